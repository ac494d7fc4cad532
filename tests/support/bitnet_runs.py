"""Small real runs of Phase 4, and what each of its settings changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_forge.contract.phase import ModelRef
from agent_forge.data import traces
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase4_bitnet.calibration import calibration_items
from agent_forge.phases.phase4_bitnet.phase import BitNetPhase
from agent_forge.phases.phase4_bitnet.rounding import RoundedTraining
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import SessionStore
from agent_forge.train.corpus import build_corpus
from tests.support import cognate_settings, quietstar_runs
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.bitnet"
TRAIN = f"{PHASE}.train"
SHAPE = quietstar_runs.SHAPE[:-1]
FEW = (
    *(f"{PHASE}.steps=7", f"{PHASE}.examples=40", f"{PHASE}.thought_items=5", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    *(f"{PHASE}.families=[digit_max, copy, rotate]", f"{PHASE}.calibration_samples=6"),
    *(f"{PHASE}.revert_steps=2", f"{PHASE}.checkpoint_every_steps=3"),
)


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*SHAPE, *FEW, *sets))


def reasoner(root: Path, *, thinks: bool = True) -> ModelRef:
    """A model of another session, as Phase 3 would hand it over."""
    SessionStore(root).create({}, "", session_id="before")
    settings = config()
    torch.manual_seed(1)
    model = ForgeNetwork(settings.model)
    tokenizer = build_corpus(settings.phases.bitnet, model.settings).tokenizer
    storage, shape = ModelStorage(root), config_dict(model.settings)
    said: dict[str, Any] = {"coherence_score": 0.7, "validity_rate": 0.8, "accuracy": 0.9}
    if thinks:
        said["strategies"] = {"step": 0.9, "doubt": 0.9, "uncertain": 0.5}
        said["levels"] = {name: list(levels) for name, levels in traces.LEVELS.items()}
    names = ("before", "quietstar", "reasoning")
    storage.save_model(model, *names, said, config=shape, tokenizer_files=tokenizer.files())
    path = storage.find("quietstar.reasoning.before")
    return ModelRef("reasoning", path, read_metadata(path).model_dump())


def run(root: Path, *sets: str, thinks: bool = True, listener: Any = None) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 4 alone."""
    begun = (folder(root) / "session.json").exists()
    orchestrator = PipelineOrchestrator(
        config=load_config(
            preset="smoke", sets=(f"storage.root={root}", *SMALL, *SHAPE, *FEW, *sets)
        ),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [reasoner(root, thinks=thinks)]
    with quietstar_runs.brief_thoughts():
        outcome = orchestrator.run(only="bitnet", input_models=given)
    assert outcome["success"], outcome
    return outcome


def made(root: Path) -> tuple[str, str]:
    place = folder(root) / "phase4_bitnet"
    return tuple(  # type: ignore[return-value]
        files.sha256_of(place / name / "model.safetensors") for name in ("packed", "dequantised")
    )


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return BitNetPhase(settings.phases.bitnet, settings).plan([])


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: its models, the stages it took, and what was told."""
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    if "revert" in setting:
        stopping = (f"{PHASE}.ladder=conservative",)
        patch.setattr(RoundedTraining, "_accuracy", _falling())
    sets = (*stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:
        result = run(root, *sets, listener=told.append)["results"]["bitnet"]
        steps = [r["stage"] for r in told if r["event"] == "step"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        FINISHED[known] = made(root), steps, saves, result.artifacts["summary"].split(",")[2:]
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def _falling() -> Any:
    """An accuracy of which half is lost by every model that is looked at."""
    seen: list[int] = []
    return lambda self, model: 0.5 ** (seen.append(1) or len(seen))  # type: ignore[func-returns-value]


def calibrated(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The items that sensitivity is measured on."""
    patch.chdir(root)
    (root / "own.txt").write_text("\n\n".join(f"a story of {i} words" for i in range(400)))
    settings = config(setting)
    c = settings.phases.bitnet
    corpus = build_corpus(c, settings.model)
    return calibration_items(corpus, c.calibration_dataset, c.calibration_samples)


def taught(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is learned about thinking, and how it is mixed with the old."""
    settings = config(setting)
    ctx: Any = SimpleNamespace(seed=0, inputs=[reasoner(root)])
    corpus = build_corpus(settings.phases.bitnet, settings.model)
    lessons = BitNetPhase(settings.phases.bitnet, settings)._lessons(ctx, corpus.tokenizer)
    assert lessons is not None
    return lessons.mix(corpus, list(lessons.traces)), [s.fingerprint() for s in lessons.sources()]


CHECKS: dict[str, Any] = {
    f"{PHASE}.codec": (finished, "ternary", "int3g32"),
    f"{PHASE}.embedding_codec": (finished, "int4g32", "int8"),
    f"{PHASE}.activation_bits": (finished, "8", "0"),
    f"{PHASE}.ladder": (finished, "standard", "conservative"),
    f"{PHASE}.calibration_dataset": (calibrated, "tasks", "own.txt"),
    f"{PHASE}.calibration_samples": (calibrated, "3", "6"),
    f"{PHASE}.steps": (planned, "10", "20"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "128", "192"),
    f"{PHASE}.control": (planned, "true", "false"),
    f"{PHASE}.revert_steps": (finished, "1", "2"),
    f"{PHASE}.most_reverts": (finished, "1", "2"),
    f"{PHASE}.parent_share": (finished, "0.5", "0.9"),
    f"{PHASE}.thoughts_share": (taught, "0.2", "0.5"),
    f"{PHASE}.examples": (taught, "40", "60"),
    f"{PHASE}.thought_items": (planned, "5", "60"),
    f"{PHASE}.least_retention": (finished, "0.0001", "1"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    **{
        key.replace(cognate_settings.PHASE, PHASE): check
        for key, check in cognate_settings.CHECKS.items()
        if check[0] in quietstar_runs.SHARED and not key.endswith(".own_share")
    },
}
