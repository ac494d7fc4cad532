"""Several runs side by side: settings that differ, what each phase changed, one metric of all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import streamlit as st

from agent_forge.config.phases import ORDER
from agent_forge.pipeline.run_view import Series, all_runs
from agent_forge.ui.dashboard import state
from agent_forge.ui.theme import Look, plain, safe

MOST_RUNS = 10
Head = dict[str, Any]


def render() -> None:
    """The page."""
    with state.problems():
        names = [str(row["session_id"]) for row in all_runs(state.store())]
        if len(names) < 2:
            st.info("Two runs are needed for a comparison.")
            return
        first = [name for name in (state.chosen(),) if name in names]
        begin = [*first, *(name for name in names if name not in first)][:2]
        options: dict[str, Any] = {"max_selections": MOST_RUNS, "key": "compared"}
        chosen = st.multiselect("Runs", names, begin, **options)
        if len(chosen) < 2:
            st.caption("Choose two runs or more.")
            return
        live = any(map(state.is_live, chosen))
        _settings(chosen)
        state.live(_headlines, state.FIGURES_S if live else None, chosen)
        metric = _choose_metric(chosen)
        if metric is not None:
            state.live(_overlay, state.FIGURES_S if live else None, chosen, metric)


def _settings(chosen: Sequence[str]) -> None:
    st.markdown("**Settings that differ**")
    configs: list[dict[str, str]] = []
    for session in chosen:
        with state.reading(session) as view:
            configs.append(dict(flat(view.config)))
    rows = differing(configs)
    if rows:
        state.table([("setting", *chosen), *rows], key="settings-differ")
    else:
        st.caption("none")


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a config by their keys."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", json.dumps(value)


def differing(configs: Sequence[Mapping[str, str]]) -> list[tuple[str | None, ...]]:
    """The settings that are not the same in all; those that a config does not have are None."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [(name, *(config.get(name) for config in configs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _headlines(chosen: Sequence[str]) -> None:
    """On unseen items, before and after each phase."""
    st.markdown("**What each phase changed, on unseen items**")
    found: dict[str, list[Any]] = {}
    for number, session in enumerate(chosen):
        with state.reading(session) as view:
            for phase in view.phases:
                told = phase.headline or {}
                cells = found.setdefault(phase.name, [None] * 3 * len(chosen))
                seconds = None if phase.seconds is None else f"{phase.seconds:.1f} s"
                cells[3 * number : 3 * number + 3] = told.get("before"), told.get("after"), seconds
    ends = ("before", "after", "time")
    head = ["phase", *(f"{session}: {end}" for session in chosen for end in ends)]
    rows = [(name, *found[name]) for name in ORDER if name in found]
    state.table([head, *rows], key="headlines")


def _choose_metric(chosen: Sequence[str]) -> tuple[str, str] | None:
    """A metric that at least two of the runs have measured."""
    counts: dict[tuple[str, str], int] = {}
    for session in chosen:
        with state.reading(session) as view:
            for key in view.series:
                counts[key] = counts.get(key, 0) + 1
    shared = sorted(key for key, count in counts.items() if count > 1)
    if not shared:
        st.caption("No metric was measured by two of them.")
        return None
    losses = [i for i, (_, name) in enumerate(shared) if name.endswith(("loss_avg_100", "/loss"))]
    options: dict[str, Any] = {"format_func": lambda key: f"{key[0]}: {plain(key[1])}"}
    options |= {"index": losses[0] if losses else 0, "key": "compared-metric"}
    chosen_key: tuple[str, str] = st.selectbox("Metric", shared, **options)
    return chosen_key


def _overlay(chosen: Sequence[str], metric: tuple[str, str]) -> None:
    """One metric of all runs; each has the colour of its place."""
    rows, units, count = [], dict[str, None](), 0
    for session in chosen:
        with state.reading(session) as view:
            series = view.series.get(metric, Series())
            x, unit = state.along(series)
            rows.append((session, "", x, list(series.values)))
            count += series.count
            units |= {unit: None} if x else {}
    told = f"{metric[0]} | n = {count:,} points"
    figure = Look(state.theme()).lines(rows, told, " or ".join(units), safe(metric[1]))
    state.draw(figure, "compared-figure")
