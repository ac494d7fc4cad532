"""The fitness of a candidate: one number from 0 to 1 and the parts that it consists of.

    fitness = sum of weight * part; every part is in [0, 1] and means the same for every model

    perplexity   1 - H / H0, bits per byte against a model that only counts bytes
    accuracy     beyond chance, where there are answers
    speed        1 / (1 + the weights in its layers / the parents'), so 0.5 at the parents'
    memory       1 / (1 + its bytes / the parents')

Speed and memory are counted, not measured: a clock's noise must not choose the champion. Only a
path has another shape than its parents; for all others they damp what the other parts say.
Perplexity and accuracy are means over domains. A fitness of the user's own replaces all of that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from agent_forge import platform
from agent_forge.errors import ConfigError, PhaseFailed
from agent_forge.evals.domains import Domain, beyond_chance, evaluation_hash, perplexity_score
from agent_forge.evals.likelihood import ItemScores
from agent_forge.evals.model_under_test import ModelUnderTest, TokenizedDomain
from agent_forge.evals.racing import (
    SHARES,
    Incumbent,
    PartialResult,
    estimate,
    first_examples,
    gains_over,
    has_lost,
    join_shards,
    shards,
)

PARTS = ("perplexity", "accuracy", "speed", "memory")
CUSTOM_SECONDS = 3600.0


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


class Fitness(Protocol):
    """Scores whatever weights the network has at the moment."""

    name: str  # of what is measured: the same for the same items and settings
    tokens: int  # that a score takes; 0 if unknown

    def score(self) -> FitnessScore: ...


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
        self.use(model_under_test.model)
        self.prepared = [model_under_test.prepare(domain) for domain in domains]
        self.tokens = sum(len(item.ids) for found in self.prepared for item in found.items)
        self._shards = [shards(domain) for domain in domains] if racing else []
        self._prepared_shards = [
            [_prepare_some(model_under_test, domain, examples) for examples in domain_shards]
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
        """The scores of every example, domain by domain."""
        return [self._measure(prepared) for prepared in self.prepared]

    def _measure(self, prepared: TokenizedDomain) -> ItemScores:
        device = next(self.model_under_test.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.mixed):
            return self.model_under_test.measure(prepared)

    def score(self) -> FitnessScore:
        return self.score_of(self.measure())

    def first_bits(self) -> tuple[float, int]:
        """Bits a byte on the first items of every domain, and the tokens of these items."""
        bits = [
            (share, self._measure(prepared).bits_per_byte(size))
            for share, (size, prepared) in zip(self.shares, self._first, strict=True)
        ]
        return _mean(bits), sum(prepared.tokens for _, prepared in self._first)

    @cached_property
    def _first(self) -> list[tuple[int, TokenizedDomain]]:
        """The first items of every domain, with their bytes."""
        found = []
        for domain in self.domains:
            examples = tuple(domain.examples[i] for i in first_examples(domain))
            part = replace(domain, examples=examples, tasks=(), writing=None)
            found.append((sum(part.sizes), self.model_under_test.prepare(part)))
        return found

    def bonus(self, shape: Mapping[str, float]) -> float:
        """The fitness that a shape adds to that of the parents' shape."""
        weights = self._used_weights()
        gains = (weights.get(name, 0.0) * (part - 0.5) for name, part in shape.items())
        return sum(gains) / sum(weights.values())

    def _used_weights(self) -> dict[str, float]:
        """The weights of the parts that these domains have."""
        exact = any(domain.exact for domain in self.domains)
        return {name: w for name, w in self.weights.items() if name != "accuracy" or exact}

    def race(self, incumbent: Incumbent | None) -> tuple[float, list[ItemScores] | None, int]:
        """Fitness, scores and tokens; if it fell behind, an estimate and None for the scores."""
        results: list[list[PartialResult]] = [[] for _ in self.domains]
        totals, tokens, rates = [len(d.examples) for d in self.domains], 0, self.rates()
        for shard in range(len(SHARES)):
            for d, prepared in enumerate(of_domain[shard] for of_domain in self._prepared_shards):
                if prepared is not None:
                    results[d].append((self._shards[d][shard], self._measure(prepared)))
                    tokens += sum(len(item.ids) for item in prepared.items)
            if incumbent is not None and shard + 1 < len(SHARES):
                gains = [gains_over(incumbent, d, r, *rates[d]) for d, r in enumerate(results)]
                value, error = estimate(gains, totals)
                value += self.bonus(self._shape) - incumbent.bonus
                if has_lost(value, error):
                    return incumbent.fitness + value, None, tokens
        scores = [join_shards(r, n) for r, n in zip(results, totals, strict=True)]
        return self.score_of(scores).fitness, scores, tokens

    def rates(self) -> list[tuple[float, float]]:
        """The fitness that a nat less and a right answer more add, domain by domain."""
        weights = self._used_weights()
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
            perplexity.append((share, perplexity_score(bits, domain.unigram_bits)))
            if domain.exact:
                raw[f"{domain.name}/accuracy"] = items.accuracy
                accuracy.append((share, beyond_chance(items.accuracy, domain.chance)))
        parts = {**self._shape, "perplexity": _mean(perplexity)}
        if accuracy:
            parts["accuracy"] = _mean(accuracy)
        weights = self._used_weights()
        fitness = sum(w * parts[name] for name, w in weights.items()) / sum(weights.values())
        if any(_misses(name, raw[name], floor) for name, floor in self.floors.items()):
            fitness = 0.0
        return FitnessScore(fitness, parts, raw)


