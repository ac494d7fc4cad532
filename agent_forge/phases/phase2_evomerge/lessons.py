"""What healing teaches: by whom, which items, and whose turn it is."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_forge.data.loader import TokenizedItem
from agent_forge.evals.model_under_test import TokenizedDomain, windows
from agent_forge.search.operators import generator

STEP_TOKENS = 512  # of a step at most; a longer item is cut into pieces of so many
LEAST_ASKED = STEP_TOKENS // 8  # of a further piece: a whole step for two tokens teaches nothing
FLOOR = 0.2  # share of the steps that is spread evenly, so that no domain starves
INERTIA = 0.7  # of a gap's mean when a batch brings a new value
LABEL = "heal"  # of its random numbers


@dataclass(frozen=True)
class Lesson:
    """What one expert teaches: the items of a domain."""

    name: str
    expert: int  # the number of a parent
    items: list[TokenizedItem]
    weight: float = 1.0  # of its gap


@dataclass
class Lessons:
    """Which items come next; its state is all that this depends on beside seed and step."""

    all: Sequence[Lesson]
    seed: int
    gaps: dict[str, float] = field(default_factory=dict)  # means over the last batches
    first_gaps: dict[str, float] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)  # that were taken of each
    steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {k: copy.copy(v) for k, v in vars(self).items() if k not in ("all", "seed")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))

    def draw(self, step: int) -> Lesson:
        """Each lesson once, then by the gaps."""
        for lesson in self.all:
            if lesson.name not in self.gaps:
                return lesson
        p = chances([lesson.weight * self.gaps[lesson.name] for lesson in self.all])
        return self.all[int(generator(self.seed, LABEL, step).choice(len(p), p=p))]

    def next_items(self, lesson: Lesson) -> list[TokenizedItem]:
        """As many of the next items as a step has room for; every round has another order."""
        chosen: list[TokenizedItem] = []
        while len(chosen) < len(lesson.items):
            place = self.items.get(lesson.name, 0)
            turn, number = divmod(place, len(lesson.items))
            order = generator(self.seed, LABEL, lesson.name, turn).permutation(len(lesson.items))
            more = [*chosen, lesson.items[order[number]]]
            if chosen and len(more) * max(len(item.ids) for item in more) > STEP_TOKENS:
                break
            chosen = more
            self.items[lesson.name] = place + 1
        return chosen

    def learned(self, lesson: Lesson, gap: float, seconds: float) -> None:
        """Remember what a step has shown."""
        name = lesson.name
        self.gaps[name] = INERTIA * self.gaps.get(name, gap) + (1 - INERTIA) * gap
        self.first_gaps.setdefault(name, gap)
        self.steps[name] = self.steps.get(name, 0) + 1
        self.seconds += seconds


def chances(gaps: Sequence[float]) -> list[float]:
    """How likely each is drawn: by what is left of its gap, and a floor for all."""
    positive = [max(0.0, gap) for gap in gaps]
    total, even = sum(positive), 1 / len(gaps)
    return [FLOOR * even + (1 - FLOOR) * (gap / total if total else even) for gap in positive]


def experts_of(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, int]:
    """The parent with the fewest bits a byte in each domain, by the records of the journal."""
    measured = [r for r in records if r["record"] == "candidate"]
    parents = [r for r in measured if r["operation"]["kind"] == "parent"]
    bits = {r["operation"]["index"]: r["score"]["raw"] for r in parents}
    return {n: min(bits, key=lambda i: (bits[i][f"{n}/bits_per_byte"], i)) for n in names}


def right_answers(prepared: TokenizedDomain) -> list[TokenizedItem]:
    """The right answer of every example, in pieces that a step has room for."""
    first = {*np.flatnonzero(np.diff(prepared.example_of, prepend=-1)).tolist()}
    pairs = zip(prepared.items, prepared.answer_of.tolist(), strict=True)
    right = [item for item, answer in pairs if answer in first]
    cut = (windows(item.ids, list(item.asked).index(True), STEP_TOKENS) for item in right)
    numbered = (numbered for pieces in cut for numbered in enumerate(pieces))
    return [piece for n, piece in numbered if n == 0 or sum(piece.asked) >= LEAST_ASKED]


def lessons_hash(lessons: Sequence[Lesson], *others: Any) -> str:
    """sha256 of all that is taught and of what else a healing depends on."""
    digest = hashlib.sha256(json.dumps(others).encode())
    for lesson in lessons:
        digest.update(json.dumps([lesson.name, lesson.expert, lesson.weight]).encode())
        for item in lesson.items:
            digest.update(np.array([item.ids, item.asked], np.int64).tobytes() + b"/")
    return digest.hexdigest()
