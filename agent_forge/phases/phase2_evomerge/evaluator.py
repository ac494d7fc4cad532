"""The bench: a candidate's weights are put into the network of its shape and measured.

It does so for the evolution's own process, or in a worker that has a bench of its own. What goes in
and comes out is plain data, so either way the same goes into the journal.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from agent_forge.errors import ForgeError, PhaseFailed
from agent_forge.evals.likelihood import ItemScores
from agent_forge.evals.model_under_test import ModelUnderTest
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.fitness import DomainFitness, Fitness, Score, shape_parts
from agent_forge.phases.phase2_evomerge.gradient import gradient
from agent_forge.phases.phase2_evomerge.networks import Networks
from agent_forge.phases.phase2_evomerge.racing import Incumbent
from agent_forge.search.candidate import Candidate, lineage

NOTHING: dict[str, Any] = {  # what is found out about a candidate, before it is
    **{"sha256": "", "score": None, "problem": "", "hit": False, "dropped": False, "outcomes": []},
    "sample": "",
    **{"tokens": 0, "merge": 0.0, "evaluation": 0.0, "cpu": 0.0},
}
CACHED = ("score", "tokens", "dropped")  # a cached result counts as the tokens it stands for
FAILURES = (ForgeError, RuntimeError, MemoryError, ArithmeticError, ValueError)


@dataclass(frozen=True)
class Material:
    """What an evolution works with: models, a network to put them into, and what to measure."""

    parents: Sequence[Weights]
    base: Weights | None
    subject: ModelUnderTest
    fitness: Fitness
    holdout: DomainFitness | None
    hashes: tuple[str, ...]  # of parents and base


# Whom a candidate races with, and the bits a byte that a path may have on its first items.
Limits = tuple[Incumbent | None, float | None]


def task_of(candidates: Mapping[str, Candidate], key: str, hurdles: Limits) -> dict[str, Any]:
    """All that a bench needs to know of a candidate."""
    against, gate = hurdles
    return {
        "key": key,
        "candidates": [c.to_json() for c in lineage(candidates, key)],
        "against": asdict(against) if against else None,
        "gate": gate,
    }


class CandidateEvaluator:
    """Makes and measures. `cache` has what was measured before, by weights and evaluation."""

    def __init__(
        self, material: Material, nursery: CandidateWeights, cache: dict[str, Any]
    ) -> None:
        self.material, self.nursery, self.cache = material, nursery, cache
        self._networks = Networks(material.subject.model)
        self.model: nn.Module = material.subject.model  # the network that was filled last
        self._filled = ""  # the candidate whose weights it has

    def work(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """A task in a worker. What would pause a run is for the caller to raise."""
        for data in task["candidates"]:
            if data["key"] not in self.nursery.known:
                self.nursery.learn(Candidate.from_json(data))
        against = task["against"]
        try:
            standing = Incumbent(**against) if against else None
            return self.measure(task["key"], (standing, task["gate"]))
        except ForgeError as error:
            return {"paused": f"{type(error).__name__}: {error}"}

    def measure(self, key: str, hurdles: Limits = (None, None)) -> dict[str, Any]:
        """One that fails costs itself and nothing else."""
        against, gate = hurdles
        began, cpu = time.perf_counter(), time.process_time()
        found = dict(NOTHING)
        try:
            sha = found["sha256"] = self.fill(key)
            if self.nursery.layers_of(key) is None:
                sample = self.nursery.sample_of(self.model)
                found["sample"] = base64.b64encode(sample.tobytes()).decode()
            found["merge"] = time.perf_counter() - began
            place = f"{sha} {self.material.fitness.name}" + (f" {against.key}" if against else "")
            place += "" if gate is None else f" gate {gate}"
            if place in self.cache:
                found |= {**self.cache[place], "hit": True}
            else:
                found |= self._score(against, gate)
                if found["score"] is not None:
                    self.cache[place] = {name: found[name] for name in CACHED}
            found["place"] = place
        except FAILURES as error:
            if isinstance(error, ForgeError) and error.pauses:
                raise
            found["problem"] = f"{type(error).__name__}: {error}"
        found["evaluation"] = time.perf_counter() - began - found["merge"]
        found["cpu"] = round(time.process_time() - cpu, 4)
        return found

    def _score(self, against: Incumbent | None, gate: float | None) -> dict[str, Any]:
        fitness, spent = self.material.fitness, 0
        if isinstance(fitness, DomainFitness) and gate is not None:
            bits, spent = fitness.glance()
            if bits > gate:
                problem = f"{bits:.4g} bits a byte on its first items, {gate:.4g} may be"
                return {"tokens": spent, "dropped": True, "problem": problem}
        found: dict[str, Any] = {"tokens": fitness.tokens}
        if isinstance(fitness, DomainFitness) and fitness.racing:
            estimate, met, found["tokens"] = fitness.race(against)
            score = Score(estimate) if met is None else fitness.judge(met)
            found |= {"dropped": met is None, "outcomes": [_plain(o) for o in met or ()]}
        else:
            score = fitness.score()
        if not math.isfinite(score.fitness):
            raise PhaseFailed(f"the fitness is {score.fitness}")
        return {**found, "tokens": found["tokens"] + spent, "score": asdict(score)}

    def standing(self, key: str, fitness: float, outcomes: Any = None) -> Incumbent:
        """A candidate as others race against it; measured again where its outcomes are gone."""
        assert isinstance(self.material.fitness, DomainFitness)
        if not outcomes:
            self.fill(key)
            _, met, _ = self.material.fitness.race(None)
            outcomes = [_plain(outcome) for outcome in met or ()]
        right, loss = ([part[i] for part in outcomes] for i in (0, 1))
        bonus = self.material.fitness.bonus(shape_parts(*self.nursery.size(key)))
        return Incumbent(key, fitness, right, loss, bonus)

    def glance(self, key: str) -> tuple[float, int]:
        """Bits a byte of a candidate on the first items, and their tokens."""
        assert isinstance(self.material.fitness, DomainFitness)
        self.fill(key)
        return self.material.fitness.glance()

    def gradient(self, key: str, turns: int, turn: int) -> tuple[dict[str, list[float]], int]:
        """By every coefficient, on the items whose turn it is; {} for a fitness of one's own."""
        if not isinstance(self.material.fitness, DomainFitness):
            return {}, 0
        if self._filled != key:
            self.fill(key)
        return gradient(self.material.fitness, self.nursery, turns, turn)

    def fill(self, key: str) -> str:
        """The weights of a candidate into the network of its shape; returns their sha256."""
        self._filled = ""
        self.model = self._networks.of(self.nursery.layers_of(key))
        for fitness in (self.material.fitness, self.material.holdout):
            if isinstance(fitness, DomainFitness):
                fitness.use(self.model, *self.nursery.size(key))
        sha = self.nursery.fill(self.model, key)
        self._filled = key
        return sha


def sample_in(found: Mapping[str, Any]) -> np.ndarray:
    """The weights, for distances, that came with what was found out."""
    return np.frombuffer(base64.b64decode(found["sample"]), np.float32)


def _plain(outcome: ItemScores) -> tuple[list[bool], list[float]]:
    return outcome.right, outcome.loss