def shape_parts(cost: float, size: float) -> dict[str, float]:
    return {"speed": 1 / (1 + cost), "memory": 1 / (1 + size)}


def _prepare_some(
    model_under_test: ModelUnderTest, domain: Domain, examples: Sequence[int]
) -> TokenizedDomain | None:
    if not examples:
        return None
    tasks = tuple(domain.tasks[i] for i in examples) if domain.tasks else ()
    chosen = tuple(domain.examples[i] for i in examples)
    return model_under_test.prepare(replace(domain, examples=chosen, tasks=tasks))


def _mean(shares: Sequence[tuple[float, float]]) -> float:
    total = sum(share for share, _ in shares)
    return sum(share * value for share, value in shares) / total if total else 0.0


def _misses(name: str, value: float, floor: float) -> bool:
    """True if a value is worse than its floor: of bits fewer are better."""
    return value > floor if name.endswith("/bits_per_byte") else value < floor


def is_function(fitness: str) -> bool:
    """True for `module:function`; else the user's own fitness is a command, or there is none."""
    return ":" in fitness and " " not in fitness


def require_module(place: str) -> None:
    """Refuse a function whose module is not there, without running any of it."""
    name = place.partition(":")[0].partition(".")[0]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"there is no fitness {place!r}: no module {name!r}",
            hint="give it as module:function; the module has to be importable from here",
        )


def function_of(place: str) -> Callable[[nn.Module], Any]:
    """The function that `module:function` names."""
    module, _, attribute = place.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it; the command `forge` has not
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may do anything
        raise ConfigError(
            f"there is no fitness {place!r}: {type(error).__name__}: {error}",
            hint="give it as module:function; the module has to be importable from here",
        ) from error
    if not callable(found):
        raise ConfigError(f"{place!r} is not a function")
    return found  # type: ignore[no-any-return]


class FunctionFitness:
    """The user's own `module:function`, which gets the model and returns a number."""

    tokens = 0

    def __init__(self, place: str, model: nn.Module, sign: int) -> None:
        self._function = function_of(place)
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

    def __init__(self, command: str, write: Callable[[], Path], sign: int) -> None:
        self._words = shlex.split(command)
        if not self._words:
            raise ConfigError("the fitness command is empty")
        self._write, self._sign, self.name = write, sign, f"command {command} {sign}"

    def score(self) -> FitnessScore:
        folder = self._write()
        words = [word.replace("{model}", str(folder)) for word in self._words]
        if words == self._words:
            words.append(str(folder))
        try:
            code, out, errors = _run(words)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PhaseFailed(f"{self.name}: {error}") from error
        words = out.split()
        if code or not words:
            last = errors.strip().splitlines()[-1:] or ["nothing was printed"]
            raise PhaseFailed(f"{self.name} ended with {code}: {last[0]}")
        return _own_score(words[-1], self._sign, self.name)


def _run(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code and output of a command. It is in a group of its own: Ctrl-C is not for it."""
    pipe = subprocess.PIPE
    group = platform.new_group()
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, **group) as process:
        try:
            out, errors = process.communicate(timeout=CUSTOM_SECONDS)
        except BaseException:
            platform.kill_group(process)
            raise
    return process.returncode, out, errors


def _own_score(value: Any, sign: int, name: str) -> FitnessScore:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise PhaseFailed(f"{name} gave {value!r}, which is no number") from error
    if not math.isfinite(number):
        raise PhaseFailed(f"{name} gave {number}")
    return FitnessScore(sign * number, {}, {"own": number})
