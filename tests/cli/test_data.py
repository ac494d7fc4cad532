"""`forge data`: what is there, what is in it, and what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_forge.cli import data
from agent_forge.data.datasets import DATASETS
from tests.support.command_line import Forge
from tests.support.data_files import put

ROW = {"question": "1+1?", "answer": "#### 2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with one whole and one damaged set."""
    put(tmp_path / "data/gsm8k/train.jsonl", ROW, ROW)
    put(tmp_path / "data/svamp/SVAMP.json", {"Body": "B"})
    return tmp_path / "data"


def test_ls(folder: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = forge("data ls").out.splitlines()
    assert len(lines) == len(DATASETS) + 1
    assert lines[1].split() == ["gsm8k", "math", "1", "yes", "2", "82", "B", "MIT"]
    assert lines[2].split()[3] == "damaged" and lines[3].split()[3:6] == ["no", "-", "-"]
    found = {s["name"]: s for s in forge("data ls --json").document["datasets"]}
    assert (found["gsm8k"]["examples"], found["gsm8k"]["bytes"]) == (2, 82)
    assert "field 'Question' is missing" in found["svamp"]["problem"]
    assert found["drop"]["files"] == []
    monkeypatch.setattr(data, "COUNTED_BYTES", 10)
    assert forge("data ls").out.splitlines()[1].split()[4] == "-"


def test_the_folder_is_an_option_or_in_the_environment(
    folder: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "svamp/SVAMP.json").unlink()
    folder.rename(folder.with_name("other"))
    assert forge("data verify --data-dir other --json").document["verified"]
    monkeypatch.setenv("AGENT_FORGE_DATA", "other")
    assert forge("data verify --json").document["verified"]
    monkeypatch.delenv("AGENT_FORGE_DATA")
    result = forge("data verify")
    assert (result.code, result.out, result.err) == (0, "", "no datasets in data yet\n")


def test_verify(folder: Path, forge: Forge) -> None:
    result = forge("data verify gsm8k")
    assert result.code == 0 and result.out.splitlines()[1].split()[:2] == ["gsm8k", "2"]
    (report,) = forge("data verify gsm8k --json").document["verified"]
    assert (report["examples"], report["duplicates"], report["in_two_splits"]) == (2, 1, 0)


def test_verify_ends_with_4_where_something_is_damaged(folder: Path, forge: Forge) -> None:
    result = forge("data verify")
    assert result.code == 4 and "gsm8k" in result.out
    assert "SVAMP.json is damaged: item 1: field 'Question' is missing" in result.err
    assert forge("data verify --json").document["exit_code"] == 4


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("data verify gsm9k", "did you mean 'gsm8k'"),
        ("data verify drop", "no dataset 'drop'"),
        ("data fetch gsm8k piqqa", "did you mean 'piqa'"),
        ("data show tinystorys", "did you mean 'tinystories'"),
        ("data show nope.jsonl", "nope.jsonl does not exist"),
        ("data show gsm8k --split nope", "unknown split 'nope'"),
        ("data fetch", "names"),
    ],
)
def test_what_does_not_exist(line: str, told: str, folder: Path, forge: Forge) -> None:
    result = forge(line)
    assert (result.code, result.out) == (2, "") and told in result.err


def test_show(folder: Path, forge: Forge) -> None:
    result = forge("data show gsm8k -n 1")
    assert result.out.splitlines() == [
        *("--- gsm8k (train)", "prompt: Question: 1+1?", "Answer:", "learned:  #### 2")
    ]
    put(folder.parent / "my.jsonl", {"text": "plain \x1b[31m"})
    assert "learned: plain ?[31m" in forge("data show my.jsonl").out
    (example,) = forge("data show my.jsonl --json").document["examples"]
    assert (example["prompt"], example["completion"]) == ("", "plain \x1b[31m")


def test_fetch(forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = SimpleNamespace(load_dataset=lambda *_, **__: {"train": [ROW] * 3})
    monkeypatch.setitem(sys.modules, "datasets", online)
    result = forge("data fetch gsm8k --limit 2 --json")
    assert result.document["fetched"][0]["examples"] == {"train": 2}
    assert forge("data verify gsm8k").code == 0
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = forge("data fetch gsm8k")
    assert result.code == 2 and "pip install 'agent-forge[data]'" in result.err
