"""What differs between Linux, macOS and Windows; nothing else asks which system it runs on."""

import contextlib
import errno
import functools
import importlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from agent_forge.errors import ConfigError, Interrupted


def _import(name: str) -> Any:
    """Return a module that only some systems have, or None."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


fcntl, resource, msvcrt = map(_import, ("fcntl", "resource", "msvcrt"))

BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # POSIX: refuse to open through a link
PROBE = os.O_RDONLY if fcntl is not None else os.O_RDWR  # enough to look at a lock
CAN_LIMIT = resource is not None  # what a process may use
LOCKED_BYTE = 1 << 30  # Windows locks byte ranges: one far behind any text the file may hold


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had."""
    memory: Any = psutil.Process().memory_info()
    if resource is None:
        return int(memory.peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def find_device(wanted: str, hint: str) -> str:
    """Return where torch computes: `auto` is the best there is; one that is not is refused."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return next((name for name in there if there[name]), "cpu")
    if not there.get(wanted, True):
        raise ConfigError(f"device {wanted!r} is not there", hint=hint)
    return wanted


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file, which ends with the process; False if it is held."""
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK):
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
    """Put a file's content on the disk; plain fsync stops at the drive's cache on macOS."""
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


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Limit the memory that this process may take in addition within the block; Linux only."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before, ceiling = resource.getrlimit(resource.RLIMIT_AS)
    now = psutil.Process().memory_info().vms
    limits = [value for value in (before, ceiling) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([now + more_bytes, *limits]), ceiling))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, ceiling))


def new_group() -> dict[str, Any]:
    """Return arguments for subprocess.Popen that give the child its own process group."""
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


def has_ended(pid: int) -> bool:
    """True if a child has ended; it is not waited for, so that its id stays taken."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


@contextlib.contextmanager
def on_stop_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """Call `handle` with the name of every signal that asks to stop while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # only that one receives any
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        _forget_lost_terminal()
        handle(signal.Signals(number).name)

    kinds = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    before = {kind: signal.getsignal(kind) for kind in kinds}
    if before.get(getattr(signal, "SIGHUP", None)) == signal.SIG_IGN:  # by nohup: it stays so
        del before[signal.SIGHUP]
    try:
        for kind in before:
            signal.signal(kind, receive)
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)


def _forget_lost_terminal() -> None:
    """Discard output whose terminal has hung up: every write to it would be an error."""
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def interrupt(name: str) -> None:
    """Raise KeyboardInterrupt with the name of a signal, unless one is being handled already."""
    if not isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit | Interrupted):
        raise KeyboardInterrupt(name)


# Calls that confined code is refused (reason -> name -> numbers on x86_64 and aarch64; -1: it has
# none). Calls that need a capability are not listed: confined code has none.
REFUSED_CALLS: dict[str, dict[str, list[int]]] = json.loads(
    Path(__file__).with_name("refused_calls.json").read_text(encoding="utf-8")
)
# Calls that are allowed or refused by an argument.
KILL, TGKILL, PRLIMIT, CLONE = (62, 129), (234, 131), (302, 261), (56, 220)
FCNTL, IOCTL, SOCKETPAIR, PRCTL = (72, 25), (16, 29), (53, 199), (157, 167)
GRANTED_PRCTL = (15, 16)  # the name of the process; not, for example, the tie to its caller's death
# Copies, flags and locks; the others send signals, watch folders, hold up whoever opens a file
# and enlarge pipes.
GRANTED_FCNTL = (*range(8), 36, 37, 38, 1030)
REFUSED_IOCTL = (0x8901, 0x8902, 0x5412)  # the first two send signals to others, TIOCSTI types
# Younger than Linux 5.1, the same number everywhere (io_uring, clone3, ...): said to be absent.
FIRST_YOUNG_CALL = 424
SELF = 0x5E1F5E1F  # stands in the filter where the process puts its own id
Step = tuple[int, int, int, int]  # of a classic BPF program
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
READABLE = (*LIBRARIES, "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom")


def confinement(*, threads: bool) -> dict[str, Any] | None:
    """Return what a process needs to confine itself on Linux; None on any other system."""
    if sys.platform != "linux":
        return None
    return {"filter": _call_filter(os.uname().machine, threads), "self": SELF, "readable": READABLE}


@functools.cache
def _call_filter(machine: str, threads: bool) -> bytes:
    """Return a seccomp program (classic BPF); empty if the machine's call numbers are unknown."""
    if machine not in MACHINES or sys.byteorder != "little":
        return b""
    column, architecture = MACHINES[machine]
    load, mask, equal, at_least, any_bit, end = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.EPERM)
    absent, again = (end, 0, 0, 0x00050000 | errno.ENOSYS), (end, 0, 0, 0x00050000 | errno.EAGAIN)
    argument = [(load, 0, 0, 16 + 8 * n) for n in range(2)]  # the lower half of each
    program = [
        *[(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, 0x80000000)],  # killed
        *[(load, 0, 0, 0), (at_least, 0, 1, FIRST_YOUNG_CALL), absent],
    ]

    def rule(call: Sequence[int], *steps: Step) -> None:
        program.extend([(equal, 0, len(steps), call[column]), *steps])

    def by_value(values: Sequence[int], then: Step, otherwise: Step) -> list[Step]:
        tests = [(equal, len(values) - n, 0, value) for n, value in enumerate(values)]
        return [*tests, otherwise, then]

    for call in itertools.chain(*(group.values() for group in REFUSED_CALLS.values())):
        if call[column] >= 0:
            rule(call, refuse)
    rule(KILL, argument[0], (equal, 0, 1, SELF), allow, refuse)
    rule(TGKILL, argument[0], (equal, 0, 1, SELF), allow, refuse)
    rule(PRLIMIT, argument[0], (equal, 1, 0, 0), (equal, 0, 1, SELF), allow, refuse)
    rule(CLONE, argument[0], (any_bit, 0, 1, 0x10000 if threads else 0), allow, again)
    rule(PRCTL, argument[0], *by_value(GRANTED_PRCTL, allow, refuse))
    rule(FCNTL, argument[1], *by_value(GRANTED_FCNTL, allow, refuse))
    rule(IOCTL, argument[1], *by_value(REFUSED_IOCTL, refuse, allow))
    rule(SOCKETPAIR, argument[1], (mask, 0, 0, 0xF), (equal, 0, 1, 1), allow, refuse)
    return b"".join(struct.pack("<HBBI", *step) for step in [*program, allow])
