"""Phase 5: it assesses, trains at the edge and beyond, takes back, and survives being killed."""

from __future__ import annotations

import ast
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.data.traces import Trace
from agent_forge.errors import ConfigError
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.phases.phase5_forge import rounds
from agent_forge.phases.phase5_forge.edge import (
    HINTS,
    EdgeDraw,
    EdgeTasks,
    edge_tasks,
    generalised_late,
    source_name,
    with_larger_sizes,
)
from agent_forge.phases.phase5_forge.own_thoughts import OwnThoughts
from agent_forge.store.records import read_metadata
from tests.support import quietstar_runs
from tests.support.forge_runs import (
    KEPT,
    PHASE,
    as_if_able,
    config,
    falling,
    five_of_six,
    made,
    run,
)
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


def test_it_tells_edges_and_rounds(reference: tuple[Path, dict[str, Any]]) -> None:
    result = reference[1]["results"]["forge"]
    edges, found = result.artifacts["tables"]
    models = ("input", "control", "forged")
    assert [row[:3] for row in edges[1:4]] == [["tot4", "digits", name] for name in models]
    assert edges[1][3] == 6 and edges[4][3] == 4  # what both families were taught
    assert [row[:3] for row in found[1:]] == [[1, "tot4", "9 to 9"], [1, "swap4", "5 to 6"]]
    assert all(row[3:5] == [1.0, 1.0] and row[-1] == "kept" for row in found[1:])
    assert set(result.artifacts["solved"]["forged"]) == {"tot4", "swap4"}
    assert result.artifacts["looks"] and not result.artifacts["walls"]
    assert result.metrics["retention"] == 1.0 and result.metrics["levels_mastered"] == 0
    card = (result.artifacts["models"][0].path / "README.md").read_text()
    assert "| family | in | model | reach |" in card and "the edge surely rose in no family" in card


def test_what_is_newly_solved_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_able(monkeypatch)
    looks: list[str] = []

    def solved(own: EdgeTasks, model: Any, split: str, asked: Any) -> list[bool]:
        looks.append(split)
        later = "edge" in str(sorted((folder(tmp_path) / "phase5_forge").rglob("*")))
        return [size <= own.taught[1] + later for size, _ in asked]

    monkeypatch.setattr(EdgeTasks, "solved", solved)
    result = run(tmp_path, *KEPT, f"{PHASE}.beyond=none")["results"]["forge"]
    shown = result.artifacts["newly_solved"]
    assert [row[0][:5] for row in shown[1:]] == ["`tot ", "`tot ", "`swp ", "`swp "]
    assert len(shown[1][0].split(":")[1]) == 8  # seven digits and the closing mark
    assert "tot4 from 6 to 7 digits" in result.artifacts["headline"]["verdict"]


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
    monkeypatch.setattr(rounds.EdgeTraining, "solved", falling(40, ("round_1",)))
    lost = run(tmp_path / "a")["results"]["forge"]
    (own,) = lost.artifacts["rounds"]
    assert own["taken_back"].startswith("lost tot4 -40.0 points, swap4 -40.0 points")
    run(tmp_path / "b", f"{PHASE}.beyond=none")
    assert made(tmp_path / "a") == made(tmp_path / "b")
    events = (folder(tmp_path / "a") / "events.jsonl").read_text()
    assert events.count("rolled_back") == 1


