"""Whether a folder can be written at all, told before any work."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agent_forge.errors import CannotWrite, NameRefused
from agent_forge.store import files

NAME_BYTES, PATH_BYTES = 255, 4096  # the longest that file systems take
MARK_BYTES = len(f"{files.TRASH}00000000-")  # what an unfinished folder has before its name


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def require_short(folder: Path) -> None:
    """Refuse a folder whose name, or that of its unfinished version, the disk would not take."""
    sizes = [len(os.fsencode(part)) for part in folder.parts]
    sizes[-1:] = [MARK_BYTES + size for size in sizes[-1:]]
    whole = len(os.fsencode(folder.absolute())) + MARK_BYTES + NAME_BYTES
    if max(sizes, default=0) > NAME_BYTES or whole > PATH_BYTES:
        raise NameRefused(
            f"{str(folder)[:60]}... is too long a name",
            hint=f"the name of a folder has at most {NAME_BYTES - MARK_BYTES} bytes here",
        )


def require_writable(folder: Path) -> None:
    """Refuse work whose result could not be written to a folder; a look that leaves no trace."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CannotWrite(folder, f"{there} is not a folder")
    probe = nearest(folder) / f"{files.TEMP}{secrets.token_hex(4)}-probe"
    with files.disk_errors(folder):
        os.close(files.disk.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        files.disk.remove(probe)
