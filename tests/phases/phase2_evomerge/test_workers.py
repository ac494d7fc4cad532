"""Workers and racing change what an evolution costs, not what it finds."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from agent_forge.errors import ForgeError, PhaseFailed, WorkersLost
from agent_forge.evals.fitness import SHARES, DomainFitness, Incumbent, estimate, shards
from agent_forge.phases.phase2_evomerge.evaluator import CandidateEvaluator
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.store import files
from agent_forge.workers import ray_pool
from agent_forge.workers.pools import WorkerProcess
from tests.support.evo_models import POOLS, begin, family, job, journal, outcome, use_pool
from tests.support.extras import RAY
from tests.support.forked_workers import fork_workers

pytestmark = pytest.mark.slow

MANY: dict[str, Any] = {"fitness_subset_size": 100}
AUTO: dict[str, Any] = {"strategy": "auto", "generations": 1}


def champion(folder: Path) -> list[str]:
    return [files.sha256_of(folder / "champion" / n) for n in ("model.safetensors", "lineage.json")]


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What this process alone finds with the settings; not to be changed."""

    @functools.cache
    def found(**settings: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("alone") / "x"
        return outcome(run_evolution(job(folder, workers=1, **settings)).loop.folder)

    return found


@pytest.mark.parametrize(
    ("strategy", "count", "kind"),
    [
        *(("spec", 2, "inline"), ("auto", 2, "processes")),
        *(
            pytest.param(strategy, count, "processes", marks=pytest.mark.soak)
            for strategy, count in (("spec", 2), ("spec", 3), ("ga", 2))
        ),
    ],
)
def test_as_many_workers_as_you_like_find_the_same(
    tmp_path: Path,
    by_itself: Any,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    count: int,
    kind: str,
) -> None:
    use_pool(kind, monkeypatch)
    settings: dict[str, Any] = AUTO if strategy == "auto" else {"strategy": strategy}
    more = {"racing": True, "fitness_subset_size": 64} if strategy == "ga" else {}
    there = run_evolution(job(tmp_path / "x", workers=count, **settings, **more))
    assert outcome(there.loop.folder) == by_itself(**settings, **more)
    assert not list(there.loop.folder.glob("weights/workers/*/*.safetensors"))


@POOLS
def test_workers_measure_on_the_items_that_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_pool(kind, monkeypatch)
    data = tmp_path / "add.jsonl"
    shutil.copy(family() / "add.jsonl", data)
    inputs = job(tmp_path / "x", workers=2, data=[str(data)])
    data.write_text(data.read_text().replace("1", "2"))
    with pytest.raises(ForgeError, match="was changed under"):
        run_evolution(inputs)


@pytest.mark.parametrize("what", ["weights", "config", "fitness"])
def test_workers_measure_what_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """They open models and code for themselves, later, and on a cluster from other disks."""
    models, source = tmp_path / "models", tmp_path / "score_that_changes.py"
    shutil.copytree(family(), models)
    monkeypatch.chdir(tmp_path)
    fork_workers(monkeypatch)
    source.write_text("def one(model): return float(next(model.parameters()).sum())\n")
    more = {"fitness": "score_that_changes:one"} if what == "fitness" else {}
    inputs = begin(models, tmp_path / "x", workers=2, **more)

    def change(record: dict[str, Any]) -> None:
        if record["event"] != "begun":
            return
        if what == "fitness":
            source.write_text("def one(model): return 1.0\n")
            del sys.modules[source.stem]  # workers that are not forked do not have it either
        else:
            name = "model.safetensors" if what == "weights" else "config.json"
            other = (models / "base" / name).read_bytes() + b"\n" * (what == "config")
            files.write_bytes(models / "twice" / name, other)

    with pytest.raises(ForgeError, match="was changed under"):
        run_evolution(inputs, listen=change)


@pytest.mark.parametrize(
    "deaths",
    [{14: 1}, pytest.param({7: 0, 14: 1, 22: 2}, marks=pytest.mark.soak)],
    ids=["one", "one a generation"],
)
def test_a_killed_worker_costs_its_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: dict[int, int]
) -> None:
    """Killed twice, that is; the champion is that of a run in which just these failed."""
    send, fatal, doomed = WorkerProcess.send, {*deaths}, dict[str, int]()

    def and_die(self: WorkerProcess, message: Any) -> None:
        send(self, message)
        key = json.loads(message)["key"] if isinstance(message, str) else ""
        if self.number in fatal or key in doomed:
            fatal.discard(self.number or 0)
            doomed[key] = doomed.get(key, 0) + 1
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerProcess, "send", and_die)
    fork_workers(monkeypatch)
    there = run_evolution(job(tmp_path / "killed", workers=2))
    failed = {r["key"]: r["generation"] for r in journal(there.loop.folder) if r["problem"]}
    assert sorted(failed.values()) == [*deaths.values()] and not fatal
    assert set(doomed) == set(failed) and set(doomed.values()) == {2}
    monkeypatch.undo()
    measure = CandidateEvaluator.measure

    def failing(
        self: CandidateEvaluator, key: str, against: Incumbent | None = None
    ) -> dict[str, Any]:
        found = measure(self, key, against)
        return {**found, "score": None, "problem": "as it was"} if key in failed else found

    monkeypatch.setattr(CandidateEvaluator, "measure", failing)
    again = run_evolution(job(tmp_path / "again", workers=1))
    assert champion(again.loop.folder) == champion(there.loop.folder)


