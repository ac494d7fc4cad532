"""Figures of Phases 3 to 8, each of what only that phase measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.ui.theme import BASELINE, COLOURS, Look, colour, level, line, safe

Found = list[tuple[str, go.Figure | None]]
Row = Mapping[str, Any]
SHARE = {"tickformat": ".0%", "range": [0, 1.05]}
MASTERED = 0.75  # share of a size that counts as solved


def settings_of(view: RunView, phase: PhaseView) -> Row:
    """The settings of a phase, as the run was begun with."""
    found: Row = view.config.get("phases", {}).get(phase.name, {})
    return found


# -- Phase 3 ---------------------------------------------------------------------------------------


def theatre_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    found = phase.artifacts.get("theatre") or {}
    items = settings_of(view, phase).get("thought_items")
    measured = f"exact answers, n = {items} a family" if items else "exact answers"
    by_level = found.get("by_level", {})
    return [
        ("Thoughts against controls", bars(found.get("accuracy", {}), look, measured, ("own",))),
        ("Thoughts by level", theatre_by_level(by_level, look, measured)),
    ]


def bars(
    rows: Mapping[str, Mapping[str, float]],
    look: Look,
    measured: str,
    own: Sequence[str] = (),
    unit: str = "share right",
) -> go.Figure | None:
    """Shares by group. What `own` names has the run's colour; of the rest the first is grey."""
    if not rows:
        return None
    rest = [name for name in rows if name not in own]
    shades = dict(zip(rest, (BASELINE, *COLOURS[1:]), strict=False))
    traces = [
        go.Bar(
            x=[safe(group) for group in values],
            y=list(values.values()),
            name=safe(name),
            marker_color=shades.get(name, look.shade),
        )
        for name, values in rows.items()
    ]
    axes = {"yaxis": SHARE, "xaxis": {"type": "category"}}
    return look.chart(traces, measured, " ", unit, barmode="group", **axes)


def theatre_by_level(
    levels: Mapping[str, Mapping[str, Row]], look: Look, measured: str
) -> go.Figure | None:
    """Accuracy with thoughts, and dashed without, by the level of each family."""
    traces = []
    for index, (family, rows) in enumerate(levels.items()):
        steps = sorted(map(int, rows))
        for name, dash, text in (("own", "solid", "thoughts"), ("none", "dash", "none")):
            values = [rows[str(step)].get(name) for step in steps]
            style: dict[str, Any] = {"mode": "lines+markers", "line": {"dash": dash}}
            traces.append(line(steps, values, f"{family}, {text}", colour(index), **style))
    if not traces:
        return None
    return look.chart(traces, measured, "level", "share right", yaxis=SHARE)


# -- Phase 4 ---------------------------------------------------------------------------------------


def bitnet_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    costs = next((t for t in phase.artifacts.get("tables", []) if t[0][:1] == ["matrices"]), [[]])
    rows = [dict(zip(costs[0], row, strict=True)) for row in costs[1:]]
    items = phase.artifacts.get("calibration_samples")
    return [
        ("Sensitivity of matrices to rounding", sensitivity(rows, look, items)),
        ("Weights that are 0", sparsity(phase.artifacts.get("zeros") or {}, look)),
    ]


def sensitivity(rows: Sequence[Row], look: Look, items: int | None) -> go.Figure | None:
    """What it costs to round each kind of matrix alone, coloured by the codec that it got."""
    if not rows:
        return None
    codecs = list(dict.fromkeys(str(row["codec"]) for row in rows))
    traces = []
    for index, codec in enumerate(codecs):
        own = [row for row in rows if row["codec"] == codec]
        bar = {"name": safe(codec), "orientation": "h", "marker_color": colour(index)}
        names = [safe(row["matrices"]) for row in own]
        traces.append(go.Bar(x=[row["nats more alone"] for row in own], y=names, **bar))
    order = {"categoryorder": "array", "categoryarray": [safe(r["matrices"]) for r in rows][::-1]}
    told = f"before training, n = {items} items" if items else "before training"
    height = 170 + 24 * len(rows)
    return look.chart(
        traces, told, "loss by it alone (nats/token)", " ", yaxis=order, height=height
    )


