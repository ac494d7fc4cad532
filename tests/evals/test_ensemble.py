"""The ensemble from the losses of its models is the ensemble from all of their probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agent_forge.data.dataset_rows import Example
from agent_forge.evals.domains import Domain
from agent_forge.evals.ensemble import Ensemble
from agent_forge.evals.likelihood import TokenLosses
from agent_forge.evals.model_under_test import (
    ModelUnderTest,
    TokenizedDomain,
    open_model_under_test,
)
from tests.support.eval_models import llama

FOUR = ("red", "blue", "green", "grey")
CHOICES = Domain("choices", tuple(Example(f"{i}:", FOUR[i % 4], choices=FOUR) for i in range(24)))
WRITTEN = Domain("written", tuple(Example(f"{i}+{i}=", str(2 * i)) for i in range(9)))
TEXT = Domain("text", (Example("so ", "it goes on and on for longer than a window is" * 3),), False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelUnderTest]:
    root = tmp_path_factory.mktemp("models")
    return [open_model_under_test(llama(root / str(seed), seed)) for seed in range(3)]


def ensemble(models: list[ModelUnderTest], domains: list[Domain]) -> Ensemble:
    found = Ensemble()
    for model in models:
        prepared = [model.prepare(domain) for domain in domains]
        losses: list[TokenLosses] = [{} for _ in domains]
        model.measure_all(prepared, token_losses=losses)
        found.add(prepared, losses)
    return found


def by_hand(models: list[ModelUnderTest], prepared: TokenizedDomain) -> list[float]:
    """The loss of each answer under the mean of all distributions."""
    answers = [0.0] * len(prepared.sizes)
    for item, answer in zip(prepared.items, prepared.answer_of.tolist(), strict=True):
        ids = torch.as_tensor(list(item.ids))[None]
        with torch.no_grad():
            each: list[Tensor] = [m.model(ids).logits[0].double().softmax(-1) for m in models]
        mean = torch.stack(each).mean(0)
        for place in range(1, len(item.ids)):
            if item.asked[place]:
                answers[answer] -= math.log(float(mean[place - 1, ids[0, place]]))
    return answers


def test_as_with_full_distributions(models: list[ModelUnderTest]) -> None:
    domains = [CHOICES, WRITTEN, TEXT]
    raw = ensemble(models, domains).raw(domains)
    assert set(raw) == {*(f"{d.name}/bits_per_byte" for d in domains), "choices/accuracy"}
    for domain in domains:
        prepared = models[0].prepare(domain)
        losses, of = by_hand(models, prepared), prepared.example_of.tolist()
        first = [losses[of.index(n)] for n in range(len(domain.examples))]
        bits = sum(first) / math.log(2) / sum(domain.sizes)
        assert raw[f"{domain.name}/bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        if domain is CHOICES:
            a_byte = [loss / int(size) for loss, size in zip(losses, prepared.sizes, strict=True)]
            own = [[x for x, n in zip(a_byte, of, strict=True) if n == e] for e in range(24)]
            right = sum(min(values) == values[0] for values in own)
            assert 0 < right < 24 and raw["choices/accuracy"] == right / 24


def test_one_model_is_its_own_ensemble(models: list[ModelUnderTest]) -> None:
    alone = ensemble(models[:1], [CHOICES]).raw([CHOICES])
    scores = models[0].measure(models[0].prepare(CHOICES))
    assert alone["choices/accuracy"] == scores.accuracy
    bits = scores.bits_per_byte(sum(CHOICES.sizes))
    assert alone["choices/bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_other_tokens_make_no_ensemble(models: list[ModelUnderTest]) -> None:
    found = ensemble(models[:1], [CHOICES])
    shorter = replace(CHOICES, examples=tuple(replace(e, prompt="a") for e in CHOICES.examples))
    other = ensemble(models[1:2], [shorter])
    found.add(other.prepared, other._sums)
    found.add(found.prepared, [{}])
    assert not found.alike and found.models == 3


def test_a_loss_beyond_any_probability_is_finite(
    models: list[ModelUnderTest], tmp_path: Path
) -> None:
    found = ensemble(models[:1], [WRITTEN])
    low = [{item: loss - 2000.0 for item, loss in own.items()} for own in found._sums]
    found._sums = low
    found.add(found.prepared, [{item: -own for item, own in low[0].items()}])
    assert all(map(math.isfinite, found.raw([WRITTEN]).values()))
