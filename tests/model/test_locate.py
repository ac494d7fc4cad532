"""What a command takes for a model: a path, a run, an id of the hub, an alias, base+adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_forge.errors import ConfigError, NotFound
from agent_forge.model import locate
from agent_forge.model.locate import locate_model, locate_parents, newest_session, specialists_of
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.evo_models import family

SPECIALISTS = ("a", "b", "c")


def finished(root: Path, session: str, folder: str, *names: str, trunk: bool = False) -> Path:
    """A phase of a run with these outputs, as the orchestrator leaves it."""
    place = root / "sessions" / session / folder
    for name in (*names, *(["trunk"] if trunk else [])):
        files.write_bytes(place / name / "config.json", b"{}")
    state = {"status": "completed", "outputs": [{"name": name} for name in names]}
    files.write_bytes(place / "state.json", files.with_checksum(state))
    return place


def test_a_path_is_that_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "with+plus"):
        (tmp_path / name).mkdir()
        assert locate_model(name) == name
        assert locate_parents([name], tmp_path)[0] == [str(tmp_path / name)]
    assert locate_model("model+model") == "model+model"
    with pytest.raises(NotFound, match="nothing is not a folder"):
        locate_model("model+nothing")
    with pytest.raises(NotFound, match="deepseek"):
        locate_model("deepsek")


def test_a_run_is_the_model_that_it_ended_with(tmp_path: Path) -> None:
    first = finished(tmp_path, "r", "phase1_cognate", *SPECIALISTS, trunk=True)
    with pytest.raises(ConfigError, match="ends with 3 models") as error:
        locate_model("r", tmp_path)
    assert str(first / "b") in str(error.value.hint)
    second = finished(tmp_path, "r", "phase2_evomerge", "champion")
    assert locate_model("r", tmp_path) == str(second / "champion")
    (tmp_path / "sessions" / "begun").mkdir()
    with pytest.raises(NotFound, match="no finished phase"):
        locate_model("begun", tmp_path)


def test_an_evolution_of_a_run_begins_with_its_specialists(tmp_path: Path) -> None:
    place = finished(tmp_path, "r", "phase1_cognate", *SPECIALISTS, trunk=True)
    parents = [str(place / name) for name in SPECIALISTS]
    assert locate_parents(["r"], tmp_path) == (parents, str(place / "trunk"))
    finished(tmp_path, "other", "phase1_cognate", *SPECIALISTS)
    assert specialists_of("other", tmp_path) is None  # without its trunk
    (place / "state.json").write_text("damaged")
    assert specialists_of("r", tmp_path) is None and newest_session(tmp_path / "none") is None


def test_names_of_the_hub_and_aliases_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "_download", lambda name: f"/cache/{name}")
    assert locate_model("owner/name", tmp_path) == "/cache/owner/name"
    assert locate_model("Qwen2", tmp_path) == "/cache/Qwen/Qwen2-1.5B-Instruct"
    assert locate_model(f"owner/name+{tmp_path}") == f"/cache/owner/name+{tmp_path}"


def test_every_command_takes_a_run(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = finished(tmp_path / "storage", "r", "phase2_evomerge", "champion") / "champion"
    (place / "config.json").unlink()
    place.rmdir()
    place.symlink_to(family() / "add")
    monkeypatch.setenv("FORGE_STORAGE", str(tmp_path / "storage"))
    assert forge("generate r 1 --max-tokens 2 --json").document["model"] == "r"
    data = family() / "add.jsonl"
    (row,) = forge(f"eval r --data {data} --items 2 --json").document["domains"]
    assert row["items"] == 2
    found = forge(f"compare r {family() / 'base'} --data {data} --items 2 --json").document
    assert found["reference"] == "r" and found["overall"]["accuracy"]["n"] == 2
    merged = forge(f"merge --models r,{family() / 'base'} --method linear {tmp_path / 'out'}")
    assert merged.code == 0, merged.err
    assert str(place) in (tmp_path / "out" / "recipe.yml").read_text()
