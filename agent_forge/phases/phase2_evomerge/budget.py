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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agent_forge.errors import ConfigError, DamagedFile

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

    def within_aim(self, raced: bool, evaluations: int) -> bool:
        return self.passes(evaluations, raced) <= AIM


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

    @property
    def seconds(self) -> dict[str, float]:
        """What its parts take, by their names."""
        return {"search": self.search_s, "verdict": self.verdict_s, "healing": self.heal_s}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any], place: Path) -> EvolutionPlan:
        """The plan of a record, which was read at a place."""
        try:
            return cls(**{**record, "costs": EvaluationCosts(**record["costs"])})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DamagedFile(place, f"its plan cannot be read ({error})") from error


@dataclass(frozen=True)
class Planner:
    """Plans for one search; `fixed` has the settings that are given."""

    costs: EvaluationCosts
    shape: SearchShape
    fixed: Mapping[str, int] = field(default_factory=dict)

    def search_seconds(self, evaluations: int, items: int) -> float:
        """Seconds of a search with so many evaluations on so many items of each domain."""
        costs, shape = self.costs, self.shape
        tokens = costs.pass_tokens("selection", items)
        fewest = min(min(items, count) for count in costs.items["selection"].values())
        raced = shape.racing and fewest >= RACED_ITEMS
        combos = min(shape.first, evaluations) * max(0.0, costs.combo_s - costs.merge_s)
        measured = shape.passes(evaluations, raced) * tokens / costs.tokens_per_s
        return measured + evaluations * costs.merge_s + combos

    def verdict_seconds(self, items: int) -> float:
        """Seconds of the verdict and of writing the champion, which is opened again."""
        costs = self.costs
        count = sum(min(items, known) for known in costs.items["verdict"].values())
        measured = costs.pass_tokens("verdict", items) / costs.exact_tokens_per_s
        compared = COMPARED_S + COMPARED_ITEM_S * count
        return self.shape.verdict_models * (measured + compared + costs.open_s) + 2 * costs.open_s

    def plan(self, minutes: float, spent_s: float = 0.0) -> EvolutionPlan:
        """What fits into the minutes; too few are refused, with those that it takes."""
        shape, total = self.shape, 60 * minutes
        reserve, heal_s = self._verdict_reserve(total), shape.heal * total
        verdict_items = _largest(
            *self._range("verdict"), lambda n: self.verdict_seconds(n) <= reserve
        )
        search_s = total - spent_s - reserve - heal_s
        found = self._items_and_evaluations(search_s)
        if found is None:
            needed = self._minutes_needed(minutes, spent_s)
            speed = f"{self.costs.tokens_per_s:,.0f} tokens/s"
            problem = f"{minutes:g} minutes are too few for these models and data at {speed}"
            hint = f"give --time-budget {needed} or more, or fewer domains"
            raise ConfigError(problem, hint=hint)
        items, evaluations = found
        generations = math.ceil((evaluations - shape.whole) / shape.population)
        generations = self.fixed.get("generations", max(1, generations))
        counts = items, verdict_items, evaluations, generations
        return EvolutionPlan(minutes, *counts, search_s, reserve, heal_s, spent_s, self.costs)

    def _items_and_evaluations(self, seconds: float) -> tuple[int, int] | None:
        """What fits into the seconds of a search; None if not even the fewest do."""
        shape, fixed = self.shape, self.fixed
        least, most = self._range("selection")
        bound = fixed.get("max_evaluations", 0) or MOST_EVALUATIONS
        if "generations" in fixed:
            first = max(shape.first, shape.population)
            bound = min(bound, shape.whole + first + shape.population * fixed["generations"])
        fewest = min(shape.least_evaluations, bound)

        def fits(evaluations: int, items: int) -> bool:
            return self.search_seconds(evaluations, items) <= seconds

        ranges, raced, counts = [(least, most)], 0, self.costs.items["selection"].values()
        if shape.racing and least < RACED_ITEMS <= min(most, *counts):
            raced = RACED_ITEMS  # one less costs more
            ranges = [(raced, most), (least, raced - 1)]
        making = self.search_seconds(fewest, 0)  # as long as measuring may take in any case
        balanced = _largest(*ranges[-1], lambda k: self.search_seconds(fewest, k) <= 2 * making)
        for low, high in ranges:
            wanted, start = bound, max(low, balanced)
            if "max_evaluations" not in fixed:
                races = shape.racing and low >= RACED_ITEMS
                wanted = _largest(fewest, bound, partial(shape.within_aim, races))
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

    def _verdict_reserve(self, total: float) -> float:
        low, high = map(self.verdict_seconds, self._range("verdict"))
        return max(low, min(high, VERDICT_SHARE * total))

    def _minutes_needed(self, minutes: float, spent_s: float) -> int:
        """The fewest whole minutes that a plan can be made for."""

        def too_few(whole: int) -> bool:
            left = 60 * whole * (1 - self.shape.heal) - spent_s
            return self._items_and_evaluations(left - self._verdict_reserve(60 * whole)) is None

        enough = max(1, math.ceil(minutes))
        while too_few(enough):
            enough *= 2
        return _largest(enough // 2, enough - 1, too_few) + 1

    def _range(self, split: str) -> tuple[int, int]:
        """The fewest and the most items of a split that may be chosen."""
        name = {"selection": "fitness_subset_size", "verdict": "verdict_items"}[split]
        most = self.costs.most(split)
        return (self.fixed[name],) * 2 if name in self.fixed else (min(LEAST_ITEMS, most), most)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits, if each below one that fits does so too; low
    if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
