"""The three documents of the phase, block by block, as they stand: 000 is the guide, 001 the readme
of the phase, 002 that of the pipeline. Where a block would take hours it has fewer generations and
items, and where it names models that are not here, small ones stand for them. The table in
docs/documents.md lists every block with its outcome."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_forge.errors import ConfigError, NotFound
from agent_forge.evals.benchmarks import EVERY_DOMAIN
from agent_forge.evomerge_pipeline import BaseModelConfig, EvolutionConfig, EvoMergePipeline
from agent_forge.phases.phase2_evomerge import EvoMerge, EvoMergeConfig
from agent_forge.phases.phase2_evomerge.inputs import load_settings
from agent_forge.store import files
from tests.support.command_line import start
from tests.support.evo_models import PARENTS, WEIGHTS_FILE, family, files_of, journal, outcome

pytestmark = pytest.mark.slow
QUICK: dict[str, Any] = {
    **{"max_generations": 1, "fitness_subset_size": 8, "verdict_items": 20},
    **{"num_workers": 1, "seed": 1, "device": "cpu", "mixed_precision": False},
}
FIGURES = (
    *("best_fitness", "initial_fitness", "improvement", "improvement_pct", "generations_run"),
    *("convergence_reason", "final_diversity", "best_combo", "combo_usage", "fitness_components"),
    *("final_fitness", "fitness_improvement", "fitness_improvement_percent"),
    *("generations_completed", "best_merge_technique", "compression_ratio"),
    *("parameters_before", "parameters_after"),
)
ARTIFACTS = (
    *("evolution_log", "final_checkpoint", "best_generation", "model_id", "merge_history"),
    *("fitness_curve", "best_merge_weights", "phase_2_metrics", "ready_for_quietstar"),
)
MODELS_OF_002 = [
    {
        "name": "deepseek",
        "path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "weight": 1.0,
        "domain_specialty": "reasoning",
    },
    {
        "name": "nemotron",
        "path": "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B",
        "weight": 1.0,
        "domain_specialty": "reasoning",
    },
    {
        "name": "qwen2",
        "path": "Qwen/Qwen2-1.5B-Instruct",
        "weight": 1.0,
        "domain_specialty": "general",
    },
]
JSON_OF_002: dict[str, Any] = {
    "max_generations": 50,
    "population_size": 8,
    "mutation_rate": 0.15,
    "selection_pressure": 0.7,
    "plateau_patience": 5,
    "plateau_threshold": 0.01,
    "base_models": MODELS_OF_002,
    "merge_operators": {
        "linear_weight": 0.5,
        "slerp_t": 0.5,
        "ties_threshold": 0.1,
        "dare_threshold": 0.1,
        "dare_amplification": 2.0,
        "frankenmerge_layers": [0, 1, 2],
        "dfs_merge_ratio": 0.3,
    },
    "evaluation_weights": {
        "code": 0.25,
        "math": 0.25,
        "multilingual": 0.25,
        "structured_data": 0.25,
    },
}
ADVANCED_001: dict[str, Any] = {
    **{"generations": 50, "population_size": 8, "elite_size": 2, "tournament_size": 3},
    **{"mutation_rate": 0.1, "mutation_strength": 0.05, "crossover_rate": 0.7},
    "techniques": ["linear", "slerp", "ties", "dare", "frankenmerge", "dfs"],
    "fitness_weights": {"perplexity": 0.4, "accuracy": 0.3, "speed": 0.2, "memory": 0.1},
    **{"convergence_threshold": 0.001, "convergence_patience": 5, "early_stopping": True},
    **{"diversity_weight": 0.3, "min_diversity": 0.2},
    **{"enable_parallel": True, "num_workers": 4, "enable_caching": True},
    **{"device": "cuda", "mixed_precision": True},
}
DEFAULT_000: dict[str, Any] = {
    **{"generations": 50, "population_size": 8, "elite_count": 2},
    **{"mutation_sigma": 0.01, "mutation_rate": 0.01},
    "fitness_weights": {"perplexity": 0.4, "accuracy": 0.3, "speed": 0.2, "memory": 0.1},
    **{"convergence_threshold": 0.001, "convergence_patience": 5, "early_stopping": True},
    **{"min_diversity": 0.3, "diversity_reseed_threshold": 0.2},
    **{"enable_caching": True, "enable_parallel": True, "num_workers": 4},
    **{"device": "cuda", "mixed_precision": True},
    **{"checkpoint_every": 10, "checkpoint_dir": "checkpoints/phase2"},
}


def here(**changes: Any) -> dict[str, Any]:
    """What a block needs on this machine: data, a base, and little work."""
    return {**QUICK, "data": files_of(family()), "base": str(family() / "base"), **changes}


def models() -> list[Path]:
    return [family() / name for name in PARENTS]


def evolve(config: EvoMergeConfig) -> Any:
    return asyncio.run(EvoMerge(config).evolve(models()))


# -- configurations -------------------------------------------------------------------------------


def test_001_advanced_configuration(tmp_path: Path) -> None:
    """All of its fields act: it is a genetic algorithm with noise and a bound on diversity."""
    whole = EvoMergeConfig(**ADVANCED_001)
    assert whole.strategy == "ga" and not whole.evolution.unused & {*ADVANCED_001}
    given = {**ADVANCED_001, **here(checkpoint_dir=tmp_path / "x")}
    del given["generations"]
    result = evolve(EvoMergeConfig(**given))
    assert result.success and not {*FIGURES} - {*result.metrics}
    assert not {*ARTIFACTS} - {*result.artifacts}


def test_000_default_configuration_is_the_documents_scheme() -> None:
    whole = EvoMergeConfig(**DEFAULT_000)
    assert whole.strategy == "spec" and whole.output_dir == "checkpoints/phase2"
    assert not whole.evolution.unused & {*DEFAULT_000}
    assert EvoMergeConfig().strategy == "auto"  # nothing is given that only another has


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"generations": 20, "population_size": 4, "enable_parallel": True}, "auto"),
        ({"generations": 100, "convergence_patience": 10, "min_diversity": 0.35}, "spec"),
        (
            {"fitness_weights": {"perplexity": 0.3, "accuracy": 0.2, "speed": 0.4, "memory": 0.1}},
            "auto",
        ),
        ({"elite_size": 2, "mutation_rate": 0.1, "crossover_rate": 0.7}, "ga"),
    ],
)
def test_000_and_001_other_configurations(fields: dict[str, Any], strategy: str) -> None:
    assert EvoMergeConfig(**fields).strategy == strategy


def test_000_troubleshooting() -> None:
    config = EvoMergeConfig()
    config.mutation_rate = 0.02
    config.mutation_sigma = 0.02
    config.min_diversity = 0.35
    config.diversity_reseed_threshold = 0.25
    assert config.strategy == "spec" and config.evolution.diversity_reseed_threshold == 0.25
    config.enable_parallel = False
    config.fitness_device = "cpu"
    assert config.target_device == "cpu"
    config.fitness_weights = {"perplexity": 0.5, "accuracy": 0.4, "speed": 0.05, "memory": 0.05}
    config.fitness_subset_size = 5000
    config.use_holdout_validation = True
    with pytest.raises(ConfigError, match="do not add up"):  # the guide says so itself
        config.elite_count = 3


def test_001_memory_overflow() -> None:
    assert EvoMergeConfig(device="cuda", cpu_offload=True).target_device == "cpu"


def test_002_all_of_its_json_by_command(tmp_path: Path) -> None:
    """Its words stay; three small models stand for those of 1.5B, and less is measured."""
    paths = [{**m, "path": str(p)} for m, p in zip(MODELS_OF_002, models(), strict=True)]
    path = tmp_path / "my_evolution_config.json"
    changes = {"base_models": paths, **QUICK, "output_dir": "x", "base": str(family() / "base")}
    path.write_text(json.dumps({**JSON_OF_002, **changes, "max_level": 2}))
    place = start(tmp_path, ["evo", "--config", str(path)]).ended()
    assert place.code == 0, place.err
    champion = tmp_path / "x" / "champion"
    assert "deepseek (reasoning)" in (champion / "README.md").read_text()
    first = [r["operation"] for r in journal(tmp_path / "x") if r["origin"].startswith("combo ")]
    assert {o["amplification"] for o in first} == {2.0} and {o["dfs_ratio"] for o in first} == {0.3}
    assert {o["drop_rate"] for o in first} == {0.1} and {o["keep"] for o in first} == {0.9}
    assert {tuple(o["layers"].values()) for o in first} == {(1, 2), ()}
    rows = {tuple(next(iter(o["weights"].values()))) for o in first}
    assert rows == {(0.5, 0.25, 0.25), (1.0, 1.0, 1.0)}  # linear, SLERP
    raw = journal(tmp_path / "x")[0]["score"]["raw"]
    assert {name.split("/")[0] for name in raw} == {*EVERY_DOMAIN}


def test_002_all_of_its_json_by_python() -> None:
    config = EvolutionConfig(**JSON_OF_002)
    assert config.strategy == "ga" and not config.evolution.unused & {
        *("mutation_rate", "selection_pressure", "amplification", "dfs_ratio", "layer_parents")
    }
    assert (config.generations, config.convergence_patience) == (50, 5)
    assert config.convergence_threshold == 0.01 and config.layer_parents == [0, 1, 2]
    assert [model.told for model in config.base_models][2] == "qwen2 (general)"
    assert load_settings(None, ["merge_operators.slerp_t=0.3"], {})[0].slerp_t == 0.3


def test_002_python_api(tmp_path: Path) -> None:
    config = EvolutionConfig(
        base_models=[
            BaseModelConfig(name=name, path=str(path))
            for name, path in zip(("deepseek", "nemotron", "qwen2"), models(), strict=True)
        ],
        wandb_project="",
        **here(output_dir=tmp_path / "x"),
    )

    async def run_evolution() -> Any:
        pipeline = EvoMergePipeline(config)
        return await pipeline.run_evolution()

    best_candidate = asyncio.run(run_evolution())
    assert Path(best_candidate.model_path).is_dir() and best_candidate.overall_fitness > 0


# -- resuming -------------------------------------------------------------------------------------


def test_a_chosen_generation_is_resumed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """By the names of all three documents; the same seed leads to the same end."""
    whole = {"strategy": "spec", "checkpoint_every": 1, "convergence_threshold": 1e-9}
    given = {**here(output_dir=tmp_path / "x"), **whole, "max_generations": 3}
    EvoMerge(EvoMergeConfig(**given)).run(models())
    straight = outcome(tmp_path / "x")
    evomerge = EvoMerge(EvoMergeConfig(**given))
    evomerge.load_checkpoint(tmp_path / "x" / "generation_2.pt")
    evomerge.run(models())
    assert outcome(tmp_path / "x-gen-2")["journal"] == straight["journal"]
    line = ["evo", "--resume", str(tmp_path / "x" / "evolution_checkpoint_gen_1.json")]
    assert start(tmp_path, [*line, "--seed", "9", "--output-dir", "other"]).ended().code == 0
    keys = [
        [r["key"] for r in journal(tmp_path / n) if r["generation"] == 2] for n in ("x", "other")
    ]
    assert keys[0] != keys[1]
    assert start(tmp_path, ["evo", "--resume", "other"]).ended().code == 0
    assert outcome(tmp_path / "x") == straight
    refused = start(tmp_path, [*line, "--output-dir", "other"]).ended()
    assert refused.code == 2 and "other exists" in refused.err
    with pytest.raises(NotFound, match="there is no"):
        evomerge.load_checkpoint(tmp_path / "x" / "generation_7.pt")
    looked = start(tmp_path, [*line, "--dry-run"]).ended()
    assert looked.code == 2 and "a branch has no plan" in looked.err
    assert not (tmp_path / "x-gen-1").exists()


def test_the_best_of_a_generation_can_be_made_again(tmp_path: Path) -> None:
    given = here(output_dir=tmp_path / "x", strategy="spec", checkpoint_every=1)
    EvoMerge(EvoMergeConfig(**given)).run(models())
    line = ["evo", "replay", str(tmp_path / "x" / "evolution_checkpoint_gen_0.json"), "again"]
    assert start(tmp_path, line).ended().code == 0
    first, again = (
        files.sha256_of(folder / WEIGHTS_FILE)
        for folder in (tmp_path / "x" / "gen_0_best_model", tmp_path / "again")
    )
    assert first == again


# -- what is told ---------------------------------------------------------------------------------


def test_results_and_words(tmp_path: Path) -> None:
    result = evolve(EvoMergeConfig(**here(output_dir=tmp_path / "x", max_generations=2)))
    figures, left = result.metrics, result.artifacts
    assert not {*FIGURES} - {*figures} and not {*ARTIFACTS} - {*left}
    assert figures["generations_completed"] == figures["generations_run"] == 2
    assert figures["parameters_before"] == 3 * figures["parameters_after"]
    assert len(left["merge_history"]) == len(left["fitness_curve"]) == 3
    assert all(" + " in words or "average" in words for words in left["merge_history"])
    assert left["phase_2_metrics"]["fitness"] == figures["best_fitness"]
    assert left["ready_for_quietstar"] is True
    words = figures["best_merge_technique"]
    assert any(word in words for word in ("gradient step", "sample", "+", "average", "as it is"))
    assert words in (tmp_path / "x" / "champion" / "README.md").read_text()


def test_metrics_of_a_generation_have_the_documents_names(tmp_path: Path) -> None:
    """Those of spec 2.2.8 and of 002; tests/track reads them in W&B's own files."""
    from agent_forge.phases.phase2_evomerge.evolution import run_evolution
    from agent_forge.phases.phase2_evomerge.told import generation_metrics
    from tests.support.evo_models import job

    done = run_evolution(job(tmp_path / "x", generations=1))
    names = {*generation_metrics(done.loop)}
    wanted = {
        *("best_fitness", "avg_fitness", "min_fitness", "max_fitness", "diversity_score"),
        *("fitness_std", "best_perplexity", "best_accuracy", "best_speed_tps", "best_memory_mb"),
        *("elite1_fitness", "elite2_fitness", "mutation_count", "add_avg", "add_best"),
        *("loser_combo_1", "loser_combo_2"),
    }
    assert {f"generation/{name}" for name in wanted} <= names
    assert {f"combo/{n}/usage" for n in range(8)} <= names and "combo/0/avg_fitness" in names


