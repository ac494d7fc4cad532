"""Large candidates: batches to threads, weights in bfloat16, the verdict in single precision."""

from __future__ import annotations

import base64
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_forge.evals import likelihood
from agent_forge.evals.fitness import SHARES, DomainFitness
from agent_forge.phases.phase2_evomerge import evaluator
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.parallel import ParallelEvaluator
from agent_forge.store import files
from tests.support.evo_models import job, journal, outcome

LARGE: dict[str, Any] = {"strategy": "auto", "generations": 1}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large."""
    monkeypatch.setattr(likelihood, "LARGE", 0)
    monkeypatch.setattr(likelihood, "LARGE_BATCH", 64)


@pytest.mark.parametrize("half", [False, True])
def test_a_gradient_does_not_depend_on_threads(tmp_path: Path, large: None, half: bool) -> None:
    run = EvolutionLoop(job(tmp_path / "x", **LARGE, mixed_precision=half))
    key = run.search.survivors[0].key
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    found = []
    for threads in (1, 2, 3):
        run.evaluator.fill(key)
        fitness.model_under_test = replace(fitness.model_under_test, threads=threads)
        found.append(json.dumps(run.evaluator.gradient(key, 2, 0)))
    assert found[0] == found[1] == found[2] and any(map(any, json.loads(found[0])[0].values()))


def test_a_gradient_in_bfloat16_points_where_the_other_does(tmp_path: Path, large: None) -> None:
    rows = []
    for half in (False, True):
        run = EvolutionLoop(job(tmp_path / str(half), **LARGE, mixed_precision=half))
        key = run.search.survivors[-1].key
        rows.append(np.concatenate(list(run.evaluator.gradient(key, 2, 0)[0].values())))
    cosine = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    assert cosine > 0.95


def test_candidates_are_in_bfloat16_and_the_verdict_is_not(tmp_path: Path, large: None) -> None:
    run = EvolutionLoop(job(tmp_path / "x", **LARGE, mixed_precision=True))
    key = run.search.survivors[0].key
    run.evaluator.fill(key)
    rough = run.evaluator.model
    assert next(rough.parameters()).dtype == torch.bfloat16
    run.evaluator.fill(key, exact=True)
    exact = run.evaluator.model
    assert exact is not rough and next(exact.parameters()).dtype == torch.float32
    stored = dict(run.weights.tensors(key))
    for name, tensor in exact.state_dict().items():
        assert name not in stored or torch.equal(tensor, stored[name].float())
        assert torch.equal(tensor.bfloat16(), rough.state_dict()[name])
    sample = run.weights.sample(key)  # of what is stored, not of what was rounded
    assert base64.b64decode(run.evaluator.measure(key)["sample"]) == sample.tobytes()
    assert not np.array_equal(run.weights.sample(run.evaluator.model), sample)


@pytest.mark.slow
def test_threads_find_what_workers_find(
    tmp_path: Path, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, races, gradients and the verdict, to the byte."""
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        todo = job(tmp_path / str(cores), **LARGE, racing=True, mixed_precision=True)
        assert evaluator.batch_threads(todo) == cores and ParallelEvaluator.of(todo, "cpu") is None
        found.append(outcome(run_evolution(todo).loop.folder))
    alone = run_evolution(
        job(tmp_path / "x", **LARGE, racing=True, mixed_precision=True, workers=1)
    )
    assert found[0] == found[1] == outcome(alone.loop.folder)
    assert journal(alone.loop.folder, "gradient")


def test_small_models_and_spec_keep_their_workers(tmp_path: Path, large: None) -> None:
    assert not evaluator.batch_threads(job(tmp_path / "x", strategy="spec"))
    assert not evaluator.batch_threads(job(tmp_path / "x", strategy="auto", workers=2))
    assert not evaluator.batch_threads(job(tmp_path / "x", strategy="auto", reading="plain"))
    likelihood.LARGE = 10**6  # the fixture puts it back
    assert not evaluator.batch_threads(job(tmp_path / "x", strategy="auto"))
    assert not evaluator.measured_in_bf16(job(tmp_path / "x", strategy="auto"))


def test_an_evolution_from_before_keeps_its_reading(tmp_path: Path) -> None:
    """Its shards and its fingerprint stay, so it resumes."""
    old = tmp_path / "old"
    few: dict[str, Any] = {"strategy": "auto", "generations": 0, "racing": True}
    wanted = run_evolution(job(old, **few, reading="plain")).loop.fingerprint
    record = files.read_checked(old / "evolution.json")
    del record["settings"]["reading"]
    files.write_checked(old / "evolution.json", record)
    for inputs in (resume_inputs(old, None, None), job(old, **few)):
        assert inputs.settings.reading == "plain"
        run = EvolutionLoop(inputs)
        assert run.fingerprint == wanted
        assert isinstance(run.evaluator.fitness, DomainFitness)
        assert run.evaluator.fitness._ends == SHARES
    spec = [EvolutionLoop(job(tmp_path / r, reading=r)).fingerprint for r in ("plain", "fast")]
    assert spec[0] == spec[1]  # of which the setting is no part, as it was none then
    shutil.rmtree(old)
    assert job(old, **few).settings.reading == "fast"
