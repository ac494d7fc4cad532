"""Settings of the training loop. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent_forge.config.settings import Settings
from agent_forge.optim.config import MuGrokConfig


class TrainSettings(Settings):
    """How a network is trained, whatever it is trained on."""

    optimizer: MuGrokConfig = Field(MuGrokConfig(), description="of MuonGrokfast")
    accumulate: int = Field(
        1, ge=1, le=4096, description="pieces that a batch is cut into; more need less memory"
    )
    warmup_steps: int = Field(20, ge=0, description="steps in which the rate rises from 0")
    warmdown_share: float = Field(
        0.5, ge=0, le=1, description="share of the steps, at the end, in which the rate falls"
    )
    final_rate: float = Field(0.05, ge=0, le=1, description="share of the rate that is left then")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto takes bf16 only on hardware that computes faster in it"
    )
    gradient_checkpointing: bool = Field(
        False, description="compute the blocks twice instead of keeping what they computed"
    )
    patience: int = Field(
        0, ge=0, description="evaluations without a gain before training stops; 0 = never"
    )
    min_gain: float = Field(0.001, ge=0, description="fall of the loss, in nats, that is a gain")


def rate_factor(step: int, total: int, settings: TrainSettings) -> float:
    """The share of the full rate at a step (from 1): rising, constant, falling in a line."""
    rising = step / settings.warmup_steps if settings.warmup_steps else 1.0
    falling_steps = settings.warmdown_share * total
    left = (total - step) / falling_steps if falling_steps else 1.0
    falling = settings.final_rate + (1 - settings.final_rate) * min(1.0, left)
    return min(1.0, rising, falling)
