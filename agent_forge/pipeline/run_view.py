"""A run as others see it: what its files say, read further as they grow.

Reports, the dashboard, the API and notebooks all look through this; it writes nothing and imports
no torch. A number that was not measured is None.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ForgeError, NotFound
from agent_forge.phases import SUMMARY
from agent_forge.store import lock
from agent_forge.store.paths import SAFE_NAME
from agent_forge.store.records import STATE_FILE, SessionRow, read_state
from agent_forge.store.registry import ModelRegistry
from agent_forge.store.sessions import REGISTRY, SessionStore, read_session
from agent_forge.track.journal import read_lines
from agent_forge.track.progress import eta_s
from agent_forge.track.tracker import EVENTS_FILE, METRICS_FILE

MOST_POINTS = 2000  # of a metric that are kept; of more, every second, fourth ... one
MOST_EVENTS = 20_000  # the newest
TAIL = 64  # bytes before a place in a file: still the same if nobody wrote it again
BEGINS = ("phase_started", "phase_resumed")
SYSTEM = "system"  # the phase of readings of the machine
STARTS = ("run_started", "run_resumed")


@dataclass
class Series:
    """One metric of one phase over a run; a long one is thinned evenly, but for the newest."""

    steps: list[int | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    every: int = 1  # which of the measured points are kept
    count: int = 0  # how many were measured

    def add(self, step: int | None, at: float, value: float) -> None:
        if self.count and (self.count - 1) % self.every:  # it was there as the newest
            del self.steps[-1], self.times[-1], self.values[-1]
        self.steps.append(step)
        self.times.append(at)
        self.values.append(value)
        self.count += 1
        if len(self.values) > MOST_POINTS and (self.count - 1) % self.every == 0:
            del self.steps[1::2], self.times[1::2], self.values[1::2]
            self.every *= 2

    @property
    def latest(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass
class PhaseView:
    """What is known of one phase of a run."""

    name: str
    number: int  # 1 to 8; 0 for the toy
    folder: Path
    status: str = "waiting"  # running, completed, paused, interrupted, failed, damaged
    share: float | None = None  # of its work that is done
    eta_s: float | None = None
    state: dict[str, Any] = field(default_factory=dict)  # its state.json

    @property
    def purpose(self) -> str:
        return SUMMARY[self.name]

    @property
    def seconds(self) -> float | None:
        seconds = self.state.get("seconds")
        return seconds if isinstance(seconds, int | float) else None

    @property
    def headline(self) -> dict[str, Any] | None:
        """Its measure on unseen items, before and after it, and the verdict."""
        return _dict(self.artifacts.get("headline")) or None

    @property
    def artifacts(self) -> dict[str, Any]:
        return _dict(self.state.get("artifacts"))

    @property
    def metrics(self) -> dict[str, Any]:
        """Its results by the specification's names."""
        return _dict(self.state.get("metrics"))

    @property
    def models(self) -> list[Path]:
        """The models that it handed over; what is no name of one is left out."""
        names = [str(_dict(one).get("name")) for one in _list(self.state.get("outputs"))]
        return [self.folder / name for name in names if SAFE_NAME.fullmatch(name)]


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
        # How far each file was read: its inode, the place and what stands before that.
        self._places = dict.fromkeys((METRICS_FILE, EVENTS_FILE), (0, 0, b""))
        self._paces: dict[tuple[str, float], tuple[float, float]] = {}  # of phases, when first seen
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
        return self._row["progress_percent"] / 100 if self._row else None

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
            if (registry := _registry(self.store)) is not None:
                self._row = dict(registry.get_session_status(self.session_id))
        self.status = self.session["status"]
        if self.status == "running" and not lock.is_busy(self.folder):
            self.status = "interrupted"
        for record in self._new(METRICS_FILE, self.series):
            self._take_metrics(record)
        for record in self._new(EVENTS_FILE, self.events):
            self.events.append(record)
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
        inode, offset, tail = self._places[name]
        try:
            with path.open("rb") as reader:
                there = path.stat().st_ino
                reader.seek(offset - len(tail))
                same = there == inode and reader.read(len(tail)) == tail
        except OSError:  # not yet, or being replaced: what was read stays
            return
        if not same:
            kept.clear()
            offset = 0
        for behind, record in read_lines(path, offset):
            offset = behind
            yield record
        with contextlib.suppress(OSError), path.open("rb") as reader:
            reader.seek(max(0, offset - TAIL))
            self._places[name] = (there, offset, reader.read(min(TAIL, offset)))

    def _take_metrics(self, record: dict[str, Any]) -> None:
        phase, step, at = str(record.get("phase")), record.get("step"), _number(record.get("time"))
        for name, value in _dict(record.get("metrics")).items():
            if (number := _number(value)) is not None:
                series = self.series.setdefault((phase, name), Series())
                series.add(step if isinstance(step, int) else None, at or 0.0, number)

    def _asked(self) -> list[str]:
        """The phases that the run was last started or resumed for; the registry counts these."""
        begun = [str(e.get("phases")).split() for e in self.events if e.get("event") in STARTS]
        return begun[-1] if begun else _list(_dict(self.session.get("asked")).get("phases"))

    def _names(self) -> list[str]:
        """The phases that were asked for, and any other that has a record."""
        asked = [*self._asked(), *_list(_dict(self.session.get("asked")).get("phases"))]
        there = [n for n in ORDER if (self.folder / phase_folder(n)).is_dir()]
        return [name for name in ORDER if name in asked or name in there]

    def _phase(self, name: str) -> PhaseView:
        folder = self.folder / phase_folder(name)
        state = read_state(folder) or {}
        view = PhaseView(name, ORDER.index(name), folder, state=state)
        unread = not state and (folder / STATE_FILE).exists()
        view.status = "damaged" if unread else state.get("status", "waiting")
        if view.status == "completed":
            view.share = 1.0
        elif view.status == "running" and self.status != "running":
            view.status = self.status if self.status != "completed" else "interrupted"
        if view.status == "running" and self._row.get("current_phase") == name:
            names = self._asked()
            if name in names:
                whole = self._row["progress_percent"] / 100 * len(names)
                view.share = min(1.0, max(0.0, whole - names.index(name)))
                view.eta_s = self._eta(name, view.share)
        return view

    def _eta(self, name: str, share: float) -> float | None:
        """The time left at the pace of this phase since it was begun; of one that was resumed,
        since this view first saw it: what was done before has no pace."""
        begins = [e for e in self.events if e.get("event") in BEGINS and e.get("phase") == name]
        began = _number(begins[-1].get("time")) if begins else None
        if began is None:
            return None
        fresh, now = begins[-1]["event"] == "phase_started", time.time()
        first = (began, 0.0) if fresh else self._paces.setdefault((name, began), (now, share))
        return eta_s(now - first[0], share - first[1], 1 - share)


def all_runs(store: SessionStore) -> list[dict[str, Any]]:
    """The rows of all sessions, newest first, with their status as it is; of those that no registry
    has, what their directories tell."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(ForgeError):  # a damaged one
        if (registry := _registry(store)) is not None:
            rows = [dict(row) for row in registry.get_all_sessions()]
    listed = {row["session_id"] for row in rows}
    for path in store.run_directories():
        if path.name not in listed:
            with contextlib.suppress(ForgeError, OSError):
                record = read_session(path)
                times = {"start_time": record["created_at"], "end_time": record.get("ended_at")}
                told = {key: record[key] for key in ("session_id", "status", "tags")}
                rows.append({**told, **times, "current_phase": None, "progress_percent": None})
    rows.sort(key=lambda row: (row["start_time"], row["session_id"]), reverse=True)
    return [{**row, "status": store.status(cast(SessionRow, row))} for row in rows]


def _registry(store: SessionStore) -> ModelRegistry | None:
    """The registry if there is one: looking creates nothing."""
    return store.registry if (store.root / REGISTRY).is_file() else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    """A value as a finite number; None if it is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return float(value) if isinstance(value, int) and abs(value) < 2**63 else None
