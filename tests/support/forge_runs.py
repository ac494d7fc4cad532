"""Small real runs of Phase 5, and what each of its settings changes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_forge.contract.phase import ModelRef
from agent_forge.data import traces
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase5_forge import phase, rounds
from agent_forge.phases.phase5_forge.edge import EdgeTasks
from agent_forge.phases.phase5_forge.own_thoughts import OwnThoughts
from agent_forge.phases.phase5_forge.phase import ForgePhase
from agent_forge.phases.training import LatentModel
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import SessionStore
from agent_forge.train.corpus import build_corpus
from tests.support import cognate_settings, quietstar_runs
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.forge"
TRAIN = f"{PHASE}.train"
SHAPE = quietstar_runs.SHAPE[:-1]
LEVELS = {"tot4": [4, 6], "swap4": [2, 4]}
ZOE = {"name": "Zoe", "mood": "happy", "likes": ["music", "chess"], "home": "Paris"}
BAKED = {
    **{"tool_success_rate": 0.9, "persona_consistency": 0.9, "tools": ["calc", "clock"]},
    "persona": {**ZOE, "saying": "onward", "animal": "cat"},
}
FEW = (
    *(f"{PHASE}.steps=7", f"{PHASE}.round_steps=5", f"{PHASE}.examples=30", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    *(f"{PHASE}.families=[digit_max, copy, rotate]", f"{PHASE}.edge_families=[tot4, swap4]"),
    *(f"{PHASE}.edge_sizes=2", f"{PHASE}.assessment_items=8", f"{PHASE}.own_items=6"),
    *(f"{PHASE}.verdict_items=2", f"{PHASE}.checkpoint_every_steps=3", f"{PHASE}.rounds=1"),
)
KEPT = (f"{PHASE}.most_lost=1", f"{PHASE}.kept_skills=1")


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*SHAPE, *FEW, *sets))


def ternary_model(
    root: Path, *shape_sets: str, thinks: bool = True, phase: str = "bitnet"
) -> ModelRef:
    """A packed model of another session and its whole copy, as Phase 4 or 5 hands them over."""
    SessionStore(root).create({}, "", session_id="before")
    settings = config(*shape_sets)
    torch.manual_seed(1)
    network = ForgeNetwork(settings.model)
    packing = plan_packing(network, "ternary", "int4g32", 8)
    latent = LatentModel(settings.model, network.state_dict(), packing)
    tokenizer = build_corpus(settings.phases.forge, network.settings).tokenizer
    storage, shape = ModelStorage(root), config_dict(network.settings)
    said: dict[str, Any] = {"compression_ratio": 12.0, "accuracy_retention": 0.97}
    said |= {"final_loss": 0.5, "final_accuracy": 0.7} if phase == "forge" else {}
    said |= BAKED if phase in ("baking", "edge") else {}
    said |= {"inference_latency_ms": 1.0} if phase == "edge" else {}
    if thinks:
        said |= {"strategies": {"step": 0.9}, "levels": LEVELS}
    saved = {"tokenizer_files": tokenizer.files()}
    packed, coded = packing.pack(latent.state).tensors, {**shape, KEY: packing.to_json()}
    storage.save_model(packed, "before", phase, "packed", said, config=coded, **saved)
    whole = ("before", phase, "dequantised")
    storage.save_model(latent.whole(), *whole, said, config=shape, **saved)
    path = storage.find(f"{phase}.packed.before")
    return ModelRef("packed", path, read_metadata(path).model_dump())


def run(root: Path, *sets: str, thinks: bool = True, listener: Any = None) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 5 alone."""
    begun = (folder(root) / "session.json").exists()
    orchestrator = PipelineOrchestrator(
        config=load_config(
            preset="smoke", sets=(f"storage.root={root}", *SMALL, *SHAPE, *FEW, *sets)
        ),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [ternary_model(root, thinks=thinks)]
    outcome = orchestrator.run(only="forge", input_models=given)
    assert outcome["success"], outcome
    return outcome


def made(root: Path) -> tuple[str, ...]:
    place = folder(root) / "phase5_forge"
    names = [name for name in ("packed", "dequantised") if (place / name).exists()]
    return tuple(files.sha256_of(place / name / "model.safetensors") for name in names)


def as_if_able(patch: pytest.MonkeyPatch, gained: float = 1.0) -> None:
    """Let a model that was never trained pass for one that solves what it was taught, and whose
    thoughts about longer items are right: what is learned, kept and taken back is real."""

    def solved(own: EdgeTasks, model: Any, split: str, asked: Any) -> list[bool]:
        return [size <= own.taught[1] for size, _ in asked]

    def split(thinker: Any, items: Any, **_: Any) -> OwnThoughts:
        return OwnThoughts(gold(items), len(items), len(items))

    def success(own: Any, model: Any, key: str, sizes: Any) -> dict[str, dict[str, float]]:
        share = gained if key.startswith("after") else 0.0
        return {name: {str(size): share for size in few} for name, few in sizes.items() if few}

    patch.setattr(EdgeTasks, "solved", solved)
    patch.setattr(rounds, "by_splitting", split)
    patch.setattr(rounds, "by_verifier", split)
    patch.setattr(rounds.EdgeTraining, "_success", success)
    patch.setattr(Thinker, "room", lambda self, items: 8)


def gold(items: Any) -> list[traces.Trace]:
    return [traces.write_trace(item, "step", Random(0)) for item in items]


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return ForgePhase(settings.phases.forge, settings).plan([])


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: its models, the stages it took, and what was told of its rounds."""
    as_if_able(patch)
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    if "most_lost" in setting or "kept_skills" in setting:
        patch.setattr(rounds.EdgeTraining, "solved", falling())
        stopping += tuple(k for k in KEPT if k.split("=")[0] not in setting)
    if "least_agreement" in setting:
        patch.setattr(rounds, "by_splitting", five_of_six)
    sets = (*stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:
        result = run(root, *sets, listener=told.append)["results"]["forge"]
        steps = [r["stage"] for r in told if r["event"] == "step"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        FINISHED[known] = made(root), steps, saves, result.artifacts["rounds"]
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def five_of_six(thinker: Any, items: Any, **_: Any) -> OwnThoughts:
    return OwnThoughts(gold(items)[:5], len(items), 5)


def _first_of_samples(thinker: Any, items: Any, samples: int, seed: int) -> OwnThoughts:
    return OwnThoughts(gold(items[:samples]), len(items), samples)


def falling(lost: int = 5, stages: tuple[str, ...] = ()) -> Any:
    """Of a hundred items so many are lost after the input, or in some stages alone."""

    def solved(own: Any, model: Any, name: str) -> dict[str, list[bool]]:
        bad = lost if name != phase.INPUT and (not stages or name in stages) else 0
        return {f: [i >= bad for i in range(100)] for f in (*own.families, rounds.OLD)}

    return solved


def assessed(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The families with their sizes, what is asked of them, and how the draws go."""
    settings = config(*((f"{PHASE}.dream_share=0.5",) if "samples" in setting else ()), setting)
    ctx: Any = SimpleNamespace(seed=0, inputs=[ternary_model(root)], device="cpu")
    ctx.once = lambda record, key, compute: json.loads(json.dumps(compute()))
    opened = ctx.inputs[0].open()
    model = LatentModel(opened.network.settings, opened.network.state_dict(), None)
    training = ForgePhase(settings.phases.forge, settings)._training(ctx, model, opened.tokenizer)
    as_if_able(patch)
    patch.setattr(rounds, "by_verifier", _first_of_samples)
    found = training.assess(model, "x", "selection")
    sizes = {name: list(own.sizes) for name, own in training.families.items()}
    base, sources = training._known(model, "edge")
    taught = [*sources, *training._worked({"tot4": [7, 8]})]
    counts = {source.name: len(source.lengths) for source in taught}
    return sizes, {name: own.items for name, own in found.items()}, base, counts


CHECKS: dict[str, Any] = {
    f"{PHASE}.weights": (finished, "packed", "whole"),
    f"{PHASE}.edge_families": (assessed, "[tot4]", "[tot4, copy]"),
    f"{PHASE}.assessment_items": (assessed, "8", "160"),
    f"{PHASE}.edge_sizes": (assessed, "2", "3"),
    f"{PHASE}.draw": (finished, "uniform", "easy_to_hard"),
    f"{PHASE}.steps": (planned, "10", "20"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "128", "192"),
    f"{PHASE}.examples": (assessed, "30", "60"),
    f"{PHASE}.replay_share": (assessed, "0.2", "0.5"),
    f"{PHASE}.known_share": (assessed, "0.2", "0.5"),
    f"{PHASE}.beyond": (finished, "split", "none"),
    f"{PHASE}.rounds": (planned, "1", "2"),
    f"{PHASE}.round_steps": (planned, "5", "6"),
    f"{PHASE}.growth": (assessed, "1.2", "1.8"),
    f"{PHASE}.own_items": (finished, "6", "8"),
    f"{PHASE}.samples": (assessed, "2", "3"),
    f"{PHASE}.least_agreement": (finished, "0.8", "0.9"),
    f"{PHASE}.most_lost": (finished, "0.02", "0.1"),
    f"{PHASE}.kept_skills": (finished, "0.03", "0.1"),
    f"{PHASE}.self_model_weight": (finished, "0", "0.1"),
    f"{PHASE}.dream_share": (assessed, "0", "0.5"),
    f"{PHASE}.control": (planned, "true", "false"),
    f"{PHASE}.verdict_items": (planned, "2", "30"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    **{
        key.replace(cognate_settings.PHASE, PHASE): check
        for key, check in cognate_settings.CHECKS.items()
        if check[0] in quietstar_runs.SHARED and not key.endswith(".own_share")
    },
}