# -- commands -------------------------------------------------------------------------------------

SMALL = "fitness_subset_size=8 verdict_items=20 workers=1 mixed_precision=false strategy=spec"


def test_002_commands(tmp_path: Path) -> None:
    """As they stand, with small folders of those names; what follows them makes them quick."""
    for name, path in zip(("deepseek", "nemotron", "qwen2"), models(), strict=True):
        shutil.copytree(path, tmp_path / name)
    more = [word for item in SMALL.split() for word in ("--set", item)]
    more += [word for path in files_of(family()) for word in ("--data", path)]
    three = "--base-models deepseek,nemotron,qwen2"
    for line in (
        f"evo --gens 1 {three} --output-dir ./test_run --device cpu",
        f"evo --gens 2 {three} --device cpu --output-dir ./production_run --set checkpoint_every=1",
    ):
        assert start(tmp_path, [*line.split(), *more]).ended().code == 0, line
    place = "./production_run/evomerge_checkpoints/evolution_checkpoint_gen_1.json"
    assert start(tmp_path, ["evo", "--resume", place]).ended().code == 0
    straight = outcome(tmp_path / "production_run")["journal"]
    assert outcome(tmp_path / "production_run-gen-1")["journal"] == straight
    assert (tmp_path / "production_run" / "gen_2_best_model").is_dir()
    assert start(tmp_path, ["evo", "--help"]).ended().code == 0


