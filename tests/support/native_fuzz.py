"""Networks of odd sizes for the native part, right and wrong ones, without torch.

    python tests/support/native_fuzz.py FOLDER SEED ROUNDS    # FOLDER holds the compiled module

Prints how many were read and how many refused. Anything but a plain error ends the process.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

REFUSED = (ValueError, TypeError, OverflowError, BufferError)
Tensors = dict[str, tuple[Any, ...]]


def matrix(draw: np.random.Generator, rows: int, columns: int, kind: int) -> tuple[Any, ...]:
    """A matrix of this kind (see network.h) with random content."""
    tiles, groups = -(-rows // 8), -(-columns // 32)
    if kind == 0:
        return 0, draw.standard_normal(rows * columns).astype(np.float32), None
    words = -(-columns // 16) if kind == 1 else groups * 4
    data = draw.integers(0, 2**32, tiles * words * 8, dtype=np.uint32)
    if kind == 1:
        data &= ~(data >> 1 & 0x55555555).astype(np.uint32) & 0xFFFFFFFF  # no 3: no trit
    scales = tiles * 8 * (1 if kind == 1 else groups)
    return kind, data, draw.random(scales).astype(np.float32)


def shapes(s: list[int]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """The matrices and vectors of a network of these sizes."""
    vocab, rank, d, layers, heads, hidden, channels, gate, trm, _, steps, _, width = s
    matrices = {
        "embedding.weight": (vocab, rank),
        "projection.weight": (d, rank),
        "projection.back": (rank, d),
        "memory.down.weight": (channels, d),
        "memory.up.weight": (d, channels),
        "gate.inner.weight": (gate, 2 * d),
        "gate.outer.weight": (d, gate),
        "recursion.refine.inner.weight": (trm, 3 * d),
        "recursion.refine.outer.weight": (d, trm),
        "recursion.update.inner.weight": (trm, 2 * d),
        "recursion.update.outer.weight": (d, trm),
    }
    inner = {"gate": gate, "recursion.refine": trm, "recursion.update": trm}
    vectors = {f"{name}.inner.bias": size for name, size in inner.items()}
    vectors |= {f"{name}.outer.bias": d for name in inner}
    vectors |= {"memory.decays": channels, "attention.frequencies": width // 2}
    vectors |= {"halting.head.bias": 1, "halting.shifts": steps, "halting.head.weight": d}
    for name in ("memory.norm.gain", "gate.norm.gain", "recursion.norm.gain", "norm.gain"):
        vectors[name] = d
    vectors |= {"recursion.y_start": d, "recursion.z_start": d}
    for i in range(layers):
        vectors |= {f"blocks.{i}.norm_{part}.gain": d for part in ("attention", "mlp")}
        own = heads * width
        matrices |= {f"blocks.{i}.attention.{part}.weight": (own, d) for part in ("q", "k", "v")}
        matrices[f"blocks.{i}.attention.out.weight"] = d, own
        matrices |= {f"blocks.{i}.mlp.{part}.weight": (hidden, d) for part in ("gate", "up")}
        matrices[f"blocks.{i}.mlp.down.weight"] = d, hidden
    return matrices, vectors


def network(draw: np.random.Generator) -> tuple[list[int], Tensors]:
    heads, half = (int(n) for n in draw.integers(1, 4, 2))
    sizes = [*(int(n) for n in draw.integers(1, 40, 12)), 2 * int(draw.integers(1, 9))]
    sizes[2], sizes[3], sizes[4] = 2 * heads * half * int(draw.integers(1, 9)), 2, heads
    sizes[9], sizes[10], sizes[11] = int(draw.integers(1, 12)), 2, 2
    matrices, vectors = shapes(sizes)
    found: Tensors = {n: matrix(draw, *s, int(draw.integers(0, 3))) for n, s in matrices.items()}
    found["embedding.weight"] = matrix(draw, *matrices["embedding.weight"], 2 * (sizes[0] % 2))
    found |= {name: matrix(draw, 1, size, 0) for name, size in vectors.items()}
    return sizes, found


def spoil(draw: np.random.Generator, sizes: list[int], tensors: Tensors) -> None:
    """Make one thing wrong."""
    name = str(draw.choice(sorted(tensors)))
    kind, data, scales = tensors[name]
    bad = data.copy()
    bad.view(np.uint32)[-1] = 0xFFFFFFFF  # NaN, or codes of which some are no trits
    wrong: list[tuple[Any, ...]] = [
        (kind, data[:-1], scales),
        (kind, np.concatenate([data, data]), scales),
        (kind, data.astype(np.float64), scales),
        (kind, np.repeat([data, data], 2)[::2], scales),
        (kind, memoryview(b"\0" + data.tobytes())[1:].cast(data.dtype.char), scales),
        (3, data, scales),
        (kind, None, scales),
        (kind, data, np.full(3, np.nan, np.float32)) if kind else (kind, bad, None),
        (kind, bad, scales) if kind == 1 else (1, data[:1], None),
        (kind, data),
    ]
    choice = int(draw.integers(0, len(wrong) + 2))
    if choice < len(wrong):
        tensors[name] = wrong[choice]
    elif choice == len(wrong):
        del tensors[name]
    else:
        sizes[int(draw.integers(0, 13))] = int(draw.choice([0, -1, 2**31, 2**62]))


def read(native: Any, draw: np.random.Generator, opened: Any, sizes: list[int]) -> None:
    """Read past the window in several pieces; and what does not fit."""
    vocab, d, layers, channels, window = sizes[0], sizes[4] * sizes[12], *sizes[3:7:3], sizes[9]
    past, memory = np.zeros(layers * 2 * window * d, "f"), np.zeros(4 * channels, "f")
    logits, position = np.empty(vocab, "f"), 0
    for count in (1, window, 3):
        tokens = draw.integers(0, vocab, count)
        steps = native.read(opened, past, memory, position, tokens, 0.5, logits)
        assert 1 <= steps <= sizes[10]
        position += count
    one = np.zeros(1, np.int64)
    good = [past, memory, position, one, 0.5, logits]
    for place, bad in (
        (0, past[:-1]),
        (0, np.zeros(0, "f")),
        (0, past[: layers * 2 * (window - 1) * d]),  # smaller than the window, and full
        (0, np.zeros(len(past) + layers * 2 * d, "f")),
        (1, memory[:-1]),
        (2, -1),
        (2, 2**63 - 1),
        (3, one[:0]),
        (3, one + vocab),
        (3, one - 1),
        (3, one.astype(np.int32)),
        (5, logits[:-1]),
        (5, logits.tobytes()),
    ):
        given = [bad if i == place else value for i, value in enumerate(good)]
        try:
            native.read(opened, *given)
        except REFUSED:
            continue
        raise AssertionError(f"argument {place} was taken: {bad}")


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import _native as native  # type: ignore[import-not-found]

    draw, counts = np.random.default_rng(int(sys.argv[2])), [0, 0]
    for number in range(int(sys.argv[3])):
        sizes, tensors = network(draw)
        spoilt = number % 3 > 0
        if spoilt:
            spoil(draw, sizes, tensors)
        try:
            opened = native.open(tuple(sizes), (0.5, 0.5), tensors, bool(number % 2))
        except REFUSED:
            counts[1] += 1
            assert spoilt, "a good network was refused"
            continue
        assert not spoilt, "a bad network was taken"
        read(native, draw, opened, sizes)
        counts[0] += 1
    sys.stdout.write("{} {}\n".format(*counts))


if __name__ == "__main__":
    main()
