"""The report of a run: one HTML file with everything in it that loads nothing from anywhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from plotly.offline import get_plotlyjs

from agent_forge.config.load import dump_yaml
from agent_forge.errors import AlreadyExists, ForgeError
from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.store import files
from agent_forge.store.records import read_metadata
from agent_forge.ui.figures import Titled, figures_of, tables_of
from agent_forge.ui.theme import GROUNDS, cell, plain, template

REPORT_FILE = "report.html"
OURS = b'<meta name="generator" content="agent-forge report">'
HEAD_BYTES = 1000  # of a file, in which that stands
MOST_ROWS = 100  # of a table
MOST_SAID, MOST_TOLD = 200, 1000  # letters of a sample, and of a problem
SAMPLES = {
    "samples": "What it says",
    "thoughts": "Thoughts",
    "parent_and_child": "Parent and child",
    "newly_solved": "Newly solved",
    "conversation": "A conversation",
    "wrong": "What it gets wrong",
}
COLUMNS = ("prompt", "question", "right", "thought")  # of samples, that come first
OVERVIEW = ("phase", "what it does", "status", "time", "on unseen items", "before", "after")
Table = Sequence[Sequence[Any]]


def write_report(view: RunView, out: Path | None = None) -> Path:
    """Write the report of a run, into its directory if no place is named; return where it is."""
    path = out or view.folder / REPORT_FILE
    if path.exists() and not _is_report(path):
        raise AlreadyExists(f"{path} exists and is no report", hint="--out names another file")
    files.write_bytes(path, render(view).encode())
    return path


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as reader:
        return OURS in reader.read(HEAD_BYTES)


def render(view: RunView) -> str:
    """The report as HTML; jinja2 escapes whatever comes from the run."""
    charts: list[dict[str, Any]] = []
    whole = _place(figures_of(view), charts)
    phases = [_phase(view, phase, charts) for phase in view.phases if phase.state]
    models = [model for phase in view.phases for model in phase.models]
    page = Environment(autoescape=True).from_string(
        Path(__file__).with_name(REPORT_FILE).read_text(encoding="utf-8")
    )
    content = {"templates": {theme: template(theme) for theme in GROUNDS}, "charts": charts}
    return page.render(
        session=view.session_id,
        status=view.status,
        about=about(view),
        problem=_problem(view),
        overview=_cells([OVERVIEW, *map(_row, view.phases)]),
        model=models[-1] if models else "",
        whole=whole,
        phases=phases,
        environment=_cells([("", ""), *_environment(view)]),
        config=dump_yaml(view.config),
        config_hash=plain(view.config_hash),
        figures=json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"),
        library=get_plotlyjs(),
    )


def _place(titled: Sequence[Titled], charts: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Add figures to those of the page; title, number and height of each."""
    places = []
    for title, figure in titled:
        content = json.loads(figure.to_json())
        content["layout"].pop("template", None)  # the page has one of each theme
        places.append((title, len(charts), int(content["layout"]["height"])))
        charts.append(content)
    return places


def about(view: RunView) -> str:
    """When the run was, and by which config."""
    session, config = view.session, view.config
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(session["created_at"]))
    parts = [f"begun {begun}", f"preset {config.get('preset') or '-'}"]
    if seconds := [phase.seconds for phase in view.phases if phase.seconds is not None]:
        parts.append(f"{sum(seconds):.0f} s of work")
    seed = config.get("runtime", {}).get("seed", "-")
    return plain(", ".join([*parts, f"seed {seed}", f"config {view.config_hash[:12]}"]), MOST_TOLD)


def _problem(view: RunView) -> str:
    """Why it ended before it was completed; empty if it was, or if nobody knows."""
    ends = [e for e in view.events if e.get("event") in ("run_failed", "run_paused")]
    known = view.status in ("failed", "paused") and ends
    return plain(ends[-1].get("error") or "", MOST_TOLD) if known else ""


def _row(phase: PhaseView) -> tuple[Any, ...]:
    """A phase in the table of all."""
    told = phase.headline or {}
    seconds = None if phase.seconds is None else f"{phase.seconds:.1f} s"
    measure = str(told.get("measure") or "").replace("_", " ")
    measured = (measure, told.get("before"), told.get("after"))
    return (phase.name, phase.purpose, phase.status, seconds, *measured)


def _phase(view: RunView, phase: PhaseView, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """What is shown of one phase."""
    told = phase.headline or {}
    handoffs = (e for e in view.events if e.get("event") == "handoff")
    warnings = [w for e in handoffs if e.get("phase") == phase.name for w in e.get("warnings", [])]
    return {
        "name": phase.name,
        "number": phase.number,
        "purpose": phase.purpose,
        "status": phase.status,
        "verdict": plain(told.get("verdict") or phase.artifacts.get("summary") or "", MOST_TOLD),
        "warnings": [plain(text, MOST_TOLD) for text in dict.fromkeys(map(str, warnings))],
        "figures": _place(figures_of(view, phase.name), charts),
        "tables": [_cells(rows) for rows in tables_of(phase)],
        "samples": [(name, _cells(rows)) for name, rows in samples_of(phase)],
        "models": _cells([("model", "weights", "MB", "sha256"), *map(model_row, phase.models)]),
    }


def samples_of(phase: PhaseView) -> Iterator[tuple[str, Table]]:
    """What models of a phase said, as tables."""
    found: Mapping[str, Any] = phase.artifacts
    if phase.models and "samples" not in found:
        with contextlib.suppress(ForgeError, OSError):
            found = {**read_metadata(phase.models[-1]).model_dump(), **found}
    for key, name in SAMPLES.items():
        rows = found.get(key) or []
        if rows and all(isinstance(row, dict) for row in rows):
            last = len(COLUMNS)
            names = sorted(rows[0], key=lambda n: COLUMNS.index(n) if n in COLUMNS else last)
            rows = [names, *([row.get(name) for name in names] for row in rows)]
        if len(rows) > 1:  # of texts in cards, whose marks say where they end
            yield name, [[plain(str(text).strip("`"), MOST_SAID) for text in row] for row in rows]


def model_row(path: Path) -> tuple[Any, ...]:
    """Size and hash of a model that was handed over, as its record says."""
    try:
        record = read_metadata(path)
    except (ForgeError, OSError):
        return (path.name, None, None, None)
    return (path.name, f"{record.parameters:,}", f"{record.size_mb:g}", record.sha256)


def _environment(view: RunView) -> Iterator[tuple[str, Any]]:
    """On what it ran, and with which versions."""
    yield "run directory", view.folder
    yield "config hash", view.config_hash
    for name, value in view.session.get("environment", {}).items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {text}" for key, text in value.items())
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        yield name.replace("_", " "), value


def _cells(rows: Table) -> list[list[str]]:
    """The rows of a table as text; of a long one the first."""
    told = [[cell(value, 400) for value in row] for row in rows[: MOST_ROWS + 1]]
    left = len(rows) - len(told)
    return [*told, [f"... and {left} more"]] if left else told
