"""Phases and runs over HTTP: looked at by their files, started and stopped as other processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from agent_forge.api import allowed
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import AlreadyInUse, ConfigError, ForgeError, NotFound
from agent_forge.model.catalog import Catalog
from agent_forge.pipeline import jobs
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.run_view import PhaseView, RunView, all_runs
from agent_forge.store.paths import model_id_for
from agent_forge.store.sessions import SessionStore, read_session

Phase = Literal[ORDER]  # type: ignore[valid-type]
Session = Annotated[str, Field(max_length=64)]
MOST_VIEWS = 4
MOST_RUNS = 4  # at work at once


class Asked(BaseModel):
    """What a start may say: models by their names, settings as a config has them."""

    model_config = ConfigDict(extra="forbid")
    models: Annotated[list[str], Field(max_length=64)] = []
    config: dict[str, Any] = {}
    preset: str | None = None
    session: Session | None = None


class RunAsked(Asked):
    only: Phase | None = None


def routes(store: SessionStore, catalog: Catalog) -> APIRouter:
    """The endpoints of phases and runs."""
    router, views = APIRouter(), Views(store)
    router.include_router(_phases(store, catalog, views))
    router.include_router(_runs(store, catalog, views))
    return router


def _phases(store: SessionStore, catalog: Catalog, views: Views) -> APIRouter:
    router = APIRouter(prefix="/phases/{phase}", tags=["phases"])

    @router.post("/start", status_code=202)
    def start_phase(phase: Phase, asked: Asked) -> dict[str, Any]:
        """Run one phase on models that are named; `config` has the settings of this phase."""
        settings = {"phases": {phase: asked.config}} if asked.config else {}
        return _start(store, catalog, asked, settings, phase)

    @router.get("/status")
    def phase_status(phase: Phase, session: Session | None = None) -> dict[str, Any]:
        """Where a phase stands, in the newest run that has it unless one is named."""
        with views.of(session, phase) as view:
            return phase_row(view, view.phase(phase))

    @router.get("/results")
    def phase_results(phase: Phase, session: Session | None = None) -> dict[str, Any]:
        """What a finished phase measured and made."""
        with views.of(session, phase) as view:
            return results(view, view.phase(phase))

    return router


def _runs(store: SessionStore, catalog: Catalog, views: Views) -> APIRouter:
    router = APIRouter(prefix="/runs", tags=["runs"])

    @router.get("")
    def list_runs() -> dict[str, Any]:
        """All runs, newest first."""
        return {"runs": run_rows(store)}

    @router.post("", status_code=202)
    def start_run(asked: RunAsked) -> dict[str, Any]:
        """Run the pipeline, or `only` one phase; `config` has settings of the whole."""
        return _start(store, catalog, asked, asked.config, asked.only)

    @router.get("/{session}")
    def run_status(session: Session) -> dict[str, Any]:
        """Where a run and its phases stand."""
        with views.of(session) as view:
            return status(view)

    @router.get("/{session}/results")
    def run_results(session: Session) -> dict[str, Any]:
        """What the finished phases of a run measured and made."""
        with views.of(session) as view:
            return all_results(view)

    @router.get("/{session}/metrics")
    def run_metrics(
        session: Session, name: Annotated[str | None, Query(max_length=200)] = None
    ) -> dict[str, Any]:
        """The newest value of every metric, or all that is kept of one."""
        with views.of(session) as view:
            return metrics(view, name)

    @router.post("/{session}/stop", status_code=202)
    def stop_run(session: Session) -> dict[str, Any]:
        """Let a run stop after its present step, with everything saved."""
        jobs.stop_run(store, session)
        return {"session": session, "status": "stopping"}

    @router.post("/{session}/resume", status_code=202)
    def resume_run(session: Session) -> dict[str, Any]:
        """Go on with a run that is not at work."""
        _require_place(store)
        jobs.resume_run(store, session)
        return {"session": session, "status": "running"}

    return router


def _require_place(store: SessionStore) -> None:
    """Refuse one more run where so many are at work."""
    if sum(row["status"] == "running" for row in all_runs(store)) >= MOST_RUNS:
        raise AlreadyInUse(f"{MOST_RUNS} runs are at work", hint="stop one, or wait")


def _start(
    store: SessionStore, catalog: Catalog, asked: Asked, config: dict[str, Any], only: str | None
) -> dict[str, Any]:
    """Check all that can be checked here, then start a process."""
    sets = allowed.sets_of(config, catalog)
    load_config(preset=asked.preset, sets=tuple(sets))
    if asked.models and only is None:
        raise ConfigError("models go with one phase", hint="name it as `only`")
    models = [str(catalog.find(name).resolve()) for name in asked.models]
    if any("," in place for place in models):
        raise ConfigError("the folder of a model has a comma in its name", hint="rename it")
    _require_place(store)
    options: dict[str, Any] = {"sets": sets, "only": only, "models": models}
    session = jobs.start_run(store, preset=asked.preset, session=asked.session, **options)
    return {
        "session": session,
        "phase": only,
        "status": "running",
        "updates": f"/ws?session={session}",
    }


# -- what a run tells ------------------------------------------------------------------------------


class Views:
    """Runs as their files tell them, read further when they are asked for again."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, session: str | None, phase: str | None = None) -> Iterator[RunView]:
        """A run, or the newest one that has a phase; nobody else reads it meanwhile."""
        name = session or newest_run(self.store, phase)
        with self._lock:
            view = self._views.pop(name, None)
            if view:
                view.refresh()
            else:
                view = RunView(self.store, name)
            self._views[name] = view
            while len(self._views) > MOST_VIEWS:
                del self._views[next(iter(self._views))]
            yield view


