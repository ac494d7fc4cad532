"""Phase 3, Quiet-STaR: bake thoughts into the weights, reward those that help, and prove it.

In: the champion of Phase 2. Out: a model that thinks before it answers tasks of several steps. It
learns from thoughts that a program has written and checked, beside its old tasks, easy strategies
first (the specification calls this prompt baking). Then its thoughts are judged on unseen items:
against none, those of other items, noise and filler, by what follows a changed step, and, with
`controls`, against two models that had as many steps without thoughts. After Quiet-STaR (arXiv
2403.09629); unlike it, thoughts are supervised first: rewards are a second step (reward_step.py).
"""

from __future__ import annotations

import copy
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from random import Random
from typing import Any

import numpy as np

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
from agent_forge.data.tasks import Task
from agent_forge.data.tokenizer import STRATEGIES, Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals import thoughts as judging
from agent_forge.evals.coherence import VALID, WEIGHTS
from agent_forge.evals.comparison import ACCURACY, Comparison, Gain
from agent_forge.evals.domains import from_tasks
from agent_forge.evals.thoughts import NONE, OWN, StrategyScores, Thinker, ThoughtReport
from agent_forge.infer.thinking import BEGIN, END, ThoughtGenerator, cache_bytes, shown
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase3_quietstar.config import QuietStarSettings
from agent_forge.phases.phase3_quietstar.reward_step import (
    RewardOutcome,
    refuse_few_items,
    refuse_long_rows,
    rewarded_levels,
    take_reward_step,
)
from agent_forge.phases.training import (
    compare_domains,
    measure_domains,
    save_network,
    train_network,
)
from agent_forge.train.config import STEP
from agent_forge.train.corpus import Corpus, build_corpus, validate_corpus
from agent_forge.train.lessons import (
    DIRECT,
    PAUSED,
    UNCERTAIN,
    Lessons,
    items_of,
    own_traces,
    pauses,
    spread,
    unseen_items,
    write_lessons,
)

NAME = "reasoning"
CONTROLS = {"direct": DIRECT, "pause": PAUSED}
OVERALL = 0.85  # accuracy with thoughts that the specification asks for
SHOWN = 3  # thoughts in the card
TIMED = 64  # thoughts at once, against one at a time
STRATEGY_ITEMS = 500  # of each family, at most, that every strategy is measured on
HELD_OUT = 60  # thoughts that evaluations during training look at
IN_FORM = 0.9  # share of thoughts in the form of their strategy, if it is learned
ITEM_TOKENS = 60  # of a thought with its answer, about
USED = 0.8  # share of items on which a model should think by itself
# Of the thoughts that were judged: the names that are logged, and those of the result.
FIGURES = {
    "thoughts_generated": "thoughts_generated_total",
    "thoughts_valid": "thoughts_valid_total",
    "validity_rate": "validity_rate",
    "avg_coherence": "avg_coherence_score",
    "semantic_similarity": "avg_semantic_similarity",
    "logical_consistency": "avg_logical_consistency",
    "relevance_score": "avg_relevance",
    "fluency_score": "avg_fluency",
    "processing_time_ms": "processing_time_ms_per_thought",
}
Scores = dict[str, Any]


