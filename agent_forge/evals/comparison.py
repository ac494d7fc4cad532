"""Comparing models by what each did with the same items: is one better than the other?

Three measures, each a sum over items over a sum of weights: accuracy, bits per byte and, where both
read the text in the same tokens, nats per token. A gain is positive where the candidate is better.
Its interval comes from resampling the items (paired bootstrap, percentiles), its p from the exact
McNemar test for right and wrong, and from flipping signs at random for losses. Near-copies of one
question are one item in both: twenty of them say no more than one. Over several domains the mean
of their gains counts, so that a large file does not outvote a small one.

Told are accuracy, where there are answers, and bits per byte, the one that can tell first: accuracy
cannot where fewer than `DISCORDANT` answers are right for one model alone. Of several comparisons
in one verdict the p are corrected together (`holm`); the intervals are not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_forge.errors import ConfigError
from agent_forge.evals.domains import POWER, Domain, smallest_gain

if TYPE_CHECKING:  # it loads torch, which nothing here needs
    from agent_forge.evals.model_under_test import ItemScores

DRAWS = 10_000
CELLS = 1 << 22  # of a block of draws: bounds the memory
LEVEL = 0.05
DISCORDANT = math.ceil(POWER)  # fewer show no gain, even if all of them are of one model
ACCURACY, BITS, NATS = "accuracy", "bits_per_byte", "nats_per_token"
UNITS = {ACCURACY: (100, "points"), BITS: (1, "bits per byte"), NATS: (1, "nats per token")}
COLUMNS = ("domain", "measure", "n", "A", "B", "gain of B", "95 % interval", "p", "verdict")

Floats = NDArray[np.float64]
Domains = Sequence[Domain]
Scores = Sequence["ItemScores"]


@dataclass(frozen=True)
class PairedScores:
    """Two models on the items of a domain. `sizes` are the bytes that each item asks for."""

    name: str
    reference: ItemScores
    candidate: ItemScores
    sizes: Sequence[int]
    exact: bool = True  # whether right and wrong mean anything
    questions: Sequence[int] = ()  # the number of each item's; none: each has its own

    def __post_init__(self) -> None:
        a, b = self.reference, self.candidate
        scored = (a.loss, b.loss, b.right, self.questions or a.loss)
        if {len(column) for column in scored} != {len(self.sizes)} or not self.sizes:
            raise ConfigError(f"{self.name}: the two models were not measured on the same items")


@dataclass(frozen=True)
class Gain:
    """One measure of two models: their values, the gain (positive is better), how sure it is."""

    reference: float
    candidate: float
    value: float
    low: float  # 95 % interval
    high: float
    p: float  # of so large a difference, either way, between equals
    n: int
    discordant: int | None = None  # questions that one of the two alone has right, or more often
    p_holm: float | None = None  # corrected for the other comparisons of the same verdict

    @property
    def decisive_p(self) -> float:
        """The corrected p, where there is one."""
        return self.p if self.p_holm is None else self.p_holm

    @property
    def verdict(self) -> str:
        """better, worse or unclear: both the test and the interval have to say so."""
        if self.decisive_p < LEVEL and self.low > 0:
            return "better"
        return "worse" if self.decisive_p < LEVEL and self.high < 0 else "unclear"

    @property
    def can_tell(self) -> bool:
        """False for an accuracy with too few differing answers to show any gain."""
        return self.discordant is None or self.discordant >= DISCORDANT

    def sentence(self, measure: str, reference: str) -> str:
        """The gain in words."""
        if not self.can_tell:
            shares = f"{100 * self.reference:.1f} % and {100 * self.candidate:.1f} %"
            return f"{measure} cannot tell: {shares}, {self.discordant} of {self.n} answers differ"
        (scale, unit), digits = UNITS[measure], 1 if measure == ACCURACY else 4
        value, low, high = (scale * x for x in (self.value, self.low, self.high))
        p = f"p = {self.decisive_p:.3f}" if self.decisive_p >= 0.001 else "p < 0.001"
        change = f"{self.verdict} than {reference} by {abs(value):.{digits}f}"
        if self.verdict == "unclear":
            change = f"no significant gain over {reference}: {value:+.{digits}f}"
        interval = f"95 % interval {low:.{digits}f}..{high:.{digits}f}"
        return f"{change} {unit} ({interval}, {p}, n = {self.n})"


@dataclass(frozen=True)
class DomainGains:
    """The gains by measure, of one domain or as the mean of all."""

    name: str
    gains: Mapping[str, Gain]

    def sentence(self, reference: str = "the reference") -> str:
        """The result in words, by the measure that can tell first."""
        return "; ".join(self.gains[m].sentence(m, reference) for m in self.measures())

    def measures(self) -> list[str]:
        """What the result is told by: accuracy of answers and bits a byte, what can tell first."""
        told = [measure for measure in (ACCURACY, BITS) if measure in self.gains]
        return sorted(told, key=lambda measure: not self.gains[measure].can_tell)

    def rows(self) -> list[tuple[Any, ...]]:
        """A row under COLUMNS for each measure."""
        rows = []
        for measure, (scale, unit) in UNITS.items():
            if gain := self.gains.get(measure):
                values = (gain.reference, gain.candidate, gain.value, gain.low, gain.high)
                a, b, value, low, high = (f"{scale * x:.{1 if scale > 1 else 4}f}" for x in values)
                name = f"{measure}, {unit}" if scale > 1 else unit
                p = f"{gain.decisive_p:.4f}"
                row = (self.name, name, gain.n, a, b, value, f"{low}..{high}", p, gain.verdict)
                rows.append(row)
        return rows

    def to_json(self) -> dict[str, Any]:
        return {name: {**asdict(g), "verdict": g.verdict} for name, g in self.gains.items()}


@dataclass(frozen=True)
class Comparison:
    """A verdict for every domain, and one over all."""

    domains: tuple[DomainGains, ...]
    overall: DomainGains

    def worse_domains(self) -> str:
        """In words, in which of several domains the candidate is worse; empty if in none."""
        if len(self.domains) < 2:
            return ""
        told = ((d.name, d.gains[m].sentence(m, "it")) for d in self.domains for m in d.measures())
        lost = ((name, text.split(" (")[0]) for name, text in told if text.startswith("worse"))
        return "".join(f"; on {name} {text}" for name, text in lost)

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows of a table under COLUMNS: each measure of each domain, accuracy in points."""
        verdicts = [*self.domains, self.overall] if len(self.domains) > 1 else self.domains
        return [row for verdict in verdicts for row in verdict.rows()]

    def to_json(self) -> dict[str, Any]:
        by_domain = {verdict.name: verdict.to_json() for verdict in self.domains}
        return {"domains": by_domain, "overall": self.overall.to_json()}


