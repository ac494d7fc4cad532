"""Every strategy on real models: the gradient is the one that differences show, evolutions go to
a champion, and a killed one to the same bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.evals.fitness import DomainFitness
from agent_forge.evals.model_under_test import measure
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evaluator import (
    BACKWARD,
    coefficient_gradient,
    item_losses,
)
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.phases.phase2_evomerge.journal import CACHE, JOURNAL
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.report import summary
from agent_forge.search import operators
from agent_forge.search.portfolio import STRATEGIES
from tests.support.evo_models import job, journal, outcome
from tests.support.extras import NEEDS_PYMOO
from tests.support.networks import shaken

pytestmark = pytest.mark.slow


def prepared(folder: Path, **settings: Any) -> EvolutionLoop:
    todo = job(folder, **settings)
    return EvolutionLoop(todo)


def smooth(run: EvolutionLoop) -> float:
    """The fitness with probabilities in place of right answers, without the constant parts."""
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    total = 0.0
    for domain, found in zip(fitness.domains, fitness.prepared, strict=True):
        with torch.no_grad():
            model = fitness.model_under_test.model.double()
            losses = item_losses(model, found.items, torch.device("cpu")).double()
        bits = float(losses.sum()) / float(torch.log(torch.tensor(2.0))) / sum(domain.sizes)
        total += 0.4 * (1 - bits / domain.unigram_bits) + 0.3 * float(torch.exp(-losses).mean())
    return total / len(fitness.domains)


@pytest.mark.parametrize("base", [True, False], ids=["base", "no base"])
def test_the_gradient_is_what_differences_show(tmp_path: Path, base: bool) -> None:
    run = prepared(tmp_path / "x", base=base, strategy="grad")
    groups, fitness = run.weights.groups.names, run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    rows = {group: [0.3, 0.5, 0.2] for group in groups}

    def put(coefficients: dict[str, list[float]]) -> None:
        made = operators.blend(run.search.space, "linear", coefficients)
        run.search.candidates[made.key] = made
        run.weights.fill(run.evaluator.model_under_test.model.float(), made.key)

    put(rows)
    found, tokens = coefficient_gradient(fitness, run.weights, 1, 0)
    assert tokens == BACKWARD * fitness.tokens
    assert all(p.grad is None for p in run.evaluator.model_under_test.model.parameters())
    for group in groups:
        for parent in range(3):
            ends = []
            for step in (1e-2, -1e-2):
                moved = list(rows[group])
                moved[parent] += step
                put({**rows, group: moved})
                ends.append(smooth(run))
            slope = (ends[0] - ends[1]) / 2e-2
            assert found[group][parent] == pytest.approx(slope, rel=0.02, abs=3e-5)


def test_parts_of_the_items_add_up_to_all(tmp_path: Path) -> None:
    run = prepared(tmp_path / "x", strategy="grad")
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    run.weights.fill(run.evaluator.model_under_test.model, run.search.survivors[-1].key)
    parts = [coefficient_gradient(fitness, run.weights, 4, turn) for turn in range(4)]
    assert sum(tokens for _, tokens in parts) == BACKWARD * fitness.tokens
    assert all(rows != parts[0][0] for rows, _ in parts[1:])
    again = coefficient_gradient(fitness, run.weights, 4, 4)
    assert again == coefficient_gradient(fitness, run.weights, 4, 0)


def test_our_own_network_is_differentiated_where_it_is_measured() -> None:
    model = shaken(0, "model.t_max=3")
    rows = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    items = [TokenizedItem(ids, [n > 1 for n in range(len(ids))]) for ids in rows]
    losses = item_losses(model, items, torch.device("cpu"))
    assert losses.tolist() == pytest.approx(measure(model, items, threshold=1.0).loss, rel=1e-4)
    losses.sum().backward()
    assert model.recursion.y_start.grad is not None and model.embedding.weight.grad is not None


FEW: dict[str, Any] = {"population_size": 4, "generations": 2}


SOAK = pytest.mark.soak  # auto has the steps of most of them


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[SOAK] * (n != "auto") + [NEEDS_PYMOO] * (n == "nsga2"))
        for n in STRATEGIES
        if n != "spec"
    ],
)
def test_a_killed_evolution_ends_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    whole = run_evolution(job(tmp_path / "whole", strategy=name, **FEW))
    best = max(whole.loop.curve)
    assert (
        whole.loop.curve[-1] == best and summary(whole.loop)["best_fitness"] >= whole.loop.curve[0]
    )
    lines = (whole.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    wanted = outcome(whole.loop.folder)
    for cut in (3, len(lines) // 2, len(lines) - 3):
        folder = tmp_path / f"cut{cut}"
        shutil.copytree(whole.loop.folder, folder, ignore=shutil.ignore_patterns("champion"))
        (folder / JOURNAL).write_bytes(b"".join(lines[:cut]) + lines[cut][:30])
        shutil.rmtree(folder / "weights")
        (folder / CACHE).unlink()
        assert outcome(run_evolution(resume_inputs(folder, None, None)).loop.folder) == wanted


def test_tokens_are_counted_and_gradients_count_thrice(tmp_path: Path) -> None:
    done = run_evolution(
        job(tmp_path / "x", strategy="grad", gradient_share=0.5, racing=False, **FEW)
    )
    scored, slopes = journal(done.loop.folder), journal(done.loop.folder, "gradient")
    one = scored[0]["tokens"]
    assert one > 0 and {r["tokens"] for r in scored} == {one}
    assert slopes and all(one < r["tokens"] < 2 * one for r in slopes)
    assert all(r["cpu"] >= 0 for r in (*scored, *slopes))
    history = outcome(done.loop.folder)["history"]
    assert history[-1]["tokens"] == sum(r["tokens"] for r in (*scored, *slopes))
    assert history[0]["tokens"] < history[1]["tokens"]


def test_a_budget_of_evaluations_can_be_raised(tmp_path: Path) -> None:
    more = {"strategy": "cma-es", "population_size": 4, "generations": 9}
    short = run_evolution(job(tmp_path / "x", max_evaluations=10, **more))
    assert short.loop.reason == "evaluations" and len(journal(short.loop.folder)) == 10
    run_evolution(job(tmp_path / "x", max_evaluations=14, **more))
    whole = run_evolution(job(tmp_path / "y", max_evaluations=14, **more))
    found, wanted = outcome(tmp_path / "x"), outcome(whole.loop.folder)
    assert found["model.safetensors"] == wanted["model.safetensors"]
    assert found["history"] == wanted["history"]


def test_one_family_with_a_coefficient_a_parent(tmp_path: Path) -> None:
    more = {"blend_method": "ties", "per_layer": False, "density": 0.4}
    done = run_evolution(job(tmp_path / "x", strategy="cma-es", **more, **FEW))
    blends = [
        r["operation"] for r in journal(done.loop.folder) if r["operation"]["kind"] == "blend"
    ]
    assert blends and all(r["method"] == "ties" for r in blends)
    assert all(len({tuple(row) for row in r["coefficients"].values()}) == 1 for r in blends)


@NEEDS_PYMOO
def test_the_front_is_in_the_log(tmp_path: Path) -> None:
    done = run_evolution(job(tmp_path / "x", strategy="nsga2", **FEW))
    front = outcome(done.loop.folder)["history"][-1]["front"]
    assert front and all(set(told) == {"add", "next", "twice"} for told in front.values())


def test_gradients_beat_the_average_quickly(tmp_path: Path) -> None:
    done = run_evolution(job(tmp_path / "x", strategy="grad", population_size=8, generations=1))
    scores = {r["operation"]["kind"]: r["score"]["fitness"] for r in journal(done.loop.folder)}
    assert done.loop.curve[-1] > scores["average"] + 0.01


@pytest.mark.parametrize("name", ["grad", "nsga2"])
def test_a_fitness_of_ones_own_has_no_gradient_and_no_domains(name: str) -> None:
    with pytest.raises(ValueError, match="your own fitness"):
        EvoMergeSettings(strategy=name, fitness="mine:score")


def test_auto_does_without_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "def size(m): return -float(sum(p.abs().sum() for p in m.parameters()))"
    )
    monkeypatch.chdir(tmp_path)
    done = run_evolution(job(tmp_path / "x", strategy="auto", fitness="own:size", **FEW))
    assert {r["tokens"] for r in journal(done.loop.folder, "gradient")} == {0}
    assert done.loop.curve[-1] >= max(r["score"]["fitness"] for r in journal(done.loop.folder))


def test_a_strategy_that_is_not_there_is_refused() -> None:
    from agent_forge.phases.phase2_evomerge.inputs import load_settings

    with pytest.raises(ConfigError, match="strategy"):
        load_settings(None, ["strategy=annealing"], {})
    assert load_settings(None, ["strategy=cma-es"], {})[0].strategy == "cma-es"
    assert load_settings(None, ["generations=3", "shift_sigma=0.2"], {})[0].strategy == "auto"
    assert load_settings("fast", [], {})[0].strategy == "auto"
    with pytest.raises(ConfigError, match="'auto': it acts in spec and ga"):
        load_settings(None, ["strategy=auto", "elite_count=3"], {})
    assert load_settings(None, ["elite_count=3", "population_size=12"], {})[0].strategy == "spec"
