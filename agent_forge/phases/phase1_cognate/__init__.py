"""Phase 1, Cognate: one trunk, then three specialists that can be merged.

| file | what is in it |
|---|---|
| specialist_scores.py | how good and how different the models are |
| config.py | CognateSettings and the three specialists; torch-free |
| phase.py | CognatePhase: trunk, branches, control, verdict |
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from agent_forge.model.network import ForgeNetwork

NAMES = ("tinytitan-reasoning", "tinytitan-memory_integration", "tinytitan-adaptive_computation")


def load_phase1_models(session_id: str, storage: Path | str = "storage") -> list[ForgeNetwork]:
    """The three specialists of a finished run, verified against their sha256."""
    from agent_forge.config.phases import phase_folder
    from agent_forge.model.opened import open_model

    folder = Path(storage) / "sessions" / session_id / phase_folder("cognate")
    models = []
    for name in NAMES:
        model = cast("ForgeNetwork", open_model(folder / name).network)
        model.folder = folder / name
        models.append(model)
    return models
