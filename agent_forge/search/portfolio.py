"""A portfolio: the budget goes where it paid. And the table of all strategies.

The parents, their average, the eight combos and some merge methods come first; then steps along the
gradient from the average or the best of these methods, until they no longer help; then whichever of
six arms (a step along the gradient, points around the best by CMA-ES, a mutation of the best,
another combo, a merge of losers, a stretch of the best method) gained most for its cost, where the
less tried ones get the benefit of the doubt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agent_forge.search import continuous, operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.continuous import CandidateVector, CmaSampler, GradientDescent, Vector
from agent_forge.search.evolution import EvolutionSearch, GeneticSearch
from agent_forge.search.settings import FIRST_COMBOS, TRIPLE

ARMS = ("gradient", "sample", "mutation", "combo", "losers")
SAMPLES = 6  # points of one round of CMA-ES
DISCOUNT = 0.7  # of what an arm gained and cost, at every further use
EXPLORATION = 0.5  # bonus of the less tried arms
BACKWARD = 3  # scores that a gradient costs: one pass forward, and one back that costs two


@dataclass
class OperatorArm:
    """A way to make candidates, with what it has cost and gained of late."""

    name: str
    gain: float = 0.0
    cost: float = 0.0
    uses: int = 0

    def reward(self, gain: float, cost: float) -> None:
        self.gain, self.cost = DISCOUNT * self.gain + gain, DISCOUNT * self.cost + cost
        self.uses += 1

    @property
    def value(self) -> float:
        return self.gain / self.cost if self.cost else 0.0


class ArmProposal(NamedTuple):
    """What an arm has proposed: the champion's score before, the candidates and their points."""

    arm: OperatorArm
    before: float
    keys: list[str]
    points: list[Vector]


