"""Every strategy behind the one interface: the same from the same seed, whatever the order, and
from every state; and none of them is worse than guessing.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.search import operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import Candidate
from agent_forge.search.continuous import CandidateVector, coefficients_of
from agent_forge.search.evolution import combos_of, distance
from agent_forge.search.portfolio import STRATEGIES
from agent_forge.search.settings import ACTS_IN, EvolutionSettings
from tests.support.extras import NEEDS_PYMOO, with_pymoo

GROUPS = ("embeddings", "layers.0", "layers.1", "rest")
PARENTS = 3
NAMES = list(STRATEGIES)
BEST = np.array([[0.1, 0.7, 0.2], [0.5, 0.1, 0.5], [0.0, 0.4, 0.6], [0.3, 0.3, 0.9]])


def start(name: str, seed: int = 0, **settings: Any) -> SearchStrategy:
    made = EvolutionSettings(**{"strategy": name, "generations": 4, **settings})
    return STRATEGIES[made.strategy](
        made, parents=PARENTS, groups=GROUPS, seed=seed, layers=("0", "1")
    )


class Bowl:
    """Coefficients are all that there is of a model, and their distance from BEST is the loss."""

    def __init__(self, search: SearchStrategy) -> None:
        self.search = search

    def grid(self, candidate: Candidate) -> np.ndarray:
        """Group by parent; a combo is its weights, disturbed by whatever else is in its recipe."""
        operation, inputs = candidate.operation, candidate.inputs
        rows = [self.grid(self.search.candidates[key]) for key in inputs]
        if candidate.kind == "parent":
            return np.tile(np.eye(PARENTS)[operation["index"]], (len(GROUPS), 1))
        if candidate.kind == "average":
            return np.mean(rows, 0)
        if candidate.kind == "method":
            return 0.2 * np.sum(rows, 0) + 0.1 * (operation["method"] == "karcher")
        if candidate.kind == "stretch":
            return np.asarray(operation["scale"] * rows[0])
        if candidate.kind == "path":
            return rows[0] + 0.01 * len(operation["layers"])
        if candidate.kind in ("blend", "shift"):
            grid = np.array([operation["coefficients"][group] for group in GROUPS])
            if candidate.kind == "blend":
                return grid * operation["scale"] * (np.array(inputs) != "")[:, None].T
            return rows[0] + grid
        if candidate.kind == "noise":
            noise = np.random.default_rng(operation["seed"]).standard_normal(rows[0].shape)
            return rows[0] + operation["sigma"] * noise
        weights = np.array([operation["weights"][group] for group in GROUPS])
        mixed = np.einsum("gi,igp->gp", weights / weights.sum(1, keepdims=True), np.array(rows))
        return operation["scale"] * mixed + 0.02 * operation["combo"] - 0.05 * operation["keep"]

    def score(self, candidate: Candidate) -> float:
        return 1 - float(((self.grid(candidate) - BEST) ** 2).sum())

    def gradient(self, candidate: Candidate) -> dict[str, list[float]]:
        return dict(zip(GROUPS, (-2 * (self.grid(candidate) - BEST)).tolist(), strict=True))

    def objectives(self, candidate: Candidate) -> dict[str, float]:
        losses = ((self.grid(candidate) - BEST) ** 2).sum(1)
        return {"a": -float(losses[:2].sum()), "b": -float(losses[2:].sum())}


def tell(search: SearchStrategy, candidate: Candidate) -> None:
    bowl = Bowl(search)
    search.tell(
        candidate.key,
        search.scores.get(candidate.key, bowl.score(candidate)),
        objectives=bowl.objectives(candidate),
        gradient=bowl.gradient(candidate) if candidate.key == search.gradient_of else None,
    )


def measure(
    search: SearchStrategy,
    order: Callable[[list[Candidate]], Candidate] = lambda c: c[0],
    diversity: float = 0.5,
) -> None:
    while asked := search.ask():
        tell(search, order(asked))
    champion = search.champion
    assert champion is not None
    search.tell(champion.key, search.scores[champion.key], holdout=search.scores[champion.key])
    search.tell_distances(2 * diversity, 2.0)


def run(
    search: SearchStrategy,
    order: Callable[[list[Candidate]], Candidate] = lambda c: c[0],
    diversity: float = 0.5,
) -> SearchStrategy:
    while search.finished is None:
        measure(search, order, diversity)
        search.advance()
    return search


def trace(search: SearchStrategy) -> tuple[list[str], list[dict[str, Any]], str | None]:
    return list(search.candidates), search.history, search.finished


# -- one interface --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", with_pymoo())
def test_the_same_seed_gives_the_same_run_whatever_is_random_elsewhere(name: str) -> None:
    np.random.seed(1)
    random.seed(1)
    first = trace(run(start(name)))
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    np.random.seed(2)
    random.seed(2)
    assert trace(run(start(name))) == first
    np.random.seed(1)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr]  # nobody drew
    if name != "grad":  # which draws nothing as long as there are gradients
        assert trace(run(start(name, seed=1)))[0] != first[0]


@pytest.mark.parametrize("name", with_pymoo())
def test_the_order_of_telling_changes_nothing(name: str) -> None:
    rng = random.Random(3)
    expected = run(start(name))
    found = run(start(name), rng.choice)
    assert trace(found) == trace(expected)
    assert found.scores == expected.scores and found.objectives == expected.objectives
    assert found.gradients == expected.gradients


@pytest.mark.parametrize("name", with_pymoo())
@pytest.mark.parametrize("most", [3, 17, 30])
def test_so_many_evaluations_and_not_one_more(name: str, most: int) -> None:
    search = run(start(name, generations=50, max_evaluations=most, early_stopping=False))
    assert search.finished == "evaluations"
    assert len(search.scores) == most == search.history[-1]["evaluations"]
    longer = run(start(name, generations=50, max_evaluations=most + 9, early_stopping=False))
    assert list(longer.scores)[:most] == list(search.scores)


@pytest.mark.parametrize("name", with_pymoo())
def test_failures_cost_themselves(name: str) -> None:
    search = start(name)
    failed = 0
    while search.finished is None:
        while asked := search.ask():
            candidate = asked[0]
            if candidate.kind not in ("parent", "average") and int(candidate.key, 16) % 3 == 0:
                wanted = candidate.key == search.gradient_of
                search.tell(candidate.key, -math.inf, gradient={} if wanted else None)
                failed += 1
            else:
                tell(search, candidate)
        search.advance()
    assert failed and search.finished == "generations"
    assert sum(entry["failed"] for entry in search.history) == failed


def test_gradients_go_on_from_a_point_that_is_not_among_the_best() -> None:
    search = start("grad")
    better = {c.key: 2.0 for c in search.survivors[:3]}
    while search.finished is None:
        while asked := search.ask():
            key = asked[0].key
            if key not in search.scores:
                search.tell(key, better.get(key, Bowl(search).score(asked[0])))
            tell(search, asked[0])
        search.advance()
    assert len(search.gradients) > 5 and search.gradients[-1][0] not in {
        c.key for c in search.survivors
    }
    assert search.champion and search.champion.kind == "parent"


def test_auto_steps_from_the_average_though_a_combo_is_ahead() -> None:
    """Unless that does not help: then from the best."""
    search = start("auto", generations=9)
    average = next(c.key for c in search.survivors if c.kind == "average")
    flat = {group: [1.0, 0.0, 0.0] for group in GROUPS}
    while len(search.gradients) < 3:
        while asked := search.ask():
            key = asked[0].key
            score = 0.9 if asked[0].origin.startswith("combo") else 0.5
            wanted = flat if key == search.gradient_of else None
            search.tell(key, search.scores.get(key, score), gradient=wanted)
        best = search.champion
        assert best is not None
        search.tell(best.key, 0.9, holdout=0.9)
        search.tell_distances(1.0, 2.0)
        search.advance()
    from_where = [search.candidates[key] for key, _ in search.gradients]
    assert from_where[0].key == average and from_where[1].origin.startswith("combo")


def test_what_is_no_gradient_is_refused() -> None:
    search = start("grad")
    while not search.gradient_of:
        tell(search, search.ask()[0])
    key = search.gradient_of
    with pytest.raises(NotFinite):
        search.tell(key, search.scores[key], gradient={"rest": [math.nan] * 3})
    assert [c.key for c in search.ask()] == [key]


# -- each finds something -------------------------------------------------------------------------


def guessed(seed: int, evaluations: int, *, recipes: bool = False) -> float:
    """The best of random coefficients around the average, or of random recipes."""
    search = start("cma-es")
    box, rng = CandidateVector(search.space), np.random.default_rng(seed)
    scores = [Bowl(search).score(c) for c in search.survivors]
    while len(scores) < evaluations:
        if recipes:
            parents, combo = search.space.parents, int(rng.integers(8))
            made = operators.combo_of(search.space, combo, parents, 0, "")
            made = operators.variant(search.space, made, operators.generator(seed, len(scores)))
        else:
            made = box.candidate(box.start() + 0.15 * rng.standard_normal(12), "")
        scores.append(Bowl(search).score(made))
    return max(scores)


@pytest.mark.parametrize("name", with_pymoo())
@pytest.mark.parametrize("seed", range(3))
def test_it_beats_guessing(name: str, seed: int) -> None:
    settings = {"generations": 100, "max_evaluations": 100, "early_stopping": False}
    if name == "ga":  # nothing of a model can be noisy here
        settings["recipe_mutation"] = 1.0
    search = run(start(name, seed, **settings))
    by_guess = guessed(seed, 100, recipes=name in ("spec", "ga"))
    assert 1 - search.history[-1]["best"] < 0.9 * (1 - by_guess)


def test_no_file_of_the_folder_steers_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pycma reads its options from a file that lies where it runs, unless told otherwise."""
    settings = {"generations": 6, "max_evaluations": 60, "early_stopping": False}
    found = []
    for name, text in (("clean", ""), ("strange", "{'CMA_on': 0, 'minstd': 0.6}")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if text:
            Path("cma_signals.in").write_text(text)
        found.append(run(start("cma-es", 1, **settings)).history)
    assert found[0] == found[1]


def test_gradients_need_few_steps() -> None:
    search = run(start("grad", generations=100, max_evaluations=40, early_stopping=False))
    assert search.history[-1]["best"] > 0.98
    assert len(search.gradients) < 40
    assert 1 - search.history[-1]["best"] < (1 - guessed(0, 40)) / 10


def test_auto_goes_on_with_what_pays() -> None:
    search = run(start("auto", generations=100, max_evaluations=150, early_stopping=False))
    ways = search.history[-1]["ways"]
    assert all(uses for uses, _ in ways.values())
    assert ways["gradient"][0] > ways["combo"][0]
    assert search.history[-1]["best"] > 0.99


@NEEDS_PYMOO
def test_the_front_has_whom_nobody_beats() -> None:
    search = run(start("nsga2", generations=8))
    front = search.history[-1]["front"]
    assert len(front) > 1
    for key, told in search.objectives.items():
        beaten = any(
            all(o[n] >= told[n] for n in told) and any(o[n] > told[n] for n in told)
            for o in front.values()
        )
        assert beaten != (key in front)
    assert search.champion and search.scores[search.champion.key] == max(search.scores.values())


def test_without_pymoo_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pymoo", "pymoo.algorithms.moo.nsga2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="pymoo") as caught:
        start("nsga2")
    assert "agent-forge[multi]" in (caught.value.hint or "")


