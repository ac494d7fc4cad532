"""The generated tasks: graded, checked, the same everywhere, and apart in their splits."""

from __future__ import annotations

import hashlib
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from agent_forge.data.tasks import DOMAINS, FAMILIES, SPLITS, Task, base, is_right, make, verifiers
from agent_forge.errors import ConfigError
from tests.support.task_samples import LEARNABLE, every_family, fingerprint, run, some

ROOT = Path(__file__).resolve().parents[3]
CODE = DOMAINS["code"]


def right(task: Task, text: str) -> bool:
    return is_right(task, text, run)


# -- the interface --------------------------------------------------------------------------------


def test_every_family_belongs_to_one_domain_and_category() -> None:
    assert sorted(name for names in DOMAINS.values() for name in names) == sorted(FAMILIES)
    assert {family.category for family in FAMILIES.values()} == {
        *("math", "qa", "code", "cs", "lang", "thinking")
    }
    assert {FAMILIES[name].domain for name in LEARNABLE} == {"reasoning", "memory", "adaptive"}
    assert all(family.summary for family in FAMILIES.values())


@every_family
def test_a_task_says_what_was_asked_of_it(name: str) -> None:
    for split in SPLITS:
        task = make(name, split, 3, level=(20, 30))
        assert (task.family, task.split) == (name, split) and 20 <= task.level <= 30
        assert task.question and task.answer and task.operands
        assert make(name, split, 3, level=17).level == 17


@every_family
def test_the_arguments_decide_everything_and_each_of_them_matters(name: str) -> None:
    first = make(name, "train", 1, seed=2)
    make(name, "verdict", 9)  # whatever is made in between
    assert make(name, "train", 1, seed=2) == first
    others = [make(name, "train", i, seed=2) for i in range(2, 12)]
    assert any(other.operands != first.operands for other in others)
    seeds = [make(name, "train", 1, seed=seed) for seed in range(3, 13)]
    assert any(other.operands != first.operands for other in seeds)


def test_tasks_are_the_same_in_another_process_without_torch() -> None:
    script = (
        "import sys; from tests.support.task_samples import fingerprint; print(fingerprint());"
        "from agent_forge.data import baselines;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    environment = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == fingerprint()


def test_the_learnable_core_stays_as_it_is() -> None:
    """Published figures name seeds; these bytes may only change together with them."""
    tasks = [make(name, split, 0, level=10) for name in LEARNABLE for split in SPLITS]
    text = "\n".join(f"{task.question} -> {task.answer}" for task in tasks)
    assert hashlib.sha256(text.encode()).hexdigest() == CORE


CORE = "8cb2a84ac9a7c6f716a0b6839d1ea83b6841c119238194fe98caa9180b5ec5e7"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"family": "digit_mx"}, "digit_max"),
        ({"family": "?"}, "known: digit_max"),
        ({"split": "test"}, "train, selection, verdict"),
        ({"level": 0}, "1 to 100"),
        ({"level": (5, 101)}, "1 to 100"),
        ({"level": (9, 3)}, "1 to 100"),
    ],
)
def test_what_does_not_exist_is_refused_with_a_hint(
    arguments: dict[str, object], hint: str
) -> None:
    given = {"family": "copy", "split": "train", "index": 0, **arguments}
    with pytest.raises(ConfigError) as caught:
        make(**given)  # type: ignore[arg-type]
    assert hint in caught.value.hint


