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
    try:
        store = SessionStore(root)
        store.registry.integrity_check()
        found = store.rebuild()
        return f"sound; {found} run directories are in it"
    except DamagedFile as error:
        problem = str(error)
    for session in sorted((root / "sessions").glob("*")):
        if lock.is_busy(session):
            raise Busy(f"{session} is in use by {lock.holder(session)}", hint="wait for it")
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            files.disk.replace(part, aside.with_name(aside.name + suffix))
    found = SessionStore(root).rebuild()
    return f"{problem}; kept as {aside.name}, rebuilt from {found} run directories"
