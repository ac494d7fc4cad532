"""The rounds of Phase 6: tools and persona in turn, each kept, or taken back if it hurts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from random import Random
from typing import Any

import torch

from agent_forge.contract.phase import PhaseContext
from agent_forge.data import exchanges
from agent_forge.data.exchanges import Card, Exchange, other_questions, tool_questions
from agent_forge.data.loader import TokenizedDataset
from agent_forge.data.tasks import Task
from agent_forge.errors import DamagedFile
from agent_forge.evals.comparison import compare_answers
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.replies import GREEDY, Asker, Replies
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer.generate import SamplingSettings
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase6_baking.config import BakingSettings
from agent_forge.phases.phase6_baking.prompted import BesideReplay, Samples
from agent_forge.phases.training import LatentModel, train_network
from agent_forge.quant.layers import rounded_once
from agent_forge.train.corpus import Corpus
from agent_forge.train.exchange_rows import (
    CARDS,
    PERSONA,
    TOOLS,
    taught_cards,
    taught_persona,
    taught_tools,
)
from agent_forge.train.lessons import Lessons, unseen_items
from agent_forge.train.prompt_baking import PromptBakingLoss
from agent_forge.train.trainer import LossFunction

SAMPLED = SamplingSettings(max_new_tokens=64, temperature=0.7)
SAMPLED_EVERY = 50  # steps, if the student's own answers are learned from
PROMPT_ITEMS = 60  # that forms of the prompt compete on
SAMPLES = "samples"
OLD, THOUGHTS = "old tasks", "thoughts"
THOUGHT_ITEMS = 40  # of each family, that are thought about before a round is kept
KINDS = (TOOLS, PERSONA)  # in this order
Right = dict[str, list[bool]]  # by kind, of old tasks and with thoughts: which items for choices


@dataclass(frozen=True)
class Round:
    """What a round of baking brought: success on items for choices, before and after."""

    number: int
    kind: str
    prompt: str  # that was baked; empty if right answers were
    before: dict[str, float]
    after: dict[str, float]
    taken_back: str  # the reason; empty if it is kept


@dataclass
class BakingTraining:
    """What the model learns from, and what it must not lose."""

    ctx: PhaseContext
    settings: BakingSettings
    corpus: Corpus
    lessons: Lessons | None
    card: Card
    rounds: list[Round] = field(default_factory=list)

    # -- asking ------------------------------------------------------------------------------------

    def ask(
        self, network: ForgeNetwork, asked: Sequence[Exchange], split: str, system: str = ""
    ) -> Replies:
        """A model's replies, greedily, with real tools."""
        return self.asker.ask(network, asked, split, system, GREEDY)

    @property
    def asker(self) -> Asker:
        return Asker(self.corpus.tokenizer, self.card)

    @cached_property
    def choices(self) -> dict[str, list[Exchange]]:
        """The items that rounds are chosen by."""
        count = self.settings.choice_items
        tools = tool_questions(self.card, "selection", count)
        tools += other_questions(exchanges.refused, "selection", max(1, count // 6))
        return {TOOLS: tools, PERSONA: exchanges.every_about(self.card, "selection")}

    def right(self, model: LatentModel, name: str) -> Right:
        """Which items for choices a model gets right; once."""
        network = model.opened().to(self.ctx.device)

        def look(kind: str) -> list[bool]:
            return self.ask(network, self.choices[kind], "selection").right

        found = {k: self.ctx.once("choices", f"{name}/{k}", partial(look, k)) for k in KINDS}
        items = [item for own in self.corpus.selection.values() for item in own]
        old = partial(measure, network, items, threshold=EVERY_STEP)
        scores = ItemScores(**self.ctx.once("old tasks", name, old))
        found[OLD] = [*map(bool, scores.right)]
        if self.lessons:
            asked = unseen_items(self.lessons.settings, "selection", THOUGHT_ITEMS)
            thinker = Thinker(network, self.corpus.tokenizer)
            look_at = partial(_thought_right, thinker, asked)
            found[THOUGHTS] = self.ctx.once("choices", f"{name}/{THOUGHTS}", look_at)
        return found

    # -- rounds ------------------------------------------------------------------------------------

    def follow(self, model: LatentModel) -> LatentModel:
        """Teach it to follow prompts: who it is and what it can do stands before the question."""
        if not (steps := self.settings.follow_steps):
            return model
        left = 1 - self.settings.replay_share
        return self._trained(model, {CARDS: left}, "follow", steps)

    def cycles(self, model: LatentModel) -> LatentModel:
        """Bake tools and persona in turn, until neither gains or the rounds are over."""
        now = self.right(model, "start")
        for number in range(1, self.settings.rounds + 1):
            open_kinds = [kind for kind in KINDS if not self._plateaued(kind)]
            if not open_kinds:
                break
            kind = open_kinds[(number - 1) % len(open_kinds)]
            child, prompt = self._baked(model, kind, number)
            after = self.right(child, f"round_{number}")
            lost = self._lost(kind, now, after)
            shares = (_shares(now), _shares(after))
            self.rounds.append(Round(number, kind, prompt, *shares, lost))
            self.ctx.log(None, {f"round_{number}/{k}/success": v for k, v in shares[1].items()})
            if lost:
                self._take_back(model, number, lost, now)
            else:
                model, now = child, after
        return model

    def _plateaued(self, kind: str) -> bool:
        """True if the last rounds of a kind, or of any, brought it no gain."""
        window, own = self.settings.plateau_rounds, [r for r in self.rounds if r.kind == kind]
        if len(own) < window:
            return False
        gains = [0.0 if r.taken_back else r.after[kind] - r.before[kind] for r in own[-window:]]
        return max(gains) < self.settings.min_gain

    def _lost(self, kind: str, before: Right, after: Right) -> str:
        """Why a round hurts, in words; empty if it does not."""
        told = []
        for name in after:
            gain = compare_answers(before[name], after[name], name)
            allowed = self.settings.min_gain if name in KINDS else self.settings.most_lost
            fell = gain.value < 0 if name == kind else gain.value < -allowed and gain.high < 0
            if fell:
                told.append(f"{name} {100 * gain.value:+.1f} points")
        return ", ".join(told)

    def _take_back(self, model: LatentModel, number: int, lost: str, recorded: Right) -> None:
        """Drop a round; the weights before it still have the score that was recorded."""
        again = self.right(model, f"before round_{number}, again")
        if again != recorded:
            raise DamagedFile(self.ctx.folder, "weights that a round went back to score otherwise")
        event = {"phase": self.ctx.phase, "stage": f"round_{number}", "reason": f"lost {lost}"}
        record = partial(self.ctx.tracker.event, "rolled_back", **event)
        self.ctx.once("rolled back", f"round_{number}", record)

    def _baked(self, model: LatentModel, kind: str, number: int) -> tuple[LatentModel, str]:
        """A model after a round, as far as the strength says, and the prompt that was baked."""
        c, stage, prompt = self.settings, f"round_{number}", ""
        left, other = 1 - c.replay_share, c.other_share
        mix = dict[str, float]()
        if c.follow_steps:
            mix[CARDS] = left * c.cards_share
            left -= mix[CARDS]
        if c.method == "gold":
            mix |= {k: left * (1 - other if k == kind else other) for k in KINDS}
            child = self._trained(model, mix, stage, c.round_steps)
        else:
            prompt = self._best_prompt(model, kind, number)
            child = self._by_prompt(model, kind, prompt, mix, stage)
        return _partly(model, child, c.strength), prompt

    # -- prompts -----------------------------------------------------------------------------------

    def _best_prompt(self, model: LatentModel, kind: str, number: int) -> str:
        """Of several forms of the card, the one behind which most is right before it is baked."""
        network, asked = model.opened().to(self.ctx.device), self.choices[kind]
        few = asked[:: max(1, len(asked) // PROMPT_ITEMS)]
        others = (self.card.text(Random(i)) for i in range(1, self.settings.prompts))
        forms = [self.card.text(), *others]

        def compete() -> list[float]:
            return [self.ask(network, few, "selection", form).share() for form in forms]

        shares: list[float] = self.ctx.once("prompts", f"round_{number}", compete)
        return forms[shares.index(max(shares))]

    def _by_prompt(
        self, model: LatentModel, kind: str, prompt: str, mix: Mapping[str, float], stage: str
    ) -> LatentModel:
        """Learn to answer without a prompt as the model does with it."""
        c, teacher = self.settings, model.opened().to(self.ctx.device)
        network, own = model.trainable(self.ctx.device), c.method == "reverse"
        told = self.corpus.tokenizer.encode_chat([{"role": "system", "content": prompt}])
        questions = self._questions(kind)
        draw = partial(self.asker.replies, questions=questions, split="train", sampling=SAMPLED)
        draw = draw if own else partial(draw, system=prompt)
        samples = Samples(draw, teacher, network, told, own, SAMPLED_EVERY)
        samples.items = self.ctx.once("samples", stage, partial(samples.drawn, teacher))
        if c.method == "samples":
            documents, said = map(list, zip(*samples.items, strict=True))
            source = TokenizedDataset(SAMPLES, documents, said)
            left = 1 - c.replay_share - sum(mix.values())
            return self._trained(model, {**mix, SAMPLES: left}, stage, c.round_steps, source)
        assert c.method != "gold"
        loss = BesideReplay(
            PromptBakingLoss(teacher, told, c.method), samples, c.rows, c.replay_share
        )
        how: dict[str, Any] = {"network": network, "loss": loss, "evaluation": samples}
        return self._trained(model, mix, stage, c.round_steps, **how)

    def _questions(self, kind: str) -> list[str]:
        """What is asked to sample answers."""
        count, rng = self.settings.samples, Random(self.ctx.seed)
        if kind == TOOLS:
            asked = tool_questions(self.card, "train", count, self.ctx.seed)
        else:
            slots = [exchanges.SLOTS[i % len(exchanges.SLOTS)] for i in range(count)]
            asked = [exchanges.about(self.card, slot, "train", rng) for slot in slots]
        return [own.question for own in asked]

    # -- training ----------------------------------------------------------------------------------

    def _trained(
        self,
        model: LatentModel,
        new: Mapping[str, float],
        stage: str,
        steps: int,
        *sources: TokenizedDataset,
        network: ForgeNetwork | None = None,
        loss: LossFunction = language_loss,
        **options: Any,
    ) -> LatentModel:
        """A model trained on new sources with these weights, beside what it knows."""
        c = self.settings
        replay, thoughts = 1 - sum(new.values()), c.thoughts_share if self.lessons else 0.0
        mix = {n: replay * (1 - thoughts) * w for n, w in self.corpus.mix().items()}
        if self.lessons:
            mix |= self.lessons.weights(replay * thoughts)
        network = network or model.trainable(self.ctx.device)
        corpus = replace(self.taught, sources=[*self.taught.sources, *sources])
        train_network(
            self.ctx,
            corpus,
            network,
            corpus.constant({**mix, **new}),
            stage=stage,
            steps=steps,
            settings=c.train,
            seed=int((self.ctx.seed + 1_000_003 * (1 + len(self.rounds))) % 2**62),  # other batches
            loss=rounded_once(loss) if model.packing else loss,
            **options,
        )
        return model.after(network, steps)

    @cached_property
    def taught(self) -> Corpus:
        """The corpus with thoughts, exchanges and, if they are followed, prompts."""
        c, tokenizer, seed = self.settings, self.corpus.tokenizer, self.ctx.seed
        sources: list[TokenizedDataset] = self.lessons.sources() if self.lessons else []
        sources.append(taught_tools(tokenizer, self.card, c.examples, seed))
        sources.append(taught_persona(tokenizer, self.card, c.examples, seed))
        if c.follow_steps:
            sources.append(taught_cards(tokenizer, c.examples, seed))
        return replace(self.corpus, sources=[*self.corpus.sources, *sources])


def _partly(before: LatentModel, after: LatentModel, strength: float) -> LatentModel:
    """The weights after training, or so much of the way there."""
    if strength == 1.0:
        return after
    pairs = {name: (tensor, after.state[name]) for name, tensor in before.state.items()}
    state = {
        name: torch.lerp(one.to(two), two, strength) if two.is_floating_point() else two
        for name, (one, two) in pairs.items()
    }
    return replace(after, state=state)


def _thought_right(thinker: Thinker, items: Sequence[Task]) -> list[bool]:
    return thinker.right(items, thinker.think(items))


def _shares(right: Right) -> dict[str, float]:
    return {name: sum(own) / len(own) for name, own in right.items()}
