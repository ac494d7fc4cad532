"""Search along gradients: one backward pass says where every coefficient should go.

A step is taken from the best point so far, in Adam's direction. If the score improves, the point
moves there and the next step is longer; if not, it is shorter. So scores on all items decide, and a
gradient on some of them only proposes. After a few steps that did not help another gradient is
taken, on other items; after all items had their turn, directions are drawn around what they showed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agent_forge.search import operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import Candidate
from agent_forge.search.continuous import CandidateVector, Vector
from agent_forge.search.operators import Rows

LONGER, SHORTER = 1.6, 0.4
TRIES = 2  # steps along one gradient
SHORTEST, LONGEST = 0.01, 4.0  # of the first step; below that it begins anew
MOMENTUM, SQUARES, FLOOR = 0.6, 0.9, 0.3


class GradientDescent:
    """A point, the direction that gradients show from it, and a step length that scores decide."""

    def __init__(
        self,
        box: CandidateVector,
        point: Vector,
        key: str,
        step: float,
        turns: int,
        *seed: int | str,
    ) -> None:
        """After `turns` gradients all items have been looked at: then directions are drawn."""
        self.box, self.point, self.key, self.first, self.step = box, point, key, step, step
        self._turns, self._seed, self._trial = turns, seed, point
        self._tries = self._taken = self._drawn = 0
        self._gradients_here = 0  # at this point
        self._mean, self._square = np.zeros(len(point)), np.zeros(len(point))
        self._direction: Vector | None = None

    @property
    def needs_gradient(self) -> bool:
        return self._direction is None and self._gradients_here < self._turns

    def learn(self, rows: Rows) -> None:
        """Take in the gradient at the point; {} if there is none."""
        self._gradients_here += 1
        if not rows:
            return
        slope = self.box.vector(rows)
        self._taken += 1
        self._mean = MOMENTUM * self._mean + (1 - MOMENTUM) * slope
        self._square = SQUARES * self._square + (1 - SQUARES) * slope**2
        self._direction, self._tries = _unit(self._adam()), 0

    def _adam(self) -> Vector:
        """Adam's direction; numbers that hardly matter are not blown up."""
        mean = self._mean / (1 - MOMENTUM**self._taken)
        size = np.sqrt(self._square / (1 - SQUARES**self._taken))
        return _unit(mean / (size + FLOOR * float(np.sqrt(np.mean(size**2))) + 1e-30))

    def propose(self, origin: str) -> Candidate:
        if self._direction is None:
            self._drawn += 1
            drawn = operators.generator(*self._seed, self._drawn).standard_normal(len(self.point))
            self._direction = _unit(_unit(drawn) + (self._adam() if self._taken else 0.0))
            self._tries = 0
        self._trial = np.clip(self.point + self.step * self._direction, *self.box.bounds)
        return self.box.candidate(self._trial, origin)

    def observe(self, key: str, better: bool) -> None:
        """Move to the proposed candidate if it is better, and set the length of the next step."""
        if better:
            self.point, self.key = self._trial, key
            self._direction, self._gradients_here = None, 0
            self.step = min(self.step * LONGER, LONGEST * self.first)
            return
        self.step = self.step * SHORTER if self.step > SHORTEST * self.first else self.first
        self._tries += 1
        if self._tries == TRIES:
            self._direction = None


def _unit(direction: Vector) -> Vector:
    """The same direction, as long as one with ones everywhere."""
    length = math.sqrt(float(np.mean(direction**2)))
    return direction / length if length else direction


class GradientSearch(SearchStrategy):
    """Coefficients of every group, from the parents' average on."""

    mutating = ("gradient",)

    def _first_generation(self) -> None:
        box, s = CandidateVector(self._space), self.settings
        start, average = box.start(), self._survivors[-1]
        turns = s.gradient_turns
        self._descent = GradientDescent(
            box, start, average, s.gradient_step, turns, self.seed, "grad"
        )
        self._trial: str | None = None

    def _more(self) -> None:
        descent = self._descent
        while len(self._tried) < self.settings.population_size:
            if self._trial is not None:
                better = self.scores[self._trial] > self.scores[descent.key]
                descent.observe(self._trial, better)
                self._trial = None
            if descent.needs_gradient:
                if (rows := self._wanted_gradient(descent.key)) is None:
                    return
                descent.learn(rows)
            made = descent.propose("gradient step")
            self._trial = made.key
            if made.key not in self.scores:
                self._propose("gradient", made, (descent.key,))
                return

    def _strategy_record(self) -> dict[str, Any]:
        return {"step": self._descent.step}
