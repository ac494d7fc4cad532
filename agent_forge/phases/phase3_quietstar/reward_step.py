"""The second step of Phase 3: reward the thoughts that help, beyond what worked thoughts teach.

In: the baked model. It tries questions whose answers can be verified, or thinks at difficult places
of texts (train/rewards.py), and is held near what it was. Every few steps its greedy answers and
the verdict on its thoughts are checked; if it lost more than allowed it goes back to the weights of
the last good check and is held more tightly, and if that happens again the step ends there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import sub
from typing import Any

import torch
from torch import Tensor

from agent_forge.contract.phase import PhaseContext, Table
from agent_forge.data import tasks
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import BatchLoader, TokenizedDataset
from agent_forge.data.tasks import Task, is_right
from agent_forge.data.tokenizer import END_OF_TURN, SPECIAL
from agent_forge.evals import thoughts as judging
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.evals.model_under_test import EVERY_STEP
from agent_forge.evals.thoughts import ANSWER_TOKENS, Thinker
from agent_forge.infer.generate import GeneratedText, SamplingSettings
from agent_forge.infer.thinking import BEGIN, END, ThoughtGenerator, shown
from agent_forge.model.loss import vocabulary_of
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.phases.phase3_quietstar.config import (
    QuietStarSettings,
    RewardSettings,
    in_order,
)
from agent_forge.phases.phase3_quietstar.lessons import DIRECT, Lessons, unseen_items
from agent_forge.phases.training import compare_domains, measure_domains, train_network
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import fit
from agent_forge.train.rewards import LikelihoodGain, MixingHead, VerifiedReward
from agent_forge.train.trainer import Batch, Trainer

STAGE, CONTROL = "reward", "reward_control"
BAKED, REWARDED, TAUGHT = "baked", "rewarded", "taught on"  # the models that are compared
POOL = 2000  # questions of each family
LOW, HIGH = 0.2, 0.8  # success at which a question teaches most
OUTSIDE = 0.1  # how often others are drawn, as a share of that
REMEMBERED = 0.7  # of a level's success, at every further look
TIGHTER = 4.0  # factor on the divergence's weight after a failed check
Cell = tuple[str, int]  # a family and a level


@dataclass
class QuestionPool:
    """Training questions by family and level; those at the edge of ability are drawn most."""

    items: Sequence[Task]
    success: dict[Cell, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cells: dict[Cell, list[int]] = {}
        for number, item in enumerate(self.items):
            self._cells.setdefault((item.family, item.level), []).append(number)

    def state_dict(self) -> dict[str, Any]:
        return {"success": [[*cell, share] for cell, share in self.success.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.success = {(family, level): share for family, level, share in state["success"]}

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers of questions."""
        cells = list(self._cells)
        weights = torch.tensor([self._weight(cell) for cell in cells])
        chosen = torch.multinomial(weights, count, replacement=True, generator=generator)
        places = torch.rand(count, generator=generator)
        found = []
        for cell, place in zip(chosen.tolist(), places.tolist(), strict=True):
            numbers = self._cells[cells[cell]]
            found.append(numbers[int(place * len(numbers))])
        return torch.tensor(found)

    def _weight(self, cell: Cell) -> float:
        return 1.0 if LOW <= self.success.get(cell, LOW) <= HIGH else OUTSIDE

    def observe(self, success: Mapping[int, float]) -> None:
        for number, share in success.items():
            cell = (self.items[number].family, self.items[number].level)
            before = self.success.get(cell, share)
            self.success[cell] = REMEMBERED * before + (1 - REMEMBERED) * share


