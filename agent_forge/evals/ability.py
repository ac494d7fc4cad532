"""How far an ability reaches: the largest size of which three of four items are solved.

Success is taken to fall with the size, by a logistic curve or by a share a step, below some lapses.
After a look at every size, each further batch is of the size that tells most about that curve; the
result is the posterior of the size at which it crosses three quarters. A smaller size that is
clearly below that is a hole, and the ability ends in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

ASKED = 0.75  # share of items that are to be solved
SLOPES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # sizes over which success falls
LAPSES = (0.0, 0.05, 0.1, 0.2)  # that happen at any size
FINENESS = 0.5  # of sizes, between two curves
OUTSIDE = (10, 30)  # sizes below and above those that are asked, where a curve may have its middle
QUANTILES = (0.05, 0.5, 0.95)  # of the posterior: low, the reach, high
SURE = 0.95  # that no size is taken for a hole by chance
SCANNED, BATCH = 8, 8  # items of every size at first; of a further look
BELIEVED = 48  # items of a size before it is believed to be a hole
Floats = NDArray[np.float64]
Asked = tuple[int, int]  # a size, and the number of an item of it
Solves = Callable[[Sequence[Asked]], Sequence[bool]]


@dataclass(frozen=True)
class Ability:
    """The largest size that is mastered (one below the smallest: none), with its interval."""

    reach: int
    low: int
    high: int
    tried: dict[int, tuple[int, int]]  # by size: solved, asked

    @property
    def items(self) -> int:
        return sum(asked for _, asked in self.tried.values())


def find_ability(solves: Solves, sizes: Sequence[int], items: int = 96) -> Ability:
    """Look at every size, then ask `items` further ones where they tell most."""
    tried = dict.fromkeys(sizes, (0, 0))
    _ask(solves, [(size, number) for size in sizes for number in range(SCANNED)], tried)
    curves = _curves(sizes)
    for _ in range(0, items, BATCH):
        weights = _posterior(curves, sizes, tried)
        size = sizes[int(np.argmax(_information(curves, weights)))]
        first = tried[size][1]
        _ask(solves, [(size, first + number) for number in range(BATCH)], tried)
    while (hole := _first_hole(tried, sizes)) in tried and tried[hole][1] < BELIEVED:
        first = tried[hole][1]  # a few items may fail by chance
        _ask(solves, [(hole, first + number) for number in range(BATCH)], tried)
    reaches = _reaches(sizes)
    weights = _posterior(curves, sizes, tried)
    low, middle, high = (_quantile(reaches, weights, share) for share in QUANTILES)
    end = hole - 1
    return Ability(min(middle, end), min(low, end), min(high, end), tried)


def _ask(solves: Solves, asked: Sequence[Asked], tried: dict[int, tuple[int, int]]) -> None:
    for (size, _), right in zip(asked, solves(asked), strict=True):
        solved, count = tried[size]
        tried[size] = solved + bool(right), count + 1


def _curves(sizes: Sequence[int]) -> Floats:
    """Success at every size (columns) of every curve that is thought possible (rows): logistic
    ones, and powers of a step's success, each below some lapses."""
    before, after = OUTSIDE  # a gentle curve has its middle far from where it is looked at
    every = np.array(sizes, dtype=np.float64)
    middles = np.arange(sizes[0] - before, sizes[-1] + after, FINENESS)
    rows = [1 / (1 + np.exp(-np.clip((middles[:, None] - every) / s, -50, 50))) for s in SLOPES]
    rows.append(ASKED ** (every / middles[middles > 0][:, None]))
    return np.concatenate([(1 - lapse) * own for own, lapse in product(rows, LAPSES)])


def _reaches(sizes: Sequence[int]) -> Floats:
    """The largest size at which each curve is above what is asked; one below the first if none."""
    above = _curves(sizes) >= ASKED
    return np.asarray(np.where(above, np.array(sizes), sizes[0] - 1).max(axis=1), np.float64)


def _posterior(
    curves: Floats, sizes: Sequence[int], tried: Mapping[int, tuple[int, int]]
) -> Floats:
    solved, asked = np.array([tried[size] for size in sizes], dtype=np.float64).T
    p = np.clip(curves, 1e-6, 1 - 1e-6)
    log = (solved * np.log(p) + (asked - solved) * np.log(1 - p)).sum(axis=1)
    weights = np.exp(log - log.max())
    return np.asarray(weights / weights.sum())


def _information(curves: Floats, weights: Floats) -> Floats:
    """Bits about the curve that one item of each size is expected to give."""

    def entropy(p: Floats) -> Floats:
        p = np.clip(p, 1e-12, 1 - 1e-12)
        return np.asarray(-p * np.log2(p) - (1 - p) * np.log2(1 - p))

    return np.asarray(entropy(weights @ curves) - weights @ entropy(curves))


def _quantile(values: Floats, weights: Floats, share: float) -> int:
    order = np.argsort(values, kind="stable")
    place = int(np.searchsorted(np.cumsum(weights[order]), share))
    return int(values[order][min(place, len(values) - 1)])


def _first_hole(tried: Mapping[int, tuple[int, int]], sizes: Sequence[int]) -> int:
    """The smallest size at which, by its own items alone, success is surely below what is asked;
    behind the largest if there is none."""
    grid = np.linspace(0.0005, 0.9995, 1000)
    for size in sizes:
        solved, asked = tried[size]
        log = solved * np.log(grid) + (asked - solved) * np.log(1 - grid)
        density = np.exp(log - log.max())
        if density[grid >= ASKED].sum() <= (1 - SURE) / len(sizes) * density.sum():
            return size
    return sizes[-1] + 1
