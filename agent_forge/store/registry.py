"""ModelRegistry: the SQLite index of sessions, models and handoffs.

The run directories hold the truth, and `repair_registry` makes it again from them. One writer at a
time (every write is BEGIN IMMEDIATE, so a lock upgrade can never fail), any number of readers; each
operation opens its own connection: one that a fork carried into a child would lose writes.
"""

import contextlib
import itertools
import json
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agent_forge.errors import AlreadyInUse, CannotWrite, DamagedFile, DiskFull, NotFound
from agent_forge.store import files, paths
from agent_forge.store.records import MIGRATIONS, ModelRow, SessionRow

APPLICATION_ID = 0x41464F52  # "AFOR": tells our databases from other people's
BUSY_TIMEOUT_MS = 30_000
PAGE_BYTES = 4096
SIDE_FILES = ("", "-wal", "-shm", "-journal")  # of the database: itself, and those beside it
WAL_LIMIT_BYTES = 16 << 20
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file
DAMAGE = ("malformed", "no such table", "no such column", "decode to UTF-8")
REPAIR = "forge doctor --repair makes it again from the run directories"
_jitter = random.Random()  # of its own: the global generator belongs to the runs


class ModelRegistry:
    """Sessions, models and handoffs, shared by any number of processes and threads."""

    def __init__(self, db_path: Path | str = "storage/registry/model_registry.db") -> None:
        self.db_path = Path(db_path)
        self.root = self.db_path.parent.parent
        with files.disk_errors(self.db_path):
            files.refuse_link(files.refuse_link(self.db_path.parent) / self.db_path.name)
            for path in (Path(f"{self.db_path}{end}") for end in SIDE_FILES):  # changed in place
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if not path.is_dir():
                        files.require_own(path, path.lstat())
            self.db_path.parent.mkdir(parents=True, exist_ok=True)
        self._migrate()

    def create_session(
        self,
        session_id: str,
        pipeline_config: Mapping[str, Any],
        tags: Sequence[str] = (),
        *,
        status: str = "running",
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> None:
        """Add a session; one that is there already stays as it is."""
        values = {
            "session_id": paths.safe_name(session_id, "session id"),
            "pipeline_config_json": _json(pipeline_config),
            "start_time": time.time() if start_time is None else start_time,
            "end_time": end_time,
            "status": status,
            "progress_percent": 100 if status == "completed" else 0,
            "tags": join_tags(tags),
        }
        with self._writing() as connection:
            _put(connection, "sessions", values, replace=False)

    def update_session(
        self,
        session_id: str,
        *,
        status: str | None = None,
        current_phase: str | None = None,
        progress_percent: float | None = None,
    ) -> None:
        """Change what is given. A status other than `running` also sets the end time."""
        changes: dict[str, Any] = {
            "status": status,
            "current_phase": current_phase,
            "progress_percent": progress_percent,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if status is not None:
            changes["end_time"] = None if status == "running" else time.time()
        assignments = ", ".join(f"{name} = ?" for name in changes) or "status = status"
        sql = f"UPDATE sessions SET {assignments} WHERE session_id = ?"
        with self._writing() as connection:
            if connection.execute(sql, (*changes.values(), session_id)).rowcount == 0:
                raise _no_session(session_id)

    def get_session_status(self, session_id: str) -> SessionRow:
        """Return the row of a session."""
        rows = self._rows("SELECT * FROM sessions WHERE session_id = ?", session_id)
        if not rows:
            raise _no_session(session_id)
        return cast(SessionRow, rows[0])

    def get_all_sessions(self) -> list[SessionRow]:
        """Return all sessions, newest first."""
        sql = "SELECT * FROM sessions ORDER BY start_time DESC, session_id DESC"
        return cast(list[SessionRow], self._rows(sql))

    def count_completed(self) -> int:
        """Count one more completed session; removing old ones does not lower the count."""
        with self._writing() as connection:
            connection.execute("UPDATE upkeep SET completed_sessions = completed_sessions + 1")
            return int(connection.execute("SELECT completed_sessions FROM upkeep").fetchone()[0])

    def delete_session(self, session_id: str) -> bool:
        """Remove a session with its models and handoffs; True if it was there."""
        with self._writing() as connection:
            cursor = connection.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            return cursor.rowcount > 0

    def register_model(
        self,
        session_id: str,
        phase_name: str,
        model_name: str = "",
        model_path: Path | str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Add or renew the entry of a model, its path relative to the root; return its id. Without
        a name it has that of its file, or of the folder of a `model.*`."""
        known, place = metadata or {}, Path(model_path)
        own = place.parent.name if place.stem == "model" else place.stem
        model_name = model_name or own
        root, path = self.root.resolve(), Path(model_path).resolve()
        values = {
            "model_id": paths.model_id_for(session_id, phase_name, model_name),
            "session_id": session_id,
            "phase_name": paths.safe_name(phase_name, "phase"),
            "model_name": paths.safe_name(model_name, "model name"),
            "model_path": (path.relative_to(root) if root in path.parents else path).as_posix(),
            "size_mb": known.get("size_mb"),
            "parameters": known.get("parameters"),
            "created_at": known.get("created_at", time.time()),
            "metadata_json": _json(known),
            "tags": join_tags(known.get("tags", ())),
        }
        with self._writing() as connection:
            if not _find(connection, "sessions", "session_id", session_id):
                raise _no_session(session_id)
            _put(connection, "models", values)
        return str(values["model_id"])

    def get_model(
        self,
        model_id: str | None = None,
        session_id: str | None = None,
        phase_name: str | None = None,
        model_name: str | None = None,
    ) -> ModelRow:
        """Return the one model that fits; none or several is an error that says which there are."""
        columns = ("model_id", "session_id", "phase_name", "model_name")
        values = (model_id, session_id, phase_name, model_name)
        wanted = {k: v for k, v in zip(columns, values, strict=True) if v is not None}
        rows = self._models({f"{column} = ?": value for column, value in wanted.items()})
        asked = ", ".join(f"{column}={value}" for column, value in wanted.items()) or "anything"
        if not rows:
            raise NotFound(f"no model with {asked}", hint="forge models shows the models")
        if len(rows) > 1:
            ids = ", ".join(row["model_id"] for row in rows[:5])
            raise NotFound(f"{len(rows)} models with {asked}: {ids}", hint="name one of them")
        return rows[0]

    def search_models(
        self,
        phase: str | None = None,
        session_id: str | None = None,
        tag: str | None = None,
        text: str | None = None,
    ) -> list[ModelRow]:
        """Return models by phase, session, tag or a piece of their id; newest first."""
        conditions = {
            "phase_name = ?": phase,
            "session_id = ?": session_id,
            "instr(',' || tags || ',', ',' || ? || ',')": tag,
            "instr(model_id, ?)": text,
        }
        return self._models({k: v for k, v in conditions.items() if v is not None})

    def _models(self, conditions: Mapping[str, str]) -> list[ModelRow]:
        where = " AND ".join(conditions) or "1"
        sql = f"SELECT * FROM models WHERE {where} ORDER BY created_at DESC, model_id"
        return cast(list[ModelRow], self._rows(sql, *conditions.values()))

    def record_handoff(
        self,
        source_model_id: str,
        target_phase: str,
        *,
        validation_status: str = "pending",
        validation_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that a model was offered to a phase, or replace that record."""
        values = {
            "handoff_id": f"{source_model_id}-to-{target_phase}",
            "target_phase": target_phase,
            "source_model_id": source_model_id,
            "handoff_timestamp": time.time(),
            "validation_status": validation_status,
            "validation_metrics_json": _json(validation_metrics or {}),
        }
        with self._writing() as connection:
            source = _find(connection, "models", "model_id", source_model_id)
            if source is None:
                raise NotFound(f"no model {source_model_id!r}")
            _put(connection, "phase_handoffs", values | {"source_phase": source["phase_name"]})

    def get_handoffs(self, session_id: str) -> list[dict[str, Any]]:
        """Return the handoffs of a session's models, each with the keys of HandoffRecord."""
        return self._rows(
            "SELECT h.* FROM phase_handoffs h JOIN models m ON m.model_id = h.source_model_id"
            " WHERE m.session_id = ? ORDER BY h.handoff_timestamp, h.handoff_id",
            session_id,
        )

    def checkpoint_wal(self) -> bool:
        """Move the write-ahead log into the database and empty it; False if readers held it up."""
        return bool(self._read("PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0)

    def vacuum_incremental(self, pages: int = 0) -> int:
        """Give free pages back to the file system (0 = all of them); return how many bytes."""
        size = int(self._read("PRAGMA page_size")[0][0])
        before = int(self._read("PRAGMA freelist_count")[0][0])
        with self._connection() as connection:
            # execute() would stop after the first page: it steps a statement without columns once
            connection.executescript(f"PRAGMA incremental_vacuum({int(pages)})")
        self.checkpoint_wal()
        return (before - int(self._read("PRAGMA freelist_count")[0][0])) * size

    def integrity_check(self) -> None:
        """Raise DamagedFile unless SQLite finds every page and every reference in order."""
        rows = self._read("PRAGMA integrity_check")
        if rows[0][0] != "ok":
            raise self._damaged(str(rows[0][0]))
        if self._read("PRAGMA foreign_key_check"):
            raise self._damaged("a row refers to one that does not exist")

    def size_bytes(self) -> tuple[int, int]:
        """Return the bytes of the database and of its write-ahead log."""
        wal = self.db_path.with_name(self.db_path.name + "-wal")
        return self.db_path.stat().st_size, wal.stat().st_size if wal.exists() else 0

    @contextlib.contextmanager
    def _connection(self, *, immutable: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection for one operation; errors of SQLite become ours here."""
        database = self.db_path.resolve().as_uri() + "?immutable=1" if immutable else self.db_path
        options: dict[str, Any] = {"timeout": BUSY_TIMEOUT_MS / 1000, "isolation_level": None}
        try:
            connection = sqlite3.connect(database, uri=immutable, **options)
            with contextlib.closing(connection):
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
                yield connection
        except sqlite3.DatabaseError as error:
            text = str(error)
            if "disk is full" in text or "disk I/O error" in text:
                free = files.free_bytes(self.db_path.parent)
                raise DiskFull(self.db_path, PAGE_BYTES, free) from error
            if "unable to open" in text or "readonly" in text:
                raise CannotWrite(self.db_path, text) from error
            if "locked" in text:
                raise AlreadyInUse(f"{self.db_path} is in use by another process") from error
            if type(error) is sqlite3.DatabaseError or any(sign in text for sign in DAMAGE):
                raise self._damaged(text) from error
            raise  # an error of the program

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        try:
            with self._connection() as connection:
                return connection.execute(sql, values).fetchall()
        except (CannotWrite, DiskFull):  # SQLite wants to write even for a reader; read without
            if not self.db_path.is_file():
                raise
        with self._connection(immutable=True) as connection:
            return connection.execute(sql, values).fetchall()

    def _rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Return rows with tags as a list, JSON parsed, and the path of a model below the root."""
        rows = [dict(row) for row in self._read(sql, values)]
        for row in rows:
            if "tags" in row:
                row["tags"] = row["tags"].split(",") if row["tags"] else []
            if "model_path" in row:
                row["model_path"] = str(self.root / row["model_path"])
            for name in row.keys() & {"metadata_json", "validation_metrics_json"}:
                try:
                    row[name.removesuffix("_json")] = json.loads(row.pop(name))
                except (TypeError, ValueError) as error:
                    raise self._damaged(f"a row is not readable ({error})") from error
        return rows

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            connection.execute("PRAGMA busy_timeout = 0")
            _when_unlocked(lambda: connection.execute("BEGIN IMMEDIATE"))
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            try:
                yield connection
                connection.execute("COMMIT")
                self._bound_wal(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _bound_wal(self, connection: sqlite3.Connection) -> None:
        """Empty a long write-ahead log: SQLite's own checkpoints give way to readers for ever."""
        size = self.size_bytes()[1]
        if size > WAL_LIMIT_BYTES // 8:
            patience_ms = 100 if size < WAL_LIMIT_BYTES // 2 else 2000  # other writers wait too
            connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _damaged(self, problem: str) -> DamagedFile:
        return DamagedFile(self.db_path, problem, hint=REPAIR)

    def _migrate(self) -> None:
        """Bring the schema up to date in one transaction; refuse a foreign or newer database, and
        what SQLite would obey in a hostile one: a journal that has any file deleted, triggers."""
        journal = self.db_path.with_name(self.db_path.name + "-journal")
        if journal.is_file() and journal.read_bytes().endswith(SUPER_JOURNAL):
            raise self._damaged("its journal names another file, which SQLite would delete")
        if self._read("SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index')"):
            raise self._damaged("it has triggers or views, which were not made here")
        if self._version() == (APPLICATION_ID, len(MIGRATIONS)):
            return
        tables = self._read("SELECT count(*) FROM sqlite_master")[0][0]
        owner, version = self._version()  # after the count: another process may be making it
        if tables and owner != APPLICATION_ID:
            raise DamagedFile(self.db_path, "a SQLite database, but not a model registry")
        files.refuse_newer(self.db_path, {"schema_version": version}, len(MIGRATIONS))
        with self._connection() as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts before the first table
            # Several processes may make the database at once; this switch ignores the timeout.
            _when_unlocked(lambda: connection.execute("PRAGMA journal_mode = WAL"))
        with self._writing() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            for statement in itertools.chain(*MIGRATIONS[version:]):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _version(self) -> tuple[int, int]:
        """Return whose database it is, and how many migrations it has seen."""
        owner, version = (self._read(f"PRAGMA {p}") for p in ("application_id", "user_version"))
        return owner[0][0], version[0][0]


def _when_unlocked(attempt: Callable[[], object]) -> None:
    """Try until no other process holds the lock: SQLite's own waiting can starve a writer."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            attempt()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_jitter.uniform(0.001, 0.01))


def _find(connection: sqlite3.Connection, table: str, column: str, value: str) -> Any:
    """Return the row of a table with this key, or None."""
    return connection.execute(f"SELECT * FROM {table} WHERE {column} = ?", (value,)).fetchone()


def _put(
    connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, replace: bool = True
) -> None:
    """Insert a row whose first column is its key; one with that key is replaced, or stays."""
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    changes = ", ".join(f"{column} = excluded.{column}" for column in values)
    action = f"UPDATE SET {changes}" if replace else "NOTHING"
    conflict = f"ON CONFLICT ({next(iter(values))}) DO {action}"
    sql = f"INSERT INTO {table} ({columns}) VALUES ({marks}) {conflict}"
    connection.execute(sql, tuple(values.values()))


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r}", hint="forge ls shows the sessions")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def join_tags(tags: Sequence[str]) -> str:
    """Return tags as the registry keeps them; a tag is a name like any other."""
    return ",".join(paths.safe_name(tag, "tag") for tag in tags)
