"""Tracker: a run's metrics and events; `metrics.jsonl` and `events.jsonl` are the truth.

Everything else (progress, W&B, dashboard, API, cards) is a view of them, and may fail without harm.
What a phase logged after its last checkpoint is removed on resume, so no step appears twice.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from agent_forge.errors import ForgeError
from agent_forge.store import files
from agent_forge.track.journal import Journal, read_lines
from agent_forge.track.wandb_sink import WandbSink

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
Listener = Callable[[dict[str, Any]], None]


def last_metrics(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the newest value of every metric in a run directory, with its step."""
    newest: dict[str, dict[str, Any]] = {}
    for _, record in read_lines(folder / METRICS_FILE):
        values = record.get("metrics")
        for name, value in values.items() if isinstance(values, dict) else ():
            newest[name] = {k: record.get(k) for k in ("step", "phase")} | {"value": value}
    return dict(sorted(newest.items()))


class Tracker:
    """Writes metrics and events, and passes them on to listeners and sinks."""

    def __init__(self, folder: Path, listeners: Sequence[Listener] = ()) -> None:
        self.metrics = Journal(folder / METRICS_FILE)
        self.events = Journal(folder / EVENTS_FILE)
        self.listeners = tuple(listeners)
        self.sinks: list[WandbSink] = []

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
        """Pass a record on to the listeners; one that fails is not called again."""
        for listener in self.listeners:
            try:
                listener(record)
            except Exception as error:  # noqa: BLE001 - a view must not stop the run
                self.listeners = tuple(one for one in self.listeners if one is not listener)
                log.warning("a view of the run failed and is left out: %r", error)


def sample(process: psutil.Process, folder: Path) -> dict[str, float]:
    """Return one reading of this process and its machine as the metrics `system/*`."""
    values = {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/process_cpu_percent": process.cpu_percent(),
        "system/process_rss_mb": process.memory_info().rss / 1e6,
        "system/memory_available_mb": psutil.virtual_memory().available / 1e6,
        "system/disk_free_mb": files.free_bytes(folder) / 1e6,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        values["system/gpu_memory_used_mb"] = (total - free) / 1e6
    return values


@contextlib.contextmanager
def sampling(tracker: Tracker, folder: Path, interval_s: float) -> Iterator[None]:
    """Sample in a thread, every `interval_s` while the block runs; 0 switches it off."""
    ended = threading.Event()

    def run() -> None:
        process = psutil.Process()
        psutil.cpu_percent()  # this and the next tell of the time since they were last called
        process.cpu_percent()
        while not ended.wait(interval_s):
            # A full disk, say: the run itself will notice and tell.
            with contextlib.suppress(ForgeError, OSError, RuntimeError, psutil.Error):
                tracker.log("system", None, sample(process, folder))

    thread = threading.Thread(target=run, name="sampler", daemon=True)
    if interval_s > 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
