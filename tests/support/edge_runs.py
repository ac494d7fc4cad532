"""Small real runs of Phase 7, and what each of its settings changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_forge.config.settings import ModelSettings
from agent_forge.data import exchanges
from agent_forge.phases import skills
from agent_forge.phases.phase7_edge.phase import EdgePhase
from agent_forge.phases.phase7_edge.profiling import Profile, Profiler
from agent_forge.phases.phase7_edge.pruning import Importance, cuts_of
from agent_forge.phases.phase7_edge.search import EdgeSearch
from agent_forge.phases.skills import Right, Skills
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from tests.support import cognate_settings, forge_runs, quietstar_runs
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.edge"
TRAIN = f"{PHASE}.train"
FEW = (
    *(f"{PHASE}.cuts=2", f"{PHASE}.cut_steps=4", f"{PHASE}.examples=30", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    *(f"{PHASE}.families=[digit_max, copy, rotate]", f"{PHASE}.calibration_items=9"),
    *(f"{PHASE}.choice_items=4", f"{PHASE}.tool_items=4", f"{PHASE}.thought_items=2"),
    *(f"{PHASE}.checkpoint_every_steps=2", f"{PHASE}.share=0.1"),
)


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*forge_runs.SHAPE, *FEW, *sets))


def run(root: Path, *sets: str, listener: Any = None, **how: bool) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 7 alone."""
    begun = (folder(root) / "session.json").exists()
    of_run = (f"storage.root={root}", *SMALL, *forge_runs.SHAPE, *FEW, *sets)
    orchestrator = PipelineOrchestrator(
        config=load_config(preset="smoke", sets=of_run),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [forge_runs.ternary_model(root, phase="baking", **how)]
    with brief():
        outcome = orchestrator.run(only="edge", input_models=given)
    assert outcome["success"], outcome
    return outcome


@contextlib.contextmanager
def brief() -> Iterator[None]:
    """Few questions, few tokens for what a model that was never trained has to say, no program."""
    every = exchanges.every_about
    with quietstar_runs.brief_thoughts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(skills, "GREEDY", replace(skills.GREEDY, max_new_tokens=4))
        patch.setattr(skills, "THOUGHT_ITEMS", 2)
        patch.setattr(exchanges, "every_about", lambda card, split: every(card, split)[::12])
        patch.setattr(Profiler, "program", None)
        yield


def made(root: Path) -> tuple[str, ...]:
    place = folder(root) / "phase7_edge"
    names = [name for name in ("packed", "dequantised") if (place / name).exists()]
    return tuple(files.sha256_of(place / name / "model.safetensors") for name in names)


def as_if_able(patch: pytest.MonkeyPatch, *counts: int, **others: list[int]) -> None:
    """Let models that were never trained pass for ones of which, of a hundred items of a kind, so
    many are right at each look: of the input, and after every cut."""
    looks = {"memory": counts or (50,), "tools": (50,), **others}
    found: dict[str, Right] = {}

    def look(own: EdgeSearch, model: Any, name: str) -> Right:
        if "again" in name:  # the last cut is taken back
            return [*found.values()][-2]
        at = len(found)
        now = {kind: few[min(at, len(few) - 1)] for kind, few in looks.items()}
        return found.setdefault(name, {k: [i < n for i in range(100)] for k, n in now.items()})

    patch.setattr(EdgeSearch, "right", look)


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return EdgePhase(settings.phases.edge, settings).plan([])


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: its models, the stages it took, and what was told of its cuts."""
    as_if_able(patch, 50, 46)
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    sets = (*stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:
        result = run(root, *sets, listener=told.append)["results"]["edge"]
        steps = [r["stage"] for r in told if r["event"] == "step"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        cuts = [(own["kind"], own["taken_back"]) for own in result.artifacts["cuts"]]
        FINISHED[known] = made(root), steps, saves, cuts
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def limited(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """Which limits a model misses that takes a tenth of what came in."""
    first = Profile(10**6, 10**7, 10**7, 1.0, 10.0, 300.0, "torch")
    own = replace(first, model_bytes=10**6, total_bytes=10**6, token_ms=1.0, memory_mb=30.0)
    return own.missed(config(f"{PHASE}.share=0.5", setting).phases.edge.limits, first)


def taught(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is taught with which weights, what is asked, and what tells which matters."""
    settings = config(setting)
    c = settings.phases.edge
    given = forge_runs.ternary_model(root, phase="baking")
    opened, ctx = given.open(), SimpleNamespace(seed=0, device="cpu", inputs=[given])
    own = Skills.of(ctx, c, opened.network.settings, opened.tokenizer)
    counts = {source.name: len(source.lengths) for source in own.taught.sources}
    asked = {kind: len(items) for kind, items in own._choices.items()}
    return own.mix, counts, asked, len(own.calibration(c.calibration_items))


def offered(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The cuts that could be made of a network of 64 channels."""
    shape, c = ModelSettings(ffn_hidden=64), config(setting).phases.edge
    ones = Importance(*([torch.ones(count)] * 4 for count in (64, 4)))
    return cuts_of(shape, ones, c.kinds, c.channel_share)


CHECKS: dict[str, Any] = {
    f"{PHASE}.target": (planned, "phone", "pi"),
    f"{PHASE}.size_mb": (limited, "0.5", "2"),
    f"{PHASE}.share": (limited, "0.05", "0.5"),
    f"{PHASE}.latency_ms": (limited, "0.5", "2"),
    f"{PHASE}.tokens_per_s": (limited, "2000", "20"),
    f"{PHASE}.memory_mb": (limited, "20", "40"),
    f"{PHASE}.kinds": (finished, "[heads]", "[layers]"),
    f"{PHASE}.channel_share": (offered, "0.1", "0.9"),
    f"{PHASE}.cuts": (finished, "1", "2"),
    f"{PHASE}.cut_steps": (planned, "4", "5"),
    f"{PHASE}.parent_share": (finished, "0.5", "0.9"),
    f"{PHASE}.exchanges_share": (taught, "0.2", "0.5"),
    f"{PHASE}.persona_share": (taught, "0.2", "0.5"),
    f"{PHASE}.thoughts_share": (taught, "0.2", "0.5"),
    f"{PHASE}.examples": (taught, "30", "60"),
    f"{PHASE}.calibration_items": (taught, "9", "18"),
    f"{PHASE}.choice_items": (taught, "4", "12"),
    f"{PHASE}.tool_items": (planned, "60", "6000"),
    f"{PHASE}.thought_items": (planned, "2", "600"),
    f"{PHASE}.least_retention": (finished, "0.9", "0.97"),
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
