"""`forge status`, `logs` and `export`: look at a run, and take it along."""

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agent_forge.cli.merge import whole_or_nothing
from agent_forge.cli.output import emit, emit_json, emit_table, plain, when
from agent_forge.cli.runs import has_registry
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ConfigError, NotFound
from agent_forge.phases import SUMMARY
from agent_forge.store import lock
from agent_forge.store.records import STATE_FILE, read_state

LINES = 28  # of the account of a run; two are left for what is said around it
LOG_COLUMNS = ("timestamp", "level", "event", "logger")
STATUS = ("session_id", "status", "current_phase", "progress_percent", "start_time", "end_time")


def status(session: str | None, metrics: bool, storage: Path, as_json: bool) -> None:
    """Say where a session stands and what each of its phases measured."""
    from agent_forge.store.sessions import SessionStore
    from agent_forge.track.tracker import last_metrics

    store = SessionStore(storage) if has_registry(storage) else None
    rows = store.registry.get_all_sessions() if store else []
    row = next((row for row in rows if session in (None, row["session_id"])), None)
    if store is None or row is None:
        raise NotFound(f"no session {session or ''} in {storage}", hint="forge run starts one")
    folder = store.path(row["session_id"])
    current: dict[str, Any] = {**row, "status": store.status(row)}
    record, last = {key: current[key] for key in STATUS}, last_metrics(folder)
    if as_json:
        return emit_json(**record, metrics=last)
    for key, value in record.items():
        text = when(value) if key.endswith("_time") else value
        print(f"{key}: {'-' if text is None else text}")
    for line in run_lines(folder):
        print(plain(line))
    if metrics:
        cells = [(name, entry["step"], entry["value"]) for name, entry in last.items()]
        cells = [(n, s, f"{v:.6g}" if isinstance(v, float) else v) for n, s, v in cells]
        emit_table(("metric", "step", "value"), cells)


def run_lines(folder: Path, done_before: Collection[str] = ()) -> list[str]:
    """A run in at most thirty lines: what each phase did and measured, the model, its own words."""
    lines: list[str] = []
    samples: list[dict[str, str]] = []
    model: Path | None = None
    for phase in ORDER:
        path = folder / phase_folder(phase)
        state = read_state(path)
        if state is None:
            if (path / STATE_FILE).exists():
                lines.append(f"{phase:<18}{SUMMARY[phase]:<44}{'damaged':>10}")
            continue
        seconds = f"{state['seconds']:.0f} s" if "seconds" in state else "-"
        ended = seconds if state["status"] == "completed" else state["status"]
        name = f"{phase} (done before)" if phase in done_before else phase
        lines.append(f"{name:<18}{SUMMARY[phase]:<44}{ended:>10}")
        artifacts = state.get("artifacts", {})
        numbers = [(k, v) for k, v in state.get("metrics", {}).items() if isinstance(v, float)]
        first = ", ".join(f"{key} {value:.4g}" for key, value in numbers[:3])
        if headline := artifacts.get("headline"):
            values = (headline["before"], headline["after"])
            before, after = ("-" if value is None else f"{value:.4g}" for value in values)
            lines.append(f"  on unseen items: {headline['measure']}: {before} -> {after}")
            lines.append(f"  {headline['verdict']}")
        elif summary := artifacts.get("summary") or first:
            lines.append(f"  {summary}")
        for output in state.get("outputs", [])[-1:]:
            model, samples = path / output["name"], artifacts.get("samples") or samples
    if model is not None:
        lines += [f"model: {model}"]
    for sample in samples[:3]:
        prompt, text = (" ".join(sample[key].split()) for key in ("prompt", "text"))
        lines += [f"  {prompt[:30]!r} -> {text[:60]!r}"]
    return lines[:LINES]


def logs(session: str, follow: bool, events: bool, storage: Path, as_json: bool) -> None:
    """Print a session's log."""
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
                line = json.dumps(record)
            elif events:
                line = plain(f"{when(record.get('time'))} {describe(record)}")
            else:
                details = " ".join(f"{k}={v}" for k, v in record.items() if k not in LOG_COLUMNS)
                level = str(record.get("level", "")).ljust(7)
                line = f"{record.get('timestamp')} {level} {record.get('event')} {details}"
                line = plain(line.rstrip())
            print(line, flush=True)
        if ended:
            return
        time.sleep(0.2)


def export(
    name: str,
    target: Path,
    dtype: str | None,
    bundle: bool,
    force: bool,
    dry_run: bool,
    storage: Path,
    as_json: bool,
) -> None:
    """Pack a run or a model into one archive, write a model as GGUF for llama.cpp and Ollama, or as
    a folder with the C program that runs it."""
    if bundle:
        _export_bundle(name, target, dtype or force, dry_run, storage, as_json)
        return
    gguf = target.suffix == ".gguf"
    if dtype and not gguf:
        raise ConfigError("--dtype is for GGUF", hint="end the name of the file to write in .gguf")
    if gguf:
        from agent_forge.model.gguf import export_gguf
        from agent_forge.model.locate import locate_model

        ref = locate_model(name, storage)
        with whole_or_nothing(target) as watch:
            options: dict[str, Any] = {"overwrite": force, "dry_run": dry_run}
            options["almost"] = lambda: watch("", 1, 1)
            entries = export_gguf(ref, target, dtype, **options)
    else:
        from agent_forge.store.archive import export_archive
        from agent_forge.store.sessions import SessionStore

        sessions = SessionStore(storage)
        entries = export_archive(sessions, name, target, overwrite=force, dry_run=dry_run)
    cells = [(path, entry["bytes"]) for path, entry in entries.items()]
    about = {"gguf" if gguf else "archive": str(target), "dry_run": dry_run, "files": entries}
    emit(as_json, ("file", "bytes"), cells, **about)


def _export_bundle(
    name: str, target: Path, refused: object, dry_run: bool, storage: Path, as_json: bool
) -> None:
    from agent_forge.model.locate import locate_model
    from agent_forge.native.bundle import write_bundle

    if refused:
        raise ConfigError("--bundle goes with neither --dtype nor --force")
    sizes = write_bundle(Path(locate_model(name, storage)), target, dry_run=dry_run)
    entries = {path: {"bytes": size} for path, size in sizes.items()}
    about = {"bundle": str(target), "dry_run": dry_run, "files": entries}
    emit(as_json, ("file", "bytes"), list(sizes.items()), **about)
