"""Disk and memory: enough before a phase starts, and still enough while it runs."""

from __future__ import annotations

from pathlib import Path

import psutil

from agent_forge.contract.phase import PhasePlan
from agent_forge.errors import DiskFull, NotEnough
from agent_forge.pipeline.config import PipelineConfig
from agent_forge.store import files
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.paths import CHECKPOINTS


def require_for(plan: PhasePlan, folder: Path, config: PipelineConfig) -> None:
    """Refuse a phase that the machine cannot hold, before it starts."""
    reserve = int(config.storage.reserve_disk_mb * 1e6)
    files.require_space(folder, plan.disk_bytes + reserve)
    needed = plan.memory_bytes + int(config.runtime.reserve_memory_mb * 1e6)
    available = psutil.virtual_memory().available
    if needed > available:
        raise NotEnough(
            f"not enough memory: {needed:,} bytes needed, {available:,} available",
            hint="close programs, or choose a smaller preset",
        )


def check_during(folder: Path, config: PipelineConfig) -> None:
    """Pause before the machine runs out. Old checkpoints go first; the newest stays."""
    reserve = int(config.storage.reserve_disk_mb * 1e6)
    if files.free_bytes(folder) < reserve:
        for stage in (folder / CHECKPOINTS).glob("*"):
            CheckpointManager(stage).make_room(reserve)
        free = files.free_bytes(folder)
        if free < reserve:
            raise DiskFull(folder, reserve, free)
    available = psutil.virtual_memory().available
    if available < config.runtime.reserve_memory_mb * 1e6:
        raise NotEnough(
            f"only {available:,} bytes of memory are left on this machine",
            hint="close programs, then resume",
        )
