"""Which channels, heads and layers of a network matter least, and the network without them.

Importance is of first order (arXiv 1905.10650): by how much the loss would change if what a channel
or a head gives to the next matrix were 0, |activation x gradient|, summed over the asked tokens. A
layer is simply left out and measured. All layers keep the same shape: each loses as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agent_forge.config.settings import ModelSettings
from agent_forge.data.loader import IGNORE, TokenizedItem
from agent_forge.model.loss import states_of, token_losses
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.training import LatentModel

CHANNELS, HEADS, LAYERS = "channels", "heads", "layers"
MULTIPLE = 8  # channels are left in such: the rows of a tile of the token step
ROWS = 16  # items of a batch
INNER = {  # the matrices of a layer whose rows go, and the one whose columns do
    CHANNELS: (("mlp.gate", "mlp.up"), "mlp.down"),
    HEADS: (("attention.q", "attention.k", "attention.v"), "attention.out"),
}


class Cut(NamedTuple):
    """What is left of a network: of each layer the channels or heads, or the layers."""

    kind: str
    kept: tuple[tuple[int, ...], ...]

    def apply(self, model: LatentModel) -> LatentModel:
        """The model without the others; those that are left do what they did."""
        if self.kind == LAYERS:
            return _with_layers(model, self.kept[0])
        return _with_rows(model, self.kind, self.kept)


class Importance(NamedTuple):
    """By layer, what the loss owes to every channel and every head."""

    channels: list[Tensor]
    heads: list[Tensor]


def cuts_of(
    settings: ModelSettings, importance: Importance, kinds: Sequence[str], share: float
) -> list[Cut]:
    """The cuts that could be made next: a share of the channels, a head or a layer."""
    found, s = list[Cut](), settings
    fewer = -(-round((1 - share) * s.ffn_hidden) // MULTIPLE) * MULTIPLE
    fewer = fewer if fewer < s.ffn_hidden else s.ffn_hidden - MULTIPLE
    if CHANNELS in kinds and fewer > 0:
        found.append(Cut(CHANNELS, _best(importance.channels, fewer)))
    if HEADS in kinds and s.n_heads > 1:
        found.append(Cut(HEADS, _best(importance.heads, s.n_heads - 1)))
    if LAYERS in kinds and s.n_layers > 1:
        every = range(s.n_layers)
        found += [Cut(LAYERS, (tuple(i for i in every if i != out),)) for out in every]
    return found


def _best(importance: Iterable[Tensor], count: int) -> tuple[tuple[int, ...], ...]:
    """Of each layer the most important ones, in their order."""
    tops = (own.sort(descending=True, stable=True).indices[:count] for own in importance)
    return tuple(tuple(sorted(top.tolist())) for top in tops)


# -- importance ------------------------------------------------------------------------------------


def importance_of(model: ForgeNetwork, items: Sequence[TokenizedItem]) -> Importance:
    """By one pass forth and back over the items. The weights of the model are not changed."""
    settings, given = model.settings, dict[tuple[str, int], Tensor]()

    def keep(place: tuple[str, int], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given[place] = inputs[0]

    hooks, sums = [], dict[tuple[str, int], Tensor]()
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):  # behind the hooks that round what is given
        down, out = block.mlp.down, block.attention.out
        places = (CHANNELS, settings.ffn_hidden, down), (HEADS, settings.n_heads, out)
        for kind, count, layer in places:
            sums[kind, number] = torch.zeros(count)
            hooks.append(layer.register_forward_pre_hook(partial(keep, (kind, number))))
    model.eval().requires_grad_(True)
    device = next(model.parameters()).device
    for start in range(0, len(items), ROWS):
        tokens, targets = (t.to(device) for t in _batch(items[start : start + ROWS]))
        states = states_of(model, tokens).flatten(0, 1)
        loss = token_losses(model, states, targets.flatten()).sum()
        gradients = torch.autograd.grad(loss, [*given.values()])
        for (place, x), gradient in zip(given.items(), gradients, strict=True):
            owed = (
                (x * gradient)
                .detach()
                .reshape(-1, len(sums[place]), x.shape[-1] // len(sums[place]))
            )
            sums[place] += owed.sum(2).abs().sum(0).cpu()
    for hook in hooks:
        hook.remove()
    layers = range(settings.n_layers)
    return Importance([sums[CHANNELS, i] for i in layers], [sums[HEADS, i] for i in layers])


def _batch(items: Sequence[TokenizedItem]) -> tuple[Tensor, Tensor]:
    """Rows of tokens, and of the asked ones that follow each."""
    longest = max(len(item.ids) for item in items)
    tokens = torch.zeros(len(items), longest, dtype=torch.long)
    targets = torch.full_like(tokens, IGNORE)
    for row, item in enumerate(items):
        tokens[row, : len(item.ids)] = torch.tensor(item.ids)
        for place, asked in enumerate(item.asked[1:]):
            if asked:
                targets[row, place] = item.ids[place + 1]
    return tokens, targets


# -- smaller models --------------------------------------------------------------------------------


def _with_rows(model: LatentModel, kind: str, kept: Sequence[Sequence[int]]) -> LatentModel:
    """A model with some of the channels or heads of every layer."""
    s, state = model.settings, dict(model.state)
    size = 1 if kind == CHANNELS else s.head_width
    inner, outer = INNER[kind]
    for number, own in enumerate(kept):
        rows = (torch.tensor(own)[:, None] * size + torch.arange(size)).flatten()
        for name in inner:
            key = f"blocks.{number}.{name}.weight"
            state[key] = state[key][rows.to(state[key].device)].clone()
        key = f"blocks.{number}.{outer}.weight"
        state[key] = state[key][:, rows.to(state[key].device)].clone()
    count = len(kept[0])
    changed = {"n_heads": count, "head_size": size} if kind == HEADS else {"ffn_hidden": count}
    return _smaller(model, changed, state, {name: name for name in state})


def _with_layers(model: LatentModel, kept: Sequence[int]) -> LatentModel:
    """A model with some of the layers."""
    renamed = {}
    for name in model.state:
        first, number, *rest = name.split(".", 2)
        if first != "blocks":
            renamed[name] = name
        elif int(number) in kept:
            renamed[name] = ".".join([first, str(kept.index(int(number))), *rest])
    state = {new: model.state[old] for old, new in renamed.items()}
    return _smaller(model, {"n_layers": len(kept)}, state, renamed)


def _smaller(
    model: LatentModel,
    changed: Mapping[str, int],
    state: Mapping[str, Tensor],
    renamed: Mapping[str, str],
) -> LatentModel:
    """A model of another shape, whose matrices are written by the codecs that they had."""
    settings = ModelSettings(**{**model.settings.model_dump(), **changed})
    if (packing := model.packing) is not None:
        matrices = {}
        for old, new in renamed.items():
            if matrix := packing.matrices.get(old):
                rows, columns = state[new].shape
                matrices[new] = replace(matrix, shape=(rows, columns))
        packing = replace(packing, matrices=matrices)
    return replace(model, settings=settings, state=state, packing=packing)
