"""The EvoMerge pipeline of the documents: base models by name, then `run_evolution`.

config = EvolutionConfig(base_models=[BaseModelConfig(name="a", path="models/a"), ...])
best = await EvoMergePipeline(config).run_evolution()
print(best.model_path, best.overall_fitness)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent_forge.contract.phase import PhaseResult
from agent_forge.phases.phase2_evomerge.api import EvoMerge, EvoMergeConfig
from agent_forge.phases.phase2_evomerge.documents import BaseModelConfig


class EvolutionConfig(EvoMergeConfig):
    """The settings of EvoMerge, and the models."""

    def __init__(self, *, base_models: Sequence[BaseModelConfig | dict[str, Any]], **fields: Any):
        super().__init__(base_models=list(base_models), **fields)


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
        names = [model.told for model in models]
        result = await EvoMerge(self.config).evolve([m.path for m in models], names)
        path = Path(result.artifacts["final_checkpoint"])
        return BestCandidate(path, result.metrics["best_fitness"], result)
