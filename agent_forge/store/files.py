"""The only durable writer: what it wrote is there complete, or not at all.

A file is written beside its place, synced and renamed into it. A directory is built out of sight
and renamed into place with a manifest of sha256 sums. Replacing a directory takes two renames, so
the new one first gets the name `.ready-*`: from then on it is the valid one, and `finish_replace`
does the rest after a crash. Whatever is unfinished has a name that `remove_leftovers` knows; that
needs the lock of the tree, because an unfinished write of a living process looks the same.
What was not written here and stands in the way gets a name `*.kept-*`, which is told.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from agent_forge import errors
from agent_forge.config import strict_json
from agent_forge.store.disk import CHUNK, FileSystemCalls, has_disk
from agent_forge.store.disk import free_bytes as free_bytes
from agent_forge.store.disk import nearest_folder as nearest_folder
from agent_forge.store.disk import refuse_link as refuse_link
from agent_forge.store.disk import require_own as require_own
from agent_forge.store.disk import sha256_of as sha256_of
from agent_forge.store.disk import tree_bytes as tree_bytes

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
TEMP, READY, OLD, TRASH = MARKS = ".tmp-", ".ready-", ".old-", ".trash-"
LEFTOVER = re.compile(r"\.(tmp|old|trash)-[0-9a-f]{8}-(.+)")  # as `unfinished` names it, only
T = TypeVar("T")
FileRecords = dict[str, dict[str, Any]]  # sha256 and bytes by file name
disk = FileSystemCalls()
log = logging.getLogger(__name__)


class HashingWriter:
    """An open file that counts and hashes what goes through it."""

    def __init__(self, path: Path, flags: int) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        self.fd = disk.open(path, flags)

    def close(self) -> None:
        os.close(self.fd)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        left = view = memoryview(data).cast("B")
        self._hash.update(view)
        self.size += len(view)
        while len(left):
            left = left[disk.write(self.fd, left[:CHUNK]) :]
        return len(view)

    @property
    def record(self) -> dict[str, Any]:
        return {"sha256": self._hash.hexdigest(), "bytes": self.size}


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[HashingWriter]:
    with closing(HashingWriter(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as writer:
        yield writer
        disk.sync(writer.fd)  # of a new file


@contextlib.contextmanager
def disk_errors(path: Path, size: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn what the system reports while `path` is changed into the error that names it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise errors.DiskFull(path, size(), free_bytes(path.parent)) from error
        if error.errno == errno.ELOOP:
            raise errors.HostileInput(f"{path} is a link; the store follows none") from error
        if error.errno == errno.ENOENT and not path.parent.exists():
            raise errors.PathDisappeared(path) from error
        raise errors.CannotWrite(path, error.strerror or str(error)) from error


@contextlib.contextmanager
def writing(path: Path, *, replace: bool = True) -> Iterator[HashingWriter]:
    """Write a file: it appears at `path`, whole, after the block; else what is there stays."""
    temp = unfinished(path)
    writer: HashingWriter | None = None
    with disk_errors(path, lambda: writer.size if writer else 0):
        try:
            disk.make_directory(path.parent)
            with _new_file(temp) as writer:
                yield writer
            (disk.replace if replace else disk.place)(temp, path)
            disk.sync_directory(path.parent)
        except FileExistsError:
            _discard(temp)
            hint = "it was made meanwhile; it stays"
            raise errors.AlreadyExists(f"{path} exists", hint=hint) from None
        except BaseException:
            _discard(temp)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    with writing(path) as writer:
        writer.write(data)


def write_checked(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its checksum, in the place of one or of nothing."""
    make_way(path, read_checked)
    write_bytes(path, with_checksum(record))


def make_way(path: Path, is_own: Callable[[Path], Any]) -> None:
    """Give what is at `path` another name, unless it is ours."""
    own = not os.path.lexists(path)
    with contextlib.suppress(errors.DamagedFile, OSError, TypeError):
        own = own or (not path.is_symlink() and bool(is_own(path)))
    if not own:
        with disk_errors(path):
            disk.replace(path, _kept(path))


