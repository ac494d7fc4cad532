"""What is decided before an evolution, once: racing, precision, and the plan for a time budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent_forge.errors import ConfigError, DamagedFile, Interrupted
from agent_forge.evals import likelihood
from agent_forge.phases.phase2_evomerge import planning
from agent_forge.phases.phase2_evomerge.budget import EvaluationCosts, Planner
from agent_forge.phases.phase2_evomerge.config import BEGUN, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import (
    EvolutionInputs,
    load_settings,
    resume_inputs,
    with_default_budget,
)
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.loop import WITHOUT_EFFECT, EvolutionLoop
from agent_forge.phases.phase2_evomerge.planning import decided, plan_lines, plan_record, repeated
from agent_forge.store import files
from tests.support.evo_models import PARENTS, job, journal, outcome, use_pool

AUTO: dict[str, Any] = {"strategy": "auto", "workers": 1}
ITEMS = {split: dict.fromkeys(PARENTS, 70) for split in ("selection", "holdout", "verdict")}
COSTS = EvaluationCosts(1e5, 1e5, 2.0, 2.0, 0.1, dict.fromkeys(PARENTS, 9.0), ITEMS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine of a known speed; what is asked of it."""
    found: list[str] = []

    def probe(inputs: EvolutionInputs, device: str) -> EvaluationCosts:
        found.append(device)
        return COSTS

    monkeypatch.setattr(planning, "probe", probe)
    return found


def planned(folder: Path, **more: Any) -> EvolutionInputs:
    """An evolution for 70 seconds, whose plan has about 30 evaluations."""
    given = job(folder, **AUTO).settings.model_dump(exclude_unset=True)
    for name in ("generations", "fitness_subset_size"):
        del given[name]
    wanted = {**given, "time_budget_minutes": 1.17, **more}
    inputs = job(folder, **AUTO)
    return EvolutionInputs(**{**vars(inputs), "settings": EvoMergeSettings(**wanted)})


# -- racing and precision -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "racing"),
    [
        ({"strategy": "spec"}, False),
        ({"strategy": "auto"}, True),
        ({"strategy": "cma-es"}, True),
        ({"strategy": "auto", "racing": False}, False),
        ({"strategy": "spec", "racing": True}, True),
        ({"strategy": "auto", "fitness": "own_fitness:size"}, False),
    ],
)
def test_racing_is_decided(own: Path, given: dict[str, Any], racing: bool) -> None:
    found = decided(job(own / "x", **given)).settings
    assert (found.racing, found.mixed_precision) == (racing, False)


def test_only_large_networks_ask_for_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "faster_in_bf16", lambda: True)
    assert decided(job(tmp_path / "x", **AUTO)).settings.mixed_precision is False
    monkeypatch.setattr(likelihood, "LARGE", 1)
    assert decided(job(tmp_path / "x", **AUTO)).settings.mixed_precision is True
    assert decided(job(tmp_path / "x", **AUTO), "cuda").settings.mixed_precision is False
    assert decided(job(tmp_path / "x", strategy="spec")).settings.mixed_precision is False
    given = decided(job(tmp_path / "x", **AUTO, mixed_precision=False))
    assert given.settings.mixed_precision is False


def test_old_settings_have_the_fingerprint_that_they_had() -> None:
    """A default of today is no default of then."""
    old = EvoMergeSettings(**{**EvoMergeSettings.BEFORE, "strategy": "auto"})
    assert old.decisive(WITHOUT_EFFECT | old.unused) == {"strategy": "auto"}
    spec = EvoMergeSettings(strategy="spec", racing=False, mixed_precision=False)
    assert spec.decisive(WITHOUT_EFFECT | spec.unused) == {}
    expected = {"strategy": "auto", "auto_version": 2, "racing": True}
    second = EvoMergeSettings(auto_version=2, methods=[], racing=True, mixed_precision=False)
    assert second.decisive(WITHOUT_EFFECT | second.unused) == expected
    expected |= {"auto_version": 3, "methods": ["svc", "tsv_m"]}
    new = EvoMergeSettings(methods=["svc", "tsv_m"], racing=True, mixed_precision=False)
    assert new.decisive(WITHOUT_EFFECT | new.unused) == expected
    written = {**spec.model_dump(), "auto_version": 2, "methods": []}  # as spec was written then
    assert EvoMergeSettings(**written).strategy == "spec"


