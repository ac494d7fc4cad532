"""The registry: the specification's tables, references that hold, upkeep that really reclaims."""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_forge.errors import (
    AlreadyInUse,
    CannotWrite,
    DamagedFile,
    DiskFull,
    HostileInput,
    NameRefused,
    NotFound,
)
from agent_forge.store import registry as registry_module
from agent_forge.store.records import MIGRATIONS
from agent_forge.store.registry import ModelRegistry
from agent_forge.store.sessions import repair_registry


@pytest.fixture
def registry(root: Path) -> ModelRegistry:
    registry = ModelRegistry(root / "registry" / "model_registry.db")
    registry.create_session("s1", {"preset": "tiny"}, ["first"])
    return registry


def add_model(registry: ModelRegistry, name: str = "m1", session: str = "s1") -> str:
    path = registry.root / "sessions" / session / "phase1_cognate" / name
    metadata = {"seed": 42, "size_mb": 1.5, "parameters": 12, "tags": ["best"]}
    return registry.register_model(session, "cognate", name, path, metadata)


def test_the_tables_have_the_columns_of_the_specification(registry: ModelRegistry) -> None:
    connection = sqlite3.connect(registry.db_path)
    expected = {
        "models": "model_id session_id phase_name model_name model_path size_mb parameters"
        " created_at metadata_json tags",
        "phase_handoffs": "handoff_id source_phase target_phase source_model_id target_model_id"
        " handoff_timestamp validation_status validation_metrics_json",
        "sessions": "session_id pipeline_config_json start_time end_time status current_phase"
        " progress_percent tags",
    }
    for table, columns in expected.items():
        found = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        assert found == columns.split()


def test_the_settings_that_the_promises_need_are_in_force(registry: ModelRegistry) -> None:
    pragmas = {"foreign_keys": 1, "auto_vacuum": 2, "synchronous": 2, "journal_mode": "wal"}
    with registry._connection() as connection:
        for name, value in pragmas.items():
            assert connection.execute(f"PRAGMA {name}").fetchone()[0] == value


def test_a_session_lives_through_its_states(registry: ModelRegistry) -> None:
    row = registry.get_session_status("s1")
    assert (row["status"], row["progress_percent"], row["tags"]) == ("running", 0, ["first"])
    assert row["end_time"] is None
    registry.update_session("s1", status="paused", current_phase="evomerge", progress_percent=40)
    row = registry.get_session_status("s1")
    assert (row["status"], row["current_phase"], row["progress_percent"]) == (
        "paused",
        "evomerge",
        40,
    )
    assert row["end_time"] is not None and row["end_time"] >= row["start_time"]
    registry.update_session("s1", status="running")
    row = registry.get_session_status("s1")
    assert row["end_time"] is None and row["tags"] == ["first"]
    with pytest.raises(sqlite3.IntegrityError):
        registry.update_session("s1", status="dreaming")
    with pytest.raises(NotFound):
        registry.update_session("s2", status="failed")
    with pytest.raises(NotFound):
        registry.get_session_status("s2")


def test_creating_a_session_again_changes_nothing(registry: ModelRegistry) -> None:
    before = registry.get_session_status("s1")
    registry.create_session("s1", {"preset": "small"})
    assert registry.get_session_status("s1") == before


def test_sessions_come_newest_first(registry: ModelRegistry) -> None:
    registry.create_session("s2", {})
    assert [row["session_id"] for row in registry.get_all_sessions()] == ["s2", "s1"]


def test_a_model_is_found_by_id_and_by_place(registry: ModelRegistry) -> None:
    model_id = add_model(registry)
    row = registry.get_model(model_id)
    assert row == registry.get_model(session_id="s1", phase_name="cognate")
    assert row["metadata"]["seed"] == 42 and row["parameters"] == 12 and row["tags"] == ["best"]
    assert Path(row["model_path"]) == registry.root / "sessions/s1/phase1_cognate/m1"
    add_model(registry, "m2")
    with pytest.raises(NotFound, match="2 models"):
        registry.get_model(session_id="s1")
    assert registry.get_model(session_id="s1", model_name="m2")["model_name"] == "m2"
    with pytest.raises(NotFound, match="no model with model_id=m9"):
        registry.get_model("m9")


def test_registering_again_renews_the_entry(registry: ModelRegistry) -> None:
    first = add_model(registry)
    path = registry.root / "sessions/s1/phase1_cognate/m1"
    assert registry.register_model("s1", "cognate", "m1", path, {"seed": 7}) == first
    assert registry.get_model(first)["metadata"] == {"seed": 7}
    assert len(registry.search_models()) == 1


