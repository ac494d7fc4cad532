"""LoRA: train a low-rank change of the matrices while they stay as they are, then fold it in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from agent_forge.errors import ConfigError

EVERY_MATRIX = ("q", "k", "v", "out", "gate", "up", "down")


class LowRank(nn.Module):
    """W + scale * B A. B begins at zero, so that nothing changes at first."""

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        first = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.lora_a = nn.Parameter(first.to(weight))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank).to(weight))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.lora_b @ self.lora_a


def add_lora(
    model: nn.Module,
    rank: int,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    targets: Sequence[str] = EVERY_MATRIX,
) -> list[str]:
    """Freeze the model and give each target a trainable low-rank change; returns their names."""
    if rank < 1:
        raise ConfigError(f"LoRA of rank {rank} changes nothing")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    if not found:
        raise ConfigError(f"no linear layer is named {', '.join(targets)}")
    if any(parametrize.is_parametrized(module) for _, module in found):
        raise ConfigError("the model has LoRA already; fold it in first")
    model.requires_grad_(False)
    for _, module in found:
        change = LowRank(module.weight, rank, scale, generator)
        parametrize.register_parametrization(module, "weight", change)
    return [name for name, _ in found]


def fold_lora(model: nn.Module) -> None:
    """Add the changes to the matrices for good; the model is an ordinary one again."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    model.requires_grad_(True)
