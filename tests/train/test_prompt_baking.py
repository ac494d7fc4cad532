"""Baking a prompt: afterwards the model answers without it as it did with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.train.bake import BakeSettings, bake, behind_prompt
from agent_forge.train.config import TrainSettings
from agent_forge.train.prompt_baking import (
    PromptBakingLoss,
    Question,
    answers_to,
    batch_of,
    mean_kl,
)
from agent_forge.train.trainer import Trainer
from tests.support.networks import network

PROMPT = [40, 41, 42, 43]
QUESTIONS = [[100 + i, 101 + i, 102] for i in range(24)]
SAMPLING = SamplingSettings(6, temperature=1.0, seed=1)


def sampled_answers(
    teacher: ForgeNetwork, questions: Any, prompt: list[int], sampling: SamplingSettings, rows: int
) -> list[Any]:
    """Batches of questions with the answers of the prompted teacher, without the prompt."""
    found = answers_to(teacher, behind_prompt(prompt, questions), sampling, prompted=True)
    return [batch_of(found[n : n + rows])[:2] for n in range(0, len(found), rows)]


def kl_left(teacher: ForgeNetwork, student: Any, prompt: list[int], given: Any) -> float:
    own, whole = (mean_kl(teacher, model, given, prompt) for model in (student, teacher))
    return own / whole


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


# -- bake -----------------------------------------------------------------------------------------

SHORT = BakeSettings(steps=40, rate=0.005, rows=4, samples=2, answer_tokens=6, renew_every=6)


def distance(prompted: ForgeNetwork, student: Any, prompt: list[int]) -> float:
    given = sampled_answers(prompted, QUESTIONS, prompt, SAMPLING, rows=8)
    return kl_left(prompted, student, prompt, given)


def test_rows_may_say_themselves_what_the_teacher_is_given() -> None:
    prompted, student = teacher(), network(n_layers=1)
    questions = behind_prompt(PROMPT, QUESTIONS[:5])
    answers = answers_to(prompted, questions, SAMPLING, prompted=True)
    plain = sampled_answers(prompted, QUESTIONS[:5], PROMPT, SAMPLING, rows=5)[0]
    own = batch_of(answers)
    assert torch.equal(own[0], plain[0]) and torch.equal(own[1], plain[1])
    losses = [
        PromptBakingLoss(prompted, prompt)(student, batch, torch.Generator()).total.item()
        for prompt, batch in ((PROMPT, plain), (None, own))
    ]
    assert losses[0] == pytest.approx(losses[1])
    odd = [Question([100, 101], [40, 100, 41, 101]), Question([7], [40, 41, 42, 7])]
    rows = answers_to(prompted, odd, SAMPLING, prompted=True)
    found = PromptBakingLoss(prompted, None)(student, batch_of(rows), torch.Generator())
    assert found.count == 12
    with torch.no_grad():
        total = 0.0
        for question, answer in rows:
            told = prompted(torch.tensor([[*question.told, *answer]]))[0, -7:-1].log_softmax(-1)
            said = student(torch.tensor([[*question.asked, *answer]]))[0, -7:-1].log_softmax(-1)
            total += F.kl_div(said, told, log_target=True, reduction="sum").item()
    assert found.total.item() == pytest.approx(total / 12, rel=1e-4)


def test_that_an_answer_ends_is_learned_too() -> None:
    prompted, question = teacher(), Question([7, 8], [40, 7, 8])
    said = generate(prompted, [question.told], SAMPLING)[0].tokens
    assert said[2] not in said[:2]
    ending = replace(SAMPLING, stop_tokens=frozenset([said[2]]))
    ((_, answer),) = answers_to(prompted, [question], ending, prompted=True)
    assert answer == said[:3]
    assert batch_of([(question, answer)])[1].tolist() == [[-100, *said[:3], -100]]


OTHERS = [{}, {"lora_rank": 0}, {"direction": "reverse"}]


@pytest.mark.parametrize("changes", OTHERS)
def test_bake_takes_most_of_the_distance_and_leaves_the_teacher_alone(changes: Any) -> None:
    prompted = teacher()
    before = {name: value.clone() for name, value in prompted.state_dict().items()}
    questions, settings = behind_prompt(PROMPT, QUESTIONS), replace(SHORT, **changes)
    told: list[tuple[str, int, int]] = []
    student = bake(prompted, questions, settings, progress=lambda *given: told.append(given))
    assert distance(prompted, student, PROMPT) < 0.75
    assert all(torch.equal(value, before[name]) for name, value in prompted.state_dict().items())
    assert told[-1] == ("training", 40, 40)


@pytest.mark.parametrize("changes", OTHERS)
def test_the_same_seed_gives_the_same_weights(changes: Any) -> None:
    prompted, few = teacher(), replace(SHORT, **{**changes, "steps": 3})
    questions = behind_prompt(PROMPT, QUESTIONS)
    first, again, other = (
        bake(prompted, questions, replace(few, seed=seed)).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_strength_scales_the_change() -> None:
    prompted, questions = teacher(), behind_prompt(PROMPT, QUESTIONS)
    few = replace(SHORT, steps=3)
    none, half, whole = (
        bake(prompted, questions, replace(few, strength=strength)).state_dict()
        for strength in (0.0, 0.5, 1.0)
    )
    for name, start in prompted.state_dict().items():
        assert torch.equal(none[name], start)
        assert torch.allclose(half[name], (start + whole[name]) / 2, atol=1e-6)


def test_a_second_prompt_is_baked_on_top_of_the_first() -> None:
    prompted, second = teacher(), [60, 61, 62]
    first = bake(prompted, behind_prompt(PROMPT, QUESTIONS), SHORT)
    both = bake(first, behind_prompt(second, QUESTIONS), SHORT)
    assert distance(first, both, second) < 0.75
    left = [distance(prompted, student, second + PROMPT) for student in (first, both)]
    assert left[1] < left[0] - 0.1 < 0.8


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"direction": "sideways"}, "neither forward nor reverse"),
        ({"strength": 2.0}, "not from 0 to 1.5"),
        ({"rate": -1.0}, "rate are at least 0"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(SHORT, **changes)


def test_bake_refuses_nothing_to_bake_and_says_when_it_diverges() -> None:
    with pytest.raises(ConfigError, match="no questions"):
        bake(teacher(), [], SHORT)
    with pytest.raises(ConfigError, match="no prompt"):
        behind_prompt([], QUESTIONS)
    wild = replace(SHORT, rate=1e6)
    with pytest.raises(NotFinite, match="diverged"):
        bake(teacher(), behind_prompt(PROMPT, QUESTIONS), wild)
