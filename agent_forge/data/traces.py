"""Thoughts: worked answers to tasks of several steps, in ten strategies that a program can check.

A thought is a list of claims, each behind the token of its strategy: `<step>rot 82134<step>rev
43128`. For the families of `tasks/reasoning.py` all strategies are written by templates from the
item itself; a family with worked steps has them as `<step>` claims. `checked` compares a thought,
whoever wrote it, with what the item says: what does not hold is refused and never learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from agent_forge.config.load import did_you_mean
from agent_forge.data import row_files, tasks
from agent_forge.data.tasks.reasoning import (
    ADVANCE,
    EVIDENCE,
    Machine,
    change,
    machine,
    swap,
    unchange,
)
from agent_forge.data.tasks.symbols import DIGITS
from agent_forge.data.tokenizer import END_OF_THINKING, END_OF_TURN, SPECIAL, STRATEGIES, THINKING
from agent_forge.errors import ConfigError

LETTERS = str.maketrans(DIGITS, "abcdefghij")
LARGEST = 2**63  # number of an item, or seed
LEVELS = {"chain": (2, 5), "tot4": (4, 10), "swap4": (2, 5), "odds": (4, 5)}  # that are taught
OTHER_LEVELS = (1, 20)  # of families with worked steps
SURE = 9  # the confidence of a thought about an item that nobody measured
TAGS = {tag.strip("<>"): SPECIAL[tag] for tag in STRATEGIES}  # by strategy
CLAIM = re.compile("|".join(map(re.escape, STRATEGIES)))
ARITHMETIC = re.compile(r"(?<![\w.])(-?\d+) ([-+*]) (-?\d+)(?: ([-+]) (\d+))? = (-?\d+)(?![\w.])")
Levels = Mapping[str, tuple[int, int]]  # by family


@dataclass(frozen=True)
class Strategy:
    """A way to think: where it applies, from which accuracy on it counts as learned, and when."""

    families: list[str]
    threshold: float  # share of right answers from which on it counts as learned
    easy: bool  # taught from the beginning
    about: str


_table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ABOUT: dict[str, Strategy] = {name: Strategy(**row) for name, row in _table.items()}


class ItemNumber(NamedTuple):
    """Which training item of its family a task is, as `tasks.make` takes it."""

    number: int
    seed: int
    lowest: int  # level
    highest: int

    def make(self, family: str) -> tasks.Task:
        level = self.lowest, self.highest
        return tasks.make(family, "train", self.number, seed=self.seed, level=level)


@dataclass(frozen=True)
class Trace:
    """A question, a thought of one strategy about it, and the answer."""

    task: tasks.Task
    strategy: str
    claims: tuple[str, ...]
    item: ItemNumber | None = None  # None: it is not to be written down

    @property
    def thought(self) -> str:
        return "".join(f"<{self.strategy}>{claim}" for claim in self.claims)

    def parts(self) -> list[str | int]:
        """The thought as texts and ids, for `Tokenizer.compose`."""
        tag = TAGS[self.strategy]
        return [part for claim in self.claims for part in (tag, claim)]

    def row(self) -> dict[str, Any]:
        """The line of a file. The item can be made again from its number; the rest is to read."""
        assert self.item is not None
        asked = {name: getattr(self.task, name) for name in ("family", "question", "answer")}
        told = {"strategy": self.strategy, "thought": self.thought}
        return {**asked, **self.item._asdict(), **told}


ROW_FIELDS = ("family", "question", "answer", *ItemNumber._fields, "strategy", "thought")


def known(names: Sequence[str]) -> list[str]:
    """The names of strategies, if all of them are some."""
    for name in names:
        if name not in ABOUT:
            raise ConfigError(f"no strategy is called {name!r}{did_you_mean(name, list(ABOUT))}")
    return list(names)


def write_trace(task: tasks.Task, strategy: str, rng: Random, sure: int = SURE) -> Trace:
    """A correct thought; `sure` is the confidence that `uncertain` tells."""
    if task.family in ADVANCE:
        claims = _WRITERS[strategy](machine(task), rng, sure)
    else:
        claims = task.steps.splitlines()
    return Trace(task, strategy, tuple(claims))


def checked(trace: Trace, answer: str) -> Trace:
    """The trace, if every claim holds and the answer is right; else a ValueError says why not."""
    task = trace.task
    if not tasks.is_right(task, answer):
        raise ValueError("the answer is wrong")
    if not trace.claims:
        raise ValueError("there is no thought")
    if task.family not in ADVANCE:
        if trace.strategy != "step" or not task.steps:
            raise ValueError(f"{task.family} has no thoughts of the strategy {trace.strategy}")
        if trace.claims != tuple(task.steps.splitlines()):
            raise ValueError("a claim is wrong")
    elif task.family not in ABOUT[trace.strategy].families:
        raise ValueError(f"{trace.strategy} is not for {task.family}")
    elif not fits(trace):
        raise ValueError("the form is another")
    elif steady(trace) != steady(write_trace(task, trace.strategy, Random(0))):
        raise ValueError("a claim is wrong")
    return trace


def steady(trace: Trace) -> tuple[str, ...]:
    """The claims without what a strategy leaves open: the mistake, the confidence."""
    if trace.strategy == "uncertain":
        return trace.claims[:-1]
    return repaired(trace.claims) if trace.strategy == "correct" else trace.claims


def repaired(claims: tuple[str, ...]) -> tuple[str, ...]:
    """The claims without a mistake that the next one takes back, if it is one."""
    place = next((i for i, claim in enumerate(claims) if claim.startswith("no ")), 0)
    mistake, right = claims[place - 1], claims[place].removeprefix("no ")
    same_label = mistake.rpartition(" ")[0] == right.rpartition(" ")[0]
    if not place or not same_label or mistake == right:
        return claims
    return (*claims[: place - 1], right, *claims[place + 1 :])


def equation_holds(match: re.Match[str]) -> bool:
    """True if what ARITHMETIC has found is so."""
    a, sign, b, then, c, result = match.groups()
    value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
    if then:
        value += int(c) if then == "+" else -int(c)
    return value == int(result)


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """The strategy of a thought and its claims; the first tag names it. Empty without a tag."""
    tags, claims = CLAIM.findall(text), CLAIM.split(text)
    if not tags or claims[0].strip() or any(tag != tags[0] for tag in tags):
        return "", ()
    return tags[0].strip("<>"), tuple(claim.strip() for claim in claims[1:])


# -- the strategies --------------------------------------------------------------------------------


def _claim(label: str, state: str) -> str:
    """A step and where it leads; sums need no blank."""
    return f"{label}{state}" if len(state) == 1 else f"{label} {state}"


def _steps(m: Machine) -> list[str]:
    return [_claim(*pair) for pair in zip(m.labels, m.states(), strict=True)]


def _step(m: Machine, rng: Random, sure: int) -> list[str]:
    return _steps(m)


def _doubt(m: Machine, rng: Random, sure: int) -> list[str]:
    return [f"{claim} {state[::-1]}" for claim, state in zip(_steps(m), m.states(), strict=True)]


def _uncertain(m: Machine, rng: Random, sure: int) -> list[str]:
    return [*_steps(m), str(sure)]


def _mece(m: Machine, rng: Random, sure: int) -> list[str]:
    middle = (len(m.labels) + 1) // 2
    halves = [Machine("0", part, m.advance) for part in (m.labels[:middle], m.labels[middle:])]
    a, b = (half.states()[-1] for half in halves)
    whole = m.states()[-1]
    return [*(" ".join(_steps(half)) for half in halves), f"{m.start}+{a}+{b}={whole}"]


def _bayesian(m: Machine, rng: Random, sure: int) -> list[str]:
    seen = [m.labels[: i + 1] for i in range(len(m.labels))]
    counts = [f"{own.count('a')}-{own.count('b')}" for own in seen]
    told = zip(m.labels, counts, m.states(), strict=True)
    return [" ".join(claim) for claim in told]


def _falsify(m: Machine, rng: Random, sure: int) -> list[str]:
    undo = unchange if m.advance is change else swap
    back, state = [], m.states()[-1]
    for label in reversed(m.labels):
        state = undo(label, state)
        back.append(f"un {_claim(label, state)}")
    return [*_steps(m), *back, "y"]


def _expert(m: Machine, rng: Random, sure: int) -> list[str]:
    moves: list[str] = []
    for label in m.labels:
        if label == "rev" and moves[-1:] == ["rev"]:
            moves.pop()
        elif not label.startswith("add"):
            moves.append(label)
    added = sum(int(label.split()[1]) for label in m.labels if label.startswith("add")) % 10
    shorter = (*moves, f"add {added}") if added else tuple(moves)
    return [", ".join(shorter) or "none", *_steps(Machine(m.start, shorter, m.advance))]


def _orthogonal(m: Machine, rng: Random, sure: int) -> list[str]:
    moves = tuple(label for label in m.labels if not label.startswith("add"))
    places = Machine("12345"[: len(m.start)], moves, m.advance)
    at = places.states()[-1] if moves else places.start
    values = "".join(m.start[int(place) - 1] for place in at)
    added = sum(int(label.split()[1]) for label in m.labels if label.startswith("add")) % 10
    last = [f"add {added} {change(f'add {added}', values)}"] if added else []
    return [*_steps(places), f"at {values}", *last]


def _multidomain(m: Machine, rng: Random, sure: int) -> list[str]:
    def spelled(state: str) -> str:
        return " ".join(state.translate(LETTERS))

    moved = [f"{la} {spelled(state)}" for la, state in zip(m.labels, m.states(), strict=True)]
    return [spelled(m.start), *moved, m.states()[-1]]


def _correct(m: Machine, rng: Random, sure: int) -> list[str]:
    steps, place = _steps(m), rng.randrange(len(m.labels))
    mistake = _claim(m.labels[place], _with_mistake(m.states()[place], rng))
    return [*steps[:place], mistake, f"no {steps[place]}", *steps[place + 1 :]]


def _with_mistake(state: str, rng: Random) -> str:
    """A state with one digit that is another."""
    i = rng.randrange(len(state))
    return state[:i] + DIGITS[(int(state[i]) + rng.randrange(1, 10)) % 10] + state[i + 1 :]


_WRITERS: dict[str, Callable[[Machine, Random, int], list[str]]] = {
    "step": _step,
    "mece": _mece,
    "bayesian": _bayesian,
    "doubt": _doubt,
    "orthogonal": _orthogonal,
    "expert": _expert,
    "falsify": _falsify,
    "multidomain": _multidomain,
    "correct": _correct,
    "uncertain": _uncertain,
}
_MOVE, _OP, _ODDS = r"(?:rot|rev|\d\d)", r"(?:rot|rev|add \d)", r"[abc] \d+/\d+"
_LONG = rf"(?:{_OP} \d+|\d\d \d{{4}})"  # with a state of several digits
_STEP = rf"(?:{_LONG}|\d\d)"
_FORMS = {
    "step": rf"{_STEP}(;{_STEP})*|{_ODDS}(;{_ODDS})*",
    "mece": r"\d\d( \d\d)*;\d\d( \d\d)*;\d\+\d\+\d=\d",
    "bayesian": r"[abc] \d+-\d+ \d+/\d+(;[abc] \d+-\d+ \d+/\d+)*",
    "doubt": rf"{_LONG} \d+(;{_LONG} \d+)*",
    "orthogonal": rf"({_MOVE} \d+;)*at \d+(;add \d \d+)?",
    "expert": rf"(none|{_OP}(, {_OP})*(;{_STEP})+)",
    "falsify": rf"{_STEP}(;{_STEP})*(;un {_STEP})+;y",
    "multidomain": rf"[a-j]( [a-j])*(;{_OP} [a-j]( [a-j])*)*;\d+",
    "correct": rf"({_STEP};)+no {_STEP}(;{_STEP})*",
    "uncertain": rf"{_STEP}(;{_STEP})*;\d",
}


def fits(trace: Trace) -> bool:
    """True if a thought has the form of its strategy, whether its claims hold or not; worked steps
    have no form of their own."""
    if trace.task.family not in ADVANCE:
        return trace.strategy == "step" and bool(trace.claims)
    return re.fullmatch(_FORMS[trace.strategy], ";".join(trace.claims)) is not None


# -- a step that was changed -----------------------------------------------------------------------


def corrupted(task: tasks.Task, rng: Random) -> tuple[tuple[str, ...], str]:
    """The first steps of a thought with a mistake in the last of them, cut there, and the answer
    that follows if one goes on from it. The wrong state is one that could be: another digit, or of
    odds what evidence for the other side would have made."""
    m = machine(task)
    states = [m.start, *m.states()]
    place = rng.randrange(max(1, len(m.labels) - 1))  # a step is left, if there are two
    label = m.labels[place]
    if task.family == "odds":
        wrong = m.advance(rng.choice([e for e in EVIDENCE if e != label]), states[place])
    else:
        wrong = _with_mistake(states[place + 1], rng)
    claims = (*_steps(m)[:place], _claim(label, wrong))
    return claims, [wrong, *m.states_from(wrong, place + 1)][-1]


# -- many of them, and files -----------------------------------------------------------------------


def families_of(strategy: str, families: Iterable[str]) -> list[str]:
    """Those of the families that a strategy is for; worked steps are for `step` alone."""
    own = ABOUT[strategy].families
    return [n for n in families if n in own or (strategy == "step" and _has_worked_steps(n))]


def _has_worked_steps(family: str) -> bool:
    return family not in ADVANCE and bool(tasks.make(family, "train", 0).steps)


def write_traces(
    strategy: str,
    count: int,
    levels: Levels,
    *,
    seed: int = 0,
    sure: Mapping[tuple[str, int], int] | None = None,
    turns: Mapping[str, int] | None = None,
) -> Iterator[Trace]:
    """Correct thoughts about training items, the families of the strategy in turn; of some there
    are several `turns`."""
    _refuse_without_families(strategy, levels)
    families = [n for n in families_of(strategy, levels) for _ in range((turns or {}).get(n, 1))]
    for i in range(count):
        name = families[i % len(families)]
        number = ItemNumber(i, seed, *levels[name])
        task = number.make(name)
        confidence = (sure or {}).get((name, task.level), SURE)
        trace = write_trace(task, strategy, Random(f"{seed}/{strategy}/{i}"), confidence)
        yield replace(checked(trace, task.answer), item=number)


def _refuse_without_families(strategy: str, levels: Levels) -> None:
    if not families_of(strategy, levels):
        wanted = ", ".join(ABOUT[strategy].families)
        raise ConfigError(f"the strategy {strategy} needs one of the families {wanted}")


def trace_of_row(row: Mapping[str, Any]) -> Trace:
    """The trace of a line of a file, checked; a ValueError says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise ValueError("it is no object with fields")
    if bad := [name for name in ROW_FIELDS if name not in row]:
        raise ValueError(f"it has no {' and no '.join(bad)}")
    task, number = _task_of(row)
    strategy, claims = parse(str(row["thought"]))
    if strategy != row["strategy"] or strategy not in ABOUT:
        raise ValueError(f"the thought is not of the strategy {row['strategy']!r}")
    return checked(Trace(task, strategy, claims, number), str(row["answer"]))


