"""Phase 2, EvoMerge: evolve three models into one.

config             settings of the phase; torch-free
phase              the phase of the pipeline: from its context to the loop and back
api                EvoMerge and EvoMergeConfig, by the names of the documents
evolution          run_evolution, from inputs to the champion; replay: the champion again
checks             what is refused before any work
inputs             before: check settings and models, open the models, split the items
planning           what the settings leave open, decided once; how long the work takes
budget             how much work fits into the time: numbers in, a plan out
loop               during: ask, make, measure, tell, advance
report             after: the verdict on unseen items, the champion's files, the summary
heal               after the search: experts teach the champion; what comes out is measured
checkpoints        standings and best models on the way; going on from an earlier one
journal            what was measured, on disk: journal, cache, and the user's own cache
candidate_weights  the weights of every candidate, made from its recipe
evaluator          measures a candidate in a network of its shape; gradients by coefficients
parallel           workers that measure candidates at the same time
"""

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
