"""Do the thoughts of a model help, or are they theatre? Measured, with controls that can say no.

A model thinks about unseen items and answers. Then it answers without its thoughts, with those of
other items, with random digits in them and with filler of the same length; and from a step in
which a digit was changed it goes on by itself: an answer that follows the changed step was thought,
one that stays right was not. All comparisons are paired. `assess` returns a verdict that can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from random import Random
from typing import Any

import numpy as np

from agent_forge.data import traces
from agent_forge.data.loader import TokenizedItem
from agent_forge.data.tasks import Task, is_right
from agent_forge.data.tasks.reasoning import ADVANCE
from agent_forge.data.tokenizer import Tokenizer, behind_thought
from agent_forge.evals.coherence import VALID, CoherenceValidator, Scores, coherence
from agent_forge.evals.comparison import Gain, compare_answers
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.infer import thinking
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import ForgeModel

OWN, NONE, SHUFFLED, RANDOM, FILLER = "own", "none", "shuffled", "random digits", "filler"
CONDITIONS = (OWN, NONE, SHUFFLED, RANDOM, FILLER)
ANSWER_TOKENS = 16
# What thoughts have to reach: of the specification, and of its summary.
LEAST_GAIN, LEAST_POWER, LEAST_CORRELATION, LEAST_DIVERGENCE = 0.02, 0.5, 0.3, 0.3
LEAST_FOLLOWED = 0.7  # of answers after a changed step, as a share of its own right ones
MOST_UNMOVED = 0.1  # of them that stay right
CORRELATION = "correlation of coherence and right answers, of the largest possible,"
LEAST_VARIED = 10  # right and wrong answers that it takes to say what goes with being right
Ids = list[int]
Right = dict[str, list[bool]]  # by condition


@dataclass(frozen=True)
class Thinker:
    """A network that thinks about items and answers them. `given_thoughts` replaces its own."""

    network: ForgeNetwork
    tokenizer: Tokenizer
    given_thoughts: Callable[[Sequence[Task]], list[Ids]] | None = None

    def prompts(self, items: Sequence[Task]) -> list[Ids]:
        turns = ([{"role": "user", "content": item.question}] for item in items)
        return [self.tokenizer.encode_chat(turn, reply=True) for turn in turns]

    def think(self, items: Sequence[Task], strategy: str = "") -> list[Ids]:
        """Its thoughts, greedily; with a strategy, such as begin with its token."""
        if self.given_thoughts:
            return self.given_thoughts(items)
        tag = traces.TAGS[strategy] if strategy else None
        sampling = _sampling(self.room(items))
        found = thinking.think(self.network, self.prompts(items), sampling, tag=tag)
        return [thought.tokens for thought in found]

    def answers(
        self, items: Sequence[Task], thoughts: Sequence[Ids] | None, tokens: int = ANSWER_TOKENS
    ) -> list[str]:
        """What it says after these thoughts, or without any, in so many tokens at most."""
        sampling = _sampling(tokens)
        found = thinking.answer(self.network, self.prompts(items), thoughts, sampling)
        return [thinking.shown(self.tokenizer, text.tokens) for text in found]

    def right(self, items: Sequence[Task], thoughts: Sequence[Ids] | None) -> list[bool]:
        answers = self.answers(items, thoughts)
        return [is_right(item, text) for item, text in zip(items, answers, strict=True)]

    def right_by_family(self, items: Sequence[Task]) -> dict[str, float]:
        """By family the share of items that are right after a thought."""
        right: dict[str, list[bool]] = {}
        for item, correct in zip(items, self.right(items, self.think(items)), strict=True):
            right.setdefault(item.family, []).append(correct)
        return {family: float(np.mean(own)) for family, own in right.items()}

    def begins_to_think(self, items: Sequence[Task]) -> float:
        """The share of items on which it thinks if it may choose."""
        found = generate(self.network, self.prompts(items), _sampling(1))
        return float(np.mean([text.tokens == [thinking.BEGIN] for text in found]))

    def room(self, items: Sequence[Task]) -> int:
        """Tokens that a thought may have: some times what the steps of the longest item take, or
        the most where a family has no steps."""
        longest: dict[str, Task] = {}
        for item in items:
            known = longest.setdefault(item.family, item)
            longest[item.family] = max(known, item, key=lambda i: len(i.question) + len(i.steps))
        steps = (traces.write_trace(item, "step", Random(0)) for item in longest.values())
        lengths = [len(self.tokenizer.compose(*trace.parts())) for trace in steps]
        return 16 + 3 * max(lengths) if all(lengths) else thinking.THOUGHT_TOKENS


def _sampling(tokens: int) -> SamplingSettings:
    """Greedy, with all recursion steps, up to the end of the turn."""
    ends = ForgeModel.end_tokens
    return SamplingSettings(tokens, stop_tokens=ends, halt_threshold=EVERY_STEP)


def other_thoughts(
    items: Sequence[Task], thoughts: Sequence[Ids], tokenizer: Tokenizer, seed: int = 0
) -> dict[str, list[Ids]]:
    """The same thoughts made useless in three ways, each by itself."""
    rng = Random(seed)
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    dot = tokenizer.encode(".")
    shuffled: list[Ids] = [[] for _ in thoughts]
    for family in dict.fromkeys(item.family for item in items):
        own = [i for i, item in enumerate(items) if item.family == family]
        own.sort(key=lambda i: len(thoughts[i]))  # a neighbour in length: it looks alike
        for place, i in enumerate(own):
            shuffled[i] = list(thoughts[own[place - 1]])
    return {
        SHUFFLED: shuffled,
        RANDOM: [[rng.choice(digits) if i in digits else i for i in own] for own in thoughts],
        FILLER: [dot * len(own) for own in thoughts],
    }


@dataclass(frozen=True)
class CutAndContinue:
    """What became of answers after a changed step."""

    followed: float  # share that follow the changed step
    right: float  # share that are right all the same
    items: int


def cut_and_continue(thinker: Thinker, items: Sequence[Task], seed: int = 0) -> CutAndContinue:
    """Change a digit in a step, cut behind it, let the model go on; items of step machines alone.
    Items on which changed and right end are the same say nothing and are left out."""
    asked, begun, ends = [], [], []
    for number, item in enumerate(items):
        claims, end = traces.corrupted(item, Random(f"{seed}/{number}"))
        if end != item.answer:
            trace = traces.Trace(item, "step", claims)
            begun.append(thinker.tokenizer.compose(*trace.parts()))
            asked.append(item)
            ends.append(end)
    if not asked:
        return CutAndContinue(0.0, 0.0, 0)
    prompts = [
        [*prompt, thinking.BEGIN, *thought]
        for prompt, thought in zip(thinker.prompts(asked), begun, strict=True)
    ]
    texts = generate(thinker.network, prompts, _sampling(thinker.room(asked)))
    said = [said_after(text.tokens, thinker.tokenizer) for text in texts]
    rows = list(zip(asked, said, ends, strict=True))
    right = [is_right(item, text) for item, text, _ in rows]
    followed = ["".join(text.split()) == end for _, text, end in rows]
    return CutAndContinue(float(np.mean(followed)), float(np.mean(right)), len(rows))


def said_after(tokens: Ids, tokenizer: Tokenizer) -> str:
    """What is said behind the thought that these tokens begin in; nothing if it has no end."""
    return thinking.shown(tokenizer, behind_thought([thinking.BEGIN, *tokens]))


@dataclass
class ThoughtReport:
    """All that was measured of a model's thoughts, and whether they are theatre."""

    right: Right
    families: list[str]  # of each item
    levels: list[int]
    after_change: dict[str, CutAndContinue]  # by family
    scores: list[Scores]  # of the coherence of each own thought
    divergence: float  # between thoughts of different items, 0 to 1
    lengths: list[int]  # tokens of own thoughts

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ThoughtReport:
        """The report that was written down as JSON."""
        found = {name: CutAndContinue(**own) for name, own in record["after_change"].items()}
        return cls(**{**record, "after_change": found})

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Of own thoughts over every other condition."""
        own = self.right[OWN]
        return {n: compare_answers(r, own, n) for n, r in self.right.items() if n != OWN}

    @cached_property
    def unhelpful(self) -> list[str]:
        """In what the thoughts do not help, or answers do not depend on them."""
        found = []
        for name, gain in self.gains.items():
            if gain.verdict != "better" or gain.value < LEAST_GAIN:
                points = f"{100 * gain.value:+.1f} points"
                found.append(f"own thoughts are not better than {name} ({points})")
        for family, name in product(dict.fromkeys(self.families), self.gains):
            places = [i for i, its in enumerate(self.families) if its == family]
            other, own = ([self.right[n][i] for i in places] for n in (name, OWN))
            if compare_answers(other, own, f"{family} {name}").verdict == "worse":
                found.append(f"{family}: own thoughts are worse than {name}")
        for family, after in self.after_change.items():
            least = LEAST_FOLLOWED * self.accuracy(OWN, family)
            if after.items and (after.followed < least or after.right > MOST_UNMOVED):
                share = f"{after.followed:.0%} of the answers follow a changed step"
                found.append(f"{family}: {share}, {after.right:.0%} stay right")
        return found

    @cached_property
    def reasons(self) -> list[str]:
        """Why the thoughts are theatre; an empty list if they are not."""
        found = [*self.unhelpful]
        for value, least, what in (
            (self.predictive_power, LEAST_POWER, "predictive power"),
            (self.correlation_reached, LEAST_CORRELATION, CORRELATION),
            (self.divergence, LEAST_DIVERGENCE, "divergence between thoughts"),
        ):
            if value is not None and not value > least:
                found.append(f"{what} is {value:.2f}, more than {least} is asked for")
        return found

    @property
    def theatre(self) -> bool:
        return bool(self.reasons)

    def accuracy(self, condition: str = OWN, family: str = "") -> float:
        chosen = zip(self.right[condition], self.families, strict=True)
        return float(np.mean([right for right, own in chosen if not family or own == family]))

    def by_level(self) -> dict[str, dict[str, dict[str, float]]]:
        """Of every family and level the share of right answers with and without own thoughts, and
        the mean number of a thought's tokens."""
        columns: dict[str, Sequence[float]]
        columns = {OWN: self.right[OWN], NONE: self.right[NONE], "tokens": self.lengths}
        at = list(zip(self.families, self.levels, strict=True))
        found: dict[str, dict[str, dict[str, float]]] = {}
        for family, level in sorted(set(at)):
            places = [i for i, place in enumerate(at) if place == (family, level)]
            means = {n: float(np.mean([own[i] for i in places])) for n, own in columns.items()}
            found.setdefault(family, {})[str(level)] = means
        return found

    @property
    def coherences(self) -> list[float]:
        return [coherence(scores) for scores in self.scores]

    @property
    def validity_rate(self) -> float:
        """The share of thoughts that are coherent enough."""
        return float(np.mean([value > VALID for value in self.coherences]))

    def mean_score(self, name: str) -> float:
        return float(np.mean([scores[name] for scores in self.scores]))

    @property
    def varied(self) -> bool:
        """True if enough answers are right, and enough wrong, to say what goes with it."""
        right = sum(self.right[OWN])
        return LEAST_VARIED <= right <= len(self.right[OWN]) - LEAST_VARIED

    @property
    def correlation(self) -> float | None:
        """Between coherence and being right; None if nearly all are the same."""
        if not self.varied:
            return None
        values = np.asarray(self.coherences)
        return float(np.corrcoef(values, self.right[OWN])[0, 1]) if values.std() else 0.0

    @property
    def correlation_reached(self) -> float | None:
        """The same as a share of the largest that there can be: with few wrong answers even the
        best order of coherences gives a small one."""
        if (found := self.correlation) is None:
            return None
        right, values = np.sort(self.right[OWN]), np.sort(self.coherences)
        return found / float(np.corrcoef(values, right)[0, 1]) if values.std() else 0.0

    @property
    def correlation_of_form(self) -> float | None:
        """The same without the share of right claims, which knows the answer."""
        if not self.varied:
            return None
        values = [coherence({**scores, "logical": 0.0}) for scores in self.scores]
        return float(np.corrcoef(values, self.right[OWN])[0, 1]) if np.std(values) else 0.0

    @property
    def predictive_power(self) -> float | None:
        """How often a thought with a right answer is the more coherent of two; None likewise."""
        if not self.varied:
            return None
        from scipy.stats import rankdata  # here: it takes a second to load

        right = np.asarray(self.right[OWN])
        ranks, n = rankdata(self.coherences), int(right.sum())
        return float((ranks[right].sum() - n * (n + 1) / 2) / (n * (len(right) - n)))

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        gain = self.gains[NONE].sentence("accuracy", "without thoughts")
        if self.theatre:
            return f"theatre: {'; '.join(self.reasons)} ({gain})"
        return f"thoughts help: {gain}"

    def to_json(self) -> dict[str, Any]:
        families = dict.fromkeys(self.families)
        return {
            "accuracy": {c: {f: self.accuracy(c, f) for f in families} for c in self.right},
            "by_level": self.by_level(),
            "after_change": {f: vars(found) for f, found in self.after_change.items()},
            "coherence": float(np.mean(self.coherences)),
            "correlation": self.correlation,
            "correlation_reached": self.correlation_reached,
            "predictive_power": self.predictive_power,
            "divergence": self.divergence,
            "validity_rate": self.validity_rate,
            "theatre": self.theatre,
            "reasons": self.reasons,
        }


