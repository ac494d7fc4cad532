"""The lock of a run directory is held by the system and dies with its process."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agent_forge.errors import AlreadyInUse, CannotWrite, HostileInput
from agent_forge.store import lock


def test_one_holder_at_a_time_even_in_one_process(tmp_path: Path) -> None:
    with lock.exclusive(tmp_path):
        assert lock.is_busy(tmp_path)
        with pytest.raises(AlreadyInUse), lock.exclusive(tmp_path):
            pass
        with lock.held(tmp_path):  # but work inside our own lock goes on
            assert lock.is_busy(tmp_path)
        assert lock.is_busy(tmp_path)
    assert not lock.is_busy(tmp_path)
    with lock.held(tmp_path):
        assert lock.is_busy(tmp_path)


def test_threads_inside_one_lock_leave_it_together(tmp_path: Path) -> None:
    with lock.exclusive(tmp_path):
        inner = lock.held(tmp_path)
        inner.__enter__()
    assert lock.is_busy(tmp_path)  # a thread is still inside
    inner.__exit__(None, None, None)
    assert not lock.is_busy(tmp_path)


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path) -> None:
    real = lock.platform.try_lock

    def removed_meanwhile(fd: int) -> bool:
        (tmp_path / lock.LOCK_FILE).unlink(missing_ok=True)
        return real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock.platform, "try_lock", removed_meanwhile)
        with pytest.raises(AlreadyInUse), lock.exclusive(tmp_path):
            pass
    with lock.exclusive(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock.platform.fcntl, "flock", no_locks)
        with pytest.raises(CannotWrite, match="No locks"), lock.exclusive(tmp_path):
            pass


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / lock.LOCK_FILE).symlink_to(victim)
    with pytest.raises(HostileInput), lock.exclusive(folder):
        pass
    with pytest.raises(HostileInput):
        lock.is_busy(folder)
    assert victim.read_text() == "mine"


def test_a_child_that_leaves_its_parents_block_frees_nothing(tmp_path: Path) -> None:
    with lock.exclusive(tmp_path):
        pid = os.fork()
        if pid == 0:
            try:
                lock._leave(tmp_path.resolve() / lock.LOCK_FILE)
                os._exit(0 if lock.is_busy(tmp_path) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
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
            grandchild = os.fork()
            if grandchild == 0:
                time.sleep(300)
                os._exit(0)
            os.write(writer, str(grandchild).encode())
            time.sleep(300)
        os._exit(0)
    grandchild = int(os.read(reader, 20))
    assert lock.is_busy(tmp_path)
    started = time.monotonic()
    with pytest.raises(AlreadyInUse, match=f"process {pid}"), lock.exclusive(tmp_path):
        pass
    assert time.monotonic() - started < 30
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with lock.exclusive(tmp_path):
        assert lock.is_busy(tmp_path)
    os.kill(grandchild, signal.SIGKILL)
