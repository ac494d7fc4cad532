"""What differs between Linux, macOS and Windows: locks, fsync, limits and process groups.

Nothing else in the package asks which system it runs on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # POSIX
    msvcrt = None  # type: ignore[assignment]

BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # POSIX: refuse to open through a link
PROBE = os.O_RDONLY if fcntl is not None else os.O_RDWR  # enough to look at a lock
HELD_BY_ANOTHER = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}
LOCKED_BYTE = 1 << 30  # Windows locks byte ranges: one far behind any text the file may hold


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file; the system frees it when the process dies."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in HELD_BY_ANOTHER:
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Free a lock taken by try_lock."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
    else:
        os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)


def after_fork(forget: Callable[[], None]) -> None:
    """Call `forget` in every forked child, where there are any."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def sync_file(fd: int) -> None:
    """Put a file's content on the disk itself; plain fsync stops at the drive's cache on macOS."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with contextlib.suppress(OSError):  # some file systems do not have it
            fcntl.fcntl(fd, full_sync)
            return
    os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Put a directory's names on the disk. Windows has no such call and keeps names by itself."""
    if fcntl is None:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def set_limits(
    *,
    cpu_seconds: int | None = None,
    memory_bytes: int | None = None,
    file_bytes: int | None = None,
    processes: int | None = None,
) -> bool:
    """Limit this process and its children; False where the system has no such limits."""
    if resource is None:
        return False
    for name, value in (
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_FSIZE", file_bytes),
        ("RLIMIT_NPROC", processes),
    ):
        if value is not None:
            kind = getattr(resource, name)
            _, ceiling = resource.getrlimit(kind)
            limit = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(kind, (limit, ceiling))
    return True


def new_group() -> dict[str, Any]:
    """Arguments for subprocess.Popen that give the child a process group of its own."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process started with new_group(), and everything that it started, at once."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
