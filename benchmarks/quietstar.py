"""Do thoughts help? Phase 3 on a champion of Phases 1 and 2, with controls, over three seeds.

    python benchmarks/quietstar.py --work W                 everything that is missing, cell by cell
    python benchmarks/quietstar.py --work W --study tiny    one study
    python benchmarks/quietstar.py --tables                 write the tables from what is there

W keeps the champions (`forge run --preset P`, made once for each preset) and the runs of Phase 3. A
cell is a study and a seed: the model with thoughts and, but for `tiny`, one that was trained to
answer directly and one that was trained with pauses, each for as many steps on the same items,
judged on 700 unseen items of each family. `tiny` and `small` are presets; `addition` is sums of
three digits in `tiny`, where direct answers are a fair rival. CPU seconds are those of the whole
phase. A run that was interrupted goes on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from results import command, run_phase

from agent_forge.contract.phase import ModelRef
from agent_forge.phases import IMPLEMENTED
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store.records import read_metadata

NAME = "quietstar"
SEEDS = {"tiny": (1, 2, 3), "small": (1, 2, 3), "addition": (1,)}
ITEMS = 700
LATER = [name for name in list(IMPLEMENTED)[3:] if name != "toy"]  # phases behind the champion's
STUDIES: dict[str, tuple[str, dict[str, Any]]] = {  # preset, and what is set of the phase
    "tiny": ("tiny", {}),
    "small": ("small", {}),
    "addition": ("tiny", {"levels": {"addition": [10, 14]}, "strategies": ["step"], "turns": {}}),
}


def champion(work: Path, preset: str) -> ModelRef:
    """The champion of Phases 1 and 2, made once."""
    path = work / "sessions" / preset / "phase2_evomerge" / "champion"
    if not (path / "manifest.json").exists():
        begun = (work / "sessions" / preset / "session.json").exists()
        words = ["resume", preset] if begun else ["run", "--preset", preset, "--session", preset]
        for key in ("runtime.threads=1", *(f"phases.{name}.enabled=false" for name in LATER)):
            words += [] if begun else ["--set", key]
        words += ["--storage", str(work)]
        subprocess.run([sys.executable, "-m", "agent_forge", *words], check=True)
    return ModelRef("champion", path, read_metadata(path).model_dump())


def thinking(work: Path, study: str, seed: int) -> dict[str, Any]:
    """One run of Phase 3, and what it measured."""
    preset, own = STUDIES[study]
    given, session = champion(work, preset), f"{study}_{seed}"
    begun = (work / "sessions" / session / "session.json").exists()
    sets = (f"storage.root={work}", f"runtime.seed={seed}", "runtime.threads=1")
    controls = str(study != "tiny").lower()
    sets += (f"phases.quietstar.controls={controls}", f"phases.quietstar.thought_items={ITEMS}")
    config = load_config(preset=preset, sets=sets)
    phase = config.phases.quietstar.model_copy(update=own)
    phases = config.phases.model_copy(update={"quietstar": phase})
    config = config.model_copy(update={"phases": phases})
    run = PipelineOrchestrator(config=config, session_id=session, resume=begun)
    cpu, wall = time.process_time(), time.monotonic()
    outcome = run.run(only="quietstar", input_models=None if begun else [given])
    assert outcome["success"], outcome
    artifacts = outcome["results"]["quietstar"].artifacts
    accuracy, strategies, targets = artifacts["tables"][:3]
    head = accuracy[0][1:]
    return {
        "accuracy": {row[0]: dict(zip(head, row[1:], strict=True)) for row in accuracy[1:]},
        "strategies": {row[0]: row[1:] for row in strategies[1:]},
        "targets": {row[0]: row[2] for row in targets[1:]},
        "verdict": artifacts["headline"]["verdict"],
        "theatre": artifacts["theatre"]["theatre"],
        "resumed": begun,
        "cpu_s": round(time.process_time() - cpu),
        "wall_s": round(time.monotonic() - wall),
    }


def reasoning(work: Path, preset: str, seed: int) -> Path:
    """The model of Phase 3 that studies of later phases begin with; made if it is not there yet,
    without controls and judged briefly."""
    session = f"{preset}_{seed}"
    path = work / "sessions" / session / "phase3_quietstar" / "reasoning"
    if not (path / "manifest.json").exists():
        sets = ("phases.quietstar.controls=false", "phases.quietstar.thought_items=300")
        run_phase(work, "quietstar", session, champion(work, preset).path, preset, seed, sets)
    return path


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, seeds in SEEDS.items():
        for seed in seeds if study in (None, name) else ():
            yield {"study": name, "seed": seed}, partial(thinking, work, name, seed)


def thinking_table(rows: list[dict[str, Any]]) -> list[str]:
    """Right answers on unseen items, by study, seed and family."""
    if not rows:
        return ["(not measured yet)"]
    columns = ("own", "none", "shuffled", "random digits", "filler", "trained direct")
    columns += ("trained pause", "follows a changed step", "stays right")
    head = ["study, seed", "family", *columns]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        for family, found in row["accuracy"].items():
            values = " | ".join(_per_cent(found.get(c, "-")) for c in columns)
            lines.append(f"| {row['study']}, {row['seed']} | {family} | {values} |")
    return lines


def _per_cent(share: float | str) -> str:
    return share if isinstance(share, str) else f"{100 * share:.1f}"


def strategy_table(rows: list[dict[str, Any]]) -> list[str]:
    """Accuracy, form and exact thoughts of every strategy."""
    if not rows:
        return ["(not measured yet)"]
    lines = ["| study, seed | strategy | accuracy | asked for | in its form | exact | tokens |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        for name, (accuracy, asked, form, exact, tokens) in row["strategies"].items():
            shares = " | ".join(f"{100 * x:.1f}" for x in (accuracy, asked, form, exact))
            told = f"{row['study']}, {row['seed']}"
            lines.append(f"| {told} | {name} | {shares} | {tokens:.0f} |")
    return lines


if __name__ == "__main__":
    tables = {"thinking": thinking_table, "strategies": strategy_table}
    command(str(__doc__), NAME, list(STUDIES), cells, tables, "quietstar.md")
