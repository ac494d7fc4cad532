"""P9: what an older version wrote opens with this one; what a newer one wrote is refused."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from agent_forge.errors import WrittenByNewerVersion
from agent_forge.store.checkpoint import CheckpointManager, restore_generators
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import MIGRATIONS
from agent_forge.store.registry import ModelRegistry
from agent_forge.store.sessions import SessionStore
from tests.support.pico import Pico, build

FIXTURES = sorted(path for path in Path(__file__).parent.glob("v*") if path.is_dir())


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a storage root that an older version wrote."""
    shutil.copytree(request.param, tmp_path / "storage")
    return tmp_path / "storage"


def test_there_is_a_fixture_of_every_schema() -> None:
    assert [path.name for path in FIXTURES] == [f"v{n}" for n in range(1, len(MIGRATIONS) + 1)]


def test_an_old_storage_root_opens(old: Path) -> None:
    sessions = SessionStore(old)
    sessions.registry.integrity_check()
    row = sessions.registry.get_session_status("s1")
    assert (row["status"], row["tags"]) == ("completed", ["kept"])
    assert sessions.registry.get_handoffs("s1")[0]["target_phase"] == "evomerge"
    torch.manual_seed(0)
    expected = Pico().state_dict()
    model, metadata = ModelStorage(old, sessions.registry, build).load_model("cognate.m1.s1")
    assert metadata["seed"] == 42
    with sessions.open("s1") as path:
        checkpoint = CheckpointManager(path / "phase1_cognate" / "checkpoints").load_checkpoint()
    assert (checkpoint.step, checkpoint.state["cursor"]) == (30, [1, 2])
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(checkpoint.state["model"][name], tensor)
    restore_generators(checkpoint.generators)


def test_a_newer_database_is_refused_and_left_alone(old: Path) -> None:
    path = old / "registry" / "model_registry.db"
    ModelRegistry(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(WrittenByNewerVersion) as caught:
        ModelRegistry(path)
    assert caught.value.exit_code == 4 and path.read_bytes() == before
