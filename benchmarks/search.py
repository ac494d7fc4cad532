"""Which way of searching finds the better merge, for how many evaluated tokens.

    python benchmarks/search.py --work W                       everything that is missing
    python benchmarks/search.py --work W --study racing        one study
    python benchmarks/search.py --tables                       write the tables from what is there

Studies, three seeds each: `strategies` spends 200 evaluations on Phase 1's `tiny` specialists with
every strategy, and with CMA-ES over one family of methods a run, the reference; `fine-tunes` does
the same on three fine-tunes of a small Llama (needs AGENT_FORGE_DATA); `racing` repeats two of the
first with racing; `workers` measures the same evolution with one and two processes and with Ray.
W keeps the models, as in evomerge.py. Every champion on the way is measured on items that the
search never sees.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from evomerge import job_of as study_of
from evomerge import specialists
from results import command

from agent_forge.evals.fitness import DomainFitness
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs, locate_inputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.store import files
from agent_forge.track.journal import read_lines

NAME = "search"
SEEDS = (1, 2, 3)
EVALUATIONS = 200
AT = (50, 100, 200)
REFERENCE = "cma-es, one family: "
STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("spec", "ga", "cma-es", "grad", "auto")},
    **{
        f"{REFERENCE}{method}": {"strategy": "cma-es", "blend_method": method, "per_layer": False}
        for method in ("linear", "ties")
    },
}
RACED = ("spec", "auto")
CREWS: dict[str, dict[str, Any]] = {
    "one process": {"workers": 1},
    "two processes": {"workers": 2},
    "Ray, two workers": {"workers": 2, "executor": "ray"},
}


LENGTH: dict[str, Any] = {"early_stopping": False, "generations": 1000, "racing": False}
LENGTH |= {"max_evaluations": EVALUATIONS}
PASSAGES = {"fitness_subset_size": 25, "verdict_items": 100}  # of each fine-tune's text


def tuned_job(work: Path, seed: int, name: str, **settings: Any) -> EvolutionInputs:
    return study_of("stories", seed, work, f"search {name}", **{**LENGTH, **PASSAGES, **settings})


def job_of(work: Path, seed: int, name: str, **settings: Any) -> EvolutionInputs:
    wanted = LENGTH | {"fitness_subset_size": 100, "verdict_items": 1000, "workers": 1, **settings}
    session = specialists("tiny", seed, work)
    place = work / f"search_{seed}_{name.replace(' ', '_').replace(',', '')}"
    return locate_inputs(
        EvoMergeSettings.model_validate(wanted), [session], None, seed, place, work
    )


def searched(job: Callable[[], EvolutionInputs]) -> dict[str, Any]:
    """One search, and each of its champions on unseen items."""
    torch.set_num_threads(1)
    return _curve(job())


def _curve(job: EvolutionInputs) -> dict[str, Any]:
    run = EvolutionLoop(job)
    run.run()
    how = job.settings.fitness_weights, job.settings.fitness_floors
    model = run.evaluator.model_under_test
    unseen = DomainFitness(model, job.splits["verdict"], *how)
    count = tokens = 0
    cpu, best, curve = 0.0, float("-inf"), []
    for _, line in read_lines(job.folder / JOURNAL):
        tokens, cpu = tokens + line.get("tokens", 0), cpu + line.get("cpu", 0.0)
        if line["record"] != "candidate":
            continue
        count += 1
        fitness = line["score"]["fitness"] if line["score"] else float("-inf")
        if fitness > best and not line.get("dropped"):
            best = fitness
            run.weights.fill(model.model, line["key"])
            curve.append([count, tokens, cpu, best, unseen.score().quality])
    curve.append([count, tokens, cpu, *curve[-1][3:]])
    rounded = [[a, b, *(round(x, 5) for x in rest)] for a, b, *rest in curve]
    return {"tokens_each": run.evaluator.fitness.tokens, "curve": rounded}


def staffed(work: Path, name: str) -> dict[str, Any]:
    """The same evolution by other workers: how long it takes, and what comes out."""
    job = job_of(work, 1, name, fitness_subset_size=250, **CREWS[name])  # about a second each
    job = locate_inputs(
        job.settings.model_copy(update={"max_evaluations": 100, "verdict_items": 20}),
        list(job.parent_refs),
        job.base_ref,
        1,
        job.folder,
    )
    began = time.monotonic()
    outcome = run_evolution(job)
    seconds = time.monotonic() - began
    return {
        "wall_s": round(seconds, 1),
        "search_s": round(outcome.loop.seconds["all"], 1),
        "sha256": files.sha256_of(outcome.model.path / "model.safetensors"),
    }


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, make in (("strategies", job_of), ("fine-tunes", tuned_job)):
        if study in (None, name):
            for seed, (strategy, settings) in product(SEEDS, STRATEGIES.items()):
                cell = {"study": name, "strategy": strategy, "seed": seed}
                yield cell, partial(searched, partial(make, work, seed, strategy, **settings))
    if study in (None, "racing"):
        for seed, name in product(SEEDS, RACED):
            cell = {"study": "racing", "strategy": name, "seed": seed}
            settings = {"strategy": name, "racing": True}
            yield cell, partial(searched, partial(job_of, work, seed, f"{name} raced", **settings))
    if study in (None, "workers"):
        for name in CREWS:
            if "Ray" not in name or importlib.util.find_spec("ray"):
                yield {"study": "workers", "crew": name}, partial(staffed, work, name)


# -- tables ---------------------------------------------------------------------------------------


def at(curve: Sequence[Sequence[float]], column: int, limit: float) -> Sequence[float]:
    """The champion when so much of a column was spent."""
    known = [point for point in curve if point[column] <= limit]
    return known[-1] if known else curve[0]


def spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.4f}"
    return f"{mean:.4f} ({min(values):.4f}..{max(values):.4f})"


def strategies_table(study: str, rows: list[dict[str, Any]]) -> list[str]:
    """Quality on unseen items after so many evaluations, and at the reference's CPU."""
    mine = [r for r in rows if r["study"] == study]
    head = [f"after {n}" for n in AT]
    lines = [
        "| strategy | seeds | " + " | ".join(head) + " | at equal CPU | fitness as searched |"
        " tokens, in evaluations | CPU s |",
        "|---|---|" + "---|" * (len(head) + 4),
    ]
    for name in STRATEGIES:
        own = [r for r in mine if r["strategy"] == name]
        if not own:
            continue
        columns = [spread([at(r["curve"], 0, n)[4] for r in own]) for n in AT]
        budgets = [_reference(mine, r["seed"]) for r in own]
        if all(budgets):
            equal = [
                at(r["curve"], 2, b["curve"][-1][2])[4]
                for r, b in zip(own, budgets, strict=True)
                if b
            ]
            columns.append(spread(equal))
        else:
            columns.append("-")
        columns.append(spread([r["curve"][-1][3] for r in own]))
        columns.append(f"{statistics.mean(r['curve'][-1][1] / r['tokens_each'] for r in own):.0f}")
        columns.append(f"{statistics.mean(r['curve'][-1][2] for r in own):.0f}")
        lines.append(f"| {name} | {len(own)} | " + " | ".join(columns) + " |")
    return [*lines, "", *_sooner(mine)]


