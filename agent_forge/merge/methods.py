"""The standard merge methods, each a small pure function.

A method looks at its inputs as a whole (weights, angles, thresholds) and returns a kernel: the
formula for a run of elements, in fp32 whatever the storage type. The engine calls the kernel run
by run, so that memory stays small and the arithmetic stays in the cache. Parameters mean what they
mean in mergekit; docs/merging.md has the formulas.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.merge.tensor_inputs import TensorInputs, draws, kept_share

Params = Mapping[str, Any]
Parts = list[Tensor]
Kernel = Callable[[Parts, Tensor | None, int], Tensor]  # parts, base, position -> result
Trim = Callable[[Tensor, int], Tensor]  # a run of a task vector, position -> the same, sparse
Sparse = tuple[Trim, float]  # and what all of it is to be multiplied with
Keep = Callable[[TensorInputs, int, Params], Sparse]
ADDS_BASE = ("ignored", "first")  # a base that is not listed is one more input for these


@dataclass(frozen=True)
class RowKernel:
    """A kernel that needs whole vectors: along the last axis (-1) or the first (0)."""

    kernel: Kernel
    axis: int = -1


@dataclass(frozen=True)
class MergeMethod:
    """A method with its parameters (name -> default) and what it asks of its inputs."""

    # A kernel, or the whole tensor at once; None: by combos.fuse.
    build: Callable[[TensorInputs, Params], Kernel | RowKernel | Tensor] | None
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_input: Mapping[str, Any] = field(default_factory=dict)  # of every input but the base
    base: Literal["ignored", "first", "optional", "required", "beside"] = "ignored"
    least: int = 1  # inputs; a base that is only a base does not count
    most: int | None = None


def combination(coefficients: Sequence[float], divisor: float = 1.0) -> Kernel:
    """sum c_i x_i / divisor, or base + sum c_i (x_i - base) / divisor."""

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        if base is not None:
            parts = [part.sub_(base) for part in parts]
        total = parts[0].mul_(coefficients[0])
        for part, c in zip(parts[1:], coefficients[1:], strict=True):
            total.add_(part, alpha=c)
        total = total if divisor == 1 else total.div_(divisor)
        return total if base is None else total.add_(base)

    return kernel


def linear(x: TensorInputs, p: Params) -> Kernel:
    """The weighted average; without `normalize` the weighted sum."""
    total = sum(p["weight"]) if p["normalize"] else 1.0
    if total == 0:
        raise ConfigError("linear: the weights sum to zero", hint="set normalize: false")
    return combination(p["weight"], total)


def angle(gram: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The angle between two combinations of the inputs; exact for nearly parallel ones too."""
    aa, bb, ab = (float(u @ gram @ v) for u, v in ((a, a), (b, b), (a, b)))
    return math.atan2(math.sqrt(max(aa * bb - ab * ab, 0.0)), ab)


def slerp_pair(theta: float, t: float) -> tuple[float, float]:
    """The two coefficients of spherical interpolation; linear where the sine vanishes."""
    if abs(math.sin(theta)) < 1e-9:
        return 1 - t, t
    return math.sin((1 - t) * theta) / math.sin(theta), math.sin(t * theta) / math.sin(theta)


def slerp(x: TensorInputs, p: Params) -> Kernel:
    """Spherical interpolation of whole tensors, linear for an angle below about 1.8 degrees."""
    # Further models follow pair by pair, each with the weight of one among those so far.
    gram, unit = x.gram(), np.eye(len(x.tensors))
    result = unit[0]
    for i in range(1, len(unit)):
        t = p["t"] if len(unit) == 2 else 1 / (i + 1)
        theta = angle(gram, result, unit[i])
        a, b = (1 - t, t) if abs(math.cos(theta)) > 0.9995 else slerp_pair(theta, t)
        result = a * result + b * unit[i]
    return combination([float(c) for c in result])


def nuslerp(x: TensorInputs, p: Params) -> Kernel | RowKernel:
    """Spherical interpolation of two models or task vectors, by tensor or by row."""
    w0, w1 = p["weight"]
    t = 0.5 if abs(w0 + w1) < 1e-6 else w1 / (w0 + w1)
    if p["nuslerp_flatten"]:
        unit = np.eye(2)
        return combination(slerp_pair(angle(x.gram(), unit[0], unit[1]), t))

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        a, b = parts if base is None else [part.sub_(base) for part in parts]
        unit_a, unit_b = (v / v.norm(dim=-1, keepdim=True).clamp(min=1e-7) for v in (a, b))
        cosine = (unit_a * unit_b).sum(-1, keepdim=True).clamp(-1, 1)
        straight = 1 - cosine.square() <= 1e-16
        theta = torch.acos(torch.where(straight, 0, cosine))
        curved = (torch.sin((1 - t) * theta) * a + torch.sin(t * theta) * b) / torch.sin(theta)
        result = torch.where(straight, (1 - t) * a + t * b, curved)
        return result if base is None else result.add_(base)

    return RowKernel(kernel, axis=0 if p["nuslerp_row_wise"] and len(x.shape) > 1 else -1)


