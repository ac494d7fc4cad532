"""Phase 4, BitNet: weights of -1, 0 and 1, trained until they do what the parent did.

In: the model of Phase 3. Out: a packed model, and the same weights in an ordinary folder of fp32.
Calibration tells what each kind of matrix costs when it alone is rounded. Then the model computes
with rounded weights and inputs and is trained straight through them: half of the loss is the
divergence from the parent, half the labels, of old tasks and of thoughts. It is compared with its
parent on unseen items and, with `control`, with the parent trained for as long without rounding.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agent_forge.contract import phase
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseHeadline,
    PhaseReport,
    Table,
)
from agent_forge.data import traces
from agent_forge.data.loader import TokenizedItem
from agent_forge.data.tasks import Task
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import ACCURACY
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.infer.thinking import shown
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase4_bitnet.calibration import (
    TASKS,
    Sensitivity,
    calibration_items,
    sensitivities,
)
from agent_forge.phases.phase4_bitnet.config import TARGETS, BitNetSettings
from agent_forge.phases.phase4_bitnet.rounding import (
    HELD_OUT,
    PUT_BACK,
    RoundedTraining,
)
from agent_forge.phases.training import (
    PACKED,
    LatentModel,
    Scores,
    compare_domains,
    measure_domains,
    network_bytes,
    open_whole,
    save_handed_over,
)
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import CODES, SCALES, PackedState, Packing, kind_of
from agent_forge.store.paths import model_id_for
from agent_forge.train.corpus import build_corpus, validate_corpus
from agent_forge.train.lessons import Lessons, lessons_of_record, spread, unseen_items

PARENT, ROUNDED, TRAINED, CONTROL = "parent", "rounded", "ternary", "control"
ITEM_TOKENS = 30  # of an item of an old task, about
THOUGHT_COST = 5  # times as much for an item that is thought about: its tokens come one by one
TIMED_TOKENS, TIMED_ROUNDS = 64, 3
SHOWN = 3  # answers and thoughts of each domain in the card


@dataclass(frozen=True)
class Measured:
    """A model on unseen items: old tasks by domain, and with thoughts by family."""

    old: Scores
    thoughts: dict[str, float]  # accuracy
    thought_nats: float | None  # a token of thoughts that are right; None if it has learned none

    @property
    def accuracy(self) -> dict[str, float]:
        return {**{d: s.accuracy for d, s in self.old.items()}, **self.thoughts}

    @property
    def mean_accuracy(self) -> float:
        return float(np.mean([*self.accuracy.values()]))

    @property
    def nats(self) -> float:
        """A token of answers: the mean of the domains, thoughts being one."""
        values = [scores.nats_per_token for scores in self.old.values()]
        return float(
            np.mean([*values, *([] if self.thought_nats is None else [self.thought_nats])])
        )

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


Found = Mapping[str, Measured]


class BitNetPhase(phase.PhaseController):
    """Calibrate, round, train, measure, pack."""

    name = "bitnet"
    config: BitNetSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        validate_corpus(c, traces.ABOUT)
        if c.calibration_dataset != TASKS and not Path(c.calibration_dataset).is_file():
            raise ConfigError(f"calibration_dataset: {c.calibration_dataset} is no file")
        steps, tokens = c.steps * (2 if c.control else 1), c.rows * c.row_tokens
        notes = (
            f"{c.codec} weights, {c.embedding_codec} embedding, {c.steps} steps"
            + (", and the parent for as long" if c.control else ""),
            f"at most {c.most_reverts} kinds of matrices are put back to {PUT_BACK}",
        )
        disk = 3 * 5 * weights * 4 * 4 + 2 * weights * 4
        memory = 10 * 4 * weights + 4000 * tokens + 3 * 10**8
        items = 3 * c.evaluation_items + 4 * THOUGHT_COST * c.thought_items
        measuring = (4 if c.control else 3) * (1 + items * ITEM_TOKENS // (3 * tokens))
        return phase.PhasePlan(steps, weights, disk, memory, notes, steps + measuring)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened, parent = open_whole(ctx.inputs[0])
        parent.to(ctx.device)
        lessons = self._lessons(ctx, opened.tokenizer)
        asked: list[Task] = []
        if lessons and self.config.texts:  # which must not hold what is asked
            asked = [t for s in ("selection", "verdict") for t in self._thought_about(lessons, s)]
        corpus = build_corpus(self.config, parent.settings, opened.tokenizer, asked)
        training = RoundedTraining(ctx, self.config, corpus, lessons, parent)
        training.taught  # noqa: B018 - lessons that do not fit are refused before any work
        found = {PARENT: self._measure(training, parent, PARENT)}
        embedding = self.config.embedding_codec.replace("fp16", "")
        packing = plan_packing(parent, self.config.codec, embedding, self.config.activation_bits)
        items = calibration_items(
            corpus, self.config.calibration_dataset, self.config.calibration_samples
        )
        costs = self._calibrate(training, packing, items)
        rounded = LatentModel(parent.settings, parent.state_dict(), packing).opened()
        found[ROUNDED] = self._measure(training, rounded.to(ctx.device), ROUNDED)
        model = training.train(packing, costs)
        child = model.opened().to(ctx.device)
        found[TRAINED] = self._measure(training, child, TRAINED)
        if self.config.control:
            found[CONTROL] = self._measure(training, training.control(model.steps), CONTROL)
        assert model.packing is not None
        packed = model.packing.pack(model.state)
        speed = ctx.once("performance", "token", partial(_performance, training, child))
        report, metadata = self._report(training, packed, costs, found, speed)
        samples = _samples(training, (parent, child))
        report.details = {
            "model_id": model_id_for(ctx.session_id, ctx.phase, PACKED),
            "quantization_bits": _bits(packed),
            "preserved_layers": sorted(
                {kind_of(n) for n in model.state if n not in model.packing.matrices}
            ),
            "calibration_samples": len(items),
            "zeros": _zeros(packed),
            "token_step": speed["backend"],
            "parent_and_child": samples,
        }
        return save_handed_over(ctx, corpus, model, report, metadata, samples)

    def _lessons(self, ctx: PhaseContext, tokenizer: Tokenizer) -> Lessons | None:
        """What it has learned about thinking, as its record says; None if nothing."""
        c, record = self.config, ctx.inputs[0].metadata
        return lessons_of_record(c, record, tokenizer, ctx.seed, replay_share=1 - c.thoughts_share)

    def _thought_about(self, lessons: Lessons, split: str) -> list[Task]:
        return unseen_items(lessons.settings, split, self.config.thought_items)

    # -- measuring ---------------------------------------------------------------------------------

    def _calibrate(
        self, training: RoundedTraining, packing: Packing, items: Sequence[TokenizedItem]
    ) -> list[Sensitivity]:
        look = partial(_timed, partial(sensitivities, training.parent, packing, items))
        seconds, kinds = training.ctx.once("calibration", "kinds", look)
        training.ctx.log(None, {"performance/calibration_time_seconds": seconds})
        return [Sensitivity(**record) for record in kinds]

    def _measure(self, training: RoundedTraining, model: ForgeNetwork, name: str) -> Measured:
        ctx, lessons = training.ctx, training.lessons
        old = measure_domains(ctx, training.corpus, model, name)
        if not lessons:
            return Measured(old, {}, None)
        items = self._thought_about(lessons, "verdict")
        thinker = Thinker(model, training.corpus.tokenizer)
        right = ctx.once("thoughts", name, partial(thinker.right_by_family, items))
        thoughts = lessons.held_out(HELD_OUT, "verdict")
        written = partial(measure, model, thoughts, threshold=EVERY_STEP)
        nats = ItemScores(**ctx.once("thought losses", name, written)).nats_per_token
        ctx.log(None, {f"{name}/accuracy/{family}": share for family, share in right.items()})
        return Measured(old, right, nats)

    # -- telling -----------------------------------------------------------------------------------

    def _report(
        self,
        training: RoundedTraining,
        packed: PackedState,
        costs: Sequence[Sensitivity],
        found: Found,
        speed: Mapping[str, Any],
    ) -> tuple[PhaseReport, dict[str, Any]]:
        """What is told of it, and what is recorded with the models."""
        against = CONTROL if CONTROL in found else PARENT
        before, after = found[against], found[TRAINED]
        retained = after.mean_accuracy / before.mean_accuracy if before.mean_accuracy else 0.0
        metrics = {**_sizes(training, packed), **_quality(found), **speed["metrics"]}
        metrics["quality/accuracy_retention"] = retained
        training.ctx.log(None, metrics)
        ratio = metrics["compression/compression_ratio"]
        told = f"{ratio:.1f} times smaller, {100 * retained:.1f} % of the {against}'s accuracy"
        if not before.mean_accuracy:
            told = f"{ratio:.1f} times smaller, and the {against} has no accuracy to be kept"
        if retained < self.config.least_retention:
            told += f", less than the {self.config.least_retention:.0%} asked for"
        gain = compare_domains(training.corpus, before.old, after.old).overall.gains[ACCURACY]
        verdict = f"{told}; old tasks: {gain.sentence(ACCURACY, f'the {against}')}"
        accuracies = found[PARENT].mean_accuracy, after.mean_accuracy
        headline = PhaseHeadline(
            f"mean accuracy, FP32 -> {self.config.codec}", *accuracies, verdict
        )
        tables = [
            _accuracy_table(found),
            _cost_table(costs, packed.packing),
            self._targets(metrics, speed["backend"]),
        ]
        named = {name.partition("/")[2]: value for name, value in metrics.items()}
        metadata: dict[str, Any] = {"compression_ratio": ratio, "accuracy_retention": retained}
        record = training.ctx.inputs[0].metadata
        metadata |= {key: record[key] for key in ("strategies", "levels") if key in record}
        return PhaseReport(headline, told, named, tables), metadata

    def _targets(self, metrics: Mapping[str, float], token_step: str) -> Table:
        """What the specification aims at, by the size of the model, beside what was measured."""
        size = phase.PhasePlan(0, self.shared.model.parameters()).size_class or "tiny"
        ratio, zeros = TARGETS[size]
        of = {name.partition("/")[2]: value for name, value in metrics.items()}
        return [
            ["target of the specification", "", "measured"],
            ["bytes of FP32 over packed ones", f"> {ratio} ({size})", of["compression_ratio"]],
            ["accuracy kept", "> 0.90", of["accuracy_retention"]],
            ["perplexity, more by %", "< 10", of["perplexity_degradation_percent"]],
            ["loss by rounding, taken back %", "> 60", of.get("perplexity_recovery_percent", "-")],
            ["weights that are 0", f"> {zeros} ({size})", of["sparsity_ratio"]],
            [f"tokens of a text, times as fast ({token_step})", "> 3", of["inference_speedup"]],
            ["weights of the token step, FP32 over packed", "> 8", of["memory_reduction"]],
        ]


def _sizes(training: RoundedTraining, packed: PackedState) -> dict[str, float]:
    """Bytes of all that is needed to run it, with its tokenizer, and how many weights are 0."""
    (packing, tensors), parent = packed, training.parent
    files = training.corpus.tokenizer.files()
    tokenizer = sum(map(len, files.values()))
    whole, small = network_bytes(parent), network_bytes(parent, packed)
    shares = _zeros(packed)
    counts = {name: math.prod(packing.matrices[name].shape) for name in shares}
    zeros = sum(shares[name] * n for name, n in counts.items()) / sum(counts.values())
    return {
        "compression/original_size_mb": whole / 1e6,
        "compression/compressed_size_mb": small / 1e6,
        "compression/compression_ratio": whole / small,
        "compression/ratio_with_tokenizer": (whole + tokenizer) / (small + tokenizer),
        "compression/layers_compressed": len(packing.matrices),
        "compression/layers_preserved": len(tensors) - 2 * len(packing.matrices),
        "compression/sparsity_ratio": zeros,
    }


def _zeros(packed: PackedState) -> dict[str, float]:
    """The share of each matrix's weights that are 0; of ternary ones alone if there are any."""
    packing, tensors = packed
    names = packing.ternary or packing.matrices
    return {n: float((packing.codes(n, tensors) == 0).double().mean()) for n in names}


