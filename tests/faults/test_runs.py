"""P1, P2, P10, P13, P14 on whole runs: killed, failing and interrupted runs end as if untouched."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.errors import AlreadyInUse, ForgeError
from agent_forge.pipeline.environment import request_stop
from agent_forge.store import files, lock
from agent_forge.store.registry import ModelRegistry
from tests.support import toy_runs
from tests.support.faults import FailingDisk
from tests.support.toy_runs import (
    change_settings,
    die_at,
    exit_code,
    folder,
    forked,
    outcome,
    resume_until_done,
    toy_run,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
EVENTS = ("run_started", "phase_started", "loop", "step", "checkpoint", "phase_completed")
SEED = 20261115


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an untouched run leaves, and how long it takes."""
    toy_run(tmp_path_factory.mktemp("warm"))  # what torch loads on first use, forks then have
    root = tmp_path_factory.mktemp("reference")
    began = time.monotonic()
    pid = forked(lambda: toy_run(root))
    assert exit_code(pid) == 0
    return {**outcome(root), "seconds": time.monotonic() - began}


def assert_as_untouched(root: Path, reference: dict[str, Any]) -> None:
    for key, value in outcome(root).items():
        assert value == reference[key], key
    registry = ModelRegistry(root / "registry" / "model_registry.db")
    registry.integrity_check()
    assert registry.get_session_status("r")["status"] == "completed"


def kill_at_random(root: Path, reference: dict[str, Any], chance: random.Random) -> int:
    """Kill a run up to three times, wherever it happens to be; then let it end."""
    killed = 0
    for _ in range(3):
        pid = forked(lambda: resume_until_done(root))
        time.sleep(chance.uniform(0, reference["seconds"]))
        os.kill(pid, signal.SIGKILL)
        killed += exit_code(pid) == -signal.SIGKILL
    assert exit_code(forked(lambda: resume_until_done(root))) == 0
    assert_as_untouched(root, reference)
    return killed


def kill_at_event(root: Path, reference: dict[str, Any], kind: str, count: int) -> None:
    pid = forked(lambda: toy_run(root, listener=die_at(kind, count)))
    assert exit_code(pid) == -signal.SIGKILL
    assert exit_code(forked(lambda: resume_until_done(root))) == 0
    assert_as_untouched(root, reference)


class DyingDisk(FailingDisk):
    """Kills its process instead of failing."""

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at_write(root: Path, reference: dict[str, Any], n: int) -> bool:
    """Kill at the n-th change of the disk; False if the run has fewer."""

    def work() -> None:
        files.disk = DyingDisk(n, 0, once=True, short=True)
        toy_run(root)

    if exit_code(forked(work)) == 0:
        return False
    assert exit_code(forked(lambda: resume_until_done(root))) == 0
    assert_as_untouched(root, reference)
    return True


