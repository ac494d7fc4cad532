"""No file of a person is lost: what only looks like ours, or lies behind a link, is left alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_forge.config.settings import CleanupSettings
from agent_forge.contract.replay import DecisionLog, MeasurementLog
from agent_forge.errors import AlreadyExists, CannotWrite, HostileInput
from agent_forge.pipeline.environment import StopSignals, request_stop
from agent_forge.store import files, lock
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.cleanup import SessionCleanupManager
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import Journal
from tests.support.command_line import Forge
from tests.support.toy_runs import change_settings, folder, toy_run


def test_a_journal_behind_a_link_is_not_cut(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("a line without its end")
    (tmp_path / "journal.jsonl").symlink_to(thesis)
    with pytest.raises(HostileInput):
        Journal(tmp_path / "journal.jsonl")
    assert thesis.read_text() == "a line without its end"


def test_leftovers_behind_a_link_stay(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    left = tmp_path / "elsewhere" / ".tmp-0a1b2c3d-x"
    left.write_text("mine")
    (tmp_path / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostileInput):
        files.remove_leftovers(tmp_path / "weights")
    assert left.read_text() == "mine"


def test_names_that_only_look_like_ours_stay(tmp_path: Path) -> None:
    names = (".tmp-work", ".trash-2024", ".ready-z", ".tmp-0a1b2c3-x", ".trash-zzzzzzzz-x")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("mine")
    files.remove_leftovers(tmp_path)
    with files.staging(tmp_path / "z") as stage:
        stage.write_json("a.json", 1)
    assert all((tmp_path / name / "thesis.tex").is_file() for name in names)
    assert (tmp_path / "z" / "a.json").is_file()


def test_a_ready_folder_with_a_manifest_of_its_own_stays(tmp_path: Path) -> None:
    ready = tmp_path / ".ready-out"
    ready.mkdir()
    (ready / "manifest.json").write_text("{}")
    (ready / "thesis.tex").write_text("mine")
    files.finish_replace(tmp_path / "out")
    assert (ready / "thesis.tex").read_text() == "mine" and not (tmp_path / "out").exists()


def test_what_could_not_be_put_in_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the target is a mount point: it cannot be renamed."""
    with files.staging(tmp_path / "out") as stage:
        stage.write_json("a.json", "old")
    real = files.disk.replace

    def busy(source: Path, target: Path) -> None:
        if source == tmp_path / "out":
            raise OSError(16, "Device or resource busy")
        real(source, target)

    monkeypatch.setattr(files.disk, "replace", busy)
    with pytest.raises(CannotWrite), files.staging(tmp_path / "out") as stage:
        stage.write_json("a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert files.read_json(tmp_path / "out" / "a.json") == "old"


def test_a_file_that_appears_while_one_is_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "x.tar.gz"
    with pytest.raises(AlreadyExists), files.writing(target, replace=False) as writer:
        target.write_text("mine")
        writer.write(b"ours")
    assert target.read_text() == "mine" and list(tmp_path.iterdir()) == [target]


def test_an_archive_does_not_replace_a_dangling_link(forge: Forge, sessions: SessionStore) -> None:
    target = sessions.root.parent / "x.tar"
    target.symlink_to(sessions.root / "gone")
    assert forge(f"export s1 {target}").code == 2 and target.is_symlink()


def test_a_folder_that_is_no_session_is_not_cleaned(sessions: SessionStore) -> None:
    sessions.set_status("s1", "completed")
    place = sessions.path("s1")
    (place / "session.json").unlink()
    (place / "thesis.txt").write_text("mine")
    manager = SessionCleanupManager(sessions, CleanupSettings())
    assert manager.remove(manager.plan(everything=True)) == []
    assert (place / "thesis.txt").read_text() == "mine" and manager.kept


# -- what is changed in place ---------------------------------------------------------------------


@pytest.mark.parametrize("content", ["my notes on locks", '{"mine": 1}', "None"])
def test_a_file_that_is_only_called_lock_stays(tmp_path: Path, content: str) -> None:
    (tmp_path / lock.LOCK_FILE).write_text(content)
    with pytest.raises(HostileInput) as caught, lock.exclusive(tmp_path):
        pass
    assert caught.value.hint and (tmp_path / lock.LOCK_FILE).read_text() == content


@pytest.mark.parametrize("content", ["", '{"p', '{"pid": 1, "host": "a", "since": '])
def test_a_lock_of_a_process_that_died_is_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / lock.LOCK_FILE).write_text(content)
    with lock.exclusive(tmp_path):
        assert lock.announced(tmp_path)["pid"] == os.getpid()


