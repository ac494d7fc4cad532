"""Handing models from one phase to the next: what must hold, and what should.

Structural rules (how many models, equal shapes, metadata present, finite weights) always stop a
bad handoff. Quality gates compare a measured value with a threshold, and stop the run or warn.
"""

import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

log = logging.getLogger(__name__)
Policy = Literal["fail", "warn"]
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class QualityGate:
    """A threshold on one measured value; the prefix of the name says which way it bounds."""

    name: str  # min_<key> or max_<key>
    threshold: float  # of the specification; a preset may set another

    @property
    def key(self) -> str:
        """Where the value stands in the model's metadata."""
        return self.name[4:]

    def passes(self, value: float, threshold: float) -> bool:
        return value >= threshold if self.name.startswith("min_") else value <= threshold


@dataclass(frozen=True)
class HandoffRule:
    """What a phase requires of the models it is handed."""

    num_models: int
    required_metadata: tuple[str, ...] = ()
    gates: tuple[QualityGate, ...] = ()


# The rules up to Phase 5 are the specification's; it leaves those behind Phase 5 open, and ours ask
# for what the next phase reads. A preset scales thresholds that depend on size (`phases.X.gates`).
RULES: dict[tuple[str, str], HandoffRule] = {}
for _rule in json.loads(Path(__file__).with_name("handoff.json").read_text()):
    _gates = tuple(QualityGate(*gate) for gate in _rule["gates"].items())
    _handoff = HandoffRule(_rule["models"], tuple(_rule["metadata"]), _gates)
    RULES[_rule["from"], _rule["to"]] = _handoff


@dataclass
class HandoffResult:
    """The outcome of one handoff, with every value that was measured."""

    passed: bool
    message: str
    measured: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ModelHandoffValidator:
    """Checks handoffs by a table of rules: (source phase, target phase) -> rule."""

    HANDOFF_RULES: ClassVar = RULES

    rules: Mapping[tuple[str, str], HandoffRule] = field(default_factory=lambda: RULES)
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)

    def validate_handoff(
        self, source_phase: str, target_phase: str, models: Sequence[Any], metadata: Records
    ) -> tuple[bool, str]:
        """True if the models may go on, else False and why. One metadata record for each model."""
        result = self.check(source_phase, target_phase, models, metadata)
        return result.passed, result.message

    def check(
        self, source: str, target: str, models: Sequence[Any], metadata: Records
    ) -> HandoffResult:
        """Like validate_handoff, with the measured values and the warnings."""
        rule = self.rules.get((source, target))
        if rule is None:
            return HandoffResult(False, f"no handoff is defined from {source} to {target}")
        if len(models) != rule.num_models:
            return HandoffResult(False, f"expected {rule.num_models} models, got {len(models)}")
        if len(metadata) != len(models):
            return HandoffResult(False, f"expected a metadata record a model, got {len(metadata)}")
        weights = [m if isinstance(m, Mapping) else m.state_dict() for m in models]
        records = [{**r, "parameters": _count(w)} for r, w in zip(metadata, weights, strict=True)]
        problem = _metadata_problem(rule, records) or _weight_problem(weights)
        result = HandoffResult(not problem, problem or "handoff passed")
        for gate, (i, record) in itertools.product(rule.gates, enumerate(records)):
            if problem:
                break
            threshold = self.thresholds.get(target, {}).get(gate.name, gate.threshold)
            value = result.measured[f"{gate.key}[{i}]"] = record[gate.key]
            if gate.passes(value, threshold):
                continue
            text = f"model {i}: {gate.key} is {value:.6g}, {gate.name} is {threshold:.6g}"
            if self.policies.get(target, "fail") == "warn":
                result.warnings.append(text)
                log.warning("handoff to %s: %s; going on, as the policy says", target, text)
            elif result.passed:
                result.passed, result.message = False, text
        return result


def _metadata_problem(rule: HandoffRule, metadata: Records) -> str:
    for i, record in enumerate(metadata):
        for key in (*rule.required_metadata, *(gate.key for gate in rule.gates)):
            if key not in record:
                return f"model {i}: required metadata {key!r} is missing"
        for gate in rule.gates:
            value = record[gate.key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                return f"model {i}: {gate.key} is {value!r}, not a number"
            if not math.isfinite(value):
                return f"model {i}: {gate.key} is {value}"
    return ""


def _count(weights: Mapping[str, Any]) -> int:
    """How many weights there really are, tied ones once: a gate does not take anyone's word."""
    return sum({(t.data_ptr(), tuple(t.shape)): t.numel() for t in weights.values()}.values())


def _weight_problem(models: Sequence[Mapping[str, Any]]) -> str:
    from agent_forge.store.tensors import first_not_finite

    shapes = [{name: tuple(t.shape) for name, t in model.items()} for model in models]
    for i, (model, shape) in enumerate(zip(models, shapes, strict=True)):
        if not model:
            return f"model {i} has no weights"
        if shape != shapes[0]:
            odd = sorted(set(shape.items()) ^ set(shapes[0].items()))
            return f"model {i} has other shapes than model 0 ({odd[0][0]})"
        if bad := first_not_finite(model):
            return f"model {i}: {bad} has NaN or infinite weights"
    return ""
