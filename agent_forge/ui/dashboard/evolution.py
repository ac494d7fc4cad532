"""Phase 2 as it goes: generations, diversity, what was tried, the best candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import streamlit as st

from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.track.journal import read_lines
from agent_forge.track.progress import clock
from agent_forge.ui.dashboard import state
from agent_forge.ui.figures_evolution import JOURNAL, measured
from agent_forge.ui.theme import cell

PHASE = "evomerge"
BEST = 10  # candidates that are listed
NUMBERS = {
    "best_fitness": "best fitness",
    "avg_fitness": "mean fitness",
    "diversity_score": "diversity",
}


def render() -> None:
    """The page."""
    session = state.chosen()
    if session is None:
        st.info("No runs yet.")
        return
    with state.problems():
        with state.reading(session) as view:
            there = any(p.name == PHASE and p.status != "waiting" for p in view.phases)
            live = view.is_live
        if not there:
            st.info("This run has not begun an evolution." if live else "This run has none.")
        state.live(_numbers, state.LIVE_S if live else None, session)
        state.live(_figures, state.FIGURES_S if live else None, session)


def _phase(view: RunView) -> PhaseView | None:
    return next((p for p in view.phases if p.name == PHASE and p.status != "waiting"), None)


def _numbers(session: str) -> None:
    with state.reading(session) as view:
        phase = _phase(view)
        if phase is None:
            return
        series = {name: view.series.get((PHASE, f"generation/{name}")) for name in NUMBERS}
        steps = [s.steps[-1] for s in series.values() if s and s.steps]
        total = view.config.get("phases", {}).get(PHASE, {}).get("generations")
        columns = st.columns(len(NUMBERS) + 3)
        with columns[0]:
            st.caption("status")
            state.badge(phase.status)
        newest = cell(max((n for n in steps if n is not None), default=None))
        columns[1].metric("generation", f"{newest} of {cell(total)}" if total else newest)
        for column, (name, label) in zip(columns[2:], NUMBERS.items(), strict=False):
            own = series[name]
            column.metric(label, cell(own.latest if own else None))
        columns[-1].metric("time left", clock(phase.eta_s))


def _figures(session: str) -> None:
    with state.opened(session) as run:
        phase = _phase(run.view)
        if phase is None:
            return
        state.figures(run.figures(PHASE, state.theme()), f"{session}-evolution")
        st.markdown("**Best candidates**")
        rows = list(best(phase))
        head = ("fitness", "generation", "how it was made", "from")
        state.table([head, *rows], key=f"best-{session}")


def best(phase: PhaseView) -> Iterator[tuple[Any, ...]]:
    """The best candidates of the journal, the best first."""
    candidates, _ = measured(record for _, record in read_lines(phase.folder / JOURNAL))
    scored = [(fitness, r) for r in candidates.values() if (fitness := _fitness(r)) is not None]
    for fitness, record in sorted(scored, key=lambda pair: -pair[0])[:BEST]:
        kind = (record.get("operation") or {}).get("kind")
        yield fitness, record.get("generation"), kind, record.get("origin")


def _fitness(record: Mapping[str, Any]) -> float | None:
    fitness = (record.get("score") or {}).get("fitness")
    return float(fitness) if isinstance(fitness, int | float) else None
