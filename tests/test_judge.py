"""`forge eval` and `forge compare`: what is asked, measured and claimed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_forge.data.readers import Example
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.evals import domains, subject
from agent_forge.evals.domains import (
    Domain,
    evaluation_hash,
    from_files,
    from_tasks,
    part,
    split_of,
)
from agent_forge.evals.subject import Subject, open_subject, windows
from agent_forge.infer.generate import Sampling
from agent_forge.infer.voice import open_voice
from agent_forge.model.hf import config_dict
from agent_forge.store.models import ModelStorage
from tests.command_line import Forge
from tests.test_cognate import shaken
from tests.test_datasets import put
from tests.test_tokenizer import TEXTS

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def own_model(storage: ModelStorage, name: str, seed: int) -> Path:
    model = shaken(seed)
    tokenizer = Tokenizer.train(TEXTS * 9, model.settings.vocab_size)
    config = config_dict(model.settings)
    files = tokenizer.files()
    storage.save_model(model, "s1", "cognate", name, {}, config=config, tokenizer_files=files)
    return storage.find(f"cognate.{name}.s1")


@pytest.fixture
def ours(storage: ModelStorage) -> Path:
    return own_model(storage, "m1", 0)


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each byte, with a start; digits that follow a space are one token with it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(
        models.BPE({c: i for i, c in enumerate([*letters, "\u0120" + "7"])}, [("\u0120", "7")])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def llama(place: Path, seed: int = 0, template: str | None = CHAT) -> Path:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(shape).save_pretrained(place)
    byte_tokenizer(template).save_pretrained(place)
    return place


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return llama(tmp_path / "llama")


def asked(found: Subject, example: Example, decode: object) -> tuple[str, str]:
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

    found = open_subject(ours)
    given = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert asked(found, TALK, decode) == (given, "d<|end|>")
    assert asked(found, Example("red cat", " sat"), decode) == ("red cat", " sat")


def test_a_foreign_model_is_asked_in_its_own_chat_form(foreign: Path) -> None:
    decode = byte_tokenizer().decode
    found = open_subject(foreign)
    given = "[user]a[end]\n[assistant]b[end]\n[user]c[end]\n[assistant]"
    assert asked(found, TALK, decode) == (given, "d[end]")
    assert asked(found, Example("5+2= ", "7"), decode) == ("5+2=", " 7")  # one token reaches over


def test_without_a_chat_template_it_goes_on_with_the_text(tmp_path: Path) -> None:
    found = open_subject(llama(tmp_path / "plain", template=None))
    assert asked(found, TALK, byte_tokenizer().decode) == ("a\nb\nc\n", "d")


def test_a_template_that_refuses_is_named(tmp_path: Path) -> None:
    place = llama(tmp_path / "strict", template="{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="no system role"):
        open_subject(place).encode(TALK)


def test_a_template_may_write_finished_turns_in_another_way(tmp_path: Path) -> None:
    template = CHAT.replace("[assistant]{% endif", "[assistant]<think>{% endif")
    found = open_subject(llama(tmp_path / "thinks", template=template))
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
    found = open_subject(foreign)
    domain = Domain("text", (Example("Once", " upon a time" * 20),), False)
    prepared = found.prepare(domain)
    assert found.longest == 64 and len(prepared.items) > 3
    assert found.measure(prepared).tokens == [240] == domain.sizes


def test_the_likeliest_choice_a_byte_counts(foreign: Path) -> None:
    found = open_subject(foreign)
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


@pytest.mark.parametrize("place", ["ours", "foreign"])
def test_right_is_what_the_model_says(place: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(place)
    voice, found = open_voice(folder), open_subject(folder)
    said = {p: "".join(voice.complete(p, Sampling(1))) for p in map(str, range(100, 160))}
    prompt = next(p for p, text in said.items() if text.isascii() and text.isprintable() and text)
    examples = (Example(prompt, said[prompt]), Example(prompt, "~"))
    assert found.measure(found.prepare(Domain("d", examples))).right == [True, False]


def test_broken_weights_are_said(foreign: Path) -> None:
    found = open_subject(foreign)
    with torch.no_grad():
        next(found.model.parameters()).fill_(math.nan)
    with pytest.raises(NotFinite):
        found.measure(found.prepare(Domain("d", (Example("a", "b"),))))


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
    one, other = Example("a  b", "c"), Example("a b", " c\n")
    assert split_of(one) == split_of(other)
    rows = [{"prompt": p, "completion": "c"} for p in ("x", "y", "x ", "x")]
    (found,) = from_files([put(tmp_path / "own.jsonl", *rows)])
    assert [e.prompt for e in found.examples] == ["x", "y"]


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
    subject_ = open_subject(ours)
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
    assert maths["bits_per_byte"] <= tokens  # " 7" is one token of two bytes
    assert text["bits_per_byte"] == pytest.approx(text["nats_per_token"] / math.log(2))
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
    monkeypatch.setattr(subject, "open_model", lambda folder: pytest.fail("it was loaded"))
    result = forge(f"eval {line}")
    assert result.code in (2, 4) and result.out == ""
    assert told in result.err, result.err


def test_a_model_without_tokenizer_is_said(foreign: Path, forge: Forge) -> None:
    (foreign / "tokenizer.json").unlink()
    result = forge(f"eval {foreign} --tasks copy")
    assert result.code == 4 and "it has no tokenizer" in result.err
    with pytest.raises(DamagedFile, match="no tokenizer"):
        open_voice(foreign)


def test_a_tokenizer_that_does_not_fit_is_said(foreign: Path, forge: Forge) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(9)])
    tokenizer.save_pretrained(foreign)
    put(foreign.parent / "own.jsonl", {"prompt": "more8", "completion": "more8"})
    result = forge(f"eval {foreign} --data own.jsonl")
    assert result.code == 2 and "outside the vocabulary of 260" in result.err
