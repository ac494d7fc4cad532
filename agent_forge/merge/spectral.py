"""Methods that look at a matrix as a map: at its singular vectors, or at what it makes of inputs.

They treat the matrices of the network; all other tensors, the embeddings and the head take the
mean. A matrix is computed whole, in double precision. Directions whose singular value is rounding
count as absent, so that neither their choice nor the signs of singular vectors matter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.merge.methods import Kernel, MergeMethod, Params, combination
from agent_forge.merge.tensor_inputs import Cache, TensorInputs
from agent_forge.model.weights import BEFORE_LAYERS, HEAD, layer_of
from agent_forge.store.tensors import TensorSpec

ROUNDING = 1e-6  # of the largest singular value
RIDGE = 1e-6  # of the mean diagonal: inputs that are always zero take the mean of the models
SVC_LEAST = {"tsv_m": 1.0, "swudi": 1.0}  # the least share of a model in a direction
SVC_LEAST_ELSE = 0.1
GRAM = "gram of inputs"  # (GRAM, model, tensor) in the cache of the parents: sum of x x^T
STEP_NS = 0.3  # of a decomposition, for each element and row of the shorter side
Rule = Callable[[Sequence[Tensor], Params], Tensor]  # task vectors -> that of the merge


def is_treated(name: str, shape: Sequence[int]) -> bool:
    """True for a matrix of the network that is no embedding and no head."""
    outside = HEAD.search(name) or BEFORE_LAYERS.search(name)
    return len(shape) == 2 and min(shape) > 0 and (layer_of(name) is not None or not outside)


def thin_svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s, V with a = U diag(s) V^T, by the eigenvectors of the smaller product."""
    if a.shape[0] < a.shape[1]:
        v, s, u = thin_svd(a.T)
        return u, s, v
    values, vectors = torch.linalg.eigh(a.T @ a)
    s, v = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    s = s[s > ROUNDING * s[:1].sum()]  # there may be none at all
    v = v[:, : len(s)]
    return a @ v / s, s, v


def polar(a: Tensor) -> Tensor:
    u, _, v = thin_svd(a)
    return u @ v.T


def tsv_m(deltas: Sequence[Tensor], p: Params) -> Tensor:
    """The top share of each model's singular vectors, all of them made orthogonal together."""
    kept = max(1, min(deltas[0].shape) // len(deltas))
    u, s, v = zip(*(thin_svd(delta) for delta in deltas), strict=True)
    weighted = [w * values[:kept] for w, values in zip(p["weight"], s, strict=True)]
    left, right = (polar(torch.cat([one[:, :kept] for one in all_], 1)) for all_ in (u, v))
    return left * torch.cat(weighted) @ right.T


def iso_c(deltas: Sequence[Tensor], p: Params) -> Tensor:
    """The sum with every singular value replaced by their mean."""
    u, s, v = thin_svd(_sum(deltas, p["weight"]))
    return (s.mean() if len(s) else 0.0) * u @ v.T


def swudi(deltas: Sequence[Tensor], p: Params) -> Tensor:
    """The sum, moved for `steps` of the flow that takes out interference, in closed form."""
    norms = [max(float(delta.square().sum()), 1e-30) for delta in deltas]
    products = [delta.T @ delta / norm for delta, norm in zip(deltas, norms, strict=True)]
    target = _sum([d @ c for d, c in zip(deltas, products, strict=True)], p["weight"])
    values, v = torch.linalg.eigh(sum(products[1:], products[0]))
    moved = 1 - torch.exp(-p["steps"] * values.clamp(min=0))
    moved[: len(values) - math.ceil(p["rho"] * len(values))] = 0  # they ascend
    moved[values <= ROUNDING**2 * values[-1]] = 0
    total = _sum(deltas, p["weight"])
    divided = moved / torch.where(moved > 0, values, 1.0)
    return torch.addmm(total, target @ v * divided - total @ v * moved, v.T)


def _sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    weighted = [w * tensor for w, tensor in zip(weights, tensors, strict=True)]
    return sum(weighted[1:], weighted[0])


def by_spectrum(x: TensorInputs, p: Params, rule: Rule) -> Kernel | Tensor:
    """base + lambda * what the rule makes of the task vectors; the mean of others."""
    if not is_treated(x.name, x.shape):
        return combination([p["lambda"] * w / len(x.tensors) for w in p["weight"]])
    base, models = x.matrices()
    assert base is not None
    return base.add_(rule([model.sub_(base) for model in models], p), alpha=p["lambda"])


def svc(merged: Tensor, x: TensorInputs, method: str) -> Tensor:
    """The merge with the strength of every direction corrected for what the models share."""
    base, models = x.matrices()
    assert base is not None
    u, s, v = thin_svd(merged.double() - base)
    shares = torch.zeros_like(s)
    for model in models:
        own = u.T @ model.sub_(base)
        size = own.square().sum(1)
        share = (own * v.T).sum(1) * s / torch.where(size > 0, size, 1.0)
        shares += share.clamp(min=SVC_LEAST.get(method, SVC_LEAST_ELSE))
    return base + u * (s * len(models) / shares) @ v.T


def regmean(x: TensorInputs, p: Params) -> Kernel | Tensor:
    """What comes nearest to the outputs of every model on its inputs, by least squares."""
    n = len(x.tensors)
    grams = [x.cache.get((GRAM, *place)) for place in x.key[0]] if x.key else []
    known = [gram.double() for gram in grams if gram is not None]
    if not is_treated(x.name, x.shape) or len(known) < n or len(known[0]) != x.shape[1]:
        return combination([1 / n] * n)
    _, models = x.matrices()
    share = p["off_diagonal"]
    known = [share * gram + (1 - share) * gram.diagonal().diag() for gram in known]
    mean = sum(models[1:], models[0]) / n
    total = sum(known[1:], known[0])
    total.diagonal().add_(RIDGE * total.diagonal().mean() + 1e-30)
    pull = sum(((w - mean) @ gram for w, gram in zip(models, known, strict=True)), 0 * mean)
    return torch.linalg.solve(total, pull.T).T + mean  # type: ignore[no-any-return]


def require_grams(method: str, cache: Cache) -> None:
    """Refuse RegMean where nobody has measured the inputs of the layers."""
    if method == "regmean" and not any(key[0] == GRAM for key in cache):
        hint = "forge evo measures them: --set 'methods=[regmean]'"
        raise ConfigError("regmean needs the inputs of every layer, which files lack", hint=hint)


def cost(specs: Mapping[str, TensorSpec], models: int) -> tuple[int, float]:
    """The bytes beside the result, and about how many seconds of one core the matrices take."""
    treated = [spec for name, spec in specs.items() if is_treated(name, spec.shape)]
    memory = max((spec.numel for spec in treated), default=0) * 8 * (2 * models + 6)
    steps = sum(spec.numel * min(spec.shape) for spec in treated)
    return memory, steps * (models + 2) * STEP_NS * 1e-9


def _spectral(rule: Rule, **own: float) -> MergeMethod:
    build = partial(by_spectrum, rule=rule)
    return MergeMethod(build, {"lambda": 1.0, **own}, {"weight": 1.0}, base="required")


SPECTRAL: dict[str, MergeMethod] = {
    "tsv_m": _spectral(tsv_m),
    "iso_c": _spectral(iso_c),
    "swudi": _spectral(swudi, steps=300.0, rho=0.85),
    "regmean": MergeMethod(regmean, {"off_diagonal": 0.9}, base="optional"),
}
