"""What the built-in tools of tools.py do: calc, python, read, find and conv.

All but `python`, which runs in the sandbox, run in this process: their work has a bound.
"""

import ast
import csv
import io
import itertools
import json
import math
import operator
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from agent_forge import platform, sandbox
from agent_forge.config import strict_json
from agent_forge.errors import ForgeError

EXPRESSION = re.compile(r"[0-9eE.+*/%() -]{1,400}")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,9}))?")
MAX_EXPONENT = 400
MAX_BITS = 1024  # of a numerator or denominator: about 300 digits, which fit into a result
FILE_BYTES = 10 << 20  # of a file that is read, and of all files that are searched
OUTPUT_BYTES = 1 << 16  # that a program may print
TEXT_SUFFIXES = (".txt", ".md", ".json", ".csv")
MAX_ENTRIES = 10_000  # files and folders that are looked at
MAX_HITS = 5
SHOWN_KEYS = 10
LINE_CHARACTERS, BEFORE_HIT = 80, 30  # of a line that is shown
# unit -> what it measures, its size in the base unit, and what is added to an amount before
UNITS: dict[str, tuple[str, str, str]] = {
    "mm": ("length", "0.001", "0"),
    "cm": ("length", "0.01", "0"),
    "m": ("length", "1", "0"),
    "km": ("length", "1000", "0"),
    "inch": ("length", "0.0254", "0"),
    "foot": ("length", "0.3048", "0"),
    "yard": ("length", "0.9144", "0"),
    "mile": ("length", "1609.344", "0"),
    "g": ("mass", "1", "0"),
    "kg": ("mass", "1000", "0"),
    "oz": ("mass", "28.349523125", "0"),
    "lb": ("mass", "453.59237", "0"),
    "ml": ("volume", "1", "0"),
    "l": ("volume", "1000", "0"),
    "s": ("time", "1", "0"),
    "min": ("time", "60", "0"),
    "h": ("time", "3600", "0"),
    "day": ("time", "86400", "0"),
    "k": ("temperature", "1", "0"),
    "c": ("temperature", "1", "273.15"),
    "f": ("temperature", "5/9", "459.67"),
}
FAILURES = {"memory": "it needs too much memory", "output": "it printed too much"}


class ToolError(ForgeError):
    """A tool cannot do what it was asked; the model is told why."""


def read_file(path: Path, limit: int, folder: Path | None = None) -> bytes:
    """The content of a regular file; a pipe is not waited for, a large file not read. Below a
    `folder` no part of the path is a link, not even one that somebody puts there just now."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | platform.NO_FOLLOW | platform.BINARY
    if folder is None or os.open not in os.supports_dir_fd:
        fd = os.open(path, flags)
    else:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for part in path.relative_to(folder).parts:
            try:
                inner = os.open(part, flags, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ToolError(f"{path.name} is not a file")
        if status.st_size > limit:
            raise ToolError(f"{path.name} is larger than {limit >> 20} MB")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(fd)


def calc(expression: str) -> str:
    """The value of an arithmetic expression."""
    expression = expression.strip()
    if not EXPRESSION.fullmatch(expression):
        raise ToolError("an expression has numbers, + - * / // % ** and parentheses only")
    try:
        return number_text(_value(ast.parse(expression, mode="eval").body, expression))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is out of range") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is not an arithmetic expression") from None


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a part of an expression; of any number that grows too long, an error."""
    match node:
        case ast.Constant(value=int() | float()):
            return exact(ast.get_source_segment(text, node) or "")  # as written: 0.1 + 0.2 is 0.3
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            return -_value(inner, text) if isinstance(sign, ast.USub) else _value(inner, text)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
            values = _value(left, text), _value(right, text)
            return _bounded(Fraction(OPERATORS[type(kind)](*values)))
    raise ToolError("this is not an arithmetic expression")


def exact(text: str) -> Fraction:
    """The number that a text writes, if it is neither too large nor too small."""
    found = NUMBER.fullmatch(text)
    if not found:
        raise ToolError(f"{text[:40]!r} is no number")
    if len(text) > MAX_BITS or abs(int(found[1] or 0)) > MAX_EXPONENT:
        raise OverflowError
    return _bounded(Fraction(text))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = float(base) ** float(exponent)
        if isinstance(root, complex):
            raise ToolError("the root of a negative number")
        near = Fraction(round(root))  # a root that is a whole number is that number
        size = max(_bits(near) * exponent.denominator, _bits(base) * abs(exponent.numerator))
        if size <= MAX_BITS and near**exponent.denominator == base**exponent.numerator:
            return near
        return Fraction(repr(root))
    if (_bits(base) - 1) * abs(exponent) > MAX_BITS:
        raise OverflowError
    return base**exponent.numerator


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _bounded(number: Fraction) -> Fraction:
    if _bits(number) > MAX_BITS:
        raise OverflowError
    return number


def number_text(number: Fraction) -> str:
    """A number in digits: exact if it is whole, otherwise with the precision of a float."""
    if _bounded(number).denominator == 1:
        return str(number.numerator)
    return repr(float(number)).removesuffix(".0")


def conv(amount: str, unit: str, to: str) -> str:
    """An amount in another unit of the same quantity."""
    for name in (unit, to):
        if name.lower() not in UNITS:
            raise ToolError(f"there is no unit {name[:40]!r}; there are: {', '.join(UNITS)}")
    (quantity, size, shift), (other, new_size, new_shift) = UNITS[unit.lower()], UNITS[to.lower()]
    if quantity != other:
        raise ToolError(f"{unit} is a {quantity}, {to} is a {other}")
    try:
        base = (exact(amount) + Fraction(shift)) * Fraction(size)
        if quantity == "temperature" and base < 0:
            raise ToolError(f"{amount[:40]} {unit} is below absolute zero")
        return number_text(base / Fraction(new_size) - Fraction(new_shift))
    except OverflowError:
        raise ToolError("the number is out of range") from None


