"""Racing: a candidate that has fallen behind the champion is not measured to the end.

Every domain's items are met in growing shares, in an order of their own hash. After each share the
candidate is compared with the champion on the items both have met: fitness is a sum over items but
for its bounds, so the paired differences give an estimate for the whole set, with a standard error
that shrinks to nothing as the last item is met. Who is below the champion by `SURE` standard errors
is dropped, with the estimate as its score. Whoever wins was measured on everything.
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

SHARES = (0.125, 0.25, 0.5, 1.0)
SURE = 1.0  # more of them save little and find nothing better (docs/evomerge.md)
LEAST = 8  # items of a domain before anything is concluded from them
PartialResult = tuple[list[int], ItemScores]  # which examples, and what came out for them


@dataclass(frozen=True)
class Incumbent:
    """The champion to beat: its fitness, and what came out for each item of every domain."""

    key: str
    fitness: float
    right: list[list[bool]]
    loss: list[list[float]]
    bonus: float = 0.0  # in its fitness, for needing less than the parents


def shards(domain: Domain) -> list[list[int]]:
    """Which examples of a domain each share adds; a small domain is met as a whole at the end."""
    order = _order(domain)
    ends = [round(share * len(order)) for share in SHARES]
    if ends[0] < LEAST:
        return [[] for _ in SHARES[1:]] + [order]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def first(domain: Domain) -> list[int]:
    """The examples of the first share; of a small domain the least that says anything."""
    order = _order(domain)
    return order[: max(LEAST, round(SHARES[0] * len(order)))]


def _order(domain: Domain) -> list[int]:
    return sorted(range(len(domain.examples)), key=lambda i: content_hash(domain.examples[i]))


def ahead(
    met: Sequence[PartialResult], domain: int, of: Incumbent, a_nat: float, an_answer: float
) -> NDArray[np.float64]:
    """The fitness that a candidate gained on the champion at each item it has met."""
    gains = [
        a_nat * (of.loss[domain][i] - loss) + an_answer * (right - of.right[domain][i])
        for where, outcome in met
        for i, loss, right in zip(where, outcome.loss, outcome.right, strict=True)
    ]
    return np.array(gains)


def estimate(gains: Sequence[NDArray[np.float64]], totals: Sequence[int]) -> tuple[float, float]:
    """The fitness that a candidate is ahead on all items, and the standard error of that.

    `gains` has those of the items met so far, domain by domain; `totals` counts all items.
    """
    value = variance = 0.0
    for mine, total in zip(gains, totals, strict=True):
        met = len(mine)
        if not met:
            return 0.0, math.inf
        value += total * float(mine.mean())
        if met < total:
            variance += total**2 * (1 - met / total) * float(mine.var(ddof=1)) / met
    return value, math.sqrt(variance)


def lost(value: float, error: float) -> bool:
    return value + SURE * error < 0


def joined(met: Sequence[PartialResult], count: int) -> ItemScores:
    """The outcomes of all shares as one, in the order of the examples."""
    rows: list[Any] = [None] * count
    for where, outcome in met:
        values = zip(outcome.right, outcome.loss, outcome.tokens, outcome.steps, strict=True)
        for i, row in zip(where, values, strict=True):
            rows[i] = row
    return ItemScores(*(list(column) for column in zip(*rows, strict=True)))
