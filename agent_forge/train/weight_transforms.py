"""Weight transforms as parametrisations: LoRA here, rounding in quant/layers.py.

A layer computes with f(weight), but stores and trains the weight; `fold` puts f(weight) in place.
LoRA beside layers that stay as they are (`LowRankBranches`) is cheaper: W + BA is never made.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
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


class LowRankBranches(nn.Module):
    """LoRA beside linear layers of a network that stays as it is: y + (x A') B'. Its parameters are
    the change alone, so its state is small; no gradient of the size of W is computed."""

    def __init__(
        self, layers: Mapping[str, nn.Module], rank: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.layers = dict.fromkeys(layers)
        self.lora_a, self.lora_b = nn.ParameterList(), nn.ParameterList()
        self._hooks = []
        for number, (name, layer) in enumerate(layers.items()):
            weight: Any = layer.weight
            self.layers[name] = turned = not isinstance(layer, nn.Linear)  # Conv1D of GPT-2
            rows, columns = reversed(weight.shape) if turned else weight.shape
            first = torch.randn(rank, columns, generator=generator) * columns**-0.5
            self.lora_a.append(nn.Parameter(first.to(weight.device)))
            self.lora_b.append(nn.Parameter(torch.zeros(rows, rank, device=weight.device)))
            self._hooks.append(layer.register_forward_hook(partial(self._add, number)))

    def _add(self, number: int, layer: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return y + F.linear(F.linear(given[0], self.lora_a[number]), self.lora_b[number])

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """What is to be added to the weight of each layer, by its name."""
        pairs = zip(self.layers.items(), self.lora_a, self.lora_b, strict=True)
        return {name: (b @ a).t() if turned else b @ a for (name, turned), a, b in pairs}

    def remove(self) -> None:
        """Let the layers compute as before."""
        for hook in self._hooks:
            hook.remove()


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
