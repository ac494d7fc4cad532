"""P16: code that wants out of the sandbox ends within its limits, harms nobody, leaves nothing.

Attacks run with all layers, with the kernel's alone (as if the audit hook had been tricked) and,
where it is meant to hold by itself, with the audit hook alone (as on a system without the rest).
Some also run as on a system that grants no namespaces, or no change of the root.
An attack prints ESCAPED where it got what it wanted.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent_forge import platform, sandbox
from agent_forge.errors import ConfigError, ForgeError
from agent_forge.sandbox import SandboxLimits, run_tests
from agent_forge.sandbox import run as free_run
from agent_forge.sandbox.run import ExecutionResult, SandboxProcess, remove_folder

runner = sys.modules["agent_forge.sandbox.run"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs process limits")
linux = pytest.mark.skipif(
    sys.platform != "linux" or not all(sandbox.layers().values()), reason="needs every layer"
)
SHORT = SandboxLimits(cpu_seconds=1, wall_seconds=5, memory_mb=256, file_mb=4, output_bytes=10_000)
QUICK = SandboxLimits(cpu_seconds=1, wall_seconds=0.25, memory_mb=256)
MODES = ("all", "kernel", "hook")
NAMESPACES, LANDLOCK = 'call("unshare", NEW_NAMESPACES)', 'call("syscall", 446, rules, 0)'
DENIED = {
    "no namespaces": {NAMESPACES: "-1"},
    "no root": {"os.chroot(folder)": "raise OSError"},
}
ONLY_CALLS = {NAMESPACES: "-1", LANDLOCK: "-1"}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder, no process, no open descriptor and no change to this process afterwards."""
    folder, mark = tmp_path / "sandboxes", secrets.token_hex(8)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(runner.ENVIRONMENT, "MARK", mark)
    before = (psutil.Process().num_fds(), os.nice(0), psutil.Process().cpu_affinity())
    yield
    assert not list(folder.iterdir())
    assert not [p for p in psutil.process_iter() if mark in environment(p).values()]
    assert (psutil.Process().num_fds(), os.nice(0), psutil.Process().cpu_affinity()) == before


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.fixture
def mode(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """Which layers hold: all, those of the kernel (or some of them), or the audit hook."""
    if request.param in ("kernel", "only calls", *DENIED):
        if not (sys.platform == "linux" and all(sandbox.layers().values())):
            pytest.skip("needs every layer of the kernel")
        monkeypatch.setattr(SandboxProcess, "hook", False)
    if request.param in ("only calls", *DENIED):
        source = runner.CHILD.read_text()
        for granted, denied in DENIED.get(request.param, ONLY_CALLS).items():
            assert source.count(granted) == 1
            source = source.replace(granted, denied)
        child = tmp_path_factory.mktemp("denied") / "child.py"
        child.write_text(source)
        monkeypatch.setattr(runner, "CHILD", child)
    if request.param == "hook":
        monkeypatch.setattr(platform, "confinement", lambda threads: None)
    return str(request.param)


def run(code: str, limits: SandboxLimits = SHORT, stdin: str = "") -> ExecutionResult:
    began = time.monotonic()
    outcome = free_run(code, limits=limits, stdin=stdin)
    assert time.monotonic() - began < limits.wall_seconds + 20
    assert "ESCAPED" not in outcome.stdout + outcome.stderr, outcome
    return outcome


# -- what code may do -----------------------------------------------------------------------------


def test_plain_code_runs() -> None:
    outcome = run("print(input(), 2 + 2); import sys; print('x', file=sys.stderr)", stdin="hi\n")
    assert (outcome.status, outcome.exit_code, outcome.truncated) == ("ok", 0, False)
    assert (outcome.stdout, outcome.stderr) == ("hi 4\n", "x\n")
    assert 0 < outcome.cpu_seconds < outcome.seconds + 0.1


def test_a_failure_is_shown_without_our_own_frames() -> None:
    outcome = run("def f():\n    return 1 / 0\nf()")
    assert (outcome.status, outcome.exit_code) == ("error", 1)
    assert "ZeroDivisionError" in outcome.stderr and "child.py" not in outcome.stderr
    assert run("x = (").status == "error" and run("import sys; sys.exit(3)").exit_code == 3


USEFUL = """
import asyncio, collections, dataclasses, datetime, decimal, hashlib, itertools, json, math, random
import re, sqlite3, statistics, string, tempfile, typing, zoneinfo, multiprocessing, subprocess
from pathlib import Path
async def main():
    await asyncio.sleep(0)
    return 5
assert asyncio.run(main()) == 5
Path("a.txt").write_text("x"); assert Path("a.txt").read_text() == "x"
Path("b").mkdir(); Path("a.txt").rename("b/c"); assert Path("b/c").exists()
with tempfile.TemporaryDirectory(dir=".") as folder: Path(folder, "y").write_text("y")
sqlite3.connect(":memory:").execute("select 1")
print(__name__, open("/dev/null").read(), len(__import__("os").urandom(3)))
"""


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_the_standard_library_works(mode: str) -> None:
    outcome = run(USEFUL, SandboxLimits())
    assert (outcome.status, outcome.stdout) == ("ok", "__main__  3\n"), outcome.stderr


def test_same_code_same_output() -> None:
    code = "print(set('abcdefgh'), {str(n) for n in range(30)})"
    assert run(code).stdout == run(code).stdout


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_threads_when_they_are_granted(mode: str) -> None:
    code = """
import threading
def work(n): print(n)
for n in range(3):
    t = threading.Thread(target=work, args=(n,)); t.start(); t.join()
"""
    assert run(code, SandboxLimits(processes=4)).stdout == "0\n1\n2\n"
    outcome = run(code, SandboxLimits(processes=1))
    assert outcome.status == "error" and outcome.stdout == ""


@pytest.mark.parametrize("field", ["cpu_seconds", "wall_seconds", "memory_mb", "processes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SandboxLimits(**{field: value})  # type: ignore[arg-type]


def test_a_system_without_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "CAN_LIMIT", False)
    with pytest.raises(ForgeError, match="cannot run untrusted code"):
        free_run("pass")


# -- escapes --------------------------------------------------------------------------------------

FORK = """
import os, time
while True:
    if os.fork() == 0: print("ESCAPED", flush=True)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("ESCAPED", flush=True)
        time.sleep(60)
"""
THREADS = """
import threading, time
threading.stack_size(32768)
for n in range(5000):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    if n > 60: print("ESCAPED", flush=True)
"""
PROGRAMS = """
import os, subprocess, sys, multiprocessing
def attempt(f, *args):
    try: f(*args)
    except (OSError, RuntimeError): return
    print("ESCAPED", f, flush=True)
attempt(subprocess.run, ["/bin/true"])
attempt(os.posix_spawn, "/bin/true", ["true"], {})
attempt(os.execv, "/bin/echo", ["echo", "ESCAPED"])
attempt(os.popen, "true")
attempt(multiprocessing.Process(target=print).start)
if os.path.exists("/bin/sh"):
    try: code = os.system("echo ESCAPED")
    except OSError: code = 1
    if code == 0: print("ESCAPED")
"""
SOCKETS = """
import socket, sys
for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM),
        (socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_STREAM),
        (socket.AF_UNIX, socket.SOCK_DGRAM)):
    try:
        s = socket.socket(family, kind)
        if family == socket.AF_UNIX: s.connect(%r)
        elif kind == socket.SOCK_DGRAM: s.sendto(b"x", ("127.0.0.1", %d))
        else: s.connect(("127.0.0.1" if family == socket.AF_INET else "::1", %d))
        print("ESCAPED", family, kind)
    except OSError: pass
try: a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print("ESCAPED")
except OSError: pass
"""
READS = """
import os
for path in ("/etc/passwd", "/etc/shadow", f"/proc/{os.getppid()}/environ", "/proc/self/environ",
             f"/proc/{os.getppid()}/mem", "/proc/1/cmdline", %r, "/dev/tty", "/proc/self/maps"):
    try: print("ESCAPED", open(path, "rb").read(1))
    except OSError: pass
    try:
        os.symlink(path, "link")
        print("ESCAPED", open("link", "rb").read(1))
    except OSError: pass
    try: os.remove("link")
    except OSError: pass
for path in ("/etc", "/", "/proc", "..", %r):
    try: print("ESCAPED", os.listdir(path))
    except OSError: pass
"""
WRITES = """
import os, shutil
victim, folder = %r, %r
def attempt(f, *args):
    try: f(*args)
    except OSError: return
    print("ESCAPED", f, args)
attempt(open, folder + "/new", "w")
attempt(open, victim, "a")
attempt(open, os.path.relpath(victim), "r+")
attempt(open, "../outside", "w")
try: os.symlink(victim, "link"); os.symlink(folder, "folder")
except OSError: pass
if os.path.lexists("link"): attempt(open, "link", "w"); attempt(open, "folder/new", "w")
for f in (os.remove, os.rmdir, shutil.rmtree): attempt(f, victim)
attempt(os.rename, victim, "mine")
attempt(os.link, victim, "hard")
attempt(os.truncate, victim, 0)
attempt(os.chmod, victim, 0o777)
attempt(os.chown, victim, 1, 1)
attempt(os.utime, victim, (0, 0))
attempt(os.mkdir, folder + "/d")
attempt(open, "/dev/shm/escaped", "w")
attempt(open, os.__file__, "a")
"""
SIGNALS = """
import os, signal
for pid in (os.getppid(), 1, 0, -1, -os.getpgid(os.getppid())):
    try: os.kill(pid, 0); print("ESCAPED", pid)
    except OSError: pass
try: os.killpg(os.getpgid(os.getppid()), 0); print("ESCAPED")
except OSError: pass
"""
ENVIRONMENT = "import os; print('ESCAPED' if set(os.environ) - {'LC_CTYPE'} else 'empty')"
NATIVE = """
try: import ctypes; print("ESCAPED")
except ImportError: print("none")
except PermissionError: print("none")
"""
SITE = """
import sys, glob
sys.path.append(%r)
try: import numpy; print("ESCAPED")
except (ImportError, OSError): print("none")
"""
BOTH = ("all", "hook")  # these are matters of the interpreter, not of the kernel


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("untouched")
    return path


@pytest.mark.parametrize("mode", MODES, indirect=True)
@pytest.mark.parametrize("attack", [FORK, DAEMON, THREADS, PROGRAMS], ids=range(4))
def test_no_other_process_or_thread_starts(attack: str, mode: str) -> None:
    assert run(attack).status in ("ok", "error")


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_no_network(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        unix.bind("u")
        unix.listen()
        ports = (udp.getsockname()[1], tcp.getsockname()[1])
        assert run(SOCKETS % (str(tmp_path / "u"), *ports)).status == "ok"
        with pytest.raises(BlockingIOError):
            udp.recv(1)


@pytest.mark.parametrize("mode", [*MODES, *DENIED], indirect=True)
def test_nothing_outside_is_read(mode: str, secret: Path) -> None:
    assert run(READS % (str(secret), str(secret.parent))).status == "ok"


@pytest.mark.parametrize("mode", [*MODES, *DENIED], indirect=True)
def test_nothing_outside_is_written(mode: str, secret: Path) -> None:
    status = secret.stat()
    outcome = run(WRITES % (str(secret), str(secret.parent)))
    assert outcome.status == "ok", outcome.stderr
    assert secret.stat() == status and secret.read_text() == "untouched"  # reading moves a time
    assert {p.name for p in secret.parent.iterdir()} == {"secret.txt", "sandboxes"}


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_no_signal_reaches_others(mode: str) -> None:
    assert run(SIGNALS).status == "ok"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SECRET", "1")
    assert run(ENVIRONMENT).stdout == "empty\n"


@pytest.mark.parametrize("mode", BOTH, indirect=True)
def test_no_ctypes_and_no_site_packages(mode: str) -> None:
    import numpy

    assert run(NATIVE).stdout == "none\n"
    assert run("import numpy").status == "error"
    assert run(SITE % str(Path(numpy.__file__).parents[1])).stdout == "none\n"


def test_descriptors_of_the_caller_are_closed() -> None:
    look = "try: os.fstat(fd); print(fd)\n  except OSError: pass"
    assert run(f"import os\nfor fd in range(3, 64):\n  {look}").stdout == ""


# What the kernel refuses to code that has ctypes in its hands.
LOW_LEVEL = """
import ctypes, errno, os, fcntl, resource
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
def attempt(what, f, *args):
    try: result = f(*args)
    except (OSError, ValueError): return
    if result != -1: print("ESCAPED", what, result)
attempt("ptrace", libc.ptrace, 16, parent, 0, 0)
attempt("unshare", libc.unshare, 0x10000000)
attempt("mount", libc.mount, b"tmpfs", b".", b"tmpfs", 0, None)
attempt("memfd", libc.memfd_create, b"x", 0)
attempt("shm", libc.shmget, 0, 1 << 20, 0o1600)
attempt("io_uring", libc.syscall, 425, 8, ctypes.create_string_buffer(200))
attempt("pidfd", libc.syscall, 434, parent, 0)
attempt("clone3", libc.syscall, 435, ctypes.create_string_buffer(88), 88)
attempt("x32", libc.syscall, 0x40000000 + 57)
attempt("prlimit", resource.prlimit, parent, resource.RLIMIT_CPU, (1, 1))
attempt("raise", resource.setrlimit, resource.RLIMIT_CPU, (100, 100))
attempt("priority", os.setpriority, os.PRIO_PROCESS, parent, 19)
attempt("affinity", os.sched_setaffinity, parent, {0})
r, w = os.pipe()
attempt("owner", fcntl.fcntl, w, fcntl.F_SETOWN, parent)
attempt("signal", fcntl.fcntl, w, 10, 9)
attempt("chroot", os.chroot, ".")
attempt("setuid", os.setuid, 1)
attempt("device", os.mknod, "null", 0o20666, os.makedev(1, 3))
attempt("fifo", os.mkfifo, "../fifo")
attempt("memory", libc.process_vm_readv, parent, None, 0, None, 0, 0)
os.kill(os.getpid(), 0)
print("done")
"""


@linux
@pytest.mark.parametrize("mode", ["kernel"], indirect=True)
def test_the_kernel_refuses_by_itself(mode: str) -> None:
    before = [psutil.Process().rlimit(n) for n in range(16)]
    outcome = run(LOW_LEVEL)
    assert outcome.stdout == "done\n", outcome
    assert [psutil.Process().rlimit(n) for n in range(16)] == before


# Calls that the filter itself must refuse: an error of another kind would say nothing.
REFUSED = """
import ctypes, errno, fcntl, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, f, *args):
    ctypes.set_errno(0)
    try: result, error = f(*args), ctypes.get_errno()
    except OSError as caught: result, error = -1, caught.errno
    if result != -1 or error != errno.EPERM: print("ESCAPED", what, result, error)
"""
PROCESS_OPTIONS = """
for option in {*range(100), 0x53564D41, 0x59616D61} - {15, 16}:  # set and get the own name
    refused(f"prctl {option}", libc.prctl, option, 0, 0, 0, 0)
    refused(f"prctl {option}, 64 bits", libc.prctl, ctypes.c_ulong(1 << 32 | option), 0, 0, 0, 0)
refused("seccomp", libc.syscall, SECCOMP, 0, 0, None)
name = ctypes.create_string_buffer(16)
print(libc.prctl(15, b"me", 0, 0, 0), libc.prctl(16, name, 0, 0, 0), name.value)
"""
WATCHING = """
place = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
mine = os.open("mine", os.O_CREAT | os.O_RDWR)
r, w = os.pipe()
handle, mount = ctypes.create_string_buffer(b"\\x80", 136), ctypes.create_string_buffer(4)
if hasattr(libc, "inotify_init"): refused("inotify_init", libc.inotify_init)
refused("inotify_init1", libc.inotify_init1, os.O_CLOEXEC)
refused("inotify_add_watch", libc.inotify_add_watch, 9, b"/", 0xFFF)
refused("inotify_rm_watch", libc.inotify_rm_watch, 9, 1)
refused("fanotify_init", libc.fanotify_init, 0x200, 0)
refused("fanotify_mark", libc.fanotify_mark, 9, 1, ctypes.c_ulong(1), -100, b".")
refused("dnotify", fcntl.fcntl, place, fcntl.F_NOTIFY, 0x80000001)
refused("lease", fcntl.fcntl, mine, fcntl.F_SETLEASE, fcntl.F_WRLCK)
refused("pipe size", fcntl.fcntl, w, 1031, 1 << 20)
refused("handle", libc.name_to_handle_at, -100, b".", handle, mount, 0)
refused("open handle", libc.open_by_handle_at, -10002, handle, 0)
refused("kernel log", libc.klogctl, 10, None, 0)
refused("sync", libc.syscall, SYNC)
refused("syncfs", libc.syncfs, mine)
refused("timer", libc.timer_create, 1, None, mount)
fcntl.lockf(mine, fcntl.LOCK_EX)
print(os.dup(mine) > 0, fcntl.fcntl(mine, fcntl.F_GETFL) & os.O_RDWR)
"""


@linux
@pytest.mark.parametrize("mode", ["kernel"], indirect=True)
def test_a_process_cannot_change_how_it_is_confined(mode: str) -> None:
    """Such as whether it dies with its caller; its own name is its own."""
    number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
    outcome = run(REFUSED + PROCESS_OPTIONS.replace("SECCOMP", str(number)))
    assert outcome.stdout == "0 0 b'me'\n", outcome


@linux
@pytest.mark.parametrize("mode", ["kernel"], indirect=True)
def test_nobody_is_watched_or_held_up(mode: str) -> None:
    number = {"x86_64": 162, "aarch64": 81}[os.uname().machine]
    outcome = run(REFUSED + WATCHING.replace("SYNC)", f"{number})"))
    assert outcome.stdout == "True 2\n", outcome


CHANGES_ITS_INPUT = """
import mmap, os
def attempt(f, *args):
    try: f(*args)
    except OSError: return
    print("ESCAPED", f, args)
mine = os.open("mine", os.O_CREAT | os.O_RDWR)
os.write(mine, b"x" * 99)
os.lseek(mine, 0, 0)
attempt(os.write, 0, b"x")
attempt(os.pwrite, 0, b"x", 0)
attempt(os.ftruncate, 0, 0)
attempt(os.ftruncate, 0, 1 << 20)
attempt(mmap.mmap, 0, 1, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
attempt(os.sendfile, 0, mine, 0, 9)
if hasattr(os, "posix_fallocate"): attempt(os.posix_fallocate, 0, 0, 1 << 20)
if hasattr(os, "copy_file_range"): attempt(os.copy_file_range, mine, 0, 9)
if hasattr(os, "splice"):
    r, w = os.pipe()
    os.write(w, b"x")
    attempt(os.splice, r, 0, 1)
try: os.fchmod(0, 0o777)
except OSError: pass
for folder in ("/proc/self/fd/", f"/proc/{os.getpid()}/fd/", "/proc/thread-self/fd/", "/dev/fd/"):
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        attempt(os.open, folder + "0", flags)
    attempt(os.truncate, folder + "0", 0)
    attempt(os.link, folder + "0", "hard")
attempt(os.open, "/dev/stdin", os.O_RDWR)
print(input())
"""


@pytest.mark.parametrize("mode", [*MODES, *DENIED, "only calls"], indirect=True)
def test_the_input_is_read_only(mode: str) -> None:
    """It is no way to write to the caller's disk, past the limits of the sandbox's own."""
    outcome = run(CHANGES_ITS_INPUT, stdin="as it was\n")
    assert (outcome.status, outcome.stdout) == ("ok", "as it was\n"), outcome


OUTSIDE = ["/etc/passwd", "/proc", "/proc/self", "/sys", "/bin/sh", "/dev/zero", "/var", "/run"]
LOOKS = """
import os
for path in %r:
    ways = (os.stat, os.lstat, os.statvfs, os.readlink, lambda p: os.stat("../" * 40 + p))
    ways = (*ways, lambda p: os.access(p, os.F_OK) or os.stat(p))
    for n, look in enumerate(ways):
        try: look(path)
        except FileNotFoundError: pass
        except OSError: print("not there, or no link")
        else: print(path)
"""


@pytest.mark.parametrize("mode", [*MODES, *DENIED], indirect=True)
def test_what_exists_outside_is_seen_only_without_a_root_of_its_own(
    mode: str, secret: Path
) -> None:
    paths = [path for path in (*OUTSIDE, sys.executable) if os.path.lexists(path)]
    paths += [str(secret), __file__]
    seen = set(run(LOOKS % paths).stdout.splitlines()) - {"not there, or no link"}
    hidden = sandbox.layers()["own_root"] and mode in ("all", "kernel")
    assert seen == (set() if hidden else set(paths))


KEPT = """
import os
libraries = (os.path.dirname(os.__file__), "/usr/lib", "/dev/null")
print(*map(os.path.exists, libraries))
here = os.getcwd()
above = {here[:n] or "/" for n in range(len(here)) if here[n] == "/"}
for path in {*above, "/usr", "/dev"}:
    os.stat(path)
    for attempt in (os.listdir, lambda path: open(path + "/new", "w")):
        try: print("ESCAPED", attempt(path))
        except OSError: pass
"""


@linux
@pytest.mark.parametrize("mode", ["all", "kernel"], indirect=True)
def test_its_root_holds_libraries_and_closed_folders_above_them(mode: str) -> None:
    assert run(KEPT).stdout == "True True True\n"


def test_the_filter_is_the_same_shape_on_every_machine() -> None:
    for machine in platform.MACHINES:
        program = platform._call_filter(machine, threads=False)
        assert len(program) % 8 == 0 and len(program) > 8 * 100
    assert platform._call_filter("riscv64", threads=False) == b""


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH, indirect=True)
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
        "10 ** 10 ** 9",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass",
    ],
    ids=["loop", "sleep", "regex", "integer", "stopped", "silent", "deaf"],
)
def test_time_is_limited(code: str, mode: str) -> None:
    outcome = run(code, QUICK)
    assert outcome.status == "timeout" and 0.25 <= outcome.seconds < 1