def test_a_branch_has_its_seed_and_says_so(tmp_path: Path) -> None:
    """It is told in its card, bound to its journal, and taken up again by the same command."""
    given = {**here(output_dir=tmp_path / "x"), "strategy": "spec", "checkpoint_every": 1}
    EvoMerge(EvoMergeConfig(**{**given, "max_generations": 2})).run(models())
    line = ["evo", "--resume", str(tmp_path / "x" / "evolution_checkpoint_gen_0.json")]
    line += ["--seed", "9", "--output-dir", "b"]
    assert start(tmp_path, line).ended().code == 0
    before = outcome(tmp_path / "b")
    assert "seed 1, 9 after generation 0" in (tmp_path / "b/champion/README.md").read_text()
    assert start(tmp_path, line).ended().code == 0
    assert outcome(tmp_path / "b") == before
    line[2] = str(tmp_path / "b" / "evolution_checkpoint_gen_1.json")
    again = start(tmp_path, [*line[:-1], "c"]).ended()
    assert again.code == 2 and "it can have no other" in again.err
    path = tmp_path / "b" / "evolution.json"
    record = files.read_checked(path)
    del record["branch"]
    path.write_bytes(files.with_checksum(record))
    lost = start(tmp_path, ["evo", "--resume", "b"]).ended()
    assert lost.code == 2 and "different branches" in lost.err
