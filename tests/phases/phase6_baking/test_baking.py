"""Phase 6: it teaches tools and a persona in turn, takes back what hurts, and survives a kill."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.model.opened import open_model
from agent_forge.phases.phase6_baking import cycles
from agent_forge.phases.phase6_baking.cycles import BakingTraining
from agent_forge.phases.phase6_baking.persona import load_persona
from agent_forge.store.records import read_metadata
from tests.support.baking_runs import KL, PHASE, as_if_learning, config, made, run
from tests.support.toy_runs import exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run with two rounds that are kept."""
    root = tmp_path_factory.mktemp("baking")
    with pytest.MonkeyPatch.context() as patch:
        as_if_learning(patch)
        return root, run(root)


def test_it_hands_over_a_model_with_tools_and_a_persona(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    root, outcome = reference
    result = outcome["results"]["baking"]
    place = folder(root) / "phase6_baking"
    packed, whole = (open_model(place / name).network for name in ("packed", "dequantised"))
    given = open_model(root / "sessions" / "before" / "phase5_forge" / "packed").network
    assert packed.packing == given.packing and whole.packing is None
    assert any(not torch.equal(t, given.state_dict()[n]) for n, t in packed.state_dict().items())
    metadata = read_metadata(result.artifacts["models"][0].path).model_dump()
    assert metadata["tools"] == ["calc", "clock"] and metadata["persona"]["name"] == "Zoe"
    assert {"tool_success_rate", "persona_consistency", "strategies", "levels"} <= set(metadata)
    assert read_metadata(place / "dequantised").model_dump()["tools"] == ["calc", "clock"]
    card = (result.artifacts["models"][0].path / "README.md").read_text()
    assert "| question | calls | answer |" in card and "| Who are you? |" in card


def test_tools_and_persona_take_turns(reference: tuple[Path, dict[str, Any]]) -> None:
    rounds = reference[1]["results"]["baking"].artifacts["rounds"]
    assert [own["kind"] for own in rounds] == ["tools", "persona"]
    assert not any(own["taken_back"] or own["prompt"] for own in rounds)


def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    own = {metric.name for metric in METRICS if metric.phase == "baking"}
    names = {name for _, _, values in metrics(reference[0]) for name in values}
    assert not own - {found.name for name in names if (found := find_metric(name))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "stage", "step"),
    [((), "round_2", 3), (KL, "follow", 2), (KL, "round_1", 3), (("reverse",), "round_2", 3)],
)
def test_killed_in_any_stage_it_ends_in_the_same_bytes(
    sets: tuple[str, ...],
    stage: str,
    step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cycles, "SAMPLED_EVERY", 2)
    sets = (KL[0], f"{PHASE}.method=reverse") if sets == ("reverse",) else sets

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == stage and record.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    keep = (*sets, f"{PHASE}.most_lost=1")
    monkeypatch.setattr(BakingTraining, "_lost", lambda *_: "")
    assert exit_code(forked(lambda: run(tmp_path / "a", *keep, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path / "a"))) == 0
    run(tmp_path / "b", *keep)
    assert made(tmp_path / "a") == made(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_round_that_hurts_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rounds lose old tasks: what is handed over is what came in."""
    as_if_learning(monkeypatch, **{cycles.OLD: [50, 30]})
    result = run(tmp_path)["results"]["baking"]
    told = [own["taken_back"] for own in result.artifacts["rounds"]]
    assert told == ["old tasks -20.0 points"] * 2
    given = open_model(tmp_path / "sessions" / "before" / "phase5_forge" / "packed").network
    assert all(torch.equal(t, given.state_dict()[n]) for n, t in result.model.state_dict().items())
    assert (folder(tmp_path) / "events.jsonl").read_text().count("rolled_back") == 2


def test_weights_that_a_round_goes_back_to_have_the_recorded_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_learning(monkeypatch, **{cycles.OLD: [50, 30]})
    look = BakingTraining.right

    def otherwise(own: BakingTraining, model: Any, name: str) -> Any:
        found = look(own, model, name)
        return {**found, "tools": [True] * 100} if "again" in name else found

    monkeypatch.setattr(BakingTraining, "right", otherwise)
    with pytest.raises((DamagedFile, AssertionError), match="score otherwise"):
        run(tmp_path)


def test_a_kind_that_gains_no_more_is_left_and_both_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_learning(monkeypatch, tools=[0, 0, 0, 0, 0, 0], persona=[0, 0, 10, 10, 20, 20, 20])
    sets = (f"{PHASE}.rounds=9", f"{PHASE}.plateau_rounds=1", f"{PHASE}.round_steps=1")
    rounds = run(tmp_path, *sets)["results"]["baking"].artifacts["rounds"]
    assert [own["kind"] for own in rounds] == ["tools", "persona", "persona"]


@pytest.mark.slow
def test_forms_of_the_prompt_compete_and_the_best_is_baked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_learning(monkeypatch)
    ask = BakingTraining.ask

    def favour(own: BakingTraining, network: Any, asked: Any, split: str, system: str = "") -> Any:
        found = ask(own, network, asked, split, system)
        good = bool(system) and not system.startswith(" named")
        return cycles.Replies(asked, [good] * len(asked), found.called, found.said)

    monkeypatch.setattr(BakingTraining, "ask", favour)
    rounds = run(tmp_path, *KL)["results"]["baking"].artifacts["rounds"]
    assert all(own["prompt"] and not own["prompt"].startswith(" named") for own in rounds)
    assert "named Zoe" in rounds[0]["prompt"] and "can calc clock" in rounds[0]["prompt"]


def test_half_baked_is_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_learning(monkeypatch)
    states = []
    partly = cycles._partly

    def noted(before: Any, after: Any, strength: float) -> Any:
        found = partly(before, after, strength)
        states.append([own.state["embedding.weight"] for own in (before, found, after)])
        return found

    monkeypatch.setattr(cycles, "_partly", noted)
    run(tmp_path, f"{PHASE}.strength=0.5", f"{PHASE}.rounds=1")
    before, half, after = states[0]
    assert torch.allclose(half, (before + after) / 2) and not torch.equal(before, after)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: Zoe", "field required|mood"),
        ("[1, 2]", "mapping|settings"),
        ("name: 'Zoe and Max'\nmood: a\nlikes: [b, c]\nhome: d\nsaying: e\nanimal: f", "name"),
        ("name: Zoe\nmood: calc\nlikes: [b, c]\nhome: d\nsaying: e\nanimal: f", "tool"),
        ("name: I\nmood: a\nlikes: [b, c]\nhome: d\nsaying: e\nanimal: f", "told apart"),
        ("name: Zoe\nmood: b\nlikes: [b, c]\nhome: d\nsaying: e\nanimal: f", "two things"),
    ],
)
def test_a_bad_persona_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){problem}"):
        load_persona(str(path))


def test_who_or_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no nobody"):
        load_persona("nobody")
    with pytest.raises(ConfigError, match="there is no xxx"):
        load_persona("x" * 5000)
    with pytest.raises(ConfigError, match="no tool 'web'"):
        config(f"{PHASE}.tools=[web]")
    with pytest.raises(ConfigError, match="follow_steps"):
        config(f"{PHASE}.method=forward")
