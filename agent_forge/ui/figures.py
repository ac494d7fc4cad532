"""The figures of a run: plain rows in, Plotly figures out.

Dashboard, report and notebook all show these, by `figures_of`. A figure whose data was not measured
is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from agent_forge.pipeline.run_view import SYSTEM, PhaseView, RunView, Series
from agent_forge.ui.figures_evolution import evolution_figures
from agent_forge.ui.figures_phases import (
    baking_figures,
    bitnet_figures,
    compression_figures,
    edge_figures,
    forge_figures,
    theatre_figures,
)
from agent_forge.ui.theme import BASELINE, Look, colour, faint, line, safe

Titled = tuple[str, go.Figure]
Values = Mapping[str, Mapping[str, float]]  # by model and domain
BASELINES = ("trunk", "input", "parent", "before", "majority", "ngram", "base", "plain average")
OWN = {
    "evomerge": evolution_figures,
    "quietstar": theatre_figures,
    "bitnet": bitnet_figures,
    "forge": forge_figures,
    "baking": baking_figures,
    "edge": edge_figures,
    "final_compression": compression_figures,
}


def figures_of(
    view: RunView, phase: str | None = None, theme: str = "light", number: int = 0
) -> list[Titled]:
    """The figures of one phase of a run with their titles; of the run as a whole if none is named.
    The `number` of a run among several gives it its colour."""
    look = Look(theme, view.session_id, view.config_hash, colour(number))
    if phase is None:
        found = whole_figures(view, look)
    else:
        own = view.phase(phase)
        found = [
            ("Training loss", training_curves(_trained(view, phase, "loss"), look)),
            ("Reward", training_curves(_trained(view, phase, "reward"), look, "reward")),
            *(OWN[phase](view, own, look) if phase in OWN else []),
            ("Accuracy by domain", radar(accuracies(view, phase), look, _items(view, own))),
        ]
    return [(title, figure) for title, figure in found if figure is not None]


def whole_figures(view: RunView, look: Look) -> list[tuple[str, go.Figure | None]]:
    """What is told of the run as a whole."""
    seconds = {phase.name: phase.seconds for phase in view.phases}
    system = {name: series for (of, name), series in view.series.items() if of == SYSTEM}
    return [
        ("Accuracy on old tasks, phase by phase", ability_over_phases(view, look)),
        ("Time of each phase", durations(seconds, look)),
        ("Processor", resources(system, "cpu_percent", "CPU (%)", look)),
        ("Memory", resources(system, "_mb", "memory (MB)", look)),
    ]


def training_curves(
    runs: Mapping[str, Mapping[str, Series]], look: Look, unit: str = "loss (nats/token)"
) -> go.Figure | None:
    """What was measured in each training: the mean of the last 100 steps and, dashed, on held-out
    items. `runs` has the series of each training by the end of their names."""
    traces, points = [], 0
    for index, (name, series) in enumerate(runs.items()):
        own = BASELINE if name in BASELINES or name == "control" else colour(index)
        for end, text, dash in (
            ("loss_avg_100", name, "solid"),
            ("reward", name, "solid"),
            ("evaluation_loss", f"{name}, held out", "dash"),
        ):
            if end in series:
                found = series[end]
                points += found.count
                style = {"dash": dash}
                traces.append(line(found.steps, found.values, text, own, line=style))
    return look.chart(traces, f"n = {points:,} points", "step", unit) if traces else None


def _trained(view: RunView, phase: str, kind: str) -> dict[str, dict[str, Series]]:
    """The series of each training of a phase."""
    ends = ("loss_avg_100", "evaluation_loss") if kind == "loss" else (kind,)
    runs: dict[str, dict[str, Series]] = {}
    for (of, name), series in view.series.items():
        stem, _, end = name.partition("/train/")
        if of == phase and end in ends:
            runs.setdefault(stem, {})[end] = series
    return runs


def accuracies(view: RunView, phase: str) -> dict[str, dict[str, float]]:
    """The accuracy of each model of a phase in each domain."""
    found: dict[str, dict[str, float]] = {}
    for (of, name), series in view.series.items():
        model, middle, domain = [*name.split("/"), "", ""][:3]
        if of == phase and middle == "accuracy" and domain and series.latest is not None:
            found.setdefault(model, {})[domain] = series.latest
    return found


def radar(values: Values, look: Look, measured: str) -> go.Figure | None:
    """The accuracy of each model by domain; what they are compared with is grey."""
    domains = list(dict.fromkeys(domain for own in values.values() for domain in own))
    if len(domains) < 3:
        return None
    traces = []
    for index, (name, own) in enumerate(values.items()):
        around = [*domains, domains[0]]
        reference = name in BASELINES
        shade = BASELINE if reference else colour(index)
        traces.append(
            go.Scatterpolar(
                r=[own.get(domain) for domain in around],
                theta=[safe(domain) for domain in around],
                name=safe(name),
                line={"color": shade, "dash": "dash" if reference else "solid"},
                fill="none" if reference else "toself",
                fillcolor=faint(shade, 0.08),
            )
        )
    radial = {"range": [0, 1], "tickformat": ".0%", "angle": 90, "tickangle": 90}
    return look.chart(traces, measured, polar={"radialaxis": radial}, height=460)


def _items(view: RunView, phase: PhaseView) -> str:
    """How many items of a domain were asked, as the config has it."""
    items = view.config.get("phases", {}).get(phase.name, {}).get("evaluation_items")
    return f"share of exact answers, n = {items} a domain" if items else "share of exact answers"


def ability_over_phases(view: RunView, look: Look) -> go.Figure | None:
    """The accuracy of what each phase handed over, by domain of the old tasks."""
    rows: dict[str, dict[str, float]] = {}
    for phase in view.phases:
        models = accuracies(view, phase.name)
        if len(models) > 1 and phase.name != "cognate":  # three specialists hand over no one model
            rows[phase.name] = list(models.values())[-1]
    domains = dict.fromkeys(d for own in rows.values() for d in own)
    shared = [d for d in domains if all(d in own for own in rows.values())]
    if len(rows) < 2 or not shared:
        return None
    names = list(rows)
    traces = [
        line(names, [rows[n][d] for n in names], d, colour(i), mode="lines+markers")
        for i, d in enumerate(shared)
    ]
    axis = {"tickformat": ".0%", "rangemode": "tozero"}
    return look.chart(traces, "share of exact answers", "phase", "accuracy", yaxis=axis)


def durations(seconds: Mapping[str, float | None], look: Look) -> go.Figure | None:
    """How long each phase took."""
    known = {name: value for name, value in seconds.items() if value is not None}
    if not known:
        return None
    bar = go.Bar(x=list(known.values()), y=list(known), orientation="h", marker_color=look.shade)
    order = {"autorange": "reversed"}
    height = 150 + 28 * len(known)
    return look.chart([bar], "all attempts together", "time (s)", " ", yaxis=order, height=height)


def resources(system: Mapping[str, Series], kind: str, unit: str, look: Look) -> go.Figure | None:
    """Readings of the machine over the time of the run."""
    chosen = {n: s for n, s in system.items() if kind in n and "disk" not in n and s.values}
    if not chosen:
        return None
    start = min(series.times[0] for series in chosen.values())
    traces = [
        line([t - start for t in s.times], s.values, _plain(n), colour(i))
        for i, (n, s) in enumerate(chosen.items())
    ]
    count = max(series.count for series in chosen.values())
    axis = {"rangemode": "tozero"}
    return look.chart(traces, f"n = {count:,} readings", "time of the run (s)", unit, yaxis=axis)


def _plain(name: str) -> str:
    """`system/process_rss_mb` as people read it."""
    end = name.rpartition("/")[2].removesuffix("_percent").removesuffix("_mb")
    return end.replace("_", " ").replace("cpu", "CPU").replace("rss", "resident")


def tables_of(phase: PhaseView) -> Iterable[Sequence[Sequence[Any]]]:
    """The tables that a phase made, each with its header first."""
    for table in phase.artifacts.get("tables", []):
        if isinstance(table, list) and len(table) > 1 and all(isinstance(r, list) for r in table):
            yield table
