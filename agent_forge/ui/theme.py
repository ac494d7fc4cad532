"""How every figure looks: light and dark, colours that colour-blind people can tell apart, captions
that say what was measured how often; and the kinds of charts that there are.

Whatever depends on the theme is in the template, so that a page can change it in place.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito; on white and on black each can be told from the ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8F6BB3", "#7A6A00")
GREY = "#808080"  # of what it is compared with
GROUNDS = {"light": ("#FFFFFF", "#1B1F24", "#DDE1E6"), "dark": ("#14171A", "#E6E8EB", "#343A40")}
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
SHARE = {"tickformat": ".0%", "range": [0, 1.05]}  # of an axis
ORDER = {"autorange": "reversed", "type": "category"}  # the first row is at the top
HEIGHT, TOP, ROW = 360, 24, 26  # of a figure, above its plot, and of a row in one that has rows
WIDTH = 76  # letters of a line of a caption
LINE, LETTER, PANEL = 19, 7, 450  # pixels: a line of a legend, a letter in it, a plot
MOST_CELLS = 15  # columns of a heat map that has its numbers in it
MOST_DRAWN = 500  # points of a series
MOST_LETTERS = 80  # of a name from a run's files
Series = tuple[str, str, Sequence[Any], Sequence[Any]]  # name, kind (dashed if it has one), x, y


def colour(number: int) -> str:
    """The colour of the n-th run, the same in all figures."""
    return COLOURS[number % len(COLOURS)]


def faint(shade: str, share: float = 0.18) -> str:
    """A colour that what lies below shows through."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


def plain(value: Any, most: int = MOST_LETTERS) -> str:
    """A text from a run's files without control characters, cut if it is long."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def safe(value: Any, most: int = MOST_LETTERS) -> str:
    """The same as Plotly shows it: with no tags."""
    return html.escape(plain(value, most))


def cell(value: Any, most: int = MOST_LETTERS) -> str:
    """A cell of a table as people read it; what was not measured shows as `-`."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return "-" if value is None or value == "" else plain(value, most)


def template(theme: str) -> dict[str, Any]:
    """All that differs between light and dark."""
    ground, ink, line = GROUNDS[theme]
    lines, title = {"gridcolor": line, "linecolor": line}, {"font": {"size": 13}, "standoff": 8}
    axis = {**lines, "zerolinecolor": line, "automargin": True, "title": title}
    layout = {
        "font": {"family": FONT, "size": 13, "color": ink},
        "paper_bgcolor": ground,
        "plot_bgcolor": ground,
        "colorway": list(COLOURS),
        "xaxis": axis,
        "yaxis": axis,
        "polar": {"bgcolor": ground, "angularaxis": lines, "radialaxis": lines},
        "hoverlabel": {"bgcolor": ground, "font": {"color": ink}, "namelength": -1},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY},
    }
    return {"layout": layout}


