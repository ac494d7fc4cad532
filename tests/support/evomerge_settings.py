"""What the settings of Phase 2 change: a check for each, for test_settings_matter.py."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_forge.evals.domains import evaluation_hash
from agent_forge.phases.phase2_evomerge import checks, parallel, planning
from agent_forge.phases.phase2_evomerge.budget import EvaluationCosts
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import locate_inputs
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.pipeline.config import load_config
from agent_forge.search.portfolio import STRATEGIES
from agent_forge.search.settings import ACTS_IN
from agent_forge.track.journal import read_lines
from tests.support.evo_models import PARENTS, family

PHASE = "phases.evomerge"
OWN = f"{PHASE}.fitness=own_score:size"
QUICK = {
    **{"generations": 1, "fitness_subset_size": 8, "verdict_items": 8, "checkpoint_every": 1},
    **{"tasks": "[copy]", "max_level": 3, "strategy": "spec"},
}


def settings(setting: str, *more: str) -> EvoMergeSettings:
    quick = [f"{PHASE}.{name}={value}" for name, value in QUICK.items()]
    if any(f"{PHASE}.data=" in item for item in (setting, *more)):
        quick = [item for item in quick if "tasks" not in item]
    return load_config(preset="smoke", sets=(*quick, *more, setting)).phases.evomerge


def searched(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What the search asks for and records, where scores follow from the candidates' names."""
    more = [f"{PHASE}.generations=9", f"{PHASE}.convergence_threshold=0.01"]
    if "elite_count" in setting:
        more.append(f"{PHASE}.population_size=16")
    if "reseed" in setting:
        more.append(f"{PHASE}.min_diversity=0.5")
    field = setting.removeprefix(f"{PHASE}.").split("=")[0]
    if (acts := ACTS_IN.get(field, ("spec",))) and "spec" not in acts:
        more.append(f"{PHASE}.strategy={acts[0]}")
    if field == "density":
        more.append(f"{PHASE}.blend_method=ties")
    layers = ("0", "1") if field in ("layer_paths", "layer_parents") else ()
    chosen = settings(setting, *more)
    search = STRATEGIES[chosen.strategy](
        chosen, parents=3, groups=("a", "b"), seed=1, layers=layers
    )
    while search.finished is None:
        while asked := search.ask():
            candidate = asked[0]
            digest = hashlib.sha256(candidate.key.encode()).digest()
            slope = {group: [byte / 256 for byte in digest[1:4]] for group in ("a", "b")}
            search.tell(candidate.key, digest[0] / 256, gradient=slope)
        search.tell_distances(0.25, 1.0)
        search.advance()
    return list(search.candidates), search.history


