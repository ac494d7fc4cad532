"""A genetic algorithm over recipes: tournaments, crossover, mutation, and fitness that is shared.

Everyone is a merge of the parents, so any two recipes can be crossed. Candidates that are alike
share their fitness, which keeps several kinds of recipes alive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from numpy.random import Generator

from agent_forge.search import operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import PAIRS, EvolutionSettings

RADIUS = 0.1  # distance from which on two recipes share nothing


def combos_of(settings: EvolutionSettings) -> list[int]:
    """The combos that the techniques allow, a balanced choice first."""
    bits = list(zip(operators.BITS, PAIRS, strict=True))
    return [
        combo
        for combo in operators.COMBOS
        if all(pair[bool(combo & bit)] in settings.techniques for bit, pair in bits)
    ]


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far two recipes are apart, 0 to about 1: techniques, weights, shares and scale."""
    bits: float = (one["combo"] ^ other["combo"]).bit_count() / len(operators.BITS)
    rows = [
        sum(abs(a / sum(u) - b / sum(v)) for a, b in zip(u, v, strict=True)) / 2
        for u, v in ((row, other["weights"][g]) for g, row in one["weights"].items())
    ]
    shares = (abs(one["drop_rate"] - other["drop_rate"]) + abs(one["keep"] - other["keep"])) / 2
    scale = min(1.0, abs(math.log(one["scale"] / other["scale"])))
    return float(bits + sum(rows) / len(rows) + shares + scale) / 4


class GeneticSearch(SearchStrategy):
    """Children of the winners of tournaments; they do not wait for the last two before them."""

    mutating = ("mutation", "crossover")
    look_ahead = 2

    def _first_generation(self) -> None:
        self._combos, size = combos_of(self.settings), self.settings.population_size
        masks = operators.mask_seed(self.seed)
        for place in range(size):
            combo = self._combos[place % len(self._combos)]
            made = operators.combo_of(self._space, combo, self._space.parents, masks, "combo")
            if place >= min(len(self._combos), size // 2):
                rng = operators.generator(self.seed, 0, place, "ga")
                made = operators.variant(self._space, made, rng)
            self._propose("combo", made)

    def _next_generation(self, best: Sequence[str], last: Sequence[str]) -> None:
        known = dict.fromkeys([*best, *last])
        alive = self._ranked([key for key in known if self.candidates[key].kind == "merge"])
        fitness = self._shared_fitness(alive)
        for place in range(len(self._tried), self.settings.population_size):
            for attempt in count():
                rng = operators.generator(self.seed, self.generation, place, attempt, "ga")
                if self._propose(*self._child(alive, fitness, rng, again=attempt > 0)):
                    break

    def _child(
        self, alive: Sequence[str], fitness: Mapping[str, float], rng: Generator, *, again: bool
    ) -> tuple[str, Candidate, tuple[str, ...]]:
        """An operator, what it made, and the candidates that it was made from."""
        if not alive:  # nothing could be measured: begin anew
            combo, seed = operators.pick(self._combos, rng), operators.draw_seed(rng)
            new = operators.combo_of(self._space, combo, self._space.parents, seed, "reseed")
            return "reseed", operators.variant(self._space, new, rng), ()
        first = self._winner(alive, fitness, rng)
        inputs: tuple[str, ...] = (first,)
        recipe = self.candidates[first].operation
        if rng.random() < self.settings.crossover_rate and len(alive) > 1:
            inputs += (self._winner([key for key in alive if key != first], fitness, rng),)
            recipe = _crossed(recipe, self.candidates[inputs[1]].operation, rng)
            name = "crossover"
        else:
            recipe = operators.variant(self._space, self.candidates[first], rng).operation
            name = "mutation"
        made = operators.mutated_recipe(self._space, recipe, rng, self._combos, again=again)
        origin = f"{name} of {' and '.join(key[:SHORT] for key in inputs)}"
        return name, Candidate(made, self._space.parents, origin), inputs

    def _winner(self, alive: Sequence[str], fitness: Mapping[str, float], rng: Generator) -> str:
        """Of a tournament: the best with a chance of `selection_pressure`, else the next."""
        size = min(self.settings.tournament_size, len(alive))
        drawn = [alive[int(i)] for i in rng.choice(len(alive), size, replace=False)]
        drawn.sort(key=lambda key: (-fitness[key], key))
        for key in drawn[:-1]:
            if rng.random() < self.settings.selection_pressure:
                return key
        return drawn[-1]

    def _shared_fitness(self, alive: Sequence[str]) -> dict[str, float]:
        """Fitness from 0 to 1, divided in part by how many others are near."""
        if not alive:
            return {}
        worst, weight = self.scores[alive[-1]], self.settings.diversity_weight
        span = (self.scores[alive[0]] - worst) or 1.0
        recipes = {key: self.candidates[key].operation for key in alive}
        shared = {}
        for key, own in recipes.items():
            near = sum(max(0.0, 1 - distance(own, r) / RADIUS) for r in recipes.values())
            shared[key] = (self.scores[key] - worst) / span * (1 - weight + weight / near)
        return shared


def _crossed(one: Mapping[str, Any], other: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
    """Each field of one of the two; a choice of layers goes with FrankenMerge alone."""
    pair = (one, other)
    made = {name: pair[int(rng.integers(2))][name] for name in sorted(one)}
    made["weights"] = {g: pair[int(rng.integers(2))]["weights"][g] for g in one["weights"]}
    if made["combo"] & operators.SELECTION:
        made["layers"] = {}
    return made
