"""Evolution by elites and losers: the best are mutated, the worst are merged with one another.

Generation 0 is the eight combos of the parents (fewer: a balanced choice; more: variants are
added). The parents and their plain average are measured beside them and compete, but are not part
of the population. Then, generation by generation:

    each of the best E      ->  3 mutants (of the recipe, noise on the weights, or layer paths)
    the worst, by threes    ->  one child each, by a combo drawn at random
    too little diversity    ->  stronger mutation; then the last two children are new combos

The best E come from the population and from the best E before them, so the champion stays until it
is beaten. Equal scores: the older one first, then by key. What failed (-inf) is neither mutated nor
merged, a path is not merged; a place that is empty for that reason gets a new combo of the parents.
The genetic algorithm breeds merges of the parents: any two recipes can be crossed, and candidates
that are alike share their fitness, which keeps several kinds of recipes alive.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from numpy.random import Generator

from agent_forge.search import operators
from agent_forge.search.base import CandidateOrigin, SearchStrategy
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import MUTANTS, PAIRS, TRIPLE, EvolutionSettings

RADIUS = 0.1  # distance from which on two recipes share no fitness
MOST_VARIANTS = 4  # a place whose candidates keep coinciding with others is left alone after these
MOST_ATTEMPTS = 50  # at a mutant that was never there: a short path has few others


class PopulationSlot(NamedTuple):
    """What a place in the population is for: a mutant, the losers' child, or a combo."""

    use: str
    inputs: tuple[str, ...]
    combo: int | None = None


