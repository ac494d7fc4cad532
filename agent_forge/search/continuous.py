"""Search over numbers: coefficients of the parents' task vectors, densities and a scale.

`CandidateVector` translates between vectors and candidates. CMA-ES (pycma) asks for points
around a mean that moves to the better ones; NSGA-II (pymoo) keeps a front where no domain gains
without another's loss; `GradientDescent` goes where one backward pass says that every coefficient
should go. All get random numbers of their own and read no others.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_forge.errors import ConfigError
from agent_forge.search import operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import Candidate
from agent_forge.search.operators import Rows

Vector = NDArray[np.float64]
Label = int | str  # of random numbers
COEFFICIENT, MOVED = (-0.2, 1.2), (-1.0, 1.0)  # bounds; of a candidate that is moved
DENSITY, SCALE = (0.05, 1.0), (0.25, 4.0)
FAILED = 1e9  # what a failed candidate costs
LONGER, SHORTER = 1.6, 0.4
TRIES = 2  # steps along one gradient
SHORTEST, LONGEST = 0.01, 4.0  # of the first step; below that it begins anew
MOMENTUM, SQUARES, FLOOR = 0.6, 0.9, 0.3


@dataclass(frozen=True)
class CandidateVector:
    """Coefficients, densities and scale of a candidate, or of what is added to an `anchor`."""

    space: operators.SearchSpace
    method: str = "linear"
    per_layer: bool = True
    scaled: bool = False
    anchor: str | None = None
    seed: int = 0  # of the masks of dare

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.space.groups) if self.per_layer else 1, len(self.space.parents)

    @property
    def bounds(self) -> tuple[Vector, Vector]:
        parts = [MOVED if self.anchor else COEFFICIENT] * math.prod(self.shape)
        parts += [DENSITY] * self._densities + [SCALE] * self.scaled
        low, high = np.array(parts, dtype=np.float64).T
        return low, high

    @property
    def _densities(self) -> int:
        return 0 if self.method == "linear" else self.shape[0]

    def start(self, density: float = 1.0) -> Vector:
        """The parents' plain average; nothing added to an anchor."""
        share = 0.0 if self.anchor else 1 / self.shape[1]
        parts = [share] * math.prod(self.shape) + [density] * self._densities + [1.0] * self.scaled
        return np.array(parts, dtype=np.float64)

    def candidate(self, x: Vector, origin: str) -> Candidate:
        """The candidate that a vector describes; out of the bounds, the nearest within."""
        x = np.clip(x, *self.bounds)
        groups, repeats = self.space.groups, 1 if self.per_layer else len(self.space.groups)
        size = math.prod(self.shape)
        grid = x[:size].reshape(self.shape).tolist()
        coefficients = dict(zip(groups, grid * repeats, strict=True))
        if self.anchor:
            return operators.shifted(self.anchor, coefficients, origin)
        kept = x[size:][: self._densities].tolist()
        density = dict(zip(groups, kept * repeats, strict=False))
        scale = float(x[-1]) if self.scaled else 1.0
        how = self.method, coefficients, density, scale, self.seed
        return operators.blend(self.space, *how, origin)

    def vector(self, rows: Rows) -> Vector:
        """Coefficients of every group, or a gradient by them, as a vector."""
        grid = np.array([rows[group] for group in self.space.groups], dtype=np.float64)
        return (grid if self.per_layer else grid.sum(0, keepdims=True)).reshape(-1)


def coefficients_of(
    space: operators.SearchSpace, known: Mapping[str, Candidate], key: str
) -> tuple[str | None, Vector]:
    """What a candidate's coefficients are added to (None: the base), and the coefficients."""
    candidate, n, groups = known[key], len(space.parents), len(space.groups)
    operation = candidate.operation
    if candidate.kind == "average":
        return None, np.full(groups * n, 1 / n)
    if candidate.kind == "parent":
        return None, np.tile(np.eye(n)[operation["index"]], groups)
    if candidate.kind == "blend" and operation["method"] == "linear":
        return None, operation["scale"] * CandidateVector(space).vector(operation["coefficients"])
    if candidate.kind == "shift":
        anchor, before = coefficients_of(space, known, candidate.inputs[0])
        return anchor, before + CandidateVector(space).vector(operation["coefficients"])
    return key, np.zeros(groups * n)


