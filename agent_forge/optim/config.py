"""MuGrokConfig: the optimizer's settings, in both vocabularies of the specification. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, AliasGenerator, ConfigDict, Field, model_validator

from agent_forge.config import strict_json
from agent_forge.config.settings import Settings
from agent_forge.errors import ConfigError

OTHER_NAMES = {"muon_lr": "lr", "grokfast_alpha": "alpha", "grokfast_lambda": "lam"}
OTHER_NAMES |= {"ns_steps": "k", "momentum": "beta", "qk_clip_threshold": "qkclip_tau"}
ONLY = {"kind": "muon_grokfast", "fallback": "adamw", "qkclip_per_head": True}
BOTH = AliasGenerator(validation_alias=lambda n: AliasChoices(n, OTHER_NAMES.get(n, n)))


class MuGrokConfig(Settings):
    """What MuonGrokfast does with a gradient. Some settings have another name in one document."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, alias_generator=BOTH)

    muon: bool = Field(True, description="false lets AdamW update the matrices too")
    muon_lr: float = Field(1e-3, gt=0, description="rate for matrices; updates scaled to AdamW's")
    fallback_lr: float = Field(1e-3, gt=0, description="AdamW's rate, for everything else")
    grokfast_alpha: float = Field(0.98, ge=0, lt=1, description="inertia of the gradient's mean")
    grokfast_lambda: float = Field(0.0, ge=0, description="share of that mean added to a gradient")
    ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations")
    momentum: float = Field(0.95, ge=0, lt=1, description="of the matrices' updates (Nesterov)")
    weight_decay: float = Field(0.05, ge=0, description="decoupled decay, of matrices only")
    grad_clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0 clips nothing")
    qk_clip_threshold: float = Field(30.0, ge=0, description="largest attention logit; 0: no limit")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of a divergence from a reference")
    mlarope_protected: bool = Field(False, description="QK-clip rescales queries, not rotary keys")

    @model_validator(mode="before")
    @classmethod
    def _without_choices(cls, values: Any) -> Any:
        """Keys of the specification that name what there is; other values are refused."""
        if not isinstance(values, Mapping):
            return values
        for name, only in ONLY.items():
            if name in values and values[name] != only:
                raise ValueError(f"{name}: {only} is all that there is")
        return {name: value for name, value in values.items() if name not in ONLY}

    @classmethod
    def from_phase(cls, number: int) -> MuGrokConfig:
        """The settings that the specification gives a phase, where they were found to work."""
        if number not in PHASE_SETTINGS:
            raise ConfigError(f"phase {number} trains nothing; those that do: {[*PHASE_SETTINGS]}")
        return cls(**PHASE_SETTINGS[number])

    @classmethod
    def through_rounding(cls, muon_lr: float, fallback_lr: float) -> MuGrokConfig:
        """For weights behind a rounding: without Grokfast, decay and limits, which hurt there."""
        off: dict[str, Any] = dict.fromkeys(
            ("grokfast_lambda", "weight_decay", "qk_clip_threshold"), 0.0
        )
        return cls(muon_lr=muon_lr, fallback_lr=fallback_lr, ns_steps=3, **off)


_table = strict_json.parse(Path(__file__).with_name("phases.json").read_text(encoding="utf-8"))
PHASE_SETTINGS: dict[int, dict[str, Any]] = {int(number): row for number, row in _table.items()}
