"""Whether evolving pays: the champion on unseen items against everything it has to beat.

    python benchmarks/evomerge.py --work W                     everything that is missing
    python benchmarks/evomerge.py --work W --study tiny        one study
    python benchmarks/evomerge.py --tables                     write the tables from what is there

Studies: `tiny` and `small` train Phase 1 (three seeds, one for `small`) and evolve its specialists;
`operators` evolves the first seed's again, each time without one operator, at equal evaluations.
A cell that was measured is not measured again; W keeps models between calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from results import done, record, write_section

from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolve import Job, evolve
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.platform import peak_memory_bytes

NAME = "evomerge"
SEEDS = {"tiny": (1, 2, 3), "small": (1,)}
GENERATIONS = {"tiny": 20, "small": 30}
RIVALS = {
    "best parent": "best parent",
    "base": "trunk",
    "plain average": "plain average",
    "best combo of generation 0": "generation 0",
    "joint training": "joint training",
}
WITHOUT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "noise alone": {"recipe_mutation": 0.0},
    "recipe alone": {"recipe_mutation": 1.0},
    "small steps": {"shift_sigma": 0.03},
    "large steps": {"shift_sigma": 0.3},
}


def specialists(preset: str, seed: int, work: Path) -> str:
    """The session of Phase 1 with this preset and seed; trained if it is not there."""
    session = f"{preset}_{seed}"
    config = load_config(
        preset=preset, sets=(f"runtime.seed={seed}", f"storage.root={work}", "runtime.threads=1")
    )
    there = (work / "sessions" / session).exists()
    outcome = PipelineOrchestrator(config=config, session_id=session, resume=there).run(
        only="cognate"
    )
    if not outcome["success"]:
        raise SystemExit(f"{session}: {outcome['error']}")
    return session


def evolved(preset: str, seed: int, work: Path, name: str, **changes: Any) -> dict[str, Any]:
    """One evolution of Phase 1's specialists, and what came out on unseen items."""
    torch.set_num_threads(1)
    session = specialists(preset, seed, work)
    level = load_config(preset=preset).phases.evomerge.max_level
    settings = EvoMergeSettings(
        generations=GENERATIONS[preset], max_level=level, early_stopping=False, **changes
    )
    job = Job.of(settings, [session], None, seed, work / f"evo_{preset}_{seed}_{name}", work)
    began = time.process_time()
    outcome = evolve(job)
    assert outcome.conclusion is not None
    found = outcome.conclusion
    values: dict[str, Any] = {
        "cpu_s": round(time.process_time() - began, 1),
        "seconds": {k: round(v, 1) for k, v in outcome.seconds.items()},
        "peak_mb": round(peak_memory_bytes() / 1e6),
        "origin": outcome.origin,
        "quality": round(found.champion.quality, 5),
        "accuracy": round(found.champion.parts["accuracy"], 5),
        "curve": [round(value, 5) for value in outcome.curve],
    }
    for rival, short in RIVALS.items():
        other = found.rivals.get(found.best_parent if rival == "best parent" else rival)
        if other is None:
            continue
        gain = other.comparison.overall.gains["accuracy"]
        values[short] = {
            "quality": round(other.score.quality, 5),
            "accuracy": round(other.score.parts["accuracy"], 5),
            "gain": [round(x, 5) for x in (gain.value, gain.low, gain.high)],
            "p": gain.p,
            "n": gain.n,
        }
    return values


def cells(work: Path, study: str | None) -> Iterator[tuple[dict[str, Any], Any]]:
    for preset, seeds in SEEDS.items():
        for seed in seeds:
            if study in (None, preset):
                cell = {"study": preset, "seed": seed}
                yield cell, lambda p=preset, s=seed: evolved(p, s, work, "main")
    if study in (None, "operators"):
        for name, changes in WITHOUT.items():
            cell = {"study": "operators", "variant": name, "seed": 1}
            yield cell, lambda n=name, c=changes: evolved("tiny", 1, work, n.replace(" ", "_"), **c)


def percent(gain: float, of: float) -> str:
    return f"{100 * gain / of:+.1f} %" if of else "-"


def gains_table(rows: list[dict[str, Any]]) -> list[str]:
    """Relative gain in accuracy over each rival, with the interval of the difference in points."""
    lines = [
        "| study | seed | champion | " + " | ".join(f"over {r}" for r in RIVALS.values()) + " |",
        "|---|---|---|" + "---|" * len(RIVALS),
    ]
    for r in rows:
        if r["study"] == "operators":
            continue
        columns = []
        for short in RIVALS.values():
            if short not in r:
                columns.append("-")
                continue
            other = r[short]
            value, low, high = (100 * x for x in other["gain"])
            p = "p < 0.001" if other["p"] < 0.001 else f"p = {other['p']:.3f}"
            relative = percent(other["gain"][0], other["accuracy"])
            columns.append(f"{relative} ({value:+.1f} points, {low:.1f}..{high:.1f}, {p})")
        lines.append(
            f"| {r['study']} | {r['seed']} | {r['accuracy']:.3f} | " + " | ".join(columns) + " |"
        )
    return lines


def operators_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| variant | fitness as searched | quality on unseen items | accuracy |"]
    lines.append("|---|---|---|---|")
    for r in rows:
        if r["study"] == "operators":
            shown = f"{r['curve'][-1]:.4f} | {r['quality']:.4f} | {r['accuracy']:.4f}"
            lines.append(f"| {r['variant']} | {shown} |")
    return lines


def cost_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| study | CPU s | merging | measuring | the rest | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for study in SEEDS:
        mine = [r for r in rows if r["study"] == study]
        if mine:
            whole = statistics.mean(r["seconds"]["all"] for r in mine)
            merge, measuring = (
                statistics.mean(r["seconds"][k] for r in mine) for k in ("merge", "evaluation")
            )
            rest = whole - merge - measuring
            shares = " | ".join(f"{part / whole:.1%}" for part in (merge, measuring, rest))
            cpu = statistics.mean(r["cpu_s"] for r in mine)
            lines.append(f"| {study} | {cpu:.0f} | {shares} | {max(r['peak_mb'] for r in mine)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("evomerge-bench"))
    parser.add_argument("--study", choices=[*SEEDS, "operators"])
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if not asked.tables:
        for cell, work in cells(asked.work.absolute(), asked.study):
            if not any(cell.items() <= r.items() for r in done(NAME)):
                record(NAME, cell, work())
    rows = done(NAME)
    tables = {"gains": gains_table, "operators": operators_table, "cost": cost_table}
    for name, table in tables.items():
        lines = table(rows)
        print("\n".join(["", *lines]))
        write_section("evomerge.md", name, lines)


if __name__ == "__main__":
    main()
