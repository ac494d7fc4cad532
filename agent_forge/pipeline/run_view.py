"""A run as others see it: what its files say, read further as they grow.

Reports, the dashboard, the API and notebooks all look through this; it writes nothing and imports
no torch. A number that was not measured is None.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ForgeError, NotFound
from agent_forge.phases import SUMMARY
from agent_forge.store import lock
from agent_forge.store.records import read_state
from agent_forge.store.sessions import SessionStore, read_session
from agent_forge.track.journal import read_lines
from agent_forge.track.progress import eta_s
from agent_forge.track.tracker import EVENTS_FILE, METRICS_FILE

MOST_POINTS = 2000  # of a metric that are kept; of more, every second, fourth ... one
MOST_EVENTS = 20_000  # the newest
BEGINS = ("phase_started", "phase_resumed")
SYSTEM = "system"  # the phase of readings of the machine


@dataclass
class Series:
    """One metric of one phase over a run, thinned evenly if it is long."""

    phase: str
    steps: list[int | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    every: int = 1  # which of the measured points are kept
    count: int = 0  # how many were measured
    latest: float | None = None

    def add(self, step: int | None, at: float, value: float) -> None:
        if self.count % self.every == 0:
            self.steps.append(step)
            self.times.append(at)
            self.values.append(value)
        self.count += 1
        self.latest = value
        if len(self.values) > MOST_POINTS:
            del self.steps[1::2], self.times[1::2], self.values[1::2]
            self.every *= 2


@dataclass
class PhaseView:
    """What is known of one phase of a run."""

    name: str
    number: int  # 1 to 8; 0 for the toy
    folder: Path
    status: str = "waiting"  # running, completed, paused, interrupted, failed
    share: float | None = None  # of its work that is done
    eta_s: float | None = None
    state: dict[str, Any] = field(default_factory=dict)  # its state.json

    @property
    def purpose(self) -> str:
        return SUMMARY[self.name]

    @property
    def seconds(self) -> float | None:
        return self.state.get("seconds")

    @property
    def headline(self) -> dict[str, Any] | None:
        """Its measure on unseen items, before and after it, and the verdict."""
        return self.artifacts.get("headline")

    @property
    def artifacts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.state.get("artifacts", {})
        return found

    @property
    def metrics(self) -> dict[str, Any]:
        """Its results by the specification's names."""
        found: dict[str, Any] = self.state.get("metrics", {})
        return found

    @property
    def models(self) -> list[Path]:
        """The models that it handed over."""
        return [self.folder / str(output["name"]) for output in self.state.get("outputs", [])]


class RunView:
    """One session: its record, phases, metrics and events. `refresh` reads what is new."""

    def __init__(self, store: SessionStore, session_id: str) -> None:
        self.store, self.session_id = store, session_id
        self.folder = store.find(session_id)
        self.session = read_session(self.folder)
        self.series: dict[tuple[str, str], Series] = {}  # by phase and name
        self.events: list[dict[str, Any]] = []
        self.status = "-"
        self.phases: list[PhaseView] = []
        self._places = {METRICS_FILE: (0, 0), EVENTS_FILE: (0, 0)}  # inode, and how far it was read
        self._stamps: dict[Path, tuple[float, int]] = {}
        self.refresh()

    @property
    def config(self) -> dict[str, Any]:
        """The config that it was begun with."""
        config: dict[str, Any] = self.session["config"]
        return config

    @property
    def config_hash(self) -> str:
        return str(self.session.get("config_hash", ""))

    @property
    def progress(self) -> float | None:
        """The share of the whole run that is done."""
        return self._row.get("progress_percent", 0.0) / 100 if self._row else None

    @property
    def is_live(self) -> bool:
        """True while a process works on it."""
        return self.status == "running"

    def refresh(self) -> None:
        """Read what has changed since the last time."""
        if not self.folder.is_dir():
            raise NotFound(f"{self.folder} is gone")
        self.session = read_session(self.folder)
        self._row: dict[str, Any] = {}
        with contextlib.suppress(ForgeError):  # without it, its directory tells enough
            self._row = dict(self.store.registry.get_session_status(self.session_id))
        self.status = self.session["status"]
        if self.status == "running" and not lock.is_busy(self.folder):
            self.status = "interrupted"
        for record in self._new(METRICS_FILE, self.series):
            self._take_metrics(record)
        self.events += self._new(EVENTS_FILE, self.events)
        del self.events[:-MOST_EVENTS]
        self.phases = [self._phase(name) for name in self._names()]

    def phase(self, name: str) -> PhaseView:
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise NotFound(f"{self.session_id} has no phase {name!r}")

    def latest(self, name: str, phase: str | None = None) -> float | None:
        """The newest value of a metric; of the phase that measured it last unless one is named."""
        found = [s for (of, n), s in self.series.items() if n == name and phase in (None, of)]
        return found[-1].latest if found else None

    def _new(self, name: str, kept: dict[Any, Any] | list[Any]) -> Iterator[dict[str, Any]]:
        """The lines that a file has got; all of them if a resumed run has written it again."""
        path = self.folder / name
        if not path.exists():
            return
        inode, offset = self._places[name]
        found = path.stat()
        if found.st_ino != inode or found.st_size < offset:
            kept.clear()
            offset = 0
        for behind, record in read_lines(path, offset):
            offset = behind
            yield record
        self._places[name] = (found.st_ino, offset)

    def _take_metrics(self, record: dict[str, Any]) -> None:
        phase, values = str(record.get("phase")), record.get("metrics")
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int | float):
                series = self.series.setdefault((phase, name), Series(phase))
                series.add(record.get("step"), float(record.get("time", 0.0)), float(value))

    def _names(self) -> list[str]:
        """The phases that were asked for, and any other that has a record."""
        asked = self.session.get("asked", {}).get("phases", [])
        there = [n for n in ORDER if (self.folder / phase_folder(n)).is_dir()]
        return [name for name in ORDER if name in asked or name in there]

    def _phase(self, name: str) -> PhaseView:
        folder = self.folder / phase_folder(name)
        state = read_state(folder) or {}
        view = PhaseView(name, ORDER.index(name), folder, state=state)
        view.status = state.get("status", "waiting")
        if view.status == "completed":
            view.share = 1.0
        elif view.status == "running" and self.status != "running":
            view.status = self.status if self.status != "completed" else "interrupted"
        if view.status == "running" and self._row.get("current_phase") == name:
            names = self.session.get("asked", {}).get("phases", [])
            if name in names:
                whole = self._row["progress_percent"] / 100 * len(names)
                view.share = min(1.0, max(0.0, whole - names.index(name)))
                view.eta_s = self._eta(name, view.share)
        return view

    def _eta(self, name: str, share: float) -> float | None:
        """The time left at the pace of this phase since it was last begun or resumed."""
        begins = [e for e in self.events if e.get("event") in BEGINS and e.get("phase") == name]
        if not begins or begins[-1]["event"] == "phase_resumed":  # what was done before has no pace
            return None
        return eta_s(time.time() - float(begins[-1].get("time", 0.0)), share, 1 - share)


def all_runs(store: SessionStore) -> list[dict[str, Any]]:
    """The rows of all sessions, newest first, with their status as it is."""
    if not (store.root / "sessions").is_dir():
        return []
    rows = store.registry.get_all_sessions()
    return [{**row, "status": store.status(row)} for row in rows]
