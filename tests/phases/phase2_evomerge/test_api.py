"""Evolution from Python, with the names and fields of the documents."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_forge.errors import ConfigError, NotFound
from agent_forge.evomerge_pipeline import BaseModelConfig, EvolutionConfig, EvoMergePipeline
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases import phase2_evomerge
from agent_forge.phases.phase2_evomerge import EvoMerge, EvoMergeConfig, parallel
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.store import files
from tests.support.eval_models import own_model
from tests.support.evo_models import FEW, PARENTS, WEIGHTS_FILE, family, files_of, job, outcome
from tests.support.fake_wandb import FakeWandb
from tests.support.forked_workers import fork_workers

pytestmark = pytest.mark.slow

SHORT = {**FEW, "generations": 1, "verdict_items": 1}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    root = family()
    return {
        **{**SHORT, "data": files_of(root), "base": str(root / "base"), "seed": 1},
        **{"device": "cpu", "output_dir": folder, **changes},
    }


def models() -> list[Path]:
    return [family() / name for name in PARENTS]


# -- EvoMerge -------------------------------------------------------------------------------------


def test_the_guides_example(tmp_path: Path) -> None:
    """Folders or networks in memory: a callback a generation, and the guide's result."""
    evomerge = EvoMerge(EvoMergeConfig(**settings(tmp_path / "x")))
    told: list[tuple[int, float, float]] = []
    evomerge.register_callback("generation", lambda n, best, div: told.append((n, best, div)))
    result = asyncio.run(evomerge.evolve(models()))
    assert result.success and result.phase_name == "evomerge" and result.duration_seconds > 0
    assert [n for n, _, _ in told] == [0, 1]
    figures = result.metrics
    assert figures["best_fitness"] == told[-1][1] and figures["final_diversity"] == told[-1][2]
    gain = figures["best_fitness"] - figures["initial_fitness"]
    assert figures["improvement"] == gain > 0
    assert figures["improvement_pct"] == pytest.approx(gain / figures["initial_fitness"])
    assert figures["generations_run"] == 1 and figures["best_combo"] in (None, *range(8))
    assert figures["convergence_reason"] == "max_generations"
    assert sum(figures["combo_usage"].values()) >= 8
    assert set(figures["fitness_components"]) == {"perplexity", "accuracy", "speed", "memory"}
    assert Path(result.artifacts["evolution_log"]).is_file()
    assert result.artifacts["best_generation"] in (0, 1) and result.artifacts["verdict"]
    state = result.model.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(result.artifacts["final_checkpoint"])
    assert all(torch.equal(state[name], t) for name, t in loaded.state_dict().items())

    same = run_evolution(job(tmp_path / "y", generations=1, verdict_items=1))
    assert outcome(same.loop.folder)["journal"] == outcome(tmp_path / "x")["journal"]

    networks = [AutoModelForCausalLM.from_pretrained(folder) for folder in models()]
    again = EvoMerge(EvoMergeConfig(**settings(tmp_path / "z")))
    in_memory = asyncio.run(again.evolve(networks))
    assert in_memory.metrics == figures
    written = tmp_path / "z" / "champion" / WEIGHTS_FILE
    assert files.sha256_of(written) == files.sha256_of(tmp_path / "x" / "champion" / WEIGHTS_FILE)


def test_networks_of_ours(storage: Any, tmp_path: Path) -> None:
    from agent_forge.model.opened import open_model

    folders = [own_model(storage, f"m{n}", n) for n in range(3)]
    networks = [open_model(folder).network for folder in folders]
    config = EvoMergeConfig(
        **{**SHORT, "generations": 0, "fitness_subset_size": 4, "seed": 1},
        **{"tasks": ["copy"], "max_level": 2, "output_dir": tmp_path / "x", "device": "cpu"},
    )
    for network in networks:  # as those that come from no folder
        network.folder = None
    with pytest.raises(ConfigError, match="where its tokenizer is"):
        EvoMerge(config).run(networks)
    config.tokenizer = str(folders[0])
    result = EvoMerge(config).run(networks)
    assert isinstance(result.model, ForgeNetwork) and result.success


