"""Phase 1: what it learns from, how it is judged, and that a killed run ends in the same bytes."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError, ForgeError
from agent_forge.evals.model_under_test import measure
from agent_forge.model import hf
from agent_forge.phases.phase1_cognate import load_phase1_models
from agent_forge.phases.phase1_cognate.phase import CognatePhase
from agent_forge.phases.phase1_cognate.specialist_scores import (
    SpecialistScores,
    assess,
    average,
    barriers,
    diversity,
)
from agent_forge.phases.phase2_evomerge.api import trunk_of
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.train.config import DOMAINS
from tests.support.cognate_settings import FEW, NAMES, QUICK, config, corpus
from tests.support.networks import shaken
from tests.support.toy_runs import die_at, exit_code, folder, forked, metrics

pytestmark = pytest.mark.slow

SMALL = ("phases.cognate.items_per_family=12", "phases.cognate.evaluation_items=6", FEW)


def run(root: Path, listener: Any = None) -> dict[str, Any]:
    sets = (f"storage.root={root}", *QUICK, FEW, "phases.cognate.checkpoint_every_steps=2")
    only: Any = {"cognate": CognatePhase}
    outcome = PipelineOrchestrator(
        config=config(*sets, "phases.cognate.control=true"),
        session_id="r",
        resume=(folder(root) / "session.json").exists(),
        controllers=only,
        listeners=[listener] if listener else [],
    ).run()
    assert outcome["success"], outcome
    return outcome


def bytes_of(root: Path) -> list[str]:
    place = folder(root) / "phase1_cognate"
    return [files.sha256_of(place / name / "model.safetensors") for name in [*NAMES, "trunk"]]


def numbers(root: Path) -> list[Any]:
    """What was measured, without times."""
    kept = [(step, m) for phase, step, m in metrics(root) if phase == "cognate"]
    return [(s, {k: v for k, v in m.items() if "latency" not in k}) for s, m in kept]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("cognate")
    return root, run(root)


# -- what it learns from ---------------------------------------------------------------------------


def test_a_missing_dataset_is_named_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = corpus("phases.cognate.datasets=[piqa]", f"phases.cognate.data_dir={tmp_path}", *SMALL)
    assert found.missing == ["piqa"] and "dataset piqa is not in" in caplog.text
    assert "odd_one_out.1" in [part.name for part in found.parts]
    assert "odd_one_out.1" not in [part.name for part in corpus(FEW, *SMALL).parts]


@pytest.mark.parametrize(
    ("setting", "sign"),
    [
        ("phases.cognate.datasets=[gsm9k]", "gsm8k"),
        ("phases.cognate.families=[copi]", "copi"),
        ("phases.cognate.families=[copy]", "no family of tasks for reasoning, adaptive"),
    ],
)
def test_what_does_not_exist_is_refused(setting: str, sign: str) -> None:
    with pytest.raises(ConfigError) as caught:
        corpus("phases.cognate.items_per_family=12", setting)
    assert sign in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("setting", ["datasets=[gsm9k]", "families=[copi]", "texts=[missing.txt]"])
def test_a_plan_refuses_them_before_any_work(setting: str) -> None:
    settings = config(f"phases.cognate.{setting}")
    with pytest.raises(ForgeError):
        CognatePhase(settings.phases.cognate, settings).plan([])


def test_mixes_add_up_and_favour_the_own_domain() -> None:
    found = corpus(*SMALL, "phases.cognate.text_share=0.2")
    domain_of = {part.name: part.domain for part in found.parts}
    mix = found.mix("memory", 0.8)
    share = {d: sum(w for n, w in mix.items() if domain_of[n] == d) for d in (*DOMAINS, "text")}
    assert sum(mix.values()) == pytest.approx(1)
    assert share["memory"] > 0.8 > 0.1 > share["reasoning"] == pytest.approx(share["adaptive"])
    stages = found.curriculum().stages
    for stage in stages:
        text = sum(w for n, w in stage.mix.items() if domain_of[n] == "text")
        assert sum(stage.mix.values()) == pytest.approx(1) and text == pytest.approx(0.2)
    assert {n[-1] for n in stages[0].mix} == {"1"} and {n[-1] for n in stages[2].mix} == set("123")


# -- how it is judged ------------------------------------------------------------------------------

REPORT = SpecialistScores(
    accuracy=dict.fromkeys(DOMAINS, 0.5),
    nats=dict.fromkeys(DOMAINS, 1.0),
    quick_accuracy=0.5,
    quick_steps=1.2,
    mean_steps=3.0,
    memory_use=0.2,
    cost=100.0,
)


def test_diversity_is_the_mean_of_four_spreads() -> None:
    assert diversity([REPORT] * 3, 3) == 0
    other = replace(
        REPORT,
        mean_steps=1.0,
        memory_use=0.1,
        cost=60.0,
        accuracy={**REPORT.accuracy, "memory": 0.8},
    )
    assert diversity([REPORT, REPORT, other], 3) == pytest.approx((1.0 + 0.5 + 0.4 + 0.1) / 4)


def test_quick_means_few_steps_and_the_report_is_of_all_steps() -> None:
    found = corpus(*SMALL, "phases.cognate.evaluation_items=60")
    model = shaken(0)
    with torch.no_grad():
        model.halting.head.weight.normal_()
    report = assess(model, found.verdict, found.selection)
    assert 1 <= report.quick_steps <= 1.4 and 1 <= report.mean_steps <= 3
    every = measure(model, found.verdict["memory"], threshold=1.0)
    assert report.accuracy["memory"] == every.accuracy and every.mean_steps == 3
    assert report.nats["memory"] == every.nats_per_token and 0 < report.memory_use < 1


def test_between_equals_there_is_no_barrier() -> None:
    found = corpus(*SMALL)
    model = shaken(0)
    assert barriers([model] * 3, found.selection) == {
        pair: pytest.approx(0, abs=1e-6) for pair in ("1_2", "1_3", "2_3")
    }
    apart = barriers([model, shaken(1)], found.selection)
    middle = average([model, shaken(1)])
    items: list[TokenizedItem] = [item for d in DOMAINS for item in found.selection[d]]
    losses = [measure(m, items, threshold=1.0).nats_per_token for m in (model, shaken(1), middle)]
    assert apart["1_2"] == pytest.approx(losses[2] - (losses[0] + losses[1]) / 2, abs=1e-6)


# -- the whole -------------------------------------------------------------------------------------


def test_it_hands_over_what_the_specification_says(done: tuple[Path, dict[str, Any]]) -> None:
    root, outcome = done
    result = outcome["results"]["cognate"]
    weights = config().model.parameters()
    assert result.metrics["num_models"] == 3
    assert result.metrics["total_parameters"] == 3 * result.metrics["parameters_per_model"]
    assert result.metrics["parameters_per_model"] == weights
    assert result.artifacts["seeds"] == [42, 1337, 2023]
    assert result.artifacts["model_names"][0] == "TinyTitan-reasoning"
    assert {"trunk", "average", "control", "model_1"} <= set(result.artifacts["reports"])
    logged = {name for _, m in numbers(root) for name in m}
    assert {"model_1/train/loss_avg_100", "phase/avg_final_loss", "phase/diversity"} <= logged
    assert {"phase/barrier_1_2", "baseline/ngram/memory", "model_3/size_mb"} <= logged
    card = (folder(root) / "phase1_cognate" / NAMES[0] / "README.md").read_text()
    assert "## Samples" in card and "> sort 52814" in card


def test_the_three_load_and_share_what_a_merge_needs(done: tuple[Path, dict[str, Any]]) -> None:
    root, _ = done
    three = load_phase1_models("r", root)
    assert trunk_of(three) == str(folder(root) / "phase1_cognate" / "trunk")
    assert trunk_of([three[0], "elsewhere"]) is None
    assert [m.settings.halt_threshold for m in three] == [0.95, 0.90, 0.50]
    embeddings = [m.state_dict()["embedding.weight"] for m in three]
    assert all(torch.equal(embeddings[0], other) for other in embeddings[1:])
    hidden = [m.state_dict()["blocks.0.mlp.up.weight"] for m in three]
    assert not torch.equal(hidden[0], hidden[1])
    assert hf.MODEL_TYPE
    place = folder(root) / "phase1_cognate" / NAMES[1]
    model = AutoModelForCausalLM.from_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = tokenizer("copy a b c", return_tensors="pt").input_ids
    assert torch.allclose(model(ids).logits, three[1](ids), atol=1e-5)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("count", [1, 4, 8])
def test_killed_at_any_stage_it_ends_in_the_same_bytes(
    tmp_path: Path, done: tuple[Path, dict[str, Any]], count: int
) -> None:
    assert exit_code(forked(lambda: run(tmp_path, die_at("step", count)))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert bytes_of(tmp_path) == bytes_of(done[0])
    assert numbers(tmp_path) == numbers(done[0])
