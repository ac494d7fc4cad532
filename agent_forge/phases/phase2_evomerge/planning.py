"""What the settings leave open is decided once, before the work: racing, precision, and what fits
into the time budget. The decisions stand in evolution.json, or in the record of a run, and whoever
goes on reads them there: no clock is asked twice. `EvolutionPace` tells how far the work is.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from agent_forge.evals.comparison import detectable_gain
from agent_forge.evals.fitness import DomainFitness
from agent_forge.merge import spectral
from agent_forge.phases.phase2_evomerge import budget
from agent_forge.phases.phase2_evomerge import inputs as opening
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.checks import measured_until_now
from agent_forge.phases.phase2_evomerge.config import SPECTRAL
from agent_forge.phases.phase2_evomerge.evaluator import (
    CandidateEvaluator,
    batch_threads,
    measured_in_bf16,
)
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.parallel import ParallelEvaluator
from agent_forge.search import operators
from agent_forge.search.base import SearchStrategy
from agent_forge.search.portfolio import BACKWARD, STRATEGIES
from agent_forge.search.settings import FIRST_COMBOS
from agent_forge.store import files
from agent_forge.track.tracker import Listener

PROBE_S = 2.0  # of measuring, for each precision
MANY = 64  # items of a domain that the probe has at most
WORKER_GAIN = 0.7  # of a further worker, in candidates; they share memory and start in seconds
RECENT = 8  # candidates whose mean time the next one is expected to take
TOLD_EVERY_S = 0.5
SPECTRAL_SHARE, MINUTES = 0.1, 60  # of the time for spectral methods; the time if none is given
PROCESS_BYTES, COPIES = 900_000_000, 4  # of torch and activations; of a network's weights


def decided(inputs: EvolutionInputs, device: str = "cpu", spent_s: float = 0.0) -> EvolutionInputs:
    """The inputs with everything decided; `spent_s` of the time budget are gone already."""
    return with_decisions(inputs, decisions(inputs, device, spent_s))


def decisions(inputs: EvolutionInputs, device: str, spent_s: float = 0.0) -> dict[str, Any]:
    """What is left open: settings, and the plan for the time budget if there is one."""
    s = inputs.settings
    found: dict[str, Any] = {}
    if s.racing is None:
        found["racing"] = s.strategy not in ("spec", "nsga2") and not s.fitness
    if s.methods is None:
        found["methods"] = SPECTRAL if _spectral_pays(inputs) else []
    if s.mixed_precision is None:
        found["mixed_precision"] = device == "cpu" and measured_in_bf16(inputs)
    if plan := _plan(with_decisions(inputs, {"settings": found}), device, spent_s):
        found |= plan.settings
        bounded = inputs.plan is None and "generations" in s.model_fields_set
        if bounded and plan.max_evaluations >= s.planned(len(inputs.parents)):
            found["max_evaluations"] = s.max_evaluations  # all generations fit: they are the end
        return {"settings": found, "plan": plan.to_json()}
    return {"settings": found} if found else {}


def _spectral_pays(inputs: EvolutionInputs) -> bool:
    """True if `auto` can have the spectral methods for a small share of the time."""
    s = inputs.settings
    seconds = len(SPECTRAL) * spectral.cost(inputs.parents[0].specs, len(inputs.parents))[1]
    return s.strategy == "auto" and seconds <= SPECTRAL_SHARE * 60 * (s.minutes_each or MINUTES)


def with_decisions(inputs: EvolutionInputs, made: Mapping[str, Any]) -> EvolutionInputs:
    """The inputs as decided; the items are chosen anew if there are to be others."""
    if not made:
        return inputs
    before = inputs.settings
    settings = before.model_copy(update=made["settings"])
    changed = replace(inputs, settings=settings)
    if "plan" in made:
        changed = replace(changed, plan=budget.EvolutionPlan.from_json(made["plan"], inputs.folder))
    counts = ("fitness_subset_size", "verdict_items")
    if any(getattr(before, name) != getattr(settings, name) for name in counts):
        splits = opening.all_items(settings)
        notes = [n for n in inputs.notes if n not in opening.gain_notes(inputs.splits["verdict"])]
        notes += opening.gain_notes(splits["verdict"])
        changed = replace(changed, splits=splits, notes=tuple(notes))
    return changed


def _plan(inputs: EvolutionInputs, device: str, spent_s: float) -> budget.EvolutionPlan | None:
    """The plan for the time budget; None if there is none to be made, or it is made already."""
    s, plan = inputs.settings, inputs.plan
    if not s.minutes_each or s.fitness:
        return None
    shape = shape_of(inputs)
    if plan is not None:
        same = plan.minutes == s.minutes_each or not s.max_evaluations
        return None if same else _replanned(inputs, plan, shape)
    if (inputs.folder / JOURNAL).exists():  # begun without a plan: the clock alone ends it
        return None
    began = time.monotonic()
    costs = probe(inputs, device)
    spent_s += time.monotonic() - began
    fixed = {name: getattr(s, name) for name in budget.FIELDS if name in s.model_fields_set}
    return budget.Planner(costs, shape, fixed).plan(s.minutes_each, spent_s)


def _replanned(
    inputs: EvolutionInputs, plan: budget.EvolutionPlan, shape: budget.SearchShape
) -> budget.EvolutionPlan:
    """The plan for other minutes, with its items; what the folder holds stays, so its champion does
    too."""
    generations, evaluations = measured_until_now(inputs.folder)
    kept = {name: plan.settings[name] for name in ("fitness_subset_size", "verdict_items")}
    again = budget.Planner(plan.costs, shape, kept).plan(inputs.settings.minutes_each, plan.spent_s)
    return replace(
        again,
        generations=max(again.generations, generations),
        max_evaluations=max(again.max_evaluations, evaluations),
    )


def shape_of(inputs: EvolutionInputs) -> budget.SearchShape:
    s, models = inputs.settings, (len(inputs.parents), inputs.verdict_models)
    auto = s.strategy == "auto"
    passes = BACKWARD * s.gradient_share if auto or s.strategy == "grad" else 0.0
    first = FIRST_COMBOS[s.auto_version] + len(s.methods or ()) if auto else 0
    raced = bool(s.racing)
    return budget.SearchShape(*models, s.population_size, first, raced, passes, s.heal)


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Compute with so many threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def probe(inputs: EvolutionInputs, device: str) -> budget.EvaluationCosts:
    """How fast the first parent's network is on real items, and how long a merge takes."""
    s = inputs.settings
    folder = files.unfinished(inputs.folder / "probe")
    with computing_threads(s.worker_threads):
        began = time.perf_counter()
        weights = CandidateWeights(inputs.parents, inputs.base, {}, folder)
        evaluator = CandidateEvaluator(inputs, weights, {}, device)
        open_s = time.perf_counter() - began
        fitness = evaluator.fitness
        assert isinstance(fitness, DomainFitness)
        merge_s, combo_s = _merge_seconds(inputs, evaluator)
        rate = exact = _tokens_per_s(fitness, bool(s.mixed_precision))
        if s.mixed_precision:
            evaluator.fill(next(iter(weights.known)), exact=True)
            exact = _tokens_per_s(fitness, False)
    if workers := ParallelEvaluator.of(inputs, device):  # the search will have them
        rate *= 1 + WORKER_GAIN * (workers.count - 1)
    pairs = zip(fitness.domains, fitness.prepared, strict=True)
    lengths = ((d, sum(len(item.ids) for item in prepared.items)) for d, prepared in pairs)
    tokens = {d.name: length / len(d.examples) for d, length in lengths}
    counts = opening.item_counts(s)
    return budget.EvaluationCosts(rate, exact, merge_s, combo_s, open_s, tokens, counts)