def test_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    EvoMerge(EvoMergeConfig(**settings(tmp_path / "x"))).run(models())
    evomerge = EvoMerge(EvoMergeConfig(**settings(tmp_path / "unused", generations=2)))
    evomerge.load_checkpoint(tmp_path / "x" / "evolution_checkpoint_gen_1.json")
    assert evomerge.run(models()).metrics["generations_run"] == 2
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ConfigError, match="other models, data or settings"):
        evomerge.run(models()[::-1])
    with pytest.raises(NotFound, match="there is no"):
        evomerge.load_checkpoint("checkpoints/evomerge/generation_30.pt")
    with pytest.raises(ConfigError, match="the event is"):
        _raise_hint(lambda: evomerge.register_callback("epoch", print))  # type: ignore[arg-type]


def _raise_hint(call: Any) -> None:
    try:
        call()
    except ConfigError as error:
        raise ConfigError(error.hint) from error


def test_workers_device_and_wandb_do_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    asked: list[int] = []
    started = parallel.open_pool

    def counted(kind: str, count: int, *rest: Any, **more: Any) -> Any:
        asked.append(count)
        return started(kind, count, *rest, **more)

    monkeypatch.setattr(parallel, "open_pool", counted)
    fork_workers(monkeypatch)
    quick = {"generations": 0, "num_workers": 2, "wandb_project": "mine"}
    EvoMerge(EvoMergeConfig(**settings(tmp_path / "x", **quick))).run(models())
    alone = settings(tmp_path / "y", generations=0, num_workers=2, enable_parallel=False)
    EvoMerge(EvoMergeConfig(**alone)).run(models())
    assert asked == [2]
    assert [call[1]["project"] for call in wandb.calls if call[0] == "init"] == ["mine"]
    logged = [call[1] for call in wandb.calls if call[0] == "log"]
    assert logged[0]["step"] == 0 and logged[0]["best_fitness"] > 0
    for field in ("device", "fitness_device"):
        with pytest.raises(ConfigError, match="'cuda' is not there"):
            EvoMerge(EvoMergeConfig(**settings(tmp_path / "z", **{field: "cuda"}))).run(models())
    assert EvoMergeConfig(device="cuda", fitness_device="cpu").target_device == "cpu"
    assert EvoMergeConfig().target_device == "cpu"  # there is no other here