def _kept(path: Path) -> Path:
    """Return the name under which what is not ours is kept, and tell it."""
    kept = path.with_name(f"{path.name}.kept-{secrets.token_hex(4)}")
    log.warning("%s held what was not written here; it is kept as %s", path, kept)
    return kept


def to_json(value: Any, *, sort_keys: bool = True) -> bytes:
    """Return the one byte form of a value: sorted keys, ASCII, no NaN."""
    text = json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=True, allow_nan=False)
    return text.encode() + b"\n"


def finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity: they are not measurements."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def with_checksum(record: dict[str, Any]) -> bytes:
    """Return a record as JSON with its schema number and checksum (see read_checked)."""
    record = {**record, "schema_version": SCHEMA_VERSION}
    return to_json({**record, "checksum": hashlib.sha256(to_json(record)).hexdigest()})


class StagedFolder:
    """A directory under construction, and the records of the files written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: FileRecords = {}

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[HashingWriter]:
        if Path(name).name != name or name in ("", ".", "..", MANIFEST) or name in self.records:
            raise errors.NameRefused(f"{name!r} cannot be a file of this directory")
        with _new_file(self.path / name) as writer:
            yield writer
        self.records[name] = writer.record

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.writing(name) as writer:
            writer.write(data)

    def write_json(self, name: str, value: Any) -> None:
        self.write_bytes(name, to_json(value))

    def copy(self, source: Path, name: str = "") -> None:
        refuse_leaving(source)
        with source.open("rb") as reader, self.writing(name or source.name) as writer:
            while chunk := reader.read(CHUNK):
                writer.write(chunk)


def refuse_leaving(path: Path) -> None:
    """Refuse a link out of its folder, but for the hub's cache: nobody gave away what it names."""
    real, folder = path.resolve(), path.parent.resolve()
    in_cache = folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs"
    if path.is_symlink() and folder not in real.parents and not in_cache:
        hint = "if it is yours, put a copy of the file in its place"
        raise errors.HostileInput(f"{path} is a link to {real}, outside of its folder", hint=hint)


@contextlib.contextmanager
def staging(
    path: Path,
    *,
    manifest: bool = True,
    replace: bool = True,
    check: Callable[[Path], object] | None = None,
) -> Iterator[StagedFolder]:
    """Build a directory: it appears at `path`, whole and with its manifest, or not at all. `check`
    sees it just before, and keeps it from appearing by an error."""
    stage = StagedFolder(unfinished(path))
    missing = [parent for parent in path.parents if not parent.exists()]
    with disk_errors(path, lambda: sum(r["bytes"] for r in stage.records.values())):
        try:
            disk.make_directory(path.parent)
            disk.make_directory(stage.path)
            yield stage
            if manifest:
                with _new_file(stage.path / MANIFEST) as writer:
                    writer.write(with_checksum({"files": stage.records}))
            disk.sync_directory(stage.path)
            if check is not None:
                check(stage.path)
            publish(stage.path, path, replace=replace)
        except BaseException:
            _discard(stage.path)
            with contextlib.suppress(OSError):  # one that holds something stays
                for parent in missing:
                    parent.rmdir()
            raise


def publish(built: Path, path: Path, *, replace: bool = True) -> None:
    """Put a folder with a manifest in the place of another one, or where there is none."""
    with disk_errors(path, lambda: tree_bytes(built)):
        finish_replace(path)
        if not replace or not path.exists():
            disk.replace(built, path)  # the system refuses it if another writer was faster
            disk.sync_directory(path.parent)
            return
        disk.replace(built, _ready(path))
        try:
            disk.sync_directory(path.parent)
            _swap(path)
        except OSError:
            if path.exists():  # the old one is still in place, so the new one was never there
                _discard(_ready(path))
            raise


def finish_replace(path: Path) -> None:
    """Finish a replacement that was cut short: once `.ready-*` exists, it is the new version."""
    ready = _ready(path)
    if not ready.exists() or ready.is_symlink():
        return
    try:
        verify(ready, content=False)
    except (errors.DamagedFile, errors.HostileInput, errors.NotFound):
        return  # somebody else gave it that name
    _swap(path)


