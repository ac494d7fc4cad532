"""The durable writer: whole or not at all, verified on reading, never outside its root."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agent_forge import platform
from agent_forge.errors import (
    CannotWrite,
    DamagedFile,
    DiskFull,
    HostileInput,
    NameRefused,
    NotFound,
    WrittenByNewerVersion,
)
from agent_forge.store import files


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make_directory(path: Path, text: str) -> None:
    with files.staging(path) as stage:
        stage.write_bytes("a.txt", text.encode())
        stage.write_json("b.json", {"text": text})


def test_a_file_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    files.write_bytes(path, b"first")
    files.write_bytes(path, b"second")
    assert path.read_text() == "second"
    assert names(path.parent) == {"file.txt"}


def test_an_error_while_writing_leaves_the_old_file_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    files.write_bytes(path, b"old")
    with pytest.raises(RuntimeError, match="stop"), files.writing(path) as writer:
        writer.write(b"half")
        raise RuntimeError("stop")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file.txt"}


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.disk, "write", lambda fd, data: os.write(fd, data[:3]))
    files.write_bytes(tmp_path / "file.txt", b"all of it arrives")
    assert (tmp_path / "file.txt").read_text() == "all of it arrives"


def test_json_has_one_form() -> None:
    assert files.to_json({"b": 1, "a": [1.5, None]}) == files.to_json({"a": [1.5, None], "b": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        files.to_json(float("nan"))


def test_a_directory_appears_whole_with_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_directory(path, "one")
    assert set(files.verify(path)) == {"a.txt", "b.json"}
    assert files.verify(path)["a.txt"] == {
        "sha256": files.sha256_of(path / "a.txt"),
        "bytes": 3,
    }
    assert names(tmp_path) == {"model"}


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_directory(path, "one")
    with files.staging(path) as stage:
        stage.write_bytes("c.txt", b"two")
    assert names(path) == {"c.txt", files.MANIFEST}
    assert names(tmp_path) == {"model"}


def test_an_error_while_staging_leaves_the_old_directory(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_directory(path, "one")
    with pytest.raises(RuntimeError, match="stop"), files.staging(path) as stage:
        stage.write_bytes("a.txt", b"two")
        raise RuntimeError("stop")
    assert (path / "a.txt").read_text() == "one"
    assert names(tmp_path) == {"model"}


def test_a_copied_file_is_in_the_manifest(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    with files.staging(tmp_path / "model") as stage:
        stage.copy(source)
    assert set(files.verify(tmp_path / "model")) == {"tokenizer.json"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", files.MANIFEST, "twice"])
def test_a_stage_takes_plain_file_names_only_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(NameRefused), files.staging(tmp_path / "model") as stage:
        stage.write_bytes("twice", b"")
        stage.write_bytes(name, b"")
    assert names(tmp_path) == set()


def cut_after_commit(path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """Replace `path` but die after the given number of renames behind the commit point."""
    real, done = files.disk.replace, []

    def replace(source: Path, target: Path) -> None:
        if len(done) == renames + 1:
            raise KeyboardInterrupt
        done.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.disk, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            make_directory(path, "new")


@pytest.mark.parametrize("renames", [0, 1])
def test_a_replacement_cut_short_is_read_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    path = tmp_path / "model"
    make_directory(path, "old")
    cut_after_commit(path, monkeypatch, renames)
    found = files.reading(path, lambda place: (files.verify(place), place / "a.txt")[1].read_text())
    assert found == ("old" if renames == 0 else "new")
    files.remove_leftovers(tmp_path)
    assert (path / "a.txt").read_text() == "new"
    assert names(tmp_path) == {"model"}


def test_a_new_replacement_comes_after_an_unfinished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    make_directory(path, "old")
    cut_after_commit(path, monkeypatch, 1)
    make_directory(path, "newest")
    files.remove_leftovers(tmp_path)
    assert (path / "a.txt").read_text() == "newest"
    assert names(tmp_path) == {"model"}


def test_sweep_removes_only_what_is_unfinished(tmp_path: Path) -> None:
    make_directory(tmp_path / "phase" / "model", "kept")
    (tmp_path / "phase" / f"{files.TEMP}12345678-x").mkdir()
    (tmp_path / "phase" / f"{files.TEMP}12345678-x" / "y").write_text("")
    (tmp_path / f"{files.TRASH}12345678-y").write_text("")
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == {"phase"} and names(tmp_path / "phase") == {"model"}


def test_a_reader_sees_one_version_while_a_writer_replaces(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_directory(path, "one")
    calls = []

    def read(place: Path) -> str:
        files.verify(place)
        if not calls:  # a writer comes in between the two reads
            calls.append(1)
            make_directory(path, "two")
            raise DamagedFile(place, "mixed versions")
        return (place / "a.txt").read_text()

    assert files.reading(path, read) == "two"


def test_a_reader_never_gets_half_of_each_version(tmp_path: Path) -> None:
    """A writer comes between two reads that both go well: the reader begins again."""
    path = tmp_path / "model"
    make_directory(path, "one")
    texts = []

    def read(place: Path) -> tuple[str, str]:
        first = (place / "a.txt").read_text()
        if not texts:
            make_directory(path, "two")
        texts.append(first)
        return first, files.read_json(place / "b.json")["text"]

    assert files.reading(path, read) == ("two", "two")


def test_a_disk_that_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(tmp_path / "model", "x")

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sha256_of", broken)
    with pytest.raises(DamagedFile, match="cannot read"):
        files.verify(tmp_path / "model")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(DamagedFile, match="cannot read"):
        files.read_json(tmp_path / "model" / "b.json")


class RecordingDisk(files.FileSystemCalls):
    """Notes the order of what reaches the disk."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.names[fd] = path.name
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self.calls.append(("write", self.names[fd]))
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.calls.append(("sync", self.names[fd]))
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self.calls.append(("sync folder", path.name))
        super().sync_directory(path)

    def replace(self, source: Path, target: Path) -> None:
        self.calls.append(("rename", target.name))
        super().replace(source, target)


