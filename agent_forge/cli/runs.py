"""`forge ls`, `show`, `models`, `clean` and `vacuum`: what is stored, and what can be removed."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.config import JSON
from agent_forge.cli.output import emit_json, emit_table, size, when

if TYPE_CHECKING:
    from agent_forge.store.cleanup import CleanupRemoval
    from agent_forge.store.sessions import SessionStore

SHOWN = ("session_id", "status", "current_phase", "progress_percent", "start_time", "tags")
STORAGE = typer.Option(
    Path("storage"), "--storage", envvar="FORGE_STORAGE", help="The storage root."
)


def has_registry(storage: Path) -> bool:
    """True if anything was ever stored; run directories without a registry are damage."""
    from agent_forge.errors import ConfigError, DamagedFile
    from agent_forge.store.registry import REPAIR
    from agent_forge.store.sessions import REGISTRY, SESSION_FILE

    if storage.exists() and not storage.is_dir():
        raise ConfigError(f"{storage} is not a folder")
    path = storage / REGISTRY
    there = path.exists() and path.stat().st_size > 0
    if not there and any((storage / "sessions").glob(f"*/{SESSION_FILE}")):
        raise DamagedFile(path, "empty" if path.exists() else "missing", hint=REPAIR)
    return there


def _open(storage: Path) -> SessionStore | None:
    """Return the store, or None where nothing was ever stored: looking creates nothing."""
    from agent_forge.store.sessions import SessionStore

    if not has_registry(storage):
        typer.echo(f"nothing is stored in {storage} yet", err=True)
        return None
    return SessionStore(storage)


def ls(storage: Path = STORAGE, as_json: bool = JSON) -> None:
    """List the sessions, newest first."""
    store = _open(storage)
    rows = store.registry.get_all_sessions() if store else []
    sessions: list[dict[str, Any]] = []
    for row in rows:
        found: dict[str, Any] = {**row, "status": store.status(row) if store else ""}
        sessions.append({key: found[key] for key in (*SHOWN, "end_time")})
    if as_json:
        emit_json(sessions=sessions)
    elif sessions:
        columns = ("session", "status", "phase", "done", "started (UTC)", "tags")
        cells = [
            {**s, "progress_percent": f"{s['progress_percent']:.0f} %"}
            | {"start_time": when(s["start_time"]), "tags": ", ".join(s["tags"])}
            for s in sessions
        ]
        emit_table(columns, [[cell[key] for key in SHOWN] for cell in cells])


def models(
    phase: str | None = typer.Option(None, "--phase", help="Only models of this phase."),
    session: str | None = typer.Option(None, "--session", help="Only models of this session."),
    tag: str | None = typer.Option(None, "--tag", help="Only models with this tag."),
    text: str | None = typer.Option(None, "--text", help="Only ids that contain this."),
    storage: Path = STORAGE,
    as_json: bool = JSON,
) -> None:
    """List the models, newest first."""
    store = _open(storage)
    rows = store.registry.search_models(phase, session, tag, text) if store else []
    if as_json:
        emit_json(models=rows)
    elif rows:
        table = []
        for row in rows:
            count = None if row["parameters"] is None else f"{row['parameters']:,}"
            on_disk = None if row["size_mb"] is None else size(row["size_mb"] * 1e6)
            made, tags = when(row["created_at"]), ", ".join(row["tags"])
            table.append((row["model_id"], row["phase_name"], count, on_disk, made, tags))
        emit_table(("model", "phase", "parameters", "size", "made (UTC)", "tags"), table)


def show(
    name: str = typer.Argument(help="A session id or a model id."),
    verify: bool = typer.Option(False, "--verify", help="Check every file against its sha256."),
    storage: Path = STORAGE,
    as_json: bool = JSON,
) -> None:
    """Show one session or one model."""
    from agent_forge.errors import NotFound
    from agent_forge.store import files

    store = _open(storage)
    details: dict[str, Any] | None = None
    if store:
        if any(row["session_id"] == name for row in store.registry.get_all_sessions()):
            details = _session_details(store, name)
            path = store.path(name)
            places = [path, *(p.parent for p in sorted(path.rglob(files.MANIFEST)))]
        else:
            with contextlib.suppress(NotFound):
                details = {"kind": "model", **store.registry.get_model(name)}
                places = [Path(details["model_path"])]
    if details is None:
        raise NotFound(f"no session or model {name!r}", hint="forge ls, forge models")
    if verify:
        details["verified_files"] = sum(_verified(place) for place in places)
    if as_json:
        emit_json(**details)
        return
    for key, value in details.items():
        _print_entry(key, value)


def _verified(place: Path) -> int:
    """Verify a model, a checkpoint or a run directory; return the number of its files."""
    from agent_forge.errors import DamagedFile
    from agent_forge.store import files
    from agent_forge.store.sessions import read_session

    if not place.exists():
        raise DamagedFile(place, "missing")
    if (place / files.MANIFEST).exists():
        return len(files.reading(place, files.verify))
    read_session(place)
    return 1


def _session_details(store: SessionStore, session_id: str) -> dict[str, Any]:
    from agent_forge.store import files

    row = store.registry.get_session_status(session_id)
    path = store.path(session_id)
    return {
        "kind": "session",
        **{key: value for key, value in row.items() if key != "pipeline_config_json"},
        "status": store.status(row),
        "path": str(path),
        "bytes": files.tree_bytes(path),
        "models": store.registry.search_models(session_id=session_id),
        "handoffs": store.registry.get_handoffs(session_id),
    }


def _print_entry(key: str, value: Any) -> None:
    if key.endswith("_time") or key == "created_at":
        value = when(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        names = [entry.get("model_id") or entry.get("handoff_id") for entry in value]
        value = "\n    ".join(["", *map(str, names)])
    elif isinstance(value, dict):
        value = "\n    ".join(["", *(f"{k}: {v}" for k, v in sorted(value.items()))])
    elif isinstance(value, list):
        value = ", ".join(value)
    print(f"{key}: {'-' if value in (None, '') else value}")


def clean(
    age: float | None = typer.Option(
        None, "--age", min=0, max=1e6, help="Remove all that ended so many days ago."
    ),
    failed: bool = typer.Option(False, "--failed", help="Remove all that failed."),
    everything: bool = typer.Option(False, "--all", help="Remove all that are not running."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only list what would be removed."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    cron: bool = typer.Option(False, "--cron", help="Only print a crontab line for this."),
    config: Path | None = typer.Option(None, "--config", help="Whose cleanup_policy is used."),
    storage: Path | None = typer.Option(
        None, "--storage", envvar="FORGE_STORAGE", help="The storage root (storage.root)."
    ),
    as_json: bool = JSON,
) -> None:
    """Remove old sessions: by the cleanup policy, or those that the options name."""
    from agent_forge.pipeline.config import load_config
    from agent_forge.store.cleanup import SessionCleanupManager

    settings = load_config(path=config)
    policy = settings.cleanup_policy
    root = storage or Path(settings.storage.root)
    if cron:
        chosen = (["--age", f"{age:g}"] if age is not None else []) + ["--failed"] * failed
        chosen += ["--all"] * everything
        line = f"{policy.schedule_cleanup} {_cron_command(chosen, root, config)}"
        if as_json:
            emit_json(crontab=line)
        else:
            print(line)
        return
    store = _open(root)
    manager = SessionCleanupManager(store, policy) if store else None
    removals: list[CleanupRemoval] = []
    if manager:
        removals = manager.plan(age_days=age, failed=failed, everything=everything)
        if removals and not dry_run:
            _confirm(removals, yes)
            removals = manager.remove(removals)
    _report_removals(removals, dry_run, as_json)
    if manager and manager.kept:
        raise manager.kept[0][1]


def _cron_command(chosen: list[str], storage: Path, config: Path | None) -> str:
    """Return the command for a crontab: absolute, as cron has no PATH; `%` would end the line."""
    forge = shutil.which("forge", path=str(Path(sys.executable).parent)) or "forge"
    command = [forge, "clean", *chosen, "--yes", "--storage", str(storage.resolve())]
    command += ["--config", str(config.resolve())] if config else []
    return shlex.join(command).replace("%", r"\%")


def _confirm(removals: list[CleanupRemoval], yes: bool) -> None:
    from agent_forge.errors import ConfigError

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("deleting needs --yes when nobody can be asked", hint="--dry-run shows")
    freed = size(sum(removal.bytes for removal in removals))
    typer.echo(f"remove {len(removals)} sessions ({freed})? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was removed", err=True)
        raise typer.Exit(1)


def _report_removals(removals: list[CleanupRemoval], dry_run: bool, as_json: bool) -> None:
    freed = sum(removal.bytes for removal in removals)
    if as_json:
        keys = ("session_id", "reason", "bytes")
        rows = [{key: getattr(removal, key) for key in keys} for removal in removals]
        emit_json(dry_run=dry_run, removed=rows, bytes=freed)
        return
    if removals:
        table = [(r.session_id, size(r.bytes), r.reason) for r in removals]
        emit_table(("session", "size", "because"), table)
    did = "would free" if dry_run else "freed"
    typer.echo(f"{len(removals)} sessions, {did} {size(freed)}", err=True)


def vacuum(storage: Path = STORAGE, as_json: bool = JSON) -> None:
    """Empty the registry's write-ahead log and give free pages back to the disk."""
    store = _open(storage)
    before = after = 0
    if store:
        before = sum(store.registry.size_bytes())
        store.registry.checkpoint_wal()
        store.registry.vacuum_incremental()
        after = sum(store.registry.size_bytes())
    if as_json:
        emit_json(bytes_before=before, bytes_after=after)
    else:
        print(f"registry: {size(before)} -> {size(after)}")
