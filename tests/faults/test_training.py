"""P1 on real training: killed, stopped, diverged or short of memory, it ends in the same bytes."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhasePlan,
    PhaseResult,
)
from agent_forge.model.hf import config_dict
from agent_forge.model.loss import LossOutput, language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.track.journal import read_lines
from agent_forge.train.config import TrainSettings
from agent_forge.train.fit import EarlyStop, fit
from agent_forge.train.trainer import Trainer
from tests.support.toy_runs import SMALL, die_at, exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
SHAPE = (
    *("model.vocab_size=300", "model.embed_rank=8", "model.d_model=16", "model.n_layers=1"),
    *("model.n_heads=2", "model.ffn_hidden=16", "model.d_mem=8", "model.gate_hidden=8"),
    *("model.trm_hidden=8", "runtime.threads=1", "phases.cognate.checkpoint_every_steps=5"),
)


class Training(PhaseController):
    """Train a small network; the trouble asked for happens on the way."""

    name = "cognate"
    trouble = ""

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        return PhasePlan(24)

    def run(self, ctx: PhaseContext) -> PhaseResult:
        torch.manual_seed(ctx.seed)
        model = ForgeNetwork(self.shared.model)
        data = ctx.generator("data")
        settings = TrainSettings(optimizer=MuGrokConfig(grokfast_lambda=0.3), warmup_steps=2)
        optimizer = MuonGrokfast(model, settings.optimizer)
        trainer = Trainer(
            model,
            optimizer,
            self.loss,
            settings,
            total=24,
            generator=ctx.generator("loss"),
            decisions=ctx.decisions,
        )
        self.trainer = trainer

        def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.randint(0, 30, (4, 9), generator=data)
            return tokens[:, :-1], tokens[:, 1:]

        def measure() -> float:
            tokens = torch.arange(16).view(2, 8)
            model.eval()
            with torch.no_grad():
                return language_loss(model, (tokens, tokens), torch.Generator()).values["loss"]

        early_stop = EarlyStop(measure, every_steps=4)
        fit(ctx, trainer, batch, parts={}, evaluation=early_stop)
        done = trainer.steps_seen
        assert done == 24
        saved = ctx.save_model("net", model, {"step": done}, config=config_dict(model.settings))
        return PhaseResult(True, None, self.name, {}, {"models": [saved]}, ctx.seconds)

    def loss(self, model: Any, piece: Any, generator: torch.Generator) -> LossOutput:
        seen, factor = self.trainer.steps_seen, self.trainer.factor
        loss = language_loss(model, piece, generator)
        if self.trouble == "diverges" and seen == 12 and factor > 0.3:
            loss.values["loss"] = math.nan
        if self.trouble == "diverges early" and seen == 2 and factor > 0.6:
            loss.values["loss"] = math.inf
        if self.trouble == "always diverges" and seen == 12:
            loss.values["loss"] = math.nan
        short = self.trouble == "memory once" and not (Path(self.trouble_file)).exists()
        if short and seen == 7:
            Path(self.trouble_file).touch()
            raise torch.OutOfMemoryError("out of memory")
        return loss


def run(
    root: Path,
    trouble: str = "",
    listener: Any = None,
    stop_at: int = 0,
    sets: tuple[str, ...] = (),
) -> dict[str, Any]:
    config = load_config(preset="smoke", sets=(f"storage.root={root}", *SMALL, *SHAPE, *sets))
    name = f"{trouble} {root.name}".replace(" ", "_")
    file = str(root.parent / f"oom_{name}")
    controller = type("Controller", (Training,), {"trouble": trouble, "trouble_file": file})

    def stop(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    runner = PipelineOrchestrator(
        config=config,
        session_id="r",
        resume=(folder(root) / "session.json").exists(),
        controllers={"cognate": controller},
        listeners=[listener or stop],
    )
    return runner.run()


def complete(root: Path, trouble: str = "") -> None:
    """Run or resume in a child, to the end."""

    def work() -> None:
        assert run(root, trouble)["success"]

    assert exit_code(forked(work)) == 0


def outcome(root: Path) -> dict[str, Any]:
    model = folder(root) / "phase1_cognate" / "net"
    files.verify(model)
    return {
        "weights": files.sha256_of(model / "model.safetensors"),
        "metrics": [m for m in metrics(root) if m[0] != "system"],
    }


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    records = (record for _, record in read_lines(folder(root) / "events.jsonl"))
    return [record for record in records if record["event"] == kind]


TROUBLES = ("", "diverges", "diverges early", "memory once")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for trouble in TROUBLES:
        root = tmp_path_factory.mktemp("reference")
        began = time.monotonic()
        complete(root, trouble)
        found[trouble] = (outcome(root), root, time.monotonic() - began)
    return found


def test_two_equal_runs_are_equal_to_the_byte(tmp_path: Path, references: dict[str, Any]) -> None:
    complete(tmp_path)
    assert outcome(tmp_path) == references[""][0]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("count", [3, 9, 11, 17])
def test_killed_at_a_step_it_ends_in_the_same_bytes(
    tmp_path: Path, references: dict[str, Any], trouble: str, count: int
) -> None:
    assert exit_code(forked(lambda: run(tmp_path, trouble, die_at("step", count)))) != 0
    complete(tmp_path, trouble)
    assert outcome(tmp_path) == references[trouble][0]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_stopped_on_the_way_it_ends_in_the_same_bytes(
    tmp_path: Path, references: dict[str, Any], trouble: str
) -> None:
    for step in (2, 6, 8, 11):  # checkpoints of an interruption, between the regular ones
        exit_code(forked(lambda step=step: run(tmp_path, trouble, stop_at=step)))  # type: ignore[misc]
    complete(tmp_path, trouble)
    assert outcome(tmp_path) == references[trouble][0]


def test_killed_at_random_again_and_again(tmp_path: Path, references: dict[str, Any]) -> None:
    chance = random.Random(5)
    for trouble in ("", "diverges"):
        expected, _, seconds = references[trouble]
        root = tmp_path / f"x{trouble}"
        for _ in range(3):
            pid = forked(lambda root=root, t=trouble: run(root, t))  # type: ignore[misc]
            time.sleep(chance.uniform(0.3, 1) * seconds)
            os.kill(pid, signal.SIGKILL)
            exit_code(pid)
        complete(root, trouble)
        assert outcome(root) == expected


def test_a_divergence_goes_back_and_halves_the_rate(references: dict[str, Any]) -> None:
    _, root, _ = references["diverges"]
    backs = events(root, "rolled_back")
    assert [(e["at"], e["to"]) for e in backs] == [(13, 10), (13, 10)]
    assert "the loss became nan" in backs[0]["reason"]
    rates = {step: m["main/train/rate"] for _, step, m in metrics(root) if "main/train/rate" in m}
    assert rates[10] == 1.0 and rates[11] == 0.25 and rates[12] == 0.25
    early = events(references["diverges early"][1], "rolled_back")
    assert [(e["at"], e["to"]) for e in early] == [(3, 0)]


def test_all_that_training_can_log_is_logged(references: dict[str, Any]) -> None:
    logged = {find_metric(name) for _, _, m in references[""][0]["metrics"] for name in m}
    table = {m for m in METRICS if m.name.startswith("{}/train/")}
    taught = {"divergence"}  # needs a teacher, and these rewards
    taught |= {"reward", "taught_share", "thought_gain", "self_model_error"}
    assert {m.name for m in table - logged} == {f"{{}}/train/{name}" for name in taught}


def test_a_lack_of_memory_is_written_down(references: dict[str, Any]) -> None:
    _, root, _ = references["memory once"]
    record = files.read_checked(folder(root) / "phase1_cognate" / "decisions.json")
    assert record["decisions"] == [{"stage": "", "name": "pieces", "step": 8, "value": 2}]


def test_what_always_diverges_fails_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    result = run(tmp_path, "always diverges")
    assert not result["success"] and "diverges even at" in result["error"]
    places = folder(tmp_path) / "phase1_cognate" / "checkpoints" / "main"
    assert [p.name for p in sorted(places.iterdir())] == ["step_00000005", "step_00000010"]
    for place in places.iterdir():
        files.verify(place)


def test_a_checkpoint_of_another_config_is_refused_and_kept(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    exit_code(forked(lambda: run(mine, "", die_at("step", 3))))
    exit_code(forked(lambda: run(other, "", die_at("step", 7), sets=("model.d_model=32",))))
    place = Path("phase1_cognate", "checkpoints", "main")
    shutil.copytree(folder(other) / place, folder(mine) / place, dirs_exist_ok=True)
    result = run(mine)
    assert not result["success"] and "belongs to other settings or inputs" in result["error"]
    files.verify(folder(mine) / place / "step_00000005")
