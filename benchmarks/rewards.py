"""What the second step of Phase 3 adds, beside as much more teaching, over three seeds.

    python benchmarks/rewards.py --work W                   everything that is missing, cell by cell
    python benchmarks/rewards.py --work W --study gold      one study
    python benchmarks/rewards.py --tables                   write the tables from what is there

The baked models of `small` lie in W, and are made if they are not there. `gold` rewards the
families whose thoughts were taught; the control goes on with those thoughts. `answers` bakes a
model without any thought about swaps (once a seed) and rewards right answers about swaps alone; the
control learns these answers. Each cell is judged on 700 unseen items of each family. CPU seconds
are those of the training of either; a run that was interrupted counts its last part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from quietstar import SEEDS, champion, reasoning
from results import command, run_phase

NAME, PRESET, ITEMS = "rewards", "small", 700
PHASE = "phases.quietstar"
WITHOUT = f"{PHASE}.levels={{chain: [2, 5], tot4: [4, 10], odds: [4, 5]}}"
ARMS = {
    "verified": ("reward.kind=verified",),
    "verified, no divergence": ("reward.kind=verified", "reward.optimizer.kl_coefficient=0"),
    "verified, AdamW": ("reward.kind=verified", "reward.optimizer.muon=false"),
    "likelihood": ("reward.kind=likelihood",),
}
STUDIES = ("gold", "answers")


def baked(work: Path, study: str, seed: int) -> Path:
    """The model that rewards begin with, made once."""
    if study == "gold":
        return reasoning(work, PRESET, seed)
    path = work / "sessions" / f"no_swaps_{seed}" / "phase3_quietstar" / "reasoning"
    if not (path / "manifest.json").exists():
        sets = (f"{PHASE}.controls=false", f"{PHASE}.thought_items=50", WITHOUT)
        given = champion(work, PRESET).path
        run_phase(work, "quietstar", f"no_swaps_{seed}", given, PRESET, seed, sets)
    return path


def rewarded(work: Path, study: str, arm: str, seed: int) -> dict[str, Any]:
    """One run of the second step, and what it measured."""
    given = baked(work, study, seed)
    sets = (f"{PHASE}.controls=false", *(f"{PHASE}.{item}" for item in ARMS[arm]))
    sets += (f"{PHASE}.steps=0", f"{PHASE}.thought_items={ITEMS}")
    sets += (f"{PHASE}.reward.control={'true' if arm == 'verified' else 'false'}",)
    if study == "answers":
        sets += (WITHOUT, f"{PHASE}.reward.answers_only={{swap4: [2, 5]}}")
    session = f"rewards_{study}_{'_'.join(arm.replace(',', '').split())}_{seed}"
    result, _ = run_phase(work, "quietstar", session, given, PRESET, seed, sets)
    return dict(result.artifacts["reward"])


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, arm, seed in product(STUDIES, ARMS, SEEDS[PRESET]):
        if study in (None, name):
            cell = {"study": name, "arm": arm, "seed": seed}
            yield cell, partial(rewarded, work, name, arm, seed)


def rewards_table(rows: list[dict[str, Any]]) -> list[str]:
    """Right answers before, after and with as much more teaching, by family."""
    if not rows:
        return ["(not measured yet)"]
    head = ["study, seed", "reward", "model", "chain", "tot4", "swap4", "odds", "CPU s", "kept"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        for name, by_family in row["accuracy"].items():
            shares = " | ".join(f"{100 * by_family[family]:.1f}" for family in head[3:7])
            cost = row["cpu_s"].get(name)
            told = [f"{row['study']}, {row['seed']}", row["arm"], name, shares]
            told += [f"{cost:.0f}" if cost else "-"]
            told += [("yes" if row["kept"] else "no") if name == "rewarded" else "-"]
            lines.append(f"| {' | '.join(told)} |")
    return lines


if __name__ == "__main__":
    command(str(__doc__), NAME, STUDIES, cells, {"rewards": rewards_table}, "quietstar.md")
