"""Progress for people: Rich bars on a terminal, plain lines elsewhere, JSON lines on request.

A view of the tracker's events: it is told and draws; it decides nothing and writes to stderr only.
"""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, TextIO

MODES = ("auto", "bars", "plain", "json", "none")
PLAIN_EVERY_S = 10.0


def eta_s(first: int, step: int, total: int, elapsed_s: float) -> float | None:
    """Seconds left at the pace since `first`; None before there is a pace."""
    done = step - first
    return None if done <= 0 else elapsed_s / done * (total - step)


def clock(seconds: float | None) -> str:
    """`1:02:03`, `2:03`, or `-` when not known."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class Progress:
    """A listener that shows nothing; the other modes derive from it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._began = time.monotonic()
        self._first = 0

    def __call__(self, record: dict[str, Any]) -> None:
        if record["event"] == "loop":
            self._began, self._first = time.monotonic(), record["first"]

    def eta(self, record: dict[str, Any]) -> float | None:
        """Until the phase is through its steps, at the pace of the present stage."""
        elapsed = time.monotonic() - self._began
        end = record["step"] + record.get("left", record["total"] - record["step"])
        return eta_s(self._first, record["step"], end, elapsed)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class PlainProgress(Progress):
    """One line for each change of state, and one every ten seconds within a loop."""

    def __init__(self, stream: TextIO, every_s: float = PLAIN_EVERY_S) -> None:
        super().__init__(stream)
        self._every_s = every_s
        self._shown = time.monotonic()

    def __call__(self, record: dict[str, Any]) -> None:
        super().__call__(record)
        if record["event"] == "loop":
            return
        if record["event"] == "step":
            if time.monotonic() - self._shown < self._every_s:
                return
            self._shown = time.monotonic()
            left = f"ETA {clock(self.eta(record))}"
            stage = "" if record.get("stage", "main") == "main" else f" {record['stage']}"
            text = f"{record['phase']}{stage} step {record['step']}/{record['total']}, {left}"
        else:
            text = describe(record)
        print(text, file=self.stream, flush=True)


class JsonProgress(Progress):
    """Every record as one JSON line."""

    def __call__(self, record: dict[str, Any]) -> None:
        super().__call__(record)
        if record["event"] == "step":
            record = {**record, "eta_s": self.eta(record)}
        print(json.dumps(record, default=str), file=self.stream, flush=True)


class BarProgress(Progress):
    """A Rich bar for each loop, with the lines of state changes above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._bars.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        if record["event"] == "loop":
            self._task = self._bars.add_task(
                record["name"], total=record["total"], completed=record["first"]
            )
        elif record["event"] == "step":
            self._bars.update(self._task, completed=record["step"])
        else:
            self._bars.console.print(describe(record), highlight=False, markup=False)


def describe(record: dict[str, Any]) -> str:
    """An event as a line of text."""
    details = ", ".join(
        f"{key} {value}" for key, value in record.items() if key not in ("event", "time", "phase")
    )
    subject = f"{record['phase']}: " if "phase" in record else ""
    event = str(record.get("event", "?")).replace("_", " ")
    return f"{subject}{event}" + (f" ({details})" if details else "")


def make_progress(mode: str = "auto", stream: TextIO | None = None) -> Progress:
    """The display for a mode; `auto` draws bars only where a person is watching."""
    out = stream or sys.stderr
    if mode == "auto":
        mode = "bars" if out.isatty() else "plain"
    views: dict[str, type[Progress]] = {
        "bars": BarProgress,
        "plain": PlainProgress,
        "json": JsonProgress,
        "none": Progress,
    }
    return views[mode](out)
