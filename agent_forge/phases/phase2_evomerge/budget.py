"""How much work fits into the time: numbers in, a plan out. No clock, no torch.

The verdict gets what it needs, at most a fifth; healing its share; the search the rest. At first
the search is to have about `AIM` passes over its items, with as many items as then fit: many items
tell more than many candidates. Where the data has no more items, more candidates are scored; where
even the fewest items leave no time for `AIM` passes, fewer are. Measuring a candidate may always
take as long as making it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from agent_forge.errors import ConfigError

AIM = 90.0  # passes over the items, or what costs as much
MOST_EVALUATIONS = 400
LEAST_ITEMS = 20  # of a domain
MOST_ITEMS = 2000  # of a domain, if nobody asks for more
VERDICT_SHARE = 0.2  # of the time, at most, unless the fewest items take more
RACED_ITEMS = 64  # of every domain: fewer are not raced
RACED_SHARE = 0.6  # of the items that a candidate meets in a race, on average (measured: 0.7)
GRADIENTS = 24  # that a search takes at most, about; one for every two candidates before
FINALISTS = 4  # passes over the holdout beside one a generation
COMPARED_S, COMPARED_ITEM_S = 0.5, 5e-4  # to compare two models, and for every item
FIELDS = ("fitness_subset_size", "verdict_items", "max_evaluations", "generations")


@dataclass(frozen=True)
class EvaluationCosts:
    """What the probe measured, and how many items there are."""

    tokens_per_s: float  # of a candidate, as the search measures it
    exact_tokens_per_s: float  # in single precision: the verdict
    merge_s: float  # to make the weights of a candidate
    combo_s: float  # of one of the eight combos
    open_s: float  # to open a model from its files
    tokens: Mapping[str, float]  # of an item, by domain
    items: Mapping[str, Mapping[str, int]]  # that there are, by split and domain

    def pass_tokens(self, split: str, items: int) -> float:
        """Tokens of so many items of every domain."""
        known = self.items.get(split, {})
        return sum(min(items, count) * self.tokens[name] for name, count in known.items())

    def most(self, split: str) -> int:
        """Items of the domain that has most."""
        return min(MOST_ITEMS, max(self.items[split].values()))


@dataclass(frozen=True)
class SearchShape:
    """What of the settings and inputs the time depends on."""

    parents: int
    verdict_models: int
    population: int
    first: int  # candidates of generation 0 that are combos
    racing: bool
    gradient_passes: float  # that a gradient costs; 0: there are none
    heal: float = 0.0  # share of the time in which the champion is healed

    @property
    def whole(self) -> int:
        """Candidates that are never raced: the parents and their average."""
        return self.parents + 1

    @property
    def least_evaluations(self) -> int:
        return self.whole + self.first + self.population

    def gradients(self, evaluations: int) -> float:
        after = max(0, evaluations - self.whole - self.first)
        return min(GRADIENTS, after / 2) if self.gradient_passes else 0.0

    def passes(self, evaluations: int, raced: bool) -> float:
        """Passes over the items that so many evaluations cost, gradients and holdout among them."""
        share = RACED_SHARE if raced else 1.0
        scored = self.whole + share * max(0, evaluations - self.whole)
        holdout = evaluations / self.population + FINALISTS
        return scored + self.gradient_passes * self.gradients(evaluations) + holdout


@dataclass(frozen=True)
class EvolutionPlan:
    """What the minutes go to."""

    minutes: float
    fitness_subset_size: int  # items of each domain
    verdict_items: int
    max_evaluations: int
    generations: int
    search_s: float  # the clock ends the search after these
    verdict_s: float
    heal_s: float
    spent_s: float  # before the search: opening the models, and the probe
    costs: EvaluationCosts

    @property
    def settings(self) -> dict[str, int]:
        """The settings that the plan decides: with them it can be repeated without a clock."""
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def passes_s(self) -> float:
        """Seconds of one pass over the items of the search."""
        tokens = self.costs.pass_tokens("selection", self.fitness_subset_size)
        return tokens / self.costs.tokens_per_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EvolutionPlan:
        return cls(**{**record, "costs": EvaluationCosts(**record["costs"])})


def search_seconds(costs: EvaluationCosts, shape: SearchShape, evaluations: int, k: int) -> float:
    """Seconds of a search with so many evaluations on k items of each domain."""
    tokens = costs.pass_tokens("selection", k)
    fewest = min(min(k, count) for count in costs.items["selection"].values())
    raced = shape.racing and fewest >= RACED_ITEMS
    combos = min(shape.first, evaluations) * max(0.0, costs.combo_s - costs.merge_s)
    measured = shape.passes(evaluations, raced) * tokens / costs.tokens_per_s
    return measured + evaluations * costs.merge_s + combos


def verdict_seconds(costs: EvaluationCosts, shape: SearchShape, items: int) -> float:
    """Seconds of the verdict and of writing the champion, which is opened again."""
    count = sum(min(items, known) for known in costs.items["verdict"].values())
    measured = costs.pass_tokens("verdict", items) / costs.exact_tokens_per_s
    compared = COMPARED_S + COMPARED_ITEM_S * count
    return shape.verdict_models * (measured + compared + costs.open_s) + 2 * costs.open_s


def make_plan(
    costs: EvaluationCosts,
    shape: SearchShape,
    minutes: float,
    spent_s: float = 0.0,
    fixed: Mapping[str, int] | None = None,
) -> EvolutionPlan:
    """What fits into the minutes; `fixed` has the settings that are given. Too few minutes are
    refused, with those that it takes."""
    fixed, total = fixed or {}, 60 * minutes
    reserve = _verdict_reserve(costs, shape, total, fixed)
    verdict = _range(fixed, "verdict_items", costs.most("verdict"))
    verdict_items = _largest(*verdict, lambda n: verdict_seconds(costs, shape, n) <= reserve)
    heal_s = shape.heal * total
    search_s = total - spent_s - reserve - heal_s
    found = _search_plan(costs, shape, search_s, fixed)
    if found is None:
        needed = _minutes_needed(costs, shape, minutes, spent_s, fixed)
        speed = f"{costs.tokens_per_s:,.0f} tokens/s"
        problem = f"{minutes:g} minutes are too few for these models and data at {speed}"
        raise ConfigError(problem, hint=f"give --time-budget {needed} or more, or fewer domains")
    items, evaluations = found
    generations = math.ceil((evaluations - shape.whole) / shape.population)
    generations = fixed.get("generations", max(1, generations))
    counts = items, verdict_items, evaluations, generations
    return EvolutionPlan(minutes, *counts, search_s, reserve, heal_s, spent_s, costs)


def replanned(plan: EvolutionPlan, shape: SearchShape, minutes: float) -> EvolutionPlan:
    """The plan of an evolution that goes on for other minutes: its items stay what they are."""
    kept = {name: plan.settings[name] for name in ("fitness_subset_size", "verdict_items")}
    return make_plan(plan.costs, shape, minutes, plan.spent_s, kept)


def _search_plan(
    costs: EvaluationCosts, shape: SearchShape, seconds: float, fixed: Mapping[str, int]
) -> tuple[int, int] | None:
    """Items and evaluations that fit into the seconds; None if not even the fewest do."""
    least, most = _range(fixed, "fitness_subset_size", costs.most("selection"))
    bound = fixed.get("max_evaluations", 0) or MOST_EVALUATIONS
    if "generations" in fixed:
        first = max(shape.first, shape.population)
        bound = min(bound, shape.whole + first + shape.population * fixed["generations"])
    fewest = min(shape.least_evaluations, bound)

    def fits(evaluations: int, items: int) -> bool:
        return search_seconds(costs, shape, evaluations, items) <= seconds

    ranges, raced = [(least, most)], 0
    if shape.racing and least < RACED_ITEMS <= min(most, *costs.items["selection"].values()):
        raced = RACED_ITEMS  # one less costs more
        ranges = [(raced, most), (least, raced - 1)]
    making = search_seconds(costs, shape, fewest, 0)  # as long as measuring may take in any case
    balanced = _largest(
        *ranges[-1], lambda k: search_seconds(costs, shape, fewest, k) <= 2 * making
    )
    for low, high in ranges:
        wanted, start = bound, max(low, balanced)
        if "max_evaluations" not in fixed:
            wanted = _largest(fewest, bound, partial(_within_aim, shape, shape.racing and low))
        if fits(wanted, start):
            items = _largest(start, high, partial(fits, wanted))
            if items == most:
                wanted = _largest(wanted, bound, lambda n: fits(n, most))
            return items + (items == raced - 1), wanted
    if not fits(fewest, least):
        return None
    items = _largest(least, balanced, partial(fits, fewest))
    wanted = fewest if items < balanced else _largest(fewest, bound, lambda n: fits(n, items))
    return items + (items == raced - 1), wanted


def _within_aim(shape: SearchShape, raced_from: int, evaluations: int) -> bool:
    return shape.passes(evaluations, raced_from >= RACED_ITEMS) <= AIM


def _verdict_reserve(
    costs: EvaluationCosts, shape: SearchShape, total: float, fixed: Mapping[str, int]
) -> float:
    least, most = _range(fixed, "verdict_items", costs.most("verdict"))
    low, high = (verdict_seconds(costs, shape, n) for n in (least, most))
    return max(low, min(high, VERDICT_SHARE * total))


def _minutes_needed(
    costs: EvaluationCosts,
    shape: SearchShape,
    minutes: float,
    spent_s: float,
    fixed: Mapping[str, int],
) -> int:
    """The fewest whole minutes that a plan can be made for."""

    def enough(whole: int) -> bool:
        left = 60 * whole * (1 - shape.heal) - spent_s
        left -= _verdict_reserve(costs, shape, 60 * whole, fixed)
        return _search_plan(costs, shape, left, fixed) is not None

    high = max(1, math.ceil(minutes))
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _range(fixed: Mapping[str, int], name: str, most: int) -> tuple[int, int]:
    """The fewest and the most items that may be chosen."""
    if name in fixed:
        return fixed[name], fixed[name]
    return min(LEAST_ITEMS, most), most


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits, if each below one that fits does so too; low
    if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