# -- recipes --------------------------------------------------------------------------------------


def test_crossover_takes_every_part_from_one_of_two() -> None:
    search = run(start("ga", crossover_rate=1.0, generations=6, early_stopping=False))
    children = [c for c in search.candidates.values() if c.origin.startswith("crossover")]
    assert len(children) == 48
    for child in children:
        pair = [search.candidates[key].operation for key in search._origins[child.key].against]
        parts = dict(child.operation)
        rows = parts.pop("weights")
        strange = [n for n, v in parts.items() if all(v != p[n] for p in pair)]
        strange += [g for g, row in rows.items() if all(row != p["weights"][g] for p in pair)]
        assert set(strange) <= {"layers"} or len(strange) <= 1  # the mutation
    assert not [
        c
        for c in run(start("ga", crossover_rate=0.0)).candidates.values()
        if "crossover" in c.origin
    ]


def test_sharing_lowers_those_that_are_alike() -> None:
    search = start("ga", diversity_weight=1.0)
    a = search.population[0]
    twin = Candidate({**a.operation, "scale": 1.001}, a.inputs, "twin")
    other = search.population[3]
    for candidate in (a, twin, other):
        search.candidates[candidate.key] = candidate
        search.scores[candidate.key] = 0.5
    search.scores[search.population[1].key] = 0.0
    shared = search._shared_fitness([a.key, twin.key, other.key, search.population[1].key])  # type: ignore[attr-defined]
    assert distance(a.operation, twin.operation) < 0.01 < distance(a.operation, other.operation)
    assert shared[a.key] == pytest.approx(0.5, abs=0.01) and shared[other.key] > shared[a.key]


