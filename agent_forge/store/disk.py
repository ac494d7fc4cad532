"""The calls that change the disk: store/files.py makes them; and some that only look at it."""

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

from agent_forge import platform
from agent_forge.errors import HostileInput

CHUNK = 1 << 20


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


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as reader:
        while chunk := reader.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Return the free bytes at the nearest existing folder of `path`."""
    return shutil.disk_usage(nearest_folder(path)).free


def has_disk(path: Path) -> bool:
    """False for the views of a kernel such as /proc, which store nothing."""
    return shutil.disk_usage(nearest_folder(path)).total > 0


def nearest_folder(path: Path) -> Path:
    """Return the path itself if it is a folder, or the nearest above it."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def tree_bytes(root: Path) -> int:
    """Return the bytes of all files below `root`; files that vanish meanwhile count nothing."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).lstat().st_size
    return total


def refuse_link(path: Path) -> Path:
    """Return the path unless it is a link: we make none inside the storage root."""
    if path.is_symlink():
        raise HostileInput(f"{path} is a link; the store follows none", hint="remove the link")
    return path


def require_own(path: Path, info: os.stat_result) -> None:
    """Refuse to change in place what is no plain file, or has another name elsewhere."""
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        hint = "move it elsewhere, or put a copy in its place"
        raise HostileInput(f"{path} is a link or no file; it is not changed", hint=hint)
