"""The lock of a run directory is held by the system and dies with its process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agent_forge.errors import Busy
from agent_forge.store import lock


def test_one_holder_at_a_time_even_in_one_process(tmp_path: Path) -> None:
    with lock.exclusive(tmp_path):
        assert lock.is_busy(tmp_path)
        with pytest.raises(Busy), lock.exclusive(tmp_path):
            pass
        with lock.held(tmp_path):  # but work inside our own lock goes on
            assert lock.is_busy(tmp_path)
        assert lock.is_busy(tmp_path)
    assert not lock.is_busy(tmp_path)
    with lock.held(tmp_path):
        assert lock.is_busy(tmp_path)


def test_looking_creates_nothing(tmp_path: Path) -> None:
    assert not lock.is_busy(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_the_holder_is_named_as_far_as_known(tmp_path: Path) -> None:
    with lock.exclusive(tmp_path):
        assert f"process {os.getpid()}" in lock.holder(tmp_path)
    for text in ("", "[]", "{}", "\xff"):
        (tmp_path / lock.LOCK_FILE).write_text(text, encoding="latin-1")
        assert lock.holder(tmp_path) == "another process"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_killed_holder_frees_the_lock_at_once_even_with_children(tmp_path: Path) -> None:
    """The child's own child inherits the descriptor; it must not keep the lock alive."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with lock.exclusive(tmp_path):
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            os.write(writer, b"x")
            time.sleep(20)
        os._exit(0)
    os.read(reader, 1)
    assert lock.is_busy(tmp_path)
    started = time.monotonic()
    with pytest.raises(Busy, match=f"process {pid}"), lock.exclusive(tmp_path):
        pass
    assert time.monotonic() - started < 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with lock.exclusive(tmp_path):
        assert lock.is_busy(tmp_path)