@every_family
def test_making_tasks_is_cheap(name: str) -> None:
    """Counted in calls, which are the same on every machine: a quiet core makes 20,000 a second."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        for i in range(300):
            make(name, SPLITS[i % 3], i)
    finally:
        sys.setprofile(None)
    assert calls / 300 < (600 if FAMILIES[name].learnable else 2000)


# -- splits ---------------------------------------------------------------------------------------


@every_family
def test_no_item_is_in_two_splits(name: str) -> None:
    """Level 1 has the fewest items, so it would show first."""
    keys, questions, answers = {}, {}, {}
    for split in SPLITS:
        items = [make(name, split, i, level=1) for i in range(700)]
        items += [make(name, split, i) for i in range(400)]
        keys[split] = {task.operands for task in items}
        questions[split] = {task.question for task in items}
        for task in items:
            assert base.split_of(name, task.operands) == split
            if name not in ("multiple_choice", "story"):  # where the answer depends on the wording
                assert answers.setdefault(task.operands, task.answer) == task.answer
    for one, other in (("train", "selection"), ("train", "verdict"), ("selection", "verdict")):
        assert not keys[one] & keys[other]
        assert not questions[one] & questions[other]
    assert min(map(len, keys.values())) > 30  # enough of them at level 1, too


def test_operands_name_the_item_and_not_its_wording() -> None:
    tasks = [make("addition", "train", i, level=1) for i in range(3000)]
    wordings: dict[str, set[str]] = {}
    for task in tasks:
        wordings.setdefault(task.operands, set()).add(task.question)
    assert max(map(len, wordings.values())) > 2


def test_the_splits_have_the_shares_they_should() -> None:
    splits = [base.split_of("x", str(i)) for i in range(20_000)]
    assert splits.count("train") / 20_000 == pytest.approx(0.70, abs=0.02)
    assert splits.count("selection") / 20_000 == pytest.approx(0.15, abs=0.01)


def fits(wording: str, text: str) -> bool:
    """Whether the text is this wording with its gaps filled."""
    first, *middle, last = re.split(r"\{\w+\}", wording)
    if not (text.startswith(first) and text.endswith(last)):
        return False
    place, end = len(first), len(text) - len(last)
    for piece in middle:
        place = text.find(piece, place, end) + len(piece)
        if place < len(piece):
            return False
    return place <= end


@every_family
def test_no_wording_is_in_two_splits(name: str) -> None:
    wordings = FAMILIES[name].wordings
    if not wordings:
        assert FAMILIES[name].learnable or FAMILIES[name].domain == "thinking"  # bare symbols
        return
    seen: dict[str, set[int]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for i in range(300):
            task = make(name, split, i)
            for other in SPLITS:
                found = {n for n, text in enumerate(wordings[other]) if fits(text, task.question)}
                assert bool(found) == (other == split), (task.question, other)
                seen[other] |= found
    assert all(len(seen[split]) == len(wordings[split]) for split in SPLITS)


# -- difficulty -----------------------------------------------------------------------------------


@every_family
def test_higher_levels_are_longer(name: str) -> None:
    means = []
    for level in (1, 34, 67, 100):
        items = [make(name, "train", i, level=level) for i in range(200)]
        means.append(
            statistics.mean(len(task.question + task.answer + task.steps) for task in items)
        )
    assert means == sorted(means) and means[-1] > 1.15 * means[0]


# -- checks ---------------------------------------------------------------------------------------


@every_family
def test_the_answer_is_accepted_and_wrong_answers_are_refused(name: str) -> None:
    for task in some(name, 60):
        assert right(task, task.answer)
        assert right(task, f"\n{task.answer}\n")
        assert task.distractors and len(set(task.distractors)) == len(task.distractors)
        for bad in (*task.distractors, *near_misses(task)):
            assert not right(task, bad), (task.question, task.answer, bad)


def near_misses(task: Task) -> list[str]:
    """Texts that are almost the answer."""
    answer = task.answer
    accept = FAMILIES[task.family].accept
    if accept is None:
        return ["", "def solve(", "solve = None", "def solve(x):\n    return None"]
    if accept is verifiers.number and not answer.startswith("-"):
        return ["", f"-{answer}", f"{answer}1", f"{answer}.5", f"{answer},000", f"x{answer}"]
    return {
        verifiers.symbols: ["", answer[:-1], f"{answer} {answer[0]}", f"{answer[0]} {answer}"],
        verifiers.number: ["", answer[1:], f"{answer}1", f"{answer}.5", f"{answer},000"],
        verifiers.words: ["", f"{answer}x", f"x{answer}", f"{answer} {answer}", f"not {answer}"],
        verifiers.letter: ["", "a clock", f"{answer}{answer}", f"x{answer})", "?"],
        verifiers.whole_text: ["", answer[: len(answer) // 2], f"{answer} And so on."],
        verifiers.value: ["", f"{answer}x", f"{answer}1", f"{answer} {answer}"],
        verifiers.json_document: ["", "[]", answer[:-1], answer.replace('"name"', '"Name"')],
        verifiers.yaml_document: ["", "- 1", f"{answer}\n- x", answer.replace("name:", "Name:")],
        verifiers.csv_document: ["", "name", f"{answer}\nx", answer.replace("name,", "Name,")],
    }[accept]


def asked(family: str, answer: str) -> Task:
    """A task of a family with a given answer."""
    return Task(family, 1, "train", "?", answer)


@pytest.mark.parametrize(
    ("family", "answer", "text", "expected"),
    [
        ("copy", "a b c", "abc", True),
        ("copy", "a b c", "  a b  c\nand more", True),
        ("copy", "a b c", "A B C", False),
        ("addition", "12", "12 apples", True),
        ("addition", "12", "The answer is 12.", True),
        ("addition", "12", "7 + 5 = 12", False),  # the first number counts
        ("addition", "12", "no idea\n12", False),
        ("addition", "12", "1,2", False),
        ("expression", "-3", "-3", True),
        ("expression", "3", "x-3", False),
        ("odd_one_out", "bed", "The bed.", True),
        ("odd_one_out", "bed", "a bed or two", False),
        ("story_qa", "to sew a flag", "sew a flag", True),
        ("multiple_choice", "B", "b", True),
        ("multiple_choice", "B", "(B)", True),
        ("multiple_choice", "B", "B) a broom", True),
        ("multiple_choice", "A", "a broom", False),
        ("extract_field", "7", "007", True),
        ("extract_field", "Oslo", '"Oslo"', True),
        ("extract_field", "Oslo", "oslo", False),
        ("to_json", '[{"a": 1, "b": "x"}]', '[ {"b": "x",\n"a": 1} ]', True),
        ("to_json", '[{"a": 1}]', '[{"a": "1"}]', False),
        ("to_json", '[{"a": 1}]', '[{"a": 1.0}]', False),
        ("to_json", '[{"a": 1}]', '[{"a": true}]', False),
        ("to_json", '[{"a": 1}]', "[" * 15_000, False),
        ("to_json", '[{"a": 1}]', '[{"a": 1}]' + " " * 30_000, False),
        ("to_yaml", "- a: 1\n  b: x", '[{"a": 1, "b": "x"}]', True),
        ("to_yaml", "- a: 1\n  b: x", "- {b: x, a: 1}", True),
        ("to_yaml", "- a: 1", "- &x {a: 1}", False),
        ("to_yaml", "- a: 1", "- !!python/object/apply:os.getcwd []", False),
        ("to_yaml", "- a: 1", "- a: 2001-99-99", False),
        ("to_csv", "a,b\n1,x", 'a, b\r\n"1","x"\r\n', True),
        ("to_csv", "a,b\n1,x", "b,a\nx,1", False),
        ("to_csv", "a,b\n1,x", 'a,b\n1,"x', False),
        ("story", "One two.", "One\ntwo.", True),
        ("translate", "K\u00e4se", "k\u00e4se", True),
    ],
)
def test_what_a_check_forgives(family: str, answer: str, text: str, expected: bool) -> None:
    assert is_right(asked(family, answer), text) == expected


@pytest.mark.parametrize("name", CODE)
def test_code_is_only_run_by_the_runner_that_is_given(name: str) -> None:
    task = make(name, "train", 0)
    with pytest.raises(ValueError, match="run="):
        is_right(task, task.answer)
    assert is_right(
        task, "anything", lambda source, tests: (source, tests) == ("anything", task.tests)
    )