def _swap(path: Path) -> None:
    """Put the directory that is ready in the place of the old one."""
    old = unfinished(path, OLD)
    if path.exists():
        disk.replace(path, old)
    disk.replace(_ready(path), path)
    disk.sync_directory(path.parent)
    if old.exists():
        retire(old, path)


def retire(old: Path, path: Path) -> None:
    """Remove the last version of `path`, but not what somebody put there meanwhile."""
    with contextlib.suppress(OSError):  # remove_leftovers does it then
        if old.is_symlink() or not old.is_dir():
            return disk.replace(old, _kept(path))
        if strange := foreign(old):
            kept = _kept(path)
            disk.make_directory(kept)
            for name in strange:
                disk.replace(old / name, kept / name)
        trash = unfinished(path, TRASH)
        disk.replace(old, trash)
        _discard(trash)


def foreign(folder: Path) -> list[str]:
    """Return the names that a folder's manifest does not have; all, if it does not fit."""
    there, own = {path.name for path in folder.iterdir()}, set[str]()
    if MANIFEST in there:
        with contextlib.suppress(errors.ForgeError):
            own = {*verify(folder), MANIFEST}
    return sorted(there - own)


def append(path: Path, data: bytes) -> None:
    """Append lines to a file; a half-written line before them is ended first."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with disk_errors(path, lambda: len(data)), closing(HashingWriter(path, flags)) as writer:
        require_own(path, os.fstat(writer.fd))
        torn = False
        if os.lseek(writer.fd, 0, os.SEEK_END):
            os.lseek(writer.fd, -1, os.SEEK_END)
            torn = os.read(writer.fd, 1) != b"\n"
        writer.write(b"\n" + data if torn else data)


def sync(path: Path) -> None:
    """Put what was appended to a file on the disk."""
    with disk_errors(path), closing(HashingWriter(path, os.O_RDWR)) as writer:
        disk.sync(writer.fd)


def cut(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes."""
    if path.exists() and path.stat().st_size > size:
        with disk_errors(path):
            require_own(path, path.lstat())
            disk.truncate(path, size)


def remove(path: Path) -> None:
    """Remove one file, if it is there."""
    if path.exists():
        with disk_errors(path):
            disk.remove(path)


def remove_tree(path: Path, root: Path) -> None:
    """Remove a directory below `root`; it is renamed out of sight first, so it goes at once."""
    if path.is_symlink() or root.resolve() not in path.resolve().parents:
        raise errors.HostileInput(f"refused to remove {path}: it is a link or not inside {root}")
    trash = unfinished(path, TRASH)
    with disk_errors(path):
        disk.replace(path, trash)
        disk.sync_directory(path.parent)
        disk.remove_tree(trash)


def remove_leftovers(root: Path, *, deep: bool = True) -> None:
    """Finish what a process that died had ready, remove what it had not.

    Only for the holder of the tree's lock. Names that only look like ours are left alone.
    """
    refuse_link(root)
    for folder, directories, names in os.walk(root):
        for name in sorted(directories + names):
            path = Path(folder) / name
            if name.startswith(READY):
                finish_replace(path.with_name(name.removeprefix(READY)))
            elif match := LEFTOVER.fullmatch(name):
                if match[1] == "old":
                    retire(path, path.with_name(match[2]))
                else:
                    _discard(path)
        directories[:] = [d for d in directories if not d.startswith(MARKS)] if deep else []


def unfinished(path: Path, mark: str = TEMP) -> Path:
    """Return a name beside a path, for its next or last version, that `remove_leftovers` knows."""
    return path.with_name(f"{mark}{secrets.token_hex(4)}-{path.name}")


@contextlib.contextmanager
def building(path: Path) -> Iterator[Path]:
    """A name beside a path to build a folder under; what is left of it in the end is removed."""
    built = unfinished(path)
    try:
        yield built
    finally:
        if built.exists():
            remove_tree(built, built.parent)


def _ready(path: Path) -> Path:
    return path.with_name(f"{READY}{path.name}")


def _discard(path: Path) -> None:
    """Remove something unfinished; if that fails, remove_leftovers finds it by its name."""
    with contextlib.suppress(OSError):
        is_folder = path.is_dir() and not path.is_symlink()
        (disk.remove_tree if is_folder else disk.remove)(path)


