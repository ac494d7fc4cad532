"""How a phase is written (PhaseController), what it is given (PhaseContext) and what it returns.

A phase brings its settings, its mathematics and the parts of its state. `PhaseContext.steps` gives
it everything else: where to begin after a kill, checkpoints, progress, a clean stop, disk checks.
Rule: whatever influences the next step is in `parts` or comes from `generator`; that rule *is* the
promise that a killed run resumes to the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from agent_forge.contract.metrics import find_metric
from agent_forge.contract.replay import DecisionLog, MeasurementLog
from agent_forge.errors import ConfigError, Interrupted, NotFinite, NotFound
from agent_forge.store import paths
from agent_forge.store.checkpoint import CheckpointManager, capture_generators, restore_generators
from agent_forge.store.models import ModelStorage, load_directory
from agent_forge.store.pytree import pack, same
from agent_forge.store.records import read_metadata, read_state
from agent_forge.store.tensors import Weights, first_not_finite
from agent_forge.track.tracker import Tracker

if TYPE_CHECKING:
    from agent_forge.model.opened import OpenedModel

log = logging.getLogger(__name__)
Piece = TypeVar("Piece")
Network = nn.Module
Table = list[list[Any]]  # its first row is the head
NAMED_MODELS = "named_models"  # the artifact with the models that are handed over by name
SIZE_CLASSES = {"tiny": 50e6, "small": 500e6, "medium": 2e9, "large": math.inf}  # weights below
GENTLER = "settings that learn more gently need a new run"


@dataclass
class PhaseResult:
    """What every phase returns. Failures carry `error`; numbers are measured or absent."""

    success: bool
    model: Any
    phase_name: str
    metrics: dict[str, Any]
    artifacts: dict[str, Any]  # "models": those that it hands over, as references
    duration_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class PhasePlan:
    """What a phase would do, and what it would need."""

    steps: int
    parameters: int | None = None
    disk_bytes: int = 0
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()
    work: int = 0  # all of the phase, in the time of a step; 0 = its steps are all

    @property
    def size_class(self) -> str | None:
        """The size class of its models in words, or None where their size is not known."""
        size = self.parameters
        return None if size is None else next(n for n, most in SIZE_CLASSES.items() if size < most)


@dataclass(frozen=True)
class ModelRef:
    """A model on disk that a phase is handed."""

    name: str
    path: Path
    metadata: Mapping[str, Any]

    def weights(self) -> dict[str, torch.Tensor]:
        """Its weights, verified against their sha256."""
        return load_directory(self.path)[0]

    def artifact(self, name: str) -> ModelRef | None:
        """A further model that the phase which made this one handed over by name, or None."""
        state = read_state(self.path.parent) or {}
        # A run that recorded no names has it in the folder of that name beside this model.
        named = state.get("artifacts", {}).get(NAMED_MODELS, {name: name})
        path = self.path.parent / paths.safe_name(named.get(name, name))
        if name not in named or not (path / "config.json").exists():
            return None
        return ModelRef(name, path, read_metadata(path).model_dump())

    def open(self) -> OpenedModel:
        """Its network and tokenizer, verified likewise."""
        from agent_forge.model.opened import open_model  # transformers takes seconds to load

        return open_model(self.path)


class Stateful(Protocol):
    """A part of a phase's state: networks and optimizers are, and whatever else has these two."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


Parts = Mapping[str, Stateful]


class PhaseController(ABC):
    """One phase. `config` is its own frozen settings, `shared` the whole pipeline's."""

    name: ClassVar[str]

    def __init__(self, config: Any, shared: Any) -> None:
        self.config = config
        self.shared = shared

    def validate_input(self, models: Sequence[ModelRef]) -> tuple[bool, str]:
        """True if the phase can work with these models, which fit the handoff rules, or why not."""
        return True, ""

    @abstractmethod
    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        """What would be done, and how much disk and memory it would take."""

    @abstractmethod
    def run(self, ctx: PhaseContext) -> PhaseResult:
        """Do it."""


@dataclass
class _Loop:
    """A loop over steps. `beginning` is the state before the first, until a checkpoint has it."""

    stage: str
    manager: CheckpointManager
    parts: Parts
    beginning: tuple[Any, Any] | None = None
    step: int = 0