def multislerp(x: TensorInputs, p: Params) -> Kernel:
    """The barycentre on the sphere: average in the tangent space of the mean direction."""
    # Everything lies in the span of the inputs, so their inner products give the coefficients.
    n = len(x.tensors)
    if n == 1:
        return lambda parts, base, start: parts[0]
    gram, eps = x.gram(), p["eps"]
    weights = np.array(p["weight"], dtype=np.float64)
    if p["normalize_weights"]:
        if weights.sum() == 0:
            hint = "set normalize_weights: false"
            raise ConfigError("multislerp: the weights sum to zero", hint=hint)
        weights = weights / weights.sum()
    norms = np.sqrt(np.diag(gram))
    unit = np.diag(1 / (norms + eps))  # rows: the unit vectors as combinations of the inputs
    mean = weights @ unit
    length = math.sqrt(max(float(mean @ gram @ mean), 0.0))
    if length < eps:
        if n == 2:
            return combination([float(w) for w in weights])
        problem = f"multislerp: the weighted directions of {x.name} cancel out"
        raise ConfigError(problem, hint="change a weight")
    mean = mean / length
    tangent = weights @ (unit - np.outer(unit @ gram @ mean, mean))
    turn = math.sqrt(max(float(tangent @ gram @ tangent), 0.0)) + eps
    result = mean * math.cos(turn) + tangent * (math.sin(turn) / turn)
    return combination([float(c) for c in result * (norms @ weights)])


def karcher(x: TensorInputs, p: Params) -> Kernel:
    """The mean on the sphere of the models' directions, times their mean norm."""
    gram, n, tol = x.gram(), len(x.tensors), p["tol"]
    norms = np.sqrt(np.diag(gram))
    valid = norms > tol
    if n == 1 or not valid.any():
        return combination([float(n == 1)] * n)
    unit = np.diag(1 / np.where(valid, norms, 1.0))[valid]  # rows, as combinations of the inputs

    def length(vector: np.ndarray) -> float:
        return math.sqrt(max(float(vector @ gram @ vector), 0.0))

    mean = unit.mean(0)
    mean = unit[0] if length(mean) < tol else mean / length(mean)
    for _ in range(int(p["max_iter"])):
        tangent = np.zeros(n)
        for vector in unit:
            theta = angle(gram, mean, vector)
            if theta >= tol and math.sin(theta) > 0:
                tangent += theta / math.sin(theta) * (vector - math.cos(theta) * mean) / len(unit)
        if (turn := length(tangent)) < tol:
            break
        mean = math.cos(turn) * mean + math.sin(turn) / turn * tangent
        mean = mean / length(mean)
    return combination([float(c) for c in mean * norms.mean()])


def stock_ratio(cosine: Tensor, count: int) -> Tensor:
    """How far to go from the base to the mean; nowhere where the estimate is singular."""
    below = 1 + (count - 1) * cosine
    singular = below.abs() < 1e-6
    return torch.where(singular, 0.0, count * cosine / torch.where(singular, 1.0, below))


def model_stock(x: TensorInputs, p: Params) -> Kernel | RowKernel:
    """Between base and mean, by the angle between the task vectors."""
    n = len(x.tensors)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    if not p["filter_wise"]:
        gram = x.gram()
        norms = np.sqrt(np.diag(gram))
        cosines = [gram[i, j] / max(norms[i] * norms[j], 1e-6) for i, j in pairs]
        cosine = float(np.mean(np.clip(cosines, -1, 1)))
        t = float(stock_ratio(torch.tensor(cosine, dtype=torch.float64), n))
        return combination([t / n] * n)

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        assert base is not None
        deltas = [part.sub_(base) for part in parts]
        norms = [d.norm(dim=-1, keepdim=True) for d in deltas]
        dots = [(deltas[i] * deltas[j]).sum(-1, keepdim=True) for i, j in pairs]
        floors = [(norms[i] * norms[j]).clamp(min=1e-6) for i, j in pairs]
        cosines = [(d / f).clamp(-1, 1) for d, f in zip(dots, floors, strict=True)]
        t = stock_ratio(torch.stack(cosines).mean(0), n)
        return t * (sum(deltas[1:], deltas[0]) / n) + base

    return RowKernel(kernel)


def passthrough(x: TensorInputs, p: Params) -> Kernel:
    """One model as it is, or scaled."""
    scale = p["scale"][0]
    return lambda parts, base, start: parts[0] if scale is None else parts[0].mul_(float(scale))