def test_techniques_limit_the_combos() -> None:
    few = ["linear", "ties", "frankenmerge", "dfs"]
    settings = EvolutionSettings(strategy="ga", techniques=few)
    assert sorted(combos_of(settings)) == [0b010, 0b011]
    search = run(start("ga", techniques=few, early_stopping=False))
    used = {c.operation["combo"] for c in search.candidates.values() if c.kind == "merge"}
    assert used == {0b010, 0b011}
    with pytest.raises(ValidationError, match="linear or slerp"):
        EvolutionSettings(strategy="ga", techniques=["dare", "dfs"])


def test_a_chain_of_shifts_is_one_place() -> None:
    search = start("auto")
    space, known = search.space, dict(search.candidates)
    combo = search.population[0]
    rows = {group: [0.1, 0.0, -0.2] for group in GROUPS}
    once = operators.shifted(combo.key, rows, "")
    twice = operators.shifted(once.key, rows, "")
    blend = operators.blend(space, "linear", rows, scale=2.0)
    moved = operators.shifted(blend.key, rows, "")
    known |= {c.key: c for c in (once, twice, blend, moved)}
    assert coefficients_of(space, known, twice.key)[0] == combo.key
    assert coefficients_of(space, known, twice.key)[1][:3] == pytest.approx([0.2, 0, -0.4])
    assert coefficients_of(space, known, moved.key)[0] is None
    assert coefficients_of(space, known, moved.key)[1][:3] == pytest.approx([0.3, 0, -0.6])


