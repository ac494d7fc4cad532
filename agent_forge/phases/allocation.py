"""How coarse each kind of matrix may be written, so that the file has a size and little is lost.

What rounding costs grows with the square of the step: price * step^2. Each doubling of the step
saves a bit of every weight. The least cost for a size then has steps of sqrt(weights / price) times
one number, which is found by bisection of the size itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from agent_forge.quant import entropy
from agent_forge.quant.codecs import COARSEST, FINEST, StepCodec, find_codec
from agent_forge.quant.packed import PackedMatrix, kinds_of

REFERENCE = 0.7  # the step at which a kind is priced
WIDEST = 3.0  # a kind's step over the mean one, at most: prices of single kinds are rough
HALVINGS = 14
SCALE_BYTES = 0.6  # of a scale, once the file is compressed
CHANGES = 10_000  # steps are written with four digits behind the point
Matrices = Mapping[str, PackedMatrix]


class Price(NamedTuple):
    """A kind of matrix: its weights, and the divergence when it alone is rounded, nats a token."""

    kind: str
    weights: int
    nats: float


@torch.no_grad()
def divergence_of(
    model: nn.Module, other: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """KL(model || model with other weights) where tokens are asked for, in nats a token. Batches
    are tokens and which of them are asked for."""
    total, count = 0.0, 0
    for tokens, asked in batches:
        outputs = (model(tokens), torch.func.functional_call(model, dict(other), (tokens,)))
        rows = (getattr(out, "logits", out)[:, :-1][asked[:, 1:]] for out in outputs)
        own, changed = (row.float().log_softmax(-1) for row in rows)
        total += float((own.exp() * (own - changed)).sum())
        count += len(own)
    return total / max(1, count)


def prices_of(
    cost: Callable[[Mapping[str, Tensor]], float], state: Mapping[str, Tensor], matrices: Matrices
) -> list[Price]:
    """Every kind of matrix, rounded alone at the step of reference. `cost` is that of weights."""
    codec, found = find_codec(f"step{REFERENCE}"), []
    for kind, names in kinds_of(matrices).items():
        rounded = {
            name: PackedMatrix(codec, matrices[name].shape, matrices[name].turned).rounded(
                state[name]
            )
            for name in names
        }
        weights = sum(state[name].numel() for name in names)
        found.append(Price(kind, weights, cost(rounded)))
    return found


def steps_for(
    state: Mapping[str, Tensor], matrices: Matrices, prices: Sequence[Price], target_bytes: float
) -> dict[str, PackedMatrix]:
    """The matrices with steps at which their codes take so many bytes; without prices, one step
    for all. The finest or coarsest steps, if no others come near."""
    kinds, wish = kinds_of(matrices), dict.fromkeys(kinds_of(matrices), 1.0)
    if prices:
        worth = {p.kind: math.sqrt(p.weights / max(p.nats, 1e-9)) for p in prices}
        weights = {p.kind: p.weights for p in prices}
        mean = sum(weights[k] * math.log(worth[k]) for k in worth) / sum(weights.values())
        wish = {k: math.exp(math.log(own) - mean) for k, own in worth.items()}
        wish = {k: min(WIDEST, max(1 / WIDEST, own)) for k, own in wish.items()}

    def at(step: float) -> dict[str, PackedMatrix]:
        found = {}
        for kind, names in kinds.items():
            own = min(COARSEST, max(FINEST, step * wish[kind]))
            codec = find_codec(f"step{math.floor(own * CHANGES) / CHANGES:g}")
            for name in names:
                found[name] = PackedMatrix(codec, matrices[name].shape, matrices[name].turned)
        return found

    low, high = math.log(FINEST), math.log(COARSEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if coded_bytes(state, at(math.exp(middle))) > target_bytes:
            low = middle
        else:
            high = middle
    chosen = at(math.exp(high))
    return {name: chosen[name] for name in matrices}  # in their order


def coded_bytes(state: Mapping[str, Tensor], matrices: Matrices) -> float:
    """The bytes that codes and scales of matrices take, about."""
    total = 0.0
    for name, matrix in matrices.items():
        assert isinstance(matrix.codec, StepCodec)
        coded = matrix.quantise(state[name])
        total += entropy.size_bits(coded.codes.numpy()) / 8
        total += SCALE_BYTES * coded.scales.numel() + 2 * entropy.lanes_of(coded.codes.numel())
    return total
