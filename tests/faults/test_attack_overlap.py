"""What is asked twice is one question; a text that stands elsewhere too is no unseen one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_forge.config.settings import Settings
from agent_forge.data import tasks, traces
from agent_forge.data.near_copies import ENOUGH, PASSAGE, passages, same_texts
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import (
    PairedScores,
    compare,
    compare_scores,
    detectable_gain,
)
from agent_forge.evals.domains import evaluation_hash, from_files, from_tasks
from agent_forge.evals.model_under_test import ItemScores
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.inputs import all_items, split_items
from agent_forge.phases.phase3_quietstar.config import QuietStarSettings
from agent_forge.pipeline.config import load_config
from agent_forge.train.corpus import build_corpus, validate_corpus
from agent_forge.train.lessons import own_traces
from tests.support.command_line import Forge

WORDS = ["".join(Random(i).choices("abcdefghijklmnop", k=2 + i % 8)) for i in range(3000)]


def prose(lines: int, seed: int = 0) -> list[str]:
    rng = Random(seed)
    return [" ".join(rng.choices(WORDS, k=12)) + "\n" for _ in range(lines)]


# -- texts at another place -----------------------------------------------------------------------


def test_passages_are_found_wherever_they_stand() -> None:
    text = "".join(prose(40))
    for other in (text[700:1500], f"A new line.\n{text}", text.upper().replace(" ", "\n  ")):
        assert len(passages(text) & passages(other)) >= ENOUGH
    assert not passages(text) & passages("".join(prose(40, seed=1)))
    assert not passages(text[: PASSAGE - 1])


def lines_of(domains: Any) -> set[str]:
    texts = ((e.prompt + e.completion).splitlines() for d in domains for e in d.examples)
    whole = {line for lines in texts for line in lines}
    return {line for line in whole if len(line) > 60}


@pytest.fixture
def shifted(tmp_path: Path) -> tuple[str, str]:
    """A file, and the same behind ten more lines: every border of its pieces is elsewhere."""
    lines = prose(1500)
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("".join([*prose(10, seed=1), *lines]))
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def test_a_text_at_another_offset_is_not_searched_and_judged_by(shifted: tuple[str, str]) -> None:
    found = split_items(EvoMergeSettings(data=list(shifted)))
    judged = lines_of(found["verdict"])
    assert judged and not judged & lines_of([*found["selection"], *found["holdout"]])
    assert not lines_of(found["holdout"]) & lines_of(found["selection"])
    assert all(domain.overlapping for domain in found["verdict"])
    assert all(domain.examples for split in found.values() for domain in split)
    before = split_items(EvoMergeSettings(data=list(shifted), split_by="asked"))
    assert lines_of(before["verdict"]) & lines_of(before["selection"])  # of before


def test_texts_of_one_form_are_not_copies_of_one_another(tmp_path: Path) -> None:
    """What many texts begin with is a form, and no text that somebody has seen."""
    form = "Below is an instruction that describes a task. Write a response that completes it.\n"
    lines = prose(1200)
    texts = [form + "".join(lines[i : i + 3]) for i in range(0, 1200, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    found = split_items(EvoMergeSettings(data=[str(tmp_path / "a.jsonl")]))
    assert found["verdict"][0].overlapping <= 4  # by chance: the next words are the same
    (domain,) = from_files([tmp_path / "a.jsonl"])
    assert len(set(domain.questions)) >= len(texts) - 8


def test_what_the_verdict_reads_is_not_taught_as_an_answer(tmp_path: Path) -> None:
    lines = prose(1500)
    texts = ["".join(lines[i : i + 5]) for i in range(0, 1500, 5)]
    rows = [{"prompt": f"Write story {i}.", "completion": text} for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, more = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    found = all_items(EvoMergeSettings(data=[data], heal=0.2, heal_steps=5, heal_data=[more]))
    judged = lines_of([*found["verdict"], *found["holdout"]])
    taught = lines_of(found["heal"])
    assert taught and judged and not judged & taught


def test_one_text_by_itself_loses_nothing(shifted: tuple[str, str]) -> None:
    found, before = (
        split_items(EvoMergeSettings(data=[shifted[0]], split_by=by))  # type: ignore[arg-type]
        for by in ("overlap", "asked")
    )
    assert [len(d.examples) for s in found for d in found[s]] == [
        len(d.examples) for s in before for d in before[s]
    ]


def test_what_the_verdict_asks_is_not_taught_from_another_offset(shifted: tuple[str, str]) -> None:
    data, more = shifted
    settings = EvoMergeSettings(data=[data], heal=0.2, heal_steps=5, heal_data=[more])
    found = all_items(settings)
    judged = lines_of([*found["verdict"], *found["holdout"]])
    assert judged and not judged & lines_of(found["heal"])


def put_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def running_rows(stories: int, width: int = 40, stride: int = 10) -> list[dict[str, str]]:
    """Prompts and completions that are cut from running texts, each behind the one before."""
    texts = [" ".join(prose(15, seed)).split() for seed in range(stories)]
    places = [(words, i) for words in texts for i in range(0, 180 - 2 * width, stride)]
    pieces = [(words[i : i + width], words[i + width : i + 2 * width]) for words, i in places]
    return [{"prompt": " ".join(a), "completion": " " + " ".join(b)} for a, b in pieces]


def test_rows_that_are_cut_from_one_text_are_on_one_side(tmp_path: Path) -> None:
    data = put_rows(tmp_path / "a.jsonl", running_rows(60))

    def leaked(split_by: Any) -> int:
        found = split_items(EvoMergeSettings(data=[data], split_by=split_by))
        search = [d.examples for s in ("selection", "holdout") for d in found[s]]
        seen = " ".join(e.prompt + e.completion for own in search for e in own)
        asked = [e.completion.split() for e in found["verdict"][0].examples]
        assert asked and all(search)
        pieces = ((" ".join(words[i : i + 30]) for i in (0, 10)) for words in asked)
        return sum(any(piece in seen for piece in own) for own in pieces)

    assert leaked("overlap") == 0
    assert leaked("passage") > 100  # as evolutions that were begun before have it
    (domain,) = from_files([Path(data)])
    assert len(set(domain.questions)) == 60


def test_an_evolution_begun_by_passages_of_texts_keeps_its_items(tmp_path: Path) -> None:
    """The hash is of the items that it had before long answers were looked at."""
    rows = running_rows(60)
    texts = [{"text": row["prompt"] + row["completion"]} for row in rows[::2]]
    data = [put_rows(tmp_path / "a.jsonl", rows), put_rows(tmp_path / "b.jsonl", texts)]
    for heal, expected in ((data[0], "1ec0bebb3f2bb47a"), (data[1], "490a5060d1afa681")):
        (judged,) = {*data} - {heal}
        settings = EvoMergeSettings(
            data=[judged], heal=0.2, heal_steps=5, heal_data=[heal], split_by="passage"
        )
        found = all_items(settings)
        assert evaluation_hash([d for s in sorted(found) for d in found[s]])[:16] == expected


def test_rows_of_short_answers_or_labels_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever passage their questions share; an answer that many rows give is a label."""
    label = [" ".join(prose(2, seed)) for seed in range(4)]
    given = [" ".join(prose(6, seed)) for seed in range(30)]
    rows = [
        {"prompt": f"{given[i % 30]} {WORDS[i]}?", "completion": answer}
        for i, answer in enumerate([*WORDS[:300], *(label * 75)])
    ]
    data = put_rows(tmp_path / "a.jsonl", rows)
    found, before = (
        split_items(EvoMergeSettings(data=[data], split_by=by)) for by in ("overlap", "asked")
    )
    assert {s: found[s][0].examples for s in found} == {s: before[s][0].examples for s in before}
    (domain,) = from_files([Path(data)])
    assert len(set(domain.questions)) == 600


