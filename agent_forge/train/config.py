"""Settings of training: of the loop, and of the corpus that is learned from. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings
from agent_forge.data.near_copies import SplitBy
from agent_forge.optim.config import MuGrokConfig

DOMAINS = ("reasoning", "memory", "adaptive")  # of the generated tasks


class TrainSettings(Settings):
    """How a network is trained, whatever it is trained on."""

    optimizer: MuGrokConfig = Field(MuGrokConfig(), description="settings of MuonGrokfast")
    accumulate: int = Field(1, ge=1, le=4096, description="pieces of a batch; more save memory")
    warmup_steps: int = Field(20, ge=0, description="steps in which the rate rises from 0")
    warmdown_share: float = Field(0.5, ge=0, le=1, description="steps of falling rate, as a share")
    final_rate: float = Field(0.05, ge=0, le=1, description="share of the rate left at the end")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 if faster")
    gradient_checkpointing: bool = Field(False, description="compute blocks twice, to save memory")
    patience: int = Field(0, ge=0, description="evaluations without a gain until it ends; 0: never")
    min_gain: float = Field(0.001, ge=0, description="fall of the loss, in nats, that is a gain")

    def slower(self, share: float) -> TrainSettings:
        """The same at a share of the rate."""
        rates = {"muon_lr": share * self.optimizer.muon_lr}
        rates["fallback_lr"] = share * self.optimizer.fallback_lr
        optimizer = self.optimizer.model_copy(update=rates)
        return self.model_copy(update={"optimizer": optimizer})


class CorpusSettings(Settings):
    """What is learned from, in batches of which size, and what is measured."""

    rows: int = Field(8, ge=1, description="rows of a batch")
    row_tokens: int = Field(128, ge=16, description="tokens of a row")
    items_per_family: int = Field(6000, ge=10, le=1_000_000, description="tasks of each family")
    max_level: int = Field(20, ge=1, le=100, description="difficulty of the generated tasks")
    families: list[str] = Field([], description="generated tasks; none: what small models learn")
    text_share: float = Field(0.1, ge=0, lt=1, description="share of running text in the mixture")
    data_dir: str = Field("data", min_length=1, description="folder of real datasets")
    datasets: list[str] = Field([], description="real datasets to learn from besides")
    texts: list[str] = Field([], description="your own files: text or JSON lines")
    split_by: SplitBy = Field(
        "asked", description="what decides which examples of these are learned: near_copies.py"
    )
    evaluation_items: int = Field(2000, ge=1, le=1_000_000, description="unseen items a domain")

    @model_validator(mode="after")
    def _families_are_named_once(self) -> CorpusSettings:
        if len(set(self.families)) != len(self.families):
            raise ValueError("a family is named twice")
        return self


def rate_factor(step: int, total: int, settings: TrainSettings) -> float:
    """The share of the full rate at a step (from 1): rising, constant, falling in a line."""
    rising = step / settings.warmup_steps if settings.warmup_steps else 1.0
    falling_steps = settings.warmdown_share * total
    left = (total - step) / falling_steps if falling_steps else 1.0
    falling = settings.final_rate + (1 - settings.final_rate) * min(1.0, left)
    return min(1.0, rising, falling)
