"""Settings of the toy phase."""

from __future__ import annotations

from pydantic import Field

from agent_forge.config.settings import PhaseSettings


class ToySettings(PhaseSettings):
    """What the toy phase can be told."""

    enabled: bool = Field(False, description="the toy runs only where it is asked for")
    steps: int = Field(200, ge=1, le=10**9, description="optimizer steps")
    width: int = Field(16, ge=1, le=4096, description="inputs and outputs of the linear map")
    learning_rate: float = Field(0.05, gt=0, description="of AdamW")
