"""The contract: handoff rules that stop, gates that tell, sizes and metric names from tables."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.config.phases import PHASES
from agent_forge.contract.handoff import RULES, ModelHandoffValidator
from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.contract.phase import PhasePlan
from tests.support.handoffs import GOOD, models

HANDOFFS = list(RULES)


def judge(target: str, **changes: Any) -> tuple[bool, str]:
    source = PHASES[PHASES.index(target) - 1]
    handed = models(target, changes.pop("weights", 25_000_000))
    record = {k: v for k, v in {**GOOD[target], **changes}.items() if v is not None}
    return ModelHandoffValidator(RULES).validate_handoff(
        source, target, handed, [record] * len(handed)
    )


def test_there_is_a_rule_between_all_neighbours() -> None:
    assert list(itertools.pairwise(PHASES)) == HANDOFFS


@pytest.mark.parametrize("target", GOOD)
def test_a_good_model_passes(target: str) -> None:
    assert judge(target) == (True, "handoff passed")


@pytest.mark.parametrize("target", GOOD)
def test_missing_metadata_always_stops(target: str) -> None:
    for key in GOOD[target]:
        passed, message = judge(target, **{key: None})
        assert not passed and repr(key) in message


@pytest.mark.parametrize(
    ("target", "changes", "sign"),
    [
        ("evomerge", {"weights": 22_499_999}, "min_parameters is 2.25e+07"),
        ("evomerge", {"weights": 27_500_001}, "max_parameters is 2.75e+07"),
        ("evomerge", {"weights": 4, "parameters": 25_000_000}, "parameters is 4,"),
        ("quietstar", {"fitness": 0.69}, "fitness is 0.69, min_fitness is 0.7"),
        ("bitnet", {"accuracy": 0.79}, "accuracy is 0.79, min_accuracy is 0.8"),
        ("forge", {"size_mb": 20.1}, "size_mb is 20.1, max_size_mb is 20"),
        ("forge", {"compression_ratio": 6.9}, "min_compression_ratio is 7"),
        ("final_compression", {"accuracy_retention": 0.89}, "min_accuracy_retention is 0.9"),
        ("final_compression", {"inference_latency_ms": 51}, "max_inference_latency_ms is 50"),
    ],
)
def test_a_missed_gate_stops_and_shows_the_measured_value(
    target: str, changes: dict[str, Any], sign: str
) -> None:
    passed, message = judge(target, **changes)
    assert not passed and sign in message


@pytest.mark.parametrize("value", ["high", True, float("nan"), float("inf")])
def test_a_gate_needs_a_finite_number(value: Any) -> None:
    passed, message = judge("quietstar", fitness=value)
    assert not passed and "fitness" in message


def test_a_policy_can_warn_and_a_preset_can_set_the_threshold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def verdict(**options: Any) -> Any:
        validator = ModelHandoffValidator(RULES, **options)
        record = {**GOOD["quietstar"], "fitness": 0.5}
        return validator.check("evomerge", "quietstar", models("quietstar"), [record])

    assert not verdict().passed
    assert verdict(thresholds={"quietstar": {"min_fitness": 0.5}}).passed
    warned = verdict(policies={"quietstar": "warn"})
    assert warned.passed and "fitness is 0.5" in warned.warnings[0]
    assert warned.measured == {"fitness[0]": 0.5} and "going on" in caplog.text


def test_structure_always_stops() -> None:
    def problem(handed: list[Any], records: int | None = None, **options: Any) -> str:
        validator = ModelHandoffValidator(RULES, policies={"evomerge": "warn"})
        metadata = [GOOD["evomerge"]] * (len(handed) if records is None else records)
        passed, message = validator.validate_handoff("cognate", "evomerge", handed, metadata)
        assert not passed
        return message

    three: list[nn.Module] = [nn.Linear(2, 2) for _ in range(3)]
    assert problem(three[:2]) == "expected 3 models, got 2"
    assert "metadata record" in problem(three, records=1)
    assert "other shapes" in problem([*three[:2], nn.Linear(2, 3)])
    assert "no weights" in problem([{}, {}, {}])
    nn.init.constant_(three[1].weight, float("nan"))  # type: ignore[arg-type]
    assert problem(three) == "model 1: weight has NaN or infinite weights"
    ints = {"steps": torch.ones(1, dtype=torch.long), "w": torch.tensor([float("inf")])}
    assert "w has NaN" in problem([ints] * 3)


def test_an_unknown_handoff_is_refused() -> None:
    passed, message = ModelHandoffValidator(RULES).validate_handoff("edge", "cognate", [], [])
    assert not passed and "from edge to cognate" in message


def test_size_classes() -> None:
    found = [PhasePlan(1, n).size_class for n in (1, 49_999_999, 50_000_000, 10**9, 2 * 10**9)]
    assert found == ["tiny", "tiny", "small", "medium", "large"]
    assert PhasePlan(1).size_class is None


def test_metric_names_are_unique_and_explained() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    assert all(m.unit and m.meaning and m.phase for m in METRICS)
    for metric in METRICS:
        assert find_metric(metric.name.replace("{}", "1")) == metric
    assert find_metric("toy/los") is None and find_metric("xtoy/loss") is None


def test_every_metric_name_in_the_code_is_in_the_table() -> None:
    """Names are written as literals; what is logged at run time is checked when it is logged."""
    package = Path(__file__).parents[2] / "agent_forge"
    literal = re.compile(
        r'"((?:toy|system|phase|generation|compression|quality|performance|edge)/[a-z0-9_/]+)"'
    )
    sources = [*package.rglob("*.py"), package / "contract" / "metrics.json"]
    found = {name for path in sources for name in literal.findall(path.read_text())}
    assert found == {m.name for m in METRICS if "{}" not in m.name}
