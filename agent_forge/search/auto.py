"""A portfolio: the budget goes where it paid.

The parents, their average and a few combos come first; then steps along the gradient from the
average, until they no longer help; then whichever of four ways gained most for its cost, where the
less tried ones get the benefit of the doubt:

    gradient   a step along the gradient from the best
    sample     a few points around the best (CMA-ES)
    mutation   of the best one's recipe, weaker when it does not help
    combo      another combo of the parents
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_forge.search import operators
from agent_forge.search.base import Proposal, Search
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.continuous import Box, Cma, Vector, place_of
from agent_forge.search.gradient import TRIES, Descent

COMBOS = 4  # that are tried first
SAMPLES = 6  # points of one round of CMA-ES
FORGET = 0.7  # of what a way gained, at every further use
DOUBT = 0.5  # benefit of the less tried
BACKWARD = 3  # a gradient costs as much as so many scores on the same items


@dataclass
class Arm:
    """What a way of making candidates has cost and gained of late."""

    name: str
    gained: float = 0.0
    cost: float = 0.0
    uses: int = 0

    def credit(self, gain: float, cost: float) -> None:
        self.gained = FORGET * self.gained + gain
        self.cost = FORGET * self.cost + cost
        self.uses += 1

    @property
    def worth(self) -> float:
        return self.gained / self.cost if self.cost else 0.0


class Auto(Search):
    """Spends where improvement per cost was largest."""

    mutating = ("gradient", "sample", "mutation")

    def _begin(self) -> None:
        self._ways = [Arm(name) for name in ("gradient", "sample", "mutation", "combo")]
        self._descent: Descent | None = None
        self._cma: Cma | None = None
        self._own: set[str] = set()  # the centre of that and its points
        self._average = self._survivors[-1]
        self._sigma = self.settings.start_sigma
        self._force = 1.0  # of mutations
        self._rounds = 0
        self._used = 0  # gradients that were looked at
        self._now: tuple[Arm, float, list[str], list[Vector]] | None = None
        self._cost = 0.0
        masks = operators.draw_seed(operators.generator(self.seed, "masks"))
        for combo in operators.COMBOS[:COMBOS]:
            made = operators.combo_of(self._space, combo, self._space.parents, masks, "combo")
            self._put(Proposal("combo", made))

    def _next(self, best: Sequence[str], last: Sequence[str]) -> None:
        """It goes on where it was."""

    # -- a round ----------------------------------------------------------------------------------

    def _more(self) -> list[Proposal]:
        for _ in range(100):  # a point that was there before is judged at once
            if len(self._slots) >= self.settings.population_size:
                return []
            if self._now is not None:
                self._settle()
            wishes = self._round()
            if self.gradient_of or any(w.candidate.key not in self.scores for w in wishes):
                return wishes
        return []

    def _round(self) -> list[Proposal]:
        best = self.champion
        if best is None:
            return self._wanted(self._ways[3], [self._combo()])
        way = self._chosen()
        if way.name == "gradient":
            return self._step(way, self._movable(best))
        if way.name == "sample":
            cma = self._around(self._movable(best))
            points = cma.ask()
            made = [cma.box.candidate(x, "sample around the best") for x in points]
            return self._wanted(way, made, points)
        if way.name == "combo":
            return self._wanted(way, [self._combo()])
        return self._wanted(way, [self._mutant(best)])

    def _wanted(
        self, way: Arm, made: Sequence[Candidate], points: Sequence[Vector] = ()
    ) -> list[Proposal]:
        best = self.champion
        value = self.scores[best.key] if best else -math.inf
        self._now = (way, value, [c.key for c in made], list(points))
        self._cost += len(made)
        self._rounds += 1
        against = (best.key,) if best else ()
        return [Proposal(way.name, c, against) for c in made]

    def _settle(self) -> None:
        """Credit the way of the last round, and let it learn."""
        assert self._now is not None
        way, before, keys, points = self._now
        after = max(self.scores[key] for key in keys)
        gain = after - before if math.isfinite(before) and after > before else 0.0
        way.credit(gain, self._cost)
        if way.name == "gradient" and self._descent is not None:
            self._descent.judge(keys[0], after > self.scores[self._descent.key])
        elif way.name == "sample" and self._cma is not None:
            self._own |= {*keys}
            self._cma.tell(points, [self.scores[key] for key in keys])
            self._sigma = self._cma.sigma
        elif way.name == "mutation":
            self._force = min(max(self._force * (1.5 if gain else 0.85), 0.1), 3.0)
        self._now, self._cost = None, 0.0

    def _chosen(self) -> Arm:
        gradient, s = self._ways[0], self.settings
        # An improvement that would not count as one, were it made for as long as patience lasts.
        least = s.convergence_threshold / s.convergence_patience / s.population_size
        if gradient.uses < TRIES or (gradient.worth > least and not self._others_tried()):
            return gradient
        top = max(least, *(way.worth for way in self._ways))
        total = sum(way.uses for way in self._ways)

        def hope(way: Arm) -> float:
            return way.worth + DOUBT * top * math.sqrt(math.log(1 + total) / (1 + way.uses))

        return max(self._ways, key=lambda way: (hope(way), -way.uses))

    def _others_tried(self) -> bool:
        return any(way.uses for way in self._ways[1:])

    # -- the ways ---------------------------------------------------------------------------------

    def _movable(self, best: Candidate) -> Candidate:
        """The best of those that have the parents' shape, so that task vectors can be added."""
        if best.kind != "path":
            return best
        others = [key for key in self.scores if self.candidates[key].kind != "path"]
        return self.candidates[self._ranked(others)[0]]

    def _place(self, key: str) -> tuple[Box, Vector]:
        """Where a candidate is among vectors."""
        anchor, point = place_of(self._space, self.candidates, key)
        return Box(self._space, anchor=anchor), point

    def _mutant(self, best: Candidate) -> Candidate:
        rng = operators.generator(self.seed, self._rounds, "mutation")
        _, made = operators.mutate(self._space, best, rng, self._force, again=True)
        if made.kind != "shift":
            return made
        box, point = self._place(best.key)  # one sum instead of a chain of them
        return box.candidate(point + box.vector(made.operation["coefficients"]), made.origin)

    def _step(self, way: Arm, best: Candidate) -> list[Proposal]:
        """From the best; at first from the average: what a combo trimmed cannot come back."""
        descent = self._descent
        if descent is None and self.scores[self._average] > -math.inf:
            best = self.candidates[self._average]
        elsewhere = descent is not None and self.scores[best.key] > self.scores[descent.key]
        if descent is None or (elsewhere and way.uses >= TRIES):
            step = descent.step if descent else self.settings.gradient_step
            box, point = self._place(best.key)
            turns = self.settings.gradient_turns
            descent = Descent(box, point, best.key, step, turns, self.seed, self._rounds)
            self._descent = descent
        if descent.needs_gradient:
            if self._used == len(self.gradients):
                self.gradient_of = descent.key
                return []
            self._used = len(self.gradients)
            descent.learn(self.gradients[-1][1])
            self._cost += BACKWARD * self.settings.gradient_share
        return self._wanted(way, [descent.propose(f"gradient step from {best.key[:SHORT]}")])

    def _around(self, best: Candidate) -> Cma:
        """The CMA-ES whose centre is the best; a new one if the best came from elsewhere."""
        if self._cma is None or best.key not in self._own:
            box, point = self._place(best.key)
            self._cma = Cma(box, point, self._sigma, SAMPLES, self.seed, self._rounds)
            self._own = {best.key}
        return self._cma

    def _combo(self) -> Candidate:
        rng = operators.generator(self.seed, self._rounds, "combo")
        combo, seed = int(rng.integers(len(operators.COMBOS))), operators.draw_seed(rng)
        made = operators.combo_of(self._space, combo, self._space.parents, seed, "combo")
        return operators.variant(self._space, made, rng)

    def _extra(self) -> dict[str, Any]:
        return {"ways": {way.name: [way.uses, way.worth] for way in self._ways}}