def test_a_loss_that_may_be_chance_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of a hundred are more than two per cent, and may be chance."""
    as_if_able(monkeypatch)
    monkeypatch.setattr(rounds.EdgeTraining, "solved", falling(3))
    (own,) = run(tmp_path)["results"]["forge"].artifacts["rounds"]
    assert not own["taken_back"]


def test_training_at_the_edge_that_costs_too_much_is_taken_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    monkeypatch.setattr(rounds.EdgeTraining, "solved", falling(40))
    result = run(tmp_path, f"{PHASE}.beyond=none")["results"]["forge"]
    place = tmp_path / "sessions" / "before" / "phase4_bitnet" / "packed"
    given = open_model(place).network.state_dict()
    assert all(torch.equal(t, given[n]) for n, t in result.model.state_dict().items())
    assert "taken back: lost tot4 -40.0 points" in result.artifacts["headline"]["verdict"]


def test_thoughts_on_which_too_few_cuts_agree_are_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    monkeypatch.setattr(rounds, "by_splitting", five_of_six)
    result = run(tmp_path, *KEPT)["results"]["forge"]
    (own,) = result.artifacts["rounds"]
    assert "enough thoughts of its own" in own["taken_back"]
    told = own["families"]["tot4"]
    assert (told["kept"], told["asked"], told["taught"]) == (5, 6, False) and not told["after"]
    assert result.artifacts["tables"][1][1][-2:] == ["-", "not taught"]


def test_beyond_the_edge_there_are_no_worked_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two rounds the sizes grow, and worked examples end where the edge was taught."""
    as_if_able(monkeypatch)
    asked: dict[str, set[int]] = {}
    source = EdgeTasks.source

    def noted(own: EdgeTasks, name: str, items: Any, hints: int = 0) -> Any:
        asked.setdefault(own.name, set()).update(size for size, _ in items)
        return source(own, name, items, hints)

    monkeypatch.setattr(EdgeTasks, "source", noted)
    result = run(tmp_path, *KEPT, f"{PHASE}.rounds=2")["results"]["forge"]
    assert len(result.artifacts["rounds"]) == 2
    assert result.artifacts["rounds"][1]["families"]["swap4"]["sizes"] == [7, 8, 9]
    assert max(asked["tot4"]) == 6 + 2 and max(asked["swap4"]) == 4 + 2


@pytest.mark.slow
def test_whole_weights_come_back_in_few_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    result = run(tmp_path, *KEPT, f"{PHASE}.weights=whole")["results"]["forge"]
    place = tmp_path / "sessions" / "before" / "phase4_bitnet" / "packed"
    given = open_model(place).network
    assert result.model.packing == given.packing
    assert any(
        not torch.equal(t, given.state_dict()[n]) for n, t in result.model.state_dict().items()
    )


@pytest.mark.slow
def test_killed_with_a_self_model_and_dreams_it_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    sets = (*KEPT, f"{PHASE}.self_model_weight=0.1", f"{PHASE}.dream_share=0.3")

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == "round_1" and record.get("step") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: run(tmp_path / "a", *sets, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path / "a"))) == 0
    run(tmp_path / "b", *sets)
    assert made(tmp_path / "a") == made(tmp_path / "b")
    names = {name for _, _, values in metrics(tmp_path / "b") for name in values}
    assert "edge/train/self_model_error" in names


def test_a_controller_draws_families_without_thoughts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (f"{PHASE}.edge_families=[copy, swap4]", f"{PHASE}.draw=controller")
    result = run(tmp_path, *KEPT, *sets)["results"]["forge"]
    assert result.artifacts["looks"] and set(result.artifacts["walls"]) <= {"copy", "swap4"}


