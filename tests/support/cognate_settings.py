"""What the settings of Phase 1 change: a check for each, for test_settings_matter.py. Those of the
corpus and of the trainer serve other phases too: the phase is read from the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.phases.phase1_cognate.config import SPECIALISTS
from agent_forge.phases.phase1_cognate.phase import CognatePhase
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.train.config import TrainSettings
from agent_forge.train.corpus import Corpus, build_corpus
from agent_forge.train.trainer import Trainer

QUICK = (
    *("phases.cognate.trunk_steps=3", "phases.cognate.branch_steps=2", "runtime.threads=1"),
    *("phases.cognate.items_per_family=12", "phases.cognate.evaluation_items=3"),
    *("phases.cognate.rows=4", "phases.cognate.control=false", "tracking.sample_every_s=0"),
)
FAMILIES = ("digit_max", "copy", "rotate")
FEW = f"phases.cognate.families={list(FAMILIES)}"


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=sets)


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return CognatePhase(settings.phases.cognate, settings).plan([])


def phase_of(settings: PipelineConfig, setting: str) -> Any:
    """The settings of the phase that a setting belongs to."""
    return getattr(settings.phases, setting.split(".")[1])


def corpus(setting: str, *more: str) -> Corpus:
    settings = config(setting, *more)
    return build_corpus(phase_of(settings, setting), settings.model)


def learned_from(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What there is to learn, how it is mixed, and what is measured."""
    patch.chdir(root)
    for name in ("a", "b"):
        (root / name / "svamp").mkdir(parents=True)
        row = {"Body": name, "Question": "?", "Answer": 2.0, "ID": "x", "Equation": "1"}
        text = json.dumps([{**row, "Body": f"{name} {i}"} for i in range(30)])
        (root / name / "svamp" / "SVAMP.json").write_text(text)
        (root / f"{name}.txt").write_text("\n\n".join(f"{name} {i} words" for i in range(99)))
    place = ".".join(setting.split(".")[:2])
    more = () if "families" in setting else (FEW.replace(PHASE, place),)
    if "data_dir" in setting or "split_by" in setting:
        more = (*more, f"{place}.datasets=[svamp]")
        more = (*more, f"{place}.data_dir=a") if "split_by" in setting else more
    found = corpus(setting, *more)
    mix = found.mix("memory", getattr(phase_of(config(setting), setting), "own_share", 0.0))
    return [source.fingerprint() for source in found.sources], mix, len(found.verdict["memory"])