def _task_of(row: Mapping[str, Any]) -> tuple[tasks.Task, ItemNumber]:
    """The item that a row is about, made again from its number: always one to learn from."""
    numbers = [row[name] for name in ItemNumber._fields]
    if not all(type(n) is int and 0 <= n <= LARGEST for n in numbers):
        raise ValueError(f"{', '.join(ItemNumber._fields)} have to be whole numbers")
    number = ItemNumber(*numbers)
    try:
        task = number.make(str(row["family"]))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if task.question != row["question"]:
        raise ValueError("its question is not that of the item of this number")
    return task, number


def read_traces(path: Path) -> list[Trace]:
    """The traces of a file of JSON lines; one that does not hold is refused with its place."""
    traces = []
    for row in row_files.rows(path):
        try:
            traces.append(trace_of_row(row.value))
        except ValueError as error:
            raise row.damaged(f"a trace that does not hold: {error}") from error
    if not traces:
        raise ConfigError(f"{path} has no traces", hint="forge data traces writes some")
    return traces


@dataclass(frozen=True)
class TraceRequest:
    """What an endpoint is asked for: the thought about one item."""

    key: str
    messages: list[dict[str, str]]
    task: tasks.Task
    strategy: str
    item: ItemNumber


def trace_requests(
    families: Sequence[str], strategies: Sequence[str], count: int, seed: int
) -> Iterator[TraceRequest]:
    """One request for each of `count` items; strategies in turn, each with its own families."""
    levels = _levels(families)
    for key, trace in _in_turn(levels, strategies, count, seed):
        name, strategy = trace.task.family, trace.strategy
        other = tasks.make(name, "train", count, seed=seed + 1, level=levels[name])
        example = write_trace(other, strategy, Random(seed))
        asked = (
            f"Answer with {THINKING}, a thought, {END_OF_THINKING}, and the answer alone. The "
            f"thought consists of claims, each behind <{strategy}>: {ABOUT[strategy].about}. "
            f"For example, to {other.question!r}: "
            f"{THINKING}{example.thought}{END_OF_THINKING}{other.answer}"
        )
        turns = {"system": asked, "user": trace.task.question}
        messages = [{"role": role, "content": text} for role, text in turns.items()]
        assert trace.item is not None
        yield TraceRequest(key, messages, trace.task, strategy, trace.item)


