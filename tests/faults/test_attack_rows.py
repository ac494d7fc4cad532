"""What an attack on rows of a user's own found: something else is asked than what is given."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data import datasets
from agent_forge.data.dataset_rows import Example
from agent_forge.data.near_copies import question_hash
from agent_forge.errors import DamagedFile
from agent_forge.evals.domains import Domain, from_files
from agent_forge.evals.model_under_test import ItemScores, open_model_under_test
from tests.golden.freeze import data_folder
from tests.support.eval_models import llama
from tests.support.tokenizers import CHAT

SAID = "{{ m['content'] }}"
TRIMS = CHAT.replace(SAID, "{{ m['content'] | trim }}")
ASKED = {"role": "user", "content": "what is it?"}


def put(path: Path, *rows: dict[str, Any]) -> Domain:
    path.write_text("\n".join(map(json.dumps, rows)))
    return from_files([path])[0]


def said(answer: str, *choices: str, **more: Any) -> dict[str, Any]:
    reply = {"role": "assistant", "content": answer, **more}
    return {"messages": [ASKED, reply], "choices": list(choices)}


# -- blanks ---------------------------------------------------------------------------------------


def test_blanks_at_the_ends_of_a_reply_change_nothing(tmp_path: Path) -> None:
    """Nor does it matter whether a template leaves them out."""
    forms = ("a bird", "a bird\n", " a bird" + "\n" * 20)
    domains = [put(tmp_path / "x.jsonl", said(form)) for form in forms]
    found: list[list[ItemScores]] = []
    for name, template in (("plain", CHAT), ("trims", TRIMS)):
        model = open_model_under_test(llama(tmp_path / name, template=template, longest=512))
        found.append([model.measure(model.prepare(domain)) for domain in domains])
    assert found[0] == found[1]
    assert [s.loss for s in found[0]] == [found[0][0].loss] * 3
    assert {tuple(d.sizes) for d in domains} == {(6,)}
    assert {d.unigram_bits for d in domains} == {domains[0].unigram_bits}


def test_choices_are_compared_without_the_blanks_around_them(tmp_path: Path) -> None:
    model = open_model_under_test(llama(tmp_path / "m", template=TRIMS, longest=512))
    for before in ("", " ", "\n\n"):
        row = said(f"{before}positive", f"{before}positive", f"{before}no")
        prepared = model.prepare(put(tmp_path / "x.jsonl", row))
        assert prepared.sizes.tolist() == [8, 2]


def test_blanks_of_a_completion_are_asked_for_and_do_not_count(tmp_path: Path) -> None:
    """A tokenizer may leave them out; the bytes are those of the data alone."""
    rows = [{"prompt": f"so {i}:", "completion": f" yes{' ' * i}"} for i in range(3)]
    domain = put(tmp_path / "x.jsonl", *rows)
    assert domain.sizes == [3, 3, 3] == from_files([tmp_path / "x.jsonl"])[0].sizes
    model = open_model_under_test(llama(tmp_path / "m", template=CHAT, longest=512))
    tokens = model.measure(model.prepare(domain)).tokens
    assert sorted(tokens) == [tokens[0], tokens[0] + 1, tokens[0] + 2]
    assert from_files([tmp_path / "x.jsonl"], "prompt")[0].sizes == [4, 5, 6]  # as it was


def test_blanks_before_a_call_do_not_count(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    sizes = [
        put(tmp_path / "x.jsonl", said(text, tool_calls=calls)).sizes for text in ("so", "so\n\n")
    ]
    assert sizes[0] == sizes[1]


# -- fields ---------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Who wrote it?", "completion": " Anna"},
    "question": {"question": "Who wrote it?", "answer": "Anna"},
    "messages": {"messages": [ASKED, {"role": "assistant", "content": "Anna"}]},
}
OF_A_QUESTION = (
    *("options", "article", "story", "support", "instruction", "background", "document", "text"),
    *("input", "Body", "reading_passage", "inputText", "distractor1", "A", "images", "hint"),
    *("source_text", "image_url", "code", "choice1", "answer_choices", "candidates", "theory"),
    *("alternatives", "claim", "review", "starter_code", "definition"),
)
OF_A_ROW: dict[str, Any] = {
    **{"id": "x", "source": "a b", "split": "train", "category": "c", "rating": 4.5},
    **{
        "meta_info": {"a": 1},
        "language_code": "de",
        "context_id": "c7",
        "text_length": 9,
        "has_context": True,
    },
    **{"question_type": "who", "explanation": "She did.", "title": "Letters", "url": "http://x"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OF_A_QUESTION)
def test_a_field_of_the_question_is_not_dropped(form: str, name: str, tmp_path: Path) -> None:
    path, row = tmp_path / "x.jsonl", FORMS[form]
    for empty in ("", " ", None, [], {}):
        put(path, {**row, name: empty})
    for value in ("Anna was here.", "wrote", ["Anna", "Tom"], {"A": "Anna"}):
        with pytest.raises(DamagedFile, match=f"line 1: field '{name}' is not read"):
            put(path, {**row, name: value})


def test_a_number_can_be_a_choice(tmp_path: Path) -> None:
    for name in ("A", "option_1", "choice2"):
        with pytest.raises(DamagedFile, match=f"field '{name}' is not read"):
            put(tmp_path / "x.jsonl", {**FORMS["prompt"], name: 7})


@pytest.mark.parametrize("name", ["answer", "completion", "choices", "question_2"])
def test_a_text_has_no_answer_beside_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=f"field '{name}' is not read"):
        put(tmp_path / "x.jsonl", {"text": "Who wrote it?", name: "Anna"})


def test_an_answer_beside_messages_is_not_dropped(tmp_path: Path) -> None:
    """A worked example, then the question: the reply to it would not be what is asked."""
    shot = [ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and now?"}]
    with pytest.raises(DamagedFile, match="field 'answer' is not read"):
        put(tmp_path / "x.jsonl", {"messages": shot, "answer": "11"})


def test_which_part_of_an_object_holds_the_rows(tmp_path: Path) -> None:
    path, row = tmp_path / "x.json", FORMS["prompt"]
    path.write_text(json.dumps({"rows": [row], "version": 3}))
    assert len(from_files([path])[0].examples) == 1
    path.write_text(json.dumps({"easy": [row], "hard": {"0": row}}))
    with pytest.raises(DamagedFile, match="which of them are the rows"):
        from_files([path])


def test_fields_that_are_no_part_of_a_question_or_in_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for row in FORMS.values():
        assert len(put(path, {**row, **OF_A_ROW}).examples) == 1
    put(path, {**FORMS["messages"], "prompt": ASKED["content"], "prompt_id": "7"})
    put(path, {**FORMS["prompt"], "instruction": "Who wrote it?"})
    for form, name in (("prompt", "context"), ("messages", "prompt"), ("messages", "question")):
        with pytest.raises(DamagedFile, match=f"field '{name}' is not read"):
            put(path, {**FORMS[form], name: "Anna did."})
    both = put(path, {**FORMS["question"], "context": "Anna did."})
    assert both.examples[0].prompt.startswith("Anna did.\n")
    with pytest.raises(DamagedFile, match="field 'passage' is not read"):
        put(path, {**FORMS["question"], "context": "Anna did.", "passage": "Or not."})


@pytest.mark.parametrize(("value", "told"), [(True, "true"), (False, "false"), (1.5, "1.5")])
def test_an_answer_that_can_be_written_in_several_ways(
    value: Any, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    rows = [
        {**FORMS["prompt"], "completion": value},
        {**FORMS["question"], "answer": value},
        {**FORMS["prompt"], "choices": [" Anna", value]},
        said(value),
    ]
    for row in rows:
        with pytest.raises(DamagedFile, match=f" is {told}, which can be written in several ways"):
            put(path, row)
    assert put(path, {**FORMS["prompt"], "completion": 42}).examples[0].completion == "42"


@pytest.mark.parametrize(
    "name", ["function_call", "refusal", "audio", "annotations", "reasoning_content", "thinking"]
)
def test_what_a_reply_says_beside_its_content(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    put(path, said("so", **{name: None}, id="x", name="bot", weight=1, created_time="now"))
    for value in ("no", [{"name": "f"}], {"name": "f"}):
        with pytest.raises(DamagedFile, match=f"line 1.*: field '{name}'.* is not read"):
            put(path, said("so", **{name: value}))
    row = said("so", function_call={"name": "f"})
    with pytest.raises(DamagedFile, match="message 2: field 'function_call' is not read"):
        put(path, {"messages": [*row["messages"], *said("so")["messages"]]})


# -- worked examples and options -------------------------------------------------------------------

Shots = Sequence[tuple[str, str]]
NOUNS = ("plot", "actor", "music", "scene", "ending", "story", "camera", "joke", "hero", "pace")
LABELS = [
    *(("Review:", "Sentiment:"), ("Question:", "SQL:"), ("Question:", "Final answer:")),
    *(("English:", "French:"), ("Entr\u00e9e :", "R\u00e9ponse :"), ("### Text\n", "### Topic\n")),
    *(
        ("**Tweet:**", "**Is it a joke:**"),
        ("[TEXT]", "[LABEL]"),
        ("\u8bc4\u8bba:", "\u60c5\u611f:"),
    ),
    *(("<text>", "<topic>"), ("Premise: It is so.\nClaim:", "Verdict:"), ("", "SQL:")),
]
FORMS_OF_SHOTS = {f"{a}/{b}": (f"{a} %s\n{b} ", "\n\n") for a, b in LABELS} | {
    **{f"a line, {sign}": (f"%s {sign} ", "\n") for sign in ("=>", "->", "\u2192", "//")},
    "lines": ("Review: %s\nSentiment: ", "\n"),
    "ruled": ("Review: %s\nSentiment: ", "\n---\n"),
    "within a line": ("Review: %s Sentiment: ", "\n"),
    "one line": ("Review: %s Sentiment: ", " "),
    "numbered": ("Review {n}: %s\nSentiment {n}: ", "\n\n"),
    "a list": ("{n}. %s => ", "\n"),
    "headed": ("Example {n}:\nText: %s\nTopic: ", "\n\n"),
    "reasoned": ("Text: %s\nThoughts: Step 1: read it.\n\nStep 2: so\nTopic: ", "\n\n"),
}


def few_shot(form: str, shots: Shots, asked: str) -> str:
    """A prompt with worked examples before what is asked."""
    each, gap = FORMS_OF_SHOTS[form]
    rows = [*shots, (asked, "")]
    return gap.join(each.replace("{n}", str(n)) % q + y for n, (q, y) in enumerate(rows, 1))


def of(prompt: str) -> bytes:
    return question_hash(Example(prompt.rstrip(), "x"))


@pytest.mark.parametrize("form", FORMS_OF_SHOTS)
def test_worked_examples_do_not_part_a_question(form: str) -> None:
    """Whatever they are, however many, and whatever their labels; other questions are others."""
    rng = random.Random(form)
    for text in ("the %s was %s and the %s seemed long", "%s%s%s"):
        asked = [text % tuple(rng.choice(NOUNS) for _ in "abc") + "xyz"[i % 3] for i in range(40)]
        asked = list(dict.fromkeys(asked))
        hashes = []
        for question in asked:
            others = [q for q in asked if q != question]
            drawn = (rng.sample(others, rng.randint(1, 5)) for _ in range(5))
            labelled = ([(q, rng.choice(["yes", "not so good"])) for q in shots] for shots in drawn)
            found = {of(few_shot(form, shots, question)) for shots in labelled}
            assert len(found) == 1, question
            hashes += found
        assert len(set(hashes)) == len(asked)


@pytest.mark.parametrize("form", ["Review:/Sentiment:", "English:/French:", "a line, =>"])
def test_a_prompt_without_worked_examples_is_the_same_question(form: str) -> None:
    shots = [("good one", "yes"), ("bad one", "no")]
    assert of(few_shot(form, shots, "the plot")) == of(few_shot(form, [], "the plot"))


def test_worked_examples_whose_answer_is_left_to_the_completion() -> None:
    shots = "Review: good\nSentiment: yes\n\n", "Review: bad\nSentiment: no\n\n"
    assert of(f"{shots[0]}Review: the plot") == of(f"{shots[1]}{shots[0]}Review: the plot")


OPTION_FORMS = ("A) ", "A. ", "(A) ", "[a] ", "**A.** ", "1. ", "- ", "A: ")


@pytest.mark.parametrize("mark", OPTION_FORMS)
@pytest.mark.parametrize("gap", ["\n", "\n\n", " "])
@pytest.mark.parametrize("end", ["\nAnswer:", "\nCorrect option:", ""])
def test_the_order_of_options_does_not_part_a_question(mark: str, gap: str, end: str) -> None:
    if gap == " " and mark == "- ":
        return
    rng, hashes = random.Random(1), []
    for question in ("Which is red?", "Which is blue?"):
        found = set()
        for _ in range(6):
            options = rng.sample(["a rose", "the sky of May", "coal", "snow"], 4)
            marks = (mark.replace("A", "ABCD"[i]).replace("a", "abcd"[i]) for i in range(4))
            marks = (m.replace("1", "1234"[i]) for i, m in enumerate(marks))
            listed = gap.join(f"{m}{o}" for m, o in zip(marks, options, strict=True))
            found.add(of(f"Question: {question}\n{listed}{end}"))
        assert len(found) == 1
        hashes += found
    assert len(set(hashes)) == 2
    others = of(f"Question: {question}\n{listed.replace('coal', 'gold')}{end}")
    assert others not in hashes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Tom: 5\nAnn: 7\nTotal:", "Tom: 6\nAnn: 9\nTotal:"),
        ("length = 5\nwidth = 3\narea =", "length = 6\nwidth = 3\narea ="),
        ("Read this text: so\nSummarise the text:", "Read this text: no\nSummarise the text:"),
        ("Tom: hi\nAnn: yes\nTom: bye\nSummary:", "Tom: ho\nAnn: no\nTom: bye\nSummary:"),
        ("Tom: hi\nAnn: yes\nTom: bye", "Tom: ho\nAnn: no\nTom: bye"),
        ("Fact: a\nRule: b\nFact: c\nIs it?", "Fact: d\nRule: b\nFact: c\nIs it?"),
        ("Text: one\n\nWhat is it?\nTopic:", "Text: two\n\nWhat is it?\nTopic:"),
    ],
)
def test_what_only_looks_like_worked_examples_is_asked(one: str, other: str) -> None:
    assert of(one) != of(other)


@pytest.mark.parametrize("name", ["gsm8k", "mbpp", "boolq", "svamp", "arc_easy"])
def test_questions_of_published_sets_stay_apart(name: str) -> None:
    if not (data_folder() / name).exists():
        pytest.skip("the folder of datasets is not here: AGENT_FORGE_DATA names it")
    examples = list(datasets.read(name, data_folder()))
    by_words = {question_hash(example, split_by="question") for example in examples}
    assert len(set(map(question_hash, examples))) > 0.999 * len(by_words)
    rng, asked = random.Random(name), [e for e in examples if len(e.prompt) < 2000][:300]
    found: dict[bytes, bytes] = {}
    for example in asked:
        own = question_hash(example)
        for _ in range(2):
            shots = [(e.prompt, "so it is") for e in rng.sample(asked, 3) if e is not example]
            found.setdefault(of(few_shot("Review:/Sentiment:", shots, example.prompt)), own)
    assert len(found) == len(set(found.values())) > 0.99 * len({question_hash(e) for e in asked})


def test_an_evolution_begun_by_the_question_keeps_its_parts(tmp_path: Path) -> None:
    """Its rows are where they were, those that another rule would move too."""
    shots = [[("good", "yes")], [("bad", "no")]]
    prompts = [few_shot("English:/French:", s, f"item {i}") for i in range(40) for s in shots]
    put(tmp_path / "x.jsonl", *({"prompt": p, "completion": "x"} for p in prompts))
    (old,), (new,) = (from_files([tmp_path / "x.jsonl"], by) for by in ("question", "asked"))
    assert (old.near_copies, new.near_copies) == (0, 40)
    assert old.parts[::2] != old.parts[1::2] and new.parts[::2] == new.parts[1::2]
    assert "".join(part[0] for part in old.parts[:40]) == "svsvsvvvsvvhvsvssssvssvshsvsvsvhsssshvsh"


def test_the_number_of_a_choice_is_not_taken_for_its_text(tmp_path: Path) -> None:
    row = {"question": "What is 2 + 1?", "choices": ["1", "2", "3", "4"], "answer": 2}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DamagedFile, match="that of a choice, or its text"):
        from_files([tmp_path / "x.jsonl"])