def test_a_worker_that_dies_once_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: Any
) -> None:
    send, fatal = WorkerProcess.send, {3, 9}

    def and_die(self: WorkerProcess, message: Any) -> None:
        send(self, message)
        if self.number in fatal:
            fatal.remove(self.number)
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerProcess, "send", and_die)
    fork_workers(monkeypatch)
    there = run_evolution(job(tmp_path / "x", workers=2, **AUTO))
    assert not fatal and outcome(there.loop.folder) == by_itself(**AUTO)


def test_a_shutdown_that_reaches_the_workers_costs_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: Any
) -> None:
    """systemd signals every process of a service; what the run journals then is kept for ever."""
    fork_workers(monkeypatch)
    signalled: set[int] = set()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "candidate" and not signalled:
            signalled.update(child.pid for child in psutil.Process().children(recursive=True))
            for pid in signalled:
                for number in (signal.SIGTERM, signal.SIGHUP):
                    os.kill(pid, number)

    todo = job(tmp_path / "signalled", workers=2, **AUTO)
    there = run_evolution(todo, listen=watch)
    assert len(signalled) >= 2 and not [r for r in journal(there.loop.folder) if r["problem"]]
    assert outcome(there.loop.folder) == by_itself(**AUTO)


@POOLS
def test_a_fitness_that_raises_in_a_worker_stops_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_pool(kind, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_score.py").write_text("def bad(model): raise KeyError('no')\n")
    with pytest.raises(PhaseFailed, match="no"):
        run_evolution(job(tmp_path / "x", workers=2, data=[], fitness="bad_score:bad"))


@pytest.mark.parametrize("executor", [RAY])
def test_a_cluster_that_goes_away_pauses_a_run_which_goes_on_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setattr(ray_pool, "SILENCE_S", 20.0)
    killed: set[int] = set()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "candidate" and event["generation"] == 1 and not killed:
            below = psutil.Process().children(recursive=True)
            parts = ("raylet", "gcs_server", "ray::")  # and what it keeps for the workers
            killed.update(child.pid for child in below if child.name().startswith(parts))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    work = job(tmp_path / "paused", workers=2, executor=executor)
    with pytest.raises(WorkersLost, match="the Ray cluster is gone") as caught:
        run_evolution(work, listen=watch)
    assert killed and caught.value.pauses and "resume" in caught.value.hint
    again = run_evolution(work)  # on a new cluster
    alone = run_evolution(job(tmp_path / "alone", workers=1))
    assert outcome(again.loop.folder) == outcome(alone.loop.folder)


# -- racing ---------------------------------------------------------------------------------------


def test_an_estimate_covers_the_whole_and_ends_in_it() -> None:
    rng, inside, wide = np.random.default_rng(1), 0, []
    for _ in range(200):
        every = [rng.normal(0.2, 1.0, 160), rng.normal(-0.1, 2.0, 80)]
        whole = sum(float(x.sum()) for x in every)
        value, error = estimate([every[0][:20], every[1][:10]], [160, 80])
        inside += abs(value - whole) <= 2 * error
        wide.append(error)
        last, none = estimate(every, [160, 80])
        assert last == pytest.approx(whole) and none == 0
    assert inside > 170 and min(wide) > 0


def test_every_item_is_met_once(tmp_path: Path) -> None:
    domains = job(tmp_path / "x", **MANY).splits["selection"]
    for domain in domains:
        shares = shards(domain)
        assert sorted(i for share in shares for i in share) == list(range(len(domain.examples)))
        assert len(shares) == len(SHARES) and len(shares[0]) == round(len(domain.examples) / 8)


def raced(folder: Path, **settings: Any) -> EvolutionLoop:
    todo = job(folder, **MANY, racing=True, **settings)
    return EvolutionLoop(todo)


def test_who_finishes_has_the_score_of_all_items(tmp_path: Path) -> None:
    run = raced(tmp_path / "x")
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    keys = [c.key for c in run.search.survivors]
    run.evaluator.fill(keys[0])
    assert fitness.race(None)[0] == pytest.approx(fitness.score().fitness)
    value, met, tokens = fitness.race(None)
    assert met is not None and tokens == fitness.tokens
    best = run.evaluator.incumbent(keys[-1], 0.9)
    raised = Incumbent("", 0.9, best.right, [[x - 3.0 for x in row] for row in best.loss])
    value, met, tokens = fitness.race(raised)  # nobody catches up with this one
    assert met is None and tokens < fitness.tokens / 2 and value < 0.9
    lowered = Incumbent("", 0.1, best.right, [[x + 3.0 for x in row] for row in best.loss])
    value, met, tokens = fitness.race(lowered)
    assert met is not None and tokens == fitness.tokens


def test_the_estimate_of_the_difference_is_that_of_the_fitness(tmp_path: Path) -> None:
    """On domains where nobody is at a bound: there fitness is no sum any more."""
    run = raced(tmp_path / "x", data=[str(family() / f"{n}.jsonl") for n in ("twice", "next")])
    fitness = run.evaluator.fitness
    assert isinstance(fitness, DomainFitness)
    scores = {}
    keys = [run.search.survivors[-1].key, run.search.population[0b101].key]
    for key in keys:
        run.evaluator.fill(key)
        scores[key] = fitness.score().fitness
    best = run.evaluator.incumbent(keys[0], scores[keys[0]])
    run.evaluator.fill(keys[1])
    _, met, _ = fitness.race(None)
    assert met is not None
    ahead = sum(
        per_nat * (sum(best.loss[d]) - sum(met[d].loss))
        + per_answer * (sum(met[d].right) - sum(best.right[d]))
        for d, (per_nat, per_answer) in enumerate(fitness.rates())
    )
    assert ahead == pytest.approx(scores[keys[1]] - scores[keys[0]], abs=1e-6)


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_race_saves_tokens_and_resumes_to_the_same_bytes(tmp_path: Path, long: bool) -> None:
    more = {**MANY, "generations": 4} if long else {"fitness_subset_size": 64, "generations": 1}
    full = run_evolution(job(tmp_path / "full", **more))
    whole = run_evolution(job(tmp_path / "raced", **more, racing=True))
    spent = [sum(r.get("tokens", 0) for r in journal(x.loop.folder)) for x in (full, whole)]
    assert spent[1] < spent[0]
    dropped = {r["key"] for r in journal(whole.loop.folder) if r.get("dropped")}
    wanted = outcome(whole.loop.folder)
    assert dropped and whole.loop.curve[-1] == max(whole.loop.curve)
    lines = (whole.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    for cut in (len(lines) // 2, len(lines) - 4)[: 1 + long]:
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "evolution.json").write_bytes((whole.loop.folder / "evolution.json").read_bytes())
        (folder / JOURNAL).write_bytes(b"".join(lines[:cut]))
        run_evolution(job(folder, **more, racing=True))
        assert outcome(folder) == wanted
    if long:  # test_layer_paths.py has a shorter one
        two = run_evolution(job(tmp_path / "two", **more, racing=True, workers=2))
        assert outcome(two.loop.folder) == wanted
