"""The training loss: deep supervision over the recursion, halting, and the gate's entropy.

Logits never exist for all positions at once: the cross-entropy is taken in chunks whose logits are
computed again in the backward pass. Steps before the last are supervised on a random share of the
positions; the last one on all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_forge.model.network import ForgeNetwork

CHUNK = 1024
IGNORE = -100


@dataclass
class Loss:
    """The loss to minimise, and what it consists of."""

    total: Tensor
    per_step: list[float]  # cross-entropy of each recursion step, in nats a token
    halting: float
    gate_entropy: float
    mean_target: float  # share of tokens for which halting before the last step was right


def token_losses(model: ForgeNetwork, y_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of each position, with at most CHUNK rows of logits alive."""

    def chunk(y: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(model.hidden(y)).float()
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)

    parts = [
        checkpoint(chunk, y, targets, use_reentrant=False, preserve_rng_state=False)
        if y.requires_grad
        else chunk(y, targets)
        for y, targets in zip(torch.split(y_ND, CHUNK), torch.split(targets_N, CHUNK), strict=True)
    ]
    return torch.cat(parts)


def language_loss(
    model: ForgeNetwork, tokens_BT: Tensor, targets_BT: Tensor, generator: torch.Generator
) -> Loss:
    """The loss of a batch. `targets` are the next tokens, IGNORE where there is none to learn."""
    settings = model.settings
    features = model.features(tokens_BT)
    kept = (targets_BT != IGNORE).flatten().nonzero().squeeze(-1)
    targets = targets_BT.flatten()[kept]
    x = features.x.flatten(0, 1)[kept]
    y, z = model.recursion.start(x)
    share = max(1, round(settings.supervised_share * len(targets)))
    total = x.new_zeros(())
    losses: list[Tensor] = []
    halts: list[tuple[Tensor, Tensor]] = []
    for step in range(settings.t_max):
        y, z = model.recursion(x, y, z)
        last = step == settings.t_max - 1
        order = torch.randperm(len(targets), generator=generator)[:share].to(x.device)
        rows = slice(None) if last else order
        loss = token_losses(model, y[rows], targets[rows])
        weight = 1.0 if last else 0.5 + 0.5 * step / settings.t_max
        total = total + weight * loss.mean()
        losses.append(loss.detach())
        halts.append((z.detach()[rows], order))
        y, z = y.detach(), z.detach()
    halting, rate = _halting_loss(model, losses, halts)
    total = total + settings.halt_loss_weight * halting
    total = total - settings.gate_entropy_weight * features.gate_entropy
    return Loss(
        total,
        [float(loss.mean()) for loss in losses],
        float(halting.detach()),
        float(features.gate_entropy.detach()),
        rate,
    )


def _halting_loss(
    model: ForgeNetwork, losses: list[Tensor], halts: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, float]:
    """Halting is right where the last step would not be better by more than a margin."""
    final = losses[-1]
    total = final.new_zeros(())
    targets = []
    for step, (z, order) in enumerate(halts[:-1]):
        target = (losses[step] <= final[order] + model.settings.halt_margin).float()
        targets.append(target.mean())
        total = total + model.halting.loss(z, target, step)
    rate = float(torch.stack(targets).mean()) if targets else 1.0
    return total, rate
