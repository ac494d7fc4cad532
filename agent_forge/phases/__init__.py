"""The phases by name, and what each requires of the models it is handed. This imports no phase.

| file | what is in it |
|---|---|
| phase1_cognate/ | three specialists from one trunk |
| phase2_evomerge/ | one model evolved from three |
| toy.py, toy_config.py | the smallest phase: shows how one is written |
| training.py | what training phases share: train, measure, compare, sample, save |
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from agent_forge.contract.handoff import HandoffRule, QualityGate

if TYPE_CHECKING:
    from agent_forge.contract.phase import PhaseController

IMPLEMENTED = {
    "toy": "agent_forge.phases.toy:ToyPhase",
    "cognate": "agent_forge.phases.phase1_cognate.phase:CognatePhase",
    "evomerge": "agent_forge.phases.phase2_evomerge.phase:EvoMergePhase",
}
SUMMARY: dict[str, str] = json.loads(Path(__file__).with_name("summaries.json").read_text())


def _rule(count: int, metadata: str, **gates: float) -> HandoffRule:
    """A rule on so many models, the names in their metadata, and thresholds by gate."""
    thresholds = tuple(QualityGate(name, threshold) for name, threshold in gates.items())
    return HandoffRule(count, tuple(metadata.split()), thresholds)


# The rules up to Phase 5 are the specification's; it leaves those behind Phase 5 open, and ours ask
# for what the next phase reads. A preset scales thresholds that depend on size (`phases.X.gates`).
RULES: dict[tuple[str, str], HandoffRule] = {
    ("cognate", "evomerge"): _rule(
        3, "specialization final_loss seed", min_parameters=22_500_000, max_parameters=27_500_000
    ),
    ("evomerge", "quietstar"): _rule(1, "fitness merge_technique", min_fitness=0.70),
    ("quietstar", "bitnet"): _rule(1, "coherence_score validity_rate", min_accuracy=0.80),
    ("bitnet", "forge"): _rule(
        1, "compression_ratio accuracy_retention", max_size_mb=20.0, min_compression_ratio=7.0
    ),
    ("forge", "baking"): _rule(1, "final_loss final_accuracy"),
    ("baking", "edge"): _rule(1, "tool_success_rate persona_consistency"),
    ("edge", "final_compression"): _rule(
        1,
        "size_mb accuracy_retention inference_latency_ms",
        max_size_mb=20.0,
        min_accuracy_retention=0.90,
        max_inference_latency_ms=50.0,
    ),
}


def load_phase(name: str) -> type[PhaseController]:
    module, _, attribute = IMPLEMENTED[name].partition(":")
    controller: type[PhaseController] = getattr(importlib.import_module(module), attribute)
    return controller