def _merge_seconds(inputs: EvolutionInputs, evaluator: CandidateEvaluator) -> tuple[float, float]:
    """Seconds to fill the network with the average, and with a combo."""
    weights = evaluator.weights
    how: Any = {"groups": weights.groups.names, "layers": weights.layers, "seed": inputs.seed}
    search = STRATEGIES["auto"](inputs.settings, parents=len(inputs.parents), **how)
    weights.known = search.candidates
    combo = next(c for c in search.population if c.operation["combo"] == operators.COMBOS[1])
    seconds = []
    for key in (search.average, combo.key):
        began = time.perf_counter()
        evaluator.fill(key)
        seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1]


def _tokens_per_s(fitness: DomainFitness, mixed: bool) -> float:
    """Tokens a second on a few items of each domain, after one of each; more, the faster it is."""
    each = fitness.tokens / max(len(d.examples) for d in fitness.domains)  # of an item a domain
    rate = 0.0
    for seconds in (0.0, PROBE_S / 4, PROBE_S):
        count = max(1, min(MANY, int(seconds * rate / each)))
        few = [d.select(range(min(count, len(d.examples)))) for d in fitness.domains]
        sample = DomainFitness(fitness.model_under_test, few, fitness.weights, {}, mixed=mixed)
        began = time.perf_counter()
        sample.measure()
        rate = sample.tokens / (time.perf_counter() - began)
    return rate