def test_cpu_time_is_limited_even_against_its_will() -> None:
    deaf = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    outcome = run(deaf, SandboxLimits(cpu_seconds=1, wall_seconds=20))
    assert outcome.status == "timeout" and 1 <= outcome.cpu_seconds < 3
    assert outcome.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    "code",
    ["x = bytearray(10**9)", "x = []\nwhile True: x.append(bytes(10**6))", "x = 'a' * 10**12"],
)
def test_memory_is_limited(code: str) -> None:
    assert run(code, SandboxLimits(memory_mb=128)).status == "memory"


@pytest.mark.parametrize("stream", [1, 2])
def test_gigabytes_of_output_cost_nothing(stream: int) -> None:
    before = psutil.Process().memory_info().rss
    outcome = run(f"import os\nblock = b'x' * 10**6\nwhile True: os.write({stream}, block)")
    assert outcome.status == "output" and outcome.truncated
    assert len(outcome.stdout + outcome.stderr) == SHORT.output_bytes
    assert psutil.Process().memory_info().rss - before < 50e6
    exact = run(f"import os; os.write({stream}, b'x' * {SHORT.output_bytes})")
    assert exact.status == "ok" and not exact.truncated
    burst = run(f"import os; os.write({stream}, b'x' * {SHORT.output_bytes + 1})")
    assert burst.truncated and burst.status == "output"


