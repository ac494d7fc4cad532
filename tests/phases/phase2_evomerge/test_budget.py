"""What fits into a time budget: plans from numbers alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_forge.errors import ConfigError
from agent_forge.phases.phase2_evomerge import budget
from agent_forge.phases.phase2_evomerge.budget import (
    EvaluationCosts,
    EvolutionPlan,
    Planner,
    SearchShape,
)

SHAPE = SearchShape(3, 7, 8, 8, True, 1.5)
ITEMS = {
    "selection": {"maths": 322, "code": 262},
    "holdout": {"maths": 88, "code": 81},
    "verdict": {"maths": 190, "code": 167},
}
COSTS = EvaluationCosts(1500.0, 700.0, 1.0, 5.0, 2.0, {"maths": 193.0, "code": 126.0}, ITEMS)


def draw(rng: random.Random) -> tuple[EvaluationCosts, SearchShape]:
    """Numbers of some machine, models and data."""
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    items = {s: {n: rng.choice([20, 63, 64, 300, 2000]) for n in names} for s in ITEMS}
    rate = 10 ** rng.uniform(2, 5)
    times = (10 ** rng.uniform(-3, 1) for _ in range(3))
    tokens = {name: rng.uniform(10, 500) for name in names}
    costs = EvaluationCosts(rate, rate * rng.uniform(0.4, 1), *times, tokens, items)
    raced, gradients = rng.random() < 0.7, rng.choice([0.0, 1.5])
    shape = SearchShape(
        3, 7, rng.choice([4, 8, 16]), 8, raced, gradients, 0.2 * (rng.random() < 0.3)
    )
    return costs, shape


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_fits_grows_with_the_minutes_and_stays_within_the_data(seed: int) -> None:
    rng = random.Random(seed)
    costs, shape = draw(rng)
    before: EvolutionPlan | None = None
    for minutes in sorted(10 ** rng.uniform(-1, 4) for _ in range(25)):
        try:
            plan = Planner(costs, shape).plan(minutes, spent_s=3.0)
        except ConfigError:
            assert before is None  # whoever had enough time has enough with more of it
            continue
        found = plan.fitness_subset_size, plan.max_evaluations
        planner = Planner(costs, shape)
        assert planner.search_seconds(found[1], found[0]) <= plan.search_s
        assert planner.verdict_seconds(plan.verdict_items) <= plan.verdict_s * (1 + 1e-9)
        parts = plan.search_s + plan.verdict_s + plan.heal_s + plan.spent_s
        assert parts == pytest.approx(60 * minutes)
        least = Planner(costs, shape).verdict_seconds(min(20, costs.most("verdict")))
        assert plan.verdict_s <= max(60 * minutes / 5, least) * (1 + 1e-9)
        assert plan.verdict_items >= min(20, costs.most("verdict"))
        for split, count in (("selection", found[0]), ("verdict", plan.verdict_items)):
            assert count <= max(costs.items[split].values())
        assert shape.least_evaluations <= plan.max_evaluations <= budget.MOST_EVALUATIONS
        covered = shape.whole + shape.population * plan.generations
        assert plan.max_evaluations <= covered
        if before is not None:
            for name in budget.FIELDS:
                assert getattr(plan, name) >= getattr(before, name), name
        before = plan
    assert before is not None


def test_more_items_come_before_more_candidates_than_enough() -> None:
    few, some, many = (Planner(COSTS, SHAPE).plan(minutes) for minutes in (12, 60, 2000))
    assert few.fitness_subset_size < some.fitness_subset_size < 322 == many.fitness_subset_size
    assert few.max_evaluations <= some.max_evaluations < many.max_evaluations
    passes = SHAPE.passes(some.max_evaluations, raced=True)
    assert 60 <= passes <= 100
    assert few.verdict_items < 190 == some.verdict_items == many.verdict_items


def test_too_few_minutes_are_refused_with_those_that_it_takes() -> None:
    with pytest.raises(ConfigError, match="1 minutes are too few") as refused:
        Planner(COSTS, SHAPE).plan(1)
    needed = int(str(refused.value.hint).split()[2])
    assert Planner(COSTS, SHAPE).plan(needed).fitness_subset_size >= 20
    with pytest.raises(ConfigError):
        Planner(COSTS, SHAPE).plan(needed - 1)


def test_given_settings_stay() -> None:
    def plan(**fixed: int) -> EvolutionPlan:
        return Planner(COSTS, SHAPE, fixed).plan(60)

    assert plan(fitness_subset_size=50).fitness_subset_size == 50
    assert plan(verdict_items=33).verdict_items == 33
    thirty = plan(max_evaluations=30)
    assert thirty.max_evaluations == 30 and thirty.fitness_subset_size > plan().fitness_subset_size
    short = plan(generations=2)
    assert short.generations == 2 and short.max_evaluations <= 4 + 8 + 2 * 8
    assert plan(generations=0).max_evaluations == 12


def test_a_raised_budget_keeps_the_items() -> None:
    plan = Planner(COSTS, SHAPE).plan(60, spent_s=5.0)
    kept = {name: plan.settings[name] for name in ("fitness_subset_size", "verdict_items")}
    more = Planner(COSTS, SHAPE, kept).plan(120, plan.spent_s)
    same: tuple[str, ...] = ("fitness_subset_size", "verdict_items", "spent_s", "costs")
    assert all(getattr(more, name) == getattr(plan, name) for name in same)
    assert more.max_evaluations > plan.max_evaluations and more.search_s > plan.search_s
    assert EvolutionPlan.from_json(more.to_json(), Path()) == more


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_s": 3000.0},
        {"exact_tokens_per_s": 1400.0},
        {"merge_s": 0.1},
        {"combo_s": 1.0},
        {"open_s": 0.1},
    ],
)
def test_whatever_is_faster_leaves_more_time(change: dict[str, Any]) -> None:
    quick = replace(COSTS, **change)
    plans = [Planner(costs, SHAPE).plan(30) for costs in (COSTS, quick)]
    assert plans[1] != replace(plans[0], costs=quick)
    planners = (Planner(costs, SHAPE) for costs in (COSTS, quick))
    spent = [p.search_seconds(80, 100) + p.verdict_seconds(100) for p in planners]
    assert spent[1] < spent[0] and math.isfinite(spent[0])
