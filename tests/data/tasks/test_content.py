"""What the tasks say is true and reads well: answers computed again, steps, language, stories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import yaml

from agent_forge.data import baselines
from agent_forge.data.tasks import DOMAINS, FAMILIES, SPLITS, Task, make
from agent_forge.data.tasks.common_sense import FLOATS, KINDS, RELATIONS, SINKS, SIZES
from agent_forge.data.tasks.multilingual import LANGUAGES, LEXICON, OWN, WORDS
from agent_forge.data.tasks.stories import BOYS, GIRLS
from agent_forge.data.tasks.symbols import FACTS
from tests.support.task_samples import LEARNABLE, every_family, run, some

BARE = {*LEARNABLE, *DOMAINS["thinking"]}
BARE |= {*DOMAINS["structured"], *DOMAINS["code"], *DOMAINS["multilingual"]}


# -- answers, computed again ----------------------------------------------------------------------


def halves(rest: list[str]) -> tuple[list[str], list[str]]:
    """The symbols before and after the colon."""
    return rest[: rest.index(":")], rest[rest.index(":") + 1 :]


def sign(pair: tuple[str, str]) -> str:
    return "<" if pair[0] < pair[1] else ">" if pair[0] > pair[1] else "="


SINGLE = ("digit_max", "digit_compare", "digit_shift", "sort_digits")
AGAIN: dict[str, Callable[[list[str]], list[str]]] = {
    "digit_max": lambda r: [max(p) for p in zip(*halves(r), strict=True)],
    "digit_compare": lambda r: [sign(p) for p in zip(*halves(r), strict=True)],
    "digit_shift": lambda r: [str(int(d) + int(r[0]))[-1] for d in r[2:]],
    "copy": lambda r: r,
    "reverse": lambda r: list(reversed(r)),
    "letter_at": lambda r: [halves(r)[1][int(i) - 1] for i in halves(r)[0]],
    "facts": lambda r: [FACTS["".join(x.split())] for x in " ".join(r).split(",")],
    "rotate": lambda r: [*r[1:], r[0]],
    "every_second": lambda r: [s for i, s in enumerate(r) if i % 2 == 0],
    "sort_digits": sorted,
}


@pytest.mark.parametrize("name", LEARNABLE)
def test_symbols_are_answered_right(name: str) -> None:
    for task in some(name, 300):
        _, *rest = re.findall(r"^[a-z]+|\S" if name in SINGLE else r"\S+", task.question)
        answer = "".join(task.answer.split())
        assert "".join(AGAIN[name](rest)) == answer
        assert task.answer == (answer if answer.isdigit() else " ".join(answer))


@pytest.mark.parametrize(
    "name", ["addition", "subtraction", "multiplication", "expression", "word_problem"]
)
def test_every_worked_step_is_true_and_the_last_gives_the_answer(name: str) -> None:
    for task in some(name, 400):
        lines = task.steps.splitlines()
        results = {int(n) for n in re.findall(r"\d+", task.question)}
        for line in lines:
            if "=" not in line:
                assert re.fullmatch(r"write \d", line)
                continue
            left, value = re.match(r"(.+) = (-?\d+)", line).groups()  # type: ignore[union-attr]
            assert eval(left) == int(value), line
            if name in ("expression", "word_problem"):
                used = {int(n) for n in re.findall(r"\d+", left)}
                assert used <= results, (task.question, line)
                results.add(abs(int(value)))
        if name in ("addition", "subtraction"):
            written = "".join(re.findall(r"write (\d)", task.steps))[::-1]
            assert int(written) == int(task.answer)
        else:
            assert lines[-1].endswith(f"= {task.answer}")


def test_arithmetic_is_answered_right() -> None:
    operations = {"addition": "+", "subtraction": "-", "multiplication": "*"}
    for name, sign in operations.items():
        for task in some(name, 200):
            numbers = re.findall(r"\d+", task.question)
            if task.question.startswith("Subtract"):
                numbers.reverse()
            assert eval(sign.join(numbers)) == int(task.answer)
    for task in some("expression", 300):
        text = "".join(re.findall(r"[\d+*() -]", re.sub(r"[A-Za-z]+", "", task.question)))
        assert eval(text) == int(task.answer), task.question


def test_sequences_are_continued_right_and_only_one_way() -> None:
    for task in some("continue_pattern", 400):
        terms = re.findall(r"(?<!\w)-?\d+|\b[a-z]\b(?=,| there|\.|\?| and|$)", task.question)
        if task.answer.isalpha():
            period = next(p for p in range(1, 99) if terms[p:] == terms[:-p])
            assert task.answer == terms[len(terms) - period] and len(terms) >= 2 * period
            continue
        numbers = [*map(int, terms), int(task.answer)]
        steps = [b - a for a, b in pairwise(numbers)]
        bends = [b - a for a, b in pairwise(steps)]
        even = steps[::2] == [steps[0]] * len(steps[::2]) and len(set(steps[1::2])) == 1
        powers = all(b * numbers[0] == a * numbers[1] for a, b in pairwise(numbers))
        assert even or len(set(bends)) == 1 or powers, task.question


@pytest.mark.parametrize("name", DOMAINS["code"])
def test_tests_tell_a_function_from_a_constant(name: str) -> None:
    for task in some(name, 100):
        assert run(task.answer, task.tests)
        constant = task.tests[0].split(" == ", 1)[1]
        assert not run(f"def solve(x):\n    return {constant}", task.tests), task.question


def test_documents_hold_the_answer() -> None:
    for task in some("extract_field", 200):
        name, field, fields, *rows = eval(task.operands)
        row = next(row for row in rows if row[0] == name)
        assert str(row[fields.index(field)]) == task.answer
        assert name in task.question and field in task.question
    for task in some("to_json", 60):
        fields, *rows = eval(task.operands)
        assert json.loads(task.answer) == [dict(zip(fields, row, strict=True)) for row in rows]
    for task in some("to_yaml", 60):
        fields, *rows = eval(task.operands)
        assert yaml.safe_load(task.answer) == [dict(zip(fields, row, strict=True)) for row in rows]


def test_the_needle_and_the_pair_stand_in_the_text_once() -> None:
    for task in some("needle", 100):
        name, value = eval(task.operands)
        sentences = [s for s in task.question.split(". ") if name in s and str(value) in s]
        assert len(sentences) == 1 and task.answer == str(value)
        assert len(re.findall(rf"\b{value}\b", task.question)) == 1
        assert task.question.rsplit("\n", 1)[0].count(name) == 1
    for task in some("key_value", 100):
        key = eval(task.operands)[0]
        assert re.findall(rf"\b{key} = (\d+)", task.question) == [task.answer]


# -- what is common knowledge ---------------------------------------------------------------------


def test_the_ontology_is_unambiguous() -> None:
    for one, other in combinations(KINDS.values(), 2):
        assert not set(one) & set(other)
    for relation in RELATIONS.values():
        assert len(set(relation["pairs"].values())) == len(relation["pairs"]) >= 10
        assert not set(relation["pairs"]) & set(relation["pairs"].values())
    assert not set(FLOATS) & set(SINKS)
    for task in some("size_order", 300):
        most, answer, *others = eval(task.operands)
        sizes = sorted((SIZES[answer], *(SIZES[other] for other in others)))
        expected = sizes[-1] if most == "biggest" else sizes[0]
        assert SIZES[answer] == expected
        assert sizes[-1] >= 2 * sizes[-2] if most == "biggest" else sizes[1] >= 2 * sizes[0]


def test_the_lexicon_is_complete_and_unambiguous() -> None:
    assert len(LEXICON) >= 60 and len(LANGUAGES) == 6
    assert all(len(row) == 6 and all(row) for row in LEXICON)
    for words in WORDS.values():
        assert len({word.lower() for word in words}) == len(words)
    for language, words in OWN.items():
        assert len(words) >= 15
        for other in set(LANGUAGES) - {language}:
            assert not set(words) & set(WORDS[other])


# -- language -------------------------------------------------------------------------------------


@every_family
def test_texts_read_well(name: str) -> None:
    for task in some(name, 200):
        text = f"{task.question}\n{task.answer}\n{task.steps}"
        assert text.replace("\n", "").isprintable()
        if FAMILIES[name].domain != "structured" and name not in DOMAINS["code"]:
            assert not set("{}") & set(text), text
        if name in BARE:
            continue
        assert not re.search(r"\b[Aa] [aeiou]\w", text), text
        assert not re.search(r"\b[Aa]n [^aeiouh]", text), text
        assert (
            "  " not in text
            and " ." not in text.replace(" ...", "")
            and ".." not in (text.replace("...", ""))
        )
        assert (
            task.question[0].isupper()
            or task.question[0].isdigit()
            or name in (*("odd_one_out", "expression"),)
        ), text


def test_there_are_tens_of_thousands_of_stories() -> None:
    stories = {make("story", "train", i).answer for i in range(30_000)}
    assert len(stories) > 29_000


def test_pronouns_fit_the_people() -> None:
    for task in (make("story", "train", i) for i in range(1500)):
        *_, hero, friend, _ = eval(task.operands)
        text = f"{task.question} {task.answer}"
        assert hero in text and friend in text
        both = {hero, friend}
        assert not both <= set(GIRLS) or not re.search(r"\b([Hh]e|[Hh]is|him)\b", text)
        assert not both <= set(BOYS) or not re.search(r"\b([Ss]he|[Hh]er)\b", text)


def test_questions_about_a_story_are_answered_by_it() -> None:
    for task in some("story_qa", 300):
        text = task.question.rsplit("\n", 1)[0]
        assert task.answer in text
        kind, *_, hero, friend, _ = eval(task.operands)
        assert kind not in ("hero", "helper") or task.answer == {"hero": hero}.get(kind, friend)


# -- baselines ------------------------------------------------------------------------------------


@every_family
def test_what_one_scores_without_understanding_is_low(name: str) -> None:
    train = [make(name, "train", i, level=(1, 30)) for i in range(1500)]
    test = [make(name, "verdict", i, level=(1, 30)) for i in range(200)]
    frequent, likely = baselines.majority(train, test), baselines.ngram(train, test)
    highest = 0.1 if FAMILIES[name].learnable else 0.6
    assert 0.0 <= frequent <= highest and 0.0 <= likely <= highest


def test_baselines_find_what_there_is_to_find() -> None:
    def task(question: str, answer: str) -> Task:
        return Task("copy", 1, "train", question, answer)

    train = [
        task("x a", "p"),
        task("y a", "p"),
        task("v a", "a"),
        task("x b", "q"),
        task("z b", "q"),
        task("c", "q"),
    ]
    test = [task("w a", "p"), task("w b", "q"), task("w d", "q"), task("w d", "p")]
    assert baselines.majority(train, test) == 0.5
    assert baselines.ngram(train, test, order=1) == 0.75
    assert baselines.ngram(train, test, order=0) == baselines.majority(train, test)
    assert baselines.majority([], test) == baselines.ngram(train, []) == 0.0


@pytest.mark.parametrize("split", SPLITS)
def test_choices_are_not_given_away_by_their_place(split: str) -> None:
    answers = [make("multiple_choice", split, i, level=1).answer for i in range(900)]
    assert all(0.25 < answers.count(letter) / 900 < 0.42 for letter in "ABC")
