"""The config folder of the specification: pipeline_config.yaml and phase_configs/phaseN_*.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ConfigError

PIPELINE_FILE = "pipeline_config.yaml"
PHASE_FOLDER = "phase_configs"
SUFFIXES = (".yaml", ".yml", ".json")
Data = dict[str, Any]


def is_layout(path: Path) -> bool:
    """Whether `path` is such a folder, or the pipeline file in one."""
    return path.is_dir() or (path.name == PIPELINE_FILE and (path.parent / PHASE_FOLDER).is_dir())


def read_layout(path: Path, read: Callable[[Path], Data]) -> Data:
    """Join the files of a config folder into one mapping."""
    folder = path if path.is_dir() else path.parent
    data = read(folder / PIPELINE_FILE)
    phases = data.get("phases") or {}
    if not isinstance(phases, dict):
        raise ConfigError(f"{folder / PIPELINE_FILE}: phases: names with settings are expected")
    known = {f"{phase_folder(name)}.yaml": name for name in ORDER}
    for file in sorted((folder / PHASE_FOLDER).glob("*")):
        if file.suffix not in SUFFIXES or file.name.startswith("."):
            continue
        name = known.get(file.name)
        if name is None:
            raise ConfigError(f"{file}: no phase has that file; known: {', '.join(known)}")
        if name in phases:
            raise ConfigError(f"phase {name!r} is set in {PIPELINE_FILE} and again in {file}")
        phases[name] = read(file)
    return {**data, "phases": phases} if phases else data


def layout_files(pipeline_yaml: str, phase_yaml: dict[str, str]) -> dict[str, str]:
    """The files of a config folder: relative path -> text."""
    files = {PIPELINE_FILE: pipeline_yaml}
    for name, text in phase_yaml.items():
        files[f"{PHASE_FOLDER}/{phase_folder(name)}.yaml"] = text
    return files