@dataclass
class PhaseContext:
    """What a phase works with. It prints nothing, builds no paths and opens no files itself."""

    phase: str
    session_id: str
    folder: Path
    inputs: Sequence[ModelRef]
    device: str
    seed: int
    tracker: Tracker
    storage: ModelStorage
    should_stop: Callable[[], bool]
    check_resources: Callable[[], None]
    checkpoint_every: int
    check_every: int
    keep_checkpoints: int
    fingerprint: str  # of all that the phase's result depends on
    planned: int = 0  # all work of the phase, in steps
    _generators: dict[str, torch.Generator] = field(default_factory=dict)
    _stages: set[str] = field(default_factory=set)
    _done: int = 0  # work of the stages that have begun, all of their steps
    _began: float = field(default_factory=time.monotonic)
    _seconds_before: float = 0.0  # that earlier attempts took
    _logged: int = 0  # records that the phase has come by
    _kept: int = 0  # records of earlier attempts that are in metrics.jsonl
    _loop: _Loop | None = None  # the stage that is running

    def __post_init__(self) -> None:
        """Take back what this phase logged after its last checkpoint, whichever stage's it was."""
        self.decisions = DecisionLog(self.folder)
        self.once = MeasurementLog(self.folder, self.fingerprint).once
        folders = sorted((self.folder / paths.CHECKPOINTS).glob("*"))
        notes = [note for place in folders for note in CheckpointManager(place).notes()]
        sure = max((note["logged"] for note in notes), default=0)
        self._seconds_before = max((note["seconds"] for note in notes), default=0.0)
        self._kept = self.tracker.metrics.keep(self.phase, sure)
        if self._kept < sure:
            log.warning("%s: %d metrics are missing in the file", self.phase, sure - self._kept)

    @property
    def seconds(self) -> float:
        """Time that the phase took, all attempts together, as far as checkpoints tell."""
        return self._seconds_before + time.monotonic() - self._began

    def generator(self, name: str) -> torch.Generator:
        """A random generator of this name: same seed, same stream; kept in checkpoints."""
        if name not in self._generators:
            self._generators[name] = torch.Generator().manual_seed(self._seed_of(name))
        return self._generators[name]

    def _seed_of(self, name: str) -> int:
        digest = hashlib.sha256(f"{self.seed}/{self.phase}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def log(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Record measured values. A name must be in the table; NaN stops the run honestly."""
        # Tensors and numpy scalars are taken for their value.
        values = {n: v.item() if hasattr(v, "item") else v for n, v in metrics.items()}
        for name, value in values.items():
            if find_metric(name) is None:
                raise ValueError(f"metric {name!r} is not in contract/metrics.json")
            if not math.isfinite(value):
                raise NotFinite(f"{name} became {value} at step {step}", hint=GENTLER)
        self._logged += 1
        if self._logged > self._kept:  # else it was logged before the run was interrupted
            self.tracker.log(self.phase, step, values)

    def steps(
        self, total: int, parts: Parts, stage: str = "main", *, rolls_back: bool = False
    ) -> Iterator[int]:
        """The steps still to do, 1 to `total`; every part is restored first and saved on the way.

        A phase with several loops gives each its `stage`; one that was finished yields nothing
        and only restores its parts. A loop that was left early runs again from its last checkpoint
        on resume, to the same end. With `rolls_back` the loop may call `roll_back`.
        """
        if stage in self._stages:
            raise ValueError(f"stage {stage!r} is used twice in phase {self.phase}")
        self._stages.add(stage)
        place = paths.child(self.folder, paths.CHECKPOINTS, paths.safe_name(stage, "stage"))
        loop = _Loop(stage, CheckpointManager(place, self.keep_checkpoints), parts)
        if rolls_back and not loop.manager.anchors():
            state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            loop.beginning = state, capture_generators(self._generators)
        self._restore(loop)
        self._tell_loop(stage, loop.step, total)
        before = self._done
        self._done += total
        while loop.step < total:
            loop.step = step = loop.step + 1
            self._loop = loop
            yield step
            if loop.step != step:
                continue  # rolled back
            self._tell_step(stage, step, total, before + step)
            if self.should_stop():
                self._save(loop)
                raise Interrupted(f"stopped after step {step} of {total}")
            regular = step % self.checkpoint_every == 0
            if regular or step == total:
                self._save(loop)
                loop.beginning = None if regular else loop.beginning
            if step % self.check_every == 0:
                self.check_resources()

    def pieces(self, stage: str, pieces: Sequence[Piece], work: int = 1) -> Iterator[Piece]:
        """Long pieces of work, each of `work` steps; the run can stop between two of them."""
        self._tell_loop(stage, 0, len(pieces))
        for number, piece in enumerate(pieces, start=1):
            if self.should_stop():  # asked for between two pieces
                raise Interrupted(f"stopped before part {number} of {stage}")
            yield piece
            self._done += work
            self._tell_step(stage, number, len(pieces), self._done)

    def tell(self, event: str, **details: Any) -> None:
        """Say what is being done between the steps; for the display, not for the record."""
        self.tracker.tell({"event": event, "phase": self.phase, **details})

    def _tell_loop(self, stage: str, first: int, total: int) -> None:
        name = self.phase if stage == "main" else f"{self.phase} {stage}"
        self.tell("loop", name=name, first=first, total=total)

    def _tell_step(self, stage: str, step: int, total: int, done: int) -> None:
        """Tell where the stage is, and how much of the whole phase is done and left."""
        left = max(self.planned, self._done) - done
        progress = {"step": step, "total": total, "done": done, "left": left}
        self.tell("step", stage=stage, **progress, seconds=round(self.seconds, 3))

    def roll_back(self, reason: str) -> None:
        """Put every part back to the last regular checkpoint; the loop goes on from there.

        Checkpoints of an interruption do not count, so that it makes no difference whether there
        was one. What was logged stays: it was measured.
        """
        loop = self._loop
        assert loop is not None, "roll_back is for the body of a loop over steps"
        checkpoint = loop.manager.load_anchor()
        if checkpoint is not None:
            self._put_back(loop.parts, checkpoint.state["parts"], checkpoint.generators)
        elif loop.beginning is not None:
            self._put_back(loop.parts, *copy.deepcopy(loop.beginning))
        else:
            raise NotFinite(f"{reason}; there is no checkpoint to go back to")
        step = checkpoint.step if checkpoint else 0
        self.tracker.event("rolled_back", phase=self.phase, at=loop.step, to=step, reason=reason)
        loop.step = step

    def save_model(
        self, name: str, model: nn.Module | Weights, metadata: Mapping[str, Any], **options: Any
    ) -> ModelRef:
        """Save a model with the options of `ModelStorage.save_model`, and tell the sinks."""
        names = (self.session_id, self.phase, name)
        model_id = self.storage.save_model(model, *names, metadata, **options)
        reference = self.model(name)
        for sink in self.tracker.sinks:
            sink.artifact(model_id, reference.path)
        return reference

    def model(self, name: str) -> ModelRef:
        """A model that this phase has saved, perhaps before it was interrupted."""
        path = self.storage.find(paths.model_id_for(self.session_id, self.phase, name))
        return ModelRef(name, path, read_metadata(path).model_dump())

    def _restore(self, loop: _Loop) -> None:
        """Put a loop back to its newest checkpoint, if it has one."""
        if not loop.manager.steps():
            return
        try:
            checkpoint = loop.manager.load_checkpoint()
        except NotFound as error:
            log.warning("%s; the stage begins anew", error)
            return
        path, saved, parts = checkpoint.path, checkpoint.state["parts"], loop.parts
        if checkpoint.state["fingerprint"] != self.fingerprint:
            hint = "start a new session for the new settings"
            raise ConfigError(f"{path} belongs to other settings or inputs", hint=hint)
        if set(saved) != set(parts):
            raise ConfigError(f"{path} holds {sorted(saved)}, but the phase has {sorted(parts)}")
        self._put_back(parts, saved, checkpoint.generators)
        self._logged, loop.step = checkpoint.note["logged"], checkpoint.step

    def _put_back(self, parts: Parts, saved: dict[str, Any], generators: dict[str, Any]) -> None:
        """Every part and every generator as saved; a generator made since begins anew."""
        for name, part in parts.items():
            part.load_state_dict(saved[name])
            if not same(part.state_dict(), saved[name]):
                raise ConfigError(f"part {name!r} did not come back as it was saved")
        given = {name: self.generator(name) for name in generators["given"]}
        for name in self._generators.keys() - given.keys():
            self._generators[name].manual_seed(self._seed_of(name))
        restore_generators(generators, given)

    def _save(self, loop: _Loop) -> None:
        step, parts = loop.step, {name: part.state_dict() for name, part in loop.parts.items()}
        state = {"fingerprint": self.fingerprint, "parts": parts}
        if bad := first_not_finite(pack(state)[0]):
            text = f"the state at step {step} holds NaN or infinity ({bad.lstrip('0123456789')})"
            raise NotFinite(text, hint=GENTLER)
        self.tracker.metrics.sync()
        note = {"logged": self._logged, "seconds": self.seconds}
        anchor = step % self.checkpoint_every == 0
        loop.manager.save(state, step=step, generators=self._generators, note=note, anchor=anchor)
        within = {} if loop.stage == "main" else {"stage": loop.stage}
        self.tell("checkpoint", **within, step=step)


@dataclass(frozen=True)
class PhaseHeadline:
    """A phase in one line: a measure on unseen items, before and after it, and the verdict."""

    measure: str
    before: float | None  # None where nothing went in
    after: float
    verdict: str


def as_markdown(table: Table) -> str:
    """A table for a card."""
    rows = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in table]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@dataclass
class PhaseReport:
    """What a phase found, told once."""

    headline: PhaseHeadline
    summary: str
    metrics: Mapping[str, Any] = field(default_factory=dict)  # by the specification's names
    tables: Sequence[Table] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # whatever else is worth recording

    def card(self) -> str:
        """The verdict and the first table as Markdown, for the cards of the models."""
        parts = ["## Measured on unseen items", self.headline.verdict]
        return "\n\n".join([*parts, *map(as_markdown, self.tables[:1])])

    def result(
        self, ctx: PhaseContext, models: Sequence[ModelRef], model: Any, **named: ModelRef
    ) -> PhaseResult:
        """The result: `models` are handed over, `named` ones by name, `model` is in memory."""
        artifacts = {
            "models": list(models),
            **self.details,
            "summary": self.summary,
            "tables": list(self.tables),
            "headline": asdict(self.headline),
            NAMED_MODELS: {name: ref.name for name, ref in named.items()},
        }
        return PhaseResult(True, model, ctx.phase, dict(self.metrics), artifacts, ctx.seconds)
