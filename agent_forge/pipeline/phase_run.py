"""One phase within a session: its record, what it needs, whether it is done, and running it.

`state.json` in its folder holds its status, the fingerprint of all that its result depends on, and
what came out. A phase that is done with the same fingerprint is not done again.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent_forge import errors
from agent_forge.config.phases import phase_folder
from agent_forge.contract import phase as contract
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseController, PhaseResult
from agent_forge.contract.replay import DECISIONS, MEASUREMENTS, are_measurements
from agent_forge.pipeline.config import PipelineConfig
from agent_forge.pipeline.environment import seed_everything
from agent_forge.store import files, paths
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import STATE_FILE, read_metadata, read_state
from agent_forge.store.sessions import CONFIG_FILE, SESSION_FILE
from agent_forge.track.tracker import Tracker

log = logging.getLogger(__name__)
# Files about a model, with times and places in them.
ABOUT_MODEL = ("metadata.json", "metrics.json", "README.md", "lineage.json", "verdict.json")
# Settings that change how a phase is run, not what comes out of it.
WITHOUT_EFFECT = {"enabled", "checkpoint_every_steps", "gate_policy", "gates"}


@dataclass
class RunContext:
    """What the phases of one run share."""

    folder: Path  # its name is the session's id
    config: PipelineConfig
    device: str
    threads: int
    tracker: Tracker
    storage: ModelStorage
    should_stop: Callable[[], bool]


def run_phase(
    run: RunContext,
    controller: PhaseController,
    inputs: Sequence[ModelRef],
    check_handoff: Callable[[Sequence[ModelRef]], None],
) -> PhaseResult:
    """Run a phase, go on with it, or skip it if it is done; `check_handoff` may refuse inputs."""
    folder = paths.child(run.folder, phase_folder(controller.name))
    fingerprint = fingerprint_of(run, controller, inputs)
    state = read_state(folder)
    if state and state["fingerprint"] == fingerprint and state["status"] == "completed":
        outputs = outputs_of(folder, state)
        if outputs is not None:
            run.tracker.event("phase_skipped", phase=controller.name, reason="done already")
            artifacts = {**state["artifacts"], "models": outputs, "skipped": True}
            measured = state["metrics"], artifacts, state["seconds"]
            return PhaseResult(True, None, controller.name, *measured)
    check_handoff(inputs)
    accepted, problem = controller.validate_input(inputs)
    if not accepted:
        raise errors.HandoffRefused(f"{controller.name}: {problem}")
    plan = controller.plan(inputs)
    require_for(plan, folder, run.config)
    state = _begin(run, controller.name, folder, fingerprint, inputs)
    context = PhaseContext(
        phase=controller.name,
        session_id=run.folder.name,
        folder=folder,
        inputs=inputs,
        device=run.device,
        seed=run.config.runtime.seed,
        tracker=run.tracker,
        storage=run.storage,
        should_stop=lambda: _there(run, folder) and run.should_stop(),
        check_resources=lambda: check_during(folder, run.config),
        checkpoint_every=controller.config.checkpoint_every_steps,
        check_every=run.config.runtime.check_every_steps,
        keep_checkpoints=run.config.storage.keep_checkpoints,
        fingerprint=fingerprint,
        planned=plan.work or plan.steps,
    )
    return _work(run, controller, context, state)


def _begin(
    run: RunContext, phase: str, folder: Path, fingerprint: str, inputs: Sequence[ModelRef]
) -> dict[str, Any]:
    """Record that the phase has begun, before anything of it exists."""
    before = read_state(folder)
    goes_on = before is None or before["fingerprint"] == fingerprint
    if not goes_on:  # drop what an attempt with other settings or inputs left to go on from
        for stage in files.refuse_link(folder / paths.CHECKPOINTS).glob("*"):
            old = CheckpointManager(stage)
            old.remove(old.steps())
        for name, is_own in ((DECISIONS, files.read_checked), (MEASUREMENTS, are_measurements)):
            files.make_way(folder / name, is_own)
            files.remove(folder / name)
    state = {
        "phase": phase,
        "status": "running",
        "fingerprint": fingerprint,
        "inputs": [str(ref.path.resolve()) for ref in inputs],
        "attempts": (before["attempts"] if before and goes_on else 0) + 1,
    }
    files.write_checked(folder / STATE_FILE, state)
    run.tracker.event("phase_resumed" if before and goes_on else "phase_started", phase=phase)
    return state


def _work(
    run: RunContext, controller: PhaseController, context: PhaseContext, state: dict[str, Any]
) -> PhaseResult:
    for sink in run.tracker.sinks:
        sink.begin(controller.name, run.folder / CONFIG_FILE)
    seed_everything(run.config.runtime.seed, controller.name)
    try:
        result = controller.run(context)
        if not isinstance(result, PhaseResult):
            raise errors.PhaseFailed(f"{controller.name} returned {type(result).__name__}")
        if not result.success:
            raise errors.PhaseFailed(f"{controller.name}: {result.error or 'no reason given'}")
        told = _complete(context, result, state)
    except Exception as error:
        _record_failure(context.folder, {**state, "seconds": context.seconds}, error)
        for sink in run.tracker.sinks:
            sink.end()
        raise
    for sink in run.tracker.sinks:
        sink.tables(told)
        sink.end()
    seconds = round(result.duration_seconds, 1)
    run.tracker.event("phase_completed", phase=controller.name, seconds=seconds)
    return result


def _complete(context: PhaseContext, result: PhaseResult, state: dict[str, Any]) -> dict[str, Any]:
    """Record what came out, and return what is told of it; only then is the phase done. Old
    checkpoints have served their time."""
    outputs: list[ModelRef] = result.artifacts.setdefault("models", [])
    others = {k: v for k, v in result.artifacts.items() if k not in ("models", "all_models")}
    result.duration_seconds = context.seconds
    context.log(None, {"phase/duration_seconds": context.seconds, "phase/success": 1})
    context.tracker.metrics.sync()
    done: dict[str, Any] = {
        **state,
        "status": "completed",
        "seconds": context.seconds,
        "outputs": [{"name": ref.name, "sha256": ref.metadata["sha256"]} for ref in outputs],
        "metrics": _plain(result.metrics),
        "artifacts": _plain(others),
    }
    files.write_checked(context.folder / STATE_FILE, done)
    for stage in (context.folder / paths.CHECKPOINTS).glob("*"):
        CheckpointManager(stage, keep_last=1).prune()
    artifacts: dict[str, Any] = done["artifacts"]
    return artifacts


def _plain(value: Any) -> Any:
    """The same as JSON can hold it: numbers finite, everything unknown as its text."""
    return json.loads(json.dumps(files.finite(value), default=str))


def _record_failure(folder: Path, state: dict[str, Any], error: Exception) -> None:
    """Note the reason beside what is intact; a full disk may not even take that."""
    if not (folder / STATE_FILE).exists():  # it was removed: that is not undone
        return
    pauses = isinstance(error, errors.ForgeError) and error.pauses
    state |= {"status": "paused" if pauses else "failed", "error": f"{error!r}"}
    with contextlib.suppress(OSError, errors.ForgeError):
        files.write_checked(folder / STATE_FILE, state)


def _there(run: RunContext, folder: Path) -> bool:
    """True; where the records of the run are gone, whatever is written would belong to nothing."""
    session, state = run.folder / SESSION_FILE, folder / STATE_FILE
    if not session.exists():
        raise errors.PathDisappeared(session, hint="the session is lost; start a new one")
    if not state.exists():
        raise errors.PathDisappeared(state, hint="resume does the phase again")
    return True


def fingerprint_of(run: RunContext, controller: PhaseController, inputs: Sequence[ModelRef]) -> str:
    """sha256 of everything that the phase's result depends on (see Settings.decisive)."""
    content = {
        "phase": controller.name,
        "settings": controller.config.decisive(WITHOUT_EFFECT),
        "model": run.config.model.model_dump(mode="json", exclude_defaults=True),
        "seed": run.config.runtime.seed,
        "threads": run.threads,
        "device": run.device,
        "inputs": [_input_digest(ref) for ref in inputs],
    }
    return hashlib.sha256(files.to_json(content)).hexdigest()


