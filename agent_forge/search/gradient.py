"""Search along gradients: one backward pass says where every coefficient should go.

A step is taken from the best point so far, in Adam's direction. If the score improves, the point
moves there and the next step is longer; if not, it is shorter. So scores on all items decide, and a
gradient on some of them only proposes. After a few steps that did not help another gradient is
taken, on other items.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agent_forge.search import operators
from agent_forge.search.base import Rows, Search, Wish
from agent_forge.search.candidate import Candidate
from agent_forge.search.continuous import Box, Vector

LONGER, SHORTER = 1.6, 0.4
TRIES = 2  # steps along one gradient
SHORTEST, LONGEST = 0.01, 4.0  # of the first step; below that it begins anew
MOMENTUM, SQUARES = 0.6, 0.9


class Descent:
    """A point, the way that gradients show from it, and a step length that scores decide."""

    def __init__(self, box: Box, point: Vector, key: str, step: float, *seed: int | str) -> None:
        self.box, self.point, self.key, self.first, self.step = box, point, key, step, step
        self.trial: Vector | None = None
        self.stalled = 0  # gradients in a row of which no step was better
        self._seed, self._taken, self._tries = seed, 0, 0
        self._mean = np.zeros(len(point))
        self._square = np.zeros(len(point))
        self._way: Vector | None = None

    @property
    def needs_gradient(self) -> bool:
        return self._way is None

    def learn(self, rows: Rows) -> None:
        """The gradient at the point; without one ({}) the way is drawn."""
        self._taken, self._tries = self._taken + 1, 0
        if rows:
            slope = self.box.vector(rows)
        else:
            slope = operators.generator(*self._seed, self._taken).standard_normal(len(self.point))
        self._mean = MOMENTUM * self._mean + (1 - MOMENTUM) * slope
        self._square = SQUARES * self._square + (1 - SQUARES) * slope**2
        mean = self._mean / (1 - MOMENTUM**self._taken)
        size = np.sqrt(self._square / (1 - SQUARES**self._taken))
        way = mean / (size + 0.3 * float(np.sqrt(np.mean(size**2))) + 1e-30)
        length = math.sqrt(float(np.mean(way**2)))
        self._way = way / length if length else way

    def propose(self, origin: str) -> Candidate:
        assert self._way is not None
        self.trial = np.clip(self.point + self.step * self._way, *self.box.bounds)
        return self.box.candidate(self.trial, origin)

    def judge(self, key: str, better: bool) -> None:
        """Move there or not, and settle the next step."""
        assert self.trial is not None
        if better:
            self.point, self.key, self._way = self.trial, key, None
            self.step, self.stalled = min(self.step * LONGER, LONGEST * self.first), 0
        else:
            self.step = self.step * SHORTER if self.step > SHORTEST * self.first else self.first
            self._tries += 1
            if self._tries == TRIES:
                self._way = None
                self.stalled += 1
        self.trial = None


class Gradient(Search):
    """Coefficients of every group, from the parents' average on."""

    names = ("gradient",)

    def _begin(self) -> None:
        box = Box(self._space)
        average = self._survivors[-1]
        step = self.settings.gradient_step
        self._descent = Descent(box, box.start(), average, step, self.seed, "grad")
        self._tried: str | None = None
        self._used = 0  # gradients that were looked at

    def _next(self, best: Any, last: Any) -> None:
        """It goes on where it was."""

    def _more(self) -> list[Wish]:
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
                return [Wish("gradient", made, (descent.key,))]
        return []

    def _extra(self) -> dict[str, Any]:
        return {"step": self._descent.step}
