"""Progress for people: Rich bars on a terminal, plain lines elsewhere, JSON lines on request.

A display is called with the events of a tracker, and with `loop` and `step`, which tell how far a
phase, a merge (in bytes) or an evaluation (in tokens) is. `work` begins a piece of work that may
take long (`tokens` counts within it): a thread shows that it goes on. It may fail without harm.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Self, TextIO

EVERY_S = 10.0  # a line at least, where lines are all that there is
BEAT_S = 0.2
NAME_WIDTH = 9  # of a domain in the table
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
    told = ((key, _told(value)) for key, value in record.items() if key not in hidden)
    details = ", ".join(f"{key} {value}" for key, value in told if value)
    subject = f"{record['phase']}: " if "phase" in record else ""
    event = str(record.get("event", "?")).replace("_", " ")
    return f"{subject}{event}" + (f" ({details})" if details else "")


def _told(value: Any) -> str:
    """A value of an event as people read it; empty if there is nothing in it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_told, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A display that shows nothing; the others derive from it. Time left is of the whole phase."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._phase: str | None = None
        self._began = time.monotonic()
        self._skipped = 0  # steps of this phase that an earlier process did: no pace follows
        self._candidates = self._generations = self._loops = 0
        self._work: Record = {}  # that is under way
        self._work_began, self._work_tokens = self._began, 0
        self._asked = self._told = False  # to stop

    def ask_stop(self) -> None:
        """Somebody asked to stop: safe within a signal's handler, the thread says it."""
        self._asked = True

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
        if record["event"] in ("work", "verdict"):
            self._work, self._work_began, self._work_tokens = record, time.monotonic(), 0
        elif record["event"] == "tokens":
            self._work_tokens = record["done"]
        elif record["event"] in ("step", "phase_completed"):  # steps tell of themselves
            self._work = {}

    def __exit__(self, *details: object) -> None:
        return None

    def _eta(self, record: Record) -> float | None:
        if "eta_s" in record:
            known: float | None = record["eta_s"]
            return known
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
            head, line = _table(record)
            return [head, line] if self._generations == 1 else [line]
        if event == "verdict":
            return [f"measuring {record['model']} on unseen items{_counted(record)}"]
        if event in ("begun", "loop", "work", "tokens"):
            return []
        return [describe(record)]

    def _working(self) -> str:
        """Return what is under way, for how long, and how long it should take."""
        took, expected = time.monotonic() - self._work_began, self._work.get("expected_s")
        subject = self._work.get("what") or f"{self._work.get('model')} on unseen items"
        pace = f", {self._work_tokens:,} tokens" if self._work_tokens else ""
        about = f" of about {clock(expected)}" if expected else ""
        return f"{subject}: {clock(took)}{about}{pace}"

    def _stopping(self) -> str:
        """Return how long the present piece of work still takes."""
        expected = self._work.get("expected_s")
        left = (expected or 0.0) - (time.monotonic() - self._work_began)
        about = f", about {max(1, round(left))} s" if expected else ""
        return f"finishing the present candidate{about}; again to leave at once"


def _counted(record: Record) -> str:
    """Return which of the models of a verdict this is."""
    number, models = record.get("number", 0), record.get("models", 0)
    return f" ({number} of {models})" if 0 < number <= models else ""


def _table(record: Record) -> tuple[str, str]:
    """Return head and row of a generation: scores by domain, pace and time left."""
    scores, speed = record.get("scores", {}), record.get("tokens_per_s")
    names = "".join(f"{name[:NAME_WIDTH]:>{NAME_WIDTH + 1}}" for name in scores)
    values = "".join(f"{value:>{NAME_WIDTH + 1}.4f}" for value in scores.values())
    mean = record["mean"] if record["mean"] is not None else float("nan")
    best, eta = record["best"] or 0, clock(record.get("eta_s"))
    row = f"{record['generation']:>5}  {best:.4f}  {mean:>6.4f}{values}"
    took, budget = clock(record.get("elapsed_s")), record.get("budget_s")
    spent = f"{took} of {clock(budget)}" if budget else took
    row += f"  {f'{speed:,.0f}' if speed else '-':>8}  {spent:>15}  {eta:>7}  {record['origin']}"
    return f"  gen    best    mean{names}  tokens/s             time      ETA  champion", row


class BeatingProgress(Progress):
    """A display with a thread that shows long work going on, and a request to stop."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._shown = time.monotonic()
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat_on(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError, ValueError), self._lock:  # the terminal may be gone
                self._beat()

    def _beat(self) -> None:
        if self._asked and not self._told:
            self._told = True
            self._show(self._stopping())
        if self._work and time.monotonic() - self._shown >= EVERY_S:
            self._going_on(self._working())

    def _going_on(self, text: str) -> None:
        """Show that work is going on."""
        self._show(f"  {text}")

    def _show(self, line: str) -> None:
        self._shown = time.monotonic()
        print(line, file=self.stream, flush=True)


class PlainProgress(BeatingProgress):
    """One line for each change of state, and one every ten seconds within a loop."""

    def __call__(self, record: Record) -> None:
        with self._lock:
            super().__call__(record)
            due = time.monotonic() - self._shown >= EVERY_S
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
                self._show(line)


class JsonProgress(Progress):
    """Every record as one JSON line."""

    def __call__(self, record: Record) -> None:
        super().__call__(record)
        if record["event"] == "tokens":  # twice a second
            return
        if record["event"] == "step":
            record = {**record, "eta_s": self._eta(record)}
        print(json.dumps(record, default=str), file=self.stream, flush=True)


class BarProgress(BeatingProgress):
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
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._bars.stop()

    def __call__(self, record: Record) -> None:
        with self._lock:
            super().__call__(record)
            if record["event"] == "generation":
                known = {name: record[name] for name in ("eta_s",) if name in record}
                n, total = record["generation"], record["generations"]
                self._draw({"phase": "evolution", "step": n, "total": total, **known})
            if record["event"] == "step":
                self._draw(record)
                return
            for line in self._lines(record):
                self._show(line)

    def _show(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)

    def _beat(self) -> None:
        super()._beat()
        self._shown = time.monotonic() - EVERY_S  # what is drawn may change at every beat

    def _going_on(self, text: str) -> None:
        if self._tasks:
            self._bars.update(list(self._tasks.values())[-1], amount=text)

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