def _input_digest(ref: ModelRef) -> dict[str, str]:
    """The sha256 of what a phase may read of a model: weights, config, tokenizer."""
    if (ref.path / files.MANIFEST).exists():
        records = files.reading(ref.path, lambda place: files.verify(place, content=False))
        return {n: record["sha256"] for n, record in records.items() if n not in ABOUT_MODEL}
    there = sorted(path for path in ref.path.iterdir() if path.is_file())  # of another making
    return {path.name: files.sha256_of(path) for path in there if path.name not in ABOUT_MODEL}


def outputs_of(folder: Path, state: dict[str, Any]) -> list[ModelRef] | None:
    """The models that a finished phase left, or None if one is damaged or gone."""
    models = []
    for output in state["outputs"]:
        path = folder / paths.safe_name(output["name"])
        try:
            files.reading(path, files.verify)
            metadata = read_metadata(path).model_dump()
        except (errors.DamagedFile, errors.NotFound) as error:
            log.warning("%s; the phase that made it is done again", error)
            return None
        if metadata["sha256"] != output["sha256"]:
            log.warning("%s is another model than it was; it is made again", path)
            return None
        models.append(ModelRef(output["name"], path, metadata))
    return models


def require_for(plan: contract.PhasePlan, folder: Path, config: PipelineConfig) -> None:
    """Refuse a phase that the machine cannot hold, before it starts."""
    files.require_space(folder, plan.disk_bytes + int(config.storage.reserve_disk_mb * 1e6))
    _require_memory(plan.memory_bytes, config, "close programs, or choose a smaller preset")


def check_during(folder: Path, config: PipelineConfig) -> None:
    """Pause before the machine runs out. Old checkpoints go first; the newest stays."""
    reserve = int(config.storage.reserve_disk_mb * 1e6)
    if files.free_bytes(folder) < reserve:
        for stage in (folder / paths.CHECKPOINTS).glob("*"):
            CheckpointManager(stage).make_room(reserve)
        files.require_space(folder, reserve)
    _require_memory(0, config, "close programs, then resume")


def _require_memory(needed: int, config: PipelineConfig, hint: str) -> None:
    needed += int(config.runtime.reserve_memory_mb * 1e6)
    if needed > (available := psutil.virtual_memory().available):
        text = f"not enough memory: {needed:,} bytes needed, {available:,} available"
        raise errors.NotEnough(text, hint=hint)
