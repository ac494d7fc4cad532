"""Where benchmarks write: one JSON line a cell, with date, commit and machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agent_forge.pipeline.environment import snapshot
from agent_forge.store import files

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = RESULTS.parent.parent / "docs"


def record(benchmark: str, cell: dict[str, Any], values: dict[str, Any]) -> None:
    """Append a finished cell and show it."""
    machine = snapshot()
    line = {
        "benchmark": benchmark,
        **cell,
        **values,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": machine["git_commit"],
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": machine["packages"]["torch"],
    }
    files.append(RESULTS / f"{benchmark}.jsonl", json.dumps(line).encode() + b"\n")
    print(json.dumps({**cell, **values}))


def done(benchmark: str) -> list[dict[str, Any]]:
    """The cells that were measured already."""
    path = RESULTS / f"{benchmark}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_section(page: str, name: str, lines: list[str]) -> None:
    """Put lines between the marks `<!-- name -->` and `<!-- /name -->` of a page in docs."""
    path = DOCS / page
    before, mark, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not mark or not end:
        raise ValueError(f"{page} has no place for {name!r}")
    files.write_text(path, before + mark + "\n".join(lines) + "\n" + end + after)