def measured_on(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The items of every split."""
    patch.chdir(family())
    folders = [str(family() / name) for name in PARENTS]
    more = [f"{PHASE}.data=[add.jsonl]"] if "split_by" in setting else []
    more += [f"{PHASE}.tasks=['pack:code']"] if "partial_credit" in setting else []
    splits = locate_inputs(settings(setting, *more), folders, None, 1, root).splits
    return {split: evaluation_hash(domains) for split, domains in splits.items()}


def recomputed(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """Whether activations are computed again."""
    from agent_forge.phases.phase2_evomerge import evaluator

    asked: list[Any] = []

    def counted(run: Any, *given: Any, use_reentrant: bool, **more: Any) -> Any:
        asked.append(use_reentrant)
        return run(*given, **more)

    patch.setattr(evaluator, "checkpoint", counted)
    chosen = settings(setting, f"{PHASE}.strategy=grad", f"{PHASE}.tasks=[copy]")
    folders = [str(family() / name) for name in PARENTS]
    run_evolution(locate_inputs(chosen, folders, None, 1, root))
    return bool(asked)


EVOLVED: dict[str, Any] = {}


def evolved(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What a short evolution of three real models measures and leaves."""
    patch.chdir(root)
    (root / "own_score.py").write_text("def size(model): return float(len(str(model)))\n")
    patch.delitem(sys.modules, "own_score", raising=False)
    patch.setattr(sys, "path", list(sys.path))
    files = [str(family() / f"{name}.jsonl") for name in PARENTS]
    more = [OWN] if "direction" in setting else [f"{PHASE}.data={files}"]
    more += [f"{PHASE}.strategy=grad"] if "gradient" in setting else []
    more += [f"{PHASE}.fitness_subset_size=100"] if "racing" in setting else []
    if "reading" in setting:  # it shows in the shards of a race
        more += [
            f"{PHASE}.{x}" for x in ("strategy=auto", "racing=true", "fitness_subset_size=100")
        ]
    more += [f"{PHASE}.layer_paths=1"] if "path_gate" in setting else []
    more += [f"{PHASE}.strategy=auto"] if "finalists" in setting else []
    wanted = settings(setting, *more)
    if (known := wanted.model_dump_json()) not in EVOLVED:  # many begin with the same settings
        folders = [str(family() / name) for name in PARENTS]
        run = EvolutionLoop(locate_inputs(wanted, folders, None, 1, root / "x"))
        run.run()
        lines = [record for _, record in read_lines(root / "x" / "journal.jsonl")]
        measured = [{k: r.get(k) for k in ("record", "score", "fitness", "tokens")} for r in lines]
        EVOLVED[known] = measured, sorted(p.name for p in (root / "x").iterdir()), run.reason
    return EVOLVED[known]


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is decided before an evolution, on a machine of a known speed."""
    items = {split: {"copy": 100} for split in ("selection", "holdout", "verdict")}
    costs = EvaluationCosts(1e3, 1e3, 0.1, 0.2, 0.5, {"copy": 20.0}, items)
    patch.setattr(planning, "probe", lambda inputs, device: costs)
    folders = [str(family() / name) for name in PARENTS]
    more = [f"{PHASE}.time_budget_minutes=5"] if "heal" in setting else []
    inputs = locate_inputs(settings(setting, *more), folders, None, 1, root / "x")
    plan = planning.decided(inputs).plan
    return plan and (plan.minutes, plan.heal_s)


def taught(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What healing makes of a champion."""
    patch.chdir(family())
    folders = [str(family() / name) for name in PARENTS]
    more = [f"{PHASE}.{x}" for x in ("generations=0", "data=[add.jsonl]", "heal=0.2")]
    more += [] if "heal_steps" in setting else [f"{PHASE}.heal_steps=2"]
    wanted = settings(*more, setting)
    healed = run_evolution(locate_inputs(wanted, folders, None, 1, root / "x")).healed
    assert healed
    return healed.record["experts"], healed.losses


def staffed(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The workers that an evolution starts."""
    asked: list[Any] = []
    patch.setattr(parallel, "open_pool", lambda *a, **k: asked.append((a[:2], k)))
    patch.setattr(checks, "require_ray", lambda: None)  # none is started
    folders = [str(family() / name) for name in PARENTS]
    on_ray = "cluster" in setting or "executor=ray" in setting
    more = [f"{PHASE}.executor=ray"] if on_ray else []
    more += [] if "workers=" in setting else [f"{PHASE}.workers=2"]
    job = locate_inputs(settings(setting, *more), folders, None, 1, root / "x")
    workers = parallel.ParallelEvaluator.of(job, "cpu")
    if workers is not None:
        workers.start()
    return asked


def repeated(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The seeds that an evolution is run with."""
    folders = [str(family() / name) for name in PARENTS]
    wanted = settings(setting, f"{PHASE}.generations=0", f"{PHASE}.tasks=[copy]")
    report = run_evolution(locate_inputs(wanted, folders, None, 1, root / "x")).report
    return report and [row["seed"] for row in report.replicates]


# Where the first value is that of the preset, its evolution is the same for all.
WEIGHTS = "{perplexity: 0.4, accuracy: 0.3, speed: 0.2, memory: 0.1}"
CHECKS = {
    f"{PHASE}.finalists": (evolved, "4", "1"),
    f"{PHASE}.replicates": (repeated, "1", "2"),
    f"{PHASE}.heal": (planned, "0", "0.2"),
    f"{PHASE}.heal_steps": (taught, "2", "3"),
    f"{PHASE}.heal_data": (taught, "[]", "[next.jsonl]"),
    f"{PHASE}.heal_rate": (taught, "0.0003", "0.003"),
    f"{PHASE}.heal_rank": (taught, "16", "4"),
    f"{PHASE}.racing": (evolved, "false", "true"),
    f"{PHASE}.reading": (evolved, "plain", "fast"),
    f"{PHASE}.workers": (staffed, "2", "3"),
    f"{PHASE}.worker_threads": (staffed, "1", "2"),
    f"{PHASE}.executor": (staffed, "local", "ray"),
    f"{PHASE}.cluster": (staffed, "''", "'ray://there:10001'"),
    f"{PHASE}.strategy": (searched, "spec", "auto"),
    f"{PHASE}.auto_version": (searched, "1", "3"),
    f"{PHASE}.max_evaluations": (searched, "0", "30"),
    f"{PHASE}.tournament_size": (searched, "3", "2"),
    f"{PHASE}.crossover_rate": (searched, "0.7", "0.2"),
    f"{PHASE}.selection_pressure": (searched, "0.7", "0.9"),
    f"{PHASE}.diversity_weight": (searched, "0.3", "1.0"),
    f"{PHASE}.techniques": (searched, "[linear, dare, dfs]", "[linear, ties, dfs]"),
    f"{PHASE}.blend_method": (searched, "linear", "dare_ties"),
    f"{PHASE}.density": (searched, "0.5", "0.3"),
    f"{PHASE}.per_layer": (searched, "true", "false"),
    f"{PHASE}.start_sigma": (searched, "0.15", "0.3"),
    f"{PHASE}.gradient_step": (searched, "0.1", "0.2"),
    f"{PHASE}.gradient_share": (evolved, "0.5", "1.0"),
    f"{PHASE}.generations": (searched, "2", "3"),
    f"{PHASE}.population_size": (searched, "8", "7"),
    f"{PHASE}.elite_count": (searched, "4", "5"),
    f"{PHASE}.recipe_mutation": (searched, "0.1", "0.9"),
    f"{PHASE}.shift_sigma": (searched, "0.1", "0.2"),
    f"{PHASE}.mutation_sigma": (searched, "0.01", "0.02"),
    f"{PHASE}.mutation_rate": (searched, "0.01", "0.02"),
    f"{PHASE}.layer_paths": (searched, "0", "0.5"),
    f"{PHASE}.path_gate": (evolved, "1.01", "100"),
    f"{PHASE}.parent_weights": (searched, "[]", "[1, 2, 3]"),
    f"{PHASE}.drop_rate": (searched, "0.5", "0.9"),
    f"{PHASE}.keep": (searched, "0.2", "0.3"),
    f"{PHASE}.ga_version": (searched, "1", "2"),
    f"{PHASE}.linear_weight": (searched, "null", "0.5"),
    f"{PHASE}.slerp_t": (searched, "null", "0.3"),
    f"{PHASE}.amplification": (searched, "null", "2.0"),
    f"{PHASE}.layer_parents": (searched, "[]", "[0, 2]"),
    f"{PHASE}.dfs_ratio": (searched, "1.0", "0.3"),
    f"{PHASE}.methods": (searched, "[]", "[karcher]"),
    f"{PHASE}.partial_credit": (measured_on, "false", "true"),
    f"{PHASE}.gradient_checkpointing": (recomputed, "false", "true"),
    f"{PHASE}.early_stopping": (searched, "true", "false"),
    f"{PHASE}.convergence_threshold": (searched, "1e-9", "0.9"),
    f"{PHASE}.convergence_patience": (searched, "1", "8"),
    f"{PHASE}.min_diversity": (searched, "0.2", "0.3"),
    f"{PHASE}.mutation_boost": (searched, "1", "3"),
    f"{PHASE}.diversity_reseed_threshold": (searched, "0.2", "0.3"),
    f"{PHASE}.fitness_weights": (evolved, WEIGHTS, "{perplexity: 1, speed: 1}"),
    f"{PHASE}.fitness_floors": (evolved, "{}", "{add/accuracy: 1}"),
    f"{PHASE}.domain_weights": (evolved, "{}", "{add: 5}"),
    f"{PHASE}.mixed_precision": (evolved, "false", "true"),
    f"{PHASE}.fitness": (evolved, "''", "own_score:size"),
    f"{PHASE}.fitness_direction": (evolved, "maximize", "minimize"),
    f"{PHASE}.data": (measured_on, "[add.jsonl]", "[next.jsonl]"),
    f"{PHASE}.tasks": (measured_on, "[copy]", "[reverse]"),
    f"{PHASE}.split_by": (measured_on, "asked", "content"),
    f"{PHASE}.max_level": (measured_on, "2", "9"),
    f"{PHASE}.fitness_subset_size": (measured_on, "8", "9"),
    f"{PHASE}.verdict_items": (measured_on, "8", "9"),
    f"{PHASE}.use_holdout_validation": (evolved, "true", "false"),
    f"{PHASE}.enable_caching": (evolved, "true", "false"),
    f"{PHASE}.checkpoint_every": (evolved, "1", "2"),
    f"{PHASE}.keep_best_models": (evolved, "2", "1"),
    f"{PHASE}.time_budget_minutes": (planned, "0", "5"),
}