def test_what_the_verdict_answers_is_in_no_text_that_is_taught_or_searched(tmp_path: Path) -> None:
    lines = prose(2000)
    rows = [
        {"question": lines[i].strip(), "answer": "".join(lines[i + 1 : i + 4]).strip()}
        for i in range(0, 2000, 4)
    ]
    texts = [{"text": f"Question: {r['question']}\nAnswer: {r['answer']}"} for r in rows]
    short = [{"question": "".join(lines[i : i + 3]), "answer": "7"} for i in range(0, 2000, 4)]
    data, more = put_rows(tmp_path / "a.jsonl", rows), put_rows(tmp_path / "b.jsonl", texts)
    few = put_rows(tmp_path / "c.jsonl", short)
    found = split_items(EvoMergeSettings(data=[data, more]))
    answers = {line for e in found["verdict"][0].examples for line in e.completion.splitlines()}
    assert answers and not answers & lines_of([found["selection"][1], found["holdout"][1]])
    for judged in (data, few):  # of what is taught, also questions
        settings = EvoMergeSettings(data=[judged], heal=0.2, heal_steps=5, heal_data=[more])
        items = all_items(settings)
        asked = lines_of([*items["verdict"], *items["holdout"]])
        assert asked and items["heal"] and not asked & lines_of(items["heal"])


