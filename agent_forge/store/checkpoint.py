"""CheckpointManager: everything that influences the next step, written whole and verified on load.

A checkpoint is a directory `step_00000030` with tensors.safetensors, state.json and a manifest:
the caller's state and every random generator. Order is the step in the name, never a file time. A
damaged one is named and skipped. When the disk fills up, older ones make room.
"""

import contextlib
import logging
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from agent_forge.errors import DamagedFile, DiskFull, NotFound
from agent_forge.store import files
from agent_forge.store.pytree import pack, unpack
from agent_forge.store.tensors import OVERHEAD_BYTES, read_tensors, tensor_bytes, write_tensors

NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
FILES = {"tensors.safetensors", "state.json", files.MANIFEST}
Generators = Mapping[str, torch.Generator]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    path: Path
    step: int
    state: dict[str, Any]
    generators: dict[str, Any]
    note: Any = None

    def __getitem__(self, key: str) -> Any:
        """What `save_checkpoint` wrote, by the specification's names."""
        return self.step if key == "step" else self.state[key.removesuffix("_state_dict")]

    def __contains__(self, key: str) -> bool:
        return key == "step" or key.removesuffix("_state_dict") in self.state


class CheckpointManager:
    """Keeps the last `keep_last` checkpoints of a directory, and the newest anchor."""

    def __init__(
        self, checkpoint_dir: Path | str = "storage/checkpoints", keep_last: int = 5
    ) -> None:
        if keep_last < 1:
            raise ValueError("keep_last must be at least 1")
        self.checkpoint_dir = Path(checkpoint_dir)
        self.keep_last = keep_last

    def save_checkpoint(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        epoch: int = 0,
        step: int = 0,
        metadata: Mapping[str, Any] | None = None,
        *,
        generators: Generators | None = None,
    ) -> Path:
        """Write the training state of the specification's example at `step`."""
        state = {
            "model": dict(model.state_dict() if isinstance(model, nn.Module) else model),
            "optimizer": optimizer.state_dict() if optimizer is not None else {},
            "epoch": epoch,
            "metadata": dict(metadata or {}),
        }
        return self.save(state, step=step, generators=generators)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        generators: Generators | None = None,
        note: Any = None,
        anchor: bool = True,
    ) -> Path:
        """Write any nested state and every random generator, and remove what is too old.

        A roll-back goes to an `anchor`; the others only serve to resume after an interruption.
        Checkpoints of later steps were given up by a roll-back and are removed first.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self.remove(path for path in self.steps() if _step_of(path) > step)
        content = {"state": dict(state), "generators": capture_generators(generators)}
        tensors, skeleton = pack(content)
        record = {
            "schema_version": files.SCHEMA_VERSION,
            "step": step,
            "epoch": 0,  # older versions look for it
            "note": note,
            "anchor": anchor,
            "state": skeleton,
        }
        path = self.checkpoint_dir / f"step_{step:08d}"
        if path in self.steps() and not _is_whole(path):
            self.remove([path])
        try:
            self._write(path, tensors, record)
        except DiskFull as full:
            if not self.make_room(tensor_bytes(tensors) + OVERHEAD_BYTES):
                raise full
            log.warning("disk full: older checkpoints were removed to save step %d", step)
            self._write(path, tensors, record)
        self.prune()
        return path

    def load_checkpoint(self, checkpoint_path: Path | str | None = None) -> Checkpoint:
        """Read one checkpoint, or the newest that is whole; damaged ones are named and skipped."""
        if checkpoint_path is not None:
            return _read(Path(checkpoint_path))
        skipped: list[str] = []
        for path in reversed(self.steps()):
            try:
                return _read(path)
            except DamagedFile as error:
                log.warning("%s; going back to the checkpoint before it", error)
                skipped.append(str(error))
        raise NotFound(f"no usable checkpoint in {self.checkpoint_dir}", hint="; ".join(skipped))

    def load_anchor(self) -> Checkpoint | None:
        """Read the newest anchor that is whole; None if there is none."""
        for path in self.anchors():
            with contextlib.suppress(DamagedFile):
                return _read(path)
        return None

    def anchors(self) -> list[Path]:
        """Return the checkpoints that a roll-back may go to, newest first, by readable records."""
        records = {path: _record_of(path) for path in reversed(self.steps())}
        return [path for path, record in records.items() if record.get("anchor", bool(record))]

    def notes(self) -> list[Any]:
        """Return the notes of all checkpoints that can be read, without reading their tensors."""
        return [record["note"] for record in map(_record_of, self.steps()) if "note" in record]

    def steps(self) -> list[Path]:
        """Return the checkpoint directories, oldest first."""
        if not self.checkpoint_dir.is_dir() or self.checkpoint_dir.is_symlink():
            return []
        named = (p for p in self.checkpoint_dir.iterdir() if NAME.fullmatch(p.name))
        return sorted((p for p in named if p.is_dir() and not p.is_symlink()), key=_step_of)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        """Remove checkpoints; one that holds more than was written here gets another name."""
        for path in checkpoints:
            files.make_way(path, lambda folder: {p.name for p in folder.iterdir()} <= FILES)
            if path.exists():
                files.remove_tree(path, self.checkpoint_dir)

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor], record: Any) -> None:
        files.require_space(path, tensor_bytes(tensors) + OVERHEAD_BYTES)
        with files.staging(path) as stage:
            with stage.writing("tensors.safetensors") as writer:
                write_tensors(writer, tensors)
            stage.write_bytes("state.json", files.to_json(record, sort_keys=False))

    def prune(self) -> None:
        """Keep the last ones that have all their bytes, and the anchor."""
        whole = [path for path in self.steps() if _is_whole(path, content=False)]
        keep = {*whole[-self.keep_last :], *self.anchors()[:1]}
        self.remove(path for path in self.steps() if path not in keep)

    def make_room(self, needed: int) -> bool:
        """Remove checkpoints, oldest first and the anchor last, until `needed` bytes are free.

        The newest whole one stays; if even that would not do, all stay. True if there is room now.
        """
        newest = next((path for path in reversed(self.steps()) if _is_whole(path)), None)
        anchor = self.anchors()[:1]
        others = sorted((p for p in self.steps() if p != newest), key=lambda p: p in anchor)
        if files.free_bytes(self.checkpoint_dir) + sum(map(files.tree_bytes, others)) < needed:
            return False
        for path in others:
            if files.free_bytes(self.checkpoint_dir) >= needed:
                break
            self.remove([path])
        return files.free_bytes(self.checkpoint_dir) >= needed


def capture_generators(generators: Generators | None = None) -> dict[str, Any]:
    """Return the state of every random generator: Python, numpy, torch, its devices, the given."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "given": {name: g.get_state() for name, g in (generators or {}).items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_generators(state: Mapping[str, Any], generators: Generators | None = None) -> None:
    """Undo capture_generators; every given generator must be in the state, and the reverse."""
    given = generators or {}
    if set(state["given"]) != set(given):
        saved = sorted(state["given"])
        raise ValueError(f"generators {sorted(given)} do not fit the checkpoint's {saved}")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for name, generator in given.items():
        generator.set_state(state["given"][name])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_whole(path: Path, *, content: bool = True) -> bool:
    with contextlib.suppress(DamagedFile):
        files.verify(path, content=content)
        return True
    return False


def _record_of(path: Path) -> dict[str, Any]:
    """Return the plain part of a checkpoint, without its tensors; empty if it is not readable."""
    try:
        record = files.read_json(path / "state.json")
    except (DamagedFile, OSError):
        return {}
    return record if isinstance(record, dict) else {}


def _read(path: Path) -> Checkpoint:
    if not NAME.fullmatch(path.name):
        raise NotFound(f"{path} is not a checkpoint directory (step_00000030)")
    step = _step_of(path)

    def read(place: Path) -> Checkpoint:
        files.verify(place)
        record = files.read_json(place / "state.json")
        try:
            files.refuse_newer(place, record)
            if record["step"] != step:
                raise ValueError(f"it holds step {record['step']}")
            content = unpack(read_tensors(place / "tensors.safetensors"), record["state"])
            return Checkpoint(place, step, **content, note=record["note"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFile(place, f"not a checkpoint ({error!r})") from error

    return files.reading(path, read)