def compare(reference: Scores, candidate: Scores, items: Domains, seed: int = 0) -> Comparison:
    """Compare two models by their scores on the same domains."""
    scored = zip(items, reference, candidate, strict=True)
    pairs = (PairedScores(d.name, a, b, d.sizes, d.exact, d.questions) for d, a, b in scored)
    return compare_scores([*pairs], seed=seed)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected so that with 5 % at most any of them is below 5 % by chance (Holm)."""
    corrected, least = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def correct_together(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of one verdict, with the p of each measure of each domain, and over all,
    corrected together."""
    several = [[*comparison.domains, comparison.overall] for comparison in comparisons]
    found: list[list[DomainGains]] = [[] for _ in comparisons]
    for of_domain in zip(*several, strict=True):
        gains: list[dict[str, Gain]] = [dict(verdict.gains) for verdict in of_domain]
        for measure in UNITS:
            having = [own for own in gains if measure in own]
            corrected = holm([own[measure].p for own in having])
            for own, p in zip(having, corrected, strict=True):
                own[measure] = replace(own[measure], p_holm=p)
        for place, verdict, own in zip(found, of_domain, gains, strict=True):
            place.append(replace(verdict, gains=own))
    return [Comparison(tuple(domains), overall) for *domains, overall in found]


def detectable_gain(items: Domains) -> tuple[int, float | None]:
    """How many answers there are, and the smallest gain in accuracy that so many can show."""
    answers = sum(len(set(domain.questions)) for domain in items if domain.exact)
    return answers, smallest_gain(answers) if answers else None


def compare_scores(pairs: Sequence[PairedScores], seed: int = 0, draws: int = DRAWS) -> Comparison:
    """Compare two models. The same seed gives the same numbers, whatever else is compared."""
    if not pairs:
        raise ConfigError("there is nothing to compare")
    terms, drawn, verdicts = [_terms(pair) for pair in pairs], [], []
    for pair, columns in zip(pairs, terms, strict=True):
        draw = _bootstrap(columns, _generator(seed, "bootstrap", pair.name), draws)
        gains = {m: _gain([t], [draw[m]], m, seed, pair.name, draws) for m, t in columns.items()}
        verdicts.append(DomainGains(pair.name, gains))
        drawn.append(draw)
    if len(pairs) == 1:
        return Comparison(tuple(verdicts), verdicts[0])
    overall = {}
    for measure in UNITS:
        having = [i for i, columns in enumerate(terms) if measure in columns]
        if having and (measure != NATS or len(having) == len(pairs)):
            chosen, lines = [terms[i][measure] for i in having], [drawn[i][measure] for i in having]
            overall[measure] = _gain(chosen, lines, measure, seed, "all domains", draws)
    return Comparison(tuple(verdicts), DomainGains("all domains", overall))


class _Terms(NamedTuple):
    """A measure as a quotient of sums: of gains and of weights."""

    gain: Floats
    weight: Floats
    values: tuple[float, float]  # of the reference and of the candidate


