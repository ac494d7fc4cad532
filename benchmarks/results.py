"""Where benchmarks write: one JSON line a cell, with date, commit and machine."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_forge.contract.phase import ModelRef, PhaseResult
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.environment import snapshot
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.records import read_metadata

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


def run_phase(
    work: Path, phase: str, session: str, given: Path, preset: str, seed: int, sets: Sequence[str]
) -> tuple[PhaseResult, dict[str, Any]]:
    """One run of a phase alone on a given model; one that was interrupted goes on. Returns its
    result, and what it took."""
    session = "".join(c if c.isalnum() else "_" for c in session.lower())
    begun = (work / "sessions" / session / "session.json").exists()
    sets = (f"storage.root={work}", f"runtime.seed={seed}", "runtime.threads=1", *sets)
    run = PipelineOrchestrator(
        config=load_config(preset=preset, sets=sets), session_id=session, resume=begun
    )
    model = ModelRef(given.name, given, read_metadata(given).model_dump())
    cpu = time.process_time()
    outcome = run.run(only=phase, input_models=None if begun else [model])
    assert outcome["success"], outcome
    return outcome["results"][phase], {
        "verdict": outcome["results"][phase].artifacts["headline"]["verdict"],
        "resumed": begun,
        "cpu_s": round(time.process_time() - cpu),
    }


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
    files.write_bytes(path, (before + mark + "\n".join(lines) + "\n" + end + after).encode())


def command(
    doc: str,
    benchmark: str,
    studies: Sequence[str],
    cells: Callable[[Path, str | None], Iterable[tuple[dict[str, Any], Callable[[], Any]]]],
    tables: Mapping[str, Callable[[list[dict[str, Any]]], list[str]]],
    page: str,
) -> None:
    """The command of a benchmark: measure the cells that are missing, write the tables."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("evomerge-bench"))
    parser.add_argument("--study", choices=studies)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if not asked.tables:
        for cell, work in cells(asked.work.absolute(), asked.study):
            if not any(cell.items() <= r.items() for r in done(benchmark)):
                record(benchmark, cell, work())
    rows = done(benchmark)
    for name, table in tables.items():
        lines = table(rows)
        print("\n".join(["", *lines]))
        write_section(page, name, lines)
