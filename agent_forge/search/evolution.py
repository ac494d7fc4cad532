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
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from numpy.random import Generator

from agent_forge.search import operators
from agent_forge.search.base import CandidateOrigin, SearchStrategy
from agent_forge.search.candidate import Candidate
from agent_forge.search.settings import MUTANTS, TRIPLE

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
        self._fill_all([PopulationSlot("combo", self._space.parents, combo) for combo in combos])

    def _next_generation(self, elites: Sequence[str], last: Sequence[str]) -> None:
        settings, new = self.settings, PopulationSlot("reseed", self._space.parents)
        losers = [key for key in self._ranked(last) if key not in elites]
        losers = [key for key in losers if self.candidates[key].kind != "path"]
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

    def _diversity_below(self, threshold: float) -> bool:
        diversity = self.history[-1]["diversity"] if self.history else None
        return diversity is not None and diversity < threshold

    def _fill_all(self, places: Sequence[PopulationSlot]) -> None:
        """Begin a population with these places, and fill each of them."""
        low = self._diversity_below(self.settings.min_diversity)
        self._strength = self.settings.mutation_boost if low else 1.0
        self._places, self._tried = list(places), [[] for _ in places]
        for index in range(len(places)):
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Find a candidate that was never there before; it replaces the last one of its place."""
        place, tried = self._places[index], self._tried[index]
        for attempt in count():
            label = (self.seed, self.generation, index, len(tried), attempt, place.use)
            if attempt == MOST_ATTEMPTS:
                place = PopulationSlot("reseed", self._space.parents)
            rng = operators.generator(*label)
            operator, candidate = self._candidate_for(place, rng, again=bool(tried))
            if candidate.key not in self.candidates:
                break
        self._add(candidate, CandidateOrigin(self.generation, operator, place.inputs))
        tried.append(candidate.key)

    def _candidate_for(
        self, place: PopulationSlot, rng: Generator, *, again: bool
    ) -> tuple[str, Candidate]:
        if place.use == "mutant":
            elite = self.candidates[place.inputs[0]]
            return operators.mutate(self._space, elite, rng, self._strength, again=again)
        combo, seed = place.combo, operators.draw_seed(rng)
        if combo is None:
            combo = int(rng.integers(len(operators.COMBOS)))
        elif not again:
            seed = operators.mask_seed(self.seed)
        made = operators.combo_of(self._space, combo, place.inputs, seed, place.use)
        plain = place.use == "losers" or place.combo is not None
        return place.use, made if plain and not again else operators.variant(self._space, made, rng)

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

    def _observed(self) -> dict[str, Any]:
        variants = [len(tried) - 1 for tried in self._tried]
        return {**super()._observed(), "variants": variants, "alike": sorted(self._duplicates)}

    def _mutations(self) -> int:
        return sum(place.use == "mutant" for place in self._places)
