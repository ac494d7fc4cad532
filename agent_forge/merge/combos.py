"""The six techniques and their eight combinations: interpolate, refine, select.

A combo is three bits, read from the left: linear or SLERP, DARE or TIES, FrankenMerge or DFS. The
stages keep their order, and a base B (given, or the parents' mean) is what they refine against:

    stage 1   D = interpolation of the parents - B
    stage 2   DARE: B + mask * D / (1 - drop_rate), or mask * D * amplification
              TIES: B + mean of the trimmed parent deltas that have the sign of D
    stage 3   FrankenMerge: each layer from the result or from a parent
              DFS: each parameter from all of them, weighted by its importance; by dfs_ratio
              only so far from the result of stage 2 to that

One pass over the parents makes any number of combos; they share what they have in common. With
`literal` stages 2 and 3 follow the specification to the letter.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.merge.methods import STANDARD, MergeMethod, Params, Parts, angle, trim_below
from agent_forge.merge.selection import SELECTING
from agent_forge.merge.spectral import SPECTRAL
from agent_forge.merge.tensor_inputs import TensorInputs, kept_share, mean, select

COMBO = "combo"
STAGES = (("linear", "slerp"), ("dare", "ties"), ("frankenmerge", "dfs"))
ALL = range(8)
SMALLEST_ANGLE = 1e-6
Pair = tuple[str, str]  # interpolation and task arithmetic: what stage 3 starts from
Stage2 = Callable[[Parts, Tensor, int], dict[Pair, Tensor]]


def parse_combo(value: int | str) -> int:
    """0 to 7, three bits such as 110, or names such as slerp-ties-frankenmerge."""
    text = str(value).strip().lower().replace("+", "-")
    for n in ALL:
        if text in (str(n), f"{n:02b}", f"{n:03b}", combo_name(n)):  # YAML drops leading zeros
            return n
    hint = '0 to 7, three bits in quotes ("110"), or names (slerp-ties-frankenmerge)'
    raise ConfigError(f"unknown combo {value!r}", hint=hint)


def combo_stages(combo: int) -> tuple[str, str, str]:
    return STAGES[0][combo >> 2], STAGES[1][combo >> 1 & 1], STAGES[2][combo & 1]


def combo_name(combo: int) -> str:
    return "-".join(combo_stages(combo))


def interpolation(anchored: np.ndarray, weights: Sequence[float], curved: bool) -> np.ndarray:
    """Coefficients of D = M - B in terms of B and of the parents' differences from it."""
    # Linear takes the weighted mean. SLERP goes from parent to parent over the sphere, with the
    # norm interpolated, and falls back to linear for an angle below 1e-6.
    n = len(weights)
    parents = np.hstack([np.ones((n, 1)), np.eye(n)])  # P_i = B + d_i
    result: np.ndarray = parents[0].copy()
    so_far = weights[0]
    for parent, weight in zip(parents[1:], weights[1:], strict=True):
        so_far += weight
        t = weight / so_far if so_far else 0.0
        a, b = arc(anchored, result, parent, t) if curved else (1 - t, t)
        result = a * result + b * parent
    result[0] = result[0] - 1 if curved else 0.0
    return result


def arc(anchored: np.ndarray, a: np.ndarray, b: np.ndarray, t: float) -> tuple[float, float]:
    """SLERP of two directions with their norms interpolated, as two coefficients."""
    theta = angle(anchored, a, b)
    norm_a, norm_b = (math.sqrt(max(float(v @ anchored @ v), 0.0)) for v in (a, b))
    if theta < SMALLEST_ANGLE or math.sin(theta) < SMALLEST_ANGLE or not norm_a or not norm_b:
        return 1 - t, t
    scale = ((1 - t) * norm_a + t * norm_b) / math.sin(theta)
    return scale * math.sin((1 - t) * theta) / norm_a, scale * math.sin(t * theta) / norm_b


def difference(base: Tensor, deltas: Sequence[Tensor], c: np.ndarray) -> Tensor:
    """c_0 B + sum c_i d_i."""
    total = deltas[0] * float(c[1])
    for delta, coefficient in zip(deltas[1:], c[2:], strict=True):
        total.add_(delta, alpha=float(coefficient))
    return total.add_(base, alpha=float(c[0])) if c[0] else total


