"""The fitness of a candidate: one number from 0 to 1 and the parts that it consists of.

    fitness = sum of weight * part; every part is in [0, 1] and means the same for every model

    perplexity   1 - H / H0, bits per byte against a model that only counts bytes
    accuracy     beyond chance, where there are answers
    speed        1 / (1 + the weights in its layers / the parents'), so 0.5 at the parents'
    memory       1 / (1 + its bytes / the parents')

Speed and memory are counted, not measured: a clock's noise must not choose the champion. Only a
path has another shape than its parents; for all others they damp what the other parts say.
Perplexity and accuracy are means over domains. A fitness of the user's own replaces all of that.

Racing measures the items of every domain in growing shards, in the order of their hashes. After
each the paired differences to the champion estimate the fitness on all items (a sum over items but
for its bounds). Who is `SURE` standard errors below is dropped with the estimate as its score.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agent_forge import platform
from agent_forge.errors import ConfigError, PhaseFailed
from agent_forge.evals import domains as scoring
from agent_forge.evals.domains import Domain, content_hash, evaluation_hash
from agent_forge.evals.model_under_test import ItemScores, ModelUnderTest, TokenizedDomain
from agent_forge.infer.generate import ProgressCallback, no_progress

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the items, at the end of each shard
SURE = 1.0  # more of them save little and find nothing better (docs/evomerge.md)
LEAST = 8  # items of a domain before anything is concluded from them
PARTS = ("perplexity", "accuracy", "speed", "memory")
CUSTOM_SECONDS = 3600.0
WrittenModel = Callable[[], contextlib.AbstractContextManager[Path]]


@dataclass(frozen=True)
class FitnessScore:
    """A measured candidate. `raw` has the figures behind the parts, by domain."""

    fitness: float
    parts: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)

    @property
    def quality(self) -> float:
        """Perplexity and accuracy alone: the parts that a merge can change."""
        known = [self.parts[name] for name in PARTS[:2] if name in self.parts]
        return sum(known) / len(known) if known else self.fitness


@dataclass(frozen=True)
class Incumbent:
    """The champion to beat: its fitness, and its result for each item of every domain."""

    key: str
    fitness: float
    right: list[list[bool]]
    loss: list[list[float]]
    bonus: float = 0.0  # in its fitness, for needing less than the parents


def shards(domain: Domain) -> list[list[int]]:
    """The examples of each shard; those of a small domain are all in the last one."""
    order = _order(domain)
    ends = [round(share * len(order)) for share in SHARES]
    if ends[0] < LEAST:
        return [*([] for _ in SHARES[1:]), order]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _order(domain: Domain) -> list[int]:
    return sorted(range(len(domain.examples)), key=lambda i: content_hash(domain.examples[i]))


def estimate(gains: Sequence[NDArray[np.float64]], totals: Sequence[int]) -> tuple[float, float]:
    """The fitness that a candidate leads by on all items, from its gains so far, and the error."""
    value = variance = 0.0
    for own, total in zip(gains, totals, strict=True):
        measured = len(own)
        if not measured:
            return 0.0, math.inf
        value += total * float(own.mean())
        if measured < total:
            variance += total**2 * (1 - measured / total) * float(own.var(ddof=1)) / measured
    return value, math.sqrt(variance)


class DomainFitness:
    """Likelihood and exact match on domains."""

    def __init__(
        self,
        model_under_test: ModelUnderTest,
        domains: Sequence[Domain],
        weights: Mapping[str, float],
        floors: Mapping[str, float],
        domain_weights: Mapping[str, float] | None = None,
        mixed: bool = False,
        racing: bool = False,
    ) -> None:
        self.model_under_test, self.domains = model_under_test, list(domains)
        # In one order, wherever they come from: another one would give other last bits.
        self.weights = {name: weights[name] for name in PARTS if weights.get(name)}
        self.floors = dict(floors)
        self.shares = [(domain_weights or {}).get(domain.name, 1.0) for domain in domains]
        self.mixed, self.racing = mixed, racing
        self.progress: ProgressCallback = no_progress  # told of every measurement
        self.use(model_under_test.model)
        self.prepared = [model_under_test.prepare(domain) for domain in domains]
        self.tokens = sum(len(item.ids) for found in self.prepared for item in found.items)
        self._shards = [shards(domain) for domain in domains] if racing else []
        self._prepared_shards = [
            [model_under_test.prepare(domain.select(s)) if s else None for s in domain_shards]
            for domain, domain_shards in zip(domains, self._shards, strict=False)
        ]
        how: dict[str, Any] = {"weights": self.weights, "floors": self.floors}
        how |= {"racing": SHARES} if racing else {}  # other batches, so other last bits
        self.name = evaluation_hash(domains, **how, shares=self.shares, mixed=mixed)

    def use(self, model: nn.Module, cost: float = 1.0, size: float = 1.0) -> None:
        """Measure what is in this network; its cost and bytes are multiples of the parents'."""
        self.model_under_test = replace(self.model_under_test, model=model)
        self._shape = shape_parts(cost, size)

    def measure(self) -> list[ItemScores]:
        return [self._measure(prepared) for prepared in self.prepared]

    def _measure(self, prepared: TokenizedDomain) -> ItemScores:
        device = next(self.model_under_test.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.mixed):
            return self.model_under_test.measure(prepared, self.progress)

    def score(self) -> FitnessScore:
        return self.score_of(self.measure())

    def first_bits(self) -> tuple[float, int]:
        """Bits a byte on the first items of every domain, and the tokens of these items."""
        bits = [self._measure(prepared).bits_per_byte(size) for size, prepared in self._first]
        total = sum(prepared.tokens for _, prepared in self._first)
        return _mean(list(zip(self.shares, bits, strict=True))), total

    @cached_property
    def _first(self) -> list[tuple[int, TokenizedDomain]]:
        """The first items of every domain, with their bytes."""
        counts = [max(LEAST, round(SHARES[0] * len(d.examples))) for d in self.domains]
        first = [d.select(_order(d)[:n]) for d, n in zip(self.domains, counts, strict=True)]
        prepare = self.model_under_test.prepare
        return [(sum(d.sizes), prepare(replace(d, writing=None))) for d in first]

    def bonus(self, shape: Mapping[str, float]) -> float:
        """The fitness that a shape adds to that of the parents' shape."""
        weights = self._used_weights
        gains = (weights.get(name, 0.0) * (part - 0.5) for name, part in shape.items())
        return sum(gains) / sum(weights.values())

    @cached_property
    def _used_weights(self) -> dict[str, float]:
        exact = any(domain.exact for domain in self.domains)
        return {name: w for name, w in self.weights.items() if name != "accuracy" or exact}

    def race(self, incumbent: Incumbent | None) -> tuple[float, list[ItemScores] | None, int]:
        """Fitness, scores and tokens; if it fell behind, an estimate and None for the scores."""
        # Of each example, once measured: right, loss, tokens and steps.
        rows: list[list[Any]] = [[None] * len(domain.examples) for domain in self.domains]
        totals, tokens, rates = [len(own) for own in rows], 0, self.rates()
        for shard in range(len(SHARES)):
            for d, prepared in enumerate(of_domain[shard] for of_domain in self._prepared_shards):
                if prepared is not None:
                    found = self._measure(prepared)
                    columns = found.right, found.loss, found.tokens, found.steps
                    for i, *row in zip(self._shards[d][shard], *columns, strict=True):
                        rows[d][i] = row
                    tokens += sum(len(item.ids) for item in prepared.items)
            if incumbent is not None and shard + 1 < len(SHARES):
                gains = []
                for d, (per_nat, per_answer) in enumerate(rates):
                    right, loss = incumbent.right[d], incumbent.loss[d]
                    seen = [i for examples in self._shards[d][: shard + 1] for i in examples]
                    nats = (per_nat * (loss[i] - rows[d][i][1]) for i in seen)
                    answers = (per_answer * (rows[d][i][0] - right[i]) for i in seen)
                    gains.append(np.array([a + b for a, b in zip(nats, answers, strict=True)]))
                value, error = estimate(gains, totals)
                value += self.bonus(self._shape) - incumbent.bonus
                if value + SURE * error < 0:
                    return incumbent.fitness + value, None, tokens
        scores = [ItemScores(*map(list, zip(*own, strict=True))) for own in rows]
        return self.score_of(scores).fitness, scores, tokens

    def rates(self) -> list[tuple[float, float]]:
        """The fitness that a nat less and a right answer more add, domain by domain."""
        weights = self._used_weights
        total = sum(weights.values())
        bits = weights.get("perplexity", 0.0) / total / (sum(self.shares) or 1.0)
        pairs = list(zip(self.shares, self.domains, strict=True))
        answers = sum(share for share, domain in pairs if domain.exact) or 1.0
        right = weights.get("accuracy", 0.0) / total / answers
        found = []
        for share, d in pairs:
            per_nat = bits / math.log(2) / sum(d.sizes) / d.unigram_bits if d.unigram_bits else 0.0
            chance = d.chance if d.exact else 1.0
            per_answer = right / (1 - chance) / len(d.examples) if chance < 1 else 0.0
            found.append((share * per_nat, share * per_answer))
        return found

    def score_of(self, scores: Sequence[ItemScores]) -> FitnessScore:
        """The score that items amount to. Below a floor there is nothing to gain elsewhere."""
        raw: dict[str, float] = {}
        perplexity, accuracy = [], []
        for domain, share, items in zip(self.domains, self.shares, scores, strict=True):
            bits = items.bits_per_byte(sum(domain.sizes))
            raw[f"{domain.name}/bits_per_byte"] = bits
            perplexity.append((share, scoring.perplexity_score(bits, domain.unigram_bits)))
            if domain.exact:
                raw[f"{domain.name}/accuracy"] = items.accuracy
                accuracy.append((share, scoring.beyond_chance(items.accuracy, domain.chance)))
        parts = {**self._shape, "perplexity": _mean(perplexity)}
        if accuracy:
            parts["accuracy"] = _mean(accuracy)
        weights = self._used_weights
        fitness = sum(w * parts[name] for name, w in weights.items()) / sum(weights.values())
        for name, floor in self.floors.items():  # of bits fewer are better
            if (raw[name] > floor) if name.endswith("/bits_per_byte") else (raw[name] < floor):
                fitness = 0.0
        return FitnessScore(fitness, parts, raw)


