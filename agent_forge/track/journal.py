"""A file of JSON lines that only grows; a resumed phase removes what it wrote too much."""

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_forge.store import files

BEGINS = b'{"'  # every line of ours


CHECKSUM = "crc"  # the last field of a line that is checked


class Journal:
    """Appends records to a file; safe for several threads of one process. Lines that are `checked`
    have a checksum: one that was damaged and can still be parsed is not believed."""

    def __init__(self, path: Path, checked: bool = False) -> None:
        self.path, self._checked = path, checked
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            files.require_own(path, path.lstat())
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            if BEGINS.startswith(content[end : end + len(BEGINS)]):  # half a line: killed in it
                files.cut(path, end)

    def write(self, record: Mapping[str, Any]) -> None:
        line = _plain(record)
        if self._checked:
            line = _plain({**record, CHECKSUM: zlib.crc32(line)})
        with self._lock:
            files.append(self.path, line + b"\n")

    def sync(self) -> None:
        """Put everything that was written on the disk."""
        with self._lock:
            if self.path.exists():
                files.sync(self.path)

    def keep(self, phase: str, count: int) -> int:
        """Keep the first `count` records of a phase and all others; return how many it has."""
        with self._lock:
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            kept, seen = [], 0
            for line in lines:
                mine = False
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    mine = str(json.loads(line)["phase"]) == phase
                if not mine or seen < count:
                    kept.append(line)
                seen += mine
            if len(kept) < len(lines):
                files.write_bytes(self.path, b"".join(kept))
            return min(seen, count)


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete lines from byte `start` on, each with the offset to come back for more."""
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
                known = record.pop(CHECKSUM, None)
                whole = known is None or known == zlib.crc32(_plain(record))
            except (ValueError, AttributeError, TypeError, RecursionError):  # of another making
                continue
            if whole:
                yield start, record


def _plain(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
