"""Weight transforms as parametrisations: LoRA, and rounding that is trained straight through.

A layer computes with f(weight), but stores and trains the weight; `fold` puts f(weight) in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from agent_forge.errors import ConfigError

EVERY_MATRIX = ("q", "k", "v", "out", "gate", "up", "down")


class LowRankUpdate(nn.Module):
    """LoRA: W + scale * B A. B begins at zero, so that nothing changes at first."""

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        first = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.lora_a = nn.Parameter(first.to(weight))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank).to(weight))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.lora_b @ self.lora_a


class StraightThrough(nn.Module):
    """Computes with `change(W)`; the gradient there is applied to W as it is."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            changed = self.change(weight)
        return changed + (weight - weight.detach())


def transformed(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weight is transformed, by name."""
    return {n: m for n, m in model.named_modules() if parametrize.is_parametrized(m, "weight")}


def add_transform(
    model: nn.Module, make: Callable[[Tensor], nn.Module], *, targets: Sequence[str] = EVERY_MATRIX
) -> list[str]:
    """Give the layers named in `targets` the transform `make(weight)`; returns their names."""
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = {n: m for n, m in linear.items() if n.rpartition(".")[2] in targets}
    if not layers:
        raise ConfigError(f"no linear layer is named {', '.join(targets)}")
    if any(map(parametrize.is_parametrized, layers.values())):
        raise ConfigError("the model has a transform such as LoRA already; fold it in first")
    for module in layers.values():
        parametrize.register_parametrization(module, "weight", make(module.weight))
    return list(layers)


def add_lora(
    model: nn.Module, rank: int, generator: torch.Generator, *, scale: float = 1.0, **where: Any
) -> list[str]:
    """Freeze the model and give each target a trainable low-rank change; returns their names."""
    if rank < 1:
        raise ConfigError(f"LoRA of rank {rank} changes nothing")
    frozen = list(model.parameters())
    names = add_transform(model, lambda w: LowRankUpdate(w, rank, scale, generator), **where)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return names


def fold(model: nn.Module) -> None:
    """Put the transformed weights in place of the stored ones; the model is an ordinary one."""
    for layer in transformed(model).values():
        parametrize.remove_parametrizations(layer, "weight")
    model.requires_grad_(True)
