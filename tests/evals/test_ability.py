"""The adaptive test of ability: it finds the edge, tells how sure it is, and sees holes."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from agent_forge.evals.ability import ASKED, Ability, find_ability

Curve = Callable[[int], float]


def found(curve: Curve, sizes: range, seed: int = 0, items: int = 96) -> Ability:
    rng = Random(seed)
    return find_ability(lambda asked: [rng.random() < curve(s) for s, _ in asked], sizes, items)


def logistic(middle: float, slope: float, lapse: float = 0.03) -> Curve:
    return lambda size: (1 - lapse) / (1 + math.exp((size - middle) / slope))


@pytest.mark.parametrize(("middle", "slope"), [(8.0, 1.0), (12.0, 2.0), (5.5, 0.3)])
def test_the_edge_is_found_and_lies_in_its_interval(middle: float, slope: float) -> None:
    curve, sizes = logistic(middle, slope), range(2, 20)
    edge = max(size for size in sizes if curve(size) >= ASKED)
    looks = [found(curve, sizes, seed) for seed in range(30)]
    assert sum(own.low <= edge <= own.high for own in looks) >= 25
    assert sum(abs(own.reach - edge) <= 1 for own in looks) >= 25
    assert all(own.low <= own.reach <= own.high for own in looks)


@pytest.mark.parametrize(("step", "edge"), [(0.96, 7), (0.98, 14)])
def test_an_error_in_any_step_makes_a_gentle_curve(step: float, edge: int) -> None:
    """Every step has to be right, so success falls by powers: the interval has to say so."""
    looks = [found(lambda size: step**size, range(1, 21), seed) for seed in range(40)]
    assert sum(own.low <= edge <= own.high for own in looks) >= 30


@pytest.mark.parametrize(("success", "reach"), [(0.0, 1), (1.0, 9)])
def test_what_is_never_or_always_solved(success: float, reach: int) -> None:
    own = found(lambda size: success, range(2, 10))
    assert (own.reach, own.low, own.high) == (reach, reach, reach)


def test_a_hole_below_ends_the_ability() -> None:
    own = found(lambda size: 0.1 if size == 4 else float(size < 9), range(2, 14))
    assert own.reach == own.high == 3


def test_a_few_failures_by_chance_make_no_hole() -> None:
    looks = [
        found(lambda size: 0.9 if size <= 20 else 0.0, range(4, 29), seed) for seed in range(30)
    ]
    assert sum(own.reach == 20 for own in looks) >= 28


def test_items_are_asked_where_they_tell_most_and_each_once() -> None:
    asked: list[tuple[int, int]] = []

    def solves(items: object) -> list[bool]:
        asked.extend(items)  # type: ignore[call-overload]
        return [size <= 9 for size, _ in items]  # type: ignore[attr-defined]

    own = find_ability(solves, range(2, 20), 96)
    assert own.reach == 9 and own.items == len(asked) == len(set(asked)) >= 18 * 8 + 96
    extra = {size: count - 8 for size, (_, count) in own.tried.items()}
    assert sum(extra[size] for size in (8, 9, 10, 11)) > 0.7 * sum(extra.values())
