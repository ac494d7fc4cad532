"""The training loss: deep supervision over the recursion, halting, and the gate's entropy.

Logits never exist for all positions at once: chunks of them are computed again in the backward
pass. Steps before the last are supervised on a random share of the positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.data.loader import IGNORE
from agent_forge.errors import ConfigError
from agent_forge.model.network import ForgeNetwork

CHUNK = 1024


@dataclass
class LossOutput:
    """What every loss function returns: the loss to minimise, and what was measured beside it."""

    total: Tensor  # a mean over `count` tokens
    count: int
    values: dict[str, float]  # logged by these names; "loss" is watched for divergence
    states: Tensor | None = None  # what the network says at those tokens; `head_of` makes logits


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What turns the `states` of a network into logits."""
    if isinstance(model, ForgeNetwork):
        return lambda states: model.logits(model.hidden(states))
    return lambda logits: logits


def states_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """The states of a causal language model at every position: ours, or one of transformers."""
    if isinstance(model, ForgeNetwork):
        return model.answers(model.features(tokens_BT).x)
    logits: Tensor = model(tokens_BT).logits
    return logits


def vocabulary_of(model: Any) -> int:
    ours = isinstance(model, ForgeNetwork)
    return int(model.settings.vocab_size if ours else model.config.vocab_size)


def token_losses(model: nn.Module, y_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of each position, with at most CHUNK rows of logits alive."""
    head = head_of(model)

    def chunk(y: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(y).float(), targets, reduction="none", ignore_index=IGNORE)

    parts = [
        checkpoint(chunk, y, targets, use_reentrant=False, preserve_rng_state=False)
        if y.requires_grad
        else chunk(y, targets)
        for y, targets in zip(torch.split(y_ND, CHUNK), torch.split(targets_N, CHUNK), strict=True)
    ]
    return torch.cat(parts)


def language_loss(model: nn.Module, batch: Sequence[Tensor], generator: Generator) -> LossOutput:
    """The loss of a batch (tokens, targets), a mean over the targets that are not IGNORE."""
    # Every term is a sum over tokens, divided by their number: cutting a batch changes nothing.
    tokens_BT, targets_BT = batch
    _check(tokens_BT, targets_BT, vocabulary_of(model))
    kept = (targets_BT != IGNORE).flatten().nonzero().squeeze(-1)
    targets = targets_BT.flatten()[kept]
    if isinstance(model, ForgeNetwork):
        return _recursive_loss(model, tokens_BT, kept, targets, generator)
    states = states_of(model, tokens_BT).flatten(0, 1)[kept]
    total = token_losses(model, states, targets).sum() / max(1, len(targets))
    return LossOutput(total, len(targets), {"loss": float(total.detach())}, states)


def _recursive_loss(
    model: ForgeNetwork, tokens_BT: Tensor, kept: Tensor, targets: Tensor, generator: Generator
) -> LossOutput:
    """The loss of our network: every recursion step, halting, and the entropy of the gate."""
    settings, features = model.settings, model.features(tokens_BT)
    x = features.x.flatten(0, 1)[kept]
    y, z = model.recursion.start(x)
    drawn = torch.rand(len(targets), settings.t_max - 1, generator=generator).to(x.device)
    chosen = (drawn < settings.supervised_share).t()
    expected = settings.supervised_share * max(1, len(targets))
    total = x.new_zeros(())
    losses, halts = [], []
    for step in range(settings.t_max - 1):
        rows = chosen[step].nonzero().squeeze(-1)
        sampled_y, sampled_z = model.recursion(x[rows], y[rows], z[rows])
        loss = token_losses(model, sampled_y, targets[rows])
        # A sampled step weighs no more than its sample: the last step leads the backbone.
        total = total + (0.5 + 0.5 * step / settings.t_max) * loss.sum() / max(1, len(targets))
        losses.append(loss.detach())
        halts.append((sampled_z.detach(), rows))
        with torch.no_grad():  # what is not sampled teaches nothing here
            new_y, z = model.recursion(x, y, z)
        y = x + (new_y - x).detach()  # each step teaches the backbone through x
    answers, _ = model.recursion(x, y, z)
    loss = token_losses(model, answers, targets)
    total = total + loss.sum() / max(1, len(targets))
    losses.append(loss.detach())
    halting, rate = _halting_loss(model, losses, halts, expected)
    total = total + settings.halt_loss_weight * halting
    entropy = features.gate_entropy.flatten()[kept].sum() / max(1, len(targets))
    total = total - settings.gate_entropy_weight * entropy
    means = [float(loss.mean()) if len(loss) else 0.0 for loss in losses]
    values = {"loss": means[-1]} | {f"loss_step_{i}": m for i, m in enumerate(means, start=1)}
    values |= {"halting_loss": float(halting.detach()), "gate_entropy": float(entropy.detach())}
    return LossOutput(total, len(targets), values | {"halt_rate": rate}, answers)


def _check(tokens: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Say what is wrong with a batch before the network stumbles over it."""
    if tokens.ndim != 2 or tokens.shape != targets.shape:
        shapes = f"tokens of shape {tuple(tokens.shape)} and targets of {tuple(targets.shape)}"
        raise ConfigError(f"{shapes}: both must be rows x tokens")
    for name, ids in (("token", tokens), ("target", targets[targets != IGNORE])):
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            problem = f"{name} {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
            raise ConfigError(problem, hint="the tokenizer does not fit the network")


def _halting_loss(
    model: ForgeNetwork, losses: list[Tensor], halts: list[tuple[Tensor, Tensor]], expected: float
) -> tuple[Tensor, float]:
    """Halting is right where the last step would not be better by more than a margin."""
    final = losses[-1]
    total = final.new_zeros(())
    targets = []
    for step, (z, rows) in enumerate(halts):
        target = (losses[step] <= final[rows] + model.settings.halt_margin).float()
        if len(target):
            targets.append(target.mean())
            total = total + model.halting.loss(z, target, step) * len(target) / expected
    return total, float(torch.stack(targets).mean()) if targets else 1.0
