"""The judge of thoughts: right about a model that thinks, and not fooled by one that does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from agent_forge.data import traces
from agent_forge.data.baselines import Grade
from agent_forge.data.dataset_rows import Example
from agent_forge.data.tasks import Task, is_right, make
from agent_forge.data.tokenizer import SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.evals import graders, thoughts
from agent_forge.evals.coherence import WEIGHTS, CoherenceValidator, coherence
from agent_forge.evals.comparison import compare_answers
from agent_forge.evals.domains import AnswerFormat, Domain
from agent_forge.evals.model_under_test import ItemScores, model_under_test
from agent_forge.evals.thoughts import NONE, OWN, Thinker, ThoughtReport, assess
from agent_forge.infer import thinking
from agent_forge.model.opened import ForgeModel, open_model
from tests.support.eval_models import llama
from tests.support.step_machine import StepMachine
from tests.support.tokenizers import TOKENIZER

FAMILIES = ("chain", "tot4", "swap4")


@cache
def items() -> tuple[Task, ...]:
    return tuple(
        make(family, "verdict", i, level=traces.LEVELS[family])
        for family in FAMILIES
        for i in range(20)
    )


def thinker(**how: object) -> Thinker:
    return Thinker(StepMachine(**how), TOKENIZER)  # type: ignore[arg-type]


@cache
def honest() -> ThoughtReport:
    return assess(thinker(slips=5), items())


def replaced(how: str) -> Thinker:
    """The perfect thinker, given other thoughts than its own."""
    machine = thinker()

    def others(asked: Sequence[Task]) -> list[list[int]]:
        own = machine.think(asked)
        if how == "constant":
            return [own[0]] * len(own)
        if how == "shuffled":
            return [*own[1:], own[0]]
        return [TOKENIZER.encode(".") * len(thought) for thought in own]

    return Thinker(machine.network, TOKENIZER, others)


def test_thoughts_that_work_are_no_theatre() -> None:
    report = honest()
    assert not report.theatre, report.reasons
    assert 0.7 < report.accuracy(OWN) < 0.95 and report.accuracy(NONE) < 0.1
    for after in report.after_change.values():
        assert after.followed > 0.9 and after.right < 0.05 and after.items > 15
    assert report.predictive_power is not None and report.predictive_power > 0.8
    assert report.correlation is not None and report.correlation > 0.3
    assert "thoughts help: better than without thoughts" in report.sentence
    assert min(report.lengths) > 5 and report.divergence > 0.3


def test_a_thought_has_room_for_some_times_its_steps() -> None:
    steps = [
        TOKENIZER.compose(*traces.write_trace(item, "step", Random(0)).parts()) for item in items()
    ]
    assert 2 * max(map(len, steps)) < thinker().room(items()) < 5 * max(map(len, steps))


@pytest.mark.parametrize("how", ["constant", "shuffled", "pauses"])
def test_replaced_thoughts_are_theatre(how: str) -> None:
    report = assess(replaced(how), items())
    assert report.theatre and "theatre" in report.sentence
    assert any("not better than" in reason for reason in report.reasons)


def test_a_model_that_answers_whatever_it_thought_is_theatre() -> None:
    """Its thoughts are right and look good, and its answers are right: they are not needed."""
    report = assess(thinker(knows=True), items())
    assert report.accuracy(OWN) == 1.0 and report.accuracy(NONE) == 1.0
    told = " ".join(report.reasons)
    assert "not better than none" in told and "0% of the answers follow a changed step" in told


def test_a_report_comes_back_from_json() -> None:
    report = honest()
    again = ThoughtReport.of_record(json.loads(json.dumps(asdict(report))))
    assert again.to_json() == report.to_json() and again.sentence == report.sentence
    levels = report.by_level()["swap4"]
    assert set(levels) == {"2", "3", "4", "5"}
    assert levels["5"]["tokens"] > levels["2"]["tokens"] > 5
    assert json.loads(json.dumps(report.to_json()))["theatre"] is False


def test_few_wrong_answers_bound_the_correlation_and_not_the_verdict() -> None:
    def report(worst: Sequence[int]) -> ThoughtReport:
        """A thousand thoughts of rising coherence, of which these have wrong answers."""
        right = [n not in worst for n in range(1000)]
        scores = [dict.fromkeys(WEIGHTS, n / 1000) for n in range(1000)]
        known = {"families": ["chain"] * 1000, "levels": [2] * 1000, "lengths": [9] * 1000}
        answers = {**dict.fromkeys(honest().right, [False] * 1000), OWN: right}
        return replace(honest(), right=answers, scores=scores, after_change={}, **known)

    sensible, random = report(range(12)), report(range(40, 1000, 80))
    assert sensible.correlation is not None and sensible.correlation < 0.3
    assert sensible.correlation_reached == pytest.approx(1.0)
    assert random.correlation_reached is not None and random.correlation_reached < 0.3
    assert any("of the largest possible" in reason for reason in random.reasons)
    assert not any("of the largest possible" in reason for reason in sensible.reasons)


def test_nearly_all_right_says_nothing_about_what_goes_with_it() -> None:
    report = assess(thinker(), items())
    assert report.accuracy(OWN) == 1.0
    assert report.correlation is None and report.predictive_power is None
    assert not report.theatre


def test_strategies_are_measured_by_form_and_content() -> None:
    found = thoughts.measure_strategy(thinker(slips=5), "step", items())
    assert found.fits == 1.0 and 0.7 < found.exact == found.accuracy < 1
    other = thoughts.measure_strategy(thinker(), "doubt", items()[:20])
    assert other.fits == 0.0 and other.exact == 0.0  # it writes plain steps, whatever it is asked


def test_useless_thoughts_look_like_the_own_ones() -> None:
    own = thinker().think(items())
    others = thoughts.other_thoughts(items(), own, TOKENIZER)
    for name in (thoughts.RANDOM, thoughts.FILLER):
        assert list(map(len, others[name])) == list(map(len, own))
    shuffled = others[thoughts.SHUFFLED]
    assert sorted(shuffled) == sorted(own) and not any(map(list.__eq__, shuffled, own))
    digits = {TOKENIZER.encode(digit)[0] for digit in "0123456789"}
    for made, thought in zip(others[thoughts.RANDOM], own, strict=True):
        assert made != thought
        assert [i in digits or i for i in made] == [i in digits or i for i in thought]


@pytest.mark.parametrize(
    ("a", "b", "distance"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert thoughts.edit_distance(list(map(ord, a)), list(map(ord, b))) == distance


def test_a_gain_of_answers_is_that_of_a_paired_test() -> None:
    before, after = [False] * 30 + [True] * 70, [True] * 25 + [False] * 5 + [True] * 70
    gain = compare_answers(before, after, "x")
    assert gain.value == pytest.approx(0.25) and gain.verdict == "better"
    assert gain.p == pytest.approx(2 * 0.5**25) and gain.low < 0.25 < gain.high
    assert compare_answers(after, after, "x").verdict == "unclear"
    with pytest.raises(ConfigError, match="not measured on the same items"):
        compare_answers([True], [], "x")


def test_coherence_tells_a_good_thought_from_noise() -> None:
    judge = CoherenceValidator(StepMachine(), TOKENIZER)
    item = items()[0]
    good = traces.write_trace(item, "step", Random(0))
    wrong = traces.Trace(item, "step", tuple(c[:-1] + "x" for c in good.claims))
    value, scores = judge.validate_thought(good.thought, item.question, item)
    assert set(scores) == set(WEIGHTS) and all(0 <= s <= 1 for s in scores.values())
    assert value == pytest.approx(coherence(scores)) and scores["logical"] == 1.0
    assert judge.validate_thought(wrong.thought, item.question, item)[1]["logical"] == 0.0
    noise = judge.validate_thought("zzz", item.question, item)[0]
    assert noise < judge.validate_thought(wrong.thought, item.question, item)[0] < value


def test_claims_in_plain_words_are_checked_by_arithmetic() -> None:
    judge = CoherenceValidator(StepMachine(), TOKENIZER)
    for text, share in (("2 + 3 = 5", 1.0), ("2 + 3 = 5 and 4 * 2 = 9", 0.5), ("it rains", 0.5)):
        assert judge.validate_thought(text, "What?")[1]["logical"] == share


def test_a_sentence_model_can_be_plugged_in() -> None:
    def embed(texts: Sequence[str]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[1.0, float("rot" in text)] for text in texts])

    judge = CoherenceValidator(StepMachine(), TOKENIZER, embed)
    assert judge.validate_thought("<step>rot 1", "rot : 2")[1]["semantic"] == pytest.approx(1.0)
    assert judge.validate_thought("<step>rev 1", "rot : 2")[1]["semantic"] < 0.8


class Forthcoming(StepMachine):
    """It begins each reply with a thought, unasked."""

    def next_token(self, ids: list[int]) -> int:
        return thinking.BEGIN if ids[-1] == SPECIAL["<|assistant|>"] else super().next_token(ids)


def test_an_answer_is_graded_behind_its_thought(tmp_path: Path) -> None:
    for name, content in TOKENIZER.files().items():
        (tmp_path / name).write_bytes(content)
    model = model_under_test(ForgeModel(Forthcoming(), tmp_path))
    turns = ((("user", t.question), ("assistant", t.answer)) for t in items()[:6])
    talks = (tuple({"role": who, "content": said} for who, said in turn) for turn in turns)
    examples = tuple(Example(t[0]["content"], t[1]["content"], messages=t) for t in talks)

    def scores(tokens: int, grade: Grade) -> ItemScores:
        domain = Domain("d", examples, tasks=items()[:6], writing=AnswerFormat(tokens), grade=grade)
        return model.measure(model.prepare(domain))

    for grade in (is_right, graders.words):
        found = scores(256, grade)
        assert found.right == [1.0] * 6
        assert not any(found.truncated) and not any(found.empty)
    found = scores(6, graders.words)  # the thought has no end
    assert found.right == [0.0] * 6
    assert all(found.truncated) and all(found.empty)


def test_the_thought_of_another_maker_is_no_answer(tmp_path: Path) -> None:
    opened = open_model(llama(tmp_path / "llama"))
    cases = {
        "<think>3 or 4?</think>4": "4",
        "3 or 4?</think>4": "4",
        "<think>a</think>3<think>b</think>4": "4",
        "<think>3 or 4?": "",
        "<think>a</think>3<think>or": "",
        "just 4": "just 4",
    }
    assert {text: opened.decode_answer(opened.encode(text)) for text in cases} == cases


OPENED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def test_a_thought_that_the_template_opens_is_no_answer(tmp_path: Path) -> None:
    """Some templates end the prompt with the mark: the model itself never writes it."""
    folder = llama(tmp_path / "llama")
    opened = open_model(folder)
    opened.tokenizer.chat_template, opened.chats = OPENED, True
    prompt = opened.encode_chat([{"role": "user", "content": "3 or 4?"}])
    assert opened.opens_thought(prompt)
    assert not opened.opens_thought(opened.encode("is <think> a word?"))
    cases = {"3 or 4? It is 4": "", "3 or 4?</think>4": "4", "a</think>3<think>or": ""}
    told = {t: opened.decode_answer(opened.encode(t), within=True) for t in cases}
    assert told == cases
    model = model_under_test(opened)
    task = replace(items()[0], answer="4")
    turns = ({"role": "user", "content": "3 or 4?"}, {"role": "assistant", "content": "4"})
    example = Example("3 or 4?", "4", messages=turns)
    domain = Domain("d", (example,), tasks=[task], writing=AnswerFormat(6), grade=graders.words)
    (answer,), _ = model.write(domain, [tuple(prompt)])
    assert answer.truncated and answer.text == ""  # whatever it wrote, it was a thought


def test_marks_of_thoughts_may_be_special_tokens(tmp_path: Path) -> None:
    opened = open_model(llama(tmp_path / "llama"))
    more = {"additional_special_tokens": ["<think>", "</think>"]}
    opened.tokenizer.add_special_tokens(more)
    cases = {"<think>It is 7, no, 9": "", "<think>7</think>8": "8", "8": "8"}
    ids = {text: opened.tokenizer(text, add_special_tokens=False).input_ids for text in cases}
    assert {text: opened.decode_answer(own).strip() for text, own in ids.items()} == cases
