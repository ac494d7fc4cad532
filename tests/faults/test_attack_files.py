"""No file of a person is lost: what only looks like ours, or lies behind a link, is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_forge.config.settings import CleanupSettings
from agent_forge.errors import AlreadyExists, CannotWrite, HostileInput
from agent_forge.store import files
from agent_forge.store.cleanup import SessionCleanupManager
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import Journal
from tests.support.command_line import Forge


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
    folder = sessions.path("s1")
    (folder / "session.json").unlink()
    (folder / "thesis.txt").write_text("mine")
    manager = SessionCleanupManager(sessions, CleanupSettings())
    assert manager.remove(manager.plan(everything=True)) == []
    assert (folder / "thesis.txt").read_text() == "mine" and manager.kept