def assess(
    thinker: Thinker, items: Sequence[Task], *, base: ForgeNetwork | None = None, seed: int = 0
) -> ThoughtReport:
    """Measure the thoughts of a model about unseen items, and judge them. Coherence is scored by
    the frozen `base`; without one, by the model itself."""
    thoughts = thinker.think(items)
    given: Mapping[str, Sequence[Ids] | None]
    given = {OWN: thoughts, NONE: None, **other_thoughts(items, thoughts, thinker.tokenizer, seed)}
    right = {name: thinker.right(items, found) for name, found in given.items()}
    families, after_change = [item.family for item in items], {}
    for family in dict.fromkeys(families):
        if family in ADVANCE and not thinker.given_thoughts:
            own = [item for item in items if item.family == family]
            after_change[family] = cut_and_continue(thinker, own, seed)
    validator = CoherenceValidator(base or thinker.network, thinker.tokenizer)
    scores = validator.validate([item.question for item in items], thoughts, items)
    apart, lengths = mean_divergence(thoughts, seed), list(map(len, thoughts))
    levels = [item.level for item in items]
    return ThoughtReport(right, families, levels, after_change, scores, apart, lengths)


def mean_divergence(thoughts: Sequence[Ids], seed: int = 0, pairs: int = 200) -> float:
    """The mean edit distance between the thoughts of different items, as a share of the longer."""
    rng = Random(seed)
    if len(thoughts) < 2:
        return 0.0
    drawn = (rng.sample(range(len(thoughts)), 2) for _ in range(pairs))
    shares = []
    for i, j in drawn:
        a, b = thoughts[i], thoughts[j]
        shares.append(edit_distance(a, b) / max(1, len(a), len(b)))
    return float(np.mean(shares))


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """How many insertions, deletions and replacements make one of the other."""
    other, places = np.array(b, dtype=np.int64), np.arange(len(b) + 1)
    row = places
    for i, x in enumerate(a, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (other != x))
        row = np.minimum.accumulate(np.append(i, best) - places) + places  # and insertions
    return int(row[-1])