def test_a_file_with_a_second_name_is_not_changed_in_place(tmp_path: Path) -> None:
    thesis, place = tmp_path / "thesis.txt", tmp_path / "x"
    thesis.write_text('{"pid": 1}\n{"half')
    place.mkdir()
    for name in (lock.LOCK_FILE, "journal.jsonl"):
        os.link(thesis, place / name)
    with pytest.raises(HostileInput), lock.exclusive(place):
        pass
    with pytest.raises(HostileInput):
        Journal(place / "journal.jsonl")
    for change in (lambda path: files.append(path, b"more\n"), lambda path: files.cut(path, 1)):
        with pytest.raises(HostileInput, match="not changed"):
            change(place / "journal.jsonl")
    assert thesis.read_text() == '{"pid": 1}\n{"half'


def test_the_end_of_a_journal_that_is_not_ours_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":1}\nmy remark')
    Journal(path).write({"event": 2})
    assert path.read_text() == '{"event":1}\nmy remark\n{"event":2}\n'


def test_a_lock_in_the_folder_of_sessions_stays(forge: Forge, root: Path) -> None:
    (root / "sessions").mkdir(parents=True)
    (root / "sessions" / lock.LOCK_FILE).write_text("my session notes")
    result = forge(f"run --preset toy --session t --storage {root}")
    assert result.code == 4 and "move that file elsewhere" in result.err
    assert (root / "sessions" / lock.LOCK_FILE).read_text() == "my session notes"


# -- what is replaced -----------------------------------------------------------------------------


def found(place: Path, name: str) -> list[str]:
    return [path.read_text() for path in place.rglob(name)]


