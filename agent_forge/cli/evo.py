"""`forge evo`: evolve models into one, and say whether it is better."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.merge import whole_or_nothing
from agent_forge.cli.output import emit_json, emit_table
from agent_forge.cli.run import conduct, named
from agent_forge.errors import Cancelled, ConfigError, Interrupted, NotFound, PhaseFailed
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.phases.phase2_evomerge.documents import RunPlace
    from agent_forge.phases.phase2_evomerge.evolution import EvolutionResult
    from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs

SPECIALISTS = 3  # of Phase 1
BESIDE_RESUME = (
    "beside it only --gens, --time-budget, --heal and --device can be given; for a branch from a"
    " checkpoint --output-dir and --seed too"
)
DEFAULT_MINUTES, QUICK_MINUTES = 60.0, 3.0  # where nothing else bounds it; without models
QUICK = "trunk_steps=400 branch_steps=80 control=false evaluation_items=300 min_diversity=0.0"


def evo(
    context: typer.Context,
    base_models: str,
    base: str | None,
    data: list[Path],
    gens: int | None,
    output_dir: Path | None,
    config: str | None,
    sets: list[str],
    resume: Path | None,
    time_budget: float | None,
    heal: float | None,
    heal_data: list[Path],
    device: str,
    seed: int | None,
    replicates: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Evolve models into one. Without arguments: the newest Phase 1, or three small ones first."""
    if context.invoked_subcommand:
        return
    if resume is not None:
        if base_models or base or data or heal_data or config or replicates:
            raise ConfigError("--resume goes on with what it was begun with", hint=BESIDE_RESUME)
        again = {"gens": gens, "minutes": time_budget, "heal": heal}
        branch = output_dir, seed
        return _go_on(resume, branch, sets, again, device, dry_run, as_json)
    options: dict[str, Any] = {"generations": gens, "time_budget_minutes": time_budget}
    options |= {"replicates": replicates, "heal": heal, "data": [*map(str, data)] or None}
    options |= {"heal_data": [*map(str, heal_data)] or None}
    options = {key: value for key, value in options.items() if value is not None}
    storage = Path(os.environ.get("FORGE_STORAGE", "storage"))
    refs = [ref.strip() for ref in base_models.split(",")] if base_models.strip() else []
    if not all(refs):
        raise ConfigError(f"--base-models {base_models!r} has nothing between two commas")
    with _interruptible(output_dir or Path("evomerge"), dry_run):
        from agent_forge.phases.phase2_evomerge import inputs

        settings, place = inputs.load_settings(config, sets, options)
        folder, known = output_dir or Path(place.output_dir), place.base_models
        names = [] if refs else [model.told for model in known]
        refs = refs or [model.path for model in known]
        found_device = _device(device if device != "auto" else place.measured_on)
        minutes = DEFAULT_MINUTES if refs else QUICK_MINUTES
        settings = inputs.with_default_budget(settings, folder, minutes)
        if not refs:
            inputs.check_before_models(settings, folder, SPECIALISTS)
    if not refs:
        refs = [_session_to_evolve(storage, device, as_json, dry_run)]
    began = time.monotonic()
    with _interruptible(folder, dry_run):
        seed = place.seed if seed is None else seed
        models = settings, refs, base or place.base, seed, folder, storage, names
        _run(inputs.locate_inputs(*models), place, found_device, dry_run, as_json, began)