class CmaSampler:
    """pycma on a box, with random numbers of its own."""

    def __init__(
        self, box: CandidateVector, start: Vector, sigma: float, size: int, *seed: Label
    ) -> None:
        self.box, rng = box, operators.generator(*seed, "cma")
        low, high = box.bounds
        options = {"bounds": [low.tolist(), high.tolist()], "popsize": size, "verbose": -9}
        options |= {"randn": lambda *shape: rng.standard_normal(shape), "seed": math.nan}
        options["signals_filename"] = None  # settings of whatever folder one works in
        inside = np.clip(start, low + 1e-6, high - 1e-6)
        with warnings.catch_warnings():  # it misses matplotlib, which only its plots need
            warnings.simplefilter("ignore")
            import cma

            self._search = cma.CMAEvolutionStrategy(inside, sigma, options)

    @property
    def mean(self) -> Vector:  # within the bounds
        return np.asarray(self._search.result.xfavorite, dtype=np.float64)

    @property
    def sigma(self) -> float:
        return float(self._search.sigma)

    def ask(self) -> list[Vector]:
        return [np.asarray(x, dtype=np.float64) for x in self._search.ask()]

    def tell(self, points: Sequence[Vector], scores: Sequence[float]) -> None:
        """Only the order of the scores counts."""
        costs = [FAILED if score == -math.inf else -score for score in scores]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._search.tell(points, costs)


class _VectorSearch(SearchStrategy):
    """Proposes points of a box; `_proposed` are those of this generation, with their keys."""

    mutating = ("sample",)

    def _first_generation(self) -> None:
        s, masks = self.settings, operators.mask_seed(self.seed)
        self._box = CandidateVector(self.space, s.blend_method, s.per_layer, True, seed=masks)
        self._start = self._box.start(s.density)

    def _propose_points(self, points: Sequence[Vector]) -> None:
        self._proposed: list[tuple[Vector, str]] = []
        for point in points:
            made = self._box.candidate(point, f"{self.settings.strategy} {self.generation}")
            self._proposed.append((point, made.key))
            self._propose("sample", made)


class CmaEs(_VectorSearch):
    """Points around a mean, which is measured too, and the mean moves to the better ones."""

    def _first_generation(self) -> None:
        super()._first_generation()
        size = self.settings.population_size - 1
        self._cma = CmaSampler(self._box, self._start, self.settings.start_sigma, size, self.seed)
        if self.settings.blend_method != "linear":  # with linear it is the average, which is there
            self._propose("mean", self._box.candidate(self._start, "cma-es mean"))
        self._propose_points(self._cma.ask())

    def _next_generation(self, best: Sequence[str], last: Sequence[str]) -> None:
        points, keys = zip(*self._proposed, strict=True)
        self._cma.tell(points, [self.scores[key] for key in keys])
        self._propose("mean", self._box.candidate(self._cma.mean, "cma-es mean"))
        self._propose_points(self._cma.ask())

    def _strategy_record(self) -> dict[str, Any]:
        return {"sigma": self._cma.sigma}


