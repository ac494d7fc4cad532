"""Measuring candidates: the weights of one are put into a network of its shape and scored.

The evolution's own process has an evaluator, and so has every worker. What goes in and comes out is
plain data, so either way the same is written to the journal.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from agent_forge.config.settings import ModelSettings
from agent_forge.errors import ConfigError, ForgeError, PhaseFailed
from agent_forge.evals.domains import Domain
from agent_forge.evals.fitness import (
    CommandFitness,
    DomainFitness,
    Fitness,
    FitnessScore,
    FunctionFitness,
    is_function,
    shape_parts,
)
from agent_forge.evals.likelihood import ItemScores
from agent_forge.evals.model_under_test import ModelUnderTest, model_under_test
from agent_forge.evals.racing import Incumbent
from agent_forge.merge.output import write
from agent_forge.model.folder import MODEL_TYPE
from agent_forge.model.load import load_network, own_name
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import with_tokenizer
from agent_forge.model.weights import Weights, from_memory, with_layers
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.fitness_gradient import gradient
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.journal import CACHED
from agent_forge.search.candidate import Candidate, lineage

EMPTY_RESULT: dict[str, Any] = {
    **{"sha256": "", "score": None, "problem": "", "hit": False, "dropped": False, "outcomes": []},
    **{"sample": "", "tokens": 0, "merge": 0.0, "evaluation": 0.0, "cpu": 0.0},
}
FAILURES = (ForgeError, RuntimeError, MemoryError, ArithmeticError, ValueError)
OTHER_NETWORKS = 2  # of shapes that are not the parents', kept at a time
# The champion to race against, and the most bits a byte that a path may have on its first items.
Limits = tuple[Incumbent | None, float | None]


def worker_task(candidates: Mapping[str, Candidate], key: str, limits: Limits) -> dict[str, Any]:
    """All that a worker needs to know of a candidate."""
    incumbent, gate = limits
    return {
        "key": key,
        "candidates": [c.to_json() for c in lineage(candidates, key)],
        "against": asdict(incumbent) if incumbent else None,
        "gate": gate,
    }


class CandidateEvaluator:
    """Makes and measures candidates. `cache` has earlier results, by weights and evaluation."""

    def __init__(
        self,
        inputs: EvolutionInputs,
        weights: CandidateWeights,
        cache: dict[str, Any],
        device: str = "cpu",
    ) -> None:
        self.weights, self.cache = weights, cache
        self.model_under_test = _load(inputs.parents[0])
        self.model: nn.Module = self.model_under_test.model.to(device)  # the one filled last
        self.fitness = self._fitness(inputs)
        self.holdout: DomainFitness | None = None
        if "holdout" in inputs.splits and not inputs.settings.fitness:
            self.holdout = self._on(inputs, inputs.splits["holdout"])
        self._networks = NetworkCache(self.model)
        self._filled = ""  # the candidate whose weights the model has

    def _fitness(self, inputs: EvolutionInputs) -> Fitness:
        own = inputs.settings.fitness
        sign = 1 if inputs.settings.fitness_direction == "maximize" else -1
        if is_function(own):
            return FunctionFitness(own, self.model_under_test.model, sign)
        if own:
            return CommandFitness(own, lambda: self._write_model(inputs), sign)
        return self._on(inputs, inputs.splits["selection"])

    def _on(self, inputs: EvolutionInputs, domains: Sequence[Domain]) -> DomainFitness:
        s = inputs.settings
        how = s.fitness_weights, s.fitness_floors, s.domain_weights, s.mixed_precision, s.racing
        return DomainFitness(self.model_under_test, domains, *how)

    def _write_model(self, inputs: EvolutionInputs) -> Path:
        """Write what the network holds as a model directory, always to the same place."""
        parent, target = inputs.parents[0], inputs.folder / "candidate"
        state = self.model_under_test.model.state_dict()
        held = from_memory({name: state[name] for name in parent.specs})
        held.config, held.folder = parent.config, parent.folder
        write(held, target, force=True)
        return target

    def work(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """A task in a worker. What would pause a run is for the caller to raise."""
        for data in task["candidates"]:
            if data["key"] not in self.weights.known:
                self.weights.learn(Candidate.from_json(data))
        against = task["against"]
        try:
            return self.measure(
                task["key"], (Incumbent(**against) if against else None, task["gate"])
            )
        except ForgeError as error:
            return {"paused": f"{type(error).__name__}: {error}"}

    def measure(self, key: str, limits: Limits = (None, None)) -> dict[str, Any]:
        """The result of a candidate. One that fails has a problem and harms nothing else."""
        incumbent, gate = limits
        began, cpu = time.perf_counter(), time.process_time()
        result = dict(EMPTY_RESULT)
        try:
            sha = result["sha256"] = self.fill(key)
            if self.weights.layers_of(key) is None:
                sample = self.weights.sample_of(self.model)
                result["sample"] = base64.b64encode(sample.tobytes()).decode()
            result["merge"] = time.perf_counter() - began
            place = f"{sha} {self.fitness.name}" + (f" {incumbent.key}" if incumbent else "")
            place += "" if gate is None else f" gate {gate}"
            if place in self.cache:
                result |= {**self.cache[place], "hit": True}
            else:
                result |= self._score(incumbent, gate)
                if result["score"] is not None:
                    self.cache[place] = {name: result[name] for name in CACHED}
            result["place"] = place
        except FAILURES as error:
            if isinstance(error, ForgeError) and error.pauses:
                raise
            result["problem"] = f"{type(error).__name__}: {error}"
        result["evaluation"] = time.perf_counter() - began - result["merge"]
        result["cpu"] = round(time.process_time() - cpu, 4)
        return result

    def _score(self, incumbent: Incumbent | None, gate: float | None) -> dict[str, Any]:
        fitness, spent = self.fitness, 0
        if isinstance(fitness, DomainFitness) and gate is not None:
            bits, spent = fitness.first_bits()
            if bits > gate:
                problem = f"{bits:.4g} bits a byte on its first items, {gate:.4g} may be"
                return {"tokens": spent, "dropped": True, "problem": problem}
        result: dict[str, Any] = {"tokens": fitness.tokens}
        if isinstance(fitness, DomainFitness) and fitness.racing:
            estimate, items, result["tokens"] = fitness.race(incumbent)
            score = FitnessScore(estimate) if items is None else fitness.score_of(items)
            result |= {"dropped": items is None, "outcomes": _plain(items or ())}
        else:
            score = fitness.score()
        if not math.isfinite(score.fitness):
            raise PhaseFailed(f"the fitness is {score.fitness}")
        return {**result, "tokens": result["tokens"] + spent, "score": asdict(score)}

    def incumbent(self, key: str, fitness: float, items: Any = None) -> Incumbent:
        """A candidate as others race against it; measured again if its items are not known."""
        assert isinstance(self.fitness, DomainFitness)
        if not items:
            self.fill(key)
            items = _plain(self.fitness.race(None)[1] or ())
        right, loss = ([part[i] for part in items] for i in (0, 1))
        bonus = self.fitness.bonus(shape_parts(*self.weights.size(key)))
        return Incumbent(key, fitness, right, loss, bonus)

    def first_bits(self, key: str) -> tuple[float, int]:
        """Bits a byte of a candidate on the first items, and their tokens."""
        assert isinstance(self.fitness, DomainFitness)
        self.fill(key)
        return self.fitness.first_bits()

    def gradient(self, key: str, turns: int, turn: int) -> tuple[dict[str, list[float]], int]:
        """By every coefficient, on the items whose turn it is; {} for a fitness of one's own."""
        if not isinstance(self.fitness, DomainFitness):
            return {}, 0
        if self._filled != key:
            self.fill(key)
        return gradient(self.fitness, self.weights, turns, turn)

    def fill(self, key: str) -> str:
        """Put the weights of a candidate into a network of its shape; returns their sha256."""
        self._filled = ""
        self.model = self._networks.of(self.weights.layers_of(key))
        for fitness in (self.fitness, self.holdout):
            if isinstance(fitness, DomainFitness):
                fitness.use(self.model, *self.weights.size(key))
        sha = self.weights.fill(self.model, key)
        self._filled = key
        return sha


