"""Measuring candidates: the weights of one are put into a network of its shape and scored.

The evolution's own process has an evaluator, and so has every worker. What goes in and comes out is
plain data, so either way the same is written to the journal.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agent_forge.config.settings import ModelSettings
from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError, ForgeError, NotFinite, PhaseFailed
from agent_forge.evals import fitness as fitnesses
from agent_forge.evals import likelihood
from agent_forge.evals import model_under_test as measuring
from agent_forge.evals.fitness import DomainFitness, Incumbent
from agent_forge.evals.likelihood import PLAIN, Reading
from agent_forge.evals.model_under_test import ItemScores, ModelUnderTest
from agent_forge.infer.generate import batches
from agent_forge.merge.output import write
from agent_forge.merge.spectral import GRAM, is_treated
from agent_forge.merge.tensor_inputs import Cache
from agent_forge.model.folder import MODEL_TYPE
from agent_forge.model.load import load_network, own_name
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import with_tokenizer
from agent_forge.model.weights import Weights, from_memory, with_layers
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.journal import UserCache, cached
from agent_forge.search.candidate import Candidate, lineage
from agent_forge.search.portfolio import BACKWARD
from agent_forge.store import files

EMPTY_RESULT: dict[str, Any] = {
    **{"sha256": "", "score": None, "problem": "", "hit": False, "dropped": False, "outcomes": []},
    **{"sample": "", "tokens": 0, "merge": 0.0, "evaluation": 0.0, "cpu": 0.0},
    "known": False,  # from a cache; a `hit` is one of this evolution's
}
FAILURES = (ForgeError, RuntimeError, MemoryError, ArithmeticError, ValueError)
OTHER_NETWORKS = 2  # of shapes that are not the parents', kept at a time
# The champion to race against, the most bits a byte that a path may have on its first items, and
# the domains whose accuracy counts nothing (None: all count, as `DomainFitness.leave_out` has it).
Limits = tuple[Incumbent | None, float | None, Sequence[str] | None]
SHARDS = 4  # of a gradient's batches, whatever the number of threads: each costs a second
Rows = dict[str, list[float]]
Term = tuple[list[TokenizedItem], float, float]  # a batch, and what a nat and an answer count


def worker_task(candidates: Mapping[str, Candidate], key: str, limits: Limits) -> dict[str, Any]:
    """All that a worker needs to know of a candidate."""
    incumbent, gate, floor = limits
    sources = [c.to_json() for c in lineage(candidates, key)]
    against = asdict(incumbent) if incumbent else None
    return {"key": key, "candidates": sources, "against": against, "gate": gate, "floor": floor}


class CandidateEvaluator:
    """Makes and measures candidates. `cache` has earlier results, by all that they depend on."""

    def __init__(
        self, inputs: EvolutionInputs, weights: CandidateWeights, cache: dict[str, Any], device: str
    ) -> None:
        self.weights, self.cache = weights, cache
        s, splits = inputs.settings, inputs.splits
        threads = batch_threads(inputs) if device == "cpu" else 0
        self.model_under_test = subject = replace(_load(inputs.parents[0], s.fast), threads=threads)
        self.model: nn.Module = subject.model.to(device)  # the one filled last
        # Its type while candidates are measured; in the verdict it is always the single precision.
        half = bool(s.mixed_precision) and subject.reading and likelihood.halve(self.model)
        self._dtype = torch.bfloat16 if half else torch.float32
        self.fitness: fitnesses.Fitness
        # Every candidate is measured with these.
        self._settings = inputs.parents[0].settings_sha256()
        self._settings += "" if device == "cpu" else f" {device}"  # it has other last bits
        if inputs.settings.fitness:
            self._settings += f" {fitnesses.source_sha256(inputs.settings.fitness)}"
        self.holdout: DomainFitness | None = None
        sign = 1 if s.fitness_direction == "maximize" else -1
        decided = bool(s.mixed_precision), bool(s.racing)
        how = s.fitness_weights, s.fitness_floors, s.domain_weights, *decided
        if fitnesses.is_function(s.fitness):
            self.fitness = fitnesses.FunctionFitness(s.fitness, subject.model, sign)
        elif s.fitness:
            written = partial(self._written_model, inputs)
            self.fitness = fitnesses.CommandFitness(s.fitness, written, sign)
        else:
            self.fitness = DomainFitness(subject, splits["selection"], *how)
            if "holdout" in splits:
                self.holdout = DomainFitness(subject, splits["holdout"], *how)
            weights.input_grams = partial(input_grams, self.fitness, weights, self.model)
        keeps = s.enable_caching and isinstance(self.fitness, DomainFitness)
        self._of_user = UserCache(1 if threads else s.worker_threads, s.split_by) if keeps else None
        self._networks = NetworkCache(self.model)
        self._filled = ""  # the candidate whose weights the model has
        self._recompute = s.gradient_checkpointing

    @contextmanager
    def _written_model(self, inputs: EvolutionInputs) -> Iterator[Path]:
        """A model directory with what the network holds, until the block is left."""
        parent, state = inputs.parents[0], self.model_under_test.model.state_dict()
        held = from_memory({name: state[name] for name in parent.specs})
        held.config, held.folder = parent.config, parent.folder
        with files.building(inputs.folder / "candidate") as target:
            write(held, target)
            yield target

    def work(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """A task in a worker. What would pause a run is for the caller to raise."""
        for data in task["candidates"]:
            if data["key"] not in self.weights.known:
                self.weights.known[data["key"]] = Candidate.from_json(data)
        against = Incumbent(**task["against"]) if task["against"] else None
        try:
            return self.measure(task["key"], (against, task["gate"], task["floor"]))
        except ForgeError as error:
            return {"paused": f"{type(error).__name__}: {error}"}

    def leave_out(self, floor: Sequence[str] | None) -> None:
        """Measure from now on without the accuracy of these domains."""
        for fitness in (self.fitness, self.holdout):
            if isinstance(fitness, DomainFitness):
                fitness.leave_out(floor)

    def measure(self, key: str, limits: Limits = (None, None, None)) -> dict[str, Any]:
        """The result of a candidate. One that fails has a problem and harms nothing else."""
        incumbent, gate, floor = limits
        self.leave_out(floor)
        began, cpu = time.perf_counter(), time.process_time()
        result = dict(EMPTY_RESULT)
        try:
            sha = result["sha256"] = self.fill(key)
            if self.weights.layers_of(key) is None:
                sample = self.weights.sample(self.model if self._holds_all else key)
                result["sample"] = base64.b64encode(sample.tobytes()).decode()
            result["merge"] = time.perf_counter() - began
            place = f"{sha} {self._settings} {self.fitness.name}"
            place += f" {incumbent.key}" if incumbent else ""
            place += "" if gate is None else f" gate {gate}"
            if place in self.cache:
                result |= {**self.cache[place], "hit": True, "known": True}
            elif earlier := self._of_user.get(place) if self._of_user else None:
                result |= {**earlier, "known": True}
            else:
                scoring = time.process_time()
                result |= self._score(incumbent, gate)
                if result["score"] is not None:
                    self.cache[place] = cached(None, place, result)
                if self._of_user:
                    self._of_user.put(place, result, time.process_time() - scoring)
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
            score = fitnesses.FitnessScore(estimate) if items is None else fitness.score_of(items)
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
        bonus = self.fitness.bonus(fitnesses.shape_parts(*self.weights.size(key)))
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
        again = self._recompute and isinstance(self.model, PreTrainedModel)
        with recomputed(self.model) if again else nullcontext():
            return coefficient_gradient(self.fitness, self.weights, turns, turn)

    @property
    def _holds_all(self) -> bool:
        """True if no weight of a candidate is rounded when it is put into the network."""
        stored = {spec.dtype for spec in self.weights.specs.values()}
        return self._dtype == torch.float32 or stored == {torch.bfloat16}

    def fill(self, key: str, *, exact: bool = False) -> str:
        """Put the weights of a candidate into a network of its shape, one in single precision if it
        is to be `exact`; returns their sha256."""
        self._filled = ""
        dtype = torch.float32 if exact else self._dtype
        self.model = self._networks.of(self.weights.layers_of(key), dtype)
        for fitness in (self.fitness, self.holdout):
            if isinstance(fitness, DomainFitness):
                fitness.use(self.model, *self.weights.size(key))
        sha = self.weights.fill(self.model, key)
        self._filled = "" if exact else key
        return sha


def _plain(items: Sequence[ItemScores]) -> list[tuple[list[float], list[float]]]:
    return [(scores.right, scores.loss) for scores in items]


def batch_threads(inputs: EvolutionInputs) -> int:
    """How many threads share the batches of a candidate: one a core if it is large, unless workers
    are asked for. 0 means none; small candidates are shared out to workers."""
    s = inputs.settings
    wanted = _reads_large(inputs) and not s.workers and s.executor == "local"
    return (os.cpu_count() or 1) if wanted else 0


def measured_in_bf16(inputs: EvolutionInputs) -> bool:
    """What `mixed_precision` becomes if it is left open: for large models what a probe says."""
    return _reads_large(inputs) and likelihood.faster_in_bf16()


def _reads_large(inputs: EvolutionInputs) -> bool:
    """True if large models of transformers are read fast."""
    first, settings = inputs.parents[0], inputs.settings
    ours = first.config.get("model_type") == MODEL_TYPE
    large = sum(spec.numel for spec in first.specs.values()) >= likelihood.LARGE
    return large and not ours and settings.fast and not settings.fitness


def _load(first: Weights, fast: bool) -> ModelUnderTest:
    """A network of the parents' shape, which every candidate is put into, and their tokenizer."""
    assert first.folder is not None and first.config  # the inputs were checked
    model = load_network(first.config, {name: first[name] for name in first}, first.label)
    ours = first.config["model_type"] == MODEL_TYPE
    names = {own_name(name) if ours else name for name in first}
    if unknown := sorted(names - set(model.state_dict())):
        hint = "open and save it once with transformers (save_pretrained), and give that folder"
        problem = f"{first.label}: transformers renames {unknown[0]} when it loads it"
        raise ConfigError(problem, hint=hint)
    return measuring.model_under_test(with_tokenizer(model, first.folder), fast=fast)


