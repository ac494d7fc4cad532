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
from agent_forge.workers.worker import Messages
from agent_forge.workers.worker_pool import WorkerPool, not_set_up, too_long

PROGRAM = Path(__file__).with_name("worker.py")
CHECK_EVERY_S = 0.5
NEVER = float("inf")
LIBRARIES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")


def thread_variables(threads: int) -> dict[str, str]:
    """Fix the threads of all that is imported later: their number can change the last bit."""
    names = [f"{library}_NUM_THREADS" for library in LIBRARIES]
    return dict.fromkeys([*names, "VECLIB_MAXIMUM_THREADS"], str(threads))


class WorkerProcess:
    """A process that runs `worker.py`, its pipe, and the thread that reads its messages."""

    number: int | None = None  # of the task that it has
    ready = False
    deadline = NEVER

    def __init__(
        self, settings: dict[str, Any], inbox: Messages, index: int = 0, driver: str = ""
    ) -> None:
        self.index = index
        variables = thread_variables(settings["threads"])
        if settings["devices"] and not driver:  # a GPU each; never run on a machine with one
            every = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = every.split(",") if every else [str(n) for n in range(settings["devices"])]
            variables["CUDA_VISIBLE_DEVICES"] = names[index]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            **platform.new_group(),
        )
        threading.Thread(target=self._receive, args=(inbox,), daemon=True).start()
        self.send({**settings, "path": sys.path, "driver": driver})

    def _receive(self, inbox: Messages) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else it died in the middle of it
                    inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def send(self, message: Any) -> None:
        """Send one line; if the process is gone, `_receive` notices."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> str:
        """Kill it with all that it started; returns how it had ended."""
        platform.kill_group(self.process)
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class ProcessPool(WorkerPool):
    """`count` processes on this machine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._inbox: Messages = queue.SimpleQueue()
        indices = range(settings["count"])
        self._workers = [WorkerProcess(settings, self._inbox, index) for index in indices]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _assign(self) -> None:
        for worker in self._workers:
            idle = worker.ready and worker.number is None
            if self._waiting and idle and not platform.has_ended(worker.process.pid):
                worker.number, task = self._waiting.popleft()
                worker.deadline = time.monotonic() + (self.settings["seconds"] or NEVER)
                worker.send(task)

    def _step(self) -> None:
        soonest = min(worker.deadline for worker in self._workers) - time.monotonic()
        try:
            worker, message = self._inbox.get(timeout=max(0.0, min(soonest, CHECK_EVERY_S)))
        except queue.Empty:
            self._check()
        else:
            if worker in self._workers:  # else one that was given up
                self._handle(worker, message)
        self._assign()

    def _handle(self, worker: WorkerProcess, message: list[Any] | None) -> None:
        if message is None:
            self._replace(worker, "died")
        elif message[0] == "ready":
            if message[1]:
                raise not_set_up(message[1])
            worker.ready = True
        else:
            assert worker.number is not None
            self._done(worker.number, *message[1:])
            worker.number, worker.deadline = None, NEVER

    def _check(self) -> None:
        """Replace workers whose time is up, and any whose end left its pipe open."""
        for worker in list(self._workers):
            if worker.deadline < time.monotonic():
                self._replace(worker, "timeout")
            elif platform.has_ended(worker.process.pid) and self._inbox.empty():
                self._replace(worker, "died")

    def _replace(self, worker: WorkerProcess, kind: str) -> None:
        how = worker.end()
        self._workers[worker.index] = WorkerProcess(self.settings, self._inbox, worker.index)
        late = too_long(self.settings["seconds"])
        self._lost(worker.number, kind, late if kind == "timeout" else how)
