"""`forge run --only PHASE --models A,B,C`: one phase on models that somebody else made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_forge.cli.run import _given
from agent_forge.errors import ConfigError, Interrupted
from agent_forge.phases.phase2_evomerge.phase import EvoMergePhase
from agent_forge.pipeline import orchestrator
from agent_forge.store import files
from agent_forge.store.records import read_state
from agent_forge.store.sessions import SessionStore, read_session
from tests.support.command_line import Forge
from tests.support.evo_models import PARENTS, family

pytestmark = pytest.mark.slow
LINE = "run --preset smoke --only evomerge --session g --progress none " + " ".join(
    f"--set phases.evomerge.{item}"
    for item in ("generations=0", "fitness_subset_size=8", "verdict_items=8")
)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Three Llamas that no phase made: without our records."""
    return [shutil.copytree(family() / name, tmp_path / "given" / name) for name in PARENTS]


def given(models: list[Path]) -> str:
    return "--models " + ",".join(f"given/{path.name}" for path in models)


def state(root: Path) -> dict[str, Any]:
    return read_state(root / "sessions" / "g" / "phase2_evomerge") or {}


def test_models_of_others(forge: Forge, root: Path, models: list[Path]) -> None:
    result = forge(f"{LINE} {given(models)}")
    assert result.code == 0, result.err
    champion = root / "sessions" / "g" / "phase2_evomerge" / "champion"
    files.verify(champion)
    lineage = (champion / "lineage.json").read_text()
    assert all(f"given/{name}" in lineage for name in PARENTS)
    assert state(root)["inputs"] == [str(path.resolve()) for path in models]
    kinds = {event["event"] for event in events(root)}
    assert "phase_started" in kinds and "handoff" not in kinds  # its rules are for Phase 1
    assert forge("resume g --json --progress none").document["phases"][0]["skipped"]
    (models[0] / "generation_config.json").write_text("{}")  # no longer what it was done with
    assert not forge("resume g --json --progress none").document["phases"][0]["skipped"]


def events(root: Path) -> list[dict[str, Any]]:
    lines = (root / "sessions" / "g" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("when", ["before its record", "within"])
def test_a_resume_remembers_them(
    forge: Forge, root: Path, models: list[Path], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Interrupted("stopped")

    place: Any = orchestrator if when == "before its record" else EvoMergePhase
    with monkeypatch.context() as patch:
        patch.setattr(place, "run_phase" if place is orchestrator else "run", stop)
        assert forge(f"{LINE} {given(models)}").code == 130
    assert bool(state(root)) == (when == "within")
    asked = read_session(SessionStore(root).find("g"))["asked"]
    assert (asked["foreign"], asked["only"]) == (True, "evomerge")
    assert asked["models"] == [str(path.resolve()) for path in models]
    result = forge("resume g --progress none")
    assert result.code == 0, result.err
    assert state(root)["inputs"] == asked["models"]


def test_a_dry_run_makes_nothing(forge: Forge, root: Path, models: list[Path]) -> None:
    result = forge(f"{LINE} {given(models)} --dry-run")
    assert result.code == 0 and "evomerge" in result.out and not root.exists()
    assert forge(f"{LINE} --dry-run").code == 3  # without them there is nothing to work on


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --preset smoke --models given/add", "--models goes with --only"),
        ("run --preset toy --only toy --models given/add", "toy works on no models"),
        ("run --only cognate --models given/add", "cognate works on no models"),
        ("run --only evomerg --models given/add", "did you mean 'evomerge'"),
        (f"{LINE} --models given/twice,given/nothing", "given/nothing"),
        (f"{LINE} --models given/twice,,given/add", "nothing between two commas"),
        (f"{LINE} --models ''", "nothing between two commas"),
        (f"{LINE} --models given/twice,given/add", "evomerge works on 3, and these are 2"),
        (f"{LINE} --models given/twice+given/add,given/next", "no folder of one model"),
    ],
)
def test_what_is_refused(
    forge: Forge, root: Path, models: list[Path], line: str, said: str
) -> None:
    """Before there is a session, and by name."""
    for more in ("", " --dry-run"):
        result = forge(line + more)
        assert result.code == 2 and said in result.err, result.err
        assert not (root / "sessions").exists()


def test_a_run_stands_for_what_the_phase_before_handed_over(root: Path) -> None:
    made = {"phase1_cognate": PARENTS, "phase3_quietstar": ["reasoning"]}
    for folder, names in made.items():
        for name in names:
            shutil.copytree(family() / PARENTS[0], root / "sessions" / "made" / folder / name)
        state = {"status": "completed", "outputs": [{"name": name} for name in names]}
        files.write_checked(root / "sessions" / "made" / folder / "state.json", state)
    assert [ref.name for ref in _given("made", "bitnet", root)] == ["reasoning"]
    assert [ref.name for ref in _given("made", "evomerge", root)] == list(PARENTS)
    with pytest.raises(ConfigError, match="bitnet works on 1, and these are 2"):
        _given("made,made", "bitnet", root)
