"""Make the registry again from the run directories, which hold the truth.

Sessions come from session.json and models from metadata.json, with their times and tags. The notes
about handoffs are not restored; events.jsonl of each run has them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from agent_forge.errors import Busy, DamagedFile, ForgeError, NotFound
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore, read_session


@dataclass
class Rebuilt:
    """What a rebuild found and added, and what it could not read."""

    sessions: int = 0
    added: int = 0
    unreadable: list[str] = field(default_factory=list)


def repair_registry(root: Path) -> str:
    """Set a damaged registry aside, then add whatever it lacks. Returns what was done."""
    if not root.is_dir():
        raise NotFound(f"{root} does not exist")
    problem = _problem(root)
    said = "sound"
    if problem:
        said = f"{problem}; kept as {_set_aside(root)}"
    store = SessionStore(root)
    found = rebuild(store)
    said += f"; {found.sessions} run directories, {found.added} entries added"
    if found.unreadable:
        said += f"; not readable: {'; '.join(found.unreadable)}"
    return said


def rebuild(store: SessionStore) -> Rebuilt:
    """Add every session and model on disk that the registry does not have."""
    result = Rebuilt()
    before = _entries(store)
    for path in store.run_directories():
        try:
            store.register(read_session(path))
        except (ForgeError, OSError) as error:
            result.unreadable.append(str(error))
            continue
        result.sessions += 1
        result.unreadable += store.register_models(path)
    result.added = _entries(store) - before
    return result


def _entries(store: SessionStore) -> int:
    return len(store.registry.get_all_sessions()) + len(store.registry.search_models())


def _set_aside(root: Path) -> str:
    """Move the damaged database out of the way, unless someone is using it."""
    for session in SessionStore(root).run_directories():
        if lock.is_busy(session):
            raise Busy(f"{session} is in use by {lock.holder(session)}", hint="wait for it to end")
    path = root / "registry" / "model_registry.db"
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            with files.disk_errors(part):
                files.disk.replace(part, aside.with_name(aside.name + suffix))
    return aside.name


def _problem(root: Path) -> str:
    """What is wrong with the registry, or nothing."""
    try:
        registry = SessionStore(root).registry
        registry.integrity_check()
    except DamagedFile as error:
        return str(error)
    return ""