def test_spectral_methods_are_tried_unless_they_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decided(job(tmp_path / "x", **AUTO)).settings.methods == ["svc", "tsv_m"]
    assert decided(job(tmp_path / "x", strategy="grad")).settings.methods == []
    assert decided(job(tmp_path / "x", **AUTO, methods=[])).settings.methods == []
    monkeypatch.setattr(planning.spectral, "cost", lambda *given: (0, 200.0))
    assert decided(job(tmp_path / "x", **AUTO)).settings.methods == []


def test_an_auto_evolution_of_before_goes_on_as_it_was(tmp_path: Path) -> None:
    """Its record knows no versions; its journal has four combos and what followed them."""
    old = {**AUTO, "auto_version": 1, "racing": False, "mixed_precision": False, "generations": 1}
    whole = run_evolution(job(tmp_path / "whole", **old))
    folder = tmp_path / "x"
    folder.mkdir()
    lines = (whole.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join(lines[:13]))
    record = files.read_checked(whole.loop.folder / BEGUN)
    del record["settings"]["auto_version"]
    files.write_checked(folder / BEGUN, record)
    again = job(folder, strategy="auto", generations=1)  # the command that it was begun with
    assert (again.settings.auto_version, again.settings.racing) == (1, False)
    done = run_evolution(resume_inputs(folder, None, None))
    assert outcome(done.loop.folder) == outcome(whole.loop.folder)


def test_generation_0_races_against_the_best_of_parents_and_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {**AUTO, "fitness_subset_size": 64, "generations": 1}
    alone = run_evolution(job(tmp_path / "x", **more))
    first = [r for r in journal(alone.loop.folder) if r["generation"] == 0]
    assert [r["origin"] for r in first[:4]] == ["parent 0", "parent 1", "parent 2", "average"]
    assert not any(r.get("dropped") for r in first[:4]) and len(first) == 14
    best = max(r["score"]["fitness"] for r in first[:4])
    dropped = [r for r in first if r.get("dropped")]
    assert dropped and all(r["score"]["fitness"] < best for r in dropped)
    assert all(r["tokens"] < first[0]["tokens"] for r in dropped)
    use_pool("inline", monkeypatch)
    two = run_evolution(job(tmp_path / "y", **{**more, "workers": 2}))
    assert outcome(two.loop.folder) == outcome(alone.loop.folder)


# -- the plan -------------------------------------------------------------------------------------


def test_a_plan_is_made_once_and_kept(tmp_path: Path, asked: list[str]) -> None:
    ready = decided(planned(tmp_path / "x"), spent_s=2.0)
    plan = ready.plan
    assert plan is not None and asked == ["cpu"] and decided(ready) is ready
    assert ready.settings.max_evaluations == plan.max_evaluations >= 20
    assert len(ready.splits["selection"][0].examples) == plan.fitness_subset_size == 64
    assert plan.spent_s >= 2.0 and ready.settings.verdict_items == 30  # which was given

    def stop() -> bool:
        return (ready.folder / JOURNAL).exists() and len(journal(ready.folder)) > 14

    with pytest.raises(Interrupted):
        run_evolution(ready, should_stop=stop)
    assert files.read_checked(ready.folder / BEGUN)["plan"] == plan.to_json()
    again = resume_inputs(ready.folder, None, None)
    assert again.plan == plan and decided(again) is again
    named = job(tmp_path / "x", **AUTO, time_budget_minutes=1.17)  # the command once more
    assert named.plan == plan and named.settings.max_evaluations == plan.max_evaluations
    done, whole = run_evolution(again), run_evolution(decided(planned(tmp_path / "y"), spent_s=2.0))
    assert outcome(done.loop.folder) == outcome(whole.loop.folder)
    assert len(asked) == 2  # once for each folder


def test_it_can_be_repeated_without_a_clock(tmp_path: Path, asked: list[str]) -> None:
    done = run_evolution(planned(tmp_path / "x"))
    sets = repeated(done.loop.inputs)
    again = run_evolution(job(tmp_path / "y", **AUTO, **{**sets, "time_budget_minutes": 0.0}))
    found, wanted = outcome(again.loop.folder), outcome(done.loop.folder)
    assert found == wanted and again.loop.inputs.plan is None


def test_the_plan_is_told(tmp_path: Path, asked: list[str]) -> None:
    told: list[dict[str, Any]] = []
    ready = decided(planned(tmp_path / "x"))
    lines = "\n".join(plan_lines(ready))
    for word in ("1.17 minutes", "100,000 tokens/s", "evaluations", "verdict", "max_evaluations="):
        assert word in lines
    record = plan_record(ready)
    assert record["minutes"]["all"] == 1.17 and record["repeat"]["racing"] is True
    assert record["memory_bytes"] > 0 and record["detectable_gain"] > 0
    run_evolution(ready, listen=told.append)
    notes = [r["text"] for r in told if r["event"] == "note"]
    assert notes[-len(plan_lines(ready)) :] == plan_lines(ready)
    assert any("answers for the verdict" in note for note in notes)