def newest_run(store: SessionStore, phase: str | None = None) -> str:
    """The newest run, or the newest that has a phase."""
    for row in all_runs(store):
        name = str(row["session_id"])
        if phase is None or _has(store.path(name), phase):
            return name
    raise NotFound("there is no such run yet", hint="POST /runs starts one")


def _has(folder: Path, phase: str) -> bool:
    """True if a run has begun a phase, or was asked for it."""
    if (folder / phase_folder(phase)).is_dir():
        return True
    with contextlib.suppress(ForgeError):  # damaged: it says so when it is looked at
        return phase in read_session(folder).get("asked", {}).get("phases", ())
    return False


def run_rows(store: SessionStore) -> list[dict[str, Any]]:
    names = ("session_id", "status", "current_phase", "progress_percent", "start_time", "end_time")
    return [{name: row[name] for name in names} for row in all_runs(store)]


def status(view: RunView) -> dict[str, Any]:
    """Where a run and its phases stand."""
    phases = [phase_row(view, phase) for phase in view.phases]
    about = {"session": view.session_id, "status": view.status, "progress": view.progress}
    return {**about, "config_hash": view.config_hash, "phases": phases}


def phase_row(view: RunView, phase: PhaseView) -> dict[str, Any]:
    """Where a phase stands; what was not measured is null."""
    row: dict[str, Any] = {"phase": phase.name, "session": view.session_id, "status": phase.status}
    row |= {"progress": phase.share, "eta_s": phase.eta_s, "seconds": phase.seconds}
    newest = {name: series.latest for (of, name), series in view.series.items() if of == phase.name}
    steps = [s.steps[-1] for (of, _), s in view.series.items() if of == phase.name and s.steps]
    numbers = [step for step in steps if step is not None]
    return {**progress(view.config, phase.name, max(numbers, default=None), newest), **row}


def progress(
    config: dict[str, Any], phase: str, step: int | None, values: dict[str, Any]
) -> dict[str, Any]:
    """What the specification tells of an evolution; nothing of other phases."""
    if phase != "evomerge":
        return {}
    total = config.get("phases", {}).get(phase, {}).get("generations")
    return {
        "progress": min(1.0, step / total) if step is not None and total else None,
        "generation": step,
        "total_generations": total,
        "best_fitness": values.get("generation/best_fitness"),
        "diversity": values.get("generation/diversity_score"),
    }


def results(view: RunView, phase: PhaseView) -> dict[str, Any]:
    """What a finished phase measured and made."""
    if phase.status != "completed":
        hint = f"GET /phases/{phase.name}/status says where it stands"
        raise NotFound(f"{phase.name} of {view.session_id} is not finished", hint=hint)
    ids = [model_id_for(view.session_id, phase.name, path.name) for path in phase.models]
    about = {"phase": phase.name, "session": view.session_id, "seconds": phase.seconds}
    return {**about, "headline": phase.headline, "metrics": phase.metrics, "models": ids}


def all_results(view: RunView) -> dict[str, Any]:
    """What the finished phases of a run measured and made."""
    done = [phase for phase in view.phases if phase.status == "completed"]
    return {"session": view.session_id, "phases": [results(view, phase) for phase in done]}


def metrics(view: RunView, name: str | None) -> dict[str, Any]:
    """The newest value of every metric of a run, or the points that are kept of one."""
    found = {key: series for key, series in view.series.items() if name in (None, key[1])}
    if name is not None and not found:
        raise NotFound(f"{view.session_id} has not measured {name[:100]!r}")
    rows = list[dict[str, Any]]()
    for (phase, metric), series in found.items():
        row = {"phase": phase, "name": metric, "latest": series.latest, "count": series.count}
        points = {"steps": series.steps, "values": series.values, "every": series.every}
        rows.append({**row, **(points if name is not None else {})})
    return {"session": view.session_id, "metrics": rows}
