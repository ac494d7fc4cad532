"""Settings of Phase 1. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from agent_forge.config.settings import PhaseSettings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import CorpusSettings, TrainSettings


@dataclass(frozen=True)
class SpecialistSettings:
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
        return {k: v for k, v in asdict(self).items() if k not in ("name", "domain", "seed")}


SPECIALISTS = (
    SpecialistSettings("reasoning", "reasoning", 42, 0.95, 0.0, 4096, 0.7, 0.3),
    SpecialistSettings("memory_integration", "memory", 1337, 0.90, 0.01, 8192, 0.5, 0.5),
    SpecialistSettings("adaptive_computation", "adaptive", 2023, 0.50, 0.05, 2048, 0.3, 0.7),
)
THREE = {f"model_{i + 1}": special for i, special in enumerate(SPECIALISTS)}


class CognateSettings(PhaseSettings, CorpusSettings):
    """What Phase 1 can be told."""

    BEFORE: ClassVar = {"split_by": "content"}

    trunk_steps: Count = setting(600, "steps of the trunk that all three share")
    branch_steps: Count = setting(150, "steps of each specialist")
    train: TrainSettings = setting(
        TrainSettings(optimizer=MuGrokConfig.from_phase(1)), "training of the trunk"
    )
    branch_rate: float = setting(1e-3, "AdamW's rate for the specialists", gt=0)
    freeze_embeddings: bool = setting(True, "specialists keep the trunk's: they merge better")
    own_share: SomeShare = setting(0.8, "share of its own domain in what a specialist learns from")
    control: bool = setting(True, "train one model on everything for as long as the three together")
    min_diversity: Share = setting(0.3, "how different the three must be (docs/cognate.md)")
