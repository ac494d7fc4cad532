"""What commands print: one JSON document, or a plain table."""

import json
import time
from collections.abc import Sequence
from typing import Any

from agent_forge.track.progress import size as size  # of a file, as people read it

SCHEMA_VERSION = 1


def emit(as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[Any]], **data: Any) -> None:
    """Print the data as a JSON document or, if there are any, the rows as a table."""
    if as_json:
        emit_json(**data)
    elif rows:
        emit_table(columns, rows)


def emit_json(**content: Any) -> None:
    """Print one JSON document; `schema_version` changes when a field changes its meaning."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2, default=str))


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under aligned column names; what was not measured shows as `-`."""
    lines = [list(columns)]
    lines += [["-" if cell is None or cell == "" else plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())


def plain(value: Any, kept: str = "") -> str:
    """Return a value as text without control characters, which could rewrite the screen."""
    return "".join(c if c.isprintable() or c in kept else "?" for c in str(value))


def when(epoch_s: float | None) -> str | None:
    """Return a time as people read it, in UTC; None if it is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(epoch_s)) if epoch_s else None
    except (TypeError, ValueError, OverflowError, OSError):
        return None
