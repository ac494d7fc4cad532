"""The sections of a config that every phase shares: frozen, no unknown keys, one hash."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every group of settings. Every number fits 64 bits or single precision."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            largest = 2**63 - 1 if isinstance(value, int) else 3.4e38
            if isinstance(value, int | float) and abs(value) > largest:
                raise ValueError(f"{name}: {value} is beyond {largest}")
        return self

    def canonical_hash(self) -> str:
        """Return the sha256 of the settings in their one canonical form."""
        data = self.model_dump(mode="json")
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
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

    seed: int = Field(42, ge=0, lt=2**63, description="seed of every random choice")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="where to compute; auto takes the first of cuda, mps, cpu that exists"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of torch; 0 = all cores")
    reserve_memory_mb: float = Field(200, ge=0, description="pause when less memory is free")
    check_every_steps: int = Field(50, ge=1, description="steps between checks of disk and memory")


class StorageSettings(Settings):
    """Where runs are kept."""

    root: Annotated[str, AfterValidator(_path)] = Field(
        "storage", min_length=1, description="folder of all runs and the registry"
    )
    keep_checkpoints: int = Field(5, ge=1, description="newest checkpoints kept for each stage")
    reserve_disk_mb: float = Field(200, ge=0, description="pause when less disk is free")


class TrackingSettings(Settings):
    """Where else the metrics of a run go; metrics.jsonl has all of them in any case."""

    wandb_enabled: bool = Field(False, description="also send the metrics to Weights & Biases")
    wandb_offline: bool = Field(True, description="W&B writes to this machine only")
    wandb_project: str = Field("agent-forge", min_length=1, description="W&B project")
    wandb_timeout_s: float = Field(10, ge=0, description="W&B is left out if it takes longer")
    sample_every_s: float = Field(5, ge=0, description="seconds between resource samples; 0 = none")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="lowest level of messages that go into log.jsonl"
    )


class CleanupSettings(Settings):
    """Which old sessions are removed, and when."""

    max_session_age_days: float = Field(30, ge=0, description="how long completed ones are kept")
    max_failed_session_age_days: float = Field(7, ge=0, description="how long failed ones are kept")
    max_sessions_total: int = Field(100, ge=1, description="sessions kept; the oldest go first")
    checkpoint_every_n_sessions: int = Field(10, ge=1, description="completed runs between vacuums")
    auto_cleanup_enabled: bool = Field(True, description="remove old sessions around each run")
    schedule_cleanup: Annotated[str, AfterValidator(_cron)] = Field(
        "0 0 * * *", description="cron schedule of the line that `forge clean --cron` prints"
    )


class ModelSettings(Settings):
    """The shape of the network. Its count of weights follows from these numbers alone."""

    vocab_size: int = Field(2048, ge=300, description="tokens")
    embed_rank: int = Field(128, ge=1, description="inner width of the factorised embedding")
    d_model: int = Field(128, ge=8, description="width of the residual stream")
    n_layers: int = Field(4, ge=1, le=1000, description="transformer blocks")
    n_heads: int = Field(4, ge=1, description="attention heads; they divide d_model")
    head_size: int = Field(0, ge=0, description="width of a head; 0: d_model / n_heads")
    ffn_hidden: int = Field(344, ge=1, description="inner width of the SwiGLU")
    d_mem: int = Field(64, ge=1, description="width of the long-range memory")
    gate_hidden: int = Field(64, ge=1, description="inner width of the memory gate")
    trm_hidden: int = Field(64, ge=1, description="inner width of the recursion")
    sw_window: int = Field(1024, ge=1, description="tokens that attention sees, itself included")
    memory_capacity: int = Field(4096, ge=16, description="slowest channel's half-life, tokens")
    surprise_weight: float = Field(0.5, ge=0, description="favours tokens unlike the last ones")
    novelty_weight: float = Field(0.5, ge=0, description="favours tokens unlike the whole past")
    gate_entropy_weight: float = Field(0.001, ge=0, description="reward for an undecided gate")
    t_max: int = Field(3, ge=1, le=1000, description="recursion steps")
    micro_steps: int = Field(2, ge=1, le=1000, description="latent refinements a recursion step")
    supervised_share: float = Field(
        0.25, gt=0, le=1, description="share of positions that train the earlier steps"
    )
    halt_threshold: float = Field(0.5, ge=0, le=1, description="probability that stops inference")
    halt_margin: float = Field(0.02, ge=0, description="nats of loss that a further step must gain")
    halt_ema: float = Field(0.98, ge=0, lt=1, description="inertia of the halting calibration")
    halt_loss_weight: float = Field(0.1, ge=0, description="weight of the halting loss")

    def weights(self) -> dict[str, int]:
        """Return the number of weights of each part of the network; tied ones count once."""
        d, memory, gate, trm = self.d_model, self.d_mem, self.gate_hidden, self.trm_hidden
        return {
            "embedding, tied to the head": (self.vocab_size + d) * self.embed_rank,
            "attention": self.n_layers * (4 * d * self.attention_width + d),
            "SwiGLU": self.n_layers * (3 * d * self.ffn_hidden + d),
            "memory": 2 * d * memory + d,
            "gate": 2 * d * gate + gate + gate * d + 2 * d,
            "recursion": 5 * d * trm + 2 * (trm + trm * d + d) + 3 * d,
            "halting": d + 1,
            "last norm": d,
        }

    @property
    def head_width(self) -> int:
        return self.head_size or self.d_model // self.n_heads

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.n_heads * self.head_width

    def parameters(self) -> int:
        """Return the number of weights of the network."""
        return sum(self.weights().values())

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.head_size % 2:
            pairs = "must be even: rotary positions turn pairs"
            raise ValueError(f"head_size {self.head_size} {pairs}")
        if not self.head_size and self.d_model % (2 * self.n_heads):
            heads = f"d_model {self.d_model} over n_heads {self.n_heads}"
            raise ValueError(f"{heads} must be an even whole number (rotary positions turn pairs)")
        if not self.surprise_weight + self.novelty_weight:
            raise ValueError("surprise_weight and novelty_weight cannot both be 0")
        if self.embed_rank > self.d_model:
            raise ValueError(f"embed_rank {self.embed_rank} is larger than d_model {self.d_model}")
        return self


class PhaseSettings(Settings):
    """The settings of every phase; each phase adds its own."""

    # Settings that were added later with a default other than what phases did before, and what
    # that was: a run from before such a setting goes on with this value.
    BEFORE: ClassVar[Mapping[str, Any]] = {}

    enabled: bool = Field(True, description="false leaves the phase out of a full run")
    checkpoint_every_steps: int = Field(50, ge=1, description="steps between two checkpoints")
    gate_policy: Literal["fail", "warn"] = Field(
        "fail", description="what happens when a model misses a quality gate of this phase"
    )
    gates: dict[str, float] = Field({}, description="thresholds that replace the specified ones")

    def decisive(self, without: set[str]) -> dict[str, Any]:
        """Return the settings that a result depends on, for a fingerprint."""
        # Without those at their original value, so that a setting which an update adds does not
        # change the fingerprint of an old run.
        later = set(self.BEFORE) - without
        kept = self.model_dump(mode="json", exclude=without | later, exclude_defaults=True)
        values = self.model_dump(mode="json", include=later)
        return kept | {k: value for k, value in values.items() if value != self.BEFORE[k]}
