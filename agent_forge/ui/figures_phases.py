"""Figures of Phases 3 to 8, each of what only that phase measures."""

from __future__ import annotations

import plotly.graph_objects as go

from agent_forge.pipeline.run_view import PhaseView, RunView
from agent_forge.ui.theme import Look

Found = list[tuple[str, go.Figure | None]]


def theatre_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []


def bitnet_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []


def forge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []


def baking_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []


def edge_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []


def compression_figures(view: RunView, phase: PhaseView, look: Look) -> Found:
    return []
