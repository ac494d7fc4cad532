"""Shared fixtures: a storage root with one session, and a network to keep in it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Threads that wait for others sleep: where more of them run than there are cores, as in parallel
# tests, those that spin take most of the time. It has to be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from agent_forge.cli import doctor
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.command_line import Forge, run_line
from tests.support.pico import Pico, build

# A shell that starts the tests in the background, or nohup, has them ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)
CACHE = tempfile.TemporaryDirectory(prefix="forge-cache-")  # never that of the user
os.environ["FORGE_CACHE"] = CACHE.name

SLOW_FOLDERS = ("faults", "golden")  # whole runs and their enemies
LONGEST = ("test_workers.py", "test_strategies.py", "test_golden.py", "test_runs.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in a slow folder, so that `make test-fast` leaves it out; and begin with what
    takes longest, so that no process is left alone with it at the end."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup() -> None:
    """One thread for each test: a run in the one before may have set one a core."""
    torch.set_num_threads(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def sessions(root: Path) -> Iterator[SessionStore]:
    """A session store with one session, `s1`."""
    store = SessionStore(root)
    store.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1")
    yield store


@pytest.fixture
def storage(sessions: SessionStore) -> ModelStorage:
    return ModelStorage(sessions.root, sessions.registry, build)


@pytest.fixture
def pico() -> Pico:
    torch.manual_seed(0)
    return Pico()


@pytest.fixture
def forge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Forge:
    """Runs a command line in this process, in tmp_path: its storage is the fixture `root`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_STORAGE", raising=False)
    monkeypatch.delenv("AGENT_FORGE_DATA", raising=False)
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 0)
    monkeypatch.setattr(doctor, "LOW_MEMORY_BYTES", 0)
    return lambda line: run_line(line, monkeypatch, capsys)
