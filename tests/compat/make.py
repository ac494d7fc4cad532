"""Write the fixture of the present schema: python -m tests.compat.make VERSION.

Run it once when a schema changes, and commit what it wrote. Old fixtures are never made again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.pico import Pico


def make(root: Path) -> None:
    sessions = SessionStore(root)
    sessions.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1", tags=["kept"])
    torch.manual_seed(0)
    model = Pico()
    optimizer = torch.optim.AdamW(model.parameters())
    storage = ModelStorage(root, sessions.registry)
    storage.save_model(model, "s1", "cognate", "m1", {"seed": 42}, metrics={"loss": 1.5})
    sessions.registry.record_handoff("cognate.m1.s1", "evomerge", validation_status="passed")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cursor": [1, 2]}
    folder = sessions.path("s1") / "phase1_cognate" / "checkpoints"
    CheckpointManager(folder).save(state, step=30)
    sessions.set_status("s1", "completed")
    sessions.registry.checkpoint_wal()


if __name__ == "__main__":
    target = Path(__file__).parent / (sys.argv[1] if len(sys.argv) == 2 else "")
    if target.exists():
        sys.exit("usage: python -m tests.compat.make vN, for a version that has no fixture yet")
    make(target)
    for lock in target.rglob("run.lock"):
        lock.unlink()
