"""The training loop: batches in, updates out, with evaluation, early stop and divergence handled.

It runs on the steps of a phase context, which brings checkpoints, exact resume and the clean stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent_forge.contract.phase import PhaseContext, Stateful
from agent_forge.errors import Diverged
from agent_forge.train.trainer import Batch, Trainer


@dataclass
class Evaluations:
    """Looks at the model now and then; training stops when `patience` looks brought no gain."""

    measure: Callable[[], float]  # a loss: lower is better
    every_steps: int
    patience: int = 0
    min_gain: float = 0.0
    best: float | None = None
    without_gain: int = 0

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"an evaluation every {self.every_steps} steps")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "without_gain": self.without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.without_gain = state["best"], state["without_gain"]

    def look(self) -> float:
        """Measure, and remember whether it is better than before."""
        value = self.measure()
        if self.best is None or value < self.best - self.min_gain:
            self.best, self.without_gain = value, 0
        else:
            self.without_gain += 1
        return value

    @property
    def enough(self) -> bool:
        return bool(self.patience) and self.without_gain >= self.patience


def fit(
    ctx: PhaseContext,
    trainer: Trainer,
    next_batch: Callable[[int], Batch],
    *,
    stage: str = "main",
    parts: dict[str, Stateful] | None = None,
    evaluations: Evaluations | None = None,
    log_every: int = 1,
) -> int:
    """Train for `trainer.total` steps, or until evaluations bring no gain; returns how many
    there were.

    `next_batch(step)` gives the batch; what it depends on is in `parts` or in a generator of the
    context. Metrics are logged as <stage>/train/<name>.
    """
    every = {**trainer.parts, **(parts or {})}
    if evaluations:
        every["evaluations"] = evaluations
    for step in ctx.steps(trainer.total, every, stage, rolls_back=True):
        try:
            values = trainer.step(step, next_batch(step))
        except Diverged as error:
            factor = trainer.factor
            ctx.roll_back(str(error))
            trainer.halve_rate(factor)
            continue
        if step % log_every == 0 or step == trainer.total:
            ctx.log(step, {f"{stage}/train/{name}": value for name, value in values.items()})
        if evaluations and step % evaluations.every_steps == 0:
            ctx.log(step, {f"{stage}/train/evaluation_loss": evaluations.look()})
            if evaluations.enough:
                break
    return trainer.steps_seen