def test_a_plan_that_cannot_be_read_is_damage(tmp_path: Path, asked: list[str]) -> None:
    folder = run_evolution(planned(tmp_path / "x")).loop.folder
    record = files.read_checked(folder / BEGUN)
    for wrong in ({"minutes": 1}, "soon", {**record["plan"], "costs": 3}):
        files.write_checked(folder / BEGUN, {**record, "plan": wrong})
        with pytest.raises(DamagedFile, match="plan"):
            resume_inputs(folder, None, None)


def test_other_minutes_or_generations_are_planned_anew(tmp_path: Path, asked: list[str]) -> None:
    folder = run_evolution(planned(tmp_path / "x")).loop.folder
    more = decided(resume_inputs(folder, None, 3.0))
    begun = files.read_checked(folder / BEGUN)["plan"]
    assert more.plan is not None and more.plan.minutes == 3.0
    assert more.settings.max_evaluations > begun["max_evaluations"]
    assert more.settings.fitness_subset_size == begun["fitness_subset_size"]
    longer = decided(resume_inputs(folder, 60, None))
    found = longer.settings
    assert (found.generations, found.max_evaluations, found.time_budget_minutes) == (60, 0, 0.0)
    assert len(asked) == 1


def test_an_evolution_without_a_plan_goes_on_without(tmp_path: Path, asked: list[str]) -> None:
    folder = run_evolution(job(tmp_path / "x", generations=0)).loop.folder
    assert decided(resume_inputs(folder, None, 5.0)).plan is None and not asked


def test_the_real_probe_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PROBE_S", 0.1)
    inputs = decided(job(tmp_path / "x", **AUTO, racing=True, mixed_precision=True))
    costs = planning.probe(inputs, "cpu")
    assert costs.items["selection"]["add"] > 24  # more than were asked for until now
    times = (costs.tokens_per_s, costs.exact_tokens_per_s, costs.merge_s, costs.combo_s)
    assert min(times) > 0 and min(costs.tokens.values()) > 2 and costs.open_s > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="too few"):
        decided(planned(tmp_path / "x", time_budget_minutes=1e-4))


def test_60_minutes_unless_something_bounds_it(tmp_path: Path) -> None:
    def minutes(config: str | None, *sets: str) -> float:
        settings, _ = load_settings(config, sets, {})
        return with_default_budget(settings, tmp_path, 60.0).time_budget_minutes

    assert minutes(None) == minutes("speed") == minutes(None, "strategy=spec") == 60.0
    bounds = ("generations=3", "max_evaluations=9", "fitness=own:f")
    assert [minutes(None, text) for text in bounds] == [0.0, 0.0, 0.0]
    assert (minutes("fast"), minutes(None, "time_budget_minutes=5")) == (0.0, 5.0)
    (tmp_path / BEGUN).write_text("{}")  # goes on with what it has
    assert minutes(None) == 0.0


# -- the clock ------------------------------------------------------------------------------------