def decode_sample(result: Mapping[str, Any]) -> np.ndarray:
    """The sampled weights, for distances, in the result of a candidate."""
    return np.frombuffer(base64.b64decode(result["sample"]), np.float32)


def _plain(items: Sequence[ItemScores]) -> list[tuple[list[bool], list[float]]]:
    return [(scores.right, scores.loss) for scores in items]


def _load(first: Weights) -> ModelUnderTest:
    """A network of the parents' shape, which every candidate is put into, and their tokenizer."""
    assert first.folder is not None and first.config  # the inputs were checked
    model = load_network(first.config, {name: first[name] for name in first}, first.label)
    ours = first.config["model_type"] == MODEL_TYPE
    names = {own_name(name) if ours else name for name in first}
    if unknown := sorted(names - set(model.state_dict())):
        raise ConfigError(
            f"{first.label}: transformers renames {unknown[0]} when it loads it",
            hint="open and save it once with transformers (save_pretrained), and give that folder",
        )
    return model_under_test(with_tokenizer(model, first.folder))


class NetworkCache:
    """One network for all candidates of the parents' shape, and a few of other depths."""

    def __init__(self, model: nn.Module) -> None:
        self.own = model
        self._others: dict[str, nn.Module] = {}  # by their configs, the newest last

    def of(self, layers: Sequence[int] | None) -> nn.Module:
        """The network for a path through these layers; None stands for the parents' layers."""
        own = self._config()
        config = own if layers is None else with_layers(own, layers)
        if config == own:
            return self.own
        name = json.dumps(config, sort_keys=True, default=str)
        if name not in self._others:
            for old in list(self._others)[: 1 - OTHER_NETWORKS]:
                del self._others[old]
            self._others[name] = self._build(config)
        return self._others[name]

    def _config(self) -> dict[str, Any]:
        if isinstance(self.own, ForgeNetwork):
            return self.own.settings.model_dump()
        config: Any = self.own.config
        return dict(config.to_dict())

    def _build(self, config: dict[str, Any]) -> nn.Module:
        """A network with whatever weights: all of them are overwritten."""
        like = next(self.own.parameters())
        network: Any
        with torch.random.fork_rng(devices=[]):
            if isinstance(self.own, ForgeNetwork):
                network = ForgeNetwork(ModelSettings.model_validate(config))
                network.folder = self.own.folder
            else:
                kind: Any = type(self.own)
                network = kind(kind.config_class.from_dict(config))
        return network.to(like.device, like.dtype).eval()  # type: ignore[no-any-return]
