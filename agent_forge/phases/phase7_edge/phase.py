"""Phase 7, Edge: the model as small and fast as a device needs it.

In: the model of Phase 6. Out: one of the same form with fewer channels, heads and layers, trained
to do what it did. Cuts go by measured importance, one kind at a time, whichever costs the least
loss for what it saves; each is followed by distillation from the model that came in. It ends when
the target is met, or when the next cut would break the retention gate: that one is taken back.
What needs a clock is measured on this machine and journaled; nothing is said of other devices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_forge.contract import phase
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseHeadline, PhaseReport, Table
from agent_forge.data import traces
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase7_edge.config import EdgeSettings
from agent_forge.phases.phase7_edge.profiling import PROMPT_TOKENS, Profiler
from agent_forge.phases.phase7_edge.search import (
    INPUT,
    MET,
    CutStep,
    EdgeSearch,
    Profiles,
)
from agent_forge.phases.skills import MEAN, Measured, Skills
from agent_forge.phases.training import (
    LatentModel,
    compare_domains,
    learned_before,
    save_handed_over,
)
from agent_forge.train.corpus import validate_corpus
from agent_forge.train.exchange_rows import PERSONA, TOOLS

EDGE = "edge"
ITEM_TOKENS = 60  # of an item, about
GATE = 0.90  # of the input's accuracy, as the next phase asks for it


Found = Mapping[str, Measured]


class EdgePhase(phase.PhaseController):
    """Measure, cut down to the target, measure, hand over."""

    name = "edge"
    config: EdgeSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        validate_corpus(c, (*traces.ABOUT, TOOLS, PERSONA))
        limits = ", ".join(f"{name} {value:g}" for name, value in c.limits._asdict().items())
        notes = (
            f"{c.target}: {limits}",
            f"at most {c.cuts} cuts of {', '.join(c.kinds)}, {c.cut_steps} steps after each",
        )
        steps, tokens = c.cuts * c.cut_steps, c.rows * c.row_tokens
        asked = 2 * (c.tool_items + 3 * c.evaluation_items + 3 * c.thought_items)
        asked += (c.cuts + 1) * c.choice_items
        work = steps + asked * ITEM_TOKENS // (3 * tokens)
        disk = (2 + c.cuts) * 5 * weights * 4 * 4 + 2 * weights * 4
        memory = 12 * 4 * weights + 4000 * tokens + 3 * 10**8
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened, c = ctx.inputs[0].open(), self.config
        if not isinstance(given := opened.network, ForgeNetwork):
            raise ConfigError("Phase 7 takes models of our own", hint="forge quantize takes others")
        skills = Skills.of(ctx, c, given.settings, opened.tokenizer)
        skills.taught  # noqa: B018 - what does not fit the rows is refused before any work
        start = LatentModel.of(given)
        with tempfile.TemporaryDirectory(prefix="agent_forge_") as place:
            profiler = Profiler(Path(place), opened.tokenizer, ctx.device)
            search = EdgeSearch(ctx, c, skills, start, profiler)
            found = {INPUT: skills.measured(start.opened().to(ctx.device), INPUT)}
            model, taken, ended = search.cut_down()
        found[EDGE] = skills.measured(model.opened().to(ctx.device), EDGE)
        return self._result(search, model, found, taken, ended)

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self,
        search: EdgeSearch,
        model: LatentModel,
        found: Found,
        taken: Profiles,
        ended: str,
    ) -> phase.PhaseResult:
        ctx, before, after = search.ctx, found[INPUT], found[EDGE]
        metrics = self._metrics(search, found, taken, ended)
        ctx.log(None, {f"edge/{name}": value for name, value in metrics.items()})
        gain = compare_domains(search.skills.corpus, before.old, after.old).overall.gains[ACCURACY]
        kept = metrics["accuracy_retention"]
        told = f"{self.config.target}: {ended}; {kept:.1%} of the accuracy"
        if not before.mean_accuracy:
            told = f"{self.config.target}: {ended}; the input has no accuracy to be kept"
        elif kept < GATE:
            told += f", less than the {GATE:.0%} asked for"
        told += f"; {metrics['size_ratio']:.1%} of the bytes and"
        told += f" {metrics['latency_ratio']:.1%} of the time a token ({taken.model.step}, here)"
        verdict = f"{told}; old tasks: {gain.sentence(ACCURACY, 'the input')}"
        headline = PhaseHeadline(
            "mean accuracy, input -> edge", before.mean_accuracy, after.mean_accuracy, verdict
        )
        tables = [_comparison(found, taken), _step_table(search.steps), _gain_table(found)]
        report = PhaseReport(headline, told, metrics, tables)
        deployment = self._deployment(model, taken)
        report.details = {
            "ended": ended,
            "cuts": [asdict(step) for step in search.steps],
            "performance_profile": {n: asdict(p) for n, p in taken._asdict().items()},
            "deployment_config": deployment,
        }
        said = {**learned_before(ctx.inputs[0].metadata), **metrics, "deployment": deployment}
        told_of = [["deployment", ""], *([name, str(own)] for name, own in deployment.items())]
        return save_handed_over(ctx, search.skills.corpus, model, report, said, told_of)

    def _metrics(
        self, search: EdgeSearch, found: Found, taken: Profiles, ended: str
    ) -> dict[str, float]:
        before, after = found[INPUT].mean_accuracy, found[EDGE].mean_accuracy
        first, own = taken
        metrics = {
            "accuracy_retention": after / before if before else 0.0,
            "inference_latency_ms": own.token_ms,
            "first_token_ms": own.first_token_ms,
            "tokens_per_second": own.tokens_per_s,
            "model_size_mb": own.model_bytes / 1e6,
            "total_size_mb": own.total_bytes / 1e6,
            "size_ratio": own.model_bytes / first.model_bytes,
            "latency_ratio": own.token_ms / first.token_ms,
            "weights_ratio": own.weights / first.weights,
            "cuts_kept": sum(not step.taken_back for step in search.steps),
            "target_met": float(ended == MET),
        }
        return metrics if own.memory_mb is None else {**metrics, "memory_mb": own.memory_mb}

    def _deployment(self, model: LatentModel, taken: Profiles) -> dict[str, Any]:
        """What somebody who ships it has to know."""
        s = model.settings
        codecs = (
            {own.codec.name for own in model.packing.matrices.values()} if model.packing else ()
        )
        return {
            "device": self.config.target,
            "limits": self.config.limits._asdict(),
            "measured_with": {"step": taken.model.step, "prompt_tokens": PROMPT_TOKENS},
            "codecs": sorted(codecs),
            "activation_bits": model.packing.activation_bits if model.packing else 0,
            "layers": s.n_layers,
            "heads": s.n_heads,
            "head_width": s.head_width,
            "channels": s.ffn_hidden,
            "window_tokens": s.sw_window,
            "bundle": "forge export --bundle",
        }


def _comparison(found: Found, taken: Profiles) -> Table:
    """What came in and what goes out: what they take here, and what they can."""
    first, own = taken
    rows: Table = [["", INPUT, EDGE]]
    rows.append(["weights", f"{first.weights:,}", f"{own.weights:,}"])
    rows.append(["bytes", f"{first.model_bytes:,}", f"{own.model_bytes:,}"])
    rows.append(["bytes with the tokenizer", f"{first.total_bytes:,}", f"{own.total_bytes:,}"])
    first_token = f"ms to the first token after {PROMPT_TOKENS} ({own.step}, here)"
    rows.append([first_token, first.first_token_ms, own.first_token_ms])
    rows.append(["ms a token", first.token_ms, own.token_ms])
    rows.append(["tokens a second", first.tokens_per_s, own.tokens_per_s])
    memory = ("-" if p.memory_mb is None else p.memory_mb for p in taken)
    rows.append(["MB of the C program at its peak", *memory])
    for kind in found[EDGE].accuracy:
        rows.append([f"right: {kind}", *(found[name].accuracy[kind] for name in (INPUT, EDGE))])
    return rows


def _step_table(steps: Sequence[CutStep]) -> Table:
    rows: Table = [
        ["cut", "of", "nats more alone", "weights", "ms a token", "kept of the mean", ""]
    ]
    for step in steps:
        own = step.profile
        told = f"taken back: {step.taken_back}" if step.taken_back else "kept"
        kept = f"{step.retention[MEAN]:.1%}" if MEAN in step.retention else "-"
        numbers = step.rise, f"{own.weights:,}", own.token_ms, kept
        rows.append([step.number, step.kind, *numbers, told])
    return rows


def _gain_table(found: Found) -> Table:
    """What is lost on what was learned since Phase 3, paired."""
    rows: Table = [["kind", "points", "from", "to", "p"]]
    for kind, own in found[EDGE].right.items():
        gain: Gain = compare_answers(found[INPUT].right[kind], own, kind)
        rows.append([kind, *(100 * x for x in (gain.value, gain.low, gain.high)), gain.p])
    return rows
