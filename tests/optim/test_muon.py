"""MuonGrokfast: the mathematics of each stage, routing by role, exact state, and that it learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.errors import ConfigError
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import PHASE_SETTINGS, MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, orthogonalize, split_roles
from agent_forge.store.checkpoint import CheckpointManager
from tests.support.networks import network, tokens


def config(**changes: Any) -> MuGrokConfig:
    return MuGrokConfig(**{"weight_decay": 0.0, "grad_clip": 0.0, **changes})


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_the_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, *shape), 5))
    assert values.min() > 0.3 and values.max() < 1.3


def test_orthogonalising_keeps_directions_whatever_the_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 6, 6)
    u, _, v = torch.linalg.svd(x[0])
    assert torch.allclose(orthogonalize(x, 20)[0] @ (u @ v).t(), torch.eye(6), atol=0.35)
    assert torch.allclose(orthogonalize(1e6 * x, 5), orthogonalize(x, 5), atol=1e-4)
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 3), 5), torch.zeros(1, 3, 3))


def test_a_batch_gives_what_each_alone_would() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 7)
    each = torch.cat([orthogonalize(x[i : i + 1], 5) for i in range(4)])
    assert torch.allclose(orthogonalize(x, 5), each, atol=1e-5)


def test_roles() -> None:
    model = network()
    matrices, rest = split_roles(model)
    named = {id(p): name for name, p in model.named_parameters()}
    assert {"embedding.weight", "projection.weight", "halting.head.weight"} <= {
        named[id(p)] for p in rest
    }
    assert all(p.ndim == 2 for p in matrices)
    assert len(matrices) == 2 * 7 + 2 + 2 + 4  # blocks, memory, gate, recursion
    assert len(matrices) + len(rest) == len(named)


def one_step(p: nn.Parameter, grads: list[torch.Tensor], **changes: Any) -> MuonGrokfast:
    optimizer = MuonGrokfast([p], config(**changes))
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return optimizer


def test_a_muon_step_by_hand() -> None:
    torch.manual_seed(0)
    w, g = torch.randn(4, 8), torch.randn(4, 8)
    p = nn.Parameter(w.clone())
    one_step(p, [g], muon_lr=0.1, momentum=0.9, weight_decay=0.5)
    momentum = 0.1 * g
    direction = orthogonalize(torch.lerp(g, momentum, 0.9)[None], 5)[0]
    assert torch.allclose(p, w * (1 - 0.05) - 0.1 * 0.2 * 8**0.5 * direction, atol=1e-6)


def test_an_adamw_step_equals_torch() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(5) for _ in range(4)]
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    one_step(ours, grads, fallback_lr=0.01)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for grad in grads:
        theirs.grad = grad.clone()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_grokfast_adds_the_running_mean() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(3) for _ in range(3)]
    p = nn.Parameter(torch.zeros(3))
    optimizer = MuonGrokfast([p], config(grokfast_alpha=0.9, grokfast_lambda=2.0))
    mean = grads[0]
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        mean = torch.lerp(mean, grad, 0.1)
        assert torch.allclose(p.grad, grad + 2.0 * mean, atol=1e-6)
    assert optimizer.metrics["ema_to_raw"] > 0


def test_grokfast_amplifies_what_persists_and_not_what_alternates() -> None:
    def last(sign: float) -> float:
        p = nn.Parameter(torch.zeros(1))
        grads = [torch.tensor([sign**i]) for i in range(400)]
        one_step(p, grads, grokfast_lambda=1.0)
        assert p.grad is not None
        return abs(float(p.grad))

    assert last(1.0) == pytest.approx(2.0, abs=0.01) and last(-1.0) == pytest.approx(1.0, abs=0.02)


def test_clipping_comes_before_everything() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = one_step(p, [torch.full((4,), 100.0)], grad_clip=1.0)
    assert p.grad is not None and float(p.grad.norm()) == pytest.approx(1.0, abs=1e-3)
    assert optimizer.metrics["grad_norm"] == pytest.approx(200.0)


@pytest.mark.parametrize("protected", [False, True])
def test_qk_clip_bounds_the_logits_of_a_head(protected: bool) -> None:
    model = network()
    with torch.no_grad():
        model.blocks[0].attention.q.weight[:32] *= 300  # type: ignore[union-attr, operator]
    frozen = config(
        muon_lr=1e-12, fallback_lr=1e-12, qk_clip_threshold=20.0, mlarope_protected=protected
    )
    optimizer = MuonGrokfast(model.train(), frozen)
    attention: Any = model.blocks[0].attention
    keys = attention.k.weight.detach().clone()
    x = tokens(30)
    for _ in range(2):
        language_loss(model, (x, x), torch.Generator().manual_seed(0)).total.backward()
        largest = attention.largest_logit_H.clone()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.metrics["qk_clip_count"]:
            assert largest[0] > 20
    assert largest.max() <= 20.5  # bounded by the clip after the first step
    assert torch.allclose(attention.k.weight, keys, atol=1e-6) == protected


def test_resuming_is_exact(tmp_path: Any) -> None:
    def train(model: ForgeNetwork, optimizer: MuonGrokfast, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randint(0, 512, (2, 20), generator=generator)
            language_loss(model, (x, x.roll(-1, 1)), generator).total.backward()
            optimizer.step()
            optimizer.zero_grad()

    first = network()
    second = copy.deepcopy(first)
    settings = MuGrokConfig.from_phase(1)
    optimizer = MuonGrokfast(first, settings)
    train(first, optimizer, range(6))
    half = MuonGrokfast(second, settings)
    train(second, half, range(3))
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint(second, half, step=3)
    again, loaded = network(), manager.load_checkpoint()
    again.load_state_dict(loaded.state["model"])
    resumed = MuonGrokfast(again, settings)
    resumed.load_state_dict(loaded.state["optimizer"])
    train(again, resumed, range(3, 6))
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_it_learns() -> None:
    x = (torch.arange(33) * 5 % 11 + 100).expand(4, -1)
    torch.manual_seed(0)
    model = ForgeNetwork(network().settings)
    optimizer = MuonGrokfast(model, MuGrokConfig(muon_lr=1e-2, fallback_lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(25):
        loss = language_loss(model, (x[:, :-1], x[:, 1:]), generator)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss.values["loss"])
    assert losses[-1] < 1.0 < 6.0 < losses[0]


def test_both_vocabularies_are_one() -> None:
    one = MuGrokConfig(muon_lr=0.5, grokfast_lambda=0.1, qk_clip_threshold=9.0, ns_steps=3)
    other = MuGrokConfig.model_validate({"lr": 0.5, "lam": 0.1, "qkclip_tau": 9.0, "k": 3})
    assert one == other
    assert MuGrokConfig.model_validate({"beta": 0.8, "alpha": 0.9}).momentum == 0.8
    with pytest.raises(ValueError, match="learning_rate"):
        MuGrokConfig.model_validate({"learning_rate": 1})


def test_phases_have_their_settings() -> None:
    for number, expected in PHASE_SETTINGS.items():
        assert MuGrokConfig.from_phase(number).grokfast_lambda == expected["grokfast_lambda"]
    with pytest.raises(ConfigError, match="phase 2 trains nothing"):
        MuGrokConfig.from_phase(2)
