"""A merge that goes wrong: a named error, parents untouched, no partial output."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.errors import (
    AlreadyExists,
    CannotWrite,
    ConfigError,
    DamagedFile,
    DiskFull,
    ForgeError,
    HostileInput,
    NotFinite,
    NotFound,
)
from agent_forge.merge.engine import merge
from agent_forge.merge.output import clear_leftovers, refuse_existing, write
from agent_forge.merge.recipe import Recipe
from agent_forge.model.locate import locate_model
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.faults import Canary, FailingDisk
from tests.support.merge_models import make_models, recipe, write_combos
from tests.support.toy_runs import exit_code, forked

FILE = "model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_models(tmp_path / "models")


def hashes(root: Path) -> dict[Path, str]:
    return {path: files.sha256_of(path) for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def untouched(root: Path, tmp_path: Path) -> Iterator[None]:
    """Whatever happens, nothing is left of the output. Tests damage parents before they merge."""
    yield
    assert [p.name for p in tmp_path.iterdir() if p != root] in ([], ["good"])


def refused(one: Recipe, tmp_path: Path, error: type[ForgeError], told: str) -> None:
    before = hashes(tmp_path / "models")
    with pytest.raises(error, match=told):
        write(merge(one), tmp_path / "out")
    assert hashes(tmp_path / "models") == before


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(root: Path, tmp_path: Path, keep: int) -> None:
    path = root / "b" / FILE
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    refused(recipe(root), tmp_path, DamagedFile, f"b/{FILE} is damaged")


@pytest.mark.parametrize("place", [3, 40])
def test_a_flipped_bit_in_the_header(root: Path, tmp_path: Path, place: int) -> None:
    path = root / "b" / FILE
    data = bytearray(path.read_bytes())
    data[place] ^= 0x80
    path.write_bytes(data)
    refused(recipe(root), tmp_path, DamagedFile, f"b/{FILE}")


def test_a_flipped_bit_in_the_weights_of_a_model_of_ours(root: Path, tmp_path: Path) -> None:
    """A model with a manifest is verified; so is one whose hash a recipe knows."""
    write(merge(recipe(root)), root / "ours")
    path = root / "ours" / FILE
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    models = [{"model": str(root / "a")}, {"model": str(root / "ours")}]
    one = Recipe.model_validate({"merge_method": "linear", "models": models})
    refused(one, tmp_path, DamagedFile, "sha256")


def test_a_flipped_bit_that_makes_a_nan(root: Path, tmp_path: Path) -> None:
    state = load_file(root / "b" / FILE)
    state["model.norm.weight"][3] = float("inf")
    save_file(state, root / "b" / FILE)
    refused(recipe(root), tmp_path, DamagedFile, rf"b/{FILE} is damaged: model\.norm\.weight")


def test_parameters_that_overflow(root: Path, tmp_path: Path) -> None:
    models = [{"model": str(root / n), "parameters": {"weight": 3e38}} for n in ("a", "b")]
    how = {"merge_method": "linear", "models": models, "parameters": {"normalize": False}}
    refused(Recipe.model_validate(how), tmp_path, NotFinite, "gives NaN or infinity")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor(root: Path, tmp_path: Path, name: str) -> None:
    state = load_file(root / "b" / FILE)
    del state[name]
    save_file(state, root / "b" / FILE)
    refused(recipe(root), tmp_path, ConfigError, rf"{name}' is in \S*a, \S*c but missing in \S*b$")


def test_a_tensor_too_many(root: Path, tmp_path: Path) -> None:
    state = load_file(root / "b" / FILE)
    save_file({**state, "model.extra.weight": torch.ones(2)}, root / "b" / FILE)
    told = r"model\.extra\.weight' is in \S*b but missing in \S*a, \S*c$"
    refused(recipe(root), tmp_path, ConfigError, told)


def test_different_shapes(root: Path, tmp_path: Path) -> None:
    state = load_file(root / "b" / FILE)
    state["model.norm.weight"] = torch.ones(17)
    save_file(state, root / "b" / FILE)
    refused(recipe(root), tmp_path, ConfigError, "different shapes")


def test_a_pickle_with_code(root: Path, tmp_path: Path) -> None:
    (root / "evil").mkdir()
    canary = tmp_path / "canary"
    torch.save({"w": torch.ones(2), "x": Canary(canary)}, root / "evil" / "pytorch_model.bin")
    models = [{"model": str(root / "a")}, {"model": str(root / "evil")}]
    one = Recipe.model_validate({"merge_method": "linear", "models": models})
    refused(one, tmp_path, HostileInput, "more than tensors")
    assert not canary.exists()


@pytest.mark.parametrize("eight", [False, True], ids=["one", "eight"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "error"])
def test_the_nth_failure_of_the_disk(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, eight: bool
) -> None:
    before = hashes(root)
    step = 17 if eight else 1
    for n in range(1, 2000, step):
        disk = FailingDisk(n, error, once=True, short=False)
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", disk)
            try:
                if eight:
                    write_combos(recipe(root, "combo", combo=0), tmp_path / "out")
                else:
                    write(merge(recipe(root)), tmp_path / "out")
            except (DiskFull, CannotWrite) as caught:
                assert isinstance(caught, DiskFull) == (error == errno.ENOSPC)
        assert hashes(root) == before
        for folder in (tmp_path / "out").glob("*-*") if eight else [tmp_path / "out"]:
            if folder.exists():
                files.verify(folder)  # whole or not there
        _remove(tmp_path / "out")
        if not disk.failures:
            assert n > 30
            return
    raise AssertionError("the merge never passed untouched")


def _remove(folder: Path) -> None:
    """What is there and what a failed clean-up left, as a user would remove it."""
    for path in [folder, *folder.parent.glob(".*")]:
        if path.exists():
            files.remove_tree(path, folder.parent)


def test_not_enough_disk_is_refused_before_the_work(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    refused(recipe(root), tmp_path, DiskFull, "1,000 free")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_while_writing(root: Path, tmp_path: Path) -> None:
    """Thirty kills at random moments: the folder is never there half, and no trace stays."""
    before = hashes(root)
    chance = random.Random(0)
    out = tmp_path / "out"
    unfinished = 0
    for _ in range(30):
        reader, writer = os.pipe()

        def work(ready: int = writer) -> None:
            def progress(_: str, done: int, total: int) -> None:
                os.write(ready, b"x")
                time.sleep(60 if done == total else 0.002)  # killed before it ends

            write(merge(recipe(root)), out, progress=progress)

        pid = forked(work)
        os.read(reader, 1)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        os.close(reader)
        os.close(writer)
        assert not out.exists()
        unfinished += bool(list(tmp_path.glob(".tmp-*")))
        assert hashes(root) == before
    assert unfinished > 20  # the kills did hit writes
    write(merge(recipe(root)), out)
    files.verify(out)
    assert not list(tmp_path.glob(".*"))
    _remove(out)


def test_the_work_of_a_living_process_is_not_a_leftover(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def look(*_: object) -> None:
        clear_leftovers(out)

    write(merge(recipe(root)), out, progress=look)
    files.verify(out)
    _remove(out)


def test_an_interrupt_leaves_nothing(
    root: Path, tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_forge.merge.engine import MergedWeights

    real = MergedWeights.compute
    seen: list[str] = []

    def compute(self: MergedWeights, name: str) -> torch.Tensor:
        seen.append(name)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(MergedWeights, "compute", compute)
    monkeypatch.setattr(MergedWeights, "__getitem__", compute)
    result = forge(f"merge --models {root}/a,{root}/b out")
    assert result.code == 1 and "nothing was written" in result.err
    assert len(seen) == 5


@pytest.mark.parametrize("eight", [False, True], ids=["one", "eight"])
def test_an_interrupt_removes_the_folders_it_made(root: Path, tmp_path: Path, eight: bool) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if eight:
            write_combos(recipe(root, "combo", combo=0), tmp_path / "x" / "out", progress=stop)
        else:
            write(merge(recipe(root)), tmp_path / "x" / "out", progress=stop)


@pytest.mark.parametrize("force", [False, True])
def test_what_holds_a_parent_is_never_replaced(root: Path, tmp_path: Path, force: bool) -> None:
    """Only asked, not done: nothing is lost even if it were answered wrongly."""
    linked = root / "linked"
    linked.mkdir()
    (linked / FILE).symlink_to(root / "b" / FILE)
    models = [{"model": str(root / "a")}, {"model": str(linked)}]
    merged = merge(Recipe.model_validate({"merge_method": "linear", "models": models}))
    for place in (root / "a", root / "b", root, tmp_path, Path("/"), Path(), Path("..")):
        with pytest.raises(ConfigError, match=r"(is|holds) (a parent of|the current)"):
            refuse_existing(place, merged, force)
    with pytest.raises(ConfigError, match="not the name of a folder"):
        refuse_existing(root / "c" / "none" / "..", merged, force)


def test_a_replacement_that_was_cut_short_is_finished(root: Path, tmp_path: Path) -> None:
    merged = merge(recipe(root))
    for name in ("good", "new"):
        write(merged, tmp_path / name)
    (tmp_path / "good").rename(tmp_path / ".old-0123abcd-good")  # killed between its two renames
    (tmp_path / "new").rename(tmp_path / ".ready-good")
    with pytest.raises(NotFound) as told:
        locate_model(str(tmp_path / "good"))
    assert ".ready-good" in told.value.hint
    with pytest.raises(AlreadyExists):
        write(merged, tmp_path / "good")
    assert files.verify(tmp_path / "good")
    write(merged, tmp_path / "good", force=True)
    assert {path.name for path in tmp_path.glob(".*-good")} == set()


def test_force_replaces_nothing_but_models(root: Path, tmp_path: Path) -> None:
    file, notes, link = (root / name for name in ("file", "notes", "link"))
    file.write_text("mine")
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    link.symlink_to(root / "c")
    merged = merge(recipe(root, models=[{"model": str(root / n)} for n in "ab"]))
    before = hashes(root)
    for place in (file, notes, link):
        with pytest.raises(AlreadyExists, match=f"{place.name} is (no folder|not replaced)"):
            write(merged, place, force=True)
    assert hashes(root) == before and link.is_symlink()


def test_force_leaves_a_training_folder_alone(root: Path, tmp_path: Path) -> None:
    """A folder of weights that we did not write, and one of ours to which someone added."""
    merged = merge(recipe(root, models=[{"model": str(root / n)} for n in "ab"]))
    own = tmp_path / "good"
    write(merged, own)
    write(merged, own, force=True)  # as it was written, it is replaced
    (root / "c" / "train.log").write_text("step 500")
    (root / "c" / "checkpoint-500").mkdir()
    (root / "c" / "checkpoint-500" / "optimizer.pt").write_bytes(b"state")
    (own / "notes.txt").write_text("mine")
    before = hashes(root) | hashes(own)
    for place, named in ((root / "c", "checkpoint-500, config.json"), (own, "notes.txt")):
        with pytest.raises(AlreadyExists, match=named):
            write(merged, place, force=True)
    (own / "notes.txt").unlink()
    card = (own / "README.md").read_bytes()
    (own / "README.md").write_bytes(b"MY NOTES" + card[8:])  # of the same size
    with pytest.raises(AlreadyExists, match=r"README\.md"):
        write(merged, own, force=True)
    (own / "README.md").unlink()
    assert hashes(root) | hashes(own) == {k: v for k, v in before.items() if k.exists()}


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_written_into_a_parent(root: Path, force: bool) -> None:
    merged = merge(recipe(root, models=[{"model": str(root / n)} for n in "ab"]))
    with pytest.raises(ConfigError, match="lies in a parent"):
        write(merged, root / "a" / "merged", force=force)
    assert not (root / "a" / "merged").exists()


@pytest.mark.parametrize("late", [False, True], ids=["while merging", "while publishing"])
def test_the_second_of_two_writers_refuses(
    root: Path, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, began = tmp_path / "good", []

    def other(*_: object) -> None:
        if not began:
            began.append(1)
            write(merge(recipe(root, "slerp")), out)

    real = files.publish
    if late:  # after the last look at the folder
        monkeypatch.setattr(files, "publish", lambda *a, **o: (other(), real(*a, **o))[1])
    with pytest.raises(CannotWrite if late else AlreadyExists, match=r"not empty|exists|denied"):
        write(merge(recipe(root)), out, progress=None if late else other)
    assert "slerp" in (out / "README.md").read_text()
    files.verify(out)


def test_only_leftovers_of_this_folder_go(root: Path, tmp_path: Path) -> None:
    """What merely looks like one is someone's."""
    beside = tmp_path / "models"
    mine = [beside / name for name in (".tmp-old-out", ".tmp-0a1b2c3d-my-out", ".tmp-zzzzzzzz-out")]
    for folder in (*mine, beside / ".tmp-0a1b2c3d-out"):
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    clear_leftovers(beside / "out")
    assert all((folder / "thesis.txt").is_file() for folder in mine)
    assert not (beside / ".tmp-0a1b2c3d-out").exists()