def shape_parts(cost: float, size: float) -> dict[str, float]:
    return {"speed": 1 / (1 + cost), "memory": 1 / (1 + size)}


def _mean(shares: Sequence[tuple[float, float]]) -> float:
    total = sum(share for share, _ in shares)
    return sum(share * value for share, value in shares) / total if total else 0.0


def is_function(fitness: str) -> bool:
    """True for `module:function`; else the user's own fitness is a command, or there is none."""
    return ":" in fitness and " " not in fitness


def require_module(place: str) -> None:
    """Refuse a function whose module is not there, without running any of it."""
    name = place.partition(":")[0].partition(".")[0]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it; the command `forge` has not
    if name not in sys.modules and not (name and importlib.util.find_spec(name)):
        raise _no_fitness(place, f"no module {name!r}")


def source_sha256(own: str) -> str:
    """sha256 of the files that a fitness of the user's own names: edited, it is another one."""
    words = shlex.split(own)
    if own and is_function(own):
        require_module(own)
        name, places = "", None  # None: all of sys.path
        for part in own.partition(":")[0].split("."):  # found without running any of it
            name = f"{name}.{part}".lstrip(".")
            spec = importlib.machinery.PathFinder.find_spec(name, places)
            places = spec.submodule_search_locations if spec else []
            words = [spec.origin or ""] if spec else []
    digest = hashlib.sha256()
    for file in (Path(word) for word in words):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def _no_fitness(place: str, problem: str) -> ConfigError:
    hint = "give it as module:function; the module has to be importable from here"
    return ConfigError(f"there is no fitness {place!r}: {problem}", hint=hint)


