"""The strategies by name, so that whoever scores need not know which one searches.

spec     the specification's elites and losers: recipes, generation by generation
ga       tournaments, crossover of recipes, shared fitness
cma-es   coefficients, densities and scale of one family, by a model of what is near the best
nsga2    the same numbers, for every domain at once: a front of compromises
grad     coefficients along the gradient of the loss
auto     all of it, where it pays most
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_forge.search.base import SearchStrategy
from agent_forge.search.continuous import CmaEs, Nsga2
from agent_forge.search.evolution import EvolutionSearch
from agent_forge.search.genetic import GeneticSearch
from agent_forge.search.gradient import GradientSearch
from agent_forge.search.portfolio import PortfolioSearch
from agent_forge.search.settings import EvolutionSettings

STRATEGIES: dict[str, type[SearchStrategy]] = {
    "spec": EvolutionSearch,
    "ga": GeneticSearch,
    "cma-es": CmaEs,
    "nsga2": Nsga2,
    "grad": GradientSearch,
    "auto": PortfolioSearch,
}


def begin(
    settings: EvolutionSettings,
    *,
    parents: int,
    groups: Sequence[str],
    seed: int,
    layers: Sequence[str] = (),
) -> SearchStrategy:
    """The search that the settings name, at its beginning."""
    strategy = STRATEGIES[settings.strategy]
    return strategy(settings, parents=parents, groups=groups, seed=seed, layers=layers)
