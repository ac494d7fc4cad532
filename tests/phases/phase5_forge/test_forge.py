"""Phase 5: it assesses, trains at the edge and beyond, takes back, and survives being killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.model.opened import open_model
from agent_forge.phases.phase5_forge import rounds
from agent_forge.phases.phase5_forge.edge import (
    HINTS,
    EdgeDraw,
    EdgeTasks,
    edge_tasks,
    generalised_late,
    source_name,
)
from agent_forge.store.records import read_metadata
from tests.support import quietstar_runs
from tests.support.forge_runs import KEPT, PHASE, as_if_able, config, made, run
from tests.support.toy_runs import exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run with a control and one round that is kept."""
    root = tmp_path_factory.mktemp("forge")
    with pytest.MonkeyPatch.context() as patch:
        as_if_able(patch)
        return root, run(root, *KEPT, f"{PHASE}.control=true")


def test_it_hands_over_a_packed_model_and_the_same_weights_whole(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    root, outcome = reference
    result = outcome["results"]["forge"]
    place = folder(root) / "phase5_forge"
    packed, whole = (open_model(place / name).network for name in ("packed", "dequantised"))
    given = open_model(root / "sessions" / "before" / "phase4_bitnet" / "packed").network
    assert packed.packing == given.packing and whole.packing is None
    assert all(torch.equal(t, whole.state_dict()[n]) for n, t in packed.state_dict().items())
    assert any(not torch.equal(t, given.state_dict()[n]) for n, t in packed.state_dict().items())
    metadata = read_metadata(result.artifacts["models"][0].path).model_dump()
    assert {"final_accuracy", "final_loss", "strategies", "levels"} <= set(metadata)
    assert metadata["final_accuracy"] == result.metrics["final_accuracy"]


def test_it_tells_edges_rounds_and_samples(reference: tuple[Path, dict[str, Any]]) -> None:
    result = reference[1]["results"]["forge"]
    edges, found, sizes = result.artifacts["tables"]
    assert [row[:3] for row in edges[1:4]] == [
        ["tot4", "digits", name] for name in ("input", "control", "forged")
    ]
    assert edges[1][3] == 6 and edges[4][3] == 4  # what both families were taught
    assert [row[:3] for row in found[1:]] == [[1, "tot4", "9 to 9"], [1, "swap4", "5 to 6"]] or [
        row[1] for row in found[1:]
    ] == ["tot4", "swap4"]
    assert all(row[-1] == "kept" and row[3] == 1.0 for row in found[1:])
    assert {row[0] for row in sizes[1:]} == {"tot4", "swap4"}
    assert len(result.artifacts["newly_solved"]) > 1 and result.artifacts["looks"]
    card = (result.artifacts["models"][0].path / "README.md").read_text()
    assert "| family | in | model | reach |" in card and "tot " in card


def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    own = {metric.name for metric in METRICS if metric.phase == "forge"}
    names = {name for _, _, values in metrics(reference[0]) for name in values}
    logged = {found.name for name in names if (found := find_metric(name))}
    assert own - logged == {"{}/train/self_model_error"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["edge", "round_1", "control"])
def test_killed_in_any_stage_it_ends_in_the_same_bytes(
    stage: str,
    reference: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if_able(monkeypatch)

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == stage and record.get("step") == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    sets = (*KEPT, f"{PHASE}.control=true")
    assert exit_code(forked(lambda: run(tmp_path, *sets, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert made(tmp_path) == made(reference[0])
    assert metrics(tmp_path) == metrics(reference[0])


def test_a_round_that_costs_too_much_is_taken_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known sizes are said to be lost in the round alone: the weights are those of before it."""
    as_if_able(monkeypatch)
    share = {"input": 0.9, "edge": 0.9, "round 1": 0.5}
    monkeypatch.setattr(
        rounds.EdgeTraining,
        "levels",
        lambda self, model, name: dict.fromkeys((*self.families, rounds.OLD), share[name]),
    )
    lost = run(tmp_path / "a")["results"]["forge"]
    assert [row["kept"] for row in lost.artifacts["rounds"]] == [False]
    assert "tot4 -40.0 points" in lost.artifacts["rounds"][0]["reason"]
    run(tmp_path / "b", f"{PHASE}.beyond=none")
    assert made(tmp_path / "a") == made(tmp_path / "b")


def test_training_at_the_edge_that_costs_too_much_is_taken_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    monkeypatch.setattr(
        rounds.EdgeTraining,
        "levels",
        lambda self, model, name: {"tot4": 0.9 if name == "input" else 0.5},
    )
    result = run(tmp_path, f"{PHASE}.beyond=none")["results"]["forge"]
    place = tmp_path / "sessions" / "before" / "phase4_bitnet" / "packed"
    given = open_model(place).network.state_dict()
    assert all(torch.equal(t, given[n]) for n, t in result.model.state_dict().items())
    assert "taken back: lost tot4 -40.0 points" in result.artifacts["headline"]["verdict"]


def test_thoughts_on_which_too_few_cuts_agree_are_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    whole = rounds.by_splitting

    def few(thinker: Any, items: Any, known: Any) -> Any:
        found = whole(thinker, items, known)
        return type(found)(found.traces[:5], len(items), 5)  # of 6

    monkeypatch.setattr(rounds, "by_splitting", few)
    result = run(tmp_path, *KEPT)["results"]["forge"]
    (own,) = result.artifacts["rounds"]
    assert not own["kept"] and "no family has 90%" in own["reason"]
    assert own["kept_thoughts"]["tot4"] == (5, 6, 5)


def test_a_family_that_cannot_be_asked_is_told_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    solved = EdgeTasks.solved

    def broken(own: EdgeTasks, model: Any, split: str, asked: Any) -> list[bool]:
        if own.name == "swap4":
            raise ZeroDivisionError("the verifier fell over")
        return solved(own, model, split, asked)

    monkeypatch.setattr(EdgeTasks, "solved", broken)
    result = run(tmp_path, *KEPT)["results"]["forge"]
    assert result.artifacts["problems"] == {"swap4": "the verifier fell over"}
    assert "swap4: the verifier fell over" in result.artifacts["headline"]["verdict"]
    assert {row[0] for row in result.artifacts["tables"][2][1:]} == {"tot4"}


def test_a_model_that_never_learned_to_think_is_trained_too(tmp_path: Path) -> None:
    sets = (f"{PHASE}.edge_families=[digit_shift]",)
    result = run(tmp_path, *sets, thinks=False)["results"]["forge"]
    assert result.artifacts["tables"][0][1][:2] == ["digit_shift", "digits"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("edge_families=[]", "at least one"),
        ("edge_families=[tot4, tot4]", "each once"),
        ("edge_families=[story]", "no family 'story' whose items have a size"),
        ("edge_families=[nothing]", "no family 'nothing'"),
        ("growth=1", "growth"),
        ("steps=-1", "steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(f"{PHASE}.{setting}")


# -- items and draws -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return quietstar_runs.known_tokenizer()


def test_sizes_end_where_items_no_longer_fit_a_row(tokenizer: Tokenizer) -> None:
    own = edge_tasks("tot4", (4, 10), 30, tokenizer, 0, 64)
    assert own.sizes[0] == 4 and 10 <= own.sizes[-1] < 30
    longest = own.sizes[-1]
    assert len(own.item(own.task(longest, "train", 0)).ids) < 64
    assert len(own.item(own.task(longest + 1, "train", 0)).ids) >= 64
    assert edge_tasks("tot4", (4, 10), 12, tokenizer, 0, 640).sizes == range(4, 13)
    assert edge_tasks("digit_shift", (3, 7), 99, tokenizer, 0, 640).sizes == range(3, 25)


def test_hints_give_the_first_claims_and_leave_the_rest_to_learn(tokenizer: Tokenizer) -> None:
    own = edge_tasks("swap4", (2, 5), 8, tokenizer, 0, 640)
    task = own.task(6, "train", 0)
    plain, hinted = own.item(task), own.item(task, 3)
    assert plain.ids == hinted.ids
    learned = [sum(item.asked) for item in (plain, own.item(task, 1), hinted, own.item(task, 5))]
    assert learned == sorted(learned, reverse=True) and len(set(learned)) == 4
    at = hinted.asked.index(True)
    text = tokenizer.decode(list(hinted.ids[at:]))
    assert text.count(" ") >= 2 and hinted.asked[at:] == plain.asked[at:]


def drawn(kind: str, seen: list[Any] | None = None, looks: int = 4) -> EdgeDraw:
    sizes = {"tot4": [11, 12, 13, 14]}
    return EdgeDraw(kind, {"old": 0.4}, sizes, lambda s: (0.0, {}), 40, 64, looks, seen or [])


def shares(draw: EdgeDraw) -> dict[str, float]:
    return {k: round(v, 6) for k, v in draw.at(39, 40).mix.items() if k != "old"}


def look(size: int, success: float) -> Any:
    return {"tot4": {str(size): success}}


def test_a_uniform_draw_takes_all_sizes_and_an_easy_one_more_and_more() -> None:
    names = [source_name("tot4", size) for size in (11, 12, 13, 14)]
    assert shares(drawn("uniform")) == dict.fromkeys(names, 0.15)
    for looks, known in enumerate((names[:1], names[:2], names[:3], names)):
        assert set(shares(drawn("easy_to_hard", [{}] * looks))) == set(known)
    assert all(sum(drawn(k).at(0, 40).mix.values()) == pytest.approx(1) for k in ("uniform",))


def test_the_controller_goes_on_after_three_looks_and_back_to_hints() -> None:
    assert list(shares(drawn("controller"))) == ["tot4 11"]
    assert list(shares(drawn("controller", [look(11, 0.8)] * 2))) == ["tot4 11"]
    mastered = drawn("controller", [look(11, 0.8)] * 3)
    assert shares(mastered) == {"tot4 11": 0.12, "tot4 12": 0.48}
    assert list(shares(drawn("controller", [look(11, 0.6)] * 9))) == ["tot4 11"]
    failing = [look(11, 0.2)] * len(HINTS)
    assert list(shares(drawn("controller", failing[:1]))) == ["tot4 11 with 1 given"]
    assert not drawn("controller", failing[:-1]).walls
    assert drawn("controller", failing).walls == {"tot4": 11}
    helped = drawn("controller", [look(11, 0.2), look(11, 0.9)])
    assert list(shares(helped)) == ["tot4 11"]


def test_a_draw_that_is_restored_goes_on_as_it_would_have() -> None:
    whole = drawn("controller", [look(11, 0.8), look(11, 0.9), look(11, 0.8), look(12, 0.1)])
    other = drawn("controller")
    other.load_state_dict(whole.state_dict())
    assert [s.mix for s in other.stages] == [s.mix for s in whole.stages] and len(whole.stages) == 5
    assert [other.at(step, 40).mix for step in range(40)] == [
        whole.at(step, 40).mix for step in range(40)
    ]


def test_generalisation_is_late_if_success_jumps_after_a_long_time_without_any() -> None:
    def at(*values: float) -> list[Any]:
        return [look(11, value) for value in values]

    assert generalised_late(at(0, 0, 0, 0.1, 0.3, 0.9)) == 5
    assert generalised_late(at(0, 0.2, 0.4, 0.5, 0.7, 0.9)) is None
    assert generalised_late(at(0.9, 0.9, 0.9)) is None
    assert generalised_late(at(0, 0, 0)) is None
