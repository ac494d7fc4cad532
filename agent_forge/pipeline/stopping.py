"""How work is asked to stop: Ctrl-C, SIGTERM, SIGHUP, or a stop file that `forge stop` writes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from agent_forge import platform
from agent_forge.store import files, lock

STOP_FILE = "stop"


class StopSignals:
    """Says whether to stop. The first request lets the step finish; a second one leaves at once."""

    def __init__(self) -> None:
        self._asked = False
        self._folder: Path | None = None

    def watch(self, folder: Path) -> None:
        """Look for a stop file in this run directory; one that is meant for us counts."""
        self._folder = folder

    def request(self) -> None:
        self._asked = True  # no lock: a signal may come while one is being handled

    def __call__(self) -> bool:
        if self._asked:
            return True
        path = self._folder / STOP_FILE if self._folder else None
        if path is None or not path.exists():
            return False
        meant_for_us = path.read_text() == str(os.getpid())
        files.remove(path)  # heard; or it was meant for a process that is gone
        if meant_for_us:
            self.request()
        return meant_for_us

    def on_signals(self) -> AbstractContextManager[None]:
        """Turn signals into requests while the block runs."""
        return platform.on_stop_signals(self._on_signal)

    def _on_signal(self, name: str) -> None:
        if self._asked:
            platform.interrupt(name)
        self.request()


def request_stop(folder: Path) -> None:
    """Ask the process that runs in this directory to stop after its present step."""
    files.write_text(folder / STOP_FILE, str(lock.holder_pid(folder)))
