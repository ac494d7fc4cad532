"""ModelRegistry: the SQLite index of sessions, models and handoffs.

It is an index: the run directories hold the truth, and `repair` makes the index again from them.
One writer at a time (every write is BEGIN IMMEDIATE, so a lock upgrade can never fail), any number
of readers in WAL mode, each statement its own short transaction. Every operation opens its own
connection: one that a fork carried into a child would lose writes. Times are UTC epoch seconds.
"""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agent_forge.errors import (
    Busy,
    CannotWrite,
    DamagedFile,
    DiskFull,
    NotFound,
    TooNew,
)
from agent_forge.store import files, names
from agent_forge.store.migrations import MIGRATIONS
from agent_forge.store.rows import HandoffRow, ModelRow, SessionRow

APPLICATION_ID = 0x41464F52  # "AFOR": tells our databases from other people's
BUSY_TIMEOUT_MS = 30_000
PAGE_BYTES = 4096
WAL_LIMIT_BYTES = 16 << 20
DAMAGE = ("malformed", "no such table", "no such column", "decode to UTF-8")
_jitter = random.Random()  # of its own: the global generator belongs to the runs
STATUSES = ("running", "completed", "failed", "paused")


class ModelRegistry:
    """Sessions, models and handoffs, shared by any number of processes and threads."""

    def __init__(self, db_path: Path | str = "storage/registry/model_registry.db") -> None:
        self.db_path = Path(db_path)
        self.root = self.db_path.parent.parent
        with files.disk_errors(self.db_path):
            names.refuse_link(names.refuse_link(self.db_path.parent) / self.db_path.name)
            self.db_path.parent.mkdir(parents=True, exist_ok=True)
        self._migrate()

    # -- sessions ---------------------------------------------------------------------------------

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
        names.safe_name(session_id, "session id")
        start = time.time() if start_time is None else start_time
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO sessions (session_id, pipeline_config_json, start_time, end_time,"
                " status, progress_percent, tags) VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (session_id) DO NOTHING",
                (
                    *(session_id, _json(pipeline_config), start, end_time, status),
                    *(100 if status == "completed" else 0, join_tags(tags)),
                ),
            )

    def update_session(
        self,
        session_id: str,
        *,
        status: str | None = None,
        current_phase: str | None = None,
        progress_percent: float | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        """Change what is given. A status other than `running` also sets the end time."""
        changes: dict[str, Any] = {
            "status": status,
            "current_phase": current_phase,
            "progress_percent": progress_percent,
            "tags": None if tags is None else join_tags(tags),
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if status is not None:
            changes["end_time"] = None if status == "running" else time.time()
        assignments = ", ".join(f"{name} = ?" for name in changes) or "status = status"
        with self._writing() as connection:
            cursor = connection.execute(
                f"UPDATE sessions SET {assignments} WHERE session_id = ?",
                (*changes.values(), session_id),
            )
            if cursor.rowcount == 0:
                raise NotFound(f"no session {session_id!r}", hint="forge ls shows the sessions")

    def get_session_status(self, session_id: str) -> SessionRow:
        rows = self._read("SELECT * FROM sessions WHERE session_id = ?", (session_id,))
        if not rows:
            raise NotFound(f"no session {session_id!r}", hint="forge ls shows the sessions")
        return _session(rows[0])

    def get_all_sessions(self) -> list[SessionRow]:
        """Newest first."""
        rows = self._read("SELECT * FROM sessions ORDER BY start_time DESC, session_id DESC")
        return [_session(row) for row in rows]

    def count_completed(self) -> int:
        """Count one more completed session; removing old ones does not lower the count."""
        with self._writing() as connection:
            connection.execute("UPDATE upkeep SET completed_sessions = completed_sessions + 1")
            row = connection.execute("SELECT completed_sessions FROM upkeep").fetchone()
            return int(row[0])

    def delete_session(self, session_id: str) -> bool:
        """Forget a session with its models and handoffs; tell whether it was there."""
        with self._writing() as connection:
            cursor = connection.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            return cursor.rowcount > 0

    # -- models -----------------------------------------------------------------------------------

    def register_model(
        self,
        session_id: str,
        phase_name: str,
        model_name: str,
        model_path: Path | str,
        metadata: Mapping[str, Any] | None = None,
        *,
        size_mb: float | None = None,
        parameters: int | None = None,
        tags: Sequence[str] = (),
        created_at: float | None = None,
    ) -> str:
        """Add or renew the entry of a model; its path is kept relative to the storage root."""
        for kind, name in (("phase", phase_name), ("model name", model_name)):
            names.safe_name(name, kind)
        model_id = names.model_id_for(session_id, phase_name, model_name)
        values = (
            *(model_id, session_id, phase_name, model_name, self._relative(Path(model_path))),
            *(size_mb, parameters, time.time() if created_at is None else created_at),
            *(_json(metadata or {}), join_tags(tags)),
        )
        with self._writing() as connection:
            known = connection.execute(
                "SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)
            ).fetchone()
            if known is None:
                raise NotFound(f"no session {session_id!r}", hint="create the session first")
            connection.execute(
                "INSERT INTO models (model_id, session_id, phase_name, model_name, model_path,"
                " size_mb, parameters, created_at, metadata_json, tags)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (model_id) DO UPDATE SET model_path = excluded.model_path,"
                " size_mb = excluded.size_mb, parameters = excluded.parameters,"
                " created_at = excluded.created_at, metadata_json = excluded.metadata_json,"
                " tags = excluded.tags",
                values,
            )
        return model_id

    def get_model(
        self,
        model_id: str | None = None,
        session_id: str | None = None,
        phase_name: str | None = None,
        model_name: str | None = None,
    ) -> ModelRow:
        """The one model that fits; none or several is an error that says which there are."""
        where = {
            "model_id": model_id,
            "session_id": session_id,
            "phase_name": phase_name,
            "model_name": model_name,
        }
        rows = self._models({f"{k} = ?": v for k, v in where.items() if v is not None})
        asked = ", ".join(f"{k}={v}" for k, v in where.items() if v is not None) or "anything"
        if not rows:
            raise NotFound(f"no model with {asked}", hint="forge models shows the models")
        if len(rows) > 1:
            names = ", ".join(row["model_id"] for row in rows[:5])
            raise NotFound(f"{len(rows)} models with {asked}: {names}", hint="name one of them")
        return rows[0]

    def search_models(
        self,
        phase: str | None = None,
        session_id: str | None = None,
        tag: str | None = None,
        text: str | None = None,
        limit: int | None = None,
    ) -> list[ModelRow]:
        """Models by phase, session, tag or a piece of their id; newest first."""
        where = {
            "phase_name = ?": phase,
            "session_id = ?": session_id,
            "instr(',' || tags || ',', ',' || ? || ',')": tag,
            "instr(model_id, ?)": text,
        }
        return self._models({k: v for k, v in where.items() if v is not None}, limit)

    def _models(self, where: Mapping[str, str], limit: int | None = None) -> list[ModelRow]:
        clause = " AND ".join(where) or "1"
        rows = self._read(
            f"SELECT * FROM models WHERE {clause} ORDER BY created_at DESC, model_id LIMIT ?",
            (*where.values(), -1 if limit is None else limit),
        )
        return [self._model(row) for row in rows]

    def _model(self, row: sqlite3.Row) -> ModelRow:
        values = dict(row)
        values["metadata"] = self._parse(values.pop("metadata_json"))
        values["tags"] = _split(values["tags"])
        values["model_path"] = str(self.root / values["model_path"])
        return cast(ModelRow, values)

    def _parse(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (TypeError, ValueError) as error:
            raise self._damaged(f"a row is not readable ({error})") from error

    def _relative(self, path: Path) -> str:
        root = self.root.resolve()
        path = path.resolve()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)

    # -- handoffs ---------------------------------------------------------------------------------

    def record_handoff(
        self,
        source_model_id: str,
        target_phase: str,
        *,
        target_model_id: str | None = None,
        validation_status: str = "pending",
        validation_metrics: Mapping[str, Any] | None = None,
    ) -> str:
        """Note that a model was offered to a phase; the same handoff again replaces the note."""
        handoff_id = f"{source_model_id}-to-{target_phase}"
        with self._writing() as connection:
            source = connection.execute(
                "SELECT phase_name FROM models WHERE model_id = ?", (source_model_id,)
            ).fetchone()
            if source is None:
                raise NotFound(f"no model {source_model_id!r}")
            if target_model_id is not None:
                self._require_model(connection, target_model_id)
            connection.execute(
                "INSERT OR REPLACE INTO phase_handoffs VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(handoff_id, source["phase_name"], target_phase, source_model_id),
                    *(target_model_id, time.time(), validation_status),
                    _json(validation_metrics or {}),
                ),
            )
        return handoff_id

    def _require_model(self, connection: sqlite3.Connection, model_id: str) -> None:
        sql = "SELECT 1 FROM models WHERE model_id = ?"
        if connection.execute(sql, (model_id,)).fetchone() is None:
            raise NotFound(f"no model {model_id!r}")

    def get_handoffs(self, session_id: str) -> list[HandoffRow]:
        rows = self._read(
            "SELECT h.* FROM phase_handoffs h JOIN models m ON m.model_id = h.source_model_id"
            " WHERE m.session_id = ? ORDER BY h.handoff_timestamp, h.handoff_id",
            (session_id,),
        )
        found = []
        for row in rows:
            values = dict(row)
            values["validation_metrics"] = self._parse(values.pop("validation_metrics_json"))
            found.append(cast(HandoffRow, values))
        return found

    # -- upkeep -----------------------------------------------------------------------------------

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
        """Bytes of the database and of its write-ahead log."""
        wal = self.db_path.with_name(self.db_path.name + "-wal")
        return self.db_path.stat().st_size, wal.stat().st_size if wal.exists() else 0

    # -- connections ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection of one operation's own; what SQLite reports gets its name here."""
        with self._errors():
            connection = sqlite3.connect(
                self.db_path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None
            )
            try:
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
                yield connection
            finally:
                connection.close()

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        try:
            with self._connection() as connection:
                return connection.execute(sql, values).fetchall()
        except (CannotWrite, DiskFull):  # SQLite wants to write even for a reader; read without
            if not self.db_path.is_file():
                raise
        with self._errors(), contextlib.closing(self._immutable()) as connection:
            return connection.execute(sql, values).fetchall()

    def _immutable(self) -> sqlite3.Connection:
        uri = self.db_path.resolve().as_uri() + "?immutable=1"
        connection = sqlite3.connect(uri, isolation_level=None, uri=True)
        connection.row_factory = sqlite3.Row
        return connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            self._begin(connection)
            try:
                yield connection
                connection.execute("COMMIT")
                self._bound_wal(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Wait for our turn to write. SQLite's own waiting sleeps so long that it can starve."""
        deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        connection.execute("PRAGMA busy_timeout = 0")
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_jitter.uniform(0.001, 0.01))
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    def _bound_wal(self, connection: sqlite3.Connection) -> None:
        """SQLite's own checkpoints give way to readers, so the log could grow without end.

        This one waits for them, but not for long: other writers wait for it meanwhile.
        """
        wal = self.db_path.with_name(self.db_path.name + "-wal")
        size = wal.stat().st_size if wal.exists() else 0
        if size > WAL_LIMIT_BYTES // 8:
            patience_ms = 100 if size < WAL_LIMIT_BYTES // 2 else 2000
            connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Name what SQLite reports; let programming errors through."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            text = str(error)
            if "disk is full" in text or "disk I/O error" in text:
                free = files.free_bytes(self.db_path.parent)
                raise DiskFull(self.db_path, PAGE_BYTES, free) from error
            if "unable to open" in text or "readonly" in text:
                raise CannotWrite(self.db_path, text) from error
            if "locked" in text:
                raise Busy(f"{self.db_path} is in use by another process") from error
            if type(error) is sqlite3.DatabaseError or any(sign in text for sign in DAMAGE):
                raise self._damaged(text) from error
            raise

    def _damaged(self, problem: str) -> DamagedFile:
        return DamagedFile(
            self.db_path,
            problem,
            hint="forge doctor --repair makes it again from the run directories",
        )

    def _migrate(self) -> None:
        """Bring the schema up to date; all migrations and their number are one transaction."""
        if self._version() == (APPLICATION_ID, len(MIGRATIONS)):
            return
        self._refuse_foreign()
        with self._connection() as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts before the first table
            self._switch_to_wal(connection)
        with self._writing() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _refuse_foreign(self) -> None:
        """Someone else's database, or a newer one of ours, is left as it is."""
        tables = self._read("SELECT count(*) FROM sqlite_master")[0][0]
        owner, version = self._version()  # after the count: another process may be making it
        if tables and owner != APPLICATION_ID:
            raise DamagedFile(self.db_path, "a SQLite database, but not a model registry")
        if version > len(MIGRATIONS):
            raise TooNew(
                f"{self.db_path} has schema {version}; this version reads up to {len(MIGRATIONS)}",
                hint="use the newer version of agent-forge that wrote it",
            )

    def _version(self) -> tuple[int, int]:
        """Whose database it is, and how many migrations it has seen."""
        owner, version = (self._read(f"PRAGMA {p}") for p in ("application_id", "user_version"))
        return owner[0][0], version[0][0]

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        """Several processes may make the database at once; this one switch ignores the timeout."""
        deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _session(row: sqlite3.Row) -> SessionRow:
    values = dict(row)
    values["tags"] = _split(values["tags"])
    return cast(SessionRow, values)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def join_tags(tags: Sequence[str]) -> str:
    """Tags as the registry keeps them; a tag is a name like any other."""
    return ",".join(names.safe_name(tag, "tag") for tag in tags)


def _split(tags: str) -> list[str]:
    return tags.split(",") if tags else []