@pytest.mark.parametrize("broken_split", ["selection", "verdict"])
def test_a_family_that_cannot_be_asked_is_told_of_and_the_run_goes_on(
    broken_split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    solved = EdgeTasks.solved

    def broken(own: EdgeTasks, model: Any, split: str, asked: Any) -> list[bool]:
        if own.name == "swap4" and split == broken_split:
            raise ZeroDivisionError("the verifier fell over")
        return solved(own, model, split, asked)

    monkeypatch.setattr(EdgeTasks, "solved", broken)
    result = run(tmp_path, *KEPT)["results"]["forge"]
    told = "ZeroDivisionError: the verifier fell over"
    assert result.artifacts["problems"] == {"swap4": told}
    assert f"swap4: {told}" in result.artifacts["headline"]["verdict"]
    assert {row[0] for row in result.artifacts["tables"][0][1:]} == {"tot4"}


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


def sized(name: str, taught: tuple[int, int], most: int, row: int, tokenizer: Any) -> EdgeTasks:
    return with_larger_sizes(edge_tasks(name, taught, 1, tokenizer, 0), most, row)


def test_sizes_end_where_items_no_longer_fit_a_row(tokenizer: Tokenizer) -> None:
    own = sized("chain", (2, 5), 40, 256, tokenizer)
    assert own.sizes[0] == 2 and 5 <= own.sizes[-1] < 40
    tokens = [len(own.item(own.task(own.sizes[-1], "train", n)).ids) for n in range(20)]
    more = [len(own.item(own.task(own.sizes[-1] + 1, "train", n)).ids) for n in range(20)]
    assert max(tokens) < 256 <= max(more)
    assert sized("tot4", (4, 10), 12, 640, tokenizer).sizes == range(4, 13)
    assert sized("digit_shift", (3, 7), 99, 640, tokenizer).sizes == range(3, 25)
    with pytest.raises(ConfigError, match="items of 10 digits do not fit rows of 32 tokens"):
        sized("tot4", (4, 10), 12, 32, tokenizer)
    assert edge_tasks("tot4", (), 20, tokenizer, 0).taught == (3, 20)


def test_hints_give_the_first_claims_and_leave_the_rest_to_learn(tokenizer: Tokenizer) -> None:
    own = sized("swap4", (2, 5), 8, 640, tokenizer)
    task = own.task(6, "train", 0)
    plain, hinted = own.item(task), own.item(task, 3)
    assert plain.ids == hinted.ids
    learned = [sum(item.asked) for item in (plain, own.item(task, 1), hinted, own.item(task, 5))]
    assert learned == sorted(learned, reverse=True) and len(set(learned)) == 4
    at = hinted.asked.index(True)
    text = tokenizer.decode(list(hinted.ids[at:]), specials=True)
    assert text.count("<step>") == 3 and hinted.asked[at:] == plain.asked[at:]
    short = own.item(own.task(2, "train", 0), 5)  # the last claim is always left
    assert (
        tokenizer.decode(list(short.ids[short.asked.index(True) :]), specials=True)[:6] == "<step>"
    )


@pytest.mark.parametrize("name", ["chain", "tot4", "swap4", "odds", "digit_shift", "copy"])
def test_a_size_is_what_can_be_counted(name: str, tokenizer: Tokenizer) -> None:
    own = edge_tasks(name, (), 30, tokenizer, 0)
    for size in (own.taught[0], own.taught[0] + 3, own.taught[1]):
        start, *rest = ast.literal_eval(own.task(size, "train", 0).operands)
        counted = len(rest) if own.thinks else len(rest[0] if rest else start)
        assert counted == size


def test_code_is_graded_by_running_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = edge_tasks("code_number", (), 1, tokenizer, 0)
    items = [own.task(1, "verdict", n) for n in range(2)]
    said = [f"# another way to write it\n{items[0].answer}", "def solve(n):\n    return None"]
    monkeypatch.setattr(Thinker, "answers", lambda self, asked, thoughts, tokens: said)
    network = ForgeNetwork(config().model)
    assert own.solved(network, "verdict", [(1, 0), (1, 1)]) == [True, False]


def test_the_control_learns_nothing_of_what_this_phase_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sizes at the edge nor own thoughts, though the model learned both by then."""
    as_if_able(monkeypatch)
    learned: dict[str, dict[str, str]] = {}
    fit = rounds.EdgeTraining._fit

    def noting(own: Any, model: Any, network: Any, draw: Any, sources: Any, stage: str, *a: Any):  # type: ignore[no-untyped-def]
        learned[stage] = {source.name: source.fingerprint() for source in sources}
        if stage == "control":
            for name, family in own.families.items():
                asked = rounds._in_turn(family.taught, max(1, own.settings.examples // 4))
                known = family.source(f"{name}, known sizes", asked)
                assert learned[stage][known.name] == known.fingerprint()
        fit(own, model, network, draw, sources, stage, *a)

    monkeypatch.setattr(rounds.EdgeTraining, "_fit", noting)
    run(tmp_path, *KEPT, f"{PHASE}.control=true")
    assert "round 1" in learned["round_1"] and "round 1" not in learned["control"]
    known = "tot4, known sizes"
    assert learned["control"][known] != learned["round_1"][known]


def test_programs_that_passed_are_learned_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of code is not split, and learns from what it wrote itself, not from our answers."""
    as_if_able(monkeypatch)
    learned: list[str] = []

    def ran(thinker: Any, items: Any, samples: int, seed: int) -> OwnThoughts:
        own = [replace(item, answer=f"# own\n{item.answer}") for item in items[:2]]
        return OwnThoughts([Trace(item, "step", ()) for item in own], len(items), 2)

    def source(own: rounds.EdgeTraining, name: str, kept: Any) -> Any:
        found = written(own, name, kept)
        learned.append(own.corpus.tokenizer.decode(found.tokens.tolist()))
        return found

    written = rounds.EdgeTraining._source
    monkeypatch.setattr(rounds, "by_running", ran)
    monkeypatch.setattr(rounds.EdgeTraining, "_source", source)
    sets = (f"{PHASE}.edge_families=[code_number]", f"{PHASE}.row_tokens=512", *KEPT)
    (own,) = run(tmp_path, *sets)["results"]["forge"].artifacts["rounds"]
    found = own["families"]["code_number"]
    assert (found["kept"], found["asked"], found["taught"]) == (2, 6, True)
    assert own["taken_back"] == "" and learned[0].count("# own") == 2


def drawn(
    kind: str, seen: list[Any] | None = None, looks: int = 4, *, hints: bool = True
) -> EdgeDraw:
    sizes = {"tot4": [11, 12, 13, 14]}
    hinted = frozenset(sizes) if hints else frozenset[str]()
    unused = {"look": lambda s, n: (0.0, {}), "steps": 40, "row_tokens": 64}
    return EdgeDraw(kind, {"old": 0.4}, sizes, hinted, looks=looks, seen=seen or [], **unused)


def shares(draw: EdgeDraw) -> dict[str, float]:
    return {k: round(v, 6) for k, v in draw.at(39, 40).mix.items() if k != "old"}


def look(size: int, success: float) -> Any:
    return {"tot4": {str(size): success}}


def test_a_uniform_draw_takes_all_sizes_and_an_easy_one_more_and_more() -> None:
    names = [source_name("tot4", size) for size in (11, 12, 13, 14)]
    assert shares(drawn("uniform")) == dict.fromkeys(names, 0.15)
    for looks, known in enumerate((names[:1], names[:2], names[:3], names)):
        assert set(shares(drawn("easy_to_hard", [{}] * looks))) == set(known)
    for kind in ("uniform", "easy_to_hard", "controller"):
        assert sum(drawn(kind).at(0, 40).mix.values()) == pytest.approx(1)


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
    overcome = [*failing, *[look(11, 0.9)] * (len(HINTS) + 2)]
    assert not drawn("controller", overcome).walls
    assert list(shares(drawn("controller", failing, hints=False))) == ["tot4 11"]


def test_a_draw_that_is_restored_goes_on_as_it_would_have() -> None:
    whole = drawn("controller", [look(11, 0.8), look(11, 0.9), look(11, 0.8), look(12, 0.1)])
    other = drawn("controller")
    other.load_state_dict(whole.state_dict())
    assert [s.mix for s in other.stages] == [s.mix for s in whole.stages] and len(whole.stages) == 5
    assert whole.stages[0] is whole.stages[1]  # nothing changed: the losses will not either
    easy = drawn("easy_to_hard", [{}, {}])
    assert [len(s.mix) for s in easy.stages] == [2, 3, 4]
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
