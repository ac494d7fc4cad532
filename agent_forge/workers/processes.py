"""Worker processes of this machine, one pipe each: one that dies takes nothing but its task along.

They are new interpreters, not forks (torch's threads do not survive a fork), and they do not load
the caller's main module. They are never asked to stop: a worker is killed, or ends by itself when
its pipe closes, which also happens when the caller was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from agent_forge import platform
from agent_forge.workers.pool import Pool, refused

PROGRAM = Path(__file__).with_name("worker.py")
LOOK_EVERY_S = 0.5
THREADS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


def thread_variables(threads: int) -> dict[str, str]:
    """Fix the threads of all that is imported later: their number can change the last bit."""
    return dict.fromkeys(THREADS, str(threads))


class Link:
    """A process that runs `worker.py`, the lines to it, and the thread that reads its lines."""

    number: int | None = None  # of the task that it has
    ready = False
    deadline = float("inf")

    def __init__(
        self, plan: dict[str, Any], inbox: queue.SimpleQueue[Any], index: int = 0, driver: str = ""
    ) -> None:
        self.index = index
        variables = thread_variables(plan["threads"])
        if plan["devices"] and not driver:  # a GPU each; never run on a machine with one
            every = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = every.split(",") if every else [str(n) for n in range(plan["devices"])]
            variables["CUDA_VISIBLE_DEVICES"] = names[index]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            **platform.new_group(),
        )
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()
        self.say({**plan, "path": sys.path, "driver": driver})

    def _read(self, inbox: queue.SimpleQueue[Any]) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else it died in the middle of it
                    inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def say(self, words: Any) -> None:
        """Send one line. If nobody reads it any more, that shows where its answers are read."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> str:
        """Kill it with all that it started, and say how it had ended."""
        platform.kill_group(self.process)
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Processes(Pool):
    """`count` processes on this machine."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._links = [Link(plan, self._inbox, index) for index in range(plan["count"])]

    def close(self) -> None:
        for link in self._links:
            link.end()

    def _give(self) -> None:
        for link in self._links:
            idle = link.ready and link.number is None
            if self._waiting and idle and not platform.has_ended(link.process.pid):
                link.number, task = self._waiting.popleft()
                link.deadline = time.monotonic() + (self.plan["seconds"] or float("inf"))
                link.say(task)

    def _step(self) -> None:
        soonest = min(link.deadline for link in self._links) - time.monotonic()
        try:
            link, words = self._inbox.get(timeout=max(0.0, min(soonest, LOOK_EVERY_S)))
        except queue.Empty:
            self._look()
        else:
            if link in self._links:  # else one that was given up
                self._hear(link, words)
        self._give()

    def _hear(self, link: Link, words: list[Any] | None) -> None:
        if words is None:
            self._replace(link, "died")
        elif words[0] == "ready":
            if words[1]:
                raise refused(words[1])
            link.ready = True
        else:
            assert link.number is not None
            self._done(link.number, *words[1:])
            link.number, link.deadline = None, float("inf")

    def _look(self) -> None:
        """See to those whose time is up, and to any whose end left its pipe open."""
        for link in list(self._links):
            if link.deadline < time.monotonic():
                self._replace(link, "timeout")
            elif platform.has_ended(link.process.pid) and self._inbox.empty():
                self._replace(link, "died")

    def _replace(self, link: Link, kind: str) -> None:
        how = link.end()
        self._links[link.index] = Link(self.plan, self._inbox, link.index)
        late = f"more than {self.plan['seconds'] or 0:g} s"
        self._lost(link.number, kind, late if kind == "timeout" else how)