def unchanged(delta: Tensor, start: int) -> Tensor:
    return delta


def nothing(delta: Tensor, start: int) -> Tensor:
    return delta.zero_()


def trim_below(threshold: float) -> Trim:
    """Zero where the magnitude is below the threshold; what equals it stays."""
    if threshold <= 0:
        return unchanged
    under = float(np.nextafter(np.float32(threshold), np.float32(0)))
    return lambda delta, start: F.hardshrink(delta, under)


def keep_ranks(x: TensorInputs, i: int, lowest: int, kept: int, rescale: bool) -> Sparse:
    """The `kept` magnitudes from rank `lowest` on, and all that equal the least or the largest."""
    # `rescale` restores the L1 norm that the task vector had.
    if kept <= 0:
        return nothing, 1.0
    last = lowest + kept - 1
    ranks = (lowest, last) if last < x.numel - 1 else (lowest,)
    low, high = [*x.magnitudes(i, ranks), math.inf][:2]
    factor = l1_factor(x, i, lowest, kept, low, high) if rescale else 1.0
    above = trim_below(low)
    if high == math.inf:
        return above, factor
    return lambda delta, start: above(delta, start) - F.hardshrink(delta, high), factor


def l1_factor(x: TensorInputs, i: int, lowest: int, kept: int, low: float, high: float) -> float:
    """L1 norm of a task vector over that of exactly the `kept` elements from rank `lowest` on."""
    before = between = 0.0
    under = inside = 0
    for delta in x.deltas(i):
        size = delta.abs_()
        before += float(size.sum(dtype=torch.float64))
        middle = (size > low) & (size < high)
        under += int((size <= low).sum())
        inside += int(middle.sum())
        between += float(size[middle].sum(dtype=torch.float64))
    at_low = min(kept, under - lowest)
    after = between + at_low * low
    after += (kept - at_low - inside) * high if math.isfinite(high) else 0.0
    return before / after if before >= 1e-7 and after >= 1e-7 else 1.0


def keep_largest(x: TensorInputs, i: int, p: Params) -> Sparse:
    """The share `density` of largest magnitude (TIES), at least one element."""
    density, n = p["density"][i], x.numel
    kept = max(1, int(density * n)) if density > 0 and n else 0
    return keep_ranks(x, i, n - kept, kept, p["rescale"])


def keep_middle(x: TensorInputs, i: int, p: Params) -> Sparse:
    """The share `density` of largest magnitude after the top `gamma` (breadcrumbs)."""
    kept, top = (int(p[key][i] * x.numel) for key in ("density", "gamma"))
    return keep_ranks(x, i, max(0, x.numel - kept - top), kept, p["rescale"])


def keep_random(x: TensorInputs, i: int, p: Params) -> Sparse:
    """A random share `density` (DARE), divided by that share with `rescale`."""
    density = p["density"][i]
    if density <= 0:
        return nothing, 1.0
    factor = 1 / kept_share(density) if p["rescale"] else 1.0
    return lambda delta, start: delta.mul_(x.mask(f"{x.name}#{i}", start, density)), factor


def keep_by_rank(x: TensorInputs, i: int, p: Params) -> Sparse:
    """A random share, `density` give or take `epsilon` by the rank in its row (DELLA)."""
    density, epsilon = p["density"][i], p["epsilon"][i]
    if density <= 0:
        return nothing, 1.0
    if density + epsilon >= 1 or density - epsilon <= 0:
        problem = f"density {density:g} give or take epsilon {epsilon:g} leaves 0 to 1"
        raise ConfigError(problem, hint="make epsilon smaller; without one it is 0.15")

    def trim(delta: Tensor, row: int) -> Tensor:
        width = delta.shape[-1]
        order = delta.abs().argsort(dim=-1, stable=True)
        rank = torch.empty(delta.shape).scatter_(
            -1, order, torch.arange(width).expand_as(order) * 1.0
        )
        share = rank.mul_(2 * epsilon / max(1, width - 1)).add_(density - epsilon)
        numbers = draws(x.seed, f"{x.name}#{i}", row * width, delta.numel()).astype(np.float32)
        return delta.mul_(torch.from_numpy(numbers).view_as(share) < share.mul_(65536))

    def measure() -> float:
        """L1 norm of the task vector over that of what is kept of it."""
        before = after = 0.0
        for row, parts, base in x.rows():
            assert base is not None
            delta = parts[i].sub_(base)
            before += float(delta.abs().sum(dtype=torch.float64))
            after += float(trim(delta, row).abs_().sum(dtype=torch.float64))
        return before / after if before >= 1e-7 and after >= 1e-7 else 1.0

    what = ("della", x.seed, x.name, i, density, epsilon)
    return trim, x.once(what, measure) if p["rescale"] else 1.0


