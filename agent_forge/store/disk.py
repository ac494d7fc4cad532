"""The calls that change the disk: store/files.py makes them, and tests make the N-th fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agent_forge import platform


class FileSystemCalls:
    """The calls that change the disk, one method each: tests make the N-th of them fail."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | platform.BINARY | platform.NO_FOLLOW, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        platform.sync_file(fd)

    def sync_directory(self, path: Path) -> None:
        platform.sync_directory(path)

    def make_directory(self, path: Path) -> None:
        """Make a directory and those missing above it; each is on the disk before the next."""
        if not path.parent.exists():
            self.make_directory(path.parent)
        if not path.exists():
            path.mkdir(exist_ok=True)
            platform.sync_directory(path.parent)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def place(self, source: Path, target: Path) -> None:
        """Give a file its name, unless something has that name by now."""
        os.link(source, target)
        source.unlink()

    def truncate(self, path: Path, size: int) -> None:
        fd = os.open(path, os.O_WRONLY | platform.BINARY | platform.NO_FOLLOW)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)