@dataclass(frozen=True)
class Look:
    """The theme, and what captions say of the run."""

    theme: str = "light"
    run: str = ""
    config_hash: str = ""
    shade: str = COLOURS[0]  # of this run, in every figure

    def shades(self, names: Iterable[str], grey: Collection[str] = ()) -> dict[str, str]:
        """The colours of what is shown side by side: the first has that of the run."""
        names = list(dict.fromkeys(names))
        rest = [self.shade, *(c for c in COLOURS if c != self.shade)]
        own = [name for name in names if name not in grey]
        found = {name: rest[i % len(rest)] for i, name in enumerate(own)}
        return {name: found.get(name, GREY) for name in names}

    def chart(self, traces: Iterable[Any], told: str, x: str, y: str, **layout: Any) -> go.Figure:
        """A figure of these traces, with units on its axes and its caption below."""
        config = f"config {self.config_hash[:12]}" if self.config_hash else ""
        run = f"run {self.run}" if self.run else ""
        text = " | ".join(part for part in (told, run, config) if part)
        lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False)
        caption = {
            "text": "<br>".join(safe(text, WIDTH) for text in lines),
            "font": {"size": 11},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "pad": {"l": 4, "b": 14 * len(lines) - 6},  # what is anchored is the first line
        }
        settings: dict[str, Any] = {
            "template": template(self.theme),
            "title": caption,
            "height": HEIGHT,
            "margin": {"l": 60, "r": 24, "t": TOP, "b": 58 + 15 * len(lines)},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            **layout,
        }
        for axis, title in (("xaxis", x), ("yaxis", y)):
            settings[axis] = {"title": {"text": title}, **settings.get(axis, {})}
        return fit_legend(go.Figure(list(traces), layout=settings))

    def lines(
        self,
        rows: Sequence[Series],
        told: str,
        x: str,
        y: str,
        grey: Collection[str] = (),
        **layout: Any,
    ) -> go.Figure | None:
        """Series over the same axis, thinned if they are long; None if there are none."""
        shades = self.shades((row[0] for row in rows), grey)
        traces, solid = [], {name for name, kind, *_ in rows if not kind}
        for name, kind, along, values in rows:
            every = -(-len(along) // MOST_DRAWN) or 1
            style = {"color": shades[name], "width": 2, "dash": "dash" if kind else "solid"}
            marks = {
                "mode": "lines+markers" if len(along) <= 12 else "lines",
                "name": safe(name),
                "legendgroup": safe(name),
                "cliponaxis": False,
                "showlegend": len(shades) > 1 and not (kind and name in solid),
            }
            drawn = list(along[::every]), list(values[::every])
            traces.append(go.Scatter(x=drawn[0], y=drawn[1], line=style, **marks))
        dashed = ", ".join(dict.fromkeys(kind for _, kind, *_ in rows if kind))
        told = f"dashed: {dashed} | {told}" if dashed else told
        return self.chart(traces, told, x, y, **layout) if traces else None

    def bars(
        self,
        rows: Mapping[str, Mapping[str, Any]],
        told: str,
        unit: str,
        grey: Collection[str] = (),
        across: bool = False,
        **layout: Any,
    ) -> go.Figure | None:
        """Values by group of everything that is named, upright or across."""
        shades, groups = self.shades(rows, grey), {group for own in rows.values() for group in own}
        traces = []
        for name, own in rows.items():
            ends = list(own.values()), [safe(group) for group in own]
            x, y = ends if across else ends[::-1]
            how = {"orientation": "h" if across else "v", "showlegend": len(rows) > 1}
            traces.append(go.Bar(x=x, y=y, name=safe(name), marker_color=shades[name], **how))
        if not groups:
            return None
        if across:
            return self.rows(traces, len(groups), told, unit, **layout)
        return self.chart(traces, told, "", unit, **{"xaxis": {"type": "category"}, **layout})

    def rows(
        self, traces: Iterable[Any], count: int, told: str, x: str, **layout: Any
    ) -> go.Figure:
        """A figure with a row of each name."""
        axes = {"yaxis": ORDER, "height": 150 + ROW * count, **layout}
        return self.chart(traces, told, x, "", **axes)

    def intervals(
        self, rows: Mapping[str, Sequence[float]], told: str, x: str, grey: Collection[str] = ()
    ) -> go.Figure | None:
        """A value with its interval, from below to above, of each row."""
        if not rows:
            return None
        shades = [GREY if name in grey else self.shade for name in rows]
        ends = {
            "array": [high - value for _, value, high in rows.values()],
            "arrayminus": [value - low for low, value, _ in rows.values()],
        }
        dots = go.Scatter(
            x=[value for _, value, _ in rows.values()],
            y=[safe(name) for name in rows],
            error_x={"type": "data", "symmetric": False, "color": GREY, **ends},
            mode="markers",
            marker={"size": 11, "color": shades},
        )
        return self.rows([dots], len(rows), told, x)

    def heat(
        self, rows: Mapping[str, Sequence[float | None]], along: Sequence[Any], told: str, x: str
    ) -> go.Figure | None:
        """Shares as colours, a row of each name."""
        if not rows:
            return None
        scale: dict[str, Any] = {
            "colorscale": "Cividis",
            "zmin": 0,
            "zmax": 1,
            "colorbar": {"tickformat": ".0%"},
        }
        names = [safe(name) for name in rows]
        if len(along) <= MOST_CELLS:
            scale["texttemplate"] = "%{z:.0%}"
        trace = go.Heatmap(z=list(rows.values()), x=list(along), y=names, **scale)
        return self.rows([trace], len(rows), told, x)


def fit_legend(figure: go.Figure) -> go.Figure:
    """The same figure with room for its legend: the plot keeps its size."""
    told = [
        str(trace.name) for trace in figure.data if trace.name and trace.showlegend is not False
    ]
    shown = len(figure.data) > 1 or any(trace.showlegend for trace in figure.data)
    widths = [LETTER * len(name) + 46 for name in told if shown]
    # Where they need more than one line, all entries get the width of the widest.
    columns = len(widths) if sum(widths) <= PANEL else max(1, PANEL // max(widths))
    above = TOP + (LINE * -(-len(widths) // columns) if widths else 0)
    figure.layout.height += above - figure.layout.margin.t
    figure.layout.margin.t = above
    return figure


def level(figure: go.Figure, y: float, text: str, shade: str = GREY) -> None:
    """A horizontal line: a threshold, or what it is compared with."""
    figure.add_hline(y=y, line={"color": shade, "dash": "dash", "width": 1.5})
    font, right = {"color": shade, "size": 11}, {"x": 1, "xref": "paper", "xanchor": "right"}
    about = {"text": safe(text), "showarrow": False, "font": font, "yanchor": "top", **right}
    figure.add_annotation(y=y, **about)