def test_the_overlap_is_told(shifted: tuple[str, str], forge: Forge) -> None:
    from tests.support.evo_models import PARENTS, family

    models = ",".join(str(family() / name) for name in PARENTS)
    told = forge(
        f"evo --base-models {models} --data {shifted[0]} --data {shifted[1]} --gens 1 --dry-run"
        " --json"
    )
    assert told.code == 0, told.err
    assert any("share a passage with the verdict's" in n for n in json.loads(told.out)["notes"])


# -- one question many times ----------------------------------------------------------------------


def scores(losses: list[float], right: list[float]) -> ItemScores:
    tokens, answers = [1] * len(losses), right or [0.0] * len(losses)
    return ItemScores(loss=losses, tokens=tokens, right=answers)


def test_near_copies_are_one_item_in_a_verdict(tmp_path: Path) -> None:
    forms = ["2+2?", "2 + 2?", "2+2 ?", "2 + 2 ?!", " 2+2?!", "2+ 2", "2 +2.", "2+2..", "(2+2)"]
    rows = [{"prompt": form, "completion": " 4"} for form in forms]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = from_files([tmp_path / "x.jsonl"])
    n = len(domains[0].examples)
    assert n == len(forms) and set(domains[0].questions) == {0}
    a, b = scores([2.0] * n, [0.0] * n), scores([1.0 + 0.01 * i for i in range(n)], [1.0] * n)
    gains = compare([a], [b], domains).overall.gains
    assert all(gain.n == 1 and gain.p == 1.0 for gain in gains.values())
    assert all(gain.verdict == "unclear" for gain in gains.values())
    apart = compare_scores([PairedScores("x", a, b, [2] * n)]).overall.gains
    assert apart["accuracy"].verdict == "better" and apart["accuracy"].n == n
    assert gains["accuracy"].value == apart["accuracy"].value  # the mean is over all rows


LOSSES = [[Random(seed + 10 * i).random() for i in range(10)] for seed in (1, 2)]


