"""`forge eval` and `forge compare`: what is asked, measured and claimed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from agent_forge.data.dataset_rows import Example
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.evals import domains, model_under_test
from agent_forge.evals.comparison import (
    ACCURACY,
    BITS,
    NATS,
    DomainGains,
    Gain,
    PairedScores,
    compare_scores,
    mcnemar,
    sign_flip,
)
from agent_forge.evals.domains import (
    Domain,
    evaluation_hash,
    from_files,
    from_tasks,
    part,
)
from agent_forge.evals.likelihood import padded
from agent_forge.evals.model_under_test import (
    ItemScores,
    ModelUnderTest,
    open_model_under_test,
    windows,
)
from agent_forge.infer.chat import open_chat_model
from agent_forge.infer.generate import SamplingSettings, batches
from agent_forge.store.models import ModelStorage
from tests.support.command_line import Forge
from tests.support.data_files import put
from tests.support.eval_models import llama, own_model
from tests.support.tokenizers import CHAT, byte_tokenizer


@pytest.fixture
def ours(storage: ModelStorage) -> Path:
    return own_model(storage, "m1", 0)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return llama(tmp_path / "llama")


def asked(found: ModelUnderTest, example: Example, decode: object) -> tuple[str, str]:
    """What is given and what is asked, as text."""
    ids, start = found.encode(example)
    return decode(ids[:start]), decode(ids[start:])  # type: ignore[operator]


TURNS = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "thanks"},
)
TALK = Example("a\nb\nc", "d", messages=TURNS)


# -- what is asked --------------------------------------------------------------------------------


def test_ours_is_asked_for_the_last_reply_and_the_end_of_the_turn(ours: Path) -> None:
    tokenizer = Tokenizer.load(ours)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, specials=True)

    found = open_model_under_test(ours)
    given = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert asked(found, TALK, decode) == (given, "d<|end|>")
    assert asked(found, Example("red cat", " sat"), decode) == ("red cat", " sat")


def test_a_foreign_model_is_asked_in_its_own_chat_form(foreign: Path) -> None:
    decode = byte_tokenizer().decode
    found = open_model_under_test(foreign)
    given = "[user]a[end]\n[assistant]b[end]\n[user]c[end]\n[assistant]"
    assert asked(found, TALK, decode) == (given, "d[end]")
    assert asked(found, Example("5+2= ", "7"), decode) == ("5+2=", " 7")  # one token reaches over


def test_without_a_chat_template_it_goes_on_with_the_text(tmp_path: Path) -> None:
    found = open_model_under_test(llama(tmp_path / "plain", template=None))
    assert asked(found, TALK, byte_tokenizer().decode) == ("a\nb\nc\n", "d")


def test_a_template_that_refuses_is_named(tmp_path: Path) -> None:
    place = llama(tmp_path / "strict", template="{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="no system role"):
        open_model_under_test(place).encode(TALK)


def test_a_template_may_write_finished_turns_in_another_way(tmp_path: Path) -> None:
    template = CHAT.replace("[assistant]{% endif", "[assistant]<think>{% endif")
    found = open_model_under_test(llama(tmp_path / "thinks", template=template))
    given = "[user]a[end]\n[assistant]b[end]\n[user]c[end]\n[assistant]"
    assert asked(found, TALK, byte_tokenizer().decode) == (given, "d[end]")


@pytest.mark.parametrize("start", [0, 3, 10, 24, 25, 99])
def test_windows_ask_for_every_token_once(start: int) -> None:
    ids = list(range(100))
    found = list(windows(ids, start, 10))
    told = [i for item in found for i, ask in zip(item.ids, item.asked, strict=True) if ask]
    assert told == ids[start:]
    assert all(len(item.ids) <= 10 and any(item.asked) for item in found)
    assert all(item.asked.index(True) >= 5 for item in found[1:])  # half of it is context


def test_a_long_text_is_measured_whole(foreign: Path) -> None:
    found = open_model_under_test(foreign)
    domain = Domain("text", (Example("Once", " upon a time" * 20),), False)
    prepared = found.prepare(domain)
    assert found.longest == 64 and len(prepared.items) > 3
    assert found.measure(prepared).tokens == [240] and domain.sizes == [239]  # " " is asked for


def test_the_likeliest_choice_a_byte_counts(foreign: Path) -> None:
    found = open_model_under_test(foreign)
    choices = (" x", " hello", " 7")

    def loss(choice: str) -> float:
        domain = Domain("one", (Example("Q:", choice),))
        outcome = found.measure(found.prepare(domain))
        return outcome.bits_per_byte(sum(domain.sizes))

    best = min(choices, key=loss)
    domain = Domain("many", tuple(Example("Q:", c, choices=choices) for c in choices))
    outcome = found.measure(found.prepare(domain))
    assert outcome.right == [choice == best for choice in choices]
    assert domain.chance == pytest.approx(1 / 3)
    assert [x / 8 / math.log(2) for x in outcome.loss] != [0, 0, 0] and len(outcome.tokens) == 3


def test_batches_are_as_large_as_told_and_progress_reaches_the_end(foreign: Path) -> None:
    assert [len(rows) for rows in batches([7] * 5, 14)] == [2, 2, 1]
    found = replace(open_model_under_test(foreign), batch_tokens=14)
    prepared = found.prepare(Domain("d", tuple(Example("red", f" ca{i}") for i in range(5))))
    seen: list[tuple[int, int]] = []
    found.measure(prepared, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(14, 35), (28, 35), (35, 35)]


@pytest.mark.parametrize("place", ["ours", "foreign"])
def test_right_is_what_the_model_says(place: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(place)
    voice, found = open_chat_model(folder), open_model_under_test(folder)
    said = {p: "".join(voice.complete(p, SamplingSettings(1))) for p in map(str, range(100, 160))}
    prompt = next(p for p, text in said.items() if text.isascii() and text.isprintable() and text)
    examples = (Example(prompt, said[prompt]), Example(prompt, "~"))
    assert found.measure(found.prepare(Domain("d", examples))).right == [True, False]


def test_a_prompt_that_is_not_read_whole_is_said(
    foreign: Path, forge: Forge, tmp_path: Path
) -> None:
    rows = [{"prompt": "ab " * n, "completion": " c", "choices": [" c", " d"]} for n in (9, 40)]
    for name, kept in (("long", rows), ("short", rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, kept)))
    command = f"eval {foreign} --data {tmp_path}"
    (long,) = forge(f"{command}/long.jsonl --json").document["domains"]
    (short,) = forge(f"{command}/short.jsonl --json").document["domains"]
    assert long["cut"] == 0.5 and long["truncated"] is None and short["cut"] is None
    assert " cut " in forge(f"{command}/long.jsonl").out
    both = f"compare {foreign} {foreign} --data {tmp_path}"
    told = forge(f"{both}/long.jsonl --json").document["rates"]
    assert [(row["domain"], row["cut"], row["truncated"]) for row in told] == [
        ("long", 0.5, None),
        ("long", 0.5, None),
    ]
    assert f"{foreign} on long: 50.0% cut" in forge(f"{both}/long.jsonl").err
    assert "cut" not in forge(f"{both}/short.jsonl").err


def test_broken_weights_are_said(foreign: Path) -> None:
    found = open_model_under_test(foreign)
    with torch.no_grad():
        next(found.model.parameters()).fill_(math.nan)
    with pytest.raises(NotFinite):
        found.measure(found.prepare(Domain("d", (Example("a", "b"),))))


def test_a_wrong_choice_without_a_loss_is_no_right_answer(foreign: Path) -> None:
    found = open_model_under_test(foreign)
    token = found.encode(Example("q", "z"))[0][-1]
    with torch.no_grad():
        found.model.get_input_embeddings().weight[token] = math.nan  # type: ignore[operator]
    domain = Domain("d", (Example("q", " ab", choices=(" ab", " zz")),))
    with pytest.raises(NotFinite):
        found.measure(found.prepare(domain))


# -- domains and their splits ---------------------------------------------------------------------


def many(count: int = 2000) -> Domain:
    return Domain("d", tuple(Example(f"question {i}", f"answer {i}") for i in range(count)))


def test_splits_are_disjoint_and_have_their_shares() -> None:
    domain = many()
    parts = {split: part(domain, split) for split in domains.SHARES}
    assert sum(len(p.examples) for p in parts.values()) == 2000
    for split, share in domains.SHARES.items():
        assert len(parts[split].examples) / 2000 == pytest.approx(share, abs=0.04)
    assert len({e for p in parts.values() for e in p.examples}) == 2000


def test_a_copy_is_on_the_same_side_and_counts_once(tmp_path: Path) -> None:
    copies = tuple(Example(f"{i}{gap}b", f"c{gap}") for i in range(9) for gap in (" ", "  "))
    for split_by in ("asked", "question", "prompt", "content"):
        parts = Domain("d", copies, split_by=split_by).parts
        assert parts[::2] == parts[1::2] and len(set(parts)) > 1
    rows = [{"prompt": p, "completion": "c"} for p in ("x", "y", "x ", "x")]
    (found,) = from_files([put(tmp_path / "own.jsonl", *rows)])
    assert [e.prompt for e in found.examples] == ["x", "y", "x "]


def test_a_subset_does_not_depend_on_the_order() -> None:
    domain = many(50)
    turned = replace(domain, examples=domain.examples[::-1])
    chosen = part(domain, "selection", 7)
    assert len(chosen.examples) == 7
    assert set(chosen.examples) == set(part(turned, "selection", 7).examples)


def test_too_little_data_is_said() -> None:
    with pytest.raises(ConfigError, match="none of its 1 examples"):
        for split in domains.SHARES:
            part(many(1), split)
    with pytest.raises(ConfigError, match="did you mean 'verdict'"):
        part(many(9), "verdct")


def test_of_a_text_the_first_word_is_given(tmp_path: Path) -> None:
    (found,) = from_files([put(tmp_path / "t.jsonl", {"text": "Once upon a time"}, {"text": "x"})])
    (example,) = found.examples
    assert (example.prompt, example.completion, found.exact) == ("Once", " upon a time", False)
    with pytest.raises(ConfigError, match="others are text"):
        from_files([put(tmp_path / "m.jsonl", {"text": "a b"}, {"prompt": "p", "completion": "c"})])


def test_generated_tasks_are_new_in_every_split() -> None:
    found = {s: from_tasks(["digit_shift"], split=s, count=60)[0] for s in domains.SHARES}
    seen = [{(e.prompt, e.completion) for e in d.examples} for d in found.values()]
    assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]
    assert all(
        len(d.examples) == len(d.tasks) == len(s) > 30
        for d, s in zip(found.values(), seen, strict=True)
    )
    assert [d.name for d in from_tasks(count=5)] == ["reasoning", "memory", "adaptive"]
    assert [d.exact for d in from_tasks(["story", "stories"], count=5)] == [False, True]


def test_the_hash_knows_items_and_settings() -> None:
    one = evaluation_hash([many(3)], limit=4)
    assert one == evaluation_hash([many(3)], limit=4)
    changed = replace(many(3), examples=(*many(2).examples, Example("question 2", "x")))
    others = [evaluation_hash(*given) for given in ([[many(2)]], [[many(3)]], [[changed]])]
    assert len({one, *others}) == 4


# -- scores ---------------------------------------------------------------------------------------


def test_scores_have_a_fixed_meaning() -> None:
    assert domains.unigram_bits(["aabb", "aabb"]) == pytest.approx(1)
    assert domains.unigram_bits(["abcd"]) == pytest.approx(2)
    assert domains.perplexity_score(1, 2) == 0.5 and domains.perplexity_score(3, 2) == 0
    assert domains.perplexity_score(0, 0) == 0
    worse = [domains.perplexity_score(bits, 2, 0.1) for bits in (1.9, 2, 2.1, 9, 1e9)]
    assert worse == sorted(set(worse), reverse=True) and worse[1] == 0 and worse[-1] > -0.1
    assert domains.perplexity_score(1, 2, 0.1) == 0.5 and domains.perplexity_score(1, 0, 0.1) == 0
    assert domains.beyond_chance(0.25, 0.25) == 0 and domains.beyond_chance(1, 0.25) == 1
    assert domains.beyond_chance(0.4, 0) == 0.4


def test_the_smallest_gain_that_could_be_seen() -> None:
    assert domains.smallest_gain(2000) == pytest.approx(2.8016 * math.sqrt(0.2 / 2000), rel=1e-3)
    assert domains.smallest_gain(10) == pytest.approx(0.785, rel=1e-2)
    assert domains.smallest_gain(3) == domains.smallest_gain(0) == 1


# -- forge eval -----------------------------------------------------------------------------------


def test_eval_of_ours(ours: Path, forge: Forge) -> None:
    result = forge(f"eval {ours} --items 30")
    lines = result.out.splitlines()
    assert lines[0].split()[:4] == ["domain", "items", "accuracy", "majority"]
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["reasoning", "30"], ["memory", "30"], ["adaptive", "30"])
    ]
    found = forge(f"eval {ours} --items 30 --json")
    row = found.document["domains"][0]
    assert found.err == "" and 1 <= row["steps"] <= 3 and row["chance"] == 0
    subject_ = open_model_under_test(ours)
    domain = from_tasks(["digit_max", "digit_compare", "digit_shift"], count=30)[0]
    assert row["majority"] is not None and row["ngram"] is not None
    outcome = subject_.measure(subject_.prepare(domain))
    assert math.log(row["perplexity"]) == pytest.approx(row["nats_per_token"])
    assert outcome.nats_per_token > 0


def test_eval_of_files(foreign: Path, forge: Forge, tmp_path: Path) -> None:
    put(
        tmp_path / "maths.jsonl",
        *({"prompt": f"{i}+1=", "completion": f" {i + 1}"} for i in range(9)),
    )
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat.\n" * 3)
    rows = forge(f"eval {foreign} --data maths.jsonl --data text.txt --json").document["domains"]
    assert [(r["domain"], r["items"]) for r in rows] == [("maths", 9), ("text", 1)]
    maths, text = rows
    assert maths["accuracy"] == 0 and text["accuracy"] is None and maths["steps"] is None
    tokens = maths["nats_per_token"] / math.log(2)
    assert maths["bits_per_byte"] <= 2 * tokens  # " 7" is one token, of one byte that counts
    size = 3 * len("Once upon a time there was a cat.\n") - len("Once")
    bits = (
        text["nats_per_token"] / math.log(2) * size / (size - 2)
    )  # all but the blanks at the ends
    assert text["bits_per_byte"] == pytest.approx(bits)
    assert 4 < text["bits_per_byte"] < 12 and text["perplexity_score"] == 0
    half = forge(f"eval {foreign} --data maths.jsonl --split selection --json").document["domains"]
    few = forge(f"eval {foreign} --data maths.jsonl --items 2 --json").document["domains"]
    assert 0 < half[0]["items"] < 9 and few[0]["items"] == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nowhere", "nowhere is not a folder"),
        ("llama", "nothing to measure"),
        ("llama --tasks copi", "did you mean 'copy'"),
        ("llama --tasks copy --level 5-x", "no range"),
        ("llama --tasks copy --level 0", "levels go from 1"),
        ("llama --tasks copy --split train", "unknown split"),
        ("llama --data none.jsonl", "none.jsonl does not exist"),
        ("llama --data empty.txt", "it is empty"),
        ("llama --data broken.jsonl", "line 2: not readable as JSON"),
        ("llama --data choice.jsonl", "line 1: the completion is none of the choices"),
        ("llama --data copy.jsonl --data copy.jsonl --data copy.jsonl", "given twice"),
        ("llama --data copy.jsonl --tasks copy", "the same name"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_is_loaded(
    line: str, told: str, foreign: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = foreign.parent
    put(place / "copy.jsonl", {"prompt": "a", "completion": "b"})
    put(place / "choice.jsonl", {"prompt": "a", "completion": "b", "choices": ["c", "d"]})
    (place / "empty.txt").write_text("")
    (place / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{oops\n')
    monkeypatch.setattr(model_under_test, "open_model", lambda folder: pytest.fail("it was loaded"))
    result = forge(f"eval {line}")
    assert result.code in (2, 4) and result.out == ""
    assert told in result.err, result.err


def test_a_model_without_tokenizer_is_said(foreign: Path, forge: Forge) -> None:
    (foreign / "tokenizer.json").unlink()
    result = forge(f"eval {foreign} --tasks copy")
    assert result.code == 4 and "it has no tokenizer" in result.err
    with pytest.raises(DamagedFile, match="no tokenizer"):
        open_chat_model(foreign)


def test_a_tokenizer_that_does_not_fit_is_said(foreign: Path, forge: Forge) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(9)])
    tokenizer.save_pretrained(foreign)
    put(foreign.parent / "own.jsonl", {"prompt": "more8", "completion": "more8"})
    result = forge(f"eval {foreign} --data own.jsonl")
    assert result.code == 2 and "outside the vocabulary of 260" in result.err


# -- the verdict ----------------------------------------------------------------------------------


def pair(
    right_a: list[int], right_b: list[int], loss_a: list[float], loss_b: list[float], **more: object
) -> PairedScores:
    tokens = [2] * len(loss_a)
    a = ItemScores([bool(r) for r in right_a], loss_a, tokens, [])
    b = ItemScores([bool(r) for r in right_b], loss_b, tokens, [])
    return replace(PairedScores("d", a, b, [4] * len(loss_a)), **more)  # type: ignore[arg-type]


SIX = pair([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], [3.0] * 6, [2.0] * 5 + [5.0])


def test_gains_by_hand() -> None:
    gains = compare_scores([SIX]).overall.gains
    accuracy, bits, nats = gains[ACCURACY], gains[BITS], gains[NATS]
    assert (accuracy.reference, accuracy.candidate) == pytest.approx((1 / 6, 5 / 6))
    assert accuracy.value == pytest.approx(4 / 6) and accuracy.n == 6
    assert accuracy.p == pytest.approx(2 * (1 + 6) / 64)
    assert (nats.reference, nats.candidate) == pytest.approx((18 / 12, 15 / 12))
    assert nats.value == pytest.approx(3 / 12)
    assert bits.value == pytest.approx(3 / 24 / math.log(2))


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1 and mcnemar(3, 3) == 1
    assert mcnemar(10, 2) == mcnemar(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 4096)


def test_flipping_signs_finds_the_exact_p() -> None:
    gains = np.array([1.0, 1.0, 1.0, 1.0, 1.0, -2.0, 0.0])
    signs = np.array(list(np.ndindex(*[2] * 6))) * 2 - 1
    exact = float((np.abs(signs @ gains[:6]) >= 3).mean())
    found = sign_flip(gains, np.random.default_rng(0), 20_000)
    assert found == pytest.approx(exact, abs=0.015)
    assert sign_flip(np.zeros(5), np.random.default_rng(0), 10) == 1
    assert sign_flip(np.ones(40), np.random.default_rng(0), 999) == 0.001


def test_the_interval_is_that_of_the_mean() -> None:
    rng = np.random.default_rng(5)
    losses = rng.normal(0.1, 1, (2, 400)) + 5
    gain = compare_scores([pair([0] * 400, [0] * 400, *losses.tolist())]).overall.gains[NATS]
    difference = (losses[0] - losses[1]) / 2
    half = 1.96 * difference.std() / 20
    mean = difference.mean()
    assert (gain.low, gain.high) == pytest.approx((mean - half, mean + half), abs=0.006)


def test_the_interval_covers_the_truth() -> None:
    """In 95 of 100 worlds; both answers and losses have a known mean difference."""
    rng = np.random.default_rng(1)
    hits = {ACCURACY: 0, NATS: 0}
    for world in range(300):
        right = rng.random((2, 150)) < np.array([[0.5], [0.6]])
        loss = rng.gamma(2, 1, (2, 150)) + np.array([[0.4], [0.0]])
        found = compare_scores(
            [pair(*right.tolist(), *loss.tolist())], seed=world, draws=500
        ).overall
        hits[ACCURACY] += found.gains[ACCURACY].low <= 0.1 <= found.gains[ACCURACY].high
        hits[NATS] += found.gains[NATS].low <= 0.2 <= found.gains[NATS].high
    assert all(0.91 <= hit / 300 <= 0.985 for hit in hits.values()), hits


def test_p_is_uniform_between_equals() -> None:
    rng = np.random.default_rng(2)
    found = []
    for world in range(400):
        loss = rng.gamma(2, 1, (2, 60)).tolist()
        parts = [pair([0] * 60, [0] * 60, *loss), pair([0], [0], [1.0], [1.0], name="e")]
        found.append(compare_scores(parts, seed=world, draws=300).overall.gains[NATS].p)
    shares = [float((np.array(found) < level).mean()) for level in (0.05, 0.25, 0.5, 0.75)]
    assert shares == pytest.approx([0.05, 0.25, 0.5, 0.75], abs=0.07) and shares[0] < 0.085


def test_domains_count_alike_and_text_has_no_accuracy() -> None:
    large = pair([0] * 90, [1] * 45 + [0] * 45, [2.0] * 90, [2.0] * 90, name="large")
    small = pair([1] * 10, [0] * 10, [2.0] * 10, [1.0] * 10, name="small")
    text = pair([0] * 5, [0] * 5, [9.0] * 5, [6.0] * 5, name="text", exact=False)
    found = compare_scores([large, small, text])
    accuracy = found.overall.gains[ACCURACY]
    assert accuracy.value == pytest.approx((0.5 - 1) / 2) and accuracy.n == 100
    assert found.overall.gains[NATS].value == pytest.approx((0 + 0.5 + 1.5) / 3)
    assert ACCURACY not in found.domains[2].gains
    assert found.domains[0].gains[ACCURACY].verdict == "better"
    assert found.domains[1].gains[ACCURACY].verdict == "worse"


def test_a_verdict_depends_on_the_seed_alone() -> None:
    rng = np.random.default_rng(3)
    parts = [
        pair([0] * 30, [0] * 30, *rng.random((2, 30)).tolist(), name=name) for name in ("x", "y")
    ]
    first = compare_scores(parts)
    assert (
        first == compare_scores(parts)
        and first.domains[::-1] == compare_scores(parts[::-1]).domains
    )
    assert compare_scores(parts[:1]).domains == first.domains[:1]
    assert first.domains[0].gains[NATS].p != compare_scores(parts, seed=1).domains[0].gains[NATS].p


def test_domains_are_resampled_apart_and_each_measure_with_its_weights() -> None:
    rng = np.random.default_rng(4)
    losses = rng.normal(5, 1, (2, 300)).tolist()
    found = compare_scores([pair([0] * 300, [0] * 300, *losses, name=name) for name in ("x", "y")])
    widths = [v.gains[NATS].high - v.gains[NATS].low for v in (*found.domains, found.overall)]
    assert widths[2] == pytest.approx(math.hypot(*widths[:2]) / 2, rel=0.05)
    sizes = rng.integers(1, 90, 50)
    loss = (0.5 * sizes).tolist(), (0.2 * sizes).tolist()  # the same gain for every byte
    gain = compare_scores([pair([0] * 50, [0] * 50, *loss, sizes=sizes.tolist())]).overall.gains[
        BITS
    ]
    assert (gain.low, gain.high) == pytest.approx((0.3 / math.log(2),) * 2)


def test_two_tokenizers_are_compared_by_bytes() -> None:
    other = replace(SIX.candidate, tokens=[3] * 6)
    assert set(compare_scores([replace(SIX, candidate=other)]).overall.gains) == {ACCURACY, BITS}


def test_other_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="same items"):
        replace(SIX, sizes=[1])
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare_scores([])


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (
            Gain(0.5, 0.531, 0.031, 0.012, 0.05, 0.002, 2000),
            "better than A by 3.1 points (95 % interval 1.2..5.0, p = 0.002, n = 2000)",
        ),
        (
            Gain(0.5, 0.469, -0.031, -0.05, -0.012, 1e-9, 2000),
            "worse than A by 3.1 points (95 % interval -5.0..-1.2, p < 0.001, n = 2000)",
        ),
        (
            Gain(0.5, 0.504, 0.004, -0.01, 0.02, 0.6, 90),
            "no significant gain over A: +0.4 points (95 % interval -1.0..2.0, p = 0.600, n = 90)",
        ),
    ],
)
def test_a_verdict_in_words(gain: Gain, told: str) -> None:
    assert DomainGains("d", {ACCURACY: gain}).sentence("A") == told
    both = DomainGains("d", {BITS: gain, ACCURACY: gain}).sentence("A")
    assert both.startswith(f"{told}; ") and " bits per byte (" in both


# -- forge compare --------------------------------------------------------------------------------


def test_a_model_is_no_better_than_itself(ours: Path, forge: Forge) -> None:
    result = forge(f"compare {ours} {ours} --tasks copy --items 20 --json")
    assert result.code == 0 and result.err == ""
    gains = result.document["domains"]["copy"]
    assert set(gains) == {ACCURACY, BITS, NATS}
    assert all((g["value"], g["p"], g["verdict"]) == (0, 1, "unclear") for g in gains.values())
    assert "no significant gain over" in result.document["sentence"]


def test_a_better_model_is_found(
    ours: Path, storage: ModelStorage, forge: Forge, tmp_path: Path
) -> None:
    """The candidate has learned the file by heart."""
    other = own_model(storage, "m2", 1)
    found = open_model_under_test(other)
    put(tmp_path / "own.jsonl", *({"prompt": f"{i}", "completion": " red"} for i in range(40)))
    prepared = found.prepare(from_files([tmp_path / "own.jsonl"])[0])
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=3e-3)
    for _ in range(40):
        tokens, asks = padded(prepared.items, torch.device("cpu"))
        logits = found.model(tokens[:, :-1])[asks[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][asks[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_file(found.model.state_dict(), tmp_path / "learned.safetensors")
    place = tmp_path / "learned"
    shutil.copytree(other, place)
    for name in ("metadata.json", "metrics.json", "manifest.json"):
        (place / name).unlink()
    (tmp_path / "learned.safetensors").replace(place / "model.safetensors")
    result = forge(f"compare {ours} {place} --data own.jsonl")
    assert f"{place}: better than {ours} by " in result.out and "n = 40" in result.out
    again = forge(f"compare {place} {ours} --data own.jsonl")
    assert "worse than" in again.out and "answers can show gains from" in again.err


@pytest.mark.slow
def test_models_of_two_makers_are_compared(ours: Path, foreign: Path, forge: Forge) -> None:
    line = f"compare {ours} {foreign} --tasks copy --tasks story --items 20 --json"
    result = forge(line)
    assert set(result.document["overall"]) == {ACCURACY, BITS}
    assert set(result.document["domains"]["story"]) == {BITS}
    assert forge(line).document == result.document
    assert forge(f"{line} --seed 1").document["overall"] != result.document["overall"]
    table = forge(line.removesuffix(" --json")).out.splitlines()
    assert len(table) == 1 + 2 + 1 + 2 + 1 and table[-2].startswith("all domains")


def test_what_cannot_be_compared(foreign: Path, forge: Forge) -> None:
    assert "nowhere is not a folder" in forge(f"compare {foreign} nowhere --tasks copy").err
    assert "nothing to measure" in forge(f"compare {foreign} {foreign}").err


def test_packs_are_written_and_worked_examples_lengthen_what_is_read(
    forge: Forge, tmp_path: Path
) -> None:
    foreign = llama(tmp_path / "longer", longest=256)
    rows = {}
    for shots in (0, 4):
        line = f"eval {foreign} --pack math --items 4 --shots {shots} --json"
        (rows[shots],) = forge(line).document["domains"]
    assert rows[0]["items"] == rows[4]["items"] == 4
    assert rows[0]["truncated"] is not None and rows[0]["cut"] < rows[4]["cut"] == 1.0
    result = forge(f"eval {foreign} --pack maths")
    assert result.code == 2 and "math" in result.err
    result = forge(f"compare {foreign} {foreign} --pack lm-eval:piqa")
    assert result.code == 2 and "forge eval has them" in result.err
    result = forge(f"eval {foreign} --tasks copy --shots 3")
    assert result.code == 2 and "--shots are worked examples of a pack" in result.err


def test_torn_weights_are_damaged(forge: Forge, foreign: Path) -> None:
    weights = foreign / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = forge(f"eval {foreign} --tasks copy")
    assert result.code == 4 and "not readable as safetensors" in result.err


@pytest.mark.parametrize(("said", "ends"), [(65, {65}), ([65, 66], {65, 66}), (None, {258})])
def test_an_answer_ends_where_generate_of_transformers_ends_it(
    foreign: Path, said: object, ends: set[int]
) -> None:
    """The file counts; only where it names no end does the tokenizer's."""
    (foreign / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert open_model_under_test(foreign).opened.end_tokens == ends
