"""Figures of Phase 2: how the population went, what it tried, where the champion comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from agent_forge.errors import DamagedFile
from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.store import files
from agent_forge.track.journal import read_lines
from agent_forge.ui.theme import BASELINE, COLOURS, Look, colour, faint, level, line, number, safe

Row = Mapping[str, Any]
JOURNAL = Path("evolution") / "journal.jsonl"
LINEAGE = "lineage.json"
MOST_NODES = 60  # of a lineage that are drawn
PREFIX = "generation/"


def evolution_figures(
    view: RunView, phase: PhaseView, look: Look
) -> list[tuple[str, go.Figure | None]]:
    """All figures of the evolution of a run."""
    rows = generations(view, phase.name)
    candidates, references = measured_models(
        record for _, record in read_lines(phase.folder / JOURNAL)
    )
    recipe = str(phase.metrics.get("best_merge_technique") or "")
    settings = view.config.get("phases", {}).get(phase.name, {})
    return [
        ("Evolution", evolution(rows, references, recipe, look, len(candidates))),
        ("Diversity", diversity(rows, settings, look)),
        ("Combinations", combos(_combos(view, phase.name), look)),
        ("Lineage of the champion", lineage(_ancestry(phase), candidates, look)),
        ("Gain of the champion", gains(phase.artifacts.get("verdict") or {}, look)),
    ]


def generations(view: RunView, phase: str) -> list[dict[str, float]]:
    """What was measured of each generation, by the names of the metrics."""
    rows: dict[int, dict[str, float]] = {}
    for (of, name), series in view.series.items():
        if of == phase and name.startswith(PREFIX):
            for step, value in zip(series.steps, series.values, strict=True):
                if step is not None:
                    rows.setdefault(step, {})[name.removeprefix(PREFIX)] = value
    return [{"generation": step, **rows[step]} for step in sorted(rows)]


def measured_models(records: Iterable[Row]) -> tuple[dict[str, Row], dict[str, float]]:
    """The candidates of a journal by their key, and the fitness of parents and plain average: none
    if it is not of the same kind, because a domain was left out after them."""
    candidates: dict[str, Row] = {}
    references: dict[str, float] = {}
    for record in records:
        if record.get("record") == "candidate":
            candidates[str(record.get("key"))] = record
            kind, score = (record.get("operation") or {}).get("kind"), record.get("score") or {}
            if kind in ("parent", "average") and "fitness" in score:
                references[str(record.get("origin"))] = score["fitness"]
        elif record.get("record") == "floor" and record.get("domains"):
            references = {}
    return candidates, references


def evolution(
    rows: Sequence[Row], references: Mapping[str, float], recipe: str, look: Look, tried: int = 0
) -> go.Figure | None:
    """Best, mean and the band from worst to best of each generation, with the parents and their
    plain average as lines, and how the champion was made."""
    rows = [row for row in rows if "best_fitness" in row]
    if not rows:
        return None
    x = [row["generation"] for row in rows]
    low, high = ([row.get(name) for row in rows] for name in ("min_fitness", "max_fitness"))
    band = {"fill": "tonexty", "fillcolor": faint(look.shade), "hoverinfo": "skip"}
    traces = [
        line(x, low, "worst", faint(look.shade, 0.4), line={"width": 1}, showlegend=False),
        line(
            x,
            high,
            "worst to best of a generation",
            faint(look.shade, 0.4),
            line={"width": 1},
            **band,
        ),
        line(x, [r.get("avg_fitness") for r in rows], "mean", COLOURS[1], line={"dash": "dot"}),
        line(x, [r["best_fitness"] for r in rows], "best so far", look.shade, line={"width": 3}),
    ]
    measured = f"n = {tried:,} candidates" if tried else f"n = {len(rows):,} generations"
    told = f"champion: {safe(recipe, 160)}<br>{measured}" if recipe else measured
    figure = look.chart(traces, told, "generation", "fitness", xaxis={"dtick": _ticks(len(x))})
    for name, fitness in references.items():
        level(figure, fitness, name, dash="dash" if name.startswith("parent") else "dot")
    return figure


def _ticks(count: int) -> int:
    return max(1, count // 10)


def diversity(rows: Sequence[Row], settings: Row, look: Look) -> go.Figure | None:
    """How far the candidates of a generation are apart, with what is asked for."""
    rows = [row for row in rows if "diversity_score" in row]
    if not rows:
        return None
    x, y = ([row[name] for row in rows] for name in ("generation", "diversity_score"))
    traces = [line(x, y, "diversity", look.shade, mode="lines+markers", showlegend=False)]
    axes = {"yaxis": {"rangemode": "tozero"}, "xaxis": {"dtick": _ticks(len(x))}}
    told = f"n = {len(rows):,} generations"
    unit = "distance over that of the parents"
    figure = look.chart(traces, told, "generation", unit, **axes)
    for name, text in (
        ("min_diversity", "below: stronger mutation"),
        ("diversity_reseed_threshold", "below: new combinations"),
    ):
        if isinstance(settings.get(name), int | float):
            level(figure, settings[name], f"{text} ({settings[name]:g})", COLOURS[1])
    return figure


def _combos(view: RunView, phase: str) -> list[dict[str, float]]:
    """How often each combination was used until now, and the mean fitness of what it made."""
    rows = []
    for combo in range(8):
        usage = view.latest(f"combo/{combo}/usage", phase)
        if usage is not None:
            mean = view.latest(f"combo/{combo}/avg_fitness", phase)
            rows.append({"combo": combo, "usage": usage, "fitness": mean})
    return rows


def combos(rows: Sequence[Row], look: Look) -> go.Figure | None:
    """Usage of the eight combinations, and above it their mean fitness."""
    if not rows:
        return None
    names = [f"{int(row['combo']):03b}" for row in rows]
    used = go.Bar(x=names, y=[row["usage"] for row in rows], marker_color=look.shade, name="used")
    mean = [row.get("fitness") for row in rows]
    points = line(
        names,
        mean,
        "mean fitness",
        COLOURS[1],
        mode="markers",
        yaxis="y2",
        marker={"size": 10, "symbol": "diamond"},
    )
    count = sum(row["usage"] for row in rows)
    upper = {"title": {"text": "mean fitness"}, "domain": [0.55, 1]}
    about = "combination: interpolation, arithmetic, selection"
    axes = {"xaxis": {"type": "category"}, "yaxis": {"domain": [0, 0.42]}, "yaxis2": upper}
    told = f"n = {count:,.0f} candidates"
    return look.chart(
        [used, points], told, about, "times used", showlegend=False, height=460, **axes
    )


def _ancestry(phase: PhaseView) -> list[Row]:
    """The candidates that the champion comes from, inputs before what is made of them."""
    for model in phase.models:
        if (model / LINEAGE).is_file():
            try:
                found = files.read_json(model / LINEAGE)
            except DamagedFile:
                return []
            rows = found.get("candidates") if isinstance(found, dict) else None
            return [row for row in rows or [] if isinstance(row, dict)]
    return []


def lineage(rows: Sequence[Row], candidates: Mapping[str, Row], look: Look) -> go.Figure | None:
    """What the champion was made of, and that of what, from the parents on the left."""
    rows = rows[:3] + rows[3:][-MOST_NODES:]
    if len(rows) < 2:
        return None
    depth: dict[str, int] = {}
    for row in rows:
        behind = [depth[key] for key in row.get("inputs", []) if key in depth]
        depth[str(row.get("key"))] = max(behind, default=-1) + 1
    places: dict[str, tuple[float, float]] = {}
    for at, group in itertools.groupby(sorted(depth, key=depth.__getitem__), depth.__getitem__):
        keys = list(group)
        places |= {key: (at, (len(keys) - 1) / 2 - i) for i, key in enumerate(keys)}
    edges: tuple[list[Any], list[Any]] = ([], [])
    for row in rows:
        for key in (k for k in row.get("inputs", []) if k in places):
            for axis, side in enumerate(edges):
                side += [places[key][axis], places[str(row["key"])][axis], None]
    names = [safe(row.get("origin"), 40) for row in rows]
    told = [
        f"{name}<br>{_fitness(candidates.get(str(row['key'])))}"
        for name, row in zip(names, rows, strict=True)
    ]
    spots = [places[str(row["key"])] for row in rows]
    shades = [BASELINE if not row.get("inputs") else look.shade for row in rows]
    shades[-1] = COLOURS[1]
    x, y = zip(*spots, strict=True)
    traces = [
        go.Scatter(
            x=edges[0],
            y=edges[1],
            mode="lines",
            line={"color": BASELINE, "width": 1},
            hoverinfo="skip",
        ),
        go.Scatter(
            x=x,
            y=y,
            mode="markers+text",
            text=names,
            textposition="top center",
            hovertext=told,
            hoverinfo="text",
            marker={"size": 14, "color": shades},
        ),
    ]
    hidden = {"visible": False}
    axes = {"yaxis": hidden, "xaxis": {"dtick": 1, "range": [-0.5, max(x) + 0.5]}}
    height = 200 + 60 * int(max(y) - min(y) + 1)
    return look.chart(
        traces,
        f"n = {len(rows)} candidates",
        "steps from the parents",
        showlegend=False,
        height=height,
        **axes,
    )


def _fitness(record: Row | None) -> str:
    """The fitness of a candidate, and the generation that it is of."""
    score = (record or {}).get("score") or {}
    if record is None or "fitness" not in score:
        return "fitness -"
    return f"generation {record.get('generation')}, fitness {number(score['fitness'])}"


def gains(verdict: Row, look: Look) -> go.Figure | None:
    """By how much the champion is better than each rival on unseen items, with its interval."""
    rows = []
    for name, rival in (verdict.get("rivals") or {}).items():
        found = rival["comparison"]["overall"]["gains"]
        if gain := found.get("bits_per_byte") or found.get("nats_per_token"):
            rows.append((name, gain))
    if not rows:
        return None
    values = [gain["value"] for _, gain in rows]
    error = {
        "type": "data",
        "symmetric": False,
        "array": [g["high"] - g["value"] for _, g in rows],
        "arrayminus": [g["value"] - g["low"] for _, g in rows],
    }
    dots = go.Scatter(
        x=values,
        y=[safe(n) for n, _ in rows],
        error_x=error,
        mode="markers",
        marker={"size": 10, "color": look.shade},
    )
    figure = look.chart(
        [dots],
        f"95 % interval, n = {rows[0][1]['n']:,} unseen items",
        "champion better by (bits/byte)",
        " ",
        yaxis={"autorange": "reversed"},
        height=170 + 32 * len(rows),
    )
    figure.add_vline(x=0, line={"color": colour(1), "dash": "dash", "width": 1.5})
    return figure
