"""Start a confined process, watch it, and leave nothing of it behind; grade answers by tests.

The caller reads what a process writes up to a cap, keeps the time, kills the whole group and
removes its folder. `child.py` is the other side. Tests run in a process of their own, so that an
answer can neither see, fake nor stop them: see protocol.py for how.
"""

import ast
import contextlib
import functools
import marshal
import math
import os
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import CodeType
from typing import IO

from agent_forge import platform
from agent_forge.errors import ConfigError, ForgeError
from agent_forge.sandbox.child import MEMORY_EXIT

CHILD, PROTOCOL = (Path(__file__).with_name(name) for name in ("child.py", "protocol.py"))
# No site packages, no bytecode written; text is UTF-8 and the order of sets the same every time.
PYTHON = ("-S", "-s", "-B", "-X", "utf8")
# Its program is the first thing that it reads: to compile it anew each time would take longer.
BEGIN = "import marshal, os; exec(marshal.loads(os.read(0, {size})))"
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
LOOK_EVERY_S = 0.02  # for a process that ends with its output held open
CHUNK = 1 << 16
NAMESPACE_LAYERS = ("namespaces", "read_only", "own_root", "own_disk")
LAYERS = ("limits", "audit_hook", *NAMESPACE_LAYERS, "landlock", "no_capabilities", "seccomp")


@dataclass(frozen=True)
class SandboxLimits:
    """What the code may use. `processes` counts threads too; other programs never start."""

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 1
    output_bytes: int = 1 << 20  # of stdout and of stderr

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(value, int) or field.name == "wall_seconds"
            if not whole or not math.isfinite(value) or value <= 0:
                hint = "limits are whole numbers above zero; only wall_seconds takes fractions"
                raise ConfigError(f"the sandbox limit {field.name} is {value!r}", hint=hint)


@dataclass(frozen=True)
class ExecutionResult:
    """How it ended: ok, error (it failed), timeout, memory, output (too much), killed (a signal).

    "ok" means exit code 0, which code can bring about as it likes; `run_tests` says whether an
    answer is right.
    """

    status: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float
    truncated: bool


@dataclass(frozen=True)
class GradeResult:
    """Which of the tests passed, and how the process with the answer ended."""

    passed: tuple[bool, ...]
    execution: ExecutionResult

    @property
    def ok(self) -> bool:
        """True if every test passed; without any test nothing is shown."""
        return bool(self.passed) and all(self.passed)


