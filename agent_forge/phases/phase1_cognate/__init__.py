"""Phase 1, Cognate: one trunk, then three specialists that can be merged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_forge.model.network import ForgeNetwork

NAMES = (
    "tinytitan-reasoning",
    "tinytitan-memory_integration",
    "tinytitan-adaptive_computation",
)


def load_phase1_models(session_id: str, storage: Path | str = "storage") -> list[ForgeNetwork]:
    """The three specialists of a finished run, verified against their sha256."""
    from agent_forge.config.phases import phase_folder
    from agent_forge.model.hf import build_network
    from agent_forge.store.models import load_directory

    folder = Path(storage) / "sessions" / session_id / phase_folder("cognate")
    models = []
    for name in NAMES:
        weights, _, config = load_directory(folder / name)
        model = build_network(config)
        model.load_state_dict(weights)
        model.folder = folder / name
        models.append(model.eval())
    return models
