"""What surrounds a run: device, threads, seeds, versions for session.json, requests to stop."""

import hashlib
import importlib.metadata
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import agent_forge
from agent_forge import platform as system
from agent_forge.config.settings import RuntimeSettings
from agent_forge.store import files, lock


def snapshot() -> dict[str, Any]:
    """What a result depends on beside its config."""
    return {
        "agent_forge": agent_forge.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "packages": versions(),
        "argv": sys.argv,
    }


def versions() -> dict[str, str]:
    """The versions of the packages that a result depends on."""
    names = ("torch", "numpy", "safetensors", "transformers", "tokenizers")
    return {name: importlib.metadata.version(name) for name in names}


def prepare(runtime: RuntimeSettings, cores: int | None = None) -> str:
    """Set torch's threads, of old as many as there were cores; return the device to compute on."""
    import torch

    torch.set_num_threads(runtime.threads or cores or os.cpu_count() or 1)
    hint = "let it be chosen: --device auto, or --set runtime.device=auto for a pipeline"
    return system.find_device(runtime.device, hint)


def thread_count() -> int:
    """The threads that torch really uses: other numbers of them give other bits."""
    import torch

    return torch.get_num_threads()


def seed_everything(seed: int, phase: str) -> None:
    """Begin a phase with the global generators at a place that seed and phase determine."""
    import numpy as np
    import torch

    value = int.from_bytes(hashlib.sha256(f"{seed}/{phase}".encode()).digest()[:4], "little")
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _git_commit() -> str | None:
    """The commit of the checkout that the package was loaded from, if it is one."""
    try:
        here, asked = Path(agent_forge.__file__).parent, ["git", "rev-parse", "HEAD"]
        done = subprocess.run(asked, cwd=here, capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode().strip() or None


def _cpu_name() -> str:
    """The processor by name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


class StopSignals:
    """True, when called, after a signal or a stop file in `folder`; a second signal leaves now."""

    def __init__(
        self, folder: Path | None = None, on_signal: Callable[[], None] = lambda: None
    ) -> None:
        """`on_signal` is called, within the handler, when the first one comes."""
        self.folder, self._first = folder, on_signal
        self._asked = False

    def request(self) -> None:
        self._asked = True  # no lock: a signal may come while one is being handled

    def __call__(self) -> bool:
        if self._asked:
            return True
        path = self.folder / lock.STOP_FILE if self.folder else None
        if path is None or not lock.is_stop_request(path):
            return False
        meant_for_us = path.read_text() == str(os.getpid())
        files.remove(path)  # heard; or it was meant for a process that is gone
        if meant_for_us:
            self.request()
        return meant_for_us

    def on_signals(self) -> AbstractContextManager[None]:
        """Turn signals into requests while the block runs."""
        return system.on_stop_signals(self._on_signal)

    def _on_signal(self, name: str) -> None:
        if self._asked:
            system.interrupt(name)
        self.request()
        self._first()


def request_stop(folder: Path) -> None:
    """Ask the process that runs in this directory to stop after its present step."""
    files.make_way(folder / lock.STOP_FILE, lock.is_stop_request)
    files.write_bytes(folder / lock.STOP_FILE, str(lock.announced(folder).get("pid")).encode())
