"""A person's mistake ends with what is wrong and an exit code: never as a defect, nor in work."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data import datasets, row_files
from agent_forge.evals import model_under_test
from agent_forge.infer import chat
from agent_forge.infer.thinking import SpokenPiece
from agent_forge.store import files
from tests.support.command_line import Forge, Result
from tests.support.evo_models import rows
from tests.support.merge_models import make_models
from tests.support.tokenizers import byte_tokenizer

LONG = row_files.MAX_CHARACTERS + 1
QUICK_S = 20.0  # far below what the work itself would take


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code and said these words, and nothing about a defect."""
    assert result.code == code, result
    for word in words:
        assert word in result.err, result.err
    for never in ("Traceback", "unexpected", "defect"):
        assert never not in result.err, result.err


# -- recipes --------------------------------------------------------------------------------------

# As people write it for mergekit: names and factors stand once, and `<<` brings them in.
WITH_ANCHORS = """
first_model: &first {root}/a
factor: &factor 0.5
weakened: &weakened
  parameters:
    scale:
      - filter: o_proj
        value: *factor
      - filter: down_proj
        value: *factor
      - value: 1.0
slices:
  - sources:
      - &layers
        model: *first
        layer_range: [0, 2]
  - sources:
      - <<: [*layers, *weakened]
        layer_range: [0, 1]
  - sources:
      - <<: *layers
        model: {root}/b
merge_method: passthrough
dtype: float32
"""
WITHOUT_ANCHORS = """
slices:
  - sources: [{{model: {root}/a, layer_range: [0, 2]}}]
  - sources:
      - model: {root}/a
        layer_range: [0, 1]
        parameters:
          scale: [{{filter: o_proj, value: 0.5}}, {{filter: down_proj, value: 0.5}}, {{value: 1.0}}]
  - sources: [{{model: {root}/b, layer_range: [0, 2]}}]
merge_method: passthrough
dtype: float32
"""


def laughs(levels: int) -> str:
    """Nine times the line before, again and again."""
    lines = ["l0: &l0 [lol, lol]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (laughs(30), "that its aliases stand for"),
        (
            "a: &a {"
            + ", ".join(f"k{i}: 1" for i in range(900))
            + "}\n"
            + "".join(f"m{i}: {{<<: [*a, *a, *a]}}\n" for i in range(90)),
            "aliases stand for",
        ),
        ("merge_method: &m [*m]", "the alias *m stands within what it stands for"),
        ("merge_method: *linear", "undefined alias 'linear'"),
        ("models: !!python/name:os.system", "tags"),
        ("dtype: float32\ndtype: float16", "'dtype' appears twice"),
    ],
    ids=lambda text: text[:12],
)
def test_a_hostile_recipe_is_not_expanded(
    forge: Forge, tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "r.yml").write_text(text)
    began = time.monotonic()
    refused(forge("merge r.yml out --dry-run"), 2, "r.yml", word)
    assert time.monotonic() - began < QUICK_S


