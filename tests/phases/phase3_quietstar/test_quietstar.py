"""Phase 3: it teaches, measures, judges, hands over, and survives being killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.data import traces
from agent_forge.data.tokenizer import SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.infer.thinking import BEGIN, END
from agent_forge.phases.phase3_quietstar import (
    CoherenceValidator,
    ThoughtGenerator,
    ThoughtInjectionSystem,
)
from agent_forge.phases.phase3_quietstar.config import QuietStarSettings
from agent_forge.store.records import read_metadata
from agent_forge.train.corpus import build_corpus
from agent_forge.train.lessons import (
    DIRECT,
    PAUSED,
    STEP,
    strategy_shares,
    unseen_items,
    write_lessons,
)
from tests.support import quietstar_runs
from tests.support.command_line import Forge
from tests.support.quietstar_runs import ALL_TEN, PHASE, config, known_tokenizer, made, run
from tests.support.toy_runs import exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
OUTPUTS = {
    *("thoughts_generated_total", "thoughts_valid_total", "validity_rate", "avg_coherence_score"),
    *("avg_semantic_similarity", "avg_logical_consistency", "avg_relevance", "avg_fluency"),
    "processing_time_ms_per_thought",
}
STAGES = (f"{PHASE}.strategies=[step, uncertain]", f"{PHASE}.controls=true")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run with all strategies and both controls."""
    root = tmp_path_factory.mktemp("quietstar")
    return root, run(root, ALL_TEN, f"{PHASE}.controls=true")


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with all stages and two strategies, for what is run again and again."""
    root = tmp_path_factory.mktemp("shorter")
    run(root, *STAGES)
    return root


def test_it_returns_what_the_specification_asks_for(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    result = reference[1]["results"]["quietstar"]
    assert result.success and set(result.metrics) >= OUTPUTS
    assert {"model_id", "coherence_threshold", "num_thoughts_per_step"} <= set(result.artifacts)
    assert len(result.artifacts["special_tokens_added"]) == 12
    metadata = read_metadata(result.artifacts["models"][0].path).model_dump()
    assert {"coherence_score", "validity_rate", "accuracy", "theatre"} <= set(metadata)
    assert metadata["theatre"] is True  # seven steps teach nobody to think
    assert "theatre: own thoughts are not better" in result.artifacts["headline"]["verdict"]
    accuracy, strategies, targets = result.artifacts["tables"][:3]
    assert [row[0] for row in accuracy[1:5]] == list(traces.LEVELS)
    assert {"trained direct", "trained pause", "follows a changed step"} <= set(accuracy[0])
    assert {row[0] for row in strategies[1:]} == set(traces.ABOUT)
    assert len(targets) > 10


def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    logged = {name for _, _, values in metrics(reference[0]) for name in values}
    known = {metric for name in logged if (metric := find_metric(name))}
    own = {metric for metric in METRICS if metric.phase == "quietstar"}
    assert {metric for metric in own - known if "reward" not in metric.name} == set()
    assert len({name for name in logged if name.startswith("step_7/")}) == 9


def test_the_card_shows_thoughts(reference: tuple[Path, dict[str, Any]]) -> None:
    card = (folder(reference[0]) / "phase3_quietstar/reasoning/README.md").read_text()
    assert "## Thoughts" in card and "| question | thought | answer | right |" in card


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["bake", "confidence", "direct", "pause", "verdict"])
def test_killed_in_any_stage_it_ends_in_the_same_bytes(
    stage: str, shorter: Path, tmp_path: Path
) -> None:
    def die(record: dict[str, Any]) -> None:
        late = 1 if stage == "confidence" else 4
        if record.get("stage") == stage and record.get("step") == late:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: run(tmp_path, *STAGES, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert made(tmp_path) == made(shorter)
    assert _without_times(metrics(tmp_path)) == _without_times(metrics(shorter))


@pytest.mark.soak
def test_killed_at_random_it_ends_in_the_same_bytes(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Again and again, at any moment, until it is done."""
    rng, kills = random.Random(5), 0
    for _ in range(200):
        child = forked(lambda: run(tmp_path, ALL_TEN, f"{PHASE}.controls=true"))
        time.sleep(rng.uniform(0.3, 1.5) if kills < 20 else 0)
        if kills < 20:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if exit_code(child) == 0:
            break
        kills += 1
    assert kills >= 5
    assert made(tmp_path) == made(reference[0])
    assert _without_times(metrics(tmp_path)) == _without_times(metrics(reference[0]))


def _without_times(records: list[Any]) -> list[Any]:
    return [
        (phase, step, {k: v for k, v in values.items() if "time" not in k and "latency" not in k})
        for phase, step, values in records
    ]


# -- lessons ---------------------------------------------------------------------------------------


def test_shares_add_up_and_easy_strategies_come_first() -> None:
    settings = config(ALL_TEN).phases.quietstar
    tokenizer = known_tokenizer()
    corpus = build_corpus(settings, config().model, tokenizer)
    lessons = write_lessons(settings, tokenizer, 0, {})
    first, then = lessons.curriculum(corpus, settings.strategies).stages
    for stage in (first, then):
        assert sum(stage.mix.values()) == pytest.approx(1.0)
        old = sum(w for name, w in stage.mix.items() if "." in name)
        assert old == pytest.approx(settings.replay_share)
        assert stage.mix[DIRECT] == pytest.approx(0.7 * settings.direct_share)
    assert {n for n in first.mix if n in traces.ABOUT} == {"step", "mece", "bayesian", "doubt"}
    assert {n for n in then.mix if n in traces.ABOUT} == set(traces.ABOUT)
    assert strategy_shares(settings, ["step"]) == {STEP: 1.0}
    assert "uncertain" not in write_lessons(settings, tokenizer, 0).traces


