"""`forge run`, `resume`, `stop` and `phases`: start the pipeline, go on with it, ask it to stop."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.config import JSON, PRESET, SETS
from agent_forge.cli.output import emit_json, emit_table, plain, size
from agent_forge.cli.runs import STORAGE

if TYPE_CHECKING:
    from agent_forge.pipeline.config import PipelineConfig

PROGRESS = typer.Option(
    "auto", "--progress", help="auto, bars, plain, json or none; goes to stderr."
)
ONLY = typer.Option(None, "--only", metavar="PHASE", help="Run this phase alone.")
EVOLUTION = "evolution.json"  # in the folder of an evolution that can be resumed
FROM = typer.Option(None, "--from", metavar="PHASE", help="Begin with this phase.")


def run(
    only: str | None = ONLY,
    start: str | None = FROM,
    preset: str | None = PRESET,
    config: Path | None = typer.Option(None, "--config", help="YAML or JSON file, or folder."),
    sets: list[str] = SETS,
    session: str | None = typer.Option(None, "--session", help="A name for the new session."),
    storage: Path | None = typer.Option(
        None, "--storage", envvar="FORGE_STORAGE", help="The storage root (storage.root)."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would happen."),
    progress: str = PROGRESS,
    as_json: bool = JSON,
) -> None:
    """Run the pipeline: every enabled phase, one after another."""
    from agent_forge.pipeline.config import load_config

    _check_progress(progress)
    settings = load_config(preset=preset, path=config, sets=tuple(sets))
    if storage is not None:
        settings = _at(settings, storage)
    if dry_run:
        _dry_run(settings, session, only, start, as_json)
        return
    _start(progress, as_json, only=only, start=start, config=settings, session_id=session)


def resume(
    session: str = typer.Argument(help="A session id; `forge ls` shows them."),
    only: str | None = ONLY,
    start: str | None = FROM,
    sets: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Only a fitness of your own, named again."
    ),
    storage: Path = STORAGE,
    progress: str = PROGRESS,
    as_json: bool = JSON,
) -> None:
    """Go on with a session where it stopped; what is done already is not done again."""
    from agent_forge.errors import ConfigError
    from agent_forge.pipeline.config import FITNESS, load_config

    _check_progress(progress)
    for text in sets:
        if not text.startswith(f"{FITNESS}="):
            raise ConfigError(
                f"--set {text}: a session goes on with the settings that it was begun with",
                hint=f"only {FITNESS} can be named, and as it was; start a new run for others",
            )
    root = _at(load_config(), storage)
    options: dict[str, Any] = {"session_id": session, "resume": True, "sets": tuple(sets)}
    _start(progress, as_json, only=only, start=start, config=root, **options)


def _at(settings: PipelineConfig, storage: Path) -> PipelineConfig:
    """The same settings with another storage root."""
    root = settings.storage.model_copy(update={"root": str(storage.expanduser())})
    return settings.model_copy(update={"storage": root})


def stop(
    session: str = typer.Argument(help="A session id, or the folder of an evolution."),
    storage: Path = STORAGE,
) -> None:
    """Ask what is running to stop after its present step and save everything."""
    from agent_forge.pipeline.environment import request_stop
    from agent_forge.store import lock
    from agent_forge.store.sessions import SessionStore

    evolution = (Path(session) / EVOLUTION).is_file()
    path = Path(session) if evolution else SessionStore(storage).find(session)
    if not lock.is_busy(path):
        typer.echo(f"{session} is not running", err=True)
        return
    request_stop(path)
    typer.echo(f"{session} will stop after its present step", err=True)


def phases(as_json: bool = JSON) -> None:
    """List the phases: what each does, and whether this version has it."""
    from agent_forge.config.phases import ORDER
    from agent_forge.phases import IMPLEMENTED, SUMMARY

    rows = [
        {"number": n, "phase": name, "available": name in IMPLEMENTED, "summary": SUMMARY[name]}
        for n, name in enumerate(ORDER)
    ]
    if as_json:
        emit_json(phases=rows)
        return
    emit_table(
        ("", "phase", "available", "what it does"),
        [(r["number"], r["phase"], "yes" if r["available"] else None, r["summary"]) for r in rows],
    )


def _start(
    progress: str, as_json: bool, *, only: str | None, start: str | None, **options: Any
) -> None:
    """Run with a display, print the outcome, and leave with its exit code."""
    outcome = conduct(progress, only=only, start=start, **options)
    root = Path(options["config"].storage.root)
    _report(root, outcome, as_json)
    if progress != "json":
        _advise(root, outcome)
    if outcome["exit_code"]:
        raise typer.Exit(outcome["exit_code"])


def conduct(
    progress: str,
    *,
    config: PipelineConfig,
    session_id: str | None = None,
    resume: bool = False,
    sets: tuple[str, ...] = (),
    only: str | None = None,
    start: str | None = None,
) -> dict[str, Any]:
    """Run the pipeline with a display. What is left at once can go on if it has a session."""
    from agent_forge.errors import Cancelled

    orchestrator = None
    try:
        from agent_forge.pipeline.orchestrator import PipelineOrchestrator
        from agent_forge.track.progress import make_progress

        begun: dict[str, Any] = {"session_id": session_id, "resume": resume, "sets": sets}
        orchestrator = PipelineOrchestrator(config=config, **begun)
        with make_progress(progress) as display:
            return orchestrator.run(only=only, start=start, listeners=[display])
    except KeyboardInterrupt:
        session = (orchestrator.session_id if orchestrator else session_id) or ""
        if not session or not _record(Path(config.storage.root), session).is_file():
            raise Cancelled("interrupted: nothing was begun") from None
        return {
            "success": False,
            "session_id": session,
            "status": "interrupted",
            "error": "left at once",
            "hint": "",
            "exit_code": 130,
            "results": {},
        }


def _check_progress(progress: str) -> None:
    from agent_forge.config.load import did_you_mean
    from agent_forge.errors import ConfigError
    from agent_forge.track.progress import MODES

    if progress not in MODES:
        raise ConfigError(f"unknown --progress {progress!r}{did_you_mean(progress, MODES)}")


def _record(root: Path, session: str) -> Path:
    """The file that a session has from its beginning on."""
    from agent_forge.store.sessions import SESSION_FILE, SessionStore

    return SessionStore(root).path(session) / SESSION_FILE


def _report(root: Path, outcome: dict[str, Any], as_json: bool) -> None:
    from agent_forge.cli.status import run_lines

    if not as_json:
        record = _record(root, outcome["session_id"])
        results = outcome["results"].items()
        before = [name for name, result in results if result.artifacts.get("skipped")]
        for line in run_lines(record.parent, before) if record.is_file() else []:
            print(plain(line))
        return
    rows = [
        {
            "phase": name,
            "skipped": bool(result.artifacts.get("skipped")),
            "seconds": result.duration_seconds,
            "metrics": result.metrics,
            "models": [str(ref.path) for ref in result.artifacts["models"]],
            "summary": result.artifacts.get("summary", ""),
            "tables": result.artifacts.get("tables", []),
        }
        for name, result in outcome["results"].items()
    ]
    kept = ("success", "session_id", "status", "error", "failed_phase", "failed_handoff")
    emit_json(**{k: outcome[k] for k in kept if k in outcome}, phases=rows)


def _advise(root: Path, outcome: dict[str, Any]) -> None:
    """The last lines, on stderr: how it ended and the next command."""
    session = named(root, outcome["session_id"])
    if outcome["success"]:
        models = [ref for r in outcome["results"].values() for ref in r.artifacts["models"]]
        if models and (models[-1].path / "tokenizer.json").is_file():
            place = shlex.quote(str(models[-1].path))
            typer.echo(f"talk to it: forge chat {place}", err=True)
            typer.echo(f"measure it: forge eval {place}", err=True)
        typer.echo(f"all metrics: forge status {session} --metrics", err=True)
        typer.echo(f"done; next: forge show {session}", err=True)
        return
    typer.echo(f"{outcome['status']}: {outcome['error']}", err=True)
    record = _record(root, outcome["session_id"])
    if record.is_file():
        saved = sorted(record.parent.glob("*/checkpoints/*/step_*"), key=lambda path: path.name)
        intact = f"everything up to {saved[-1].name}" if saved else "there was nothing to save yet"
        typer.echo(f"intact: {intact}", err=True)
    if outcome["hint"]:
        typer.echo(f"hint: {outcome['hint']}", err=True)
    if record.is_file():
        command = "logs" if outcome["status"] == "failed" else "resume"
        typer.echo(f"next: forge {command} {session}", err=True)


def named(root: Path, session: str) -> str:
    """A session as commands take it: with its storage unless that is the usual one."""
    return session if str(root) == "storage" else f"{session} --storage {shlex.quote(str(root))}"


def _dry_run(
    settings: Any, session: str | None, only: str | None, start: str | None, as_json: bool
) -> None:
    """What would run, with its needs; nothing is created."""
    from agent_forge.pipeline.orchestrator import PipelineOrchestrator
    from agent_forge.store import files

    orchestrator = PipelineOrchestrator(config=settings, session_id=session)
    rows: list[dict[str, Any]] = []
    for name, plan in orchestrator.plan(only, start).items():
        rows.append(
            {
                "phase": name,
                "steps": plan.steps,
                "parameters": plan.parameters,
                "size_class": plan.size_class,
                "disk_bytes": plan.disk_bytes,
                "memory_bytes": plan.memory_bytes,
                "notes": list(plan.notes),
            }
        )
    free = files.free_bytes(Path(settings.storage.root).resolve())
    if as_json:
        config = settings.model_dump(mode="json")
        emit_json(
            config_hash=settings.canonical_hash(), phases=rows, free_bytes=free, config=config
        )
        return
    emit_table(
        ("phase", "steps", "parameters", "size class", "disk", "memory"),
        [
            (
                *(r["phase"], r["steps"], r["parameters"], r["size_class"]),
                *(size(r["disk_bytes"]), size(r["memory_bytes"])),
            )
            for r in rows
        ],
    )
    typer.echo(f"config {settings.canonical_hash()[:12]}, {size(free)} free", err=True)
