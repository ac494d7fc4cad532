"""Racing: a candidate that cannot become champion is not measured to the end.

Every domain's items are met in growing shares, in an order of their own hash. After each share the
candidate is compared with the champion on the items both have met: fitness is a sum over items but
for its bounds, so the paired differences give an estimate for the whole set, with a standard error
that shrinks to nothing as the last item is met. Who is below the champion by `SURE` standard errors
is dropped, with the estimate as its score. Whoever wins was measured on everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_forge.evals.domains import Domain, content_hash
from agent_forge.evals.likelihood import Outcome

SHARES = (0.125, 0.25, 0.5, 1.0)
SURE = 3.0
LEAST = 8  # items of a domain before anything is concluded from them


def rungs(domain: Domain) -> list[list[int]]:
    """Which examples of a domain each share adds; small domains have one share only."""
    order = sorted(range(len(domain.examples)), key=lambda i: content_hash(domain.examples[i]))
    ends = [max(round(share * len(order)), 1) for share in SHARES]
    if ends[0] < LEAST:
        return [[] for _ in SHARES[:-1]] + [order]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def estimate(
    ahead: Sequence[NDArray[np.float64]], totals: Sequence[int]
) -> tuple[float, float]:
    """The fitness that a candidate is ahead on all items, and the standard error of that.

    `ahead` has for every domain what it gained on each item met so far; `totals` says how many
    items the domain has.
    """
    value = variance = 0.0
    for gains, total in zip(ahead, totals, strict=True):
        met = len(gains)
        if not met:
            return 0.0, math.inf
        value += total * float(gains.mean())
        if met < total:
            spread = float(gains.var(ddof=1)) if met > 1 else math.inf
            variance += total**2 * (1 - met / total) * spread / met
    return value, math.sqrt(variance)


def lost(value: float, error: float) -> bool:
    return value + SURE * error < 0


def join(parts: Sequence[tuple[list[int], Outcome]], count: int) -> Outcome:
    """The outcomes of shares as one, in the order of the examples."""
    rows: list[tuple[bool, float, int, float]] = [(False, 0.0, 0, 0.0)] * count
    for where, outcome in parts:
        values = zip(outcome.right, outcome.loss, outcome.tokens, outcome.steps, strict=True)
        for i, row in zip(where, values, strict=True):
            rows[i] = row
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Outcome(*columns)  # type: ignore[arg-type]
