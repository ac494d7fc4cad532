"""PipelineOrchestrator: plan the phases of a run, run them, hand over, stop, pause and resume.

The core is synchronous and belongs in the main thread (signals arrive there); the `async` methods
of the specification run it in a worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from agent_forge import errors
from agent_forge.config.load import did_you_mean, merge, read_one, to_yaml, validate
from agent_forge.config.phases import ORDER, PHASES, phase_folder, source_of
from agent_forge.contract.handoff import ModelHandoffValidator
from agent_forge.contract.phase import ModelRef, Network, PhaseController, PhasePlan, PhaseResult
from agent_forge.phases import IMPLEMENTED, load_phase
from agent_forge.phases.phase2_evomerge.config import refuse_outside
from agent_forge.pipeline.config import BEFORE, EVOMERGE, PipelineConfig, load_config
from agent_forge.pipeline.environment import StopSignals, prepare, snapshot, thread_count, versions
from agent_forge.pipeline.given import save_inputs
from agent_forge.pipeline.phase_run import RunContext, outputs_of, require_for, run_phase
from agent_forge.store.cleanup import SessionCleanupManager
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import learned_record, read_state
from agent_forge.store.sessions import CONFIG_FILE, SESSION_FILE, SessionStore, read_session
from agent_forge.track.logs import logging_to
from agent_forge.track.tracker import Listener, Tracker, sampling
from agent_forge.track.wandb_sink import WandbSink

log = structlog.stdlib.get_logger(__name__)
early = logging.getLogger(__name__)  # before a run has its log: warnings go to stderr
REGISTRY_EVERY_S = 1.0
FIRST_PHASES = ("toy", "cognate", "evomerge")  # of runs that did not note which there were
PhaseResults = dict[str, PhaseResult]


class PipelineOrchestrator:
    """Runs the phases of one session, in order, from wherever it stands."""

    PHASE_SEQUENCE = PHASES

    def __init__(
        self,
        config_path: Path | str | None = None,
        *,
        config: PipelineConfig | None = None,
        session_id: str | None = None,
        resume: bool = False,
        listeners: Sequence[Listener] = (),
        controllers: Mapping[str, type[PhaseController]] | None = None,
        sets: Sequence[str] = (),
    ) -> None:
        self.config = config or load_config(path=None if config_path is None else Path(config_path))
        self.sessions = SessionStore(self.config.storage.root)
        self.session_id = session_id
        self.stopper = StopSignals()
        self._resume = resume
        self._listeners = tuple(listeners)
        self._controllers = controllers
        if resume:
            self.config = saved_config(self.sessions, session_id or "", sets)

    def phase_names(self, only: str | None = None, start: str | None = None) -> list[str]:
        """The phases that a run would go through, after a check of the names given."""
        for name in (only, start):
            if name is not None and name not in ORDER:
                raise errors.ConfigError(f"unknown phase {name!r}{did_you_mean(name, ORDER)}")
        if only and start:
            text = "--only and --from contradict each other"
            raise errors.ConfigError(text, hint="name one of them")
        enabled = [name for name in ORDER if getattr(self.config.phases, name).enabled]
        if start and start not in enabled:
            raise errors.ConfigError(f"phase {start!r} is not enabled in this config")
        asked = [only] if only else enabled[enabled.index(start) :] if start else enabled
        available = self._controllers or IMPLEMENTED
        missing = [name for name in asked if name not in available]
        names = [name for name in asked if name in available]
        if names and missing:
            early.warning("not in this version yet: %s", ", ".join(missing))
        if not names:
            absent = ", ".join(missing) or "any enabled phase"
            hint = "forge phases shows what there is; forge run --preset toy works"
            raise errors.ConfigError(f"this version does not have {absent} yet", hint=hint)
        return names

    def controller(self, name: str) -> PhaseController:
        cls = self._controllers[name] if self._controllers else load_phase(name)
        return cls(getattr(self.config.phases, name), self.config)

    def plan(
        self, only: str | None = None, start: str | None = None, given: Sequence[ModelRef] = ()
    ) -> dict[str, PhasePlan]:
        """What each phase would do, after a check of all that a new run could be refused for."""
        names = self.phase_names(only, start)
        self.sessions.check_new(self.session_id)
        if not given and (source := source_of(names[0])):
            text = f"{source} -> {names[0]}: a new session has no models of {source}"
            hint = f"begin with {source}, name them (--models), or forge resume a session with them"
            raise errors.HandoffRefused(text, hint=hint)
        prepare(self.config.runtime)
        plans = {name: self.controller(name).plan(()) for name in names}  # no models yet
        for name, plan in plans.items():
            require_for(plan, self.sessions.root / name, self.config)
        return plans

    def run(
        self,
        *,
        only: str | None = None,
        start: str | None = None,
        input_models: Sequence[ModelRef] | None = None,
        foreign: bool = False,
        listeners: Sequence[Listener] = (),
    ) -> dict[str, Any]:
        """Run the phases; the result tells success, what was done, and how a failure came about.
        Of `foreign` input models the rules of a handoff are not asked: no phase before made them.
        """
        begun = read_session(self.sessions.find(self.session_id or "")) if self._resume else {}
        foreign = foreign or begun.get("asked", {}).get("foreign", False)
        there = None  # the phases that there were when it began, if it goes on with those
        if self._resume and not (only or start):
            asked = begun.get("asked", {})
            only, start = asked.get("only"), asked.get("start")
            there = asked.get("phases", FIRST_PHASES)
        names = [n for n in self.phase_names(only, start) if there is None or n in there]
        self._listeners = (*self._listeners, *listeners)
        cores = begun.get("environment", {}).get("cores")  # other threads would give other bits
        device = prepare(self.config.runtime, cores)
        if not self._resume:  # what cannot be done is refused before there is a session
            self.sessions.check_new(self.session_id)
            for name in names:
                self.controller(name).plan(())
            asked = {"only": only, "start": start, "phases": names}
            asked |= {"foreign": True} if foreign else {}
            asked |= {"models": [str(r.path.resolve()) for r in input_models or ()]}
            self.session_id = self._new_session(asked)
        folder = self.sessions.find(self.session_id or "")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sessions.open(folder.name))
            tracker = self._tracker(folder, names)
            stack.enter_context(logging_to(folder, self.config.tracking.log_level, tracker.tell))
            stack.enter_context(self.stopper.on_signals())
            self.stopper.folder = folder
            machine = device, thread_count()
            run = RunContext(folder, self.config, *machine, tracker, self.storage, self.stopper)
            self._warn_of_other_versions(folder)
            for sink in tracker.sinks:
                stack.callback(sink.close)
            stack.enter_context(sampling(tracker, folder, self.config.tracking.sample_every_s))
            return self._run_all(run, names, input_models, checks=not foreign)

    async def run_full_pipeline(self) -> dict[str, Any]:
        """The specification's entry: all enabled phases, off the event loop."""
        return await self._off_the_loop()

    async def _off_the_loop(self, **options: Any) -> dict[str, Any]:
        """Run in a worker thread; cancelling asks the run to stop after its step."""
        try:
            return await asyncio.to_thread(self.run, **options)
        except asyncio.CancelledError:
            self.stopper.request()
            raise

    async def run_single_phase(
        self, phase_name: str, input_models: Sequence[ModelRef | Network] | None = None
    ) -> PhaseResult:
        """One phase alone; its inputs are given or come from this session. Networks in memory are
        saved first, in a session of their own, and no rules of a handoff are asked of them."""
        refs, options = input_models, dict[str, Any]()
        if not all(isinstance(own, ModelRef) for own in input_models or ()):
            refs = save_inputs(self, phase_name, input_models or ())
            options["foreign"] = True
        outcome = await self._off_the_loop(only=phase_name, input_models=refs, **options)
        failed = PhaseResult(False, None, phase_name, {}, {}, 0.0, outcome["error"])
        result: PhaseResult = outcome["results"].get(phase_name, failed)
        return result

    def _new_session(self, asked: Mapping[str, Any]) -> str:
        SessionCleanupManager(self.sessions, self.config.cleanup_policy).cleanup_old_sessions()
        details = {"config_hash": self.config.canonical_hash(), "environment": snapshot()}
        details |= {"asked": dict(asked)}
        config = self.config.model_dump(mode="json"), to_yaml(self.config)
        return self.sessions.create(*config, session_id=self.session_id, details=details).name

    def _run_all(
        self,
        run: RunContext,
        names: Sequence[str],
        given: Sequence[ModelRef] | None,
        checks: bool = True,
    ) -> dict[str, Any]:
        import torch

        results: PhaseResults = {}
        current = ""
        self.sessions.set_status(run.folder.name, "running")
        begun = "run_resumed" if self._resume else "run_started"
        run.tracker.event(begun, session=run.folder.name, phases=" ".join(names))
        try:
            for current in names:
                if self.stopper():
                    raise errors.Interrupted(f"stopped before phase {current}")
                inputs = self._inputs(run, current, results) if given is None else list(given)
                check = functools.partial(self._check_handoff if checks else _accept, run, current)
                results[current] = run_phase(run, self.controller(current), inputs, check)
                given = None
        except errors.ForgeError as error:
            return self._outcome(run, results, current, error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return self._outcome(run, results, current, errors.NotEnough(f"out of memory: {error}"))
        except Exception as error:
            with contextlib.suppress(OSError, errors.ForgeError):
                self._end(run, "failed", f"unexpected {type(error).__name__}: {error}")
            raise
        return self._outcome(run, results, current, None)

    def _outcome(
        self, run: RunContext, results: PhaseResults, phase: str, error: errors.ForgeError | None
    ) -> dict[str, Any]:
        """How the run ended; disk, memory and requests only pause it."""
        status = "completed" if error is None else "paused" if error.pauses else "failed"
        try:
            self._end(run, status, str(error or ""))
        except (OSError, errors.ForgeError) as problem:
            if error is None:  # a run whose end could not be recorded has not ended
                lost: errors.ForgeError = errors.PathDisappeared(run.folder)
                if (run.folder / SESSION_FILE).exists():
                    lost = errors.CannotWrite(run.folder, f"the end of the run ({problem})")
                return self._outcome(run, results, phase, lost)
            log.warning("could not record how the run ended", problem=str(problem))
        outcome: dict[str, Any] = {
            "success": error is None,
            "session_id": run.folder.name,
            "status": status,
            "error": str(error or ""),
            "hint": error.hint if error else "",
            "exit_code": error.exit_code if error else 0,
            "completed_phases": list(results),
            "results": results,
        }
        if error is None:
            return {**outcome, "final_model": results[phase].model}
        if isinstance(error, errors.HandoffRefused):
            return {**outcome, "failed_handoff": f"{source_of(phase) or 'input'} -> {phase}"}
        return {**outcome, "failed_phase": phase}

    def _end(self, run: RunContext, status: str, error: str) -> None:
        """Record how it ended, in the directory first; then tidy up, if that works."""
        details, session_id = {"error": error} if error else {}, run.folder.name
        self.sessions.set_status(session_id, status)
        run.tracker.event(f"run_{status}", session=session_id, **details)
        log.info("run ended", status=status, **details)
        if status != "completed" or self._resume:  # what a session says may not clean others
            return
        try:
            self.sessions.registry.update_session(session_id, progress_percent=100)
            SessionCleanupManager(self.sessions, self.config.cleanup_policy).tidy_up(session_id)
        except (OSError, errors.ForgeError) as problem:
            log.warning("could not tidy up after the run", problem=str(problem))

    def _warn_of_other_versions(self, folder: Path) -> None:
        """A resumed run is only promised to be equal under the versions that began it."""
        before = read_session(folder).get("environment", {}).get("packages", {})
        changed = [name for name, version in before.items() if versions().get(name) != version]
        if changed:
            log.warning("versions have changed since the run began", packages=changed)

    def _inputs(self, run: RunContext, phase: str, results: PhaseResults) -> list[ModelRef]:
        """The models of the phase before, or those that were given at the first start."""
        source = source_of(phase)
        if source is None:
            return []
        if source in results:
            return list(results[source].artifacts["models"])
        folder = run.folder / phase_folder(source)
        state = read_state(folder)
        if state and state["status"] == "completed":
            return outputs_of(folder, state) or []
        own = read_state(run.folder / phase_folder(phase)) or {}
        places = own.get("inputs") or read_session(run.folder).get("asked", {}).get("models", [])
        return [reference(Path(place)) for place in places]

    def _check_handoff(self, run: RunContext, target: str, models: Sequence[ModelRef]) -> None:
        """Apply the rules of the handoff, record the result, and raise if it did not pass."""
        source = source_of(target)
        if source is None:
            return
        weights, metadata = [ref.weights() for ref in models], [ref.metadata for ref in models]
        result = self.handoff_validator.check(source, target, weights, metadata)
        record: dict[str, Any] = {"validation_status": "passed" if result.passed else "failed"}
        record |= {"validation_metrics": {**result.measured, "message": result.message}}
        for ref in models:
            with contextlib.suppress(errors.NotFound):  # a model from elsewhere is in no registry
                self.sessions.registry.record_handoff(ref.metadata["model_id"], target, **record)
        details = {"measured": result.measured, "warnings": result.warnings}
        run.tracker.event("handoff", phase=target, source=source, passed=result.passed, **details)
        if not result.passed:
            hint = f"forge resume {run.folder.name} --from {source} makes its models anew"
            raise errors.HandoffRefused(f"{source} -> {target}: {result.message}", hint=hint)

    @property
    def phases(self) -> dict[str, PhaseController]:
        """The controllers of all eight phases, by name."""
        return {name: self.controller(name) for name in self.PHASE_SEQUENCE}

    @functools.cached_property
    def storage(self) -> ModelStorage:
        """Where its models are; it saves and loads our networks."""
        ways = _network_of, _config_of
        return ModelStorage(self.sessions.root, self.sessions.registry, *ways)

    @property
    def handoff_validator(self) -> ModelHandoffValidator:
        """The handoff rules with this config's thresholds and policies."""
        thresholds = {name: settings.gates for name, settings in self.config.phases}
        policies = {name: settings.gate_policy for name, settings in self.config.phases}
        return ModelHandoffValidator(thresholds=thresholds, policies=policies)

    def _tracker(self, folder: Path, names: Sequence[str]) -> Tracker:
        listeners = (*self._listeners, self._registry_listener(folder.name, names))
        tracker, tracking = Tracker(folder, listeners), self.config.tracking
        if tracking.wandb_enabled:
            tracker.sinks.append(WandbSink(folder, tracking, self.config.model_dump(mode="json")))
        return tracker

    def _registry_listener(self, session_id: str, names: Sequence[str]) -> Listener:
        """Keep phase and progress in the registry, at most once a second."""
        last = 0.0

        def listen(record: dict[str, Any]) -> None:
            nonlocal last
            if record["event"] in ("phase_completed", "phase_skipped"):
                last = 0.0
            elif record["event"] != "step" or time.monotonic() - last < REGISTRY_EVERY_S:
                return
            last = time.monotonic()
            phase, done, left = record["phase"], record.get("done", 1), record.get("left", 0)
            share = (list(names).index(phase) + done / (done + left)) / len(names)
            progress = {"current_phase": phase, "progress_percent": min(100.0, 100 * share)}
            self.sessions.registry.update_session(session_id, **progress)

        return listen


def _network_of(config: dict[str, Any]) -> Network:
    from agent_forge.model.hf import build_network  # transformers takes seconds to load

    return build_network(config)


def _config_of(network: Network) -> dict[str, Any]:
    from agent_forge.model.hf import config_of

    return config_of(network)


def reference(place: Path) -> ModelRef:
    """A model in a folder, with what its record says, if it has one."""
    return ModelRef(place.name, place, learned_record(place))


def _accept(run: RunContext, target: str, models: Sequence[ModelRef]) -> None:
    """Take models as they are; that they open is checked as they are opened."""


def saved_config(sessions: SessionStore, session: str, sets: Sequence[str] = ()) -> PipelineConfig:
    """The config that a session was started with; the storage root is where it is found now.

    session.json has it under a checksum. config.yaml beside it is for people; one that was edited
    is refused, since what is done already was done with other settings.
    """
    folder = sessions.find(session)
    record = merge(BEFORE, read_session(folder)["config"])
    moved = {"storage": {**record.get("storage", {}), "root": str(sessions.root)}}
    config = validate(PipelineConfig, {**record, **moved}, str(folder))
    refuse_outside(config.phases.evomerge.model_dump(), f"session {session}", sets, EVOMERGE)
    path = folder / CONFIG_FILE
    try:
        given = merge(BEFORE, read_one(path))
        edited = validate(PipelineConfig, given, str(path)).model_dump(mode="json")
    except (errors.ConfigError, OSError) as error:
        early.warning("%s; session.json has the config too", error)
        return config
    begun = validate(PipelineConfig, record, str(folder)).model_dump(mode="json")
    changed = _differences(begun, edited)  # both with the defaults of settings that came later
    if changed:
        hint = f"start a new run with it: forge run --config {path}"
        text = f"{path} was edited since the run began: {', '.join(changed)}"
        raise errors.ConfigError(text, hint=hint)
    return config


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], above: str = "") -> list[str]:
    """The keys, with dots, whose values differ."""
    keys = []
    for key in sorted({*one, *other}):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            keys += _differences(a, b, f"{above}{key}.")
        elif a != b:
            keys.append(f"{above}{key}")
    return keys
