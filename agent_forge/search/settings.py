"""Settings of the evolution. Free of numpy, so that configs load at once.

Which sizes the scheme can serve: each of E elites has 3 mutants and every 3 losers have one child,
so a population of P needs P - 3E triples below the elites: 3 (P - 3E) <= P - E. That leaves 3E + 1
to 4E: 4 with one elite, 7 and 8 with two, 10 to 12 with three, and every larger size.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings

MUTANTS = 3  # of each elite
TRIPLE = 3  # losers that make one child
SIZES = "4, 7, 8 and every size from 10 on"
LEAST = 4  # candidates at a time of any strategy
FIRST_COMBOS = {1: 4, 2: 8, 3: 8}  # that auto tries first, by its version
PAIRS = (("linear", "slerp"), ("dare", "ties"), ("frankenmerge", "dfs"))  # of techniques, by bit
GA_2 = "recipe_mutation mutation_sigma mutation_rate min_diversity mutation_boost"  # not in its 1
COMBOS = "parent_weights drop_rate keep linear_weight slerp_t amplification layer_parents dfs_ratio"
FIELDS_OF = {  # that act in some strategies alone; all others act in every one
    "spec ga": "elite_count min_diversity mutation_boost",
    "spec ga auto": f"shift_sigma recipe_mutation mutation_sigma mutation_rate {COMBOS}",
    "spec auto": "layer_paths",
    "spec": "diversity_reseed_threshold",
    "ga": "tournament_size crossover_rate selection_pressure diversity_weight techniques"
    " ga_version",
    "cma-es nsga2": "blend_method density per_layer",
    "cma-es nsga2 auto": "start_sigma",
    "grad auto": "gradient_step gradient_share",
    "auto": "auto_version methods",
}
ACTS_IN = {name: of.split() for of, names in FIELDS_OF.items() for name in names.split()}
# Values as if the field did not exist, some of them defaults of earlier versions.
OFF: dict[str, tuple[Any, ...]] = {"min_diversity": (0.0,), "diversity_reseed_threshold": (0.0,)}
OFF |= {"auto_version": (1, 2), "ga_version": (1,), "methods": ([],)}
Share = Annotated[float, Field(ge=0, le=1)]
SomeShare = Annotated[float, Field(gt=0, le=1)]
Between = Annotated[float, Field(gt=0, lt=1)]
MethodName = Literal[
    "breadcrumbs",
    "breadcrumbs_ties",
    "della",
    "della_linear",
    "iso_c",
    "karcher",
    "model_stock",
    "ram",
    "ramplus_tl",
    "regmean",
    "sce",
    "svc",
    "swudi",
    "tsv_m",
]
Count = Annotated[int, Field(ge=1)]


def setting(default: Any, description: str, **bounds: Any) -> Any:
    return Field(default, description=description, **bounds)


def elites_for(population_size: int) -> int:
    """The fewest elites that serve a population."""
    return math.ceil(population_size / (MUTANTS + 1))


class EvolutionSettings(Settings):
    """How candidates are searched. A field that the strategy does not have is refused."""

    strategy: Literal["spec", "ga", "cma-es", "nsga2", "grad", "auto"] = setting(
        "auto", "how candidates are searched; auto: by what gained most, gradients first"
    )
    auto_version: Literal[1, 2, 3] = setting(
        3,
        "auto: 2 takes its first gradients at the average, even if a method is better; 1 has half"
        " of the combos at first and merges no losers; both as evolutions before",
    )
    ga_version: Literal[1, 2] = setting(
        2, "ga: 1 has no noise and no bound on diversity, as evolutions before"
    )
    generations: int = setting(50, "how many follow the first one, of combos", ge=0, le=100_000)
    methods: list[MethodName] | None = setting(
        None,
        "auto: merge methods to try beside the combos, and to stretch where they are good; null ="
        " svc and tsv_m, unless they take long",
    )
    max_evaluations: int = setting(0, "scores to stop after, those of parents too; 0 = never", ge=0)
    population_size: int = setting(8, f"candidates at a time: {SIZES}", ge=1, le=1024)
    elite_count: Count = setting(2, "best ones that are mutated; if not given, a quarter of all")
    recipe_mutation: Share = setting(0.9, "share of mutants with another recipe; others get noise")
    shift_sigma: float = setting(0.1, "step of a coefficient when the recipe varies", ge=1e-4, le=1)
    mutation_sigma: float = setting(0.01, "spread of the noise on weights", gt=0, le=10)
    mutation_rate: SomeShare = setting(0.01, "share of the weights that noise changes")
    layer_paths: Share = setting(0.0, "share of mutants that skip, repeat or swap layers")
    parent_weights: list[float] = setting([], "weights of parents in first combos; none = equal")
    drop_rate: float = setting(0.9, "share that DARE drops at first", ge=0, le=0.9999)
    keep: float = setting(0.2, "share that TIES keeps at first", ge=0.0001, le=1)
    linear_weight: Between | None = setting(
        None, "weight of the first model in first combos with Linear; null = that of the others"
    )
    slerp_t: Between | None = setting(
        None, "how far first combos with SLERP go from the first model to the second; null = half"
    )
    amplification: float | None = setting(
        None, "factor on what DARE keeps; null = 1 / (1 - drop_rate)", gt=0, le=10_000
    )
    layer_parents: list[Annotated[int, Field(ge=0)]] = setting(
        [], "numbers of the parents that first FrankenMerges take layers from, in turn; none = best"
    )
    dfs_ratio: SomeShare = setting(1.0, "how far DFS goes from the merge before it to its own")
    early_stopping: bool = setting(True, "stop when the champion no longer improves")
    convergence_threshold: float = setting(0.001, "least improvement for early_stopping", gt=0)
    convergence_patience: Count = setting(5, "generations that may pass without improvement")
    min_diversity: float = setting(0.3, "mutation is stronger below it; 1 = that of parents", ge=0)
    mutation_boost: float = setting(2.0, "factor on mutations below min_diversity", ge=1, le=10)
    diversity_reseed_threshold: float = setting(0.2, "below it two children are new combos", ge=0)
    tournament_size: int = setting(3, "ga: candidates that compete to become a parent", ge=1, le=64)
    crossover_rate: Share = setting(0.7, "ga: share of children that have two parents")
    selection_pressure: SomeShare = setting(0.7, "ga: chance of a tournament's best, then the next")
    diversity_weight: Share = setting(0.3, "ga: how much of their fitness similar candidates share")
    techniques: list[Literal["linear", "slerp", "dare", "ties", "frankenmerge", "dfs"]] = setting(
        [*chain(*PAIRS)], "ga: the techniques that combos are made of"
    )
    blend_method: Literal["linear", "ties", "dare_linear", "dare_ties"] = setting(
        "linear", "what is done to the task vectors whose coefficients are searched"
    )
    density: float = setting(0.5, "share that ties and dare keep at first", ge=0.05, le=1)
    per_layer: bool = setting(True, "coefficients for every layer, not one for all")
    start_sigma: SomeShare = setting(0.15, "first spread of the coefficients")
    gradient_step: SomeShare = setting(0.1, "length of the first step along a gradient")
    gradient_share: SomeShare = setting(0.5, "share of the items for one gradient, in turn")

    @property
    def triples(self) -> int:
        """How many children the losers have."""
        return self.population_size - MUTANTS * self.elite_count

    def planned(self, parents: int) -> int:
        """How many candidates are scored at most, the parents and their average among them."""
        first = max(self.population_size, FIRST_COMBOS[self.auto_version])  # by auto, all combos
        first = first + len(self.methods or ()) if self.strategy == "auto" else self.population_size
        every = self.population_size * self.generations + first + parents + 1
        return min(every, self.max_evaluations or every)

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
        if self.strategy == "ga" and self.ga_version == 1:
            found |= {*GA_2.split()}
        return found | ({"density"} if self.blend_method == "linear" else set())

    @model_validator(mode="after")
    def _fields_act(self) -> EvolutionSettings:
        for name in sorted(self.unused):
            default = type(self).model_fields[name].default
            if name == "elite_count":
                default = elites_for(self.population_size)
            if getattr(self, name) not in (default, *OFF.get(name, ())):
                where = " and ".join(ACTS_IN[name])
                if self.strategy in ACTS_IN[name]:
                    blend = "a blend_method that is not linear"
                    where += f", and there with {blend if name == 'density' else 'ga_version 2'}"
                strategy = f"the strategy {self.strategy!r}"
                raise ValueError(f"{name} has no meaning for {strategy}: it acts in {where}")
        return self

    @model_validator(mode="after")
    def _can_be_served(self) -> EvolutionSettings:
        for pair in PAIRS:
            if not {*pair} & {*self.techniques}:
                raise ValueError(f"techniques needs {pair[0]} or {pair[1]}")
        if self.strategy == "spec":
            size, elites = self.population_size, self.elite_count
            wanted = elites_for(size)
            if not MUTANTS * elites < size <= (MUTANTS + 1) * elites:
                served = MUTANTS * wanted < size
                way = f"set elite_count to {wanted}" if served else f"allowed sizes are {SIZES}"
                sums = f"{MUTANTS} mutants an elite and a child of every {TRIPLE} losers"
                problem = f"population_size {size} cannot be served with elite_count {elites}"
                raise ValueError(f"{problem}: {sums} do not add up; {way}")
            if (edge := self.diversity_reseed_threshold) > (low := self.min_diversity):
                raise ValueError(f"diversity_reseed_threshold {edge} is above min_diversity {low}")
        elif self.population_size < (fewest := max(LEAST, self.elite_count + 1)):
            raise ValueError(f"population_size {self.population_size} is below {fewest}")
        if self.methods and len({*self.methods}) < len(self.methods):
            raise ValueError("a method is listed twice in methods")
        if min(self.parent_weights, default=1) <= 0:
            raise ValueError("parent_weights are above 0")
        if self.parent_weights and (self.linear_weight or self.slerp_t):
            raise ValueError("parent_weights say what linear_weight and slerp_t would: give either")
        return self