def test_the_clock_stops_at_a_count_which_stays(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a generation; killed or resumed, it ends there again, and more minutes go on."""
    given = {"fitness_subset_size": 24}
    whole = run_evolution(planned(tmp_path / "whole", **given, time_budget_minutes=1.5))

    def elapsed(self: EvolutionLoop) -> float:
        return 1e6 if len(self.search.scores) >= 15 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(EvolutionLoop, "elapsed", elapsed)
        stopped = run_evolution(planned(tmp_path / "x", **given))
    (note,) = journal(stopped.loop.folder, "stopped")
    assert note["evaluations"] == len(stopped.loop.search.scores) == 15
    assert stopped.loop.reason == "time budget"
    wanted = outcome(stopped.loop.folder)
    again = run_evolution(resume_inputs(stopped.loop.folder, None, None))
    assert (again.loop.reason, outcome(again.loop.folder)) == ("time budget", wanted)
    more = run_evolution(resume_inputs(stopped.loop.folder, None, 1.5))
    assert more.loop.reason == whole.loop.reason
    assert outcome(more.loop.folder)["lineage.json"] == outcome(whole.loop.folder)["lineage.json"]


def test_parents_and_average_are_measured_whatever_the_clock_says(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EvolutionLoop, "elapsed", lambda self: 1e6)
    done = run_evolution(planned(tmp_path / "x"))
    assert len(journal(done.loop.folder)) == 4 and done.report is not None


def test_an_older_stop_after_a_generation_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_evolution(job(tmp_path / "x", generations=0)).loop.folder
    with (folder / JOURNAL).open("a") as journal_file:
        journal_file.write('{"record":"stopped","generation":0,"budget":5.0}\n')
    again = run_evolution(resume_inputs(folder, 3, 5.0))
    assert (again.loop.reason, len(again.loop.curve)) == ("time budget", 1)


# -- what is told meanwhile -----------------------------------------------------------------------


def test_every_piece_of_work_is_told_with_the_time_it_takes(
    tmp_path: Path, asked: list[str]
) -> None:
    told: list[dict[str, Any]] = []
    run_evolution(planned(tmp_path / "x"), listen=told.append)
    works = [r for r in told if r["event"] == "work"]
    assert all(r["expected_s"] > 0 for r in works)
    for kind in ("candidate 1 of", "gradient 1", "holdout"):
        assert any(kind in r["what"] for r in works)
    assert any(r["event"] == "tokens" and r["done"] > 0 for r in told)
    verdicts = [r for r in told if r["event"] == "verdict"]
    assert [r["number"] for r in verdicts] == [*range(1, 8)]
    assert {r["models"] for r in verdicts} == {7} and verdicts[0]["expected_s"] > 0


def test_the_time_left_goes_by_the_plan(tmp_path: Path, asked: list[str]) -> None:
    told: list[dict[str, Any]] = []
    done = run_evolution(planned(tmp_path / "x", early_stopping=False), listen=told.append)
    records = [r for r in told if r["event"] == "generation"]
    plan = done.loop.inputs.plan
    assert plan is not None and records[-1]["eta_s"] == pytest.approx(plan.verdict_s)
    first = records[0]
    planner = Planner(plan.costs, planning.shape_of(done.loop.inputs))
    spent, whole = (
        planner.search_seconds(n, plan.fitness_subset_size)
        for n in (first["evaluations"], plan.max_evaluations)
    )
    left = first["elapsed_s"] * (whole - spent) / spent + plan.verdict_s
    assert first["eta_s"] == pytest.approx(left) and math.isfinite(left)
    assert set(first["scores"]) == set(PARENTS) and first["tokens_per_s"] > 0


def test_texts_to_teach_with_stay_when_a_plan_changes_the_items(
    tmp_path: Path, asked: list[str]
) -> None:
    texts = tmp_path / "more.jsonl"
    texts.write_text("".join(f'{{"text": "one more text, number {n}"}}\n' for n in range(9)))
    inputs = planned(tmp_path / "x", heal=0.1, heal_data=[str(texts)])
    found = decided(inputs)
    assert found.settings.fitness_subset_size != inputs.settings.fitness_subset_size
    assert len(found.splits["heal"][0].examples) == 9


@pytest.mark.slow
def test_fewer_minutes_keep_what_was_measured(tmp_path: Path, asked: list[str]) -> None:
    """Else another champion would replace the one that is there."""
    folder = tmp_path / "x"
    run_evolution(planned(folder, early_stopping=False))
    weights = folder / "champion" / "model.safetensors"
    before, scores = files.sha256_of(weights), len(journal(folder))
    again = decided(resume_inputs(folder, None, 1.0))
    assert again.settings.max_evaluations == scores
    run_evolution(again)
    assert len(journal(folder)) == scores and files.sha256_of(weights) == before
    assert resume_inputs(folder, None, None).settings.max_evaluations == scores


@pytest.mark.slow
def test_nobody_is_dropped_where_the_fitness_has_floors(tmp_path: Path) -> None:
    """Below a floor the fitness is 0: whoever meets it may lose elsewhere and still be better."""
    how: dict[str, Any] = {**AUTO, "generations": 0, "racing": True, "fitness_subset_size": 100}
    for floors, drops in (({}, True), ({"add/bits_per_byte": 0.001}, False)):
        folder = tmp_path / f"{drops}"
        run_evolution(job(folder, **how, fitness_floors=floors))
        assert any(r.get("dropped") for r in journal(folder)) == drops


def test_a_gradient_whose_activations_are_computed_again_is_the_same(tmp_path: Path) -> None:
    rows = []
    for again in (False, True):
        folder = tmp_path / str(again)
        given = {"strategy": "grad", "generations": 1, "gradient_checkpointing": again}
        run_evolution(job(folder, **given))
        rows.append([r["rows"] for r in journal(folder, "gradient")])
    assert rows[0] and rows[0] == rows[1]
    with pytest.raises(ValidationError, match="only grad and auto take gradients"):
        EvoMergeSettings(strategy="spec", gradient_checkpointing=True)
