"""P1 on an evolution: killed at any moment, it goes on to the same champion and verdict."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_forge.errors import CannotWrite, DiskFull, ForgeError
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.store import files
from tests.support.evo_models import family, job, outcome
from tests.support.faults import FailingDisk
from tests.support.toy_runs import die_at, exit_code, forked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
SMALL: dict[str, Any] = {"fitness_subset_size": 8, "verdict_items": 8, "recipe_mutation": 0.6}
# All that goes on beside one another: gradients, races, workers, finalists and healing.
EVERYTHING: dict[str, Any] = {"strategy": "auto", "racing": True, "workers": 2, "heal": 0.2}
EVERYTHING |= {"heal_steps": 6, "generations": 1, "fitness_subset_size": 16, "verdict_items": 20}


def complete(folder: Path, settings: dict[str, Any] = SMALL) -> None:
    assert exit_code(forked(lambda: run_evolution(job(folder, **settings)))) == 0


def result(folder: Path) -> dict[str, Any]:
    """What an evolution left; what healing made of it too."""
    healed = folder / "healed" / "model.safetensors"
    return {**outcome(folder), "healed": files.sha256_of(healed) if healed.exists() else ""}


def timed(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
    family()
    began = time.monotonic()
    complete(folder, settings)
    return result(folder), time.monotonic() - began


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    return timed(tmp_path_factory.mktemp("reference") / "x", SMALL)


def killed(folder: Path, after_s: float, settings: dict[str, Any]) -> bool:
    """Whether an evolution that is killed then was still at it."""
    pid = forked(lambda: run_evolution(job(folder, **settings)))
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    return exit_code(pid) == -signal.SIGKILL


def campaign(
    root: Path,
    reference: tuple[dict[str, Any], float],
    kills: int,
    seed: int,
    settings: dict[str, Any] = SMALL,
) -> None:
    expected, seconds = reference
    chance = random.Random(seed)
    hits = 0
    for n in range(kills):
        folder = root / str(n)
        hits += killed(folder, chance.uniform(0.05, 0.95) * seconds, settings)
        complete(folder, settings)
        assert result(folder) == expected, n
        files.remove_tree(folder, root)
    assert hits > kills / 2


def test_killed_at_random(tmp_path: Path, reference: tuple[dict[str, Any], float]) -> None:
    campaign(tmp_path, reference, 5, seed=1)


@pytest.mark.soak
def test_killed_at_random_a_hundred_times(
    tmp_path: Path, reference: tuple[dict[str, Any], float]
) -> None:
    campaign(tmp_path, reference, 100, seed=2)


@pytest.mark.soak
def test_killed_a_hundred_times_with_everything_on(tmp_path: Path) -> None:
    """Kills wait for no worker either: those that are left over end by themselves."""
    whole = timed(tmp_path / "whole", EVERYTHING)
    assert whole[0]["healed"]
    campaign(tmp_path, whole, 100, 3, EVERYTHING)


def test_killed_again_and_again(tmp_path: Path, reference: tuple[dict[str, Any], float]) -> None:
    for kind, count in (("candidate", 2), ("candidate", 5), ("generation", 1), ("verdict", 2)):
        dying = partial(run_evolution, job(tmp_path / "x", **SMALL), listen=die_at(kind, count))
        assert exit_code(forked(dying)) == -signal.SIGKILL
    complete(tmp_path / "x")
    assert result(tmp_path / "x") == reference[0]


def test_a_disk_that_fails_for_a_moment(
    tmp_path: Path, reference: tuple[dict[str, Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 60th operation of the disk fails once: an error that pauses, then the same bytes."""
    failures = 0
    for n in range(5, 100_000, 60):
        disk = FailingDisk(n, 28, once=True, short=False)
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", disk)
            try:
                run_evolution(job(tmp_path / "x", **SMALL))
            except ForgeError as error:
                assert isinstance(error, DiskFull | CannotWrite) and error.pauses
        failures += bool(disk.failures)
        if not disk.failures:
            break
    assert failures > 3
    assert {**result(tmp_path / "x"), "strays": []} == reference[0]
