"""Folders that disappear or cannot be written, and journals that have lost their first line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_forge.merge import output
from agent_forge.phases.phase2_evomerge import evaluator, parallel
from agent_forge.phases.phase2_evomerge.journal import CACHE, JOURNAL
from agent_forge.store import files, paths
from agent_forge.track.progress import PlainProgress
from tests.support.command_line import Forge, Patch, start
from tests.support.evo_models import PARENTS, evo_line, evolved, family
from tests.support.forked_workers import fork_workers
from tests.support.merge_models import make_models
from tests.support.toy_runs import exit_code, forked, toy_run

FORK = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The small family, to be removed."""
    for name in (*PARENTS, "base"):
        shutil.copytree(family() / name, tmp_path / "models" / name)
    return tmp_path / "models"


# -- gone -----------------------------------------------------------------------------------------


def removing(gone: Path, event: str, count: int) -> Patch:
    """A patch: the folder is removed when an evolution tells of its count-th event of a kind."""

    def patch() -> None:
        real, seen = PlainProgress.__call__, 0

        def told(self: Any, record: dict[str, Any]) -> None:
            nonlocal seen
            seen += record["event"] == event
            if record["event"] == event and seen == count:
                shutil.rmtree(gone)
            real(self, record)

        PlainProgress.__call__ = told  # type: ignore[method-assign]

    return patch


def ends_with_gone(tmp_path: Path, line: list[str], patch: Patch, gone: str) -> None:
    ended = start(tmp_path, line, patch).ended()
    assert ended.code == 5 and f"error: {gone} is gone" in ended.err, ended


@FORK
@pytest.mark.parametrize(
    ("event", "count"), [("begun", 1), ("candidate", 4), ("generation", 1), ("verdict", 7)]
)
def test_the_folder_of_an_evolution_disappears(
    tmp_path: Path, models: Path, event: str, count: int
) -> None:
    """Nothing is put in its place, as if half an evolution were one."""
    ends_with_gone(tmp_path, evo_line(models=models), removing(tmp_path / "x", event, count), "x")
    assert not (tmp_path / "x").exists()


@FORK
@pytest.mark.parametrize(
    ("name", "event", "count"), [("twice", "candidate", 4), ("base", "verdict", 7)]
)
def test_a_model_disappears_under_an_evolution(
    tmp_path: Path, models: Path, name: str, event: str, count: int
) -> None:
    """Its weights are mapped and could still be read; what lies beside them could not."""
    patch = removing(models / name, event, count)
    ends_with_gone(tmp_path, evo_line(models=models), patch, str(models / name))
    assert not (tmp_path / "x" / "champion").exists()
    shutil.copytree(family() / name, models / name)
    assert start(tmp_path, ["evo", "--resume", "x"]).ended().code == 0


