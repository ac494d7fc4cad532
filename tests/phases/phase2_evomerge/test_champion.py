"""An honest champion: what counts nothing, who is chosen at the end, what it is compared with."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data.dataset_rows import Example
from agent_forge.errors import ConfigError, Interrupted
from agent_forge.evals.domains import Domain
from agent_forge.evals.fitness import DomainFitness, FitnessScore
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.phases.phase2_evomerge.config import WEIGHTS, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.phases.phase2_evomerge.journal import EvolutionJournal
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.report import ENSEMBLE, ORACLE
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.evo_models import (
    FASTEST,
    PARENTS,
    evo_line,
    family,
    job,
    journal,
    outcome,
    use_pool,
)
from tests.support.toy_runs import exit_code, forked

AUTO: dict[str, Any] = {"strategy": "auto", "generations": 1}


def domain(name: str, choices: int = 0, exact: bool = True) -> Domain:
    offered = tuple(f"c{i}" for i in range(choices))
    examples = tuple(
        Example(f"{i}?", f"c{i % max(choices, 1)}", choices=offered) for i in range(200)
    )
    return Domain(name, examples, exact)


@pytest.fixture(scope="module")
def fitness() -> DomainFitness:
    domains = [domain("free"), domain("four", 4), domain("text", exact=False)]
    return DomainFitness(open_model_under_test(family() / "add"), domains, WEIGHTS, {})


# -- what counts nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "four", "floor"),
    [
        ((0, 0), (50, 50), ["free", "four"]),
        ((3, 1), (58, 50), ["free", "four"]),  # what one in 200, and one in 4, explains
        ((4, 0), (70, 50), []),  # one parent above chance is enough
        ((0, 0), (70, 0), ["free"]),
    ],
)
def test_where_chance_explains_all_parents(
    fitness: DomainFitness, free: tuple[int, int], four: tuple[int, int], floor: list[str]
) -> None:
    raws = [
        {"free/accuracy": a / 200, "four/accuracy": b / 200}
        for a, b in zip(free, four, strict=True)
    ]
    assert fitness.at_floor(raws) == floor
    alone = DomainFitness(fitness.model_under_test, fitness.domains, {"accuracy": 1.0}, {})
    assert alone.at_floor(raws) == []  # something has to count


def test_what_is_left_out_changes_no_fitness(fitness: DomainFitness) -> None:
    shape = {"speed": 0.5, "memory": 0.5}

    def score(free: float, four: float) -> FitnessScore:
        raw = {f"{d.name}/bits_per_byte": 2.0 for d in fitness.domains}
        return fitness.score_from(raw | {"free/accuracy": free, "four/accuracy": four}, shape)

    fitness.leave_out(None)
    all_count, name = score(0.5, 0.5).fitness, fitness.name
    assert score(0.4, 0.5).fitness < all_count and min(map(min, fitness.rates()[:2])) > 0
    fitness.leave_out(["free"])
    assert score(0.4, 0.5).fitness == score(0.5, 0.5).fitness > score(0.5, 0.4).fitness
    assert [right > 0 for _, right in fitness.rates()] == [False, True, False]
    assert score(0.0, 0.625).parts["accuracy"] == pytest.approx(0.5)
    fitness.leave_out(["free", "four"])
    without = (0.4 * score(0, 0).parts["perplexity"] + 0.3 * 0.5) / 0.7
    assert score(0.4, 0.9).fitness == score(0.5, 0.5).fitness == pytest.approx(without)
    assert len({name, fitness.name}) == 2  # the cache tells them apart
    fitness.leave_out(None)
    assert fitness.name == name


def test_worse_than_counting_bytes_is_no_tie(fitness: DomainFitness) -> None:
    def score(bits: float) -> float:
        raw = {f"{d.name}/bits_per_byte": bits for d in fitness.domains}
        raw |= {"free/accuracy": 0.0, "four/accuracy": 0.0}
        return fitness.score_from(raw, {"speed": 0.5, "memory": 0.5}).parts["perplexity"]

    fitness.leave_out(None)
    assert score(20.0) == score(9.0) == 0.0
    fitness.leave_out([])
    assert -0.1 < score(20.0) < score(9.0) < 0 < score(1.0) < 1
    fitness.leave_out(None)


@pytest.mark.slow
def test_the_floor_is_known_before_other_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pool("inline", monkeypatch)
    loop = EvolutionLoop(job(tmp_path / "x", workers=2, racing=False, **AUTO))
    loop.run()
    lines = loop.journal.records
    floor = next(i for i, line in enumerate(lines) if line["record"] == "floor")
    origins = [line["origin"] for line in lines[1:floor]]
    assert origins == [*(f"parent {i}" for i in range(3)), "average"]
    assert lines[floor]["domains"] == loop.floor == ["add"]
    after = next(r for r in lines[floor:] if r["record"] == "candidate")
    counted = (after["score"]["raw"][f"{name}/accuracy"] for name in ("twice", "next"))
    assert after["score"]["parts"]["accuracy"] == pytest.approx(sum(counted) / 2)
    first = lines[1]  # a parent was measured before, and is told as all others are
    told = loop.evaluator.fitness.score_from(first["score"]["raw"], first["score"]["parts"])  # type: ignore[union-attr]
    assert loop.search.scores[first["key"]] == told.fitness != first["score"]["fitness"]


@pytest.mark.slow
def test_spec_and_what_was_begun_before_count_as_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_evolution(job(tmp_path / "spec", **FASTEST)).loop
    assert spec.floor is None and not journal(spec.folder, "floor")
    real = EvolutionJournal.begin
    with monkeypatch.context() as before:
        before.setattr(EvolutionJournal, "begin", lambda self, **rules: real(self))
        whole = run_evolution(job(tmp_path / "whole", **AUTO)).loop.folder
        candidates: list[Any] = []
        stop = lambda: len(candidates) > 5  # noqa: E731
        with pytest.raises(Interrupted):
            run_evolution(job(tmp_path / "x", **AUTO), listen=candidates.append, should_stop=stop)
    run_evolution(resume_inputs(tmp_path / "x", None, None))
    assert outcome(tmp_path / "x") == outcome(whole) and not journal(whole, "floor")


# -- finalists ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_holdout_chooses_among_the_best(tmp_path: Path) -> None:
    """Here it says the opposite of the search: the last of the finalists wins."""

    def evolved(folder: str, **more: Any) -> EvolutionLoop:
        loop = EvolutionLoop(job(tmp_path / folder, **AUTO, **more))
        evaluator = loop.evaluator

        def opposite() -> FitnessScore:
            return FitnessScore(-loop.search.scores[evaluator._filled])

        assert evaluator.holdout is not None
        evaluator.holdout.score = opposite  # type: ignore[method-assign]
        loop.run()
        return loop

    loop = evolved("x", finalists=3)
    hashes = {r["key"]: r["sha256"] for r in journal(loop.folder)}
    ranked = sorted(loop.search.scores.values(), reverse=True)
    best = loop.search.champion
    assert best is not None and best.key != loop.champion.key
    assert loop.search.scores[best.key] == ranked[0] > loop.search.scores[loop.champion.key]
    held = [r["key"] for r in journal(loop.folder, "holdout")]
    better = {
        hashes[k]
        for k, s in loop.search.scores.items()
        if s > loop.search.scores[loop.champion.key]
    }
    assert len(better) == 2 and better <= {hashes[key] for key in held}
    before = (loop.folder / "journal.jsonl").read_bytes()
    again = EvolutionLoop(job(loop.folder, **AUTO, finalists=3))
    again.evaluator.holdout.score = None  # type: ignore[method-assign,union-attr,assignment]
    again.run()
    assert again.champion.key == loop.champion.key
    assert (loop.folder / "journal.jsonl").read_bytes() == before
    one = evolved("y", finalists=1)
    assert one.champion is one.search.champion


def test_finalists_that_nothing_chooses_are_refused() -> None:
    for more in ({"strategy": "spec"}, {"strategy": "auto", "use_holdout_validation": False}):
        with pytest.raises(ValueError, match="finalists are chosen by the holdout"):
            EvoMergeSettings.model_validate({"finalists": 2, **more})


# -- ceilings and replicates ----------------------------------------------------------------------


@pytest.mark.slow
def test_replicates_go_on_after_a_kill(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**FASTEST, "replicates": 3, "strategy": "auto", "workers": 1}
    whole = run_evolution(job(tmp_path / "whole", **settings))
    report = whole.report
    assert report is not None
    notes: list[str] = []

    def kill(record: dict[str, Any]) -> None:
        notes.extend([record["text"]] if record["event"] == "note" else [])
        if record["event"] == "candidate" and notes and "search 3 of 3" in notes[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    died = forked(lambda: run_evolution(job(tmp_path / "x", **settings), listen=kill))
    assert exit_code(died) == -signal.SIGKILL
    assert journal(tmp_path / "x" / "replicate_3") and not (tmp_path / "x" / "champion").exists()
    assert len(journal(tmp_path / "x", "replicate")) == 1
    run_evolution(resume_inputs(tmp_path / "x", None, None))
    assert outcome(tmp_path / "x") == outcome(tmp_path / "whole")
    rows = report.replicates
    assert [row["seed"] for row in rows] == [1, 2, 3]
    won = sum(row["verdicts"]["plain average"] == "better" for row in rows)
    told = report.notes()[-1]
    assert told.startswith("of 3 searches (seeds 1, 2, 3) the champion beat the best parent in ")
    assert told.endswith(f"the plain average in {won}; the champion is that of seed 1")
    alone = job(tmp_path / "alone", seed=2, **{**settings, "replicates": 1})
    second = run_evolution(alone).report
    assert second is not None and rows[1]["fitness"] == second.champion.fitness
    overall = second.baselines["plain average"].comparison.overall
    assert rows[1]["gains"]["plain average"] == overall.to_json()
    saved = files.read_json(tmp_path / "x" / "champion" / "verdict.json")
    check_ceilings(saved)


def check_ceilings(verdict: dict[str, Any]) -> None:
    raws = {name: verdict["rivals"][name]["score"]["raw"] for name in PARENTS}
    oracle, ensemble = verdict["ceilings"][ORACLE], verdict["ceilings"][ENSEMBLE]
    assert set(oracle["parents"]) == set(PARENTS)
    for name, parent in oracle["parents"].items():
        key = f"{name}/bits_per_byte"
        assert oracle["raw"][key] == raws[parent][key]
        worst = max(raw[key] for raw in raws.values())
        assert ensemble["raw"][key] < worst and f"{name}/accuracy" not in ensemble["raw"]
    bits = verdict["rivals"]["plain average"]["comparison"]["overall"]["gains"]["bits_per_byte"]
    way = bits["reference"] - oracle["bits_per_byte"]
    assert verdict["share_of_oracle"] == pytest.approx(bits["value"] / way)
    assert f"went {verdict['share_of_oracle']:.0%} of the way" in " ".join(verdict["notes"])


def test_replicates_need_unseen_items(own: Path) -> None:
    with pytest.raises(ConfigError, match="replicates are compared on unseen items"):
        job(own / "x", fitness="own_fitness:size", replicates=2)


@pytest.mark.slow
def test_replicates_from_the_command_line(forge: Forge, tmp_path: Path) -> None:
    line = " ".join(evo_line("--replicates", "2"))
    planned = forge(f"{line} --dry-run --json").document
    assert planned["replicates"] == 2
    done = forge(line)
    assert done.code == 0 and "of 2 searches (seeds 1, 2)" in done.out, done.err
    assert "ceiling: ensemble of parents" in done.out and "(Holm)" in done.out
    again = forge("evo --resume x --replicates 3")
    assert again.code == 2


def test_a_budget_is_divided(tmp_path: Path) -> None:
    for replicates in (1, 3):
        made = job(tmp_path / f"{replicates}", time_budget_minutes=6.0, replicates=replicates)
        plan = EvolutionLoop(made).inputs.plan
        assert plan and plan.minutes == 6.0 / replicates