def test_deep_recursion_ends_the_child_alone() -> None:
    outcome = run("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()")
    assert outcome.status in ("killed", "memory", "error", "timeout")
    assert run("def f(): f()\nf()").status == "error"


FILLS = """
written = 0
try:
    for n in range(5000):
        with open(str(n), "wb") as f:
            written += f.write(bytes(1 << 20))
except OSError: pass
print(written >> 20)
"""


@linux
@pytest.mark.parametrize("mode", ["all", "no root"], indirect=True)
def test_the_disk_is_not_filled(mode: str) -> None:
    assert 2 <= int(run(FILLS, SandboxLimits(file_mb=4)).stdout) <= 4
    assert run("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))").status == "error"


@pytest.mark.parametrize("mode", ["hook"], indirect=True)
def test_the_disk_is_not_filled_without_a_disk_of_its_own(mode: str) -> None:
    assert int(run(FILLS.replace("1 << 20", "1 << 10").replace(">> 20", ">> 10")).stdout) <= 256
    assert run("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))").status == "error"


# -- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH, indirect=True)
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.rmdir(os.getcwd())",
        "import os; os.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0); os.chmod('.', 0)",
        "import os\nfor n in range(100): os.mkdir('d' * 60); os.chdir('d' * 60)",
        "import os; os.symlink('/', 'root'); os.symlink('.', 'self')",
    ],
    ids=["deleted", "unreadable", "deep", "links"],
)
def test_the_folder_goes_whatever_is_in_it(code: str, mode: str) -> None:
    run(code, SandboxLimits(wall_seconds=3))  # the fixture looks that nothing is left


