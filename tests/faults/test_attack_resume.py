"""What an attack on resumed evolutions found: a folder that holds what was never measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import all_items, resume_inputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.store import files
from agent_forge.track.journal import Journal, read_lines
from tests.support.evo_models import FASTEST, WEIGHTS_FILE, job, outcome

pytestmark = pytest.mark.slow


def test_a_changed_digit_of_the_journal_is_measured_again(tmp_path: Path) -> None:
    run_evolution(job(tmp_path / "x", **FASTEST))
    before, path = outcome(tmp_path / "x"), tmp_path / "x" / JOURNAL
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"origin":"parent 2"' in line)
    fitness = json.loads(lines[number])["score"]["fitness"]
    lines[number] = lines[number].replace(str(fitness), "0.9644")
    path.write_text("\n".join(lines) + "\n")
    (tmp_path / "x" / "fitness_cache.jsonl").unlink()
    run_evolution(resume_inputs(tmp_path / "x", None, None))
    after = outcome(tmp_path / "x")
    assert {k: v for k, v in after.items() if k != "journal"} == {
        k: v for k, v in before.items() if k != "journal"
    }


def test_lines_without_a_checksum_are_those_of_before(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"record":"begun"}\n')
    Journal(path, checked=True).write({"record": "candidate", "score": 0.5})
    assert [r for _, r in read_lines(path)] == [
        {"record": "begun"},
        {"record": "candidate", "score": 0.5},
    ]
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert [r["record"] for _, r in read_lines(path)] == ["begun"]


def test_the_best_model_of_a_generation_that_went_on(tmp_path: Path) -> None:
    """Stopped inside generation 0, then to its end: its best model is that of its end."""
    hashes = []
    for name, first in (("straight", 24), ("twice", 4)):
        for most in dict.fromkeys((first, 24)):
            run_evolution(job(tmp_path / name, generations=1, max_evaluations=most))
        hashes.append(files.sha256_of(tmp_path / name / "gen_0_best_model" / WEIGHTS_FILE))
    assert hashes[0] == hashes[1]


def test_a_healed_model_of_before_is_named(tmp_path: Path) -> None:
    folder, told = tmp_path / "x", list[str]()

    def listen(record: dict[str, Any]) -> None:
        told.append(str(record.get("text", "")))

    run_evolution(job(folder, **FASTEST, heal=0.1, heal_steps=2))
    changes = {"heal": 0.0, "heal_steps": 0}
    run_evolution(resume_inputs(folder, None, None, **changes), listen=listen)
    assert any("was healed before: this verdict is not about it" in text for text in told)


@pytest.mark.parametrize("noted", [False, True])
def test_a_healed_model_of_another_champion_is_not_beside_the_new_one(
    tmp_path: Path, noted: bool
) -> None:
    """It gets the name of its own champion; with notes of a person in it, it stays."""
    folder, told = tmp_path / "x", list[str]()

    def listen(record: dict[str, Any]) -> None:
        told.append(str(record.get("text", "")))
        if noted and len(told) == 1:
            (folder / "healed" / "notes.txt").write_text("mine")

    first = run_evolution(job(folder, **FASTEST, heal=0.1, heal_steps=2)).loop.champion.key
    before = files.sha256_of(folder / "healed" / WEIGHTS_FILE)
    assert f"The champion {first[:8]} " in (folder / "healed" / "README.md").read_text()
    changes = {"heal": 0.0, "heal_steps": 0, "generations": 3}
    done = run_evolution(resume_inputs(folder, None, None, **changes), listen=listen)
    assert done.loop.champion.key != first
    place = folder / ("healed" if noted else f"healed_of_{first[:8]}")
    assert any(f"{place} was healed before" in text for text in told)
    assert files.sha256_of(place / WEIGHTS_FILE) == before
    assert (folder / "healed").exists() == noted
    if noted:
        assert (place / "notes.txt").read_text() == "mine"
    else:
        files.verify(place)


def test_what_a_pack_asks_after_worked_examples_is_not_taught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "task_id": n,
            "text": f"Write a function that adds {n} to a number.",
            "code": f"def add_{n}(x):\n    return x + {n}",
            "test_list": [f"assert add_{n}(1) == {n + 1}"],
        }
        for n in (*range(1, 11), *range(11, 511), *range(601, 700))
    ]
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("AGENT_FORGE_DATA", str(tmp_path))
    asked = [r for r in rows if 11 <= int(str(r["task_id"])) <= 510]
    free = {"prompt": "What is a llama?", "completion": "An animal."}
    teach = tmp_path / "teach.jsonl"
    form = '"""\n{}\n"""\n'
    texts = [{"prompt": form.format(r["text"]), "completion": str(r["code"])} for r in asked]
    teach.write_text("\n".join(map(json.dumps, [*texts, free])))
    settings = EvoMergeSettings(
        tasks=["pack:mbpp"],
        heal=0.1,
        heal_steps=1,
        heal_data=[str(teach)],
        fitness_subset_size=20,
        verdict_items=2000,
    )
    (left,) = all_items(settings)["heal"]
    verdict = {task.question for d in all_items(settings)["verdict"] for task in d.tasks}
    assert len(verdict) > 100
    assert not {example.prompt for example in left.examples} & verdict
    assert any("llama" in example.prompt for example in left.examples)
