"""Progress for people: Rich bars on a terminal, plain lines elsewhere, JSON lines on request.

A display is called with the events of a tracker, and with `loop` and `step`, which tell how far a
phase, a merge (in bytes) or an evaluation (in tokens) is. It may fail without harm.
"""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Self, TextIO

TABLE_HEAD = "  gen  best    mean    diversity  hits    ETA  champion"
Record = Mapping[str, Any]


def eta_s(elapsed_s: float, done: float, left: float) -> float | None:
    """Return the seconds that `left` takes at the pace of `done`; None before there is a pace."""
    return elapsed_s * left / done if done > 0 else None


def clock(seconds: float | None) -> str:
    """Return `1:02:03`, `2:03`, or `-` when not known."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def size(n_bytes: float) -> str:
    """Return bytes as people read them, in steps of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def describe(record: Record) -> str:
    """Return an event as a line of text."""
    hidden = ("event", "time", "phase")
    details = ", ".join(f"{key} {value}" for key, value in record.items() if key not in hidden)
    subject = f"{record['phase']}: " if "phase" in record else ""
    event = str(record.get("event", "?")).replace("_", " ")
    return f"{subject}{event}" + (f" ({details})" if details else "")


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A display that shows nothing; the others derive from it. Time left is of the whole phase."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._phase: str | None = None
        self._began = time.monotonic()
        self._skipped = 0  # steps of this phase that an earlier process did: no pace follows
        self._candidates = self._generations = self._loops = 0

    def __call__(self, record: Record) -> None:
        phase = record.get("phase", record["name"] if record["event"] == "loop" else None)
        if phase is not None and phase != self._phase:
            self._phase, self._began, self._skipped, self._loops = phase, time.monotonic(), 0, 0
        if record["event"] == "loop":
            self._skipped += record["first"]
            self._loops += 1
            if self._loops == 1:  # what came before, such as reading data, does not come again
                self._began = time.monotonic()
        self._candidates += record["event"] == "candidate"
        self._generations += record["event"] == "generation"

    def __exit__(self, *details: object) -> None:
        return None

    def _eta(self, record: Record) -> float | None:
        done = record.get("done", record["step"])
        left = record.get("left", record["total"] - record["step"])
        return eta_s(time.monotonic() - self._began, done - self._skipped, left)

    def _step(self, record: Record) -> dict[str, Any]:
        """Return what is shown of a step, under the names that a Rich bar has for it."""
        step, total, stage = record["step"], record["total"], record.get("stage", "main")
        amount, done = f"{step}/{total}", record.get("done", step)
        if record.get("unit") == "bytes":
            speed = step / max(time.monotonic() - self._began, 1e-9)
            amount = f"{size(step)} of {size(total)}, {size(speed)}/s"
        return {
            "description": record["phase"] + ("" if stage == "main" else f" {stage}"),
            "completed": done,
            "total": done + record.get("left", total - step),
            "amount": amount,
            "eta": clock(self._eta(record)),
        }

    def _lines(self, record: Record) -> list[str]:
        """Return the lines for anything that is no step."""
        event = record["event"]
        if event == "note":
            return [record["text"]]
        if event == "candidate":
            if record["problem"]:
                return [f"  candidate {record['key'][:8]} failed: {record['problem']}"]
            first = self._candidates == 1 and not self._generations
            return [f"a candidate takes about {record['seconds']:.1f} s"] if first else []
        if event == "generation":
            n = record["generation"]
            eta = clock(eta_s(time.monotonic() - self._began, n + 1, record["left"]))
            mean = record["mean"] if record["mean"] is not None else float("nan")
            best, diversity = record["best"] or 0, record["diversity"] or 0
            line = f"{n:>5}  {best:.4f}  {mean:.4f}  {diversity:>9.3f}  {record['cache_hits']:>4}"
            line += f"  {eta:>5}  {record['origin']}"
            return [TABLE_HEAD, line] if self._generations == 1 else [line]
        if event == "verdict":
            return [f"measuring {record['model']} on unseen items"]
        return [] if event in ("begun", "loop") else [describe(record)]


class PlainProgress(Progress):
    """One line for each change of state, and one every ten seconds within a loop."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._shown = time.monotonic()

    def __call__(self, record: Record) -> None:
        super().__call__(record)
        due = time.monotonic() - self._shown >= 10
        if record["event"] == "step":
            in_bytes, shown = record.get("unit") == "bytes", self._step(record)
            due = due or (in_bytes and record["step"] == record["total"])
            amount = shown["amount"] if in_bytes else f"step {shown['amount']}"
            lines = [f"{shown['description']} {amount}, ETA {shown['eta']}"] if due else []
        else:
            lines = self._lines(record)
        if record["event"] == "candidate" and due and not lines:
            lines = [f"  {self._candidates} candidates measured"]
        for line in lines:
            self._shown = time.monotonic()
            print(line, file=self.stream, flush=True)


class JsonProgress(Progress):
    """Every record as one JSON line."""

    def __call__(self, record: Record) -> None:
        super().__call__(record)
        if record["event"] == "step":
            record = {**record, "eta_s": self._eta(record)}
        print(json.dumps(record, default=str), file=self.stream, flush=True)


class BarProgress(Progress):
    """A Rich bar for each phase, with the lines of state changes above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich import progress as rich
        from rich.console import Console

        bar = ("{task.description}", rich.BarColumn(), "{task.fields[amount]}")
        times = (rich.TimeElapsedColumn(), "ETA {task.fields[eta]}")
        self._bars = rich.Progress(*bar, *times, console=Console(file=stream))
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bars.stop()

    def __call__(self, record: Record) -> None:
        super().__call__(record)
        if record["event"] == "generation":
            n, total = record["generation"], record["generations"]
            self._draw({"phase": "evolution", "step": n, "total": total})
        if record["event"] == "step":
            self._draw(record)
            return
        for line in self._lines(record):
            self._bars.console.print(line, highlight=False, markup=False)

    def _draw(self, record: Record) -> None:
        phase = record["phase"]
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, amount="", eta="-")
        self._bars.update(self._tasks[phase], **self._step(record))


DISPLAYS = {"bars": BarProgress, "plain": PlainProgress, "json": JsonProgress, "none": Progress}
MODES = ("auto", *DISPLAYS)


def make_progress(mode: str = "auto", stream: TextIO | None = None) -> Progress:
    """Return the display of a mode; `auto` draws bars only where a person is watching."""
    out = stream or sys.stderr
    if mode == "auto":
        mode = "bars" if out.isatty() else "plain"
    return DISPLAYS[mode](out)
