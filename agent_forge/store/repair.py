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
from agent_forge.store.metadata import read_metadata
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
    listed = {row["session_id"] for row in store.registry.get_all_sessions()}
    known = {row["model_id"] for row in store.registry.search_models()}
    for path in store.run_directories():
        try:
            record = read_session(path)
            result.sessions += 1
            if path.name not in listed:
                store.register(record)
                result.added += 1
        except (ForgeError, OSError) as error:
            result.unreadable.append(str(error))
            continue
        for place in sorted(path.glob(f"*/*/{files.MANIFEST}")):
            try:
                result.added += _adopt(store, path.name, place.parent, known)
            except (ForgeError, OSError) as error:
                result.unreadable.append(str(error))
    return result


def _adopt(store: SessionStore, session_id: str, path: Path, known: set[str]) -> bool:
    """Register one model unless it is known; checkpoints have manifests too, but no metadata."""
    if not (path / "metadata.json").exists():
        return False
    record = read_metadata(path)
    if record.session_id != session_id or record.model_name != path.name:
        raise DamagedFile(path, f"it says it is {record.model_id}")
    if record.model_id in known:
        return False
    store.registry.register_model(
        session_id,
        record.phase_name,
        record.model_name,
        path,
        record.model_dump(),
        size_mb=record.size_mb,
        parameters=record.parameters,
        tags=record.tags,
        created_at=record.created_at,
    )
    return True


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
