"""Shared fixtures: a storage root with one session, and a network small enough to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore

torch.set_num_threads(1)


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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def sessions(root: Path) -> Iterator[SessionStore]:
    """A session store with one session, `s1`."""
    store = SessionStore(root)
    store.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1")
    yield store
    store.registry.close()


@pytest.fixture
def storage(sessions: SessionStore) -> ModelStorage:
    return ModelStorage(sessions.root, sessions.registry, build)


@pytest.fixture
def pico() -> Pico:
    torch.manual_seed(0)
    return Pico()
