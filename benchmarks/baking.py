"""Tools and a persona inside the weights: from right answers, and from a prompt, over three seeds.

    python benchmarks/baking.py --work W                    everything that is missing
    python benchmarks/baking.py --work W --study gold       one study
    python benchmarks/baking.py --tables                    write the tables from what is there

The inputs are models of Phase 5 in W, made if they are not there. `gold`: Phase 6 of `tiny` and
`small` as it is. `methods`: of `tiny` that first learns to follow prompts, one round of each kind
by right answers, by the prompted model's answers, and by the KL to it in both directions, for as
many steps each. `strength`: how much of a round of right answers is taken. A run that was
interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import forge
from results import command, run_phase

NAME, SEEDS = "baking", (1, 2, 3)
PHASE = "phases.baking"
FOLLOWED = (f"{PHASE}.follow_steps=1500", f"{PHASE}.rounds=2", f"{PHASE}.round_steps=300")
VARIANTS = {
    "methods": {
        method: (*FOLLOWED, f"{PHASE}.method={method}")
        for method in ("gold", "samples", "forward", "reverse")
    },
    "strength": {str(s): (f"{PHASE}.strength={s}",) for s in (0.25, 0.5, 0.75, 1.25)},
}
STUDIES = ("gold", *VARIANTS)


def baked(work: Path, preset: str, seed: int, *more: str, name: str = "gold") -> dict[str, Any]:
    """One run of Phase 6, and what it measured."""
    given = forge.model(work, preset, seed)
    named = (f"baking_{preset}_{name}_{seed}", given, preset, seed, more)
    result, told = run_phase(work, "baking", *named)
    right, rounds = result.artifacts["tables"]
    measured = {"right": right[1:], "rounds": rounds[1:], "metrics": result.metrics}
    return {**measured, "conversation": result.artifacts["conversation"], **told}


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for preset, seed in product(("tiny", "small"), SEEDS) if study in (None, "gold") else ():
        cell = {"study": "gold", "preset": preset, "variant": "", "seed": seed}
        yield cell, partial(baked, work, preset, seed)
    for kind, variants in VARIANTS.items():
        for (variant, sets), seed in product(variants.items(), SEEDS):
            if study in (None, kind):
                cell = {"study": kind, "preset": "tiny", "variant": variant, "seed": seed}
                yield cell, partial(baked, work, "tiny", seed, *sets, name=f"{kind}_{variant}")


def right_table(rows: list[dict[str, Any]]) -> list[str]:
    """What is right before and after, of every run."""
    if not rows:
        return ["(not measured yet)"]
    lines = ["| run | asked | items | before | after | CPU s |", "|" + "---|" * 6]
    for row in rows:
        run = ", ".join(str(row[k]) for k in ("preset", "study", "variant", "seed") if row[k])
        for asked, items, before, after in row["right"]:
            shares = f"{100 * before:.1f} | {100 * after:.1f}"
            lines.append(f"| {run} | {asked} | {items} | {shares} | {row['cpu_s']} |")
    return lines


if __name__ == "__main__":
    command(str(__doc__), NAME, list(STUDIES), cells, {"right": right_table}, "baking.md")
