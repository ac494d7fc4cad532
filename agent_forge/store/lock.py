"""The lock of a run directory: held by the system, so proof of life; its text is for people."""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_forge import platform
from agent_forge.errors import AlreadyInUse, HostileInput, NotFound
from agent_forge.store import files

LOCK_FILE = "run.lock"
MARK = b'{"pid": '  # begins the text of a lock
STOP_FILE = "stop"  # asks the process of this number, which holds the lock, to stop
MAX_PID_BYTES = 32
PATIENCE_S = 0.4  # a probe by `forge ls` holds the lock for an instant: that is not "busy"

_guard = threading.Lock()
_held: dict[Path, list[int]] = {}  # lock file -> [open descriptor, blocks inside it]


def _forget_after_fork() -> None:
    """Close the parent's locks in a forked child: they must not outlive the parent."""
    global _guard
    _guard = threading.Lock()  # another thread may have held it at the fork
    for fd, _ in _held.values():
        os.close(fd)
    _held.clear()


platform.after_fork(_forget_after_fork)


@contextlib.contextmanager
def exclusive(directory: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the directory's lock for the block; AlreadyInUse if any process has it, or this one."""
    path = _lock_path(directory)
    deadline = time.monotonic() + patience_s
    while not _take(path):
        if time.monotonic() > deadline:
            raise busy(directory)
        time.sleep(0.02)
    try:
        yield
    finally:
        _leave(path)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Like `exclusive`, but a block inside this process's own lock just goes on."""
    path = _lock_path(directory)
    with contextlib.ExitStack() as stack:
        with _guard:
            if inside := path in _held:
                _held[path][1] += 1
                stack.callback(_leave, path)
        if not inside:
            stack.enter_context(exclusive(directory))
        yield


def is_busy(directory: Path) -> bool:
    """True if a living process holds the directory's lock."""
    path = _lock_path(directory)
    if path in _held:
        return True
    if not path.is_file():
        return False
    with files.disk_errors(path):
        fd = os.open(files.refuse_link(path), platform.PROBE)
    try:
        if not platform.try_lock(fd):
            return True
        platform.unlock(fd)
        return False
    finally:
        os.close(fd)


def busy(directory: Path) -> AlreadyInUse:
    """Return the error that says who holds the lock."""
    return AlreadyInUse(f"{directory} is in use by {holder(directory)}", hint="wait for it to end")


def holder(directory: Path) -> str:
    """Return who holds the lock, as far as its file tells."""
    text = "process {pid} on {host} since {since} ({command})"
    who = announced(directory)
    return text.format(**who) if who else "another process"


def announced(directory: Path) -> dict[str, Any]:
    """Return pid, host, since and command of the holder; empty if the file does not tell."""
    try:
        who = json.loads(_lock_path(directory).read_text())
        return {"pid": int(who["pid"]), **{key: who[key] for key in ("host", "since", "command")}}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _lock_path(directory: Path) -> Path:
    return directory.resolve() / LOCK_FILE


def _take(path: Path) -> bool:
    with _guard:
        if path in _held:
            return False
        if not path.parent.is_dir():
            raise NotFound(f"{path.parent} does not exist")
        with files.disk_errors(path):
            flags = os.O_RDWR | os.O_CREAT | platform.NO_FOLLOW
            fd = os.open(files.refuse_link(path), flags, 0o644)
            try:
                if platform.try_lock(fd) and _is_still(path, fd):
                    files.require_own(path, os.fstat(fd))
                    if not MARK.startswith(os.read(fd, len(MARK))):  # its text would be lost
                        hint = "move that file elsewhere"
                        raise HostileInput(f"{path} is no lock of ours", hint=hint)
                    _held[path] = [fd, 1]
            finally:
                if path not in _held:
                    os.close(fd)
        if path not in _held:
            return False
    _announce(fd)
    return True


def _is_still(path: Path, fd: int) -> bool:
    """True if the file we locked is the one at `path`: its directory may have been removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def is_stop_request(path: Path) -> bool:
    """True if a file is what `forge stop` writes, not only called so."""
    with contextlib.suppress(OSError):
        own = path.is_file() and not path.is_symlink() and path.stat().st_size < MAX_PID_BYTES
        return own and re.fullmatch(rb"\d*|None", path.read_bytes()) is not None
    return False


def _announce(fd: int) -> None:
    who = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": " ".join(sys.argv)[:200],
    }
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, json.dumps(who).encode())


def _leave(path: Path) -> None:
    """Leave one block; the last one frees the lock. A forked child has nothing to free."""
    with _guard:
        entry = _held.get(path)
        if entry is None:
            return
        entry[1] -= 1
        if entry[1] == 0:
            del _held[path]
            platform.unlock(entry[0])
            os.close(entry[0])
