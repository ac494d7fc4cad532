"""Codecs and bits: what is written is read, and rounding is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agent_forge.errors import ConfigError
from agent_forge.quant import bits
from agent_forge.quant.codecs import Codec, IntegerCodec, TernaryCodec, find_codec

NAMES = ("ternary", "ternary_spec", "ternary_bitnet", "int8", "int4g32", "int3g32", "int2g32")


def matrix(rows: int = 37, columns: int = 101) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    return weight


@pytest.mark.parametrize("name", [*NAMES, "int5g7", "int4", "step1.5", "step0.05", "step8"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (37, 101), (8, 64)])
def test_codes_survive_their_bytes(name: str, shape: tuple[int, int]) -> None:
    codec, weight = find_codec(name), matrix(max(4, shape[0]), shape[1])[: shape[0]]
    codes, scales = codec.quantise(weight)
    data, written = codec.pack(codes), codec.pack_scales(scales)
    assert data.dtype == torch.uint8 and codec.fits(len(data), codes.numel())
    assert written.dtype == codec.scale_type and torch.equal(codec.unpack_scales(written), scales)
    assert torch.equal(codec.unpack(data, codes.numel()).view(shape), codes)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_rounded_is_rounded_to_itself(name: str) -> None:
    codec, weight = find_codec(name), matrix()
    once = codec.rounded(weight)
    assert torch.equal(codec.rounded(codec.before(once)), once)
    assert torch.equal(codec.quantise(codec.before(once)).codes, codec.quantise(weight).codes)


def test_ternary_rows_have_the_scale_of_least_squares() -> None:
    codec, weight = find_codec("ternary"), matrix()
    coded = codec.quantise(weight)
    kept = weight.abs() > 0.75 * weight.abs().mean(1, keepdim=True)
    assert torch.equal(coded.codes != 0, kept) and coded.scales.shape == (37, 1)
    best = [
        float(row[own].abs().mean()) for row, own in zip(weight, kept, strict=True) if own.any()
    ]
    scales = [float(s) for s, own in zip(coded.scales, kept, strict=True) if own.any()]
    assert scales == pytest.approx(best, rel=1e-3)
    assert not coded.codes[3].any()


@pytest.mark.parametrize(
    ("name", "zeros", "error"),
    [("ternary", 0.45, 0.191), ("ternary_spec", 0.19, 0.280), ("ternary_bitnet", 0.31, 0.26)],
)
def test_on_gaussian_weights_zeros_and_errors_are_the_known_ones(
    name: str, zeros: float, error: float
) -> None:
    weight = torch.randn(200, 512, generator=torch.Generator().manual_seed(1))
    codec = find_codec(name)
    assert float((codec.quantise(weight).codes == 0).float().mean()) == pytest.approx(
        zeros, abs=0.01
    )
    lost = (codec.rounded(weight) - weight).square().mean() / weight.square().mean()
    assert float(lost) == pytest.approx(error, abs=0.01)


def test_integers_of_a_group_reach_its_largest_weight() -> None:
    codec, weight = find_codec("int4g32"), matrix(4, 64)
    rounded = codec.rounded(weight)
    for row, own in zip(weight.view(-1, 32), rounded.view(-1, 32), strict=True):
        place = row.abs().argmax()
        assert float(own[place]) == pytest.approx(float(row[place]), rel=1e-3, abs=1e-6)
        assert float((own - row).abs().max()) <= float(row.abs().max()) / 8 * 1.01
    assert codec.groups(64) == 2 and codec.groups(65) == 3 and find_codec("int8").groups(65) == 1


def test_three_bits_take_three_eighths_of_the_bytes() -> None:
    codes = np.random.default_rng(0).integers(-4, 4, 1001).astype(np.int8)
    data = bits.pack_bits(codes, 3)
    assert len(data) == bits.packed_size(1001, 3) == 376
    assert np.array_equal(bits.unpack_bits(data, 3, 1001), codes)


def test_a_byte_that_holds_no_trits_is_refused() -> None:
    codec = find_codec("ternary")
    for byte in range(243):
        codes = codec.unpack(torch.tensor([byte], dtype=torch.uint8), 5)
        assert int(codec.pack(codes)[0]) == byte
    with pytest.raises(ValueError, match="above 242"):
        codec.unpack(torch.tensor([243], dtype=torch.uint8), 5)


@pytest.mark.parametrize(
    "name",
    ["", "ternry", "int1", "int9", "int4g", "int4g0", "fp16", "int4g32x", "step0.01", "step9"],
)
def test_unknown_codecs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no codec"):
        find_codec(name)


def test_names_find_what_they_say() -> None:
    found: list[Codec] = [find_codec(name) for name in ("ternary_spec", "int3g64")]
    assert found == [TernaryCodec("ternary_spec", 0.3, False), IntegerCodec("int3g64", 3, 64)]


def test_a_coarser_step_takes_fewer_bits_and_loses_more() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
    bits_of, lost = [], []
    for step in (0.1, 0.5, 1.0, 1.5, 2.2, 3.2):
        codec = find_codec(f"step{step}")
        coded = codec.quantise(weight)
        bits_of.append(8 * len(codec.pack(coded.codes)) / weight.numel())
        lost.append(float((codec.restore(coded) - weight).square().mean()))
    assert bits_of == sorted(bits_of, reverse=True) and lost == sorted(lost)
    # Entropy and error of uniform steps on Gaussian weights, with the least-squares scale.
    assert bits_of[2] == pytest.approx(2.1, abs=0.05) and lost[2] == pytest.approx(0.08, abs=0.01)
    assert bits_of[4] == pytest.approx(1.14, abs=0.03) and lost[4] == pytest.approx(0.298, abs=0.01)


def test_scales_of_steps_are_powers_that_fit_a_byte() -> None:
    codec = find_codec("step1")
    weight = matrix() * torch.logspace(-6, 4, 37)[:, None]
    scales = codec.quantise(weight).scales.float()
    assert scales[3] == 0 and bool(scales.isfinite().all())
    exponents = 8 * torch.log2(scales[scales > 0])
    assert float((exponents - exponents.round()).abs().max()) < 0.01  # but for the rounding to fp16
    with pytest.raises(ValueError, match="a scale is impossible"):
        codec.unpack_scales(torch.tensor([[1]], dtype=torch.uint8))