def _terms(pair: PairedScores) -> dict[str, _Terms]:
    a, b = pair.reference, pair.candidate
    # Of each measure its columns, its weights, and whether more (1) or less (-1) is better.
    columns: dict[str, tuple[Any, Any, Any, int]]
    columns = {BITS: (a.loss, b.loss, math.log(2) * np.asarray(pair.sizes, float), -1)}
    if pair.exact:
        columns[ACCURACY] = a.right, b.right, np.ones(len(pair.sizes)), 1
    if list(a.tokens) == list(b.tokens):
        columns[NATS] = a.loss, b.loss, a.tokens, -1
    found = {}
    for measure, (*numbers, better) in columns.items():
        reference, candidate, weight = (np.asarray(column, float) for column in numbers)
        values = float(reference.sum() / weight.sum()), float(candidate.sum() / weight.sum())
        gain = _by_question(better * (candidate - reference), pair.questions)
        found[measure] = _Terms(gain, _by_question(weight, pair.questions), values)
    return found


def _by_question(column: Floats, questions: Sequence[int]) -> Floats:
    """The sums of a column over the items of each question."""
    if len(set(questions)) == len(questions):
        return column
    return np.bincount(np.asarray(questions), weights=column).astype(np.float64)


def _gain(
    terms: Sequence[_Terms], drawn: Sequence[Floats], measure: str, seed: int, name: str, draws: int
) -> Gain:
    """The mean over domains of one measure, with its interval and p."""
    low, high = np.quantile(np.mean(drawn, axis=0), [LEVEL / 2, 1 - LEVEL / 2])
    shares = [t.gain / t.weight.sum() / len(terms) for t in terms]
    discordant = sum(int((t.gain != 0).sum()) for t in terms) if measure == ACCURACY else None
    if measure == ACCURACY and len(terms) == 1:
        gain = terms[0].gain
        p = mcnemar(int((gain > 0).sum()), int((gain < 0).sum()))
    else:
        p = sign_flip(np.concatenate(shares), _generator(seed, measure, name), draws)
    reference, candidate = (float(np.mean([t.values[side] for t in terms])) for side in (0, 1))
    value, n = float(sum(share.sum() for share in shares)), sum(len(t.gain) for t in terms)
    return Gain(reference, candidate, value, float(low), float(high), p, n, discordant)


def compare_answers(
    reference: Sequence[bool], candidate: Sequence[bool], name: str, seed: int = 0
) -> Gain:
    """The gain in accuracy of one model, or of one way to ask it, over another: right or wrong on
    the same items."""
    if len(reference) != len(candidate) or not reference:
        raise ConfigError(f"{name}: the two were not measured on the same items")
    a, b = (np.asarray(column, float) for column in (reference, candidate))
    terms = _Terms(b - a, np.ones(len(a)), (float(a.mean()), float(b.mean())))
    drawn = _bootstrap({ACCURACY: terms}, _generator(seed, "bootstrap", name), DRAWS)[ACCURACY]
    return _gain([terms], [drawn], ACCURACY, seed, name, DRAWS)


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p of so uneven a split of the items on which the models differ."""
    from scipy.stats import binomtest  # here: it takes a second to load

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def sign_flip(gains: Floats, rng: np.random.Generator, draws: int = DRAWS) -> float:
    """The two-sided p of the sum of gains, if each could as well have had the other sign."""
    gains = gains[gains != 0]
    total = float(gains.sum())
    slack = 1e-9 * float(np.abs(gains).sum())  # equal sums may differ in their last bits
    beyond = 0
    for rows in _blocks(draws, len(gains)):
        bits = rng.integers(0, 2, (rows, len(gains)), dtype=np.int8)
        sums = 2 * (bits @ gains) - total
        beyond += int((np.abs(sums) >= abs(total) - slack).sum())
    return (beyond + 1) / (draws + 1)  # what was seen is one of the possible


def _bootstrap(terms: dict[str, _Terms], rng: np.random.Generator, draws: int) -> dict[str, Floats]:
    """Every measure on items drawn with replacement, the same ones for all measures."""
    n = len(next(iter(terms.values())).gain)
    found: dict[str, list[Floats]] = {measure: [] for measure in terms}
    for rows in _blocks(draws, n):
        chosen = rng.integers(0, n, (rows, n), dtype=np.int32)
        for measure, t in terms.items():
            found[measure].append(t.gain[chosen].sum(1) / t.weight[chosen].sum(1))
    return {measure: np.concatenate(parts) for measure, parts in found.items()}


def _blocks(draws: int, n: int) -> list[int]:
    """How many draws are made at once, block by block."""
    most = max(1, CELLS // max(1, n))
    return [min(most, draws - first) for first in range(0, draws, most)]


def _generator(seed: int, *names: str) -> np.random.Generator:
    """A random stream of its own for every use."""
    key = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:16], "little"))
