"""The network: causal, equal with and without caches, of the size it says, sane at the start."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from agent_forge.data.loader import IGNORE
from agent_forge.model.attention import Attention, KeyValues, RMSNorm, rotate
from agent_forge.model.loss import language_loss, token_losses
from agent_forge.model.memory import MemoryGate, MemoryState, NeuralMemory, decaying_sum
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.recursion import HaltingHead, Recursion
from agent_forge.pipeline.config import load_config
from tests.support.networks import network, settings, shake, tokens

# -- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["smoke", "tiny", "small", "25m"])
def test_the_count_of_weights_follows_from_the_settings(preset: str) -> None:
    shape = load_config(preset=preset).model
    with torch.device("meta"):
        model = ForgeNetwork(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()
    parts = {
        "attention": "attention",
        "SwiGLU": "mlp",
        "memory": "memory.",
        "gate": "gate.",
        "recursion": "recursion.",
        "halting": "halting.",
    }
    for part, sign in parts.items():
        found = [
            p.numel()
            for name, p in model.named_parameters()
            if (name.startswith(sign) if sign.endswith(".") else sign in name)
        ]
        assert sum(found) == shape.weights()[part], part
    if preset == "25m":
        assert abs(shape.parameters() / 25e6 - 1) < 0.05


@pytest.mark.parametrize("preset", ["smoke", "tiny"])
def test_the_first_loss_is_that_of_a_guess(preset: str) -> None:
    shape = load_config(preset=preset).model
    torch.manual_seed(0)
    model = ForgeNetwork(shape)
    x = torch.randint(0, shape.vocab_size, (4, 64))
    loss = language_loss(model, (x, x.roll(1, 1)), torch.Generator().manual_seed(0))
    for value in (loss.values[f"loss_step_{i}"] for i in range(1, shape.t_max + 1)):
        assert value == pytest.approx(math.log(shape.vocab_size), abs=0.1)


@pytest.mark.parametrize("window", [1024, 20])
def test_no_token_sees_the_future(window: int) -> None:
    model = network(sw_window=window)
    x = tokens(90)
    changed = x.clone()
    changed[:, 60:] = (changed[:, 60:] + 7) % 512
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.allclose(before[:, 60:], after[:, 60:])


@pytest.mark.parametrize("window", [1024, 20])
@pytest.mark.parametrize("first", [1, 37, 70])
def test_step_by_step_equals_all_at_once(window: int, first: int) -> None:
    model = network(sw_window=window)
    x = tokens(100)
    cache = model.new_cache()
    with torch.no_grad():
        whole = model(x)
        parts = [model(x[:, :first], cache)]
        parts += [model(x[:, i : i + 1], cache) for i in range(first, 100)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)
    assert all(layer.k is not None and layer.k.shape[2] <= window for layer in cache.layers)


def test_rows_of_a_batch_do_not_mix() -> None:
    model = network()
    x = tokens(40, rows=3)
    with torch.no_grad():
        assert torch.allclose(model(x)[1:2], model(x[1:2]), atol=1e-5)


def test_every_weight_learns() -> None:
    torch.manual_seed(0)
    model = ForgeNetwork(settings())
    x = tokens(40)
    generator = torch.Generator().manual_seed(0)
    shake(model)
    language_loss(model, (x, x.roll(-1, 1)), generator).total.backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_it_learns_to_repeat_a_pattern() -> None:
    torch.manual_seed(0)
    model = ForgeNetwork(settings())
    x = (torch.arange(33) % 7 + 100).expand(4, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    first = 0.0
    for _ in range(40):
        loss = language_loss(model, (x[:, :-1], x[:, 1:]), generator)
        first = first or loss.values["loss"]
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert loss.values["loss"] < 0.3 < first


# -- attention ------------------------------------------------------------------------------------


def test_attention_equals_the_formula() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, window=3)
    torch.nn.init.normal_(attention.out.weight)
    x = torch.randn(1, 6, 8)
    q, k, v = (
        f(x).view(1, 6, 2, 4).transpose(1, 2) for f in (attention.q, attention.k, attention.v)
    )
    positions = torch.arange(6)
    q, k = rotate(q, positions), rotate(k, positions)
    logits = q @ k.transpose(2, 3) / 2
    for i in range(6):
        for j in range(6):
            if not i - 3 < j <= i:
                logits[..., i, j] = -torch.inf
    expected = attention.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(1, 6, 8))
    assert torch.allclose(attention(x, None, 0), expected, atol=1e-6)
    attention.watched = 6
    attention(x, None, 0)
    assert attention.largest_logit_H is not None
    assert torch.allclose(attention.largest_logit_H, logits.amax(dim=(0, 2, 3)))


def test_a_memory_in_bf16_still_forgets() -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(8, 4, 4096, 0.5, 0.5)
    x = torch.randn(1, 300, 8)
    exact = memory(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = memory(x)
    assert torch.allclose(exact, rough.float(), atol=0.1)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def product(i: int, j: int) -> Tensor:
        return (rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum()

    assert torch.allclose(rotate(q, torch.tensor([9])).norm(), q.norm())
    assert torch.allclose(product(3, 1), product(103, 101), atol=1e-4)
    assert not torch.allclose(product(3, 1), product(3, 2), atol=1e-3)


def test_the_cache_keeps_no_more_than_the_window() -> None:
    past = KeyValues()
    for _ in range(5):
        k, _ = past.extend(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), window=6)
    assert k.shape[2] == 10 and past.k is not None and past.k.shape[2] == 6


def test_rms_norm() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(RMSNorm(2)(x), x / math.sqrt(12.5), atol=1e-5)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_the_parallel_sum_equals_the_loop(length: int) -> None:
    torch.manual_seed(0)
    u, decay, carry = torch.randn(2, length, 3), torch.tensor([0.5, 0.9, 0.999]), torch.randn(2, 3)
    found, last = decaying_sum(u, decay, carry)
    state = carry
    for t in range(length):
        state = decay * state + u[:, t]
        assert torch.allclose(found[:, t], state, atol=1e-4)
    assert torch.allclose(last, state, atol=1e-4)


def test_the_memory_reaches_further_with_more_capacity() -> None:
    """How much of a token's trace is left 2,000 tokens later."""

    def trace(capacity: int) -> float:
        memory = NeuralMemory(4, 8, capacity, 0.5, 0.5)
        return float(memory.decays(torch.zeros(1)).max() ** 2000)

    assert trace(256) < 0.01 < 0.2 < trace(4096)