def plan_record(inputs: EvolutionInputs) -> dict[str, Any]:
    """What will be done, as numbers."""
    s, plan = inputs.settings, inputs.plan
    record: dict[str, Any] = {
        "precision": "bfloat16" if s.mixed_precision else "single",
        "threads": batch_threads(inputs) or s.worker_threads,
        "memory_bytes": memory_bytes(inputs),
        "detectable_gain": detectable_gain(inputs.splits.get("verdict", ()))[1],
        "repeat": repeated(inputs),
    }
    if plan is not None:
        minutes = {name: round(value / 60, 2) for name, value in plan.seconds.items()}
        minutes |= {"all": plan.minutes, "until_now": round(plan.spent_s / 60, 2)}
        record |= {"minutes": minutes, "tokens_per_s": round(plan.costs.tokens_per_s, 1)}
        record |= plan.settings
    return record


def memory_bytes(inputs: EvolutionInputs) -> int:
    """About the most memory: a network in single precision, its gradient, what is being merged."""
    weights = sum(spec.numel for spec in inputs.parents[0].specs.values())
    return PROCESS_BYTES + 4 * COPIES * weights * max(1, inputs.settings.workers)


def plan_lines(inputs: EvolutionInputs) -> list[str]:
    """The plan in words."""
    s, plan = inputs.settings, inputs.plan
    if plan is None:
        return []
    parts = ", ".join(f"{name} {s / 60:.1f}" for name, s in plan.seconds.items() if s)
    precision = "bfloat16" if s.mixed_precision else "single precision"
    threads = batch_threads(inputs) or s.worker_threads
    values = {name: json.dumps(value) for name, value in repeated(inputs).items()}
    again = " ".join(f"--set {name}={value}" for name, value in values.items())
    memory, disk = (n / 1e9 for n in (memory_bytes(inputs), inputs.disk_bytes))
    return [
        f"plan for {plan.minutes:g} minutes: {parts}, until now {plan.spent_s / 60:.1f}",
        f"{plan.costs.tokens_per_s:,.0f} tokens/s ({precision}, {threads} threads): a pass"
        f" over {plan.fitness_subset_size} items of each domain takes {plan.passes_s:.1f} s",
        f"{plan.max_evaluations} evaluations in {plan.generations} generations at most,"
        f" {plan.verdict_items} unseen items of each domain for the verdict",
        f"about {memory:.1f} GB of memory, up to {disk:.1f} GB of disk",
        f"the same without a clock: {again}",
    ]