@FORK
def test_the_folder_of_an_evolution_with_workers_disappears(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_workers(monkeypatch)
    line = evo_line("--set", "workers=2", models=models)
    ends_with_gone(tmp_path, line, removing(tmp_path / "x", "candidate", 2), "x")


@FORK
def test_a_model_disappears_as_workers_open_it(tmp_path: Path, models: Path) -> None:
    def patch() -> None:
        real = parallel.open_pool

        def late(kind: str, *given: Any, **options: Any) -> Any:
            shutil.rmtree(models / "add")
            return real("inline", *given, **options)  # builds as a worker does, in this process

        parallel.open_pool = late

    line = evo_line("--set", "workers=2", models=models)
    ends_with_gone(tmp_path, line, patch, str(models / "add"))


@FORK
@pytest.mark.parametrize("gone", ["storage", "storage/sessions/r", "storage/sessions/r/toy"])
def test_a_folder_disappears_under_a_run(tmp_path: Path, gone: str) -> None:
    left = tmp_path / gone

    def remove(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 7:
            shutil.rmtree(left)

    def work() -> None:
        result = toy_run(tmp_path / "storage", listener=remove)
        assert result["exit_code"] == 5 and f"{left} is gone" in result["error"], result

    assert exit_code(forked(work)) == 0
    assert not left.exists()
    if gone.endswith("toy"):
        assert toy_run(tmp_path / "storage", resume=True)["success"]


@FORK
def test_a_run_without_its_folder_is_not_to_be_resumed(tmp_path: Path) -> None:
    def patch() -> None:
        from agent_forge.pipeline import phase_run

        real = phase_run._complete

        def complete(*given: Any) -> None:
            real(*given)
            shutil.rmtree(tmp_path / "storage/sessions/r")

        phase_run._complete = complete

    line = "run --preset toy --session r --set storage.reserve_disk_mb=0 --set phases.toy.steps=5"
    ended = start(tmp_path, line.split(), patch).ended()
    assert ended.code == 5 and "paused: storage/sessions/r is gone" in ended.err
    assert "forge resume" not in ended.err


def test_a_parent_disappears_under_a_merge(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_models(tmp_path / "m")
    real = output._write_rest

    def late(*given: Any) -> None:
        shutil.rmtree(tmp_path / "m" / "a")
        real(*given)

    monkeypatch.setattr(output, "_write_rest", late)
    result = forge("merge --models m/a,m/b out")
    assert result.code == 5 and "m/a is gone" in result.err
    assert not (tmp_path / "out").exists()


# -- read-only ------------------------------------------------------------------------------------


class ReadOnly(files.FileSystemCalls):
    """A disk that takes nothing any more."""

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return super().open(path, flags)

    def make_directory(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


@FORK
@pytest.mark.parametrize("more", ["", "--dry-run"])
@pytest.mark.parametrize("what", ["evo", "resume", "merge"])
def test_where_nothing_can_be_written_no_work_is_begun(
    tmp_path: Path,
    forge: Forge,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    more: str,
) -> None:
    make_models(tmp_path / "m")
    line = {
        "evo": " ".join(evo_line()),
        "resume": f"evo --resume {evolved()}",
        "merge": "merge --models m/a,m/b new/out",
    }[what]
    monkeypatch.setattr(files, "disk", ReadOnly())
    monkeypatch.setattr(evaluator, "load_network", None)  # whoever came so far would work already
    monkeypatch.setattr(output, "lineage", None)
    before = sorted(tmp_path.rglob("*"))
    result = forge(f"{line} {more}")
    place = {"evo": "x", "resume": str(evolved()), "merge": "new"}[what]
    assert result.code == 5, result
    assert f"cannot write {place}: Read-only file system" in result.err + result.out
    assert sorted(tmp_path.rglob("*")) == before


@FORK
def test_a_replay_is_refused_where_nothing_can_be_written(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "disk", ReadOnly())
    result = forge(f"evo replay {evolved() / 'champion/lineage.json'} new/out")
    assert result.code == 5 and "cannot write new: Read-only file system" in result.err


def test_looking_whether_a_folder_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    paths.require_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


# -- journals -------------------------------------------------------------------------------------


def without_the_first(lines: list[bytes]) -> list[bytes]:
    return lines[1:]


def garbage(lines: list[bytes]) -> list[bytes]:
    return [b"\x00\xff" * 40 + b"\n", *lines[1:]]


def cut_short(lines: list[bytes]) -> list[bytes]:
    return [lines[0][:30] + b"\n", *lines[1:]]


def another_digit(lines: list[bytes]) -> list[bytes]:
    first = json.loads(lines[0])
    digest = first["fingerprint"]
    first["fingerprint"] = ("0" if digest[0] != "0" else "1") + digest[1:]
    return [json.dumps(first).encode() + b"\n", *lines[1:]]


def nothing_but_garbage(lines: list[bytes]) -> list[bytes]:
    return [b"{not a line of ours}\n"]


@FORK
@pytest.mark.parametrize(
    "damage", [without_the_first, garbage, cut_short, another_digit, nothing_but_garbage]
)
def test_a_journal_without_its_first_line_is_named(
    tmp_path: Path, forge: Forge, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    shutil.copytree(evolved(), tmp_path / "x")
    path = tmp_path / "x" / JOURNAL
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    damaged = path.read_bytes()
    for line in ("evo --resume x", "evo --resume x --dry-run", " ".join(evo_line())):
        result = forge(line)
        assert result.code == 4, result
        assert f"x/{JOURNAL} is damaged: its first line" in result.err
        assert "put a copy of the file back" in result.err and CACHE in result.err
    assert path.read_bytes() == damaged


@FORK
def test_any_other_line_of_a_journal_is_measured_again(tmp_path: Path) -> None:
    shutil.copytree(evolved(), tmp_path / "x")
    path = tmp_path / "x" / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", b'{"of": "others"}\n', *lines[4:]]))
    assert start(tmp_path, ["evo", "--resume", "x"]).ended().code == 0
    found = [files.sha256_of(f / "champion/model.safetensors") for f in (tmp_path / "x", evolved())]
    assert found[0] == found[1]