class QuietStarPhase(phase.PhaseController):
    """Bake, measure, judge, hand over."""

    name = "quietstar"
    config: QuietStarSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        validate_corpus(self.config, (*self.config.strategies, *CONTROLS.values()))
        own_traces(self.config)
        c, weights = self.config, self.shared.model.parameters()
        steps = (c.steps + self._confidence_steps()) * (3 if c.controls else 1)
        if c.reward.kind != "none":
            refuse_long_rows(c, self.shared.model)
            refuse_few_items(c)
            steps += c.reward.steps + c.reward.control_steps * c.reward.control
        tokens = c.rows * c.row_tokens
        notes = (
            f"{c.examples:,} thoughts of {len(c.strategies)} strategies, {c.steps} steps"
            + (", and two controls for as long" if c.controls else ""),
            f"{c.thought_items:,} unseen items of each family for the verdict on thoughts",
        )
        disk = 2 * 5 * weights * 4 * 4 + weights * 4 + 10**7
        memory = 6 * 4 * weights + 3000 * tokens + 3 * 10**8
        work = steps + self._verdict_work() * (len(c.strategies) + 6 + 2 * c.controls)
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened = ctx.inputs[0].open()
        model = opened.network.to(ctx.device)
        if not isinstance(model, ForgeNetwork):
            raise ConfigError("Phase 3 teaches models of our own; this one is of another kind")
        if not self.config.steps and not ctx.inputs[0].metadata.get("strategies"):
            hint = "teach it: --set phases.quietstar.steps=800"
            raise ConfigError("steps: 0 is for a model that thinks; this one never did", hint=hint)
        tokenizer: Tokenizer = opened.tokenizer
        splits = ("selection", "verdict") if self.config.texts else ()
        unseen = [task for split in splits for task in self._items(split)]
        corpus = build_corpus(self.config, model.settings, tokenizer, unseen)
        before = measure_domains(ctx, corpus, model, "input")
        base = copy.deepcopy(model)
        controls = {name: copy.deepcopy(model) for name in CONTROLS if self.config.controls}
        lessons = self._bake(ctx, corpus, model)
        rewarded = None
        if self.config.reward.kind != "none":
            rewarded = take_reward_step(ctx, self.config, corpus, lessons, model)
        for name, control in controls.items():
            self._train_control(ctx, corpus, lessons, control, name)
        after = measure_domains(ctx, corpus, model, NAME)
        kept = compare_domains(corpus, before, after)
        found = self._measure(ctx, Thinker(model, tokenizer), base, controls)
        return self._result(ctx, corpus, model, found, kept, rewarded)

    def _items(self, split: str) -> list[Task]:
        """All that is measured of a split."""
        c = self.config
        levels = {**c.ranges, **rewarded_levels(c)}
        return unseen_items(c, split, c.thought_items + c.reward.check_items, levels)

    # -- teaching ----------------------------------------------------------------------------------

    def _bake(self, ctx: PhaseContext, corpus: Corpus, model: ForgeNetwork) -> Lessons:
        """Teach all strategies; `uncertain` last, when it is known how sure the model may be."""
        c, seed = self.config, ctx.seed
        lessons = write_lessons(c, corpus.tokenizer, seed)
        own = replace(corpus, sources=[*corpus.sources, *lessons.sources()])
        how: dict[str, Any] = {"settings": c.train, "seed": seed}
        how["held_out"] = lessons.held_out(HELD_OUT)
        curriculum = lessons.curriculum(corpus, list(lessons.traces))
        if c.steps:
            train_network(ctx, own, model, curriculum, stage="bake", steps=c.steps, **how)
        if UNCERTAIN not in c.strategies or not c.steps:
            return lessons
        measured = partial(self._confidence, Thinker(model, corpus.tokenizer))
        told = ctx.once("confidence", "by family and level", measured)
        sure = {(family, level): digit for family, level, digit in told}
        lessons = write_lessons(c, corpus.tokenizer, seed, sure)
        own = replace(corpus, sources=[*corpus.sources, *lessons.sources()])
        mix = corpus.constant(lessons.mix(corpus, c.strategies))
        how["settings"] = c.train.slower(c.confidence_rate)
        steps = self._confidence_steps()
        train_network(ctx, own, model, mix, stage="confidence", steps=steps, **how)
        return lessons

    def _confidence_steps(self) -> int:
        uncertain = UNCERTAIN in self.config.strategies and self.config.steps
        return max(1, round(self.config.confidence_share * self.config.steps)) if uncertain else 0

    def _confidence(self, thinker: Thinker) -> list[tuple[str, int, int]]:
        """For each family and level how sure the model is of items that it was not taught: the
        first decimal of its accuracy, 9 at most."""
        items = items_of(UNCERTAIN, unseen_items(self.config, "selection", 200))
        right: dict[tuple[str, int], list[bool]] = {}
        for item, correct in zip(items, thinker.right(items, thinker.think(items)), strict=True):
            right.setdefault((item.family, item.level), []).append(correct)
        return [(*key, min(9, int(10 * np.mean(own)))) for key, own in right.items()]

    def _train_control(
        self, ctx: PhaseContext, corpus: Corpus, lessons: Lessons, model: ForgeNetwork, name: str
    ) -> None:
        """Train a copy of the input on the same items for as many steps, without thoughts."""
        source = lessons.direct() if name == "direct" else lessons.paused()
        own = replace(corpus, sources=[*corpus.sources, source])
        mix = corpus.constant(lessons.control_mix(corpus, CONTROLS[name]))
        steps = self.config.steps + self._confidence_steps()
        how: dict[str, Any] = {"settings": self.config.train, "seed": ctx.seed, "steps": steps}
        train_network(ctx, own, model, mix, stage=name, **how)

    # -- measuring ---------------------------------------------------------------------------------

    def _verdict_work(self) -> int:
        """What it costs to judge thoughts once, in training steps."""
        tokens = self.config.thought_items * len(self.config.levels) * ITEM_TOKENS
        return 1 + tokens // (3 * self.config.rows * self.config.row_tokens)

    def _measure(
        self,
        ctx: PhaseContext,
        thinker: Thinker,
        base: ForgeNetwork,
        controls: Mapping[str, ForgeNetwork],
    ) -> Scores:
        """All that is measured on unseen items, each thing once."""
        c, items = self.config, unseen_items(self.config, "verdict", self.config.thought_items)
        few = unseen_items(c, "verdict", min(c.thought_items, STRATEGY_ITEMS))
        by_strategy = {name: items_of(name, few) for name in c.strategies}
        tasks: dict[str, Callable[[], Any]] = {
            "thoughts": partial(judging.assess, thinker, items, base=base, seed=ctx.seed),
            **{
                f"strategy {name}": partial(judging.measure_strategy, thinker, name, own)
                for name, own in by_strategy.items()
            },
            "tags": partial(judging.tag_losses, thinker, c.strategies, by_strategy),
            "usage": partial(self._usage, thinker, items),
            "time": partial(_time_of_thoughts, thinker, spread(items, TIMED)),
            "memory": partial(_memory_overhead, thinker, spread(items, 8)),
            "samples": partial(_samples, thinker, by_strategy),
            **{
                f"control {name}": partial(_control_right, thinker, model, name, items)
                for name, model in controls.items()
            },
        }
        if UNCERTAIN in c.strategies:
            own = by_strategy[UNCERTAIN]
            tasks["calibration"] = partial(judging.calibration, thinker, own)
        found: Scores = {}
        for name in ctx.pieces("verdict", list(tasks), self._verdict_work()):
            found[name] = ctx.once("thinking", name, tasks[name])
        report = ThoughtReport.of_record(found["thoughts"])
        report.right |= {f"trained {n}": found[f"control {n}"] for n in controls}
        return {**found, "thoughts": report}

    def _usage(self, thinker: Thinker, items: Sequence[Task]) -> dict[str, float]:
        """How often it thinks if it may choose: about these items, and about old tasks."""
        old = [task for domain in from_tasks(count=100) for task in domain.tasks]
        return {"new": thinker.begins_to_think(items), "old": thinker.begins_to_think(old)}

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        model: ForgeNetwork,
        found: Scores,
        kept: Comparison,
        rewarded: RewardOutcome | None,
    ) -> phase.PhaseResult:
        report: ThoughtReport = found["thoughts"]
        strategies = {n: StrategyScores(**found[f"strategy {n}"]) for n in self.config.strategies}
        figures, steps = _figures(report, found), self.config.steps
        ctx.log(steps, {f"step_{steps}/{name}": value for name, value in figures.items()})
        ctx.log(None, self._phase_metrics(report, found, strategies))
        if rewarded:
            ctx.log(None, _reward_metrics(rewarded))
        headline = PhaseHeadline(
            "accuracy on tasks of several steps, without thoughts -> with",
            report.accuracy(NONE),
            report.accuracy(OWN),
            f"{report.sentence}; {old_skills(kept, self.config.kept_skills)}",
        )
        tables = [
            self._accuracy_table(report),
            self._strategy_table(strategies),
            self._target_table(report, found),
        ]
        summary = f"{report.sentence}; strategies not learned: {_not_learned(strategies) or 'none'}"
        metrics = {FIGURES[name]: value for name, value in figures.items()}
        metrics["accuracy"] = report.accuracy(OWN)
        told = PhaseReport(headline, summary, metrics, tables)
        told.details = {
            "coherence_threshold": VALID,
            "num_thoughts_per_step": ThoughtGenerator(model).default_counts[0],
            "special_tokens_added": ["[thinking]", "[/endthinking]", *STRATEGIES],
            "theatre": report.to_json(),
            "thoughts": found["samples"],
        }
        metadata = {
            "coherence_score": float(np.mean(report.coherences)),
            "validity_rate": report.validity_rate,
            "accuracy": report.accuracy(OWN),
            "theatre": report.theatre,
            "strategies": {name: scores.accuracy for name, scores in strategies.items()},
            "levels": {name: list(levels) for name, levels in self.config.ranges.items()},
        }
        parts = [told.card(), *map(as_markdown, tables[1:])]
        if rewarded:
            told.details["reward"] = {"kept": rewarded.kept, "verdict": rewarded.sentence}
            told.details["reward"] |= {"accuracy": rewarded.accuracy, "cpu_s": rewarded.cpu_s}
            parts += ["## Second step: rewards", rewarded.sentence, as_markdown(rewarded.table)]
        card = "\n\n".join([*parts, "## Thoughts", _sample_table(found["samples"])])
        saved = save_network(ctx, corpus, model, NAME, metadata, told.metrics, card)
        told.details |= {"model_id": saved.metadata["model_id"]}
        return told.result(ctx, [saved], model)

    def _phase_metrics(
        self, report: ThoughtReport, found: Scores, strategies: Mapping[str, StrategyScores]
    ) -> dict[str, float]:
        without, with_thoughts = report.accuracy(NONE), report.accuracy(OWN)
        values = {
            "phase/total_thoughts_generated": len(report.lengths),
            "phase/total_thoughts_valid": round(report.validity_rate * len(report.lengths)),
            "phase/overall_validity_rate": report.validity_rate,
            "phase/avg_coherence": float(np.mean(report.coherences)),
            "phase/accuracy_with_thoughts": with_thoughts,
            "phase/accuracy_without_thoughts": without,
            "phase/accuracy_improvement": with_thoughts - without,
            "phase/thought_divergence": report.divergence,
            "phase/thinking_usage": found["usage"]["new"],
            "phase/thinking_usage_old": found["usage"]["old"],
            "phase/theatre": float(report.theatre),
        }
        for name, scores in strategies.items():
            values |= {f"strategy/{name}/{key}": value for key, value in scores.named.items()}
        for family, after in report.after_change.items():
            values[f"theatre/{family}/followed"] = after.followed
            values[f"theatre/{family}/stays_right"] = after.right
        for condition in report.right:
            name = condition.replace(" ", "_")
            for family in self.config.ranges:
                values[f"theatre/{family}/accuracy_{name}"] = report.accuracy(condition, family)
        return values

    def _accuracy_table(self, report: ThoughtReport) -> Table:
        """Right answers by family under every condition, and what follows a changed step."""
        rows: Table = [["family", *report.right, "follows a changed step", "stays right"]]
        for family in self.config.ranges:
            row = [report.accuracy(condition, family) for condition in report.right]
            after = report.after_change.get(family)
            rows.append([family, *row, *((after.followed, after.right) if after else ("-", "-"))])
        return rows

    def _strategy_table(self, strategies: Mapping[str, StrategyScores]) -> Table:
        rows: Table = [["strategy", "accuracy", "asked for", "in its form", "exact", "tokens"]]
        for name, s in strategies.items():
            asked = traces.ABOUT[name].threshold
            rows.append([name, s.accuracy, asked, s.fits, s.exact, s.tokens])
        return rows

    def _target_table(self, report: ThoughtReport, found: Scores) -> Table:
        """What the specification aims at, beside what was measured."""
        time, (own, other) = found["time"], found["tags"]
        others = len(self.config.strategies) > 1
        rows: Table = [["target of the specification", "", "measured"]]
        rows += [
            ["accuracy with thoughts", f">= {OVERALL}", report.accuracy(OWN)],
            ["gain by thoughts", "> 0.02", report.gains[NONE].value],
            ["valid thoughts", "> 0.75", report.validity_rate],
            ["coherence", "> 0.70", float(np.mean(report.coherences))],
            ["correlation of coherence and right answers", "> 0.3", _or_dash(report.correlation)],
            ["the same, of the largest possible", "> 0.3", _or_dash(report.correlation_reached)],
            ["the same without right claims", "-", _or_dash(report.correlation_of_form)],
            ["predictive power", "> 0.5", _or_dash(report.predictive_power)],
            ["divergence between thoughts", "> 0.3", report.divergence],
            ["thinks by itself, new tasks", f"> {USED}", found["usage"]["new"]],
            ["thinks by itself, old tasks", "0", found["usage"]["old"]],
            ["loss of thoughts behind other tags", ">= 1.3 times", other / own if others else "-"],
            ["ms a thought, at once", "< 15", time["batched_ms"]],
            ["ms a thought, one at a time", "-", time["alone_ms"]],
            ["thoughts at once, times as fast", ">= 10", time["alone_ms"] / time["batched_ms"]],
            ["memory of a reply with a thought, more by", "< 0.20", found["memory"]],
        ]
        if "calibration" in found:
            rows.append(["gap between confidence and accuracy", "-", found["calibration"][0]])
        return rows


