"""Layers that compute with rounded numbers: weights by a codec, inputs in eight bits a token.

Rounding is trained straight through: a gradient passes as if nothing had been rounded.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from agent_forge.errors import ConfigError
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.packed import PackedMatrix, Packing

INPUT_LEVELS = 127  # of eight bits, on either side of 0
HEADS = re.compile(r"(^|\.)(lm_head|embed_out|projection)$")  # ours is tied through its projection
# What decides when to halt, and which expert is asked.
KEPT = re.compile(r"(^|\.)(halting|router|block_sparse_moe\.gate|shared_expert_gate)(\.|$)")


class StraightThrough(nn.Module):
    """Computes with `change(W)`; the gradient there is applied to W as it is."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            changed = self.change(weight)
        return changed + (weight - weight.detach())


def rounded_inputs(x: Tensor) -> Tensor:
    """Each token's vector in whole steps of a 127th of its largest number."""
    with torch.no_grad():
        wide = x.float()
        step = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / INPUT_LEVELS
        rounded = ((wide / step).round() * step).to(x.dtype)
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def round_inputs(model: nn.Module, weights: Iterable[str]) -> None:
    """Let the layers of these weights round what they are given; embeddings and heads, which may
    be one, do not."""
    modules = dict(model.named_modules())
    for name in (weight.removesuffix(".weight") for weight in weights):
        layer = modules.get(name)
        if layer is not None and not isinstance(layer, nn.Embedding) and not HEADS.search(name):
            layer.register_forward_pre_hook(_round_first, with_kwargs=True)


def _round_first(
    layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    if given:
        return (rounded_inputs(given[0]), *given[1:]), named
    first, *others = named
    return (), {first: rounded_inputs(named[first]), **{name: named[name] for name in others}}


def plan_packing(
    model: nn.Module, body: str, embedding: str = "", activation_bits: int = 0
) -> Packing:
    """A packing of every matrix: linear layers by the codec `body`, embeddings and the head by
    `embedding` (empty: fp16). Norms, biases and what decides when to halt stay fp16."""
    codecs = {True: find_codec(embedding) if embedding else None, False: find_codec(body)}
    found: dict[str, PackedMatrix] = {}
    for name, layer in model.named_modules():
        turned = type(layer).__name__ == "Conv1D"
        if not turned and not isinstance(layer, nn.Linear | nn.Embedding):
            continue
        codec = codecs[isinstance(layer, nn.Embedding) or bool(HEADS.search(name))]
        if codec and not KEPT.search(name):
            rows, columns = stored_weight(layer).shape
            found[f"{name}.weight"] = PackedMatrix(codec, (rows, columns), turned)
    if not found:
        raise ConfigError("the model has no linear layer that could be packed")
    return Packing(found, activation_bits)


def compute_rounded(model: nn.Module, packing: Packing) -> None:
    """Let a model compute as it will when it is packed, and train straight through that."""
    for name, matrix in packing.matrices.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        parametrize.register_parametrization(layer, "weight", StraightThrough(matrix.rounded))
    round_inputs(model, packing.with_rounded_inputs)


def rounded_once(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that rounds every weight once, however often a layer is used."""

    def compute(*given: Any) -> Any:
        with parametrize.cached():
            return loss(*given)

    return compute


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained, by the names of a model that computes with them as they are."""
    state = model.state_dict()
    return {
        name.replace(".parametrizations.weight.original", ".weight"): t for name, t in state.items()
    }


def stored_weight(layer: nn.Module) -> Tensor:
    """The weight that is trained; where a layer is transformed, what its transform is given."""
    given: Any = layer
    if parametrize.is_parametrized(layer, "weight"):
        return given.parametrizations.weight.original  # type: ignore[no-any-return]
    return given.weight  # type: ignore[no-any-return]
