"""A file of JSON lines that only grows, and can be cut back to an earlier length on resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_forge.store import files


class Journal:
    """Appends records to a file; safe for several threads of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_torn_line()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"), allow_nan=False, default=str)
        with self._lock:
            files.append(self.path, line.encode() + b"\n")

    def mark(self) -> int:
        """The present length, with everything up to it on the disk."""
        with self._lock:
            if not self.path.exists():
                return 0
            files.sync(self.path)
            return self.path.stat().st_size

    def cut(self, mark: int) -> None:
        """Go back to a length that `mark` gave."""
        with self._lock:
            files.cut(self.path, mark)

    def _drop_torn_line(self) -> None:
        """A process that was killed while writing leaves half a line; it never happened."""
        if self.path.exists():
            content = self.path.read_bytes()
            files.cut(self.path, content.rfind(b"\n") + 1)


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines from byte `start` on, each with the offset behind it.

    A reader keeps the last offset and comes back for more; a half-written line is not there yet.
    """
    if not path.exists():
        return
    with path.open("rb") as reader:
        reader.seek(start)
        for line in reader:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield start, record
