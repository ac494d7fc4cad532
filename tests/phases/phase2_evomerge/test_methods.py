"""Merge methods in the search: their weights, their files, and what RegMean reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from agent_forge.errors import ConfigError, Interrupted
from agent_forge.merge import spectral
from agent_forge.merge.combos import METHODS
from agent_forge.merge.engine import merge
from agent_forge.merge.recipe import Recipe
from agent_forge.model.folder import open_weights
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evaluator import CandidateEvaluator
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.search.candidate import Candidate
from agent_forge.search.settings import MethodName
from tests.support.evo_models import family, job, outcome, use_pool

PARENTS = [Candidate({"kind": "parent", "index": i}) for i in range(3)]
KEYS = tuple(c.key for c in PARENTS)
NAMES = get_args(MethodName)
AUTO: dict[str, Any] = {"strategy": "auto", "racing": False, "mixed_precision": False}
AUTO |= {"generations": 2, "methods": ["regmean", "tsv_m", "svc"], "early_stopping": False}
AUTO |= {"fitness_subset_size": 12, "verdict_items": 20}
AUTO["convergence_threshold"] = 0.5  # so that gradients alone do not count as enough


def by(method: str) -> Candidate:
    return Candidate({"kind": "method", "method": method, "seed": 3}, KEYS)


def stretch(of: Candidate, scale: float) -> Candidate:
    return Candidate({"kind": "stretch", "scale": scale}, (of.key,))


@pytest.fixture
def opened(tmp_path: Path) -> CandidateEvaluator:
    """What measures candidates of the three, and a method of each name with a stretch of it."""
    inputs = job(tmp_path / "x", fitness_subset_size=8)
    made = [by(name) for name in NAMES]
    every = [*PARENTS, *made, *(stretch(c, 0.5) for c in made)]
    known = {c.key: c for c in every}
    weights = CandidateWeights(inputs.parents, inputs.base, known, tmp_path / "weights")
    return CandidateEvaluator(inputs, weights, {}, "cpu")


@pytest.mark.parametrize("base", [True, False])
def test_every_method_that_can_be_named_makes_weights(tmp_path: Path, base: bool) -> None:
    inputs = job(tmp_path / "x", base=base, fitness_subset_size=8)
    known = {c.key: c for c in (*PARENTS, *(by(name) for name in NAMES))}
    weights = CandidateWeights(inputs.parents, inputs.base, known, tmp_path / "weights")
    evaluator = CandidateEvaluator(inputs, weights, {}, "cpu")
    found = {name: weights.fill(evaluator.model, by(name).key) for name in NAMES}
    if base:  # about the mean the sum of all task vectors is nothing
        assert len(set(found.values())) == len(NAMES)
    assert {*NAMES} - {"svc"} < {*METHODS}


def test_a_stretch_is_on_the_line_from_the_base_and_its_input_is_made_once(
    opened: CandidateEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, method = opened.weights, by("tsv_m")
    calls: list[int] = []
    real = spectral.tsv_m
    monkeypatch.setitem(
        spectral.SPECTRAL,
        "tsv_m",
        spectral._spectral(lambda deltas, p: calls.append(1) or real(deltas, p)),
    )
    monkeypatch.setitem(METHODS, "tsv_m", spectral.SPECTRAL["tsv_m"])
    weights.fill(opened.model, method.key)
    first = len(calls)
    assert first > 0
    weights.keep([], True)  # survivors come and go
    weights.fill(opened.model, stretch(method, 0.5).key)
    weights.keep([], True)
    assert len(calls) == first
    base = open_weights(family() / "base")
    whole, half = (dict(weights.tensors(c.key)) for c in (method, stretch(method, 0.5)))
    for name, tensor in half.items():
        torch.testing.assert_close(tensor, base[name].lerp(whole[name], 0.5))
    fresh = CandidateWeights(weights.parents, weights.base, weights.known, weights.folder)
    fresh.keep([])  # another process trusts no file
    assert not list(weights.folder.glob("*.safetensors"))


def test_regmean_reads_the_inputs_of_every_parent(opened: CandidateEvaluator) -> None:
    """Its answer for one layer by brute force: least squares on what its parents read."""
    weights, name = opened.weights, "model.layers.0.self_attn.q_proj.weight"
    assert weights.input_grams is not None
    before = {k: v.clone() for k, v in opened.model.state_dict().items()}
    grams = weights.input_grams()
    assert all(torch.equal(v, before[k]) for k, v in opened.model.state_dict().items())
    treated = [n for n, spec in weights.specs.items() if spectral.is_treated(n, spec.shape)]
    assert {(place, n) for _, place, n in grams} == {
        (f"parent{i}", n) for i in range(3) for n in treated
    }
    shrunk = []
    for i in range(3):
        gram = grams[spectral.GRAM, f"parent{i}", name]
        assert torch.linalg.eigvalsh(gram).min() > -1e-6 * gram.trace()
        shrunk.append(0.9 * gram + 0.1 * gram.diagonal().diag())
    models = [parent[name].double() for parent in weights.parents]
    wanted = sum(w @ g for w, g in zip(models, shrunk, strict=True)) @ sum(shrunk).inverse()
    found = dict(weights.tensors(by("regmean").key))[name].double()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_regmean_needs_items_and_a_lineage_without_them_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="regmean needs items"):
        EvoMergeSettings.model_validate({"fitness": "a:b", "methods": ["regmean"]})
    inputs = job(tmp_path / "x")
    known = {c.key: c for c in (*PARENTS, by("regmean"))}
    weights = CandidateWeights(inputs.parents, inputs.base, known, tmp_path / "weights")
    with pytest.raises(ConfigError, match="without the items"):
        dict(weights.tensors(by("regmean").key))


def test_the_sum_is_corrected_as_the_recipe_says(opened: CandidateEvaluator) -> None:
    models = {f"parent{i}": parent for i, parent in enumerate(opened.weights.parents)}
    recipe = Recipe.model_validate(
        {
            "merge_method": "task_arithmetic",
            "models": [{"model": str(parent.folder)} for parent in models.values()],
            "base_model": str(family() / "base"),
            "post_pass": "svc",
        }
    )
    expected = dict(merge(recipe))
    for name, tensor in opened.weights.tensors(by("svc").key):
        assert torch.equal(tensor, expected[name])


@pytest.mark.slow
def test_methods_by_workers_and_after_a_stop_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_evolution(job(tmp_path / "alone", workers=1, **AUTO)).loop
    expected = outcome(alone.folder)
    kinds = [c.kind for c in alone.search.candidates.values()]
    assert kinds.count("method") == 3 and "stretch" in kinds
    assert len(list((alone.folder / "weights").glob("*.safetensors"))) <= 1  # of the champion
    use_pool("inline", monkeypatch)
    there = run_evolution(job(tmp_path / "there", workers=2, **AUTO)).loop
    assert outcome(there.folder) == expected
    monkeypatch.undo()
    seen: list[str] = []

    def stop() -> bool:
        seen.append("")
        return len(seen) == 14

    with pytest.raises(Interrupted):
        run_evolution(job(tmp_path / "stopped", workers=1, **AUTO), should_stop=stop)
    resumed = run_evolution(job(tmp_path / "stopped", workers=1, **AUTO)).loop
    assert outcome(resumed.folder) == expected
