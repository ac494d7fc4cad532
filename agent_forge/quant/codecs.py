"""Codecs: from a matrix of weights to small whole numbers and scales, and back.

A codec goes row by row, a row being what makes one output; scales fit fp16. Encoding what a codec
of ternary weights or integers has decoded (`before` it, for two ternary ones) gives the same codes
and scales again, as long as scales are above the smallest ordinary number of fp16 (6e-5). Steps are
chosen by the spread of a row, so those are rounded anew.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.quant import bits, entropy

INTEGERS = re.compile(r"int([2-8])(?:g([1-9]\d{0,3}))?")
# By how much of a row's mean size a weight must exceed 0; and whether the scale is the one with the
# least squared error, or the mean. The second and third are the specification's and BitNet's.
TERNARY = {"ternary": (0.75, True), "ternary_spec": (0.3, False), "ternary_bitnet": (0.5, False)}
STEPS = re.compile(r"step(\d{1,2}(?:\.\d{1,4})?)")
FINEST, COARSEST = 0.04, 8.0  # steps: beyond, rows clip or are nearly all 0
NAMES = (
    "ternary, ternary_spec, ternary_bitnet, integers such as int8, int4g32 (groups of 32), or"
    f" steps of {FINEST} to {COARSEST:g} times the spread of a row, entropy-coded, such as step1.5"
)
# Scales of the step codec: 2^(k / 8), so that a byte has one; 0 is that of a row without weights.
FINEST_SCALE, SCALES_OF_TWO = -112, 8
MANTISSAS = torch.tensor([2 ** (i / 8) for i in range(8)]).half().float()


class Coded(NamedTuple):
    """A matrix as codes of int8, in its shape, and scales of fp16, one a group of a row."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Codec(ABC):
    """A way to write a matrix; `name` says which in settings and files."""

    name: str

    @abstractmethod
    def quantise(self, weight: Tensor) -> Coded: ...

    @abstractmethod
    def groups(self, columns: int) -> int:
        """The scales of a row."""

    @abstractmethod
    def fits(self, size: int, count: int) -> bool:
        """True if so many codes may take so many bytes."""

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Codes as bytes."""

    @abstractmethod
    def unpack(self, data: Tensor, count: int) -> Tensor:
        """So many codes from bytes; ValueError if they hold anything else."""

    def pack_scales(self, scales: Tensor) -> Tensor:
        """Scales as they are written."""
        return scales

    def unpack_scales(self, written: Tensor) -> Tensor:
        """Scales that were written; ValueError if they are impossible."""
        if not bool(written.isfinite().all()):
            raise ValueError("a scale is not finite")
        return written

    @property
    def scale_type(self) -> torch.dtype:
        """What scales are written as."""
        return torch.float16

    def restore(self, coded: Coded) -> Tensor:
        """The matrix that codes and scales stand for, in fp32."""
        columns, groups = coded.codes.shape[1], coded.scales.shape[1]
        if groups == 1:
            return coded.codes.float() * coded.scales.float()
        width = -(-columns // groups)
        scales = coded.scales.float().repeat_interleave(width, dim=1)[:, :columns]
        return coded.codes.float() * scales

    def rounded(self, weight: Tensor) -> Tensor:
        """The matrix as it is after it was written and read."""
        return self.restore(self.quantise(weight)).to(weight.dtype)

    def before(self, decoded: Tensor) -> Tensor:
        """Weights that are rounded to a matrix that was read; it itself, of most codecs."""
        return decoded


@dataclass(frozen=True)
class TernaryCodec(Codec):
    """-1, 0 and 1 with a scale for each row."""

    threshold: float = 0.75
    least_squares: bool = True

    def quantise(self, weight: Tensor) -> Coded:
        sizes = weight.float().abs()
        mean = sizes.mean(dim=1, keepdim=True)
        kept = sizes > self.threshold * mean
        codes = torch.where(kept, weight.sign(), 0).to(torch.int8)
        if self.least_squares:
            mean = (sizes * kept).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(1)
        return Coded(codes, mean.half())

    def before(self, decoded: Tensor) -> Tensor:
        if self.least_squares:
            return decoded
        # A scale that is the mean of a row would shrink by the share of its zeros.
        share = (decoded != 0).to(decoded.dtype).mean(dim=1, keepdim=True)
        return decoded / torch.where(share > 0, share, 1)

    def groups(self, columns: int) -> int:
        return 1

    def fits(self, size: int, count: int) -> bool:
        return size == -(-count // bits.TRITS)

    def pack(self, codes: Tensor) -> Tensor:
        return torch.from_numpy(bits.pack_trits(codes.cpu().numpy()))

    def unpack(self, data: Tensor, count: int) -> Tensor:
        if data.numel() and int(data.max()) > bits.LARGEST:
            raise ValueError(f"a byte of trits is above {bits.LARGEST}")
        return torch.from_numpy(bits.unpack_trits(data.numpy(), count))


@dataclass(frozen=True)
class IntegerCodec(Codec):
    """Whole numbers of some bits; the largest weight of a group gets the lowest one."""

    bits: int = 4
    group: int = 0  # columns that share a scale, at most; 0: all of a row

    def quantise(self, weight: Tensor) -> Coded:
        rows, columns = weight.shape
        groups, lowest = self.groups(columns), 1 << self.bits - 1
        width = -(-columns // groups)
        padded = torch.nn.functional.pad(weight.float(), (0, groups * width - columns))
        cells = padded.view(rows, groups, width)
        largest = cells.gather(2, cells.abs().argmax(dim=2, keepdim=True))
        scales = (largest / -lowest).half()
        divisors = scales.float().where(scales != 0, torch.ones(()))
        codes = (cells / divisors).round().clamp(-lowest, lowest - 1) * (scales != 0)
        codes = codes.to(torch.int8).view(rows, -1)[:, :columns]
        return Coded(codes.contiguous(), scales.squeeze(2))

    def groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def fits(self, size: int, count: int) -> bool:
        return size == bits.packed_size(count, self.bits)

    def pack(self, codes: Tensor) -> Tensor:
        return torch.from_numpy(bits.pack_bits(codes.cpu().numpy(), self.bits))

    def unpack(self, data: Tensor, count: int) -> Tensor:
        return torch.from_numpy(bits.unpack_bits(data.numpy().astype(np.uint8), self.bits, count))


@dataclass(frozen=True)
class StepCodec(Codec):
    """Whole steps of so many times the spread of a row, entropy-coded: the coarser the step, the
    fewer bits, without a lowest number of them."""

    step: float = 1.0

    def quantise(self, weight: Tensor) -> Coded:
        wide = weight.float()
        spread = wide.square().mean(dim=1, keepdim=True).sqrt()
        steps = _powers(_exponents(self.step * spread))
        divisors = torch.where(steps > 0, steps, 1)
        codes = (wide / divisors).round().clamp(-127, 127) * (steps > 0)
        # With coarse steps, what is a step away lies nearer to 0 than the step itself.
        fitted = (wide * codes).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True).clamp(1)
        return Coded(codes.to(torch.int8), _powers(_exponents(fitted)).half())

    def groups(self, columns: int) -> int:
        return 1

    def fits(self, size: int, count: int) -> bool:
        return entropy.HEAD < size <= 2 * count + 4 * entropy.lanes_of(count) + 1024

    def pack(self, codes: Tensor) -> Tensor:
        return torch.from_numpy(entropy.encode(codes.cpu().numpy()))

    def unpack(self, data: Tensor, count: int) -> Tensor:
        return torch.from_numpy(entropy.decode(data.numpy(), count))

    def pack_scales(self, scales: Tensor) -> Tensor:
        return (_exponents(scales) + 128).to(torch.uint8)

    def unpack_scales(self, written: Tensor) -> Tensor:
        exponents = written.to(torch.int32) - 128
        if bool(((exponents < FINEST_SCALE) & (exponents != -128)).any()):
            raise ValueError("a scale is impossible")
        return _powers(exponents).half()

    @property
    def scale_type(self) -> torch.dtype:
        return torch.uint8


def _exponents(scales: Tensor) -> Tensor:
    """Of positive numbers k such that 2^(k / 8) is near; of others -128."""
    found = (torch.log2(scales.float().clamp(min=1e-30)) * SCALES_OF_TWO).round().to(torch.int32)
    return torch.where(scales > 0, found.clamp(FINEST_SCALE, 127), -128)


def _powers(exponents: Tensor) -> Tensor:
    """2^(k / 8), as C has it too; 0 for -128."""
    whole = torch.div(exponents, SCALES_OF_TWO, rounding_mode="floor")
    values = torch.ldexp(MANTISSAS[(exponents - SCALES_OF_TWO * whole).long()], whole)
    return torch.where(exponents > -128, values, torch.zeros(()))


def find_codec(name: str) -> Codec:
    """The codec of a name."""
    if name in TERNARY:
        return TernaryCodec(name, *TERNARY[name])
    if (match := STEPS.fullmatch(name)) and FINEST <= float(match[1]) <= COARSEST:
        return StepCodec(name, float(match[1]))
    if not (match := INTEGERS.fullmatch(name)):
        raise ConfigError(f"there is no codec {name!r}", hint=f"codecs are {NAMES}")
    return IntegerCodec(name, int(match[1]), int(match[2] or 0))
