"""Phase 5, Forge: go on training at the edge of what the model can do, then beyond it.

In: the model of Phase 4. Out: one of the same form that solves larger items. An adaptive test finds
how far each family of tasks reaches; worked examples of the sizes just beyond are taught beside
what it knows. Then it goes on without any: it solves longer items in pieces of lengths that it
knows, and learns the joined thoughts on which two different cuts agree. A round that costs more
than is allowed is taken back whole. Off unless asked for, until they are proved to help: Grokfast,
a self-model (arXiv 2407.10188), own answers as replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import NamedTuple

from agent_forge.contract import phase
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseHeadline,
    PhaseReport,
    Table,
)
from agent_forge.data import traces
from agent_forge.data.tasks import Task
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals.ability import Ability
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer.thinking import shown
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase5_forge.config import ForgeSettings
from agent_forge.phases.phase5_forge.edge import (
    EdgeDraw,
    EdgeTasks,
    edge_tasks,
    generalised_late,
    with_larger_sizes,
)
from agent_forge.phases.phase5_forge.rounds import CHOICE_ITEMS, EdgeTraining, Round, Solved
from agent_forge.phases.training import (
    WHOLE,
    LatentModel,
    Scores,
    compare_domains,
    learned_before,
    measure_domains,
    save_handed_over,
)
from agent_forge.train.config import STEP
from agent_forge.train.corpus import build_corpus, validate_corpus
from agent_forge.train.lessons import lessons_of_record, spread

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


class Course(NamedTuple):
    """How the training went."""

    draw: EdgeDraw | None  # None: nothing was trained at the edge
    taken_back: str  # why that was, if it was
    rounds: list[Round]


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
        opened = ctx.inputs[0].open()
        if not isinstance(given := opened.network, ForgeNetwork):
            raise ConfigError("Phase 5 takes models of our own; this one is of another kind")
        start = LatentModel.of(given)
        training = self._training(ctx, start, opened.tokenizer)
        found = {INPUT: self._measure(training, start, INPUT)}
        before = training.solved(start, INPUT)
        abilities = training.assess(start, INPUT, "selection")
        reach = {family: own.reach for family, own in abilities.items()}
        first = self._weights_to_train(ctx, start)
        model, draw, taken_back = training.at_the_edge(first, reach, before)
        if model is not first:
            now = training.assess(model, "edge", "selection")
            reach = {family: own.reach for family, own in now.items()}
        model, rounds = training.beyond(model, reach, before)
        if model is first:
            model = start
        elif start.packing and not model.packing:
            model = self._in_few_bits(training, start, model, before)
        if self.config.control and model.steps:
            before_it = replace(training, worked_to={}, pools=[])  # nothing of what came since
            control = before_it.on_known(start, CONTROL, model.steps)
            found[CONTROL] = self._measure(training, control, CONTROL)
        found[FORGED] = self._measure(training, model, FORGED)
        return self._result(training, (start, model), found, Course(draw, taken_back, rounds))

    def _weights_to_train(self, ctx: PhaseContext, start: LatentModel) -> LatentModel:
        """Those of few bits, or their whole copy."""
        if self.config.weights == "packed" or not start.packing:
            return start
        copy = ctx.inputs[0].artifact(WHOLE)
        state = (copy.open().network if copy else start.whole()).state_dict()
        return LatentModel(start.settings, state, None)

    def _in_few_bits(
        self, training: EdgeTraining, start: LatentModel, model: LatentModel, before: Solved
    ) -> LatentModel:
        """Whole weights brought back to few bits, or the input if that costs too much."""
        assert start.packing is not None
        packed = training.brought_back(model, start.packing)
        if lost := training.lost(before, training.solved(packed, "few_bits")):
            training.take_back("few_bits", lost)
            training.problems["few bits"] = f"all is taken back: lost {lost}"
            return start
        return packed

    def _training(
        self, ctx: PhaseContext, model: LatentModel, tokenizer: Tokenizer
    ) -> EdgeTraining:
        """The families with the sizes that fit a row, and what is learned from beside them."""
        c, record = self.config, ctx.inputs[0].metadata
        lessons = lessons_of_record(c, record, tokenizer, ctx.seed)
        taught = record.get("levels", {})
        every = {
            name: edge_tasks(name, taught.get(name, ()), c.max_level, tokenizer, ctx.seed)
            for name in c.edge_families
        }
        corpus = build_corpus(c, model.settings, tokenizer, self._asked(every) if c.texts else ())
        training = EdgeTraining(ctx, c, corpus, lessons, every)

        def largest(own: EdgeTasks) -> int:
            return with_larger_sizes(own, self._most(own), c.row_tokens).sizes[-1]

        for name, top in training.of_each("sizes", "largest", largest).items():
            sizes = range(every[name].taught[0], top + 1)
            training.families[name] = replace(every[name], sizes=sizes)
        if not training.families:
            told = "; ".join(f"{name}: {why}" for name, why in training.problems.items())
            raise ConfigError(f"there is no family to train on: {told}")
        return training

    def _most(self, own: EdgeTasks) -> int:
        """The largest size that is looked at: some beyond what can be learned."""
        c, top = self.config, own.taught[1]
        top += c.edge_sizes if c.steps else 0
        for _ in range(c.rounds if c.beyond != "none" else 0):
            top = math.ceil(c.growth * top)
        return top + PAST_THE_END

    def _asked(self, families: Mapping[str, EdgeTasks]) -> Iterator[Task]:
        """All that families may be asked, which must not be in texts to learn from."""
        numbers = max(self.config.verdict_items, 2 * self.config.assessment_items, CHOICE_ITEMS)
        for own, split in product(families.values(), ("selection", "verdict")):
            for size, number in product(own.up_to(self._most(own)), range(numbers)):
                yield own.task(size, split, number)

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(self, training: EdgeTraining, model: LatentModel, name: str) -> Measured:
        ctx, network = training.ctx, model.opened().to(training.ctx.device)
        old = measure_domains(ctx, training.corpus, network, name)
        abilities = training.assess(model, name, "verdict", drop=False)
        each = range(self.config.verdict_items)

        def look(own: EdgeTasks) -> list[list[bool]]:
            asked = [(size, number) for size in own.sizes for number in each]
            right = own.solved(network, "verdict", asked)
            return [right[i : i + len(each)] for i in range(0, len(right), len(each))]

        found = training.of_each("solved", name, look, drop=False)
        for family, own in abilities.items():
            told = {"reach": own.reach, "low": own.low, "high": own.high, "items": own.items}
            ctx.log(None, {f"{name}/edge/{family}/{key}": value for key, value in told.items()})
        sizes = {family: training.families[family].sizes for family in found}
        solved = {f: dict(zip(sizes[f], rows, strict=True)) for f, rows in found.items()}
        return Measured(abilities, solved, old)

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self,
        training: EdgeTraining,
        models: tuple[LatentModel, LatentModel],
        found: Mapping[str, Measured],
        course: Course,
    ) -> phase.PhaseResult:
        ctx, (before, after) = training.ctx, (found[INPUT], found[FORGED])
        beyond, known = (_gain(training, before, after, part) for part in (BEYOND, KNOWN))
        old = compare_domains(training.corpus, before.old, after.old).overall.gains[ACCURACY]
        told = [_risen(training, before, after)]
        told += [f"sizes known before {_points(known)}"] if known else []
        told += [f"old tasks {_points(old)}"]
        if course.taken_back:
            told.append(f"training at the edge was taken back: {course.taken_back}")
        told += [f"{name}: {why}" for name, why in training.problems.items()]
        verdict, measured = "; ".join(told), beyond or old
        about = "items beyond the known sizes that are solved" if beyond else "old tasks"
        headline = PhaseHeadline(about, measured.reference, measured.candidate, verdict)
        metrics = _figures(before, after, known, old)
        logged = {name.replace("final", "old"): value for name, value in metrics.items()}
        logged |= {"gain_beyond": beyond.value} if beyond else {}
        ctx.log(None, {f"phase/{name}": value for name, value in logged.items()})
        self._log_rounds(ctx, course.rounds)
        tables = [_edge_table(training, found), _round_table(course.rounds)]
        report = PhaseReport(headline, verdict, metrics, tables)
        draw, samples = course.draw, _newly_solved(training, models, before, after)
        report.details = {
            "rounds": [asdict(own) for own in course.rounds],
            "looks": draw.seen if draw else [],
            "walls": draw.walls if draw else {},
            "generalised_late": generalised_late(draw.seen) if draw else None,
            "problems": training.problems,
            "solved": {n: {f: _shares(s) for f, s in m.solved.items()} for n, m in found.items()},
            "newly_solved": samples,
        }
        learned = {**learned_before(ctx.inputs[0].metadata), **metrics}
        return save_handed_over(ctx, training.corpus, models[1], report, learned, samples)

    def _log_rounds(self, ctx: PhaseContext, rounds: Sequence[Round]) -> None:
        for own, (name, f) in ((r, pair) for r in rounds for pair in r.families.items()):
            values = {"agreement": f.kept / f.asked} if f.asked else {}
            values |= {"right_thoughts": f.right / f.kept} if f.kept else {}
            values |= {"success": sum(f.after.values()) / len(f.after)} if f.after else {}
            ctx.log(None, {f"round_{own.number}/{name}/{key}": v for key, v in values.items()})


def _figures(before: Measured, after: Measured, known: Gain | None, old: Gain) -> dict[str, float]:
    """What is handed on: old tasks, by how much the edges rose, what is kept of known sizes."""
    losses = [scores.nats_per_token for scores in after.old.values()]
    figures = {"final_accuracy": old.candidate, "final_loss": sum(losses) / len(losses)}
    reaches = ((before.abilities.get(f), own.reach) for f, own in after.abilities.items())
    figures["levels_mastered"] = sum(max(0, last - was.reach) for was, last in reaches if was)
    if known and known.reference:
        figures["retention"] = known.candidate / known.reference
    return figures


def _of(training: EdgeTraining, measured: Measured, family: str, part: str) -> list[bool]:
    """What is solved of the sizes of a family that were known before, or of those beyond."""
    taught = training.families[family].taught[1]
    own = measured.solved[family].items()
    return [right for size, rows in own if (size <= taught) == (part == KNOWN) for right in rows]


def _gain(training: EdgeTraining, before: Measured, after: Measured, part: str) -> Gain | None:
    """Of one model over the other on the sizes known before, or on those beyond; None if there is
    no such item."""
    families = [f for f in before.solved if f in after.solved]
    one, two = ([r for f in families for r in _of(training, m, f, part)] for m in (before, after))
    return compare_answers(one, two, part) if one else None


def _points(gain: Gain) -> str:
    low, high = 100 * gain.low, 100 * gain.high
    return f"{100 * gain.value:+.1f} points (95 % interval {low:.1f}..{high:.1f}, n = {gain.n})"


def _risen(training: EdgeTraining, before: Measured, after: Measured) -> str:
    """What the model can do now that it could not, in words: where the intervals are apart."""
    told = []
    for family, now in after.abilities.items():
        was, own = before.abilities.get(family), training.families[family]
        if was and now.low > was.high:
            told.append(f"{family} from {_size(own, was.reach)} to {now.reach} {own.unit}")
    return f"the edge rose: {', '.join(told)}" if told else "the edge surely rose in no family"


def _size(own: EdgeTasks, size: int) -> int | str:
    """A size, or `none` for what lies below the smallest that is asked."""
    return size if size >= own.sizes[0] else "none"


def _edge_table(training: EdgeTraining, found: Mapping[str, Measured]) -> Table:
    """How far each family reaches, with its interval, by every model, and what is solved."""
    rows: Table = [["family", "in", "model", "reach", "interval", "known sizes", "beyond"]]
    for family, (name, m) in product(training.families, found.items()):
        if (own := m.abilities.get(family)) and family in m.solved:
            rights = (_of(training, m, family, part) for part in (KNOWN, BEYOND))
            shares = [sum(right) / len(right) if right else "-" for right in rights]
            asked = training.families[family]
            low, reach, high = (_size(asked, size) for size in (own.low, own.reach, own.high))
            rows.append([family, asked.unit, name, reach, f"{low} to {high}", *shares])
    return rows


def _round_table(rounds: Sequence[Round]) -> Table:
    rows: Table = [["round", "family", "sizes", "thoughts kept", "right ones", "before", "after"]]
    rows[0].append("the round is")
    for own, (name, f) in ((r, pair) for r in rounds for pair in r.families.items()):
        end = f"taken back: {own.taken_back}" if own.taken_back else "kept"
        shares = [f.kept / f.asked if f.asked else "-", f.right / f.kept if f.kept else "-"]
        means = [sum(s.values()) / len(s) if s else "-" for s in (f.before, f.after)]
        sizes = f"{f.sizes[0]} to {f.sizes[-1]}"
        rows.append([own.number, name, sizes, *shares, *means, end if f.taught else "not taught"])
    return rows


def _shares(solved: Mapping[int, Sequence[bool]]) -> dict[int, float]:
    return {size: sum(right) / len(right) for size, right in solved.items()}


def _newly_solved(
    training: EdgeTraining, models: Sequence[LatentModel], before: Measured, after: Measured
) -> Table:
    """Items beyond the known sizes that it solves now and did not before, as both models think."""
    rows: Table = [["question", "right", INPUT, FORGED]]
    items = list[Task]()
    for family in (f for f in after.solved if f in before.solved):
        own, new = training.families[family], list[Task]()
        for size in own.beyond if own.thinks else ():
            pairs = zip(before.solved[family][size], after.solved[family][size], strict=True)
            now = [n for n, (was, is_now) in enumerate(pairs) if is_now and not was]
            new += [own.task(size, "verdict", number) for number in now]
        items += spread(new, SHOWN)
    said = []
    for model in models if items else ():
        thinker = Thinker(model.opened().to(training.ctx.device), training.corpus.tokenizer)
        thoughts = thinker.think(items, STEP)
        told = [shown(thinker.tokenizer, ids, specials=True) for ids in thoughts]
        answers = thinker.answers(items, thoughts)
        said.append([f"`{t} {a}`" for t, a in zip(told, answers, strict=True)])
    for item, *texts in zip(items, *said, strict=True):
        rows.append([f"`{item.question}`", f"`{item.answer}`", *texts])
    return rows
