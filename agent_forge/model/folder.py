"""Model folders: what is in one, and what in it is refused, with the file and the reason.

No code of a folder is ever run. A model is named by a folder, a file, or `base+adapter`.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_forge.errors import ConfigError, DamagedFile, HostileInput, NotFound
from agent_forge.model.adapter import adapt, is_adapter, read_settings
from agent_forge.model.weights import INDEX, NAMES, SINGLE, Weights, checked_sha256, read_shards
from agent_forge.store import files

MODEL_TYPE = "agent_forge"
CONFIG = "config.json"
# Stems of the JSON files that transformers reads, and where it would look for code to run.
RECORDS = NAMES["record_files"]
RECORD_BYTES = 16 << 20
# By these transformers would read other files than the usual ones.
OTHER_FILES = ("configuration_files", "fast_tokenizer_files", "transformers_weights")
# What transformers hands to a tokenizer: as texts these would be paths that it opens.
ARGUMENTS = ("vocab", "merges", "init_inputs")
TOKENIZER = ("tokenizer_config", "special_tokens_map")
NO_PATHS = ("chat_template", "name_or_path", "_name_or_path")  # never opened, whatever they say
SHARDS = "shard-[0-9]*-model-*-of-*.safetensors"  # which it would take instead of the weights
VERIFIED_BYTES = 1_000_000_000  # files of our own are compared whole up to this much of weights
# A tokenizer has at least one of these, whoever made it.
VOCABULARIES = NAMES["vocabulary_files"]


def refuse_code(folder: Path) -> None:
    """Refuse a folder that asks for code of its own to be run, or has damaged records."""
    for stem in RECORDS:
        path = folder / f"{stem}.json"
        if not path.is_file():
            continue
        if path.stat().st_size > RECORD_BYTES:
            raise HostileInput(f"{path} is too large: at most {RECORD_BYTES:,} bytes are read")
        record = files.read_json(path)
        if not isinstance(record, dict):
            raise DamagedFile(path, "not a record")
        files.refuse_newer(path, record)
        for key, value in entries(record):
            if isinstance(value, float) and not math.isfinite(value):
                raise DamagedFile(path, f"{key} is {value}")
            if key == "auto_map" and value:
                problem = "asks for code of its own to be run (auto_map); none is ever run"
                hint = "if transformers knows this architecture itself, remove auto_map in a copy"
                raise HostileInput(f"{path} {problem}", hint=hint)
            if key in OTHER_FILES and value:
                problem = f"{path}: {key} names other files than those that are read"
                hint = f"remove {key} in a copy, with the file of your choice in place"
                raise HostileInput(problem, hint=hint)
        for key, value in record.items():
            if key.endswith("_file") and isinstance(value, str) and Path(value).name != value:
                raise HostileInput(f"{path}: {key} names {value!r}, which is outside its folder")
        if stem in TOKENIZER:
            _refuse_paths(path, record)


def _refuse_paths(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse settings of a tokenizer that would have a file opened outside of its folder."""
    inner = [v for key, v in record.items() if key.endswith("_kwargs") and isinstance(v, dict)]
    for key, value in [item for part in (record, *inner) for item in part.items()]:
        argument = key in ARGUMENTS and (isinstance(value, str) or key == "init_inputs")
        if argument and value:
            problem = f"{path}: {key} is {str(value)!r}; a tokenizer is read from its own files"
            raise HostileInput(problem, hint=f"remove {key} in a copy")
        free = key.endswith("token") or key in NO_PATHS
        if not free and isinstance(value, str) and _is_outside(value, path.parent):
            raise HostileInput(f"{path}: {key} names {value!r}, a file outside its folder")


def _is_outside(name: str, folder: Path) -> bool:
    """True if a text names a file of this machine that is not in a folder."""
    try:
        return Path(name).is_file() and folder.resolve() not in Path(name).resolve().parents
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def entries(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a record with its value, those of records inside it too."""
    waiting: list[Any] = [record]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def read_config(ref: str | Path) -> dict[str, Any]:
    """The config of a model; what is no language model is refused before a weight is read."""
    folder = home_of(ref)
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder", hint="forge models lists the models of runs")
    refuse_code(folder)
    if not (folder / CONFIG).is_file():
        raise NotFound(f"{folder} has no {CONFIG}: it is not a model directory")
    config: dict[str, Any] = files.read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder} is not a language model: its config names no model_type")
    if not any((folder / name).is_file() for name in VOCABULARIES):
        hint = "copy tokenizer.json and tokenizer_config.json of its base model into it"
        raise DamagedFile(folder, "it has no tokenizer", hint=hint)
    return config


def home_of(ref: str | Path) -> Path:
    """The folder with config and tokenizer of a model: of an adapter, that of its base."""
    path = _path(ref)
    if not path.exists() and "+" in str(ref):
        return home_of(str(ref).rpartition("+")[0])
    if path.is_file():
        return path.parent
    if not is_adapter(path):
        return path
    base = read_settings(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).exists():
        missing = f"an adapter for {base or 'an unnamed base'}, which is not on this machine"
        raise NotFound(f"{path} is {missing}", hint=f"name the base as well: BASE+{path}")
    if is_adapter(Path(base)):
        hint = f"name all: BASE+{base}+{path}"
        raise ConfigError(f"{path} is an adapter on the adapter {base}", hint=hint)
    return Path(base)


def _path(ref: str | Path) -> Path:
    try:
        return Path(ref).expanduser()
    except RuntimeError as error:
        raise NotFound(f"{ref}: {error}") from None


def open_weights(ref: str | Path) -> Weights:
    """The tensors of a model, read when asked for; `base+adapter` puts a LoRA adapter on a base."""
    text = str(ref)
    path = _path(text)
    if not path.exists() and "+" in text:
        base, _, adapter = text.rpartition("+")
        refuse_code(_path(adapter))
        return adapt(open_weights(base), _path(adapter))
    if not path.exists():
        raise NotFound(f"{text} does not exist", hint="a model is a folder or file on this machine")
    folder = path if path.is_dir() else path.parent
    _refuse_edited(folder)
    refuse_code(folder)
    if path.is_file():
        return read_shards(text, path)
    if is_adapter(path):
        return adapt(open_weights(home_of(path)), path)
    if other := next(path.glob(SHARDS), None):
        raise HostileInput(f"{other} is read by transformers instead of the weights beside it")
    # As in transformers: of a model that is there twice the single file counts.
    for file in (path / name for pair in zip(SINGLE, INDEX, strict=True) for name in pair):
        if file.is_file():
            return read_shards(text, file)
    raise NotFound(f"{text} holds no weights", hint=f"it needs one of {', '.join(SINGLE + INDEX)}")


def _refuse_edited(folder: Path) -> None:
    """Refuse a folder of our own in which a file is not what was written."""

    def compare(place: Path) -> None:
        records = files.verify(place, content=False)
        weights = {name for name in records if name.endswith((".safetensors", ".bin"))}
        if sum(records[name]["bytes"] for name in weights) > VERIFIED_BYTES:
            records = {name: record for name, record in records.items() if name not in weights}
        for name, record in records.items():
            checked_sha256(place / name, record)

    if (folder / files.MANIFEST).is_file():
        files.reading(folder, compare)
