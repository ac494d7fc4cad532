"""How a run is asked to stop: Ctrl-C, SIGTERM, or a stop file that `forge stop` writes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from agent_forge.store import files, lock

STOP_FILE = "stop"


class Stopper:
    """Says whether to stop. The first request lets the step finish; a second one leaves at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._folder: Path | None = None

    def watch(self, folder: Path) -> None:
        """Look for a stop file in this run directory; one that is meant for us counts."""
        self._folder = folder

    def request(self) -> None:
        self._asked.set()

    def __call__(self) -> bool:
        if self._asked.is_set():
            return True
        path = self._folder / STOP_FILE if self._folder else None
        if path is None or not path.exists():
            return False
        meant_for_us = path.read_text() == str(os.getpid())
        files.remove(path)  # heard; or it was meant for a process that is gone
        if meant_for_us:
            self.request()
        return meant_for_us

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into requests. Only the main thread may, so only it does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            for kind in before:
                signal.signal(kind, self._on_signal)
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            raise KeyboardInterrupt
        self.request()


def request_stop(folder: Path) -> None:
    """Ask the process that runs in this directory to stop after its present step."""
    files.write_text(folder / STOP_FILE, str(lock.holder_pid(folder)))