def test_a_recipe_with_anchors_is_what_it_stands_for(forge: Forge, tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    for name, text in (("with", WITH_ANCHORS), ("without", WITHOUT_ANCHORS)):
        (tmp_path / f"{name}.yml").write_text(text.format(root=root))
    found = [forge(f"merge {n}.yml out --dry-run --json").document for n in ("with", "without")]
    assert found[0]["recipe"] == found[1]["recipe"] and found[0]["verdict"] != "no"
    assert forge("merge with.yml out").code == 0
    assert "&" not in (tmp_path / "out" / "recipe.yml").read_text()


def test_a_key_that_carries_no_anchor_is_still_unknown(forge: Forge, tmp_path: Path) -> None:
    text = WITH_ANCHORS.format(root=tmp_path).replace("&factor 0.5", "0.5").replace("*factor", "1")
    (tmp_path / "r.yml").write_text(text)
    refused(forge("merge r.yml out --dry-run"), 2, "unknown key 'factor'")


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (pipe, "is a pipe"),
        (Path.mkdir, "is a folder, not a recipe"),
        (Path.touch, "is empty"),
        (lambda path: path.write_bytes(b"\x80\x81" * 99), "not UTF-8 text"),
        (lambda path: path.write_bytes(b"a: \0"), "special characters"),
        (lambda path: path.write_text("x" * 2_000_000), "too large"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_no_recipe_is_named(
    forge: Forge, tmp_path: Path, make: Callable[[Path], Any], word: str
) -> None:
    make(tmp_path / "r.yml")
    refused(forge("merge r.yml out --dry-run"), 2, "r.yml", word)
    if word not in ("is empty", "is a folder, not a recipe"):  # a run and an evolution have both
        refused(forge("validate r.yml"), 2, "r.yml", word)


def test_a_folder_is_no_config_of_an_evolution(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    refused(forge("evo --config c --dry-run"), 2, "cannot read c", "Is a directory")


# -- data -----------------------------------------------------------------------------------------


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def gzipped(content: bytes, times: int) -> bytes:
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb", 1) as writer:
        for _ in range(times):
            writer.write(content)
    return buffer.getvalue()


GOOD = {"prompt": "a", "completion": "b"}
TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BAD_DATA: dict[str, tuple[bytes, int, str]] = {
    "nan.jsonl": (lines(GOOD) + b'{"prompt": "a", "completion": NaN}', 4, "line 2: not readable"),
    "inf.json": (
        b'[{"text": "NaN"},\n{"text": -Infinity}]',
        4,
        "line 2: -Infinity is not a finite",
    ),
    "huge.jsonl": (b'{"prompt": "a", "completion": 1e999}', 4, "1e999 is not a finite number"),
    "prompt.jsonl": (lines(GOOD, {**GOOD, "prompt": "a" * LONG}), 4, "line 2: field 'prompt' has"),
    "answer.jsonl": (lines({**GOOD, "completion": "a" * LONG}), 4, "at most 262,144 are read"),
    "said.jsonl": (
        lines({"messages": [TURN[0], {**TURN[1], "content": "a" * LONG}]}),
        4,
        "262,144",
    ),
    "turns.jsonl": (lines({"messages": TURN * 501}), 4, "has 1,002 entries, at most 1,000"),
    "together.jsonl": (
        lines({"messages": [{**TURN[0], "content": "a" * 9000}, TURN[1]] * 40}),
        4,
        "'messages' has",
    ),
    "choices.jsonl": (
        lines({**GOOD, "choices": ["b", *map(str, range(1000))]}),
        4,
        "1,001 entries",
    ),
    "calls.jsonl": (
        lines({"messages": [TURN[0], {"role": "assistant", "tool_calls": ["x"]}]}),
        4,
        "tool_calls",
    ),
    "deep.jsonl": (
        b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}",
        4,
        "nested deeper than 100 levels",
    ),
    "deeper.jsonl": (b"[" * 99_999, 4, "nested deeper than 100 levels"),
    "empty.jsonl": (b"", 4, "it is empty"),
    "binary.jsonl": (bytes(range(128, 256)), 4, "byte 0 is not UTF-8"),
    "nul.csv": (b"prompt,completion\na,b\nc,\0\n", 4, "line 3: a NUL byte"),
    "field.csv": (b"prompt,completion\na," + b"x" * 200_000, 4, "line 2: field larger than"),
    "line.jsonl.gz": (gzipped(bytes(1 << 20), 65), 4, "line 1 is longer than 64 MiB"),
    "blank.jsonl.gz": (gzipped(b" " * 4095 + b"\n", 9999), 4, "grows more than 100-fold"),
    "rows.jsonl.gz": (gzipped(lines(GOOD) + b" " * 4000 + b"\n", 9999), 4, "grows more than"),
    "cut.jsonl.gz": (gzipped(lines(GOOD), 99)[:30], 4, "broken gzip"),
    "text.jsonl.gz": (lines(GOOD), 4, "broken gzip"),
    "x.parquet": (b"PAR1", 2, "pyarrow"),
    "x.docx": (b"PK", 2, "known: .jsonl"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_a_bad_data_file_is_named(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    content, code, word = BAD_DATA[name]
    (tmp_path / name).write_bytes(content)
    began = time.monotonic()
    refused(forge(f"data show {name} -n 1000000"), code, name, word)
    assert time.monotonic() - began < QUICK_S


def test_every_command_that_reads_data_refuses_it_before_a_model_is_loaded(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(BAD_DATA["prompt.jsonl"][0])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(model_under_test, "open_model", lambda folder: pytest.fail("it was loaded"))
    for line in (
        *("eval one --data bad.jsonl", "compare one two --data bad.jsonl"),
        "evo --data bad.jsonl --dry-run",
        "run --preset smoke --set phases.evomerge.data=[bad.jsonl] --dry-run",
    ):
        refused(forge(line), 4, "bad.jsonl", "line 2", "split it into several rows")


@pytest.mark.parametrize("word", ["word ", "w\n", "\u00e4"])
@pytest.mark.parametrize("name", ["long.jsonl", "long.txt"])
def test_a_long_text_is_read_in_pieces(forge: Forge, tmp_path: Path, name: str, word: str) -> None:
    text = word * (2 * LONG // len(word))
    content = json.dumps({"text": text}) if name.endswith("jsonl") else text
    (tmp_path / name).write_text(content)
    pieces = [
        e["completion"] for e in forge(f"data show {name} -n 99999 --json").document["examples"]
    ]
    assert "".join(pieces) == text and max(map(len, pieces)) < 2 * row_files.PIECE_CHARACTERS


def test_a_pipe_a_device_and_what_may_not_be_read(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(tmp_path / "pipe.jsonl")
    for name in ("pipe.jsonl", "/dev/zero", "/dev/null"):
        refused(forge(f"data show {name}"), 2, name, "is not a file")
    (tmp_path / "folder").mkdir()
    refused(forge("data show ./folder"), 2, "folder has no files that end in")
    refused(forge(f"data show {'x' * 5000}.jsonl"), 2, "File name too long")
    (tmp_path / "secret.jsonl").write_bytes(lines(GOOD))

    def locked(path: Path, *options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", locked)  # the tests may run as root, who may read anything
    refused(forge("data show secret.jsonl"), 2, "cannot read secret.jsonl: Permission denied")
    refused(forge("validate secret.jsonl"), 2, "cannot read secret.jsonl: Permission denied")


def test_a_row_that_a_reader_does_not_know(forge: Forge, tmp_path: Path) -> None:
    bad = {"drop": {"passage": "p", "qa_pairs": 5}, "arc_easy": {"question": "q", "choices": 3}}
    for name, row in bad.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.jsonl").write_bytes(lines(row))
        refused(forge(f"data show {name}"), 4, "train.jsonl is damaged: line 1")


def test_too_little_memory_is_no_defect(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(datasets, "local_files", full)
    refused(forge("data ls"), 5, "not enough memory")


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_model_file_with_no_number_is_damaged(forge: Forge, tmp_path: Path, number: str) -> None:
    root = make_models(tmp_path / "m")
    (root / "a" / "config.json").write_text(f'{{"model_type": "llama",\n "eps": {number}}}')
    (root / "a" / "tokenizer.json").write_text("{}")
    said = (f"{root}/a/config.json is damaged", f"line 2: {number} is not a finite number")
    refused(forge(f"generate {root}/a abc"), 4, *said)
    refused(forge(f"merge --models {root}/a,{root}/b out"), 4, *said)
    dry = forge(f"merge --models {root}/a,{root}/b out --dry-run")
    assert dry.code == 4 and said[1] in dry.out


# -- prompts --------------------------------------------------------------------------------------


def stdin(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "content", "words"),
    [
        ("generate no -", b"a" * LONG, ("the prompt has more than the 262,144 characters",)),
        ("generate no -", b"a\xff", ("stdin is not UTF-8 text",)),
        ("generate no -", b"", ("the prompt is empty",)),
        (f"generate no {'a' * LONG}", b"", ("the prompt has more than the 262,144 characters",)),
        ("generate no \udcff", b"", ("the prompt is not UTF-8 text",)),
        (f"chat no --system {'a' * LONG}", b"", ("--system has more than the 262,144 characters",)),
        ("chat no --system \udcff", b"", ("--system is not UTF-8 text",)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_prompt_that_is_none_is_refused_before_the_model_is_looked_for(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, line: str, content: bytes, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin(content))
    refused(forge(line), 2, *words)


class Echo:
    """Says how long the conversation is."""

    def think_and_reply(self, messages: Any, sampling: Any, mode: str) -> Any:
        chat.check_prompt(messages[-1]["content"])
        return iter([SpokenPiece(str(len(messages)), "answer")])


@pytest.mark.parametrize(
    ("content", "word"), [(b"a\n\xff\n", "not UTF-8"), (b"a\n" + b"b" * LONG, "262,144")]
)
def test_a_bad_line_ends_a_chat(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, content: bytes, word: str
) -> None:
    monkeypatch.setattr(chat, "open_chat_model", lambda *given: Echo())
    monkeypatch.setattr("sys.stdin", stdin(content))
    refused(forge("chat ."), 2, word)
    monkeypatch.setattr("sys.stdin", stdin(b"a\0\x01\x1b[2J\nb\n"))
    assert forge("chat .").out == "1\n3\n"


# -- numbers --------------------------------------------------------------------------------------

TOO_LARGE = 2**63
BAD_NUMBERS = [
    *(f"generate no x --seed {seed}" for seed in (TOO_LARGE, -1, 10**40)),
    *(f"generate no x --max-tokens {n}" for n in (0, 10**7, 10**40)),
    *(f"generate no x --temperature {t}" for t in ("nan", "inf", "-1", "1e9", "1e-320")),
    *(f"generate no x --top-p {p}" for p in ("nan", "0", "2", "inf")),
    *(f"generate no x --top-k {k}" for k in (-1, 10**40)),
    *(f"chat no --seed {seed}" for seed in (TOO_LARGE, -1)),
    *(f"compare no no --seed {seed}" for seed in (TOO_LARGE, -1)),
    *(f"eval no --items {n}" for n in (0, 10**7, 10**40)),
    *(f"eval no --shots {n} --pack math" for n in (-1, 1001, 10**40)),
    *(f"eval no --level {level}" for level in ("0", "101", "5-2", "1-", "9" * 5000, "a", "-3")),
    *(f"evo --seed {seed}" for seed in (TOO_LARGE, -1)),
    *(f"evo --time-budget {m}" for m in ("nan", "inf", "1e300", "-1")),
    *(f"evo --gens {n}" for n in (-1, 10**6)),
    *(f"evo --resume no --time-budget {m}" for m in ("nan", "inf")),
    *(f"merge --models a,b out --seed {seed}" for seed in (TOO_LARGE, -1)),
    *(f"merge --models a,b out --max-ram {m}" for m in ("nan", "inf", "0")),
    *(f"merge --models a,b out --threads {n}" for n in (-1, 10**9)),
    *(f"run --preset toy --dry-run --set runtime.seed={seed}" for seed in (TOO_LARGE, -1)),
    *(f"run --dry-run --set phases.toy.{s}" for s in ("steps=1e30", "learning_rate=1e99")),
    *(f"run --dry-run --set model.{s}" for s in ("t_max=1000000000", f"sw_window={TOO_LARGE}")),
    f"data show x.jsonl -n {10**40}",
    "clean --age inf --dry-run",
]


@pytest.mark.parametrize("line", BAD_NUMBERS, ids=lambda line: line[:50])
def test_a_number_out_of_range_is_refused_before_anything_is_opened(
    forge: Forge, line: str
) -> None:
    result = forge(line)
    refused(result, 2)
    ranges = ("greater than", "less than", "valid integer", "beyond", "is 0, or from")
    assert any(words in result.err for words in (*ranges, "go from 1 to 100", "at most 1"))
    assert result.out == ""


# -- evolutions -----------------------------------------------------------------------------------


@pytest.fixture
def parents(tmp_path: Path) -> Path:
    """Models a, b and c with tokenizers, and data to measure them on."""
    root = make_models(tmp_path / "m")
    for name in ("a", "b", "c"):
        byte_tokenizer().save_pretrained(root / name)
    pairs = [{"prompt": p, "completion": c} for p, c in rows("add")]
    (root / "data.jsonl").write_bytes(lines(*pairs))
    return root


def evo(root: Path, first: str, second: str, more: str = "") -> str:
    return f"evo --base-models {first},{second} --data {root}/data.jsonl --gens 0 {more}"


def test_a_model_given_twice_is_noticed_before_the_work(
    forge: Forge, tmp_path: Path, parents: Path
) -> None:
    first = parents / "a"
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "cache").mkdir()
    for path in first.iterdir():  # as the cache of the hub has it
        (tmp_path / "cache" / path.name).symlink_to(path)
    for twin in (f"{tmp_path}/link", "./link", "m/a", "./m/../m/a", f"{tmp_path}/cache"):
        for more in ("--dry-run", ""):
            result = forge(evo(parents, str(first), twin, more))
            refused(result, 2)
            assert "given twice" in result.err or "has the same weights as" in result.err
    assert not (tmp_path / "evomerge").exists()
    assert forge(evo(parents, str(first), "m/b", "--dry-run")).code == 0
    assert (
        forge("merge --models m/a,link out --dry-run").code == 0
    )  # a note says that they are equal


def test_a_tokenizer_that_is_none_is_noticed_by_a_dry_run(forge: Forge, parents: Path) -> None:
    (parents / "a" / "tokenizer.json").write_text('{"model": 5}')
    for more in ("--dry-run", ""):
        refused(forge(evo(parents, "m/a", "m/b", more)), 4, "m/a/tokenizer.json", "not a tokenizer")


# -- where it is written --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--session bad/../name", 2, ("'bad/../name' is not allowed",)),
        ("--session ''", 2, ("'' is not allowed",)),
        ("--session CON", 2, ("'CON' is not allowed",)),
        ("--session s1", 2, ("session 's1' exists already",)),
        ("--progress loud", 2, ("unknown --progress 'loud'",)),
        ("--storage file", 5, ("cannot write file", "is not a folder")),
        ("--storage file/below", 5, ("cannot write file/below", "is not a folder")),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    forge: Forge, sessions: Any, tmp_path: Path, options: str, code: int, words: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for more in ("--dry-run", "--progress none" if "--progress" not in options else ""):
        refused(forge(f"run --preset toy {options} {more}"), code, *words)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_phase_without_its_models(forge: Forge) -> None:
    refused(forge("run --only evomerge --dry-run"), 3, "a new session has no models of cognate")


def test_a_full_disk_is_foreseen_by_every_dry_run(
    forge: Forge, tmp_path: Path, parents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    told = ("not enough disk", "bytes needed, 1,000 free")
    need = forge(evo(parents, "m/a", "m/b", "--dry-run"))
    refused(need, 5, *told)
    began = forge(evo(parents, "m/a", "m/b"))
    refused(began, 5, *told)
    assert began.err == need.err and not (tmp_path / "evomerge").exists()
    refused(forge("run --preset toy --dry-run"), 5, *told)
    for models in ("--models m/a,m/b", "--models m/a,m/b,m/c --combo all"):
        refused(forge(f"merge {models} out"), 5, *told)
        dry = forge(f"merge {models} out --dry-run")
        assert dry.code == 5 and told[1] in dry.out
    assert not (tmp_path / "out").exists()


def test_a_read_only_disk_is_named(
    forge: Forge, tmp_path: Path, parents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(files.disk, "open", refuse)
    for line in (evo(parents, "m/a", "m/b"), "merge --models m/a,m/b out", "run --preset toy"):
        refused(forge(line), 5, "cannot write", "Read-only file system")
        dry = forge(f"{line} --dry-run")
        assert dry.code == 5 and "Read-only" in dry.out + dry.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_dry_run_of_a_merge_refuses_the_folder_and_the_memory(
    forge: Forge, tmp_path: Path, parents: Path
) -> None:
    (tmp_path / "out").mkdir()
    for options, code, word in (("out", 2, "out exists"), ("new --max-ram 1", 5, "of memory")):
        refused(forge(f"merge --models m/a,m/b {options}"), code, word)
        dry = forge(f"merge --models m/a,m/b {options} --dry-run")
        assert dry.code == code and word in dry.out
    assert forge("merge --models m/a,m/b out --force --dry-run").code == 0
