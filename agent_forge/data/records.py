"""Rows from files: JSON, JSONL (also gzipped), CSV, plain text and, with pyarrow, Parquet.

What is wrong with a file is said with its line and, for a wrong encoding, its byte.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.errors import ConfigError, DamagedFile

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".tokens", ".parquet")
LINE_BYTES = 64 << 20
JSON_BYTES = 1 << 30
PIECE_CHARACTERS = 2000  # plain text is cut at line ends into documents of about this size
END_LINE = "<|endoftext|>"
UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Row:
    """One row of a file, which knows where it stands."""

    value: Any
    path: Path
    where: str

    def damaged(self, problem: str) -> DamagedFile:
        return DamagedFile(self.path, f"{self.where}: {problem}")

    def has(self, name: str) -> bool:
        return isinstance(self.value, Mapping) and self.value.get(name) is not None

    def get(self, *names: str) -> Any:
        """The first of these fields that is there."""
        if not isinstance(self.value, Mapping):
            raise self.damaged(f"{type(self.value).__name__} where an object with fields belongs")
        for name in names:
            if self.value.get(name) is not None:
                return self.value[name]
        raise self.damaged(f"field {' or '.join(map(repr, names))} is missing")

    def text(self, *names: str) -> str:
        """The first of these fields, which has to be text that is not blank."""
        return self.checked(self.get(*names), names[0])

    def checked(self, value: Any, name: str) -> str:
        """A value as text with plain line ends; numbers and booleans are written out."""
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int | float):
            value = str(int(value)) if value == value // 1 else repr(value)
        if not isinstance(value, str):
            raise self.damaged(f"field {name!r} is {type(value).__name__}, text is expected")
        if not value.strip():
            raise self.damaged(f"field {name!r} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.damaged(f"field {name!r} has half a surrogate pair") from None
        return value.replace("\r\n", "\n").replace("\r", "\n")

    def index(self, name: str, size: int) -> int:
        """A field that counts from 0 into `size` choices."""
        value = self.get(name)
        if not str(value).isdecimal() or int(value) >= size:
            raise self.damaged(f"field {name!r} is {value!r}, 0 to {size - 1} is expected")
        return int(value)


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by its suffix; a file without any is damaged."""
    kinds = {".json": _json, ".csv": _csv, ".txt": _text, ".tokens": _text, ".parquet": _parquet}
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        made = _jsonl(path)
    elif path.suffix in kinds:
        made = kinds[path.suffix](path)
    else:
        raise ConfigError(f"{path}: cannot read {path.suffix!r}; known: {', '.join(SUFFIXES)}")
    first = next(made, None)
    if first is None:
        raise DamagedFile(path, "it is empty")
    yield from itertools.chain([first], made)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers: UTF-8, of sane length, without NUL."""
    offset = 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as reader:
        for number in itertools.count(1):
            content = _line(reader, path, number)
            if not content:
                return
            if number == 1 and content.startswith(UTF16):
                raise DamagedFile(path, "it is UTF-16", hint="save it as UTF-8")
            try:
                text = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DamagedFile(
                    path,
                    f"line {number}: byte {offset + error.start} is not UTF-8",
                    hint="save it as UTF-8",
                ) from None
            if "\0" in text:
                raise DamagedFile(path, f"line {number}: a NUL byte; it is no text file")
            offset += len(content)
            yield number, text


def _line(reader: io.BufferedIOBase, path: Path, number: int) -> bytes:
    try:
        content = reader.readline(LINE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedFile(path, f"line {number}: broken gzip ({error})") from error
    if len(content) > LINE_BYTES:
        raise DamagedFile(path, f"line {number} is longer than {LINE_BYTES >> 20} MiB")
    return content


def _parse(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"{where}not readable as JSON ({error})") from None


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in lines(path):
        if line.strip():
            where = f"line {number}"
            yield Row(_parse(line, path, f"{where}: "), path, where)


def _json(path: Path) -> Iterator[Row]:
    """A list, an object that holds one list, or an object whose values are the rows."""
    if path.stat().st_size > JSON_BYTES:
        raise DamagedFile(path, f"larger than {JSON_BYTES >> 30} GiB", hint="save it as JSONL")
    text = "".join(line for _, line in lines(path))
    if not text.strip():
        return
    value = _parse(text, path, "")
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else list(value.values())
    if not isinstance(value, list):
        raise DamagedFile(path, "a list of rows is expected")
    for number, item in enumerate(value, start=1):
        yield Row(item, path, f"item {number}")


def _csv(path: Path) -> Iterator[Row]:
    reader = csv.DictReader((line for _, line in lines(path)), strict=True)
    try:
        for value in reader:
            yield Row(value, path, f"line {reader.line_num}")
    except csv.Error as error:
        raise DamagedFile(path, f"line {reader.reader.line_num}: {error}") from None


def _text(path: Path) -> Iterator[Row]:
    """Documents of plain text: cut at end-of-text lines, else at line ends after some size."""
    piece: list[str] = []
    start, size = 1, 0
    for number, line in lines(path):
        ends = line.strip() == END_LINE
        if not ends:
            piece.append(line)
            size += len(line)
        if ends or size >= PIECE_CHARACTERS:
            if "".join(piece).strip():
                yield Row({"text": "".join(piece)}, path, f"line {start}")
            piece, start, size = [], number + 1, 0
    if "".join(piece).strip():
        yield Row({"text": "".join(piece)}, path, f"line {start}")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"reading {path} needs pyarrow", hint="pip install 'agent-forge[data]'"
        ) from None
    number = itertools.count(1)
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for value in batch.to_pylist():
                yield Row(value, path, f"row {next(number)}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedFile(path, f"not readable as Parquet ({error})") from error
