"""The EvoMerge pipeline of the documents: base models by name, then `run_evolution`.

config = EvolutionConfig(base_models=[BaseModelConfig(name="a", path="models/a"), ...])
best = await EvoMergePipeline(config).run_evolution()
print(best.model_path, best.overall_fitness)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent_forge.contract.phase import PhaseResult
from agent_forge.errors import ConfigError
from agent_forge.phases.phase2_evomerge.api import EvoMerge, EvoMergeConfig

TASKS = {"math": "reasoning", "structured_data": "structured"}  # the documents' names of ours
OWN_WEIGHT = "every model has a weight of its own: BaseModelConfig(weight=...)"
WITHOUT_MEANING = {
    "linear_weight": OWN_WEIGHT,
    "slerp_t": OWN_WEIGHT,
    "frankenmerge_layers": "FrankenMerge chooses layer by layer, and the evolution varies it",
    "dfs_merge_ratio": "DFS weighs every number by how far the models agree on it",
}


@dataclass(frozen=True)
class BaseModelConfig:
    """One of the models: a folder or an id of the Hugging Face hub."""

    name: str
    path: str
    weight: float = 1.0  # in the first merges
    domain_specialty: str = ""  # told with its name in verdict and card


class EvolutionConfig(EvoMergeConfig):
    """The settings of EvoMerge, and the models."""

    def __init__(
        self,
        *,
        base_models: Sequence[BaseModelConfig | Mapping[str, Any]],
        merge_operators: Mapping[str, float] | None = None,
        evaluation_weights: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> None:
        try:
            models = [BaseModelConfig(**m) if isinstance(m, Mapping) else m for m in base_models]
        except TypeError as error:
            raise ConfigError(f"base_models: {error}") from error
        fields |= _operator_settings(merge_operators or {})
        weights = [model.weight for model in models]
        if len(set(weights)) > 1:
            fields["parent_weights"] = weights
        if evaluation_weights and not fields.get("data"):
            evaluation_weights = {TASKS.get(k, k): v for k, v in evaluation_weights.items()}
            fields["tasks"] = list(evaluation_weights)
        if evaluation_weights:
            fields["domain_weights"] = dict(evaluation_weights)
        super().__init__(**fields)
        self.__dict__["base_models"] = models


def _operator_settings(given: Mapping[str, float]) -> dict[str, float]:
    """`merge_operators` as settings of ours; what has no counterpart is refused by name."""
    settings: dict[str, float] = {}
    for name, value in given.items():
        if name == "dare_threshold":
            settings["drop_rate"] = value
        elif name == "ties_threshold":
            settings["keep"] = 1 - value
        elif name == "dare_amplification":
            rescale = 1 / (1 - given.get("dare_threshold", 0.9))
            if abs(value - rescale) > 1e-6:
                problem = f"dare_amplification {value} is not what DARE rescales by: {rescale:g}"
                raise ConfigError(problem, hint="leave it out: it follows from dare_threshold")
        else:
            why = WITHOUT_MEANING.get(name, "it is not known")
            raise ConfigError(f"merge_operators.{name} cannot be set: {why}")
    return settings


class BestCandidate(NamedTuple):
    """The champion."""

    model_path: Path
    overall_fitness: float
    result: PhaseResult


class EvoMergePipeline:
    """Evolve the models of a config."""

    def __init__(self, config: EvolutionConfig) -> None:
        self.config = config

    async def run_evolution(self) -> BestCandidate:
        """To the champion and the verdict."""
        models = self.config.base_models
        names = [m.name + (f" ({m.domain_specialty})" * bool(m.domain_specialty)) for m in models]
        result = await EvoMerge(self.config).evolve([m.path for m in models], names)
        path = Path(result.artifacts["final_checkpoint"])
        return BestCandidate(path, result.metrics["best_fitness"], result)
