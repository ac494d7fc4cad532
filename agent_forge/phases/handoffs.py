"""What each phase requires of the models it is handed (thresholds of the specification).

The rules up to Phase 5 are the specification's; it leaves those behind Phase 5 open, and ours ask
for what the next phase reads. A preset scales thresholds that depend on size (`phases.X.gates`).
"""

from __future__ import annotations

from agent_forge.contract.handoff import HandoffRule, QualityGate

RULES: dict[tuple[str, str], HandoffRule] = {
    ("cognate", "evomerge"): HandoffRule(
        3,
        ("specialization", "final_loss", "seed"),
        (QualityGate("min_parameters", 22_500_000), QualityGate("max_parameters", 27_500_000)),
    ),
    ("evomerge", "quietstar"): HandoffRule(
        1, ("fitness", "merge_technique"), (QualityGate("min_fitness", 0.70),)
    ),
    ("quietstar", "bitnet"): HandoffRule(
        1, ("coherence_score", "validity_rate"), (QualityGate("min_accuracy", 0.80),)
    ),
    ("bitnet", "forge"): HandoffRule(
        1,
        ("compression_ratio", "accuracy_retention"),
        (QualityGate("max_size_mb", 20.0), QualityGate("min_compression_ratio", 7.0)),
    ),
    ("forge", "baking"): HandoffRule(1, ("final_loss", "final_accuracy")),
    ("baking", "edge"): HandoffRule(1, ("tool_success_rate", "persona_consistency")),
    ("edge", "final_compression"): HandoffRule(
        1,
        ("size_mb", "accuracy_retention", "inference_latency_ms"),
        (
            QualityGate("max_size_mb", 20.0),
            QualityGate("min_accuracy_retention", 0.90),
            QualityGate("max_inference_latency_ms", 50.0),
        ),
    ),
}
