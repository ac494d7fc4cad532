"""Thoughts of its own about items that are longer than what it was taught, chosen without answers.

`split`: the model solves an item in two pieces of lengths that it knows, the second from where its
own first one ended, and does so for two different cuts; joined thoughts on which both agree are
kept. How a family is split is knowledge of the task, and is said to be. `verified`: thoughts whose
answer is right; `voted`: thoughts whose answer most of the samples give. Both stand beside it as
alternatives: they keep right answers behind wrong steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from agent_forge.data import traces
from agent_forge.data.tasks import Task, is_right
from agent_forge.data.tasks.reasoning import machine, piece
from agent_forge.data.traces import Trace
from agent_forge.evals.model_under_test import EVERY_STEP
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer import thinking
from agent_forge.infer.generate import SamplingSettings
from agent_forge.model.opened import ForgeModel
from agent_forge.train.config import STEP

TEMPERATURE = 1.0  # of samples that are verified or voted on


class Worked(NamedTuple):
    """A thought of the model's own: its claims, and the answer that it came to."""

    claims: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class OwnThoughts:
    """Thoughts that were kept, of how many items. `right` is told and used for nothing."""

    traces: list[Trace]
    asked: int
    right: int  # kept thoughts that a program finds right in every step

    @property
    def agreement(self) -> float:
        return len(self.traces) / self.asked if self.asked else 0.0


def by_splitting(thinker: Thinker, items: Sequence[Task], known: tuple[int, int]) -> OwnThoughts:
    """Thoughts on which two cuts into pieces of known lengths agree."""
    cuts = {n: _cuts(len(machine(item).labels), *known) for n, item in enumerate(items)}
    both = {n: cut for n, cut in cuts.items() if cut}
    asked = [items[n] for n in both]
    first, second = (_joined(thinker, asked, [cut[n] for cut in both.values()]) for n in (0, 1))
    agreed = [one if one and one == two else None for one, two in zip(first, second, strict=True)]
    return _kept(asked, agreed, len(items))


def by_verifier(thinker: Thinker, items: Sequence[Task], samples: int, seed: int) -> OwnThoughts:
    """The first sample of each item whose answer is right."""
    kept: list[Worked | None] = []
    for item, own in zip(items, _samples(thinker, items, samples, seed), strict=True):
        kept.append(next((w for w in own if w.claims and is_right(item, w.answer)), None))
    return _kept(items, kept, len(items))


def by_vote(thinker: Thinker, items: Sequence[Task], samples: int, seed: int) -> OwnThoughts:
    """The first sample of each item with the answer that more than half of them give."""
    kept: list[Worked | None] = []
    for own in _samples(thinker, items, samples, seed):
        answer, votes = Counter(worked.answer for worked in own).most_common(1)[0]
        chosen = (w for w in own if w.claims and w.answer == answer)
        kept.append(next(chosen, None) if 2 * votes > len(own) else None)
    return _kept(items, kept, len(items))


def _kept(items: Sequence[Task], found: Sequence[Worked | None], asked: int) -> OwnThoughts:
    kept = [(item, worked) for item, worked in zip(items, found, strict=True) if worked]
    right = sum(
        worked.claims == traces.write_trace(item, STEP, Random(0)).claims
        and is_right(item, worked.answer)
        for item, worked in kept
    )
    own = [Trace(replace(item, answer=w.answer), STEP, w.claims) for item, w in kept]
    return OwnThoughts(own, asked, right)


def _cuts(length: int, low: int, high: int) -> tuple[int, int] | None:
    """Two places to cut a length into two pieces from `low` to `high`; None without two."""
    places = range(max(low, length - high), min(high, length - low) + 1)
    return (places[len(places) // 2], places[-1 if len(places) > 2 else 0]) if places[1:] else None


def _joined(thinker: Thinker, items: Sequence[Task], places: Sequence[int]) -> list[Worked | None]:
    """What the model makes of each item in two pieces, one after the other."""
    begun = [piece(item, 0, place) for item, place in zip(items, places, strict=True)]
    first = _worked(thinker, begun)
    rest = [
        piece(item, place, len(machine(item).labels), worked.answer) if worked else None
        for item, place, worked in zip(items, places, first, strict=True)
    ]
    second = _worked(thinker, rest)
    return [
        Worked((*one.claims, *two.claims), two.answer) if one and two else None
        for one, two in zip(first, second, strict=True)
    ]


def _worked(thinker: Thinker, pieces: Sequence[Task | None]) -> list[Worked | None]:
    """The thought and the answer of every piece that there is."""
    asked = [own for own in pieces if own is not None]
    if not asked:
        return [None] * len(pieces)
    thoughts = thinker.think(asked, STEP)
    answers = thinker.answers(asked, thoughts)
    told = (thinking.shown(thinker.tokenizer, ids, specials=True) for ids in thoughts)
    found = iter([Worked(traces.parse(t)[1], a) for t, a in zip(told, answers, strict=True)])
    return [next(found) if own is not None else None for own in pieces]


def _samples(
    thinker: Thinker, items: Sequence[Task], samples: int, seed: int
) -> list[list[Worked]]:
    """So many thoughts about each item as it is, with their answers."""
    how = SamplingSettings(
        thinker.room(items),
        temperature=TEMPERATURE,
        seed=seed,
        stop_tokens=ForgeModel.end_tokens,
        halt_threshold=EVERY_STEP,
    )
    tag = traces.TAGS[STEP]
    prompts = thinker.prompts(items)
    found = thinking.think(thinker.network, prompts, how, tag=tag, samples=samples)
    thoughts = [thought.tokens for thought in found]
    repeated = [item for item in items for _ in range(samples)]
    answers = thinker.answers(repeated, thoughts)
    told = (thinking.shown(thinker.tokenizer, ids, specials=True) for ids in thoughts)
    worked = [Worked(traces.parse(t)[1], a) for t, a in zip(told, answers, strict=True)]
    return [worked[i : i + samples] for i in range(0, len(worked), samples)]
