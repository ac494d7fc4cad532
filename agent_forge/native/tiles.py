"""Matrices in the order in which C reads them (network.h): 8 rows side by side, a word of each."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.quant.codecs import Coded, StepCodec, TernaryCodec
from agent_forge.quant.packed import PackedMatrix, Packing

FLOATS, TERNARY, NIBBLES = range(3)
ROWS = 8  # of a tile
TRITS = np.array([8 * (k % 4) + 2 * (k // 4) for k in range(16)], np.uint32)  # bits of a word
FOURS = np.array([4 * k for k in range(8)], np.uint32)
SCALED = 32  # columns that share a scale
MOST_STEPS = 7  # of a nibble, from 0 on
EMBEDDING = "embedding.weight"  # of its layer the inputs are tokens: nothing is rounded


class Tiles(NamedTuple):
    """A matrix or vector for C; the sizes of both arrays follow from its kind and shape."""

    kind: int
    data: NDArray[np.float32] | NDArray[np.uint32]
    scales: NDArray[np.float32] | None = None


def tiles_of(name: str, weight: Tensor, packing: Packing) -> Tiles:
    """A decoded weight in the shortest form in which C computes what torch would."""
    matrix = packing.matrices.get(name)
    if name in packing.with_rounded_inputs and name != EMBEDDING:
        return ternary(_again(name, weight))
    if matrix is not None and isinstance(matrix.codec, TernaryCodec):
        return nibbles(_again(name, weight)) or floats(weight)
    if matrix is None:
        return floats(weight)
    found = _steps(weight) if isinstance(matrix.codec, StepCodec) else _coded(matrix, weight)
    return (nibbles(found) if found else None) or floats(weight)


def _again(name: str, weight: Tensor) -> Coded:
    """The codes and scales of a decoded ternary matrix, whatever threshold it was made with."""
    coded = Coded(weight.sign().to(torch.int8), weight.abs().amax(dim=1, keepdim=True).half())
    if not torch.equal(coded.codes * coded.scales.float(), weight):
        raise ConfigError(f"{name} is not ternary: it was changed since it was unpacked")
    return coded


def _coded(matrix: PackedMatrix, weight: Tensor) -> Coded | None:
    """The codes and scales of a decoded matrix; None if its codec does not find them again."""
    coded = matrix.codec.quantise(weight)
    return coded if torch.equal(matrix.codec.restore(coded), weight) else None


def _steps(weight: Tensor) -> Coded | None:
    """Codes of four bits and scales that give a matrix exactly: the smallest number of a row is
    one step, or two, or three, ...; None if there are none."""
    sizes = weight.float().abs()
    smallest = sizes.where(sizes > 0, torch.inf).amin(dim=1, keepdim=True)
    smallest = scales = smallest.where(smallest.isfinite(), 1)
    for parts in range(2, MOST_STEPS + 2):
        codes = (weight / scales).round()
        fits = (codes * scales == weight).all(dim=1, keepdim=True)
        if bool(fits.all()):
            return Coded(codes.to(torch.int8), scales) if float(codes.abs().max()) < 128 else None
        scales = torch.where(fits, scales, smallest / parts)
    return None


def floats(tensor: Tensor) -> Tiles:
    """A copy: whoever changes the tensor does not change the network that was opened."""
    return Tiles(FLOATS, np.array(tensor.detach().float().cpu().numpy(), order="C"))


def ternary(coded: Coded) -> Tiles:
    """Two bits a code, with a scale a row."""
    scales = np.zeros(-(-len(coded.codes) // ROWS) * ROWS, np.float32)
    scales[: len(coded.codes)] = coded.scales.float().numpy()[:, 0]
    return Tiles(TERNARY, _words(coded.codes.numpy() + 1, TRITS, len(TRITS), fill=1), scales)


def nibbles(coded: Coded) -> Tiles | None:
    """Four bits a code, with a scale for 32 columns; None if it does not fit that."""
    codes, scales = coded.codes.numpy(), coded.scales.float().numpy()
    (rows, columns), groups = codes.shape, scales.shape[1]
    width, chunks = -(-columns // groups), -(-columns // SCALED)
    if codes.min() < -8 or codes.max() > 7 or (groups > 1 and width % SCALED):
        return None
    spread = np.repeat(scales, chunks if groups == 1 else width // SCALED, axis=1)[:, :chunks]
    padded = np.zeros((-(-rows // ROWS) * ROWS, chunks), np.float32)
    padded[:rows] = spread
    return Tiles(NIBBLES, _words(codes & 15, FOURS, SCALED, fill=0), _tiled(padded))


def _words(
    codes: NDArray[np.int8], shifts: NDArray[np.uint32], step: int, fill: int
) -> NDArray[np.uint32]:
    """Codes at these bits of words; columns are filled up to a multiple of `step`."""
    rows, columns = codes.shape
    padded = np.full((-(-rows // ROWS) * ROWS, -(-columns // step) * step), fill, np.uint32)
    padded[:rows, :columns] = codes
    cells = padded.reshape(len(padded), -1, len(shifts))
    return _tiled(np.bitwise_or.reduce(cells << shifts, axis=2))


def _tiled(rows: NDArray[Any]) -> NDArray[Any]:
    """Of every 8 rows the first columns, then the second, and so on."""
    return np.ascontiguousarray(rows.reshape(-1, ROWS, rows.shape[1]).transpose(0, 2, 1))
