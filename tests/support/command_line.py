"""The real command line, run within a test's process or in one forked from it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_forge import platform
from agent_forge.cli import main
from tests.support.toy_runs import exit_code


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout, which has to be one JSON document and nothing else."""
        return dict(json.loads(self.out))


Forge = Callable[..., Result]


def run_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Result:
    """Run `forge LINE`; what it printed and its exit code."""
    monkeypatch.setattr(sys, "argv", ["forge", *shlex.split(line)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return Result(int(ended.value.code or 0), *capsys.readouterr())


# -- in a forked process ---------------------------------------------------------------------------

PATIENCE_S = 60.0
Patch = Callable[[], object]  # done in the forked process, before the command


class Ended(NamedTuple):
    code: int
    err: str


class Process(NamedTuple):
    """`forge LINE` in a forked process, which is cheap: torch is loaded already."""

    pid: int
    folder: Path  # its working directory

    def meet(self, mark: str = "there") -> None:
        """Wait until it waits (see `waiting`)."""
        self.wait_for(self.folder / f".{mark}")

    def wait_for(self, path: Path) -> None:
        """Wait for a file of its making."""
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            gone = platform.has_ended(self.pid) or time.monotonic() > deadline
            assert not gone, (self.folder / ".err").read_text()
            time.sleep(0.005)

    def send(self, kind: str) -> None:
        os.kill(self.pid, getattr(signal, kind))

    def go_on(self, mark: str = "there") -> None:
        (self.folder / f".{mark}-no-more").touch()

    def ended(self) -> Ended:
        code = exit_code(self.pid)
        said = (self.folder / ".err").read_text()
        assert "Traceback" not in said and "defect" not in said, said
        return Ended(code, said)


def start(
    folder: Path, line: Sequence[str], patch: Patch = lambda: None, stdin: int = -1
) -> Process:
    """Fork and run; its output goes to .out and .err."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Process(pid, folder)
    code: Any = 70
    try:
        os.chdir(folder)
        os.environ.pop("FORGE_STORAGE", None)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
        sys.stderr = (folder / ".err").open("w", buffering=1)
        sys.stdout = (folder / ".out").open("w", buffering=1)
        if stdin >= 0:
            sys.stdin = os.fdopen(stdin)
        sys.argv = ["forge", *line]
        patch()
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 - a child reports by its exit code and .err
        traceback.print_exc()
    finally:
        os._exit(int(code))


def waiting(place: Any, name: str, at: int = 1, mark: str = "there") -> Patch:
    """A patch: the at-th call of `place.name` says that it is there, and waits to go on."""

    def patch() -> None:
        real, calls = getattr(place, name), 0
        here, go_on = (Path.cwd() / f".{mark}{end}" for end in ("", "-no-more"))

        def waits(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                here.touch()
                deadline = time.monotonic() + PATIENCE_S
                while not go_on.exists():
                    if time.monotonic() > deadline:
                        os._exit(71)  # the test is over, and nobody waits any more
                    time.sleep(0.005)
            return real(*arguments, **options)

        setattr(place, name, waits)

    return patch
