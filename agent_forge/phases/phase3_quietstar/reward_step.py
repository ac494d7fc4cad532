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
from operator import sub
from typing import Any

import torch
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.phase import PhaseContext, Table
from agent_forge.data import tasks, traces
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import BatchLoader, TokenizedDataset
from agent_forge.data.tasks import Task, is_right
from agent_forge.data.tokenizer import END_OF_TURN, SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.evals import thoughts as judging
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.evals.thoughts import ANSWER_TOKENS, Thinker
from agent_forge.infer.generate import GeneratedText, SamplingSettings
from agent_forge.infer.thinking import BEGIN, END, PARALLEL_THOUGHTS, ThoughtGenerator
from agent_forge.model.loss import vocabulary_of
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.phases.phase3_quietstar.config import QuietStarSettings, RewardSettings
from agent_forge.phases.training import train_network
from agent_forge.train.config import in_order
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import fit
from agent_forge.train.lessons import DIRECT, Lessons, unseen_items
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
    latest: dict[int, float] = field(default_factory=dict)  # of questions that were just asked

    def __post_init__(self) -> None:
        self._cells: dict[Cell, list[int]] = {}
        for number, item in enumerate(self.items):
            self._cells.setdefault((item.family, item.level), []).append(number)

    def state_dict(self) -> dict[str, Any]:
        known = [[*cell, share] for cell, share in self.success.items()]
        return {"success": known, "latest": [[*pair] for pair in self.latest.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.success = {(family, level): share for family, level, share in state["success"]}
        self.latest.clear()
        self.latest.update({int(number): share for number, share in state["latest"]})

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers of questions, each once, by what the latest ones told."""
        self._observe()
        cells = list(self._cells)
        weights = torch.tensor([self._weight(cell) for cell in cells])
        chosen = torch.multinomial(weights, count, replacement=True, generator=generator)
        places = torch.rand(count, generator=generator)
        found = []
        for cell, place in zip(chosen.tolist(), places.tolist(), strict=True):
            numbers = self._cells[cells[cell]]
            found.append(numbers[int(place * len(numbers))])
        return torch.tensor(list(dict.fromkeys(found)))

    def _weight(self, cell: Cell) -> float:
        return 1.0 if LOW <= self.success.get(cell, LOW) <= HIGH else OUTSIDE

    def _observe(self) -> None:
        for number, share in self.latest.items():
            cell = (self.items[number].family, self.items[number].level)
            before = self.success.get(cell, share)
            self.success[cell] = REMEMBERED * before + (1 - REMEMBERED) * share
        self.latest.clear()


@dataclass
class RewardGuard:
    """Checks the model now and then; goes back to its last good weights if it has lost too much."""

    trainer: Trainer
    check: Callable[[str], dict[str, Any]]  # name of the check -> accuracy, theatre
    every_steps: int
    most_lost: float
    go_back: Callable[[str], None]  # is told the reason
    failures: int = 0
    number: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loss: Any = self.trainer.loss
        self._good = self._weights()
        self._start = self.check("start")

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
        # After a divergence the same number is of other weights: the rate tells them apart.
        found, start = self.check(f"{self.number}/{self.trainer.factor}"), self._start
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


def refuse_long_rows(c: QuietStarSettings, shape: ModelSettings) -> None:
    """Refuse rows that, with a thought behind their last token, are more than attention sees."""
    longest = max(length for _, length in PARALLEL_THOUGHTS.values())
    total = c.row_tokens + longest + 2 + c.reward.ahead
    if c.reward.kind == "likelihood" and total > shape.sw_window:
        problem = f"rows of {c.row_tokens} tokens and a thought are {total}"
        raise ConfigError(f"{problem}; attention sees {shape.sw_window}", hint="shorter row_tokens")


def refuse_few_items(c: QuietStarSettings) -> None:
    """Refuse checks that take all items of a family: none would say whether the step is kept."""
    for name, left in _families(c, "selection", {**c.ranges, **rewarded_levels(c)}).items():
        if not left:
            problem = f"check_items: {name} has no more than {c.reward.check_items} items"
            hint = "fewer check_items, or more of its levels"
            raise ConfigError(f"{problem} at these levels, and further ones are needed", hint=hint)


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
    chosen = _families(c, "selection", levels)  # the verdict's items choose nothing
    right = {name: _answers_of(ctx, c, corpus, models[name], name, chosen) for name in models}
    gain = _gain(right, [f for f in levels if f in rewarded_levels(c)])
    spoiled = [f for f in levels if _gain(right, [f]).verdict == "worse"]
    old = _old_accuracy(ctx, corpus, model, REWARDED) - _old_accuracy(ctx, corpus, baked, BAKED)
    kept = not spoiled and is_kept(c.reward, gain, old)
    unseen = _families(c, "verdict", levels)
    told_of = {n: _answers_of(ctx, c, corpus, models[n], n, unseen) for n in models}
    if not kept:
        model.load_state_dict(baked.state_dict())
    accuracy = {n: {f: sum(x) / len(x) for f, x in own.items()} for n, own in told_of.items()}
    table: Table = [["family", *models]]
    table += [[f, *(accuracy[n][f] for n in models)] for f in levels]
    told = [gain.sentence(ACCURACY, "the baked model"), f"old tasks {100 * old:+.1f} points"]
    told += [f"worse on {family}" for family in spoiled]
    told += [f"went back: {reason}" for reason in reasons]
    told += ["it is kept" if kept else "the baked model goes on"]
    return RewardOutcome(kept, "; ".join(told), table, accuracy, gain.value, cpu_s)


def is_kept(settings: RewardSettings, gain: Gain, old: float) -> bool:
    """True if the step has brought something and old tasks have not lost more than allowed."""
    return gain.verdict == "better" and old >= -settings.kept_skills


def _gain(right: Mapping[str, Mapping[str, list[bool]]], families: Sequence[str]) -> Gain:
    """Of the rewarded model over the baked one on the items of some families."""
    baked, rewarded = ([r for f in families for r in right[n][f]] for n in (BAKED, REWARDED))
    return compare_answers(baked, rewarded, STAGE)


def _families(c: QuietStarSettings, split: str, levels: traces.Levels) -> dict[str, list[Task]]:
    """Items of every family that neither training nor the checks on the way have seen."""
    seen = c.reward.check_items if split == "selection" else 0
    return {
        name: unseen_items(c, split, seen + c.thought_items, {name: level})[seen:]
        for name, level in levels.items()
    }


def _answers_of(
    ctx: PhaseContext,
    c: QuietStarSettings,
    corpus: Corpus,
    model: ForgeNetwork,
    name: str,
    items: Mapping[str, Sequence[Task]],
) -> dict[str, list[bool]]:
    """What a model answers rightly, by family, asked as it was trained: a control that learned
    answers alone is asked for answers alone."""
    thinker, direct = Thinker(model, corpus.tokenizer), name == TAUGHT and c.reward.answers_only

    def answered() -> dict[str, list[bool]]:
        return {
            family: thinker.right(own, None if direct else thinker.think(own))
            for family, own in items.items()
        }

    split = next(item.split for own in items.values() for item in own)
    found: dict[str, list[bool]] = ctx.once("reward verdict", f"{split}/{name}", answered)
    return found


def _old_accuracy(ctx: PhaseContext, corpus: Corpus, model: ForgeNetwork, name: str) -> float:
    """The accuracy on old tasks, a mean over the domains, by items for choices."""

    def measured() -> float:
        scores = (measure(model, own, threshold=EVERY_STEP) for own in corpus.selection.values())
        shares = [own.accuracy for own in scores]
        return sum(shares) / len(shares)

    return float(ctx.once("reward verdict", f"old/{name}", measured))


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
        loss.success = pool.latest
    else:
        loss = _likelihood(c, model)
        model.mixing = MixingHead(model.settings.d_model).to(ctx.device)

    def next_batch(step: int) -> Batch:
        if s.kind == "likelihood":
            return loader.next_batch()
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

    reference = getattr(trainer.loss, "reference", None)

    def measured() -> dict[str, Any]:
        report = judging.assess(thinker, items, base=reference, seed=ctx.seed)
        return {"accuracy": report.accuracy(), "theatre": bool(report.unhelpful)}

    def check(name: str) -> dict[str, Any]:
        found: dict[str, Any] = ctx.once("reward checks", name, measured)
        return found

    def told(reason: str) -> None:
        ctx.tracker.event("rolled_back", phase=ctx.phase, stage=STAGE, reason=reason)

    return RewardGuard(trainer, check, s.check_every, s.most_lost, told)


def _verified(c: QuietStarSettings, thinker: Thinker, items: Sequence[Task]) -> VerifiedReward:
    """Tries begin to think, and end with the turn."""
    tokenizer = thinker.tokenizer

    def verify(number: int, text: GeneratedText) -> bool:
        return is_right(items[number], judging.said_after(text.tokens, tokenizer))

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