def test_surprise_and_novelty_change_what_is_written() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 50, 8)
    x[:, 20:] = x[:, 19:20]  # from here on nothing is new

    def read(surprise: float, novelty: float) -> Tensor:
        torch.manual_seed(1)
        found: Tensor = NeuralMemory(8, 8, 4096, surprise, novelty)(x)
        return found

    assert not torch.allclose(read(1, 0), read(0, 1), atol=1e-3)
    assert torch.allclose(read(1, 0), read(2, 0))


def test_the_memory_does_not_fade_in() -> None:
    """The first token already reads itself at full strength: the sum is divided by its weights."""
    torch.manual_seed(0)
    memory = NeuralMemory(8, 8, 4096, 0.5, 0.5)
    x = torch.randn(1, 1, 8)
    assert torch.allclose(memory(x), memory.norm(memory.up(memory.down(x))), atol=1e-5)


def test_the_memory_state_goes_on() -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(8, 8, 4096, 0.7, 0.3)
    x = torch.randn(2, 90, 8)
    state = MemoryState()
    parts = [memory(part, state) for part in x.split(25, 1)]
    assert torch.allclose(torch.cat(parts, 1), memory(x), atol=1e-5)


def test_the_gate_blends_between_its_two_sides() -> None:
    gate = MemoryGate(4, 4)
    y, m = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    blend, entropy = gate(y, m)
    g = torch.sigmoid(torch.tensor(2.0))
    assert torch.allclose(blend, g * gate.norm(y) + (1 - g) * m, atol=1e-6)
    assert entropy.shape == (2, 3) and bool((entropy > 0).all() and (entropy <= math.log(2)).all())


# -- recursion and halting ------------------------------------------------------------------------


def test_the_recursion_begins_as_the_identity() -> None:
    torch.manual_seed(0)
    recursion = Recursion(8, 8, 2, 3)
    x = torch.randn(3, 8)
    y, z = recursion.start(x)
    y, z = recursion(x, y, z)
    assert torch.equal(y, x) and z.abs().sum() > 0


def test_more_steps_change_the_answer() -> None:
    x = tokens(10)
    with torch.no_grad():
        assert not torch.allclose(network(t_max=1)(x), network(t_max=3)(x), atol=1e-3)
        assert not torch.allclose(network(micro_steps=1)(x), network(micro_steps=2)(x), atol=1e-3)


