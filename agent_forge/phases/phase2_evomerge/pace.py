"""How far an evolution is: what is under way, how long it takes, and how long all of it does."""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import Any

from agent_forge.phases.phase2_evomerge.budget import search_seconds
from agent_forge.phases.phase2_evomerge.decisions import shape_of
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.search.base import SearchStrategy
from agent_forge.track.tracker import Listener

RECENT = 8  # candidates whose mean time the next one is expected to take
TOLD_EVERY_S = 0.5


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
            models, plan = self._inputs.verdict_models, self._inputs.plan
            expected = plan.verdict_s if plan else self.verdict_s
            each = expected / models if expected else None
            record = {**record, "number": self._verdicts, "models": models, "expected_s": each}
            self._done = self._last = 0
        self._listener(record)

    def begin(self, kind: str, what: str) -> None:
        """A piece of work begins."""
        self._done = self._last = 0
        self._listener({"event": "work", "what": what, "expected_s": self._expected(kind)})

    def end(self, kind: str, seconds: float, tokens: int, whole: bool = False) -> None:
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(seconds)
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
        return (
            self._inputs.verdict_models * fmean(self._whole) * items["verdict"] / items["selection"]
        )

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
        items, shape = plan.fitness_subset_size, shape_of(self._inputs)
        until, whole = (
            search_seconds(plan.costs, shape, n, items) for n in (scored, plan.max_evaluations)
        )
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