def sparsity(zeros: Mapping[str, float], look: Look) -> go.Figure | None:
    """The share of weights that are 0, by layer and kind of matrix."""
    kinds: dict[str, dict[str, float]] = {}
    for name, share in zeros.items():
        parts = name.removesuffix(".weight").split(".")
        layer = next((part for part in parts if part.isdigit()), "rest")
        kinds.setdefault(".".join(p for p in parts if not p.isdigit()), {})[layer] = share
    if not kinds:
        return None
    layers = sorted({x for own in kinds.values() for x in own}, key=lambda x: (x == "rest", x))
    names = [name if name == "rest" else f"layer {name}" for name in layers]
    values = [[own.get(layer) for layer in layers] for own in kinds.values()]
    heat = {"colorscale": "Cividis", "texttemplate": "%{z:.0%}", "colorbar": {"tickformat": ".0%"}}
    trace = go.Heatmap(z=values, x=names, y=[safe(kind) for kind in kinds], zmin=0, zmax=1, **heat)
    height = 150 + 26 * len(kinds)
    return look.chart([trace], f"n = {len(zeros)} matrices", "layer", " ", height=height)


# -- Phase 5 ---------------------------------------------------------------------------------------


def forge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    found = phase.artifacts
    return [
        ("How far each family reaches", reaches(_edges(view, phase), look)),
        ("Solved by size", solved(found.get("solved") or {}, look)),
        ("Levels of the curriculum", levels(found.get("looks") or [], look)),
        ("Rounds beyond the edge", rounds(found.get("rounds") or [], look)),
    ]


