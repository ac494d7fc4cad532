"""What the code computes is what it computed when the hashes were frozen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.compat import make_run
from tests.golden import freeze

KNOWN = json.loads(freeze.FROZEN.read_text())
HERE = KNOWN["by cpu"].get(freeze.cpu())
WITHIN = 0.02  # of a loss, on a CPU that adds in another order


@pytest.mark.parametrize("name", ["tasks", "evaluations"])
def test_text_is_the_same_on_every_machine(name: str) -> None:
    assert freeze.PORTABLE[name]() == KNOWN[name]


def test_published_sets_are_asked_as_before() -> None:
    if not (freeze.data_folder() / "gsm8k").exists():
        pytest.skip("the folder of datasets is not here: AGENT_FORGE_DATA names it")
    assert freeze.published() == KNOWN["published"]


@pytest.mark.parametrize("name", freeze.BY_CPU)
def test_weights_and_journals_are_the_same(name: str, tmp_path: Path) -> None:
    """To the last bit on a CPU whose hashes are known; elsewhere what was measured is near."""
    found = freeze.BY_CPU[name](tmp_path)
    if HERE is not None:
        known = dict(HERE[name])
        # Machines of one kind of CPU have trained the same weights and measured them otherwise in
        # the last digit: whichever is known.
        if "metrics" in known:
            assert found.pop("metrics") in known.pop("metrics")
        assert found == known
        return
    other = next(iter(KNOWN["by cpu"].values()))[name]
    assert found.keys() == other.keys()
    for key in {"loss", "fitness"} & found.keys():
        assert found[key] == pytest.approx(other[key], rel=WITHIN)


def test_a_run_of_the_old_code_resumes_to_its_end(tmp_path: Path) -> None:
    """P9: stopped within Phase 2 by the code before it was rearranged."""
    expected = json.loads((make_run.HERE / "outcome.json").read_text())
    shutil.copytree(make_run.HERE, tmp_path / "storage")
    freeze.forge("resume old", tmp_path)
    found = make_run.digests(tmp_path / "storage")
    events = (tmp_path / "storage" / "sessions" / "old" / "events.jsonl").read_text()
    assert '"phase_skipped"' in events and found.keys() == next(iter(expected.values())).keys()
    if freeze.cpu() in expected:
        assert found == expected[freeze.cpu()]
