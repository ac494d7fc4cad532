"""What each phase requires of the models it is handed (thresholds of the specification).

The rules up to Phase 5 are the specification's; it leaves those behind Phase 5 open, and ours ask
for what the next phase reads. A preset scales thresholds that depend on size (`phases.X.gates`).
"""

from __future__ import annotations

from agent_forge.contract.handoff import HandoffRule, QualityGate

RULES: dict[tuple[str, str], HandoffRule] = {
    ("cognate", "evomerge"): HandoffRule(
        num_models=3,
        required_metadata=("specialization", "final_loss", "seed"),
        gates=(
            QualityGate("min_parameters", "parameters", 22_500_000),
            QualityGate("max_parameters", "parameters", 27_500_000),
        ),
    ),
    ("evomerge", "quietstar"): HandoffRule(
        num_models=1,
        required_metadata=("fitness", "merge_technique"),
        gates=(QualityGate("min_fitness", "fitness", 0.70),),
    ),
    ("quietstar", "bitnet"): HandoffRule(
        num_models=1,
        required_metadata=("coherence_score", "validity_rate"),
        gates=(QualityGate("min_accuracy", "accuracy", 0.80),),
    ),
    ("bitnet", "forge"): HandoffRule(
        num_models=1,
        required_metadata=("compression_ratio", "accuracy_retention"),
        gates=(
            QualityGate("max_size_mb", "size_mb", 20.0),
            QualityGate("min_compression_ratio", "compression_ratio", 7.0),
        ),
    ),
    ("forge", "baking"): HandoffRule(
        num_models=1, required_metadata=("final_loss", "final_accuracy")
    ),
    ("baking", "edge"): HandoffRule(
        num_models=1, required_metadata=("tool_success_rate", "persona_consistency")
    ),
    ("edge", "final_compression"): HandoffRule(
        num_models=1,
        required_metadata=("size_mb", "accuracy_retention", "inference_latency_ms"),
        gates=(
            QualityGate("max_size_mb", "size_mb", 20.0),
            QualityGate("min_accuracy_retention", "accuracy_retention", 0.90),
            QualityGate("max_inference_latency_ms", "inference_latency_ms", 50.0),
        ),
    ),
}