class EvolutionSearch(SearchStrategy):
    """The specification's scheme, for anything that can be scored."""

    def _first_generation(self) -> None:
        size = self.settings.population_size
        combos = [*sorted(operators.COMBOS[:size]), *[None] * (size - len(operators.COMBOS))]
        self._fill_all([PopulationSlot("combo", self.space.parents, combo) for combo in combos])

    def _next_generation(self, elites: Sequence[str], last: Sequence[str]) -> None:
        settings, new = self.settings, PopulationSlot("reseed", self.space.parents)
        ranked = [key for key in self._ranked(last) if key not in elites]
        losers = [key for key in ranked if self.candidates[key].kind != "path"]
        losers = losers[-TRIPLE * settings.triples :]
        places = [
            PopulationSlot("mutant", (elites[n // MUTANTS % len(elites)],)) if elites else new
            for n in range(MUTANTS * settings.elite_count)
        ]
        for n in range(settings.triples):
            triple = tuple(losers[TRIPLE * n : TRIPLE * (n + 1)])
            places.append(PopulationSlot("losers", triple) if len(triple) == TRIPLE else new)
        if self._diversity_below(settings.diversity_reseed_threshold):
            places[-2:] = [new, new]
        self._fill_all(places)

    def _fill_all(self, places: Sequence[PopulationSlot]) -> None:
        self._strength = self._mutation_strength()
        self._places, self._tried = list(places), [[] for _ in places]
        for index in range(len(places)):
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Find a candidate that was never there before; it replaces the last one of its place."""
        place, tried = self._places[index], self._tried[index]
        for attempt in count():
            label = (self.seed, self.generation, index, len(tried), attempt, place.use)
            if attempt == MOST_ATTEMPTS:
                place = PopulationSlot("reseed", self.space.parents)
            rng = operators.generator(*label)
            operator, candidate = self._candidate_for(place, rng, again=bool(tried))
            if candidate.key not in self.candidates:
                break
        source = place.inputs[0] if place.use == "mutant" else None
        self._add(candidate, CandidateOrigin(self.generation, operator, place.inputs, source))
        tried.append(candidate.key)

    def _candidate_for(
        self, place: PopulationSlot, rng: Generator, *, again: bool
    ) -> tuple[str, Candidate]:
        if place.use == "mutant":
            elite = self.candidates[place.inputs[0]]
            return operators.mutate(self.space, elite, rng, self._strength, again=again)
        combo, seed = place.combo, operators.draw_seed(rng)
        if combo is None:
            combo = int(rng.integers(len(operators.COMBOS)))
        elif not again:
            seed = operators.mask_seed(self.seed)
        made = operators.combo_of(self.space, combo, place.inputs, seed, place.use)
        plain = place.use == "losers" or place.combo is not None
        return place.use, made if plain and not again else operators.variant(self.space, made, rng)

    def tell_duplicates(self, keys: Sequence[str]) -> None:
        """These have equal weights: the first stays, each other place gets a variant to ask for."""
        for key in sorted(set(keys), key=self._position)[1:]:
            if key not in self._population() or key in self._duplicates:
                continue  # a reference point, or replaced already
            index = self._population().index(key)
            if len(self._tried[index]) <= MOST_VARIANTS:
                self._fill(index)
            else:
                self._duplicates.add(key)

    def _mutations(self) -> int:
        return sum(place.use == "mutant" for place in self._places)


def combos_of(settings: EvolutionSettings) -> list[int]:
    """The combos that the techniques allow, a balanced choice first."""
    bits, given = list(zip(operators.BITS, PAIRS, strict=True)), settings.techniques
    return [c for c in operators.COMBOS if all(pair[bool(c & bit)] in given for bit, pair in bits)]


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
            made = operators.combo_of(self.space, combo, self.space.parents, masks, "combo")
            if place >= min(len(self._combos), size // 2):
                rng = operators.generator(self.seed, 0, place, "ga")
                made = operators.variant(self.space, made, rng)
            self._propose("combo", made)

    def _next_generation(self, best: Sequence[str], last: Sequence[str]) -> None:
        # Only recipes can be crossed: what noise was put on breeds in the place of its mutant.
        of = {key: c.inputs[0] for key, c in self.candidates.items() if c.kind == "noise"}
        known = dict.fromkeys(of.get(key, key) for key in [*best, *last])
        alive = self._ranked([key for key in known if self.candidates[key].kind == "merge"])
        self._strength = self._mutation_strength() if self.settings.ga_version > 1 else 1.0
        fitness = self._shared_fitness(alive)
        for place in range(len(self._tried), self.settings.population_size):
            for attempt in count():
                rng, own = (
                    operators.generator(self.seed, self.generation, place, attempt, label)
                    for label in ("ga", "noise")
                )
                name, made, inputs = self._child(alive, fitness, rng, again=attempt > 0)
                recipes = self.settings.recipe_mutation if self.settings.ga_version > 1 else 1.0
                if name == "mutation" and alive and own.random() >= recipes:
                    source = self.candidates[inputs[0]]
                    made = operators.noisy(self.space, source, own, self._strength)
                if self._propose(name, made, inputs, inputs[0] if len(inputs) == 1 else None):
                    break

    def _child(
        self, alive: Sequence[str], fitness: Mapping[str, float], rng: Generator, *, again: bool
    ) -> tuple[str, Candidate, tuple[str, ...]]:
        """An operator, what it made, and the candidates that it was made from."""
        if not alive:  # nothing could be measured: begin anew
            combo, seed = operators.pick(self._combos, rng), operators.draw_seed(rng)
            new = operators.combo_of(self.space, combo, self.space.parents, seed, "reseed")
            return "reseed", operators.variant(self.space, new, rng), ()
        first = self._winner(alive, fitness, rng)
        inputs: tuple[str, ...] = (first,)
        recipe = self.candidates[first].operation
        if rng.random() < self.settings.crossover_rate and len(alive) > 1:
            inputs += (self._winner([key for key in alive if key != first], fitness, rng),)
            recipe = _crossed(recipe, self.candidates[inputs[1]].operation, rng)
            name = "crossover"
        else:
            recipe = operators.variant(self.space, self.candidates[first], rng).operation
            name = "mutation"
        how = self._combos, self._strength
        recipe = operators.mutated_recipe(self.space, recipe, rng, *how, again=again)
        origin = f"{name} of {' and '.join(key[:SHORT] for key in inputs)}"
        return name, Candidate(recipe, self.space.parents, origin), inputs

    def _winner(self, alive: Sequence[str], fitness: Mapping[str, float], rng: Generator) -> str:
        """Of a tournament: the best with a chance of `selection_pressure`, else the next."""
        size = min(self.settings.tournament_size, len(alive))
        drawn = [alive[int(i)] for i in rng.choice(len(alive), size, replace=False)]
        drawn.sort(key=lambda key: (-fitness[key], key))
        chance = self.settings.selection_pressure
        return next((key for key in drawn[:-1] if rng.random() < chance), drawn[-1])

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