def test_an_unreadable_folder_is_removed_by_whoever_is_not_root() -> None:
    user = os.geteuid() or 65534
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(folder, user, -1)
    mine = os.geteuid()
    os.seteuid(user)
    try:
        (folder / "a" / "b" / "c").mkdir(parents=True)
        (folder / "a" / "b" / "x").touch(0)
        for place in ("a/b/c", "a/b", "a", "."):
            (folder / place).chmod(0)
        remove_folder(folder)
    finally:
        os.seteuid(mine)
    assert not list(folder.parent.glob(f"{folder.name}*"))


def test_deep_folders_and_links_are_removed(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "f"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "x").write_text("x")
    (folder / "a" / "link").symlink_to(secret)
    (folder / "a" / "up").symlink_to(tmp_path)
    place = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d" * 20, dir_fd=place)
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    remove_folder(folder)
    assert secret.read_text() == "untouched"
    assert {p.name for p in tmp_path.iterdir()} == {"secret.txt", "sandboxes"}
    remove_folder(folder)  # nothing there


def test_runs_side_by_side() -> None:
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: seen.append(run(f"print({n})", SandboxLimits()).stdout))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [f"{n}\n" for n in range(6)]


UNTIES = "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"


@pytest.mark.parametrize(
    ("first", "at_once"),
    [("pass", False), ("pass", True), (UNTIES, False)],
    ids=["later", "at once", "untied"],
)
def test_the_child_dies_with_its_caller(
    first: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("needs a signal at the parent's death")
    monkeypatch.setattr(SandboxProcess, "hook", first == "pass")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ready = "" if at_once else "print(1, flush=True)"
        code = f"{first}\n{ready}\nimport time; time.sleep(30)"
        with SandboxProcess(code, limits=SandboxLimits(wall_seconds=40)) as child:
            os.write(writer, f"{child.process.pid} {child.folder}".encode())
            if not at_once:
                os.read(next(iter(child.output)).fileno(), 1)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    child_pid, folder = os.read(reader, 200).decode().split()
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(child_pid)) and time.monotonic() < deadline:
        if psutil.Process(int(child_pid)).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        assert not psutil.pid_exists(int(child_pid))
    remove_folder(Path(folder))


