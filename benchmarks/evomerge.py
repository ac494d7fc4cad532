"""Whether evolving pays: the champion on unseen items against everything it has to beat.

    python benchmarks/evomerge.py --work W                     everything that is missing
    python benchmarks/evomerge.py --work W --study tiny        one study
    python benchmarks/evomerge.py --tables                     write the tables from what is there

Studies: `tiny` and `small` train Phase 1 (three seeds, one for `small`) and evolve its specialists;
`stories` makes three fine-tunes of a small Llama on real text (needs AGENT_FORGE_DATA) and evolves
them; `operators` evolves those of `tiny` again, each time with one operator changed, at equal
evaluations. A cell that was measured is not measured again; W keeps models between calls.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from finetunes import DOMAINS
from results import command

from agent_forge.model.locate import specialists_of
from agent_forge.phases.phase2_evomerge import candidate_weights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs, locate_inputs
from agent_forge.pipeline.config import load_config
from agent_forge.platform import peak_memory_bytes
from agent_forge.search import operators
from agent_forge.search.evolution import EvolutionSearch, PopulationSlot

NAME = "evomerge"
SEEDS = {"tiny": (1, 2, 3), "small": (1,), "stories": (1, 2, 3)}
GENERATIONS = {"tiny": 20, "small": 20, "stories": 12}
RIVALS = {
    "best parent": "best parent",
    "base": "trunk",
    "plain average": "plain average",
    "best combo of generation 0": "generation 0",
    "joint training": "joint training",
}
SHOWN = ("quality", "champion")
OPERATORS: dict[str, tuple[str, int, dict[str, Any]]] = {  # study: models, seeds, settings
    "operators": (
        *("tiny", 2),
        {"generations": 15, "fitness_subset_size": 100, "verdict_items": 1000},
    ),
}
CHANGED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no recipe mutation: noise alone": {"recipe_mutation": 0.0},
    "no noise: recipe mutation alone": {"recipe_mutation": 1.0},
    "no loser merging: mutants instead": {},
    "no combos: linear merges alone": {},
    "no layer groups: one coefficient a parent": {},
}


@contextmanager
def without(variant: str) -> Iterator[None]:
    """The evolution without one of its operators, where no setting turns it off."""
    if variant.startswith("no loser"):
        fill = EvolutionSearch._fill_all

        def mutants(self: EvolutionSearch, places: Sequence[PopulationSlot]) -> None:
            best = [place.inputs for place in places if place.use == "mutant"]
            kept = [p if p.use != "losers" else PopulationSlot("mutant", best[0]) for p in places]
            fill(self, kept)

        with patch.object(EvolutionSearch, "_fill_all", mutants):
            yield
    elif variant.startswith("no combos"):
        combo_of, menu = operators.combo_of, operators._recipe_menu

        def linear(space: Any, combo: int, *rest: Any) -> Any:
            return combo_of(space, 0, *rest)

        def same(*given: Any) -> list[str]:
            return [name for name in menu(*given) if name != "combo"]

        changed = patch.multiple(operators, combo_of=linear, _recipe_menu=same)
        with changed:
            yield
    elif variant.startswith("no layer"):
        with patch.object(candidate_weights, "TensorGroups", OneGroup):
            yield
    else:
        yield


class OneGroup(candidate_weights.TensorGroups):
    """All tensors share their coefficients."""

    def __init__(self, names: Iterable[str]) -> None:
        self.of = {"all": [""]}  # which is in every name


def specialists(preset: str, seed: int, work: Path) -> str:
    """The session of Phase 1 with this preset and seed; trained if it is not there."""
    session = f"{preset}_{seed}"
    if specialists_of(session, work) is None:
        words = ["run", "--preset", preset, "--only", "cognate", "--session", session]
        words += ["--set", f"runtime.seed={seed}"]
        if (work / "sessions" / session).exists():
            words = ["resume", session]
        forge = Path(sys.executable).with_name("forge")
        # In a process of its own, so that its memory is not counted here.
        subprocess.run([forge, *words, "--storage", str(work)], check=True)
    return session


def job_of(study: str, seed: int, work: Path, name: str, **changes: Any) -> EvolutionInputs:
    """The evolution of a study's three models; they are trained if they are not there."""
    settings: dict[str, Any] = {"generations": GENERATIONS[study], "early_stopping": False}
    settings["strategy"] = "spec"  # whose operators are compared
    settings["workers"] = 1  # so that CPU seconds and shares are those of one process
    base = None
    if study == "stories":
        place = work / f"stories_{seed}"
        tune = [sys.executable, str(Path(__file__).with_name("finetunes.py")), str(place)]
        subprocess.run([*tune, "--seed", str(seed)], check=True)
        made = [place / domain for domain in DOMAINS]
        refs, base = [str(folder) for folder in made], str(place / "base")
        settings["data"] = [f"{folder}.jsonl" for folder in made]
        settings["fitness_subset_size"] = 50  # passages of 400 characters
        settings["split_by"] = "content"  # as the numbers of docs/evomerge.md were measured
    else:
        refs = [specialists(study, seed, work)]
        settings["max_level"] = load_config(preset=study).phases.evomerge.max_level
    words = "".join(c if c.isalnum() else "_" for c in name)
    folder = work / f"evo_{study}_{seed}_{words}"
    return locate_inputs(
        EvoMergeSettings(**{**settings, **changes}), refs, base, seed, folder, work
    )


