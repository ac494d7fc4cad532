"""The crew: workers with a bench each, who measure what is asked for at the same time.

They get all that the search asks for at once and hand it back one by one, in the order in which it
was asked for, so the search cannot tell how many they are. A worker that dies costs its candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent_forge.errors import PhaseFailed, WorkersLost
from agent_forge.phases.phase2_evomerge.evaluator import NOTHING, Limits, task_of
from agent_forge.search.candidate import Candidate
from agent_forge.workers import Failure, Pool

WORTH_S = 30.0  # of measuring by one: below it workers are not started unless they were asked for


class Crew:
    """Started with the first task. `patient`: only if the work is worth the start."""

    def __init__(self, start: Callable[[], Pool], patient: bool) -> None:
        self._start, self._patient = start, patient
        self._pool: Pool | None = None
        self._given: list[str] = []  # the keys of all tasks
        self._found: dict[str, dict[str, Any]] = {}  # not asked for yet

    def wanted(self, seconds_left: float) -> bool:
        """Whether it is to be used for what one bench would take so long for."""
        return bool(self._pool) or not self._patient or seconds_left > WORTH_S

    def measure(
        self,
        candidates: Mapping[str, Candidate],
        asked: Mapping[str, Limits],
    ) -> dict[str, Any]:
        """What came out for the first that is asked for; the others are under way."""
        if self._pool is None:
            self._pool = self._start()
        for key, hurdles in asked.items():
            if key not in self._given:
                self._pool.submit(len(self._given), task_of(candidates, key, hurdles))
                self._given.append(key)
        first = next(iter(asked))
        while first not in self._found:
            number, outcome = next(self._pool.results())
            self._found[self._given[number]] = self._told(outcome)
        return self._found.pop(first)

    def _told(self, outcome: Any) -> dict[str, Any]:
        if isinstance(outcome, Failure):
            if outcome.kind == "raised":
                raise PhaseFailed(f"a worker failed: {outcome.message}")
            return {**NOTHING, "problem": f"its worker {outcome.kind}", "died": True}
        if "paused" in outcome:
            raise WorkersLost(f"a worker had to stop: {outcome['paused']}", hint="resume the run")
        return dict(outcome)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