def _go_on(
    resume: Path,
    branch: tuple[Path | None, int | None],
    sets: list[str],
    again: dict[str, Any],
    device: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """`--resume`: settings are those of the folder; what reaches outside has to be named again. A
    checkpoint that others followed has a new folder to go on in."""
    outside = [text for text in sets if text.startswith(("fitness=", "cluster="))]
    mirror = [text for text in sets if text.startswith("wandb_")]
    if {*sets} - {*outside, *mirror}:
        raise ConfigError("--resume goes on with what it was begun with", hint=BESIDE_RESUME)
    from agent_forge.phases.phase2_evomerge.checkpoints import continued

    given, (target, seed) = resume, branch
    resume = continued(given, target, seed, only_look=dry_run)
    if resume.is_dir() and resume != given and not as_json:
        typer.echo(f"going on in {resume}", err=True)
    with _interruptible(resume if resume.is_dir() else resume.parent, dry_run):
        from agent_forge.phases.phase2_evomerge import inputs

        begun = str(inputs.find_evolution(resume)[1].get("device", device))
        found_device = _device(begun if device == "auto" else device)
        found = inputs.resume_inputs(resume, sets=outside, **again)
        place = inputs.load_settings(None, mirror, {})[1]
        _run(found, place, found_device, dry_run, as_json, time.monotonic())


@contextlib.contextmanager
def _interruptible(folder: Path, dry_run: bool) -> Iterator[None]:
    """End an interrupt with the command that goes on, if the folder holds what can go on."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        from agent_forge.phases.phase2_evomerge.config import BEGUN

        if dry_run or not (folder / BEGUN).is_file():
            raise Cancelled("interrupted: nothing was begun") from None
        why = str(error) if isinstance(error, Interrupted) else "left at once"
        problem = f"paused: {why}; what was measured is saved"
        raise Interrupted(problem, hint=f"forge evo --resume {shlex.quote(str(folder))}") from None


def _run(
    inputs: EvolutionInputs,
    place: RunPlace,
    device: str,
    dry_run: bool,
    as_json: bool,
    began: float,
) -> None:
    """The evolution, or what it would be. From when it has begun a signal is a request to stop."""
    if dry_run:
        from agent_forge.phases.phase2_evomerge.planning import decided

        return _plan(decided(inputs, device, time.monotonic() - began), as_json)
    from agent_forge.phases.phase2_evomerge.evolution import run_evolution
    from agent_forge.phases.phase2_evomerge.mirror import mirrored
    from agent_forge.pipeline.environment import StopSignals

    with contextlib.ExitStack() as stack:
        display = stack.enter_context(make_progress("none" if as_json else "auto"))
        stopper = StopSignals(inputs.folder, display.ask_stop)

        def listen(record: dict[str, Any]) -> None:
            if record["event"] == "result":  # the report tells it
                return
            if record["event"] == "begun":
                stack.enter_context(stopper.on_signals())
            with contextlib.suppress(OSError):  # the terminal is gone: the work goes on
                display(record)

        both = stack.enter_context(mirrored(listen, place, inputs.settings, inputs.folder))
        how: Any = {"listen": both, "should_stop": stopper, "device": device}
        _report(run_evolution(inputs, **how, spent_s=time.monotonic() - began), as_json)


def _device(device: str) -> str:
    from agent_forge.config.load import validate
    from agent_forge.config.settings import RuntimeSettings
    from agent_forge.pipeline.environment import prepare, thread_count

    wanted = {"device": device, "threads": thread_count()}  # as OMP_NUM_THREADS has it
    return prepare(validate(RuntimeSettings, wanted, "--device"))


def replay(lineage: Path, target: Path, as_json: bool) -> None:
    """Make a champion again from its parents, byte by byte."""
    with whole_or_nothing(target) as progress:
        from agent_forge.phases.phase2_evomerge.evolution import replay as make_again

        written = make_again(lineage, target, progress)
        if as_json:
            return emit_json(folder=str(target), sha256=written)
        print(f"{target}: {written}")


def _session_to_evolve(storage: Path, device: str, quiet: bool, dry_run: bool) -> str:
    """The newest run with specialists; without any, three small ones are trained first."""
    from agent_forge.model.locate import newest_session
    from agent_forge.pipeline.config import load_config

    session = newest_session(storage)
    if session is None and dry_run:
        problem = f"there are no models yet: {storage} has no run that finished Phase 1"
        hint = "without --dry-run three small ones are trained first; or give --base-models"
        raise NotFound(problem, hint=hint)
    if session is None:  # a short Phase 1, about a minute and a half on two cores
        if not quiet:
            typer.echo("no models given: training three small specialists first", err=True)
        sets = [f"phases.cognate.{change}" for change in QUICK.split()]
        sets += [f"runtime.device={device}", f"storage.root={storage}"]
        settings = load_config(preset="tiny", sets=tuple(sets))
        outcome = conduct("none" if quiet else "auto", settings, only="cognate")
        session = str(outcome["session_id"])
        if outcome["exit_code"] == Interrupted.exit_code:
            problem = f"{outcome['status']}: {outcome['error']} of training three specialists"
            hint = f"forge resume {named(storage, session)}, then forge evo again"
            raise Interrupted(problem, hint=hint)
        if not outcome["success"]:
            raise PhaseFailed(str(outcome["error"]), hint=str(outcome["hint"]))
    if not quiet:
        typer.echo(f"evolving the specialists of {session}", err=True)
    return session


def _plan(inputs: EvolutionInputs, as_json: bool) -> None:
    from agent_forge.phases.phase2_evomerge import planning

    inputs.require_room()
    settings, parents, splits = inputs.settings, list(inputs.parent_refs), inputs.splits
    record = {
        "parents": parents,
        "base": inputs.base_ref,
        "seed": inputs.seed,
        "output_dir": str(inputs.folder),
        "strategy": settings.strategy,
        "generations": settings.generations,
        "replicates": settings.replicates,
        "candidates": settings.planned(len(parents)),
        "items": {s: {d.name: len(d.examples) for d in domains} for s, domains in splits.items()},
        "near_copies": {d.name: d.near_copies for d in splits.get("verdict", ()) if d.near_copies},
        "disk_bytes": inputs.disk_bytes,
        **planning.plan_record(inputs),
        "notes": list(inputs.notes),
    }
    if as_json:
        return emit_json(**record)
    for key, value in record.items():
        print(f"{key}: {json.dumps(value) if isinstance(value, dict) else value}")
    print("\n".join(planning.plan_lines(inputs)))


def _report(result: EvolutionResult, as_json: bool) -> None:
    loop, report, model, healed = result
    if as_json:
        paths = {"folder": str(loop.folder), "champion": str(model.path)}
        ended = {"generations": len(loop.curve) - 1, "reason": loop.reason}
        fitness = loop.search.scores[loop.champion.key]
        measured: dict[str, Any] = {"fitness": fitness, "curve": loop.curve}
        measured["healing"] = healed.record if healed else None
        return emit_json(**paths, **ended, **measured, verdict=report.to_json() if report else None)
    from agent_forge.phases.phase2_evomerge.evolution import plot

    print(f"champion: {model.path} ({loop.technique}); ended: {loop.reason}")
    print(f"fitness over generations: {plot(loop.curve)}")
    if report is None:
        return print("no verdict: there are no unseen items beside your own fitness")
    last = [healed.sentence(loop.folder)] if healed else []
    emit_table(("on unseen items", "fitness", *report.champion.raw), report.rows())
    print("\n".join([*report.sentences(), *report.notes(), *last]), flush=True)