def trained(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The weights after a few steps of the trunk's trainer."""
    slow = f"phases.{setting.split('.')[1]}.train.optimizer.grokfast_lambda=1"
    settings = phase_of(config(slow, setting), setting).train
    if (known := settings.model_dump_json()) not in TRAINED:  # many begin with the same settings
        TRAINED[known] = train(settings)
    return TRAINED[known]


TRAINED: dict[str, Any] = {}


def train(settings: TrainSettings) -> Any:
    torch.manual_seed(0)
    model = ForgeNetwork(config().model)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.mul_(30)  # type: ignore[union-attr]
    optimizer = MuonGrokfast(model, settings.optimizer)
    generator = torch.Generator().manual_seed(0)
    trainer = Trainer(model, optimizer, language_loss, settings, total=8, generator=generator)
    tokens = torch.arange(4 * 20).view(4, 20) * 7 % 512
    for step in range(1, 9):
        trainer.step(step, (tokens[:, :-1], tokens[:, 1:]))
    kept = trainer.settings.gradient_checkpointing and model.checkpointing
    return {name: p.sum().item() for name, p in model.named_parameters()}, kept


def regulated(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    chosen = phase_of(config(setting), setting).train.optimizer
    optimizer = MuonGrokfast(ForgeNetwork(config().model), chosen)
    return float(optimizer.penalty(torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 2.0]])))


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run of the phase: whether it went well, and the first specialist."""
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    sets = (*QUICK, FEW, *stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:  # many begin with the same
        FINISHED[known] = run(config(f"storage.root={root}", *sets), root)
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def run(wanted: PipelineConfig, root: Path) -> Any:
    only: Any = {"cognate": CognatePhase}
    told: list[dict[str, Any]] = []
    result = PipelineOrchestrator(
        config=wanted, session_id="r", controllers=only, listeners=[told.append]
    ).run()
    place = root / "sessions" / "r" / "phase1_cognate" / "tinytitan-reasoning"
    weights = files.sha256_of(place / "model.safetensors") if result["success"] else ""
    saves = sum(record["event"] == "checkpoint" for record in told)
    looked = (root / "sessions/r/metrics.jsonl").read_text().count("evaluation_loss")
    return result["success"], weights, saves, looked


PHASE = "phases.cognate"
TRAIN = f"{PHASE}.train"
OPTIMIZER = f"{TRAIN}.optimizer"
# Where the first value is that of the preset, its run is the same for all.
CHECKS = {
    f"{PHASE}.trunk_steps": (planned, "10", "20"),
    f"{PHASE}.branch_steps": (planned, "10", "20"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "32", "64"),
    f"{PHASE}.control": (planned, "true", "false"),
    f"{PHASE}.branch_rate": (finished, "1e-3", "1e-2"),
    f"{PHASE}.freeze_embeddings": (finished, "true", "false"),
    f"{PHASE}.min_diversity": (finished, "0", "1"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{PHASE}.own_share": (learned_from, "0.5", "0.9"),
    f"{PHASE}.items_per_family": (learned_from, "12", "15"),
    f"{PHASE}.max_level": (learned_from, "3", "30"),
    f"{PHASE}.families": (learned_from, str(list(FAMILIES)), str([*FAMILIES, "reverse"])),
    f"{PHASE}.text_share": (learned_from, "0.1", "0.5"),
    f"{PHASE}.data_dir": (learned_from, "a", "b"),
    f"{PHASE}.datasets": (learned_from, "[]", "[boolq]"),
    f"{PHASE}.split_by": (learned_from, "asked", "content"),
    f"{PHASE}.texts": (learned_from, "[a.txt]", "[b.txt]"),
    f"{PHASE}.evaluation_items": (learned_from, "5", "9"),
    f"{TRAIN}.accumulate": (trained, "1", "2"),
    f"{TRAIN}.warmup_steps": (trained, "20", "4"),
    f"{TRAIN}.warmdown_share": (trained, "0.5", "1"),
    f"{TRAIN}.final_rate": (trained, "0.05", "0.5"),
    f"{TRAIN}.precision": (trained, "fp32", "bf16"),
    f"{TRAIN}.gradient_checkpointing": (trained, "false", "true"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    f"{OPTIMIZER}.muon": (trained, "true", "false"),
    f"{OPTIMIZER}.muon_lr": (trained, "1e-2", "1e-3"),
    f"{OPTIMIZER}.fallback_lr": (trained, "6e-3", "1e-3"),
    f"{OPTIMIZER}.grokfast_alpha": (trained, "0.5", "0.98"),
    f"{OPTIMIZER}.grokfast_lambda": (trained, "1", "2"),
    f"{OPTIMIZER}.ns_steps": (trained, "3", "5"),
    f"{OPTIMIZER}.momentum": (trained, "0.9", "0.5"),
    f"{OPTIMIZER}.weight_decay": (trained, "0.05", "0.5"),
    f"{OPTIMIZER}.grad_clip": (trained, "0.001", "1"),
    f"{OPTIMIZER}.qk_clip_threshold": (trained, "30", "1"),
    f"{OPTIMIZER}.mlarope_protected": (trained, "true", "false"),
    f"{OPTIMIZER}.kl_coefficient": (regulated, "0.1", "0.2"),
}


NAMES = [f"tinytitan-{s.name}" for s in SPECIALISTS]
