"""The training loop: schedule, pieces, memory, divergence, LoRA, distillation, two processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.replay import DecisionLog
from agent_forge.data.loader import IGNORE
from agent_forge.errors import ConfigError, Diverged, NotEnough, NotFinite
from agent_forge.model.loss import LossOutput, language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, divergence
from agent_forge.quant.layers import StraightThrough
from agent_forge.train.config import TrainSettings, rate_factor
from agent_forge.train.fit import DistillationLoss, EarlyStop
from agent_forge.train.trainer import Trainer, bf16_is_faster
from agent_forge.train.weight_transforms import (
    add_lora,
    add_transform,
    fold,
    transformed,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "embed_rank": 8,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "ffn_hidden": 24,
    "d_mem": 8,
    "gate_hidden": 8,
    "trm_hidden": 16,
}


def network(seed: int = 0, **changes: Any) -> ForgeNetwork:
    torch.manual_seed(seed)
    return ForgeNetwork(ModelSettings(**{**SHAPE, **changes}))


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (rows, 13), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[::3, :5] = IGNORE  # pieces teach different numbers of tokens
    return tokens[:, :-1], targets


def trainer(
    model: ForgeNetwork, loss: Any = language_loss, total: int = 100, **options: Any
) -> Trainer:
    known = {"device", "decisions"}
    rest = {name: value for name, value in options.items() if name in known}
    settings = TrainSettings(**{k: v for k, v in options.items() if k not in known})
    optimizer = MuonGrokfast(model, settings.optimizer)
    generator = torch.Generator().manual_seed(0)
    return Trainer(model, optimizer, loss, settings, total=total, generator=generator, **rest)


def train(steps: int = 3, **options: Any) -> dict[str, Tensor]:
    shape = {"gate_entropy_weight": 0.1}  # enough to show when a piece is weighed wrongly
    work = trainer(network(**shape), **options)
    for step in range(1, steps + 1):
        work.step(step, batch(seed=step))
    return {name: value.clone() for name, value in work.model.state_dict().items()}


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(a[name], b[name], atol=tolerance, rtol=1e-4) for name in a)


def test_the_rate_rises_stays_and_falls() -> None:
    settings = TrainSettings(warmup_steps=10, warmdown_share=0.5, final_rate=0.1)
    rates = [rate_factor(step, 100, settings) for step in range(1, 101)]
    assert rates[:2] == [0.1, 0.2] and rates[9:50] == [1.0] * 41
    assert rates[74] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)
    plain = TrainSettings(warmup_steps=0, warmdown_share=0)
    assert {rate_factor(step, 100, plain) for step in range(1, 101)} == {1.0}


def test_a_schedule_that_does_not_fit_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer(network(), total=5)
    assert "rises for 20 steps, of 5" in caplog.text
    with pytest.raises(ValueError, match="0 steps"):
        trainer(network(), total=0)
    with pytest.raises(ValueError, match="every 0 steps"):
        EarlyStop(lambda: 0.0, every_steps=0)


def test_the_optimizer_gets_the_rate_and_the_loss_falls() -> None:
    work = trainer(network(), total=60, optimizer=MuGrokConfig(muon_lr=1e-2, fallback_lr=5e-3))
    values = [work.step(step, batch()) for step in range(1, 61)]
    assert values[0]["rate"] == pytest.approx(0.05) and values[29]["rate"] == 1.0
    assert work.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 1e-2)
    assert values[-1]["loss"] < 0.6 * values[0]["loss"]
    assert {"loss_step_1", "loss_step_3", "grad_norm", "update_norm", "halt_rate"} <= set(values[0])


def test_eight_rows_at_once_equal_four_twice_and_every_other_cut() -> None:
    whole = train()
    for pieces in (2, 3, 8):
        assert close(whole, train(accumulate=pieces)), pieces
    assert not close(whole, train(steps=2))


def test_qk_clip_sees_every_piece() -> None:
    low = MuGrokConfig(qk_clip_threshold=0.05)
    assert close(train(optimizer=low), train(optimizer=low, accumulate=8))
    assert not close(train(optimizer=low), train())


def test_more_pieces_than_rows_are_as_many_as_rows() -> None:
    assert close(train(accumulate=8), train(accumulate=100))


def test_evaluation_moves_nothing() -> None:
    model = network()
    trainer(model).step(1, batch())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        language_loss(model, batch(), torch.Generator())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(before["halting.mean_target"], network().halting.mean_target)


def test_two_runs_are_equal_to_the_byte() -> None:
    a, b = train(), train()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_gradient_checkpointing_changes_nothing() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    plain = train()
    work = trainer(network(gate_entropy_weight=0.1), gradient_checkpointing=True)
    assert isinstance(work.model, ForgeNetwork)
    work.model.blocks[0].register_forward_pre_hook(count)
    for step in range(1, 4):
        work.step(step, batch(seed=step))
    assert calls == 6  # forward, and again in the backward pass
    assert close(plain, dict(work.model.state_dict()), 1e-7)


def test_bf16_is_taken_only_where_asked_or_faster() -> None:
    assert bf16_is_faster("cpu") == torch.cpu._is_amx_tile_supported()
    auto, exact, rough = train(), train(precision="fp32"), train(precision="bf16")
    if not bf16_is_faster("cpu"):
        assert all(torch.equal(auto[name], exact[name]) for name in auto)
    assert not close(exact, rough, 1e-9) and close(exact, rough, 0.02)


class Greedy:
    """A loss that does not get memory for more than `rows` rows."""

    def __init__(self, rows: int, error: Exception) -> None:
        self.rows, self.error, self.seen = rows, error, [0]

    def __call__(
        self, model: Any, piece: Sequence[Tensor], generator: torch.Generator
    ) -> LossOutput:
        self.seen.append(len(piece[0]))
        loss = language_loss(model, piece, generator)
        if len(piece[0]) > self.rows:
            raise self.error
        return loss


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
        MemoryError(),
    ],
)
def test_out_of_memory_makes_smaller_pieces_and_the_same_result(error: Exception) -> None:
    greedy, decisions = Greedy(2, error), DecisionLog()
    assert close(train(), train(loss=greedy, decisions=decisions))
    assert decisions.at(1) == {"pieces": 4} and greedy.seen[1:4] == [8, 4, 2]
    assert greedy.seen[-4:] == [2, 2, 2, 2]  # it does not try the large ones again


def test_a_decision_holds_from_its_step_on(tmp_path: Path) -> None:
    decisions = DecisionLog(tmp_path)
    decisions.record("pieces", 5, 2)
    decisions.record("pieces", 9, 4)
    again = DecisionLog(tmp_path)
    assert [again.at(step).get("pieces") for step in (4, 5, 8, 9, 50)] == [None, 2, 2, 4, 4]
    assert again.at(4) == {} and again.at(7) == {"pieces": 2}
    again.of("branch").record("pieces", 1, 8)
    assert again.at(7) == {"pieces": 2} and DecisionLog(tmp_path).of("branch").at(7) == {
        "pieces": 8
    }


def test_not_enough_memory_for_one_row_is_said() -> None:
    with pytest.raises(NotEnough, match="one row of the batch at step 1"):
        train(loss=Greedy(0, MemoryError()))


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        train(loss=Greedy(0, RuntimeError("something else")))


def test_a_divergence_changes_no_weight() -> None:
    def broken(model: Any, piece: Any, generator: torch.Generator) -> LossOutput:
        loss = language_loss(model, piece, generator)
        loss.values["loss"] = math.nan
        return loss

    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Diverged, match="the loss became nan at step 1"):
        trainer(model, broken).step(1, batch())
    parameters = dict(model.named_parameters())
    assert all(torch.equal(before[name], parameters[name]) for name in parameters)


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    def broken(model: Any, piece: Any, generator: torch.Generator) -> LossOutput:
        loss = language_loss(model, piece, generator)
        loss.total = loss.total * math.inf
        return loss

    model = network()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(Diverged, match=r"norm is (nan|inf); no weight was changed"):
        trainer(model, broken).step(1, batch())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loss_that_runs_away_is_a_divergence() -> None:
    work = trainer(network())
    for step in range(1, 22):
        work.step(step, batch())
    work.recent = [0.1] * 20
    with pytest.raises(Diverged, match="ran away at step 22"):
        work.step(22, batch())
    work.expect_other_losses()  # the data changes: no divergence
    work.step(22, batch())


def test_the_rate_is_halved_until_that_makes_no_sense() -> None:
    work = trainer(network())
    factors = []
    with pytest.raises(NotFinite, match=r"even at 0\.0312"):
        for _ in range(10):
            work.halve_rate(work.factor)
            factors.append(work.factor)
    assert factors == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]


@pytest.mark.parametrize(
    ("tokens", "targets", "sign"),
    [
        (torch.zeros(2, 4).long(), torch.zeros(2, 5).long(), r"shape \(2, 4\) and .*\(2, 5\)"),
        (torch.zeros(4).long(), torch.zeros(4).long(), "rows x tokens"),
        (torch.full((2, 4), 300), torch.zeros(2, 4).long(), "token 300 is outside"),
        (torch.zeros(2, 4).long(), torch.full((2, 4), 999), "target 999 is outside"),
        (torch.tensor([[-1, 5]]), torch.zeros(1, 2).long(), "token -1 is outside"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(tokens: Tensor, targets: Tensor, sign: str) -> None:
    with pytest.raises(ConfigError, match=sign):
        trainer(network()).step(1, (tokens, targets))


def test_a_batch_without_anything_to_learn_is_refused() -> None:
    tokens, targets = batch()
    with pytest.raises(ValueError, match="nothing to learn"):
        trainer(network()).step(1, (tokens, torch.full_like(targets, IGNORE)))
    with pytest.raises(ValueError, match="a batch of lengths"):
        trainer(network()).step(1, (tokens[:0], targets[:0]))
    with pytest.raises(ValueError, match="a batch of lengths"):
        trainer(network()).step(1, (tokens, targets[:3]))


def test_straight_through_learns_at_the_changed_weights() -> None:
    seen = []

    def spying(model: Any, piece: Any, generator: torch.Generator) -> LossOutput:
        seen.append(model.blocks[0].mlp.up.weight.detach().clone())
        return language_loss(model, piece, generator)

    model = network()
    names = add_transform(model, lambda _: StraightThrough(torch.sign))
    assert "blocks.0.mlp.up" in names and names == list(transformed(model))
    stored: Any = model.blocks[0].mlp.up.parametrizations.weight  # type: ignore[union-attr]
    latent = stored.original.detach().clone()
    trainer(model, spying, total=10).step(1, batch())
    assert torch.equal(seen[0], latent.sign())
    now = stored.original.detach()
    assert 0 < (now - latent).abs().max() < 0.01  # the latent weights moved by one small step
    fold(model)
    assert torch.equal(model.blocks[0].mlp.up.weight, now.sign())  # type: ignore[union-attr]


def test_qk_clip_scales_what_is_stored_behind_a_transform() -> None:
    def stored(model: ForgeNetwork) -> dict[str, Tensor]:
        return {
            n.replace("parametrizations.weight.original", "weight"): p.detach()
            for n, p in model.named_parameters()
        }

    plain, changed = network(), network()
    add_transform(changed, lambda _: StraightThrough(lambda weight: weight.clone()))
    low = MuGrokConfig(qk_clip_threshold=1e-3)
    clipped = [
        trainer(m, optimizer=low).step(1, batch())["qk_clip_count"] for m in (plain, changed)
    ]
    assert clipped[0] == clipped[1] > 0 and close(stored(plain), stored(changed), 0.0)


def test_the_penalty_is_the_divergence_from_the_reference() -> None:
    optimizer = MuonGrokfast(nn.Linear(2, 2), MuGrokConfig(kl_coefficient=0.5))
    reference = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    logits = reference.clone().requires_grad_()
    assert optimizer.penalty(logits, reference).item() == pytest.approx(0, abs=1e-7)
    flat = torch.zeros(2, 2, requires_grad=True)
    p = torch.softmax(reference, -1)
    expected = 0.5 * (p * (p.log() - math.log(0.5))).sum(-1).mean()
    penalty = optimizer.penalty(flat, reference)
    penalty.backward()
    assert penalty.item() == pytest.approx(expected.item()) and flat.grad is not None
    assert MuGrokConfig.from_phase(3).kl_coefficient == 0.1


def test_lora_trains_a_small_change_and_folds_in() -> None:
    model = network()
    generator = torch.Generator().manual_seed(1)
    names = add_lora(model, 2, generator)
    assert "blocks.0.attention.q" in names and "blocks.1.mlp.down" in names
    tokens = batch()[0]
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    before = model(tokens).detach()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert torch.equal(before, network()(tokens))  # nothing has changed yet
    work = trainer(model, optimizer=MuGrokConfig(fallback_lr=1e-2), warmup_steps=0)
    losses = [work.step(step, batch())["loss"] for step in range(1, 20)]
    assert losses[-1] < losses[0]
    after = model(tokens).detach()
    same = {n: torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen}
    assert all(same.values()) and not torch.allclose(before, after, atol=1e-3)
    fold(model)
    assert model.state_dict().keys() == network().state_dict().keys()
    assert torch.allclose(model(tokens), after, atol=1e-5)
    with pytest.raises(ConfigError, match="no linear layer is named nothing"):
        add_lora(model, 2, generator, targets=("nothing",))
    add_lora(model, 2, generator)
    with pytest.raises(ConfigError, match="LoRA already"):
        add_lora(model, 2, generator)
    with pytest.raises(ConfigError, match="rank 0"):
        add_lora(network(), 0, generator)


@pytest.mark.parametrize("targets", [("q", "k"), ("up",)])
def test_qk_clip_leaves_frozen_attention_alone(targets: tuple[str, ...]) -> None:
    model = network()
    add_lora(model, 2, torch.Generator().manual_seed(1), targets=targets)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    work = trainer(model, optimizer=MuGrokConfig(qk_clip_threshold=1e-3))
    assert work.step(1, batch())["qk_clip_count"] == 0
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_distillation_approaches_the_teacher() -> None:
    teacher, student = network(1), network(2)
    with torch.no_grad():
        teacher.embedding.weight.mul_(30)  # a teacher that has an opinion
    loss = DistillationLoss(teacher, share=1.0, temperature=2.0)
    work = trainer(student, loss, optimizer=MuGrokConfig(muon_lr=5e-3, fallback_lr=5e-3))
    away = [work.step(step, batch())["divergence"] for step in range(1, 31)]
    assert away[-1] < 0.85 * away[0]
    same = DistillationLoss(student)(student, batch(), torch.Generator())
    assert same.values["divergence"] == pytest.approx(0, abs=1e-5)
    plain = language_loss(student, batch(), torch.Generator().manual_seed(0))
    none = DistillationLoss(teacher, share=0.0)
    mixed = none(student, batch(), torch.Generator().manual_seed(0))
    assert mixed.total.item() == pytest.approx(plain.total.item())
    with pytest.raises(ValueError, match="share"):
        DistillationLoss(teacher, share=2)
    with pytest.raises(ConfigError, match="teacher has 300 tokens, the student 400"):
        DistillationLoss(teacher)(network(vocab_size=400), batch(), torch.Generator())
    empty = (batch()[0], torch.full_like(batch()[1], IGNORE))
    assert DistillationLoss(teacher)(student, empty, torch.Generator()).values["divergence"] == 0


def test_models_of_transformers_teach_and_learn() -> None:
    def llama(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(vocab_size=300, num_attention_heads=2, **sizes))

    tokens, targets = batch()
    plain = language_loss(llama(0), (tokens, targets), torch.Generator())
    wanted = nn.functional.cross_entropy(llama(0)(tokens).logits.flatten(0, 1), targets.flatten())
    assert plain.values["loss"] == pytest.approx(wanted.item()) == plain.total.item()
    for teacher, student in ((llama(1), llama(2)), (network(1), llama(2)), (llama(1), network(2))):
        loss = DistillationLoss(teacher)(student, (tokens, targets), torch.Generator())
        kept = targets.flatten() != IGNORE
        logits = [getattr(m(tokens), "logits", None) for m in (student, teacher)]
        own, other = (
            (m(tokens) if found is None else found).flatten(0, 1)[kept]
            for m, found in zip((student, teacher), logits, strict=True)
        )
        expected = divergence(own, other).mean().item()
        assert loss.values["divergence"] == pytest.approx(expected, rel=1e-4)
        loss.total.backward()  # type: ignore[no-untyped-call]
