"""The interfaces of the specification under one name, as its examples use them.

from agent_forge.interfaces import ModelStorage, PipelineOrchestrator
storage = ModelStorage()
model_id = storage.save_model(model, "my-session", "cognate", "model_1", {"seed": 42})
model, metadata = storage.load_model(model_id)

What the examples leave to whoever runs them is decided here: a session that is missing is made, and
networks are ours. docs/documents.md lists where we differ from the text, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from agent_forge.config.settings import CleanupSettings
from agent_forge.contract.handoff import ModelHandoffValidator
from agent_forge.contract.phase import PhaseController, PhaseResult
from agent_forge.errors import ConfigError
from agent_forge.model.hf import build_network, config_of
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import cleanup, models
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.registry import ModelRegistry
from agent_forge.store.sessions import SessionStore, read_session
from agent_forge.store.tensors import Weights

__all__ = (
    "CheckpointManager",
    "ModelHandoffValidator",
    "ModelRegistry",
    "ModelStorage",
    "MuGrokConfig",
    "MuonGrokfast",
    "PhaseController",
    "PhaseResult",
    "PipelineOrchestrator",
    "SessionCleanupManager",
)


class ModelStorage(models.ModelStorage):
    """Models of our networks below a storage root, also without a run."""

    def __init__(self, base_path: Path | str = "storage") -> None:
        super().__init__(base_path, build=build_network, describe=config_of)

    def save_model(
        self,
        model: nn.Module | Weights,
        session_id: str,
        phase_name: str,
        model_name: str,
        metadata: Mapping[str, Any],
        **options: Any,
    ) -> str:
        """Save a model, register it, and return its id. A session that is missing is made; what is
        saved counts as its end, from which its age is told when old ones are removed."""
        if isinstance(model, ForgeNetwork) and model.packing:
            raise ConfigError("a packed network is saved by the phase that made it")
        sessions = SessionStore(self.base_path)
        if not sessions.path(session_id).exists():
            sessions.create({}, "", session_id=session_id)
        names = session_id, phase_name, model_name
        model_id = super().save_model(model, *names, metadata, **options)
        if not read_session(sessions.find(session_id))["config"]:  # of no run
            sessions.set_status(session_id, "completed")
        return model_id


class SessionCleanupManager(cleanup.SessionCleanupManager):
    """The cleanup of a registry and a storage that belong together."""

    def __init__(
        self,
        registry: ModelRegistry,
        storage: models.ModelStorage,
        policy: CleanupSettings | None = None,
    ) -> None:
        sessions = SessionStore(storage.base_path)
        if registry.db_path.resolve() != sessions.registry.db_path.resolve():
            raise ConfigError(f"{registry.db_path} is not the registry of {storage.base_path}")
        super().__init__(sessions, policy or CleanupSettings())
