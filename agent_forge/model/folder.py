"""A model directory, opened: ours verified against its sha256, any other by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.store import files

if TYPE_CHECKING:
    from torch import nn

MODEL_TYPE = "agent_forge"
# A tokenizer has at least one of these, whoever made it.
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a language model; refuses at once what is none."""
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder", hint="forge models lists the models of runs")
    if not (folder / "config.json").is_file():
        raise NotFound(f"{folder} has no config.json: it is not a model directory")
    config = files.read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise DamagedFile(folder / "config.json", "not the config of a model")
    if "model_type" not in config:
        raise ConfigError(f"{folder} is not a language model: its config names no model_type")
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise DamagedFile(
            folder,
            "it has no tokenizer",
            hint="copy tokenizer.json and tokenizer_config.json of its base model into it",
        )
    return config


def open_model(folder: Path) -> tuple[nn.Module, Any]:
    """The model in a folder. Ours comes as its network, any other with its own tokenizer."""
    config = read_config(folder)
    # Here, so that what is no model is refused before transformers is loaded.
    from agent_forge.model.hf import build_network, load_foreign
    from agent_forge.store.models import load_directory

    model: nn.Module
    tokenizer = None
    if config["model_type"] != MODEL_TYPE:
        model, tokenizer = load_foreign(folder)
    elif not (folder / "metadata.json").exists():  # a merge, or another tool's copy
        model = load_foreign(folder)[0].network  # type: ignore[assignment]
    else:
        weights, _, config = load_directory(folder)
        model = build_network(config)
        model.load_state_dict(weights)
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise DamagedFile(folder, f"{name} holds NaN or infinity", hint="fetch it again")
    return model.eval(), tokenizer