def test_a_box_is_one_row_or_one_a_group() -> None:
    space = start("cma-es").space
    wide = CandidateVector(space, "ties", per_layer=True, scaled=True)
    assert len(wide.start(0.5)) == 4 * 3 + 4 + 1
    narrow = CandidateVector(space, "dare_ties", per_layer=False, scaled=True, seed=7)
    made = narrow.candidate(np.array([0.1, 0.2, 2.0, 0.5, 1.5]), "x").operation
    assert made["coefficients"] == {g: [0.1, 0.2, 1.2] for g in GROUPS}  # the bound
    assert made["density"] == dict.fromkeys(GROUPS, 0.5)
    assert (made["scale"], made["seed"], made["method"]) == (1.5, 7, "dare_ties")


# -- settings -------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "elite_count": 5,
    "shift_sigma": 0.2,
    "parent_weights": [1.0, 2.0, 3.0],
    "drop_rate": 0.5,
    "keep": 0.4,
    "recipe_mutation": 0.5,
    "mutation_sigma": 0.02,
    "mutation_rate": 0.02,
    "min_diversity": 0.4,
    "mutation_boost": 3.0,
    "diversity_reseed_threshold": 0.1,
    "tournament_size": 2,
    "crossover_rate": 0.2,
    "selection_pressure": 0.9,
    "diversity_weight": 0.9,
    "techniques": ["linear", "ties", "dfs"],
    "blend_method": "ties",
    "density": 0.3,
    "per_layer": False,
    "start_sigma": 0.3,
    "layer_paths": 0.5,
    "gradient_step": 0.03,
    "gradient_share": 0.25,
    "auto_version": 1,
    "methods": ["tsv_m", "karcher"],
    "ga_version": 1,
    "linear_weight": 0.5,
    "slerp_t": 0.3,
    "amplification": 2.0,
    "layer_parents": [0, 2],
    "dfs_ratio": 0.3,
}
LOW = {"min_diversity": 0.35, "mutation_boost": 0.25}  # diversity at which they act


