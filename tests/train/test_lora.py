"""LoRA on networks of any maker: only the change is trained, and it ends in the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.errors import ConfigError
from agent_forge.model.loss import head_of, states_of
from agent_forge.train.lora import add_branches, fold, linear_layers
from tests.support.eval_models import FAMILIES
from tests.support.networks import network

TOKENS = torch.arange(1, 13).reshape(2, 6)


def model(kind: str) -> nn.Module:
    if kind == "ours":
        return network()
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **FAMILIES[kind])
    built: nn.Module = AutoModelForCausalLM.from_config(shape).eval()
    return built


def logits(own: nn.Module) -> torch.Tensor:
    return head_of(own)(states_of(own, TOKENS))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "ours"])
def test_a_change_begins_at_zero_is_trained_alone_and_folds_into_the_weights(kind: str) -> None:
    own = model(kind)
    before = logits(own).detach()
    start = {name: weight.clone() for name, weight in own.state_dict().items()}
    branches = add_branches(own, 4, torch.Generator().manual_seed(0))
    assert torch.equal(logits(own), before)
    logits(own).square().sum().backward()
    assert all(parameter.grad is None for parameter in own.parameters())
    assert any(b.grad.abs().sum() > 0 for b in branches.lora_b)
    with torch.no_grad():
        for b in branches.lora_b:
            b.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    changed = logits(own).detach()
    assert float((changed - before).abs().max()) > 1e-3
    assert all(torch.equal(weight, start[name]) for name, weight in own.state_dict().items())
    fold(own, branches)
    assert torch.allclose(logits(own), changed, atol=1e-4 * float(changed.abs().max()))
    assert own.state_dict().keys() == start.keys()  # an ordinary network
    for name in linear_layers(own):
        difference = own.state_dict()[f"{name}.weight"] - start[f"{name}.weight"]
        assert 0 < int(torch.linalg.matrix_rank(difference, rtol=1e-4)) <= 4, name


def test_embeddings_and_heads_are_left_alone() -> None:
    names: Any = linear_layers(model("gpt2"))
    assert len(names) == 8 and not any("lm_head" in name or "wte" in name for name in names)
    with pytest.raises(ConfigError, match="no linear layer"):
        linear_layers(nn.Embedding(3, 3))
    with pytest.raises(ConfigError, match="changes nothing"):
        add_branches(model("llama"), 0, torch.Generator())
