"""Rows from files: JSON, JSONL (also gzipped), CSV, plain text and, with pyarrow, Parquet.

Errors name the line. The size of a row is limited: no file takes more memory than the model.
"""

import csv
import gzip
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.config import strict_json
from agent_forge.errors import ConfigError, DamagedFile, HostileInput

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".tokens", ".parquet")
LINE_BYTES = 64 << 20
JSON_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 18  # of a text that a model is given: a prompt, an answer, a conversation
MAX_ENTRIES = 1000  # of a list in a row: choices, messages, tests
PIECE_CHARACTERS = 2000  # plain text is cut at line ends into documents of about this size
MAX_GROWTH, ALLOWED_GROWTH = 100, 1 << 20  # of a gzip: times its size, and bytes in any case
END_LINE = "<|endoftext|>"


@dataclass(frozen=True)
class DataRow:
    """One row of a file; `where` names its place in the file for error messages."""

    value: Any
    path: Path
    where: str

    def damaged(self, problem: str, hint: str = "") -> DamagedFile:
        return DamagedFile(self.path, f"{self.where}: {problem}", hint=hint)

    def has(self, name: str) -> bool:
        return isinstance(self.value, Mapping) and self.value.get(name) is not None

    def get(self, *names: str) -> Any:
        """The value of the first of these fields that exists."""
        if not isinstance(self.value, Mapping):
            raise self.damaged(f"{type(self.value).__name__} where an object with fields belongs")
        for name in names:
            if self.value.get(name) is not None:
                return self.value[name]
        raise self.damaged(f"field {' or '.join(map(repr, names))} is missing")

    def text(self, *names: str) -> str:
        """The first of these fields as text; blank text is an error."""
        return self.checked(self.get(*names), names[0])

    def checked(self, value: Any, name: str) -> str:
        """A value as text with plain line ends; numbers and booleans are written out."""
        if isinstance(value, float) and not math.isfinite(value):
            raise self.damaged(f"field {name!r} is {value}, which is no number")
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
        self.refuse_long(value, f"field {name!r}")
        return value.replace("\r\n", "\n").replace("\r", "\n")

    def refuse_long(self, text: str, what: str) -> None:
        if len(text) > MAX_CHARACTERS:
            problem = f"{what} has {len(text):,} characters, at most {MAX_CHARACTERS:,} are read"
            raise self.damaged(problem, "split it into several rows")

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        return tuple(self.checked(entry, name) for entry in self.entries(name, optional=optional))

    def entries(self, name: str, *, optional: bool = False) -> list[Any]:
        """A field that must be a list of at most MAX_ENTRIES; `optional`: empty if missing."""
        value = self.value.get(name) or [] if optional else self.get(name)
        if not isinstance(value, list):
            raise self.damaged(f"field {name!r} is not a list")
        if len(value) > MAX_ENTRIES:
            count = f"{len(value):,} entries, at most {MAX_ENTRIES:,} are read"
            raise self.damaged(f"field {name!r} has {count}")
        return value

    def index(self, name: str, size: int) -> int:
        """A field that is the number of a choice, from 0 to `size` - 1."""
        value = self.get(name)
        if not str(value).isdecimal() or int(value) >= size:
            raise self.damaged(f"field {name!r} is {value!r}, 0 to {size - 1} is expected")
        return int(value)


