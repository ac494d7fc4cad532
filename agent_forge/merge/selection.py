"""Methods that choose, element by element, which models may change the base: two of a pair (a base
and one model) and three of any number of models. Kernels as in methods.py."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_forge.merge.methods import Kernel, MergeMethod, Params, Parts, RowKernel
from agent_forge.merge.tensor_inputs import TensorInputs, select

LEAST_DIFFERENCE = 1e-6  # that nearswap divides by
TINY_SHARE = 1e-8  # added to the softmax of a row, so that its logarithm exists
LEAST_ENERGY = 1e-6  # below it sce weights all models alike


def differences(parts: Parts, base: Tensor | None) -> Tensor:
    assert base is not None
    return torch.stack([part.sub_(base) for part in parts])


def variance(deltas: Tensor) -> Tensor:
    """Over the models; `Tensor.var` takes many times as long along the first axis."""
    return (deltas - deltas.mean(0)).square_().mean(0)


def nearswap(x: TensorInputs, p: Params) -> Kernel:
    """The model where it is within `t` of the base, else `t` of the way towards it."""

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        assert base is not None
        apart = (base - parts[0]).abs_().clamp_(min=LEAST_DIFFERENCE)
        share = torch.div(p["t"], apart).clamp_(0, 1)
        return share * parts[0] + (1 - share) * base

    return kernel


def importance(model: Tensor, base: Tensor) -> Tensor:
    """How much each element has moved, times the divergence between the rows as distributions."""
    p, q = (F.softmax(row, dim=-1).add_(TINY_SHARE) for row in (model, base))
    divergence = torch.sum(p * torch.log(p / q), dim=-1, keepdim=True)
    return ((model - base).abs_() * divergence).clamp_(min=0)


def arcee_fusion(x: TensorInputs, p: Params) -> RowKernel:
    """The model where its importance reaches the median plus 1.5 interquartile ranges."""

    def scores() -> Iterator[Tensor]:
        for _, (model,), base in x.rows():
            assert base is not None
            yield importance(model, base).flatten()

    def measure() -> float:
        ranks = [int(share * (x.numel - 1)) for share in (0.25, 0.5, 0.75)]
        low, middle, high = np.array(select(scores, ranks), dtype=np.float32)
        return float(middle + np.float32(1.5) * (high - low))

    threshold = x.once(("fusion",), measure)

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        assert base is not None
        chosen = importance(parts[0], base) >= threshold
        return base + parts[0].sub_(base).mul_(chosen)

    return RowKernel(kernel)


def ram(x: TensorInputs, p: Params, plus: bool) -> Kernel:
    """The mean of the task vectors that act on an element, as they are where only one does."""
    # With `plus`, what only one changes is stronger, the more a model shares with the others.
    n, epsilon = len(x.tensors), p["epsilon"]

    def acting(parts: Parts, base: Tensor | None) -> tuple[Tensor, Tensor]:
        deltas = F.hardshrink(differences(parts, base), epsilon)
        return deltas, deltas.sign().abs_().sum(0)

    def measure() -> np.ndarray:
        counts: np.ndarray = np.zeros((2, n))
        for parts, base in x.runs():
            deltas, count = acting(parts, base)
            active = deltas != 0
            alone = (active & (count == 1)).sum(1)
            counts += np.stack([(active.sum(1) - alone).numpy(), alone.numpy()])
        return counts

    factors = torch.ones(n, 1)
    if plus:
        shared, alone = x.once(("ram", epsilon), measure)
        ratio = np.clip(shared / np.maximum(alone, max(epsilon, 1e-30)), 0, p["alpha"])
        factors = torch.tensor(1 + p["r"] * ratio, dtype=torch.float32).view(n, 1)

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        deltas, count = acting(parts, base)
        mean = deltas.sum(0).div_(count.clamp(min=1))
        mixed = torch.where(count == 1, deltas.mul_(factors).sum(0), mean) if plus else mean
        assert base is not None
        return mixed.add_(base)

    return kernel


def sce(x: TensorInputs, p: Params) -> Kernel:
    """Elements of largest variance, models by their energy there, signs by the vote of the sum."""
    share = p["select_topk"]

    def variances() -> Iterator[Tensor]:
        return (variance(differences(*run)) for run in x.runs())

    def threshold() -> float:
        kept = int(sum(int(v.count_nonzero()) for v in variances()) * share)
        return select(variances, [x.numel - kept])[0] if kept > 0 else torch.inf

    least = x.once(("variance", share), threshold) if share < 1 else 0.0

    def chosen(parts: Parts, base: Tensor | None) -> Tensor:
        deltas = differences(parts, base)
        return deltas if share >= 1 else deltas.mul_(variance(deltas) >= least)

    def energies() -> np.ndarray:
        found = (chosen(*run).square_().sum(1, dtype=torch.float64) for run in x.runs())
        return np.asarray(sum(energy.numpy() for energy in found) / x.numel)

    energy = x.once(("energy", share), energies)
    if energy.sum() < LEAST_ENERGY:
        energy = np.ones(len(energy))
    weights = torch.tensor(energy / energy.sum(), dtype=torch.float32).view(-1, 1)

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        deltas = chosen(parts, base)
        sign = torch.copysign(torch.ones(()), deltas.sum(0))
        agreeing = deltas.mul_(sign).clamp_(min=0)
        weight = (agreeing.sign() * weights).sum(0).clamp_(min=LEAST_ENERGY)
        assert base is not None
        return agreeing.mul_(weights).sum(0).div_(weight).mul_(sign).add_(base)

    return kernel


_RAM = {"epsilon": 1e-5}
_SCE = {"int8_mask": False, "select_topk": 1.0}
SELECTING: dict[str, MergeMethod] = {
    "nearswap": MergeMethod(nearswap, {"t": 1e-4}, base="required", most=1),
    "arcee_fusion": MergeMethod(arcee_fusion, base="required", most=1),
    "ram": MergeMethod(partial(ram, plus=False), _RAM, base="required", least=0),
    "ramplus_tl": MergeMethod(
        partial(ram, plus=True), {"r": 0.1, "alpha": 0.2, **_RAM}, base="required", least=0
    ),
    "sce": MergeMethod(sce, _SCE, base="required", least=0),
}