def test_copies_of_a_text_are_one_item_in_a_verdict(tmp_path: Path) -> None:
    stories = ["".join(prose(8, seed)) for seed in range(10)]
    rows = [{"text": f"Copy {i}. {story}"} for story in stories for i in range(7)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (domain,) = from_files([tmp_path / "x.jsonl"])
    assert len(domain.examples) == 70 and len(set(domain.questions)) == 10
    a, b = (scores([r + 0.01 * i for r in row for i in range(7)], []) for row in LOSSES)
    assert compare([a], [b], [domain]).overall.gains["bits_per_byte"].n == 10


@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize("stride", [1, 2, 4, 10])
def test_windows_of_a_text_are_one_item(width: int, stride: int) -> None:
    """However little one begins behind the other, and in whatever order they come."""
    stories = [" ".join(prose(15, seed)).split() for seed in range(20)]
    starts = range(0, 180 - width, stride)
    texts = [" ".join(words[i : i + width]) for words in stories for i in starts]
    assert len(set(same_texts(texts))) == 20
    Random(0).shuffle(texts)
    assert len(set(same_texts(texts))) == 20


def test_a_gain_that_can_be_shown_counts_questions(tmp_path: Path) -> None:
    rows = [{"prompt": f"{k}{n} or {n}?", "completion": "x"} for n in range(9) for k in ("", "!")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert detectable_gain(from_files([tmp_path / "x.jsonl"]))[0] == 9


def test_questions_of_one_copy_each_are_compared_as_ever() -> None:
    rng = Random(0)
    a, b = (scores([rng.random() for _ in range(50)], [0.0, 1.0] * 25) for _ in range(2))
    plain = compare_scores([PairedScores("x", a, b, [3] * 50)])
    numbered = compare_scores([PairedScores("x", a, b, [3] * 50, True, range(50))])
    assert plain == numbered
    with pytest.raises(ConfigError, match="same items"):
        PairedScores("x", a, b, [3] * 50, True, [0, 1])


def test_generated_tasks_are_each_their_own_question() -> None:
    for domain in from_tasks(count=300):
        assert len(set(domain.questions)) == len(domain.examples)


# -- files to learn from --------------------------------------------------------------------------


def quietstar(**changes: Any) -> Any:
    settings: Settings = load_config(preset="smoke").phases.quietstar
    return QuietStarSettings(**{**settings.model_dump(), **changes})


def test_the_file_that_the_command_writes_can_be_taught(tmp_path: Path, forge: Forge) -> None:
    assert forge(f"data traces --out {tmp_path / 't.jsonl'} --count 50").code == 0
    known = traces.read_traces(tmp_path / "t.jsonl")
    settings = quietstar(traces=[str(tmp_path / "t.jsonl")])
    kept = own_traces(settings)
    assert kept == [trace for trace in known if trace.strategy in settings.strategies]
    assert 0 < len(kept) < len(known)
    others = [trace.row() for trace in known if trace.strategy == "uncertain"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    with pytest.raises(ConfigError, match="no thoughts of a strategy that is taught"):
        own_traces(settings)


def test_a_file_named_like_another_source_is_refused_before_any_work(
    tmp_path: Path, forge: Forge
) -> None:
    for name in ("step", "direct answers", "copy.1"):
        (tmp_path / f"{name}.txt").write_text("".join(prose(50)))
    settings = quietstar(texts=[str(tmp_path / "copy.1.txt")])
    with pytest.raises(ConfigError, match=r"'copy\.1'"):
        validate_corpus(settings)
    command = "run --preset smoke --dry-run --set"
    for name in ("step", "'direct answers'"):
        place = f"{tmp_path / name.strip(chr(39))}.txt"
        result = forge(f'{command} "phases.quietstar.texts=[{place}]"')
        assert result.code == 2 and "another name" in result.err


def test_what_old_tasks_are_measured_by_is_not_learned_from_own_texts(tmp_path: Path) -> None:
    settings, shape = quietstar(), load_config(preset="smoke").model
    judged = [t for own in build_corpus(settings, shape).unseen.values() for t in own]
    rows = [{"prompt": t.question, "completion": t.answer} for t in judged]
    rows += [{"prompt": f"what is word {i}?", "completion": WORDS[i]} for i in range(60)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = build_corpus(quietstar(texts=[str(path)]), shape)
    own = next(part for part in corpus.parts if part.name == "own")
    assert own.examples and all(e.prompt.startswith("what is word") for e in own.examples)


def test_what_thoughts_are_judged_by_is_not_learned_from_own_texts(tmp_path: Path) -> None:
    judged = [tasks.make("chain", "verdict", i, level=(2, 5)) for i in range(40)]
    learned = [tasks.make("chain", "train", i, level=(2, 5)) for i in range(40)]
    rows = [{"prompt": t.question, "completion": t.answer} for t in (*judged, *learned)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings, shape = quietstar(texts=[str(path)]), load_config(preset="smoke").model
    asked = {task.question for task in judged}
    for measured, overlap in (((), True), (judged, False)):
        corpus = build_corpus(settings, shape, None, measured)
        own = next(part for part in corpus.parts if part.name == "own")
        assert bool(asked & {example.prompt for example in own.examples}) is overlap
        assert own.examples
