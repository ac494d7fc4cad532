"""Shared fixtures: a storage root with one session, and a network to keep in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.pico import Pico, build

torch.set_num_threads(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def sessions(root: Path) -> Iterator[SessionStore]:
    """A session store with one session, `s1`."""
    store = SessionStore(root)
    store.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1")
    yield store


@pytest.fixture
def storage(sessions: SessionStore) -> ModelStorage:
    return ModelStorage(sessions.root, sessions.registry, build)


@pytest.fixture
def pico() -> Pico:
    torch.manual_seed(0)
    return Pico()
