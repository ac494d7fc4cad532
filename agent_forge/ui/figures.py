"""The figures of a run: plain rows in, Plotly figures out.

Dashboard, report and notebook all show these, by `figures_of`. A figure whose data was not measured
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import plotly.graph_objects as go

from agent_forge.config.phases import source_of
from agent_forge.pipeline.run_view import SYSTEM, PhaseView, RunView, Series
from agent_forge.ui.figures_evolution import evolution_figures, scores_of
from agent_forge.ui.figures_phases import (
    baking_figures,
    bitnet_figures,
    compression_figures,
    edge_figures,
    forge_figures,
    theatre_figures,
)
from agent_forge.ui.theme import GREY, SHARE, Look, colour, safe

Titled = tuple[str, go.Figure]
Found = list[tuple[str, go.Figure | None]]
Shares = Mapping[str, Mapping[str, float]]  # by model and domain
LOSS, HELD_OUT, REWARD = "loss_avg_100", "evaluation_loss", "reward"
REFERENCES = ("trunk", "input", "parent", "before", "best parent")
READINGS = {  # of the machine, in words
    "cpu_percent": "all cores (100 %: all are busy)",
    "process_cpu_percent": "this run (100 %: one core)",
}
HANDED_OVER = ("reasoning", "ternary", "forged", "baked", "edge")  # the names of what phases made


def toy_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """The toy: the error of its linear map."""
    found = view.series.get((phase.name, "toy/loss"))
    rows = [("toy", "", found.steps, found.values)] if found else []
    told = f"n = {found.count:,} points" if found else ""
    return [("Training loss", look.lines(rows, told, "step", "squared error"))]


OWN = {
    "toy": toy_figures,
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
    found = _whole(view, look) if phase is None else _of_phase(view, view.phase(phase), look)
    return [(title, figure) for title, figure in found if figure is not None]


def _whole(view: RunView, look: Look) -> Found:
    readings = {n.rpartition("/")[2]: s for (of, n), s in view.series.items() if of == SYSTEM}
    seconds = {p.name: p.seconds for p in view.phases if p.seconds is not None}
    told, rows = f"n = {len(seconds)} phases", _handed_over(view)
    seconds = seconds if len(seconds) > 1 else {}
    return [
        ("Accuracy on old tasks, phase by phase", ability(rows, look, _asked(view, list(rows)))),
        ("Time of each phase", look.bars({"": seconds}, told, "time (s)", across=True)),
        ("Processor", resources(readings, "_percent", "CPU (%)", look)),
        ("Memory", resources(readings, "process_rss_mb", "memory (MB)", look)),
    ]


def _of_phase(view: RunView, phase: PhaseView, look: Look) -> Found:
    own: Found = []
    with suppress(LookupError, TypeError, ValueError, AttributeError):  # of another version
        own = OWN[phase.name](view, phase, look) if phase.name in OWN else []
    return [
        ("Training loss", training(_trained(view, phase.name, LOSS, HELD_OUT), look)),
        ("Reward", training(_trained(view, phase.name, REWARD), look)),
        *own,
        ("Accuracy by domain", radar(accuracies(view, phase), look, _asked(view, [phase.name]))),
    ]


def _asked(view: RunView, phases: Sequence[str]) -> str:
    """What is asked for the accuracy of a domain, and how many items these phases ask."""
    settings = (view.config.get("phases", {}).get(name, {}) for name in phases)
    counts = [own.get("evaluation_items", own.get("verdict_items")) for own in settings]
    known = sorted({n for n in counts if isinstance(n, int)})
    span = " to ".join(f"{n:,}" for n in dict.fromkeys((*known[:1], *known[-1:]))) or "-"
    return f"share of exact answers, n = {span} items a domain"


def training(runs: Mapping[str, Mapping[str, Series]], look: Look) -> go.Figure | None:
    """What was measured in each training: the mean loss of the last 100 steps and, dashed, that of
    held-out items; or rewards. `runs` has the series of each training by the end of their names."""
    rows = [
        (name, "held out" if end == HELD_OUT else "", series.steps, series.values)
        for name, ends in runs.items()
        for end, series in ends.items()
    ]
    rewarded = any(REWARD in ends for ends in runs.values())
    unit = "reward" if rewarded else "loss (nats/token)"
    values = [value for *_, own in rows for value in own]
    wide = not rewarded and bool(values) and max(values) > 4 * min(values) > 0
    axis = {"type": "log", "dtick": "D2"} if wide else {"nticks": 8}
    told = "" if rewarded else "mean of the last 100 steps | "
    told += f"n = {sum(s.count for ends in runs.values() for s in ends.values()):,} points"
    return look.lines(rows, told, "step", unit, ("control",), yaxis=axis)


def _trained(view: RunView, phase: str, *ends: str) -> dict[str, dict[str, Series]]:
    """The series of each training of a phase by the end of their names."""
    runs: dict[str, dict[str, Series]] = {}
    for (of, name), series in view.series.items():
        stem, _, end = name.partition("/train/")
        if of == phase and end in ends:
            runs.setdefault(stem, {})[end] = series
    return runs


def accuracies(view: RunView, phase: PhaseView) -> dict[str, dict[str, float]]:
    """The accuracy of each model of a phase in each domain."""
    found = scores_of(phase.artifacts.get("verdict") or {}, "accuracy")
    for (of, name), series in view.series.items():
        model, middle, domain = [*name.split("/"), "", ""][:3]
        if of == phase.name and middle == "accuracy" and domain and series.latest is not None:
            found.setdefault(model, {})[domain] = series.latest
    return found


def radar(values: Shares, look: Look, told: str) -> go.Figure | None:
    """The accuracy of each model by domain; what they are compared with is grey."""
    domains = list(dict.fromkeys(domain for own in values.values() for domain in own))
    if len(domains) < 3:
        return None
    around, shades = [*domains, domains[0]], look.shades(values, REFERENCES)
    traces = []
    for name, own in values.items():
        style = {"color": shades[name], "dash": "dash" if shades[name] == GREY else "solid"}
        points = {"r": [own.get(d) for d in around], "theta": [safe(d) for d in around]}
        traces.append(go.Scatterpolar(**points, name=safe(name), line=style))
    radial = {"range": [0, 1], "tickformat": ".0%", "angle": 90, "tickangle": 90}
    polar = {"radialaxis": radial, "domain": {"y": [0, 0.94]}}
    return look.chart(traces, told, "", "", polar=polar, height=440)


def _handed_over(view: RunView) -> dict[str, dict[str, float]]:
    """By phase: the accuracy of what it handed over, where one model is."""
    rows: dict[str, dict[str, float]] = {}
    for phase in view.phases:
        found = accuracies(view, phase)
        names = (*HANDED_OVER, phase.artifacts.get("chosen"))
        made = next((found[name] for name in names if name in found), None)
        if made and phase.name != "cognate":  # its three specialists are no one model
            given = next((found[name] for name in REFERENCES if name in found), None)
            if not rows and given:
                rows[source_of(phase.name) or "input"] = given
            rows[phase.name] = made
    return rows


def ability(rows: Shares, look: Look, told: str) -> go.Figure | None:
    """The accuracy of what each phase handed over, by domain of the old tasks."""
    domains = dict.fromkeys(d for own in rows.values() for d in own)
    kept = [d for d in domains if all(d in own for own in rows.values())]
    names = [safe(name) for name in rows]
    series = [(d, "", names, [own[d] for own in rows.values()]) for d in kept]
    axes: dict[str, Any] = {"yaxis": SHARE, "xaxis": {"type": "category", "tickangle": -20}}
    return look.lines(series, told, "", "accuracy", **axes) if len(rows) > 1 else None


def resources(readings: Mapping[str, Series], end: str, unit: str, look: Look) -> go.Figure | None:
    """Readings of the machine over the time of the run."""
    chosen = {name: s for name, s in readings.items() if name.endswith(end) and s.values}
    if not chosen:
        return None
    start = min(s.times[0] for s in chosen.values())
    rows = [
        (READINGS.get(name, name), "", [t - start for t in s.times], s.values)
        for name, s in chosen.items()
    ]
    told = f"n = {max(s.count for s in chosen.values()):,} readings"
    return look.lines(rows, told, "time of the run (s)", unit, yaxis={"rangemode": "tozero"})


def tables_of(phase: PhaseView) -> Iterator[Sequence[Sequence[Any]]]:
    """The tables that a phase made, each with its header first."""
    tables = phase.artifacts.get("tables")
    for table in tables if isinstance(tables, list) else []:
        if len(table) > 1:
            yield table