def test_confidence_is_what_was_measured() -> None:
    settings = config(ALL_TEN).phases.quietstar
    sure = {(f, level): level % 10 for f in traces.LEVELS for level in range(1, 20)}
    lessons = write_lessons(settings, known_tokenizer(), 0, sure)
    for trace in lessons.traces["uncertain"]:
        assert trace.claims[-1] == str(trace.task.level % 10)


def test_controls_have_the_same_items_and_no_thoughts() -> None:
    settings = config().phases.quietstar
    lessons = write_lessons(settings, known_tokenizer(), 0)
    thoughts = lessons.sources()
    paused, direct = lessons.paused(), lessons.direct()
    assert [s.name for s in (paused, direct)] == [PAUSED, DIRECT]
    assert len(paused.lengths) == len(direct.lengths) == sum(len(s.lengths) for s in thoughts[:-1])
    # As long as the thoughts, with one kind of token between the marks, of which none is learned.
    assert sum(map(sum, (s.lengths.tolist() for s in thoughts[:-1]))) == sum(
        paused.lengths.tolist()
    )
    tokens, targets = paused.tokens.tolist(), paused.targets.tolist()
    begin = tokens.index(BEGIN)
    end = tokens.index(END)
    assert len(set(tokens[begin + 1 : end])) == 1 and set(targets[: end - 1]) == {-100}
    assert targets[end] != -100
    assert not {BEGIN, END} & set(direct.tokens.tolist())


def test_unseen_items_are_unseen_and_each_is_there_once() -> None:
    settings = config().phases.quietstar
    items = unseen_items(settings, "verdict", 30)
    assert len({(item.family, item.operands) for item in items}) == len(items) == 120
    taught = write_lessons(settings, known_tokenizer(), 0).traces.values()
    assert not {t.task.question for own in taught for t in own} & {i.question for i in items}


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("strategies=[]", "at least one"),
        ("strategies=[step, step]", "each once"),
        ("strategies=[stp]", "did you mean 'step'"),
        ("strategies=[doubt, bayesian]", "step is taught in any case"),
        ("levels={copy: [1, 5]}", "needs one of the families|no strategy"),
        ("easy_share=1.0", "less than 1"),
        ("levels={chain: [2, 5]}", "needs one of the families"),
        ("levels={chain: [2, 5], copy: [1, 2], odds: [4, 5]}", "no strategy that is taught is for"),
        ("levels={chian: [2, 5]}", "no tasks 'chian'"),
        ("levels={chain: [5, 2], tot4: [4, 5], swap4: [1, 2], odds: [2, 3]}", "the lower first"),
        ("steps=-1", "greater than or equal to 0"),
        ("replay_share=2", "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(f"{PHASE}.{setting}")


@pytest.mark.parametrize("content", ["", "{}\n", "not json\n", '{"family": "chain"}\n'])
def test_malformed_files_of_thoughts_are_refused_before_any_work(
    content: str, tmp_path: Path, forge: Forge
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    command = f"run --preset smoke --dry-run --set {PHASE}.traces=[{path}]"
    result = forge(f"{command} --set storage.root={tmp_path / 'st'}")
    assert result.code in (2, 4) and "own.jsonl" in result.err
    assert not (tmp_path / "st" / "sessions").exists()


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    given = quietstar_runs.champion(tmp_path)
    place = given.path / "tokenizer.json"
    document = json.loads(place.read_text())
    for token in document["added_tokens"]:
        if token["id"] == SPECIAL["[thinking]"]:
            token["content"] = "[other]"
    copy = tmp_path / "other"
    shutil.copytree(given.path, copy)
    for name in ("manifest.json", "metadata.json"):
        (copy / name).unlink()
    (copy / "tokenizer.json").write_text(json.dumps(document))
    from agent_forge.model.opened import open_model

    with pytest.raises(ConfigError, match=r"no special token \[thinking\]"):
        open_model(copy)


# -- parts by themselves ---------------------------------------------------------------------------


def test_thoughts_are_injected_only_if_they_are_coherent_and_gradient_flows() -> None:
    torch.manual_seed(0)
    system = ThoughtInjectionSystem(16, 4)
    base = torch.randn(2, 5, 16, requires_grad=True)
    thoughts = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(3)]
    assert system.inject_thoughts(base, thoughts, [0.1, 0.7, 0.5]) is base
    fused = system.inject_thoughts(base, thoughts, [0.9, 0.1, 0.8])
    assert fused.shape == base.shape
    fused.square().sum().backward()  # type: ignore[no-untyped-call]
    assert thoughts[0].grad is not None and thoughts[0].grad.abs().sum() > 0
    assert thoughts[1].grad is None and system.gate.bias.grad is not None
    other = system.inject_thoughts(base, [thoughts[0] + 1, *thoughts[1:]], [0.9, 0.1, 0.8])
    assert not torch.equal(other, fused)


def test_the_specifications_parts_have_one_import() -> None:
    assert CoherenceValidator.__module__ == "agent_forge.evals.coherence"
    assert ThoughtGenerator.__module__ == "agent_forge.infer.thinking"
    assert QuietStarSettings().strategies[0] == "step"


def test_no_steps_are_for_models_that_think(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="this one never did"):
        quietstar_runs.run(tmp_path, "phases.quietstar.steps=0")