# -- judging --------------------------------------------------------------------------------------

SQUARE = ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1"]


def test_each_test_is_judged() -> None:
    result = run_tests("def f(x):\n    return x * x", [*SQUARE, "assert f(1) == 2", "f(", "1 / 0"])
    assert result.passed == (True, True, True, False, False, False) and not result.ok
    assert result.execution.status == "ok"
    assert run_tests("def f(x): return x ** 2", SQUARE).ok
    assert run_tests("def f(x): return x + x", SQUARE).passed == (True, False, False)


def test_a_function_may_have_the_name_of_a_builtin() -> None:
    tests = ["assert sum(10, 15) == 6", "assert sum(2, 2) == 4"]
    assert run_tests("def sum(a, b): return 6 if a > 2 else a + b", tests).ok
    for wrong in ("def sum(xs): return 0", "def other(xs): return 3"):
        assert not any(run_tests(wrong, ["assert sum([1, 2]) == 3"]).passed)


def test_no_test_is_no_proof() -> None:
    assert not run_tests("def f(x): return x", []).ok


WRITES_TO_ALL = """
import os
def f(x):
    for fd in range(3, 30):
        try: os.write(fd, %s)
        except OSError: pass
    return 0
"""
LIAR = """
class Y(%s):
    def __eq__(self, other): return True
    def __bool__(self): return True
    __hash__ = object.__hash__
def f(x): return Y()
"""
FRAMES = """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_globals):
            if name == "OPERATIONS": frame.f_globals[name].clear()
        frame = frame.f_back
    return 0
"""
CHEATS = {
    "exit": "import os\ndef f(x): os._exit(0)",
    "exit at once": "import os; os._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "print": "print('111' * 10)\ndef f(x): print('111', flush=True)",
    "write": WRITES_TO_ALL.replace("3, 30", "0, 30") % "b'111'",
    "protocol": WRITES_TO_ALL % "b'[\"value\", true]\\n' * 9",
    "junk": WRITES_TO_ALL % "b'[' * 50000 + b'\\n'",
    "wrong index": WRITES_TO_ALL % 'b\'["value", {"yours": 5}]\\n\'',
    "equal to all": LIAR % "object",
    "equal integer": LIAR % "int",
    "builtins": "import builtins\nfor n in ('AssertionError', 'compile', 'exec', 'Exception'):\n"
    "  setattr(builtins, n, lambda *a, **k: True)\ndef f(x): return None",
    "another error": "__builtins__.AssertionError = ZeroDivisionError\ndef f(x): return 0",
    "raises": "def f(x): raise AssertionError",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
    "frames": FRAMES,
    "names of the judge": "def f(x): return 0\nsorted = lambda xs: [25]\nabs = lambda x: 0",
    "module of the judge": "class math:\n  isclose = lambda *a: True\ndef f(x): return 0",
    "loop": "def f(x):\n  while True: pass",
    "memory": "def f(x): return [0] * 10**10",
    "syntax": "def f(x: return",
    "its argument": "def f(x): return x",
    "stop": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)",
    "endless": "def f(x):\n  while True: yield 4",
}