def test_prediction_halts_by_its_threshold() -> None:
    model = network(t_max=3)
    x = tokens(20, rows=5)
    with torch.no_grad():
        whole = model(x)[:, -1]
    logits, steps = model.predict(x, threshold=1.0)
    assert steps.tolist() == [3] * 5 and torch.allclose(logits, whole, atol=1e-5)
    logits, steps = model.predict(x, threshold=0.0)
    assert steps.tolist() == [1] * 5 and not torch.allclose(logits, whole, atol=1e-3)
    assert model.predict(x)[1].max() <= 3


def test_halting_starts_shy_and_is_calibrated() -> None:
    halting = HaltingHead(4, 3, ema=0.5)
    z = torch.randn(100, 4)
    assert float(torch.sigmoid(halting.head(z)).mean().detach()) == pytest.approx(0.047, abs=1e-3)
    for _ in range(30):
        halting.begin_step()
        halting.loss(z[:40], torch.ones(40), 0)
        halting.loss(z[40:], torch.ones(60), 0)
        halting.end_step()
    assert float(halting.probability(z, 0).mean()) > 0.9  # shy as a whole, though always right
    assert float(halting.probability(z, 1).mean()) == pytest.approx(0.047, abs=0.001)


def test_halting_learns_where_a_further_step_would_not_help() -> None:
    model = network()
    x = tokens(40)
    generator = torch.Generator().manual_seed(0)
    generous = language_loss(network(halt_margin=100), (x, x), generator)
    strict = language_loss(model, (x, x), generator)
    assert generous.values["halt_rate"] == 1.0 and 0 < strict.values["halt_rate"] < 1


# -- the loss -------------------------------------------------------------------------------------


def test_the_chunked_loss_equals_the_plain_one() -> None:
    model = network()
    y = torch.randn(2500, model.settings.d_model, requires_grad=True)
    targets = torch.randint(0, 512, (2500,))
    plain = nn.functional.cross_entropy(model.logits(model.hidden(y)), targets, reduction="none")
    chunked = token_losses(model, y, targets)
    assert torch.allclose(chunked, plain, atol=1e-5)
    (expected,) = torch.autograd.grad(plain.sum(), y)
    (found,) = torch.autograd.grad(chunked.sum(), y)
    assert torch.allclose(found, expected, atol=1e-5)


def test_ignored_positions_teach_nothing() -> None:
    model = network()
    x = tokens(30)
    targets = x.roll(-1, 1)
    masked = targets.clone()
    masked[:, :20] = IGNORE
    other = x.clone()
    losses = [
        language_loss(model, (other, masked), torch.Generator().manual_seed(0)).values["loss"],
        float(token_losses(model, _last(model, x), targets.flatten()).view(2, 30)[:, 20:].mean()),
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def _last(model: ForgeNetwork, x: Tensor) -> Tensor:
    features = model.features(x).x.flatten(0, 1)
    y, z = model.recursion.start(features)
    for _ in range(model.settings.t_max):
        y, z = model.recursion(features, y, z)
    return y


def test_the_weights_of_the_loss_act() -> None:
    x = tokens(30)

    def total(**changes: object) -> float:
        loss = language_loss(network(**changes), (x, x), torch.Generator().manual_seed(0))
        return float(loss.total.detach())

    assert total(gate_entropy_weight=1.0) < total()  # entropy is rewarded
    assert total(halt_loss_weight=1.0) > total()
    assert total(supervised_share=1.0) != total()


@pytest.mark.parametrize("bias", [0.0, 30.0, 200.0, -200.0])
def test_a_gate_that_is_quite_sure_learns_without_nan(bias: float) -> None:
    gate = MemoryGate(8, 4)
    nn.init.constant_(gate.outer.bias, bias)
    y = torch.randn(3, 8, requires_grad=True)
    _, entropy = gate(y, torch.randn(3, 8))
    entropy.mean().backward()
    g = torch.sigmoid(torch.tensor(bias, dtype=torch.float64))
    expected = -(torch.xlogy(g, g) + torch.xlogy(1 - g, 1 - g))
    assert entropy.mean().item() == pytest.approx(float(expected), abs=1e-5)
    assert gate.outer.bias.grad is not None and torch.isfinite(gate.outer.bias.grad).all()
