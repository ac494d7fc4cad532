"""Figures of Phases 3 to 8, each of what only that phase measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.ui.theme import GREY, SHARE, Look, level, safe

Found = list[tuple[str, go.Figure | None]]
Row = Mapping[str, Any]
SOLVED = 0.75  # of the items of a size: the size counts as solved


def theatre_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 3: do thoughts help, against controls."""
    found = phase.artifacts.get("theatre") or {}
    shares, levels = found.get("accuracy", {}), found.get("by_level", {})
    names = [n for n in ("own", "none") if n in shares]
    shares = {n: shares[n] for n in [*names, *(n for n in shares if n not in names)]}
    told = f"exact answers, n = {_settings(view, phase).get('thought_items', '-')} a family"
    rows = [
        (family, text, sorted(map(int, own)), [own[k].get(key) for k in sorted(own, key=int)])
        for family, own in levels.items()
        for key, text in (("own", ""), ("none", "without thoughts"))
    ]
    bars = look.bars(shares, told, "share right", ("none",), yaxis=SHARE)
    lines = look.lines(rows, told, "level", "share right", yaxis=SHARE)
    return [("Thoughts against controls", bars), ("Thoughts by level", lines)]


def bitnet_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 4: what rounding costs, and how much of the weights is 0."""
    costs: dict[str, dict[str, float]] = {}  # by codec and kind of matrix
    for row in _table(phase, "matrices"):
        costs.setdefault(row["codec"], {})[row["matrices"]] = row["nats more alone"]
    told = f"before training, n = {phase.artifacts.get('calibration_samples', '-')} items"
    sensitivity = look.bars(costs, told, "loss by it alone (nats/token)", across=True)
    return [
        ("Sensitivity to rounding", sensitivity),
        ("Weights that are 0", sparsity(phase.artifacts.get("zeros") or {}, look)),
    ]


def sparsity(zeros: Mapping[str, float], look: Look) -> go.Figure | None:
    """The share of weights that are 0, by kind of matrix and layer."""
    kinds: dict[str, dict[str, float]] = {}
    for name, share in zeros.items():
        parts = name.removesuffix(".weight").split(".")
        layer = next((f"layer {part}" for part in parts if part.isdigit()), "elsewhere")
        kinds.setdefault(".".join(p for p in parts if not p.isdigit()), {})[layer] = share
    layers = sorted({n for own in kinds.values() for n in own}, key=lambda n: (len(n) > 8, n))
    rows = {kind: [own.get(layer) for layer in layers] for kind, own in kinds.items()}
    return look.heat(rows, layers, f"n = {len(zeros)} matrices", "")


def forge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 5: the edge of ability, before and after, and on the way."""
    found, edges = phase.artifacts, _edges(view, phase)
    items = sum(e.get("items", 0) for e in edges.values())
    ends = {n: (e["low"], e["reach"], e["high"]) for n, e in edges.items() if "reach" in e}
    grey = [name for name in ends if name.endswith("input")]
    told = "90 % interval; below the smallest size that is asked: none solved"
    told = f"{told} | n = {items:,.0f} items"
    reach = look.intervals(ends, told, "largest size solved", grey)
    if reach is not None:
        reach.update_xaxes(tickformat=",d")
    solved = [
        (
            f,
            n if n == "input" else "",
            sorted(map(int, own)),
            [own[k] for k in sorted(own, key=int)],
        )
        for n, families in (found.get("solved") or {}).items()
        for f, own in families.items()
    ]
    told = f"unseen items, n = {_settings(view, phase).get('verdict_items', '-')} a size"
    sizes = look.lines(solved, told, "size", "share solved", yaxis=SHARE)
    if sizes is not None:
        level(sizes, SOLVED, f"solved from here on ({SOLVED:.0%})")
    return [
        ("How far each family reaches", reach),
        ("Solved by size", sizes),
        ("Levels of the curriculum", levels(found.get("looks") or [], look)),
    ]


def _edges(view: RunView, phase: PhaseView) -> dict[str, dict[str, float]]:
    """By family and model: the largest size that is solved, and its interval."""
    rows: dict[str, dict[str, float]] = {}
    for (of, name), series in view.series.items():
        model, edge, family, key = [*name.split("/"), "", "", ""][:4]
        if of == phase.name and edge == "edge" and key and series.latest is not None:
            rows.setdefault(f"{family}, {model}", {})[key] = series.latest
    return dict(sorted(rows.items(), key=lambda row: row[0].partition(",")[0]))


def levels(looks: Sequence[Mapping[str, Row]], look: Look) -> go.Figure | None:
    """The share that is solved of each size, at every look during training."""
    sizes = sorted({(f, int(size)) for seen in looks for f, own in seen.items() for size in own})
    rows = {f"{f}, size {n}": [seen.get(f, {}).get(str(n)) for seen in looks] for f, n in sizes}
    told = f"share solved of each size | n = {len(looks)} looks"
    return look.heat(rows, range(1, len(looks) + 1), told, "look during training")


