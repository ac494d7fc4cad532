"""Layer paths: the weights, networks of another depth, the search, the gate, and a whole run."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from agent_forge.errors import ConfigError
from agent_forge.evals.fitness import DomainFitness, Incumbent
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.merge.output import write
from agent_forge.model.folder import open_weights
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evaluator import OTHER_NETWORKS, NetworkCache
from agent_forge.phases.phase2_evomerge.evolution import replay, run_evolution
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.phases.phase2_evomerge.journal import CACHE, JOURNAL
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.search import operators
from agent_forge.search.candidate import Candidate
from agent_forge.search.portfolio import PortfolioSearch
from agent_forge.search.settings import EvolutionSettings
from agent_forge.store import files
from agent_forge.track.journal import read_lines
from tests.support.evo_models import FEW as QUICK
from tests.support.evo_models import POOLS, family, job, journal, outcome, use_pool
from tests.support.merge_models import make_models
from tests.support.searches import GROUPS, LAYERS, by_key, run, start

pytestmark = pytest.mark.slow

PARENTS = [Candidate({"kind": "parent", "index": i}) for i in range(3)]
AVERAGE = Candidate({"kind": "average"}, tuple(p.key for p in PARENTS))
KINDS = ("llama", "qwen2", "gpt2", "forge")
PATHS = {
    "skip": [[0, 1]],
    "repeat": [[0, 0], [0, 1], [0, 1]],
    "stack": [[1, 0], [0, 0], [2, 1]],
    "swap": [[1, 0], [0, 1]],
}
TOKENS = torch.tensor([[5, 7, 11, 3, 2, 40, 9]])


def path(layers: list[list[int]], first: Candidate = PARENTS[0]) -> Candidate:
    others = (p.key for p in PARENTS if p is not first)
    return Candidate({"kind": "path", "layers": layers}, (first.key, *others))


def nursery_of(
    root: Path, scratch: Path, *candidates: Candidate, base: bool = True
) -> CandidateWeights:
    known = {c.key: c for c in (*PARENTS, AVERAGE, *candidates)}
    models = [open_weights(root / name) for name in "abc"]
    return CandidateWeights(models, open_weights(root / "base") if base else None, known, scratch)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def stacked(model: Any, others: list[Any], layers: list[list[int]]) -> Any:
    """The same by hand: modules copied from the networks."""

    def of(network: Any) -> tuple[nn.Module, str]:
        inner = getattr(network, "network", None)
        if inner is not None:
            return inner, "blocks"
        inner = getattr(network, "model", None) or network.transformer
        return inner, "layers" if hasattr(inner, "layers") else "h"

    made = copy.deepcopy(model)
    inner, name = of(made)
    sources = [getattr(*of(network)) for network in others]
    setattr(inner, name, nn.ModuleList(copy.deepcopy(sources[i][n]) for i, n in layers))
    made.config.num_hidden_layers = len(layers)
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = [made.config.layer_types[n] for _, n in layers]
    return made


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(TOKENS) if isinstance(model, ForgeNetwork) else model(TOKENS, use_cache=False)
    return found if isinstance(found, Tensor) else found.logits


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_the_layers_copied_by_hand(kind: str, name: str, tmp_path: Path) -> None:
    root = make_models(tmp_path, kind)
    for number, parent in enumerate("abc"):  # a new layer of ours would change nothing
        file, own = root / parent / "model.safetensors", torch.Generator().manual_seed(number)
        state = load_file(file)
        noisy = {n: t + 0.1 * torch.randn(t.shape, generator=own) for n, t in state.items()}
        save_file(noisy, file)
    made = path(PATHS[name])
    nursery = nursery_of(root, tmp_path / "weights", made)
    write(nursery.weights(made.key), tmp_path / "out")
    whole = [loaded(root / n) for n in "abc"]
    wanted = stacked(whole[0], whole, PATHS[name])
    found = loaded(tmp_path / "out")
    assert_close(logits(found), logits(wanted), rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits(found), logits(whole[0]))
    own = dict(found.state_dict())
    assert all(torch.equal(tensor, own[n]) for n, tensor in wanted.state_dict().items())
    config = json.loads((tmp_path / "out/config.json").read_text())
    depth = {config[k] for k in ("num_hidden_layers", "n_layer", "n_layers") if k in config}
    assert depth == {len(PATHS[name])}
    network = NetworkCache(getattr(whole[2], "network", whole[2])).of(nursery.layers_of(made.key))
    nursery.fill(network, made.key)
    assert_close(logits(network), logits(wanted), rtol=1e-5, atol=1e-6)


def test_a_path_through_a_merge_has_the_rest_of_it(tmp_path: Path) -> None:
    root = make_models(tmp_path)
    made = path([[0, 1], [2, 0]], AVERAGE)
    nursery = nursery_of(root, tmp_path / "weights", made, base=False)
    mean, b = dict(nursery.tensors(AVERAGE.key)), dict(open_weights(root / "b").items())
    for name, tensor in nursery.tensors(made.key):
        if ".layers.0." in name:
            assert torch.equal(tensor, mean[name.replace("layers.0", "layers.1")])
        elif ".layers.1." in name:
            assert torch.equal(tensor, b[name.replace("layers.1", "layers.0")])
        else:
            assert torch.equal(tensor, mean[name])
    assert set(nursery.specs_of(made.key)) == set(nursery.specs)


def test_sizes_are_counted(tmp_path: Path) -> None:
    root = make_models(tmp_path)
    one, same = path(PATHS["skip"]), path(PATHS["swap"])
    nursery = nursery_of(root, tmp_path / "weights", one, same)
    assert nursery.size(PARENTS[0].key) == nursery.size(same.key) == (1.0, 1.0)
    cost, size = nursery.size(one.key)
    whole, less = (nursery.weights(key).nbytes for key in (PARENTS[0].key, one.key))
    assert cost == 0.5 and size == less / whole and 0.5 < size < 1


def test_few_networks_are_kept_and_building_draws_nothing(tmp_path: Path) -> None:
    model = loaded(make_models(tmp_path) / "a")
    networks = NetworkCache(model)
    state = torch.random.get_rng_state()
    found = [networks.of([0] * n) for n in (1, 3, 4, 5)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert networks.of(None) is model and networks.of([1, 0]) is model
    assert len(networks._others) == OTHER_NETWORKS and networks.of([1] * 5) is found[-1]
    assert [len(network.model.layers) for network in found] == [1, 3, 4, 5]


# -- the search -----------------------------------------------------------------------------------


def space(n: int = 4, **settings: Any) -> operators.SearchSpace:
    keys = tuple(p.key for p in PARENTS)
    names = tuple(str(i) for i in range(n))
    return operators.SearchSpace(keys, GROUPS, names, EvolutionSettings(**settings))


def test_a_share_of_the_mutants_are_paths() -> None:
    where = space(layer_paths=0.3)
    names = [operators.mutate(where, AVERAGE, operators.generator(i), 1.0)[0] for i in range(400)]
    assert 90 < names.count("path") < 150
    off = space()
    assert all(
        operators.mutate(off, AVERAGE, operators.generator(i), 1.0)[0] != "path" for i in range(99)
    )


@pytest.mark.parametrize("n", [1, 2, 5])
def test_paths_stay_within_their_bounds(n: int) -> None:
    where, of, seen, steps = space(n, layer_paths=0.1), AVERAGE, set(), set()
    for i in range(300):
        name, made = operators.mutate(where, of, operators.generator(n, i), 1.0)
        if name != "path":
            continue
        layers = made.operation["layers"]
        assert 1 <= len(layers) <= n * 3 // 2
        assert all(0 <= a < 4 and 0 <= b < n for a, b in layers)
        assert made.inputs == (AVERAGE.key, *where.parents)
        seen.add(len(layers))
        steps |= {a for a, _ in layers}
        of = made  # from here on nothing but paths
    assert of.kind == "path" and seen == set(range(1, n * 3 // 2 + 1)) and steps == {0, 1, 2, 3}


@pytest.mark.parametrize("layers", [LAYERS, ("0",)], ids=["two layers", "one layer"])
def test_nothing_but_paths_is_made_from_paths(layers: tuple[str, ...]) -> None:
    settings = {"layer_paths": 0.6, "generations": 12, "early_stopping": False}
    evolution = start(layers=layers, **settings)
    run(evolution, lambda c: by_key(c) + (c.kind == "path"))
    paths = {key for key, c in evolution.candidates.items() if c.kind == "path"}
    assert evolution.champion is not None and evolution.champion.kind == "path"
    for made in evolution.candidates.values():
        assert not paths & {*made.inputs}, made.origin
    later = [entry for entry in evolution.history if entry["generation"] > 1]
    assert sum(entry["operators"].get("path", 0) for entry in later) >= (
        9 if len(layers) > 1 else 1
    )
    # Few short paths there are, and none is asked for twice: the other places get combos.
    assert len(layers) > 1 or sum(e["operators"].get("reseed", 0) for e in later) > 20


def test_auto_moves_the_best_that_can_be_moved() -> None:
    settings = EvolutionSettings(
        strategy="auto", layer_paths=1.0, generations=12, early_stopping=False
    )
    search = PortfolioSearch(settings, parents=3, groups=GROUPS, seed=1, layers=LAYERS)
    while search.finished is None:
        while asked := search.ask():
            made = asked[0]
            slope = {group: [0.1, 0.2, 0.3] for group in GROUPS}
            search.tell(made.key, by_key(made) + (made.kind == "path"), gradient=slope)
        search.advance()
    kinds = {key: c.kind for key, c in search.candidates.items()}
    assert "path" in kinds.values() and search.champion and search.champion.kind == "path"
    assert all(kinds[key] != "path" for c in search.candidates.values() for key in c.inputs)
    assert any(c.origin.startswith("sample") for c in search.candidates.values())
    assert any(c.origin.startswith("gradient") for c in search.candidates.values())


# -- measuring ------------------------------------------------------------------------------------


def prepared(folder: Path, **settings: Any) -> EvolutionLoop:
    todo = job(folder, layer_paths=0.5, **settings)
    return EvolutionLoop(todo)


def known(run: EvolutionLoop, layers: list[list[int]]) -> str:
    made = operators.path(run.search.space, run.search.survivors[-1], operators.generator("x"))
    made = Candidate({"kind": "path", "layers": layers}, made.inputs)
    run.search.candidates[made.key] = made
    return made.key


def test_a_path_is_measured_in_its_own_shape(tmp_path: Path) -> None:
    run = prepared(tmp_path / "x")
    key, average = known(run, [[0, 0], [0, 1], [0, 1]]), run.search.survivors[-1].key
    plain = run.evaluator.measure(average)["score"]
    assert plain["parts"]["speed"] == plain["parts"]["memory"] == 0.5
    found = run.evaluator.measure(key)["score"]
    cost, size = run.weights.size(key)
    assert found["parts"]["speed"] == 1 / (1 + cost) == 1 / 2.5
    assert found["parts"]["memory"] == 1 / (1 + size) < 0.5
    write(run.weights.weights(key), tmp_path / "out")
    subject = open_model_under_test(tmp_path / "out")
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    same = DomainFitness(subject, fitness.domains, fitness.weights, {}).score()
    assert same.raw == pytest.approx(found["raw"]) and found["raw"] != plain["raw"]
    again = run.evaluator.measure(average)
    assert again["score"] == plain and again["hit"]
    assert again["sample"] and not run.evaluator.measure(key)["sample"]  # of one shape alone


def test_the_gate_costs_a_path_its_first_items(tmp_path: Path) -> None:
    run = prepared(tmp_path / "x", fitness_subset_size=100)
    key, average = known(run, [[0, 1]]), run.search.survivors[-1].key
    bits, tokens = run.evaluator.first_bits(average)
    own, same = run.evaluator.first_bits(key)
    fitness = run.evaluator.fitness
    assert same == tokens < 0.2 * fitness.tokens and own > 1.2 * bits
    out = run.evaluator.measure(key, (None, 1.2 * bits, None))
    assert out["score"] is None and out["dropped"] and out["tokens"] == tokens
    assert "bits a byte" in out["problem"] and not run.evaluator.cache
    passed = run.evaluator.measure(key, (None, own, None))
    assert passed["score"] and not passed["dropped"]
    assert passed["tokens"] == tokens + fitness.tokens
    assert run.evaluator.measure(key, (None, own, None))["hit"]
    assert run.evaluator.measure(key, (None, 1.2 * bits, None))[
        "dropped"
    ]  # cached is what that gate let in


def test_a_race_knows_what_another_shape_is_worth(tmp_path: Path) -> None:
    data = [str(family() / f"{name}.jsonl") for name in ("twice", "next")]
    run = prepared(tmp_path / "x", racing=True, fitness_subset_size=100, data=data)
    key, average = known(run, [[0, 0], [0, 1], [0, 1]]), run.search.survivors[-1].key
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    scores = {k: run.evaluator.measure(k)["score"]["fitness"] for k in (key, average)}
    mine, other = (run.evaluator.incumbent(k, scores[k]) for k in (key, average))
    assert mine.bonus < 0 == other.bonus
    ahead = sum(
        per_nat * (sum(other.loss[d]) - sum(mine.loss[d]))
        + per_answer * (sum(mine.right[d]) - sum(other.right[d]))
        for d, (per_nat, per_answer) in enumerate(fitness.rates())
    )
    assert ahead + mine.bonus == pytest.approx(scores[key] - scores[average], abs=1e-6)
    run.evaluator.fill(key)
    level = Incumbent("", 0.5, mine.right, mine.loss, mine.bonus)  # the same: nobody falls behind
    assert fitness.race(level)[1] is not None
    small = Incumbent("", 0.5, mine.right, mine.loss, mine.bonus + 0.2)  # as good and much smaller
    assert fitness.race(small)[:2] == (pytest.approx(0.3), None)


# -- a whole run ----------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    **{"layer_paths": 0.7, "path_gate": 3.0, "generations": 3, "checkpoint_every": 1},
    "fitness_weights": {"perplexity": 1e-3, "speed": 1.0},  # so that a short path wins
}


@pytest.mark.parametrize("cuts", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_champion_that_is_a_path_resumes_replays_and_loads(tmp_path: Path, cuts: int) -> None:
    whole = run_evolution(job(tmp_path / "whole", **ALL))
    lines = (whole.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    records = [record for _, record in read_lines(whole.loop.folder / JOURNAL)]
    best = json.loads((whole.model.path / "lineage.json").read_text())
    made = next(c for c in best["candidates"] if c["key"] == best["key"])
    assert made["operation"]["kind"] == "path" and len(made["operation"]["layers"]) == 1
    assert any(r["record"] == "gate" for r in records)
    for folder in (whole.model.path, whole.loop.folder / "gen_3_best_model"):
        model = open_model_under_test(folder).model
        assert len(model.model.layers) == 1 == model.config.num_hidden_layers  # type: ignore
    assert whole.report and whole.report.champion.parts["speed"] == 1 / 1.5
    assert all(r.score.parts["speed"] == 0.5 for r in whole.report.baselines.values())
    sha = replay(whole.model.path / "lineage.json", tmp_path / "again")
    assert sha == files.sha256_of(whole.model.path / "model.safetensors")
    assert files.sha256_of(tmp_path / "again/config.json") == files.sha256_of(
        whole.model.path / "config.json"
    )
    wanted = outcome(whole.loop.folder)
    gate = next(n for n, r in enumerate(records) if r["record"] == "gate")
    for cut in (gate + 1, len(lines) - 3, gate, gate + 4)[:cuts]:
        folder = tmp_path / f"cut{cut}"
        shutil.copytree(whole.loop.folder, folder, ignore=shutil.ignore_patterns("champion"))
        (folder / JOURNAL).write_bytes(b"".join(lines[:cut]) + lines[cut][:30])
        shutil.rmtree(folder / "weights")
        (folder / CACHE).unlink()
        assert outcome(run_evolution(resume_inputs(folder, None, None)).loop.folder) == wanted


def paths_in(folder: Path) -> list[dict[str, Any]]:
    return [r for r in journal(folder) if r["operation"]["kind"] == "path"]


@POOLS
def test_workers_and_races_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_pool(kind, monkeypatch)
    few: dict[str, Any] = {"layer_paths": 0.7, "fitness_subset_size": 64, "racing": True}
    alone = run_evolution(job(tmp_path / "alone", workers=1, **few))
    there = run_evolution(job(tmp_path / "two", workers=2, **few))
    assert outcome(there.loop.folder) == outcome(alone.loop.folder)
    out = [r for r in paths_in(alone.loop.folder) if r["problem"]]
    assert out and all(r["dropped"] and r["score"] is None and r["sha256"] for r in out)
    assert all("bits a byte on its first items" in r["problem"] for r in out)


def test_auto_has_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = iter((2, 2, 1, 0, 2) * 9)  # mutation, sample, gradient: one may pay for long otherwise
    monkeypatch.setattr(PortfolioSearch, "_choose", lambda self: self._arms[next(arms)])
    many = {"layer_paths": 1.0, "path_gate": 100, "generations": 2}
    done = run_evolution(job(tmp_path / "x", strategy="auto", **{**ALL, **many}))
    assert (
        any(r["score"] for r in paths_in(done.loop.folder)) and "path" in done.loop.champion.origin
    )
    kinds = [r["operation"]["kind"] for r in journal(done.loop.folder)]
    assert {"blend", "shift"} & {*kinds[kinds.index("path") :]}  # others than the champion moved


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"strategy": "ga", "layer_paths": 0.1}, "layer_paths has no meaning"),
        ({"path_gate": 1.5}, "path_gate has no meaning"),
        ({"layer_paths": 0.1, "fitness": "a:b"}, "layer_paths needs bits"),
        ({"layer_paths": 1.1}, "less than or equal to 1"),
    ],
)
def test_settings_that_do_nothing_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EvoMergeSettings.model_validate({**QUICK, **wrong})


def test_a_model_of_unknown_depth_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agent_forge.phases.phase2_evomerge.inputs.DEPTHS", ("elsewhere",))
    with pytest.raises(ConfigError, match="how many layers"):
        job(tmp_path / "x", layer_paths=0.1)