def _edges(view: RunView, phase: PhaseView) -> dict[str, dict[str, dict[str, float]]]:
    """By model and family: the largest size that is solved, and its interval."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for (of, name), series in view.series.items():
        model, *rest = name.split("/")
        if of == phase.name and len(rest) == 3 and rest[0] == "edge" and series.latest is not None:
            rows.setdefault(model, {}).setdefault(rest[1], {})[rest[2]] = series.latest
    return rows


def reaches(rows: Mapping[str, Mapping[str, Row]], look: Look) -> go.Figure | None:
    """The largest size of which three of four are solved, with its interval, before and after."""
    traces = []
    for name, families in rows.items():
        known = {f: v for f, v in families.items() if {"reach", "low", "high"} <= set(v)}
        sizes = [own["reach"] for own in known.values()]
        above = [own["high"] - own["reach"] for own in known.values()]
        below = [own["reach"] - own["low"] for own in known.values()]
        error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        marker = {"size": 11, "color": BASELINE if name == "input" else look.shade}
        dots = {"mode": "markers", "marker": marker, "error_y": error, "name": safe(name)}
        traces.append(go.Scatter(x=[safe(family) for family in known], y=sizes, **dots))
    if not traces:
        return None
    items = sum(v.get("items", 0) for own in rows.values() for v in own.values())
    axes = {"xaxis": {"type": "category"}, "yaxis": {"rangemode": "tozero"}, "scattermode": "group"}
    told = f"90 % interval, n = {items:,.0f} items"
    return look.chart(traces, told, "family", "largest size solved", **axes)


def solved(rows: Mapping[str, Mapping[str, Mapping[str, float]]], look: Look) -> go.Figure | None:
    """The share that is solved of each size of a family: dashed by the input, solid after."""
    traces = []
    for name, families in rows.items():
        for index, (family, sizes) in enumerate(families.items()):
            x = sorted(map(int, sizes))
            dash = {"dash": "dash" if name == "input" else "solid"}
            y = [sizes[str(size)] for size in x]
            traces.append(line(x, y, f"{family}, {name}", colour(index), line=dash))
    if not traces:
        return None
    figure = look.chart(traces, "unseen items", "size", "share solved", yaxis=SHARE)
    level(figure, MASTERED, "solved")
    return figure


def levels(looks: Sequence[Mapping[str, Mapping[str, float]]], look: Look) -> go.Figure | None:
    """The share that is solved of each size, at every look during training."""
    sizes = {(f, int(size)) for seen in looks for f, own in seen.items() for size in own}
    if not sizes:
        return None
    rows = sorted(sizes)
    values = [[seen.get(f, {}).get(str(size)) for seen in looks] for f, size in rows]
    heat = {"colorscale": "Cividis", "zmin": 0, "zmax": 1, "colorbar": {"tickformat": ".0%"}}
    names = [f"{safe(family)} {size}" for family, size in rows]
    trace = go.Heatmap(z=values, x=list(range(1, len(looks) + 1)), y=names, **heat)
    height = 170 + 22 * len(rows)
    told = f"share solved, n = {len(looks)} looks"
    return look.chart([trace], told, "look during training", " ", height=height)


def rounds(rows: Sequence[Row], look: Look) -> go.Figure | None:
    """The mean share of new sizes that is solved before and after each round of own thoughts."""
    families: dict[str, list[tuple[str, float | None]]] = {}
    for row in rows:
        for family, own in row["families"].items():
            end = "taken back" if row["taken_back"] else "after" if own["after"] else "not taught"
            for when, shares in (("before", own["before"]), (end, own["after"])):
                mean = sum(shares.values()) / len(shares) if shares else None
                at = f"round {row['number']}, {when}"
                families.setdefault(family, []).append((at, mean))
    if not families:
        return None
    traces = [
        line(*zip(*points, strict=True), name, colour(i), mode="lines+markers")
        for i, (name, points) in enumerate(families.items())
    ]
    told = f"n = {len(rows)} rounds"
    return look.chart(traces, told, "round", "share of new sizes solved", yaxis=SHARE)


# -- Phases 6 to 8 ---------------------------------------------------------------------------------


def baking_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    asked = next((t for t in phase.artifacts.get("tables", []) if t[0][:1] == ["asked"]), [[]])
    counted = [row for row in asked[1:] if isinstance(row[1], int)]
    names = [f"{row[0]} (n = {row[1]})" for row in counted]
    rows = {
        model: {name: row[i] for name, row in zip(names, counted, strict=True)}
        for i, model in enumerate(asked[0])
        if i > 1 and counted
    }
    course: dict[str, list[tuple[str, float]]] = {}
    for own in phase.artifacts.get("rounds") or []:
        end = "taken back" if own["taken_back"] else "kept"
        for skill, share in own["after"].items():
            course.setdefault(skill, []).append((f"{own['number']}: {own['kind']}, {end}", share))
    traces = [
        line(*zip(*points, strict=True), skill, colour(i), mode="lines+markers")
        for i, (skill, points) in enumerate(course.items())
    ]
    axes = {"yaxis": SHARE, "xaxis": {"type": "category"}}
    told = "items for choices, after each round"
    steps = look.chart(traces, told, "round", "share right", **axes) if traces else None
    return [
        ("Tools and persona", bars(rows, look, "unseen wordings", asked[0][-1:])),
        ("Rounds of baking", steps),
    ]


def edge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    whole = (phase.artifacts.get("performance_profile") or {}).get("input")
    points = [{"name": "input", "bytes": whole["model_bytes"], "kept": 1.0}] if whole else []
    for cut in phase.artifacts.get("cuts") or []:
        size, kept = cut["profile"]["model_bytes"], cut["retention"]["mean"]
        name = f"cut {cut['number']}: {cut['kind']}"
        points.append({"name": name, "bytes": size, "kept": kept, "left": cut["taken_back"]})
    gate = settings_of(view, phase).get("least_retention")
    return [("Size against quality", frontier(points, look, {"asked for": gate}))]


def compression_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    points = [
        {"name": p["name"], "bytes": p["bytes"], "kept": p["retention"]["mean"], "left": p["gate"]}
        for p in phase.artifacts.get("points") or []
    ]
    gate, chosen = settings_of(view, phase).get("least_retention"), phase.artifacts.get("chosen")
    gates = {"asked for": gate}
    return [("Size against quality", frontier(points, look, gates, str(chosen)))]


def frontier(
    points: Sequence[Row], look: Look, gates: Mapping[str, float | None], chosen: str = ""
) -> go.Figure | None:
    """Bytes against the share of the input's accuracy that is kept. What was left is open, what
    was chosen is a star."""
    if not points:
        return None
    marker = {
        "size": [18 if p["name"] == chosen else 12 for p in points],
        "symbol": [
            "star" if p["name"] == chosen else "circle-open" if p.get("left") else "circle"
            for p in points
        ],
        "color": [BASELINE if p["name"] == "input" else look.shade for p in points],
    }
    trace = go.Scatter(
        x=[p["bytes"] for p in points],
        y=[p["kept"] for p in points],
        text=[safe(p["name"]) for p in points],
        mode="markers+text",
        textposition="top center",
        marker=marker,
    )
    axes = {"xaxis": {"type": "log"}, "yaxis": {"tickformat": ".0%", "rangemode": "tozero"}}
    told = f"without the tokenizer, n = {len(points)} points"
    figure = look.chart([trace], told, "bytes", "accuracy kept of the input's", **axes)
    for name, gate in gates.items():
        if gate is not None:
            level(figure, gate, f"{name} ({gate:.0%})")
    return figure