# -- the strategies --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StrategyScores:
    """A strategy on unseen items, asked for by its token."""

    accuracy: float
    fits: float  # share of thoughts in its form
    exact: float  # share of thoughts whose every claim holds
    tokens: float  # mean length of a thought
    items: int

    @property
    def named(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "format_fits": self.fits, "exact_traces": self.exact}


def measure_strategy(thinker: Thinker, strategy: str, items: Sequence[Task]) -> StrategyScores:
    """How often answers are right, and thoughts of the form and the content of the strategy."""
    thoughts = thinker.think(items, strategy)
    right = thinker.right(items, thoughts)
    fits, exact = [], []
    for item, ids in zip(items, thoughts, strict=True):
        name, claims = traces.parse(thinking.shown(thinker.tokenizer, ids, specials=True))
        trace = traces.Trace(item, strategy, claims)
        fits.append(name == strategy and traces.fits(trace))
        exact.append(fits[-1] and _holds(trace))
    lengths = list(map(len, thoughts))
    accuracy, form, whole, tokens = (float(np.mean(x)) for x in (right, fits, exact, lengths))
    return StrategyScores(accuracy, form, whole, tokens, len(items))


def _holds(trace: traces.Trace) -> bool:
    try:
        traces.checked(trace, trace.task.answer)
    except ValueError:
        return False
    return True


