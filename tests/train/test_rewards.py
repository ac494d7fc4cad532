"""Rewards: the estimators' means are the exact gradients, where all thoughts can be enumerated."""

from __future__ import annotations

import copy
import itertools
from itertools import product

import pytest
import torch
from torch import Tensor

from agent_forge.data.loader import IGNORE
from agent_forge.infer.generate import GeneratedText, SamplingSettings
from agent_forge.model.branches import Branches, Trunk
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.train.config import TrainSettings
from agent_forge.train.rewards import (
    LikelihoodGain,
    MixingHead,
    VerifiedReward,
    advantages,
    sample_thoughts,
)
from agent_forge.train.trainer import Trainer
from tests.support.networks import settings, shake

VOCABULARY, LENGTH = 4, 2
ALL = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))  # every try
PROMPT = [1, 2, 0]
WORTH = {tuple(row): float((7 * row[0] + 5 * row[1]) % 3 == 1) for row in ALL.tolist()}


def toy(seed: int = 0) -> ForgeNetwork:
    torch.manual_seed(seed)
    shape = settings().model_copy(update={"vocab_size": VOCABULARY})
    model = shake(ForgeNetwork(shape), seed)
    assert isinstance(model, ForgeNetwork)
    return model


def flat(model: ForgeNetwork) -> Tensor:
    """The gradient of all weights; 0 of those that have none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in grads])


def alike(found: Tensor, exact: Tensor) -> float:
    """How far apart two gradients are, as a share of the exact one."""
    return float((found - exact).norm() / exact.norm())


# -- verified answers -----------------------------------------------------------------------------


def verified(model: ForgeNetwork, samples: int, kl: float = 0.0) -> VerifiedReward:
    def verify(question: int, text: GeneratedText) -> bool:
        return bool(WORTH[(text.tokens[0], text.tokens[1])])

    how = SamplingSettings(LENGTH, temperature=1.0, halt_threshold=1.0)
    return VerifiedReward([PROMPT], verify, copy.deepcopy(model), how, samples, kl)


def try_log_p(model: ForgeNetwork) -> Tensor:
    """The log-probability of every try."""
    rows = torch.cat([torch.tensor(PROMPT).expand(len(ALL), -1), ALL], 1)
    log_p = model(rows[:, :-1]).log_softmax(-1)[:, -LENGTH:]
    return log_p.gather(-1, ALL[..., None])[..., 0].sum(1)


def test_verified_answers_give_the_gradient_of_the_expected_reward() -> None:
    model, rewards = toy(), torch.tensor([WORTH[tuple(row)] for row in ALL.tolist()])
    (-(try_log_p(model).exp() * rewards).sum() / LENGTH).backward()
    exact, found = flat(model), torch.zeros(())
    samples, times = 400, 12
    reward = verified(model, samples)
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        reward(model, (torch.tensor([0]),), generator).total.backward()
        found = found + flat(model) / times
    assert alike(found, exact * (1 - 1 / samples)) < 0.1
    assert alike(-found, exact) > 1.5  # the sign is seen


def test_what_has_no_variance_teaches_nothing() -> None:
    assert advantages(torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1]])).tolist() == [
        [0.5, -0.5, -0.5, 0.5],
        [0.0, 0.0, 0.0, 0.0],
    ]
    model = toy()
    reward = verified(model, 4)
    reward.verify = lambda question, text: True
    loss = reward(model, (torch.tensor([0]),), torch.Generator().manual_seed(0))
    loss.total.backward()
    assert loss.values["taught_share"] == 0 and loss.values["reward"] == 1
    assert reward.success == {0: 1.0} and float(flat(model).abs().max()) < 1e-6


def test_tries_are_held_near_the_reference() -> None:
    """The divergence pulls back, token by token, and is 0 at the reference itself."""
    model = toy()
    reward = verified(model, 64, kl=100.0)  # beside which the advantages are small
    same = reward(model, (torch.tensor([0]),), torch.Generator().manual_seed(0))
    assert abs(same.values["divergence"]) < 1e-6
    reward.reference = toy(1)
    before = reward(model, (torch.tensor([0]),), torch.Generator().manual_seed(0))
    before.total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.0002 * parameter.grad
    after = reward(model, (torch.tensor([0]),), torch.Generator().manual_seed(0))
    assert 0 < after.values["divergence"] < before.values["divergence"]


def test_tries_of_any_length_weigh_their_own_tokens_alone() -> None:
    """Two questions, texts that end by themselves or not: the loss, computed by hand."""
    model, stop = toy(), 3
    how = SamplingSettings(4, temperature=1.0, halt_threshold=1.0, stop_tokens=frozenset([stop]))
    prompts = [[1, 2, 0], [0, 1, 1, 2, 2]]
    tried: dict[int, list[GeneratedText]] = {0: [], 1: []}

    def verify(question: int, text: GeneratedText) -> bool:
        tried[question].append(text)
        return len(text.tokens) % 2 == 1

    reward = VerifiedReward(prompts, verify, toy(1), how, 6, kl=0.5)
    loss = reward(model, (torch.tensor([0, 1]),), torch.Generator().manual_seed(1))
    assert loss.values["taught_share"] == 1.0
    assert {text.stopped_by for texts in tried.values() for text in texts} == {"token", "length"}
    policy, distances, count = 0.0, [], 0
    for question, texts in tried.items():
        right = [float(len(text.tokens) % 2) for text in texts]
        for text, worth in zip(texts, right, strict=True):
            ends = [stop] if text.stopped_by == "token" else []
            sampled = [*text.tokens, *ends]
            row = torch.tensor([[*prompts[question], *sampled]])[:, :-1]
            mine, other = (net(row).log_softmax(-1)[0, -len(sampled) :] for net in (model, toy(1)))
            log_p = mine.gather(-1, torch.tensor(sampled)[:, None]).sum()
            policy -= float((worth - sum(right) / len(right)) * log_p)
            distances += (mine.exp() * (mine - other)).sum(-1).tolist()
            count += len(sampled)
    expected = policy / count + 0.5 * sum(distances) / len(distances)
    assert loss.count == count and float(loss.total) == pytest.approx(expected, abs=1e-5)


def test_what_nothing_was_learned_from_changes_no_weight() -> None:
    """Muon would make a whole step of any gradient, however small."""
    model = toy()
    reward = verified(model, 4, kl=1.0)
    reward.verify = lambda question, text: True
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(
        model,
        MuonGrokfast(model, MuGrokConfig()),
        reward,
        TrainSettings(),
        total=3,
        generator=torch.Generator().manual_seed(0),
    )
    trainer.step(1, (torch.tensor([0]),))
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    turns = itertools.cycle([True, False])
    reward.verify = lambda question, text: next(turns)
    trainer.step(2, (torch.tensor([0]),))
    assert not torch.equal(before["projection.weight"], model.projection.weight)


# -- likelihood -----------------------------------------------------------------------------------

BEGIN, END = 2, 3
TEXT = torch.tensor([[1, 0, 3, 1, 2]])
TARGETS = torch.tensor([[IGNORE, IGNORE, 1, 2, 0]])  # three places that could be difficult


def gain(model: ForgeNetwork, nll_share: float = 0.0, kl: float = 0.0) -> LikelihoodGain:
    how = {"thoughts": 2, "length": LENGTH, "places": 1, "ahead": 2}
    return LikelihoodGain(copy.deepcopy(model), BEGIN, END, **how, kl=kl, nll_share=nll_share)


def thinking_toy() -> ForgeNetwork:
    model = toy()
    model.mixing = shake(MixingHead(model.settings.d_model), 3)
    return model


def enumerated(model: ForgeNetwork, place: int) -> tuple[Tensor, Tensor]:
    """Of every thought at a place: its log-probability, and that of the true tokens after it."""
    marks = [torch.full((len(ALL), 1), token) for token in (BEGIN, END)]
    true = TARGETS[0, place : place + 2]
    given = torch.cat([marks[0], ALL, marks[1], true[:1].expand(len(ALL), 1)], 1)
    rows = torch.cat([TEXT[:, : place + 1].expand(len(ALL), -1), given], 1)
    states = model.answers(model.features(rows).x)[:, -len(given[0]) :]
    log_p = model.logits(model.hidden(states[:, :LENGTH])).log_softmax(-1)
    thought = log_p.gather(-1, ALL[..., None])[..., 0].sum(1)
    plain = model.answers(model.features(TEXT).x)[:, place : place + 2].expand(len(ALL), -1, -1)
    thinking = states[:, -2:]
    share = model.mixing(plain, thinking)  # type: ignore[operator]
    logits = (1 - share) * model.logits(model.hidden(plain))
    logits = logits + share * model.logits(model.hidden(thinking))
    likely = logits.log_softmax(-1).gather(-1, true.expand(len(ALL), -1)[..., None])
    return thought, likely[..., 0].sum(1)


def test_likelihood_gains_give_the_gradient_of_their_expectation() -> None:
    """Over all pairs of thoughts: what each is worth depends on the other."""
    model, generator = thinking_toy(), torch.Generator().manual_seed(0)
    reward = gain(model)
    with torch.no_grad():
        answers = model.answers(model.features(TEXT).x)
        place = int(reward._difficult(model, answers, TARGETS))
    assert place >= 2
    thought, likely = enumerated(model, place)
    mean = (likely[:, None] + likely[None]) / 2
    worth = (likely[:, None] - mean).clamp(min=0).detach()  # of the first of each pair
    chances = thought.detach().exp()
    expected = (chances[:, None] * chances[None] * worth * thought[:, None]).sum()
    (-expected / LENGTH).backward()
    exact, found, times = flat(model), torch.zeros(()), 20
    many = TEXT.repeat(100, 1), TARGETS.repeat(100, 1)
    for _ in range(times):
        reward(model, many, generator).total.backward()
        found = found + flat(model) / times
    assert alike(found, exact) < 0.15


def test_a_thought_is_judged_by_the_true_tokens_that_follow() -> None:
    model = thinking_toy()
    reward, at = gain(model, nll_share=1.0), torch.tensor([[2, 2]])
    with torch.no_grad():
        trunk = Trunk.read(model, TEXT)
        thoughts = ALL[[3, 9]]
        given, true = reward._rows(at, thoughts, TARGETS)
        assert given.tolist() == [[BEGIN, 0, 3, END, 1], [BEGIN, 2, 1, END, 1]]
        assert true.tolist() == [[1, 2], [1, 2]]
        states = model.answers(Branches(model, trunk, at).read(given))
        answers = model.answers(trunk.x_BTD)
        found, helped, loss = reward._likelihoods(model, answers, at, states[:, LENGTH + 1 :], true)
        assert torch.allclose(found, enumerated(model, 2)[1][[3, 9]], atol=1e-4)
        plain = model.logits(model.hidden(answers[0, 2:4])).log_softmax(-1)
        without = plain.gather(-1, TARGETS[0, 2:4, None]).mean()
        assert helped == pytest.approx(float(-loss - without), abs=1e-4)
        beyond, wanted = reward._rows(torch.tensor([[4, 4]]), thoughts, TARGETS)
        assert wanted.tolist() == [[0, IGNORE]] * 2 and beyond.shape == given.shape
        ended = TARGETS.clone()
        ended[0, 2] = IGNORE  # a text ends there: what follows is another's
        assert reward._rows(at, thoughts, ended)[1].tolist() == [[IGNORE, IGNORE]] * 2


def test_thoughts_are_sampled_as_the_model_finds_them_likely() -> None:
    model, count = toy(), 4000
    with torch.no_grad():
        at = torch.full((1, count), 2)
        trunk = Trunk.read(model, TEXT)
        found = sample_thoughts(model, trunk, at, BEGIN, LENGTH, torch.Generator().manual_seed(0))
    model.mixing = MixingHead(model.settings.d_model)
    chances = enumerated(model, 2)[0].exp()
    counted = torch.bincount(VOCABULARY * found[:, 0] + found[:, 1], minlength=len(ALL)) / count
    assert float((counted - chances).abs().max()) < 0.03


def test_the_mixture_lets_gradients_reach_the_thought() -> None:
    model = toy()
    model.mixing = MixingHead(model.settings.d_model)
    loss = gain(model, nll_share=1.0)(model, (TEXT, TARGETS), torch.Generator().manual_seed(0))
    loss.total.backward()
    assert float(model.mixing.outer.bias.grad.abs()) > 0  # type: ignore[union-attr]
    assert BEGIN not in TEXT[0, :4] and float(model.embedding.weight.grad[BEGIN].abs().max()) > 0
    assert loss.count == 2 * LENGTH and loss.values["reward"] >= 0
    with pytest.raises(AttributeError):
        gain(model)(toy(), (TEXT, TARGETS), torch.Generator().manual_seed(0))
