"""Settings of the evolution. Free of numpy, so that configs load at once.

Which sizes the scheme can serve: each of E elites has 3 mutants and every 3 losers have one child.
A population of P therefore needs P - 3E triples, and they must fit below the elites:
3 (P - 3E) <= P - E. That leaves 3E + 1 to 4E: 4 with one elite, 7 and 8 with two, 10 to 12 with
three, 13 to 16 with four, and every larger size.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings

MUTANTS = 3  # of each elite
TRIPLE = 3  # losers that make one child
SIZES = "4, 7, 8 and every size from 10 on"
LEAST = 4  # candidates at a time of any strategy
PAIRS = (("linear", "slerp"), ("dare", "ties"), ("frankenmerge", "dfs"))  # of techniques, by bit
FIELDS_OF = {  # that act in some strategies alone; all others act in every one
    "spec ga": "elite_count",
    "spec ga auto": "shift_sigma parent_weights drop_rate keep",
    "spec auto": "recipe_mutation mutation_sigma mutation_rate layer_paths",
    "spec": "min_diversity mutation_boost diversity_reseed_threshold",
    "ga": "tournament_size crossover_rate selection_pressure diversity_weight techniques",
    "cma-es nsga2": "blend_method density per_layer",
    "cma-es nsga2 auto": "start_sigma",
    "grad auto": "gradient_step gradient_share",
}
ACTS_IN = {name: of.split() for of, names in FIELDS_OF.items() for name in names.split()}
OFF = {"min_diversity": 0.0, "diversity_reseed_threshold": 0.0}  # as if the field did not exist


def elites_for(population_size: int) -> int:
    """The fewest elites that serve a population."""
    return math.ceil(population_size / (MUTANTS + 1))


class EvolutionSettings(Settings):
    """How candidates are searched. A field that the strategy does not have is refused."""

    strategy: Literal["spec", "ga", "cma-es", "nsga2", "grad", "auto"] = Field(
        "spec", description="how candidates are searched; spec: elites mutate, losers merge"
    )
    generations: int = Field(
        50, ge=0, le=100_000, description="how many generations follow the first, of combos"
    )
    max_evaluations: int = Field(
        0, ge=0, description="stop after so many scored candidates, parents included; 0 = never"
    )
    population_size: int = Field(8, ge=1, le=1024, description=f"candidates at a time: {SIZES}")
    elite_count: int = Field(
        2, ge=1, description="best ones that are mutated; if not given, a quarter of the population"
    )
    recipe_mutation: float = Field(
        0.9, ge=0, le=1, description="share of mutants that vary the recipe; the others get noise"
    )
    shift_sigma: float = Field(
        0.1, ge=1e-4, le=1, description="step of a merge coefficient when the recipe varies"
    )
    mutation_sigma: float = Field(0.01, gt=0, le=10, description="spread of the noise on weights")
    mutation_rate: float = Field(
        0.01, gt=0, le=1, description="share of the weights that noise changes"
    )
    layer_paths: float = Field(
        0.0, ge=0, le=1, description="share of mutants that skip, repeat or swap layers"
    )
    parent_weights: list[float] = Field(
        [], description="weight of each parent in the first combos; none = all the same"
    )
    drop_rate: float = Field(0.9, ge=0, le=0.9999, description="share that DARE drops at first")
    keep: float = Field(0.2, ge=0.0001, le=1, description="share that TIES keeps at first")
    early_stopping: bool = Field(True, description="stop when the champion no longer improves")
    convergence_threshold: float = Field(
        0.001, gt=0, description="smallest improvement that counts for early_stopping"
    )
    convergence_patience: int = Field(
        5, ge=1, description="generations that may pass without such an improvement"
    )
    min_diversity: float = Field(
        0.3, ge=0, description="below it mutation is stronger; 1 = the parents' mean distance"
    )
    mutation_boost: float = Field(
        2.0, ge=1, le=10, description="factor on mutations while diversity is below min_diversity"
    )
    diversity_reseed_threshold: float = Field(
        0.2, ge=0, description="diversity below which the last two children are new combos"
    )
    tournament_size: int = Field(
        3, ge=1, le=64, description="ga: candidates that compete to become a parent"
    )
    crossover_rate: float = Field(
        0.7, ge=0, le=1, description="ga: share of children that have two parents"
    )
    selection_pressure: float = Field(
        0.7, gt=0, le=1, description="ga: chance of the best of a tournament, then of the next"
    )
    diversity_weight: float = Field(
        0.3, ge=0, le=1, description="ga: how much fitness a candidate shares with similar ones"
    )
    techniques: list[Literal["linear", "slerp", "dare", "ties", "frankenmerge", "dfs"]] = Field(
        ["linear", "slerp", "dare", "ties", "frankenmerge", "dfs"],
        description="ga: the techniques that combos are made of",
    )
    blend_method: Literal["linear", "ties", "dare_linear", "dare_ties"] = Field(
        "linear", description="what is done to the task vectors whose coefficients are searched"
    )
    density: float = Field(0.5, ge=0.05, le=1, description="share that ties and dare keep at first")
    per_layer: bool = Field(True, description="coefficients for every layer, not one for all")
    start_sigma: float = Field(0.15, gt=0, le=1, description="first spread of the coefficients")
    gradient_step: float = Field(
        0.1, gt=0, le=1, description="length of the first step along a gradient"
    )
    gradient_share: float = Field(
        0.5, gt=0, le=1, description="share of the items that a gradient is taken on, in turn"
    )

    @property
    def triples(self) -> int:
        """How many children the losers have."""
        return self.population_size - MUTANTS * self.elite_count

    @property
    def gradient_turns(self) -> int:
        """Gradients until all items have been looked at."""
        return max(1, round(1 / self.gradient_share))

    @model_validator(mode="before")
    @classmethod
    def _a_quarter_is_elite(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(size := data.get("population_size"), int):
            return {"elite_count": max(1, elites_for(size)), **data}
        return data

    @property
    def unused(self) -> set[str]:
        """Fields that do nothing with this strategy."""
        found = {name for name, strategies in ACTS_IN.items() if self.strategy not in strategies}
        return found | ({"density"} if self.blend_method == "linear" else set())

    @model_validator(mode="after")
    def _fields_act(self) -> EvolutionSettings:
        for name in sorted(self.unused):
            default = type(self).model_fields[name].default
            if name == "elite_count":
                default = elites_for(self.population_size)
            if getattr(self, name) not in (default, OFF.get(name, default)):
                where = " and ".join(ACTS_IN[name])
                if self.strategy in ACTS_IN[name]:
                    where += ", and there with a blend_method that is not linear"
                raise ValueError(
                    f"{name} has no meaning for the strategy {self.strategy!r}: it acts in {where}"
                )
        return self

    @model_validator(mode="after")
    def _can_be_served(self) -> EvolutionSettings:
        for pair in PAIRS:
            if not {*pair} & {*self.techniques}:
                raise ValueError(f"techniques needs {pair[0]} or {pair[1]}")
        if self.strategy == "spec":
            self._fits_the_scheme()
        elif self.population_size < (least := max(LEAST, self.elite_count + 1)):
            raise ValueError(f"population_size {self.population_size} is below {least}")
        if min(self.parent_weights, default=1) <= 0:
            raise ValueError("parent_weights are above 0")
        return self

    def _fits_the_scheme(self) -> None:
        size, elites = self.population_size, self.elite_count
        wanted = elites_for(size)
        if not MUTANTS * elites < size <= (MUTANTS + 1) * elites:
            served = MUTANTS * wanted < size
            raise ValueError(
                f"population_size {size} cannot be served with elite_count {elites}:"
                f" {MUTANTS} mutants an elite and a child of every {TRIPLE} losers do not add up; "
                + (f"set elite_count to {wanted}" if served else f"allowed sizes are {SIZES}")
            )
        if self.diversity_reseed_threshold > self.min_diversity:
            raise ValueError(
                f"diversity_reseed_threshold {self.diversity_reseed_threshold} is above"
                f" min_diversity {self.min_diversity}"
            )