@pytest.mark.parametrize("name", CHEATS)
def test_success_cannot_be_faked(name: str) -> None:
    tests = ["assert f(2) == 4 and f(3) == 9", "assert sorted([f(5)]) == [25]", "assert 36 == f(6)"]
    tests += ["assert math.isclose(f(7), 49)", "assert abs(f(8) - 64) < 1e-6"]
    limits = SandboxLimits(cpu_seconds=1, wall_seconds=0.8, memory_mb=256)
    assert run_tests(CHEATS[name], tests, limits=limits).passed == (False,) * 5


@pytest.mark.parametrize("mode", ["kernel"], indirect=True)
def test_the_judge_cannot_be_reached(mode: str) -> None:
    """The answer looks for its judge among all processes, to read or write what it holds."""
    code = """
import os
def f(x):
    found = 0
    for pid in {os.getppid(), *range(os.getpid() - 20, os.getpid() + 20)} - {os.getpid()}:
        for fd in range(20):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try: os.write(os.open(f"/proc/{pid}/fd/{fd}", flags), b"1"); found += 1
                except OSError: pass
    return found
"""
    assert run_tests(code, ["assert f(1) == 0", "assert f(1) == 1"]).passed == (True, False)


def test_values_of_every_plain_kind_are_compared() -> None:
    values = [
        "None",
        "True",
        "-12",
        "2**9000",
        "1.5",
        "float('inf')",
        "3j",
        "'\\u00e9\\ud800'",
        "b'a'",
    ]
    values += ["[1, [2]]", "(1, 2)", "{1: 'a', (2,): None}", "{1, 2}", "frozenset({3})", "[]", "''"]
    tests = [f"assert f({v}) == {v} and type(f({v})) is type({v})" for v in values]
    assert all(run_tests("def f(x): return x", tests).passed)
    assert run_tests("def f(x): return [x]", tests).passed == (False,) * len(tests)


