"""Settings of Phase 7, and what devices allow for. Torch-free."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import SkillSettings, TrainSettings

OPTIMIZER = MuGrokConfig.through_rounding(2e-3, 1e-3)
Device = Literal["laptop", "phone", "pi", "server"]
Kind = Literal["channels", "heads", "layers"]


class Target(NamedTuple):
    """What a device allows for. Whatever needs a clock is judged by what is measured here."""

    size_mb: float  # of all files that it takes to run
    share: float  # of the bytes that came in
    latency_ms: float  # a token
    tokens_per_s: float
    memory_mb: float  # of the process, at its peak


TARGETS: dict[Device, Target] = {
    "server": Target(100.0, 1.0, 10.0, 100.0, 4000.0),
    "laptop": Target(50.0, 0.95, 20.0, 50.0, 1000.0),
    "phone": Target(20.0, 0.9, 50.0, 20.0, 500.0),
    "pi": Target(10.0, 0.8, 100.0, 10.0, 200.0),
}


class EdgeSettings(PhaseSettings, SkillSettings):
    """What Phase 7 can be told."""

    target: Device = setting("phone", "the device that it is for; the next five replace its limits")
    size_mb: float = setting(0.0, "of all files that it takes to run; 0: the device's", ge=0)
    share: float = setting(
        0.0, "of the bytes that come in, that may be left; 0: the device's", ge=0, le=1
    )
    latency_ms: float = setting(0.0, "of a token, as measured here; 0: the device's", ge=0)
    tokens_per_s: float = setting(0.0, "at least, as measured here; 0: the device's", ge=0)
    memory_mb: float = setting(0.0, "of the process, at its peak; 0: the device's", ge=0)
    kinds: list[Kind] = setting(["channels", "heads", "layers"], "what may be cut")
    channel_share: SomeShare = setting(0.125, "of the channels between, that a cut takes away")
    cuts: Count = setting(6, "at most")
    cut_steps: Count = setting(200, "training steps after each")
    parent_share: Share = setting(0.5, "of the loss, that is the divergence from the input")
    train: TrainSettings = setting(
        TrainSettings(optimizer=OPTIMIZER, warmup_steps=5, warmdown_share=0.8),
        "training after every cut",
    )
    calibration_items: Count = setting(240, "items that tell what matters")
    least_retention: SomeShare = setting(  # more than the gate behind this phase, on fewer items
        0.92, "of the input's accuracy on items for choices, that every cut must keep"
    )

    @model_validator(mode="after")
    def _something_may_be_cut(self) -> EdgeSettings:
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise ValueError("kinds: at least one, and each once")
        return self

    @property
    def limits(self) -> Target:
        """The device's limits, replaced where the settings have others."""
        own = TARGETS[self.target]._asdict()
        return Target(**{name: getattr(self, name) or value for name, value in own.items()})
