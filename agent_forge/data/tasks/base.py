"""What a task and a family of tasks are, and how an item falls into a split.

`draw` picks the operands: what an item asks about. The sha256 of family and operands names the one
split that may hold them, so a family draws until they belong to the split that was asked for.
`build` then words the question, with wordings of that split alone. Families of bare symbols have
no wording. All randomness comes from the given `Random`: an item is the same on any machine.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

SPLITS = ("train", "selection", "verdict")
MAX_LEVEL = 100
MAX_DRAWS = 10_000

Operands = tuple[Any, ...]  # of numbers and strings: their repr names the item
Wordings = Mapping[str, Sequence[str]]  # split -> templates of a question


def load(name: str) -> Any:
    """The content of the data file `name`.json in this folder. The order of its lists matters."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))


DESCRIPTIONS: dict[str, dict[str, Any]] = load("families")  # domain, category, summary, wordings


@dataclass(frozen=True)
class Task:
    """One question with its answer. `level` is the difficulty, 1 to 100."""

    family: str
    level: int
    split: str
    question: str
    answer: str
    steps: str = ""  # worked steps, one a line
    distractors: tuple[str, ...] = ()  # wrong answers of the same form
    tests: tuple[str, ...] = ()  # for code: assertions that a right answer passes
    operands: str = ""  # what the item asks about, whatever its wording


class TaskContent(NamedTuple):
    """What a family builds from operands; the parts of a Task that it decides."""

    question: str
    answer: str
    distractors: tuple[str, ...] = ()  # candidates: the first three that are not the answer count
    steps: str = ""
    tests: tuple[str, ...] = ()


class Size(NamedTuple):
    """What grows with the level of a family: `least` at level 1, `most` at level 100. A family may
    have no items below `first`."""

    unit: str
    least: int
    most: int
    first: int = 0

    @property
    def smallest(self) -> int:
        return max(self.least, self.first)

    def level(self, size: int) -> int:
        """The lowest level with items of a size."""
        if not self.smallest <= size <= self.most:
            raise ValueError(f"{size} {self.unit}: there are {self.smallest} to {self.most}")
        return 1 - (self.least - size) * (MAX_LEVEL - 1) // (self.most - self.least)

    def at(self, level: int) -> int:
        """The size of the items of a level."""
        return max(self.first, scaled(level, self.least, self.most))


Draw = Callable[[int, Random], Operands]  # (level, rng)
Accept = Callable[[Task, str], bool]  # True if the text answers the task
Build = Callable[[Any, int, str, Random], TaskContent]  # (operands, level, split, rng)


@dataclass(frozen=True)
class TaskFamily:
    """A kind of task. `learnable`: a model of 1M weights learns low levels in a minute of CPU."""

    name: str
    draw: Draw
    build: Build
    accept: Accept | None  # None: answers are code, and must be run
    domain: str
    category: str  # math, qa, code, cs (common sense), lang or thinking
    summary: str
    learnable: bool = False
    wordings: Wordings = field(default_factory=dict)  # empty: symbols only, one form for all
    size: Size | None = None  # None: nothing that can be counted grows

    def generate(self, level: int, split: str, rng: Random) -> Task:
        """One item of the split; draws until the operands belong to it."""
        for _ in range(MAX_DRAWS):
            operands = self.draw(level, rng)
            text = repr(operands)
            if split_of(self.name, text) == split:
                asked, answer, others, steps, tests = self.build(operands, level, split, rng)
                wrong = tuple(c for c in dict.fromkeys(others) if c != answer)[:3]
                return Task(self.name, level, split, asked, answer, steps, wrong, tests, text)
        raise RuntimeError(f"{self.name} has no item of level {level} in split {split!r}")


def family(
    name: str, draw: Draw, build: Build, accept: Accept | None, wordings: Wordings | None = None
) -> TaskFamily:
    """The family that families.json describes under this name; `wordings` if it has none there."""
    described = DESCRIPTIONS[name] | ({"wordings": wordings} if wordings else {})
    size = Size(*described["size"]) if "size" in described else None
    return TaskFamily(name, draw, build, accept, **{**described, "size": size})


def wording(family: str, split: str, rng: Random, /, **gaps: Any) -> str:
    """One of the templates that families.json gives a family for a split, with its gaps filled."""
    template: str = rng.choice(DESCRIPTIONS[family]["wordings"][split])
    return template.format(**gaps)


def split_of(family: str, operands: str) -> str:
    """The one split that an item may be in: 70 % train, 15 % selection, 15 % verdict."""
    bucket = hashlib.sha256(f"{family}|{operands}".encode()).digest()[0]  # 0-255
    return "train" if bucket < 180 else "selection" if bucket < 218 else "verdict"


def scaled(level: int, low: int, high: int) -> int:
    """A size that grows evenly from `low` at level 1 to `high` at level 100."""
    return low + (high - low) * (level - 1) // (MAX_LEVEL - 1)
