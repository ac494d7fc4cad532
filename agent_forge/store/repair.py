"""Make a damaged registry again from the run directories, which hold the truth."""

from __future__ import annotations

import time
from pathlib import Path

from agent_forge.errors import Busy, DamagedFile
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore


def repair_registry(root: Path) -> str:
    """Check the registry; if it is damaged, set it aside and rebuild it. Returns what was done."""
    path = root / "registry" / "model_registry.db"
    problem = _problem(root)
    if not problem:
        return f"sound; {_rebuild(root)} run directories are in it"
    for session in sorted((root / "sessions").glob("*")):
        if lock.is_busy(session):
            raise Busy(f"{session} is in use by {lock.holder(session)}", hint="wait for it")
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            files.disk.replace(part, aside.with_name(aside.name + suffix))
    return f"{problem}; kept as {aside.name}, rebuilt from {_rebuild(root)} run directories"


def _problem(root: Path) -> str:
    """What is wrong with the registry, or nothing."""
    try:
        registry = SessionStore(root).registry
        registry.integrity_check()
        registry.close()
    except DamagedFile as error:
        return str(error)
    return ""


def _rebuild(root: Path) -> int:
    store = SessionStore(root)
    found = store.rebuild()
    store.registry.close()
    return found