class Nsga2(_VectorSearch):
    """One objective a domain; the champion is the best by fitness."""

    def _first_generation(self) -> None:
        super()._first_generation()
        pymoo()
        self._search: Any = None
        s, rng = self.settings, operators.generator(self.seed, "nsga2")
        spread = rng.standard_normal((s.population_size, len(self._start))) * s.start_sigma
        spread[0] = 0.0
        self._sampling = np.clip(self._start + spread, *self._box.bounds)
        self._propose_points(list(self._sampling))

    def _next_generation(self, best: Sequence[str], last: Sequence[str]) -> None:
        NSGA2, Problem, Evaluator, StaticProblem, NoTermination = pymoo()
        names = sorted({n for known in self.objectives.values() for n in known}) or ["fitness"]
        costs = np.full((len(self._proposed), len(names)), FAILED)
        for row, (_, key) in enumerate(self._proposed):
            if self.scores[key] > -math.inf:
                by_name = self.objectives.get(key, {"fitness": self.scores[key]})
                costs[row] = [-by_name[name] for name in names]
        if self._search is None:
            low, high = self._box.bounds
            self._problem = Problem(n_var=len(low), n_obj=costs.shape[1], xl=low, xu=high)
            self._search = NSGA2(pop_size=len(self._sampling), sampling=self._sampling)
            seed = operators.draw_seed(operators.generator(self.seed, "nsga2", "all"))
            self._search.setup(self._problem, termination=NoTermination(), seed=seed, verbose=False)
            self._individuals = self._search.ask()
        Evaluator().eval(StaticProblem(self._problem, F=costs), self._individuals)
        self._search.tell(infills=self._individuals)
        self._individuals = self._search.ask()
        self._propose_points([np.asarray(x, dtype=np.float64) for x in self._individuals.get("X")])

    def _strategy_record(self) -> dict[str, Any]:
        """The Pareto front so far: those that no other dominates."""
        known = {k: v for k, v in self.objectives.items() if self.scores[k] > -math.inf}
        every, front = list(known.values()), {}
        for key, v in sorted(known.items()):
            if not any(w != v and all(w[n] >= v[n] for n in v) for w in every):
                front[key] = v
        return {"front": front}


class GradientDescent:
    """A point, the direction that gradients show from it, and a step length that scores decide.
    A step goes from the best point so far, in Adam's direction. If the score improves, the point
    moves there and the next step is longer; if not, it is shorter: scores on all items decide, and
    a gradient on some of them only proposes. After a few steps that did not help another gradient
    is taken, on other items; after all of them, directions are drawn around what they showed."""

    def __init__(
        self, box: CandidateVector, point: Vector, key: str, step: float, turns: int, *seed: Label
    ) -> None:
        """After `turns` gradients all items have been looked at: then directions are drawn."""
        self.box, self.point, self.key, self.first, self.step = box, point, key, step, step
        self._turns, self._seed, self._trial = turns, seed, point
        self._tries = self._taken = self._drawn = 0
        self._gradients_here = 0  # at this point
        self._mean, self._square = np.zeros(len(point)), np.zeros(len(point))
        self._direction: Vector | None = None

    def reseed(self, *seed: Label) -> None:
        self._seed = seed

    @property
    def needs_gradient(self) -> bool:
        return self._direction is None and self._gradients_here < self._turns

    def learn(self, rows: Rows) -> None:
        """Take in the gradient at the point; {} if there is none."""
        self._gradients_here += 1
        if rows:
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
        self._direction = None if self._tries == TRIES else self._direction


def _unit(direction: Vector) -> Vector:
    """The same direction, as long as one with ones everywhere."""
    length = math.sqrt(float(np.mean(direction**2)))
    return direction / length if length else direction


class GradientSearch(SearchStrategy):
    """Coefficients of every group, from the parents' average on."""

    mutating = ("gradient",)

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._descent.reseed(seed, "grad")

    def _first_generation(self) -> None:
        box, s = CandidateVector(self.space), self.settings
        how = self.average, s.gradient_step, s.gradient_turns
        self._descent = GradientDescent(box, box.start(), *how, self.seed, "grad")
        self._trial: str | None = None

    def _more(self) -> None:
        descent = self._descent
        while len(self._tried) < self.settings.population_size:
            if self._trial is not None:
                descent.observe(self._trial, self.scores[self._trial] > self.scores[descent.key])
                self._trial = None
            if descent.needs_gradient:
                if (rows := self._wanted_gradient(descent.key)) is None:
                    return
                descent.learn(rows)
            made = descent.propose("gradient step")
            self._trial = made.key
            if made.key not in self.scores:
                self._propose("gradient", made, (descent.key,), descent.key)
                return

    def _strategy_record(self) -> dict[str, Any]:
        return {"step": self._descent.step}


def pymoo() -> tuple[Any, ...]:
    """The parts of pymoo that are used here; an error if it is not installed."""
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.evaluator import Evaluator
        from pymoo.core.problem import Problem
        from pymoo.core.termination import NoTermination
        from pymoo.problems.static import StaticProblem
    except ImportError as error:
        hint = "pip install 'agent-forge[multi]'"
        raise ConfigError("the strategy nsga2 needs the library pymoo", hint=hint) from error
    return NSGA2, Problem, Evaluator, StaticProblem, NoTermination
