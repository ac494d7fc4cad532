"""SessionStore: the run directories of a storage root, and the registry made from them."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from agent_forge.errors import AlreadyExists, DamagedFile, ForgeError, NameRefused, NotFound
from agent_forge.store import files, lock, paths
from agent_forge.store.records import SessionRecord, SessionRow, Status, read_metadata
from agent_forge.store.registry import ModelRegistry, join_tags

log = logging.getLogger(__name__)
SESSION_FILE = "session.json"
CONFIG_FILE = "config.yaml"
REGISTRY = Path("registry") / "model_registry.db"


class SessionStore:
    """Creates, finds and opens the run directories of one storage root."""

    def __init__(self, root: Path | str = "storage") -> None:
        self.root = Path(root)

    @cached_property
    def registry(self) -> ModelRegistry:
        """The registry, made on first use: looking at a storage root creates nothing."""
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
        with self.changing():
            path = self.new_path(session_id)
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
            self.register(path)
        return path

    def check_new(self, session_id: str | None) -> None:
        """Refuse what `create` would refuse, and a root that cannot be written; create nothing."""
        paths.require_writable(self.root)
        if session_id is not None:
            self.new_path(session_id)
        if (self.root / REGISTRY).exists():
            self.registry.get_all_sessions()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Be alone in adding or removing sessions; first clear up what a dead process left."""
        folder = self.root / "sessions"
        with files.disk_errors(folder):
            files.disk.make_directory(folder)
        with lock.exclusive(folder, patience_s=60):
            files.remove_leftovers(folder, deep=False)
            listed = {row["session_id"] for row in self.registry.get_all_sessions()}
            for path in self.run_directories():  # copied in, or their maker died just before
                if path.name not in listed:
                    with contextlib.suppress(ForgeError, OSError):
                        for problem in self.register(path):
                            log.warning("%s", problem)
            yield

    def run_directories(self) -> list[Path]:
        """Return what lies in the place of run directories, without unfinished work and locks."""
        every = sorted((self.root / "sessions").glob("*"))
        return [path for path in every if path.is_dir() and not path.name.startswith(".")]

    def new_path(self, session_id: str | None) -> Path:
        """Return where a new session goes; without an id, a time stamp that is not taken."""
        stamp = time.strftime("session_%Y%m%d_%H%M%S", time.gmtime())
        stamps = [stamp, *(f"{stamp}_{n}" for n in range(2, 1000))]
        names = stamps if session_id is None else [session_id]
        for path in map(self.path, names):
            if not path.exists():
                return path
        hint = f"continue it: forge resume {names[0]}"
        raise AlreadyExists(f"session {names[0]!r} exists already", hint=hint)

    def path(self, session_id: str) -> Path:
        """Return where a session of this id lives, whether or not it exists."""
        return paths.child(self.root, "sessions", session_id)

    def find(self, session_id: str) -> Path:
        """Return the directory of an existing session."""
        path = self.path(session_id)
        if not (path / SESSION_FILE).is_file():
            paths.require_root(self.root)
            hint = "forge ls shows the sessions"
            raise NotFound(f"no session {session_id!r} in {self.root}", hint=hint)
        return path

    @contextlib.contextmanager
    def open(self, session_id: str) -> Iterator[Path]:
        """Hold a session's lock for the block; first clear up after a process that died in it."""
        path = self.find(session_id)
        with lock.exclusive(path):
            files.remove_leftovers(path)
            self.register(path)  # its maker may have died before
            yield path

    def register(self, path: Path) -> list[str]:
        """Register a run directory and its models, unless they are; return problems of models."""
        session = read_session(path)
        times = {"start_time": session["created_at"], "end_time": session["ended_at"]}
        about = (path.name, session["config"], session["tags"])
        self.registry.create_session(*about, status=session["status"], **times)
        listed = {row["model_id"] for row in self.registry.search_models(session_id=path.name)}
        problems = []
        for model in sorted(manifest.parent for manifest in path.glob(f"*/*/{files.MANIFEST}")):
            if not (model / "metadata.json").exists() or not paths.SAFE_NAME.fullmatch(model.name):
                continue  # checkpoints have manifests too
            try:
                record = read_metadata(model)
                if (record.session_id, record.model_name) != (path.name, model.name):
                    raise DamagedFile(model, f"it says it is {record.model_id}")
                if record.model_id not in listed:
                    names = path.name, record.phase_name, record.model_name
                    self.registry.register_model(*names, model, record.model_dump())
            except (ForgeError, OSError) as error:
                problems.append(str(error))
        return problems

    def set_status(self, session_id: str, status: str) -> None:
        """Change a session's status, in its directory first, then in the registry."""
        if status not in (known := get_args(Status)):
            raise ValueError(f"status {status!r} is not one of {', '.join(known)}")
        path = self.find(session_id)
        with lock.held(path):
            ended = None if status == "running" else time.time()
            record = {**read_session(path), "status": status, "ended_at": ended}
            files.write_checked(path / SESSION_FILE, record)
            self.registry.update_session(session_id, status=status)

    def status(self, row: SessionRow) -> str:
        """Return the status as it is: `running` only while a living process holds the lock."""
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
    """Return session.json of a run directory, checked for its form."""
    place = path / SESSION_FILE
    if not place.exists():
        raise NotFound(f"{path} is not a run directory: it has no {SESSION_FILE}")
    try:
        record = SessionRecord.model_validate(files.read_checked(place)).model_dump()
        join_tags(record["tags"])
    except (ValidationError, NameRefused) as error:
        raise DamagedFile(place, f"not the record of a session ({error})") from error
    if (named := record["session_id"]) != path.name:
        hint = f"a run directory keeps its name: {path.with_name(named)}"
        raise DamagedFile(place, f"the record of session {named!r}, not of this one", hint=hint)
    return record


def repair_registry(root: Path) -> str:
    """Set a damaged registry aside, add what it lacks from the run directories; return a report.

    The records of handoffs are not restored; events.jsonl of each run has them.
    """
    if not root.is_dir():
        raise NotFound(f"{root} does not exist")
    report = "sound"
    try:
        SessionStore(root).registry.integrity_check()
    except DamagedFile as error:
        report = f"{error}; kept as {_set_aside(root)}"
    store = SessionStore(root)
    before, count, unreadable = _count_entries(store), 0, []
    for path in store.run_directories():
        try:
            unreadable += store.register(path)
            count += 1
        except (ForgeError, OSError) as error:
            unreadable.append(str(error))
    report += f"; {count} run directories, {_count_entries(store) - before} entries added"
    return f"{report}; not readable: {'; '.join(unreadable)}" if unreadable else report


def _count_entries(store: SessionStore) -> int:
    return len(store.registry.get_all_sessions()) + len(store.registry.search_models())


def _set_aside(root: Path) -> str:
    """Move a damaged database out of the way, unless someone is using it; return its new name."""
    for session in SessionStore(root).run_directories():
        if lock.is_busy(session):
            raise lock.busy(session)
    path = root / REGISTRY
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    for suffix in ("-journal", "", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            with files.disk_errors(part):
                files.disk.replace(part, aside.with_name(aside.name + suffix))
    return aside.name
