"""Thoughts as data: every claim is right, and what is not right is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from agent_forge.data import traces
from agent_forge.data.tasks import Task, is_right, make
from agent_forge.data.tasks.base import split_of
from agent_forge.data.tokenizer import SPECIAL
from agent_forge.errors import ConfigError, DamagedFile

every_strategy = pytest.mark.parametrize("strategy", traces.ABOUT)


def some(strategy: str, count: int = 60) -> list[traces.Trace]:
    return list(traces.write_traces(strategy, count, traces.LEVELS, seed=3))


def solved(task: Task) -> str:
    """The answer to a question, read from its text alone and computed in another way."""
    if task.family == "chain":
        operations, digits = task.question.split(" : ")
        numbers = [int(d) for d in digits]
        for operation in operations.split(", "):
            if operation == "rot":
                numbers.append(numbers.pop(0))
            elif operation == "rev":
                numbers.reverse()
            else:
                numbers = [(n + int(operation[4:])) % 10 for n in numbers]
        return "".join(map(str, numbers))
    if task.family == "tot4":
        start, addends = task.question.removeprefix("tot ").split(":")
        return str((int(start) + sum(map(int, addends))) % 10)
    if task.family == "swap4":
        state, swaps = task.question.removeprefix("swp ").split(" : ")
        places = dict(zip("1234", state, strict=True))
        for a, b in swaps.split():
            places[a], places[b] = places[b], places[a]
        return "".join(places[p] for p in "1234")
    odds, evidence = task.question.removeprefix("odds ").split(" : ")
    a, b = map(int, odds.split("/"))
    up = evidence.count("a") - evidence.count("b")
    result = Fraction(a, b) * Fraction(2) ** up
    return f"{result.numerator}/{result.denominator}"


@pytest.mark.parametrize("family", traces.LEVELS)
def test_answers_are_right(family: str) -> None:
    for i in range(300):
        task = make(family, "train", i, level=(1, 12))
        assert task.answer == solved(task), task.question


@every_strategy
def test_a_thought_leads_to_the_answer_and_holds(strategy: str) -> None:
    for trace in some(strategy):
        assert trace.task.split == "train"
        assert traces.checked(trace, trace.task.answer) is trace and traces.fits(trace)
        last = trace.claims[-2 if strategy == "uncertain" else -1]
        if strategy == "falsify":
            last = next(c for c in reversed(trace.claims) if not re.match("un |[yn]$", c))
        if trace.claims != ("none",):
            ends = last.replace("no ", "").endswith(trace.task.answer)
            assert ends or strategy == "doubt", trace.thought
        assert traces.parse(trace.thought) == (strategy, trace.claims)


@every_strategy
def test_no_form_passes_for_that_of_another_strategy(strategy: str) -> None:
    for other in traces.ABOUT:
        if other != strategy:
            taken = [traces.fits(replace(trace, strategy=other)) for trace in some(strategy, 30)]
            assert not any(taken), (strategy, other)


@every_strategy
def test_a_changed_claim_is_refused(strategy: str) -> None:
    rng = Random(1)
    refused = 0
    for trace in some(strategy):
        places = [i for i, c in enumerate(trace.claims) if re.search(r"\d", c)]
        if strategy == "uncertain":
            places = places[:-1]  # any confidence may be told
        if strategy == "correct":  # another mistake is a mistake all the same
            places = [i for i in places if trace.claims[i].startswith("no ")]
        if not places:
            continue
        place = rng.choice(places)
        claim = trace.claims[place]
        at = rng.choice([m.start() for m in re.finditer(r"\d", claim)])
        other = claim[:at] + str((int(claim[at]) + 1) % 10) + claim[at + 1 :]
        changed = (*trace.claims[:place], other, *trace.claims[place + 1 :])
        with pytest.raises(ValueError, match=r"a claim is wrong|the form is another"):
            traces.checked(replace(trace, claims=changed), trace.task.answer)
        refused += 1
    assert refused > 40


def test_a_wrong_answer_a_missing_claim_and_another_family_are_refused() -> None:
    trace = some("step")[0]
    with pytest.raises(ValueError, match="the answer is wrong"):
        traces.checked(trace, "00000")
    with pytest.raises(ValueError, match="a claim is wrong"):
        traces.checked(replace(trace, claims=trace.claims[:-1]), trace.task.answer)
    with pytest.raises(ValueError, match="there is no thought"):
        traces.checked(replace(trace, claims=()), trace.task.answer)
    with pytest.raises(ValueError, match="mece is not for chain"):
        traces.checked(replace(trace, strategy="mece"), trace.task.answer)


def test_a_correction_takes_back_a_real_mistake() -> None:
    for trace in some("correct"):
        place = next(i for i, claim in enumerate(trace.claims) if claim.startswith("no "))
        right = trace.claims[place].removeprefix("no ")
        no_mistake = (*trace.claims[: place - 1], right, *trace.claims[place:])
        with pytest.raises(ValueError, match="a claim is wrong"):
            traces.checked(replace(trace, claims=no_mistake), trace.task.answer)


def test_worked_steps_of_other_families_are_thoughts() -> None:
    levels = {"addition": (1, 10), "multiplication": (1, 10)}
    for trace in traces.write_traces("step", 20, levels):
        assert trace.claims == tuple(trace.task.steps.splitlines())
    for claims in ((*trace.claims, "2 + 2 = 4"), ("1 + 1 = 2",), ("I know it",)):
        with pytest.raises(ValueError, match="a claim is wrong"):
            traces.checked(replace(trace, claims=claims), trace.task.answer)


def test_worked_steps_have_no_form_of_their_own() -> None:
    trace = next(traces.write_traces("step", 1, {"addition": (11, 14)}))
    assert traces.fits(trace) and not traces.fits(replace(trace, claims=()))
    assert not traces.fits(replace(trace, strategy="doubt"))


def test_a_question_of_worked_steps_has_to_be_that_of_its_item() -> None:
    row = next(traces.write_traces("step", 1, {"addition": (1, 5)})).row()
    assert traces.trace_of_row(row).row() == row
    other = make("addition", "verdict", 3, level=3).question
    with pytest.raises(ValueError, match="question is not that of the item"):
        traces.trace_of_row({**row, "question": other})


def test_no_problem_of_odds_is_taught_and_measured() -> None:
    """Each operand counts: two items that ask for the same are one item, in one part."""
    parts: dict[str, set[str]] = {}
    for split in ("train", "selection", "verdict"):
        made = (make("odds", split, i, level=(4, 5)) for i in range(300))
        parts[split] = {task.question for task in made}
    assert not parts["train"] & parts["verdict"] and not parts["selection"] & parts["verdict"]


@pytest.mark.parametrize("family", traces.LEVELS)
def test_what_follows_a_changed_step(family: str) -> None:
    differing = 0
    for i in range(60):
        task = make(family, "verdict", i, level=traces.LEVELS[family])
        claims, end = traces.corrupted(task, Random(i))
        steps = traces.write_trace(task, "step", Random(0)).claims
        assert claims[:-1] == steps[: len(claims) - 1] and claims[-1] != steps[len(claims) - 1]
        assert len(claims) < len(steps)
        differing += not is_right(task, end)
    assert differing > 50


# -- files -----------------------------------------------------------------------------------------


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = list(traces.local_rows([], [], 40, 0))
    assert {row["strategy"] for row in rows} == set(traces.ABOUT)
    assert [trace.row() for trace in traces.read_traces(written(tmp_path, *rows))] == rows


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"thought": "<step>rot 1<mece>2"}, "not of the strategy"),
        ({"thought": ""}, "not of the strategy"),
        ({"strategy": "magic", "thought": "<magic>x"}, "not of the strategy"),
        ({"answer": "1"}, "the answer is wrong"),
        ({"family": "copy"}, "question is not"),
        ({"family": "nothing"}, "no task family"),
        ({"family": ["chain"]}, "no task family"),
        ({"highest": 1000}, "no range"),
        ({"lowest": 5, "highest": 2}, "no range"),
        ({"number": "__import__('os')"}, "whole numbers"),
        ({"number": -1}, "whole numbers"),
        ({"number": True}, "whole numbers"),
        ({"seed": 10**4000}, "whole numbers"),
        ({"number": 7}, "question is not that of the item"),
        ({"question": "rot : 12345"}, "question is not that of the item"),
    ],
)
def test_a_row_that_does_not_hold_is_refused_with_its_place(
    change: dict[str, object], told: str, tmp_path: Path
) -> None:
    good = next(iter(traces.local_rows(["chain"], ["step"], 1, 0)))
    with pytest.raises(DamagedFile, match=told) as failure:
        traces.read_traces(written(tmp_path, good, {**good, **change}))
    assert "line 2" in str(failure.value)


def test_items_of_the_verdict_are_never_taught(tmp_path: Path) -> None:
    """However a row spells what it is about: the item is made again, and only to learn from."""
    task = make("chain", "verdict", 0, level=3)
    number = traces.ItemNumber(0, 0, 3, 3)
    row = replace(traces.write_trace(task, "step", Random(0)), item=number).row()
    respelled = row["question"].replace(",", " ,")
    for changed in (row, {**row, "operands": task.operands}, {**row, "question": respelled}):
        with pytest.raises(DamagedFile, match="question is not that of the item"):
            traces.read_traces(written(tmp_path, changed))
    for family in ("chain", "addition", "word_problem", "code_list"):
        for i in range(20):
            made = traces.ItemNumber(i, 10**9 + i, 1, 100).make(family)
            assert made.split == split_of(family, made.operands) == "train"


@pytest.mark.parametrize("row", [[], 7, "text", {}, {"family": "chain"}])
def test_other_rows_and_empty_files_are_refused(row: object, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile):
        traces.read_traces(written(tmp_path, row))
    with pytest.raises((ConfigError, DamagedFile), match=r"no traces|empty|nothing"):
        traces.read_traces(written(tmp_path))


def test_replies_are_taken_only_if_they_hold() -> None:
    for request in traces.trace_requests([], [], 20, 0):
        trace = traces.write_trace(request.task, request.strategy, Random(5))
        said = f"[thinking]{trace.thought}[/endthinking]"
        row = traces.accept_reply(request, f"{said}{request.task.answer}")
        assert row["thought"] == trace.thought
        assert request.messages[1]["content"] == request.task.question
        for reply in (f"{said}0", trace.thought, f"Sure! {said}{request.task.answer}", ""):
            with pytest.raises(ValueError, match=r"wrong|is not"):
                traces.accept_reply(request, reply)


def test_unknown_names_are_refused_before_anything_is_written() -> None:
    with pytest.raises(ConfigError, match="did you mean 'falsify'"):
        next(traces.local_rows([], ["falsfy"], 1, 0))
    with pytest.raises(ConfigError, match="no task family"):
        next(traces.local_rows(["chian"], [], 1, 0))
    with pytest.raises(ConfigError, match="bayesian needs one of the families odds"):
        traces.local_rows(["chain"], ["bayesian"], 1, 0)  # before the first is asked for
    with pytest.raises(ConfigError, match="step needs one of the families"):
        traces.local_rows(["copy"], [], 1, 0)


def test_a_family_alone_has_the_strategies_that_are_for_it() -> None:
    rows = list(traces.local_rows(["odds"], [], 6, 0))
    assert {row["strategy"] for row in rows} == {"step", "bayesian"}
    keys = [
        request.key
        for f in ("chain", "swap4")
        for request in traces.trace_requests([f], ["step"], 3, 0)
    ]
    assert len(set(keys)) == 6


def test_what_is_learned_of_a_thought() -> None:
    step, mistaken = some("step", 1)[0], some("correct", 1)[0]
    parts, learned = traces.document(step)
    first = parts.index(SPECIAL["[thinking]"])
    assert learned == [False] * first + [True] * (len(parts) - first)
    parts, learned = traces.document(mistaken)
    left_out = [p for p, said in zip(parts[first:], learned[first:], strict=True) if not said]
    assert left_out == [mistaken.claims[_place_of_mistake(mistaken)]]


def _place_of_mistake(trace: traces.Trace) -> int:
    return next(i for i, claim in enumerate(trace.claims) if claim.startswith("no ")) - 1