def test_every_field_of_some_strategies_is_refused_in_the_others() -> None:
    assert set(OTHER) == set(ACTS_IN)
    for name, value in OTHER.items():
        for strategy in NAMES:
            given: Mapping[str, Any] = {"strategy": strategy, name: value}
            if strategy in ACTS_IN[name]:
                size = {"population_size": 16} if name == "elite_count" else {}
                method = {"blend_method": "ties"} if name == "density" else {}
                EvolutionSettings(**given, **size, **method)
            elif name in ("auto_version", "ga_version"):  # as if there were no such field
                EvolutionSettings(**given)
            else:
                with pytest.raises(ValidationError, match=f"{name} has no meaning"):
                    EvolutionSettings(**given)
    with pytest.raises(ValidationError, match="not linear"):
        EvolutionSettings(strategy="cma-es", density=0.3)
    dumped = EvolutionSettings(strategy="cma-es", population_size=9).model_dump()
    assert EvolutionSettings(**dumped).population_size == 9  # written down and read again


@pytest.mark.parametrize("field", sorted(set(ACTS_IN) - {"gradient_share"}))
def test_every_field_changes_the_run_of_each_strategy_that_has_it(field: str) -> None:
    for strategy in ACTS_IN[field]:
        if strategy in ("spec", "nsga2"):
            continue  # tests/search/test_evolution.py, and what is the same code as cma-es
        more = {"blend_method": "ties"} if field == "density" else {}
        size = {"population_size": 16} if field == "elite_count" else {}
        more |= {**size, "generations": 30, "early_stopping": False}
        if strategy == "auto":
            more |= {"generations": 60}  # until every way has had many turns
        how = {"diversity": LOW.get(field, 0.5)}
        plain = run(start(strategy, **more), **how)
        changed = run(start(strategy, **more, **{field: OTHER[field]}), **how)
        assert trace(plain) != trace(changed), (strategy, field)


def test_small_populations_are_refused() -> None:
    with pytest.raises(ValidationError, match="below 4"):
        EvolutionSettings(strategy="cma-es", population_size=3)
    assert EvolutionSettings(strategy="grad", population_size=5).population_size == 5


def test_the_budget_ends_a_search_that_looks_ahead() -> None:
    """The last ones of a budget are not left for a generation that never comes."""
    search = start("ga", generations=50, max_evaluations=30, early_stopping=False)
    while search.finished is None:
        while asked := search.pending:
            search.tell(asked[0].key, 0.5)
        search.tell_distances(0.5, 1.0)
        search.advance()
    assert search.finished == "evaluations" and len(search.scores) == 30
    assert search.generation < 6


# -- auto -----------------------------------------------------------------------------------------


def losing(search: SearchStrategy) -> list[Candidate]:
    return [c for c in search.candidates.values() if c.origin.startswith("losers")]


def test_auto_begins_with_all_combos_and_merges_losers() -> None:
    search = start("auto", generations=40, early_stopping=False)
    assert [c.operation["combo"] for c in search.population] == list(operators.COMBOS)
    assert start("auto", population_size=4).population == search.population
    run(search)
    assert losing(search)
    first, known = losing(search)[0], list(search.candidates.values())
    parents = {c.key for c in known[:PARENTS]}
    before = [c for c in known[: known.index(first)] if set(c.inputs) == parents]
    worst = sorted((c.key for c in before if c.kind == "merge"), key=search.scores.__getitem__)
    assert set(first.inputs) == set(worst[:3])
    assert search.operator_gains["losers"]["tried"] == len(losing(search))
    measured = start("auto").settings.planned(PARENTS)
    assert measured == 8 * 4 + 8 + PARENTS + 1
    small = EvolutionSettings(population_size=4, generations=2).planned(PARENTS)
    assert small == 4 * 2 + 8 + PARENTS + 1


