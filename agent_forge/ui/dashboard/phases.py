"""One phase of a run: its verdict, figures, metrics, tables, what its models say, the models."""

from __future__ import annotations

from typing import Any

import streamlit as st

from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.ui.dashboard import state
from agent_forge.ui.figures import tables_of
from agent_forge.ui.report import model_row, samples_of
from agent_forge.ui.theme import Look, plain, safe


def render() -> None:
    """The page."""
    session = state.chosen()
    if session is None:
        st.info("No runs yet.")
        return
    with state.problems():
        with state.reading(session) as view:
            names = [phase.name for phase in view.phases]
            live = view.is_live
        if not names:
            st.info("This run has no phases.")
            return
        begun = [phase.name for phase in view.phases if phase.status != "waiting"]
        newest = names.index(begun[-1]) if begun else 0
        name = st.selectbox("Phase", names, index=newest, key=f"phase-{session}")
        metric = _choose_metric(session, name)
        state.live(_head, state.LIVE_S if live else None, session, name)
        state.live(_figures, state.FIGURES_S if live else None, session, name, metric)
        with state.reading(session) as view:
            _details(view.phase(name), f"{session}-{name}")


def _choose_metric(session: str, phase: str) -> str | None:
    """The metric that is drawn, of all that the phase has measured."""
    with state.reading(session) as view:
        names = sorted(name for of, name in view.series if of == phase)
    options: dict[str, Any] = {"index": None, "placeholder": "choose one of all that was measured"}
    chosen: str | None = st.selectbox("Metric", names, key=f"metric-{session}-{phase}", **options)
    return chosen


def _head(session: str, name: str) -> None:
    """Status, times and the verdict."""
    with state.reading(session) as view:
        phase = view.phase(name)
        told = phase.headline or {}
        seconds = "-" if phase.seconds is None else f"{phase.seconds:.1f} s"
        share = "-" if phase.share is None else f"{phase.share:.0%}"
        values = {"time": seconds, "done": share}
        for end in ("before", "after"):
            values[f"{end}, unseen items"] = state.number(told.get(end))
        columns = st.columns([1, *[1] * len(values)])
        with columns[0]:
            st.caption("status")
            state.badge(phase.status)
        for column, (label, value) in zip(columns[1:], values.items(), strict=True):
            column.metric(label, value)
        verdict = told.get("verdict") or phase.artifacts.get("summary")
        if verdict:
            st.text(plain(told.get("measure", ""), 200))
            st.code(plain(verdict, 2000), language=None, wrap_lines=True)


def _figures(session: str, name: str, metric: str | None) -> None:
    with state.opened(session) as run:
        shown = list(run.figures(name, state.theme()))
        if metric and (figure := _metric(run.view, name, metric)):
            shown.insert(0, ("The chosen metric", figure))
        if shown:
            state.figures(shown, f"{session}-{name}")
        else:
            st.caption("Nothing that can be drawn was measured yet.")


def _metric(view: RunView, phase: str, metric: str) -> object | None:
    """One metric over its steps, or over time if it has none."""
    series = view.series.get((phase, metric))
    if series is None or not series.values:
        return None
    look = Look(state.theme(), view.session_id, view.config_hash)
    x, unit = state.along(series)
    told = f"n = {series.count:,} points"
    return look.lines([(metric, "", x, series.values)], told, unit, safe(metric))


def _details(phase: PhaseView, key: str) -> None:
    """What does not change while it runs."""
    if tables := list(tables_of(phase)):
        st.markdown("**Tables**")
        for number, rows in enumerate(tables):
            state.table(rows, key=f"table-{key}-{number}")
    for title, rows in samples_of(phase):
        st.markdown(f"**{title}**")
        state.table(rows, key=f"samples-{key}-{title}")
    if phase.models:
        st.markdown("**Models**")
        state.table([("model", "weights", "MB", "sha256"), *map(model_row, phase.models)])
    if phase.metrics:
        with st.expander("Results by the specification's names"):
            state.table([("name", "value"), *phase.metrics.items()], key=f"results-{key}")
