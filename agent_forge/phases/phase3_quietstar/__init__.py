"""Phase 3, Quiet-STaR: teach a model to think before it answers, and prove that it helps.

| file | what is in it |
|---|---|
| config.py | QuietStarSettings; torch-free |
| phase.py | QuietStarPhase: bake, measure, judge, hand over |
| reward_step.py | the second step: rewards, what guards it, whether it is kept |
| injection.py | ThoughtInjectionSystem: several thoughts fused into the states of a network |

What is taught is in train/lessons.py, ThoughtGenerator in infer/thinking.py, CoherenceValidator in
evals/coherence.py, the verdict in evals/thoughts.py, thoughts as data in data/traces.py.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CoherenceValidator": "agent_forge.evals.coherence",
    "ThoughtGenerator": "agent_forge.infer.thinking",
    "ThoughtInjectionSystem": "agent_forge.phases.phase3_quietstar.injection",
}
__all__ = ["CoherenceValidator", "ThoughtGenerator", "ThoughtInjectionSystem"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the settings of the phase need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
