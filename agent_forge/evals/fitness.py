"""The fitness of a candidate: one number from 0 to 1 and the parts that it consists of.

    fitness = sum of weight * part; every part is in [0, 1] and means the same for every model

    perplexity   1 - H / H0, bits per byte against a model that only counts bytes; a model that is
                 worse than that falls to `BELOW` below 0, so that two of them never tie
    accuracy     beyond chance, where there are answers
    speed        1 / (1 + the weights in its layers / the parents'), so 0.5 at the parents'
    memory       1 / (1 + its bytes / the parents')

Speed and memory are counted, not measured: a clock's noise must not choose the champion. Only a
path has another shape than its parents; for all others they damp what the other parts say.
Perplexity and accuracy are means over domains. Domains in which no parent is right more often than
chance explains (`at_floor`) are left out of accuracy: there it is noise. (The strategy `spec`, and
evolutions begun before that was so, count all of them, and bound perplexity by 0.)
A fitness of the user's own replaces all of that.

Racing measures the items of every domain in growing shards, in the order of their hashes. After
each the paired differences to the champion estimate the fitness on all items (a sum over items but
for its bounds). Who is `SURE` standard errors below is dropped with the estimate as its score. A
fast reading has finer shards, and asks for more errors, by Student's t, the fewer items there are.
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
from dataclasses import asdict, dataclass, field, replace
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

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the items, at the end of each shard, in the plain reading
SURE = 1.0  # more of them save little and find nothing better (docs/evomerge.md)
FINE_SHARES = (1 / 32, 1 / 16, *SHARES)  # a hopeless candidate costs a few per cent
FINE_SURE = 1.5  # they look more often, at fewer items
LEAST = 8  # items of a domain before anything is concluded from them
BELOW = 0.1
FLOOR_LEVEL = 0.05  # of the one-sided test against chance
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


def shards(domain: Domain, shares: Sequence[float] = SHARES) -> list[list[int]]:
    """The examples of each shard; those of a small domain are all in the last one."""
    order = _order(domain)
    ends = [round(share * len(order)) for share in shares]
    if shares is not SHARES and len(order) >= 2 * LEAST:
        ends = [max(LEAST, end) for end in ends]  # a shard after the first may have nothing new
    if ends[0] < LEAST:
        return [*([] for _ in shares[1:]), order]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def student(z: float, freedom: int) -> float:
    """The quantile of Student's t that has the probability of a normal z (Cornish and Fisher)."""
    first = (z**3 + z) / (4 * freedom)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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
        self._ends = SHARES if model_under_test.reading is None else FINE_SHARES
        self._shards = [shards(domain, self._ends) for domain in domains] if racing else []
        self._prepared_shards = [
            [model_under_test.prepare(domain.select(s)) if s else None for s in domain_shards]
            for domain, domain_shards in zip(domains, self._shards, strict=False)
        ]
        how: dict[str, Any] = {"weights": self.weights, "floors": self.floors}
        how |= {"racing": self._ends} if racing else {}  # other batches, so other last bits
        how |= {"reading": asdict(model_under_test.reading)} if model_under_test.reading else {}
        self._own_name = evaluation_hash(domains, **how, shares=self.shares, mixed=mixed)
        self.leave_out(None)

    def leave_out(self, floor: Sequence[str] | None) -> None:
        """Give no weight to the accuracy of these domains; None counts as `spec` does."""
        self.floor = floor
        self.name = self._own_name if floor is None else f"{self._own_name} floor {sorted(floor)}"
        self._answers = [d.exact and d.name not in (floor or ()) for d in self.domains]
        self._used_weights = {
            name: w for name, w in self.weights.items() if name != "accuracy" or any(self._answers)
        }

    def at_floor(self, parents: Sequence[Mapping[str, float]]) -> list[str]:
        """The domains in which chance explains the accuracy of each parent (its `raw`): where
        nothing can be guessed, that of one right answer among all. None, if nothing else counts."""
        from scipy.stats import binom  # here: it takes a second to load

        found = []
        for domain in self.domains if "perplexity" in self.weights else ():
            n = len(domain.examples)
            luck = max(domain.chance, 1 / n)
            right = (round(n * raw[f"{domain.name}/accuracy"]) for raw in parents if domain.exact)
            if domain.exact and all(binom.sf(k - 1, n, luck) >= FLOOR_LEVEL for k in right):
                found.append(domain.name)
        return found

    def use(self, model: nn.Module, cost: float = 1.0, size: float = 1.0) -> None:
        """Measure what is in this network; its cost and bytes are multiples of the parents'."""
        self.model_under_test = replace(self.model_under_test, model=model)
        self._shape = shape_parts(cost, size)

    def measure(self) -> list[ItemScores]:
        return self._measure(self.prepared)

    def _measure(self, prepared: Sequence[TokenizedDomain]) -> list[ItemScores]:
        weight = next(self.model_under_test.model.parameters())
        cast = self.mixed and weight.dtype != torch.bfloat16
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=cast):
            return self.model_under_test.measure_all(prepared, self.progress)

    def score(self) -> FitnessScore:
        return self.score_of(self.measure())

    def first_bits(self) -> tuple[float, int]:
        """Bits a byte on the first items of every domain, and the tokens of these items."""
        sizes, prepared = zip(*self._first, strict=True)
        items = zip(self._measure(prepared), sizes, strict=True)
        bits = [scores.bits_per_byte(size) for scores, size in items]
        total = sum(found.tokens for found in prepared)
        return _mean(list(zip(self.shares, bits, strict=True))), total

    @cached_property
    def _first(self) -> list[tuple[int, TokenizedDomain]]:
        """The first items of every domain, with their bytes."""
        counts = [max(LEAST, round(self._ends[0] * len(d.examples))) for d in self.domains]
        first = [d.select(_order(d)[:n]) for d, n in zip(self.domains, counts, strict=True)]
        prepare = self.model_under_test.prepare
        return [(sum(d.sizes), prepare(replace(d, writing=None))) for d in first]

    def bonus(self, shape: Mapping[str, float]) -> float:
        """The fitness that a shape adds to that of the parents' shape."""
        weights = self._used_weights
        gains = (weights.get(name, 0.0) * (part - 0.5) for name, part in shape.items())
        return sum(gains) / sum(weights.values())

    def race(self, incumbent: Incumbent | None) -> tuple[float, list[ItemScores] | None, int]:
        """Fitness, scores and tokens; if it fell behind, an estimate and None for the scores."""
        # Of each example, once measured: right, loss, tokens and steps.
        rows: list[list[Any]] = [[None] * len(domain.examples) for domain in self.domains]
        totals, tokens, rates = [len(own) for own in rows], 0, self.rates()
        for shard in range(len(self._ends)):
            of_shard = [own[shard] for own in self._prepared_shards]
            places = [(d, prepared) for d, prepared in enumerate(of_shard) if prepared]
            measured = self._measure([prepared for _, prepared in places])
            for (d, prepared), found in zip(places, measured, strict=True):
                columns = found.right, found.loss, found.tokens, found.steps
                for i, *row in zip(self._shards[d][shard], *columns, strict=True):
                    rows[d][i] = row
                tokens += sum(len(item.ids) for item in prepared.items)
            # Below a floor the fitness is no sum over items: then nobody is dropped.
            if incumbent is not None and not self.floors and places and shard + 1 < len(self._ends):
                gains = []
                for d, (per_nat, per_answer) in enumerate(rates):
                    right, loss = incumbent.right[d], incumbent.loss[d]
                    seen = [i for examples in self._shards[d][: shard + 1] for i in examples]
                    nats = (per_nat * (loss[i] - rows[d][i][1]) for i in seen)
                    answers = (per_answer * (rows[d][i][0] - right[i]) for i in seen)
                    gains.append(np.array([a + b for a, b in zip(nats, answers, strict=True)]))
                value, error = estimate(gains, totals)
                value += self.bonus(self._shape) - incumbent.bonus
                if value + self._sure(gains) * error < 0:
                    return incumbent.fitness + value, None, tokens
        scores = [ItemScores(*map(list, zip(*own, strict=True))) for own in rows]
        return self.score_of(scores).fitness, scores, tokens

    def _sure(self, gains: Sequence[NDArray[np.float64]]) -> float:
        """The standard errors below the champion at which a candidate is dropped."""
        if self._ends is SHARES:
            return SURE
        return student(FINE_SURE, max(1, sum(len(own) - 1 for own in gains)))

    def rates(self) -> list[tuple[float, float]]:
        """The fitness that a nat less and a right answer more add, domain by domain."""
        weights = self._used_weights
        total = sum(weights.values())
        bits = weights.get("perplexity", 0.0) / total / (sum(self.shares) or 1.0)
        pairs = list(zip(self.shares, self.domains, self._answers, strict=True))
        answers = sum(share for share, _, counts in pairs if counts) or 1.0
        right = weights.get("accuracy", 0.0) / total / answers
        found = []
        for share, d, counts in pairs:
            per_nat = bits / math.log(2) / sum(d.sizes) / d.unigram_bits if d.unigram_bits else 0.0
            chance = d.chance if counts else 1.0
            per_answer = right / (1 - chance) / len(d.examples) if chance < 1 else 0.0
            found.append((share * per_nat, share * per_answer))
        return found

    def score_of(self, scores: Sequence[ItemScores]) -> FitnessScore:
        """The score that items amount to."""
        raw: dict[str, float] = {}
        for domain, items in zip(self.domains, scores, strict=True):
            raw[f"{domain.name}/bits_per_byte"] = items.bits_per_byte(sum(domain.sizes))
            if domain.exact:
                raw[f"{domain.name}/accuracy"] = items.accuracy
        return self.score_from(raw, self._shape)

    def score_from(self, raw: dict[str, float], shape: Mapping[str, float]) -> FitnessScore:
        """The score that figures amount to. Below a floor there is nothing to gain elsewhere."""
        below = 0.0 if self.floor is None else BELOW
        perplexity, accuracy, counted = [], [], []
        for domain, share, counts in zip(self.domains, self.shares, self._answers, strict=True):
            bits = raw[f"{domain.name}/bits_per_byte"]
            part = scoring.perplexity_score(bits, domain.unigram_bits, below)
            perplexity.append((share, part))
            if domain.exact:
                right = scoring.beyond_chance(raw[f"{domain.name}/accuracy"], domain.chance)
                accuracy.append((share, right))
                counted += [(share, right)] if counts else []
        parts = {**shape, "perplexity": _mean(perplexity)}
        if accuracy:
            parts["accuracy"] = _mean(counted or accuracy)
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
    try:
        words = shlex.split(own)
    except ValueError as error:
        raise ConfigError(f"fitness {own!r} cannot be read: {error}") from error
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
