"""Where benchmarks write: one JSON line a cell, with date, commit and machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agent_forge.pipeline.environment import snapshot
from agent_forge.store import files

RESULTS = Path(__file__).resolve().parent / "results"


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


def recorded(benchmark: str) -> list[dict[str, Any]]:
    """The cells that this commit already has from this machine: they need no second run."""
    path = RESULTS / f"{benchmark}.jsonl"
    machine = snapshot()
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        line
        for line in lines
        if (line["commit"], line["cpu"]) == (machine["git_commit"], machine["cpu"])
    ]
