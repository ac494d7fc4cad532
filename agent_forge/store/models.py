"""ModelStorage: model directories, saved whole and verified on every load.

A directory holds model.safetensors, config.json, tokenizer files, metadata.json, metrics.json,
README.md (the card) and manifest.json, and is registered in the registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.store import files, lock, names
from agent_forge.store.card import render_card
from agent_forge.store.metadata import ModelMetadata, read_metadata
from agent_forge.store.names import model_directory, model_id_for
from agent_forge.store.registry import ModelRegistry, join_tags
from agent_forge.store.tensors import (
    join_tied,
    read_tensors,
    split_tied,
    tensor_bytes,
    write_tensors,
)

WEIGHTS = "model.safetensors"
OVERHEAD_BYTES = 1 << 17  # header, metadata and card beside the weights
Weights = Mapping[str, torch.Tensor]
Build = Callable[[dict[str, Any]], nn.Module]
Loaded = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]


class ModelStorage:
    """Saves and loads models below a storage root. `build` makes the network of a config."""

    def __init__(
        self,
        base_path: Path | str = "storage",
        registry: ModelRegistry | None = None,
        build: Build | None = None,
    ) -> None:
        self.base_path = Path(base_path)
        self.registry = registry or ModelRegistry(self.base_path / "registry" / "model_registry.db")
        self._build = build

    def save_model(
        self,
        model: nn.Module | Weights,
        session_id: str,
        phase_name: str,
        model_name: str,
        metadata: Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        tokenizer_files: Sequence[Path] | Mapping[str, bytes] = (),
        tags: Sequence[str] = (),
        beside: Mapping[str, bytes] | None = None,
        story: str = "",
    ) -> str:
        """Save a model with all that belongs to it, register it, and return its id.

        `beside` are further files of it, `story` is what the card tells besides the figures.
        """
        path = model_directory(self.base_path, session_id, phase_name, model_name)
        join_tags(tags)
        self.registry.get_session_status(session_id)
        measured = files.finite(dict(metrics or {}))
        weights, tied = split_tied(_state_dict(model))
        files.require_space(path, tensor_bytes(weights) + OVERHEAD_BYTES)
        with lock.held(self.base_path / "sessions" / session_id), files.staging(path) as stage:
            with stage.writing(WEIGHTS) as writer:
                write_tensors(writer, weights, {"format": "pt"})
            record = ModelMetadata(
                **{
                    **files.finite(dict(metadata)),
                    "model_id": model_id_for(session_id, phase_name, model_name),
                    "session_id": session_id,
                    "phase_name": phase_name,
                    "model_name": model_name,
                    "created_at": time.time(),
                    "parameters": sum(tensor.numel() for tensor in weights.values()),
                    "size_mb": stage.records[WEIGHTS]["bytes"] / 1e6,
                    "sha256": stage.records[WEIGHTS]["sha256"],
                    "tied_weights": tied,
                    "tags": list(tags),
                }
            )
            stage.write_json("config.json", config or {})
            stage.write_json("metadata.json", record.model_dump())
            stage.write_json("metrics.json", measured)
            stage.write_bytes("README.md", render_card(record, measured, story).encode())
            _put(stage, beside or {})
            _put(stage, tokenizer_files)
        return self.registry.register_model(
            session_id,
            phase_name,
            model_name,
            path,
            record.model_dump(),
            size_mb=record.size_mb,
            parameters=record.parameters,
            tags=tags,
            created_at=record.created_at,
        )

    def load_model(
        self,
        model_id: str | None = None,
        session_id: str | None = None,
        phase_name: str | None = None,
        model_name: str | None = None,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Load a model by its id, or by session, phase and, if there are several, name."""
        if self._build is None:
            raise ConfigError("this storage was opened without a way to build networks")
        weights, metadata, config = self._load(model_id, session_id, phase_name, model_name)
        model = self._build(config)
        model.load_state_dict(weights)
        return model, metadata

    def load_weights(
        self,
        model_id: str | None = None,
        session_id: str | None = None,
        phase_name: str | None = None,
        model_name: str | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Like load_model, without building the network."""
        weights, metadata, _ = self._load(model_id, session_id, phase_name, model_name)
        return weights, metadata

    def find(self, *which: str | None, **named: str | None) -> Path:
        """The directory of a registered model, named as for load_model."""
        path = Path(self.registry.get_model(*which, **named)["model_path"])
        for place in (path, *path.parents):
            if place == self.base_path:
                break
            names.refuse_link(place)
        return path

    def _load(self, *which: str | None) -> Loaded:
        row = self.registry.get_model(*which)
        loaded = load_directory(self.find(row["model_id"]))
        if loaded[1]["model_id"] != row["model_id"]:
            raise DamagedFile(row["model_path"], f"it says it is {loaded[1]['model_id']}")
        return loaded


def load_directory(path: Path) -> Loaded:
    """Verify a model directory and return its weights, metadata and config."""

    def read(place: Path) -> Loaded:
        records = files.verify(place)
        for name in (WEIGHTS, "metadata.json", "config.json"):
            if name not in records:
                raise DamagedFile(place, f"it has no {name}")
        metadata = read_metadata(place)
        weights = read_tensors(place / WEIGHTS)
        if not set(metadata.tied_weights.values()) <= set(weights):
            raise DamagedFile(place, "its tied weights name some that are not there")
        config = files.read_json(place / "config.json")
        return join_tied(weights, metadata.tied_weights), metadata.model_dump(), config

    return files.reading(path, read)


def _put(stage: files.StagedFolder, sources: Sequence[Path] | Mapping[str, bytes]) -> None:
    """Further files of a model: copies, or contents by name."""
    if isinstance(sources, Mapping):
        for name, content in sources.items():
            stage.write_bytes(name, content)
    else:
        for source in sources:
            stage.copy(source)


def _state_dict(model: nn.Module | Weights) -> dict[str, torch.Tensor]:
    return dict(model.state_dict() if isinstance(model, nn.Module) else model)
