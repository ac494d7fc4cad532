"""Weights & Biases as a mirror of the metrics, behind a thread that may fail or hang.

Whatever goes wrong in W&B (not installed, raising, hanging) is one warning: nothing is lost.
`Mirror` calls it directly; trackio, which has less of the same interface, can be handed to that.
"""

import configparser
import importlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_forge.config.settings import TrackingSettings

log = logging.getLogger(__name__)
MAX_WAITING = 10_000
LEAST_WAIT_S = 5.0  # measured: 1.5 s on an idle machine, more where others compute
OWN_SETTINGS = {"entity", "project"}  # others in a folder could send the key of a user elsewhere
NO_GIT = {"disable_git": True, "save_code": False}  # whose config in a folder may name programs
Rows = Sequence[Sequence[Any]]  # of a table, its header first


def tables_of(artifacts: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """The tables among what a phase recorded, by name: what it measured, samples, thoughts."""
    for name, found in artifacts.items():
        for number, rows in enumerate(found if name == "tables" else [found]):
            if not isinstance(rows, list) or not rows:
                continue
            if all(isinstance(row, dict) for row in rows):
                names = list(dict.fromkeys(key for row in rows for key in row))
                rows = [names, *([row.get(key) for key in names] for row in rows)]
            if len(rows) > 1 and all(isinstance(r, list) and len(r) == len(rows[0]) for r in rows):
                yield (f"{name}_{number}" if name == "tables" else name), rows


class Mirror:
    """One run at a time in W&B or trackio, grouped by the folder that it is about."""

    def __init__(
        self,
        folder: Path,
        tracking: TrackingSettings,
        config: Mapping[str, Any],
        library: Any = None,  # wandb, imported when it is needed, unless another is given
    ) -> None:
        self.folder, self._tracking, self._library = folder, tracking, library
        about = {"group": folder.name, "config": dict(config)}
        self._settings = {"project": tracking.wandb_project, **about}
        self._run: Any = None

    @property
    def place(self) -> Path | None:
        """Where W&B keeps the open run; None of trackio, which has a place of its own."""
        place = getattr(self._run, "dir", None)
        return Path(place).parent if place else None

    def open(self, name: str, kind: str, about: Path | None = None, **more: Any) -> None:
        """Begin a run; `about` is a file with all of its settings."""
        os.environ.setdefault("WANDB_SILENT", "true")  # of files whose checksums it takes
        library = self._library = self._library or importlib.import_module("wandb")
        if self._is_wandb:
            self._refuse_settings_of_folders()
            mode = "offline" if self._tracking.wandb_offline else "online"
            more |= {"mode": mode, "dir": str(self.folder), "job_type": kind}
            more |= {"settings": library.Settings(silent=True, **NO_GIT)}
        self._run = library.init(name=name, **more, **self._settings)
        self.order("*", "step")
        if about is not None and about.is_file():
            self.artifact(f"config.{self.folder.name}", about, "config")

    def order(self, names: str, by: str) -> None:
        """Draw these metrics over that one."""
        if self._is_wandb and self._run is not None:
            self._run.define_metric(names, step_metric=by)

    def log(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log(dict(values))

    def table(self, name: str, rows: Rows) -> None:
        columns = [str(column) or "-" for column in rows[0]]
        cells = [_alike(column) for column in zip(*rows[1:], strict=True)]
        body = [list(row) for row in zip(*cells, strict=True)]
        if self._is_wandb:
            table = self._library.Table(columns=columns, data=body)
        else:
            table = self._library.Table(data=[dict(zip(columns, row, strict=True)) for row in body])
        self.log({name: table})

    def artifact(self, name: str, path: Path, kind: str = "model") -> None:
        """A file goes along, as what lies there may not stay; of a folder only where it is, which
        trackio cannot note."""
        if self._run is None or not path.exists() or not (path.is_file() or self._is_wandb):
            return  # or it has been replaced by a newer one
        artifact = self._library.Artifact(name, type=kind)
        if path.is_file():
            artifact.add_file(str(path))
        else:
            artifact.add_reference(path.resolve().as_uri())
        self._run.log_artifact(artifact)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _is_wandb(self) -> bool:
        return getattr(self._library, "__name__", "") == "wandb"

    def _refuse_settings_of_folders(self) -> None:
        said, here = configparser.ConfigParser(), (Path(), self.folder)
        read = said.read([p / f"{dot}wandb/settings" for p in here for dot in ("", ".")])
        others = {key for part in said.values() for key in part} - OWN_SETTINGS
        if others and not self._tracking.wandb_offline:
            raise PermissionError(f"{', '.join(read)} sets {', '.join(others)}: set it elsewhere")


def _alike(column: Sequence[Any]) -> list[Any]:
    """A column of a table in one type, as W&B asks: numbers, or else texts."""
    if all(cell is None or isinstance(cell, int | float) for cell in column):
        return [None if cell is None else float(cell) for cell in column]
    return ["-" if cell is None else str(cell) for cell in column]


class WandbSink:
    """Makes one W&B run a phase, grouped by session, and waits for it only so long."""

    def __init__(self, folder: Path, tracking: TrackingSettings, config: dict[str, Any]) -> None:
        self._mirror = Mirror(folder, tracking, config)
        self._patience_s, self._offline = tracking.wandb_timeout_s, tracking.wandb_offline
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(MAX_WAITING)
        self._failed = self._closed = False
        self._began = time.monotonic()
        self._busy_since = math.inf
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def begin(self, phase: str, about: Path | None = None) -> None:
        self._began = time.monotonic()
        name = f"{phase}_{self._mirror.folder.name}"
        self._hand_over(lambda: self._mirror.open(name, phase, about))

    def log(self, phase: str, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Our step is a value among the others: W&B's own counter would drop what comes late."""
        values = dict(metrics) if step is None else {"step": step, **metrics}
        self._hand_over(lambda: self._mirror.log(values))

    def tables(self, artifacts: Mapping[str, Any]) -> None:
        """The tables among what a phase recorded."""
        for name, rows in tables_of(artifacts):
            self._hand_over(partial(self._mirror.table, name, rows))

    def artifact(self, name: str, path: Path) -> None:
        self._hand_over(lambda: self._mirror.artifact(name, path))

    def end(self) -> None:
        """Finish the phase's run; wait for W&B as long as `_patience` says, then leave it out."""
        self._hand_over(self._mirror.close)
        began, patience_s = time.monotonic(), self._patience()
        while not self._failed and self._calls.unfinished_tasks:
            if time.monotonic() - min(began, self._busy_since) > patience_s:
                self._give_up(f"not done within {patience_s:g} s")
            time.sleep(0.005)

    def close(self) -> None:
        """Let the thread end."""
        self._closed = True  # first: the thread looks at it when it has done the last call
        self._hand_over(lambda: None)

    def _patience(self) -> float:
        """Return how long to wait. Offline nothing is uploaded: 1/20 of the phase is plenty, but
        for one that was shorter than what W&B takes to start and to write its first table."""
        if not self._offline:
            return self._patience_s
        return min(self._patience_s, max(LEAST_WAIT_S, 0.05 * (time.monotonic() - self._began)))

    def _hand_over(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"{MAX_WAITING} entries are waiting")

    def _work(self) -> None:
        while not self._failed and not (self._closed and self._calls.empty()):
            call = self._calls.get()
            self._busy_since = time.monotonic()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever wandb raises, the run goes on
                self._give_up(f"{type(error).__name__}: {error}")
            self._busy_since = math.inf
            self._calls.task_done()

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("W&B is left out from here on (%s); the files here have everything", reason)
