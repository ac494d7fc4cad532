"""Thoughts of its own about items that are longer than what it was taught, chosen without answers.

`split`: the model solves an item in two pieces of lengths that it knows, the second from where its
own first one ended, and does so for two different cuts; joined thoughts on which both agree are
kept. How a family is split is knowledge of the task, and is said to be. `verified`: thoughts whose
answer is right; `voted`: thoughts whose answer most of the samples give. Both stand beside it as
alternatives: they keep right answers behind wrong steps. Of code, programs are kept instead: those
that pass their tests.
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
from agent_forge.evals import graders
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
    """Thoughts on which two cuts into pieces of known lengths agree; of items that have two."""
    cuts = [cuts_of(len(machine(item).labels), *known) for item in items]
    asked = [item for item, cut in zip(items, cuts, strict=True) if cut]
    if not asked:
        return OwnThoughts([], 0, 0)
    places = zip(*(cut for cut in cuts if cut), strict=True)
    first, second = (_joined(thinker, asked, place) for place in places)
    agreed = [one if one == two else None for one, two in zip(first, second, strict=True)]
    return _kept(asked, agreed)


def by_verifier(thinker: Thinker, items: Sequence[Task], samples: int, seed: int) -> OwnThoughts:
    """The first sample of each item whose answer is right."""
    kept: list[Worked | None] = []
    for item, own in zip(items, _samples(thinker, items, samples, seed), strict=True):
        kept.append(next((w for w in own if w.claims and is_right(item, w.answer)), None))
    return _kept(items, kept)


def by_vote(thinker: Thinker, items: Sequence[Task], samples: int, seed: int) -> OwnThoughts:
    """The first sample of each item with the answer that more than half of them give."""
    kept: list[Worked | None] = []
    for own in _samples(thinker, items, samples, seed):
        answer, votes = Counter(worked.answer for worked in own).most_common(1)[0]
        chosen = (w for w in own if w.claims and w.answer == answer)
        kept.append(next(chosen, None) if 2 * votes > len(own) else None)
    return _kept(items, kept)


def by_running(thinker: Thinker, items: Sequence[Task], samples: int, seed: int) -> OwnThoughts:
    """The first program of each item, of so many, that passes its tests in the sandbox; it stands
    as the answer, without claims."""
    tokens = 2 * max(len(thinker.tokenizer.encode(item.answer)) for item in items)
    prompts, how = thinker.prompts(items), _sampling(tokens, seed)
    found = thinking.answer(thinker.network, prompts, None, how, samples=samples)
    kept = []
    for number, item in enumerate(items):
        whole = [t for t in found[number * samples : (number + 1) * samples] if not t.truncated]
        texts = (thinking.shown(thinker.tokenizer, text.tokens) for text in whole)
        tried = dict.fromkeys(graders.program_of(item, text) for text in texts)
        passed = next((program for program in tried if graders.code(item, program)), None)
        if passed is not None:
            kept.append(Trace(replace(item, answer=passed), STEP, ()))
    return OwnThoughts(kept, len(items), len(kept))


def _kept(items: Sequence[Task], found: Sequence[Worked | None]) -> OwnThoughts:
    kept = [(item, worked) for item, worked in zip(items, found, strict=True) if worked]
    gold = (traces.write_trace(item, STEP, Random(0)).claims for item, _ in kept)
    right = sum(
        w.claims == claims and is_right(item, w.answer)
        for (item, w), claims in zip(kept, gold, strict=True)
    )
    own = [Trace(replace(item, answer=w.answer), STEP, w.claims) for item, w in kept]
    return OwnThoughts(own, len(items), right)


def cuts_of(length: int, low: int, high: int) -> tuple[int, int] | None:
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
    """The thought and the answer of every piece that there is, if it has all steps."""
    asked = [own for own in pieces if own is not None]
    if not asked:
        return [None] * len(pieces)
    found = iter(_read(thinker, asked, thinker.think(asked, STEP)))
    worked = [next(found) if own is not None else None for own in pieces]
    return [
        w if w and own and len(w.claims) == len(machine(own).labels) else None
        for w, own in zip(worked, pieces, strict=True)
    ]


def _read(thinker: Thinker, items: Sequence[Task], thoughts: Sequence[list[int]]) -> list[Worked]:
    """The claims of thoughts, and the answers that follow them."""
    told = (thinking.shown(thinker.tokenizer, ids, specials=True) for ids in thoughts)
    answers = thinker.answers(items, thoughts)
    return [Worked(traces.parse(t)[1], a) for t, a in zip(told, answers, strict=True)]


def _samples(
    thinker: Thinker, items: Sequence[Task], samples: int, seed: int
) -> list[list[Worked]]:
    """So many thoughts about each item as it is, with their answers."""
    how = _sampling(thinker.room(items), seed)
    tag, prompts = traces.TAGS[STEP], thinker.prompts(items)
    found = thinking.think(thinker.network, prompts, how, tag=tag, samples=samples)
    repeated = [item for item in items for _ in range(samples)]
    worked = _read(thinker, repeated, [thought.tokens for thought in found])
    return [worked[i : i + samples] for i in range(0, len(worked), samples)]


def _sampling(tokens: int, seed: int) -> SamplingSettings:
    return SamplingSettings(
        tokens,
        temperature=TEMPERATURE,
        seed=seed,
        stop_tokens=ForgeModel.end_tokens,
        halt_threshold=EVERY_STEP,
    )
