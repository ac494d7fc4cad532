"""`forge status`, `logs` and `export`: look at a run, and take it along."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer

from agent_forge.cli.config import JSON
from agent_forge.cli.output import emit_json, emit_table, plain, when
from agent_forge.cli.runs import STORAGE


def status(
    session: str | None = typer.Argument(None, help="A session id; the newest by default."),
    storage: Path = STORAGE,
    as_json: bool = JSON,
) -> None:
    """Where a session stands: status, phase, progress, and what it measured last."""
    from agent_forge.errors import NotFound
    from agent_forge.store.sessions import SessionStore
    from agent_forge.track.tracker import last_metrics

    store = SessionStore(storage) if storage.exists() else None
    rows = store.registry.get_all_sessions() if store else []
    chosen = [row for row in rows if session in (None, row["session_id"])]
    if store is None or not chosen:
        raise NotFound(f"no session {session or ''} in {storage}", hint="forge run starts one")
    row = chosen[0]
    record: dict[str, Any] = {
        "session_id": row["session_id"],
        "status": store.status(row),
        "current_phase": row["current_phase"],
        "progress_percent": row["progress_percent"],
        "start_time": row["start_time"],
        "end_time": row["end_time"],
        "metrics": last_metrics(store.path(row["session_id"])),
    }
    if as_json:
        emit_json(**record)
        return
    for key, value in record.items():
        if key == "metrics":
            emit_table(("metric", "step", "value"), [_metric_row(*m) for m in value.items()])
        else:
            text = when(value) if key.endswith("_time") else value
            print(f"{key}: {'-' if text is None else text}")


def _metric_row(name: str, entry: dict[str, Any]) -> tuple[Any, ...]:
    value = entry["value"]
    return name, entry["step"], f"{value:.6g}" if isinstance(value, float) else value


def logs(
    session: str = typer.Argument(help="A session id."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Wait for more while it runs."),
    events: bool = typer.Option(False, "--events", help="The events instead of the log."),
    storage: Path = STORAGE,
    as_json: bool = typer.Option(False, "--json", help="The lines as they are."),
) -> None:
    """Print a session's log."""
    from agent_forge.store import lock
    from agent_forge.store.sessions import SessionStore
    from agent_forge.track.journal import read_lines
    from agent_forge.track.logs import LOG_FILE
    from agent_forge.track.progress import describe
    from agent_forge.track.tracker import EVENTS_FILE

    folder = SessionStore(storage).find(session)
    path = folder / (EVENTS_FILE if events else LOG_FILE)
    offset = 0
    while True:
        ended = not follow or not lock.is_busy(folder)
        for behind, record in read_lines(path, offset):
            offset = behind
            if as_json:
                print(json.dumps(record), flush=True)
            elif events:
                print(plain(f"{when(record.get('time'))} {describe(record)}"), flush=True)
            else:
                print(plain(_log_line(record)), flush=True)
        if ended:
            return
        time.sleep(0.2)


def _log_line(record: dict[str, Any]) -> str:
    known = ("timestamp", "level", "event", "logger")
    rest = " ".join(f"{k}={v}" for k, v in record.items() if k not in known)
    level = str(record.get("level", "")).ljust(7)
    return f"{record.get('timestamp')} {level} {record.get('event')} {rest}".rstrip()


def export(
    name: str = typer.Argument(help="A session id or a model id."),
    target: Path = typer.Argument(help="The archive to write: .tar or .tar.gz"),
    force: bool = typer.Option(False, "--force", help="Overwrite an archive that exists."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only list what would be packed."),
    storage: Path = STORAGE,
    as_json: bool = JSON,
) -> None:
    """Pack a run or a model into one archive with a manifest of sha256 sums."""
    from agent_forge.store.archive import export_archive
    from agent_forge.store.sessions import SessionStore

    entries = export_archive(SessionStore(storage), name, target, overwrite=force, dry_run=dry_run)
    if as_json:
        emit_json(archive=str(target), dry_run=dry_run, files=entries)
        return
    emit_table(("file", "bytes"), [(path, entry["bytes"]) for path, entry in entries.items()])
