"""The training of Phase 5: at the edge by worked examples, beyond it in rounds of own thoughts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from agent_forge.contract.phase import PhaseContext
from agent_forge.data.loader import Schedule, TokenizedDataset
from agent_forge.data.traces import Trace
from agent_forge.evals.ability import ASKED, Ability, Asked, find_ability
from agent_forge.evals.comparison import compare_answers
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase5_forge.config import ForgeSettings
from agent_forge.phases.phase5_forge.edge import HINTS, EdgeDraw, EdgeTasks, Looked, source_name
from agent_forge.phases.phase5_forge.own_thoughts import (
    OwnThoughts,
    by_running,
    by_splitting,
    by_verifier,
    by_vote,
    cuts_of,
)
from agent_forge.phases.training import LatentModel, train_network
from agent_forge.quant.layers import rounded_once
from agent_forge.quant.packed import Packing
from agent_forge.train.config import STEP
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import Lessons, trace_item
from agent_forge.train.self_model import SelfModelLoss
from agent_forge.train.trainer import LossFunction

log = logging.getLogger(__name__)
LOOKED_AT = 8  # items of a size, at every look
CHOICE_ITEMS = 300  # of each family, that say whether known sizes are kept; a fifth of a new size
PAST = 0.25  # of the own thoughts that a round learns from, that are of the rounds before
STRATEGIES = 0.3  # of what was known before, that is thoughts of all strategies and families
LOOKS = {"uniform": 10, "easy_to_hard": 10, "controller": 40}
LEAST_PASSED = 0.1  # of the items, of which a program passed, for a family of code to be taught
RUN_AT_ONCE = 40  # items whose programs are run before anybody can stop or kill that
DREAMS, DREAMED = "dreams", 200  # items of each family
OLD = "old tasks"
Reach = Mapping[str, int]  # by family: the largest size that is solved
Solved = dict[str, list[bool]]  # by family, and of old tasks: which items for choices


@dataclass(frozen=True)
class FamilyRound:
    """A family in a round: its new sizes, own thoughts about them, and success by size."""

    sizes: list[int]
    kept: int  # thoughts to learn from
    asked: int
    right: int  # of those kept, in every step; told, and used for nothing
    taught: bool  # enough were kept
    before: dict[str, float]
    after: dict[str, float] = field(default_factory=dict)  # empty if nothing was trained

    @property
    def reach(self) -> int:
        """The largest new size that is solved without a hole below; the one before them if none."""
        found = self.sizes[0] - 1
        for size in self.sizes:
            if self.after.get(str(size), 0.0) < ASKED:
                break
            found = size
        return found


@dataclass(frozen=True)
class Round:
    """What a round of own thoughts brought, and why it was taken back, if it was."""

    number: int
    families: dict[str, FamilyRound]
    taken_back: str  # the reason; empty if it is kept


@dataclass
class EdgeTraining:
    """What the model learns from, and what it must not lose."""

    ctx: PhaseContext
    settings: ForgeSettings
    corpus: Corpus
    lessons: Lessons | None
    families: dict[str, EdgeTasks]  # those that cannot be asked are taken out
    problems: dict[str, str] = field(default_factory=dict)  # and stand here with the reason
    worked_to: dict[str, int] = field(default_factory=dict)  # largest size with worked examples
    pools: list[TokenizedDataset] = field(default_factory=list)  # own thoughts of kept rounds

    # -- looking -----------------------------------------------------------------------------------

    def of_each(
        self, record: str, key: str, work: Callable[[EdgeTasks], Any], *, drop: bool = True
    ) -> dict[str, Any]:
        """What `work` finds of each family, once. A family whose tasks or verifiers raise is told
        of, and with `drop` it is left out from there on."""

        def guarded(own: EdgeTasks) -> Any:
            try:
                found = work(own)
            except (OSError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever tasks and verifiers raise
                return {"error": f"{type(error).__name__}: {error}"}
            return {"found": asdict(found) if isinstance(found, Ability) else found}

        found = {}
        for name, own in [*self.families.items()]:
            kept = self.ctx.once(record, f"{key}/{name}", partial(guarded, own))
            if "error" in kept:
                log.warning("%s is left out: %s", name, kept["error"])
                self.problems[name] = kept["error"]
                if drop:
                    del self.families[name]
            else:
                found[name] = kept["found"]
        return found

    def assess(
        self, model: LatentModel, name: str, split: str, *, drop: bool = True
    ) -> dict[str, Ability]:
        """How far each family reaches."""
        network, items = model.opened().to(self.ctx.device), self.settings.assessment_items

        def look(own: EdgeTasks) -> Ability:
            return find_ability(partial(own.solved, network, split), own.sizes, items)

        found = self.of_each("abilities", f"{name}/{split}", look, drop=drop)
        return {n: Ability(**{**r, "tried": _tried(r["tried"])}) for n, r in found.items()}

    def solved(self, model: LatentModel, name: str) -> Solved:
        """Items of sizes known before and old tasks that are solved; of those for choices."""
        network = model.opened().to(self.ctx.device)

        def look(own: EdgeTasks) -> list[bool]:
            return own.solved(network, "selection", _in_turn(own.taught, CHOICE_ITEMS))

        found = self.of_each("known sizes", name, look)
        items = [item for own in self.corpus.selection.values() for item in own]
        old = partial(measure, network, items, threshold=EVERY_STEP)
        return {**found, OLD: ItemScores(**self.ctx.once("old tasks", name, old)).right}

    def lost(self, before: Solved, now: Solved) -> str:
        """What is surely lost, by more than is allowed, in words; empty if nothing."""
        c, told = self.settings, []
        for name in now:
            gain = compare_answers([*map(bool, before[name])], [*map(bool, now[name])], name)
            allowed = c.kept_skills if name == OLD else c.most_lost
            if gain.value < -allowed and gain.high < 0:
                told.append(f"{name} {100 * gain.value:+.1f} points")
        return ", ".join(told)

    def take_back(self, stage: str, reason: str) -> None:
        """Note, once, that what a stage learned is dropped."""
        event = {"phase": self.ctx.phase, "stage": stage, "reason": reason}
        self.ctx.once("rolled back", stage, lambda: self.ctx.tracker.event("rolled_back", **event))

    # -- at the edge -------------------------------------------------------------------------------

    def at_the_edge(
        self, model: LatentModel, reach: Reach, before: Solved
    ) -> tuple[LatentModel, EdgeDraw | None, str]:
        """Train on worked examples of the sizes beyond the edge that fit a row; returns the model,
        what was drawn, and why it was taken back, if it was."""
        c, sizes = self.settings, dict[str, list[int]]()
        for name, own in self.families.items():
            top = min(reach[name] + c.edge_sizes, own.sizes[-1])
            if beyond := [*range(max(reach[name] + 1, own.sizes[0]), top + 1)]:
                sizes[name] = beyond
        if not c.steps or not sizes:
            return model, None, ""
        base, sources = self._known(model, "edge")
        network = model.trainable(self.ctx.device)
        hinted = frozenset(name for name in sizes if self.families[name].thinks)
        how = (partial(self._look, network), c.steps, c.row_tokens, LOOKS[c.draw])
        draw = EdgeDraw(c.draw, base, sizes, hinted, *how)
        self._fit(model, network, draw, [*sources, *self._worked(sizes)], "edge", c.steps)
        child = model.after(network, c.steps)
        if lost := self.lost(before, self.solved(child, "edge")):
            self.take_back("edge", lost)
            return model, draw, f"lost {lost}"
        self.worked_to |= {name: own[-1] for name, own in sizes.items()}
        return child, draw, ""

    def _worked(self, sizes: Mapping[str, Sequence[int]]) -> list[TokenizedDataset]:
        """Worked examples of every size; for the controller also with first claims given."""
        hints = HINTS if self.settings.draw == "controller" else (0,)
        count = max(1, self.settings.examples // (len(hints) * sum(map(len, sizes.values()))))
        found = []
        for name, own in sizes.items():
            family = self.families[name]
            for size, given in [(s, h) for s in own for h in hints if not h or family.thinks]:
                asked = [(size, number) for number in range(count)]
                found.append(family.source(source_name(name, size, given), asked, given))
        return found

    def _look(
        self, network: ForgeNetwork, sizes: Mapping[str, Sequence[int]], number: int
    ) -> tuple[float, Looked]:
        """The loss on items of sizes, new ones at every look, and the share of each solved."""
        first, found, losses, tokens = LOOKED_AT * number, Looked(), 0.0, 0
        for name, own in sizes.items():
            asked = [(size, first + n) for size in own for n in range(LOOKED_AT)]
            scores = self.families[name].scores(network, "selection", asked)
            found[name] = _by_size(asked, scores.right)
            losses, tokens = losses + sum(scores.loss), tokens + sum(scores.tokens)
        network.train()
        return losses / tokens, found

    def _known(
        self, model: LatentModel, stage: str
    ) -> tuple[dict[str, float], list[TokenizedDataset]]:
        """The weights of what it knew before, and what has to be there for it beside the corpus:
        thoughts of every strategy, and worked examples of the families as far as there are any."""
        c, sources = self.settings, list[TokenizedDataset]()
        mix = {name: c.replay_share * weight for name, weight in self.corpus.mix().items()}
        left = (1 - c.replay_share) * c.known_share
        if self.lessons:
            sources += self.lessons.sources()
            mix |= self.lessons.weights(STRATEGIES * left)
            left *= 1 - STRATEGIES
        for name, family in self.families.items():
            sizes = family.taught[0], self.worked_to.get(name, family.taught[1])
            asked = _in_turn(sizes, max(1, c.examples // (2 * len(self.families))))
            sources.append(family.source(f"{name}, known sizes", asked))
            mix[sources[-1].name] = left / len(self.families)
        if c.dream_share and (dreams := self._dreams(model, stage)):
            sources.append(dreams)
            mix[DREAMS] = (1 - c.replay_share) * (1 - c.known_share) * c.dream_share
        return mix, sources

    def _dreams(self, model: LatentModel, stage: str) -> TokenizedDataset | None:
        """Its own thoughts about items of known sizes whose answers are right."""
        c, kept = self.settings, list[Trace]()
        thinker = Thinker(model.opened().to(self.ctx.device), self.corpus.tokenizer)
        for name, own in self.families.items():
            if own.thinks:
                asked = _in_turn(own.taught, DREAMED, 10**6)
                how = partial(by_verifier, thinker, samples=c.samples, seed=self.ctx.seed)
                kept += self._journaled(how, own, asked, f"{DREAMS} {stage}/{name}").traces
        return self._source(DREAMS, kept) if kept else None

    def _fit(
        self,
        model: LatentModel,
        network: ForgeNetwork,
        draw: Schedule,
        sources: Sequence[TokenizedDataset],
        stage: str,
        steps: int,
        loss: LossFunction = language_loss,
    ) -> None:
        """Train a network of the model's weights on the corpus and further sources."""
        c, own = self.settings, None
        if c.self_model_weight:
            loss = own = SelfModelLoss(loss, network, c.self_model_weight)
        corpus = replace(self.corpus, sources=[*self.corpus.sources, *sources])
        seed = int((self.ctx.seed + 1_000_003 * model.steps) % 2**62)  # later stages: other batches
        options: dict[str, Any] = {"settings": c.train, "seed": seed, "steps": steps}
        options |= {"evaluation": draw} if isinstance(draw, EdgeDraw) else {}
        options["loss"] = rounded_once(loss) if model.packing else loss
        train_network(self.ctx, corpus, network, draw, stage=stage, **options)
        if own:
            own.take_off(network)

    def on_known(self, model: LatentModel, stage: str, steps: int, **options: Any) -> LatentModel:
        """A model trained on what it knows alone: old tasks, worked sizes, thoughts of kept rounds;
        a control, or one that is brought back to few bits."""
        mix, sources = self._known(model, stage)
        mix |= {pool.name: (1 - sum(mix.values())) / len(self.pools) for pool in self.pools}
        network = model.trainable(self.ctx.device)
        curriculum = self.corpus.constant(mix)
        self._fit(model, network, curriculum, [*sources, *self.pools], stage, steps, **options)
        return model.after(network, steps)

    def brought_back(self, model: LatentModel, packing: Packing) -> LatentModel:
        """Weights of full precision in few bits, taught by what they were."""
        teacher = DistillationLoss(model.opened().to(self.ctx.device))
        packed = replace(model, packing=packing)
        return self.on_known(packed, "few_bits", self.settings.round_steps, loss=teacher)

    # -- beyond ------------------------------------------------------------------------------------

    def beyond(
        self, model: LatentModel, reach: Reach, before: Solved
    ) -> tuple[LatentModel, list[Round]]:
        """Rounds of own thoughts about longer and longer items, each kept or taken back whole."""
        c, now, rounds = self.settings, dict(reach), list[Round]()
        for number in range(1, c.rounds + 1) if c.beyond != "none" else ():
            sizes = {name: self._next_sizes(own, now[name]) for name, own in self.families.items()}
            if not any(sizes.values()):
                break
            model, found = self._round(model, number, sizes, now, before)
            rounds.append(found)
            if found.taken_back:
                break
            now |= {name: own.reach for name, own in found.families.items() if own.taught}
        return model, rounds

    def _next_sizes(self, own: EdgeTasks, last: int) -> list[int]:
        """The sizes of the next round: beyond those that are solved, with two cuts into pieces
        where the family is split."""
        if not (own.thinks or own.is_code) or last < own.taught[1]:
            return []
        top = min(math.ceil(self.settings.growth * last), own.sizes[-1])
        sizes = range(last + 1, top + 1)
        split = self._splits(own)
        return [size for size in sizes if not split or cuts_of(size, own.taught[0], last)]

    def _splits(self, own: EdgeTasks) -> bool:
        """True if own thoughts about a family are chosen by two cuts that agree."""
        return own.thinks and self.settings.beyond == "split"

    def _round(
        self,
        model: LatentModel,
        number: int,
        sizes: Mapping[str, list[int]],
        reach: Reach,
        before: Solved,
    ) -> tuple[LatentModel, Round]:
        c, stage = self.settings, f"round_{number}"
        families, taught = {}, list[Trace]()
        shares = self._success(model, f"before {stage}", sizes)
        for name in shares:
            own = self._own_thoughts(model, number, name, sizes[name], reach[name])
            least = LEAST_PASSED if self.families[name].is_code else 0.0
            least = c.least_agreement if self._splits(self.families[name]) else least
            enough = own.traces and own.agreement >= least
            counts = (len(own.traces), own.asked, own.right, bool(enough))
            families[name] = FamilyRound(sizes[name], *counts, shares[name])
            taught += own.traces if enough else []
        if not taught:
            reason = "no family has enough thoughts of its own to learn from"
            return model, Round(number, families, reason)
        pool = self._source(f"round {number}", taught)
        mix, sources = self._known(model, stage)
        new, past = 1 - sum(mix.values()), PAST if self.pools else 0.0
        mix |= {one.name: new * past / len(self.pools) for one in self.pools}
        mix[pool.name] = new * (1 - past)
        network = model.trainable(self.ctx.device)
        sources += [pool, *self.pools]
        self._fit(model, network, self.corpus.constant(mix), sources, stage, c.round_steps)
        child = model.after(network, c.round_steps)
        after = self._success(child, f"after {stage}", sizes)
        families = {n: replace(own, after=after.get(n, {})) for n, own in families.items()}
        lost = self.lost(before, self.solved(child, stage))
        reason = f"lost {lost}" if lost else ""
        learned = [own for own in families.values() if own.taught]
        if not reason and not any(own.reach >= own.sizes[0] for own in learned):
            reason = "no new size is solved"
        if reason:
            self.take_back(stage, reason)
            return model, Round(number, families, reason)
        self.pools.append(pool)
        return child, Round(number, families, "")

    def _own_thoughts(
        self, model: LatentModel, number: int, name: str, sizes: Sequence[int], reach: int
    ) -> OwnThoughts:
        """The model's thoughts about items of sizes that it was not taught, or its programs."""
        c, own = self.settings, self.families[name]
        first = 10**6 * (number + 1)
        asked = [(sizes[i % len(sizes)], first + i) for i in range(c.own_items)]
        thinker = Thinker(model.opened().to(self.ctx.device), self.corpus.tokenizer)
        if own.is_code:
            how = partial(by_running, thinker, samples=c.samples, seed=self.ctx.seed)
            return self._programs(how, own, asked, f"{number}/{name}")
        if c.beyond == "split":
            how = partial(by_splitting, thinker, known=(own.taught[0], reach))
        else:
            choose = by_verifier if c.beyond == "verified" else by_vote
            how = partial(choose, thinker, samples=c.samples, seed=self.ctx.seed)
        return self._journaled(how, own, asked, f"{number}/{name}")

    def _programs(
        self, how: Callable[..., OwnThoughts], own: EdgeTasks, asked: Sequence[Asked], key: str
    ) -> OwnThoughts:
        """Programs that passed and fit a row; some items at a time, as running them takes long."""
        kept, right = list[Trace](), 0
        for first in range(0, len(asked), RUN_AT_ONCE):
            few = asked[first : first + RUN_AT_ONCE]
            found = self._journaled(how, own, few, f"{key}/{first}")
            kept, right = [*kept, *found.traces], right + found.right
        fitting = [t for t in kept if len(own.item(t.task).ids) < self.settings.row_tokens]
        return OwnThoughts(fitting, len(asked), right)

    def _journaled(
        self,
        how: Callable[..., OwnThoughts],
        own: EdgeTasks,
        asked: Sequence[Asked],
        key: str,
    ) -> OwnThoughts:
        """Own thoughts about items to learn from, made once."""
        items = [own.task(size, "train", number) for size, number in asked]
        place = {(task.operands, task.question): n for n, task in enumerate(items)}

        def made() -> dict[str, Any]:
            found = how(items=items)
            where = [place[t.task.operands, t.task.question] for t in found.traces]
            kept = [
                [n, list(t.claims), t.task.answer] for n, t in zip(where, found.traces, strict=True)
            ]
            return {"kept": kept, "asked": found.asked, "right": found.right}

        record = self.ctx.once("own thoughts", key, made)
        kept = [
            Trace(replace(items[n], answer=answer), STEP, tuple(claims))
            for n, claims, answer in record["kept"]
        ]
        return OwnThoughts(kept, record["asked"], record["right"])

    def _success(
        self, model: LatentModel, key: str, sizes: Mapping[str, list[int]]
    ) -> dict[str, dict[str, float]]:
        """By family and size the share of new items that are solved; of those for choices."""
        network = model.opened().to(self.ctx.device)

        def look(own: EdgeTasks) -> dict[str, float]:
            asked = [(size, n) for size in sizes[own.name] for n in range(CHOICE_ITEMS // 5)]
            return _by_size(asked, own.solved(network, "selection", asked)) if asked else {}

        found = self.of_each("new sizes", key, look)
        return {name: own for name, own in found.items() if own}

    def _source(self, name: str, own: Sequence[Trace]) -> TokenizedDataset:
        items = [
            trace_item(self.corpus.tokenizer, trace)
            if trace.claims
            else self.families[trace.task.family].item(trace.task)
            for trace in own
        ]
        return TokenizedDataset(name, [i.ids for i in items], [i.asked for i in items])


def _in_turn(sizes: tuple[int, int], count: int, first: int = 0) -> list[Asked]:
    """Sizes and numbers of so many items, the sizes in turn."""
    every = range(sizes[0], sizes[1] + 1)
    return [(every[i % len(every)], first + i) for i in range(count)]


def _by_size(asked: Sequence[Asked], right: Sequence[float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for (size, _), own in zip(asked, right, strict=True):
        found.setdefault(str(size), []).append(float(own))
    return {size: sum(own) / len(own) for size, own in found.items()}


def _tried(record: Mapping[str, Sequence[int]]) -> dict[int, tuple[int, int]]:
    return {int(size): (solved, asked) for size, (solved, asked) in record.items()}