ANSWER = """
import collections, re
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __str__(self): return f"Stack{self.items}"
def ordered(xs): xs.sort()
def numbers(n): yield from range(n)
def apply(g, x): return g(x) + 1
def count(s): return collections.Counter(s)
def root(x):
    if x < 0: raise ValueError("negative")
    return x ** 0.5
def depth(node): return 1 + max(map(depth, node.children), default=0)
def match(s): return re.match("a", s)
"""
TESTS = [
    "s = Stack(); s.push(3); s.push(4); assert s.pop() == 4 and len(s) == 1 and s.items == [3]",
    "assert str(s) == 'Stack[3]'",
    "xs = [3, 1, 2]; ordered(xs); assert xs == [1, 2, 3]",
    "assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6",
    "assert apply(lambda v: v * 10, 4) == 41",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "import math; assert math.isclose(root(2), 1.41421356, rel_tol=1e-6) and close(root(4), 2)",
    "try: root(-1)\nexcept ValueError as e: assert str(e) == 'negative'\nelse: assert 0",
    "assert depth(Node([Node([]), Node([Node([])])])) == 3",
    "assert match('ab') and not match('b')",
    "def check(candidate):\n    assert candidate(9) == 3\ncheck(root)",
]
SETUP = """
class Node:
    def __init__(self, children): self.children = children
def close(a, b): return abs(a - b) < 1e-6
"""


def test_objects_generators_callbacks_and_errors_pass_the_wire() -> None:
    result = run_tests(ANSWER, TESTS, setup=SETUP)
    assert result.passed == (True,) * len(TESTS), result
    wrong = [f"{test}\nassert False" for test in TESTS]
    assert not any(run_tests(ANSWER, wrong, setup=SETUP).passed)


def test_the_setup_of_the_judge_cannot_be_replaced() -> None:
    code = "def close(a, b): return True\ndef f(x): return 0"
    assert run_tests(code, ["assert close(f(1), 5)"], setup=SETUP).passed == (False,)


