"""P1 (of the store), P7, P8: killed writers, two processes on one directory, readers and writers.

Children are forked from this process, which has torch loaded, so that a hundred of them are cheap.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.errors import AlreadyInUse
from agent_forge.store import files
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.models import ModelStorage, load_directory
from agent_forge.store.registry import WAL_LIMIT_BYTES, ModelRegistry
from agent_forge.store.sessions import SessionStore
from tests.support.toy_runs import exit_code, forked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def exit_codes(pids: list[int]) -> list[int]:
    return [exit_code(pid) for pid in pids]


def save_again_and_again(root: Path, ready: int) -> None:
    """Replace one model and add checkpoints as fast as possible until killed."""
    sessions = SessionStore(root)
    with sessions.open("s1") as path:
        storage = ModelStorage(root, sessions.registry)
        checkpoints = CheckpointManager(path / "checkpoints", keep_last=2)
        for n in range(1, 10_000):
            state = {"w": torch.full((2000,), float(n))}
            storage.save_model(state, "s1", "cognate", "m1", {"n": n})
            checkpoints.save_checkpoint(state, step=n)
            if n == 1:
                os.write(ready, b"x")


def kill_while_saving(root: Path, delay_s: float) -> None:
    reader, writer = os.pipe()
    pid = forked(lambda: save_again_and_again(root, writer))
    os.read(reader, 1)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    assert exit_codes([pid]) == [-signal.SIGKILL]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_a_hundred_killed_saves_leave_a_hundred_loadable_models(
    sessions: SessionStore, kills: int
) -> None:
    """A sample here, all of them in `make soak`."""
    chance = random.Random(0)
    unfinished = 0
    for _ in range(kills):
        kill_while_saving(sessions.root, chance.uniform(0, 0.02))
        unfinished += any(p.name[0] == "." for p in sessions.path("s1").rglob("*"))
        row = sessions.registry.get_model(session_id="s1", phase_name="cognate")
        weights, metadata, _ = load_directory(Path(row["model_path"]))
        assert (weights["w"] == metadata["n"]).all()
        with sessions.open("s1") as path:
            checkpoints = CheckpointManager(path / "checkpoints")
            loaded = checkpoints.load_checkpoint()
            assert (loaded.state["model"]["w"] == loaded.step).all()
            assert loaded.path == checkpoints.steps()[-1]
            assert not [p for p in path.rglob("*") if p.name[0] == "."]
            files.remove_tree(path / "checkpoints", path)
        sessions.registry.integrity_check()
    assert unfinished > kills / 5  # the kills did hit writes


def test_two_processes_never_share_a_directory(sessions: SessionStore) -> None:
    def second() -> None:
        started = time.monotonic()
        with pytest.raises(AlreadyInUse, match=f"process {parent}") as caught, sessions.open("s1"):
            pass
        assert caught.value.exit_code == 6 and time.monotonic() - started < 30

    parent = os.getpid()
    with sessions.open("s1"):
        assert exit_codes([forked(second)]) == [0]
    assert exit_codes([forked(lambda: sessions.open("s1").__enter__() and None)]) == [0]
    with sessions.open("s1"):
        pass


def read_then_write(path: Path, worker: int, count: int) -> None:
    """Transactions that first read and then write: the kind that deadlocks when done naively."""
    registry = ModelRegistry(path)
    for n in range(count):
        with registry._writing() as connection:
            seen = connection.execute("SELECT count(*) FROM models").fetchone()[0]
            connection.execute(
                "INSERT INTO models VALUES (?, 's1', 'cognate', 'm', 'x', 1, ?, 0, '{}', '')",
                (f"w{worker}-{n}", seen),
            )


def test_six_processes_of_150_transactions_have_no_error(sessions: SessionStore) -> None:
    path = sessions.registry.db_path
    pids = [forked(lambda w=w: read_then_write(path, w, 150)) for w in range(6)]  # type: ignore[misc]
    assert exit_codes(pids) == [0] * 6
    rows = sessions.registry.search_models()
    assert sorted(row["parameters"] or 0 for row in rows) == list(range(900))
    sessions.registry.integrity_check()


def test_ten_processes_may_make_the_database_at_once(root: Path) -> None:
    path = root / "registry" / "model_registry.db"

    def make(n: int) -> None:
        ModelRegistry(path).create_session(f"s{n}", {})

    pids = [forked(lambda n=n: make(n)) for n in range(10)]  # type: ignore[misc]
    assert exit_codes(pids) == [0] * 10
    assert len(ModelRegistry(path).get_all_sessions()) == 10


@pytest.mark.parametrize("look", range(5))
def test_another_process_may_make_the_database_between_two_looks(
    root: Path, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "registry" / "model_registry.db"
    read, looks = ModelRegistry._read, 0

    def late(self: ModelRegistry, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == look + 1:
            assert exit_codes([forked(lambda: ModelRegistry(path))]) == [0]
        return read(self, *args)

    monkeypatch.setattr(ModelRegistry, "_read", late)
    ModelRegistry(path).create_session("s", {})
    assert looks > look


def write_for(path: Path, worker: int, seconds: float) -> None:
    registry = ModelRegistry(path)
    registry.create_session(f"w{worker}", {})
    end = time.monotonic() + seconds
    n = 0
    while time.monotonic() < end:
        registry.register_model(f"w{worker}", "cognate", f"m{n}", path, {"text": "x" * 500})
        registry.update_session(f"w{worker}", progress_percent=n % 100)
        n += 1
    registry.update_session(f"w{worker}", current_phase=str(n))


def read_for(path: Path, seconds: float) -> None:
    registry = ModelRegistry(path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for row in registry.get_all_sessions():
            registry.get_session_status(row["session_id"])
        registry.search_models(phase="cognate", session_id="w0")


def readers_against_writers(sessions: SessionStore, seconds: float) -> None:
    path = sessions.registry.db_path
    writers = [forked(lambda w=w: write_for(path, w, seconds)) for w in range(4)]  # type: ignore[misc]
    readers = [forked(lambda: read_for(path, seconds)) for _ in range(4)]
    largest_wal = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        largest_wal = max(largest_wal, sessions.registry.size_bytes()[1])
        time.sleep(0.05)
    assert exit_codes(writers + readers) == [0] * 8
    for worker in range(4):
        written = sessions.registry.get_session_status(f"w{worker}")["current_phase"]
        assert str(len(sessions.registry.search_models(session_id=f"w{worker}"))) == written
    assert 0 < largest_wal < WAL_LIMIT_BYTES
    sessions.registry.integrity_check()


def test_readers_never_block_writers(sessions: SessionStore) -> None:
    readers_against_writers(sessions, 3)


@pytest.mark.soak
def test_readers_never_block_writers_for_a_minute(sessions: SessionStore) -> None:
    readers_against_writers(sessions, 60)
