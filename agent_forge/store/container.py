"""A model in one file: the files of its folder, compressed together with a checksum.

    "FORGE" and a version (8 bytes), the length of the index (4 bytes), the index, the files, sha256

The index and every file are raw LZMA2; the index is a list of names with the bytes of the file
whole and as stored. Codes of few bits are written by their own coder and go through as they are.
A command that is given such a file unpacks it once, into a folder of the user's cache.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agent_forge.errors import CannotWrite, DamagedFile, HostileInput
from agent_forge.store import files
from agent_forge.store.paths import user_cache

SUFFIX = ".forge"
MAGIC = b"FORGE\x00\x00\x01"  # the last byte is the version
LENGTH = 4
CHECKSUM = hashlib.sha256().digest_size
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 8 << 20}]
MOST_INDEX = 1 << 20
# By how much a file may grow: more is made to fill a disk.
MOST_GROWTH, ALWAYS_ALLOWED = 100, 16 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
UNNAMED = "model"


class Container(NamedTuple):
    """The bytes of a container, and how many of them each file takes; the rest is under ""."""

    content: bytes
    sizes: dict[str, int]


def container_of(contents: Mapping[str, bytes]) -> Container:
    """Files in one."""
    stored = {name: _compressed(content) for name, content in contents.items()}
    entries = [[name, len(contents[name]), len(data)] for name, data in stored.items()]
    index = _compressed(json.dumps(entries).encode())
    head = MAGIC + len(index).to_bytes(LENGTH, "little") + index
    body = b"".join((head, *stored.values()))
    sizes = {name: len(data) for name, data in stored.items()}
    content = body + hashlib.sha256(body).digest()
    return Container(content, {**sizes, "": len(head) + CHECKSUM})


def read_container(path: Path) -> dict[str, bytes]:
    """The files in one, verified."""
    data = path.read_bytes()
    if data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise DamagedFile(path, "no model of Agent Forge in one file")
    if data[len(MAGIC) - 1] != MAGIC[-1]:
        hint = "a newer Agent Forge may read it"
        raise DamagedFile(path, f"version {data[len(MAGIC) - 1]}; 1 is read", hint=hint)
    body, checksum = data[:-CHECKSUM], data[-CHECKSUM:]
    if hashlib.sha256(body).digest() != checksum:
        raise DamagedFile(path, "cut short or changed: its sha256 differs")
    place = len(MAGIC) + LENGTH
    end = place + int.from_bytes(data[len(MAGIC) : place], "little")
    found: dict[str, bytes] = {}
    entries = _index(path, body[place:end])
    if end + sum(stored for _, _, stored in entries) != len(body):
        raise DamagedFile(path, "its index does not fit what follows")
    whole = sum(size for _, size, _ in entries)
    if whole > ALWAYS_ALLOWED + MOST_GROWTH * len(data):
        raise HostileInput(f"{path} would unpack to {whole:,} bytes")
    for name, size, stored in entries:
        found[name] = _whole(path, body[end : end + stored], size)
        end += stored
    return found


def unpacked(path: Path) -> Path:
    """The folder of a model in one file: unpacked, unless it was before."""
    contents = read_container(path)
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    name = path.stem if path.stem.strip(".") else UNNAMED  # `...forge` would lead out of the folder
    folder = user_cache() / "models" / digest.hexdigest()[:32] / name
    there = folder.exists()
    if there and _is_whole(folder, contents):
        return folder
    files.require_space(folder, sum(map(len, contents.values())))
    try:  # what another process has unpacked meanwhile stays: it may be reading it
        with files.staging(folder, replace=there) as stage:
            for name, content in contents.items():
                stage.write_bytes(name, content)
    except CannotWrite:
        if not _is_whole(folder, contents):  # else another process was faster
            raise
    return folder


def _is_whole(folder: Path, contents: Mapping[str, bytes]) -> bool:
    """True if the files are there with this content, whatever a manifest beside them says; what was
    damaged or changed is unpacked again."""
    with suppress(DamagedFile, FileNotFoundError):
        found = {name: record["sha256"] for name, record in files.verify(folder).items()}
        return found == {n: hashlib.sha256(data).hexdigest() for n, data in contents.items()}
    return False


def _compressed(data: bytes) -> bytes:
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=FILTERS)


def _whole(path: Path, data: bytes, size: int) -> bytes:
    """What was compressed to `data`; never more than `size` bytes."""
    reader = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=FILTERS)
    try:
        content = reader.decompress(data, max_length=size)
        if len(content) == size and not reader.eof:
            content += reader.decompress(b"", max_length=1)
    except (lzma.LZMAError, EOFError):
        raise DamagedFile(path, "a part of it cannot be decompressed") from None
    if len(content) != size or not reader.eof or reader.unused_data:
        raise DamagedFile(path, "a part of it is not of the size that its index says")
    return content


def _index(path: Path, data: bytes) -> list[tuple[str, int, int]]:
    reader = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=FILTERS)
    try:
        entries: Any = json.loads(reader.decompress(data, max_length=MOST_INDEX))
    except (lzma.LZMAError, EOFError, ValueError, RecursionError):
        raise DamagedFile(path, "its index cannot be read") from None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise DamagedFile(path, "its index is no list of files")
    names = [name for name, _, _ in entries]
    if any(not NAME.fullmatch(name) or name == files.MANIFEST for name in names):
        raise HostileInput(
            f"{path} names a file that a model has not: outside of its folder, or odd"
        )
    if len({*names}) != len(names) or len(names) > 100:
        raise DamagedFile(path, "its index names a file twice")
    return [(name, size, stored) for name, size, stored in entries]


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in entry[1:])
