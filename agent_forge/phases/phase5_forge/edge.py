"""The edge of ability: items of a family by size, whether they are solved, and which are drawn.

With worked thoughts an item is solved if every token that is learned is the likeliest one: greedy
generation would write just that, at twice the cost. Code is written and run in the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from agent_forge.data import tasks, traces
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import CurriculumStage, Mix, TokenizedDataset, TokenizedItem
from agent_forge.data.tasks import Task
from agent_forge.data.tasks.reasoning import ADVANCE
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.evals import graders
from agent_forge.evals.ability import ASKED, Asked
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.config import STEP
from agent_forge.train.lessons import trace_item

LOW, HIGH = 0.55, ASKED  # success at which the controller stays where it is
MASTERED = 3  # looks in a row above that
WALL = 0.5  # success with all hints below which it goes no further
HINTS = (0, 1, 3, 5)  # first claims of a thought that are given
HINTED_SHARE = 0.2  # of the draws of the controller that go to sizes it has mastered


@dataclass(frozen=True)
class EdgeTasks:
    """A family of tasks by size. `taught`: the smallest and the largest that the model knows of."""

    name: str
    taught: tuple[int, int]
    sizes: range  # whose items fit into a row
    tokenizer: Tokenizer
    seed: int

    @property
    def thinks(self) -> bool:
        """True if its items have thoughts that a program can check."""
        return self.name in ADVANCE

    @property
    def unit(self) -> str:
        size = tasks.FAMILIES[self.name].size
        return size.unit if size else ""

    def task(self, size: int, split: str, number: int) -> Task:
        sizes = tasks.FAMILIES[self.name].size
        assert sizes is not None
        return tasks.make(self.name, split, number, seed=self.seed, level=sizes.level(size))

    def item(self, task: Task, hints: int = 0) -> TokenizedItem:
        """A task with its thought or answer; the first claims may be given instead of learned."""
        if not self.thinks:
            documents, masks = tokenise(self.tokenizer, [tasks.as_example(task)])
            return TokenizedItem(documents[0], masks[0] if masks else [True] * len(documents[0]))
        trace = traces.write_trace(task, STEP, Random(0))
        item = trace_item(self.tokenizer, trace)
        if not hints:
            return item
        given = trace_item(self.tokenizer, traces.Trace(task, STEP, trace.claims[:hints]))
        same = next(i for i, (a, b) in enumerate(zip(item.ids, given.ids)) if a != b)  # noqa: B905
        return TokenizedItem(item.ids, [own and i >= same for i, own in enumerate(item.asked)])

    def source(self, name: str, asked: Sequence[Asked], hints: int = 0) -> TokenizedDataset:
        """Worked examples of items by size and number."""
        items = [self.item(self.task(size, "train", n), hints) for size, n in asked]
        return TokenizedDataset(name, [i.ids for i in items], [i.asked for i in items])

    def solved(self, model: ForgeNetwork, split: str, asked: Sequence[Asked]) -> list[bool]:
        """Which items of a split, by size and number, a model solves."""
        found = [self.task(size, split, number) for size, number in asked]
        if tasks.FAMILIES[self.name].accept is None:
            written = Thinker(model, self.tokenizer).answers(found, None)
            return [graders.code(task, text) for task, text in zip(found, written, strict=True)]
        scores = measure(model, [self.item(task) for task in found], threshold=EVERY_STEP)
        return [bool(right) for right in scores.right]


def edge_tasks(
    name: str,
    taught: tuple[int, int],
    most: int,
    tokenizer: Tokenizer,
    seed: int,
    row_tokens: int,
) -> EdgeTasks:
    """The family with all of its sizes, up to the largest whose items fit into a row."""
    of = tasks.FAMILIES[name].size
    assert of is not None
    found = EdgeTasks(name, taught, range(0), tokenizer, seed)
    largest = taught[1]
    while largest < min(most, of.most):
        if len(found.item(found.task(largest + 1, "train", 0)).ids) >= row_tokens:
            break
        largest += 1
    return EdgeTasks(name, taught, range(taught[0], largest + 1), tokenizer, seed)


Looked = dict[str, dict[str, float]]  # family -> size, as JSON has it -> share that is solved


@dataclass
class _Place:
    """Where the controller is in a family."""

    at: int = 0  # of its sizes
    hints: int = 0  # of HINTS
    streak: int = 0
    wall: bool = False

    def observe(self, success: float, last: int) -> None:
        self.streak = self.streak + 1 if success >= HIGH and not self.hints else 0
        if success >= HIGH and self.hints:
            self.hints -= 1
        elif self.streak == MASTERED and self.at < last:
            self.at, self.streak = self.at + 1, 0
        elif success < LOW:
            self.wall = self.hints == len(HINTS) - 1 and success < WALL
            self.hints = min(self.hints + 1, len(HINTS) - 1)


@dataclass
class EdgeDraw:
    """Which sizes beyond the edge are drawn as training goes on. It is a curriculum, and what looks
    at the model meanwhile; its state is what it has seen."""

    kind: str
    base: Mix  # weights of everything else; those of the edge make up for what is missing to 1
    sizes: Mapping[str, Sequence[int]]  # beyond the edge, by family
    look: Callable[[Mapping[str, Sequence[int]]], tuple[float, Looked]]
    steps: int
    row_tokens: int
    looks: int = 10
    seen: list[Looked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.every_steps = max(1, self.steps // self.looks)
        self._replay()

    @property
    def ended(self) -> bool:
        return False

    @property
    def stages(self) -> Sequence[CurriculumStage]:
        return self._stages

    def at(self, step: int, total: int) -> CurriculumStage:
        return self._stages[min(step // self.every_steps, len(self._stages) - 1)]

    def update(self) -> float:
        """Look at the model, and draw accordingly from now on; returns its loss there."""
        loss, seen = self.look(self._watched())
        self.seen.append(seen)
        self._move(seen)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])
        self._replay()

    @property
    def walls(self) -> dict[str, int]:
        """The families that went no further even with all hints, and at which size."""
        return {name: self.sizes[name][p.at] for name, p in self._places.items() if p.wall}

    def _replay(self) -> None:
        self._places = {name: _Place() for name in self.sizes}
        self._stages = [self._stage()]
        for seen in self.seen:
            self._move(seen)

    def _move(self, seen: Looked) -> None:
        for name, place in self._places.items():
            sizes = self.sizes[name]
            if (known := seen.get(name, {}).get(str(sizes[place.at]))) is not None:
                place.observe(known, len(sizes) - 1)
        self._stages.append(self._stage())

    def _watched(self) -> Mapping[str, Sequence[int]]:
        """The sizes that are looked at: all, or where the controller is."""
        if self.kind != "controller":
            return self.sizes
        return {name: [self.sizes[name][p.at]] for name, p in self._places.items()}

    def _stage(self) -> CurriculumStage:
        share = (1 - sum(self.base.values())) / len(self.sizes)
        mix = dict(self.base)
        for name, sizes in self.sizes.items():
            for source, weight in self._weights(name, sizes).items():
                mix[source] = share * weight
        return CurriculumStage(1.0, mix, self.row_tokens)

    def _weights(self, name: str, sizes: Sequence[int]) -> dict[str, float]:
        """The weight of each source of a family; they add up to 1."""
        if self.kind == "controller":
            place = self._places[name]
            now = source_name(name, sizes[place.at], HINTS[place.hints])
            below = sizes[: place.at]
            shares = {source_name(name, size): HINTED_SHARE / len(below) for size in below}
            return {**shares, now: 1 - sum(shares.values())}
        drawn = sizes
        if self.kind == "easy_to_hard":
            drawn = sizes[: max(1, len(sizes) * (len(self.seen) + 1) // self.looks)]
        return {source_name(name, size): 1 / len(drawn) for size in drawn}


def source_name(family: str, size: int, hints: int = 0) -> str:
    return f"{family} {size}" + (f" with {hints} given" if hints else "")


def generalised_late(seen: Sequence[Looked], asked: float = ASKED) -> int | None:
    """The look at which success on unseen items jumped, long after training began: the first look
    above what is asked, if half of all looks before it were below half of that; None otherwise."""
    means = [float(np.mean([v for own in look.values() for v in own.values()])) for look in seen]
    first = next((i for i, mean in enumerate(means) if mean >= asked), None)
    if first is None or first < len(means) // 2:
        return None
    return first if all(mean < asked / 2 for mean in means[: max(1, first - 1)]) else None
