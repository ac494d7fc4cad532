"""A model in one file: what goes in comes out, and a file that is broken or hostile is refused."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from agent_forge.errors import DamagedFile, ForgeError, HostileInput
from agent_forge.store import container, files
from agent_forge.store.container import container_of, read_container, unpacked
from agent_forge.store.paths import USER_FOLDER

CONTENTS = {
    "model.safetensors": random.Random(0).randbytes(5000),
    "config.json": b'{"model_type": "agent_forge"}' * 50,
    "empty.txt": b"",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(USER_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "m.forge").write_bytes(container_of(CONTENTS).content)
    return tmp_path / "m.forge"


def signed(path: Path, index: object, payload: bytes = b"") -> Path:
    """A file with a checksum that is right, whatever its index says."""
    coded = container._compressed(json.dumps(index).encode())
    body = container.MAGIC + len(coded).to_bytes(4, "little") + coded + payload
    path.write_bytes(body + hashlib.sha256(body).digest())
    return path


def test_what_goes_in_comes_out(packed: Path) -> None:
    content, sizes = container_of(CONTENTS)
    assert read_container(packed) == CONTENTS and content == packed.read_bytes()
    assert sum(sizes.values()) == len(content)
    assert sizes["model.safetensors"] < 5020 and sizes["config.json"] < 100


def test_it_is_unpacked_once(packed: Path, cache: Path) -> None:
    folder = unpacked(packed)
    assert {
        p.name: p.read_bytes() for p in folder.iterdir() if p.name != files.MANIFEST
    } == CONTENTS
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert unpacked(packed) == folder and folder.is_relative_to(cache)
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    (folder / "config.json").write_bytes(b"changed")
    assert unpacked(packed) == folder
    assert (folder / "config.json").read_bytes() == CONTENTS["config.json"]


def test_what_another_process_was_faster_to_unpack_stays(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []

    def other(place: Path, size: int) -> None:
        monkeypatch.undo()
        monkeypatch.setenv(USER_FOLDER, str(packed.parent / "cache"))
        first.append(unpacked(packed).stat().st_ino)

    monkeypatch.setattr(files, "require_space", other)
    assert [unpacked(packed).stat().st_ino] == first


def test_what_was_unpacked_is_that_of_the_file_whatever_its_manifest_says(packed: Path) -> None:
    folder = unpacked(packed)
    with files.staging(folder) as stage:
        for name, content in CONTENTS.items():
            stage.write_bytes(name, content[::-1])
    assert unpacked(packed) == folder
    assert all((folder / name).read_bytes() == content for name, content in CONTENTS.items())


@pytest.mark.parametrize("name", ["..forge", "...forge", "....forge", ".. .forge"])
def test_a_name_of_dots_stays_in_its_folder(packed: Path, cache: Path, name: str) -> None:
    before = unpacked(packed)
    folder = unpacked(packed.rename(packed.with_name(name)))
    assert folder.resolve().parent == before.resolve().parent != folder.resolve()
    assert [*cache.glob("models/*")] == [before.parent]  # nothing was moved away
    assert (before / "config.json").is_file() and (folder / "config.json").is_file()


def test_every_cut_and_every_flipped_byte_is_refused(packed: Path) -> None:
    whole = packed.read_bytes()
    for size in range(0, len(whole), 97):
        packed.write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            read_container(packed)
    for place in range(0, len(whole), 53):
        broken = bytearray(whole)
        broken[place] ^= 1
        packed.write_bytes(bytes(broken))
        with pytest.raises(DamagedFile):
            read_container(packed)


@pytest.mark.parametrize(
    "index",
    [
        [["../x", 0, 0]],
        [["a/b", 0, 0]],
        [["..", 0, 0]],
        [["", 0, 0]],
        [["a\0b", 0, 0]],
        [["\ud800", 0, 0]],
        [["x" * 300, 0, 0]],
        [["manifest.json", 0, 0]],
        [["x", 1 << 40, 0]],
    ],
)
def test_names_stay_inside_and_sizes_sane(tmp_path: Path, index: object) -> None:
    with pytest.raises(HostileInput):
        read_container(signed(tmp_path / "x.forge", index))


@pytest.mark.parametrize(
    "index",
    [3, [3], [["x"]], [["x", -1, 0]], [["x", 0, 9]], [["x", True, 0]], [["x", 5, 0]]],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, index: object) -> None:
    with pytest.raises(DamagedFile):
        read_container(signed(tmp_path / "x.forge", index))


def test_a_file_grows_no_larger_than_it_says(tmp_path: Path) -> None:
    zeros = container._compressed(bytes(10 << 20))
    with pytest.raises(DamagedFile, match="of the size"):
        read_container(signed(tmp_path / "x.forge", [["x", 100, len(zeros)]], zeros))
    with pytest.raises(HostileInput, match="would unpack"):
        read_container(signed(tmp_path / "x.forge", [["x", 1 << 34, len(zeros)]], zeros))


def test_random_changes_behind_a_right_checksum_end_in_a_named_error(tmp_path: Path) -> None:
    rng, path, refused = random.Random(1), tmp_path / "x.forge", 0
    whole = container_of(CONTENTS).content[: -container.CHECKSUM]
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(8, len(body))] = rng.randrange(256)
        path.write_bytes(bytes(body) + hashlib.sha256(body).digest())
        try:
            read_container(path)
        except ForgeError:
            refused += 1
    assert refused > 10
