"""Tracker: the one place where a run's metrics and events are recorded.

`metrics.jsonl` and `events.jsonl` in the run directory are the truth. Everything else (progress,
W&B, dashboard, API, cards) is a view of them, and may fail without harm. What a phase logged after
its last checkpoint is taken back on resume, so no step appears twice; events are the history of
state changes and carry no steps.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agent_forge.track.journal import Journal, read_lines

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
Listener = Callable[[dict[str, Any]], None]


def last_metrics(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest value of every metric in a run directory, with its step."""
    found: dict[str, dict[str, Any]] = {}
    for _, record in read_lines(folder / METRICS_FILE):
        values = record.get("metrics")
        for name, value in values.items() if isinstance(values, dict) else ():
            found[name] = {k: record.get(k) for k in ("step", "phase")} | {"value": value}
    return dict(sorted(found.items()))


class Sink(Protocol):
    """A mirror of the metrics that may fail without harm (see wandb_sink)."""

    def begin(self, phase: str) -> None: ...
    def log(self, phase: str, step: int | None, metrics: Mapping[str, Any]) -> None: ...
    def artifact(self, name: str, path: Path) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Writes metrics and events, and passes them on to listeners and sinks."""

    def __init__(
        self, folder: Path, *, listeners: Sequence[Listener] = (), sinks: Sequence[Sink] = ()
    ) -> None:
        self.metrics = Journal(folder / METRICS_FILE)
        self.events = Journal(folder / EVENTS_FILE)
        self.listeners = tuple(listeners)
        self.sinks = tuple(sinks)

    def log(self, phase: str, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Record what was measured at a step (None: it belongs to no step)."""
        record = {"phase": phase, "step": step, "time": time.time(), "metrics": dict(metrics)}
        self.metrics.write(record)
        for sink in self.sinks:
            sink.log(phase, step, metrics)

    def event(self, kind: str, **details: Any) -> None:
        """Record a change of state."""
        record = {"event": kind, "time": time.time(), **details}
        self.events.write(json.loads(json.dumps(record, default=str)))
        self.tell(record)

    def tell(self, record: dict[str, Any]) -> None:
        """Pass something on to whoever is watching; one that fails is not told again."""
        for listener in self.listeners:
            try:
                listener(record)
            except Exception as error:  # noqa: BLE001 - a view must not stop the run
                self.listeners = tuple(one for one in self.listeners if one is not listener)
                log.warning("a view of the run failed and is left out: %r", error)

    def artifact(self, name: str, path: Path) -> None:
        """Point the sinks to a model that was saved."""
        for sink in self.sinks:
            sink.artifact(name, path)

    def begin_phase(self, phase: str) -> None:
        for sink in self.sinks:
            sink.begin(phase)

    def end_phase(self) -> None:
        for sink in self.sinks:
            sink.end()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