def evolved(study: str, seed: int, work: Path, name: str, **changes: Any) -> dict[str, Any]:
    """One evolution, and what came out on unseen items."""
    torch.set_num_threads(1)
    job = job_of(study, seed, work, name, **changes)
    began = time.process_time()
    with without(name):
        outcome = run_evolution(job)
    assert outcome.report is not None
    found = outcome.report
    measure = "accuracy" if "accuracy" in found.champion.parts else "bits_per_byte"
    values: dict[str, Any] = {
        "measure": measure,
        "cpu_s": round(time.process_time() - began, 1),
        "seconds": {k: round(v, 1) for k, v in outcome.loop.seconds.items()},
        "peak_mb": round(peak_memory_bytes() / 1e6),
        "model_mb": round(job.nbytes / len(job.parents) / 1e6, 1),
        "origin": outcome.loop.champion.origin,
        "quality": round(found.champion.quality, 5),
        "champion": round(level(found.champion.raw, measure), 5),
        "curve": [round(value, 5) for value in outcome.loop.curve],
    }
    for rival, short in RIVALS.items():
        other = found.baselines.get(found.best_parent if rival == "best parent" else rival)
        if other is None:
            continue
        gain = other.comparison.overall.gains[measure]
        values[short] = {
            "quality": round(other.score.quality, 5),
            "level": round(level(other.score.raw, measure), 5),
            "gain": [round(x, 5) for x in (gain.value, gain.low, gain.high)],
            "p": gain.p,
            "n": gain.n,
        }
    return values


def level(raw: Mapping[str, float], measure: str) -> float:
    """The mean of a measure over domains."""
    return statistics.mean(v for name, v in raw.items() if name.endswith(f"/{measure}"))


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, seeds in SEEDS.items():
        for seed in seeds:
            if study in (None, name):
                yield {"study": name, "seed": seed}, partial(evolved, name, seed, work, "main")
    for operators_of, (models, count, quicker) in OPERATORS.items():
        if study in (None, operators_of):
            for (name, changes), seed in product(CHANGED.items(), SEEDS[models][:count]):
                cell = {"study": operators_of, "variant": name, "seed": seed}
                yield cell, partial(evolved, models, seed, work, name, **quicker, **changes)


def gains_table(rows: list[dict[str, Any]]) -> list[str]:
    """Relative gain over each rival, with the difference and its interval."""
    lines = [
        "| study | seed | champion | " + " | ".join(f"over {r}" for r in RIVALS.values()) + " |",
        "|---|---|---|" + "---|" * len(RIVALS),
    ]
    for r in rows:
        if r["study"] in OPERATORS:
            continue
        points = r["measure"] == "accuracy"
        factor, unit = (100, "points") if points else (1, "bits")
        columns = []
        for short in RIVALS.values():
            if short not in r:
                columns.append("-")
                continue
            other = r[short]
            value, low, high = (factor * x for x in other["gain"])
            p = "p < 0.001" if other["p"] < 0.001 else f"p = {other['p']:.3f}"
            relative = 100 * other["gain"][0] / other["level"]
            digits = 1 if points else 3
            span = f"{value:+.{digits}f} {unit}, {low:.{digits}f}..{high:.{digits}f}, {p}"
            columns.append(f"{relative:+.1f} % ({span})")
        shown = f"{r['champion']:.3f}" + ("" if points else " bits a byte")
        lines.append(f"| {r['study']} | {r['seed']} | {shown} | " + " | ".join(columns) + " |")
    return lines


def operators_table(study: str, rows: list[dict[str, Any]]) -> list[str]:
    """Each variant beside the evolution as it is, over the same seeds."""
    mine = [r for r in rows if r["study"] == study]
    lines = ["| variant | seeds | fitness as searched | quality on unseen items | accuracy |"]
    lines.append("|---|---|---|---|---|")
    for name in dict.fromkeys(r["variant"] for r in mine):
        cells = [r for r in mine if r["variant"] == name]
        columns = ([r["curve"][-1] for r in cells], *([r[k] for r in cells] for k in SHOWN))
        shown = " | ".join(f"{statistics.mean(values):.4f}" for values in columns)
        lines.append(f"| {name} | {len(cells)} | {shown} |")
    return lines


def cost_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| study | CPU s | merging | measuring | the rest | one model, MB | peak, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for study in SEEDS:
        mine = [r for r in rows if r["study"] == study][-1:]
        for r in mine:
            spent = r["seconds"]
            parts = spent["merge"], spent["evaluation"]
            shares = [part / spent["all"] for part in (*parts, spent["all"] - sum(parts))]
            shown = " | ".join(f"{share:.1%}" for share in shares)
            memory = f"{r['model_mb']} | {r['peak_mb']}"
            lines.append(f"| {study} | {r['cpu_s']:.0f} | {shown} | {memory} |")
    return lines


if __name__ == "__main__":
    tables: dict[str, Callable[[list[dict[str, Any]]], list[str]]] = {
        "gains": gains_table,
        "operators": partial(operators_table, "operators"),
        "cost": cost_table,
    }
    command(str(__doc__), NAME, [*SEEDS, *OPERATORS], cells, tables, "evomerge.md")