@dataclass
class RewardGuard:
    """Checks the model now and then; goes back to its last good weights if it has lost too much."""

    trainer: Trainer
    check: Callable[[int], dict[str, Any]]  # number of the check -> accuracy, theatre
    every_steps: int
    most_lost: float
    go_back: Callable[[str], None]  # is told the reason
    failures: int = 0
    number: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loss: Any = self.trainer.loss
        self._good = self._weights()
        self._start = self.check(0)

    def _weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.trainer.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        counts = {"failures": self.failures, "number": self.number, "reasons": [*self.reasons]}
        return {"good": self._good, "kl": self._loss.kl, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._good, self._loss.kl = state["good"], state["kl"]
        self.failures, self.number = state["failures"], state["number"]
        self.reasons = list(state["reasons"])

    @property
    def ended(self) -> bool:
        return self.failures > 1

    def update(self) -> float:
        """Check; returns the share of wrong answers."""
        self.number += 1
        found, start = self.check(self.number), self._start
        lost = start["accuracy"] - found["accuracy"]
        if lost > self.most_lost or (found["theatre"] and not start["theatre"]):
            points = f"{-100 * lost:+.1f} points"
            reason = f"check {self.number}: {points}{', theatre' if found['theatre'] else ''}"
            self.reasons.append(reason)
            self.failures += 1
            self.trainer.model.load_state_dict(self._good)
            self.trainer.optimizer.state.clear()
            self._loss.kl *= TIGHTER
            self.go_back(reason)
        else:
            self._good = self._weights()
        return 1.0 - float(found["accuracy"])


@dataclass(frozen=True)
class RewardOutcome:
    """What the second step brought, and whether it is kept."""

    kept: bool
    sentence: str
    table: Table
    accuracy: dict[str, dict[str, float]]  # of each model, by family
    gain: float
    cpu_s: dict[str, float]  # of the training of each model, as far as one process knows


def rewarded_levels(c: QuietStarSettings) -> dict[str, tuple[int, int]]:
    """The families that are rewarded: those without thoughts or, if there are none, all taught."""
    return in_order(c.reward.answers_only) or c.ranges


def take_reward_step(
    ctx: PhaseContext, c: QuietStarSettings, corpus: Corpus, lessons: Lessons, model: ForgeNetwork
) -> RewardOutcome:
    """Train the baked model by rewards, compare, and leave the better one's weights in it."""
    baked, clock = copy.deepcopy(model), [time.process_time()]
    reasons = reward_step(ctx, c, corpus, model)
    clock.append(time.process_time())
    models = {BAKED: baked, REWARDED: model}
    if c.reward.control:
        models[TAUGHT] = _taught_on(ctx, c, corpus, lessons, copy.deepcopy(baked))
    clock.append(time.process_time())
    cost = dict(zip((REWARDED, TAUGHT), map(sub, clock[1:], clock), strict=True))
    cpu_s = ctx.once("reward verdict", "CPU seconds", lambda: cost)
    levels = {**c.ranges, **rewarded_levels(c)}
    items = unseen_items(c, "verdict", c.thought_items, levels)
    right: dict[str, list[bool]] = {}
    for name in ctx.pieces("reward verdict", list(models)):
        thinker = Thinker(models[name], corpus.tokenizer)
        answered = partial(_answered, thinker, items)
        right[name] = ctx.once("reward verdict", name, answered)
    rewarded = {i for i, item in enumerate(items) if item.family in rewarded_levels(c)}
    gain = _gain(right, [i for i in range(len(items)) if i in rewarded])
    others = [i for i in range(len(items)) if i not in rewarded]
    scores = [measure_domains(ctx, corpus, models[name], name) for name in (BAKED, REWARDED)]
    old = compare_domains(corpus, *scores).overall.gains[ACCURACY].value
    spoiled = bool(others) and _gain(right, others).verdict == "worse"
    kept = not spoiled and is_kept(c.reward, gain, old)
    if not kept:
        model.load_state_dict(baked.state_dict())
    accuracy = {n: _by_family(items, own) for n, own in right.items()}
    table: Table = [["family", *models]]
    table += [[f, *(accuracy[n][f] for n in models)] for f in levels]
    told = [gain.sentence(ACCURACY, "the baked model"), f"old tasks {100 * old:+.1f} points"]
    told += [f"went back: {reason}" for reason in reasons]
    told += ["it is kept" if kept else "the baked model goes on"]
    return RewardOutcome(kept, "; ".join(told), table, accuracy, gain.value, cpu_s)


def is_kept(settings: RewardSettings, gain: Gain, old: float) -> bool:
    """True if the step has brought something and old tasks have not lost more than allowed."""
    return gain.verdict == "better" and old >= -settings.kept_skills


def _gain(right: Mapping[str, Sequence[bool]], places: Sequence[int]) -> Gain:
    baked, rewarded = ([right[name][i] for i in places] for name in (BAKED, REWARDED))
    return compare_answers(baked, rewarded, STAGE)


def _by_family(items: Sequence[Task], right: Sequence[bool]) -> dict[str, float]:
    found: dict[str, list[bool]] = {}
    for item, own in zip(items, right, strict=True):
        found.setdefault(item.family, []).append(own)
    return {family: sum(own) / len(own) for family, own in found.items()}


def _answered(thinker: Thinker, items: Sequence[Task]) -> list[bool]:
    return thinker.right(items, thinker.think(items))


def _taught_on(
    ctx: PhaseContext, c: QuietStarSettings, corpus: Corpus, lessons: Lessons, model: ForgeNetwork
) -> ForgeNetwork:
    """The control: more of what is known of the rewarded families, thoughts or answers alone."""
    if c.reward.answers_only:
        sources, mix = [_direct(c, corpus, ctx.seed)], lessons.control_mix(corpus, DIRECT)
    else:
        sources, mix = lessons.sources(), lessons.mix(corpus, list(lessons.traces))
    own = replace(corpus, sources=[*corpus.sources, *sources])
    how: dict[str, Any] = {"settings": c.train, "seed": ctx.seed, "steps": c.reward.control_steps}
    return train_network(ctx, own, model, corpus.constant(mix), stage=CONTROL, **how)


def _questions(c: QuietStarSettings, seed: int) -> list[Task]:
    """Training items of the rewarded families."""
    return [
        tasks.make(family, "train", i, seed=seed, level=level)
        for family, level in rewarded_levels(c).items()
        for i in range(min(POOL, c.examples))
    ]


def _direct(c: QuietStarSettings, corpus: Corpus, seed: int) -> TokenizedDataset:
    examples = map(tasks.as_example, _questions(c, seed))
    return TokenizedDataset(DIRECT, *tokenise(corpus.tokenizer, examples))


def reward_step(
    ctx: PhaseContext, c: QuietStarSettings, corpus: Corpus, model: ForgeNetwork
) -> list[str]:
    """Train the baked model by rewards; returns why it went back, if it did."""
    s, thinker = c.reward, Thinker(model, corpus.tokenizer)
    questions = ctx.generator(f"questions_{STAGE}")
    pool = QuestionPool(_questions(c, ctx.seed))
    loader = _answers(c, corpus, vocabulary_of(model), ctx.seed)
    loss: VerifiedReward | LikelihoodGain
    if s.kind == "verified":
        loss = _verified(c, thinker, pool.items)
    else:
        loss = _likelihood(c, model)
        model.mixing = MixingHead(model.settings.d_model)

    def next_batch(step: int) -> Batch:
        if isinstance(loss, LikelihoodGain):
            return loader.next_batch()
        pool.observe(loss.success)
        loss.success = {}
        return (pool.draw(s.questions, questions),)

    of_stage: dict[str, Any] = {"device": ctx.device, "decisions": ctx.decisions.of(STAGE)}
    of_stage |= {"total": s.steps, "generator": ctx.generator(f"loss_{STAGE}")}
    optimizer = MuonGrokfast(model, s.optimizer)
    trainer = Trainer(model, optimizer, loss, s.train, **of_stage)
    guard = _guard(ctx, c, trainer, thinker)
    parts: dict[str, Any] = {"questions": pool, "loader": loader}
    fit(ctx, trainer, next_batch, stage=STAGE, parts=parts, evaluation=guard)
    if s.kind == "likelihood":
        del model.mixing
    return guard.reasons


def _guard(
    ctx: PhaseContext, c: QuietStarSettings, trainer: Trainer, thinker: Thinker
) -> RewardGuard:
    s = c.reward
    items = unseen_items(c, "selection", s.check_items, {**c.ranges, **rewarded_levels(c)})

    def measured() -> dict[str, Any]:
        report = judging.assess(thinker, items, seed=ctx.seed)
        return {"accuracy": report.accuracy(), "theatre": report.theatre}

    def check(number: int) -> dict[str, Any]:
        found: dict[str, Any] = ctx.once("reward checks", str(number), measured)
        return found

    def told(reason: str) -> None:
        ctx.tracker.event("rolled_back", phase=ctx.phase, stage=STAGE, reason=reason)

    return RewardGuard(trainer, check, s.check_every, s.most_lost, told)


def _verified(c: QuietStarSettings, thinker: Thinker, items: Sequence[Task]) -> VerifiedReward:
    """Tries begin to think, and end with the turn."""
    tokenizer = thinker.tokenizer

    def verify(number: int, text: GeneratedText) -> bool:
        if END not in text.tokens:
            return False
        said = text.tokens[text.tokens.index(END) + 1 :]
        return is_right(items[number], shown(tokenizer, said))

    how = SamplingSettings(
        thinker.room(items) + ANSWER_TOKENS,
        temperature=1.0,
        stop_tokens=frozenset([SPECIAL[END_OF_TURN]]),
        halt_threshold=EVERY_STEP,
    )
    prompts = [[*prompt, BEGIN] for prompt in thinker.prompts(items)]
    reference, kl = _frozen(thinker.network), c.reward.optimizer.kl_coefficient
    return VerifiedReward(prompts, verify, reference, how, c.reward.samples, kl)


def _likelihood(c: QuietStarSettings, model: ForgeNetwork) -> LikelihoodGain:
    """As many thoughts of a place, and as long, as suits the size of the model."""
    s, (count, length) = c.reward, ThoughtGenerator(model).default_counts
    where = {"thoughts": count, "length": length, "places": s.places, "ahead": s.ahead}
    return LikelihoodGain(_frozen(model), BEGIN, END, **where, kl=s.optimizer.kl_coefficient)


def _frozen(model: ForgeNetwork) -> ForgeNetwork:
    return copy.deepcopy(model).eval().requires_grad_(False)


def _answers(c: QuietStarSettings, corpus: Corpus, vocabulary: int, seed: int) -> BatchLoader:
    """Rows of old tasks and of answers to the questions, for thoughts at difficult places."""
    share = c.replay_share
    mix = {name: share * weight for name, weight in corpus.mix().items()} if share else {}
    sources = [*corpus.sources, _direct(c, corpus, seed)]
    size = {"batch": c.rows, "length": c.row_tokens, "vocab_size": vocabulary}
    return BatchLoader(sources, {**mix, DIRECT: 1 - share}, seed=seed, **size)
