"""P2, P3, P4: any single I/O failure, a full disk and damaged files leave the last good state."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from agent_forge.errors import CannotWrite, DamagedFile, DiskFull, ForgeError
from agent_forge.store import files
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.faults import FailingDisk
from tests.support.pico import build


def weights(value: float) -> dict[str, torch.Tensor]:
    model = build({})
    return {name: torch.full_like(t, value) for name, t in model.state_dict().items()}


def scenario(root: Path, saved: list[int]) -> None:
    """Everything a run writes: a session, a model replaced in place, checkpoints, a status."""
    sessions = SessionStore(root)
    storage = ModelStorage(root, sessions.registry, build)
    path = sessions.create({}, "preset: smoke\n", session_id="s2")
    checkpoints = CheckpointManager(path / "checkpoints", keep_last=1)
    for step in (1, 2):
        storage.save_model(
            weights(step),
            "s1",
            "cognate",
            "m1",
            {"step": step},
            config={"model_type": "pico"},
            metrics={"loss": 1.0},
        )
        checkpoints.save_checkpoint(weights(step), step=step)
        saved.append(step)
    sessions.set_status("s2", "completed")


def check_after(root: Path, saved: int = 0) -> None:
    """The next start: what was saved is there, whole, and nothing unfinished is left.

    `saved` is the last step whose checkpoint was reported as written.
    """
    sessions = SessionStore(root)
    sessions.registry.integrity_check()
    storage = ModelStorage(root, sessions.registry, build)
    for row in sessions.registry.get_all_sessions():
        with sessions.open(row["session_id"]) as path:
            checkpoints = CheckpointManager(path / "checkpoints")
            assert saved == 0 or path.name != "s2" or checkpoints.steps()
            if checkpoints.steps():
                loaded = checkpoints.load_checkpoint()
                assert loaded.path == checkpoints.steps()[-1] and loaded.step >= saved
                assert all((t == loaded.step).all() for t in loaded.state["model"].values())
    with sessions.changing():
        pass
    model, metadata = storage.load_model("cognate.m1.s1")
    assert all((p == metadata["step"]).all() for p in model.parameters())
    marks = (files.TEMP, files.READY, files.TRASH)
    strays = [p for p in root.rglob(".*") if p.name.startswith(marks)]
    assert strays == []


def prepare(root: Path) -> None:
    sessions = SessionStore(root)
    sessions.create({}, "", session_id="s1")
    ModelStorage(root, sessions.registry, build).save_model(
        weights(0), "s1", "cognate", "m1", {"step": 0}
    )


def runs_with_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, numbers: Iterable[int]
) -> Iterator[tuple[Path, int]]:
    """Runs whose n-th change of the disk fails, up to the first n that a run does not reach."""
    for n in numbers:
        root = tmp_path / str(n)
        prepare(root)
        disk = FailingDisk(n, kind.error, once=kind.once, short=kind.short)
        saved = [0]
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", disk)
            try:
                scenario(root, saved)
            except CannotWrite:
                assert kind.error == errno.EIO
            except DiskFull:
                assert kind.error == errno.ENOSPC
        if not disk.failures:
            assert n > 60  # the scenario really went through the durable writer
            return
        yield root, saved[-1]
    raise AssertionError("the scenario never passed untouched")


class Kind(NamedTuple):
    """How a disk fails."""

    error: int
    short: bool
    once: bool


KINDS = {
    f"{name}-{'once' if once else 'for-good'}": Kind(*how, once)
    for name, how in {
        "full": (errno.ENOSPC, False),
        "error": (errno.EIO, False),
        "short-write": (errno.ENOSPC, True),
    }.items()
    for once in (True, False)
}


@pytest.mark.parametrize("name", KINDS)
def test_the_nth_failure_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every n with one of the kinds, each in its turn; `make soak` takes every n with each."""
    numbers = range(1 + [*KINDS].index(name), 1000, len(KINDS))
    for root, saved in runs_with_a_failure(tmp_path, monkeypatch, KINDS[name], numbers):
        check_after(root, saved)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_every_failure_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    numbers = range(1, 1000)
    for root, saved in runs_with_a_failure(tmp_path, monkeypatch, KINDS[name], numbers):
        check_after(root, saved)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and file-size limits")
def test_a_file_size_limit_is_a_full_disk(root: Path) -> None:
    """The system itself refuses to write on: the same promise without any injection."""
    import resource

    prepare(root)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            big = {"w": torch.ones(100_000)}
            ModelStorage(root, build=build).save_model(big, "s1", "cognate", "m1", {"step": 1})
        except DiskFull as error:
            os._exit(error.exit_code)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    check_after(root)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_disk_that_fills_up_is_survived(tmp_path: Path) -> None:
    """A real file system of 1 MB that is almost full, behind an estimate that was too kind."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {mount} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        manager = CheckpointManager(mount / "checkpoints", keep_last=9)
        estimate, manager_module = files.require_space, files
        manager_module.require_space = lambda path, needed: None
        try:
            with pytest.raises(DiskFull):
                for step in range(1, 40):
                    manager.save_checkpoint({"w": torch.ones(20_000 * step)}, step=step)
        finally:
            manager_module.require_space = estimate
        kept = manager.load_checkpoint()
        assert kept.step >= 4 and kept.path == manager.steps()[-1]
        files.remove_leftovers(mount)
        assert manager.steps()[-1] == kept.path
        assert {p.name[:5] for p in (mount / "checkpoints").iterdir()} == {"step_"}
    finally:
        os.system(f"umount {mount}")


def artefacts(root: Path) -> list[Path]:
    """Every file that is read back; no two in a row are alike, so that a swap changes both."""
    prepare(root)
    scenario(root, [])
    unread = ("run.lock", "config.yaml")
    found = (path for path in (root / "sessions").rglob("*") if path.is_file())
    return sorted(path for path in found if path.name not in unread and path.stat().st_size > 4)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "swap"])
def test_damage_to_any_file_is_named(root: Path, how: str) -> None:
    places = artefacts(root)
    assert len(places) == 11  # six of the model, three of the checkpoint, two sessions
    for i, place in enumerate(places):
        content = place.read_bytes()
        place.write_bytes(
            {
                "flip": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:],
                "truncate": content[: len(content) // 2],
                "empty": b"",
                "swap": places[i - 1].read_bytes(),
            }[how]
        )
        _assert_named(root, place)
        place.write_bytes(content)


def _assert_named(root: Path, place: Path) -> None:
    """Reading what holds the file raises an error with its folder in it."""
    try:
        if place.name == "session.json":
            with SessionStore(root).open(place.parent.name):
                pass
        elif place.parent.name.startswith("step_"):
            CheckpointManager(place.parent.parent).load_checkpoint(place.parent)
        else:
            ModelStorage(root, build=build).load_model("cognate.m1.s1")
    except DamagedFile as error:
        assert place.parent.name in str(error)
        return
    except ForgeError as error:
        raise AssertionError(f"{place}: {error!r}") from error
    raise AssertionError(f"{place}: the damage went unnoticed")
