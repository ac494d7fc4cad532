"""A run at a glance: a card of each phase, what is to be done, and what happened last."""

from __future__ import annotations

import streamlit as st

from agent_forge.config.phases import ORDER
from agent_forge.phases import SUMMARY
from agent_forge.pipeline import jobs
from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.track.progress import clock, describe
from agent_forge.ui.dashboard import state
from agent_forge.ui.report import about
from agent_forge.ui.theme import cell, plain

IN_A_ROW = 4
LAST_EVENTS = 12
# What is shown of a phase that is at work, by the end of a metric's name.
KEY_METRICS = {
    "best_fitness": "best fitness",
    "loss_avg_100": "loss, mean of 100 steps",
    "loss": "loss",
}


def render() -> None:
    """The page."""
    session = state.chosen()
    if session is None:
        st.info("No runs yet. Start one on the page Configuration, or by: forge run --preset smoke")
        return
    with state.problems():
        with state.reading(session) as view:
            told, live = about(view), view.is_live
        st.text(told)
        _controls(session)
        state.live(_cards, state.LIVE_S if live else None, session)
        state.live(_whole, state.FIGURES_S if live else None, session)


def _controls(session: str) -> None:
    """Stop what runs, go on with what does not."""
    with state.reading(session) as view:
        live, done = view.is_live, view.status == "completed"
    left, right, _ = st.columns([1, 1, 6])
    with left, st.popover("Stop", disabled=not live, key="stop"):
        st.text(f"{plain(session)} saves everything and stops after its present step.")
        if st.button("Stop this run", key="stop-now", type="primary"):
            with state.problems("It cannot be stopped"):
                jobs.stop_run(state.store(), session)
                st.caption("It was asked to stop.")
    with right:
        idle = not live and not done
        if st.button("Resume", key="resume", disabled=not idle, help="go on where it stopped"):
            with state.problems("It does not go on"):
                with st.spinner("Starting ..."):
                    jobs.resume_run(state.store(), session)
                state.go_to(session)


def _cards(session: str) -> None:
    with state.reading(session) as view:
        _why_ended(view)
        there = {phase.name: phase for phase in view.phases}
        names = [name for name in ORDER if name != "toy" and "toy" not in there] or list(there)
        for first in range(0, len(names), IN_A_ROW):
            row = names[first : first + IN_A_ROW]
            for column, name in zip(st.columns(IN_A_ROW), row, strict=False):
                with column, st.container(border=True, height="stretch", key=f"card-{name}"):
                    _card(view, name, there.get(name))


def _card(view: RunView, name: str, phase: PhaseView | None) -> None:
    st.markdown(f"**{ORDER.index(name)} {name}**")
    st.caption(SUMMARY[name])
    if phase is None:
        st.text("not asked for")
        return
    state.badge(phase.status)
    if phase.status == "running":
        share = "-" if phase.share is None else f"{phase.share:.0%}"
        told = f"{share}, time left {clock(phase.eta_s)}"
        st.progress(phase.share or 0.0, text=told)
    elif phase.seconds is not None:
        st.caption(f"took {clock(phase.seconds)}")
    _key_figure(view, phase)


def _key_figure(view: RunView, phase: PhaseView) -> None:
    """Its measure before and after; of one that is at work the newest value of what it improves."""
    if told := phase.headline:
        before, after = (state.number(told.get(key)) for key in ("before", "after"))
        st.metric("on unseen items", f"{before} \N{RIGHTWARDS ARROW} {after}")
        st.text(plain(told.get("measure", "-")))
        return
    for end, label in KEY_METRICS.items():
        for (of, name), series in reversed(view.series.items()):
            if of == phase.name and name.rpartition("/")[2] == end:
                st.metric(label, cell(series.latest))
                return
    st.metric("key figure", "-")


def _why_ended(view: RunView) -> None:
    """Why a run failed or paused, as it said itself."""
    ends = [e for e in view.events if e.get("event") in ("run_failed", "run_paused")]
    if view.status == "failed":
        state.problem("The run failed", describe(ends[-1]) if ends else "its events say no more")
    elif view.status == "paused" and ends:
        st.text(describe(ends[-1]))


def _whole(session: str) -> None:
    with state.opened(session) as run:
        if shown := run.figures(None, state.theme()):
            state.figures(shown, f"run-{session}")
        st.markdown("**Last events**")
        events = run.view.events[: -LAST_EVENTS - 1 : -1]
        rows = [(state.moment(event.get("time")), describe(event)) for event in events]
        state.table([("time (UTC)", "event"), *rows], key=f"events-{session}")
