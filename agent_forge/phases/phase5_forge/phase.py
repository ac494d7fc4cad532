"""Phase 5, Forge: go on training at the edge of what the model can do, then beyond it.

In: the model of Phase 4. Out: one of the same form that solves larger items. An adaptive test finds
how far each family of tasks reaches; worked examples of the sizes just beyond are taught beside
what it knows. Then it goes on without any: it solves longer items in pieces of lengths that it
knows, and learns the joined thoughts on which two different cuts agree. A round that costs more
than is allowed is taken back whole. What was proved not to help here is off: Grokfast, a
self-model (arXiv 2407.10188), own answers as replay; benchmarks/forge.py has them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from agent_forge.contract import phase
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseHeadline,
    PhaseReport,
    Table,
    as_markdown,
)
from agent_forge.data import tasks, traces
from agent_forge.data.tasks import Task
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals.ability import Ability
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer.thinking import shown
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase5_forge.config import ForgeSettings
from agent_forge.phases.phase5_forge.edge import EdgeDraw, EdgeTasks, edge_tasks, generalised_late
from agent_forge.phases.phase5_forge.rounds import EdgeTraining, Levels, Round
from agent_forge.phases.training import (
    LatentModel,
    Scores,
    compare_domains,
    measure_domains,
    save_network,
)
from agent_forge.quant.packed import Packing
from agent_forge.train.config import STEP
from agent_forge.train.corpus import build_corpus, validate_corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import lessons_of_record

PACKED, WHOLE = "packed", "dequantised"
INPUT, FORGED, CONTROL = "input", "forged", "control"
KNOWN, BEYOND = "known", "beyond"  # sizes that it was taught before this phase, and larger ones
PAST_THE_END = 2  # sizes beyond the largest that can be learned, which show where it ends
SHOWN = 3  # items of each family in the card
ITEM_TOKENS = 80  # of an item with its thought, about


@dataclass(frozen=True)
class Measured:
    """A model on unseen items: how far it reaches, what it solves of every size, old tasks."""

    abilities: dict[str, Ability]
    solved: dict[str, dict[int, list[bool]]]  # by family and size
    old: Scores


class ForgePhase(phase.PhaseController):
    """Assess, train at the edge, go beyond it, compare, hand over."""

    name = "forge"
    config: ForgeSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        validate_corpus(c, traces.ABOUT)
        rounds = c.rounds * c.round_steps if c.beyond != "none" else 0
        again = c.round_steps if c.weights == "whole" else 0
        steps = (c.steps + rounds) * (2 if c.control else 1) + again
        notes = (
            f"{', '.join(c.edge_families)}: {c.edge_sizes} sizes beyond the edge, {c.steps} steps",
            f"at most {c.rounds} rounds of own thoughts ({c.beyond}), {c.round_steps} steps each",
        )
        asked = 2 * len(c.edge_families) * (c.assessment_items + 3 * c.edge_sizes * c.verdict_items)
        tokens = c.rows * c.row_tokens
        work = steps + 2 * (1 + (asked + 3 * c.evaluation_items) * ITEM_TOKENS // (3 * tokens))
        disk = (2 + c.rounds) * 5 * weights * 4 * 4 + 2 * weights * 4
        memory = 10 * 4 * weights + 4000 * tokens + 3 * 10**8
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        start, packing, tokenizer = self._opened(ctx)
        training = self._training(ctx, start, tokenizer)
        before = self._measure(training, start, INPUT)
        known = training.levels(start, INPUT)
        abilities = training.assess(start, INPUT, "selection")
        reach = {family: own.reach for family, own in abilities.items()}
        model, draw = self._at_the_edge(training, start, reach, known)
        now = training.assess(model, "edge", "selection") if draw else abilities
        model, rounds = training.beyond(model, {f: a.reach for f, a in now.items()}, known)
        found = {INPUT: before}
        if self.config.control:
            found[CONTROL] = self._measure(training, self._control(training, start, model), CONTROL)
        if self.config.weights == "whole" and packing:
            model = self._round_again(training, model, packing)
        found[FORGED] = self._measure(training, model, FORGED)
        return self._result(training, start, model, found, draw, rounds)

    def _opened(self, ctx: PhaseContext) -> tuple[LatentModel, Packing | None, Tokenizer]:
        """The weights to train, how they are to be packed in the end, and the tokenizer."""
        opened = ctx.inputs[0].open()
        network, packing = opened.network, getattr(opened.network, "packing", None)
        if not isinstance(network, ForgeNetwork):
            raise ConfigError("Phase 5 takes models of our own; this one is of another kind")
        if self.config.weights == "whole" and (copy := ctx.inputs[0].artifact(WHOLE)):
            network = copy.open().network
        own = packing if self.config.weights == "packed" else None
        return LatentModel(network.settings, network.state_dict(), own), packing, opened.tokenizer

    def _training(
        self, ctx: PhaseContext, model: LatentModel, tokenizer: Tokenizer
    ) -> EdgeTraining:
        c, record = self.config, ctx.inputs[0].metadata
        lessons = lessons_of_record(c, record, tokenizer, ctx.seed)
        families: dict[str, EdgeTasks] = {}
        for name in c.edge_families:
            size = tasks.FAMILIES[name].size
            assert size is not None
            taught = (size.least, size.at(c.max_level))
            if name in record.get("levels", {}):
                taught = (record["levels"][name][0], record["levels"][name][1])
            top = taught[1] + (c.edge_sizes if c.steps else 0)
            for _ in range(c.rounds if c.beyond != "none" else 0):
                top = math.ceil(c.growth * top)
            most = top + PAST_THE_END
            families[name] = edge_tasks(name, taught, most, tokenizer, ctx.seed, c.row_tokens)
        asked: list[Task] = []
        if c.texts:  # which must not hold what is asked
            asked = [t for own in families.values() for t in self._items(own)]
        corpus = build_corpus(c, model.settings, tokenizer, asked)
        return EdgeTraining(ctx, c, corpus, lessons, families)

    def _items(self, own: EdgeTasks) -> list[Task]:
        each = range(self.config.verdict_items)
        splits = ("selection", "verdict")
        return [own.task(size, split, n) for split in splits for size in own.sizes for n in each]

    # -- training ----------------------------------------------------------------------------------

    def _at_the_edge(
        self, training: EdgeTraining, start: LatentModel, reach: Mapping[str, int], known: Levels
    ) -> tuple[LatentModel, EdgeDraw | None]:
        """The model trained at its edge, or as it was if that costs more than is allowed."""
        model, draw = training.at_the_edge(start, reach)
        if draw and (lost := training.lost(known, training.levels(model, "edge"))):
            ctx = training.ctx
            ctx.tracker.event("rolled_back", phase=ctx.phase, stage="edge", reason=f"lost {lost}")
            training.problems["training at the edge"] = f"taken back: lost {lost}"
            return start, draw
        return model, draw

    def _control(
        self, training: EdgeTraining, start: LatentModel, model: LatentModel
    ) -> LatentModel:
        """The input trained for as many steps on what it knew before."""
        c, lessons = self.config, training.lessons
        mix, corpus = training.known_mix(), training.known_corpus()
        held_out = lessons.held_out(60) if lessons else ()
        how: dict[str, Any] = {"settings": c.train, "seed": training.ctx.seed, "stage": CONTROL}
        how |= {"corpus": corpus, "curriculum": corpus.constant(mix), "held_out": held_out}
        return start.trained(training.ctx, steps=max(1, model.steps), **how)

    def _round_again(
        self, training: EdgeTraining, model: LatentModel, packing: Packing
    ) -> LatentModel:
        """Weights of full precision brought back to few bits, taught by what they were."""
        teacher = model.opened().to(training.ctx.device)
        corpus = training.known_corpus()
        how: dict[str, Any] = {"settings": self.config.train, "seed": training.ctx.seed}
        how |= {"corpus": corpus, "curriculum": corpus.constant(training.known_mix())}
        how |= {"stage": "round_again", "loss": DistillationLoss(teacher)}
        packed = LatentModel(model.settings, model.state, packing, model.steps)
        return packed.trained(training.ctx, steps=self.config.round_steps, **how)

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(self, training: EdgeTraining, model: LatentModel, name: str) -> Measured:
        ctx, network = training.ctx, model.opened().to(training.ctx.device)
        old = measure_domains(ctx, training.corpus, network, name)
        abilities = training.assess(model, name, "verdict")
        solved: dict[str, dict[int, list[bool]]] = {}
        for family in abilities:
            own, each = training.families[family], range(self.config.verdict_items)
            asked = [(size, number) for size in own.sizes for number in each]
            look = partial(own.solved, network, "verdict", asked)
            for (size, _), right in zip(
                asked, ctx.once("sizes", f"{name}/{family}", look), strict=True
            ):
                solved.setdefault(family, {}).setdefault(size, []).append(right)
            values = {"reach": abilities[family].reach, "items": abilities[family].items}
            ctx.log(None, {f"{name}/edge/{family}/{key}": v for key, v in values.items()})
        return Measured(abilities, solved, old)

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self,
        training: EdgeTraining,
        start: LatentModel,
        model: LatentModel,
        found: Mapping[str, Measured],
        draw: EdgeDraw | None,
        rounds: Sequence[Round],
    ) -> phase.PhaseResult:
        ctx, (before, after) = training.ctx, (found[INPUT], found[FORGED])
        beyond, known = (_gain(training, before, after, part) for part in (BEYOND, KNOWN))
        old = compare_domains(training.corpus, before.old, after.old).overall.gains[ACCURACY]
        accuracy = sum(s.accuracy for s in after.old.values()) / len(after.old)
        loss = sum(s.nats_per_token for s in after.old.values()) / len(after.old)
        told = (
            f"{_risen(training, before, after)}; sizes known before {100 * known.value:+.1f} points"
        )
        told += f", old tasks {100 * old.value:+.1f}"
        told += "".join(f"; {name}: {why}" for name, why in training.problems.items())
        about = "items beyond the known sizes that are solved"
        headline = PhaseHeadline(about, beyond.reference, beyond.candidate, told)
        reaches = ((before.abilities[f].reach, own.reach) for f, own in after.abilities.items())
        mastered = sum(last - first for first, last in reaches)
        metrics = {"final_accuracy": accuracy, "final_loss": loss, "levels_mastered": mastered}
        metrics |= {"retention": 1 + known.value, "gain_beyond": beyond.value}
        logged = {name.replace("final", "answer"): value for name, value in metrics.items()}
        ctx.log(None, {f"phase/{name}": value for name, value in logged.items()})
        self._log_rounds(ctx, rounds)
        tables = [_edge_table(training, found), _round_table(rounds), _size_table(found)]
        report = PhaseReport(headline, told, metrics, tables)
        samples = _samples(training, start, model)
        report.details = {
            "rounds": [asdict(own) for own in rounds],
            "looks": draw.seen if draw else [],
            "walls": draw.walls if draw else {},
            "generalised_late": generalised_late(draw.seen) if draw else None,
            "problems": training.problems,
            "newly_solved": samples,
        }
        return self._saved(training, model, report, samples)

    def _saved(
        self, training: EdgeTraining, model: LatentModel, report: PhaseReport, samples: Table
    ) -> phase.PhaseResult:
        ctx, corpus, record = training.ctx, training.corpus, training.ctx.inputs[0].metadata
        keys = ("strategies", "levels", "compression_ratio", "accuracy_retention")
        metadata = {key: record[key] for key in keys if key in record}
        metadata |= {key: report.metrics[key] for key in ("final_accuracy", "final_loss")}
        card = [report.card(), *map(as_markdown, [*report.tables[1:], samples])]
        about = metadata, report.metrics, "\n\n".join(card)
        network = model.opened().to(ctx.device)
        whole = save_network(ctx, corpus, model.whole().to(ctx.device), WHOLE, *about)
        if model.packing is None:
            return report.result(ctx, [whole], network)
        packed = model.packing.pack(model.state)
        saved = save_network(ctx, corpus, network, PACKED, *about, packed=packed)
        return report.result(ctx, [saved], network, **{WHOLE: whole})

    def _log_rounds(self, ctx: PhaseContext, rounds: Sequence[Round]) -> None:
        for own in rounds:
            for family, (kept, asked, right) in own.kept_thoughts.items():
                values = {"agreement": kept / asked, "success": own.after.get(family, 0.0)}
                if kept:
                    values["right_thoughts"] = right / kept
                named = {f"round_{own.number}/{family}/{n}": v for n, v in values.items()}
                ctx.log(None, named)


def _of(training: EdgeTraining, measured: Measured, family: str, part: str) -> list[bool]:
    """What is solved of the sizes of a family that were known before, or of those beyond."""
    own = training.families[family]
    sizes = [size for size in own.sizes if (size <= own.taught[1]) == (part == KNOWN)]
    return [right for size in sizes for right in measured.solved[family][size]]


def _gain(training: EdgeTraining, before: Measured, after: Measured, part: str) -> Gain:
    """Of one model over the other on the sizes known before, or on those beyond."""
    families = [f for f in before.solved if f in after.solved]
    one, two = ([r for f in families for r in _of(training, m, f, part)] for m in (before, after))
    return compare_answers(one or [False], two or [False], part)


def _risen(training: EdgeTraining, before: Measured, after: Measured) -> str:
    """What the model can do now that it could not, in words."""
    told = []
    for family, now in after.abilities.items():
        was, unit = before.abilities[family], training.families[family].unit
        if now.reach > was.reach:
            told.append(f"{family} from {was.reach} to {now.reach} {unit}")
    return f"the edge rose: {', '.join(told)}" if told else "the edge rose in no family"


def _edge_table(training: EdgeTraining, found: Mapping[str, Measured]) -> Table:
    """How far each family reaches, with its interval, by every model, and what is solved."""
    rows: Table = [["family", "in", "model", "reach", "interval", "known sizes", "beyond"]]
    for family, (name, m) in product(found[INPUT].abilities, found.items()):
        if own := m.abilities.get(family):
            shares = (_mean(_of(training, m, family, part)) for part in (KNOWN, BEYOND))
            between, unit = f"{own.low} to {own.high}", training.families[family].unit
            rows.append([family, unit, name, own.reach, between, *shares])
    rows += [[family, "-", "-", "-", why, "-", "-"] for family, why in training.problems.items()]
    return rows


def _round_table(rounds: Sequence[Round]) -> Table:
    head = "round,family,sizes,thoughts kept,right ones,before,after,the round is"
    rows: Table = [head.split(",")]
    for own in rounds:
        end = "kept" if own.kept else f"taken back: {own.reason}"
        for family, (kept, asked, right) in own.kept_thoughts.items():
            sizes = "{} to {}".format(*own.sizes[family])
            shares = [kept / asked, right / kept if kept else "-"]
            became = [own.before[family], own.after[family]]
            rows.append([own.number, family, sizes, *shares, *became, end])
    return rows


def _size_table(found: Mapping[str, Measured]) -> Table:
    """The share that is solved of every size."""
    rows: Table = [["family", "size", *found]]
    for family, by_size in found[INPUT].solved.items():
        own = [m.solved.get(family, {}) for m in found.values()]
        rows += [[family, size, *(_mean(m.get(size, [])) for m in own)] for size in by_size]
    return rows


def _mean(right: Sequence[bool]) -> float | str:
    return sum(right) / len(right) if right else "-"


def _samples(training: EdgeTraining, start: LatentModel, model: LatentModel) -> Table:
    """Items beyond the known sizes that it solves now, as both models think about them."""
    rows: Table = [["question", "right", INPUT, FORGED]]
    device, tokenizer = training.ctx.device, training.corpus.tokenizer
    thinkers = [Thinker(m.opened().to(device), tokenizer) for m in (start, model)]
    for family, own in training.families.items():
        sizes = [size for size in own.sizes if size > own.taught[1]][:SHOWN]
        if family in training.problems or not own.thinks or not sizes:
            continue
        items = [own.task(size, "selection", 0) for size in sizes]
        said = []
        for thinker in thinkers:
            thoughts = thinker.think(items, STEP)
            told = [shown(tokenizer, ids, specials=True) for ids in thoughts]
            answers = thinker.answers(items, thoughts)
            said.append([f"`{t} {a}`" for t, a in zip(told, answers, strict=True)])
        for item, *texts in zip(items, *said, strict=True):
            rows.append([f"`{item.question}`", f"`{item.answer}`", *texts])
    return rows
