"""Settings of the evolution. Free of numpy, so that configs load at once.

Which sizes the scheme can serve: each of E elites has 3 mutants and every 3 losers have one child.
A population of P therefore needs P - 3E triples, and they must fit below the elites:
3 (P - 3E) <= P - E. That leaves 3E + 1 to 4E: 4 with one elite, 7 and 8 with two, 10 to 12 with
three, 13 to 16 with four, and every larger size.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings

MUTANTS = 3  # of each elite
TRIPLE = 3  # losers that make one child
SIZES = "4, 7, 8 and every size from 10 on"


def elites_for(population_size: int) -> int:
    """The fewest elites that serve a population."""
    return math.ceil(population_size / (MUTANTS + 1))


class EvolutionSettings(Settings):
    """Elites are mutated, losers are merged. Strengths are relative to the generation before."""

    generations: int = Field(50, ge=0, le=100_000, description="after generation 0, the combos")
    population_size: int = Field(8, ge=1, le=1024, description=f"candidates at a time: {SIZES}")
    elite_count: int = Field(
        2, ge=1, description="best ones that are mutated; if not given, a quarter of the population"
    )
    recipe_mutation: float = Field(
        0.9, ge=0, le=1, description="share of mutants that vary the recipe; noise for the others"
    )
    shift_sigma: float = Field(
        0.1, ge=1e-4, le=1, description="step of a merge coefficient when the recipe varies"
    )
    mutation_sigma: float = Field(0.01, gt=0, le=10, description="spread of the noise on weights")
    mutation_rate: float = Field(0.01, gt=0, le=1, description="share of the weights it changes")
    parent_weights: list[float] = Field(
        [], description="of the parents in the first combos; none = all alike"
    )
    drop_rate: float = Field(0.9, ge=0, le=0.9999, description="share that DARE drops at first")
    keep: float = Field(0.2, ge=0.0001, le=1, description="share that TIES keeps at first")
    early_stopping: bool = Field(True, description="stop when the champion no longer improves")
    convergence_threshold: float = Field(
        0.001, gt=0, description="smallest improvement that counts"
    )
    convergence_patience: int = Field(
        5, ge=1, description="generations that may pass without such an improvement"
    )
    min_diversity: float = Field(
        0.3, ge=0, description="below it mutation is stronger; 1 = the parents' mean distance"
    )
    mutation_boost: float = Field(2.0, ge=1, le=10, description="how much stronger it is then")
    diversity_reseed_threshold: float = Field(
        0.2, ge=0, description="below it the last two children are new combos of the parents"
    )

    @property
    def triples(self) -> int:
        """How many children the losers have."""
        return self.population_size - MUTANTS * self.elite_count

    @model_validator(mode="before")
    @classmethod
    def _a_quarter_is_elite(cls, data: Any) -> Any:
        if isinstance(data, dict) and "elite_count" not in data:
            size = data.get("population_size")
            if isinstance(size, int):
                return {**data, "elite_count": max(1, elites_for(size))}
        return data

    @model_validator(mode="after")
    def _can_be_served(self) -> EvolutionSettings:
        size, elites, wanted = (
            self.population_size,
            self.elite_count,
            elites_for(self.population_size),
        )
        if not MUTANTS * elites < size <= (MUTANTS + 1) * elites:
            served = MUTANTS * wanted < size
            raise ValueError(
                f"population_size {size} cannot be served with elite_count {elites}:"
                f" {MUTANTS} mutants an elite and a child of every {TRIPLE} losers do not add up; "
                + (f"set elite_count to {wanted}" if served else f"allowed sizes are {SIZES}")
            )
        if min(self.parent_weights, default=1) <= 0:
            raise ValueError("parent_weights are above 0")
        if self.diversity_reseed_threshold > self.min_diversity:
            raise ValueError(
                f"diversity_reseed_threshold {self.diversity_reseed_threshold} is above"
                f" min_diversity {self.min_diversity}"
            )
        return self
