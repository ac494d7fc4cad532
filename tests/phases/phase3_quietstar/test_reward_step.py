"""The second step of Phase 3: questions at the edge, what guards it, and what is kept of it."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.data import tasks
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import Gain
from agent_forge.phases.phase3_quietstar.config import RewardSettings
from agent_forge.phases.phase3_quietstar.phase import QuietStarPhase
from agent_forge.phases.phase3_quietstar.reward_step import (
    HIGH,
    LOW,
    TIGHTER,
    QuestionPool,
    RewardGuard,
    is_kept,
)
from tests.support.quietstar_runs import PHASE, config, made, run
from tests.support.toy_runs import exit_code, folder, forked, metrics

REWARD = f"{PHASE}.reward"
KEY = "reward/train/loss"
SHORT = (f"{PHASE}.strategies=[step]", f"{PHASE}.thought_items=2", f"{REWARD}.check_items=1")
FEW = (*SHORT, f"{REWARD}.steps=3", f"{REWARD}.check_every=2", f"{REWARD}.questions=2")
CHAIN = f"{PHASE}.levels={{chain: [1, 1]}}"  # whose thoughts are short


# -- questions -------------------------------------------------------------------------------------


def pool() -> QuestionPool:
    return QuestionPool([tasks.make("chain", "train", i, level=2 + i % 3) for i in range(60)])


def test_questions_at_the_edge_of_ability_are_drawn_most() -> None:
    questions, generator = pool(), torch.Generator().manual_seed(0)
    of_level = {
        level: {n: share for n, item in enumerate(questions.items) if item.level == level}
        for level, share in ((2, 1.0), (3, 0.5), (4, 0.0))
    }
    for success in of_level.values():
        questions.latest.update(success)
    again, state = pool(), copy.deepcopy(questions.state_dict())
    drawn = [n for _ in range(200) for n in questions.draw(4, generator).tolist()]
    assert questions.success == {("chain", 2): 1.0, ("chain", 3): 0.5, ("chain", 4): 0.0}
    levels = [questions.items[n].level for n in drawn]
    assert levels.count(3) > 6 * levels.count(2) > 0 and levels.count(4) > 0
    again.load_state_dict(state)  # with what was seen last, and not taken in yet
    assert again.draw(4, torch.Generator().manual_seed(0)).tolist() == drawn[:4]
    many = questions.draw(500, generator).tolist()
    assert len(set(many)) == len(many)  # tries of the same question would be the same tries


def test_success_is_remembered_for_a_while() -> None:
    questions, generator = pool(), torch.Generator().manual_seed(0)
    for success in (1.0, 0.0, 0.0, 0.0):
        questions.latest[0] = success
        questions.draw(1, generator)
    assert LOW < questions.success[("chain", 2)] < HIGH


# -- what guards it --------------------------------------------------------------------------------


def guarded(checks: list[dict[str, Any]]) -> tuple[RewardGuard, nn.Module, list[str]]:
    model, told = nn.Linear(2, 2), []
    optimizer = torch.optim.AdamW(model.parameters())
    loss = SimpleNamespace(kl=0.1)
    trainer: Any = SimpleNamespace(model=model, optimizer=optimizer, loss=loss, factor=1.0)
    found = iter(checks)
    guard = RewardGuard(trainer, lambda name: next(found), 1, 0.03, told.append)
    return guard, model, told


def check(accuracy: float, theatre: bool = False) -> dict[str, Any]:
    return {"accuracy": accuracy, "theatre": theatre}


@pytest.mark.parametrize("bad", [check(0.7), check(0.9, theatre=True)])
def test_a_failed_check_goes_back_and_holds_tighter_and_a_second_one_ends_it(
    bad: dict[str, Any],
) -> None:
    guard, model, told = guarded([check(0.8), check(0.79), bad, check(0.8), bad])
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert guard.update() == pytest.approx(0.21) and not told
    good = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight.fill_(2.0)
    guard.trainer.optimizer.state[model.weight] = {"step": 1}
    guard.update()
    assert torch.equal(model.weight, good["weight"]) and not guard.trainer.optimizer.state
    assert guard.trainer.loss.kl == 0.1 * TIGHTER and len(told) == 1 and not guard.ended
    saved = copy.deepcopy(guard.state_dict())
    guard.update()
    guard.update()
    assert guard.ended and len(guard.reasons) == len(told) == 2
    guard.load_state_dict(saved)
    assert not guard.ended and guard.trainer.loss.kl == 0.1 * TIGHTER and guard.number == 2


def test_checks_after_a_divergence_are_of_other_weights() -> None:
    names: list[str] = []
    guard, _, _ = guarded([check(0.8)])
    guard.check = lambda name: (names.append(name), check(0.8))[1]
    guard.update()
    guard.number, guard.trainer.factor = 0, 0.5  # as a divergence leaves it
    guard.update()
    assert len(set(names)) == 2


def test_what_was_theatre_before_is_no_failure() -> None:
    guard, _, told = guarded([check(0.8, theatre=True), check(0.8, theatre=True)])
    guard.update()
    assert not told


@pytest.mark.parametrize(
    ("value", "low", "p", "old", "kept"),
    [
        (0.05, 0.02, 0.001, -0.01, True),
        (0.05, 0.02, 0.001, -0.05, False),
        (0.01, -0.01, 0.4, 0.0, False),
        (-0.05, -0.08, 0.001, 0.0, False),
    ],
)
def test_only_what_is_proved_and_harms_nothing_is_kept(
    value: float, low: float, p: float, old: float, kept: bool
) -> None:
    gain = Gain(0.5, 0.5 + value, value, low, value + 0.03, p, 2000, 100)
    assert is_kept(RewardSettings(), gain, old) is kept


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize(
    "sets",
    [
        (f"{REWARD}.kind=likelihood", CHAIN),
        (
            f"{REWARD}.kind=verified",
            f"{REWARD}.answers_only={{swap4: [1, 2]}}",
            CHAIN,
            f"{REWARD}.control=true",
            f"{REWARD}.control_steps=2",
        ),
    ],
)
def test_either_reward_is_taken_compared_and_told(sets: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run(tmp_path, *FEW, *sets)
    told = outcome["results"]["quietstar"].artifacts["reward"]
    assert "baked model" in told["verdict"] and isinstance(told["kept"], bool)
    logged = {name for _, _, values in metrics(tmp_path) for name in values}
    assert {"reward/train/reward", "phase/reward_gain", "phase/reward_kept"} <= logged
    assert ("reward/swap4/accuracy_taught_on" in logged) == (len(sets) > 2)
    card = (folder(tmp_path) / "phase3_quietstar" / "reasoning" / "README.md").read_text()
    assert "## Second step: rewards" in card
    if not told["kept"]:  # then the weights are those without the step
        plain = tmp_path / "plain"
        run(plain, *SHORT, CHAIN)
        assert made(plain) == made(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("kind", ["verified", "likelihood"])
def test_killed_among_its_steps_it_ends_in_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """Two steps behind a checkpoint: all that decides the next questions has to be in it."""
    sets = (f"{REWARD}.kind={kind}", f"{REWARD}.steps=6", f"{REWARD}.check_every=3", *SHORT)
    sets += (CHAIN, f"{REWARD}.questions=3", f"{REWARD}.samples=2")

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == "reward" and record.get("step") == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, *sets)
    assert exit_code(forked(lambda: run(killed, *sets, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(killed))) == 0
    found, expected = (
        [(step, v) for _, step, values in metrics(root) for v in [values.get(KEY)] if v is not None]
        for root in (killed, whole)
    )
    assert found == expected and len(found) == 6 and made(killed) == made(whole)


def test_rows_beyond_what_attention_sees_are_refused_before_any_work() -> None:
    sets = ("model.sw_window=160", f"{REWARD}.kind=likelihood")
    settings = config(*sets)
    with pytest.raises(ConfigError, match="attention sees 160"):
        QuietStarPhase(settings.phases.quietstar, settings).plan([])


def test_checks_that_leave_no_items_are_refused_before_any_work() -> None:
    few = (f"{REWARD}.kind=verified", f"{REWARD}.answers_only={{tot4: [1, 1]}}", CHAIN, *SHORT[:2])

    def phase(checked: int) -> QuietStarPhase:
        settings = config(*few, f"{REWARD}.check_items={checked}")
        return QuietStarPhase(settings.phases.quietstar, settings)

    assert phase(20).plan([]).steps
    with pytest.raises(ConfigError, match="tot4 has no more than 200 items"):
        phase(200).plan([])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("answers_only={chian: [1, 2]}", "no tasks 'chian'"),
        ("answers_only={swap4: [3, 1]}", "the lower first"),
        ("answers_only={chain: [1, 2]}", "has thoughts"),
        ("samples=1", "greater than or equal to 2"),
    ],
)
def test_rewards_that_cannot_be_are_refused(setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(f"{REWARD}.{setting}")