def disjoint_means(trimmed: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Half the sum and half the difference of the means of each sign, and the plain sum."""
    up, down = trimmed[0].clamp(min=0), trimmed[0].clamp(max=0)
    ups, downs = up.sign(), down.sign()
    for delta in trimmed[1:]:
        part = delta.clamp(min=0)
        up.add_(part)
        ups.add_(part.sign_())
        torch.clamp(delta, max=0, out=part)
        down.add_(part)
        downs.add_(part.sign_())
    total = up + down
    up.div_(ups.clamp_(min=1)).div_(2)
    down.div_(downs.clamp_(max=-1)).div_(-2)
    return up + down, up.sub_(down), total


def literal_ties(merged: Tensor, parents: Sequence[Tensor], threshold: float) -> Tensor:
    """The specification's formula: deltas of the merged model from each parent."""
    deltas = [merged - parent for parent in parents]
    important = mean([delta.abs() for delta in deltas]) > threshold
    elected = torch.sign(mean([delta.sign() for delta in deltas]))
    agreeing = [delta * (delta.sign() == elected) for delta in deltas]
    return mean(agreeing).mul_(important).add_(mean(parents))


def parents_share(parents: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What DFS needs of the parents: weighted sum of offsets, weights, consensus, scale."""
    consensus = mean(parents)
    offsets = [parent - consensus for parent in parents]
    distances = [offset.abs() for offset in offsets]
    scale = mean(distances).add_(1e-30)
    weights = [distance.add_(scale).reciprocal_() for distance in distances]
    total, weight = offsets[0].mul_(weights[0]), weights[0].clone()
    for offset, w in zip(offsets[1:], weights[1:], strict=True):
        total.addcmul_(offset, w)
        weight.add_(w)
    return total, weight, consensus, scale


def dfs(merged: Tensor, share: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Dynamic fusion: sum w_c x_c / sum w_c over the merged model and the parents."""
    # A candidate's weight is 1 / (distance to the parents' consensus + their mean distance to it).
    total, weight, consensus, scale = share
    offset = merged - consensus
    own = offset.abs().add_(scale).reciprocal_()
    return torch.addcmul(total, offset, own).div_(weight + own).add_(consensus)


def second_stage(x: TensorInputs, p: Params, pairs: Sequence[Pair]) -> Stage2:
    """The results of stage 2 for these pairs; whatever they share is computed once."""
    products = x.anchored() if any(i == "slerp" for i, _ in pairs) else np.zeros(())
    c = {i: interpolation(products, p["weight"], i == "slerp") for i in {i for i, _ in pairs}}
    if x.centred:  # the differences sum to zero: what cancels is taken out, so that it stays zero
        for value in c.values():
            value[1:] -= value[1:].mean()
            value[np.abs(value) < 1e-12] = 0.0
    if p["literal"]:
        return _literal(x, p, pairs, c)
    with_dare, with_ties = (any(t == task for _, t in pairs) for task in STAGES[1])
    share = kept_share(1 - p["drop_rate"])
    factor = p["amplification"] or 1 / share
    trims = []
    if with_ties and p["keep"] < 1:
        rank = x.numel - max(1, int(p["keep"] * x.numel))
        trims = [trim_below(x.magnitudes(i, (rank,))[0]) for i in range(len(x.tensors))]

    def kernel(parts: Parts, base: Tensor, start: int) -> dict[Pair, Tensor]:
        deltas = [part - base for part in parts]
        d = {i: difference(base, deltas, value) for i, value in c.items()}
        results: dict[Pair, Tensor] = {}
        if with_dare:
            kept = x.mask(x.name, start, share)
        if with_ties:
            for n, trim in enumerate(trims):
                deltas[n] = trim(deltas[n], start)
            middle, half, total = disjoint_means(deltas)
        for i, task in pairs:
            if task == "dare":
                results[i, task] = torch.addcmul(base, d[i], kept, value=factor)
            else:
                # Half the sum of the means of each sign, plus or minus half their difference, is
                # the one with the elected sign: thirty times faster than a comparison.
                sign = torch.copysign(base.new_ones(()), d[i] if c[i].any() else total)
                results[i, task] = torch.addcmul(middle, half, sign).add_(base)
        return results

    return kernel


def _literal(x: TensorInputs, p: Params, pairs: Sequence[Pair], c: dict[str, np.ndarray]) -> Stage2:
    share = kept_share(1 - p["drop_rate"])
    factor = p["amplification"] or 1 / share

    def merged(parts: Parts, base: Tensor, i: str) -> Tensor:
        return difference(base, [part - base for part in parts], c[i]).add_(base)

    def spread(i: str) -> Iterator[Tensor]:
        for parts, base in x.runs():
            assert base is not None
            m = merged(parts, base, i)
            yield mean([(m - part).abs() for part in parts])

    rank = min(x.numel - 1, math.ceil((1 - p["keep"]) * (x.numel - 1)))
    thresholds = {i: select(partial(spread, i), (rank,))[0] for i, t in pairs if t == "ties"}

    def kernel(parts: Parts, base: Tensor, start: int) -> dict[Pair, Tensor]:
        results: dict[Pair, Tensor] = {}
        for i, task in pairs:
            m = merged(parts, base, i)
            if task == "dare":
                kept = x.mask(x.name, start, share)
                m.sub_(parts[0])
                results[i, task] = torch.addcmul(parts[0], m, kept, value=factor)
            else:
                results[i, task] = literal_ties(m, parts, thresholds[i])
        return results

    return kernel


def fuse(
    x: TensorInputs, p: Params, which: Sequence[int], choices: Mapping[Pair, int]
) -> Callable[[Parts, Tensor, int], dict[int, Tensor]]:
    """Combos of one tensor: a function of a run of the parents and the base."""
    # `choices`: the candidate that FrankenMerge takes for the layer of this tensor, after each pair
    plan = {combo: combo_stages(combo) for combo in which}
    taken = {n: choices.get((i, t), 0) for n, (i, t, s) in plan.items() if s == "frankenmerge"}
    pairs = list(dict.fromkeys((i, t) for n, (i, t, _) in plan.items() if not taken.get(n)))
    stage2 = second_stage(x, p, pairs) if pairs else None
    fusing = len(taken) < len(plan)

    def kernel(parts: Parts, base: Tensor, start: int) -> dict[int, Tensor]:
        merged = stage2(parts, base, start) if stage2 else {}
        share = parents_share(parts) if fusing and not p["literal"] else None
        results = {}
        for combo, (i, t, s) in plan.items():
            if s == "frankenmerge":  # the layer of the merged model (0) or of parent n, as it is
                results[combo] = parts[taken[combo] - 1] if taken[combo] else merged[i, t]
            elif share is None:  # literal: the specification's weights cancel, the mean is left
                results[combo] = mean([merged[i, t], *parts])
            else:
                results[combo] = dfs(merged[i, t], share)
            if s == "dfs" and p["dfs_ratio"] != 1:
                results[combo] = torch.lerp(merged[i, t], results[combo], p["dfs_ratio"])
        return results

    return kernel


def agreement(gram: np.ndarray) -> int:
    """The candidate whose task vector agrees best with the others: the highest mean cosine."""
    # The data-free layer score of FrankenMerge; the merged result (0) wins a tie.
    norms = np.sqrt(np.clip(np.diag(gram), 0, None))
    scale = np.where(norms > 0, norms, np.inf)
    cosines = gram / np.outer(scale, scale)
    np.fill_diagonal(cosines, 0)
    scores = cosines.sum(0)
    return int(np.argmax(scores >= scores.max() - 1e-9))


_SHARED = {"drop_rate": 0.9, "amplification": 0.0, "keep": 0.2, "dfs_ratio": 1.0}
_SHARED |= {"whole_model": False, "literal": False}
_METHOD = MergeMethod(None, _SHARED, {"weight": 1.0}, base="beside", least=2)
METHODS: dict[str, MergeMethod] = {**STANDARD, **SELECTING, **SPECTRAL, COMBO: _METHOD}
