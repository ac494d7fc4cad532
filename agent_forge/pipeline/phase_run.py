"""One phase within a session: its record, whether it is done already, and running it.

`state.json` in the phase's folder holds its status, the fingerprint of everything that its result
depends on, and what came out. A phase that is done with the same fingerprint is not done again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.config.phases import phase_folder
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseController, PhaseResult
from agent_forge.errors import DamagedFile, ForgeError, HandoffRefused, NotFound, PhaseFailed
from agent_forge.pipeline import resources
from agent_forge.pipeline.config import PipelineConfig
from agent_forge.pipeline.environment import seed_everything
from agent_forge.store import files, names
from agent_forge.store.metadata import read_metadata
from agent_forge.store.models import ModelStorage
from agent_forge.store.names import CHECKPOINTS
from agent_forge.track.tracker import Tracker

STATE_FILE = "state.json"
# Settings that change how a phase is run, not what comes out of it.
WITHOUT_EFFECT = {"enabled", "checkpoint_every_steps", "gate_policy", "gates"}


@dataclass
class Run:
    """What the phases of one run share."""

    folder: Path
    config: PipelineConfig
    device: str
    tracker: Tracker
    storage: ModelStorage
    should_stop: Callable[[], bool]

    @property
    def session_id(self) -> str:
        return self.folder.name


def run_phase(run: Run, controller: PhaseController, inputs: Sequence[ModelRef]) -> PhaseResult:
    """Run a phase, or go on with it, or skip it if it is done with the same inputs and config."""
    folder = run.folder / phase_folder(controller.name)
    fingerprint = fingerprint_of(run, controller, inputs)
    state = read_state(folder)
    if state and state["fingerprint"] == fingerprint and state["status"] == "completed":
        outputs = outputs_of(folder, state)
        if outputs is not None:
            run.tracker.event("phase_skipped", phase=controller.name, reason="done already")
            return _done(controller.name, state, outputs)
    accepted, problem = controller.validate_input(inputs)
    if not accepted:
        raise HandoffRefused(f"{controller.name}: {problem}")
    resources.require_for(controller.plan(inputs), folder, run.config)
    state = _begin(run, controller.name, folder, fingerprint, state)
    return _work(run, controller, inputs, folder, state)


def _begin(
    run: Run, phase: str, folder: Path, fingerprint: str, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Record that the phase has begun, before anything of it exists."""
    goes_on = before is not None and before["fingerprint"] == fingerprint
    if before is not None and not goes_on and (folder / CHECKPOINTS).exists():
        files.remove_tree(folder / CHECKPOINTS, run.folder)
    state = {
        "phase": phase,
        "status": "running",
        "fingerprint": fingerprint,
        "mark": before["mark"] if before else run.tracker.metrics.mark(),
        "attempts": (before["attempts"] if before and goes_on else 0) + 1,
        "seconds": before["seconds"] if before and goes_on else 0.0,
    }
    files.write_bytes(folder / STATE_FILE, files.sealed(state))
    run.tracker.event("phase_resumed" if goes_on else "phase_started", phase=phase)
    return state


def _work(
    run: Run,
    controller: PhaseController,
    inputs: Sequence[ModelRef],
    folder: Path,
    state: dict[str, Any],
) -> PhaseResult:
    began = time.monotonic()
    context = _context(run, controller, inputs, folder, state)
    run.tracker.begin_phase(controller.name)
    seed_everything(run.config.runtime.seed, controller.name)
    try:
        result = controller.run(context)
        if not result.success:
            raise PhaseFailed(f"{controller.name}: {result.error or 'no reason given'}")
        state["seconds"] += time.monotonic() - began
        result.duration_seconds = state["seconds"]
        state |= {
            "status": "completed",
            "outputs": [
                {"name": ref.name, "sha256": ref.metadata["sha256"]} for ref in context.saved
            ],
            "metrics": result.metrics,
            "artifacts": {k: v for k, v in result.artifacts.items() if k != "all_models"},
        }
        context.log(None, {"phase/duration_seconds": state["seconds"], "phase/success": 1})
        files.write_bytes(folder / STATE_FILE, files.sealed(state))
    except ForgeError as error:
        state["seconds"] += time.monotonic() - began
        _record_failure(folder, state, error)
        raise
    finally:
        run.tracker.end_phase()
    result.artifacts["models"] = list(context.saved)
    run.tracker.event("phase_completed", phase=controller.name, seconds=round(state["seconds"], 1))
    return result


def _record_failure(folder: Path, state: dict[str, Any], error: ForgeError) -> None:
    """Note the reason beside what is intact; a full disk may not even take that."""
    state |= {"status": "paused" if error.exit_code in (5, 130) else "failed", "error": str(error)}
    try:
        files.write_bytes(folder / STATE_FILE, files.sealed(state))
    except (OSError, ForgeError):
        return


def _context(
    run: Run,
    controller: PhaseController,
    inputs: Sequence[ModelRef],
    folder: Path,
    state: dict[str, Any],
) -> PhaseContext:
    return PhaseContext(
        phase=controller.name,
        session_id=run.session_id,
        folder=folder,
        inputs=inputs,
        device=run.device,
        seed=run.config.runtime.seed,
        tracker=run.tracker,
        storage=run.storage,
        should_stop=run.should_stop,
        check_resources=lambda: resources.check_during(folder, run.config),
        checkpoint_every=controller.config.checkpoint_every_steps,
        check_every=run.config.runtime.check_every_steps,
        keep_checkpoints=run.config.storage.keep_checkpoints,
        mark=state["mark"],
        fingerprint=state["fingerprint"],
    )


def fingerprint_of(run: Run, controller: PhaseController, inputs: Sequence[ModelRef]) -> str:
    """sha256 of everything that the phase's result depends on."""
    content = {
        "phase": controller.name,
        "settings": controller.config.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "model": run.config.model.model_dump(mode="json"),
        "seed": run.config.runtime.seed,
        "threads": run.config.runtime.threads,
        "device": run.device,
        "inputs": [ref.metadata["sha256"] for ref in inputs],
    }
    return hashlib.sha256(files.to_json(content)).hexdigest()


def read_state(folder: Path) -> dict[str, Any] | None:
    """The record of a phase, or None if it has not begun; a damaged one counts as not begun."""
    try:
        return files.read_sealed(folder / STATE_FILE)
    except (FileNotFoundError, DamagedFile):
        return None


def outputs_of(folder: Path, state: dict[str, Any]) -> list[ModelRef] | None:
    """The models that a finished phase left, or None if one is damaged or gone."""
    found = []
    for output in state["outputs"]:
        path = folder / names.safe_name(output["name"])
        try:
            files.reading(path, files.verify)
            metadata = read_metadata(path).model_dump()
        except (DamagedFile, NotFound):
            return None
        if metadata["sha256"] != output["sha256"]:
            return None
        found.append(ModelRef(output["name"], path, metadata))
    return found


def _done(phase: str, state: dict[str, Any], outputs: list[ModelRef]) -> PhaseResult:
    artifacts = {**state["artifacts"], "models": outputs, "skipped": True}
    return PhaseResult(True, None, phase, state["metrics"], artifacts, state["seconds"])
