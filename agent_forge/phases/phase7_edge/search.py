"""Cuts, each followed by distillation from the input; kept, or taken back if it costs too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from agent_forge.contract.phase import PhaseContext
from agent_forge.data import exchanges
from agent_forge.data.exchanges import Card, Exchange, other_questions, tool_questions
from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import DamagedFile
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.replies import GREEDY, Asker
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase7_edge.config import EdgeSettings
from agent_forge.phases.phase7_edge.profiling import Profile, Profiler
from agent_forge.phases.phase7_edge.pruning import Cut, cuts_of, importance_of
from agent_forge.phases.training import LatentModel
from agent_forge.train.corpus import Corpus
from agent_forge.train.exchange_rows import (
    PERSONA,
    TOOLS,
    exchange_item,
    taught_persona,
    taught_tools,
)
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import Lessons, unseen_items

INPUT, THOUGHTS = "input", "thoughts"
THOUGHT_ITEMS = 40  # of each family, that are thought about before a cut is kept
HELD_OUT = 60  # thoughts that evaluations during training look at
REFUSED = 6  # tool questions for each wish without a tool, of those for choices
MET = "the target is met"
Right = dict[str, list[bool]]  # which items are right: by domain, of thoughts, tools and persona


@dataclass(frozen=True)
class CutStep:
    """A cut: what was taken, what it cost before and after the distillation."""

    number: int
    kind: str
    rise: float  # nats a token by the cut alone
    shape: dict[str, int]
    retention: dict[str, float]  # of the input's accuracy; "mean" is of the mean over all
    profile: Profile
    taken_back: str  # the reason; empty if it is kept


class Chosen(NamedTuple):
    """A cut, and by how much the loss rises by it alone."""

    cut: Cut
    rise: float


class Profiles(NamedTuple):
    """What the input and a model take, measured in turns."""

    input: Profile
    model: Profile


@dataclass
class EdgeSearch:
    """A model that came in, what it is taught while it gets smaller, and what it must keep."""

    ctx: PhaseContext
    settings: EdgeSettings
    corpus: Corpus
    lessons: Lessons | None
    card: Card | None  # its tools and persona, if it has learned any
    start: LatentModel
    profiler: Profiler
    steps: list[CutStep] = field(default_factory=list)

    # -- asking ------------------------------------------------------------------------------------

    def right(self, model: LatentModel, name: str) -> Right:
        """Which items for choices a model gets right; once."""
        network, found = model.opened().to(self.ctx.device), Right()
        for domain, items in self.corpus.selection.items():
            own = partial(measure, network, items, threshold=EVERY_STEP)
            scores = ItemScores(**self.ctx.once("old tasks", f"{name}/{domain}", own))
            found[domain] = [*map(bool, scores.right)]
        for kind, items in self.choices.items():
            look = partial(self.answered, network, kind, items, "selection")
            found[kind] = self.ctx.once("choices", f"{name}/{kind}", look)
        return found

    def answered(
        self, network: ForgeNetwork, kind: str, items: Sequence[Any], split: str
    ) -> list[bool]:
        """Which questions it answers rightly: with thoughts, or with tools and as somebody."""
        if kind.startswith(THOUGHTS):
            thinker = Thinker(network, self.corpus.tokenizer)
            return thinker.right(items, thinker.think(items))
        assert self.card is not None
        asker = Asker(self.corpus.tokenizer, self.card)
        return asker.ask(network, items, split, sampling=GREEDY).right

    @cached_property
    def choices(self) -> dict[str, list[Any]]:
        """What is asked before a cut is kept, beside old tasks."""
        found: dict[str, list[Any]] = {}
        if self.lessons:
            found[THOUGHTS] = unseen_items(self.lessons.settings, "selection", THOUGHT_ITEMS)
        if self.card:
            found |= self.exchanges("selection", self.settings.choice_items)
        return found

    def exchanges(self, split: str, count: int) -> dict[str, list[Exchange]]:
        """Questions for tools, with some that no tool is for, and about the persona."""
        assert self.card is not None
        tools = tool_questions(self.card, split, count)
        tools += other_questions(exchanges.refused, split, max(1, count // REFUSED))
        return {TOOLS: tools, PERSONA: exchanges.every_about(self.card, split)}

    # -- cuts --------------------------------------------------------------------------------------

    def cut_down(self) -> tuple[LatentModel, Profiles, str]:
        """Cut until the target is met, or the next cut would cost too much; what is left, what it
        and the input take, and why it ended."""
        model, taken = self.start, self.profiles(self.start, INPUT)
        first = now = self.right(self.start, INPUT)
        for number in range(1, self.settings.cuts + 1):
            if not (missed := self.missed(taken)):
                break
            if (chosen := self._choose(model, number)) is None:
                return model, taken, f"nothing is left to cut: {missed}"
            child = self._distilled(chosen.cut.apply(model), number)
            after = self.right(child, f"cut_{number}")
            lost, own = self._lost(first, after), self.profiles(child, f"cut_{number}")
            self._note(number, chosen, child, retention(first, after), own.model, lost)
            if lost:
                self._take_back(model, number, lost, now)
                return model, taken, f"the next cut would break the retention gate: {lost}"
            model, now, taken = child, after, own
        missed = self.missed(taken)
        return model, taken, f"{self.settings.cuts} cuts are made: {missed}" if missed else MET

    def missed(self, taken: Profiles) -> str:
        """The limits of the device that are not met, in words."""
        return ", ".join(taken.model.missed(self.settings.limits, taken.input))

    def profiles(self, model: LatentModel, name: str) -> Profiles:
        """What the input and a model take, measured in turns; once, as it reads a clock."""
        models = {INPUT: self.start} if name == INPUT else {INPUT: self.start, name: model}
        found = self.ctx.once("profile", name, partial(self.profiler.measure, models))
        return Profiles(Profile(**found[INPUT]), Profile(**found[name]))

    def _choose(self, model: LatentModel, number: int) -> Chosen | None:
        """The cut that costs the least for what it saves, by calibration alone; None if there is
        none left."""
        records = self.ctx.once("cuts", str(number), partial(self._candidates, model))
        if not records:
            return None
        best = min(records, key=lambda own: (own["rise"] / own["saved"], own["saved"]))
        cut = Cut(best["kind"], tuple(map(tuple, best["kept"])))
        return Chosen(cut, best["rise"])

    def _candidates(self, model: LatentModel) -> list[dict[str, Any]]:
        """Every cut that could be made: by how much the loss rises without any training."""
        c, items, network = self.settings, self.calibration, model.opened().to(self.ctx.device)
        cuts = cuts_of(model.settings, importance_of(network, items), c.kinds, c.channel_share)
        whole, found = measure(network, items, threshold=EVERY_STEP).nats_per_token, []
        for cut in cuts:
            smaller = cut.apply(model)
            saved = model.settings.parameters() - smaller.settings.parameters()
            own = measure(smaller.opened().to(self.ctx.device), items, threshold=EVERY_STEP)
            found.append({**cut._asdict(), "rise": own.nats_per_token - whole, "saved": saved})
        return found

    @cached_property
    def calibration(self) -> list[TokenizedItem]:
        """Items of all that it knows, in equal shares; none of the verdict."""
        tokenizer, old = self.corpus.tokenizer, list(self.corpus.selection.values())
        each = -(-self.settings.calibration_items // (1 + bool(self.lessons) + bool(self.card)))
        found = [item for own in old for item in own[: -(-each // len(old))]]
        found += self.lessons.held_out(each) if self.lessons else []
        for asked in self.exchanges("selection", each).values() if self.card else ():
            few = asked[:: max(1, 2 * len(asked) // each)]
            found += [exchange_item(tokenizer, own) for own in few]
        return found

    def _lost(self, first: Right, after: Right) -> str:
        """What has less of the input's accuracy than it must keep, in words; empty if all is."""
        least, kept = self.settings.least_retention, retention(first, after)
        judged = ("mean", TOOLS, PERSONA)
        told = [f"{kind} {kept[kind]:.1%}" for kind in judged if kept.get(kind, 1.0) < least]
        return f"{', '.join(told)} of the input's accuracy, not {least:.0%}" if told else ""

    def _note(
        self,
        number: int,
        chosen: Chosen,
        child: LatentModel,
        kept: dict[str, float],
        own: Profile,
        lost: str,
    ) -> None:
        shape = child.settings.model_dump(include={"n_layers", "n_heads", "ffn_hidden"})
        self.steps.append(CutStep(number, chosen.cut.kind, chosen.rise, shape, kept, own, lost))
        values = {"retention": kept["mean"], "weights": own.weights, "token_ms": own.token_ms}
        self.ctx.log(None, {f"cut_{number}/{name}": value for name, value in values.items()})

    def _take_back(self, model: LatentModel, number: int, lost: str, recorded: Right) -> None:
        """Drop a cut; the weights before it still have the score that was recorded."""
        if self.right(model, f"before cut_{number}, again") != recorded:
            raise DamagedFile(self.ctx.folder, "weights that a cut went back to score otherwise")
        event = {"phase": self.ctx.phase, "stage": f"cut_{number}", "reason": lost}
        record = partial(self.ctx.tracker.event, "rolled_back", **event)
        self.ctx.once("rolled back", f"cut_{number}", record)

    # -- distillation ------------------------------------------------------------------------------

    def _distilled(self, model: LatentModel, number: int) -> LatentModel:
        """What is left, trained to do what the input does, straight through the rounding."""
        c, teacher = self.settings, self.start.opened().to(self.ctx.device)
        seed = (self.ctx.seed + 1_000_003 * model.steps) % 2**62  # other batches after every cut
        return model.trained(
            self.ctx,
            corpus=self.taught,
            curriculum=self.taught.constant(self.mix),
            held_out=self.lessons.held_out(HELD_OUT) if self.lessons else (),
            stage=f"cut_{number}",
            steps=c.cut_steps,
            settings=c.train,
            seed=seed,
            loss=DistillationLoss(teacher, share=c.parent_share),
        )

    @cached_property
    def taught(self) -> Corpus:
        """Old tasks, thoughts and exchanges, as far as it knows them."""
        c, tokenizer, seed = self.settings, self.corpus.tokenizer, self.ctx.seed
        further = self.lessons.sources() if self.lessons else []
        if self.card:
            further = [*further, taught_tools(tokenizer, self.card, c.examples, seed)]
            further.append(taught_persona(tokenizer, self.card, c.examples, seed))
        return replace(self.corpus, sources=[*self.corpus.sources, *further])

    @property
    def mix(self) -> dict[str, float]:
        c = self.settings
        said = c.exchanges_share if self.card else 0.0
        thoughts = (1 - said) * c.thoughts_share if self.lessons else 0.0
        mix = {name: (1 - said - thoughts) * w for name, w in self.corpus.mix().items()}
        if self.lessons:
            mix |= self.lessons.weights(thoughts)
        if self.card:
            mix |= {TOOLS: said * (1 - c.persona_share), PERSONA: said * c.persona_share}
        return mix


def retention(first: Right, after: Right) -> dict[str, float]:
    """The share of the first accuracy that is kept: of every kind, and of the mean over all."""
    before, now = (_shares(own) for own in (first, after))
    before["mean"], now["mean"] = (float(np.mean([*own.values()])) for own in (before, now))
    return {kind: now[kind] / share if share else 1.0 for kind, share in before.items()}


def _shares(right: Mapping[str, Sequence[bool]]) -> dict[str, float]:
    return {kind: float(np.mean(own)) for kind, own in right.items()}
