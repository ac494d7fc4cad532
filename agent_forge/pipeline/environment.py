"""Where a run takes place: device, threads, seeds, and a snapshot of versions for session.json."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import agent_forge
from agent_forge.config.settings import RuntimeSettings
from agent_forge.errors import ConfigError

RECORDED = ("torch", "numpy", "safetensors", "transformers", "tokenizers")


def snapshot() -> dict[str, Any]:
    """What a result depends on beside its config."""
    return {
        "agent_forge": agent_forge.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in RECORDED},
        "argv": sys.argv,
    }


def prepare(runtime: RuntimeSettings) -> str:
    """Set torch's threads and return the device to compute on."""
    import torch

    torch.set_num_threads(runtime.threads or os.cpu_count() or 1)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if runtime.device == "auto":
        return next((name for name in ("cuda", "mps") if there[name]), "cpu")
    if not there.get(runtime.device, True):
        raise ConfigError(
            f"device {runtime.device!r} is not there",
            hint="let it be chosen: --device auto, or --set runtime.device=auto for a pipeline",
        )
    return runtime.device


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