def test_a_model_needs_a_session_and_a_safe_name(registry: ModelRegistry, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no session"):
        registry.register_model("s9", "cognate", "m", tmp_path)
    with pytest.raises(NameRefused):
        registry.register_model("s1", "cognate", "../m", tmp_path)
    with pytest.raises(NameRefused):
        registry.register_model("s1", "cognate", "m", tmp_path, {"tags": ["a,b"]})
    assert registry.search_models() == []


def test_models_are_searched(registry: ModelRegistry) -> None:
    registry.create_session("s2", {})
    add_model(registry, "m1")
    add_model(registry, "m2", "s2")
    registry.register_model("s2", "evomerge", "m3", registry.root)

    def found(**where: str) -> set[str]:
        return {row["model_name"] for row in registry.search_models(**where)}  # type: ignore[arg-type]

    assert found() == {"m1", "m2", "m3"}
    assert found(phase="cognate") == {"m1", "m2"}
    assert found(session_id="s2") == {"m2", "m3"}
    assert found(tag="best") == {"m1", "m2"} and found(tag="bes") == set()
    assert found(text="evomerge") == {"m3"}


def test_the_storage_root_can_be_moved(registry: ModelRegistry, tmp_path: Path) -> None:
    model_id = add_model(registry)
    outside = registry.register_model("s1", "edge", "far", tmp_path / "elsewhere")
    moved = tmp_path / "moved"
    registry.root.rename(moved)
    again = ModelRegistry(moved / "registry" / "model_registry.db")
    assert Path(again.get_model(model_id)["model_path"]).is_relative_to(moved)
    assert again.get_model(outside)["model_path"] == str(tmp_path / "elsewhere")


def test_handoffs_go_with_their_models(registry: ModelRegistry) -> None:
    source = add_model(registry)
    for status in ("pending", "passed"):
        registry.record_handoff(
            source, "evomerge", validation_status=status, validation_metrics={"fitness": 0.7}
        )
    (row,) = registry.get_handoffs("s1")
    assert (row["source_phase"], row["validation_status"]) == ("cognate", "passed")
    assert row["validation_metrics"] == {"fitness": 0.7}
    with pytest.raises(NotFound):
        registry.record_handoff("nobody", "evomerge")
    registry.delete_session("s1")
    assert registry.search_models() == [] and registry.get_handoffs("s1") == []
    tables = sqlite3.connect(registry.db_path)
    assert tables.execute("SELECT count(*) FROM phase_handoffs").fetchone() == (0,)
    registry.integrity_check()


def test_a_failed_transaction_changes_nothing(registry: ModelRegistry) -> None:
    with pytest.raises(RuntimeError, match="stop"), registry._writing() as connection:
        connection.execute("DELETE FROM sessions")
        raise RuntimeError("stop")
    assert len(registry.get_all_sessions()) == 1


def test_vacuum_really_reclaims(registry: ModelRegistry) -> None:
    for n in range(60):
        registry.create_session(f"big{n}", {"text": "x" * 20_000})
    registry.checkpoint_wal()
    full, _ = registry.size_bytes()
    for n in range(60):
        registry.delete_session(f"big{n}")
    reclaimed = registry.vacuum_incremental(pages=10)
    assert reclaimed == 10 * registry_module.PAGE_BYTES
    reclaimed += registry.vacuum_incremental()
    small, wal = registry.size_bytes()
    assert full - small == reclaimed > 60 * 20_000 and wal == 0


def test_nothing_is_lost_across_forks(registry: ModelRegistry) -> None:
    """Parent and forked children write in turns; SQLite alone would lose some of it."""

    def write(name: str) -> None:
        registry.create_session(name, {})

    for n in range(3):
        pid = os.fork()
        if pid == 0:
            write(f"child{n}")
            os._exit(0)
        write(f"parent{n}")
        assert os.waitpid(pid, 0)[1] == 0
        write(f"after{n}")
    assert len(ModelRegistry(registry.db_path).get_all_sessions()) == 1 + 9


def test_threads_share_a_registry(registry: ModelRegistry) -> None:
    threads = [
        threading.Thread(target=lambda n=n: registry.create_session(f"t{n}", {}))  # type: ignore[misc]
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.get_all_sessions()) == 9


def test_a_full_disk_is_named_and_survived(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sqlite3.connect

    def small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = real(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 16")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", small)
        with pytest.raises(DiskFull):
            registry.create_session("s2", {"text": "x" * 100_000})
    registry.integrity_check()
    assert [row["session_id"] for row in registry.get_all_sessions()] == ["s1"]


def test_damage_is_named(registry: ModelRegistry) -> None:
    add_model(registry)
    registry.checkpoint_wal()
    good = registry.db_path.read_bytes()
    for content in (b"not a database at all" * 400, good[:100] + b"\xff" * 3000):
        registry.db_path.write_bytes(content)
        with pytest.raises(DamagedFile, match="model_registry"):
            ModelRegistry(registry.db_path).get_all_sessions()
    flipped = bytearray(good)
    for page in range(1, len(good) // 4096):  # page headers: a type that no page has
        flipped[page * 4096] ^= 0xFF
    registry.db_path.write_bytes(flipped)
    with pytest.raises(DamagedFile):
        ModelRegistry(registry.db_path).integrity_check()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE models SET metadata_json = '{'",
        "UPDATE models SET model_name = CAST(x'ff' AS TEXT)",
        "ALTER TABLE models RENAME TO other",
    ],
)
def test_a_row_that_is_not_readable_is_damage(registry: ModelRegistry, change: str) -> None:
    add_model(registry)
    connection = sqlite3.connect(registry.db_path)
    connection.execute(change)
    connection.commit()
    with pytest.raises(DamagedFile, match="model_registry"):
        registry.search_models()


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "registry" / "model_registry.db").mkdir(parents=True)
    with pytest.raises(CannotWrite):
        ModelRegistry(tmp_path / "a" / "registry" / "model_registry.db")
    (tmp_path / "outside").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "registry").symlink_to(tmp_path / "outside")
    with pytest.raises(HostileInput):
        ModelRegistry(tmp_path / "b" / "registry" / "model_registry.db")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_registry_that_may_not_be_written_can_be_read(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.checkpoint_wal()
    real = sqlite3.connect

    def unwritable(place: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        if "immutable" not in str(place):
            raise sqlite3.OperationalError("unable to open database file")
        return real(place, *arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", unwritable)
    assert len(ModelRegistry(registry.db_path).get_all_sessions()) == 1
    with pytest.raises(CannotWrite):
        registry.create_session("s2", {})


def test_updating_nothing_still_needs_the_session(registry: ModelRegistry) -> None:
    registry.update_session("s1")
    with pytest.raises(NotFound):
        registry.update_session("s2")


def test_a_dangling_reference_is_found(registry: ModelRegistry) -> None:
    connection = sqlite3.connect(registry.db_path)
    connection.execute("INSERT INTO models VALUES ('m', 'gone', 'p', 'n', 'x', 1, 1, 0, '{}', '')")
    connection.commit()
    with pytest.raises(DamagedFile, match="refers to one"):
        registry.integrity_check()


def test_someone_elses_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry" / "model_registry.db"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE photos (name TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DamagedFile, match="not a model registry"):
        ModelRegistry(path)
    assert path.read_bytes() == before


def test_a_journal_that_has_another_file_deleted_is_refused(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    """SQLite ends what a journal says was begun, and deletes the file that it names."""
    mine, magic = tmp_path / "mine.txt", bytes.fromhex("d9d505f920a163d7")
    mine.write_text("mine")
    name = str(mine).encode()
    pages = registry.db_path.stat().st_size // 4096
    header = magic + struct.pack(">5I", 0, 1, pages, 512, 4096)
    named = struct.pack(">I", (1 << 30) // 4096 + 1) + name
    end = struct.pack(">2I", len(name), sum(name)) + magic
    registry.db_path.with_name("model_registry.db-journal").write_bytes(
        header.ljust(512, b"\0") + named + end
    )
    with pytest.raises(DamagedFile, match="journal"):
        ModelRegistry(registry.db_path)
    assert "journal names another file" in repair_registry(registry.root)
    assert ModelRegistry(registry.db_path).get_all_sessions() == []
    assert mine.read_text() == "mine"


def test_a_database_that_changes_rows_by_itself_is_refused(registry: ModelRegistry) -> None:
    """Sessions are cleaned by their times in it: made old, they would go at once."""
    connection = sqlite3.connect(registry.db_path)
    change = "UPDATE sessions SET end_time = 1"
    connection.execute(f"CREATE TRIGGER t AFTER UPDATE OF status ON sessions BEGIN {change}; END")
    connection.commit()
    with pytest.raises(DamagedFile, match="triggers"):
        ModelRegistry(registry.db_path)


def test_a_lock_that_never_comes_free_is_an_error(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "BUSY_TIMEOUT_MS", 50)
    blocker = sqlite3.connect(registry.db_path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(AlreadyInUse):
        registry.create_session("s2", {})
    blocker.execute("ROLLBACK")
    registry.create_session("s2", {})


def test_switching_to_wal_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registry" / "model_registry.db"
    path.parent.mkdir()
    blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN EXCLUSIVE")
    threading.Timer(0.3, lambda: blocker.execute("ROLLBACK")).start()
    assert ModelRegistry(path).get_all_sessions() == []
    other = tmp_path / "other" / "registry" / "model_registry.db"
    other.parent.mkdir(parents=True)
    blocker = sqlite3.connect(other, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(registry_module, "BUSY_TIMEOUT_MS", 50)
    with pytest.raises(AlreadyInUse):
        ModelRegistry(other)


def test_a_migration_runs_once_and_in_one_transaction(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (*MIGRATIONS, ("ALTER TABLE models ADD COLUMN rating REAL", "CREATE NONSENSE"))
    monkeypatch.setattr(registry_module, "MIGRATIONS", broken)
    with pytest.raises(sqlite3.OperationalError):
        ModelRegistry(registry.db_path)
    good = (*MIGRATIONS, ("ALTER TABLE models ADD COLUMN rating REAL",))
    monkeypatch.setattr(registry_module, "MIGRATIONS", good)
    for _ in range(2):
        again = ModelRegistry(registry.db_path)
        assert again.get_session_status("s1")["tags"] == ["first"]
    assert again._version()[1] == len(good)