def repeated(inputs: EvolutionInputs) -> dict[str, Any]:
    """The settings that repeat the evolution exactly, with no clock."""
    s = inputs.settings
    return {
        name: getattr(s, name) for name in (*budget.FIELDS, "racing", "mixed_precision", "methods")
    }


class EvolutionPace:
    """Passes events on, and tells how long each piece of work will take."""

    def __init__(self, inputs: EvolutionInputs, listener: Listener) -> None:
        self._inputs, self._listener = inputs, listener
        self._recent: dict[str, deque[float]] = {}  # seconds, by the kind of work
        self._whole: list[float] = []  # seconds of candidates that met all items
        self._tokens = self._busy_s = 0.0
        self._verdicts = self._done = self._last = 0
        self._told = 0.0

    def tell(self, record: dict[str, Any]) -> None:
        """Pass an event on; that of a model of the verdict is counted."""
        if record["event"] == "verdict":
            self._verdicts += 1
            models, expected = self._inputs.verdict_models, self.verdict_s
            each = expected / models if expected else None
            record = {**record, "number": self._verdicts, "models": models, "expected_s": each}
            self._done = self._last = 0
        self._listener(record)

    def begin(self, kind: str, what: str) -> None:
        """A piece of work begins."""
        self._done = self._last = 0
        self._listener({"event": "work", "what": what, "expected_s": self._expected(kind)})

    def end(self, kind: str, seconds: float, tokens: int | None, whole: bool = False) -> None:
        """A piece of work is done; no tokens: what it would have measured was known."""
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(seconds)
        if tokens is not None:
            self._tokens, self._busy_s = self._tokens + tokens, self._busy_s + seconds
        if whole:
            self._whole.append(seconds)

    def tokens_done(self, done: int, total: int) -> None:
        """Progress of a measurement, domain by domain; told now and then."""
        self._done += done - (self._last if done > self._last else 0)
        self._last = done
        if (now := time.monotonic()) - self._told > TOLD_EVERY_S:
            self._told = now
            self._listener({"event": "tokens", "done": self._done})

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._busy_s if self._busy_s else None

    @property
    def verdict_s(self) -> float | None:
        """Seconds of the verdict, from the plan or by what whole candidates took."""
        plan, splits = self._inputs.plan, self._inputs.splits
        if plan is not None:
            return plan.verdict_s
        if not self._whole or "selection" not in splits:
            return 0.0 if "verdict" not in splits else None
        items = {s: sum(len(d.examples) for d in splits[s]) for s in ("selection", "verdict")}
        times = self._inputs.verdict_models * items["verdict"] / items["selection"]
        return times * fmean(self._whole)

    def eta_s(self, search: SearchStrategy, elapsed_s: float) -> float | None:
        """Seconds that are left: by the plan at the measured pace, else by the generations."""
        plan, scored = self._inputs.plan, len(search.scores)
        verdict = self.verdict_s
        if verdict is None or not scored:
            return None
        if search.finished:
            return verdict
        if plan is None:
            left = search.generations_left() * self._inputs.settings.population_size
            return elapsed_s * left / scored + verdict
        planner = budget.Planner(plan.costs, shape_of(self._inputs))
        counts = scored, plan.max_evaluations
        until, whole = (planner.search_seconds(n, plan.fitness_subset_size) for n in counts)
        left_s = max(0.0, whole - until) * elapsed_s / until
        return min(left_s, max(0.0, plan.search_s - elapsed_s)) + verdict + plan.heal_s

    def _expected(self, kind: str) -> float | None:
        if recent := self._recent.get(kind):
            return fmean(recent)
        plan = self._inputs.plan
        if plan is None:
            return fmean(self._whole) if self._whole else None
        passes = shape_of(self._inputs).gradient_passes if kind == "gradient" else 1.0
        return passes * plan.passes_s + plan.costs.merge_s
