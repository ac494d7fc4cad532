"""A network small enough to read, for tests that need one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Pico(nn.Module):
    """An embedding, a layer and a head tied to the embedding: 4 * 3 + 3 * 3 + 3 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)))


def build(config: dict[str, Any]) -> nn.Module:
    return Pico()
