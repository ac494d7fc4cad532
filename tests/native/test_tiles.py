"""Matrices in C: equal to torch at any size, exact for whole numbers, the same on any path."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.native.tiles import FLOATS, NIBBLES, TERNARY, Tiles, ternary, tiles_of
from agent_forge.quant.codecs import Coded, find_codec
from agent_forge.quant.layers import rounded_inputs
from agent_forge.quant.packed import PackedMatrix, Packing

# Fewer than a tile, whole tiles, one more; sums of 16 bits are widened every 256 columns.
SIZES = [(1, 1), (7, 3), (8, 16), (9, 17), (13, 255), (16, 256), (5, 257), (33, 520), (40, 1024)]


def times(native: ModuleType, tiles: Tiles, shape: Any, x: Tensor, avx2: bool) -> Tensor:
    out = np.full(shape[0], np.nan, np.float32)
    native.multiply(tiles, *shape, x.numpy(), out, avx2)
    return torch.from_numpy(out)


def packing(codec: str, shape: tuple[int, int], bits: int, name: str = "w") -> Packing:
    return Packing({name: PackedMatrix(find_codec(codec), shape)}, bits)


def decoded(codec: str, shape: tuple[int, int], seed: int = 0) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return find_codec(codec).rounded(weight)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("codec", ["ternary", "ternary_spec", "ternary_bitnet"])
def test_ternary_products_are_those_of_torch(native: Any, codec: str, shape: Any) -> None:
    weight, x = decoded(codec, shape), torch.randn(shape[1])
    tiles = tiles_of("w", weight, packing(codec, shape, 8))
    found = [times(native, tiles, shape, x, avx2) for avx2 in (True, False)]
    wanted = F.linear(rounded_inputs(x).double(), weight.double())
    assert tiles.kind == TERNARY and torch.equal(*found)
    assert torch.allclose(found[0].double(), wanted, rtol=1e-6, atol=1e-6 * float(x.norm()))


@pytest.mark.parametrize("avx2", [True, False])
@pytest.mark.parametrize("columns", [255, 256, 257, 4096])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_largest_sums_do_not_overflow(
    native: Any, avx2: bool, columns: int, signs: tuple[int, int]
) -> None:
    codes = torch.full((9, columns), signs[0], dtype=torch.int8)
    tiles = ternary(Coded(codes, torch.ones(9, 1, dtype=torch.float16)))
    x = torch.full((columns,), 127.0 * signs[1])
    wanted = torch.full((9,), 127.0 * columns * signs[0] * signs[1])
    assert torch.equal(times(native, tiles, (9, columns), x, avx2), wanted)


@pytest.mark.parametrize("avx2", [True, False])
def test_whole_numbers_are_summed_exactly(native: Any, avx2: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-1, 2, (50, 777), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (777,), generator=generator)
    x[0] = 127  # so that a step is 1
    tiles = ternary(Coded(codes, torch.ones(50, 1, dtype=torch.float16)))
    found = times(native, tiles, (50, 777), x.float(), avx2)
    assert torch.equal(found.long(), codes.long() @ x)


def test_halves_are_rounded_as_torch_does(native: Any) -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    tiles = ternary(Coded(torch.eye(7, dtype=torch.int8), torch.ones(7, 1, dtype=torch.float16)))
    for avx2 in (True, False):
        assert torch.equal(times(native, tiles, (7, 7), x, avx2), rounded_inputs(x))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("codec", ["int4g32", "int4g64", "int4", "int3g32", "ternary"])
def test_products_of_four_bits_are_those_of_torch(native: Any, codec: str, shape: Any) -> None:
    weight, x = decoded(codec, shape), torch.randn(shape[1])
    tiles = tiles_of("w", weight, packing(codec, shape, 0))
    found = [times(native, tiles, shape, x, avx2) for avx2 in (True, False)]
    wanted = F.linear(x.double(), weight.double())
    # Where a row is not a whole number of groups, the codec makes narrower ones.
    groups = find_codec(codec).groups(shape[1])
    narrower = groups > 1 and -(-shape[1] // groups) % 32
    assert tiles.kind == (FLOATS if narrower else NIBBLES) and torch.equal(*found)
    assert torch.allclose(found[0].double(), wanted, rtol=1e-5, atol=1e-5 * float(x.norm()))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("codec", ["step1.5", "step0.8", "step8"])
def test_steps_are_found_again(native: Any, codec: str, shape: Any) -> None:
    weight, x = decoded(codec, shape), torch.randn(shape[1])
    tiles = tiles_of("w", weight, packing(codec, shape, 8))
    wanted = F.linear(x.double(), weight.double())
    found = [times(native, tiles, shape, x, avx2) for avx2 in (True, False)]
    assert tiles.kind == NIBBLES and torch.equal(*found)
    assert torch.allclose(found[0].double(), wanted, rtol=1e-5, atol=1e-5 * float(x.norm()))


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ([[0, 0, 0], [2, -3, 0], [3, -5, 7]], NIBBLES),
        ([[7, 0, 0], [-7, 6, 5], [7, -8, 6]], NIBBLES),
        ([[10, -12, 0], [2, 4, 6], [1, 0, 0]], NIBBLES),
        ([[10, -11, 0], [1, 1, 1], [1, 0, 0]], FLOATS),
        ([[1, 8, 0], [1, 1, 1], [1, 0, 0]], FLOATS),
        ([[1, -127, 0], [1, 1, 1], [0, 0, 0]], FLOATS),
    ],
)
@pytest.mark.parametrize("exponent", [-112, -27, 3, 100])
def test_a_row_may_have_no_single_step(
    native: Any, codes: list[list[int]], kind: int, exponent: int
) -> None:
    scale = find_codec("step1").unpack_scales(torch.tensor([[exponent + 128]], dtype=torch.uint8))
    weight, x = torch.tensor(codes).float() * scale.float(), torch.eye(3)
    tiles = tiles_of("w", weight, packing("step1", (3, 3), 8))
    columns = [times(native, tiles, (3, 3), row, True) for row in x]
    assert tiles.kind == kind and torch.equal(torch.stack(columns, dim=1), weight)


@pytest.mark.parametrize("change", [0.01, torch.nan, torch.inf])
def test_steps_that_were_changed_are_kept_as_floats(change: float) -> None:
    weight = decoded("step1.5", (16, 32))
    weight[3, 4] += change
    assert tiles_of("w", weight, packing("step1.5", (16, 32), 8)).kind == FLOATS


@pytest.mark.parametrize("codec", ["int8", "int8g32", "int4g20"])
def test_what_has_no_tiles_is_kept_as_floats(native: Any, codec: str) -> None:
    weight, x = decoded(codec, (21, 75)), torch.randn(75)
    tiles = tiles_of("w", weight, packing(codec, (21, 75), 8))
    found = [times(native, tiles, (21, 75), x, avx2) for avx2 in (True, False)]
    assert tiles.kind == FLOATS and torch.equal(*found)
    assert torch.allclose(found[0], weight @ x, rtol=1e-5, atol=1e-5)


def test_the_embedding_rounds_no_inputs() -> None:
    weight = decoded("ternary", (16, 32))
    of = packing("ternary", (16, 32), 8, "embedding.weight")
    assert tiles_of("embedding.weight", weight, of).kind == NIBBLES


def test_a_ternary_matrix_that_was_changed_is_refused() -> None:
    weight = decoded("ternary", (16, 32))
    weight[3, 4] += 0.01
    with pytest.raises(ConfigError, match="w is not ternary"):
        tiles_of("w", weight, packing("ternary", (16, 32), 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("avx2", [True, False])
def test_inputs_that_are_not_finite_give_nan(native: Any, bad: float, avx2: bool) -> None:
    tiles = tiles_of("w", decoded("ternary", (9, 40)), packing("ternary", (9, 40), 8))
    x = torch.ones(40)
    x[39] = bad
    assert bool(times(native, tiles, (9, 40), x, avx2).isnan().all())


def test_zeros_give_zeros(native: Any) -> None:
    tiles = tiles_of("w", decoded("ternary", (9, 40)), packing("ternary", (9, 40), 8))
    assert torch.equal(times(native, tiles, (9, 40), torch.zeros(40), True), torch.zeros(9))
