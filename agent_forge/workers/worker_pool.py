"""What every executor promises: results in the order of submission, whoever ran the tasks.

Tasks and results are plain data as JSON carries it (a tuple comes back as a list), so a result
is the same from this process, from another one, and from a journal that is read again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent_forge.errors import ForgeError, WorkersLost
from agent_forge.workers import worker

DEATHS_PER_WORKER = 5  # in a row, with no task done in between: then it is not the tasks


@dataclass(frozen=True)
class WorkerFailure:
    """What a task has instead of a result."""

    kind: str  # raised, died (with its worker), timeout
    message: str


class WorkerPool:
    """Takes tasks and returns their results; to be closed, so use it in a `with`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings  # what `open_pool` was given
        self._last = -1
        self._order: deque[int] = deque()  # submitted and not handed out yet
        self._waiting: deque[tuple[int, str]] = deque()  # submitted and not begun
        self._results: dict[int, Any] = {}
        self._deaths = 0  # since a task was done

    def __enter__(self) -> WorkerPool:
        return self

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
        """Each number with its result or Failure, until all are out; more can be submitted."""
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
            raise WorkersLost(
                f"{self._deaths} workers died with no task done in between; the last: {how}",
                hint="if memory is short use fewer workers, then resume: what is done is kept",
            )


def too_long(seconds: float | None) -> str:
    return f"more than {seconds or 0:g} s"


def not_set_up(problem: str) -> ForgeError:
    """The error for a work function that cannot be built: the next worker would fail as well."""
    return ForgeError(f"a worker cannot be set up: {problem}")


class InlinePool(WorkerPool):
    """Tasks run in this process, one by one, when their results are asked for.

    Nothing can be stopped here: a task that took too long counts as such once it has ended.
    """

    _work: worker.Work | None = None

    def _step(self) -> None:
        if not self._work:
            self._work, problem = worker.build(self.settings)
            if not self._work:
                raise not_set_up(problem)
        (number, task), seconds = self._waiting.popleft(), self.settings["seconds"]
        began = time.monotonic()
        self._done(number, *worker.run_task(self._work, task, self.settings["threads"]))
        if seconds and time.monotonic() - began > seconds:
            self._lost(number, "timeout", too_long(seconds))
