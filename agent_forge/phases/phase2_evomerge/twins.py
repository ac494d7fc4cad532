"""One model given twice: by another path, through a link, or as a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from agent_forge.errors import ConfigError
from agent_forge.model.weights import Weights

TENSORS, ELEMENTS = 8, 256  # that are looked at before two models are compared as a whole


def refuse_twins(models: Sequence[Weights]) -> None:
    """Refuse two models with the same weights. What differs at a glance is read no further."""
    seen: dict[bytes, list[Weights]] = {}
    for model in models:
        alike = seen.setdefault(_glance(model), [])
        for other in alike:
            if model.sha256() == other.sha256():
                raise ConfigError(
                    f"{model.label} has the same weights as {other.label}",
                    hint="merged with itself a model stays what it is: leave one of them out",
                )
        alike.append(model)


def _glance(model: Weights) -> bytes:
    """A hash of the first elements of some tensors."""
    digest = hashlib.sha256()
    for name in sorted(model.specs)[:: max(1, len(model.specs) // TENSORS)]:
        first = model[name].detach().reshape(-1)[:ELEMENTS].cpu().contiguous()
        digest.update(first.view(torch.uint8).numpy().data)
    return digest.digest()
