"""Worker processes that are forked from the test's, which is cheap: torch is loaded already."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from agent_forge.workers import pools, worker


class ForkedWorker:
    """What `pools.WorkerProcess` uses of Popen. It has the pipes, the group and the deaths of a
    worker that is started anew, and all modules of the test's process."""

    returncode: int

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        assert command[-1] == worker.__file__
        (inward, told), (said, outward) = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _work(inward, outward, env)
        os.close(inward)
        os.close(outward)
        self.stdin, self.stdout = os.fdopen(told, "wb"), os.fdopen(said, "rb")

    def wait(self, timeout: float | None = None) -> int:
        if not hasattr(self, "returncode"):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _work(inward: int, outward: int, env: dict[str, str]) -> None:
    """Never returns: the pipes of this process and of other workers are not this one's to keep."""
    try:
        os.setsid()
        os.dup2(inward, 0)
        os.dup2(outward, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.update(env)
        worker.main()
    except BaseException:  # noqa: BLE001 - a child reports by its end
        traceback.print_exc()
    finally:
        os._exit(1)


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Let pools of processes fork them. What real ones do otherwise is tested in tests/workers."""
    patch.setattr(pools, "subprocess", SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE))
