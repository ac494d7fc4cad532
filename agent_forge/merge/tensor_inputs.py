"""What one output tensor is made of, read run by run in fp32, and what is measured on the way.

Inner products and trim thresholds need a whole tensor; they are computed in runs too and kept in a
cache for as long as the parents live, because a search asks for the same ones again and again.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

RUN = 1 << 17  # elements at a time: three parents and scratch fit into a second-level cache
DRAWS_A_STEP = 16  # 16-bit numbers in one step of the Philox counter
Cache = dict[tuple[Any, ...], Any]
T = TypeVar("T")


@dataclass(eq=False)
class TensorInputs:
    """The inputs of one output tensor as flat tensors in their storage type, and perhaps a base."""

    tensors: Sequence[Tensor]
    base: Tensor | None = None
    centred: bool = False  # the mean of the inputs is the base
    name: str = ""
    seed: int = 0
    read_as: torch.dtype | None = None  # rounds every input first, as a recipe's `dtype` asks
    cache: Cache = field(default_factory=dict)
    key: tuple[Any, ...] = ()  # of the inputs in the cache
    whole_model: np.ndarray | None = None  # inner products to be used instead of the tensor's own

    def __post_init__(self) -> None:
        self.shape = (self.tensors[0] if self.base is None else self.base).shape
        self.numel = self.shape.numel()
        self.tensors = [tensor.detach().contiguous().reshape(-1) for tensor in self.tensors]
        self.base = None if self.base is None else self.base.detach().contiguous().reshape(-1)

    def read(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """A run of a tensor as a new fp32 tensor."""
        part = tensor[start:stop]
        return part.to(self.read_as or part.dtype).to(torch.float32, copy=True)

    def run(self, start: int) -> tuple[list[Tensor], Tensor | None]:
        """The inputs and the base from `start` on."""
        parts = [self.read(tensor, start, start + RUN) for tensor in self.tensors]
        if self.base is not None:
            return parts, self.read(self.base, start, start + RUN)
        return parts, mean(parts) if self.centred else None

    def runs(self) -> Iterator[tuple[list[Tensor], Tensor | None]]:
        return map(self.run, range(0, self.numel, RUN))

    def deltas(self, i: int) -> Iterator[Tensor]:
        """The difference of input i from the base, run by run."""
        for start in range(0, self.numel, RUN):
            if self.base is None:
                parts, base = self.run(start)
                assert base is not None
                yield parts[i].sub_(base)
            else:
                delta = self.read(self.tensors[i], start, start + RUN)
                yield delta.sub_(self.read(self.base, start, start + RUN))

    def rows(self) -> Iterator[tuple[int, list[Tensor], Tensor | None]]:
        """Runs of whole vectors along the last axis, as matrices, with the number of the first."""
        width = self.shape[-1] if len(self.shape) > 1 else self.numel
        step = max(1, RUN // max(1, width)) * width
        for start in range(0, self.numel, step):
            stop = start + step
            parts = [self.read(tensor, start, stop).view(-1, width) for tensor in self.tensors]
            base = None if self.base is None else self.read(self.base, start, stop).view(-1, width)
            yield start // width, parts, base

    def matrices(self) -> tuple[Tensor | None, list[Tensor]]:
        """The base and the inputs as whole matrices, in double precision."""
        tensors = [*([] if self.base is None else [self.base]), *self.tensors]
        whole = [self.read(t, 0, self.numel).double().view(self.shape) for t in tensors]
        return (None, whole) if self.base is None else (whole[0], whole[1:])

    def anchored(self) -> np.ndarray:
        """Inner products, in fp64, of the base (or the first input) and the differences from it."""
        # From differences, small angles stay exact.

        def measure() -> np.ndarray:
            total: np.ndarray = np.zeros(())
            for parts, base in self.runs():
                anchor, *others = parts if base is None else [base, *parts]
                rows = torch.stack([anchor, *(part.sub_(anchor) for part in others)])
                total = total + (rows @ rows.T).double().numpy()
            return total

        return self.once(("anchored",), measure) if self.whole_model is None else self.whole_model

    def once(self, what: tuple[Any, ...], measure: Callable[[], T]) -> T:
        """What was measured on these inputs, from the cache if they have a key in it."""
        key = (*what, *self.key)
        if not self.key or key not in self.cache:
            self.cache[key] = measure()
        measured: T = self.cache[key]
        return measured

    def gram(self) -> np.ndarray:
        """Inner products of the inputs, or of their differences from the base if there is one."""
        anchored = self.anchored()
        if self.base is not None or self.centred:
            return anchored[1:, 1:]
        change = np.eye(len(anchored))
        change[1:, 0] = 1.0  # x_i = x_0 + (x_i - x_0)
        return np.asarray(change @ anchored @ change.T)

    def mask(self, name: str, start: int, density: float) -> Tensor:
        return dare_mask(self.seed, name, start, min(RUN, self.numel - start), density)

    def magnitudes(self, i: int, ranks: tuple[int, ...]) -> list[float]:
        """The magnitudes of task vector i at these ranks, counted from the smallest."""
        return self.once(("magnitudes", i, ranks), lambda: select(lambda: self.deltas(i), ranks))


def mean(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))


def select(runs: Callable[[], Iterable[Tensor]], ranks: Sequence[int]) -> list[float]:
    """The values at these ranks among all magnitudes, exactly, by counting instead of sorting."""
    # The bits of a positive float grow with it: one pass counts the upper half of the bits, another
    # one the lower half of those that share the upper half wanted. `runs()` starts a pass.
    upper = np.zeros(1 << 15, dtype=np.int64)
    for delta in runs():
        upper += np.bincount(_bits(delta) >> 16, minlength=1 << 15)
    below = np.concatenate(([0], np.cumsum(upper)))
    bins = [int(np.searchsorted(below, rank, side="right")) - 1 for rank in ranks]
    lower = {b: np.zeros(1 << 16, dtype=np.int64) for b in bins}
    for delta in runs():
        bits = _bits(delta)
        for b, counts in lower.items():
            counts += np.bincount(bits[bits >> 16 == b] & 0xFFFF, minlength=1 << 16)
    values = []
    for rank, b in zip(ranks, bins, strict=True):
        low = int(np.searchsorted(np.cumsum(lower[b]), rank - below[b], side="right"))
        values.append(float(np.array(b << 16 | low, dtype=np.int32).view(np.float32)))
    return values


def _bits(delta: Tensor) -> np.ndarray:
    return np.asarray(delta.abs().view(torch.int32).numpy())


@lru_cache(maxsize=4096)
def _mask_key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")


def kept_share(density: float) -> float:
    """The share that a mask of this density keeps, which is a multiple of 2^-16."""
    return max(1, round(density * 65536)) / 65536


def draws(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """A random number of 16 bits for each element from `start` on."""
    # Their generator is counter-based and keyed by seed and name, so element k always gets number
    # k: whoever asks, in whatever order.
    step, skip = divmod(start, DRAWS_A_STEP)
    generator = np.random.Philox(key=_mask_key(seed, name), counter=step)
    words = generator.random_raw(-(-(skip + count) // DRAWS_A_STEP) * 4)
    return np.asarray(words.astype("<u8", copy=False).view("<u2")[skip : skip + count])


def dare_mask(seed: int, name: str, start: int, count: int, density: float) -> Tensor:
    """1 for the elements from `start` on that are kept, else 0."""
    if density <= 0:
        return torch.zeros(count)
    kept = draws(seed, name, start, count) < round(kept_share(density) * 65536)
    return torch.from_numpy(kept.view(np.uint8)).float()  # whole numbers convert faster than bools
