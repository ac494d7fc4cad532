"""Search along gradients: one backward pass says where every coefficient should go.

A step is taken from the best point so far, in Adam's direction. If the score improves, the point
moves there and the next step is longer; if not, it is shorter. So scores on all items decide, and a
gradient on some of them only proposes. After a few steps that did not help another gradient is
taken, on other items; after all items had their turn, ways are drawn around what they showed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agent_forge.search import operators
from agent_forge.search.base import Proposal, Rows, Search
from agent_forge.search.candidate import Candidate
from agent_forge.search.continuous import Box, Vector

LONGER, SHORTER = 1.6, 0.4
TRIES = 2  # steps along one gradient
SHORTEST, LONGEST = 0.01, 4.0  # of the first step; below that it begins anew
MOMENTUM, SQUARES, FLOOR = 0.6, 0.9, 0.3


class Descent:
    """A point, the way that gradients show from it, and a step length that scores decide."""

    def __init__(
        self, box: Box, point: Vector, key: str, step: float, turns: int, *seed: int | str
    ) -> None:
        """After `turns` gradients all items have been looked at: then ways are drawn."""
        self.box, self.point, self.key, self.first, self.step = box, point, key, step, step
        self._turns, self._seed = turns, seed
        self._trial = point
        self._tries = self._taken = self._here = self._drawn = 0  # here: gradients at this point
        self._mean = np.zeros(len(point))
        self._square = np.zeros(len(point))
        self._way: Vector | None = None

    @property
    def needs_gradient(self) -> bool:
        return self._way is None and self._here < self._turns

    def learn(self, rows: Rows) -> None:
        """The gradient at the point; {} if there is none."""
        self._here += 1
        if not rows:
            return
        slope = self.box.vector(rows)
        self._taken += 1
        self._mean = MOMENTUM * self._mean + (1 - MOMENTUM) * slope
        self._square = SQUARES * self._square + (1 - SQUARES) * slope**2
        self._aim(self._shown())

    def _shown(self) -> Vector:
        """Adam's direction; numbers that hardly matter are not blown up."""
        mean = self._mean / (1 - MOMENTUM**self._taken)
        size = np.sqrt(self._square / (1 - SQUARES**self._taken))
        return _unit(mean / (size + FLOOR * float(np.sqrt(np.mean(size**2))) + 1e-30))

    def _aim(self, way: Vector) -> None:
        self._way, self._tries = _unit(way), 0

    def propose(self, origin: str) -> Candidate:
        if self._way is None:
            self._drawn += 1
            drawn = operators.generator(*self._seed, self._drawn).standard_normal(len(self.point))
            self._aim(_unit(drawn) + (self._shown() if self._taken else 0.0))
        assert self._way is not None
        self._trial = np.clip(self.point + self.step * self._way, *self.box.bounds)
        return self.box.candidate(self._trial, origin)

    def judge(self, key: str, better: bool) -> None:
        """Move there or not, and settle the next step."""
        if better:
            self.point, self.key, self._way, self._here = self._trial, key, None, 0
            self.step = min(self.step * LONGER, LONGEST * self.first)
            return
        self.step = self.step * SHORTER if self.step > SHORTEST * self.first else self.first
        self._tries += 1
        if self._tries == TRIES:
            self._way = None


def _unit(way: Vector) -> Vector:
    """The same way, as long as one with ones everywhere."""
    length = math.sqrt(float(np.mean(way**2)))
    return way / length if length else way


class Gradient(Search):
    """Coefficients of every group, from the parents' average on."""

    mutating = ("gradient",)

    def _begin(self) -> None:
        box = Box(self._space)
        average = self._survivors[-1]
        step, turns = self.settings.gradient_step, self.settings.gradient_turns
        self._descent = Descent(box, box.start(), average, step, turns, self.seed, "grad")
        self._tried: str | None = None
        self._used = 0  # gradients that were looked at

    def _next(self, best: Any, last: Any) -> None:
        """It goes on where it was."""

    def _more(self) -> list[Proposal]:
        descent = self._descent
        while len(self._slots) < self.settings.population_size:
            if self._tried is not None:
                before, after = self.scores[descent.key], self.scores[self._tried]
                descent.judge(self._tried, after > before)
                self._tried = None
            if descent.needs_gradient:
                if self._used == len(self.gradients):
                    self.gradient_of = descent.key
                    return []
                descent.learn(self.gradients[-1][1])
                self._used = len(self.gradients)
            made = descent.propose("gradient step")
            self._tried = made.key
            if made.key not in self.scores:
                return [Proposal("gradient", made, (descent.key,))]
        return []

    def _extra(self) -> dict[str, Any]:
        return {"step": self._descent.step}
