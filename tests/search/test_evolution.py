"""The search for better candidates: composition, reproduction, resume, and what each setting does.

`World` plays the models: vectors whose groups are merged, shifted and disturbed as a candidate
says, scored by their distance from a hidden target.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import Candidate, lineage
from agent_forge.search.evolution import MOST_VARIANTS, EvolutionSearch
from agent_forge.search.operators import SearchSpace, combo_of, generator, mutate
from agent_forge.search.settings import ACTS_IN, EvolutionSettings
from tests.support.searches import GROUPS, LAYERS, Score, by_key, run, start, step

WIDTH = 40
DIMENSION = WIDTH * len(GROUPS)


class World:
    def __init__(self, seed: int, parents: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.parents = rng.standard_normal((parents, DIMENSION))
        shares = rng.uniform(0, 0.7, (len(GROUPS), parents))
        self.target = (np.repeat(shares, WIDTH, axis=0) * self.parents.T).sum(1)
        self.made: dict[str, np.ndarray] = {}

    def make(self, candidates: Mapping[str, Candidate], key: str) -> np.ndarray:
        for candidate in lineage(candidates, key):
            if candidate.key not in self.made:
                inputs = [self.made[i] for i in candidate.inputs]
                self.made[candidate.key] = self.result(candidate.operation, inputs)
        return self.made[key]

    def result(self, operation: Mapping[str, Any], inputs: list[np.ndarray]) -> np.ndarray:
        kind = operation["kind"]
        if kind == "parent":
            return self.parents[operation["index"]]
        if kind == "average":
            return np.mean(inputs, 0)
        if kind == "shift":
            shares = np.repeat([operation["coefficients"][g] for g in GROUPS], WIDTH, axis=0)
            return inputs[0] + (shares * self.parents.T).sum(1)
        rng = np.random.default_rng(operation["seed"])
        if kind == "noise":
            hit = rng.random(DIMENSION) < operation["rate"]
            return inputs[0] + hit * operation["sigma"] * rng.standard_normal(DIMENSION)
        weights = np.repeat([operation["weights"][g] for g in GROUPS], WIDTH, axis=0)
        merged = (weights * np.transpose(inputs)).sum(1) / weights.sum(1)
        merged = merged * (1.2 if operation["combo"] & 4 else 1.0)
        if operation["combo"] & 2:
            merged = merged * (np.abs(merged) >= np.quantile(np.abs(merged), 1 - operation["keep"]))
        else:
            kept = rng.random(DIMENSION) >= operation["drop_rate"]
            merged = merged * kept / (1 - operation["drop_rate"])
        if operation["combo"] & 1:
            merged = np.mean([merged, *inputs], 0)
        return operation["scale"] * merged

    def score(self, candidates: Mapping[str, Candidate], key: str) -> float:
        return 1 - float(np.mean((self.make(candidates, key) - self.target) ** 2))


def trace(evolution: EvolutionSearch) -> tuple[list[str], list[dict[str, Any]], str | None]:
    """All that a run did."""
    return list(evolution.candidates), evolution.history, evolution.finished


# -- it finds something ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_better_candidates_are_found(seed: int) -> None:
    world, evolution = World(seed), start(seed, layers=(), generations=30)
    run(evolution, lambda c: world.score(evolution.candidates, c.key))
    best = [entry["best"] for entry in evolution.history]
    assert best == sorted(best)
    parents = max(evolution.scores[c.key] for c in start(seed).survivors)
    assert best[0] >= parents
    assert 1 - best[-1] < 0.7 * (1 - best[0])  # the distance that was left fell by a third
    gains = evolution.operator_gains
    assert gains["shift"]["improved"] > 0
    assert gains["shift"]["tried"] > gains["noise"]["tried"]


def test_lineage_alone_makes_the_champion_again() -> None:
    world, evolution = World(1), start(1, layers=(), generations=12)
    run(evolution, lambda c: world.score(evolution.candidates, c.key))
    assert evolution.champion
    key = evolution.champion.key
    text = json.dumps([c.to_json() for c in lineage(evolution.candidates, key)])
    again = {c["key"]: Candidate.from_json(c) for c in json.loads(text)}
    assert len(again) < len(evolution.candidates)
    assert np.array_equal(World(1).make(again, key), world.made[key])


# -- candidates -----------------------------------------------------------------------------------


def parent(index: int) -> Candidate:
    return Candidate({"kind": "parent", "index": index}, (), f"parent {index}")


def noise(of: Candidate, seed: int) -> Candidate:
    return Candidate({"kind": "noise", "sigma": 0.1, "rate": 0.5, "seed": seed}, (of.key,))


def test_a_key_says_what_a_candidate_is_made_of() -> None:
    operation = {"kind": "noise", "sigma": 0.1, "rate": 0.5, "seed": 3}
    made = Candidate(operation, (parent(0).key,), "here")
    turned = Candidate(dict(reversed(operation.items())), (parent(0).key,), "there")
    assert made == turned and hash(made) == hash(turned)
    others = [noise(parent(0), 4), noise(parent(1), 3), parent(0), parent(1)]
    pairs = [(parent(0).key, parent(1).key), (parent(1).key, parent(0).key)]
    others += [Candidate({"kind": "average"}, pair) for pair in pairs]
    assert len({made.key, *(c.key for c in others)}) == 7
    operation["seed"] = 4
    assert made.operation["seed"] == 3
    with pytest.raises(AttributeError):
        made.origin = "elsewhere"  # type: ignore[misc]


def test_json_keeps_a_candidate_and_a_changed_one_is_refused() -> None:
    made = noise(parent(0), 3)
    data = json.loads(json.dumps(made.to_json()))
    again = Candidate.from_json(data)
    assert (again, again.origin, again.inputs) == (made, made.origin, made.inputs)
    data["operation"]["seed"] = 4
    with pytest.raises(ValueError, match="not what its key says"):
        Candidate.from_json(data)


@pytest.mark.parametrize(
    ("operation", "inputs"),
    [
        ({"kind": "clone"}, ()),
        ({}, ()),
        ({"kind": "parent"}, ()),
        ({"kind": "parent", "index": 0, "more": 1}, ()),
        ({"kind": "parent", "index": 0}, ("a",)),
        ({"kind": "average"}, ()),
        ({"kind": "shift", "coefficients": {}}, ("a", "b")),
        ({"kind": "parent", "index": math.nan}, ()),
    ],
)
def test_a_malformed_candidate_is_refused(
    operation: dict[str, Any], inputs: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError):
        Candidate(operation, inputs)


def test_lineage_has_inputs_first_and_nothing_else() -> None:
    a, b, other = parent(0), parent(1), parent(2)
    both = Candidate({"kind": "average"}, (a.key, b.key))
    left, right = noise(both, 1), noise(both, 2)
    top = Candidate({"kind": "average"}, (left.key, right.key, a.key))
    everything = {c.key: c for c in (top, right, left, both, other, b, a)}
    assert lineage(everything, top.key) == [a, b, both, left, right, top]
    deep = [a]
    for seed in range(3000):
        deep.append(noise(deep[-1], seed))
    assert lineage({c.key: c for c in deep}, deep[-1].key) == deep


# -- the scheme -----------------------------------------------------------------------------------


def test_generation_0_is_the_references_and_the_eight_combos() -> None:
    evolution = start(drop_rate=0.7, keep=0.4)
    references, combos = evolution.ask()[:4], evolution.ask()[4:]
    assert [c.origin for c in references] == ["parent 0", "parent 1", "parent 2", "average"]
    parents = tuple(c.key for c in references[:3])
    assert references[3].inputs == parents
    assert [c.operation["combo"] for c in combos] == list(range(8))
    assert [c.origin for c in combos][6] == "combo 110"
    assert evolution.population == combos
    for combo in combos:
        assert combo.inputs == parents
        assert combo.operation["weights"] == {g: [1.0, 1.0, 1.0] for g in GROUPS}
        assert (combo.operation["drop_rate"], combo.operation["keep"]) == (0.7, 0.4)
    assert len({c.operation["seed"] for c in combos}) == 1  # so that one pass makes them all
    assert start(seed=1).population[0].operation["seed"] != combos[0].operation["seed"]


@pytest.mark.parametrize("parents", [2, 3, 5])
def test_later_generations_are_mutants_of_the_best_and_children_of_the_worst(parents: int) -> None:
    evolution = start(parents=parents, generations=12, early_stopping=False, recipe_mutation=0.5)
    while True:
        pool = [*evolution.survivors, *evolution.population]
        population = {c.key for c in evolution.population}
        step(evolution)
        if evolution.finished:
            break
        best = sorted(pool, key=lambda c: -by_key(c))
        losers = [c.key for c in best if c.key in population][-6:]
        elites = best[:2]
        assert evolution.survivors == elites
        children = evolution.population
        for n, mutant in enumerate(children[:6]):
            elite = elites[n // 3]
            assert f"mutation of {elite.key[:8]}" in mutant.origin
            assert mutant.inputs in ((elite.key,), elite.inputs)
        assert [c.inputs for c in children[6:]] == [tuple(losers[:3]), tuple(losers[3:])]
        assert len({c.key for c in children}) == 8
        assert evolution.ask() == children  # nothing is measured twice
        assert evolution.history[-1]["elites"] == [c.key for c in elites]
    combos = {c.operation["combo"] for c in evolution.candidates.values() if "losers" in c.origin}
    assert len(combos) >= 6


def test_a_reference_point_can_be_champion_and_elite() -> None:
    evolution = start(generations=3)
    step(evolution, lambda c: 1.0 if c.kind in ("parent", "average") else 0.0)
    assert evolution.champion and evolution.champion.kind in ("parent", "average")
    assert {c.kind for c in evolution.survivors} <= {"parent", "average"}
    champion = evolution.champion
    run(evolution, lambda c: 0.5)
    assert evolution.champion == champion


def test_equal_scores_go_to_the_older_and_then_by_key() -> None:
    evolution = start(generations=4, early_stopping=False)
    step(evolution, lambda c: 0.5 if c.kind == "merge" else 0.0)
    keys = sorted(c.key for c in start().population)
    assert [c.key for c in evolution.survivors] == keys[:2]
    run(evolution, lambda c: 0.5)
    assert [entry["champion"] for entry in evolution.history] == [keys[0]] * 5


def test_history_says_what_was_measured() -> None:
    evolution = start(generations=3, early_stopping=False)
    for number in range(4):
        assert evolution.generation == number
        population = evolution.population
        step(evolution, diversity=0.6)
        entry = evolution.history[-1]
        scores = [by_key(c) for c in population]
        assert entry["mean"] == pytest.approx(np.mean(scores))
        assert entry["fitness_std"] == pytest.approx(np.std(scores))
        assert (entry["generation"], entry["diversity"], entry["failed"]) == (number, 0.6, 0)
        assert entry["mutations"] == (6 if number else 0)
        assert sum(entry["operators"].values()) == entry["distinct"] == 8
        assert entry["operators"].get("losers", 0) == (2 if number else 0)
        champion = max(evolution.scores, key=lambda key: evolution.scores[key])
        assert (entry["champion"], entry["best"]) == (champion, evolution.scores[champion])
    assert evolution.finished == "generations"
    json.dumps(evolution.history, allow_nan=False)
    merges = [c for c in evolution.candidates.values() if c.kind == "merge"]
    assert sum(evolution.combo_usage.values()) == len(merges) >= 8 + 6
    assert set(evolution.combo_usage) == set(range(8))
    assert all(count >= 1 for count in evolution.combo_usage.values())


def test_operator_gains_compare_a_child_with_its_best_input() -> None:
    evolution = start(generations=2, early_stopping=False, recipe_mutation=0.0)
    scores = {"average": 0.1, "merge": 0.25, "noise": 0.75}
    step(evolution, lambda c: scores.get(c.kind, 0.5 if c.origin == "parent 1" else 0.375))
    step(evolution, lambda c: -math.inf if c.kind == "noise" else 0.75)
    gains = evolution.operator_gains
    assert gains["combo"] == {"tried": 8, "failed": 0, "improved": 0, "mean_gain": -0.25}
    assert gains["losers"] == {"tried": 2, "failed": 0, "improved": 2, "mean_gain": 0.5}
    assert gains["noise"] == {"tried": 6, "failed": 6, "improved": 0, "mean_gain": None}


# -- mutation -------------------------------------------------------------------------------------


def space(**settings: Any) -> SearchSpace:
    keys = tuple(parent(n).key for n in range(3))
    return SearchSpace(keys, GROUPS, LAYERS, EvolutionSettings(**settings))


def mutants(
    elite: Candidate, where: SearchSpace, count: int = 150
) -> Iterator[tuple[str, Candidate]]:
    for n in range(count):
        yield mutate(where, elite, generator("test", n), 1.0)


@pytest.mark.parametrize("combo", range(8))
def test_a_recipe_mutation_changes_one_thing_that_the_combo_notices(combo: int) -> None:
    where = space(recipe_mutation=1.0)
    elite = combo_of(where, combo, where.parents, 7, "combo")
    seen = set()
    for name, mutant in mutants(elite, where):
        seen.add(name)
        if name == "shift":
            assert mutant.inputs == (elite.key,)
            continue
        assert mutant.inputs == elite.inputs
        changed = {k for k in elite.operation if mutant.operation[k] != elite.operation[k]}
        assert changed == {name}
        new = mutant.operation[name]
        if name == "combo":
            assert (new ^ combo).bit_count() == 1
        elif name == "weights":
            assert sum(new[g] != [1.0, 1.0, 1.0] for g in GROUPS) == 1
            assert min(map(min, new.values())) > 0
        elif name == "layers":
            ((layer, choice),) = new.items()
            assert layer in LAYERS and choice in range(4)
        else:
            assert new > 0 and (name == "scale" or new < 1)
    wanted = {"shift", "combo", "weights", "scale", "keep" if combo & 2 else "drop_rate"}
    assert seen == wanted | (set() if combo & 1 else {"layers"})


def test_a_choice_of_layers_leaves_with_frankenmerge() -> None:
    where = space(recipe_mutation=1.0)
    plain = combo_of(where, 0b010, where.parents, 7, "combo")
    elite = Candidate({**plain.operation, "layers": {"0": 2}}, plain.inputs)
    flipped = [c.operation for name, c in mutants(elite, where) if name == "combo"]
    assert {o["combo"]: bool(o["layers"]) for o in flipped} == {
        0b110: True,
        0b000: True,
        0b011: False,
    }


def test_another_attempt_takes_what_cannot_coincide() -> None:
    where = space(recipe_mutation=1.0)
    elite = combo_of(where, 0, where.parents, 7, "combo")
    again = [mutate(where, elite, generator(n), 1.0, again=True) for n in range(100)]
    assert {name for name, _ in again} == {"shift", "weights", "scale", "drop_rate"}
    assert len({candidate for _, candidate in again}) == 100


def test_what_is_not_a_merge_of_the_parents_is_shifted() -> None:
    where = space(recipe_mutation=1.0)
    children = [noise(parent(0), n) for n in range(3)]
    for elite in (
        parent(0),
        children[0],
        combo_of(where, 3, [c.key for c in children], 7, "losers"),
    ):
        for name, mutant in mutants(elite, where, 30):
            assert (name, mutant.inputs) == ("shift", (elite.key,))
            moved = [c for c in mutant.operation["coefficients"].values() if any(c)]
            assert len(moved) == 1 and len(moved[0]) == 3
            assert list(mutant.operation["coefficients"]) == list(GROUPS)


def test_steps_are_as_large_as_the_settings_say() -> None:
    where = space(recipe_mutation=1.0, shift_sigma=0.2)
    drawn = [
        c
        for _, mutant in mutants(parent(0), where, 400)
        for row in mutant.operation["coefficients"].values()
        for c in row
        if c
    ]
    assert np.std(drawn) == pytest.approx(0.2, rel=0.1)
    _, once = mutate(where, parent(0), generator("test"), 1.0)
    _, twice = mutate(where, parent(0), generator("test"), 2.0)
    steps = [np.array([*c.operation["coefficients"].values()]) for c in (once, twice)]
    assert steps[1] == pytest.approx(2 * steps[0], abs=1e-5)
    elite = combo_of(where, 0, where.parents, 7, "combo")
    scales = [m.operation["scale"] for name, m in mutants(elite, where, 600) if name == "scale"]
    assert np.std(np.log(scales)) == pytest.approx(0.6, rel=0.25)  # three parents share the sum


# -- settings -------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "generations": ({"generations": 3}, {"generations": 4}, None),
    "population_size": ({"population_size": 8}, {"population_size": 7}, None),
    "elite_count": (
        {"population_size": 16, "elite_count": 4},
        {"population_size": 16, "elite_count": 5},
        None,
    ),
    "recipe_mutation": ({}, {"recipe_mutation": 0.2}, None),
    "shift_sigma": ({}, {"shift_sigma": 0.2}, None),
    "mutation_sigma": (
        {"recipe_mutation": 0.5},
        {"recipe_mutation": 0.5, "mutation_sigma": 0.02},
        None,
    ),
    "mutation_rate": (
        {"recipe_mutation": 0.5},
        {"recipe_mutation": 0.5, "mutation_rate": 0.02},
        None,
    ),
    "layer_paths": ({}, {"layer_paths": 0.5}, None),
    "parent_weights": ({}, {"parent_weights": [1.0, 2.0, 3.0]}, None),
    "drop_rate": ({}, {"drop_rate": 0.5}, None),
    "keep": ({}, {"keep": 0.5}, None),
    "linear_weight": ({}, {"linear_weight": 0.5}, None),
    "slerp_t": ({}, {"slerp_t": 0.3}, None),
    "amplification": ({}, {"amplification": 2.0}, None),
    "layer_parents": ({}, {"layer_parents": [0, 2]}, None),
    "dfs_ratio": ({}, {"dfs_ratio": 0.3}, None),
    "early_stopping": (
        {"generations": 7, "convergence_threshold": 1.0},
        {"generations": 7, "convergence_threshold": 1.0, "early_stopping": False},
        None,
    ),
    "convergence_threshold": (
        {"generations": 7, "convergence_threshold": 1e-6},
        {"generations": 7, "convergence_threshold": 1.0},
        None,
    ),
    "convergence_patience": (
        {"generations": 7, "convergence_threshold": 1.0},
        {"generations": 7, "convergence_threshold": 1.0, "convergence_patience": 2},
        None,
    ),
    "max_evaluations": ({}, {"max_evaluations": 20}, None),
    "min_diversity": ({}, {"min_diversity": 0.5}, 0.4),
    "mutation_boost": ({}, {"mutation_boost": 3.0}, 0.25),
    "diversity_reseed_threshold": ({}, {"diversity_reseed_threshold": 0.27}, 0.25),
}


def test_every_setting_has_its_check() -> None:
    of_others = {name for name, acts in ACTS_IN.items() if "spec" not in acts}  # test_strategies
    assert set(FIELDS) | of_others | {"strategy"} == set(EvolutionSettings.model_fields)


@pytest.mark.parametrize("field", FIELDS)
def test_every_setting_changes_the_run(field: str) -> None:
    one, other, diversity = FIELDS[field]
    base = {"generations": 4}
    runs = []
    for given in (one, one, other):
        evolution = start(**{**base, **given})
        rising: Score = lambda c, e=evolution: 0.01 * by_key(c) + 0.0005 * e.generation  # noqa: E731
        runs.append(run(evolution, rising, diversity))
    assert trace(runs[0]) == trace(runs[1])
    assert trace(runs[0]) != trace(runs[2])


def test_population_sizes_are_those_that_the_scheme_serves() -> None:
    served = {}
    for size in range(1, 30):
        try:
            served[size] = EvolutionSettings(strategy="spec", population_size=size)
        except ValidationError as error:
            assert "allowed sizes are 4, 7, 8 and every size from 10 on" in str(error)
    assert sorted(served) == [4, 7, 8, *range(10, 30)]
    for size, settings in served.items():
        elites, triples = settings.elite_count, settings.triples
        assert 3 * elites + triples == size and triples >= 1 and 3 * triples <= size - elites
    assert EvolutionSettings(strategy="spec").elite_count == served[8].elite_count == 2
    with pytest.raises(ValidationError, match="set elite_count to 2"):
        EvolutionSettings(strategy="spec", population_size=8, elite_count=1)
    with pytest.raises(ValidationError, match="set elite_count to 1"):
        EvolutionSettings(strategy="spec", population_size=4, elite_count=2)


@pytest.mark.parametrize("size", [4, 7, 10, 16])
def test_other_sizes_keep_to_the_scheme(size: int) -> None:
    evolution = start(population_size=size, generations=5, early_stopping=False)
    settings = evolution.settings
    if size == 4:
        combos = [c.operation["combo"] for c in evolution.population]
        assert combos == [0b000, 0b011, 0b101, 0b110]  # each technique twice, each two once
    if size > 8:
        assert all("variant" in c.origin for c in evolution.population[8:])
    while evolution.finished is None:
        population = evolution.population
        assert len(population) == len(set(population)) == size
        if evolution.generation:
            uses = ["mutation" in c.origin for c in population]
            assert uses == [True] * 3 * settings.elite_count + [False] * settings.triples
        step(evolution)
    assert all(len(c.inputs) == 3 for c in evolution.candidates.values() if "losers" in c.origin)


@pytest.mark.parametrize(
    "wrong",
    [
        {"diversity_reseed_threshold": 0.4},
        {"keep": 0.0},
        {"drop_rate": 1.0},
        {"mutation_rate": 1.5},
        {"shift_sigma": 0.0},
        {"convergence_patience": 0},
        {"elites": 2},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvolutionSettings(**{"strategy": "spec", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [{"parents": 1}, {"groups": ()}, {"groups": ("a", "a")}, {"layers": ("0", "0")}],
)
def test_a_search_without_anything_to_search_is_refused(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"parents": 3, "groups": GROUPS, "seed": 0, **wrong}
    with pytest.raises(ConfigError):
        EvolutionSearch(EvolutionSettings(strategy="spec"), **given)


# -- stopping and diversity -----------------------------------------------------------------------


def test_it_stops_when_the_champion_no_longer_improves() -> None:
    evolution = start(convergence_patience=3)
    for number in range(5):  # generation 4 is the last improvement that counts
        step(evolution, lambda c, n=number: 0.1 * n)
    assert evolution.finished is None
    for _ in range(3):
        assert evolution.finished is None
        step(evolution, lambda c: 0.4005)
    assert evolution.finished == "converged" and evolution.generation == 7
    with pytest.raises(ValueError, match="finished"):
        evolution.advance()


def test_a_slow_but_steady_gain_is_no_convergence() -> None:
    evolution = start(generations=30)
    while evolution.finished is None:
        step(evolution, lambda c: 0.0003 * evolution.generation)  # 0.0015 in five generations
    assert evolution.finished == "generations"


def test_the_holdout_decides_when_it_is_told() -> None:
    def go(holdout: Callable[[int], float | None]) -> EvolutionSearch:
        evolution = start(generations=30, convergence_patience=4)
        while evolution.finished is None:
            for candidate in evolution.ask():
                evolution.tell(candidate.key, 0.1 * evolution.generation)  # fitness always improves
            champion, value = evolution.champion, holdout(evolution.generation)
            assert champion
            if value is not None:
                evolution.tell(champion.key, evolution.scores[champion.key], holdout=value)
            evolution.advance()
        assert [entry["holdout"] for entry in evolution.history][3] == holdout(3)
        return evolution

    falling = go(lambda n: 0.5 - 0.1 * abs(n - 6))
    assert (falling.finished, falling.generation) == ("converged", 10)
    assert go(lambda n: None).finished == "generations"
    assert go(lambda n: 0.1 * n).finished == "generations"
    assert go(lambda n: 0.5 if n != 2 else None).finished == "generations"


def test_low_diversity_strengthens_mutation_and_then_reseeds() -> None:
    def children(diversity: float | None) -> EvolutionSearch:
        evolution = start(recipe_mutation=0.0, mutation_boost=3.0)
        step(evolution, diversity=diversity)
        return evolution

    told: list[float | None] = [None, 0.31, 0.29, 0.21, 0.19, 0.0]
    for diversity, boosted in zip(told, [1, 1, 3, 3, 3, 3], strict=True):
        evolution = children(diversity)
        sigmas = {c.operation["sigma"] for c in evolution.population[:6]}
        assert sigmas == {0.01 * boosted}
        fresh = diversity is not None and diversity < 0.2
        parents = tuple(c.key for c in start().survivors[:3])
        assert [c.inputs == parents for c in evolution.population[6:]] == [fresh, fresh]
        step(evolution, diversity=0.9)
        assert evolution.history[1]["strength"] == boosted
        assert evolution.history[1]["operators"].get("reseed", 0) == 2 * fresh
        assert {c.operation.get("sigma") for c in evolution.population[:6]} == {0.01}
    weights = [c.operation["weights"] for c in children(0.1).population[6:]]
    assert weights[0] != weights[1]


def test_equal_parents_count_as_no_diversity() -> None:
    evolution = start()
    for candidate in evolution.ask():
        evolution.tell(candidate.key, 0.0)
    evolution.tell_distances(0.5, 0.0)
    evolution.advance()
    assert evolution.history[0]["diversity"] == 0.0
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(NotFinite):
            evolution.tell_distances(wrong, 1.0)


# -- failures -------------------------------------------------------------------------------------


def test_failed_candidates_are_neither_mutated_nor_merged() -> None:
    def flaky(candidate: Candidate) -> float:
        return -math.inf if int(candidate.key[-1], 16) % 2 else by_key(candidate)

    evolution = run(start(generations=25, early_stopping=False), flaky)
    assert evolution.finished == "generations"
    assert sum(entry["failed"] for entry in evolution.history) > 50
    used = {i for c in evolution.candidates.values() for i in c.inputs}
    originals = {c.key for c in start().survivors}
    assert used - originals
    assert all(evolution.scores[key] > -math.inf for key in used - originals)
    elites = {key for entry in evolution.history for key in entry["elites"]}
    assert all(evolution.scores[key] > -math.inf for key in elites)
    merged = {i for c in evolution.candidates.values() if "losers" in c.origin for i in c.inputs}
    assert merged and not merged & elites
    json.dumps(evolution.history, allow_nan=False)
    assert all(len(c.inputs) == 3 for c in evolution.candidates.values() if "losers" in c.origin)


def test_a_generation_that_fails_whole_does_not_end_the_run() -> None:
    evolution = start(generations=4, early_stopping=False)
    step(evolution, lambda c: -math.inf)  # the parents too
    assert evolution.champion is None and evolution.survivors == []
    assert (evolution.history[0]["best"], evolution.history[0]["mean"]) == (None, None)
    assert all(c.kind == "merge" for c in evolution.population)
    assert len(set(evolution.population)) == 8
    lucky = evolution.population[3]
    step(evolution, lambda c: 0.5 if c == lucky else -math.inf)
    assert evolution.champion == lucky
    assert all(lucky.key[:8] in c.origin for c in evolution.population[:6])
    step(evolution, lambda c: -math.inf)
    assert evolution.champion == lucky
    run(evolution)
    assert evolution.finished == "generations" and evolution.champion != lucky


def test_a_run_in_which_nothing_ever_scores_says_so() -> None:
    evolution = run(start(convergence_patience=3), lambda c: -math.inf)
    assert (evolution.finished, evolution.generation) == ("failed", 3)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_what_is_not_a_score_is_refused(score: float) -> None:
    evolution = start()
    key = evolution.ask()[0].key
    with pytest.raises(NotFinite, match=f"{key[:8]} cannot have the score {score}") as caught:
        evolution.tell(key, score)
    assert "-inf" in caught.value.hint
    for holdout in (score, -math.inf):
        with pytest.raises(NotFinite):
            evolution.tell(key, 0.5, holdout=holdout)
    assert evolution.ask()[0].key == key  # nothing was taken


def test_telling_something_else_is_refused() -> None:
    evolution = start()
    first, second, *_ = evolution.ask()
    evolution.tell(first.key, 0.5)
    evolution.tell(first.key, 0.5, holdout=0.4)  # the same again is fine
    with pytest.raises(ValueError, match="had the score"):
        evolution.tell(first.key, 0.6)
    with pytest.raises(ValueError, match="had the score"):
        evolution.tell(first.key, 0.5, holdout=0.3)
    with pytest.raises(ValueError, match="no candidate of generation 0"):
        evolution.tell(noise(second, 1).key, 0.5)
    with pytest.raises(ValueError, match="11 candidates have no score yet"):
        evolution.advance()


# -- duplicates -----------------------------------------------------------------------------------


def test_duplicates_of_generation_0_become_variants() -> None:
    evolution = start()
    before = evolution.population
    evolution.tell_duplicates([before[6].key, before[2].key, before[4].key])
    after = evolution.population
    changed = [n for n in range(8) if before[n] != after[n]]
    assert changed == [4, 6]  # the first of them stays
    for n in changed:
        old, new = before[n].operation, after[n].operation
        assert after[n].inputs == before[n].inputs and new["combo"] == old["combo"]
        assert all(new[k] != old[k] for k in ("drop_rate", "keep", "weights", "seed"))
    assert [c for c in evolution.ask()[4:] if c not in before] == [after[4], after[6]]
    step(evolution)
    assert (evolution.history[0]["variants"], evolution.history[0]["distinct"]) == (2, 8)


def test_a_duplicate_of_a_reference_point_is_replaced_and_the_reference_stays() -> None:
    evolution = start()
    average, combo = evolution.ask()[3:5]
    evolution.tell_duplicates([combo.key, average.key])
    assert average in evolution.ask() and combo not in evolution.ask()
    evolution.tell_duplicates([c.key for c in evolution.survivors])
    assert evolution.survivors == start().survivors


def test_candidates_that_stay_alike_are_left_alone_in_the_end() -> None:
    evolution = start(generations=1)
    seen = set()
    for _ in range(MOST_VARIANTS + 3):
        pair = [c.key for c in evolution.population[:2]]
        seen.add(pair[1])
        evolution.tell_duplicates(pair)
    assert len(seen) == MOST_VARIANTS + 1
    step(evolution)
    assert (evolution.history[0]["variants"], evolution.history[0]["distinct"]) == (1, 7)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_duplicates_in_any_order_give_the_same(generation: int) -> None:
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        evolution = start(recipe_mutation=1.0, generations=4)
        for _ in range(generation):
            step(evolution)
        keys = [c.key for c in evolution.population]
        told = [(keys[0], keys[1]), (keys[1], keys[2]), (keys[2], keys[7], keys[5])]
        for n in order:
            evolution.tell_duplicates(told[n])
        assert [n for n in range(8) if evolution.population[n].key != keys[n]] == [1, 2, 5, 7]
        results.append(trace(run(evolution))[1:])
    assert all(result == results[0] for result in results)
    with pytest.raises(ValueError, match="no candidate"):
        start().tell_duplicates(["0" * 64])


# -- state and reproduction -----------------------------------------------------------------------


def flaky_world(evolution: EvolutionSearch) -> Score:
    world = World(3)

    def score(candidate: Candidate) -> float:
        failed = candidate.key.startswith("0")
        return -math.inf if failed else world.score(evolution.candidates, candidate.key)

    return score


def eventful(evolution: EvolutionSearch, shuffle: random.Random | None = None) -> None:
    """A generation with duplicates, failures, distances and holdouts, told in any order."""
    score, number = flaky_world(evolution), evolution.generation
    if number % 3 == 0 and not any(len(tried) > 1 for tried in evolution._tried):
        evolution.tell_duplicates([evolution.population[n].key for n in (1, 4)])
    waiting = evolution.ask()
    if shuffle:
        shuffle.shuffle(waiting)
    for candidate in waiting:
        value = score(candidate)
        holdout = value / 2 if value > -math.inf else None
        evolution.tell(candidate.key, value, holdout=holdout)
    evolution.tell_distances((0.5, 0.25, 0.15)[number % 3], 1.0)
    evolution.advance()


def finish(evolution: EvolutionSearch, shuffle: random.Random | None = None) -> EvolutionSearch:
    while evolution.finished is None:
        eventful(evolution, shuffle)
    return evolution


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_changes_nothing(seed: int) -> None:
    straight = finish(start(2, generations=8))
    np.random.seed(seed)  # nobody here may look at it
    shuffled = finish(start(2, generations=8), random.Random(seed))
    assert trace(shuffled) == trace(straight)
    assert shuffled.scores == straight.scores
    assert shuffled.champion == straight.champion


def test_the_same_seed_gives_the_same_candidates_in_every_version() -> None:
    """Old journals can be resumed only as long as this holds."""
    evolution = run(start(42, generations=6, early_stopping=False), diversity=0.25)
    keys = "".join(evolution.candidates).encode()
    assert hashlib.sha256(keys).hexdigest()[:16] == "699f7d7190b47243"
    assert set(start(43).population).isdisjoint(start(42).population)


# -- how it is built ------------------------------------------------------------------------------


def test_it_is_a_strategy() -> None:
    assert isinstance(start(), SearchStrategy)


@pytest.mark.parametrize(
    ("module", "absent"), [("evolution", ["torch"]), ("settings", ["torch", "numpy"])]
)
def test_it_loads_nothing_heavy(module: str, absent: list[str]) -> None:
    code = (
        f"import sys, agent_forge.search.{module}; print(sorted(set(sys.modules) & set({absent})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_how_many_generations_are_left() -> None:
    """As many as patience lasts, unless the champion improves; none when it has ended."""
    patience = {"convergence_patience": 3, "convergence_threshold": 0.5, "generations": 9}
    search = start(**patience)
    left = []
    while search.finished is None:
        while asked := search.ask():
            search.tell(asked[0].key, 0.25 if search.generation < 1 else 0.2)
        search.advance()
        left.append(search.generations_left())
    assert left[0] == 3 and left[-1] == 0 and left == sorted(left, reverse=True)
