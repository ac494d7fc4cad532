"""Scores of given text: exact match is what greedy generation writes, whatever shares the batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.evals.model_under_test import TOKENS_A_BATCH, measure
from agent_forge.infer.generate import SamplingSettings, batches, generate
from agent_forge.model.network import ForgeNetwork
from tests.support.networks import shaken


def items(model: ForgeNetwork, count: int = 12) -> list[TokenizedItem]:
    """Prompts with what the model itself would say; every third has one wrong token."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        prompt = torch.randint(30, 400, (3 + i % 4,), generator=generator).tolist()
        made = generate(model, [prompt], SamplingSettings(max_new_tokens=4, halt_threshold=1.0))[
            0
        ].tokens
        if i % 3 == 0:
            made[i % 4] = (made[i % 4] + 1) % 400
        found.append(TokenizedItem(prompt + made, [False] * len(prompt) + [True] * 4))
    return found


def test_exact_match_is_what_greedy_generation_writes() -> None:
    model = shaken(0)
    outcome = measure(model, items(model), threshold=1.0)
    assert outcome.right == [i % 3 != 0 for i in range(12)]
    assert outcome.accuracy == pytest.approx(2 / 3) and outcome.mean_steps == 3
    assert outcome.tokens == [4] * 12


def test_the_loss_is_that_of_the_asked_tokens() -> None:
    model = shaken(0)
    item = items(model)[1]
    outcome = measure(model, [item], threshold=1.0)
    logits = model(torch.tensor([list(item.ids)]))[0, -5:-1]
    expected = F.cross_entropy(logits, torch.tensor(item.ids[-4:]), reduction="sum")
    assert outcome.loss[0] == pytest.approx(expected.item(), rel=1e-4)
    assert outcome.nats_per_token == pytest.approx(expected.item() / 4, rel=1e-4)
    bits = expected.item() / math.log(2)
    assert outcome.bits_per_byte(10) == pytest.approx(bits / 10, rel=1e-4)


def test_a_score_does_not_depend_on_what_else_is_measured() -> None:
    model = shaken(0)
    found = items(model)
    together = measure(model, found)
    for i in (0, 5, 11):
        alone = measure(model, [found[i]])
        assert alone.right[0] == together.right[i]
        assert alone.loss[0] == pytest.approx(together.loss[i], rel=1e-4)


def test_batches_hold_every_item_once_and_stay_small() -> None:
    lengths = [7, 900, 3, 3000, 5000, 7, 1]
    found = list(batches(lengths, TOKENS_A_BATCH))
    assert sorted(i for batch in found for i in batch) == list(range(7))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= TOKENS_A_BATCH


def test_any_causal_model_is_measured() -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model: nn.Module = LlamaForCausalLM(shape).eval()
    ids = [3, 4, 5, 6]
    outcome = measure(model, [TokenizedItem(ids, [False, False, True, True])])
    logits = model(torch.tensor([ids])).logits[0, 1:3]
    assert outcome.loss[0] == pytest.approx(
        F.cross_entropy(logits, torch.tensor(ids[2:]), reduction="sum").item(), rel=1e-4
    )
    assert outcome.mean_steps == 1


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="no items"):
        measure(shaken(0), [])
    with pytest.raises(ConfigError, match="asks for no token"):
        measure(shaken(0), [TokenizedItem([1, 2], [True, False])])  # nothing comes before the first
