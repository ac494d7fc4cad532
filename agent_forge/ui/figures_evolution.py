"""Figures of Phase 2: how the population went, what it tried, where the champion comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from agent_forge.errors import ForgeError
from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.search.settings import ACTS_IN, PAIRS
from agent_forge.store import files
from agent_forge.track.journal import read_lines
from agent_forge.ui.theme import COLOURS, GREY, Look, cell, faint, fit_legend, level, safe

Row = Mapping[str, Any]
Rows = Sequence[Row]
JOURNAL, LINEAGE = Path("evolution") / "journal.jsonl", "lineage.json"
PREFIX = "generation/"
MOST_NODES = 40  # of a lineage that are drawn
MOST_NAMED = 12  # nodes whose names are shown; of more, those of the ends
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")
THRESHOLDS = {
    "min_diversity": "below: stronger mutation",
    "diversity_reseed_threshold": "below: new combinations",
}


def evolution_figures(
    view: RunView, phase: PhaseView, look: Look
) -> list[tuple[str, go.Figure | None]]:
    """All figures of the evolution of a run."""
    rows = generations(view, phase.name)
    journal = phase.folder / JOURNAL
    journal = journal if journal.is_file() else phase.folder / JOURNAL.name  # of forge evo
    candidates, references = measured(record for _, record in read_lines(journal))
    ancestry, names = _ancestry(phase)
    references = _now(rows) or references
    parents = {f"parent {n}": f"parent {name}" for n, name in enumerate(names)}
    parents["average"] = "plain average"
    references = {parents.get(origin, origin): value for origin, value in references.items()}
    recipe = str(phase.metrics.get("best_merge_technique") or "")
    settings = view.config.get("phases", {}).get(phase.name, {})
    usage = [
        (f"{n:03b}", used, view.latest(f"combo/{n}/avg_fitness", phase.name))
        for n in range(8)
        if (used := view.latest(f"combo/{n}/usage", phase.name)) is not None
    ]
    verdict = phase.artifacts.get("verdict") or {}
    gains, n = gains_of(verdict), items_of(verdict)
    told = f"on unseen items, 95 % interval; right of 0 the champion is better | n = {n:,} items"
    gain = look.intervals(gains, told, "gain (bits/byte)")
    if gain is not None:
        gain.add_vline(x=0, line={"color": GREY, "width": 1.5})
    return [
        ("Evolution", evolution(rows, references, recipe, look, len(candidates))),
        ("Diversity", diversity(rows, settings, look)),
        ("Combinations", combinations(usage, look)),
        ("Lineage of the champion", lineage(ancestry, candidates, names, look)),
        ("Gain of the champion over each", gain),
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


def measured(records: Iterable[Row]) -> tuple[dict[str, Row], dict[str, float]]:
    """The candidates of a journal by their key, and the fitness of parents and plain average: none
    if it cannot be compared, because a domain was left out after them."""
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


def _now(rows: Rows) -> dict[str, float]:
    """The fitness of parents and plain average by what counts now, where it was recorded."""
    found = {}
    for name, value in (rows[-1] if rows else {}).items():
        origin = name.removesuffix("_fitness").replace("_", " ")
        if origin.startswith("parent ") or origin == "plain average":
            found[origin] = value
    return found


def evolution(
    rows: Rows, references: Mapping[str, float], recipe: str, look: Look, tried: int = 0
) -> go.Figure | None:
    """Best, mean and the band from worst to best of each generation, with the parents and their
    plain average as level lines, and how the champion was made."""
    rows = [row for row in rows if "best_fitness" in row]
    x = [row["generation"] for row in rows]
    told = f"n = {tried:,} candidates" if tried else f"n = {len(rows):,} generations"
    told = f"champion: {recipe} | {told}" if recipe else told
    best = [("best so far", "", x, [row["best_fitness"] for row in rows])]
    mean = [("mean of a generation", "", x, [row.get("avg_fitness") for row in rows])]
    axis = {"dtick": max(1, len(x) // 10)}
    figure = look.lines([*best, *mean] if rows else [], told, "generation", "fitness", xaxis=axis)
    if figure is None:
        return None
    edge = {"color": faint(look.shade, 0.4), "width": 1}
    band = {"fill": "tonexty", "fillcolor": faint(look.shade), "name": "worst to best"}
    for name, more in (("min_fitness", {"showlegend": False}), ("max_fitness", band)):
        y = [row.get(name) for row in rows]
        figure.add_scatter(x=x, y=y, mode="lines", line=edge, hoverinfo="skip", **more)
    for number, (name, fitness) in enumerate(references.items()):
        line = {"color": GREY, "width": 1.5, "dash": DASHES[number % len(DASHES)]}
        ends = {"x": [x[0], x[-1]], "y": [fitness, fitness]}
        figure.add_scatter(**ends, mode="lines", name=safe(name), line=line)
    return fit_legend(figure)


def diversity(rows: Rows, settings: Row, look: Look) -> go.Figure | None:
    """How far the candidates of a generation are apart, with the thresholds that act."""
    rows = [row for row in rows if "diversity_score" in row]
    x, y = ([row[name] for row in rows] for name in ("generation", "diversity_score"))
    series = [("diversity", "", x, y)] if rows else []
    axes: dict[str, Any] = {
        "xaxis": {"dtick": max(1, len(x) // 10)},
        "yaxis": {"rangemode": "tozero"},
    }
    unit, told = "distance over that of the parents", f"n = {len(rows):,} generations"
    figure = look.lines(series, told, "generation", unit, **axes)
    for name, text in THRESHOLDS.items() if figure else ():
        if settings.get("strategy") in ACTS_IN[name] and settings.get(name):
            level(figure, settings[name], f"{text} ({settings[name]:g})", COLOURS[1])
    return figure


def combinations(usage: Sequence[tuple[str, float, float | None]], look: Look) -> go.Figure | None:
    """How often each of the eight was used, and above it the mean fitness of what it made."""
    told = f"n = {sum(used for _, used, _ in usage):,.0f} candidates"
    axes: dict[str, Any] = {
        "yaxis": {"domain": [0, 0.42], "title": {"text": "times used"}, "tickformat": ",d"},
        "height": 470,
    }
    told = f"below each: interpolation, task arithmetic, selection of layers | {told}"
    ticks = ["<br>".join([n, *(_technique(i, bit) for i, bit in enumerate(n))]) for n, *_ in usage]
    names = {"tickvals": [n for n, *_ in usage], "ticktext": ticks, "tickfont": {"size": 11}}
    axes["xaxis"] = {"type": "category", "tickangle": 0, **names}
    axes["yaxis2"] = {"title": {"text": "mean fitness"}, "domain": [0.55, 1]}
    figure = look.bars({"times used": {n: used for n, used, _ in usage}}, told, "", **axes)
    if figure:
        figure.layout.margin.b += 30  # for the names below the bars
        x, y = [name for name, *_ in usage], [fitness for *_, fitness in usage]
        marker = {"size": 10, "symbol": "diamond", "color": COLOURS[1]}
        dots = {"mode": "markers", "marker": marker, "showlegend": False}
        figure.add_scatter(x=x, y=y, yaxis="y2", name="mean fitness", **dots)
    return figure


def _technique(stage: int, bit: str) -> str:
    """What a bit of a combination stands for, short enough for below a bar."""
    return PAIRS[stage][int(bit)].removesuffix("merge")


def _ancestry(phase: PhaseView) -> tuple[Rows, list[str]]:
    """The candidates that the champion comes from, inputs before what is made of them, and the
    names of the models that were merged."""
    for path in (model / LINEAGE for model in phase.models):
        with suppress(ForgeError, OSError):
            found = files.read_json(path)
            rows = [row for row in found.get("candidates", []) if "key" in row]
            return rows, [Path(str(one.get("model"))).name for one in found.get("models", [])]
    return [], []


def lineage(
    rows: Rows, candidates: Mapping[str, Row], names: Sequence[str], look: Look
) -> go.Figure | None:
    """What the champion was made of, and that of what, from the parents on the left."""
    made = [row for row in rows if row["inputs"]]
    rows = [*(row for row in rows if not row["inputs"]), *made[-MOST_NODES:]]
    if not made:
        return None
    places: dict[str, tuple[int, int]] = {}  # steps from the parents, and number among these
    for row in rows:
        at = 1 + max((places[key][0] for key in row["inputs"] if key in places), default=-1)
        places[row["key"]] = at, -sum(1 for other, _ in places.values() if other == at)
    pairs = [(key, row["key"]) for row in rows for key in row["inputs"] if key in places]
    x, y = ([v for a, b in pairs for v in (places[a][i], places[b][i], None)] for i in (0, 1))
    shades = [look.shade if row["inputs"] else GREY for row in rows]
    told = [f"{row.get('origin')}: {_fitness(candidates.get(row['key']))}" for row in rows]
    nodes = go.Scatter(
        x=[p[0] for p in places.values()],
        y=[p[1] for p in places.values()],
        text=[safe(name, 36) for name in _named(rows, names)],
        textposition="top center",
        hovertext=[safe(text, 160) for text in told],
        hoverinfo="text",
        mode="markers+text",
        marker={"size": 14, "color": [*shades[:-1], COLOURS[1]]},
    )
    style = {"mode": "lines", "line": {"color": GREY, "width": 1}, "hoverinfo": "skip"}
    lowest, last = min(nodes.y), max(nodes.x)
    hidden = {"visible": False, "range": [lowest - 0.3, 0.5]}
    axis = {"dtick": max(1, last // 8), "range": [-0.4 - 0.05 * last, last + 0.4 + 0.05 * last]}
    axes = {"xaxis": axis, "yaxis": hidden, "height": 200 - 60 * lowest}
    n = f"n = {len(rows)} candidates"
    traces = [go.Scatter(x=x, y=y, **style), nodes]
    return look.chart(traces, n, "steps from the parents", "", showlegend=False, **axes)


def _named(rows: Rows, names: Sequence[str]) -> list[str]:
    """What is written at each node: the name of a parent, else how it was made."""
    told = []
    for row in rows:
        index, last = (row.get("operation") or {}).get("index"), row is rows[-1]
        if not row["inputs"] and isinstance(index, int) and 0 <= index < len(names):
            told.append(names[index])
        else:
            text = "champion" if last else str(row.get("origin"))
            told.append(text if last or len(rows) <= MOST_NAMED else "")
    return told


def _fitness(record: Row | None) -> str:
    """The fitness of a candidate, and the generation that it is of."""
    found = record or {}
    fitness = (found.get("score") or {}).get("fitness")
    return f"generation {cell(found.get('generation'))}, fitness {cell(fitness)}"


def gains_of(verdict: Row) -> dict[str, tuple[float, float, float]]:
    """By how much the champion is better than each rival on unseen items: low, value, high."""
    rivals = (verdict.get("rivals") or {}).items()
    found = {name: r["comparison"]["overall"]["gains"].get("bits_per_byte") for name, r in rivals}
    return {name: (g["low"], g["value"], g["high"]) for name, g in found.items() if g}


def items_of(verdict: Row) -> int:
    """The items that the verdict is about."""
    for rival in (verdict.get("rivals") or {}).values():
        gains = rival["comparison"]["overall"]["gains"].values()
        return max((int(gain["n"]) for gain in gains), default=0)
    return 0


def scores_of(verdict: Row, measure: str) -> dict[str, dict[str, float]]:
    """By model and domain: what the verdict measured of champion and rivals."""
    models = {"champion": verdict.get("champion") or {}}
    models |= {name: rival.get("score") for name, rival in (verdict.get("rivals") or {}).items()}
    return {
        name: {
            key.removesuffix(f"/{measure}"): value
            for key, value in score.get("raw", {}).items()
            if key.endswith(f"/{measure}")
        }
        for name, score in models.items()
        if score
    }
