"""What it costs to round one kind of matrix alone, and what its layers are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.data import datasets
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.model.network import ForgeNetwork
from agent_forge.quant.packed import Packing, kind_of, kinds_of
from agent_forge.train.corpus import Corpus

TASKS = "tasks"
OUTLIERS = 20.0  # times its mean size that the largest input has: few steps are left for the rest


@dataclass(frozen=True)
class Sensitivity:
    """A kind of matrix rounded alone: its weights, and the rise of the loss in nats a token."""

    kind: str
    weights: int
    rise: float
    outliers: float  # the largest input of its layers, in times of their mean size; 0: unknown

    @property
    def flagged(self) -> bool:
        return self.outliers > OUTLIERS


def calibration_items(corpus: Corpus, dataset: str, samples: int) -> list[TokenizedItem]:
    """What sensitivity is measured on: nothing of the verdict."""
    if dataset == TASKS:
        domains = list(corpus.selection.values())
        return [item for own in domains for item in own[: -(-samples // len(domains))]][:samples]
    examples = list(datasets.read_own(Path(dataset)))[:samples]
    if not examples:
        raise ConfigError(f"{dataset} has no examples to calibrate with")
    return list(map(TokenizedItem, *tokenise(corpus.tokenizer, examples)))


@torch.no_grad()
def sensitivities(
    model: ForgeNetwork, packing: Packing, items: Sequence[TokenizedItem]
) -> list[dict[str, Any]]:
    """Every kind of matrix, the least sensitive first; the model is as before afterwards."""
    largest = _input_outliers(model, packing, items)
    whole = measure(model, items, threshold=EVERY_STEP).nats_per_token
    found = []
    for kind, names in kinds_of(packing.matrices).items():
        layers = {name: model.get_parameter(name) for name in names}
        before = {name: weight.detach().clone() for name, weight in layers.items()}
        for name, weight in layers.items():
            weight.copy_(packing.matrices[name].rounded(weight))
        nats = measure(model, items, threshold=EVERY_STEP).nats_per_token
        for name, weight in layers.items():
            weight.copy_(before[name])
        weights = sum(weight.numel() for weight in layers.values())
        found.append(Sensitivity(kind, weights, nats - whole, largest.get(kind, 0.0)))
    return [vars(s) for s in sorted(found, key=lambda s: (s.rise, s.kind))]


def _input_outliers(
    model: ForgeNetwork, packing: Packing, items: Sequence[TokenizedItem]
) -> dict[str, float]:
    """By kind the largest number that a layer is given, in times of the token's mean size."""
    found: dict[str, float] = {}

    def look(kind: str, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        sizes = given[0].abs()
        ratio = float((sizes.amax(-1) / sizes.mean(-1).clamp(min=1e-8)).max())
        found[kind] = max(found.get(kind, 0.0), ratio)

    hooks = []
    for name in packing.with_rounded_inputs:
        layer, kind = model.get_submodule(name.removesuffix(".weight")), kind_of(name)
        hook = layer.register_forward_pre_hook(lambda *given, kind=kind: look(kind, *given))
        hooks.append(hook)
    measure(model, items, threshold=EVERY_STEP)
    for hook in hooks:
        hook.remove()
    return found
