"""Codes in as few bits as their distribution allows: a range coder by asymmetric numerals (rANS).

    lowest code (1 byte, signed), number of codes - 1 (1 byte), how often each comes (2 bytes each,
    of 2^14), the state of each lane (4 bytes each), words (2 bytes each); all little-endian

Symbol i belongs to lane i % lanes. Lanes share the words in the order in which they need them, so
that numpy reads a row of them at once and a plain loop reads the same. Integers alone: what is
written once reads the same everywhere, which coders that take probabilities as floats cannot say.
"""

import numpy as np
from numpy.typing import NDArray

PRECISION = 14  # bits of a frequency
TOTAL = 1 << PRECISION
LOWEST_STATE = 1 << 16
# Symbols of a lane, about: each lane costs two bytes, each row of lanes ten calls of numpy, so that
# large matrices have more lanes (0.3 % more bytes, a third less time).
ROWS, ROWS_OF_LARGE, LARGE = 2048, 1280, 1 << 17
HEAD = 2  # bytes in front of the frequencies
# As arrays: numpy takes longer to make one of a plain number than to compute with a row of lanes.
SLOT, SHIFT, LEAST, WORD = (np.array(n) for n in (TOTAL - 1, PRECISION, LOWEST_STATE, 16))
Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]


def lanes_of(count: int) -> int:
    return max(1, count // (ROWS if count < LARGE else ROWS_OF_LARGE))


def frequencies(counts: Counts) -> Counts:
    """Counts scaled to add up to TOTAL; what comes at all has at least 1."""
    scaled: Counts = np.maximum(counts * TOTAL // max(1, counts.sum()), counts > 0)
    while (left := TOTAL - int(scaled.sum())) != 0:
        largest = int(scaled.argmax())  # where one more or less costs least
        scaled[largest] += max(left, 1 - int(scaled[largest]))
    return scaled


def encode(codes: NDArray[np.int8]) -> Bytes:
    """Codes as bytes."""
    flat = codes.reshape(-1).astype(np.int64)
    lowest = int(flat.min()) if len(flat) else 0
    symbols = flat - lowest
    freq = frequencies(np.bincount(symbols, minlength=1))
    start = np.cumsum(freq) - freq
    lanes = lanes_of(len(flat))
    states = np.full(lanes, LOWEST_STATE, np.int64)
    written: list[NDArray[np.uint16]] = []
    for at in range((len(flat) - 1) // lanes * lanes, -1, -lanes):
        row = symbols[at : at + lanes]
        own, often = states[: len(row)], freq[row]
        full = own >= often << (32 - PRECISION)
        written.append((own[full] & 0xFFFF).astype(np.uint16))
        own = np.where(full, own >> 16, own)
        states[: len(row)] = (own // often << PRECISION) + own % often + start[row]
    words = np.concatenate(written[::-1]) if written else np.zeros(0, np.uint16)
    head = np.array([lowest & 255, len(freq) - 1], np.uint8)
    parts = (freq.astype("<u2"), states.astype("<u4"), words.astype("<u2"))
    return np.concatenate([head, *(part.view(np.uint8) for part in parts)])


def decode(data: Bytes, count: int) -> NDArray[np.int8]:
    """So many codes from bytes; ValueError if these were not made of as many."""
    lowest, freq, states, words = _parts(data, lanes_of(count))
    lanes, place = len(states), 0
    often, start = np.repeat(freq, freq), np.repeat(np.cumsum(freq) - freq, freq)
    within = np.arange(TOTAL) - start
    slots = np.empty((-(-count // lanes), lanes), np.int64)
    for row, slot in enumerate(slots):  # in place: small arrays take as long as their calls do
        left = count - row * lanes
        own, slot = (states, slot) if left >= lanes else (states[:left], slot[:left])
        np.bitwise_and(own, SLOT, out=slot)
        own >>= SHIFT
        own *= often.take(slot)
        own += within.take(slot)
        (short,) = (own < LEAST).nonzero()
        end = place + len(short)
        if end > len(words):
            raise ValueError("its bytes end too soon")
        longer = own.take(short)
        longer <<= WORD
        longer |= words[place:end]
        own[short], place = longer, end
    if place != len(words) or bool((states != LOWEST_STATE).any()):
        raise ValueError("its bytes do not end where its codes do")
    codes = np.repeat(np.arange(len(freq)) + lowest, freq).astype(np.int8)
    return codes[slots.reshape(-1)[:count]]


def size_bits(codes: NDArray[np.int8]) -> float:
    """The bits that codes take, without the head: what `encode` writes, but for some bytes."""
    counts = np.bincount(codes.reshape(-1).astype(np.int64) + 128)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(frequencies(counts) / TOTAL)).sum())


def _parts(data: Bytes, lanes: int) -> tuple[int, Counts, Counts, Counts]:
    """Lowest code, frequencies, states and words of what `encode` wrote."""
    if len(data) < HEAD:
        raise ValueError("its bytes have no beginning")
    size = int(data[1]) + 1
    ends = HEAD + 2 * size, HEAD + 2 * size + 4 * lanes
    if len(data) < ends[1] or (len(data) - ends[1]) % 2:
        raise ValueError("its bytes are cut short")
    lowest, freq = int(data[:1].view(np.int8)[0]), _numbers(data[HEAD : ends[0]], "<u2")
    if lowest + size > 128 or int(freq.sum()) != TOTAL:
        raise ValueError("its codes or their frequencies are impossible")
    states = _numbers(data[ends[0] : ends[1]], "<u4")
    if bool((states < LOWEST_STATE).any()):
        raise ValueError("a state of it is impossible")
    return lowest, freq, states, _numbers(data[ends[1] :], "<u2")


def _numbers(data: Bytes, kind: str) -> Counts:
    return np.frombuffer(data.tobytes(), kind).astype(np.int64)
