"""P1 on a phase as real ones are: two stages, evaluation between, early stop, saves on the way."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhasePlan,
    PhaseResult,
)
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from tests.support.toy_runs import SMALL, die_at, exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


class Staged(PhaseController):
    """A trunk that may stop early, then two branches; every kind of call a phase can make."""

    name = "cognate"

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        return PhasePlan(30)

    def run(self, ctx: PhaseContext) -> PhaseResult:
        trunk, best = nn.Linear(3, 3), Best()
        for step in ctx.steps(40, {"trunk": trunk, "best": best}, stage="trunk"):
            best.loss = min(best.loss, train(trunk, ctx.generator("trunk")))
            ctx.log(step, {"toy/loss": best.loss})
            if step == 13:
                break
        ctx.log(None, {"toy/final_loss": best.loss})
        for branch in ("one", "two"):
            model = nn.Linear(3, 3)
            model.load_state_dict(trunk.state_dict())
            for step in ctx.steps(11, {"model": model}, stage=branch):
                loss = train(model, ctx.generator(f"data_{branch}"))  # first used inside the loop
                ctx.log(step, {"toy/loss": loss + float(torch.rand(()))})
                if step == 4:
                    ctx.save_model(f"{branch}_early", model, {"step": step})
            ctx.save_model(branch, model, {"step": 11})
            ctx.log(None, {"toy/final_loss": loss_of(model)})
        models = [ctx.model(name) for name in ("one_early", "one", "two_early", "two")]
        return PhaseResult(True, None, self.name, {}, {"models": models}, ctx.seconds)


class Best:
    """The lowest loss so far: it influences what is logged, so it is a part of the state."""

    loss = 1e9

    def state_dict(self) -> float:
        return self.loss

    def load_state_dict(self, state: float) -> None:
        self.loss = state


def loss_of(model: nn.Module) -> float:
    return float(model(torch.ones(1, 3)).square().mean().detach())


def train(model: nn.Module, generator: torch.Generator) -> float:
    x = torch.randn(8, 3, generator=generator)
    loss = model(x).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return float(loss.detach())


def run(root: Path, listener: Any = None) -> dict[str, Any]:
    sets = (*SMALL, "phases.cognate.checkpoint_every_steps=5", "tracking.sample_every_s=0.02")
    config = load_config(preset="smoke", sets=(f"storage.root={root}", *sets))
    runner = PipelineOrchestrator(
        config=config,
        session_id="r",
        resume=(folder(root) / "session.json").exists(),
        controllers={"cognate": Staged},
        listeners=[listener] if listener else [],
    )
    result = runner.run()
    assert result["success"], result
    return result


def outcome(root: Path) -> dict[str, Any]:
    names = ("one_early", "one", "two_early", "two")
    place = folder(root) / "phase1_cognate"
    state = files.read_checked(place / "state.json")
    return {
        "weights": [files.sha256_of(place / n / "model.safetensors") for n in names],
        "outputs": state["outputs"],
        "metrics": [m for m in metrics(root) if m[0] != "system"],
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run(tmp_path_factory.mktemp("warm"))
    root = tmp_path_factory.mktemp("reference")
    began = time.monotonic()
    assert exit_code(forked(lambda: run(root))) == 0
    return {"outcome": outcome(root), "seconds": time.monotonic() - began}


def test_the_reference_has_every_step(reference: dict[str, Any]) -> None:
    steps = [step for _, step, _ in reference["outcome"]["metrics"]]
    expected = [*range(1, 14), None, *range(1, 12), None, *range(1, 12), None, None]
    assert steps == expected and len(reference["outcome"]["outputs"]) == 4


@pytest.mark.parametrize("count", [1, 7, 13, 14, 18, 19, 24, 25, 30, 34])
def test_killed_at_a_step_of_any_stage(
    tmp_path: Path, reference: dict[str, Any], count: int
) -> None:
    pid = forked(lambda: run(tmp_path, die_at("step", count)))
    assert exit_code(pid) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert outcome(tmp_path) == reference["outcome"]


def test_killed_at_random_again_and_again(tmp_path: Path, reference: dict[str, Any]) -> None:
    chance = random.Random(7)
    for n in range(4):
        root = tmp_path / str(n)
        for _ in range(3):
            pid = forked(lambda root=root: run(root))  # type: ignore[misc]
            time.sleep(chance.uniform(0, reference["seconds"]))
            os.kill(pid, signal.SIGKILL)
            exit_code(pid)
        assert exit_code(forked(lambda root=root: run(root))) == 0  # type: ignore[misc]
        assert outcome(root) == reference["outcome"]


@pytest.mark.parametrize("stage", ["trunk", "one"])
def test_a_checkpoint_of_an_earlier_stage_may_be_damaged(
    tmp_path: Path, reference: dict[str, Any], stage: str
) -> None:
    exit_code(forked(lambda: run(tmp_path, die_at("step", 33))))
    places = folder(tmp_path) / "phase1_cognate" / "checkpoints" / stage
    newest = sorted(places.glob("step_*"))[-1]
    (newest / "tensors.safetensors").write_bytes(b"damaged")
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert outcome(tmp_path) == reference["outcome"]


def test_metrics_that_were_lost_are_told(tmp_path: Path) -> None:
    exit_code(forked(lambda: run(tmp_path, die_at("step", 30))))
    (folder(tmp_path) / "metrics.jsonl").write_bytes(b"")
    run(tmp_path)
    assert "metrics are missing" in (folder(tmp_path) / "log.jsonl").read_text()


def test_the_time_of_all_attempts_counts(tmp_path: Path) -> None:
    def slow(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 8:
            time.sleep(0.5)

    def die(record: dict[str, Any]) -> None:
        slow(record)
        die_at_12(record)

    die_at_12 = die_at("step", 12)
    began = time.monotonic()
    exit_code(forked(lambda: run(tmp_path, die)))
    run(tmp_path)
    state = files.read_checked(folder(tmp_path) / "phase1_cognate" / "state.json")
    assert 0.5 < state["seconds"] < time.monotonic() - began
