"""Weights & Biases as a mirror of the metrics, behind a thread that may fail or hang.

Whatever goes wrong in W&B (not installed, raising, hanging) is one warning: nothing is lost.
"""

import configparser
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent_forge.config.settings import TrackingSettings

log = logging.getLogger(__name__)
MAX_WAITING = 10_000
OWN_SETTINGS = {"entity", "project"}  # others in a folder could send the key of a user elsewhere


class WandbSink:
    """Makes one W&B run a phase, grouped by session, and waits for it only so long."""

    def __init__(self, folder: Path, tracking: TrackingSettings, config: dict[str, Any]) -> None:
        mode = "offline" if tracking.wandb_offline else "online"
        self._settings: dict[str, Any] = {"project": tracking.wandb_project, "mode": mode}
        self._settings |= {"group": folder.name, "dir": str(folder), "config": config}
        self._patience_s, self._offline = tracking.wandb_timeout_s, tracking.wandb_offline
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(MAX_WAITING)
        self._run: Any = None
        self._failed = self._closed = False
        self._began = time.monotonic()
        self._busy_since = math.inf
        threading.Thread(target=self._work, name="wandb", daemon=True).start()

    def begin(self, phase: str) -> None:
        self._began = time.monotonic()
        self._hand_over(lambda: self._open(phase))

    def log(self, phase: str, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Our step is a value among the others: W&B's own counter would drop what comes late."""
        values = dict(metrics) if step is None else {"step": step, **metrics}
        self._hand_over(lambda: self._run and self._run.log(values))

    def artifact(self, name: str, path: Path) -> None:
        self._hand_over(lambda: self._link(name, path))

    def end(self) -> None:
        """Finish the phase's run; wait for W&B as long as `_patience` says, then leave it out."""
        self._hand_over(self._close)
        began, patience_s = time.monotonic(), self._patience()
        while not self._failed and self._calls.unfinished_tasks:
            if time.monotonic() - min(began, self._busy_since) > patience_s:
                self._give_up(f"not done within {patience_s:g} s")
            time.sleep(0.005)

    def close(self) -> None:
        """Let the thread end."""
        self._hand_over(lambda: None)
        self._closed = True

    def _patience(self) -> float:
        """Return how long to wait. Offline nothing is uploaded: 1/20 of the phase is plenty."""
        if not self._offline:
            return self._patience_s
        return min(self._patience_s, max(1.0, 0.05 * (time.monotonic() - self._began)))

    def _open(self, phase: str) -> None:
        import wandb

        said, here = configparser.ConfigParser(), (Path(), Path(self._settings["dir"]))
        read = said.read([p / f"{dot}wandb/settings" for p in here for dot in ("", ".")])
        others = {key for part in said.values() for key in part} - OWN_SETTINGS
        if others and not self._offline:
            raise PermissionError(f"{', '.join(read)} sets {', '.join(others)}: set it elsewhere")
        name, quiet = f"{phase}_{self._settings['group']}", wandb.Settings(silent=True)
        self._run = wandb.init(name=name, job_type=phase, settings=quiet, **self._settings)
        self._run.define_metric("*", step_metric="step")

    def _link(self, name: str, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(name, type="model")
        if path.is_file():  # a small one: it goes along, as what lies there may not stay
            artifact.add_file(str(path))
        elif not path.exists():  # it has been replaced by a newer one
            return
        else:
            artifact.add_reference(path.resolve().as_uri())
        if self._run is not None:
            self._run.log_artifact(artifact)

    def _close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

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
