"""lm-evaluation-harness: our folders are its `hf` models, and its tasks are packs of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_forge.errors import ConfigError
from agent_forge.evals.domains import from_files
from agent_forge.evals.lm_eval_harness import OWN, measure
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.store.models import ModelStorage
from tests.support.command_line import Forge
from tests.support.eval_models import own_model

REASON = "lm-eval is not installed: the extra `eval`"
lm_eval = pytest.importorskip("lm_eval", reason=REASON)
pytest.importorskip("accelerate", reason=REASON)  # a part of it that models of transformers need

COUNT = 24


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with two tasks over a local file, and the file as ours."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    questions: list[dict[str, Any]] = [
        {"prompt": f"the {i} cats and {i * 7 % 5}", "choices": [f" {i % 10}", " x"]}
        for i in range(COUNT)
    ]
    for i, question in enumerate(questions):
        question |= {"label": i % 2, "completion": question["choices"][i % 2]}
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    choice = {
        "task": "local_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    written = {
        "task": "local_written",
        "output_type": "generate_until",
        "doc_to_target": "{{completion}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / OWN).mkdir()
    for task in (choice, written):
        (tmp_path / OWN / f"{task['task']}.yaml").write_text(yaml.safe_dump({**shared, **task}))
    return tmp_path


def test_a_model_of_ours_is_an_ordinary_one_there(storage: ModelStorage, folder: Path) -> None:
    import agent_forge.model.hf  # noqa: F401 - registers the model's classes

    model = own_model(storage, "m1", 0)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / OWN))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "device": "cpu"},
        tasks=["local_choice"],
        task_manager=manager,
        batch_size=4,
        bootstrap_iters=0,
    )
    subject = open_model_under_test(model)
    (domain,) = from_files([folder / "questions.jsonl"])
    ours = subject.measure(subject.prepare(domain))
    assert found["results"]["local_choice"]["acc,none"] == pytest.approx(ours.accuracy)
    assert 0 < ours.accuracy < 1  # else equality says little


def test_tasks_by_name(storage: ModelStorage, folder: Path, forge: Forge) -> None:
    model = own_model(storage, "m1", 0)
    names = "--pack lm-eval:local_choice --pack lm-eval:local_written --pack math"
    found = forge(f"eval {model} {names} --items 6 --data-dir {folder} --json")
    assert found.code == 0, found.err
    rows = {row["domain"]: row for row in found.document["domains"]}
    assert list(rows) == ["math", "lm-eval:local_choice", "lm-eval:local_written"]
    assert all(row["items"] == 6 and 0 <= row["accuracy"] <= 1 for row in rows.values())
    table = forge(f"eval {model} {names} --items 6 --data-dir {folder}").out
    assert "lm-eval:local_written" in table


def test_unknown_tasks_are_refused(storage: ModelStorage, folder: Path) -> None:
    with pytest.raises(ConfigError, match="lm-eval has no task 'nothing'"):
        measure(own_model(storage, "m1", 0), ["nothing"], folder=folder)
