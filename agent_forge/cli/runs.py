"""`forge ls`, `show`, `models`, `clean` and `vacuum`: what is stored, and what can be removed."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.output import emit, emit_json, size, when
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.store import files
from agent_forge.store.paths import require_root

if TYPE_CHECKING:
    from agent_forge.store.cleanup import CleanupRemoval
    from agent_forge.store.sessions import SessionStore

LISTED = ("session_id", "status", "current_phase", "progress_percent", "start_time", "tags")


def has_registry(storage: Path) -> bool:
    """True if anything was ever stored; run directories without a registry are damage."""
    from agent_forge.store.registry import REPAIR
    from agent_forge.store.sessions import REGISTRY, SESSION_FILE

    require_root(storage)
    path = storage / REGISTRY
    filled = path.exists() and path.stat().st_size > 0
    if not filled and any((storage / "sessions").glob(f"*/{SESSION_FILE}")):
        raise DamagedFile(path, "empty" if path.exists() else "missing", hint=REPAIR)
    return filled


def _open(storage: Path) -> SessionStore | None:
    """Return the store, or None where nothing was ever stored: looking creates nothing."""
    from agent_forge.store.sessions import SessionStore

    if has_registry(storage):
        return SessionStore(storage)
    typer.echo(f"nothing is stored in {storage} yet", err=True)
    return None


def ls(storage: Path, as_json: bool) -> None:
    """List the sessions, newest first."""
    store = _open(storage)
    rows: list[dict[str, Any]] = []
    if store:
        rows = [{**row, "status": store.status(row)} for row in store.registry.get_all_sessions()]
    sessions = [{key: row[key] for key in (*LISTED, "end_time")} for row in rows]
    cells = []
    for session, status, phase, done, start, tags in (tuple(row.values())[:6] for row in sessions):
        cells.append((session, status, phase, f"{done:.0f} %", when(start), ", ".join(tags)))
    columns = ("session", "status", "phase", "done", "started (UTC)", "tags")
    emit(as_json, columns, cells, sessions=sessions)


def models(
    phase: str | None,
    session: str | None,
    tag: str | None,
    text: str | None,
    storage: Path,
    as_json: bool,
) -> None:
    """List the models, newest first."""
    store = _open(storage)
    rows = store.registry.search_models(phase, session, tag, text) if store else []
    cells = []
    for row in rows:
        count = None if row["parameters"] is None else f"{row['parameters']:,}"
        on_disk = None if row["size_mb"] is None else size(row["size_mb"] * 1e6)
        created, tags = when(row["created_at"]), ", ".join(row["tags"])
        cells.append((row["model_id"], row["phase_name"], count, on_disk, created, tags))
    columns = ("model", "phase", "parameters", "size", "made (UTC)", "tags")
    emit(as_json, columns, cells, models=rows)


def show(name: str, verify: bool, storage: Path, as_json: bool) -> None:
    """Show one session or one model."""
    store = _open(storage)
    details: dict[str, Any] | None = None
    if store:
        if any(row["session_id"] == name for row in store.registry.get_all_sessions()):
            row, path = store.registry.get_session_status(name), store.path(name)
            details = {
                "kind": "session",
                **{key: value for key, value in row.items() if key != "pipeline_config_json"},
                "status": store.status(row),
                "path": str(path),
                "bytes": files.tree_bytes(path),
                "models": store.registry.search_models(session_id=name),
                "handoffs": store.registry.get_handoffs(name),
            }
            folders = [path, *(p.parent for p in sorted(path.rglob(files.MANIFEST)))]
        else:
            with contextlib.suppress(NotFound):
                details = {"kind": "model", **store.registry.get_model(name)}
                folders = [Path(details["model_path"])]
    if details is None:
        raise NotFound(f"no session or model {name!r}", hint="forge ls, forge models")
    if verify:
        details["verified_files"] = sum(_verified(folder) for folder in folders)
    if as_json:
        return emit_json(**details)
    for key, value in details.items():
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


def _verified(folder: Path) -> int:
    """Verify a model, a checkpoint or a run directory; return the number of its files."""
    from agent_forge.store.sessions import read_session

    if not folder.exists():
        raise DamagedFile(folder, "missing")
    if (folder / files.MANIFEST).exists():
        return len(files.reading(folder, files.verify))
    read_session(folder)
    return 1


def clean(
    age: float | None,
    failed: bool,
    everything: bool,
    dry_run: bool,
    yes: bool,
    cron: bool,
    config: Path | None,
    storage: Path | None,
    as_json: bool,
) -> None:
    """Remove old sessions: by the cleanup policy, or those that the options name."""
    from agent_forge.pipeline.config import load_config
    from agent_forge.store.cleanup import SessionCleanupManager

    settings = load_config(path=config)
    policy = settings.cleanup_policy
    root = storage or Path(settings.storage.root)
    if cron:  # absolute, as cron has no PATH; `%` would end the line
        forge = shutil.which("forge", path=str(Path(sys.executable).parent)) or "forge"
        command = [forge, "clean", *(["--age", f"{age:g}"] if age is not None else [])]
        command += [*["--failed"] * failed, *["--all"] * everything, "--yes"]
        command += ["--storage", str(root.resolve())]
        command += ["--config", str(config.resolve())] if config else []
        line = f"{policy.schedule_cleanup} " + shlex.join(command).replace("%", r"\%")
        return emit_json(crontab=line) if as_json else print(line)
    store = _open(root)
    manager = SessionCleanupManager(store, policy) if store else None
    removals: list[CleanupRemoval] = []
    if manager:
        removals = manager.plan(age_days=age, failed=failed, everything=everything)
        if removals and not dry_run:
            if not yes:
                _confirm(removals)
            removals = manager.remove(removals)
    freed = sum(removal.bytes for removal in removals)
    rows = [{"session_id": r.session_id, "reason": r.reason, "bytes": r.bytes} for r in removals]
    cells = [(r.session_id, size(r.bytes), r.reason) for r in removals]
    emit(as_json, ("session", "size", "because"), cells, dry_run=dry_run, removed=rows, bytes=freed)
    if not as_json:
        did = "would free" if dry_run else "freed"
        typer.echo(f"{len(removals)} sessions, {did} {size(freed)}", err=True)
    if manager and manager.kept:
        raise manager.kept[0][1]


def _confirm(removals: list[CleanupRemoval]) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("deleting needs --yes when nobody can be asked", hint="--dry-run shows")
    freed = size(sum(removal.bytes for removal in removals))
    typer.echo(f"remove {len(removals)} sessions ({freed})? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was removed", err=True)
        raise typer.Exit(1)


def vacuum(storage: Path, as_json: bool) -> None:
    """Empty the registry's write-ahead log and give free pages back to the disk."""
    store = _open(storage)
    before = after = 0
    if store:
        before = sum(store.registry.size_bytes())
        store.registry.vacuum_incremental()
        after = sum(store.registry.size_bytes())
    if as_json:
        return emit_json(bytes_before=before, bytes_after=after)
    print(f"registry: {size(before)} -> {size(after)}")