def _reference(mine: list[dict[str, Any]], seed: int) -> dict[str, Any] | None:
    """Of one seed: the family with the best quality on unseen items."""
    families = [r for r in mine if r["seed"] == seed and r["strategy"].startswith(REFERENCE)]
    return max(families, key=lambda r: r["curve"][-1][4], default=None)


def _sooner(mine: list[dict[str, Any]]) -> list[str]:
    """Tokens until a strategy is as good as the best reference in the end, seed by seed."""
    lines = ["| strategy | tokens to the reference's final quality | to its final fitness |"]
    lines.append("|---|---|---|")
    for name in STRATEGIES:
        own = [r for r in mine if r["strategy"] == name]
        if own and not name.startswith(REFERENCE):
            columns = (", ".join(_reached(mine, r, column) for r in own) for column in (4, 3))
            lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def _reached(mine: list[dict[str, Any]], row: dict[str, Any], column: int) -> str:
    """As a share of the tokens that the reference took."""
    reference = _reference(mine, row["seed"])
    if reference is None:
        return "-"
    goal, whole = reference["curve"][-1][column], reference["curve"][-1][1]
    reached = next((point[1] for point in row["curve"] if point[column] >= goal), None)
    return "never" if reached is None else f"{reached / whole:.2f}"


def racing_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| strategy | racing | tokens, in evaluations | quality on unseen items |"]
    lines.append("|---|---|---|---|")
    for name in RACED:
        for study, word in (("strategies", "off"), ("racing", "on")):
            own = [r for r in rows if r["study"] == study and r["strategy"] == name]
            if own:
                tokens = statistics.mean(r["curve"][-1][1] / r["tokens_each"] for r in own)
                quality = spread([r["curve"][-1][4] for r in own])
                lines.append(f"| {name} | {word} | {tokens:.0f} | {quality} |")
    return lines


def workers_table(rows: list[dict[str, Any]]) -> list[str]:
    mine = {r["crew"]: r for r in rows if r["study"] == "workers"}
    if not mine:
        return []
    lines = ["| workers | s | times as fast | champion |", "|---|---|---|---|"]
    first = mine.get("one process")
    for name, r in mine.items():
        times = f"{first['search_s'] / r['search_s']:.2f}" if first else "-"
        same = "the same bytes" if first and r["sha256"] == first["sha256"] else "OTHER BYTES"
        lines.append(f"| {name} | {r['search_s']:.0f} | {times} | {same} |")
    return lines


if __name__ == "__main__":
    tables: dict[str, Callable[[list[dict[str, Any]]], list[str]]] = {
        "strategies": partial(strategies_table, "strategies"),
        "fine-tunes": partial(strategies_table, "fine-tunes"),
        "racing": racing_table,
        "workers": workers_table,
    }
    command(str(__doc__), NAME, list(tables), cells, tables, "evomerge.md")
