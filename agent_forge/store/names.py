"""Names and places: what may be a name, and where in the storage root things live."""

from __future__ import annotations

import re
from pathlib import Path

from agent_forge.config.phases import phase_folder
from agent_forge.errors import HostileInput, NameRefused

SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
RESERVED = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")  # device names on Windows
CHECKPOINTS = "checkpoints"  # folder beside the models of a phase


def safe_name(name: str, kind: str = "name") -> str:
    """Return the name if it can be one path segment on every system, and nothing more."""
    if not SAFE_NAME.fullmatch(name) or RESERVED.fullmatch(name):
        raise NameRefused(
            f"{kind} {name!r} is not allowed",
            hint="use 1 to 64 of a-z, 0-9, '_' and '-', beginning with a letter or digit",
        )
    return name


def child(root: Path, *names: str) -> Path:
    """The path root/names...; every name is safe and no link on the way leads elsewhere."""
    path = root
    for name in names:
        path = refuse_link(path / safe_name(name))
    return path


def refuse_link(path: Path) -> Path:
    """Return the path unless it is a link: inside the storage root there are none of ours."""
    if path.is_symlink():
        raise HostileInput(f"{path} is a link; the store follows none", hint="remove the link")
    return path


def model_id_for(session_id: str, phase_name: str, model_name: str) -> str:
    """One id per place, so that saving the same model again after a crash changes no name.

    No name has a dot in it, so no two places share an id.
    """
    return f"{phase_name}.{model_name}.{session_id}"


def model_directory(root: Path, session_id: str, phase_name: str, model_name: str) -> Path:
    """Where a model lives: storage/sessions/<session>/<phase folder>/<model>."""
    if model_name == CHECKPOINTS:
        raise NameRefused(f"a model cannot be named {model_name!r}: its checkpoints live there")
    folder = phase_folder(safe_name(phase_name, "phase"))
    return child(root, "sessions", session_id, folder, model_name)
