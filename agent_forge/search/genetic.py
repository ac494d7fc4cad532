"""A genetic algorithm over recipes: tournaments, crossover, mutation, and fitness that is shared.

Everyone is a merge of the parents, so any two recipes can be crossed: each group's weights and each
other field come from one of the two. A candidate shares its fitness with those that are like it,
which keeps several kinds of recipes alive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from numpy.random import Generator

from agent_forge.search import operators
from agent_forge.search.base import Proposal, Search
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import PAIRS, EvolutionSettings

RADIUS = 0.1  # distance from which on two recipes share nothing


def combos_of(settings: EvolutionSettings) -> list[int]:
    """The combos that the techniques allow, a balanced choice first."""
    bits = zip(operators.BITS, PAIRS, strict=True)
    open_bits = {bit: [pair[v] in settings.techniques for v in (0, 1)] for bit, pair in bits}
    return [c for c in operators.COMBOS if all(v[bool(c & b)] for b, v in open_bits.items())]


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Between two recipes, from 0 to about 1: techniques, weights, shares and scale count alike."""
    bits: float = (one["combo"] ^ other["combo"]).bit_count() / len(operators.BITS)
    rows = [
        sum(abs(a / sum(u) - b / sum(v)) for a, b in zip(u, v, strict=True)) / 2
        for u, v in ((row, other["weights"][g]) for g, row in one["weights"].items())
    ]
    shares = (abs(one["drop_rate"] - other["drop_rate"]) + abs(one["keep"] - other["keep"])) / 2
    scale = min(1.0, abs(math.log(one["scale"] / other["scale"])))
    return float(bits + sum(rows) / len(rows) + shares + scale) / 4


class Genetic(Search):
    """Children of the winners of tournaments; the best stay until they are beaten.

    A generation is bred before the last two of the one before have a score: nobody waits for them.
    """

    mutating = ("mutation", "crossover")
    look_ahead = 2

    def _begin(self) -> None:
        self._combos = combos_of(self.settings)
        masks = operators.draw_seed(operators.generator(self.seed, "masks"))
        for place in range(self.settings.population_size):
            plain = place < min(len(self._combos), self.settings.population_size // 2)
            combo = self._combos[place % len(self._combos)]
            made = operators.combo_of(self._space, combo, self._space.parents, masks, "combo")
            if not plain:
                rng = operators.generator(self.seed, 0, place, "ga")
                made = operators.variant(self._space, made, rng)
            self._put(Proposal("combo", made))

    def _next(self, best: Sequence[str], last: Sequence[str]) -> None:
        merges = [key for key in dict.fromkeys([*best, *last]) if self._is_merge(key)]
        alive = self._ranked(merges)
        shared = self._shared(alive)
        for place in range(len(self._slots), self.settings.population_size):
            for attempt in count():
                rng = operators.generator(self.seed, self.generation, place, attempt, "ga")
                wish = self._child(alive, shared, rng, again=attempt > 0)
                if wish.candidate.key not in self.candidates:
                    break
            self._put(wish)

    def _child(
        self, alive: Sequence[str], shared: Mapping[str, float], rng: Generator, *, again: bool
    ) -> Proposal:
        if not alive:  # nothing could be measured: begin anew
            combo = operators.one(self._combos, rng)
            seed = operators.draw_seed(rng)
            new = operators.combo_of(self._space, combo, self._space.parents, seed, "reseed")
            return Proposal("reseed", operators.variant(self._space, new, rng))
        first = self._winner(alive, shared, rng)
        if rng.random() < self.settings.crossover_rate and len(alive) > 1:
            second = self._winner([key for key in alive if key != first], shared, rng)
            pair = (self.candidates[first].operation, self.candidates[second].operation)
            made = self._crossed(*pair, rng)
            against: tuple[str, ...] = (first, second)
            origin = f"crossover of {first[:SHORT]} and {second[:SHORT]}"
            name = "crossover"
        else:
            varied = operators.variant(self._space, self.candidates[first], rng)
            made, against, name = dict(varied.operation), (first,), "mutation"
            origin = f"mutation of {first[:SHORT]}"
        made |= operators.recipe_change(self._space, made, rng, self._allowed, again=again)
        return Proposal(name, Candidate(made, self._space.parents, origin), against)

    def _allowed(self, combo: int) -> bool:
        return combo in self._combos

    def _crossed(
        self, one: Mapping[str, Any], other: Mapping[str, Any], rng: Generator
    ) -> dict[str, Any]:
        """Each field of one of the two; a choice of layers goes with FrankenMerge alone."""
        pair = (one, other)
        made = {name: pair[int(rng.integers(2))][name] for name in sorted(one)}
        rows = {g: pair[int(rng.integers(2))]["weights"][g] for g in one["weights"]}
        made |= {"weights": rows}
        if made["combo"] & operators.SELECTION:
            made["layers"] = {}
        return made

    def _winner(self, alive: Sequence[str], shared: Mapping[str, float], rng: Generator) -> str:
        """Of a tournament: the best with a chance of `selection_pressure`, else the next."""
        size = min(self.settings.tournament_size, len(alive))
        drawn = [alive[int(i)] for i in rng.choice(len(alive), size, replace=False)]
        drawn.sort(key=lambda key: (-shared[key], key))
        for key in drawn[:-1]:
            if rng.random() < self.settings.selection_pressure:
                return key
        return drawn[-1]

    def _shared(self, alive: Sequence[str]) -> dict[str, float]:
        """Fitness from 0 to 1, divided in part by how many others are near."""
        if not alive:
            return {}
        worst, weight = self.scores[alive[-1]], self.settings.diversity_weight
        span = (self.scores[alive[0]] - worst) or 1.0
        found = {}
        for key in alive:
            own = self.candidates[key].operation
            near = sum(
                max(0.0, 1 - distance(own, self.candidates[other].operation) / RADIUS)
                for other in alive
            )
            found[key] = (self.scores[key] - worst) / span * (1 - weight + weight / near)
        return found

    def _is_merge(self, key: str) -> bool:
        return self.candidates[key].kind == "merge"