def elect(deltas: Sequence[Tensor], weights: Sequence[float] | None) -> tuple[Tensor, Tensor]:
    """The sum of what agrees with the elected sign, and the weight that agreed (TIES)."""
    # With s the elected sign, the part of d that agrees is s relu(s d): no comparisons, which cost
    # thirty times an addition here. Without `weights` nobody asks who agreed.
    total = deltas[0].clone()
    for delta in deltas[1:]:
        total.add_(delta)
    sign = torch.copysign(torch.ones((), dtype=total.dtype), total)
    mixed = torch.mul(deltas[0], sign).clamp_(min=0)
    agreed = mixed.sign().mul_(weights[0]) if weights else mixed
    for i, delta in enumerate(deltas[1:], 1):
        part = torch.mul(delta, sign, out=total).clamp_(min=0)
        mixed.add_(part)
        if weights:
            agreed.add_(part.sign_(), alpha=weights[i])
    return mixed.mul_(sign), agreed


def task_vectors(
    x: TensorInputs, p: Params, keep: Keep | None, consensus: bool
) -> Kernel | RowKernel:
    """base + lambda * the task vectors: made sparse, weighted, and summed or put to the vote."""
    weights, scale, normalize = p["weight"], p["lambda"], p["normalize"]
    total = sum(weights) if abs(sum(weights)) >= 1e-8 else 1.0
    shares = enumerate(p["density"])
    sparse = [keep(x, i, p) if keep and share < 1 else (unchanged, 1.0) for i, share in shares]
    trims = [trim for trim, _ in sparse]
    factors = [w * factor for w, (_, factor) in zip(weights, sparse, strict=True)]

    def kernel(parts: Parts, base: Tensor | None, start: int) -> Tensor:
        assert base is not None
        deltas = [t(part.sub_(base), start) for t, part in zip(trims, parts, strict=True)]
        if not consensus:
            mixed = deltas[0].mul_(factors[0])
            for delta, factor in zip(deltas[1:], factors[1:], strict=True):
                mixed.add_(delta, alpha=factor)
            return mixed.mul_(scale / total if normalize else scale).add_(base)
        deltas = [d if f == 1 else d.mul_(f) for d, f in zip(deltas, factors, strict=True)]
        mixed, agreed = elect(deltas, weights if normalize else None)
        if normalize and min(weights) > 0:  # what agreed is 0 only where nothing is left to divide
            mixed.div_(agreed.clamp_(min=min(weights)))
        elif normalize:
            mixed.div_(agreed.add_(agreed.sign().abs_().neg_().add_(1)))  # 1 instead of 0
        return torch.add(base, mixed, alpha=scale)

    return RowKernel(kernel) if keep is keep_by_rank else kernel


def _task_method(
    keep: Keep | None, *, consensus: bool, normalize: bool = False, rescale: bool = False
) -> MergeMethod:
    build = partial(task_vectors, keep=keep, consensus=consensus)
    shared = {"normalize": normalize, "rescale": rescale, "lambda": 1.0, "int8_mask": False}
    own = {"gamma": 0.01} if keep is keep_middle else {}
    own |= {"epsilon": 0.15} if keep is keep_by_rank else {}
    per_input = {"weight": 1.0, "density": 1.0, **own}
    return MergeMethod(build, shared, per_input, base="required", least=0)


_NUSLERP = {"nuslerp_flatten": True, "nuslerp_row_wise": False}
_MULTISLERP = {"normalize_weights": True, "eps": 1e-8}
STANDARD: dict[str, MergeMethod] = {
    "linear": MergeMethod(linear, {"normalize": True}, {"weight": 1.0}),
    "slerp": MergeMethod(slerp, {"t": 0.5}, base="first", least=2),
    "nuslerp": MergeMethod(nuslerp, _NUSLERP, {"weight": 1.0}, base="optional", least=2, most=2),
    "multislerp": MergeMethod(multislerp, _MULTISLERP, {"weight": 1.0}, base="optional"),
    "karcher": MergeMethod(karcher, {"max_iter": 10, "tol": 1e-5}),
    "model_stock": MergeMethod(model_stock, {"filter_wise": False}, base="required", least=2),
    "passthrough": MergeMethod(passthrough, per_input={"scale": None}, most=1),
    "task_arithmetic": _task_method(None, consensus=False),
    "ties": _task_method(keep_largest, consensus=True, normalize=True),
    "dare_linear": _task_method(keep_random, consensus=False, rescale=True),
    "dare_ties": _task_method(keep_random, consensus=True, rescale=True),
    "breadcrumbs": _task_method(keep_middle, consensus=False),
    "breadcrumbs_ties": _task_method(keep_middle, consensus=True),
    "della_linear": _task_method(keep_by_rank, consensus=False, rescale=True),
    "della": _task_method(keep_by_rank, consensus=True, normalize=True, rescale=True),
}
