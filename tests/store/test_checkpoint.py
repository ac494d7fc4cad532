"""Checkpoints: everything that influences the next step, and a way back when one is damaged."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agent_forge.errors import DamagedFile, DiskFull, NotFound, WrittenByNewerVersion
from agent_forge.store import files
from agent_forge.store.checkpoint import CheckpointManager, restore_generators
from agent_forge.store.tensors import OVERHEAD_BYTES
from tests.support.pico import Pico


class Training:
    """Four random sources, a cursor, AdamW: a run in miniature."""

    def __init__(self) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.data = torch.Generator().manual_seed(4)
        self.model = Pico()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.cursor = 0

    def step(self) -> None:
        tokens = torch.randint(0, 4, (2, 3), generator=self.data)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        self.optimizer.zero_grad()
        (self.model(tokens).square().mean() * (1 + noise)).backward()
        self.optimizer.step()
        self.cursor += 6

    def save(self, manager: CheckpointManager, step: int, **more: Any) -> Path:
        return manager.save_checkpoint(
            self.model,
            self.optimizer,
            epoch=step // 2,
            step=step,
            metadata={"config_hash": "abc", "cursor": self.cursor},
            generators={"data": self.data},
            **more,
        )

    def load(self, manager: CheckpointManager) -> int:
        checkpoint = manager.load_checkpoint()
        self.model.load_state_dict(checkpoint.state["model"])
        self.optimizer.load_state_dict(checkpoint.state["optimizer"])
        restore_generators(checkpoint.generators, {"data": self.data})
        self.cursor = checkpoint.state["metadata"]["cursor"]
        return checkpoint.step


def weights(training: Training) -> bytes:
    state = training.model.state_dict()
    return b"".join(state[name].numpy().tobytes() for name in sorted(state))


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path: Path) -> None:
    reference = Training()
    for _ in range(6):
        reference.step()
    manager = CheckpointManager(tmp_path)
    first = Training()
    for step in range(1, 4):
        first.step()
        first.save(manager, step)
    second = Training()
    for _ in range(9):  # a run that has gone elsewhere meanwhile
        second.step()
    for _ in range(second.load(manager), 6):
        second.step()
    assert weights(second) == weights(reference) and second.cursor == reference.cursor


def test_the_metadata_and_epoch_come_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    Training().save(manager, 7)
    checkpoint = manager.load_checkpoint(tmp_path / "step_00000007")
    assert (checkpoint.step, checkpoint.state["epoch"]) == (7, 3)
    assert checkpoint.state["metadata"]["config_hash"] == "abc"
    with pytest.raises(ValueError, match="do not fit"):
        restore_generators(checkpoint.generators, {})


def test_only_weights_are_required(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint({"w": torch.ones(2)})
    checkpoint = manager.load_checkpoint()
    assert checkpoint.step == 0 and checkpoint.state["optimizer"] == {}
    restore_generators(checkpoint.generators)


def test_the_last_and_the_anchor_are_kept_by_step_not_by_time(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 10, 20, 30):
        path = manager.save({"w": torch.ones(1)}, step=step, anchor=step <= 2)
        os.utime(path, (step, 100 - step))  # a copy or a restore changes file times
    assert [path.name for path in manager.steps()] == [
        "step_00000002",
        "step_00000020",
        "step_00000030",
    ]
    assert manager.load_checkpoint().step == 30
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointManager(tmp_path, keep_last=0)


def test_going_back_gives_up_the_later_checkpoints(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30, 5):
        path = manager.save_checkpoint({"w": torch.full((1,), float(step))}, step=step)
    assert manager.steps() == [path] and manager.load_checkpoint().step == 5
    with pytest.raises(ValueError, match="negative"):
        manager.save_checkpoint({"w": torch.ones(1)}, step=-1)


def test_a_truncated_checkpoint_does_not_count_among_the_last(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        if step == 30:
            damage(tmp_path / "step_00000020" / "tensors.safetensors", "truncate")
        manager.save_checkpoint({"w": torch.ones(1)}, step=step)
    assert [path.name for path in manager.steps()] == ["step_00000010", "step_00000030"]
    (tmp_path / "step_00000040").symlink_to(tmp_path / "step_00000010")
    assert manager.load_checkpoint().step == 30


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 4]) + content[-2:])
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "remove"])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_stepped_over(
    tmp_path: Path, how: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save_checkpoint({"w": torch.full((2,), float(step))}, step=step)
    damage(tmp_path / "step_00000002" / name, how)
    with caplog.at_level(logging.WARNING):
        checkpoint = manager.load_checkpoint()
    assert checkpoint.step == 1 and checkpoint.state["model"]["w"].tolist() == [1, 1]
    assert "step_00000002" in caplog.text and "going back" in caplog.text
    with pytest.raises(DamagedFile, match="step_00000002"):
        manager.load_checkpoint(tmp_path / "step_00000002")


def test_two_swapped_files_are_noticed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save_checkpoint({"w": torch.full((2,), float(step))}, step=step)
    one, two = (tmp_path / f"step_0000000{n}" / "tensors.safetensors" for n in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(NotFound, match="no usable checkpoint") as caught:
        manager.load_checkpoint()
    assert "step_00000001" in caught.value.hint and "step_00000002" in caught.value.hint


def test_nothing_saved_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        CheckpointManager(tmp_path / "none").load_checkpoint()


def test_what_was_verified_but_is_no_checkpoint_is_damage(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint({"w": torch.ones(2)}, step=1)
    record = files.read_json(tmp_path / "step_00000001" / "state.json")
    for change, error in (
        ({"step": 2, "state": {}}, DamagedFile),
        ({"step": 2, "schema_version": "x", "state": 5}, DamagedFile),
        ({"step": 2, "schema_version": 2}, WrittenByNewerVersion),
    ):
        with files.staging(tmp_path / "step_00000002") as stage:
            stage.copy(tmp_path / "step_00000001" / "tensors.safetensors")
            stage.write_json("state.json", {**record, **change})
        with pytest.raises(error):
            manager.load_checkpoint(tmp_path / "step_00000002")


def test_a_full_disk_drops_old_checkpoints_then_stops_with_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=4)
    state = {"w": torch.ones(1000)}
    for step in (1, 2, 3):
        manager.save(state, step=step, anchor=step == 1)
    damage(tmp_path / "step_00000003" / "state.json", "flip")
    each = files.tree_bytes(tmp_path / "step_00000001")
    room = OVERHEAD_BYTES + 12_000 + int(2.5 * each)

    def free(path: Path) -> int:
        return room - files.tree_bytes(tmp_path)

    def names() -> list[int]:
        return [int(path.name[5:]) for path in manager.steps()]

    monkeypatch.setattr(files, "free_bytes", free)
    # the damaged one goes; the anchor and the newest stay
    manager.save(state, step=4, anchor=False)
    assert "older checkpoints were removed" in caplog.text and names() == [1, 2, 4]
    with pytest.raises(DiskFull):  # all of them together would not be enough: none goes
        manager.save_checkpoint({"w": torch.ones(10**6)}, step=5)
    assert names() == [1, 2, 4]
    room -= int(1.2 * each)
    manager.save_checkpoint(state, step=6)
    assert names() == [4, 6]
    room -= each
    with pytest.raises(DiskFull) as caught:
        manager.save_checkpoint(state, step=7)
    assert caught.value.exit_code == 5 and manager.load_checkpoint().step == 6


def test_a_renamed_checkpoint_is_not_another_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save_checkpoint({"w": torch.ones(1)}, step=step)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000009")
    loaded = manager.load_checkpoint()
    assert loaded.step == 2 and "it holds step 1" in caplog.text
    with pytest.raises(NotFound, match="not a checkpoint directory"):
        manager.load_checkpoint(tmp_path / "elsewhere")


def test_the_order_of_a_mapping_is_kept(tmp_path: Path) -> None:
    """A loop or a sum over it must not change on resume."""
    manager = CheckpointManager(tmp_path)
    manager.save({"cursor": {"z": 1, "a": {"y": 2, "b": 3}}}, step=0)
    cursor = manager.load_checkpoint().state["cursor"]
    assert list(cursor) == ["z", "a"] and list(cursor["a"]) == ["y", "b"]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    shared = torch.ones(2)
    manager.save_checkpoint({"embed": shared, "head": shared})
    state = manager.load_checkpoint().state["model"]
    assert state["embed"] is state["head"]


def test_cuda_generators_are_kept_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_forge.store import checkpoint

    state = [torch.ones(16, dtype=torch.uint8)]
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    checkpoint.restore_generators(checkpoint.capture_generators())
    assert restored == [state]


def test_the_optimizer_state_is_exact(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint(layer, optimizer)
    found = manager.load_checkpoint().state["optimizer"]
    expected = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for key, value in expected["state"][0].items():
        assert torch.equal(found["state"][0][key], value)
