"""Workers that measure candidates at the same time, each with an evaluator of its own.

They get all that is pending at once and hand it back one by one, in the order in which it was
asked for, so the search cannot tell how many they are. A candidate whose worker dies is tried once
more; a second death costs the candidate.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch

from agent_forge.config.load import validate
from agent_forge.errors import ConfigError, PhaseFailed, WorkersLost
from agent_forge.evals.domains import evaluation_hash
from agent_forge.evals.fitness import source_sha256
from agent_forge.phases.phase2_evomerge import evaluator
from agent_forge.phases.phase2_evomerge import inputs as opening
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.journal import CACHE, WEIGHTS, read_cache
from agent_forge.search.candidate import Candidate
from agent_forge.store import files
from agent_forge.workers import WorkerFailure, WorkerPool, open_pool
from agent_forge.workers.worker import Work

SCRATCH = "workers"  # below the weights of an evolution: theirs while they work
OWN_BYTES = 500_000_000  # of a worker, beside its network and what it merges
COPIES = 3  # of a network in single precision, at most, while one is merged
WORTH_S = 30.0  # of serial work: below it workers are not started unless they were asked for


class ParallelEvaluator:
    """Measures candidates by workers, which are started with the first task."""

    def __init__(self, inputs: EvolutionInputs, device: str, count: int, devices: int) -> None:
        self._inputs, self._device, self.count, self._devices = inputs, device, count, devices
        self._begun = _measured_with(inputs)
        self._pool: WorkerPool | None = None
        self._submitted: list[str] = []  # the keys of all tasks; twice if its worker died
        self._tasks: dict[str, dict[str, Any]] = {}  # that have no result yet
        self._results: dict[str, dict[str, Any]] = {}  # not asked for yet

    @classmethod
    def of(cls, inputs: EvolutionInputs, device: str) -> ParallelEvaluator | None:
        """The workers that are asked for, or one a core if they fit; None: this process alone."""
        settings = inputs.settings
        if device == "cpu" and evaluator.batch_threads(inputs):
            return None
        devices = torch.cuda.device_count() if device.startswith("cuda") else 0
        cores = (os.cpu_count() or 1) // settings.worker_threads
        model = 4 * COPIES * inputs.nbytes // (2 * len(inputs.parents))  # stored in 16 bits or more
        memory = psutil.virtual_memory().available // (model + OWN_BYTES)
        count = settings.workers or devices or max(1, min(cores, memory))
        if settings.executor == "local" and count == 1:
            return None
        return cls(inputs, device, count, devices)

    def pays_off(self, serial_seconds: float) -> bool:
        """True if workers are to be used for this much serial work."""
        settings = self._inputs.settings
        asked_for = settings.workers > 0 or settings.executor != "local"
        return bool(self._pool) or asked_for or serial_seconds > WORTH_S

    def start(self) -> WorkerPool:
        settings, folder = self._inputs.settings, self._inputs.folder
        self._sweep()  # after a run that was killed
        arguments = {
            "settings": {**opening.portable_settings(settings), "verdict_items": 1},  # not read
            "parents": list(self._inputs.parent_refs),
            "base": self._inputs.base_ref,
            "device": self._device,
            "folder": str(folder.resolve()),
            "begun": self._begun,
        }
        return open_pool(
            "processes" if settings.executor == "local" else "ray",
            self.count,
            f"{__name__}:start_worker",
            arguments,
            threads=settings.worker_threads,
            devices=self._devices,
            address=settings.cluster or None,
        )

    def measure(
        self, known: dict[str, Candidate], pending: dict[str, evaluator.Limits]
    ) -> dict[str, Any]:
        """The result of the first that is pending, a failed one if its worker died."""
        if self._pool is None:
            self._pool = self.start()
        for key, limits in pending.items():
            if key not in self._submitted:
                self._tasks[key] = evaluator.worker_task(known, key, limits)
                self._submit(self._pool, key)
        first = next(iter(pending))
        while first not in self._results:
            number, result = next(self._pool.results())
            key = self._submitted[number]
            if isinstance(result, WorkerFailure):
                if result.kind == "raised":
                    raise PhaseFailed(f"a worker failed: {result.message}")
                if result.kind == "died" and self._submitted.count(key) == 1:
                    self._submit(self._pool, key)
                    continue
                failed = {"problem": f"its worker {result.kind}", "died": True}
                result = {**evaluator.EMPTY_RESULT, **failed}
            if "paused" in result:
                problem = f"a worker had to stop: {result['paused']}"
                raise WorkersLost(problem, hint="resume the run")
            self._results[key] = result
            del self._tasks[key]
        return self._results.pop(first)

    def _submit(self, pool: WorkerPool, key: str) -> None:
        pool.submit(len(self._submitted), self._tasks[key])
        self._submitted.append(key)

    def __enter__(self) -> ParallelEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._sweep()

    def _sweep(self) -> None:
        """Remove the folders of workers that are gone."""
        scratch = self._inputs.folder / WEIGHTS / SCRATCH
        if scratch.exists():
            files.remove_leftovers(scratch)


def _measured_with(inputs: EvolutionInputs) -> list[str]:
    """Hashes of what every process that measures must have alike."""
    items, own = inputs.splits.get("selection", ()), source_sha256(inputs.settings.fitness)
    return [evaluation_hash(items), own, inputs.parents[0].settings_sha256(), *inputs.hashes]


def start_worker(
    settings: dict[str, Any],
    parents: list[str],
    base: str | None,
    device: str,
    folder: str,
    begun: list[str],
) -> Work:
    """The function that measures in a worker; it opens the models for itself, once."""
    checked = validate(EvoMergeSettings, settings, "the evolution")
    place = Path(folder)
    scratch = place / WEIGHTS / SCRATCH
    for made in (scratch.parent, scratch):  # not the evolution's own: if it is gone, that is it
        made.mkdir(exist_ok=True)
    own = files.unfinished(scratch / "worker")
    own.mkdir()
    models = opening.open_models(parents, base)
    splits = opening.split_items(checked)
    inputs = EvolutionInputs(checked, tuple(parents), base, *models, splits, own)
    if _measured_with(inputs) != begun:
        problem = "a model, the data or the fitness was changed under the evolution"
        raise ConfigError(problem, hint="put it back")
    weights = CandidateWeights(*models, {}, own, place / WEIGHTS)
    cache = read_cache(place / CACHE if checked.enable_caching else None)
    return evaluator.CandidateEvaluator(inputs, weights, cache, device).work
