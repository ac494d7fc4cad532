"""How far training at the edge and own thoughts carry a model, over three seeds.

    python benchmarks/forge.py --work W                    everything that is missing
    python benchmarks/forge.py --work W --study edge       one study
    python benchmarks/forge.py --tables                    write the tables from what is there

The inputs are models of Phase 4: those in W, or else those in benchmarks/models. `edge`: Phase 5
of `tiny` and `small` as it is, with a copy that is trained as long on what it knew. `draws`: which
sizes are drawn, at equal steps. `beyond`: how own thoughts are chosen. `weights`: packed ones or
their whole copy. `auxiliaries`: Grokfast, self-model and dreams. All but `edge` are of `tiny`. A
run that was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bitnet import packed
from results import command, run_phase

NAME, SEEDS = "forge", (1, 2, 3)
PHASE = "phases.forge"
NO_ROUNDS = f"{PHASE}.beyond=none"
VARIANTS = {
    "draws": {
        "uniform": (NO_ROUNDS,),
        "controller": (NO_ROUNDS, f"{PHASE}.draw=controller"),
        "easy to hard": (NO_ROUNDS, f"{PHASE}.draw=easy_to_hard"),
    },
    "beyond": {
        "split": (f"{PHASE}.steps=0",),
        "verified": (f"{PHASE}.steps=0", f"{PHASE}.beyond=verified"),
        "voted": (f"{PHASE}.steps=0", f"{PHASE}.beyond=voted"),
    },
    "weights": {"packed": (), "whole": (f"{PHASE}.weights=whole",)},
    "auxiliaries": {
        "none": (NO_ROUNDS,),
        "Grokfast 0.3": (NO_ROUNDS, f"{PHASE}.train.optimizer.grokfast_lambda=0.3"),
        "self-model 0.1": (NO_ROUNDS, f"{PHASE}.self_model_weight=0.1"),
        "dreams": (NO_ROUNDS, f"{PHASE}.dream_share=0.2"),
    },
}
STUDIES = ("edge", *VARIANTS)


def forged(work: Path, preset: str, seed: int, *more: str, name: str = "edge") -> dict[str, Any]:
    """One run of Phase 5, and what it measured."""
    given = packed(work, preset, seed)
    named = (f"forge_{preset}_{name}_{seed}", given, preset, seed, more)
    result, told = run_phase(work, "forge", *named)
    edges, rounds = result.artifacts["tables"]
    return {
        "edges": edges[1:],
        "rounds": rounds[1:],
        "solved": result.artifacts["solved"],
        "metrics": result.metrics,
        **told,
    }


def model(work: Path, preset: str, seed: int) -> Path:
    """The model that studies of later phases begin with; made if it is not there yet."""
    path = work / "sessions" / f"forge_{preset}_edge_{seed}" / "phase5_forge" / "packed"
    if not (path / "manifest.json").exists():
        forged(work, preset, seed, f"{PHASE}.control=false")
    return path


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    if study in (None, "edge"):
        for preset, seed in product(("tiny", "small"), SEEDS):
            cell = {"study": "edge", "preset": preset, "variant": "", "seed": seed}
            yield cell, partial(forged, work, preset, seed, f"{PHASE}.control=true")
    for kind, variants in VARIANTS.items():
        for (variant, sets), seed in product(variants.items(), SEEDS):
            if study in (None, kind):
                cell = {"study": kind, "preset": "tiny", "variant": variant, "seed": seed}
                run = partial(forged, work, "tiny", seed, *sets, name=f"{kind}_{variant}")
                yield cell, run


def edge_table(rows: list[dict[str, Any]], studies: tuple[str, ...]) -> list[str]:
    """How far each family reaches, and what is solved of known sizes and of those beyond."""
    found = [row for row in rows if row["study"] in studies]
    if not found:
        return ["(not measured yet)"]
    lines = ["| run | family | model | reach | interval | known sizes | beyond | CPU s |"]
    lines.append("|" + "---|" * 8)
    for row in found:
        run = ", ".join(str(row[k]) for k in ("preset", "variant", "seed") if row[k])
        for family, unit, model, reach, between, *shares in row["edges"]:
            told = " | ".join(s if isinstance(s, str) else f"{100 * s:.1f}" for s in shares)
            line = f"| {run} | {family} | {model} | {reach} {unit} | {between} | {told} |"
            lines.append(f"{line} {row['cpu_s']} |")
    return lines


def round_table(rows: list[dict[str, Any]]) -> list[str]:
    """Own thoughts by round: how many were kept and right, and what came of them."""
    found = [(row, own) for row in rows for own in row["rounds"]]
    if not found:
        return ["(not measured yet)"]
    head = ["run", "round", "family", "sizes", "kept", "right", "before", "after", "end"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row, own in found:
        run = ", ".join(str(row[k]) for k in ("preset", "study", "variant", "seed") if row[k])
        told = (f"{100 * v:.1f} %" if isinstance(v, float) else str(v) for v in own)
        lines.append(f"| {run} | {' | '.join(told)} |")
    return lines


if __name__ == "__main__":
    tables = {
        "edges": partial(edge_table, studies=("edge",)),
        "variants": partial(edge_table, studies=tuple(VARIANTS)),
        "rounds": round_table,
    }
    command(str(__doc__), NAME, list(STUDIES), cells, tables, "forge.md")
