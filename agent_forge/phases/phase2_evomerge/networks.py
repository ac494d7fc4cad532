"""Networks to put weights into: that of the parents' shape, and others as paths want them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from agent_forge.config.settings import ModelSettings
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.weights import with_layers

FEW = 2  # other shapes that are kept at a time


class Networks:
    """One network for all that have the parents' shape, and a few of other depths."""

    def __init__(self, model: nn.Module) -> None:
        self.own = model
        self._others: dict[str, nn.Module] = {}  # by their configs, the newest last

    def of(self, layers: Sequence[int] | None) -> nn.Module:
        """For a path through these layers; None stands for the layers as they are."""
        before = self._config()
        config = before if layers is None else with_layers(before, layers)
        if config == before:
            return self.own
        name = json.dumps(config, sort_keys=True, default=str)
        if name not in self._others:
            for old in list(self._others)[: 1 - FEW]:
                del self._others[old]
            self._others[name] = self._built(config)
        return self._others[name]

    def _config(self) -> dict[str, Any]:
        if isinstance(self.own, ForgeNetwork):
            return self.own.settings.model_dump()
        config: Any = self.own.config
        return dict(config.to_dict())

    def _built(self, config: dict[str, Any]) -> nn.Module:
        """With whatever weights: all of them are overwritten."""
        like = next(self.own.parameters())
        made: Any
        with torch.random.fork_rng(devices=[]):
            if isinstance(self.own, ForgeNetwork):
                made = ForgeNetwork(ModelSettings.model_validate(config))
                made.folder = self.own.folder
            else:
                kind: Any = type(self.own)
                made = kind(kind.config_class.from_dict(config))
        return made.to(like.device, like.dtype).eval()  # type: ignore[no-any-return]
