"""What a model of ours has learned, for phases that make it smaller: taught on, asked, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.phase import PhaseContext
from agent_forge.data import exchanges
from agent_forge.data.exchanges import Card, Exchange, Persona, other_questions, tool_questions
from agent_forge.data.loader import TokenizedItem
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.replies import GREEDY, Asker
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.training import Scores, measure_domains
from agent_forge.train.config import SkillSettings
from agent_forge.train.corpus import Corpus, build_corpus
from agent_forge.train.exchange_rows import (
    PERSONA,
    TOOLS,
    exchange_item,
    taught_persona,
    taught_tools,
)
from agent_forge.train.lessons import Lessons, lessons_of_record, unseen_items

THOUGHTS = "thoughts"
THOUGHT_ITEMS = 40  # of each family, that are thought about for choices
HELD_OUT = 60  # thoughts that evaluations during training look at
REFUSED = 6  # tool questions for each wish without a tool
MEAN = "mean"
Right = dict[str, list[bool]]  # which items are right: by domain, of thoughts, tools and persona


@dataclass(frozen=True)
class Measured:
    """A model on unseen items: old tasks by domain; thoughts by family, tools and persona."""

    old: Scores
    right: Right

    @property
    def accuracy(self) -> dict[str, float]:
        old = {domain: scores.accuracy for domain, scores in self.old.items()}
        return {**old, **{kind: float(np.mean(own)) for kind, own in self.right.items()}}

    @property
    def mean_accuracy(self) -> float:
        return float(np.mean([*self.accuracy.values()]))


@dataclass(frozen=True)
class Skills:
    """Old tasks, and what the record of a model says that it learned besides: to think, to call
    tools, to be somebody."""

    ctx: PhaseContext
    settings: SkillSettings
    corpus: Corpus
    lessons: Lessons | None
    card: Card | None

    @classmethod
    def of(
        cls, ctx: PhaseContext, settings: SkillSettings, shape: ModelSettings, tokenizer: Tokenizer
    ) -> Skills:
        """Those of the model that the phase was handed, for networks of a shape."""
        record = ctx.inputs[0].metadata
        lessons = lessons_of_record(settings, record, tokenizer, ctx.seed)
        corpus = build_corpus(settings, shape, tokenizer)
        return cls(ctx, settings, corpus, lessons, card_of(record))

    # -- learning ----------------------------------------------------------------------------------

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
        """The weights of all sources; they add up to 1."""
        c = self.settings
        said = c.exchanges_share if self.card else 0.0
        thoughts = (1 - said) * c.thoughts_share if self.lessons else 0.0
        mix = {name: (1 - said - thoughts) * w for name, w in self.corpus.mix().items()}
        if self.lessons:
            mix |= self.lessons.weights(thoughts)
        if self.card:
            mix |= {TOOLS: said * (1 - c.persona_share), PERSONA: said * c.persona_share}
        return mix

    @property
    def training(self) -> dict[str, Any]:
        """What every training on them has in common, as `train_network` takes it."""
        held_out = self.lessons.held_out(HELD_OUT) if self.lessons else ()
        curriculum = self.taught.constant(self.mix)
        return {"corpus": self.taught, "curriculum": curriculum, "held_out": held_out}

    def calibration(self, count: int) -> list[TokenizedItem]:
        """Items of all that it knows, in equal shares; none of the verdict."""
        tokenizer, old = self.corpus.tokenizer, list(self.corpus.selection.values())
        each = -(-count // (1 + bool(self.lessons) + bool(self.card)))
        found = [item for own in old for item in own[: -(-each // len(old))]]
        found += self.lessons.held_out(each) if self.lessons else []
        for asked in self.exchanges("selection", each).values() if self.card else ():
            few = asked[:: max(1, 2 * len(asked) // each)]
            found += [exchange_item(tokenizer, own) for own in few]
        return found

    # -- asking ------------------------------------------------------------------------------------

    def right(self, network: ForgeNetwork, name: str) -> Right:
        """Which items for choices a model gets right; once for a name."""
        found = Right()
        for domain, items in self.corpus.selection.items():
            own = partial(measure, network, items, threshold=EVERY_STEP)
            scores = ItemScores(**self.ctx.once("old tasks", f"{name}/{domain}", own))
            found[domain] = [*map(bool, scores.right)]
        for kind, asked in self._choices.items():
            look = partial(self._answered, network, kind, asked, "selection")
            found[kind] = self.ctx.once("choices", f"{name}/{kind}", look)
        return found

    def measured(self, network: ForgeNetwork, name: str) -> Measured:
        """A model on the items of the verdict; once for a name."""
        c, asked = self.settings, dict[str, list[Any]]()
        old = measure_domains(self.ctx, self.corpus, network, name)
        if self.lessons:
            for item in unseen_items(self.lessons.settings, "verdict", c.thought_items):
                asked.setdefault(f"{THOUGHTS}: {item.family}", []).append(item)
        if self.card:
            asked |= self.exchanges("verdict", c.tool_items)
        right = {}
        for kind, items in asked.items():
            look = partial(self._answered, network, kind, items, "verdict")
            right[kind] = self.ctx.once("verdict", f"{name}/{kind}", look)
        return Measured(old, right)

    def exchanges(self, split: str, count: int) -> dict[str, list[Exchange]]:
        """Questions for tools, with some that no tool is for, and about the persona."""
        assert self.card is not None
        tools = tool_questions(self.card, split, count)
        tools += other_questions(exchanges.refused, split, max(1, count // REFUSED))
        return {TOOLS: tools, PERSONA: exchanges.every_about(self.card, split)}

    @cached_property
    def _choices(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        if self.lessons:
            found[THOUGHTS] = unseen_items(self.lessons.settings, "selection", THOUGHT_ITEMS)
        if self.card:
            found |= self.exchanges("selection", self.settings.choice_items)
        return found

    def _answered(
        self, network: ForgeNetwork, kind: str, items: Sequence[Any], split: str
    ) -> list[bool]:
        """Which questions it answers rightly: with thoughts, or with tools and as somebody."""
        if kind.startswith(THOUGHTS):
            thinker = Thinker(network, self.corpus.tokenizer)
            return thinker.right(items, thinker.think(items))
        assert self.card is not None
        asker = Asker(self.corpus.tokenizer, self.card)
        return asker.ask(network, items, split, sampling=GREEDY).right


def card_of(record: Mapping[str, Any]) -> Card | None:
    """The tools and the persona that a model has learned, as its record says."""
    if not record.get("tools") or not record.get("persona"):
        return None
    return Card(Persona(**record["persona"]), tuple(record["tools"]))


def retention(first: Right, after: Right) -> dict[str, float]:
    """The share of the first accuracy that is kept: of every kind, and of the mean over all; of
    what had no right answer, nothing is said."""
    before, now = (
        {kind: float(np.mean(right)) for kind, right in own.items()} for own in (first, after)
    )
    before[MEAN], now[MEAN] = (float(np.mean([*own.values()])) for own in (before, now))
    return {kind: now[kind] / share for kind, share in before.items() if share}