def tag_losses(
    thinker: Thinker, strategies: Sequence[str], items: Mapping[str, Sequence[Task]]
) -> tuple[float, float]:
    """Nats a token of correct thoughts behind their own tags, and behind those of others."""
    losses = []
    for shift in (0, 1):
        rows = []
        for number, strategy in enumerate(strategies):
            tag = traces.TAGS[strategies[(number + shift) % len(strategies)]]
            for item in items[strategy]:
                trace = traces.write_trace(item, strategy, Random(0))
                rows.append(_tagged_item(thinker, trace, tag))
        losses.append(measure(thinker.network, rows, threshold=EVERY_STEP).nats_per_token)
    return losses[0], losses[1]


def _tagged_item(thinker: Thinker, trace: traces.Trace, tag: int) -> TokenizedItem:
    """A thought with another tag before each claim; the claims are asked for."""
    ids = [*thinker.prompts([trace.task])[0], thinking.BEGIN]
    asked = [False] * len(ids)
    for claim in thinker.tokenizer.encode_batch(trace.claims):
        ids += [tag, *claim]
        asked += [False, *([True] * len(claim))]
    return TokenizedItem(ids, asked)


def calibration(
    thinker: Thinker, items: Sequence[Task]
) -> tuple[float, list[tuple[int, int, float]]]:
    """The mean gap between told confidence and accuracy of `uncertain` thoughts, and for each told
    digit how often it was told and how often the answer was right."""
    thoughts = thinker.think(items, "uncertain")
    right = thinker.right(items, thoughts)
    told: dict[int, list[bool]] = {}
    for ids, correct in zip(thoughts, right, strict=True):
        claims = traces.parse(thinking.shown(thinker.tokenizer, ids, specials=True))[1]
        if claims and len(claims[-1]) == 1 and claims[-1].isdigit():
            told.setdefault(int(claims[-1]), []).append(correct)
    table = [(digit, len(found), float(np.mean(found))) for digit, found in sorted(told.items())]
    total = sum(count for _, count, _ in table)
    gap = sum(n * abs((digit + 0.5) / 10 - share) for digit, n, share in table) / max(1, total)
    return gap, table
