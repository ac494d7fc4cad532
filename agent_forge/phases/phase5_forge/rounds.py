"""The training of Phase 5: at the edge by worked examples, beyond it in rounds of own thoughts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from agent_forge.contract.phase import PhaseContext
from agent_forge.data.loader import TokenizedDataset
from agent_forge.data.traces import Trace
from agent_forge.evals.ability import ASKED, Ability, find_ability
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.loss import language_loss
from agent_forge.phases.phase5_forge.config import ForgeSettings
from agent_forge.phases.phase5_forge.edge import HINTS, EdgeDraw, EdgeTasks, Looked, source_name
from agent_forge.phases.phase5_forge.own_thoughts import (
    OwnThoughts,
    by_splitting,
    by_verifier,
    by_vote,
)
from agent_forge.phases.training import LatentModel, train_network
from agent_forge.quant.layers import rounded_once
from agent_forge.train.config import STEP
from agent_forge.train.corpus import Corpus
from agent_forge.train.lessons import Lessons, trace_item
from agent_forge.train.self_model import SelfModelLoss
from agent_forge.train.trainer import LossFunction

log = logging.getLogger(__name__)
LOOKED_AT = 8  # items of a size, at every look
KNOWN_ITEMS = 200  # of each family, that say whether known sizes are kept
EARLIER = 0.25  # of the own thoughts that a round learns from, that are of the rounds before
LESSONS = 0.3  # of what was known before, that is of all strategies and families
LOOKS = {"uniform": 10, "easy_to_hard": 10, "controller": 40}
DREAMS, DREAMED = "dreams", 200  # items of each family
OLD = "old tasks"
Levels = dict[str, float]  # accuracy by family, and of old tasks


@dataclass(frozen=True)
class Round:
    """What a round brought: by family the sizes it was about, how many of its own thoughts it kept
    and how many of those are right, and success on these sizes before and after."""

    number: int
    sizes: dict[str, tuple[int, int]]
    kept_thoughts: dict[str, tuple[int, int, int]]  # kept, asked, right in every step
    before: dict[str, float]
    after: dict[str, float]
    kept: bool
    reason: str


@dataclass
class EdgeTraining:
    """What the model learns from, and what it must not lose."""

    ctx: PhaseContext
    settings: ForgeSettings
    corpus: Corpus
    lessons: Lessons | None
    families: Mapping[str, EdgeTasks]
    problems: dict[str, str] = field(default_factory=dict)  # families that are left out, and why

    # -- looking -----------------------------------------------------------------------------------

    def assess(self, model: LatentModel, name: str, split: str) -> dict[str, Ability]:
        """How far each family reaches. One that cannot be asked is told of and left out."""
        found: dict[str, Ability] = {}
        network = model.opened().to(self.ctx.device)
        for family, own in self.families.items():
            if family in self.problems:
                continue
            look = partial(
                find_ability,
                partial(own.solved, network, split),
                own.sizes,
                self.settings.assessment_items,
            )
            try:
                record = self.ctx.once("abilities", f"{name}/{split}/{family}", look)
            except Exception as error:  # noqa: BLE001 - whatever tasks and verifiers raise
                log.warning("%s cannot be assessed and is left out: %s", family, error)
                self.problems[family] = str(error)
                continue
            tried = {int(size): (right, asked) for size, (right, asked) in record["tried"].items()}
            found[family] = Ability(record["reach"], record["low"], record["high"], tried)
        return found

    def levels(self, model: LatentModel, name: str) -> Levels:
        """Accuracy on the sizes that were known before, and on old tasks, by items for choices."""

        def measured() -> Levels:
            network = model.opened().to(self.ctx.device)
            found = {
                family: _share(own.solved(network, "selection", _in_turn(own.taught, KNOWN_ITEMS)))
                for family, own in self._asked.items()
            }
            items = [item for own in self.corpus.selection.values() for item in own]
            return {**found, OLD: measure(network, items, threshold=EVERY_STEP).accuracy}

        record: Levels = self.ctx.once("known sizes", name, measured)
        return record

    @property
    def _asked(self) -> dict[str, EdgeTasks]:
        return {n: own for n, own in self.families.items() if n not in self.problems}

    def lost(self, before: Levels, now: Levels) -> str:
        """What is lost by more than is allowed, in words; empty if nothing."""
        c, told = self.settings, []
        for name, share in before.items():
            allowed = c.kept_skills if name == OLD else c.most_lost
            if now[name] < share - allowed:
                told.append(f"{name} {100 * (now[name] - share):+.1f} points")
        return ", ".join(told)

    # -- at the edge -------------------------------------------------------------------------------

    def at_the_edge(
        self, model: LatentModel, reach: Mapping[str, int], stage: str = "edge"
    ) -> tuple[LatentModel, EdgeDraw | None]:
        """Train on worked examples of the sizes beyond the edge; those that fit a row."""
        c = self.settings
        sizes = {}
        for family, last in reach.items():
            own = self.families[family]
            top = min(last + c.edge_sizes, own.sizes[-1])
            if beyond := range(max(last + 1, own.sizes[0]), top + 1):
                sizes[family] = list(beyond)
        if not c.steps or not sizes:
            return model, None
        base, extra = self._base(model, reach)
        network = model.trainable(self.ctx.device)
        draw = EdgeDraw(
            c.draw, base, sizes, partial(self._look, network), c.steps, c.row_tokens, LOOKS[c.draw]
        )
        self._fit(model, network, draw, [*extra, *self._worked(sizes)], stage, c.steps)
        return model.after(network, c.steps), draw

    def _worked(self, sizes: Mapping[str, Sequence[int]]) -> list[TokenizedDataset]:
        """Worked examples of every size; for the controller also with first claims given."""
        hints = HINTS if self.settings.draw == "controller" else (0,)
        count = max(1, self.settings.examples // (len(hints) * sum(map(len, sizes.values()))))
        return [
            self.families[family].source(
                source_name(family, size, given), [(size, n) for n in range(count)], given
            )
            for family, own in sizes.items()
            for size in own
            for given in hints
            if not given or self.families[family].thinks
        ]

    def _base(
        self, model: LatentModel, reach: Mapping[str, int]
    ) -> tuple[dict[str, float], list[TokenizedDataset]]:
        """The weights of what it knew before, and what has to be there for it beside the corpus:
        thoughts of every strategy, and of the families at hand all sizes that it solves."""
        c, new = self.settings, 1 - self.settings.replay_share
        mix = {name: c.replay_share * weight for name, weight in self.corpus.mix().items()}
        sources = list[TokenizedDataset]()
        left = new * c.known_share
        if self.lessons:
            sources += self.lessons.sources()
            thoughts = {name: w for name, w in self.known_mix().items() if name not in mix}
            share = LESSONS * left / sum(thoughts.values())
            mix |= {name: share * weight for name, weight in thoughts.items()}
            left *= 1 - LESSONS
        for family, own in self._asked.items():
            sizes = own.taught[0], max(own.taught[1], reach.get(family, 0))
            count = max(1, c.examples // (2 * len(self._asked)))
            source = own.source(f"{family}, known sizes", _in_turn(sizes, count))
            sources.append(source)
            mix[source.name] = left / len(self._asked)
        if c.dream_share and (dreams := self._dreams(model)):
            sources.append(dreams)
            mix[DREAMS] = new * (1 - c.known_share) * c.dream_share
        return mix, sources

    def known_corpus(self) -> Corpus:
        """What it knew before: old tasks, and thoughts if it has learned any."""
        further = self.lessons.sources() if self.lessons else []
        return replace(self.corpus, sources=[*self.corpus.sources, *further])

    def known_mix(self) -> dict[str, float]:
        if not self.lessons:
            return self.corpus.mix()
        return self.lessons.mix(self.corpus, list(self.lessons.traces))

    def _dreams(self, model: LatentModel) -> TokenizedDataset | None:
        """Its own thoughts about items of known sizes whose answers are right."""
        thinker = Thinker(model.opened().to(self.ctx.device), self.corpus.tokenizer)
        kept: list[Trace] = []
        for own in self._thinking.values():
            items = [own.task(size, "train", n) for size, n in _in_turn(own.taught, DREAMED, 10**6)]
            samples, seed = self.settings.samples, self.ctx.seed
            kept += by_verifier(thinker, items, samples, seed).traces
        return self._source(DREAMS, kept) if kept else None

    def _look(self, network: Any, sizes: Mapping[str, Sequence[int]]) -> tuple[float, Looked]:
        asked = [
            (family, size, self.families[family].task(size, "selection", number))
            for family, own in sizes.items()
            for size in own
            for number in range(LOOKED_AT)
        ]
        items = [self.families[family].item(task) for family, _, task in asked]
        scores = measure(network, items, threshold=EVERY_STEP)
        network.train()
        found: dict[str, dict[str, list[float]]] = {}
        for (family, size, _), right in zip(asked, scores.right, strict=True):
            found.setdefault(family, {}).setdefault(str(size), []).append(right)
        shares = {f: {s: sum(r) / len(r) for s, r in own.items()} for f, own in found.items()}
        return scores.nats_per_token, shares

    def _fit(
        self,
        model: LatentModel,
        network: Any,
        draw: Any,
        sources: Sequence[TokenizedDataset],
        stage: str,
        steps: int,
    ) -> None:
        """Train a network of the model's weights on the corpus and further sources."""
        c, loss = self.settings, language_loss
        own: SelfModelLoss | None = None
        whole: LossFunction = loss
        if c.self_model_weight:
            whole = own = SelfModelLoss(loss, network, c.self_model_weight)
        corpus = replace(self.corpus, sources=[*self.corpus.sources, *sources])
        options: dict[str, Any] = {"settings": c.train, "seed": self._seed(model), "steps": steps}
        if isinstance(draw, EdgeDraw):
            options["evaluation"] = draw
        options["loss"] = rounded_once(whole) if model.packing else whole
        train_network(self.ctx, corpus, network, draw, stage=stage, **options)
        if own:
            own.take_off(network)

    def _seed(self, model: LatentModel) -> int:
        """Later stages see other batches."""
        return int((self.ctx.seed + 1_000_003 * model.steps) % 2**62)

    # -- beyond ------------------------------------------------------------------------------------

    @cached_property
    def _thinking(self) -> dict[str, EdgeTasks]:
        return {name: own for name, own in self._asked.items() if own.thinks}

    def beyond(
        self, model: LatentModel, reach: Mapping[str, int], start: Levels
    ) -> tuple[LatentModel, list[Round]]:
        """Rounds of own thoughts about longer and longer items, each kept or taken back whole."""
        c = self.settings
        reach, rounds = dict(reach), list[Round]()
        pools: list[TokenizedDataset] = []
        for number in range(1, c.rounds + 1) if c.beyond != "none" else ():
            sizes = {}
            for family, own in self._thinking.items():
                last, most = reach.get(family, 0), own.sizes[-1]
                top = min(math.ceil(c.growth * last), most)
                if last >= own.taught[1] and top > last:
                    sizes[family] = (last + 1, top)
            if not sizes:
                break
            model, found, pool = self._round(model, number, sizes, reach, pools, start)
            rounds.append(found)
            if not found.kept or pool is None:
                break
            pools.append(pool)
            for family, (_, top) in sizes.items():
                if found.after.get(family, 0.0) >= ASKED:
                    reach[family] = top
        return model, rounds

    def _round(
        self,
        model: LatentModel,
        number: int,
        sizes: dict[str, tuple[int, int]],
        reach: Mapping[str, int],
        pools: Sequence[TokenizedDataset],
        start: Levels,
    ) -> tuple[LatentModel, Round, TokenizedDataset | None]:
        c, ctx = self.settings, self.ctx
        own = {f: self._own_thoughts(model, number, f, sizes[f], reach[f]) for f in sizes}
        counts = {f: (len(o.traces), o.asked, o.right) for f, o in own.items()}
        before = self._success(model, f"before round {number}", sizes)
        enough = c.least_agreement if c.beyond == "split" else 0.0
        taught = [t for o in own.values() if o.agreement >= enough for t in o.traces]
        if not taught:
            reason = f"no family has {c.least_agreement:.0%} of thoughts to learn from"
            return model, Round(number, sizes, counts, before, before, False, reason), None
        pool = self._source(f"round {number}", taught)
        base, extra = self._base(model, reach)
        new, earlier = 1 - sum(base.values()), EARLIER if pools else 0.0
        mix: dict[str, float] = {**base, pool.name: new * (1 - earlier)}
        mix |= {one.name: new * earlier / len(pools) for one in pools}
        network = model.trainable(ctx.device)
        sources = [*extra, pool, *pools]
        curriculum = self.corpus.constant(mix)
        self._fit(model, network, curriculum, sources, f"round_{number}", c.round_steps)
        child = model.after(network, c.round_steps)
        after = self._success(child, f"after round {number}", sizes)
        lost = self.lost(start, self.levels(child, f"round {number}"))
        gained = sum(after.values()) > sum(before.values())
        reason = f"lost {lost}" if lost else "" if gained else "nothing was gained"
        kept = not reason
        if not kept:
            ctx.tracker.event(
                "rolled_back", phase=ctx.phase, stage=f"round_{number}", reason=reason
            )
        found = Round(number, sizes, counts, before, after, kept, reason)
        return child if kept else model, found, pool

    def _own_thoughts(
        self, model: LatentModel, number: int, family: str, sizes: tuple[int, int], reach: int
    ) -> OwnThoughts:
        """The model's thoughts about items of sizes that it was not taught."""
        c, own = self.settings, self.families[family]
        asked = [
            own.task(size, "train", n) for size, n in _in_turn(sizes, c.own_items, 10**6 * number)
        ]

        def made() -> dict[str, Any]:
            thinker = Thinker(model.opened().to(self.ctx.device), self.corpus.tokenizer)
            if c.beyond == "split":
                found = by_splitting(thinker, asked, (own.taught[0], reach))
            else:
                choose = by_verifier if c.beyond == "verified" else by_vote
                found = choose(thinker, asked, c.samples, self.ctx.seed)
            place = {task.operands: n for n, task in enumerate(asked)}
            kept = [[place[t.task.operands], list(t.claims), t.task.answer] for t in found.traces]
            return {"kept": kept, "asked": found.asked, "right": found.right}

        record = self.ctx.once("own thoughts", f"{number}/{family}", made)
        kept = [
            Trace(replace(asked[n], answer=answer), STEP, tuple(claims))
            for n, claims, answer in record["kept"]
        ]
        return OwnThoughts(kept, record["asked"], record["right"])

    def _success(
        self, model: LatentModel, name: str, sizes: Mapping[str, tuple[int, int]]
    ) -> dict[str, float]:
        """The share of thoughts about new sizes that are right in every step; for choices."""

        def measured() -> dict[str, float]:
            network = model.opened().to(self.ctx.device)
            return {
                f: _share(self.families[f].solved(network, "selection", _in_turn(own, KNOWN_ITEMS)))
                for f, own in sizes.items()
            }

        record: dict[str, float] = self.ctx.once("new sizes", name, measured)
        return record

    def _source(self, name: str, own: Sequence[Trace]) -> TokenizedDataset:
        items = [trace_item(self.corpus.tokenizer, trace) for trace in own]
        return TokenizedDataset(name, [i.ids for i in items], [i.asked for i in items])


def _in_turn(sizes: tuple[int, int], count: int, first: int = 0) -> list[tuple[int, int]]:
    """Sizes and numbers of so many items, the sizes in turn."""
    every = range(sizes[0], sizes[1] + 1)
    return [(every[i % len(every)], first + i) for i in range(count)]


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)