def accept_reply(request: TraceRequest, text: str) -> dict[str, Any]:
    """The row of a reply whose thought and answer hold; a ValueError says why there is none."""
    before, start, rest = text.partition(THINKING)
    thought, end, answer = rest.partition(END_OF_THINKING)
    if not start or not end or before.strip():
        raise ValueError(f"it is not {THINKING}...{END_OF_THINKING} and an answer")
    strategy, claims = parse(thought)
    if strategy != request.strategy:
        raise ValueError(f"the strategy is not <{request.strategy}>")
    trace = Trace(request.task, strategy, claims, request.item)
    return checked(trace, answer.strip()).row()


def local_rows(
    families: Sequence[str], strategies: Sequence[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """As many rows by the templates."""
    traced = _in_turn(_levels(families), strategies, count, seed)
    return (trace.row() for _, trace in traced)


def _levels(families: Sequence[str]) -> Levels:
    """The levels that are asked for of each family; without names, of those that are taught."""
    for name in families:
        tasks.make(name, "train", 0)  # refuses an unknown name
    return {name: LEVELS.get(name, OTHER_LEVELS) for name in families or LEVELS}


def _in_turn(
    levels: Levels, strategies: Sequence[str], count: int, seed: int
) -> Iterator[tuple[str, Trace]]:
    """Traces with a key each; the strategies take turns, without names those that apply."""
    names = known(strategies) or [name for name in ABOUT if families_of(name, levels)]
    for name in names or ["step"]:
        _refuse_without_families(name, levels)
    each = -(-count // len(names))
    sources = [write_traces(name, each, levels, seed=seed) for name in names]

    def keyed(trace: Trace) -> tuple[str, Trace]:
        return f"{trace.strategy}/{trace.task.family}/{trace.task.operands}", trace

    return (keyed(next(sources[i % len(names)])) for i in range(count))


def document(trace: Trace) -> tuple[list[str | int], list[bool]]:
    """A trace as a turn of a chat, in texts and ids, and of each whether it is learned: what the
    assistant says, but for a mistake."""
    parts: list[str | int] = [SPECIAL["<|user|>"], trace.task.question, SPECIAL[END_OF_TURN]]
    parts += [SPECIAL["<|assistant|>"], SPECIAL[THINKING]]
    learned = [False, False, False, False, True]
    for claim, following in zip(trace.claims, (*trace.claims[1:], ""), strict=True):
        mistake = trace.strategy == "correct" and following.startswith("no ")
        parts += [TAGS[trace.strategy], claim]
        learned += [True, not mistake]
    parts += [SPECIAL[END_OF_THINKING], trace.task.answer, SPECIAL[END_OF_TURN]]
    return parts, learned + [True] * 3