def test_a_run_killed_at_random_resumes_to_the_same_bytes(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    chance = random.Random(SEED)
    killed = sum(kill_at_random(tmp_path / str(n), reference, chance) for n in range(4))
    assert killed >= 3  # not all came after the end


@pytest.mark.parametrize("kind", EVENTS)
def test_a_run_killed_at_any_event_resumes_to_the_same_bytes(
    tmp_path: Path, reference: dict[str, Any], kind: str
) -> None:
    kill_at_event(tmp_path, reference, kind, 1)


def test_a_run_killed_while_writing_resumes_to_the_same_bytes(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    chance = random.Random(SEED)
    for n in chance.sample(range(1, 200), 6):
        assert kill_at_write(tmp_path / str(n), reference, n)


@pytest.mark.soak
def test_two_hundred_kills(tmp_path: Path, reference: dict[str, Any]) -> None:
    chance = random.Random(SEED)
    kills = 0
    for kind in EVENTS:
        for count in range(1, 1 + (24 if kind == "step" else 4 if kind == "checkpoint" else 1)):
            kill_at_event(tmp_path / f"{kind}{count}", reference, kind, count)
            kills += 1
    for n in range(1, 1000):
        if not kill_at_write(tmp_path / f"write{n}", reference, n):
            break
        kills += 1
    for n in range(40):
        kills += kill_at_random(tmp_path / f"random{n}", reference, chance)
    assert kills >= 200
    sys.stdout.write(f"{kills} kills, every run ended with the bytes of an untouched one\n")


def fail_at_write(
    root: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch, n: int, once: bool
) -> bool:
    """Let the n-th change of the disk fail, then resume; False if the run has fewer."""
    kind = (errno.ENOSPC, errno.EIO)[n % 2]
    disk = FailingDisk(n, kind, once=once, short=n % 3 == 0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", disk)
        try:
            result = toy_run(root)
        except ForgeError as error:
            result = {"success": False, "exit_code": error.exit_code}
    if not disk.failures:
        return False
    assert result["success"] or result["exit_code"] == 5
    if not result["success"]:
        resume_until_done(root)
    assert_as_untouched(root, reference)
    return True


@pytest.mark.parametrize("once", [True, False], ids=["once", "for-good"])
def test_a_run_survives_the_nth_io_failure(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """A sample here; `make soak` takes every n until a run passes untouched."""
    for n in range(1 + 15 * once, 250, 31):
        if not fail_at_write(tmp_path / str(n), reference, monkeypatch, n, once):
            break
    assert n > 150


@pytest.mark.soak
@pytest.mark.parametrize("once", [True, False], ids=["once", "for-good"])
def test_a_run_survives_every_io_failure(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    for n in range(1, 2000):
        if not fail_at_write(tmp_path / str(n), reference, monkeypatch, n, once):
            break
    else:
        raise AssertionError("no run passed untouched")
    sys.stdout.write(f"{n - 1} single failures, every run ended like an untouched one\n")


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP", "stop file"])
def test_a_request_to_stop_pauses_and_saves(
    tmp_path: Path, reference: dict[str, Any], how: str
) -> None:
    def ask(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 7:
            if how == "stop file":
                request_stop(folder(tmp_path))
            else:
                os.kill(os.getpid(), getattr(signal, how))

    def work() -> None:
        result = toy_run(tmp_path, listener=ask)
        assert (result["exit_code"], result["status"]) == (130, "paused")
        assert "step 7 of 24" in result["error"]

    assert exit_code(forked(work)) == 0
    status = files.read_checked(folder(tmp_path) / "session.json")["status"]
    assert status == "paused" and not lock.is_busy(folder(tmp_path))
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)


def test_a_second_interrupt_leaves_at_once(tmp_path: Path, reference: dict[str, Any]) -> None:
    def ask(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 7:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            toy_run(tmp_path, listener=ask)

    assert exit_code(forked(work)) == 0
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)


def test_a_second_start_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    refused: list[float] = []

    def start_again(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 3 and not refused:
            began = time.monotonic()
            pid = forked(lambda: _busy(tmp_path))
            assert exit_code(pid) == 0
            refused.append(time.monotonic() - began)

    assert toy_run(tmp_path, listener=start_again)["success"]
    assert refused[0] < 30


def _busy(root: Path) -> None:
    with pytest.raises(AlreadyInUse) as caught:
        toy_run(root, resume=True)
    assert caught.value.exit_code == 6


def test_two_equal_runs_are_equal(tmp_path: Path, reference: dict[str, Any]) -> None:
    toy_run(tmp_path)
    assert_as_untouched(tmp_path, reference)


def test_nan_stops_the_run_at_the_last_good_checkpoint(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.randn

    def broken(*size: Any, **options: Any) -> torch.Tensor:
        broken.calls += 1  # type: ignore[attr-defined]
        x = real(*size, **options)
        return x * float("nan") if broken.calls == 13 else x  # type: ignore[attr-defined]

    broken.calls = 0  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", broken)
        result = toy_run(tmp_path)
    assert (result["exit_code"], result["status"], result["failed_phase"]) == (1, "failed", "toy")
    assert "toy/loss became nan at step 12" in result["error"]
    state = files.read_checked(folder(tmp_path) / "toy" / "state.json")
    assert state["status"] == "failed" and "nan" in state["error"]
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)


def test_the_newest_checkpoint_may_be_damaged(tmp_path: Path, reference: dict[str, Any]) -> None:
    pid = forked(lambda: toy_run(tmp_path, listener=die_at("step", 18)))
    exit_code(pid)
    newest = sorted((folder(tmp_path) / "toy" / "checkpoints" / "main").glob("step_*"))[-1]
    (newest / "tensors.safetensors").write_bytes(b"damaged")
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)
    assert "going back" in (folder(tmp_path) / "log.jsonl").read_text()


def test_the_phase_record_may_be_damaged(tmp_path: Path, reference: dict[str, Any]) -> None:
    exit_code(forked(lambda: toy_run(tmp_path, listener=die_at("step", 18))))
    (folder(tmp_path) / "toy" / "state.json").write_bytes(b"damaged")
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)


def test_all_checkpoints_may_be_damaged(tmp_path: Path, reference: dict[str, Any]) -> None:
    exit_code(forked(lambda: toy_run(tmp_path, listener=die_at("step", 18))))
    for place in (folder(tmp_path) / "toy" / "checkpoints" / "main").glob("step_*"):
        (place / "tensors.safetensors").write_bytes(b"damaged")
    resume_until_done(tmp_path)
    assert_as_untouched(tmp_path, reference)
    assert "begins anew" in (folder(tmp_path) / "log.jsonl").read_text()


def test_a_state_with_nan_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 10 is finite, but its update made the weights NaN."""
    real = torch.optim.AdamW.step

    def poison(self: Any, *arguments: Any) -> Any:
        real(self, *arguments)
        if self.state[self.param_groups[0]["params"][0]]["step"] == 10:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", poison)
        result = toy_run(tmp_path)
    assert result["status"] == "failed" and "holds NaN" in result["error"]
    steps = (folder(tmp_path) / "toy" / "checkpoints" / "main").glob("step_*")
    assert [place.name for place in steps] == ["step_00000005"]
    resume_until_done(tmp_path)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    exit_code(forked(lambda: toy_run(tmp_path, listener=die_at("step", 18))))
    (folder(tmp_path) / "toy" / "state.json").unlink()
    change_settings(tmp_path, "learning_rate: 0.05", "learning_rate: 0.06")
    result = toy_run(tmp_path, resume=True)
    assert not result["success"] and "belongs to other settings" in result["error"]


def test_the_disk_runs_low_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old checkpoints go first, then the run pauses with exit 5; nothing is lost."""
    sets = ("storage.reserve_disk_mb=1", "runtime.check_every_steps=12")
    checkpoints = folder(tmp_path) / "toy" / "checkpoints" / "main"

    def low(path: Path) -> int:
        return 10**9 if not list(checkpoints.glob("step_*")) else 10**5

    with monkeypatch.context() as patch:
        patch.setattr(files, "free_bytes", low)
        reserve, require = 10**6, files.require_space  # what a checkpoint needs is there
        patch.setattr(files, "require_space", lambda p, n: require(p, n) if n == reserve else None)
        result = toy_run(tmp_path, *sets)
    assert (result["exit_code"], result["status"]) == (5, "paused")
    assert "1,000,000 bytes needed" in result["error"]
    assert (checkpoints / "step_00000010").exists()
    assert toy_run(tmp_path, *sets, resume=True)["success"]


def test_memory_runs_low_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Low:
        available = 10**8

    seen = 0

    def memory() -> Any:
        nonlocal seen
        seen += 1
        return Low if seen > 1 else real()

    real = psutil.virtual_memory
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", memory)
        result = toy_run(tmp_path, "runtime.check_every_steps=5")
    assert result["exit_code"] == 5 and "memory" in result["error"]
    assert toy_run(tmp_path, resume=True)["success"]


def test_a_run_that_does_not_fit_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("storage.reserve_disk_mb=1e12", "runtime.reserve_memory_mb=1e12"):
        result = toy_run(tmp_path / setting[:4], setting)
        assert result["exit_code"] == 5 and "needed" in result["error"]
        assert not (folder(tmp_path / setting[:4]) / "toy").exists()


def test_reference_is_a_real_run(reference: dict[str, Any]) -> None:
    steps = [step for _, step, _ in reference["metrics"] if step is not None]
    assert steps == list(range(1, 25)) and reference["strays"] == []
    losses = [m["toy/loss"] for _, _, m in reference["metrics"] if "toy/loss" in m]
    assert losses[-1] < 0.7 * losses[0]
    assert toy_runs.SMALL[0] == "phases.toy.steps=24"
