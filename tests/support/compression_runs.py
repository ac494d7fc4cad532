"""Small real runs of Phase 8, and what each of its settings changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_forge.data import exchanges
from agent_forge.phases import skills
from agent_forge.phases.phase8_final_compression.phase import FinalCompressionPhase
from agent_forge.phases.phase8_final_compression.points import Compression
from agent_forge.phases.skills import Right, Skills
from agent_forge.phases.training import LatentModel
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from tests.support import cognate_settings, forge_runs, quietstar_runs
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.final_compression"
TRAIN = f"{PHASE}.train"
WIDER = ("model.d_model=32", "model.ffn_hidden=64", "model.embed_rank=16")  # than a student
FEW = (
    *(f"{PHASE}.ratios=[14, 20]", f"{PHASE}.student_ratios=[28]", f"{PHASE}.thaw_steps=2"),
    *(f"{PHASE}.steps=3", f"{PHASE}.student_steps=4", f"{PHASE}.examples=30", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    *(f"{PHASE}.families=[digit_max, copy, rotate]", f"{PHASE}.calibration_items=9"),
    *(f"{PHASE}.choice_items=4", f"{PHASE}.tool_items=4", f"{PHASE}.thought_items=2"),
    f"{PHASE}.checkpoint_every_steps=2",
)


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*forge_runs.SHAPE, *FEW, *sets))


def run(root: Path, *sets: str, listener: Any = None) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 8 alone."""
    begun = (folder(root) / "session.json").exists()
    of_run = (f"storage.root={root}", *SMALL, *forge_runs.SHAPE, *FEW, *sets)
    orchestrator = PipelineOrchestrator(
        config=load_config(preset="smoke", sets=of_run),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [forge_runs.ternary_model(root, *WIDER, phase="edge")]
    with brief():
        outcome = orchestrator.run(only="final_compression", input_models=given)
    assert outcome["success"], outcome
    return outcome


@contextlib.contextmanager
def brief() -> Iterator[None]:
    """Few questions, and few tokens for what a model that was never trained has to say."""
    every = exchanges.every_about
    with quietstar_runs.brief_thoughts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(skills, "GREEDY", replace(skills.GREEDY, max_new_tokens=4))
        patch.setattr(skills, "THOUGHT_ITEMS", 2)
        patch.setattr(exchanges, "every_about", lambda card, split: every(card, split)[::12])
        yield


def made(root: Path) -> tuple[str, ...]:
    place = folder(root) / "phase8_final_compression" / "compressed"
    return tuple(files.sha256_of(place / name) for name in ("model.safetensors", "model.forge"))


def as_if_able(patch: pytest.MonkeyPatch, **counts: int) -> None:
    """Let models that were never trained pass for ones of which, of a hundred items, so many are
    right: by the names of points, 50 for all others."""

    def look(own: Skills, network: Any, name: str) -> Right:
        point = name.removeprefix("before ").removesuffix(", again") if "again" in name else name
        right = 50 if "before" in name else counts.get(point, 50)
        return {kind: [i < right for i in range(100)] for kind in ("memory", "tools")}

    patch.setattr(Skills, "right", look)


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return FinalCompressionPhase(settings.phases.final_compression, settings).plan([])


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: its file, the stages it took, and what was told of its points."""
    as_if_able(patch, coded_1=49, coded_2=48, student_1=46)
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    sets = (*stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:
        result = run(root, *sets, listener=told.append)["results"]["final_compression"]
        steps = [r["stage"] for r in told if r["event"] == "step"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        points = [(own["name"], own["gate"]) for own in result.artifacts["points"]]
        FINISHED[known] = made(root), steps, saves, points
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def taught(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is taught with which weights, and what is asked."""
    c, given = config(setting).phases.final_compression, forge_runs.ternary_model(root)
    given = replace(given, metadata={**given.metadata, **forge_runs.BAKED})
    opened: Any = given.open()
    ctx: Any = SimpleNamespace(seed=0, device="cpu", inputs=[given])
    own = Skills.of(ctx, c, opened.network.settings, opened.tokenizer)
    counts = {source.name: len(source.lengths) for source in own.taught.sources}
    asked = {kind: len(items) for kind, items in own._choices.items()}
    return own.mix, counts, asked, len(own.calibration(c.calibration_items))


def missed(setting: str, root: Path, patch: pytest.MonkeyPatch) -> str:
    """What is not kept by a point at which a kind falls from 50 to 42 of 100, another not."""
    before = {"a": [i < 50 for i in range(100)], "b": [i < 50 for i in range(100)]}
    after = {**before, "a": [i < 42 for i in range(100)]}
    c, none = config(setting).phases.final_compression, LatentModel(config().model, {}, None)
    ctx: Any = None
    own = Compression(ctx, c, ctx, none, 1, {}, before)
    return "; ".join(own._missed(before, after, g) for g in (c.first_gate, c.coded_gate))


CHECKS: dict[str, Any] = {
    f"{PHASE}.ratios": (finished, "[14]", "[12, 20]"),
    f"{PHASE}.student_ratios": (finished, "[]", "[28]"),
    f"{PHASE}.prune_vocabulary": (finished, "true", "false"),
    f"{PHASE}.allocate": (finished, "true", "false"),
    f"{PHASE}.thaw_steps": (finished, "0", "2"),
    f"{PHASE}.steps": (finished, "3", "4"),
    f"{PHASE}.student_steps": (finished, "4", "5"),
    f"{PHASE}.parent_share": (finished, "0.5", "0.9"),
    f"{PHASE}.control": (finished, "false", "true"),
    f"{PHASE}.calibration_items": (taught, "9", "30"),
    f"{PHASE}.first_gate": (missed, "0.9", "0.99"),
    f"{PHASE}.coded_gate": (missed, "0.9", "0.99"),
    f"{PHASE}.student_gate": (finished, "0.9", "0.99"),
    f"{PHASE}.least_retention": (missed, "0.8", "0.95"),
    f"{PHASE}.least_of_each": (missed, "0.8", "0.9"),
    f"{PHASE}.exchanges_share": (taught, "0.2", "0.5"),
    f"{PHASE}.persona_share": (taught, "0.2", "0.5"),
    f"{PHASE}.thoughts_share": (taught, "0.2", "0.5"),
    f"{PHASE}.examples": (taught, "30", "60"),
    f"{PHASE}.choice_items": (taught, "4", "12"),
    f"{PHASE}.tool_items": (planned, "60", "6000"),
    f"{PHASE}.thought_items": (planned, "2", "600"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "128", "192"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    **{
        key.replace(cognate_settings.PHASE, PHASE): check
        for key, check in cognate_settings.CHECKS.items()
        if check[0] in quietstar_runs.SHARED and not key.endswith(".own_share")
    },
}
