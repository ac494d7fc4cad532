"""The entropy coder: what is written is read, in hardly more bytes than the codes' information."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent_forge.quant import entropy


def drawn(count: int, step: float) -> NDArray[np.int8]:
    found = np.random.default_rng(0).normal(size=count) / step
    return np.clip(np.round(found), -127, 127).astype(np.int8)


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=300), st.integers(1, 40))
def test_any_codes_survive(codes: list[int], times: int) -> None:
    given_codes = np.array(codes * times, np.int8)
    read = entropy.decode(entropy.encode(given_codes), len(given_codes))
    assert read.dtype == np.int8 and np.array_equal(read, given_codes)


@pytest.mark.parametrize("step", [0.05, 0.5, 1.5, 3.2])
@pytest.mark.parametrize("count", [2047, 4097, 100_003, 140_001])
def test_it_takes_what_the_distribution_says(count: int, step: float) -> None:
    codes = drawn(count, step)
    data = entropy.encode(codes)
    assert np.array_equal(entropy.decode(data, count), codes)
    _, counts = np.unique(codes, return_counts=True)
    least = -(counts * np.log2(counts / count)).sum() / 8
    assert entropy.size_bits(codes) / 8 == pytest.approx(least, rel=0.01, abs=40)
    head = entropy.HEAD + 2 * (int(codes.max()) - int(codes.min()) + 1)
    assert least < len(data) < 1.01 * least + 3 * entropy.lanes_of(count) + head + 8


def test_frequencies_add_up_and_forget_nothing() -> None:
    for counts in ([1, 10**9], [5], [1] * 256, [10**6, *[1] * 200], [0, 3, 0, 2]):
        found = entropy.frequencies(np.array(counts))
        assert found.sum() == entropy.TOTAL and ((found > 0) == (np.array(counts) > 0)).all()


def test_lanes_read_as_a_plain_loop_does() -> None:
    """The way of the C program: symbol by symbol, each lane in its turn."""
    codes = drawn(10_001, 1.0)
    data = entropy.encode(codes)
    lowest, freq, states, words = entropy._parts(data, entropy.lanes_of(len(codes)))
    start, place, found = np.cumsum(freq) - freq, 0, []
    for i in range(len(codes)):
        lane = i % len(states)
        slot = int(states[lane]) & entropy.TOTAL - 1
        symbol = int(np.searchsorted(start, slot, side="right")) - 1
        state = int(freq[symbol]) * (int(states[lane]) >> entropy.PRECISION)
        state += slot - int(start[symbol])
        if state < entropy.LOWEST_STATE:
            state, place = state << 16 | int(words[place]), place + 1
        states[lane] = state
        found.append(symbol + lowest)
    assert len(states) > 1 and place == len(words) and found == codes.tolist()


def test_damaged_bytes_are_refused_or_decode_to_codes() -> None:
    rng, data = random.Random(0), entropy.encode(drawn(5000, 1.0))
    refused = 0
    for _ in range(400):
        broken = data.copy()[: rng.randrange(len(data)) if rng.random() < 0.3 else len(data)]
        for _ in range(rng.randrange(1, 5)):
            if len(broken):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            assert entropy.decode(broken, 5000).shape == (5000,)
        except ValueError:
            refused += 1
    assert refused > 350
    with pytest.raises(ValueError, match="end"):
        entropy.decode(data, 4999)
