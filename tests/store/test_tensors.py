"""Tensors and nested state on disk: exact, deterministic, readable by everyone."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from agent_forge.errors import DamagedFile, HostileInput, NotFound
from agent_forge.store import files
from agent_forge.store.pytree import pack, unpack
from agent_forge.store.tensors import (
    DTYPE_CODES,
    join_tied,
    read_tensors,
    read_weights,
    split_tied,
    write_tensors,
)


def write(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    with files.writing(path) as writer:
        write_tensors(writer, tensors, metadata)
    return path


def every_kind() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 2, (6,), generator=torch.Generator().manual_seed(1))
    tensors = {code: raw.to(dtype) for dtype, code in DTYPE_CODES.items()}
    tensors["empty"] = torch.zeros(0, 3)
    tensors["scalar"] = torch.tensor(1.5)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).t()
    return tensors


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = every_kind()
    path = write(tmp_path / "t.safetensors", tensors, note="hello")
    for found in (read_tensors(path), load_file(path)):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert found[name].tolist() == tensor.tolist()
    with safe_open(path, framework="pt") as reader:
        assert reader.metadata() == {"note": "hello"}


def test_equal_tensors_give_equal_files_in_any_order(tmp_path: Path) -> None:
    tensors = every_kind()
    one = write(tmp_path / "1", tensors)
    two = write(tmp_path / "2", dict(reversed(tensors.items())))
    assert one.read_bytes() == two.read_bytes()


def test_a_read_tensor_is_aligned_memory_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"a": torch.ones(3), "b": torch.ones(5)})
    found = read_tensors(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert found["a"].tolist() == [1, 1, 1]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())


def test_a_type_without_a_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="complex64"):
        write(tmp_path / "t", {"a": torch.ones(2, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_kept_once_under_their_first_name() -> None:
    shared, other = torch.ones(2, 3), torch.ones(2, 3)
    state = {"z.embed": shared, "a.head": shared, "other": other, "view": shared.t()}
    kept, aliases = split_tied(state)
    assert set(kept) == {"z.embed", "other", "view"} and aliases == {"a.head": "z.embed"}
    joined = join_tied(kept, aliases)
    assert joined["a.head"] is joined["z.embed"]


def test_empty_tensors_are_never_tied() -> None:
    assert split_tied({"a": torch.zeros(0), "b": torch.zeros(0)})[1] == {}


def test_a_state_dict_of_others_is_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    contents: dict[str, Any] = {
        "plain.pt": state,
        "spec.bin": {"epoch": 1, "model_state_dict": state},
        "lightning.ckpt": {"state_dict": state},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        assert read_weights(tmp_path / name)["w"].tolist() == [0, 1, 2]
    torch.save({"a": state["w"], "b": state["w"]}, tmp_path / "tied.pt")
    tied = read_weights(tmp_path / "tied.pt")
    assert tied["a"] is tied["b"]
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "old.pth")["w"].tolist() == [0, 1, 2]
    assert read_weights(write(tmp_path / "t.safetensors", state))["w"].tolist() == [0, 1, 2]
    for suffix in ("pt", "safetensors"):
        with pytest.raises(NotFound):
            read_weights(tmp_path / f"missing.{suffix}")


def test_what_holds_no_weights_is_damage(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "short.safetensors").write_bytes(b"\x01")
    (tmp_path / "huge.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    for path in tmp_path.iterdir():
        with pytest.raises(DamagedFile, match=path.name):
            read_weights(path)


def test_a_tensor_cannot_claim_more_than_the_file_holds(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**9)}, tmp_path / "wide.pt")
    with pytest.raises(HostileInput, match="claims more"):
        read_weights(tmp_path / "wide.pt")


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(HostileInput, match="unpack"):
        read_weights(path)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_torch_file_is_an_error_by_name(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("damage") / "x.pt"
    torch.save({"w": torch.arange(4.0)}, path)
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position] = byte
    path.write_bytes(content[:position] if cut else content)
    try:
        read_weights(path)
    except (DamagedFile, HostileInput) as error:
        assert "x.pt" in str(error)


# -- nested state ---------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8)
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
def test_nested_state_comes_back_exactly(tree: Any) -> None:
    tensors, skeleton = pack(tree)
    again = unpack(tensors, json.loads(files.to_json(skeleton, sort_keys=False)))
    assert again == tree and repr(again) == repr(tree)


def test_tensors_arrays_and_odd_keys_come_back() -> None:
    tree = {
        0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(2.0)},
        "rng": ("MT19937", np.arange(4, dtype=np.uint32), 1, 0, 0.0),
        "$": "a key that looks like a tag",
        "nan": math.nan,
        "inf": -math.inf,
    }
    again = unpack(*pack(tree))
    assert again[0]["exp_avg"].tolist() == [0, 1, 2]
    assert again["rng"][1].dtype == np.uint32 and isinstance(again["rng"], tuple)
    assert math.isnan(again["nan"]) and again["inf"] == -math.inf
    assert list(again) == list(tree)


def test_no_two_places_share_a_tensor_unless_they_did() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    tree = {"a": {"b/c": one}, "a/b": {"c": two}, "tied": one, "empty": [torch.zeros(0)] * 2}
    tensors, skeleton = pack(tree)
    again = unpack(tensors, skeleton)
    assert again["a"]["b/c"].tolist() == [1, 1] and again["a/b"]["c"].tolist() == [0, 0]
    assert again["tied"] is again["a"]["b/c"] and len(tensors) == 4


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": [lambda: 0]}, {torch.ones(1): 1}])
def test_what_cannot_be_kept_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match="state at /"):
        pack(value)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tag"):
        unpack({}, {"$": "code", "value": "import os"})
