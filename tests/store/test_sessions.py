"""Sessions: run directories that describe themselves, and a policy that decides what goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_forge.config.settings import CleanupSettings
from agent_forge.errors import (
    AlreadyExists,
    AlreadyInUse,
    DamagedFile,
    HostileInput,
    NotFound,
    WrittenByNewerVersion,
)
from agent_forge.store import files, lock
from agent_forge.store.cleanup import DAY_S, SessionCleanupManager, plan_cleanup
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import (
    SessionStore,
    read_session,
    repair_registry,
)
from tests.support.pico import Pico

NOW = 1_000_000_000.0


def test_a_session_directory_describes_itself(sessions: SessionStore) -> None:
    path = sessions.create({"a": 1}, "a: 1\n", tags=["x"], details={"argv": ["forge"]})
    record = read_session(path)
    assert record["config"] == {"a": 1} and record["argv"] == ["forge"]
    assert (path / "config.yaml").read_text() == "a: 1\n"
    assert sessions.registry.get_session_status(path.name)["tags"] == ["x"]


def test_ids_are_time_stamps_that_never_collide(
    sessions: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "session_20261115_120000")
    names = [sessions.create({}, "").name for _ in range(3)]
    assert names == [f"session_20261115_120000{end}" for end in ("", "_2", "_3")]
    with pytest.raises(AlreadyExists, match="exists already"):
        sessions.create({}, "", session_id="s1")


def test_opening_locks_and_clears_up(sessions: SessionStore) -> None:
    path = sessions.find("s1")
    stray = path / "phase1_cognate" / f"{files.TEMP}12345678-model"
    stray.mkdir(parents=True)
    with sessions.open("s1") as opened:
        assert opened == path and lock.is_busy(path) and not stray.exists()
        with pytest.raises(AlreadyInUse), sessions.open("s1"):
            pass
    assert not lock.is_busy(path)
    with pytest.raises(NotFound), sessions.open("s9"):
        pass


def test_status_is_kept_in_the_directory_and_the_registry(sessions: SessionStore) -> None:
    row = sessions.registry.get_session_status("s1")
    assert sessions.status(row) == "interrupted"
    with sessions.open("s1"):
        assert sessions.status(row) == "running"
    sessions.set_status("s1", "paused")
    assert read_session(sessions.find("s1"))["status"] == "paused"
    assert sessions.status(sessions.registry.get_session_status("s1")) == "paused"
    with pytest.raises(ValueError, match="dreaming"):
        sessions.set_status("s1", "dreaming")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_version": 2}, DamagedFile),
        ({"schema_version": None}, DamagedFile),
        ({"status": "completed"}, DamagedFile),
        ({"checksum": "0"}, DamagedFile),
    ],
)
def test_a_session_record_is_checked(
    sessions: SessionStore,
    change: dict[str, Any],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = sessions.find("s1")
    record = files.read_json(path / "session.json")
    files.write_bytes(path / "session.json", files.to_json({**record, **change}))
    with pytest.raises(error), sessions.open("s1"):
        pass
    good = {k: v for k, v in record.items() if k != "checksum"}
    for bad in ({"session_id": "other"}, {"status": "odd"}, {"config": []}, {"tags": ["A b"]}):
        (path / "session.json").write_bytes(files.with_checksum({**good, **bad}))
        with pytest.raises(DamagedFile):
            read_session(path)
    monkeypatch.setattr(files, "SCHEMA_VERSION", 2)
    newer = files.with_checksum(good)
    monkeypatch.undo()
    (path / "session.json").write_bytes(newer)
    with pytest.raises(WrittenByNewerVersion):
        read_session(path)
    for content in (b"[]", files.with_checksum({"session_id": "other"})):
        (path / "session.json").write_bytes(content)
        with pytest.raises(DamagedFile):
            read_session(path)


def test_the_registry_is_rebuilt_from_the_directories(
    sessions: SessionStore, storage: ModelStorage, pico: Pico
) -> None:
    storage.save_model(pico, "s1", "cognate", "m1", {"seed": 42}, tags=["best"])
    sessions.set_status("s1", "completed")
    (sessions.root / "sessions" / "not a session").mkdir()
    (sessions.root / "sessions" / "empty").mkdir()
    broken = sessions.root / "sessions/s1/phase1_cognate/broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{}")
    (broken / "metadata.json").write_text('{"model_id": 5}')
    copied = sessions.root / "sessions/s1/phase1_cognate/lost"
    copied.mkdir()
    for name in ("manifest.json", "metadata.json"):
        (copied / name).write_bytes((broken.with_name("m1") / name).read_bytes())
    before = storage.registry.get_model("cognate.m1.s1")
    session = sessions.registry.get_session_status("s1")
    said = repair_registry(sessions.root)
    assert said.startswith("sound; 1 run directories, 0 entries added; not readable: ")
    assert all(name in said for name in ("not a session", "empty", "broken", "lost"))
    assert sessions.registry.get_session_status("s1") == session
    sessions.registry.db_path.write_bytes(b"garbage" * 1000)
    assert "1 run directories, 2 entries added" in repair_registry(sessions.root)
    again = SessionStore(sessions.root).registry
    restored = again.get_session_status("s1")
    for key in ("status", "tags", "start_time", "end_time"):
        assert restored[key] == pytest.approx(session[key], abs=0.1)
    assert again.get_model("cognate.m1.s1") == before
    assert list(sessions.root.glob("registry/*.damaged-*"))


def test_a_repair_waits_for_running_sessions(sessions: SessionStore) -> None:
    sessions.registry.db_path.write_bytes(b"garbage" * 1000)
    with lock.exclusive(sessions.path("s1")), pytest.raises(AlreadyInUse):
        repair_registry(sessions.root)


# -- the policy, as a function --------------------------------------------------------------------


def session(name: str, status: str, age_days: float, ended: bool = True) -> dict[str, Any]:
    start = NOW - age_days * DAY_S
    return {
        "session_id": name,
        "status": status,
        "start_time": start,
        "end_time": start if ended else None,
    }


def going(*sessions: dict[str, Any], **options: Any) -> set[str]:
    policy = options.pop("policy", CleanupSettings())
    return set(plan_cleanup(sessions, policy, NOW, **options))


HISTORY = (
    session("new", "completed", 29),
    session("old", "completed", 31),
    session("failed-new", "failed", 6),
    session("failed-old", "failed", 8),
    session("paused", "paused", 400),
    session("interrupted", "interrupted", 400, ended=False),
    session("running", "running", 400, ended=False),
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"old", "failed-old"}),
        ({"keep": {"old"}}, {"failed-old"}),
        ({"age_days": 10}, {"new", "old"}),
        ({"age_days": 7}, {"new", "old", "failed-old"}),
        ({"failed": True}, {"failed-new", "failed-old"}),
        ({"failed": True, "age_days": 30}, {"failed-new", "failed-old", "old"}),
        ({"everything": True}, {s["session_id"] for s in HISTORY} - {"running"}),
        ({"everything": True, "keep": {"new"}}, {s["session_id"] for s in HISTORY[1:6]}),
        ({"policy": CleanupSettings(max_session_age_days=20)}, {"new", "old", "failed-old"}),
        (
            {"policy": CleanupSettings(max_failed_session_age_days=1)},
            {"old", "failed-old"} | {"failed-new"},
        ),
        (
            {"policy": CleanupSettings(max_sessions_total=3)},
            {"old", "failed-old", "paused", "interrupted"},
        ),
    ],
)
def test_what_goes(options: dict[str, Any], expected: set[str]) -> None:
    assert going(*HISTORY, **options) == expected


def test_age_counts_from_the_end() -> None:
    long_run = {**session("long", "completed", 40), "end_time": NOW - DAY_S}
    assert going(long_run) == set()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["completed", "failed", "paused", "interrupted", "running"]),
            st.floats(0, 100),
        ),
        max_size=12,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_running_sessions_never_go(
    history: list[tuple[str, float]], total: int, everything: bool
) -> None:
    rows = [session(f"s{i}", status, age) for i, (status, age) in enumerate(history)]
    gone = going(*rows, policy=CleanupSettings(max_sessions_total=total), everything=everything)
    running = {row["session_id"] for row in rows if row["status"] == "running"}
    assert not gone & running
    left = len(rows) - len(gone)
    assert left <= max(total, len(running))


# -- carrying it out ------------------------------------------------------------------------------


@pytest.fixture
def manager(sessions: SessionStore) -> SessionCleanupManager:
    return SessionCleanupManager(sessions, CleanupSettings())


def session_names(manager: SessionCleanupManager) -> list[str]:
    folder = manager.sessions.root / "sessions"
    return [path.name for path in folder.iterdir() if path.name != lock.LOCK_FILE]


def test_removing_a_session_takes_files_and_rows(
    manager: SessionCleanupManager, storage: ModelStorage, pico: Pico
) -> None:
    storage.save_model(pico, "s1", "cognate", "m1", {})
    (removal,) = manager.plan(everything=True)
    assert removal.bytes == files.tree_bytes(manager.sessions.path("s1")) > 100
    assert manager.remove([removal]) == [removal]
    assert session_names(manager) == []
    assert manager.sessions.registry.get_all_sessions() == []
    assert storage.registry.search_models() == []


def test_a_session_that_was_resumed_meanwhile_stays(manager: SessionCleanupManager) -> None:
    manager.sessions.set_status("s1", "failed")
    plan = manager.plan(failed=True)
    manager.sessions.set_status("s1", "completed")
    assert manager.remove(plan) == [] and "meanwhile" in str(manager.kept[0][1])
    assert manager.sessions.find("s1")


def test_a_copied_run_directory_is_adopted(sessions: SessionStore) -> None:
    sessions.registry.delete_session("s1")
    sessions.create({}, "", session_id="s2")
    assert {row["session_id"] for row in sessions.registry.get_all_sessions()} == {"s1", "s2"}


def test_opening_races_with_removing(sessions: SessionStore) -> None:
    path = sessions.find("s1")
    files.remove_tree(path, sessions.root)
    with pytest.raises(NotFound), lock.exclusive(path):
        pass
    assert not path.exists()  # no ghost


def test_a_session_in_use_stays(manager: SessionCleanupManager) -> None:
    plan = manager.plan(everything=True)
    with lock.exclusive(manager.sessions.path("s1")):
        assert manager.plan(everything=True) == []
        assert manager.remove(plan) == []
    assert manager.sessions.find("s1")


def test_a_link_in_place_of_a_session_is_refused(
    manager: SessionCleanupManager, tmp_path: Path
) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("keep me")
    path = manager.sessions.path("s1")
    files.remove_tree(path, manager.sessions.root)
    path.symlink_to(outside)
    assert manager.plan(everything=True) == []
    assert isinstance(manager.kept[0][1], HostileInput)
    (path.parent / f"{files.TRASH}12345678-x").symlink_to(outside)
    manager.remove([])
    assert {p.name for p in path.parent.iterdir()} == {"s1", lock.LOCK_FILE}
    assert (outside / "file").read_text() == "keep me"


def test_a_removal_cut_short_is_finished_later(
    manager: SessionCleanupManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.disk, "remove_tree", die)
        with pytest.raises(KeyboardInterrupt):
            manager.remove(manager.plan(everything=True))
    assert not manager.sessions.path("s1").exists()
    row = manager.sessions.registry.get_session_status("s1")
    assert manager.sessions.status(row) == "missing"
    assert manager.plan() == []  # it might be on a disk that is not there: it goes in its time
    assert manager.remove(manager.plan(everything=True))
    assert manager.sessions.registry.get_all_sessions() == []
    assert session_names(manager) == []


def test_completing_a_session_cleans_and_tends_the_database(
    sessions: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CleanupSettings(checkpoint_every_n_sessions=2, max_sessions_total=2)
    manager = SessionCleanupManager(sessions, policy)
    tended: list[int] = []
    real = manager.checkpoint_and_vacuum
    monkeypatch.setattr(manager, "checkpoint_and_vacuum", lambda: tended.append(real()))
    gone = []
    for name in ("s2", "s3", "s4", "s5"):
        sessions.create({}, "", session_id=name)
        gone += manager.auto_cleanup_on_session_complete(name)
    assert [removal.session_id for removal in gone] == ["s1", "s2", "s3"]
    assert {row["session_id"] for row in sessions.registry.get_all_sessions()} == {"s4", "s5"}
    assert len(tended) == 2  # after the second and the fourth that completed


def test_automatic_cleaning_can_be_switched_off(sessions: SessionStore) -> None:
    policy = CleanupSettings(auto_cleanup_enabled=False, max_sessions_total=1)
    sessions.create({}, "", session_id="s2")
    assert SessionCleanupManager(sessions, policy).auto_cleanup_on_session_complete("s2") == []
    assert len(sessions.registry.get_all_sessions()) == 2


def test_the_record_on_disk_is_plain_json(sessions: SessionStore) -> None:
    record = json.loads((sessions.find("s1") / "session.json").read_text())
    assert record["schema_version"] == 1 and record["session_id"] == "s1"
