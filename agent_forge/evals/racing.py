"""Racing: a candidate that has fallen behind the champion is not measured to the end.

The items of every domain are measured in growing shards, in an order of their own hash. After each
shard the candidate is compared with the champion on the items that both were measured on: fitness
is a sum over items but for its bounds, so the paired differences give an estimate for all items,
with a standard error that reaches zero at the last one. A candidate that is below the champion by
`SURE` standard errors is dropped with the estimate as its score. Every winner is fully measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_forge.evals.domains import Domain, content_hash
from agent_forge.evals.likelihood import ItemScores

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the items, at the end of each shard
SURE = 1.0  # more of them save little and find nothing better (docs/evomerge.md)
LEAST = 8  # items of a domain before anything is concluded from them
PartialResult = tuple[list[int], ItemScores]  # the measured examples and their scores


@dataclass(frozen=True)
class Incumbent:
    """The champion to beat: its fitness, and its result for each item of every domain."""

    key: str
    fitness: float
    right: list[list[bool]]
    loss: list[list[float]]
    bonus: float = 0.0  # in its fitness, for needing less than the parents


def shards(domain: Domain) -> list[list[int]]:
    """The examples of each shard; those of a small domain are all in the last one."""
    order = _order(domain)
    ends = [round(share * len(order)) for share in SHARES]
    if ends[0] < LEAST:
        return [[] for _ in SHARES[1:]] + [order]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def first_examples(domain: Domain) -> list[int]:
    """The examples of the first shard, and at least `LEAST`."""
    order = _order(domain)
    return order[: max(LEAST, round(SHARES[0] * len(order)))]


def _order(domain: Domain) -> list[int]:
    return sorted(range(len(domain.examples)), key=lambda i: content_hash(domain.examples[i]))


def gains_over(
    incumbent: Incumbent,
    domain: int,
    results: Sequence[PartialResult],
    per_nat: float,
    per_answer: float,
) -> NDArray[np.float64]:
    """The fitness that a candidate gained on the incumbent at each measured item of a domain."""
    right, loss = incumbent.right[domain], incumbent.loss[domain]
    gains = [
        per_nat * (loss[i] - own_loss) + per_answer * (own_right - right[i])
        for examples, scores in results
        for i, own_loss, own_right in zip(examples, scores.loss, scores.right, strict=True)
    ]
    return np.array(gains)


def estimate(gains: Sequence[NDArray[np.float64]], totals: Sequence[int]) -> tuple[float, float]:
    """The fitness that a candidate is ahead by on all items, and the standard error of that.

    `gains` has those of the measured items, domain by domain; `totals` counts all items.
    """
    value = variance = 0.0
    for own, total in zip(gains, totals, strict=True):
        measured = len(own)
        if not measured:
            return 0.0, math.inf
        value += total * float(own.mean())
        if measured < total:
            variance += total**2 * (1 - measured / total) * float(own.var(ddof=1)) / measured
    return value, math.sqrt(variance)


def has_lost(value: float, error: float) -> bool:
    return value + SURE * error < 0


def join_shards(results: Sequence[PartialResult], count: int) -> ItemScores:
    """The scores of all shards as one, in the order of the examples."""
    rows: list[Any] = [None] * count
    for examples, scores in results:
        values = zip(scores.right, scores.loss, scores.tokens, scores.steps, strict=True)
        for i, row in zip(examples, values, strict=True):
            rows[i] = row
    return ItemScores(*(list(column) for column in zip(*rows, strict=True)))