def run(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> ExecutionResult:
    """Run Python code and return how it ended; whatever it does, nothing is raised here."""
    with SandboxProcess(code, stdin=stdin, limits=limits or SandboxLimits()) as child:
        watch([child])
        return child.result()


def run_tests(
    code: str, tests: Sequence[str], *, setup: str = "", limits: SandboxLimits | None = None
) -> GradeResult:
    """Run each test (statements, mostly one assert) against what `code` defines.

    `setup` runs on both sides before the code and before the tests. A test passes if it raises
    nothing; one that was never reached has not passed.
    """
    limits = limits or SandboxLimits()
    (answer_in, tests_out), (tests_in, answer_out) = os.pipe(), os.pipe()
    ends = [answer_in, tests_out, tests_in, answer_out]
    try:
        tester = f"test_answer({tests_in}, {tests_out}, {setup!r}, {list(tests)!r})"
        server = f"serve_answer({answer_in}, {answer_out}, {code!r}, {setup!r})"
        both = compiled(PROTOCOL)
        with (
            SandboxProcess(both, tester, limits=limits, fds=(tests_in, tests_out)) as testing,
            SandboxProcess(both, server, limits=limits, fds=(answer_in, answer_out)) as answering,
        ):
            while ends:
                os.close(ends.pop())
            watch([testing, answering])
            grades = testing.result().stdout
            passed = tuple(grades[n : n + 1] == "1" for n in range(len(tests)))
            return GradeResult(passed, answering.result())
    finally:
        for fd in ends:
            os.close(fd)


@functools.cache
def compiled(source: Path) -> CodeType:
    """A file of this package, compiled once for all the processes that it is sent to."""
    return compile(source.read_text(encoding="utf-8"), source.name, "exec", dont_inherit=True)


@functools.cache
def layers() -> dict[str, bool]:
    """Which layers hold on this machine, as a confined process finds them."""
    with SandboxProcess(limits=SandboxLimits()) as child:
        watch([child])
        result = child.result()
    if result.status != "ok":
        raise ForgeError(f"the sandbox does not start here: {result.stderr.strip()}")
    held = {"limits": True, "audit_hook": True, **ast.literal_eval(result.stdout)}
    return {name: held.get(name, False) for name in LAYERS}


class SandboxProcess(contextlib.AbstractContextManager["SandboxProcess"]):
    """A confined process. Parts of its code share a namespace; without any it prints its layers."""

    hook = True  # tests take it away to see the kernel's layers alone

    def __init__(
        self, *code: str | CodeType, limits: SandboxLimits, stdin: str = "", fds: Sequence[int] = ()
    ) -> None:
        if not platform.CAN_LIMIT:
            problem = "this system cannot run untrusted code: it has no process limits"
            raise ForgeError(problem, hint="use Linux, macOS or the Windows Subsystem for Linux")
        request = {"code": code, "limits": asdict(limits), "hook": self.hook, "caller": os.getpid()}
        request |= {"plan": platform.confinement(threads=limits.processes > 1)}
        self.limits = limits
        self.status = ""  # how it ended, once it has
        self.truncated = False
        self.exit_code, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="forge-sandbox-"))
        try:
            program, sent = marshal.dumps(compiled(CHILD)), marshal.dumps(request)
            size, text = len(sent).to_bytes(8, "little"), stdin.encode("utf-8", "surrogateescape")
            with read_only(program, size, sent, text) as source:
                self.began = time.monotonic()
                self.process = subprocess.Popen(
                    [sys.executable, *PYTHON, "-c", BEGIN.format(size=len(program))],
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    cwd=self.folder,
                    env=ENVIRONMENT,
                    pass_fds=fds,
                    **platform.new_group(),
                )
        except BaseException:
            remove_folder(self.folder)
            raise
        assert self.process.stdout and self.process.stderr
        self.output = {self.process.stdout: bytearray(), self.process.stderr: bytearray()}

    def __exit__(self, *_: object) -> None:
        self.kill("killed")
        for stream in self.output:
            stream.close()
        remove_folder(self.folder)

    def read(self, stream: IO[bytes]) -> bool:
        """Take what has been written; False at the end of the stream. Too much output kills it."""
        kept = self.output[stream]
        try:
            data = os.read(stream.fileno(), CHUNK)
        except BlockingIOError:
            return False
        room = self.limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.truncated = True
            self.kill("output")
            self.status = "output"  # also where it ended by itself
            return False
        return bool(data)

    def poll(self) -> None:
        """Notice that it has ended, or that its time is up."""
        if not self.status and platform.has_ended(self.process.pid):
            self.kill("")
            for stream in self.output:
                while self.read(stream):
                    pass
        elif not self.status and time.monotonic() - self.began > self.limits.wall_seconds:
            self.kill("timeout")

    def kill(self, status: str) -> None:
        """Kill it and its whole group; without a status, the exit code says how it ended."""
        if self.status:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        _, code, usage = os.wait4(self.process.pid, 0)
        self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(code)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        self.seconds = time.monotonic() - self.began
        own = "timeout" if self.cpu_seconds >= self.limits.cpu_seconds else "killed"
        if self.exit_code >= 0:
            own = {0: "ok", MEMORY_EXIT: "memory"}.get(self.exit_code, "error")
        self.status = status or own

    def result(self) -> ExecutionResult:
        out, err = (bytes(kept).decode("utf-8", "replace") for kept in self.output.values())
        used = (self.seconds, self.cpu_seconds, self.truncated)
        return ExecutionResult(self.status, self.exit_code, out, err, *used)


def watch(children: Sequence[SandboxProcess]) -> None:
    """Read and keep the time until all have ended; the end of the first is the end of the rest."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            for stream in child.output:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, child)
        while not all(child.status for child in children):
            for key, _ in selector.select(LOOK_EVERY_S if selector.get_map() else 0.001):
                if not key.data.read(key.fileobj):
                    selector.unregister(key.fileobj)
            for child in children:
                child.poll()
            if children[0].status:
                for child in children[1:]:
                    child.poll()
                    child.kill("ok")


def read_only(*data: bytes) -> IO[bytes]:
    """An open file without a name. Whoever inherits it cannot write to it, nor open it to write.

    On a kernel without Landlock, root with root's powers could still open it.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.writelines(data)
        file.flush()
        os.fchmod(file.fileno(), stat.S_IRUSR)
        return Path(file.name).open("rb")


def remove_folder(folder: Path) -> None:
    """Remove what hostile code left: unreadable, or nested deeper than a path can be long.

    Folders within folders are moved up first, so that no path grows and nothing recurses.
    """
    moved, waiting = 0, [folder] if folder.exists() else []
    while waiting:
        place = waiting[-1]
        place.chmod(stat.S_IRWXU)
        for inner in list(place.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                inner.chmod(stat.S_IRWXU)
                moved += 1
                waiting.append(inner.rename(folder.with_name(f"{folder.name}-{moved}")))
            else:
                inner.unlink()
        waiting.remove(place)
        place.rmdir()
