"""Layers that compute rounded: what they compute, what is trained, and where gradients go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from agent_forge.errors import ConfigError
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.quant.layers import (
    compute_rounded,
    plan_packing,
    round_inputs,
    rounded_inputs,
    rounded_once,
    trained_state,
)
from tests.support.quietstar_runs import config


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


def test_inputs_are_whole_steps_of_a_token_and_gradients_pass() -> None:
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = rounded_inputs(x)
    steps = (y / (x.abs().amax(-1, keepdim=True) / 127)).detach()
    assert torch.allclose(steps, steps.round(), atol=1e-3) and float(steps.abs().max()) < 127.01
    assert not torch.equal(y, x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(rounded_inputs(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_a_rounded_network_computes_as_its_packed_file_and_trains_its_own_weights() -> None:
    torch.manual_seed(0)
    network = ForgeNetwork(config().model)
    packing = plan_packing(network, "ternary", "int4g32", 8)
    kept = {n: t for n, t in network.state_dict().items() if n not in packing.matrices}
    network.load_state_dict({n: t.half().to(t.dtype) for n, t in kept.items()}, strict=False)
    before = copy.deepcopy(network.state_dict())
    packed = copy.deepcopy(network)
    packed.load_state_dict(packing.rounded(before))
    round_inputs(packed, packing.with_rounded_inputs)
    compute_rounded(network, packing)
    tokens, targets = batch()
    assert torch.equal(network(tokens), packed(tokens))
    assert set(trained_state(network)) == set(before)
    assert all(torch.equal(trained_state(network)[n], before[n]) for n in before)
    language_loss(network, (tokens, targets), torch.Generator()).total.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in network.named_parameters()}
    original = "blocks.0.mlp.down.parametrizations.weight.original"
    assert gradients[original] is not None and float(gradients[original].abs().sum()) > 0


def test_rounding_once_changes_no_gradient() -> None:
    torch.manual_seed(0)
    network = ForgeNetwork(config().model)
    compute_rounded(network, plan_packing(network, "ternary", "int4g32", 8))
    found = []
    for loss in (language_loss, rounded_once(language_loss)):
        network.zero_grad()
        loss(network, batch(), torch.Generator().manual_seed(1)).total.backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    for plain, cached in zip(*found, strict=True):
        torch.testing.assert_close(plain, cached)


def test_models_of_transformers_are_packed_as_well() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(**size, **heads, tie_word_embeddings=True))
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )
    for model in (llama, gpt2):
        packing = plan_packing(model, "ternary", "int4g32", 8)
        state = model.state_dict()
        heads_too = {"lm_head.weight"} & {*state}
        assert heads_too <= {*packing.matrices}
        packed = packing.pack(state)
        assert packed.tensors.keys() >= {f"{n}.codes" for n in packing.matrices}
        found = packing.unpack(packed.tensors, "here")
        rounded = packing.rounded(state)
        assert all(torch.equal(found[n].float(), rounded[n].float()) for n in state)
    turned = packing.matrices["transformer.h.0.attn.c_attn.weight"]
    assert turned.turned and turned.shape == (16, 48) and turned.rows_columns == (48, 16)


def test_tied_weights_stay_one_while_they_are_trained() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    )
    compute_rounded(model, plan_packing(model, "ternary", "int4g32", 8))
    embedding, head = model.model.embed_tokens, model.lm_head
    assert torch.equal(embedding.weight, head.weight)
    own = [m.parametrizations.weight.original for m in (embedding, head)]
    assert own[0] is own[1]


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer"):
        plan_packing(nn.Sequential(nn.LayerNorm(4)), "ternary")
