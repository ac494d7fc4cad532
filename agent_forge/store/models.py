"""ModelStorage: model directories, saved whole and verified on every load.

A directory holds model.safetensors, config.json, tokenizer files, metadata.json, metrics.json,
README.md (the card, made from what was recorded) and manifest.json.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.quant.packed import packing_of
from agent_forge.store import files, lock, paths, tensors
from agent_forge.store.records import ModelMetadata, read_metadata
from agent_forge.store.registry import ModelRegistry, join_tags

WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}  # in its header, as transformers has it
CARD_HEAD = "---\nlibrary_name: agent-forge\n---"
LoadedModel = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]


class ModelStorage:
    """Saves and loads models below a storage root. `build` makes the network of a config, and
    `describe` the config of a network that is saved without one."""

    def __init__(
        self,
        base_path: Path | str = "storage",
        registry: ModelRegistry | None = None,
        build: Callable[[dict[str, Any]], nn.Module] | None = None,
        describe: Callable[[nn.Module], dict[str, Any]] | None = None,
    ) -> None:
        self.base_path = Path(base_path)
        self.registry = registry or ModelRegistry(self.base_path / "registry" / "model_registry.db")
        self._build, self._describe = build, describe

    def save_model(
        self,
        model: nn.Module | tensors.Weights,
        session_id: str,
        phase_name: str,
        model_name: str,
        metadata: Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        tokenizer_files: Mapping[str, bytes] | None = None,
        tags: Sequence[str] = (),
        beside: Mapping[str, bytes] | None = None,
        card_head: str = CARD_HEAD,
        card_text: str = "",
        parameters: int = 0,
        check: Callable[[Path], object] | None = None,
    ) -> str:
        """Save a model with its files (contents by name) and its card (`card_head` is its YAML,
        `card_text` Markdown), register it, and return its id. `parameters` is for packed models:
        their codes are not counted. What `check` refuses, by an error, in the finished folder is
        neither put in place nor registered."""
        path = paths.model_directory(self.base_path, session_id, phase_name, model_name)
        join_tags(tags)
        self.registry.get_session_status(session_id)
        measured = files.finite(dict(metrics or {}))
        state = model.state_dict() if isinstance(model, nn.Module) else model
        if config is None and self._describe and isinstance(model, nn.Module):
            config = self._describe(model)
        weights, tied = tensors.split_tied(state)
        files.require_space(path, tensors.tensor_bytes(weights) + tensors.OVERHEAD_BYTES)
        session = self.base_path / "sessions" / session_id
        with lock.held(session), files.staging(path, check=check) as stage:
            with stage.writing(WEIGHTS) as writer:
                tensors.write_tensors(writer, weights, METADATA)
            own = {
                "model_id": paths.model_id_for(session_id, phase_name, model_name),
                "session_id": session_id,
                "phase_name": phase_name,
                "model_name": model_name,
                "created_at": time.time(),
                "parameters": parameters or sum(tensor.numel() for tensor in weights.values()),
                "size_mb": stage.records[WEIGHTS]["bytes"] / 1e6,
                "sha256": stage.records[WEIGHTS]["sha256"],
                "tied_weights": tied,
                "tags": list(tags),
            }
            record = ModelMetadata(**{**files.finite(dict(metadata)), **own})
            stage.write_json("config.json", config or {})
            stage.write_json("metadata.json", record.model_dump())
            stage.write_json("metrics.json", measured)
            card = model_card(record, measured, card_text, card_head)
            stage.write_bytes("README.md", card.encode())
            for name, content in (*(beside or {}).items(), *(tokenizer_files or {}).items()):
                stage.write_bytes(name, content)
        names = (session_id, phase_name, model_name)
        return self.registry.register_model(*names, path, record.model_dump())

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
        row = self.registry.get_model(model_id, session_id, phase_name, model_name)
        folder = self.find(row["model_id"])
        weights, metadata, config = load_directory(folder)
        if packing_of(config, folder):  # which computes otherwise than a network of its weights
            raise ConfigError(f"{folder} is packed", hint="open_model opens it")
        if metadata["model_id"] != row["model_id"]:
            raise DamagedFile(row["model_path"], f"it says it is {metadata['model_id']}")
        model = self._build(config)
        model.load_state_dict(weights)
        return model, metadata

    def find(self, model_id: str) -> Path:
        """Return the directory of a registered model."""
        path = Path(self.registry.get_model(model_id)["model_path"])
        for place in (path, *path.parents):
            if place == self.base_path:
                break
            files.refuse_link(place)
        return path


def load_directory(path: Path) -> LoadedModel:
    """Verify a model directory; return its weights, decoded if packed, its metadata and config."""

    def read(place: Path) -> LoadedModel:
        records = files.verify(place)
        for name in (WEIGHTS, "metadata.json", "config.json"):
            if name not in records:
                raise DamagedFile(place, f"it has no {name}")
        metadata = read_metadata(place)
        weights = tensors.read_tensors(place / WEIGHTS)
        if not set(metadata.tied_weights.values()) <= set(weights):
            raise DamagedFile(place, "its tied weights name some that are not there")
        config = files.read_json(place / "config.json")
        weights = tensors.join_tied(weights, metadata.tied_weights)
        if packing := packing_of(config, place):
            weights = packing.unpack(weights, place)
        return weights, metadata.model_dump(), config

    return files.reading(path, read)


def model_card(
    metadata: ModelMetadata, metrics: Mapping[str, Any], text: str = "", head: str = CARD_HEAD
) -> str:
    """Return the card of a model: its metadata, `text`, samples, and the measured metrics."""
    extra = dict(metadata.model_extra or {})
    samples = extra.pop("samples", [])
    if text:  # it tells what these hold, and for people
        extra = {name: v for name, v in extra.items() if not isinstance(v, dict | list)}
    facts = {
        "model id": f"`{metadata.model_id}`",
        "parameters": f"{metadata.parameters:,}",
        "size": f"{metadata.size_mb:.2f} MB",
        "sha256": f"`{metadata.sha256}`",
    }
    rows = [*_table_rows(facts), *_table_rows(dict(sorted(extra.items())))]
    made = f"Made by phase `{metadata.phase_name}` of run `{metadata.session_id}`."
    lines = [head, f"# {metadata.model_name}", "", made, ""]
    lines += ["| | |", "|---|---|", *rows, "", *([text, ""] if text else [])]
    if isinstance(samples, list) and samples:
        lines += ["## Samples", ""]
        for sample in samples:
            lines += [f"> {_cell(sample['prompt'])}", "", _cell(sample["text"]), ""]
    table = ["| metric | value |", "|---|---|", *_table_rows(dict(sorted(metrics.items())))]
    measured = table if metrics else ["Nothing was measured on this model."]
    return "\n".join([*lines, "## Measured", "", *measured, ""])


def _table_rows(values: Mapping[str, Any]) -> list[str]:
    return [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
