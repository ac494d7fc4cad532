"""What every executor promises, and two of them: in this process, and processes of this machine.

Tasks and results are plain data as JSON carries it (a tuple comes back as a list), so a result
is the same from this process, from another one, and from a journal that is read again.

Worker processes have one pipe each: one that dies takes nothing but its task along. They are new
interpreters, not forks (torch's threads do not survive a fork), and they do not load the caller's
main module. They are never asked to stop: a worker is killed, or ends by itself when its pipe
closes, which also happens when the caller was killed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent_forge import platform
from agent_forge.errors import ForgeError, WorkersLost
from agent_forge.workers import worker

CHECK_EVERY_S = 0.5
NEVER = float("inf")
DEATHS_PER_WORKER = 5  # in a row, with no task done in between: then it is not the tasks


@dataclass(frozen=True)
class WorkerFailure:
    """What a task has instead of a result."""

    kind: str  # raised, died (with its worker), timeout
    message: str


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Takes tasks and returns their results; to be closed, so use it in a `with`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings  # what `open_pool` was given
        self._last = -1
        self._order: deque[int] = deque()  # submitted and not handed out yet
        self._waiting: deque[tuple[int, str]] = deque()  # submitted and not begun
        self._results: dict[int, Any] = {}
        self._deaths = 0  # since a task was done
        self._inbox: worker.Messages = queue.SimpleQueue()  # what workers report

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, number: int, task: Any) -> None:
        """Add a task; numbers grow, and their order is the order of the results."""
        if number <= self._last:
            raise ValueError(f"task {number} comes after task {self._last}")
        self._waiting.append((number, json.dumps(task)))
        self._order.append(number)
        self._last = number
        self._assign()

    def results(self) -> Iterator[tuple[int, Any]]:
        """Each number with its result or WorkerFailure, until all are out; more can be added."""
        while self._order:
            while self._order[0] not in self._results:
                self._step()
            number = self._order.popleft()
            yield number, self._results.pop(number)

    def close(self) -> None:
        """End every worker at once; what was not handed out is lost."""

    def _assign(self) -> None:
        """Hand waiting tasks to idle workers, without waiting for any."""

    def _step(self) -> None:
        """Wait for the next message of a worker, and handle it."""
        raise NotImplementedError

    def _done(self, number: int, result: str | None, problem: str) -> None:
        self._deaths = 0
        failed = WorkerFailure("raised", problem)
        self._results[number] = failed if result is None else json.loads(result)

    def _lost(self, number: int | None, kind: str, how: str) -> None:
        """A worker is gone, with the task that it had; too many are not the tasks' fault."""
        if number is not None:
            self._results[number] = WorkerFailure(kind, how)
        self._deaths += kind == "died"
        if self._deaths >= DEATHS_PER_WORKER * self.settings["count"]:
            problem = f"{self._deaths} workers died with no task done in between; the last: {how}"
            hint = "if memory is short use fewer workers, then resume: what is done is kept"
            raise WorkersLost(problem, hint=hint)


def too_long(seconds: float | None) -> str:
    return f"more than {seconds or 0:g} s"


def not_set_up(problem: str) -> ForgeError:
    """The error for a work function that cannot be built: the next worker would fail as well."""
    return ForgeError(f"a worker cannot be set up: {problem}")


class InlinePool(WorkerPool):
    """Tasks run in this process when their results are asked for; none can be stopped here."""

    _work: worker.Work | None = None

    def _step(self) -> None:
        if not self._work:
            self._work, problem = worker.build(self.settings)
            if not self._work:
                raise not_set_up(problem)
        (number, task), seconds = self._waiting.popleft(), self.settings["seconds"]
        began = time.monotonic()
        self._done(number, *worker.run_task(self._work, task, self.settings["threads"]))
        if seconds and time.monotonic() - began > seconds:  # it counts as such once it has ended
            self._lost(number, "timeout", too_long(seconds))


def thread_variables(threads: int) -> dict[str, str]:
    """Fix the threads of all that is imported later: their number can change the last bit."""
    names = [f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")]
    return dict.fromkeys([*names, "VECLIB_MAXIMUM_THREADS"], str(threads))


class WorkerProcess:
    """A process that runs `worker.py`, its pipe, and the thread that reads its messages."""

    number: int | None = None  # of the task that it has
    ready = False
    deadline = NEVER

    def __init__(
        self, settings: dict[str, Any], inbox: worker.Messages, index: int = 0, driver: str = ""
    ) -> None:
        self.index = index
        variables = thread_variables(settings["threads"])
        if settings["devices"] and not driver:  # a GPU each; never run on a machine with one
            every = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = every.split(",") if every else [str(n) for n in range(settings["devices"])]
            variables["CUDA_VISIBLE_DEVICES"] = names[index]
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            **platform.new_group(),
        )
        threading.Thread(target=self._receive, args=(inbox,), daemon=True).start()
        self.send({**settings, "path": sys.path, "driver": driver})

    def _receive(self, inbox: worker.Messages) -> None:
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
        self._workers = [WorkerProcess(settings, self._inbox, n) for n in range(settings["count"])]

    def close(self) -> None:
        for process in self._workers:
            process.end()

    def _assign(self) -> None:
        for process in self._workers:
            idle = process.ready and process.number is None
            if self._waiting and idle and not platform.has_ended(process.process.pid):
                process.number, task = self._waiting.popleft()
                process.deadline = time.monotonic() + (self.settings["seconds"] or NEVER)
                process.send(task)

    def _step(self) -> None:
        soonest = min(process.deadline for process in self._workers) - time.monotonic()
        try:
            process, message = self._inbox.get(timeout=max(0.0, min(soonest, CHECK_EVERY_S)))
        except queue.Empty:
            self._check()
            return self._assign()
        if process not in self._workers:
            return  # it was given up
        if message is None:
            self._replace(process, "died")
        elif message[0] == "ready":
            if message[1]:
                raise not_set_up(message[1])
            process.ready = True
        else:
            self._done(process.number, *message[1:])
            process.number, process.deadline = None, NEVER
        self._assign()

    def _check(self) -> None:
        """Replace workers whose time is up, and any whose end left its pipe open."""
        for process in list(self._workers):
            if process.deadline < time.monotonic():
                self._replace(process, "timeout")
            elif platform.has_ended(process.process.pid) and self._inbox.empty():
                self._replace(process, "died")

    def _replace(self, process: WorkerProcess, kind: str) -> None:
        how = process.end()
        self._workers[process.index] = WorkerProcess(self.settings, self._inbox, process.index)
        late = too_long(self.settings["seconds"])
        self._lost(process.number, kind, late if kind == "timeout" else how)