def test_every_field_of_the_documents() -> None:
    config = EvoMergeConfig(
        generations=50,
        population_size=8,
        elite_size=2,
        mutation_rate=0.1,
        mutation_strength=0.05,
        fitness_weights={"perplexity": 0.4, "accuracy": 0.3, "speed": 0.2, "memory": 0.1},
        convergence_threshold=0.001,
        convergence_patience=5,
        early_stopping=True,
        min_diversity=0.3,
        diversity_reseed_threshold=0.2,
        enable_caching=True,
        enable_parallel=True,
        num_workers=4,
        device="cuda",
        mixed_precision=True,
        checkpoint_every=10,
        checkpoint_dir="checkpoints/phase2",
        fitness_subset_size=500,
        use_holdout_validation=True,
        fitness_device="cpu",
    )
    assert (config.elite_count, config.elite_size) == (2, 2)
    assert config.mutation_sigma == config.mutation_strength == 0.05
    assert config.output_dir == config.checkpoint_dir == "checkpoints/phase2"
    assert config.mixed_precision and config.num_workers == 4
    config.mutation_rate = 0.02  # as the guide's troubleshooting does
    config.mutation_strength = 0.02
    config.fitness_weights = {"perplexity": 0.5, "accuracy": 0.5}
    assert (config.evolution.mutation_rate, config.evolution.mutation_sigma) == (0.02, 0.02)
    assert config.evolution.fitness_weights["accuracy"] == 0.5
    with pytest.raises(AttributeError, match="no setting 'colour'"):
        _ = config.colour


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"elite_size": 2, "elite_count": 3}, "elite_count are one thing|elite_size"),
        ({"max_generations": 3, "generations": 4}, "are one thing: 4 and 3"),
        ({"mutation_strength": 0.1, "mutation_sigma": 0.2}, "are one thing"),
        ({"checkpoint_dir": "a", "output_dir": "b"}, "are one thing"),
        ({"tournament_size": 2, "layer_paths": 0.1}, "it acts in ga"),
        ({"techniques": ["linear"]}, "techniques needs dare or ties"),
        ({"population_size": 3}, "is below 4"),
        ({"elite_count": 3}, "cannot be served with elite_count 3"),
        ({"generation": 3}, "did you mean 'generations'"),
        ({"max_generation": 3}, "did you mean 'max_generations'"),
        ({"output_dr": "x"}, "did you mean 'output_dir'"),
        ({"max_generations": -1}, "EvoMergeConfig: max_generations: .*greater than or equal"),
        ({"elite_size": 3}, "cannot be served with elite_size 3"),
        ({"base_models": []}, "base_models names no models"),
        ({"base_models": None}, "base_models names no models"),
        ({"enabled": True}, "unknown key 'enabled'"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EvoMergeConfig(**fields)
    config = EvoMergeConfig()
    if len(fields) == 1:
        with pytest.raises(ConfigError, match=told):
            setattr(config, *next(iter(fields.items())))
        assert config.evolution == EvoMergeConfig().evolution  # nothing was changed


def test_the_same_twice_is_no_contradiction() -> None:
    assert EvoMergeConfig(max_generations=3, generations=3).generations == 3


def test_what_the_package_offers() -> None:
    assert phase2_evomerge.EvoMerge is EvoMerge
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = phase2_evomerge.Nothing


# -- EvoMergePipeline -----------------------------------------------------------------------------


def three(**changes: Any) -> list[Any]:
    known = [{"name": n, "path": str(family() / n)} for n in PARENTS]
    known[1] |= changes
    return [BaseModelConfig(**known[0]), known[1], BaseModelConfig(**known[2])]


def test_the_pipeline_of_the_readme(tmp_path: Path) -> None:
    config = EvolutionConfig(
        base_models=three(weight=2.0, domain_specialty="sums"),
        merge_operators={"dare_threshold": 0.5, "ties_threshold": 0.6, "dare_amplification": 2.0},
        evaluation_weights={"add": 0.5, "twice": 0.25},
        plateau_patience=5,
        plateau_threshold=1e-9,
        max_generations=1,
        **{k: v for k, v in settings(tmp_path / "x").items() if k not in _TWICE},
    )
    best = asyncio.run(EvoMergePipeline(config).run_evolution())
    assert best.model_path == tmp_path / "x" / "champion"
    assert best.overall_fitness == best.result.metrics["best_fitness"] > 0
    assert "add (sums)" in (best.model_path / "README.md").read_text()
    evolution = config.evolution
    assert evolution.parent_weights == [1.0, 2.0, 1.0]
    assert (evolution.drop_rate, evolution.keep) == (0.5, 0.4)
    assert evolution.domain_weights == {"add": 0.5, "twice": 0.25}


_TWICE = ("generations", "convergence_threshold")


def test_evaluation_weights_without_data_are_of_generated_tasks() -> None:
    weights = {"code": 0.25, "math": 0.5, "multilingual": 0.25, "structured_data": 0.25}
    config = EvolutionConfig(base_models=three(), evaluation_weights=weights)
    packs = ("code", "math", "multilingual", "structured")
    assert config.tasks == [f"pack:{name}" for name in packs]
    assert config.domain_weights["math"] == 0.5 and config.domain_weights["structured"] == 0.25
    assert config.parent_weights == []  # all alike


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"merge_operators": {"x": 0.5}}, "merge_operators has no 'x'"),
        ({"merge_operators": {"dare_threshold": 1.5}}, "drop_rate"),
        ({"merge_operators": {"ties_threshold": "half"}}, "ties_threshold: 'half' is no number"),
        ({"merge_operators": [0.5]}, "a value for each of its names"),
        ({"merge_operators": {"slerp_t": 0.5}, "slerp_t": 0.4}, "are one thing: 0.5 and 0.4"),
        ({"evaluation_weights": 0.5}, "a number for each domain"),
        ({"selection_pressure": 0.9, "strategy": "auto"}, "acts in ga"),
        ({"base_models": [{"name": "a", "place": "b"}]}, "base_models: .*place"),
    ],
)
def test_what_the_pipeline_refuses(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EvolutionConfig(**{"base_models": three(), **fields})


def test_two_models_of_one_name(tmp_path: Path) -> None:
    config = EvolutionConfig(base_models=three(name="twice"), **settings(tmp_path / "x"))
    with pytest.raises(ConfigError, match="do not tell all models apart"):
        asyncio.run(EvoMergePipeline(config).run_evolution())
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
