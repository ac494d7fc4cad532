"""What differs between systems: locks, sync, limits and process groups, with and without POSIX."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_forge import platform
from agent_forge.errors import AlreadyInUse
from agent_forge.store import files, lock
from tests.support.polling import until


class WindowsLocks(types.ModuleType):
    """Stands in for msvcrt: byte-range locks, one holder for each file."""

    LK_NBLCK, LK_UNLCK = 1, 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.locked: set[tuple[int, int]] = set()

    def locking(self, fd: int, mode: int, count: int) -> None:
        assert count == 1 and os.lseek(fd, 0, os.SEEK_CUR) == platform.LOCKED_BYTE
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if mode == self.LK_UNLCK:
            self.locked.remove(key)
        elif key in self.locked:
            raise OSError(errno.EACCES, "locked by another")
        else:
            self.locked.add(key)


@pytest.fixture
def without_posix(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowsLocks]:
    """The platform module as it loads where fcntl and resource do not exist."""
    windows = WindowsLocks()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    importlib.reload(platform)
    yield windows
    monkeypatch.undo()
    importlib.reload(platform)


def test_the_store_works_without_the_posix_modules(
    tmp_path: Path, without_posix: WindowsLocks
) -> None:
    with lock.exclusive(tmp_path):
        assert len(without_posix.locked) == 1
        assert f"process {os.getpid()}" in lock.holder(tmp_path)
        with pytest.raises(AlreadyInUse), lock.exclusive(tmp_path):
            pass
    assert not without_posix.locked and not lock.is_busy(tmp_path)
    other = os.open(tmp_path / lock.LOCK_FILE, os.O_RDWR)
    assert platform.try_lock(other) and lock.is_busy(tmp_path)
    platform.unlock(other)
    os.close(other)
    with files.staging(tmp_path / "model") as stage:
        stage.write_bytes("a", b"1")
    assert files.verify(tmp_path / "model")


def test_there_are_no_limits_without_the_posix_modules(without_posix: WindowsLocks) -> None:
    assert platform.CAN_LIMIT is False


def test_the_posix_modules_are_back() -> None:
    assert platform.fcntl is not None and platform.resource is not None


def test_macos_syncs_through_the_drives_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(platform.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(platform.fcntl, "fcntl", lambda fd, what: calls.append(what))
    files.write_bytes(tmp_path / "a", b"x")
    assert calls == [51, 51]  # the file, then its folder


def test_a_whole_group_is_killed(tmp_path: Path) -> None:
    """The grandchild would go on writing for long; it must die with its parent."""
    beat = tmp_path / "beat"
    grandchild = f"import time\nwhile True: open({str(beat)!r}, 'a').write('x'); time.sleep(0.01)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], **platform.new_group())

    def grows() -> bool:
        size = beat.stat().st_size
        time.sleep(0.2)
        return beat.stat().st_size > size

    until(lambda: beat.exists() and grows())
    platform.kill_group(process)
    until(lambda: not grows(), 10)
    platform.kill_group(process)  # a second time does no harm


def test_without_process_groups_the_process_itself_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "killpg")
    monkeypatch.setattr(platform.sys, "platform", "win32")
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    assert platform.new_group() == {"creationflags": 512}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    platform.kill_group(process)
    assert process.returncode != 0