def baking_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 6: tools and persona, before and after, and round by round."""
    asked: dict[str, dict[str, float]] = {}  # by model
    for row in _table(phase, "asked"):
        if isinstance(row["items"], int):
            for model in list(row)[2:]:
                asked.setdefault(model, {})[f"{row['asked']}, n = {row['items']}"] = row[model]
    rounds = phase.artifacts.get("rounds") or []
    ends = [
        f"{r['number']}: {r['kind']}{', taken back' if r['taken_back'] else ''}" for r in rounds
    ]
    skills = list(rounds[0]["after"]) if rounds else []
    rows = [(skill, "", ends, [r["after"].get(skill) for r in rounds]) for skill in skills]
    axes: dict[str, Any] = {"yaxis": SHARE, "xaxis": {"type": "category"}}
    told = f"items for choices after each round, n = {len(rounds)} rounds"
    about = "unseen wordings, n of each behind its name"
    bars = look.bars(asked, about, "share right", ("input",), across=True, xaxis=SHARE)
    lines = look.lines(rows, told, "round", "share right", **axes)
    return [("Tools and persona", bars), ("Rounds of baking", lines)]


def edge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 7: what each cut leaves."""
    whole = (phase.artifacts.get("performance_profile") or {}).get("input")
    points = [("input", whole["model_bytes"], 1.0, "")] if whole else []
    for cut in phase.artifacts.get("cuts") or []:
        if (kept := cut["retention"].get("mean")) is not None:
            size = cut["profile"]["model_bytes"]
            points.append((f"cut {cut['number']}: {cut['kind']}", size, kept, cut["taken_back"]))
    gate = _settings(view, phase).get("least_retention")
    return [("Size against quality", frontier(points, look, gate))]


def compression_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    """Phase 8: the points between size and quality."""
    found = phase.artifacts.get("points") or []
    points = [
        (p["name"], p["bytes"], p["retention"]["mean"], p["gate"])
        for p in found
        if "mean" in p["retention"]  # of an input that can do something
    ]
    gate = _settings(view, phase).get("least_retention")
    chosen = str(phase.artifacts.get("chosen"))
    return [("Size against quality", frontier(points, look, gate, chosen))]


def frontier(
    points: Sequence[tuple[str, float, float, str]],
    look: Look,
    gate: float | None = None,
    chosen: str = "",
) -> go.Figure | None:
    """Bytes against the share of the input's accuracy that is kept, each with why it was left, if
    it was: these are open. What was chosen is a star."""
    if not points:
        return None
    signs = [
        "star" if n == chosen else "circle-open" if why else "circle" for n, _, _, why in points
    ]
    shades = [GREY if name == "input" else look.shade for name, *_ in points]
    order = sorted(range(len(points)), key=lambda i: points[i][1])  # neighbours' names alternate
    sides = {i: ("top", "bottom")[rank % 2] for rank, i in enumerate(order)}
    trace = go.Scatter(
        x=[size for _, size, _, _ in points],
        y=[kept for _, _, kept, _ in points],
        text=[safe(name) for name, *_ in points],
        hovertext=[safe(f"{name}: {why}" if why else name) for name, _, _, why in points],
        mode="markers+text",
        textposition=[f"{sides[i]} center" for i in range(len(points))],
        marker={"size": 14, "symbol": signs, "color": shades},
    )
    low, high = (math.log10(max(1, f(size for _, size, _, _ in points))) for f in (min, max))
    room = max(0.03, 0.15 * (high - low))  # for names beside the outermost
    top = max(1.0, *(kept for _, _, kept, _ in points), gate or 0) + 0.15
    axes = {
        "xaxis": {"type": "log", "range": [low - room, high + room], "nticks": 6},
        "yaxis": {"tickformat": ".0%", "range": [0, top]},
    }
    open_too = "open: taken back or below what is asked for" if "circle-open" in signs else ""
    told = [open_too, "star: chosen" if "star" in signs else "", "without the tokenizer"]
    told += [f"n = {len(points)} points"]
    about = " | ".join(text for text in told if text)
    figure = look.chart([trace], about, "size (bytes)", "accuracy, of the input's", **axes)
    if gate is not None:
        level(figure, gate, f"asked for ({gate:.0%})")
    return figure


def _settings(view: RunView, phase: PhaseView) -> Row:
    """The settings of a phase, as the run was begun with."""
    found: Row = view.config.get("phases", {}).get(phase.name, {})
    return found


def _table(phase: PhaseView, first: str) -> list[Row]:
    """The rows of the table whose first column has this name."""
    for table in phase.artifacts.get("tables", []):
        if table and table[0][:1] == [first]:
            return [dict(zip(table[0], row, strict=False)) for row in table[1:]]
    return []