class PortfolioSearch(SearchStrategy):
    """Spends where improvement per cost was largest."""

    mutating = ("gradient", "sample", "mutation")

    def _first_generation(self) -> None:
        version = self.settings.auto_version
        names = [*(ARMS if version > 1 else ARMS[:-1])]
        names += ["stretch"] if self.settings.methods else []
        self._arms = [OperatorArm(name) for name in names]
        self._descent: GradientDescent | None = None
        self._cma: CmaSampler | None = None
        self._cma_keys: set[str] = set()  # its centre and its points
        self._sigma = self.settings.start_sigma
        self._rounds, self._force = 0, 1.0  # the force of mutations
        self._round: ArmProposal | None = None  # that waits for its scores
        self._cost = 0.0  # of that
        masks = operators.mask_seed(self.seed)
        for combo in operators.COMBOS[: FIRST_COMBOS[version]]:
            made = operators.combo_of(self.space, combo, self.space.parents, masks, "combo")
            self._propose("combo", made)
        for method in self.settings.methods or ():
            self._propose("method", operators.by_method(self.space, method, masks))

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._cma = None
        if self._descent is not None:
            self._descent.reseed(seed, self._rounds)

    def _more(self) -> None:
        for _ in range(100):  # a point that was proposed before has its score at once
            if len(self._tried) >= self.settings.population_size:
                return
            if self._round is not None:
                self._observe(self._round)
            self._play()
            if self.gradient_of or (self._round and not {*self._round.keys} <= {*self.scores}):
                return

    def _play(self) -> None:
        """Choose an arm and have it propose candidates, or ask for the gradient that it needs."""
        best = self.champion
        arm = self._choose() if best else self._arms[3]
        if best is None or arm.name == "combo":
            self._start_round(arm, [self._combo()])
        elif arm.name == "gradient":
            self._step(arm, self._movable(best))
        elif arm.name == "sample":
            movable = self._movable(best)
            if self._cma is None or movable.key not in self._cma_keys:  # it came from elsewhere
                box, point = self._point_of(movable.key)
                self._cma = CmaSampler(box, point, self._sigma, SAMPLES, self.seed, self._rounds)
                self._cma_keys = {movable.key}
            cma, points = self._cma, self._cma.ask()
            made = [cma.box.candidate(x, "sample around the best") for x in points]
            self._start_round(arm, made, points, movable.key)
        elif arm.name == "stretch":
            self._start_round(arm, [self._stretched()])
        elif arm.name == "losers":
            self._start_round(arm, [self._losers_child(arm.uses, best)])
        else:
            self._start_round(arm, [self._mutant(best)], source=best.key)

    def _start_round(
        self,
        arm: OperatorArm,
        made: Sequence[Candidate],
        points: Sequence[Vector] = (),
        source: str | None = None,
    ) -> None:
        best = self.champion
        before = self.scores[best.key] if best else -math.inf
        self._round = ArmProposal(arm, before, [c.key for c in made], list(points))
        self._cost += len(made)
        self._rounds += 1
        for candidate in made:
            self._propose(arm.name, candidate, (best.key,) if best else (), source)

    def _observe(self, ended: ArmProposal) -> None:
        """Reward the arm of the last round, and let it learn."""
        after = max(self.scores[key] for key in ended.keys)
        improved = math.isfinite(ended.before) and after > ended.before
        ended.arm.reward(after - ended.before if improved else 0.0, self._cost)
        if ended.arm.name == "gradient" and self._descent is not None:
            self._descent.observe(ended.keys[0], after > self.scores[self._descent.key])
        elif ended.arm.name == "sample" and self._cma is not None:
            self._cma_keys |= {*ended.keys}
            self._cma.tell(ended.points, [self.scores[key] for key in ended.keys])
            self._sigma = self._cma.sigma
        elif ended.arm.name == "mutation":
            self._force = min(max(self._force * (1.5 if improved else 0.85), 0.1), 3.0)
        self._round, self._cost = None, 0.0

    def _choose(self) -> OperatorArm:
        """Gradients first, while they help; then the arm with the best value and bonus."""
        (gradient, *others), s = self._arms, self.settings
        # An improvement that would not count as one, were it made for as long as patience lasts.
        least = s.convergence_threshold / s.convergence_patience / s.population_size
        untried = not any(arm.uses for arm in others)
        if gradient.uses < continuous.TRIES or (gradient.value > least and untried):
            return gradient
        top = max(least, *(arm.value for arm in self._arms))
        total = sum(arm.uses for arm in self._arms)

        def bound(arm: OperatorArm) -> float:
            bonus = math.sqrt(math.log(1 + total) / (1 + arm.uses))
            return arm.value + EXPLORATION * top * bonus

        return max(self._arms, key=lambda arm: (bound(arm), -arm.uses))

    def _movable(self, best: Candidate) -> Candidate:
        """The best of those that have the parents' shape, so that task vectors can be added."""
        if best.kind != "path":
            return best
        others = [key for key in self.scores if self.candidates[key].kind != "path"]
        return self.candidates[self._ranked(others)[0]]

    def _point_of(self, key: str) -> tuple[CandidateVector, Vector]:
        anchor, point = continuous.coefficients_of(self.space, self.candidates, key)
        return CandidateVector(self.space, anchor=anchor), point

    def _mutant(self, best: Candidate) -> Candidate:
        rng = operators.generator(self.seed, self._rounds, "mutation")
        _, made = operators.mutate(self.space, best, rng, self._force, again=True)
        if made.kind != "shift":
            return made
        box, point = self._point_of(best.key)  # one sum instead of a chain of them
        return box.candidate(point + box.vector(made.operation["coefficients"]), made.origin)

    def _step(self, arm: OperatorArm, best: Candidate) -> None:
        """From the best; at first from what has all of the parents: what a combo trimmed cannot
        come back."""
        descent = self._descent
        if descent is None and (whole := self._ranked(self._untrimmed())):
            best = self.candidates[whole[0]]
        elsewhere = descent is not None and self.scores[best.key] > self.scores[descent.key]
        if descent is None or (elsewhere and arm.uses >= continuous.TRIES):
            step = descent.step if descent else self.settings.gradient_step
            where, turns = (*self._point_of(best.key), best.key), self.settings.gradient_turns
            self._descent = descent = GradientDescent(*where, step, turns, self.seed, self._rounds)
        if descent.needs_gradient:
            if (rows := self._wanted_gradient(descent.key)) is None:
                return
            descent.learn(rows)
            self._cost += BACKWARD * self.settings.gradient_share
        made = descent.propose(f"gradient step from {best.key[:SHORT]}")
        self._start_round(arm, [made], source=descent.key)

    def _untrimmed(self) -> list[str]:
        """The average, and what methods made of the parents."""
        known = [key for key in self.scores if self.candidates[key].kind == "method"]
        return [self.average, *(known if self.settings.auto_version > 2 else ())]

    def _combo(self) -> Candidate:
        rng = operators.generator(self.seed, self._rounds, "combo")
        made = operators.random_combo(self.space, self.space.parents, rng, "combo")
        return operators.variant(self.space, made, rng)

    def _stretched(self) -> Candidate:
        """The best merge by a method with another scale; another combo if none could be scored."""
        kinds = ("method", "stretch")
        ranked = self._ranked([k for k in self.scores if self.candidates[k].kind in kinds])
        if not ranked:
            return self._combo()
        best = self.candidates[ranked[0]]
        of = best.inputs[0] if best.kind == "stretch" else best.key
        rng = operators.generator(self.seed, self._rounds, "stretch")
        return operators.stretched(of, best.operation.get("scale", 1.0), rng)

    def _losers_child(self, uses: int, best: Candidate) -> Candidate:
        """A random combo of the worst three merges of the parents, at the next use of the next
        three; another combo of the parents where there are no three."""
        parents, known = self.space.parents, (key for key in self.scores if key != best.key)
        merges = (key for key in known if self.candidates[key].kind == "merge")
        losers = self._ranked([key for key in merges if self.candidates[key].inputs == parents])
        if len(losers) < TRIPLE:
            return self._combo()
        end = len(losers) - TRIPLE * (uses % (len(losers) // TRIPLE))
        rng = operators.generator(self.seed, self._rounds, "losers")
        return operators.random_combo(self.space, losers[end - TRIPLE : end], rng, "losers")

    def _strategy_record(self) -> dict[str, Any]:
        return {"ways": {arm.name: [arm.uses, arm.value] for arm in self._arms}}


STRATEGIES: dict[str, type[SearchStrategy]] = {
    "spec": EvolutionSearch,
    "ga": GeneticSearch,
    "cma-es": continuous.CmaEs,
    "nsga2": continuous.Nsga2,
    "grad": continuous.GradientSearch,
    "auto": PortfolioSearch,
}
