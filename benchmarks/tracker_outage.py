"""What a W&B outage costs: toy runs with W&B off, absent, raising and hanging, one after another.

Claim: the run completes with one warning, in at most 5 % more time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

from results import record

from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator

STEPS = 24_000
ROUNDS = 3
CASES = ("off", "absent", "raising", "hanging")


def outage(kind: str) -> types.ModuleType | None:
    """A module in the place of wandb that raises or hangs in its first call."""
    if kind == "absent":
        return None

    def init(**_: Any) -> None:
        if kind == "hanging":
            threading.Event().wait()
        raise ConnectionError("no server")

    module = types.ModuleType("wandb")
    module.__dict__.update(init=init, Settings=dict)
    return module


def run(kind: str, root: Path) -> tuple[float, int]:
    """Seconds of a run, and how many warnings it gave."""
    sys.modules["wandb"] = outage(kind)  # type: ignore[assignment]
    sets = (
        f"storage.root={root}",
        f"phases.toy.steps={STEPS}",
        "phases.toy.checkpoint_every_steps=4000",
        f"tracking.wandb_enabled={'false' if kind == 'off' else 'true'}",
    )
    began = time.monotonic()
    result = PipelineOrchestrator(config=load_config(preset="toy", sets=sets), session_id="r").run()
    seconds = time.monotonic() - began
    assert result["success"]
    log = (root / "sessions" / "r" / "log.jsonl").read_text()
    return seconds, log.count('"level": "warning"')


def main() -> None:
    seconds: dict[str, list[float]] = {kind: [] for kind in CASES}
    warnings: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        run("off", Path(folder) / "warm")
        for turn in range(ROUNDS):
            for kind in CASES:
                took, warnings[kind] = run(kind, Path(folder) / f"{kind}{turn}")
                seconds[kind].append(took)
    base = statistics.median(seconds["off"])
    for kind in CASES:
        middle = statistics.median(seconds[kind])
        values = {
            "median_s": round(middle, 2),
            "all_s": [round(s, 2) for s in seconds[kind]],
            "ratio_to_off": round(middle / base, 3),
            "warnings": warnings[kind],
        }
        record("tracker_outage", {"wandb": kind, "steps": STEPS}, values)


if __name__ == "__main__":
    main()
