"""The edge of ability: items of a family by size, whether they are solved, and which are drawn.

With worked thoughts an item is solved if every token that is learned is the likeliest one: greedy
generation would write just that, at twice the cost. Code is written and run in the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from agent_forge.data import tasks, traces
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import CurriculumStage, Mix, TokenizedDataset, TokenizedItem
from agent_forge.data.tasks import Task
from agent_forge.data.tasks.reasoning import ADVANCE
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals import graders
from agent_forge.evals.ability import ASKED, Asked
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.config import STEP
from agent_forge.train.lessons import trace_item

LOW, HIGH = 0.55, ASKED  # success at which the controller stays where it is
MASTERED = 3  # looks in a row above that
WALL = 0.5  # success, after all hints were given in training, below which it goes no further
HINTS = (0, 1, 3, 5)  # first claims of a thought that are given in training
BEHIND_SHARE = 0.2  # of the draws of the controller, that go to sizes it has mastered
TRIED = 20  # items of a size, whether they fit into a row


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
    def is_code(self) -> bool:
        """True if its answers are programs: other ones than ours may be right."""
        return tasks.FAMILIES[self.name].accept is None

    @property
    def unit(self) -> str:
        return _size_of(self.name).unit

    @property
    def beyond(self) -> list[int]:
        """The sizes that it was not taught."""
        return [size for size in self.sizes if size > self.taught[1]]

    def up_to(self, most: int) -> range:
        """All sizes from the smallest that it was taught to another, as far as there are any."""
        return range(self.taught[0], min(most, _size_of(self.name).most) + 1)

    def task(self, size: int, split: str, number: int) -> Task:
        level = _size_of(self.name).level(size)
        return tasks.make(self.name, split, number, seed=self.seed, level=level)

    def item(self, task: Task, hints: int = 0) -> TokenizedItem:
        """A task with its thought or answer; the first claims may be given instead of learned."""
        if not self.thinks:
            documents, masks = tokenise(self.tokenizer, [tasks.as_example(task)])
            return TokenizedItem(documents[0], masks[0])
        trace = traces.write_trace(task, STEP, Random(0))
        item = trace_item(self.tokenizer, trace)
        if not hints:
            return item
        given = replace(trace, claims=trace.claims[: min(hints, len(trace.claims) - 1)])
        begins = item.asked.index(True) + 1  # behind the mark of a thought
        start = begins + len(self.tokenizer.compose(*given.parts()))
        return TokenizedItem(item.ids, [own and i >= start for i, own in enumerate(item.asked)])

    def source(self, name: str, asked: Sequence[Asked], hints: int = 0) -> TokenizedDataset:
        """Worked examples of items by size and number."""
        items = [self.item(self.task(size, "train", n), hints) for size, n in asked]
        return TokenizedDataset(name, [i.ids for i in items], [i.asked for i in items])

    def scores(self, model: ForgeNetwork, split: str, asked: Sequence[Asked]) -> ItemScores:
        """The scores of a model on items of a split, by size and number."""
        found = [self.task(size, split, number) for size, number in asked]
        items = [self.item(task) for task in found]
        scores = measure(model, items, threshold=EVERY_STEP)
        if self.is_code:
            most = 2 * max(len(item.ids) for item in items)
            written = Thinker(model, self.tokenizer).answers(found, None, most)
            graded = zip(found, written, strict=True)
            return replace(scores, right=[float(graders.code(*pair)) for pair in graded])
        return scores

    def solved(self, model: ForgeNetwork, split: str, asked: Sequence[Asked]) -> list[bool]:
        return [bool(right) for right in self.scores(model, split, asked).right]


def _size_of(family: str) -> tasks.Size:
    size = tasks.FAMILIES[family].size
    assert size is not None, "settings refuse families without sizes"
    return size


def edge_tasks(
    name: str, levels: Sequence[int], max_level: int, tokenizer: Tokenizer, seed: int
) -> EdgeTasks:
    """A family with the sizes that it was taught: those in the model's record, or of old tasks."""
    of = _size_of(name)
    taught = (levels[0], levels[1]) if levels else (of.smallest, of.at(max_level))
    return EdgeTasks(name, taught, range(taught[0], taught[1] + 1), tokenizer, seed)


