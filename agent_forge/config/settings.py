"""The sections of a config that every phase shares. Each field says what it means, with its unit.

A config is frozen, refuses unknown keys, and has one canonical hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LARGEST_INT = 2**63 - 1  # of 64 bits
LARGEST_FLOAT = 3.4e38  # of single precision


class Settings(BaseModel):
    """Base of every group of settings. A number fits what computes with it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _numbers_fit(self) -> Settings:
        for name in type(self).model_fields:
            value = getattr(self, name)
            largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
            if isinstance(value, int | float) and abs(value) > largest:
                raise ValueError(f"{name}: {value} is beyond {largest}")
        return self

    def canonical_hash(self) -> str:
        """sha256 of the settings in their one canonical form."""
        text = json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(text.encode()).hexdigest()


def _cron(text: str) -> str:
    fields = text.split()
    limits = (59, 23, 31, 12, 7)  # minute, hour, day, month, day of the week
    if len(fields) != 5 or not all(re.fullmatch(r"[\w*/,-]+", field) for field in fields):
        raise ValueError("a cron schedule has five fields, as in '0 0 * * *'")
    for field, limit in zip(fields, limits, strict=True):
        if any(int(number) > limit for number in re.findall(r"\d+", field)):
            raise ValueError(f"{field!r} is more than the {limit} that this field of cron allows")
    return " ".join(fields)


def _path(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a path has no control characters")
    return text


class RuntimeSettings(Settings):
    """Where and how a run computes."""

    seed: int = Field(42, ge=0, lt=2**63, description="every random choice derives from it")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto takes the first of cuda, mps, cpu that is there"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of torch; 0 = all cores")
    reserve_memory_mb: float = Field(
        200, ge=0, description="pause when the machine has less memory than this left"
    )
    check_every_steps: int = Field(
        50, ge=1, description="steps between two looks at free disk and memory"
    )


class StorageSettings(Settings):
    """Where runs are kept."""

    root: Annotated[str, AfterValidator(_path)] = Field(
        "storage", min_length=1, description="folder of all runs and the registry"
    )
    keep_checkpoints: int = Field(
        5, ge=1, description="checkpoints kept for each phase; the best one stays in addition"
    )
    reserve_disk_mb: float = Field(
        200, ge=0, description="pause when the disk has less than this left"
    )


class TrackingSettings(Settings):
    """Who is told what a run measures. metrics.jsonl has everything in any case."""

    wandb_enabled: bool = Field(False, description="mirror the metrics to Weights & Biases")
    wandb_offline: bool = Field(True, description="keep the mirror on this machine")
    wandb_project: str = Field("agent-forge", min_length=1, description="W&B project")
    wandb_timeout_s: float = Field(
        10, ge=0, description="how long W&B may take to answer before it is left out"
    )
    sample_every_s: float = Field(
        5, ge=0, description="seconds between two samples of CPU, memory and disk; 0 = none"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="what goes into log.jsonl"
    )


class CleanupSettings(Settings):
    """Which old sessions go, and when."""

    max_session_age_days: float = Field(30, ge=0, description="completed sessions stay this long")
    max_failed_session_age_days: float = Field(7, ge=0, description="failed ones stay this long")
    max_sessions_total: int = Field(100, ge=1, description="of all sessions, the newest stay")
    checkpoint_every_n_sessions: int = Field(
        10, ge=1, description="sessions between two rounds of database upkeep"
    )
    auto_cleanup_enabled: bool = Field(
        True, description="clean by itself at the start of a run and after it completes"
    )
    schedule_cleanup: Annotated[str, AfterValidator(_cron)] = Field(
        "0 0 * * *", description="cron schedule that `forge clean --cron` prints a line for"
    )