def test_methods_are_tried_first_and_the_best_of_them_is_stretched() -> None:
    how: Any = {"methods": ["iso_c", "karcher"], "generations": 40, "early_stopping": False}
    search = start("auto", **how)
    assert [c.operation.get("method") for c in search.population][8:] == ["iso_c", "karcher"]
    assert search.settings.planned(PARENTS) == 8 * 40 + 10 + PARENTS + 1
    run(search)
    known = search.candidates
    stretched = [c for c in known.values() if c.kind == "stretch"]
    methods = [c for c in known.values() if c.kind == "method"]
    best = max(methods, key=lambda c: search.scores[c.key])
    assert stretched[0].inputs == (best.key,)
    assert {known[c.inputs[0]].kind for c in stretched} == {"method"}  # no chains of them
    assert max(search.scores[c.key] for c in stretched) > search.scores[best.key]
    assert search.operator_gains["stretch"]["tried"] == len(stretched)
    again = run(start("auto", **how))
    assert list(again.candidates) == list(known)
    with pytest.raises(ValidationError, match="listed twice"):
        EvolutionSettings(methods=["sce", "sce"])


def test_losers_are_merges_of_the_parents_that_did_not_fail() -> None:
    search = start("auto")
    while asked := search.pending:
        combo = asked[0].operation.get("combo")
        search.tell(asked[0].key, -math.inf if combo in (0, 1, 2, 3, 4) else 0.5 + (combo or 9))
    best = search.champion
    assert best is not None and best.kind in ("parent", "average")
    child = search._losers_child(0, best)  # type: ignore[attr-defined]
    assert {search.candidates[key].operation["combo"] for key in child.inputs} == {5, 6, 7}
    search.scores[child.inputs[0]] = -math.inf
    other = search._losers_child(0, best)  # type: ignore[attr-defined]
    assert other.inputs == tuple(list(search.candidates)[:PARENTS])  # a new combo instead


def test_the_first_version_of_auto_is_what_it_was() -> None:
    """So that evolutions which were begun with it go on: hashes of what it proposed then."""
    search = run(start("auto", auto_version=1, generations=12, early_stopping=False))
    assert len(search.population) == 8 and not losing(search)
    assert (
        hashlib.sha256("".join(search.candidates).encode()).hexdigest()[:16] == "bc2c28644f4c4bd8"
    )


@pytest.mark.parametrize(("version", "start_of"), [(2, "average"), (3, "method")])
def test_the_first_gradient_is_taken_at_the_best_that_nothing_was_trimmed_of(
    version: int, start_of: str
) -> None:
    search = start("auto", auto_version=version, methods=["svc", "tsv_m"])
    worth = {"merge": 0.9, "method": 0.7, "average": 0.5}
    while search.gradient_of is None:
        for candidate in search.ask():
            search.tell(candidate.key, worth.get(candidate.kind, 0.1))
        if search.gradient_of is None:
            search.advance()
    assert search.candidates[search.gradient_of].kind == start_of


@pytest.mark.parametrize("name", ["spec", "ga", "grad", "auto"])
def test_another_seed_from_a_generation_on(name: str) -> None:
    """What came before stays, and what comes after is another choice."""
    runs = []
    for seed in (0, 9):
        search = start(name, generations=12, early_stopping=False)
        while search.finished is None:
            measure(search)
            if search.generation == 5:
                search.reseed(seed)
            search.advance()
        born = {key: search.born(key) for key in search.candidates}
        runs.append([[k for k, g in born.items() if (g <= 5) == early] for early in (True, False)])
    assert runs[0][0] == runs[1][0] and runs[0][1] != runs[1][1]