def _bits(packed: PackedState) -> float:
    """Bits a weight of the matrices that a codec wrote, scales included."""
    packing, tensors = packed
    parts = [tensors[name + part] for name in packing.matrices for part in (CODES, SCALES)]
    weights = sum(math.prod(matrix.shape) for matrix in packing.matrices.values())
    return 8 * sum(part.numel() * part.element_size() for part in parts) / weights


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """What work gives, with the seconds that it took."""
    began = timeit.default_timer()
    found = work()
    return timeit.default_timer() - began, found


def _performance(training: RoundedTraining, child: ForgeNetwork) -> dict[str, Any]:
    """How much faster a text is continued, one token at a time, and what the weights take then."""
    prompt = [item.ids[:4] for item in training.corpus.selection["memory"][:1]]
    sampling = SamplingSettings(max_new_tokens=TIMED_TOKENS)
    runs = (partial(generate, model, prompt, sampling) for model in (training.parent, child))
    parent, own = (min(_timed(run)[0] for _ in range(TIMED_ROUNDS)) for run in runs)
    decoder = native_decoder(child)
    bytes_of = sum(t.numel() * 4 for t in training.parent.state_dict().values())
    held = decoder.weight_bytes if decoder else bytes_of
    found = {"performance/inference_speedup": parent / own}
    found["performance/memory_reduction"] = bytes_of / held
    return {"backend": decoder.backend if decoder else "torch", "metrics": found}


