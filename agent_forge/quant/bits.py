"""Small whole numbers into bytes and back: five trits a byte, or so many bits each."""

import numpy as np
from numpy.typing import NDArray

TRITS = 5  # in a byte: 3^5 = 243
POWERS = 3 ** np.arange(TRITS)
LARGEST = 3**TRITS - 1
Bytes = NDArray[np.uint8]


def pack_trits(codes: NDArray[np.int8]) -> Bytes:
    """Codes of -1, 0 and 1 in bytes; the last byte is filled up with zeros."""
    flat = codes.reshape(-1)
    rows = np.zeros((-(-len(flat) // TRITS), TRITS), np.uint8)
    rows.reshape(-1)[: len(flat)] = flat + 1
    rows.reshape(-1)[len(flat) :] = 1
    return (rows @ POWERS.astype(np.uint8)).astype(np.uint8)


def unpack_trits(data: Bytes, count: int) -> NDArray[np.int8]:
    """The first `count` codes of bytes, none of which may be above LARGEST."""
    table = (np.arange(LARGEST + 1)[:, None] // POWERS % 3 - 1).astype(np.int8)
    return table[data].reshape(-1)[:count]


def pack_bits(codes: NDArray[np.int8], bits: int) -> Bytes:
    """Signed codes of so many bits (1 to 8) without gaps; eight of them are `bits` bytes."""
    flat = codes.reshape(-1).astype(np.int16) + (1 << bits - 1)
    rows = np.zeros((-(-len(flat) // 8), 8), np.uint64)
    rows.reshape(-1)[: len(flat)] = flat
    words = np.bitwise_or.reduce(rows << _shifts(bits), axis=1)
    octets = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(octets).reshape(-1)[: packed_size(len(flat), bits)]


def unpack_bits(data: Bytes, bits: int, count: int) -> NDArray[np.int8]:
    """The first `count` codes of bytes."""
    octets = np.zeros((-(-count // 8), 8), np.uint8)
    filled = np.zeros(len(octets) * bits, np.uint8)
    filled[: len(data)] = data
    octets[:, :bits] = filled.reshape(-1, bits)
    words = octets.view("<u8")
    codes = (words >> _shifts(bits)) & np.uint64((1 << bits) - 1)
    return (codes.astype(np.int16) - (1 << bits - 1)).astype(np.int8).reshape(-1)[:count]


def packed_size(count: int, bits: int) -> int:
    """The bytes that so many codes take."""
    return -(-count * bits // 8)


def _shifts(bits: int) -> NDArray[np.uint64]:
    return np.arange(8, dtype=np.uint64) * np.uint64(bits)
