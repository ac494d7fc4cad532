"""Generated packs as choices, partial credit, and what a foreign model is asked without data."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_forge.data.tasks import make
from agent_forge.errors import ConfigError
from agent_forge.evals import graders
from agent_forge.evals.benchmarks import CHOICE, EVERY_DOMAIN, from_names
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.inputs import split_items
from tests.support.evo_models import PARENTS, family, locate_inputs


def test_generated_packs_as_choices() -> None:
    names = [f"{CHOICE}{name}" for name in EVERY_DOMAIN]
    found = from_names(names, split="verdict", count=60, levels=(1, 9))
    assert [domain.name for domain in found] == [*EVERY_DOMAIN]
    for domain in found:
        assert domain.writing is None and 0.25 <= domain.chance < 0.35, domain.name
        for example, task in zip(domain.examples, domain.tasks, strict=True):
            assert example.prompt == f"{task.question}\nAnswer:"
            assert example.completion in example.choices
            assert len({*example.choices}) == len(example.choices)
    again = from_names(names, split="verdict", count=60, levels=(1, 9))
    assert [d.examples for d in again] == [d.examples for d in found]
    other = from_names(names, split="selection", count=60, levels=(1, 9))
    for mine, theirs in zip(found, other, strict=True):
        assert not {e.prompt for e in mine.examples} & {e.prompt for e in theirs.examples}
    with pytest.raises(ConfigError, match="only generated packs are"):
        from_names([f"{CHOICE}arc_easy"], split="verdict", count=9, levels=(1, 9))


@pytest.mark.slow
def test_models_of_others_are_asked_in_plain_words(tmp_path: Path) -> None:
    folders = [str(family() / name) for name in PARENTS]
    settings = EvoMergeSettings(generations=0, fitness_subset_size=8, verdict_items=8)
    inputs = locate_inputs(settings, folders, None, 1, tmp_path)
    assert inputs.settings.tasks == [f"{CHOICE}{name}" for name in EVERY_DOMAIN]
    assert any("by likelihood; chance: code 25%" in note for note in inputs.notes)


def test_partial_credit_of_code() -> None:
    task = make("code_list", "verdict", 3, level=4)
    assert graders.code_in_part(task, task.answer) == 1.0
    assert graders.code_in_part(task, "no code") == 0.0
    assert graders.code_in_part(task, "def solve(xs:\n  broken") == 0.0
    wrong = graders.code_in_part(task, "def solve(xs):\n    return 'nothing'")
    assert wrong == pytest.approx(0.2) and graders.code(task, "def solve(xs):\n    return 0") == 0


def test_partial_credit_of_documents() -> None:
    task = make("to_json", "verdict", 1, level=4)
    assert graders.document_in_part(task, task.answer) == 1.0
    assert graders.document_in_part(task, "{]") == 0.0
    assert graders.document_in_part(task, "{}") == pytest.approx(0.2)
    digits = "".join("7" if c.isdigit() else c for c in task.answer)
    assert 0.2 <= graders.document_in_part(task, digits) < 1.0 or digits == task.answer


def test_the_verdict_has_no_partial_credit() -> None:
    few = {"fitness_subset_size": 5, "verdict_items": 5, "max_level": 3}
    splits = split_items(EvoMergeSettings(tasks=["pack:code"], partial_credit=True, **few))
    grades = {split: domains[0].grade for split, domains in splits.items()}
    assert grades["verdict"] is graders.code
    assert grades["selection"] is grades["holdout"] is graders.code_in_part
