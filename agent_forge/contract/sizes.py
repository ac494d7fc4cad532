"""Size classes of models, and what each implies. Sizes are detected at run time, never assumed."""

from __future__ import annotations

from typing import NamedTuple


class SizeClass(NamedTuple):
    """What a phase chooses by the size of the model it was handed."""

    name: str
    below_parameters: float
    batch_size: int
    target_compression: float
    target_sparsity: float
    ternary_threshold: float


SIZE_CLASSES = (
    SizeClass("tiny", 50e6, 32, 6.0, 0.25, 0.05),
    SizeClass("small", 500e6, 16, 8.0, 0.35, 0.10),
    SizeClass("medium", 2e9, 8, 10.0, 0.40, 0.15),
    SizeClass("large", float("inf"), 4, 12.0, 0.45, 0.20),
)


def size_class(parameters: int) -> SizeClass:
    """The class of a model with this many weights."""
    return next(entry for entry in SIZE_CLASSES if parameters < entry.below_parameters)