def with_larger_sizes(own: EdgeTasks, most: int, row_tokens: int) -> EdgeTasks:
    """The family up to a size, or to the largest whose items fit into a row."""
    fitting = own.taught[1] - 1
    for size in own.up_to(most)[own.taught[1] - own.taught[0] :]:
        items = (own.item(own.task(size, "train", n)) for n in range(TRIED))
        if max(len(item.ids) for item in items) >= row_tokens:
            break
        fitting = size
    if fitting < own.taught[1]:
        problem = f"items of {own.taught[1]} {own.unit} do not fit rows of {row_tokens} tokens"
        raise ConfigError(f"{own.name}: {problem}", hint="larger row_tokens of the phase")
    return replace(own, sizes=range(own.taught[0], fitting + 1))


Looked = dict[str, dict[str, float]]  # family -> size, as JSON has it -> share that is solved


@dataclass
class _Place:
    """Where the controller is in a family."""

    at: int = 0  # of its sizes
    hints: int = 0  # of HINTS
    streak: int = 0
    wall: bool = False

    def observe(self, success: float, last: int, most_hints: int) -> None:
        self.streak = self.streak + 1 if success >= HIGH and not self.hints else 0
        self.wall = self.hints == most_hints and success < WALL
        if success >= HIGH and self.hints:
            self.hints -= 1
        elif self.streak == MASTERED and self.at < last:
            self.at, self.streak = self.at + 1, 0
        elif success < LOW:
            self.hints = min(self.hints + 1, most_hints)


@dataclass
class EdgeDraw:
    """Which sizes beyond the edge are drawn as training goes on. It is a curriculum, and what looks
    at the model meanwhile; its state is what it has seen."""

    kind: str
    base: Mix  # weights of everything else; those of the edge make up for what is missing to 1
    sizes: Mapping[str, Sequence[int]]  # beyond the edge, by family
    hinted: frozenset[str]  # families whose thoughts can be given in part
    look: Callable[[Mapping[str, Sequence[int]], int], tuple[float, Looked]]
    steps: int
    row_tokens: int
    looks: int = 10
    seen: list[Looked] = field(default_factory=list)
    ended: bool = field(init=False, default=False)
    stages: list[CurriculumStage] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.every_steps = max(1, self.steps // self.looks)
        self.load_state_dict({"seen": self.seen})

    def at(self, step: int, total: int) -> CurriculumStage:
        return self.stages[min(step // self.every_steps, len(self.stages) - 1)]

    def update(self) -> float:
        """Look at the model, and draw accordingly from now on; returns its loss there."""
        loss, seen = self.look(self._watched(), len(self.seen))
        self._observe(seen)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._places, self.seen = {name: _Place() for name in self.sizes}, []
        self.stages = [self._stage()]
        for seen in state["seen"]:
            self._observe(seen)

    @property
    def walls(self) -> dict[str, int]:
        """The families that went no further although all hints were given, and at which size."""
        places = self._places.items() if self.kind == "controller" else ()
        return {name: self.sizes[name][place.at] for name, place in places if place.wall}

    def _observe(self, seen: Looked) -> None:
        self.seen.append(seen)
        for name, place in self._places.items():
            sizes, hints = self.sizes[name], len(HINTS) - 1 if name in self.hinted else 0
            if (success := seen.get(name, {}).get(str(sizes[place.at]))) is not None:
                place.observe(success, len(sizes) - 1, hints)
        new = self._stage()
        self.stages.append(self.stages[-1] if new == self.stages[-1] else new)

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
            behind = sizes[: place.at]
            shares = {source_name(name, size): BEHIND_SHARE / len(behind) for size in behind}
            return {**shares, now: 1 - sum(shares.values())}
        drawn = sizes
        if self.kind == "easy_to_hard":
            drawn = sizes[: max(1, len(sizes) * (len(self.seen) + 1) // self.looks)]
        return {source_name(name, size): 1 / len(drawn) for size in drawn}


def source_name(family: str, size: int, hints: int = 0) -> str:
    return f"{family} {size}" + (f" with {hints} given" if hints else "")


def generalised_late(seen: Sequence[Looked], asked: float = ASKED) -> int | None:
    """The look at which success on unseen items jumped: the first above what is asked, if it is in
    the second half and all but the one before it were below half of that; None otherwise."""
    means = [float(np.mean([v for own in look.values() for v in own.values()])) for look in seen]
    first = next((i for i, mean in enumerate(means) if mean >= asked), None)
    if first is None or first < len(means) // 2:
        return None
    return first if all(mean < asked / 2 for mean in means[: max(1, first - 1)]) else None
