"""Tasks that take several steps, each of them easy: what thinking is for.

An item is a state, a list of labels, and a rule that makes the next state of a label and a state;
the answer is the last state. `machine` gives them back for an item, so that every claim of a
thought about it can be checked (data/traces.py). A level is the number of steps, and no less than
gives enough items (3 of `tot4`, 4 of `odds`).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations
from random import Random
from typing import NamedTuple

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, Task, TaskContent, family
from agent_forge.data.tasks.symbols import DIGITS, symbol_question

SIZE = 5  # digits of a chain
OPERATIONS = 2 * ["rot", "rev"] + [f"add {k}" for k in range(1, 5)]
PLACES = ["".join(pair) for pair in combinations("1234", 2)]
EVIDENCE = "abc"
PRIORS = ("1/8", "1/4", "1/2", "1/1", "2/1", "4/1", "8/1")
Advance = Callable[[str, str], str]  # (label, state) -> the next state
_ODDS = re.compile(r"[1-9][0-9]{0,3}/[1-9][0-9]{0,3}")


class Machine(NamedTuple):
    """An item: where it starts, what is done, and what doing it means."""

    start: str
    labels: tuple[str, ...]
    advance: Advance

    def states(self) -> list[str]:
        """The state after each label."""
        return self.states_from(self.start)

    def states_from(self, state: str, done: int = 0) -> list[str]:
        """The states that follow from a state in which `done` labels are behind."""
        after = accumulate(
            self.labels[done:], lambda s, label: self.advance(label, s), initial=state
        )
        return list(after)[1:]


def change(label: str, state: str) -> str:
    """A step of `chain`: rotate, reverse, or add to every digit, modulo 10."""
    if label == "rot":
        return state[1:] + state[0]
    if label == "rev":
        return state[::-1]
    return "".join(DIGITS[(int(d) + int(label.split()[1])) % 10] for d in state)


def unchange(label: str, state: str) -> str:
    """What a step of `chain` made this state from."""
    if label == "rot":
        return state[-1] + state[:-1]
    return change(f"add {10 - int(label.split()[1])}" if label.startswith("add") else label, state)


def swap(label: str, state: str) -> str:
    """A step of `swap4`: two places change their digits."""
    symbols = list(state)
    a, b = (int(place) - 1 for place in label)
    symbols[a], symbols[b] = symbols[b], symbols[a]
    return "".join(symbols)


def update(label: str, state: str) -> str:
    """A step of `odds`: evidence for a doubles its side, for b the other; c says nothing."""
    a, b = map(int, state.split("/"))
    a, b = a * (1 + (label == "a")), b * (1 + (label == "b"))
    common = math.gcd(a, b)
    return f"{a // common}/{b // common}"


ADVANCE: dict[str, Advance] = {
    "chain": change,
    "tot4": lambda label, state: DIGITS[(int(state) + int(label)) % 10],
    "swap4": swap,
    "odds": update,
}


def machine(task: Task) -> Machine:
    """The steps of an item of these families."""
    start, *labels = ast.literal_eval(task.operands)
    return Machine(start, tuple(labels), ADVANCE[task.family])


def piece(task: Task, first: int, after: int, start: str = "") -> Task | None:
    """Some labels of an item as an item of their own, from its start or from a given state; None
    if there is no such state."""
    whole = machine(task)
    begin = start or whole.start
    odds = "/" in whole.start
    if not (_ODDS.fullmatch(begin) if odds else begin.isdigit() and len(begin) == len(whole.start)):
        return None
    operands = (begin, *whole.labels[first:after])
    steps, family = len(operands) - 1, next(own for own in FAMILIES if own.name == task.family)
    asked = family.build(operands, steps, task.split, Random(0))
    both = (asked.question, asked.answer)
    return Task(task.family, steps, task.split, *both, operands=repr(operands))


def _drawn(
    start: Callable[[Random], str], labels: Sequence[str], least: int
) -> Callable[[int, Random], Operands]:
    return lambda level, rng: (start(rng), *rng.choices(labels, k=max(level, least)))


def _digits(count: int) -> Callable[[Random], str]:
    return lambda rng: "".join(rng.choices(DIGITS, k=count))


def _built(name: str, form: Callable[[str, Sequence[str]], str]) -> Callable[..., TaskContent]:
    """How an item is asked; the answer is its last state."""

    def build(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
        start, *labels = operands
        *_, answer = Machine(start, tuple(labels), ADVANCE[name]).states()
        question = form(start, labels)
        if name != "odds":
            return symbol_question(question, answer, DIGITS, rng)
        a, b = answer.split("/")
        return TaskContent(question, answer, (f"{b}/{a}", f"{2 * int(a)}/{b}", f"{a}/{2 * int(b)}"))

    return build


FAMILIES = (
    family(
        "chain",
        _drawn(_digits(SIZE), OPERATIONS, 1),
        _built("chain", lambda start, labels: f"{', '.join(labels)} : {start}"),
        verifiers.symbols,
    ),
    family(
        "tot4",
        _drawn(_digits(1), "1234", 3),
        _built("tot4", lambda start, labels: f"tot {start}:{''.join(labels)}"),
        verifiers.symbols,
    ),
    family(
        "swap4",
        _drawn(_digits(4), PLACES, 1),
        _built("swap4", lambda start, labels: f"swp {start} : {' '.join(labels)}"),
        verifiers.symbols,
    ),
    family(
        "odds",
        _drawn(lambda rng: rng.choice(PRIORS), EVIDENCE, 4),
        _built("odds", lambda start, labels: f"odds {start} : {' '.join(labels)}"),
        verifiers.symbols,
    ),
)
