"""How every figure looks: light and dark, colours that colour-blind people can tell apart, a
caption with what was measured how often.

Whatever depends on the theme is in the template, so that a page can change it in place.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito; on white and on black each can be told from the ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8F6BB3", "#7A6A00")
BASELINE = "#808080"  # what it is compared with
GROUNDS = {"light": ("#FFFFFF", "#1B1F24", "#DDE1E6"), "dark": ("#14171A", "#E6E8EB", "#343A40")}
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
MOST_LETTERS = 80  # of a name from a run's files
HEIGHT = 400


def colour(number: int) -> str:
    """The colour of the n-th run or series, the same in all figures."""
    return COLOURS[number % len(COLOURS)]


def faint(shade: str, share: float = 0.18) -> str:
    """A colour that what lies below shows through."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


def safe(text: Any, most: int = MOST_LETTERS) -> str:
    """A text from a run's files as Plotly and HTML show it: no tags, no control characters."""
    plain = "".join(c if c.isprintable() else "?" for c in str(text))
    return html.escape(plain if len(plain) <= most else f"{plain[: most - 3]}...")


def template(theme: str) -> dict[str, Any]:
    """All that differs between light and dark."""
    ground, ink, line = GROUNDS[theme]
    lines = {"gridcolor": line, "linecolor": line}
    axis = {**lines, "zerolinecolor": line, "automargin": True}
    around = {"bgcolor": ground, "angularaxis": lines, "radialaxis": lines}
    cells = {"fill": {"color": ground}, "line": {"color": line}, "font": {"color": ink}}
    header = {**cells, "fill": {"color": line}}
    layout = {
        "font": {"family": FONT, "size": 13, "color": ink},
        "paper_bgcolor": ground,
        "plot_bgcolor": ground,
        "colorway": list(COLOURS),
        "xaxis": axis,
        "yaxis": axis,
        "polar": around,
        "hoverlabel": {"bgcolor": ground, "font": {"color": ink}, "namelength": -1},
    }
    return {"layout": layout, "data": {"table": [{"cells": cells, "header": header}]}}


@dataclass(frozen=True)
class Look:
    """The theme, and what captions say of the run."""

    theme: str = "light"
    run: str = ""
    config_hash: str = ""
    shade: str = COLOURS[0]  # of this run, in every figure

    def caption(self, *measured: str) -> str:
        """What was measured how often, whose it is, and by which config."""
        config = f"config {safe(self.config_hash[:12])}" if self.config_hash else ""
        run = f"run {safe(self.run)}" if self.run else ""
        return " | ".join(part for part in (*measured, run, config) if part)

    def chart(
        self, traces: Sequence[Any], measured: str, x: str = "", y: str = "", **layout: Any
    ) -> go.Figure:
        """A figure of these traces, with units on its axes and its caption below."""
        caption = {"text": self.caption(measured), "font": {"size": 11}, "x": 0.01, "y": 0.01}
        settings: dict[str, Any] = {
            "template": template(self.theme),
            "title": {**caption, "yref": "container", "yanchor": "bottom"},
            "height": HEIGHT,
            "margin": {"l": 60, "r": 24, "t": 40, "b": 90},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            **layout,
        }
        for axis, title in (("xaxis", x), ("yaxis", y)):
            if title:
                settings[axis] = {"title": {"text": title}, **settings.get(axis, {})}
        return go.Figure(list(traces), layout=settings)


def line(x: Sequence[Any], y: Sequence[Any], name: str, shade: str, **more: Any) -> go.Scatter:
    """One measured series."""
    style = {"color": shade, "width": 2, **more.pop("line", {})}
    mode = more.pop("mode", "lines" if len(x) > 1 else "markers")
    return go.Scatter(x=list(x), y=list(y), name=safe(name), mode=mode, line=style, **more)


def level(
    figure: go.Figure, y: float, text: str, shade: str = BASELINE, dash: str = "dash"
) -> None:
    """A horizontal line: a threshold, or what it is compared with."""
    figure.add_hline(y=y, line={"color": shade, "dash": dash, "width": 1.5})
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="right",
        y=y,
        yanchor="bottom",
        text=safe(text),
        showarrow=False,
        font={"color": shade, "size": 11},
    )


def table(look: Look, header: Sequence[Any], rows: Sequence[Sequence[Any]], measured: str) -> Any:
    """A table as a figure; what was not measured shows as `-`."""
    columns = [[cell(row[i]) if i < len(row) else "-" for row in rows] for i in range(len(header))]
    head = {"values": [f"<b>{cell(name)}</b>" for name in header], "align": "left"}
    body = {"values": columns, "align": "left", "height": 24}
    size = 90 + 26 * (len(rows) + 1)
    return look.chart([go.Table(header=head, cells=body)], measured, height=size)


def cell(value: Any) -> str:
    """A cell of a table as people read it."""
    if value is None or value == "":
        return "-"
    return number(value) if isinstance(value, float) else safe(value)


def number(value: float) -> str:
    """A measured number, to four places that count."""
    return f"{value:.4g}"


def present(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that were measured."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
    return {k: float(v) for k, v in numbers.items() if not isinstance(values[k], bool)}
