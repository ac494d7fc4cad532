"""What is asked once is asked once: near-copies stay together, copies count once, files too."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data import datasets
from agent_forge.data.dataset_rows import Example
from agent_forge.data.near_copies import question_hash
from agent_forge.data.tasks import is_right, make
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.evals.benchmarks import from_benchmarks
from agent_forge.evals.domains import SHARES, exact_hash, folded, from_files, part
from agent_forge.evals.graders import final_number

QUESTION = "Weng earns $12 an hour, for well-kept gardens. How much in 50 minutes?"
FORMS = [
    QUESTION.replace(", ", ","),
    QUESTION.replace("$", "$ "),
    QUESTION.replace("-", " "),
    QUESTION.replace("?", " ?"),
    *(f"{QUESTION[:9]}{mark}{QUESTION[9:]}" for mark in "\u200b\u00ad\ufeff\u200e\ufe0f\x07"),
    f"`{QUESTION}`",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_near_copy_is_known_by_its_letters(form: str) -> None:
    assert folded(form) == folded(QUESTION)


def test_the_form_of_a_row_does_not_part_near_copies(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    turn = {"role": "user", "content": QUESTION}
    reply = {"role": "assistant", "content": "10"}
    rows = [
        {"prompt": QUESTION, "completion": "10"},
        {"question": QUESTION, "answer": "10"},
        {"messages": [turn, reply]},
        {"messages": [system, turn, reply]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (domain,) = from_files([tmp_path / "a.jsonl"])
    assert len(set(domain.parts)) == 1 and domain.near_copies == len(domain.examples) - 1 == 3


LONG = "How many red birds has the tall house number 7?"
SHOT = "Question: What is 1+1?\nAnswer: 2\n\n"
DRESSED = [
    *(LONG.upper(), f"> {LONG}", f"| {LONG} |", f"**{LONG}**", f"# {LONG}\n", f"{LONG}\u2800"),
    *(LONG.replace(" ", "\u3164", 1), f"{LONG} \U0001f642", LONG.replace("i", "\u0131")),
    *(LONG.replace("red", "re\u0301d"), LONG.replace("7", "(7\u2212)"), f"Q: {LONG}\nA:"),
    *(f"{form}{end}" for form in (f"Question: {LONG}\nAnswer:",) for end in ("", " ", "\n")),
    *(f"QUESTION: {LONG}\nANSWER:", f"### Instruction:\n{LONG}\n\n### Response:\n"),
    *(f"**Question 3:** {LONG}\n\n**Answer:** ", f"Problem. {LONG}\nSolution:"),
    *(f"{SHOT}Question: {LONG}\nAnswer:", f"{SHOT * 3}Q: {LONG}\nThe answer is"),
    f"Question: a\nAnswer: one step\n\nthe next\n#### 2\n\nQuestion: {LONG}\nAnswer:",
    f"Question: {LONG} Answer: Let's think step by step.",
    f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{LONG}<|im_end|>\n"
    "<|im_start|>assistant\n",
    *(f"<s>[INST] {LONG} [/INST]", f"User: hi\nAssistant: hello\nUser: {LONG}\nAssistant:"),
]


@pytest.mark.parametrize("prompt", DRESSED)
def test_what_is_around_a_question_does_not_part_near_copies(prompt: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": prompt, "completion": "x"},
        {"question": LONG, "answer": "y"},
        {"question": prompt, "answer": "z"},
        {"messages": chat("hi", "hello", prompt, "x")},
        {"messages": [{"role": "system", "content": "s"}, *chat(LONG, "x")]},
    ]
    (domain,) = from_files([written(tmp_path / "a.jsonl", *rows)])
    assert domain.near_copies == len(domain.examples) - 1 == 4 and len(set(domain.parts)) == 1


def chat(*said: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(said)
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


@pytest.mark.parametrize(
    "pair",
    [
        (chat("What is 2 + 3?", "5", "And 4?", ""), chat("What is 2 + 7?", "9", "And 4?", "")),
        ("A passage.\nQuestion: Is it true?\nAnswer:", "Another.\nQuestion: Is it true?\nAnswer:"),
        ("...", "!!!"),
        (f"{SHOT}Passage: a b c\n\nQuestion: Who?", f"{SHOT}Passage: d e f\n\nQuestion: Who?"),
        ("Question:", "Answer:"),
    ],
)
def test_what_is_asked_still_tells_questions_apart(pair: tuple[Any, Any]) -> None:
    one, other = (
        Example("?", "x", messages=tuple(p)) if isinstance(p, list) else Example(p, "x")
        for p in pair
    )
    assert question_hash(one) != question_hash(other)


@pytest.mark.parametrize(
    "text", ["\n" * 99_999, "." * 99_999, "a " * 50_000, "<" * 99_999, "Q:" * 9]
)
def test_no_text_takes_long_to_be_placed(text: str) -> None:
    began = time.process_time()
    assert question_hash(Example(text, "x"))
    assert time.process_time() - began < 1


def test_no_example_is_in_two_parts(tmp_path: Path) -> None:
    """What differs in the turn of a sentence alone: a system turn that was folded in."""
    system = {"role": "system", "content": "Be brief."}
    rows = [[system, *chat(f"item {i}", "ok")] for i in range(90)]
    rows += [chat(f"Be brief.\nitem {i}", "ok") for i in range(90)]
    (domain,) = from_files([written(tmp_path / "a.jsonl", *({"messages": row} for row in rows))])
    parts = [set(map(exact_hash, part(domain, split).examples)) for split in SHARES]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 180


def test_a_published_set_without_a_test_part_keeps_near_copies_together(tmp_path: Path) -> None:
    asked = [f"Tom has {i} apples and eats 3. How many are left?" for i in range(2000)]
    forms = [form for q in asked for form in (q, q.upper(), q.replace(".", " ."))]
    rows = [{"question": form, "answer": str(n % 7)} for n, form in enumerate(forms)]
    (tmp_path / "asdiv").mkdir()
    written(tmp_path / "asdiv" / "asdiv.jsonl", *rows)
    found = [
        {
            question_hash(e)
            for e in from_benchmarks(["asdiv"], split=s, folder=tmp_path, shots=0)[0].examples
        }
        for s in SHARES
    ]
    found.append({question_hash(e) for e in datasets.read("asdiv", tmp_path, split="train")})
    assert all(found) and sum(map(len, found)) == len(set.union(*found)) == 2000


def test_a_search_does_not_see_what_a_published_test_part_asks(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": f"{i} and 1?", "answer": "2"} for i in range(400)]
    (tmp_path / "gsm8k").mkdir()
    written(tmp_path / "gsm8k" / "train.jsonl", *rows)
    written(tmp_path / "gsm8k" / "test.jsonl", *({**r, "answer": "3"} for r in rows[:200]))
    of = {"folder": tmp_path, "shots": 0}
    sides = [from_benchmarks(["gsm8k"], split=s, **of)[0].examples for s in SHARES]  # type: ignore[arg-type]
    found = [set(map(question_hash, side)) for side in sides]
    assert sum(map(len, found)) == len(set.union(*found)) and len(found[2]) == 200
    written(tmp_path / "gsm8k" / "train.jsonl", *rows[:200])  # then nothing is left for a search
    with pytest.raises(NotFound, match="no items of 'gsm8k' for selection"):
        from_benchmarks(["gsm8k"], split="selection", **of)  # type: ignore[arg-type]


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_row_of_two_files_counts_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(9)]
    one, other = written(tmp_path / "a.jsonl", *rows[:6]), written(tmp_path / "b.jsonl", *rows[3:])
    a, b = from_files([one, other])
    assert (len(a.examples), len(b.examples), b.repeated) == (6, 3, 3)
    with pytest.raises(ConfigError, match="are in the files before it"):
        from_files([one, written(tmp_path / "c.jsonl", *rows[:6])])


def test_only_exact_copies_are_left_out(tmp_path: Path) -> None:
    code = [{"prompt": "go on:", "completion": f"if a:\n{' ' * n}b"} for n in (1, 2, 4)]
    choices = [{"prompt": "2 + 2 =", "completion": "4", "choices": ["4", o]} for o in "5678"]
    for rows in (code, choices):
        (domain,) = from_files([written(tmp_path / "a.jsonl", *rows, rows[0])])
        assert len(domain.examples) == len(rows)


@pytest.mark.parametrize("text", ["!!bool foo", "!!int ''", "!!timestamp x", "1:0" + ":0" * 400])
def test_no_text_of_a_model_breaks_a_grader(text: str) -> None:
    assert not is_right(make("to_yaml", "verdict", 1, level=5), text)


@pytest.mark.parametrize(
    "text",
    ["prompt,completion\nThree colours, red, green, blue\n", "prompt,prompt,completion\na,b,c\n"],
)
def test_a_table_with_cells_of_no_column_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DamagedFile, match=r"cells|columns"):
        from_files([tmp_path / "rows.csv"])


def test_an_object_that_is_a_row_is_one(tmp_path: Path) -> None:
    row = {"prompt": "Which is red?", "completion": "blood", "choices": ["blood", "milk"]}
    (tmp_path / "one.json").write_text(json.dumps(row))
    (example,) = from_files([tmp_path / "one.json"])[0].examples
    assert example.prompt == "Which is red?" and example.choices == ("blood", "milk")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1'234", 1234), ("1_000", 1000), ("minus 5", -5), ("3:30", None), ("0x10", None)],
)
def test_other_notations_are_read_whole_or_not_at_all(text: str, value: int | None) -> None:
    number = final_number(f"The answer is {text}")
    assert (number and number[0]) == value
