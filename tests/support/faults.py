"""A disk that fails at a chosen call, and a pickle that runs code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agent_forge.store import files


class FailingDisk(files.FileSystemCalls):
    """Fails at the N-th call: once or from then on, with an error or after half of a write."""

    def __init__(self, fail_at: int, error: int, *, once: bool, short: bool) -> None:
        self.calls = 0
        self.failures = 0
        self.fail_at, self.error, self.once, self.short = fail_at, error, once, short

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at or (self.calls > self.fail_at and not self.once):
            self.failures += 1
            raise OSError(self.error, os.strerror(self.error))

    def write(self, fd: int, data: memoryview) -> int:
        if self.short and self.calls + 1 == self.fail_at:
            os.write(fd, data[: len(data) // 2])
        self._count()
        return super().write(fd, data)


def _counted(name: str) -> Callable[..., object]:
    real = getattr(files.FileSystemCalls, name)

    def call(self: FailingDisk, *arguments: object) -> object:
        self._count()
        return real(self, *arguments)

    return call


for operation in (
    *("open", "sync", "sync_directory", "make_directory"),
    *("replace", "remove", "remove_tree"),
):
    setattr(FailingDisk, operation, _counted(operation))


class Canary:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))
