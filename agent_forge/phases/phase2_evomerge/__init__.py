"""Phase 2, EvoMerge: evolve three models into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_forge.phases.phase2_evomerge.api import EvoMerge, EvoMergeConfig

__all__ = ["EvoMerge", "EvoMergeConfig"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the settings of the phase need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_forge.phases.phase2_evomerge import api

    return getattr(api, name)
