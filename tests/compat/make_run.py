"""Write the fixture of a run that was stopped in Phase 2: python -m tests.compat.make_run.

It was made once by the code before it was rearranged, and is never made again. What came out of an
untouched run of the same code stands in outcome.json, for the CPU that it was made on.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from tests.golden.freeze import cpu, file_digest

HERE = Path(__file__).parent / "run"
SETS = (
    *("model.vocab_size=320", "model.embed_rank=8", "model.d_model=16", "model.n_layers=2"),
    *("model.n_heads=2", "model.ffn_hidden=24", "model.d_mem=8", "model.gate_hidden=8"),
    *("model.trm_hidden=8", "runtime.threads=1", "tracking.sample_every_s=0"),
    *("phases.cognate.trunk_steps=6", "phases.cognate.branch_steps=3"),
    *("phases.cognate.items_per_family=30", "phases.cognate.evaluation_items=6"),
    *("phases.evomerge.fitness_subset_size=6", "phases.evomerge.verdict_items=8"),
    *("phases.evomerge.generations=2", "phases.evomerge.checkpoint_every=1"),
    "phases.evomerge.gates={min_parameters: 1, max_parameters: 300000}",
)


def orchestrator(root: Path) -> PipelineOrchestrator:
    config = load_config(preset="smoke", sets=(*SETS, f"storage.root={root}"))
    return PipelineOrchestrator(config=config, session_id="old")


def stopped(root: Path) -> None:
    """Stop after the first generation of the evolution."""
    run = orchestrator(root)

    def listen(record: dict[str, Any]) -> None:
        if record.get("phase") == "evomerge" and record["event"] == "step" and record["step"] == 1:
            run.stopper.request()

    outcome = run.run(listeners=[listen])
    assert outcome["status"] == "paused", outcome


def digests(root: Path) -> dict[str, str]:
    models = sorted((root / "sessions" / "old").glob("phase*/*/model.safetensors"))
    return {f"{p.parent.parent.name}/{p.parent.name}": file_digest(p) for p in models}


if __name__ == "__main__":
    if HERE.exists():
        sys.exit(f"{HERE} exists: a fixture is never made again")
    sys.argv = ["forge"]  # the run notes its command
    with tempfile.TemporaryDirectory() as folder:
        whole, half = Path(folder) / "whole", Path(folder) / "half"
        assert orchestrator(whole).run()["success"]
        stopped(half)
        shutil.copytree(half, HERE, ignore=shutil.ignore_patterns("run.lock"))
        (HERE / "outcome.json").write_text(json.dumps({cpu(): digests(whole)}, indent=1) + "\n")
