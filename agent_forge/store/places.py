"""Whether a folder can be written at all, told before any work."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agent_forge.errors import CannotWrite
from agent_forge.store import files


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def require_writable(folder: Path) -> None:
    """Refuse work whose result could not be written to a folder; a look that leaves no trace."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CannotWrite(folder, f"{there} is not a folder")
    probe = nearest(folder) / f"{files.TEMP}{secrets.token_hex(4)}-probe"
    with files.disk_errors(folder):
        os.close(files.disk.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        files.disk.remove(probe)
