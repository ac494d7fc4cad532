"""Baking a prompt: afterwards the model answers without it as it did with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from agent_forge.errors import ConfigError
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.train.config import TrainSettings
from agent_forge.train.prompt_baking import PromptBakingLoss, kl_left, sampled_answers
from agent_forge.train.trainer import Trainer
from tests.support.networks import network

PROMPT = [40, 41, 42, 43]
QUESTIONS = [[100 + i, 101 + i, 102] for i in range(24)]
SAMPLING = SamplingSettings(6, temperature=1.0, seed=1)


def batches(teacher: ForgeNetwork) -> list[Any]:
    return sampled_answers(teacher, QUESTIONS, PROMPT, SAMPLING, rows=4)


def teacher() -> ForgeNetwork:
    """A network whose answers depend on what stands before."""
    model = network()
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    return model


def test_the_loss_is_the_divergence_from_the_prompted_self() -> None:
    prompted = teacher()
    student = network(n_layers=1)
    tokens, targets = batch = batches(prompted)[0]
    found = PromptBakingLoss(prompted, PROMPT)(student, batch, torch.Generator())
    given = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], 1)
    wanted = prompted(given)[:, len(PROMPT) :].log_softmax(-1)
    own = student(tokens).log_softmax(-1)
    asked = targets != -100
    plain = F.kl_div(own[asked], wanted[asked], log_target=True, reduction="sum") / asked.sum()
    assert found.count == int(asked.sum()) and found.total.item() == pytest.approx(plain.item())
    reverse = PromptBakingLoss(prompted, PROMPT, "reverse")(student, batch, torch.Generator())
    other = F.kl_div(wanted[asked], own[asked], log_target=True, reduction="sum") / asked.sum()
    assert reverse.total.item() == pytest.approx(other.item())
    few = PromptBakingLoss(prompted, PROMPT, top_k=512)(student, batch, torch.Generator())
    assert few.total.item() == pytest.approx(plain.item())
    fewer = PromptBakingLoss(prompted, PROMPT, top_k=5)(student, batch, torch.Generator())
    assert fewer.total.item() != pytest.approx(plain.item())


def test_before_baking_all_of_the_distance_is_left() -> None:
    prompted = teacher()
    batch = batches(prompted)[0]
    assert kl_left(prompted, copy.deepcopy(prompted), PROMPT, [batch]) == pytest.approx(1.0)


def test_what_cannot_be_baked_is_refused() -> None:
    prompted = teacher()
    with pytest.raises(ConfigError, match="no prompt"):
        PromptBakingLoss(prompted, [])
    with pytest.raises(ConfigError, match="different vocabularies"):
        batch = batches(prompted)[0]
        PromptBakingLoss(prompted, PROMPT)(network(vocab_size=600), batch, torch.Generator())
    silent = SamplingSettings(3, stop_tokens=frozenset(range(512)))
    with pytest.raises(ConfigError, match="no answer was sampled"):
        sampled_answers(prompted, QUESTIONS, PROMPT, silent, 4)


def test_a_row_is_one_question_with_the_answer_of_the_prompted_model() -> None:
    prompted = teacher()
    greedy = SamplingSettings(6)
    found = sampled_answers(prompted, QUESTIONS, PROMPT, greedy, rows=5)
    assert [len(tokens) for tokens, _ in found] == [5, 5, 5, 5, 4]
    said = generate(prompted, [[*PROMPT, *QUESTIONS[0]]], greedy)[0].tokens
    tokens, targets = found[0]
    assert tokens[0].tolist() == [*QUESTIONS[0], *said]
    assert targets[0].tolist() == [-100, -100, *said, -100]


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_baking_takes_most_of_the_distance(direction: Any) -> None:
    prompted = teacher()
    student = copy.deepcopy(prompted).requires_grad_(True)
    given = batches(prompted)
    settings = TrainSettings(
        optimizer=MuGrokConfig(muon_lr=0.005, fallback_lr=0.005), warmup_steps=2
    )
    trainer = Trainer(
        student,
        MuonGrokfast(student, settings.optimizer),
        PromptBakingLoss(prompted, PROMPT, direction),
        settings,
        total=40,
        generator=torch.Generator(),
    )
    before = {name: value.clone() for name, value in prompted.state_dict().items()}
    losses = [trainer.step(step, given[step % len(given)])["loss"] for step in range(1, 41)]
    assert sum(losses[-8:]) < 0.6 * sum(losses[:8]), losses
    if direction == "forward":
        assert kl_left(prompted, student, PROMPT, given) < 0.5
    for name, value in prompted.state_dict().items():
        assert torch.equal(value, before[name])
