"""A thread that samples CPU, memory, disk and GPU into the metrics `system/*`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from agent_forge.errors import ForgeError
from agent_forge.store import files
from agent_forge.track.tracker import Tracker


def sample(process: psutil.Process, folder: Path) -> dict[str, float]:
    """One reading of this process and its machine."""
    memory = psutil.virtual_memory()
    values = {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/process_cpu_percent": process.cpu_percent(),
        "system/process_rss_mb": process.memory_info().rss / 1e6,
        "system/memory_available_mb": memory.available / 1e6,
        "system/disk_free_mb": files.free_bytes(folder) / 1e6,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        values["system/gpu_memory_used_mb"] = (total - free) / 1e6
    return values


class Sampler:
    """Samples every `interval_s` while its block runs; 0 switches it off."""

    def __init__(self, tracker: Tracker, folder: Path, interval_s: float) -> None:
        self._tracker, self._folder, self._interval_s = tracker, folder, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        if self._interval_s > 0:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(self._interval_s):
            try:
                values = sample(process, self._folder)
                self._tracker.log("system", None, values)
            except (ForgeError, OSError, RuntimeError, psutil.Error):
                continue  # a full disk, say: the run itself will notice and tell
