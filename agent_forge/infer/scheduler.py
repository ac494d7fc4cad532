"""Replies for many clients at once: what waits for the same model is continued in one batch.

One thread computes. Rows of a batch keep in step, so none joins one that runs: several batches take
turns, a token each, and what comes meanwhile waits for the next. A reply is a row after another: a
thought, calls of tools, the answer; between them it goes to the front of the queue.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from agent_forge.errors import ForgeError
from agent_forge.infer.generate import CACHED_TOKENS, Batch, Row, reader_of

MOST_BATCHES = 8  # that take turns
APART = 4  # tokens between the beginnings of two, in which requests gather for the next
MOST_TOOLS = 4  # calls of tools that are carried out at once
STOPPING = "the server is stopping"
SPREAD = 64  # tokens by which prompts of a batch may differ in length: the rest is read one by one


class QueueFull(ForgeError, exit_code=5):
    """More requests wait than there are places."""


class Request(ABC):
    """A reply that somebody waits for."""

    gone = False  # nobody waits for it any more
    row: Row
    left: Iterator[Row | Callable[[], object]]

    def __init__(self, network: nn.Module, together: bool = True) -> None:
        self.network, self.together = network, together  # False: it is read row by row
        self.left = self.work()

    @abstractmethod
    def work(self) -> Iterator[Row | Callable[[], object]]:
        """Its rows, each yielded to be continued to its end, and other work, done in a thread."""

    @abstractmethod
    def look(self, row: Row) -> None:
        """Called whenever a row has grown."""

    @abstractmethod
    def end(self, error: Exception | None) -> None:
        """Called once, when nothing is left to do or something failed."""


class Scheduler:
    """The thread that computes, and the queue before it."""

    def __init__(self, places: int, cached_tokens: int = CACHED_TOKENS) -> None:
        self.places, self.cached_tokens = places, cached_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[Batch, list[Request]]] = []
        self._round = 0  # since a batch began
        self._changed, self._closing = threading.Condition(), False
        self._tools = ThreadPoolExecutor(MOST_TOOLS, "tools")
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn; refuse it if too many do."""
        with self._changed:
            if len(self._waiting) >= self.places:
                raise QueueFull(f"{self.places} requests are waiting", hint="try again later")
        self._go_on(request, first=False)

    def cancel(self, request: Request) -> None:
        """Give the place of a request free, wherever it is."""
        with self._changed:
            request.gone = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(request)

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait, and how many are being answered."""
        with self._changed:
            return len(self._waiting), sum(len(requests) for _, requests in self._running)

    def close(self) -> None:
        """End after the present token; whoever still waits is told."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._tools.shutdown(wait=False)
        left = [*self._waiting, *(one for _, own in self._running for one in own)]
        self._waiting.clear()
        self._running.clear()
        for request in left:
            request.end(QueueFull(STOPPING))

    def _go_on(self, request: Request, *, first: bool = True) -> None:
        """Let the next row of a request wait, or do its next piece of other work."""
        try:
            work = None if request.gone else next(request.left, None)
        except Exception as error:  # noqa: BLE001 - it fails alone
            return request.end(error)
        if work is None:
            return request.end(None)
        if not isinstance(work, Row):
            self._tools.submit(self._aside, request, work)
            return
        request.row = work
        with self._changed:
            if self._closing:
                return request.end(QueueFull(STOPPING))
            (self._waiting.appendleft if first else self._waiting.append)(request)
            self._changed.notify()

    def _aside(self, request: Request, work: Callable[[], object]) -> None:
        if self._closing:
            return request.end(QueueFull(STOPPING))
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it fails alone
            return request.end(error)
        self._go_on(request)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
                if self._closing:
                    return
                taken = self._take()
            for requests in taken:
                self._guarded(requests, self._begin)
            for running in list(self._running):
                self._guarded(running[1], self._advance, running)
                if not running[0].live or not running[1]:
                    self._running.remove(running)

    def _take(self) -> list[list[Request]]:
        """Requests that can begin now, those of a model and of like length together."""
        self._round += 1
        if self._running and (self._round < APART or len(self._running) >= MOST_BATCHES):
            return []
        room = self.cached_tokens
        room -= sum(one.row.most_tokens for _, own in self._running for one in own)
        free, groups = MOST_BATCHES - len(self._running), list[list[Request]]()
        for request in list(self._waiting):
            if request.row.most_tokens > room and (self._running or groups):
                break  # in turn: a large one is not passed by for ever
            group = next((own for own in groups if self._fits(request, own)), None)
            if group is None:
                if len(groups) == free:
                    continue
                groups.append(group := [])
            group.append(request)
            room -= request.row.most_tokens
            self._waiting.remove(request)
            self._round = 0
        return groups

    def _fits(self, request: Request, group: Sequence[Request]) -> bool:
        """True if a request may go with others, all of the same model."""
        if request.network is not group[0].network or not request.together:
            return False
        length = len(request.row.prompt)
        return all(abs(length - len(one.row.prompt)) <= SPREAD for one in group)

    def _begin(self, requests: list[Request]) -> None:
        rows = [request.row for request in requests]
        batch = Batch(reader_of(requests[0].network, rows[0].sampling), rows)
        self._running.append((batch, requests))

    def _advance(self, requests: list[Request], running: tuple[Batch, list[Request]]) -> None:
        """One token for every row of a batch; those that have ended go on elsewhere."""
        batch = running[0]
        here = [i for i, row in enumerate(batch.live) if not _of(row, requests).gone]
        batch.keep(here)
        requests[:] = [one for one in requests if not one.gone]
        if not requests:
            return
        batch.advance()
        for request in list(requests):
            request.look(request.row)
            if request.row.result.stopped_by:
                requests.remove(request)
                self._go_on(request)

    def _guarded(self, requests: list[Request], work: Callable[..., None], *more: Any) -> None:
        """Do work for requests; what it raises is told to each of them."""
        try:
            work(requests, *more)
        except Exception as error:  # noqa: BLE001 - other batches go on
            for request in requests:
                request.end(error)
            requests.clear()


def _of(row: Row, requests: Sequence[Request]) -> Request:
    return next(request for request in requests if request.row is row)
