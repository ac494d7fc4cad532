"""A number belongs to the file it stands beside: a model that was written is measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from agent_forge.errors import PhaseFailed
from agent_forge.evals.model_under_test import ModelUnderTest, open_model_under_test

TOLERANCE = 1e-4  # relative: fp32 sums differ in their last bits from batch to batch


def confirm(
    folder: Path, measure: Callable[[ModelUnderTest], Sequence[float]], recorded: Sequence[float]
) -> None:
    """Open a model from the disk; on a few items it has to score what was recorded of it."""
    found = np.asarray(measure(open_model_under_test(folder)), float)
    expected = np.asarray(recorded, float)
    if found.shape == expected.shape and np.allclose(found, expected, TOLERANCE, TOLERANCE):
        return
    raise PhaseFailed(
        f"{folder} does not score what was measured: {found.sum():.6g} nats on"
        f" {len(expected)} items, {expected.sum():.6g} were recorded",
        hint="nothing is handed over; check the disk and the memory of this machine, run it again",
    )