class NetworkCache:
    """One network for all candidates of the parents' shape, and a few of other depths."""

    def __init__(self, model: nn.Module) -> None:
        self.own, self._others = model, dict[str, nn.Module]()  # by their configs, the newest last
        config: Any = model.settings if isinstance(model, ForgeNetwork) else model.config
        self._config = config.model_dump() if isinstance(model, ForgeNetwork) else config.to_dict()

    def of(self, layers: Sequence[int] | None, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The network for a path through these layers; None stands for the parents' layers."""
        config = self._config if layers is None else with_layers(self._config, layers)
        like = next(self.own.parameters())
        if config == self._config and dtype == like.dtype:
            return self.own
        name = f"{dtype} {json.dumps(config, sort_keys=True, default=str)}"
        if name not in self._others:
            for old in list(self._others)[: 1 - OTHER_NETWORKS]:
                del self._others[old]
            network: Any
            with torch.random.fork_rng(devices=[]):  # all of its weights are overwritten
                if isinstance(self.own, ForgeNetwork):
                    network = ForgeNetwork(ModelSettings.model_validate(config))
                    network.folder = self.own.folder
                else:
                    kind: Any = type(self.own)
                    network = kind(kind.config_class.from_dict(config))
            self._others[name] = network.to(like.device).eval()
            for parameter in network.parameters():  # not the buffers, see likelihood.halve
                parameter.data = parameter.data.to(dtype)
        return self._others[name]


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the activations of a layer are computed again for its gradient, not kept."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers: list[Any] = max(lists, key=len, default=[])
    caches, model.config.use_cache = model.config.use_cache, False  # none is filled twice
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        model.config.use_cache = caches
        for layer in layers:
            del layer.forward


def coefficient_gradient(
    fitness: DomainFitness, weights: CandidateWeights, turns: int, turn: int
) -> tuple[Rows, int]:
    """The gradient at the weights that the network has now, on the items of a turn; its tokens.
    With W = ... + sum of c[group][i] * (parent_i - base) the derivative by c[group][i] is the sum
    over the group's tensors of <dF/dW, parent_i - base>. F is the fitness made smooth: of right
    answers their mean probability counts. All recursion steps are taken, without halting. A reading
    has its batches in a fixed number of shards, which threads take and which are added in order."""
    subject = fitness.model_under_test
    model, reading = subject.model, subject.reading
    model.eval()
    wanted = {name: p for name, p in model.named_parameters() if name in weights.specs}
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    tokens, terms = 0, []
    for i, (prepared, rates) in enumerate(zip(fitness.prepared, fitness.rates(), strict=True)):
        items = prepared.right_items(turns, turn)
        tokens += BACKWARD * sum(len(prepared.items[n].ids) for n in items)
        terms += _terms(fitness, i, items, *rates)
    shards = [terms[n::SHARDS] for n in range(min(SHARDS, len(terms)))] if reading else [terms]
    lock = threading.Lock()  # of the parents' files
    try:
        model.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        with likelihood.selecting(model, reading or PLAIN):
            jobs = [partial(_shard_rows, subject, weights, wanted, own, lock) for own in shards]
            found = list(likelihood.in_threads(jobs, subject.threads))
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(before[name])
    rows = {g: np.sum([own[g] for own in found], axis=0).tolist() for g in found[0]}
    if not all(math.isfinite(value) for row in rows.values() for value in row):
        raise NotFinite("the gradient is not finite")
    return rows, tokens


def _terms(
    fitness: DomainFitness, domain: int, chosen: Sequence[int], per_nat: float, per_answer: float
) -> list[Term]:
    """The batches of a domain's part of the fitness; the chosen items stand for all."""
    prepared = fitness.prepared[domain]
    answers = sorted({int(prepared.answer_of[n]) for n in chosen})
    every = fitness.domains[domain]
    per_nat *= sum(every.sizes) / sum(int(prepared.sizes[answer]) for answer in answers)
    per_answer *= len(every.examples) / len(answers)
    items = [prepared.items[n] for n in chosen]
    rows = batches([len(item.ids) for item in items], fitness.model_under_test.batch_tokens)
    return [([items[n] for n in own], per_nat, per_answer) for own in rows]


def _shard_rows(
    subject: ModelUnderTest,
    weights: CandidateWeights,
    wanted: Mapping[str, nn.Parameter],
    terms: Sequence[Term],
    lock: threading.Lock,
) -> Rows:
    """The derivatives of some batches by every coefficient; sums are in single precision."""
    device = next(subject.model.parameters()).device
    slopes: dict[str, Tensor] = {}
    for items, per_nat, per_answer in terms:
        losses = item_losses(subject.model, items, device, subject.reading or PLAIN)
        value = per_answer * torch.exp(-losses).sum() - per_nat * losses.sum()
        found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
        for name, slope in zip(wanted, found, strict=True):
            if slope is not None:
                old = slopes.get(name)
                slopes[name] = slope.float() if old is None else old.add_(slope)
    return _by_coefficient(weights, slopes, lock)


def input_grams(fitness: DomainFitness, weights: CandidateWeights, own: nn.Module) -> Cache:
    """The sum of x x^T over the inputs of every linear layer of each parent, for RegMean, on the
    right answers of the search; as the merge engine wants them."""
    subject = fitness.model_under_test
    network, reading, grams = copy.deepcopy(own), subject.reading or PLAIN, Cache()
    targets, device = dict(network.state_dict()), next(network.parameters()).device
    places = {target.data_ptr(): name for name, target in targets.items()}
    parts = [prepared.right_items() for prepared in fitness.prepared]
    terms = [term for i, part in enumerate(parts) for term in _terms(fitness, i, part, 1.0, 1.0)]

    def note(place: tuple[str, ...], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().flatten(0, -2).float()
        grams[place] = grams.get(place, 0.0) + (x.T @ x).cpu().double()

    for i, parent in enumerate(weights.parents):
        for name in weights.specs:
            targets[name].copy_(parent[name])
        layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
        named = [(places.get(m.weight.data_ptr(), ""), m) for m in layers]
        treated = [(n, m) for n, m in named if is_treated(n, m.weight.shape)]
        where = [((GRAM, f"parent{i}", n), m) for n, m in treated]
        hooks = [m.register_forward_pre_hook(partial(note, place)) for place, m in where]
        with torch.no_grad(), likelihood.selecting(network, reading):
            for items, *_ in terms:
                item_losses(network, items, device, reading)
        for hook in hooks:
            hook.remove()
    return grams


def item_losses(
    model: nn.Module, items: Sequence[TokenizedItem], device: torch.device, reading: Reading = PLAIN
) -> Tensor:
    """The loss of each item in nats, summed over its asked tokens."""
    tokens, asked = likelihood.padded(items, device)
    logits, wanted = asked_logits(model, tokens, asked, reading), asked[:, 1:]
    loss = F.cross_entropy(logits, tokens[:, 1:][wanted], reduction="none")
    owner = wanted.nonzero()[:, 0]
    return loss.new_zeros(len(items)).index_add(0, owner, loss)


def asked_logits(model: nn.Module, tokens: Tensor, asked: Tensor, reading: Reading) -> Tensor:
    """The logits from which the asked tokens are predicted; of a network of ours those after all
    recursion steps, without halting. `likelihood.selecting` has been entered."""
    wanted = asked[:, 1:]
    if not isinstance(model, ForgeNetwork):
        return likelihood.asked_logits(model, tokens[:, :-1], wanted, reading).float()
    y = model.answers(model.features(tokens[:, :-1]).x[wanted])
    return model.logits(model.hidden(y)).float()


def _by_coefficient(
    weights: CandidateWeights, slopes: Mapping[str, Tensor], lock: threading.Lock
) -> Rows:
    """Inner products with the parents' task vectors, summed by group."""
    found: Rows = {group: [0.0] * len(weights.parents) for group in weights.groups.names}
    for name, slope in slopes.items():
        with lock:
            vectors = weights.task_vectors(name)
        flat, row = slope.cpu().flatten(), found[weights.groups.group_of(name)]
        for i, vector in enumerate(vectors):
            row[i] += float(flat @ vector.flatten())
    return found
