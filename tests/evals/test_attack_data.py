"""What is asked once is asked once: near-copies stay together, copies count once, files too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_forge.data.tasks import is_right, make
from agent_forge.errors import ConfigError
from agent_forge.evals.domains import folded, from_files

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
