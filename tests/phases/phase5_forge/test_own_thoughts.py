"""Own thoughts beyond what was taught: two cuts have to agree, and no answer is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from agent_forge.data import tasks, traces
from agent_forge.data.tasks.reasoning import machine, piece
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer.generate import GeneratedText
from agent_forge.phases.phase5_forge import own_thoughts
from agent_forge.phases.phase5_forge.own_thoughts import (
    Worked,
    by_running,
    by_splitting,
    by_verifier,
    by_vote,
    cuts_of,
)
from tests.support.step_machine import StepMachine
from tests.support.tokenizers import TOKENIZER


class Solver:
    """Thinks as a model would that knows some lengths, and errs where it is told to."""

    def __init__(self, known: range, errs: Any = lambda item: False) -> None:
        self.known, self.errs, self.asked = known, errs, list[Any]()

    def worked(self, items: Sequence[tasks.Task]) -> list[Worked]:
        found = []
        for item in items:
            self.asked.append(item)
            steps = len(machine(item).labels)
            assert steps in self.known, f"{steps} steps were never taught"
            trace = traces.write_trace(item, "step", Random(0))
            answer = item.answer
            if self.errs(item):
                answer = str((int(answer) + 1) % 10)
            found.append(Worked(trace.claims, answer))
        return found


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Solver:
    own = Solver(range(4, 11))

    def worked(thinker: Any, pieces: Sequence[Any]) -> list[Worked | None]:
        asked = iter(own.worked([p for p in pieces if p is not None]))
        return [next(asked) if p is not None else None for p in pieces]

    monkeypatch.setattr(own_thoughts, "_worked", worked)
    return own


def long_items(count: int = 12, size: int = 14) -> list[tasks.Task]:
    return [tasks.make("tot4", "train", i, level=size) for i in range(count)]


@pytest.mark.parametrize("family", ["chain", "tot4", "swap4", "odds"])
def test_pieces_of_an_item_lead_to_its_end(family: str) -> None:
    for number in range(20):
        task = tasks.make(family, "train", number, level=(4, 9))
        count = len(machine(task).labels)
        first = piece(task, 0, 2)
        assert first is not None and len(machine(first).labels) == 2
        rest = piece(task, 2, count, first.answer)
        assert rest is not None and rest.answer == task.answer
        assert tasks.is_right(rest, task.answer)


@pytest.mark.parametrize("family", ["chain", "tot4", "swap4", "odds"])
@pytest.mark.parametrize(
    "state", ["123", "abcde", "1234567", "0/1", "99999/1", "1/0", "-1", "1/2", "3", "4711", "12345"]
)
def test_a_state_that_cannot_be_is_no_start(family: str, state: str) -> None:
    task = tasks.make(family, "train", 0, level=4)
    start = machine(task).start
    fits = "/" in state if family == "odds" else state.isdigit() and len(state) == len(start)
    found = piece(task, 2, 4, state)
    assert (found is None) == (not fits or state in ("0/1", "1/0", "99999/1"))


@pytest.mark.parametrize("family", ["chain", "tot4", "swap4"])
def test_a_network_that_thinks_is_split_and_joined(family: str) -> None:
    """Nothing is replaced here: it reads pieces, writes thoughts, and those are joined."""
    items = [tasks.make(family, "train", i, level=7) for i in range(6)]
    found = by_splitting(Thinker(StepMachine(), TOKENIZER), items, (3, 5))
    assert (len(found.traces), found.asked, found.right) == (6, 6, 6)
    sloppy = by_splitting(Thinker(StepMachine(slips=3), TOKENIZER), items, (3, 5))
    assert sloppy.right == len(sloppy.traces) < 6  # a slip in one cut is noticed


def test_samples_of_a_network_are_verified_and_voted_on() -> None:
    items = [tasks.make("tot4", "train", i, level=6) for i in range(4)]
    thinker = Thinker(StepMachine(), TOKENIZER)
    for choose in (by_verifier, by_vote):
        found = choose(thinker, items, 2, 0)
        assert (len(found.traces), found.asked, found.right) == (4, 4, 4)


def test_what_cannot_be_cut_is_not_asked() -> None:
    items = [tasks.make("tot4", "train", 0, level=7)]
    unused: Any = None
    assert by_splitting(unused, items, (4, 6)).asked == 0


def test_a_sure_solver_agrees_with_itself_and_is_right(solver: Solver) -> None:
    items = long_items()
    found = by_splitting(solver, items, (4, 10))  # type: ignore[arg-type]
    assert (len(found.traces), found.asked, found.right) == (12, 12, 12)
    assert found.agreement == 1.0
    gold = [traces.write_trace(item, "step", Random(0)).claims for item in items]
    assert [trace.claims for trace in found.traces] == gold
    assert len({len(machine(own).labels) for own in solver.asked}) > 1  # two different cuts


def test_an_error_in_a_piece_of_one_cut_is_noticed(solver: Solver) -> None:
    items = long_items()
    wrong = piece(items[0], 0, cuts_of(14, 4, 10)[0])  # type: ignore[index]
    solver.errs = lambda own: own == wrong
    found = by_splitting(solver, items, (4, 10))  # type: ignore[arg-type]
    assert len(found.traces) == 11 and found.right == 11
    assert items[0].question not in [trace.task.question for trace in found.traces]


def test_answers_are_those_of_the_model_and_never_looked_up(solver: Solver) -> None:
    items = [replace(item, answer="?") for item in long_items()]  # what nobody may read
    found = by_splitting(solver, items, (4, 10))  # type: ignore[arg-type]
    assert len(found.traces) == 12 and all(t.task.answer.isdigit() for t in found.traces)
    assert found.right == 0  # by the answer that the item claims


@pytest.mark.parametrize(
    ("length", "cuts"),
    [(14, (7, 10)), (11, (6, 7)), (20, None), (19, (10, 9)), (8, None), (21, None), (9, (5, 4))],
)
def test_cuts_leave_pieces_of_known_lengths(length: int, cuts: tuple[int, int] | None) -> None:
    assert cuts_of(length, 4, 10) == cuts
    for cut in cuts or ():
        assert 4 <= cut <= 10 and 4 <= length - cut <= 10


def test_a_verifier_looks_at_the_answer_and_a_vote_at_most_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = long_items(3)
    right, wrong = items[0].answer, str((int(items[0].answer) + 1) % 10)
    gold = traces.write_trace(items[0], "step", Random(0)).claims
    own = [
        [Worked(("11",), right), Worked(gold, right), Worked(("12",), wrong)],
        [Worked(("11",), "?"), Worked(("12",), "?"), Worked(("13",), items[1].answer)],
        [Worked(("11",), "1"), Worked(("12",), "2"), Worked(("13",), "3")],
    ]
    monkeypatch.setattr(own_thoughts, "_samples", lambda *_: own)
    unused: Any = None
    verified = by_verifier(unused, items, 3, 0)
    kept = [t.claims for t in verified.traces]
    assert kept[:2] == [("11",), ("13",)] and verified.right == 0  # right answers, wrong steps
    voted = by_vote(unused, items, 3, 0)
    assert [t.claims for t in voted.traces] == [("11",), ("11",)]
    assert [t.task.answer for t in voted.traces] == [right, "?"] and voted.asked == 3


def test_programs_are_kept_that_pass_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They really run; other programs than ours may pass, and the first that does is kept."""
    items = [tasks.make("code_number", "train", i, level=1) for i in range(3)]
    otherwise = f"# another way to write it\n{items[0].answer}"
    endless = "def solve(n):\n    while True:\n        pass"
    said = ["no program", otherwise, items[2].answer, endless, endless, "def solve(n): return 1"]

    def answer(network: Any, prompts: Any, thoughts: Any, how: Any, *, samples: int) -> Any:
        assert thoughts is None and len(prompts) == 3 and samples == 2
        assert how.temperature > 0 and how.max_new_tokens > len(TOKENIZER.encode(items[0].answer))
        return [GeneratedText(TOKENIZER.encode(text)) for text in said]

    monkeypatch.setattr(own_thoughts.thinking, "answer", answer)
    found = by_running(Thinker(StepMachine(), TOKENIZER), items, 2, 0)
    assert (found.asked, found.right) == (3, 1)
    (kept,) = found.traces
    assert kept.task == replace(items[0], answer=otherwise) and kept.claims == ()