@pytest.mark.parametrize("change", ["notes.txt", "a.json"])
def test_what_appears_in_a_folder_while_it_is_replaced_is_kept(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "champion"
    for version in ("old", "new"):
        with files.staging(place) as stage:
            stage.write_json("a.json", version)
            if version == "new":
                (place / change).write_text("mine")
    kept = next(tmp_path.glob("champion.kept-*"))
    assert (kept / change).read_text() == "mine" and str(kept) in caplog.text
    assert files.read_json(place / "a.json") == "new" and not files.foreign(place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["champion", kept.name]


def test_what_appeared_is_kept_even_if_the_writer_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "champion"
    monkeypatch.setattr(files, "retire", lambda old, path: None)
    for version in ("old", "new"):
        with files.staging(place) as stage:
            stage.write_json("a.json", version)
            if version == "new":
                (place / "notes.txt").write_text("mine")
    monkeypatch.undo()
    files.remove_leftovers(tmp_path)
    assert found(tmp_path, "notes.txt") == ["mine"] and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_stands_where_a_record_goes_is_kept(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "state.json", tmp_path / "other.json"
    files.write_checked(other, {"a": 1})
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    else:
        path.symlink_to(other)
    for number in (1, 2):
        files.write_checked(path, {"a": number})
        assert files.read_checked(path)["a"] == number and not path.is_symlink()
    assert len(list(tmp_path.glob("state.json.kept-*"))) == 1
    assert files.read_checked(other)["a"] == 1


# -- what is removed ------------------------------------------------------------------------------


def test_a_checkpoint_that_holds_more_is_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    (tmp_path / "step_000000001").mkdir()
    (tmp_path / "step_00000009").write_text("mine")
    for step in (1, 2, 3):
        path = manager.save({}, step=step)
        if step == 1:
            (path / "notes.txt").write_text("mine")
    assert found(tmp_path, "notes.txt") == ["mine"] and found(tmp_path, "step_00000009") == ["mine"]
    assert [path.name for path in manager.steps()] == ["step_00000003"]
    assert (tmp_path / "step_000000001").is_dir()


STOPS = ["stop eating sugar", "caf\xe9", "12 monkeys"]


@pytest.mark.parametrize("text", STOPS)
def test_a_file_that_is_only_called_stop_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stop"
    path.write_bytes(text.encode("latin-1"))
    assert not StopSignals(tmp_path)() and path.read_bytes() == text.encode("latin-1")
    with lock.exclusive(tmp_path):
        request_stop(tmp_path)
    assert next(tmp_path.glob("stop.kept-*")).read_bytes() == text.encode("latin-1")
    assert StopSignals(tmp_path)() and not path.exists()


def test_a_folder_or_a_link_that_is_only_called_stop_stays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "stop").mkdir()
    (tmp_path / "b" / "stop").symlink_to(tmp_path / "nowhere")
    for name in ("a", "b"):
        assert not StopSignals(tmp_path / name)() and os.path.lexists(tmp_path / name / "stop")


FOREIGN = ["analysis.txt", "toy/notes.txt", "toy/linear/notes.txt", "mine/state.json", "stop"]


@pytest.mark.parametrize(
    "name", [*FOREIGN, "toy/checkpoints/main/step_00000024/notes.txt", "wandb/NOTES.md"]
)
def test_a_session_with_files_of_a_person_is_not_cleaned(
    name: str, tmp_path: Path, forge: Forge, ran: Path
) -> None:
    shutil.copytree(ran, tmp_path / "st")
    mine = folder(tmp_path / "st") / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for options in ("--dry-run", "--yes"):
        result = forge(f"clean --all {options} --storage st")
        assert result.code == 4 and name in result.err and mine.read_text() == "mine"
    mine.unlink()
    assert forge("clean --all --yes --storage st").code == 0
    assert not folder(tmp_path / "st").exists()


def test_weights_that_were_changed_since_are_not_cleaned(
    ran: Path, tmp_path: Path, forge: Forge
) -> None:
    """Somebody went on training there: the names and sizes are still those that were written."""
    shutil.copytree(ran, tmp_path / "st")
    weights = folder(tmp_path / "st") / "toy" / "linear" / "model.safetensors"
    changed = weights.read_bytes()[:-4] + b"mine"
    weights.write_bytes(changed)
    assert forge("clean --all --yes --storage st").code == 4
    assert weights.read_bytes() == changed


def test_what_was_kept_in_a_replaced_version_is_not_cleaned(
    ran: Path, tmp_path: Path, forge: Forge
) -> None:
    """A run that was killed when it had replaced a model in which somebody had put notes."""
    shutil.copytree(ran, tmp_path / "st")
    place = folder(tmp_path / "st")
    shutil.copytree(place / "toy" / "linear", place / "toy" / ".old-0123abcd-linear")
    (place / "toy" / ".old-0123abcd-linear" / "notes.txt").write_text("mine")
    assert forge("clean --all --yes --storage st").code == 4
    assert found(place, "notes.txt") == ["mine"] and (place / "session.json").exists()


def test_a_copy_of_a_model_in_a_session_is_not_cleaned(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path / "st")
    place = folder(tmp_path / "st")
    shutil.copytree(place / "toy" / "linear", place / "toy" / "published")
    manager = SessionCleanupManager(SessionStore(tmp_path / "st"), CleanupSettings())
    assert manager.plan(everything=True) == [] and manager.kept


def test_what_a_person_put_where_a_model_goes_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["event"] == "step":
            (folder(tmp_path) / "toy" / "linear").mkdir(exist_ok=True)
            (folder(tmp_path) / "toy" / "linear" / "notes.txt").write_text("mine")

    assert toy_run(tmp_path, listener=interrupt)["success"]
    assert found(folder(tmp_path), "notes.txt") == ["mine"] and "kept as" in caplog.text
    assert not SessionStore(tmp_path).register(folder(tmp_path))


def test_other_settings_drop_only_what_a_run_has_written(tmp_path: Path) -> None:
    toy_run(tmp_path)
    place = folder(tmp_path) / "toy"
    for name in ("decisions.json", "measurements.jsonl", "checkpoints/notes.txt"):
        (place / name).write_text("mine\n")
    (place / "checkpoints" / "main" / "notes.txt").write_text("mine\n")
    change_settings(tmp_path, "steps: 24", "steps: 12")
    assert toy_run(tmp_path, resume=True)["success"]
    kept = [path.read_text() for path in place.rglob("*") if path.is_file() and is_kept(path)]
    assert kept == ["mine\n"] * 4


def test_other_settings_drop_what_was_measured_with_the_old_ones(tmp_path: Path) -> None:
    toy_run(tmp_path)
    place = folder(tmp_path) / "toy"
    MeasurementLog(place, "old").once("scores", "1", lambda: 1)
    DecisionLog(place).record("pieces", 1, 8)
    change_settings(tmp_path, "steps: 24", "steps: 12")
    assert toy_run(tmp_path, resume=True)["success"]
    assert not (place / "measurements.jsonl").exists() and not (place / "decisions.json").exists()


def is_kept(path: Path) -> bool:
    return ".kept-" in path.name or path.name == "notes.txt"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage root with a run that is done."""
    root = tmp_path_factory.mktemp("ran")
    assert toy_run(root)["success"]
    return root