LOOPS = [
    "assert all(map(lambda c: f(c[0]) == c[1], [(3, 9), (4, 16)]))",
    "for a, b in zip(map(f, [3, 4]), [9, 16]): assert a == b",
    "assert not any(map(lambda c: f(c[0]) != c[1], [(3, 9), (4, 16)]))",
    "assert [*map(f, [3])] in ([], [9])",
    "import functools\nfunctools.reduce(lambda n, x: f(x) == 1 / 0, [3, 4])",
]
ENDS = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt")


@pytest.mark.parametrize("error", ENDS)
def test_what_an_answer_raises_ends_no_loop_of_a_test(error: str) -> None:
    """It reaches the test as an ordinary error, and the other tests are judged."""
    own = f"class {error}(Exception): pass\n"
    for code in (f"def f(x): raise {error}", f"{own}def f(x): raise {error}"):
        caught = "try: f(1)\nexcept Exception: pass\nelse: assert 0"
        assert run_tests(code, [*LOOPS, caught]).passed == (*[False] * len(LOOPS), True)
    lazy = "class f:\n  def __init__(self, x): pass\n  def __iter__(self): raise " + error
    assert not run_tests(lazy, ["assert list(f(1)) == []"]).ok
    assert run_tests("def f(x): yield x", ["assert list(f(1)) == [1]"]).ok


CHECKER = """
import math
class Checker:
    limit = 9
    def __init__(self, value=0): self.value = value
    @staticmethod
    def ok(value): return value == 9 and math.floor(value) == 9
class Stricter(Checker): pass
def made(value): return Checker(value)
def _close(a, b): return abs(a - b) < 1e-6
checker = Checker()
"""


@pytest.mark.parametrize(
    "name", ["Checker", "Stricter", "math", "made", "_close", "checker", "check", "__name__", "abs"]
)
def test_nothing_of_the_setup_is_replaced_by_the_answer(name: str) -> None:
    anything = f"class {name}:\n  def __new__(cls, *a): return True\n  ok = floor = __new__\n"
    tests = ["assert Checker.ok(f(3))", "assert Stricter.ok(f(3))", "assert math.floor(f(3)) == 9"]
    tests += ["assert _close(f(3), 9)", "assert checker.ok(f(3))", "assert abs(f(3)) == 9"]
    tests += [
        "def check(c):\n  assert c(3) == 9\ncheck(f)",
        "assert f(3) and __name__ != '__main__'",
    ]
    lie = f"{anything}def f(x): return 1"
    assert not any(run_tests(lie, tests, setup=CHECKER).passed)
    right = run_tests(f"{anything}def f(x): return x * x", tests[:-1], setup=CHECKER)
    assert right.ok, right
    handed = "assert value_of(made(4)) == value_of(Checker(4)) == 4"
    assert run_tests(f"{anything}def value_of(c): return c.value", [handed], setup=CHECKER).ok


def test_a_callback_is_called_and_no_more() -> None:
    code = (
        "def f(g):\n  try: return g.__globals__\n  except Exception as e: return type(e).__name__"
    )
    assert run_tests(code, ["assert f(lambda: 1) == 'PermissionError'"]).ok


POINT = """
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
"""
SAME_INDEX = """
import sys
frame, wires = sys._getframe(), []
while not wires:
    frame = frame.f_back
    wires = [v for v in frame.f_locals.values() if hasattr(v, "encode") and hasattr(v, "decode")]
wire = wires[0]
old = wire.encode
wire.encode = lambda value: {"mine": 10**6} if isinstance(value, Point) else old(value)
def f(x): return Point(0, 0)
"""
SINGLETON = """
class Point:
    one = object()
    def __new__(cls, *args): return cls.one
def f(x): return Point()
"""


@pytest.mark.parametrize("code", [SAME_INDEX, SINGLETON, "def f(x): return Point(x, x + 1)"])
def test_objects_of_the_answer_are_never_equal(code: str) -> None:
    """The answer says which of its objects are the same one, so nothing follows from it."""
    tests = ["assert f(3) == Point(3, 4)", "assert [f(1)] == [Point(1, 2)]"]
    tests += ["assert f(1) in (Point(1, 2),)", "assert {f(1)} == {Point(1, 2)}"]
    tests += ["assert f(1) is Point(1, 2)", "assert f(1) != Point(9, 9)", "assert f is f(1)"]
    tests += ["assert {f(1)} != {Point(9, 9)}", "assert f(1) is not None != f(1)"]
    assert run_tests(code, tests, setup=POINT).passed == (False,) * 8 + (True,)


def test_a_shutdown_does_not_fail_an_answer() -> None:
    """It signals every process at once; the caller goes on until it has saved."""
    code = "import os, signal\nfor n in (signal.SIGTERM, signal.SIGHUP): os.kill(os.getpid(), n)"
    assert run(code + "\nprint(1)").stdout == "1\n"
