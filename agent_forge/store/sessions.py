"""Sessions: the life of a run directory, and the policy by which old ones go.

A run directory is self-describing: session.json and config.yaml in it are enough to list it, to
resume it, and to make the registry again. What to remove is decided by a pure function over
(sessions, policy, now); `SessionCleanupManager` carries it out.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from agent_forge.errors import (
    AlreadyExists,
    Busy,
    DamagedFile,
    ForgeError,
    HostileInput,
    NameRefused,
    NotFound,
)
from agent_forge.store import files, lock, names, places
from agent_forge.store.metadata import SessionRecord, read_metadata
from agent_forge.store.registry import STATUSES, ModelRegistry, join_tags
from agent_forge.store.rows import SessionRow

DAY_S = 86_400
CHANGING_PATIENCE_S = 60
log = logging.getLogger(__name__)
SESSION_FILE = "session.json"
CONFIG_FILE = "config.yaml"
REGISTRY = Path("registry") / "model_registry.db"


class CleanupPolicy(Protocol):
    """The settings that cleaning reads (config section `cleanup_policy`)."""

    @property
    def max_session_age_days(self) -> float: ...
    @property
    def max_failed_session_age_days(self) -> float: ...
    @property
    def max_sessions_total(self) -> int: ...
    @property
    def checkpoint_every_n_sessions(self) -> int: ...
    @property
    def auto_cleanup_enabled(self) -> bool: ...


class SessionStore:
    """Creates, finds and opens the run directories of one storage root."""

    def __init__(self, root: Path | str = "storage") -> None:
        self.root = Path(root)

    @cached_property
    def registry(self) -> ModelRegistry:
        """Opened, and made if need be, when it is first asked: looking creates nothing."""
        return ModelRegistry(self.root / REGISTRY)

    def create(
        self,
        config: Mapping[str, Any],
        config_text: str,
        *,
        session_id: str | None = None,
        tags: Sequence[str] = (),
        details: Mapping[str, Any] | None = None,
    ) -> Path:
        """Make a run directory with its config; the id is a time stamp unless given."""
        join_tags(tags)
        stamp = time.strftime("session_%Y%m%d_%H%M%S", time.gmtime())
        wanted = stamp if session_id is None else session_id
        with self.changing():
            path = self._free_path(wanted, fixed=session_id is not None)
            record = {
                **(details or {}),
                "session_id": path.name,
                "created_at": time.time(),
                "status": "running",
                "config": dict(config),
                "tags": list(tags),
            }
            with files.staging(path, manifest=False) as stage:
                stage.write_bytes(CONFIG_FILE, config_text.encode())
                stage.write_bytes(SESSION_FILE, files.with_checksum(record))
            self.register(read_session(path))
        return path

    def check_new(self, session_id: str | None) -> None:
        """Refuse what `create` would refuse, and a root that cannot be written; makes nothing."""
        places.require_writable(self.root)
        if session_id is not None:
            self._free_path(session_id, fixed=True)
        if (self.root / REGISTRY).exists():
            self.registry.get_all_sessions()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Alone in adding or removing sessions; first clear up what a dead process left."""
        folder = self.root / "sessions"
        with files.disk_errors(folder):
            files.disk.make_directory(folder)
        with lock.exclusive(folder, patience_s=CHANGING_PATIENCE_S):
            files.remove_leftovers(folder, deep=False)
            self._adopt()
            yield

    def _adopt(self) -> None:
        """Register run directories that were copied in, or whose maker died just before."""
        listed = {row["session_id"] for row in self.registry.get_all_sessions()}
        for path in self.run_directories():
            if path.name not in listed:
                with contextlib.suppress(ForgeError, OSError):
                    self.register(read_session(path))
                    for problem in self.register_models(path):
                        log.warning("%s", problem)

    def run_directories(self) -> Iterator[Path]:
        """What lies in the place of run directories; unfinished work and locks do not count."""
        for path in sorted((self.root / "sessions").glob("*")):
            if path.is_dir() and not path.name.startswith("."):
                yield path

    def _free_path(self, wanted: str, *, fixed: bool) -> Path:
        names = [wanted] if fixed else [wanted, *(f"{wanted}_{n}" for n in range(2, 1000))]
        free = (path for path in map(self.path, names) if not path.exists())
        path = next(free, None)
        if path is None:
            raise AlreadyExists(
                f"session {wanted!r} exists already", hint=f"continue it: forge resume {wanted}"
            )
        return path

    def path(self, session_id: str) -> Path:
        """Where a session of this id lives, whether or not it exists."""
        return names.child(self.root, "sessions", session_id)

    def find(self, session_id: str) -> Path:
        """The directory of an existing session."""
        path = self.path(session_id)
        if not (path / SESSION_FILE).is_file():
            raise NotFound(
                f"no session {session_id!r} in {self.root}", hint="forge ls shows the sessions"
            )
        return path

    @contextlib.contextmanager
    def open(self, session_id: str) -> Iterator[Path]:
        """Hold a session's lock for the block; first clear up after a process that died in it.

        One that died while creating it may not have come to register it.
        """
        path = self.find(session_id)
        with lock.exclusive(path):
            files.remove_leftovers(path)
            self.register(read_session(path))
            self.register_models(path)
            yield path

    def register(self, record: Mapping[str, Any]) -> None:
        """Put a session into the registry as its directory tells it, unless it is there."""
        self.registry.create_session(
            record["session_id"],
            record["config"],
            record["tags"],
            status=record["status"],
            start_time=record["created_at"],
            end_time=record["ended_at"],
        )

    def register_models(self, path: Path) -> list[str]:
        """Put the models of a run directory into the registry; what cannot be read is returned."""
        known = {row["model_id"] for row in self.registry.search_models(session_id=path.name)}
        problems = []
        for place in sorted(path.glob(f"*/*/{files.MANIFEST}")):
            try:
                self._register_model(path.name, place.parent, known)
            except (ForgeError, OSError) as error:
                problems.append(str(error))
        return problems

    def _register_model(self, session_id: str, path: Path, known: set[str]) -> None:
        if not (path / "metadata.json").exists():  # checkpoints have manifests too
            return
        record = read_metadata(path)
        if record.session_id != session_id or record.model_name != path.name:
            raise DamagedFile(path, f"it says it is {record.model_id}")
        if record.model_id in known:
            return
        self.registry.register_model(
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

    def set_status(self, session_id: str, status: str) -> None:
        """Change a session's status, in its directory first, then in the registry."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
        path = self.find(session_id)
        with lock.held(path):
            ended = None if status == "running" else time.time()
            record = {**read_session(path), "status": status, "ended_at": ended}
            files.write_bytes(path / SESSION_FILE, files.with_checksum(record))
            self.registry.update_session(session_id, status=status)

    def status(self, row: SessionRow) -> str:
        """The status as it is: `running` only while a living process holds the lock."""
        try:
            path = self.path(row["session_id"])
            if not path.is_dir():
                return "missing"
            if row["status"] == "running" and not lock.is_busy(path):
                return "interrupted"
        except ForgeError:
            return "unreadable"
        return row["status"]


def read_session(path: Path) -> dict[str, Any]:
    """session.json of a run directory, checked for its form."""
    place = path / SESSION_FILE
    if not place.exists():
        raise NotFound(f"{path} is not a run directory: it has no {SESSION_FILE}")
    try:
        record = SessionRecord.model_validate(files.read_checked(place)).model_dump()
        join_tags(record["tags"])
    except (ValidationError, NameRefused) as error:
        raise DamagedFile(place, f"not the record of a session ({error})") from error
    if record["session_id"] != path.name:
        told = record["session_id"]
        raise DamagedFile(
            place,
            f"the record of session {told!r}, not of this one",
            hint=f"a run directory keeps its name: {path.with_name(told)}",
        )
    return record


# -- cleaning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Removal:
    """A session that is to go, and why."""

    session_id: str
    reason: str
    bytes: int = 0
    end_time: float | None = None


def plan_cleanup(
    sessions: Sequence[Mapping[str, Any]],
    policy: CleanupPolicy,
    now: float,
    *,
    keep: Collection[str] = (),
    age_days: float | None = None,
    failed: bool = False,
    everything: bool = False,
) -> list[Removal]:
    """Which sessions go, and why. Running ones and those in `keep` always stay.

    By policy: completed and failed ones past their age, then the oldest beyond the total. Paused
    and interrupted sessions can be resumed and only go by the total. `age_days` replaces both
    ages, `failed` takes all failed ones, `everything` takes all that are not running or kept.
    """
    asked = age_days is not None or failed or everything
    max_age = {
        "completed": policy.max_session_age_days if age_days is None else age_days,
        "failed": policy.max_failed_session_age_days if age_days is None else age_days,
    }
    going: dict[str, str] = {}
    free = [s for s in sessions if s["status"] != "running" and s["session_id"] not in keep]
    for session in free:
        status = session["status"]
        age = (now - (session["end_time"] or session["start_time"])) / DAY_S
        by_age = (not asked or age_days is not None) and age > max_age.get(status, float("inf"))
        if everything:
            going[session["session_id"]] = "all were asked for"
        elif failed and status == "failed":
            going[session["session_id"]] = "failed"
        elif by_age:
            going[session["session_id"]] = f"{status} {age:.0f} days ago"
    if not asked:
        excess = len(sessions) - len(going) - policy.max_sessions_total
        left = [s for s in free if s["session_id"] not in going]
        for session in sorted(left, key=lambda s: s["start_time"])[: max(0, excess)]:
            going[session["session_id"]] = f"more than {policy.max_sessions_total} sessions"
    ends = {session["session_id"]: session["end_time"] for session in sessions}
    return [Removal(name, reason, end_time=ends[name]) for name, reason in going.items()]


class SessionCleanupManager:
    """Carries out the policy: on request, at start-up and after a session completes."""

    def __init__(self, sessions: SessionStore, policy: CleanupPolicy) -> None:
        self.sessions = sessions
        self.policy = policy
        self.kept: list[tuple[str, ForgeError]] = []

    def plan(
        self,
        *,
        keep: Collection[str] = (),
        age_days: float | None = None,
        failed: bool = False,
        everything: bool = False,
    ) -> list[Removal]:
        """What would be removed now, with the bytes it would free."""
        rows: list[dict[str, Any]] = []
        for row in self.sessions.registry.get_all_sessions():
            status = self.sessions.status(row)
            if status == "missing":  # an unmounted disk, perhaps: it goes when its time has come
                status = "interrupted" if row["status"] == "running" else row["status"]
            try:
                self.sessions.path(row["session_id"])
            except ForgeError as error:
                self.kept.append((row["session_id"], error))
                continue
            rows.append({**row, "status": status})
        chosen = plan_cleanup(
            rows,
            self.policy,
            time.time(),
            keep=keep,
            age_days=age_days,
            failed=failed,
            everything=everything,
        )
        return [
            replace(removal, bytes=files.tree_bytes(self.sessions.path(removal.session_id)))
            for removal in chosen
        ]

    def remove(self, removals: Sequence[Removal]) -> list[Removal]:
        """Remove sessions, directory first; `kept` then tells which stayed and why."""
        gone: list[Removal] = []
        with self.sessions.changing():
            for removal in removals:
                try:
                    if self._remove(removal):
                        gone.append(removal)
                except ForgeError as error:
                    log.warning("%s stays: %s", removal.session_id, error)
                    self.kept.append((removal.session_id, error))
        return gone

    def _remove(self, removal: Removal) -> bool:
        path = self.sessions.path(removal.session_id)
        there = path.exists()
        if there:
            if not (path / SESSION_FILE).is_file():
                raise HostileInput(
                    f"{path} is no session: it has no {SESSION_FILE}",
                    hint="move it elsewhere; what is in it was not written here",
                )
            with lock.exclusive(path):
                row = self.sessions.registry.get_session_status(path.name)
                if row["end_time"] != removal.end_time:
                    raise Busy(f"session {path.name} was resumed meanwhile")
                files.remove_tree(path, self.sessions.root / "sessions")
        return self.sessions.registry.delete_session(path.name) or there

    def cleanup_old_sessions(self, *, keep: Collection[str] = ()) -> list[Removal]:
        """Remove what the policy no longer wants; nothing if automatic cleaning is off."""
        if not self.policy.auto_cleanup_enabled:
            return []
        gone = self.remove(self.plan(keep=keep))
        for removal in gone:
            log.warning("old session %s was removed: %s", removal.session_id, removal.reason)
        return gone

    def auto_cleanup_on_session_complete(self, session_id: str) -> list[Removal]:
        """Mark a session completed, then tidy up."""
        self.sessions.set_status(session_id, "completed")
        return self.tidy_up(session_id)

    def tidy_up(self, session_id: str) -> list[Removal]:
        """After a session has completed: tend the database every N sessions, and clean."""
        if self.sessions.registry.count_completed() % self.policy.checkpoint_every_n_sessions == 0:
            self.checkpoint_and_vacuum()
        return self.cleanup_old_sessions(keep={session_id})

    def checkpoint_and_vacuum(self) -> int:
        """Empty the write-ahead log and give free pages back; return the bytes reclaimed."""
        self.sessions.registry.checkpoint_wal()
        return self.sessions.registry.vacuum_incremental()