class FunctionFitness:
    """The user's own `module:function`, which gets the model and returns a number."""

    tokens = 0

    def __init__(self, place: str, model: nn.Module, sign: int) -> None:
        require_module(place)
        module, _, attribute = place.partition(":")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
                self._function = getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # the user's module may do anything
            raise _no_fitness(place, f"{type(error).__name__}: {error}") from error
        if not callable(self._function):
            raise ConfigError(f"{place!r} is not a function")
        self._model, self._sign, self.name = model, sign, f"function {place} {sign}"

    def score(self) -> FitnessScore:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
                value = self._function(self._model)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise PhaseFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        return _own_score(value, self._sign, self.name)


class CommandFitness:
    """The user's own command, which gets a model directory and prints a number last."""

    tokens = 0

    def __init__(self, command: str, written: WrittenModel, sign: int) -> None:
        self._words = shlex.split(command)
        if not self._words:
            raise ConfigError("the fitness command is empty")
        self._written, self._sign, self.name = written, sign, f"command {command} {sign}"

    def score(self) -> FitnessScore:
        with self._written() as folder:
            return self._score(folder)

    def _score(self, folder: Path) -> FitnessScore:
        words = [word.replace("{model}", str(folder)) for word in self._words]
        if words == self._words:
            words.append(str(folder))
        pipe, group = subprocess.PIPE, platform.new_group()  # its own: Ctrl-C is not for it
        try:
            with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, **group) as process:
                try:
                    out, errors = process.communicate(timeout=CUSTOM_SECONDS)
                except BaseException:
                    platform.kill_group(process)
                    raise
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PhaseFailed(f"{self.name}: {error}") from error
        printed, code = out.split(), process.returncode
        if code or not printed:
            last = errors.strip().splitlines()[-1:] or ["nothing was printed"]
            raise PhaseFailed(f"{self.name} ended with {code}: {last[0]}")
        return _own_score(printed[-1], self._sign, self.name)


def _own_score(value: Any, sign: int, name: str) -> FitnessScore:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise PhaseFailed(f"{name} gave {value!r}, which is no number") from error
    if not math.isfinite(number):
        raise PhaseFailed(f"{name} gave {number}")
    return FitnessScore(sign * number, {}, {"own": number})


Fitness = DomainFitness | FunctionFitness | CommandFitness
