"""The strategies by name, so that whoever scores need not know which one searches."""

from __future__ import annotations

from agent_forge.search.base import SearchStrategy
from agent_forge.search.continuous import CmaEs, GradientSearch, Nsga2
from agent_forge.search.evolution import EvolutionSearch, GeneticSearch
from agent_forge.search.portfolio import PortfolioSearch

STRATEGIES: dict[str, type[SearchStrategy]] = {
    "spec": EvolutionSearch,
    "ga": GeneticSearch,
    "cma-es": CmaEs,
    "nsga2": Nsga2,
    "grad": GradientSearch,
    "auto": PortfolioSearch,
}