def rows(path: Path) -> Iterator[DataRow]:
    """The rows of a file, by its suffix; a file without any is damaged."""
    if path.exists() and not path.is_file():  # a pipe could be waited for without end
        raise ConfigError(f"{path} is not a file", hint="save what comes from it in one")
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"{path}: cannot read {path.suffix!r}; known: {', '.join(SUFFIXES)}")
    readers = {".json": _json, ".csv": _csv, ".txt": _text, ".tokens": _text, ".parquet": _parquet}
    row = None
    for row in readers.get(path.suffix, _jsonl)(path):
        yield row
    if row is None:
        raise DamagedFile(path, "it is empty")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers: UTF-8, of sane length, without NUL."""
    offset = 0
    try:
        raw = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    with raw, gzip.open(raw) if path.suffix == ".gz" else raw as reader:
        for number in itertools.count(1):
            try:
                content = reader.readline(LINE_BYTES + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DamagedFile(path, f"line {number}: broken gzip ({error})") from error
            if not content:
                return
            if len(content) > LINE_BYTES:
                raise DamagedFile(path, f"line {number} is longer than {LINE_BYTES >> 20} MiB")
            if number == 1 and content.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DamagedFile(path, "it is UTF-16", hint="save it as UTF-8")
            try:
                text = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                problem = f"line {number}: byte {offset + error.start} is not UTF-8"
                raise DamagedFile(path, problem, hint="save it as UTF-8") from None
            if "\0" in text:
                raise DamagedFile(path, f"line {number}: a NUL byte; it is no text file")
            offset += len(content)
            if offset > ALLOWED_GROWTH and offset > MAX_GROWTH * raw.tell():
                problem = f"{path} grows more than {MAX_GROWTH}-fold when it is unpacked"
                raise HostileInput(problem, hint="unpack it yourself and look at what it holds")
            yield number, text


def _parse(text: str, path: Path, where: str) -> Any:
    try:
        return strict_json.parse(text)
    except ValueError as error:
        raise DamagedFile(path, f"{where}not readable as JSON ({error})") from None


def _jsonl(path: Path) -> Iterator[DataRow]:
    for number, line in lines(path):
        if line.strip():
            yield DataRow(_parse(line, path, f"line {number}: "), path, f"line {number}")


def _json(path: Path) -> Iterator[DataRow]:
    """A list, an object that holds one list, or an object whose values are the rows."""
    if path.stat().st_size > JSON_BYTES:
        raise DamagedFile(path, f"larger than {JSON_BYTES >> 30} GiB", hint="save it as JSONL")
    text = "".join(line for _, line in lines(path))
    if not text.strip():
        return
    value = _parse(text, path, "")
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        asks = any(isinstance(value.get(name), str) for name in ("prompt", "question", "text"))
        row = asks or isinstance(value.get("messages"), list)  # the object is a row itself
        others = [name for name, item in value.items() if isinstance(item, dict)]
        if not row and len(lists) == 1 and others:
            problem = f"it holds one list, and beside it {others[0]!r}: which of them are the rows?"
            raise DamagedFile(path, problem, hint="save the rows alone, as a list or as JSONL")
        value = [value] if row else lists[0] if len(lists) == 1 else list(value.values())
    if not isinstance(value, list):
        raise DamagedFile(path, "a list of rows is expected")
    for number, item in enumerate(value, start=1):
        yield DataRow(item, path, f"item {number}")


def _csv(path: Path) -> Iterator[DataRow]:
    reader = csv.DictReader((line for _, line in lines(path)), strict=True)
    try:
        names = reader.fieldnames or []
        if len({*names}) < len(names):
            raise DamagedFile(path, "two of its columns have the same name")
        for value in reader:
            if None in value:  # where csv puts the cells that are too many
                raise DamagedFile(path, f"line {reader.line_num} has more cells than columns")
            yield DataRow(value, path, f"line {reader.line_num}")
    except csv.Error as error:
        raise DamagedFile(path, f"line {reader.reader.line_num}: {error}") from None


def _text(path: Path) -> Iterator[DataRow]:
    for start, piece in pieces(lines(path)):
        yield DataRow({"text": piece}, path, f"line {start}")


def pieces(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Documents of plain text, each with the number of its first line."""
    piece: list[str] = []
    start, size = 0, 0
    parts = ((n, part) for n, line in numbered for part in _short(line))
    for number, part in itertools.chain(parts, [(0, END_LINE)]):
        ends = part.strip() == END_LINE
        if not ends:
            start = start or number
            piece.append(part)
            size += len(part)
        if ends or size >= PIECE_CHARACTERS:
            if (text := "".join(piece)).strip():
                yield start, text
            piece, start, size = [], 0, 0


def _short(line: str) -> Iterator[str]:
    """A line as it is, or in pieces that end behind spaces if it is very long."""
    start = 0
    if len(line) + PIECE_CHARACTERS > MAX_CHARACTERS:  # the lines before it may be as long
        while len(line) - start > PIECE_CHARACTERS:
            end = start + PIECE_CHARACTERS
            end = line.rfind(" ", start, end) + 1 or end
            yield line[start:end]
            start = end
    yield line[start:]


def _parquet(path: Path) -> Iterator[DataRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        hint = "pip install 'agent-forge[data]'"
        raise ConfigError(f"reading {path} needs pyarrow", hint=hint) from None
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        values = (value for batch in batches for value in batch.to_pylist())
        for number, value in enumerate(values, start=1):
            yield DataRow(value, path, f"row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedFile(path, f"not readable as Parquet ({error})") from error