def _reward_metrics(outcome: RewardOutcome) -> dict[str, float]:
    values = {"phase/reward_gain": outcome.gain, "phase/reward_kept": float(outcome.kept)}
    for name, by_family in outcome.accuracy.items():
        for family, share in by_family.items():
            values[f"reward/{family}/accuracy_{name.replace(' ', '_')}"] = share
    return values


def _figures(report: ThoughtReport, found: Scores) -> dict[str, float]:
    """What the specification wants to know of thoughts, under the first of its names in FIGURES."""
    values = [
        len(report.lengths),
        round(report.validity_rate * len(report.lengths)),
        report.validity_rate,
        float(np.mean(report.coherences)),
        *(report.mean_score(part) for part in WEIGHTS),
        found["time"]["batched_ms"],
    ]
    return dict(zip(FIGURES, values, strict=True))


def _not_learned(strategies: Mapping[str, StrategyScores]) -> str:
    """The strategies whose answers or form are below what is asked for, in words."""
    missed = []
    for name, scores in strategies.items():
        if scores.accuracy < traces.ABOUT[name].threshold:
            missed.append(f"{name} {scores.accuracy:.2f} < {traces.ABOUT[name].threshold}")
        elif scores.fits < IN_FORM:
            missed.append(f"{name}, {scores.fits:.0%} in its form")
    return ", ".join(missed)