def read_json(path: Path) -> Any:
    """Read JSON, ours or of a model; what is not readable is damage, and is named."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise errors.DamagedFile(path, "not a file")
    with _read_errors(path):
        content = path.read_bytes()
    try:
        return strict_json.parse(content.decode(json.detect_encoding(content), "surrogatepass"))
    except ValueError as error:
        raise errors.DamagedFile(path, f"not readable as JSON ({error})") from error


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn the error of a failing disk into damage; other errors are not the file's."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise errors.DamagedFile(path, "the disk cannot read it") from error
        raise


def read_checked(path: Path) -> dict[str, Any]:
    """Read a record made by `with_checksum`; one that was altered in any way is damage."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise errors.DamagedFile(path, "not a record")
    checksum = record.pop("checksum", None)
    try:
        fits = checksum == hashlib.sha256(to_json(record)).hexdigest()
    except ValueError:  # NaN, which we never write
        fits = False
    if not fits:
        raise errors.DamagedFile(path, "its checksum does not fit")
    refuse_newer(path, record)
    return record


def refuse_newer(path: Path, record: Mapping[str, Any], newest: int = SCHEMA_VERSION) -> None:
    """Refuse what a newer version wrote: its meaning may have changed."""
    version = record.get("schema_version")
    if isinstance(version, int) and version > newest:
        text = f"{path} has schema {version}; this version reads up to {newest}"
        hint = "use the newer version of agent-forge that wrote it"
        raise errors.WrittenByNewerVersion(text, hint=hint)


def verify(directory: Path, *, content: bool = True) -> FileRecords:
    """Check the files of a directory against its manifest (without `content`: names and sizes
    only, which reads nothing) and return the manifest's records."""
    try:
        records = read_checked(directory / MANIFEST).get("files")
    except FileNotFoundError:
        raise errors.DamagedFile(directory, f"it has no {MANIFEST}") from None
    if not isinstance(records, dict) or not all(map(_is_file_record, records.values())):
        raise errors.DamagedFile(directory / MANIFEST, "not a manifest")
    for name, record in records.items():
        path = directory / name
        if path.name != name or name in (".", ".."):
            text = f"{directory / MANIFEST} names {name!r}, which is outside of it"
            raise errors.HostileInput(text)
        if not path.is_file() or path.is_symlink():
            raise errors.DamagedFile(path, "missing")
        size = path.stat().st_size
        if size != record["bytes"]:
            raise errors.DamagedFile(path, f"{size} bytes where {record['bytes']} were written")
        with _read_errors(path):
            found = sha256_of(path) if content else record["sha256"]
        if found != record["sha256"]:
            expected = record["sha256"][:12]
            raise errors.DamagedFile(path, f"sha256 {found[:12]}..., expected {expected}...")
    return records


def _is_file_record(record: Any) -> bool:
    types = {"sha256": str, "bytes": int}
    return isinstance(record, dict) and all(isinstance(record.get(k), t) for k, t in types.items())


def reading(path: Path, read: Callable[[Path], T]) -> T:
    """Read a directory that a writer may be replacing; never half of each version."""
    for _ in range(20):
        place = path if path.exists() or not _ready(path).exists() else _ready(path)
        before = _manifest_bytes(place)
        try:
            result = read(place)
        except (errors.DamagedFile, FileNotFoundError):
            if before == _manifest_bytes(path) and place == path:
                if before is None and not path.exists():
                    raise errors.NotFound(f"{path} does not exist") from None
                raise
        else:
            if before == _manifest_bytes(place):
                return result
    raise errors.DamagedFile(path, "it was replaced again and again while being read")


def _manifest_bytes(directory: Path) -> bytes | None:
    path = directory / MANIFEST
    with contextlib.suppress(OSError):
        return path.read_bytes() if path.is_file() else None
    return None


def require_space(path: Path, needed: int) -> None:
    """Refuse work that the disk cannot hold, before it starts."""
    if needed > (free := free_bytes(path)):
        if not has_disk(path):
            raise errors.CannotWrite(path, "it is no place on a disk")
        raise errors.DiskFull(path, needed, free)
