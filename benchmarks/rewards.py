"""What the second step of Phase 3 adds, beside as much more teaching, over three seeds.

    python benchmarks/rewards.py --work W                   everything that is missing, cell by cell
    python benchmarks/rewards.py --work W --study gold      one study
    python benchmarks/rewards.py --tables                   write the tables from what is there

W is that of benchmarks/quietstar.py: the baked models of `small` are taken from there. `gold`
rewards the families whose thoughts were taught; the control goes on with those thoughts. `answers`
bakes a model without any thought about swaps (once a seed) and rewards right answers about swaps
alone; the control learns these answers. Each cell is judged on 700 unseen items of each family. CPU
seconds are those of the training of either; a run that was interrupted counts its last part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from quietstar import SEEDS, champion
from results import command

from agent_forge.contract.phase import ModelRef
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store.records import read_metadata

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


def phase_run(work: Path, session: str, given: ModelRef, seed: int, sets: tuple[str, ...]) -> Any:
    """A run of Phase 3 alone, begun or gone on with."""
    begun = (work / "sessions" / session / "session.json").exists()
    own = (f"storage.root={work}", f"runtime.seed={seed}", f"{PHASE}.controls=false", *sets)
    config = load_config(preset=PRESET, sets=own)
    run = PipelineOrchestrator(config=config, session_id=session, resume=begun)
    outcome = run.run(only="quietstar", input_models=None if begun else [given])
    assert outcome["success"], outcome
    return outcome["results"]["quietstar"]


def baked(work: Path, study: str, seed: int) -> ModelRef:
    """The model that rewards begin with, made once."""
    session = f"{PRESET}_{seed}" if study == "gold" else f"no_swaps_{seed}"
    path = work / "sessions" / session / "phase3_quietstar" / "reasoning"
    if not (path / "manifest.json").exists():
        sets = (f"{PHASE}.thought_items=50", *((WITHOUT,) if study == "answers" else ()))
        phase_run(work, session, champion(work, PRESET), seed, sets)
    return ModelRef("reasoning", path, read_metadata(path).model_dump())


def rewarded(work: Path, study: str, arm: str, seed: int) -> dict[str, Any]:
    given = baked(work, study, seed)
    sets = tuple(f"{PHASE}.{item}" for item in ARMS[arm])
    sets += (f"{PHASE}.steps=0", f"{PHASE}.thought_items={ITEMS}")
    sets += (f"{PHASE}.reward.control={'true' if arm == 'verified' else 'false'}",)
    if study == "answers":
        sets += (WITHOUT, f"{PHASE}.reward.answers_only={{swap4: [2, 5]}}")
    session = f"rewards_{study}_{'_'.join(arm.replace(',', '').split()).lower()}_{seed}"
    result = phase_run(work, session, given, seed, sets)
    return dict(result.artifacts["reward"])


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, arm, seed in product(STUDIES, ARMS, SEEDS):
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
