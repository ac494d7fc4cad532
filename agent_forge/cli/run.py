"""`forge run`, `resume`, `stop`, `phases`: start the pipeline, go on with it, ask it to stop.

`forge init` and `validate` write and check its config.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.output import emit, emit_json, emit_table, plain, size
from agent_forge.cli.report import report_at_end
from agent_forge.cli.status import run_lines
from agent_forge.config.phases import ORDER, source_of
from agent_forge.contract.handoff import RULES
from agent_forge.errors import AlreadyExists, Cancelled, ConfigError
from agent_forge.phases import IMPLEMENTED, SUMMARY
from agent_forge.store import files, lock
from agent_forge.track.progress import MODES, make_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_forge.contract.phase import ModelRef
    from agent_forge.pipeline.config import PipelineConfig

PLANNED = ("steps", "parameters", "size_class", "disk_bytes", "memory_bytes", "notes")


def run(
    only: str | None,
    start: str | None,
    preset: str | None,
    config: Path | None,
    sets: list[str],
    models: str | None,
    session: str | None,
    storage: Path | None,
    dry_run: bool,
    progress: str,
    as_json: bool,
) -> None:
    """Run the pipeline: every enabled phase, one after another."""
    from agent_forge.pipeline.config import load_config

    _check_progress(progress)
    settings = load_config(preset=preset, path=config, sets=tuple(sets))
    if storage is not None:
        settings = _at(settings, storage)
    given = _given(models, only, Path(settings.storage.root)) if models is not None else []
    if dry_run:
        return _dry_run(settings, session, as_json, only=only, start=start, given=given)
    # The rules of a handoff are for what the phase before has made.
    foreign = any(ref.metadata.get("phase_name") != source_of(only or "") for ref in given)
    about: dict[str, Any] = {"given": given, "foreign": foreign, "session_id": session}
    _start(progress, settings, as_json, only=only, start=start, **about)


def _given(models: str, only: str | None, storage: Path) -> list[ModelRef]:
    """The models that a phase is to work on, whoever made them."""
    from agent_forge.model.locate import handed_over, locate_model
    from agent_forge.pipeline.orchestrator import reference

    if only is None:
        raise ConfigError("--models goes with --only", hint="name the phase that works on them")
    source = source_of(only)
    if only in ORDER and source is None:
        raise ConfigError(f"--models: {only} works on no models", hint="forge phases")
    names = [name.strip() for name in models.split(",")]
    if not all(names):
        raise ConfigError(f"--models {models!r} has nothing between two commas")
    places: list[str] = []
    for name in names:  # a run stands for what its phase before this one has made
        found = handed_over(name, source, storage) if source else []
        places += found or [str(Path(locate_model(name, storage)).resolve())]
    if (several := next((place for place in places if not Path(place).is_dir()), None)) is not None:
        hint = "merge them into a folder first: forge merge"
        raise ConfigError(f"--models: {several} is no folder of one model", hint=hint)
    if source and len(places) != (count := RULES[source, only].num_models):
        raise ConfigError(f"--models: {only} works on {count}, and these are {len(places)}")
    return [reference(Path(place)) for place in places]


def resume(
    session: str,
    only: str | None,
    start: str | None,
    sets: list[str],
    storage: Path,
    progress: str,
    as_json: bool,
) -> None:
    """Go on with a session where it stopped; what is done already is not done again."""
    from agent_forge.phases.phase2_evomerge.config import OUTSIDE
    from agent_forge.pipeline.config import EVOMERGE, load_config

    _check_progress(progress)
    again = [f"{EVOMERGE}{name}" for name in OUTSIDE]
    for text in sets:
        if text.partition("=")[0] not in again:
            problem = f"--set {text}: a session goes on with the settings that it was begun with"
            hint = f"only {', '.join(again)} can be named, as they were; start a new run for others"
            raise ConfigError(problem, hint=hint)
    begun = {"session_id": session, "resume": True, "sets": tuple(sets)}
    _start(progress, _at(load_config(), storage), as_json, only=only, start=start, **begun)


def _check_progress(progress: str) -> None:
    from agent_forge.config.load import did_you_mean

    if progress not in MODES:
        raise ConfigError(f"unknown --progress {progress!r}{did_you_mean(progress, MODES)}")


def _at(settings: PipelineConfig, storage: Path) -> PipelineConfig:
    """The same settings with another storage root."""
    root = settings.storage.model_copy(update={"root": str(storage.expanduser())})
    return settings.model_copy(update={"storage": root})


def stop(session: str, storage: Path) -> None:
    """Ask what is running to stop after its present step and save everything."""
    from agent_forge.phases.phase2_evomerge.config import BEGUN
    from agent_forge.pipeline.environment import request_stop
    from agent_forge.store.sessions import SessionStore

    evolution = (Path(session) / BEGUN).is_file()
    path = Path(session) if evolution else SessionStore(storage).find(session)
    if not lock.is_busy(path):
        return typer.echo(f"{session} is not running", err=True)
    request_stop(path)
    typer.echo(f"{session} will stop after its present step", err=True)


def init(folder: Path, preset: str | None, sets: list[str], force: bool, dry_run: bool) -> None:
    """Write pipeline_config.yaml and phase_configs/*.yaml, ready to edit."""
    from agent_forge.pipeline.config import config_folder, load_config

    texts = config_folder(load_config(preset=preset, sets=tuple(sets)))
    paths = {folder / name: text for name, text in texts.items()}
    if folder.exists() and not folder.is_dir():
        raise AlreadyExists(f"{folder} exists and is not a folder", hint="name another one")
    existing = [path for path in paths if path.exists() or path.is_symlink()]
    if existing and not force:
        raise AlreadyExists(f"{existing[0]} exists", hint="--force overwrites it")
    for path, text in paths.items():
        if not dry_run:
            files.write_bytes(path, text.encode())
    for path in paths:
        print(path)


def validate(path: Path | None, preset: str | None, sets: list[str], as_json: bool) -> None:
    """Check a config and print it as it would be used, with its hash."""
    from agent_forge.config.load import to_yaml
    from agent_forge.pipeline.config import load_config

    config = load_config(preset=preset, path=path, sets=tuple(sets))
    digest, parameters = config.canonical_hash(), config.model.parameters()
    if as_json:
        content = config.model_dump(mode="json")
        return emit_json(valid=True, config_hash=digest, parameters=parameters, config=content)
    print(to_yaml(config), end="")
    typer.echo(f"valid, hash {digest[:12]}, {parameters:,} weights a model", err=True)


def phases(as_json: bool) -> None:
    """List the phases: what each does, and whether this version has it."""
    rows = [
        {"number": n, "phase": name, "available": name in IMPLEMENTED, "summary": SUMMARY[name]}
        for n, name in enumerate(ORDER)
    ]
    cells = [(n, p, "yes" if there else None, text) for n, p, there, text in map(dict.values, rows)]
    emit(as_json, ("", "phase", "available", "what it does"), cells, phases=rows)


def _start(progress: str, config: PipelineConfig, as_json: bool, **options: Any) -> None:
    """Run with a display, print the outcome, and leave with its exit code."""
    outcome = conduct(progress, config, **options)
    root = Path(config.storage.root)
    page = report_at_end(root, outcome)
    _report(root, outcome, as_json, page)
    if progress != "json":
        advise(root, outcome, page)
    if outcome["exit_code"]:
        raise typer.Exit(outcome["exit_code"])


def conduct(
    progress: str,
    config: PipelineConfig,
    *,
    only: str | None = None,
    start: str | None = None,
    given: Sequence[ModelRef] = (),
    foreign: bool = False,
    **session: Any,  # session_id, resume, sets
) -> dict[str, Any]:
    """Run the pipeline with a display. What is left at once can go on if it has a session."""
    orchestrator = None
    try:
        from agent_forge.pipeline.orchestrator import PipelineOrchestrator

        orchestrator = PipelineOrchestrator(config=config, **session)
        with make_progress(progress) as display:
            how: dict[str, Any] = {"input_models": given, "foreign": foreign} if given else {}
            return orchestrator.run(only=only, start=start, listeners=[display], **how)
    except KeyboardInterrupt:
        name = orchestrator.session_id if orchestrator else session.get("session_id")
        if not name or not _record(Path(config.storage.root), name).is_file():
            raise Cancelled("interrupted: nothing was begun") from None
        ended = {"status": "interrupted", "error": "left at once", "hint": "", "exit_code": 130}
        return {"success": False, "session_id": name, **ended, "results": {}}


def _record(root: Path, session: str) -> Path:
    """The file that a session has from its beginning on."""
    from agent_forge.store.sessions import SESSION_FILE, SessionStore

    return SessionStore(root).path(session) / SESSION_FILE


def _report(root: Path, outcome: dict[str, Any], as_json: bool, page: Path | None) -> None:
    results = outcome["results"].items()
    skipped = [name for name, result in results if result.artifacts.get("skipped")]
    if not as_json:
        record = _record(root, outcome["session_id"])
        for line in run_lines(record.parent, skipped) if record.is_file() else []:
            print(plain(line))
        return
    rows = [
        {
            "phase": name,
            "skipped": name in skipped,
            "seconds": result.duration_seconds,
            "metrics": result.metrics,
            "models": [str(ref.path) for ref in result.artifacts["models"]],
            "summary": result.artifacts.get("summary", ""),
            "tables": result.artifacts.get("tables", []),
        }
        for name, result in results
    ]
    kept = ("success", "session_id", "status", "error", "failed_phase", "failed_handoff")
    emit_json(**{k: outcome[k] for k in kept if k in outcome}, phases=rows, report=page)


def advise(root: Path, outcome: dict[str, Any], page: Path | None = None) -> None:
    """Print the last lines, on stderr: how it ended and the next command."""
    session = named(root, outcome["session_id"])
    lines = [f"report: {page}"] if page else []
    if outcome["success"]:
        models = [ref for r in outcome["results"].values() for ref in r.artifacts["models"]]
        if models and (models[-1].path / "tokenizer.json").is_file():
            path = shlex.quote(str(models[-1].path))
            lines += [f"talk to it: forge chat {path}", f"measure it: forge eval {path}"]
        lines += [f"all metrics: forge status {session} --metrics"]
        lines += [f"done; next: forge show {session}"]
    else:
        lines += [f"{outcome['status']}: {outcome['error']}"]
        record = _record(root, outcome["session_id"])
        if record.is_file():
            saved = sorted(record.parent.glob("*/checkpoints/*/step_*"), key=lambda p: p.name)
            last = f"everything up to {saved[-1].name}" if saved else ""
            lines += [f"intact: {last or 'there was nothing to save yet'}"]
        if outcome["hint"]:
            lines += [f"hint: {outcome['hint']}"]
        if record.is_file():
            command = "logs" if outcome["status"] == "failed" else "resume"
            lines += [f"next: forge {command} {session}"]
    typer.echo("\n".join(lines), err=True)


def named(root: Path, session: str) -> str:
    """A session as commands take it: with its storage unless that is the usual one."""
    return session if str(root) == "storage" else f"{session} --storage {shlex.quote(str(root))}"


def _dry_run(settings: PipelineConfig, session: str | None, as_json: bool, **chosen: Any) -> None:
    """Print what would run, with its needs; nothing is created."""
    from agent_forge.pipeline.orchestrator import PipelineOrchestrator

    plans = PipelineOrchestrator(config=settings, session_id=session).plan(**chosen)
    digest = settings.canonical_hash()
    free = files.free_bytes(Path(settings.storage.root).resolve())
    if as_json:
        rows = [{"phase": n, **{k: getattr(p, k) for k in PLANNED}} for n, p in plans.items()]
        config = settings.model_dump(mode="json")
        return emit_json(config_hash=digest, phases=rows, free_bytes=free, config=config)
    cells = []
    for name, plan in plans.items():
        needs = (size(plan.disk_bytes), size(plan.memory_bytes))
        cells.append((name, plan.steps, plan.parameters, plan.size_class, *needs))
    emit_table(("phase", "steps", "parameters", "size class", "disk", "memory"), cells)
    typer.echo(f"config {digest[:12]}, {size(free)} free", err=True)