def test_everything_is_synced_before_it_is_renamed_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    disk = RecordingDisk()
    monkeypatch.setattr(files, "disk", disk)
    files.write_bytes(folder / "a", b"x")
    assert [kind for kind, _ in disk.calls] == ["write", "sync", "rename", "sync folder"]
    assert disk.calls[2:] == [("rename", "a"), ("sync folder", "folder")]
    disk.calls.clear()
    make_directory(folder / "model", "x")
    kinds = [kind for kind, _ in disk.calls]
    assert kinds == ["write", "sync"] * 3 + ["sync folder", "rename", "sync folder"]
    assert disk.calls[-2:] == [("rename", "model"), ("sync folder", "folder")]
    disk.calls.clear()
    files.remove_tree(folder / "model", folder)
    assert [kind for kind, _ in disk.calls] == ["rename", "sync folder"]


def test_new_folders_are_on_the_disk_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(platform, "sync_directory", lambda path: synced.append(path.name))
    files.disk.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path.name, "a"]


def test_reading_gives_up_on_what_is_really_damaged_or_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        files.reading(tmp_path / "nothing", files.verify)
    make_directory(tmp_path / "model", "x")
    (tmp_path / "model" / "a.txt").write_text("y")
    with pytest.raises(DamagedFile, match=r"a\.txt"):
        files.reading(tmp_path / "model", files.verify)

    def replaced_each_time(place: Path) -> None:
        make_directory(tmp_path / "model", os.urandom(4).hex())
        raise DamagedFile(place, "mixed versions")

    with pytest.raises(DamagedFile, match="again and again"):
        files.reading(tmp_path / "model", replaced_each_time)


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"{}",
        files.with_checksum({"files": []}),
        files.with_checksum({"files": {"a.txt": {"bytes": 1}}}),
        b"{",
        b'"\\ud800',
        b'{"checksum": 1, "files": NaN}',
    ],
)
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, manifest: bytes) -> None:
    make_directory(tmp_path / "model", "x")
    (tmp_path / "model" / files.MANIFEST).write_bytes(manifest)
    with pytest.raises(DamagedFile):
        files.verify(tmp_path / "model")


def test_a_manifest_cannot_reach_outside_and_a_newer_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_directory(tmp_path / "model", "x")
    record = {"sha256": "0" * 64, "bytes": 1}
    for name in ("../secret", "/etc/passwd", ".."):
        content = files.with_checksum({"files": {name: record}})
        files.write_bytes(tmp_path / "model" / files.MANIFEST, content)
        with pytest.raises(HostileInput):
            files.verify(tmp_path / "model")
    monkeypatch.setattr(files, "SCHEMA_VERSION", 2)
    make_directory(tmp_path / "newer", "x")
    monkeypatch.undo()
    with pytest.raises(WrittenByNewerVersion):
        files.verify(tmp_path / "newer")


def test_a_linked_file_is_not_the_file_that_was_written(tmp_path: Path) -> None:
    make_directory(tmp_path / "model", "x")
    (tmp_path / "model" / "a.txt").rename(tmp_path / "elsewhere")
    (tmp_path / "model" / "a.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFile, match="missing"):
        files.verify(tmp_path / "model")


def test_remove_tree_stays_inside(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    make_directory(root / "inside", "x")
    make_directory(outside, "x")
    (root / "link").symlink_to(outside)
    (root / "inside" / "link").symlink_to(outside)
    for path in (outside, root, root / "..", root / "link", root / "inside" / ".." / ".."):
        with pytest.raises(HostileInput):
            files.remove_tree(path, root)
    files.remove_tree(root / "inside", root)
    assert names(root) == {"link"}
    assert files.verify(outside)


def test_append_adds_to_a_file(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        files.append(tmp_path / "events.jsonl", line)
    assert (tmp_path / "events.jsonl").read_bytes() == b"one\ntwo\n"
    files.sync(tmp_path / "events.jsonl")
    files.cut(tmp_path / "events.jsonl", 4)
    files.cut(tmp_path / "events.jsonl", 1000)
    files.cut(tmp_path / "nothing", 0)
    assert (tmp_path / "events.jsonl").read_bytes() == b"one\n"
    files.remove(tmp_path / "events.jsonl")
    files.remove(tmp_path / "events.jsonl")
    assert names(tmp_path) == set()


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for write in (files.write_bytes, files.append):
        with pytest.raises(CannotWrite, match="cannot write") as caught:
            write(tmp_path / "file" / "below", b"x")
        assert caught.value.exit_code == 5


def test_space_is_checked_before_the_work(tmp_path: Path) -> None:
    files.require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(DiskFull) as caught:
        files.require_space(tmp_path, 10**18)
    assert "1,000,000,000,000,000,000 bytes needed" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no view of a kernel here")
def test_a_place_that_is_on_no_disk_is_not_called_full() -> None:
    with pytest.raises(CannotWrite, match="no place on a disk"):
        files.require_space(Path("/proc/model"), 1)


def test_tree_bytes_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("/usr")
    assert files.tree_bytes(tmp_path) == 5
