"""Phase 8, Final compression: to the honest limit.

In: the model of Phase 7. Out: one file that is as small as the gates allow, and the whole curve of
size and quality that leads there. Tokens that nothing uses go first. Then the weights are written
in ever coarser steps, entropy-coded, each time trained through the rounding to do what the input
did; behind that, smaller networks are taught by it (students, named so). A point that does not keep
what the gates ask for is tried once more gently, then taken back. Ratios are bytes of the file over
bytes of the input in fp32; they are never multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from agent_forge.contract import phase
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseHeadline,
    PhaseReport,
    Table,
    as_markdown,
)
from agent_forge.data import traces
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import ACCURACY
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase8_final_compression.config import FinalCompressionSettings
from agent_forge.phases.phase8_final_compression.points import (
    START,
    STUDENT,
    Compression,
    Point,
    pruned,
)
from agent_forge.phases.skills import MEAN, Measured, Right, Skills, retention
from agent_forge.phases.training import (
    LatentModel,
    compare_domains,
    latency_ms,
    learned_before,
    network_bytes,
    save_network,
)
from agent_forge.train.corpus import validate_corpus
from agent_forge.train.exchange_rows import PERSONA, TOOLS

INPUT, PRUNED = "before", "pruned"
COMPRESSED, FILE = "compressed", "model.forge"
ITEM_TOKENS = 60  # of an item, about


class FinalCompressionPhase(phase.PhaseController):
    """Measure, go down the curve, measure every point, hand over the smallest that holds."""

    name = "final_compression"
    config: FinalCompressionSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        validate_corpus(c, (*traces.ABOUT, TOOLS, PERSONA))
        students = len(c.student_ratios) * (2 if c.control else 1)
        steps = c.thaw_steps * bool(c.ratios) + 2 * len(c.ratios) * c.steps
        steps += students * (c.student_steps + c.steps)
        steps += c.thaw_steps + len(c.ratios) * c.steps if c.control and c.ratios else 0
        named = [f"{ratio:g}x" for ratio in (*c.ratios, *c.student_ratios)]
        notes = (
            f"points at {', '.join(named)} of the bytes in fp32, each tried twice at most",
            f"kept from {c.least_retention:.0%} of the accuracy on",
        )
        each = c.tool_items + c.choice_items + 3 * (c.evaluation_items + c.thought_items)
        asked = (2 + len(named)) * each
        tokens = c.rows * c.row_tokens
        disk = (2 + 2 * len(named)) * 5 * weights * 4 * 3
        memory = 14 * 4 * weights + 4000 * tokens + 3 * 10**8
        work = steps + asked * ITEM_TOKENS // (3 * tokens)
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened, c = ctx.inputs[0].open(), self.config
        if not isinstance(given := opened.network, ForgeNetwork):
            hint = "forge compress takes others"
            raise ConfigError("Phase 8 takes models of our own", hint=hint)
        tokenizer: Tokenizer = opened.tokenizer
        whole = Skills.of(ctx, c, given.settings, tokenizer)
        start = LatentModel.of(given)
        device = start.opened().to(ctx.device)
        first, found = whole.right(device, INPUT), {INPUT: whole.measured(device, INPUT)}
        skills, fewer = (
            self._pruned(ctx, whole, start, first)
            if c.prune_vocabulary
            else (
                whole,
                start,
            )
        )
        learned = learned_before(ctx.inputs[0].metadata)
        size = network_bytes(ForgeNetwork(given.settings))
        down = Compression(ctx, c, skills, fewer, size, learned, first)
        chosen = down.go_down()
        for point in down.points:
            network = down.models[point.name].opened().to(ctx.device)
            found[point.name] = skills.measured(network, point.name)
        return self._result(down, found, chosen)

    def _pruned(
        self, ctx: PhaseContext, whole: Skills, start: LatentModel, first: Right
    ) -> tuple[Skills, LatentModel]:
        """The model with the tokens alone that what is taught uses, if it keeps what it can."""
        documents = [own.tokens.tolist() for own in whole.taught.sources]
        tokenizer, kept = whole.corpus.tokenizer.pruned(documents)
        smaller = pruned(start, kept)
        skills = Skills.of(ctx, self.config, smaller.settings, tokenizer)
        right = skills.right(smaller.opened().to(ctx.device), PRUNED)
        if retention(first, right).get(MEAN, 1.0) < self.config.first_gate:
            return whole, start
        return skills, smaller

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self, down: Compression, found: Mapping[str, Measured], chosen: str
    ) -> phase.PhaseResult:
        ctx, model = down.ctx, down.models[chosen]
        point = next(own for own in down.points if own.name == chosen)
        before, after = found[INPUT], found[chosen]
        kept = after.mean_accuracy / before.mean_accuracy if before.mean_accuracy else 0.0
        network = model.opened().to(ctx.device)
        container = down.file_of(model)
        metrics = {
            "compression_ratio": down.fp32_bytes / point.bytes,
            "compression_ratio_with_tokenizer": down.fp32_bytes / len(container.content),
            "bits_per_weight": point.bits_per_weight,
            "file_size_mb": len(container.content) / 1e6,
            "accuracy_retention": kept,
            "points_kept": sum(not own.gate for own in down.points) - 1,
            "latency_512_ms": ctx.once("latency", chosen, partial(latency_ms, network)),
        }
        ctx.log(None, {f"compression/{name}": value for name, value in metrics.items()})
        gain = compare_domains(down.skills.corpus, before.old, after.old).overall.gains[ACCURACY]
        told = f"{kept:.1%} of the accuracy"
        if not before.mean_accuracy:
            told = "the input has no accuracy to be kept"
        told = f"{metrics['compression_ratio']:.1f} times smaller than fp32, {told}"
        told += f", {point.bits_per_weight:.2f} bits a weight"
        if point.kind == STUDENT:
            told += f"; a student of {point.weights:,} weights, not the model's own"
        if chosen == START:
            told = f"no point kept what is asked for: the input, in its own codes; {told}"
        verdict = f"{told}; old tasks: {gain.sentence(ACCURACY, 'the input')}"
        headline = PhaseHeadline(
            "mean accuracy, input -> file", before.mean_accuracy, after.mean_accuracy, verdict
        )
        tables = [_curve(down, found), _kinds(found)]
        report = PhaseReport(headline, told, metrics, tables)
        report.details = {
            "points": [asdict(own) for own in down.points],
            "chosen": chosen,
            "left_out": down.left_out,
            "tokens": [
                ctx.inputs[0].open().network.settings.vocab_size,
                down.start.settings.vocab_size,
            ],
        }
        said = {**down.learned, **metrics, "student": point.kind == STUDENT}
        card = "\n\n".join([report.card(), *map(as_markdown, tables[1:])])
        packed = model.packing.pack(model.state) if model.packing else None
        corpus, beside = down.skills.corpus, {FILE: container.content}
        saved = save_network(ctx, corpus, network, COMPRESSED, said, metrics, card, packed, beside)
        return report.result(ctx, [saved], network)


def _curve(down: Compression, found: Mapping[str, Measured]) -> Table:
    """Size and quality of every point, on unseen items."""
    rows: Table = [
        ["point", "bytes", "times smaller", "bits a weight", "accuracy", "of the input's", "gates"]
    ]
    whole = found[INPUT].mean_accuracy
    rows.append(["fp32", f"{down.fp32_bytes:,}", 1.0, 32.0, whole, 1.0 if whole else "-", "-"])
    for own in down.points:
        accuracy = found[own.name].mean_accuracy
        share = accuracy / whole if whole else "-"
        ratio, gate = down.fp32_bytes / own.bytes, _told(own)
        cells = [own.name, f"{own.bytes:,}", ratio, own.bits_per_weight, accuracy, share, gate]
        rows.append(cells)
    tokenizer = down.points[0].tokenizer_bytes
    rows.append(["the tokenizer, to be added", f"{tokenizer:,}", *["-"] * 5])
    return rows


def _told(point: Point) -> str:
    return f"not kept: {point.gate}" if point.gate else "kept"


def _kinds(found: Mapping[str, Measured]) -> Table:
    """Accuracy in every kind of question."""
    kinds = list(found[INPUT].accuracy)
    rows: Table = [["model", *kinds]]
    rows += [[name, *(own.accuracy[kind] for kind in kinds)] for name, own in found.items()]
    return rows