class ModelSettings(Settings):
    """The shape of the network. Its count of weights follows from these numbers alone."""

    vocab_size: int = Field(2048, ge=300, description="tokens")
    embed_rank: int = Field(128, ge=1, description="inner width of the factorised embedding")
    d_model: int = Field(128, ge=8, description="width of the residual stream")
    n_layers: int = Field(4, ge=1, le=1000, description="transformer blocks")
    n_heads: int = Field(4, ge=1, description="attention heads; they divide d_model")
    ffn_hidden: int = Field(344, ge=1, description="inner width of the SwiGLU")
    d_mem: int = Field(64, ge=1, description="width of the long-range memory")
    gate_hidden: int = Field(64, ge=1, description="inner width of the memory gate")
    trm_hidden: int = Field(64, ge=1, description="inner width of the recursion")
    sw_window: int = Field(1024, ge=1, description="tokens that attention sees, with the own one")
    memory_capacity: int = Field(
        4096, ge=16, description="half-life of the slowest memory channel, in tokens"
    )
    surprise_weight: float = Field(
        0.5, ge=0, description="how much a difference from the recent past strengthens a memory"
    )
    novelty_weight: float = Field(
        0.5, ge=0, description="how much a difference from the distant past strengthens it"
    )
    gate_entropy_weight: float = Field(
        0.001, ge=0, description="reward for a memory gate that stays open to both sides"
    )
    t_max: int = Field(3, ge=1, le=1000, description="recursion steps")
    micro_steps: int = Field(
        2, ge=1, le=1000, description="refinements of the latent in each of them"
    )
    supervised_share: float = Field(
        0.25, gt=0, le=1, description="share of positions that steps before the last learn from"
    )
    halt_threshold: float = Field(
        0.5, ge=0, le=1, description="probability above which inference halts"
    )
    halt_margin: float = Field(
        0.02, ge=0, description="loss in nats that a further step must gain to be worth it"
    )
    halt_ema: float = Field(0.98, ge=0, lt=1, description="inertia of the halting calibration")
    halt_loss_weight: float = Field(0.1, ge=0, description="weight of the halting loss")

    def weights(self) -> dict[str, int]:
        """How many weights each part of a network of this shape has; tied ones count once."""
        d, memory, gate, trm = self.d_model, self.d_mem, self.gate_hidden, self.trm_hidden
        return {
            "embedding, tied to the head": (self.vocab_size + d) * self.embed_rank,
            "attention": self.n_layers * (4 * d * d + d),
            "SwiGLU": self.n_layers * (3 * d * self.ffn_hidden + d),
            "memory": 2 * d * memory + d,
            "gate": 2 * d * gate + gate + gate * d + 2 * d,
            "recursion": 5 * d * trm + 2 * (trm + trm * d + d) + 3 * d,
            "halting": d + 1,
            "last norm": d,
        }

    def parameters(self) -> int:
        """How many weights a network of this shape has."""
        return sum(self.weights().values())

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelSettings:
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"d_model {self.d_model} over n_heads {self.n_heads} must give an even whole"
                " number (rotary positions turn pairs)"
            )
        if not self.surprise_weight + self.novelty_weight:
            raise ValueError("surprise_weight and novelty_weight cannot both be 0")
        if self.embed_rank > self.d_model:
            raise ValueError(f"embed_rank {self.embed_rank} is larger than d_model {self.d_model}")
        return self


class PhaseSettings(Settings):
    """What every phase can be told; each phase adds its own."""

    # Settings that came later and whose default is not what phases did before: what that was.
    # A run that has no record of such a setting goes on with this.
    BEFORE: ClassVar[Mapping[str, Any]] = {}

    enabled: bool = Field(True, description="false leaves the phase out of a full run")
    checkpoint_every_steps: int = Field(50, ge=1, description="steps between two checkpoints")
    gate_policy: Literal["fail", "warn"] = Field(
        "fail", description="what a missed quality gate at the entrance of this phase does"
    )
    gates: dict[str, float] = Field(
        {}, description="thresholds of those gates that differ from the specification's"
    )

    def decisive(self, without: set[str]) -> dict[str, Any]:
        """The settings that a result depends on, for a fingerprint: none that is as it always was.

        So the fingerprint of an old run outlives an update that adds a setting.
        """
        later = set(self.BEFORE) - without
        kept = self.model_dump(mode="json", exclude=without | later, exclude_defaults=True)
        values = self.model_dump(mode="json", include=later)
        return kept | {k: value for k, value in values.items() if value != self.BEFORE[k]}