def _quality(found: Found) -> dict[str, float]:
    """Perplexities by the names of the specification."""
    before, rounded, after = (found[name] for name in (PARENT, ROUNDED, TRAINED))
    lost, values = (
        rounded.nats - before.nats,
        {
            "quality/pre_compression_perplexity": before.perplexity,
            "quality/post_compression_perplexity": rounded.perplexity,
            "quality/post_finetuning_perplexity": after.perplexity,
            "quality/perplexity_degradation_percent": 100
            * (after.perplexity / before.perplexity - 1),
            "quality/pre_accuracy": before.mean_accuracy,
            "quality/post_accuracy": after.mean_accuracy,
        },
    )
    if lost > 0:
        values["quality/perplexity_recovery_percent"] = 100 * (rounded.nats - after.nats) / lost
    return values


def _accuracy_table(found: Found) -> Table:
    """Accuracy by domain and family, and the perplexity of answers and thoughts."""
    columns = list(found[PARENT].accuracy)
    rows: Table = [["model", *columns, "mean", "perplexity"]]
    for name, m in found.items():
        rows.append([name, *(m.accuracy[c] for c in columns), m.mean_accuracy, m.perplexity])
    return rows


def _cost_table(costs: Sequence[Sensitivity], packing: Packing) -> Table:
    """What each kind of matrix costs alone, before any training, and how it was written."""
    codecs = {kind_of(name): matrix.codec.name for name, matrix in packing.matrices.items()}
    rows: Table = [["matrices", "weights", "nats more alone", "largest input", "codec"]]
    for cost in costs:
        largest = f"{cost.outliers:.0f} times the mean{' (flagged)' if cost.flagged else ''}"
        told = largest if cost.outliers else "-"
        rows.append([cost.kind, f"{cost.weights:,}", cost.rise, told, codecs[cost.kind]])
    return rows


def _samples(training: RoundedTraining, networks: Sequence[ForgeNetwork]) -> Table:
    """What parent and child say of the same items, and think where they have learned to."""
    tokenizer, rows = training.corpus.tokenizer, [["question", "right", PARENT, TRAINED]]
    old = [task for own in training.corpus.unseen.values() for task in spread(own, SHOWN)]
    said = [Thinker(network, tokenizer).answers(old, None) for network in networks]
    new: list[Task] = []
    if training.lessons:
        new = spread(unseen_items(training.lessons.settings, "selection", SHOWN), 3 * SHOWN)
        for texts, network in zip(said, networks, strict=True):
            thinker = Thinker(network, tokenizer)
            thoughts = thinker.think(new)
            told = [shown(tokenizer, ids, specials=True) for ids in thoughts]
            answers = thinker.answers(new, thoughts)
            texts += [f"{thought} {text}" for thought, text in zip(told, answers, strict=True)]
    for item, *texts in zip([*old, *new], *said, strict=True):
        rows.append([f"`{cell}`" for cell in (item.question, item.answer, *texts)])
    return rows
