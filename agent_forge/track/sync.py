"""A run replayed into one run of W&B or trackio, from its files: whoever listened while it ran.

The same files make the same id: what is there whole is not sent again; a run that went on since
has another. Metrics are `PHASE/name` over `PHASE/step`, those of the machine over the seconds.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.config.settings import TrackingSettings
from agent_forge.store import files
from agent_forge.store.paths import SAFE_NAME, model_id_for
from agent_forge.store.records import STATE_FILE, read_state
from agent_forge.store.sessions import CONFIG_FILE, SESSION_FILE
from agent_forge.track.journal import read_lines
from agent_forge.track.progress import describe
from agent_forge.track.tracker import EVENTS_FILE, METRICS_FILE
from agent_forge.track.wandb_sink import Mirror, Rows, tables_of

WHOLE = "forge-sync-done"  # beside what W&B wrote of a run that was replayed to its end


def truth_id(folder: Path) -> str:
    """Eight digits that say what the files of a run hold."""
    digest = hashlib.sha256()
    records = (folder / phase_folder(name) / STATE_FILE for name in ORDER)
    for path in (folder / METRICS_FILE, folder / EVENTS_FILE, folder / SESSION_FILE, *records):
        if path.is_file():
            digest.update(files.sha256_of(path).encode())
    return digest.hexdigest()[:8]


def replay(
    folder: Path, session: dict[str, Any], tracking: TrackingSettings, library: Any
) -> dict[str, Any]:
    """Replay a run; return its name and id there, where W&B keeps it, how many lines were sent,
    and whether it was there already."""
    key = truth_id(folder)
    told: dict[str, Any] = {"name": f"{folder.name}_{key}", "id": key}
    kind = "offline-run" if tracking.wandb_offline else "run"
    there = [path.parent for path in folder.glob(f"wandb/{kind}-*-{key}/{WHOLE}")]
    if there and library.__name__ == "wandb":
        return {**told, "place": there[0], "sent": 0, "known": True}
    about = {name: session.get(name) for name in ("session_id", "config_hash", "status")}
    mirror = Mirror(folder, tracking, session["config"] | about, library)
    own = {"id": key} if library.__name__ == "wandb" else {}
    try:
        mirror.open(told["name"], "sync", folder / CONFIG_FILE, **own)
        place, sent = mirror.place, 0
        for values in _logged(mirror, folder, session["created_at"]):
            mirror.log(values)
            sent += 1
        for name, rows in _tables(folder):
            mirror.table(name, rows)
        for name, path in _models(folder):
            mirror.artifact(name, path)
    finally:
        mirror.close()
    if place is not None:
        files.write_bytes(place / WHOLE, b"")
    return {**told, "place": place, "sent": sent, "known": False}


def _logged(mirror: Mirror, folder: Path, began: float) -> Iterator[dict[str, Any]]:
    """The metrics, line by line."""
    phases: set[str] = set()
    for _, record in read_lines(folder / METRICS_FILE):
        phase, values, at = (record.get(key) for key in ("phase", "metrics", "time"))
        if not isinstance(values, dict) or not isinstance(at, int | float):
            continue
        own = f"{phase}/"
        if own not in phases:
            phases.add(own)
            mirror.order(f"{own}*", f"{own}step" if phase in ORDER else "seconds")
        step = {} if record.get("step") is None else {f"{own}step": record["step"]}
        named = {own + name.removeprefix(own): value for name, value in values.items()}
        yield {"seconds": round(at - began, 3), **step, **named}


def _states(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ORDER:
        if (state := read_state(folder / phase_folder(name))) is not None:
            yield name, state


def _tables(folder: Path) -> Iterator[tuple[str, Rows]]:
    """What happened, what became of each phase, and the tables that it made."""
    events = [[r.get("time"), describe(r)] for _, r in read_lines(folder / EVENTS_FILE)]
    if events:
        yield "events", [["time", "event"], *events]
    phases: list[list[Any]] = [["phase", "status", "seconds", "measure", "before", "after", "says"]]
    for name, state in _states(folder):
        artifacts = state.get("artifacts") or {}
        headline = artifacts.get("headline") or {}
        numbers = [headline.get(key) for key in ("measure", "before", "after", "verdict")]
        phases.append([name, state["status"], state.get("seconds"), *numbers])
        for title, rows in tables_of(artifacts):
            yield f"{name}/{title}", rows
    if len(phases) > 1:
        yield "phases", phases


def _models(folder: Path) -> Iterator[tuple[str, Path]]:
    """The models that phases handed over, by the names that they have in the registry."""
    for phase, state in _states(folder):
        for name in (str(output["name"]) for output in state.get("outputs", [])):
            if SAFE_NAME.fullmatch(name):
                yield model_id_for(folder.name, phase, name), folder / phase_folder(phase) / name
