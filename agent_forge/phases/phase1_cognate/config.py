"""Settings of Phase 1. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agent_forge.config.settings import PhaseSettings, Settings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.train.config import CorpusSettings, TrainSettings


class Specialist(Settings):
    """One of the three: the domain that it is trained on, and how it remembers and halts."""

    name: str
    domain: str
    seed: int
    halt_threshold: float
    halt_margin: float
    memory_capacity: int
    surprise_weight: float
    novelty_weight: float

    def shape(self) -> dict[str, Any]:
        """The settings of the network that differ from the trunk's; none changes a weight."""
        return self.model_dump(exclude={"name", "domain", "seed"})


_FIELDS = tuple(Specialist.model_fields)
_VALUES = (
    ("reasoning", "reasoning", 42, 0.95, 0.0, 4096, 0.7, 0.3),
    ("memory_integration", "memory", 1337, 0.90, 0.01, 8192, 0.5, 0.5),
    ("adaptive_computation", "adaptive", 2023, 0.50, 0.05, 2048, 0.3, 0.7),
)
SPECIALISTS = tuple(
    Specialist.model_validate(dict(zip(_FIELDS, values, strict=True))) for values in _VALUES
)


class CognateSettings(PhaseSettings, CorpusSettings):
    """What Phase 1 can be told."""

    trunk_steps: int = Field(600, ge=1, description="steps of the trunk that all three share")
    branch_steps: int = Field(150, ge=1, description="steps of each specialist")
    train: TrainSettings = Field(
        TrainSettings(optimizer=MuGrokConfig.from_phase(1)), description="training of the trunk"
    )
    branch_rate: float = Field(1e-3, gt=0, description="AdamW's rate for the specialists")
    freeze_embeddings: bool = Field(
        True, description="specialists keep the trunk's embedding: they merge better"
    )
    own_share: float = Field(
        0.8, gt=0, le=1, description="share of its own domain in what a specialist learns from"
    )
    control: bool = Field(
        True, description="train one model on everything for as long as the three together"
    )
    min_diversity: float = Field(
        0.3, ge=0, le=1, description="how different the three must be (docs/cognate.md)"
    )
