"""Settings of Phase 1. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from agent_forge.config.settings import PhaseSettings, Settings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.train.config import TrainSettings

DOMAINS = ("reasoning", "memory", "adaptive")


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


SPECIALISTS = (
    Specialist(
        name="reasoning",
        domain="reasoning",
        seed=42,
        halt_threshold=0.95,
        halt_margin=0.0,
        memory_capacity=4096,
        surprise_weight=0.7,
        novelty_weight=0.3,
    ),
    Specialist(
        name="memory_integration",
        domain="memory",
        seed=1337,
        halt_threshold=0.90,
        halt_margin=0.01,
        memory_capacity=8192,
        surprise_weight=0.5,
        novelty_weight=0.5,
    ),
    Specialist(
        name="adaptive_computation",
        domain="adaptive",
        seed=2023,
        halt_threshold=0.50,
        halt_margin=0.05,
        memory_capacity=2048,
        surprise_weight=0.3,
        novelty_weight=0.7,
    ),
)


class CognateSettings(PhaseSettings):
    """What Phase 1 can be told."""

    trunk_steps: int = Field(600, ge=1, description="steps of the trunk that all three share")
    branch_steps: int = Field(150, ge=1, description="steps of each specialist")
    rows: int = Field(8, ge=1, description="rows of a batch")
    row_tokens: int = Field(128, ge=16, description="tokens of a row")
    train: TrainSettings = Field(
        TrainSettings(optimizer=MuGrokConfig.from_phase(1)), description="of the trunk"
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
    items_per_family: int = Field(
        6000, ge=10, le=1_000_000, description="generated tasks of each family"
    )
    max_level: int = Field(20, ge=1, le=100, description="difficulty of the generated tasks")
    families: list[str] = Field(
        [], description="families of generated tasks; none = those that small models learn"
    )
    text_share: float = Field(0.1, ge=0, lt=1, description="share of running text in the trunk")
    data_dir: str = Field("data", min_length=1, description="folder of real datasets")
    datasets: list[str] = Field([], description="real datasets to learn from besides")
    texts: list[str] = Field([], description="your own files: text or JSON lines")
    evaluation_items: int = Field(
        2000, ge=1, le=1_000_000, description="unseen items of each domain it is measured on"
    )
    min_diversity: float = Field(
        0.3, ge=0, le=1, description="how different the three must be (docs/cognate.md)"
    )

    @model_validator(mode="after")
    def _families_cover_the_domains(self) -> CognateSettings:
        if len(set(self.families)) != len(self.families):
            raise ValueError("a family is named twice")
        return self