def old_skills(kept: Comparison, allowed: float) -> str:
    """What became of the old tasks, in words."""
    gain: Gain = kept.overall.gains[ACCURACY]
    told = f"old tasks {100 * gain.value:+.1f} points"
    return (
        told if gain.value >= -allowed else f"{told}, more is lost than the {allowed:.0%} allowed"
    )


def _control_right(
    thinker: Thinker, model: ForgeNetwork, name: str, items: Sequence[Task]
) -> list[bool]:
    """Which items a control answers rightly, asked as it was trained."""
    control, dots = Thinker(model, thinker.tokenizer), None
    if name == "pause":
        steps = (traces.write_trace(item, STEP, Random(0)) for item in items)
        dots = [pauses(thinker.tokenizer, trace) for trace in steps]
    return control.right(items, dots)


def _time_of_thoughts(thinker: Thinker, items: Sequence[Task]) -> dict[str, float]:
    """Milliseconds a thought: all of them at once, and one at a time."""
    few = items[:8]
    at_once = timeit.timeit(lambda: thinker.think(items), number=1) / len(items)
    alone = timeit.timeit(lambda: [thinker.think([item]) for item in few], number=1) / len(few)
    return {"batched_ms": 1000 * at_once, "alone_ms": 1000 * alone}


def _memory_overhead(thinker: Thinker, items: Sequence[Task]) -> float:
    """How much more memory a reply takes with a thought: weights and what the cache holds at its
    end, over the same without, less 1."""
    weights = sum(p.numel() * p.element_size() for p in thinker.network.parameters())
    prompts, sizes = thinker.prompts(items), []
    thoughts = [[BEGIN, *thought, END] for thought in thinker.think(items)]
    for rows in (map(add, prompts, thoughts), prompts):
        held = [cache_bytes(thinker.network, row) for row in rows]
        sizes.append(weights + sum(held) / len(held))
    return sizes[0] / sizes[1] - 1


def _samples(thinker: Thinker, items: Mapping[str, Sequence[Task]]) -> list[dict[str, str]]:
    """A few thoughts of each strategy with their answers."""
    found = []
    for strategy, own in items.items():
        few = spread(own, SHOWN)
        thoughts = thinker.think(few, strategy)
        for item, ids, text in zip(few, thoughts, thinker.answers(few, thoughts), strict=True):
            thought = shown(thinker.tokenizer, ids, specials=True)
            said = {"prompt": item.question, "thought": thought, "answer": text}
            found.append({**said, "right": item.answer})
    return found


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value


def _sample_table(samples: Sequence[Mapping[str, str]]) -> str:
    lines = ["| question | thought | answer | right |", "|---|---|---|---|"]
    for row in samples:
        cells = (row[key] for key in ("prompt", "thought", "answer", "right"))
        lines.append("| " + " | ".join(f"`{cell}`" for cell in cells) + " |")
    return "\n".join(lines)
