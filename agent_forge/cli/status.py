"""`forge status`, `logs` and `export`: look at a run, and take it along."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from agent_forge.cli.config import JSON
from agent_forge.cli.output import emit_json, emit_table, plain, when
from agent_forge.cli.runs import STORAGE

LINES = 28  # of the account of a run; two are left for what is said around it


def status(
    session: str | None = typer.Argument(None, help="A session id; the newest by default."),
    metrics: bool = typer.Option(False, "--metrics", help="Print the last value of every metric."),
    storage: Path = STORAGE,
    as_json: bool = JSON,
) -> None:
    """Say where a session stands and what each of its phases measured."""
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
        if key != "metrics":
            text = when(value) if key.endswith("_time") else value
            print(f"{key}: {'-' if text is None else text}")
    for line in run_lines(store.path(row["session_id"])):
        print(plain(line))
    if metrics:
        entries = record["metrics"].items()
        emit_table(("metric", "step", "value"), [_metric_row(*entry) for entry in entries])


def run_lines(folder: Path, done_before: Collection[str] = ()) -> list[str]:
    """A run in at most thirty lines: what each phase did and measured, the model, its own words."""
    from agent_forge.config.phases import ORDER, phase_folder
    from agent_forge.contract.phase import read_state
    from agent_forge.phases import SUMMARY

    lines: list[str] = []
    samples: list[dict[str, str]] = []
    model: Path | None = None
    for phase in ORDER:
        place = folder / phase_folder(phase)
        state = read_state(place)
        if state is None:
            continue
        done = state["status"] == "completed"
        took = f"{state['seconds']:.0f} s" if "seconds" in state else "-"
        name = f"{phase} (done before)" if phase in done_before else phase
        lines.append(f"{name:<18}{SUMMARY[phase]:<44}{took if done else state['status']:>10}")
        artifacts = state.get("artifacts", {})
        if headline := artifacts.get("headline"):
            before, after = (_figure(headline[key]) for key in ("before", "after"))
            lines.append(f"  on unseen items: {headline['measure']}: {before} -> {after}")
            lines.append(f"  {headline['verdict']}")
        elif told := artifacts.get("summary") or _first_metrics(state.get("metrics", {})):
            lines.append(f"  {told}")
        for output in state.get("outputs", [])[-1:]:
            model, samples = place / output["name"], artifacts.get("samples") or samples
    if model is not None:
        lines += [f"model: {model}"]
    said = [(" ".join(s["prompt"].split()), " ".join(s["text"].split())) for s in samples[:3]]
    lines += [f"  {prompt[:30]!r} -> {text[:60]!r}" for prompt, text in said]
    return lines[:LINES]


def _first_metrics(metrics: dict[str, Any]) -> str:
    numbers = [(k, v) for k, v in metrics.items() if isinstance(v, float)]
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers[:3])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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
