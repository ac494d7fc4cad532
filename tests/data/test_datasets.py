"""Datasets: every shape is read, every kind of bad file is named, splits are stable."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_forge.data import row_files
from agent_forge.data.dataset_rows import Example
from agent_forge.data.datasets import (
    DATASETS,
    SPLITS,
    fetch,
    kind_of_file,
    local_files,
    missing,
    read,
    read_own,
    split_of,
    tokenise,
    verify,
)
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFound
from tests.support.data_files import put
from tests.support.tokenizers import TOKENIZER

REAL = Path(os.environ.get("AGENT_FORGE_DATA", Path(__file__).parents[3] / "shared" / "data"))
ARC = {
    "question": {
        "stem": "Hot?",
        "choices": [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}],
    },
    "answerKey": "2",
}
ARC_HUB = {
    "question": "Hot?",
    "choices": {"text": ["ice", "fire"], "label": ["A", "B"]},
    "answerKey": "B",
}
FIRE = ("Question: Hot?\nAnswer:", " fire", (" ice", " fire"))
CONTEXT = {
    "question": "Who?",
    "answer": "Ann",
    "context": [["T", ["No.", "Ann did. "]], ["U", ["No."]]],
    "supporting_facts": [["T", 1], ["T", 9]],
}
CONTEXT_HUB = {
    **CONTEXT,
    "context": {"title": ["T", "U"], "sentences": [["No.", "Ann did. "], ["No."]]},
    "supporting_facts": {"title": ["T", "T"], "sent_id": [1, 9]},
}
PAIRS = [
    {"question": "How many?", "answer": {"number": "3", "spans": [], "date": {}}},
    {"question": "Which?", "answer": {"number": "", "spans": ["a", "b"], "date": {}}},
    {"question": "When?", "answer": {"number": "", "spans": [], "date": {"day": "", "year": "9"}}},
]
YES_NO = (" no", " yes")
# name, file, row -> prompt, completion, choices
SHAPES: list[tuple[str, str, Any, Any]] = [
    (
        *("gsm8k", "train.jsonl", {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}),
        ("Question: 1+1?\nAnswer:", " 1+1=2\n#### 2", ()),
    ),
    (
        *("svamp", "SVAMP.json", {"Body": "Two dvds", "Question": "How many?", "Answer": 2.0}),
        ("Question: Two dvds. How many?\nAnswer:", " 2", ()),
    ),
    (
        *("asdiv", "train.jsonl", {"question": "A?", "result": "2.5"}),
        ("Question: A?\nAnswer:", " 2.5", ()),
    ),
    (
        *("asdiv", "asdiv.csv", {"body": "One.", "question": "B?", "answer": "9 (apples)"}),
        ("Question: One. B?\nAnswer:", " 9 (apples)", ()),
    ),
    (
        "mbpp",
        "mbpp.jsonl",
        {"text": "Add.", "code": "def f():\r\n  1", "task_id": 601, "test_list": ["assert f()"]},
        ('"""\nAdd.\nassert f()\n"""\n', "def f():\n  1\n", ()),
    ),
    (
        *("codexglue", "train.jsonl.gz", {"docstring": "Adds.", "code": "def f(): 1"}),
        ('"""\nAdds.\n"""\n', "def f(): 1\n", ()),
    ),
    ("arc_easy", "train.jsonl", ARC, FIRE),
    ("arc_challenge", "train.jsonl", ARC_HUB, FIRE),
    (
        *("hotpotqa", "hotpot_train_v1.1.json", CONTEXT),
        ("Ann did.\nQuestion: Who?\nAnswer:", " Ann", ()),
    ),
    (
        *("hotpotqa", "train.jsonl", CONTEXT_HUB),
        ("Ann did.\nQuestion: Who?\nAnswer:", " Ann", ()),
    ),
    (
        "drop",
        "validation.jsonl",
        {"passage": "P.", "question": "Q?", "answers_spans": {"spans": ["x", "y"]}},
        ("P.\nQuestion: Q?\nAnswer:", " x", ()),
    ),
    (
        *("strategyqa", "dev.json", {"question": "Q?", "answer": False, "facts": ["F.", "G."]}),
        ("F. G.\nQuestion: Q?\nAnswer:", " no", YES_NO),
    ),
    (
        *("piqa", "train.jsonl", {"goal": "G", "sol1": "a", "sol2": "b", "label": 1}),
        ("Question: G\nAnswer:", " b", (" a", " b")),
    ),
    (
        *("hellaswag", "hellaswag_val.jsonl", {"ctx": "He", "endings": ["a", "b"], "label": "1"}),
        ("He", " b", (" a", " b")),
    ),
    (
        *("boolq", "dev.jsonl", {"question": "q", "passage": "P", "answer": True}),
        ("P\nQuestion: q\nAnswer:", " yes", YES_NO),
    ),
    (
        "boolq",
        "boolq_validation.jsonl",
        {"query": "Passage: P\nQuestion: q?", "choices": ["no", "yes"], "gold": 0},
        ("P\nQuestion: q?\nAnswer:", " no", YES_NO),
    ),
    ("wikitext", "train.jsonl", {"text": " = A = \n"}, ("", " = A = \n", ())),
    ("fineweb_edu", "part.jsonl", {"text": "T", "score": 3}, ("", "T", ())),
    ("openwebtext", "x.jsonl.gz", {"text": "T"}, ("", "T", ())),
    ("tinystories", "tinystories.json", "Once.", ("", "Once.", ())),
]


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file", "row", "expected"), SHAPES)
def test_every_shape_is_read(
    name: str, file: str, row: Any, expected: tuple[str, str, tuple[str, ...]], tmp_path: Path
) -> None:
    put(tmp_path / name / file, row)
    (example,) = read(name, tmp_path)
    assert (example.prompt, example.completion, example.choices) == expected
    assert example.source == name and example.split in SPLITS


def test_every_dataset_has_a_shape_above() -> None:
    assert {name for name, *_ in SHAPES} == set(DATASETS)
    assert {d.category for d in DATASETS.values()} == {"math", "code", "qa", "cs", "lang"}
    assert {d.stage for d in DATASETS.values()} == {1, 2, 3}


def test_drop_as_published_has_many_questions_a_passage(tmp_path: Path) -> None:
    path = tmp_path / "drop" / "drop_dataset_dev.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"nfl_1": {"passage": "P.", "qa_pairs": PAIRS}}))
    assert [e.completion for e in read("drop", tmp_path)] == [" 3", " a, b", " 9"]


def test_labels_in_a_file_beside(tmp_path: Path) -> None:
    put(tmp_path / "piqa" / "valid.jsonl", *[{"goal": "G", "sol1": "a", "sol2": "b"}] * 2)
    labels = tmp_path / "piqa" / "valid-labels.lst"
    labels.write_text("1\n0\n")
    assert [e.completion for e in read("piqa", tmp_path)] == [" b", " a"]
    for text in ("1\n", "1\n0\n1\n"):
        labels.write_text(text)
        with pytest.raises(DamagedFile, match="labels"):
            list(read("piqa", tmp_path))


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    row = {"ctx": "He", "endings": ["a", "b"], "label": ""}
    put(tmp_path / "hellaswag" / "val.jsonl", row, {**row, "label": "0"})
    assert len(list(read("hellaswag", tmp_path))) == 1
    put(tmp_path / "hellaswag" / "val.jsonl", row)
    with pytest.raises(DamagedFile, match="no example to learn from"):
        list(read("hellaswag", tmp_path))


def test_plain_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "tinystories" / "TinyStories-train.txt"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbfOne.\r\nMore.\r\n<|endoftext|>\r\n\r\n<|endoftext|>\r\nTwo.")
    assert [e.completion for e in read("tinystories", tmp_path)] == ["One.\nMore.\n", "Two."]
    path.write_text("0123456789 line\n" * 1000)
    pieces = [e.completion for e in read("tinystories", tmp_path)]
    assert "".join(pieces) == "0123456789 line\n" * 1000 and max(map(len, pieces)) < 2100


@pytest.mark.skipif(not REAL.is_dir(), reason="the published files are not on this machine")
@pytest.mark.parametrize(
    ("name", "examples", "verdict"),
    [
        *(("gsm8k", 8792, 1319), ("arc_easy", 5197, 2376), ("arc_challenge", 2588, 1170)),
        *(("mbpp", 974, 500), ("svamp", 1000, None), ("strategyqa", 2290, 229)),
        *(("piqa", 1838, None), ("boolq", 3270, None), ("hotpotqa", 7405, None)),
        *(("tinystories", 1000, None), ("wikitext", None, None)),
    ],
)
def test_the_published_files(name: str, examples: int | None, verdict: int | None) -> None:
    if missing([name], REAL):
        pytest.skip(f"{name} is not there")
    report = verify(name, REAL)
    assert examples is None or report["examples"] == examples
    assert verdict is None or report["splits"]["verdict"] == verdict
    assert min(report["splits"].values()) > 0
    documents, masks = tokenise(TOKENIZER, list(read(name, REAL, split="selection"))[:50])
    assert all(any(mask) for mask in masks) and all(documents)


# -- a user's own files ---------------------------------------------------------------------------


def test_a_users_own_rows(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path = put(
        tmp_path / "my.jsonl",
        {"prompt": "a", "completion": "b"},
        {"question": "q", "answer": 3},
        {"text": "plain"},
        {"messages": talk},
    )
    found = [(e.prompt, e.completion) for e in read_own(path)]
    assert found == [("a", "b"), ("Question: q\nAnswer:", " 3"), ("", "plain"), ("Hi", "Ho")]
    documents, masks = tokenise(TOKENIZER, read_own(path))
    assert documents[3] == TOKENIZER.encode_chat(talk)
    learned = [
        TOKENIZER.decode([i for i, m in zip(ids, mask, strict=True) if m], specials=True)
        for ids, mask in zip(documents, masks, strict=True)
    ]
    assert learned == ["b", " 3", "plain", "Ho<|end|>"]
    assert TOKENIZER.decode(documents[1]) == "Question: q\nAnswer: 3"
    assert len(list(read_own(tmp_path))) == 4


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "field 'completion' is missing"),
        ({"prompt": "a", "completion": ""}, "field 'completion' is empty"),
        ({"prompt": "a", "completion": ["b"]}, "field 'completion' is list, text is expected"),
        ({"a": 1}, "none of the fields"),
        (7, "none of the fields"),
        ({"text": "\ud800"}, "half a surrogate"),
        ({"messages": []}, "nothing would be learned"),
        ({"messages": ["x"]}, "message 1: str where an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 1: role 'bot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing would be learned"),
        ({"messages": [{"role": "user"}]}, "message 1: field 'content' is missing"),
    ],
)
def test_a_row_that_lacks_something(row: Any, problem: str, tmp_path: Path) -> None:
    path = put(tmp_path / "my.jsonl", {"text": "good"}, row)
    with pytest.raises(DamagedFile, match=f"line 2.*{problem}"):
        list(read_own(path))


def test_a_question_is_read_with_its_text_and_its_choices(tmp_path: Path) -> None:
    question = {"question": "Who?", "answer": "Tom"}
    for more, prompt, choices in (
        ({"context": "Tom ate."}, "Tom ate.\nQuestion: Who?\nAnswer:", ()),
        ({"passage": "Tom ate."}, "Tom ate.\nQuestion: Who?\nAnswer:", ()),
        ({"context": None, "choices": []}, "Question: Who?\nAnswer:", ()),
        ({"choices": ["Al", "Tom"]}, "Question: Who?\nAnswer:", (" Al", " Tom")),
    ):
        (example,) = read_own(put(tmp_path / "my.jsonl", question | more))
        assert (example.prompt, example.completion, example.choices) == (prompt, " Tom", choices)
    turns = [{"role": r, "content": t} for r, t in (("user", "Who?"), ("assistant", "Tom"))]
    chat = put(tmp_path / "chat.jsonl", {"messages": turns, "choices": ["Al", "Tom"]})
    assert [example.choices for example in read_own(chat)] == [("Al", "Tom")]
    for wrong in ({"choices": ["Al", "Tom"], "answer": 1}, {"options": ["Al"]}, {"context": ["a"]}):
        with pytest.raises(
            DamagedFile, match=r"none of the choices|that of a choice|'options'|'context'"
        ):
            list(read_own(put(tmp_path / "my.jsonl", question | wrong)))


TURN = {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    ("right", "mark"),
    [
        ({"prompt": "Who?", "completion": "Tom"}, {"label": False}),
        ({"prompt": "Who?", "completion": "Tom"}, {"isCorrect": "False"}),
        ({"question": "Who?", "answer": "Tom"}, {"is_correct": False, "id": "x"}),
        ({"question": "Who?", "answer": "Tom"}, {"correct": 0}),
        ({"prompt": "Who?", "completion": "Tom"}, {"is_correct": "no"}),
        ({"messages": [TURN, {"role": "assistant", "content": "Tom"}]}, {"label": False}),
        (
            {"messages": [TURN, {"role": "assistant", "content": "Tom"}]},
            {"messages": [TURN, {"role": "assistant", "content": "Al", "weight": 0}]},
        ),
    ],
)
def test_an_answer_that_is_marked_as_wrong_is_not_taken(
    right: Any, mark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path / "my.jsonl", right, right | mark, right | mark)
    assert [example.completion.strip() for example in read_own(path)] == ["Tom"]
    assert "my.jsonl: 2 rows are left out" in caplog.text
    with pytest.raises(DamagedFile, match="all its answers are marked as wrong"):
        list(read_own(put(path, right | mark)))


def test_what_only_looks_like_a_wrong_answer_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, reply = {"question": "Who?", "answer": "Tom"}, {"role": "assistant", "content": "Tom"}
    rows = [
        {**asked, "answer": "no", "label": False},  # a class: the answer itself
        {**asked, "choices": ["Al", "Tom"], "label": False},
        {**asked, "choices": ["Tom", "Al"], "correct": 0},  # the place of the right one
        {**asked, "is_correct": True, "label": True, "correct": None},
        {**asked, "label": 0, "is_public": False},
        {"messages": [TURN, {**reply, "weight": 0}, TURN, {**reply, "weight": 1}]},
        {"text": "Tom", "label": False},
    ]
    for row in rows:
        assert len(list(read_own(put(tmp_path / "my.jsonl", row)))) == 1
    assert not caplog.records


def test_what_tells_of_a_part_of_a_question_may_be_there(tmp_path: Path) -> None:
    asked = {"question": "Who?", "answer": "Tom"}
    told = {"context_title": "Lunch", "table_name": "meals", "input_language": "en"}
    assert len(list(read_own(put(tmp_path / "my.jsonl", asked | told)))) == 1
    for name in ("input", "option_2", "context_sentences"):
        with pytest.raises(DamagedFile, match=f"field '{name}' is not read"):
            list(read_own(put(tmp_path / "my.jsonl", asked | {name: "Lunch"})))


def test_rows_of_a_set_that_lack_something(tmp_path: Path) -> None:
    for name, row, problem in (
        ("gsm8k", {"question": "q"}, "line 1: field 'answer' is missing"),
        ("gsm8k", ["q"], "line 1: list where an object"),
        ("arc_easy", {**ARC, "answerKey": "E"}, "'answerKey' is 'E', choices are"),
        ("arc_easy", {**ARC_HUB, "choices": {"text": ["a"], "label": ["A", "B"]}}, "not a row"),
        ("arc_easy", {**ARC_HUB, "choices": {"text": ["a", "b"], "label": ["B", "B"]}}, "choices"),
        ("boolq", {"question": "q", "passage": "p", "answer": "True"}, "none of the choices"),
        ("strategyqa", {"question": "q", "answer": "false"}, "none of the choices"),
        ("mbpp", {"text": "t", "code": "c", "task_id": "x", "test_list": []}, "'task_id'"),
        ("mbpp", {"text": "t", "code": "c", "task_id": 1, "test_list": []}, "'test_list'"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": 2}, "0 to 1 is expected"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": "no"}, "0 to 1 is expected"),
        ("hellaswag", {"ctx": "c", "endings": "x", "label": "0"}, "'endings' is not a list"),
        ("hotpotqa", {**CONTEXT, "context": 7}, "do not fit"),
        ("drop", {"passage": "p", "question": "q", "answers_spans": {"spans": []}}, "no spans"),
    ):
        file = "mbpp.jsonl" if name == "mbpp" else "train.jsonl"
        put(tmp_path / name / file, row)
        with pytest.raises(DamagedFile, match=problem):
            list(read(name, tmp_path))


# -- bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("a.jsonl", b"", "it is empty"),
        ("a.jsonl", b"\n \r\n", "it is empty"),
        ("a.txt", b" \n", "it is empty"),
        ("a.json", b"", "it is empty"),
        ("a.json", b"[]", "it is empty"),
        ("a.csv", b"text\n", "it is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2: not readable as JSON"),
        ("a.jsonl", b"[" * 200_000, "line 1: not readable as JSON"),
        ("a.json", b'[{"text": "a"}', "not readable as JSON"),
        ("a.json", b"7", "a list of rows"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', "line 2: byte 24 is not UTF-8"),
        ("a.txt", b"\xff\xfea\x00", "UTF-16"),
        ("a.txt", b"a\nb\x00c", "line 2: a NUL byte"),
        ("a.jsonl", b'{"text": "a\x00"}', "line 1: a NUL byte"),
        ("a.jsonl.gz", b"no gzip", "line 1: broken gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "broken gzip"),
        ("a.csv", b'text\n"open', "line 2"),
    ],
)
def test_a_bad_file_is_named_with_its_place(
    file: str, content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DamagedFile, match=problem) as caught:
        list(read_own(tmp_path / file))
    assert file in str(caught.value) and caught.value.exit_code == 4


def test_a_huge_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LINE_BYTES", 1 << 20)
    path = put(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b" * (1 << 20)})
    with pytest.raises(DamagedFile, match="line 2 is longer than 1 MiB"):
        list(read_own(path))


def test_marks_and_line_ends_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\nb\\rc"}\r\n\r\n{"text": "d"}\r\n')
    assert [e.completion for e in read_own(path)] == ["a\nb\nc", "d"]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown dataset 'gsm8'; did you mean 'gsm8k'"):
        read("gsm8", tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "README.md").write_text("x")
    with pytest.raises(NotFound, match=r"no dataset 'gsm8k': files like \*train\*") as caught:
        read("gsm8k", tmp_path)
    assert "forge data fetch gsm8k" in caught.value.hint
    with pytest.raises(NotFound, match="does not exist"):
        read_own(tmp_path / "nope.jsonl")
    with pytest.raises(NotFound, match="no files that end in"):
        read_own(tmp_path / "gsm8k")
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_own(tmp_path / "gsm8k" / "README.md"))
    put(tmp_path / "svamp" / "SVAMP.json", SHAPES[1][2])
    assert missing(["gsm8k", "svamp", "drop"], tmp_path) == ["gsm8k", "drop"]
    with pytest.raises(ConfigError, match="unknown split 'trian'; did you mean 'train'"):
        read("svamp", tmp_path, split="trian")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="needs pyarrow") as caught:
        list(read_own(tmp_path / "a.parquet"))
    assert "agent-forge[data]" in caught.value.hint


# -- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "sides"),
    [
        ("train", {"train": {"train", "selection", "verdict"}}),
        ("all", {"all": {"train", "selection", "verdict"}}),
        ("test", {"test": {"train", "selection", "verdict"}}),
        ("train test", {"train": {"train", "selection"}, "test": {"verdict"}}),
        ("train valid", {"train": {"train", "selection"}, "valid": {"verdict"}}),
        ("valid test", {"valid": {"train", "selection"}, "test": {"verdict"}}),
        (
            "train valid test",
            {"train": {"train"}, "valid": {"selection"}, "test": {"verdict"}},
        ),
    ],
)
def test_splits(kinds: str, sides: dict[str, set[str]]) -> None:
    known = set(kinds.split())
    for kind, expected in sides.items():
        made = Counter(split_of(Example(f"q {i}", "a"), kind, known) for i in range(2000))
        assert set(made) == expected
        if "selection" in expected and len(expected) > 1:
            assert 60 < made["selection"] < 140


def test_copies_are_on_the_same_side_and_splits_are_those_of_any_machine() -> None:
    made = [split_of(Example(f"q {i}", "a"), "all", {"all"}) for i in range(2000)]
    assert [i for i, side in enumerate(made) if side == "selection"][:3] == [17, 72, 141]
    assert split_of(Example("Q 1!", "b", "x", "y"), "all", {"all"}) == made[1]
    then = [split_of(Example("q", str(i)), "all", {"all"}, "content") for i in range(99)]
    assert [i for i, side in enumerate(then) if side == "selection"][:3] == [36, 38, 47]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *(("train.jsonl", "train"), ("hotpot_dev_v1_simplified.json", "valid")),
        *(("boolq_validation.jsonl", "valid"), ("wiki.test.tokens", "test")),
        *(("SVAMP.json", "all"), ("latest.json", "all"), ("train-00000-of-1.parquet", "train")),
    ],
)
def test_the_kind_of_a_file(file: str, kind: str) -> None:
    assert kind_of_file(Path(file)) == kind


def test_mbpp_is_split_by_its_published_task_numbers(tmp_path: Path) -> None:
    row = {"text": "t", "code": "c", "test_list": ["assert 1"]}
    numbers = (1, 10, 11, 510, 511, 600, 601)
    put(tmp_path / "mbpp" / "mbpp.jsonl", *({**row, "task_id": n} for n in numbers))
    sides = [example.split for example in read("mbpp", tmp_path)]
    assert sides == ["train"] * 2 + ["verdict"] * 2 + ["selection"] * 2 + ["train"]


def test_verify_counts_copies_and_leaks(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]
    put(tmp_path / "gsm8k" / "train.jsonl", *rows, rows[0])
    put(tmp_path / "gsm8k" / "test.jsonl", rows[3], {"question": "new", "answer": "x"})
    report = verify("gsm8k", tmp_path)
    assert (report["examples"], report["duplicates"], report["in_two_splits"]) == (23, 2, 1)
    assert report["splits"]["verdict"] == 2 and len(report["files"]) == 2


# -- fetching -------------------------------------------------------------------------------------


def online(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_fetched_examples_read_like_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(hub: str, config: str | None, *, streaming: bool) -> Any:
        assert (hub, config, streaming) == ("allenai/ai2_arc", "ARC-Easy", True)
        return {"train": [ARC_HUB] * 5, "validation": [ARC_HUB], "test": iter([ARC_HUB] * 3)}

    online(monkeypatch, load)
    record = fetch("arc_easy", tmp_path, limit=2)
    assert record["examples"] == {"train": 2, "validation": 1, "test": 2}
    found = list(read("arc_easy", tmp_path))
    assert [e.split for e in found] == ["train", "train", "selection", "verdict", "verdict"]
    assert (found[0].prompt, found[0].completion, found[0].choices) == FIRE
    assert verify("arc_easy", tmp_path)["examples"] == 5
    assert fetch("arc_easy", tmp_path, limit=0)["examples"]["train"] == 5
    (saved,) = local_files(DATASETS["arc_easy"], tmp_path)
    saved.write_bytes(saved.read_bytes().replace(b"fire", b"firn"))
    with pytest.raises(DamagedFile, match="sha256"):
        verify("arc_easy", tmp_path)


def test_fetching_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    online(monkeypatch, load)
    with pytest.raises(ConfigError, match=r"cannot fetch gsm8k .* no network") as caught:
        fetch("gsm8k", tmp_path)
    assert "by hand" in caught.value.hint and not list(tmp_path.iterdir())
    online(monkeypatch, lambda *_, **__: {"train": []})
    with pytest.raises(DamagedFile, match="no examples"):
        fetch("gsm8k", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="needs the library datasets") as caught:
        fetch("gsm8k", tmp_path)
    assert "pip install 'agent-forge[data]'" in caught.value.hint


def test_a_users_files_are_not_replaced_by_fetched_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online(monkeypatch, lambda *_, **__: {"train": [SHAPES[0][2]]})
    mine = put(tmp_path / "gsm8k" / "train.jsonl", SHAPES[0][2])
    with pytest.raises(AlreadyExists, match="not fetched"):
        fetch("gsm8k", tmp_path)
    assert mine.exists()
