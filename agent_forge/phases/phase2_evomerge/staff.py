"""Who measures: how many workers an evolution has, and how each of them gets its bench."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from agent_forge.config.load import validate
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.crew import Crew
from agent_forge.phases.phase2_evomerge.evaluator import CandidateEvaluator
from agent_forge.phases.phase2_evomerge.evomerge import Inputs, resolve
from agent_forge.phases.phase2_evomerge.journal import read_cache
from agent_forge.phases.phase2_evomerge.prepare import prepare
from agent_forge.phases.phase2_evomerge.run import CACHE, WEIGHTS
from agent_forge.store import files
from agent_forge.workers import Pool, open_pool
from agent_forge.workers.worker import Work

SCRATCH = "workers"  # below the weights of a run: theirs while they work
OWN_BYTES = 500_000_000  # of a worker, beside its network and what it merges
COPIES = 3  # of a network in single precision, at most, while one is merged


def crew_of(settings: EvoMergeSettings, inputs: Inputs, device: str, folder: Path) -> Crew | None:
    """The workers that the settings ask for; None if one bench is all there is to be."""
    devices = torch.cuda.device_count() if device.startswith("cuda") else 0
    count = settings.workers or devices or _that_fit(settings, inputs)
    if settings.executor == "local" and count == 1:
        return None
    arguments = {
        "settings": {
            **settings.model_dump(mode="json"),
            "data": [str(Path(name).resolve()) for name in settings.data],
            "verdict_items": 1,  # no worker reads them
        },
        "parents": list(inputs.parents),
        "base": inputs.base,
        "device": device,
        "folder": str(folder.resolve()),
    }

    def start() -> Pool:
        scratch = folder / WEIGHTS / SCRATCH
        if scratch.exists():  # of a run that was killed
            files.remove_tree(scratch, folder)
        return open_pool(
            "processes" if settings.executor == "local" else "ray",
            count,
            f"{__name__}:measurer",
            arguments,
            threads=settings.worker_threads,
            devices=devices,
            address=settings.cluster or None,
        )

    patient = settings.workers == 0 and settings.executor == "local"
    return Crew(start, patient)


def _that_fit(settings: EvoMergeSettings, inputs: Inputs) -> int:
    """One for every core that its threads can have, as far as there is memory."""
    cores = (os.cpu_count() or 1) // settings.worker_threads
    model = 4 * COPIES * inputs.nbytes // (2 * len(inputs.parents))  # stored in 16 bits or more
    memory = psutil.virtual_memory().available // (model + OWN_BYTES)
    return max(1, min(cores, memory))


def measurer(
    settings: dict[str, Any], parents: list[str], base: str | None, device: str, folder: str
) -> Work:
    """A worker's bench, and the function that measures on it."""
    checked = validate(EvoMergeSettings, settings, "the evolution")
    place = Path(folder)
    scratch = place / WEIGHTS / SCRATCH
    for parent in (scratch.parent, scratch):  # not the evolution's own: if it is gone, that is it
        parent.mkdir(exist_ok=True)
    mine = Path(tempfile.mkdtemp(dir=scratch))
    material = prepare(checked, resolve(checked, parents, base, place), device, mine)
    nursery = CandidateWeights(material.parents, material.base, {}, mine, place / WEIGHTS)
    cache = read_cache(place / CACHE if checked.enable_caching else None)
    return CandidateEvaluator(material, nursery, cache).work