def run_python(code: str, time_limit_s: float) -> str:
    """What a program prints, run in the sandbox."""
    limits = sandbox.SandboxLimits(
        cpu_seconds=math.ceil(time_limit_s),
        wall_seconds=time_limit_s,
        output_bytes=OUTPUT_BYTES,
    )
    result = sandbox.run(code, limits=limits)
    if result.status == "ok":
        return result.stdout
    if result.status == "timeout":
        raise ToolError(f"it took longer than {time_limit_s:g} s")
    ended = f"it ended with exit code {result.exit_code}"
    told = [ended, *result.stderr.strip().splitlines()]
    raise ToolError(FAILURES.get(result.status, told[-1]))


def _require(folder: Path | None) -> Path:
    if folder is None:
        raise ToolError("no folder was given")
    return folder.resolve()


def read_inside(root: Path, name: str | Path, limit: int) -> str:
    """The text of a file in the folder `root`; whatever leads out of the folder is refused."""
    shown = str(name)[:100]
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ToolError(f"{shown!r} is outside the folder")
        return read_file(path, limit, root).decode("utf-8-sig", "replace")
    except (OSError, ValueError, RuntimeError):  # missing, no name of a file, links in a circle
        raise ToolError(f"there is no file {shown!r} that can be read") from None


def read_value(folder: Path | None, file: str, key: str, field: str = "") -> str:
    """The value of a key in a file, or of a field of it."""
    root = _require(folder)
    if not file.endswith((".json", ".csv")):
        raise ToolError("only .json and .csv files can be read")
    text = read_inside(root, file, FILE_BYTES)
    try:
        value = _csv_row(text, key) if file.endswith(".csv") else _first(_json_rows(text), key)
    except (ValueError, csv.Error) as error:
        raise ToolError(f"{file[:100]} is damaged: {error}") from None
    if field:
        value = _first(value.items() if isinstance(value, dict) else (), field)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first(pairs: Iterable[tuple[str, Any]], wanted: str) -> Any:
    """The value of the first pair with this key."""
    others: list[str] = []
    for key, value in pairs:
        if key == wanted:
            return value
        if len(others) < SHOWN_KEYS:
            others.append(key)
    there = f"there are: {', '.join(others)}" if others else "there are none"
    raise ToolError(f"there is no {wanted[:40]!r}; {there}")


def _csv_row(text: str, key: str) -> dict[str, str]:
    """The row of a table whose first column is the key."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = [name.strip() for name in next(reader, [])]
    if len(set(names)) < len(names):
        raise ValueError("two columns have one name")
    row = _first(((row[0], row) for row in reader if row), key)
    return dict(zip(names, row, strict=False))


def _json_rows(text: str) -> Iterator[tuple[str, Any]]:
    """The values of an object by their keys; rows of a list by `name` or what stands first."""
    value = strict_json.parse(text, str)  # numbers as they are written
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list) and all(isinstance(row, dict) and row for row in value):
        yield from ((str(row.get("name", next(iter(row.values())))), row) for row in value)
    else:
        raise ValueError("it has neither an object nor a list of objects")


def find_lines(folder: Path | None, text: str, time_limit_s: float) -> str:
    """The first lines that contain a text, in any case, with their places."""
    root, wanted = _require(folder), text.strip().lower()
    if not wanted:
        raise ToolError("there is no text to look for")
    hits: list[str] = []
    deadline, left, complete = time.monotonic() + time_limit_s, FILE_BYTES, True
    for place in _text_files(root):
        if place is None or time.monotonic() > deadline:
            complete = False
            break
        try:
            content = read_inside(root, place, left)
        except ToolError:  # too large; or it is a link or a pipe
            complete = complete and (place.is_symlink() or not place.is_file())
            continue
        left -= len(content)
        found = _hits(place.relative_to(root).as_posix(), content, wanted)
        hits += itertools.islice(found, MAX_HITS)
        if len(hits) >= MAX_HITS:
            break
    if not hits and not complete:
        raise ToolError("nothing found, but the folder is too large to look at all of it")
    return "\n".join(hits[:MAX_HITS]) or "nothing found"


def _hits(name: str, content: str, wanted: str) -> Iterator[str]:
    if wanted not in content.lower():
        return
    for number, line in enumerate(content.split("\n"), start=1):
        at = line.lower().find(wanted)
        if at >= 0:
            start = max(0, at - BEFORE_HIT) if len(line) > LINE_CHARACTERS else 0
            yield f"{name}:{number}: {line[start : start + LINE_CHARACTERS].strip()}"


def _text_files(root: Path) -> Iterator[Path | None]:
    """The text files of a folder and below, in order; None if there are too many to look at."""
    waiting, left = [root], MAX_ENTRIES
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                found = sorted(itertools.islice(entries, left + 1), key=lambda entry: entry.name)
        except OSError:  # it may not be read
            continue
        left -= len(found)
        if left < 0:
            yield None
            return
        yield from (Path(entry) for entry in found if entry.name.endswith(TEXT_SUFFIXES))
        folders = [Path(entry) for entry in found if entry.is_dir(follow_symlinks=False)]
        waiting += reversed(folders)
