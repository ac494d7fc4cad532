"""Phase 4: it calibrates, rounds, trains, puts back, packs, and survives being killed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.cli.status import run_lines
from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.errors import ConfigError
from agent_forge.evals.model_under_test import EVERY_STEP, ItemScores, measure
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.phases.phase4_bitnet.calibration import Sensitivity, sensitivities
from agent_forge.phases.phase4_bitnet.phase import Measured, _quality
from agent_forge.phases.phase4_bitnet.rounding import RoundedTraining
from agent_forge.phases.training import LatentModel
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import kind_of
from agent_forge.store.records import read_metadata
from agent_forge.train.corpus import build_corpus
from tests.support.bitnet_runs import PHASE, config, made, run
from tests.support.toy_runs import exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
OUTPUTS = {
    *("original_size_mb", "compressed_size_mb", "compression_ratio", "layers_compressed"),
    *("layers_preserved", "sparsity_ratio", "pre_compression_perplexity", "accuracy_retention"),
    *("post_compression_perplexity", "post_finetuning_perplexity"),
    "perplexity_degradation_percent",
}
CONTROL = f"{PHASE}.control=true"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run with a control."""
    root = tmp_path_factory.mktemp("bitnet")
    return root, run(root, CONTROL)


def test_it_returns_what_the_specification_asks_for(reference: tuple[Path, dict[str, Any]]) -> None:
    result = reference[1]["results"]["bitnet"]
    assert result.success and set(result.metrics) >= OUTPUTS
    accuracy, costs, targets = result.artifacts["tables"]
    assert [row[0] for row in accuracy[1:]] == ["parent", "rounded", "ternary", "control"]
    assert accuracy[0][1:4] == ["reasoning", "memory", "adaptive"] and "chain" in accuracy[0]
    assert {row[0] for row in costs[1:]} >= {
        "embedding",
        "blocks.attention.q",
        "recursion.update.inner",
    }
    assert [row[2] for row in costs[1:]] == sorted(row[2] for row in costs[1:])
    measured = {row[0]: row[2] for row in targets[1:]}
    assert len(measured) == 7 and all(v == "-" or isinstance(v, float) for v in measured.values())
    model, packing = result.model, result.model.packing
    zeros = [(model.get_parameter(name) == 0).flatten() for name in packing.ternary]
    share = float(torch.cat(zeros).float().mean())
    assert result.metrics["sparsity_ratio"] == pytest.approx(share)
    one = {
        name: float(own.float().mean()) for name, own in zip(packing.ternary, zeros, strict=True)
    }
    assert result.artifacts["zeros"] == pytest.approx(one)
    kept = accuracy[3][-2] / accuracy[4][-2] if accuracy[4][-2] else 0.0
    assert result.metrics["accuracy_retention"] == pytest.approx(kept)
    metadata = read_metadata(result.artifacts["models"][0].path).model_dump()
    assert {"compression_ratio", "accuracy_retention", "strategies", "levels"} <= set(metadata)
    assert metadata["parameters"] == sum(t.numel() for t in result.model.state_dict().values())


def test_sizes_are_those_of_the_files(reference: tuple[Path, dict[str, Any]]) -> None:
    result = reference[1]["results"]["bitnet"]
    packed, whole = (folder(reference[0]) / "phase4_bitnet" / n for n in ("packed", "dequantised"))
    sizes = [
        sum((place / name).stat().st_size for name in ("model.safetensors", "config.json"))
        for place in (whole, packed)
    ]
    assert result.metrics["original_size_mb"] * 1e6 == pytest.approx(sizes[0])
    assert result.metrics["compressed_size_mb"] * 1e6 == pytest.approx(sizes[1])
    assert result.metrics["compression_ratio"] == pytest.approx(sizes[0] / sizes[1])


def test_packed_and_whole_copy_have_the_same_weights(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    place = folder(reference[0]) / "phase4_bitnet"
    packed, whole = (open_model(place / name).network for name in ("packed", "dequantised"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(packed.state_dict()[name].float(), tensor.float()), name
    assert len(packed.state_dict()["blocks.0.mlp.up.weight"][0].unique()) <= 3
    assert (
        packed.blocks[0].mlp.up._forward_pre_hooks and not whole.blocks[0].mlp.up._forward_pre_hooks
    )


def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    logged = {name for _, _, values in metrics(reference[0]) for name in values}
    known = {metric for name in logged if (metric := find_metric(name))}
    own = {metric for metric in METRICS if metric.phase == "bitnet"}
    # Of a loss by rounding nothing is taken back where there was none, as may be here.
    assert {m.name for m in own - known} <= {"quality/perplexity_recovery_percent"}


def test_what_was_taken_back_is_told_where_something_was_lost() -> None:
    def model(nats: float) -> Measured:
        return Measured({"memory": ItemScores([True], [nats], [1], [1.0])}, {}, None)

    found = {"parent": model(1.0), "rounded": model(3.0), "ternary": model(1.5)}
    assert _quality(found)["quality/perplexity_recovery_percent"] == pytest.approx(75)
    found["rounded"] = model(1.0)
    assert "quality/perplexity_recovery_percent" not in _quality(found)


def test_a_run_that_ends_with_it_is_told(reference: tuple[Path, dict[str, Any]]) -> None:
    lines = "\n".join(run_lines(folder(reference[0]), []))
    assert "FP32 -> ternary" in lines and "times smaller" in lines and "packed" in lines


def test_the_card_shows_parent_and_child(reference: tuple[Path, dict[str, Any]]) -> None:
    card = (folder(reference[0]) / "phase4_bitnet/packed/README.md").read_text()
    assert "| question | right | parent | ternary |" in card and "`tot " in card
    assert "| target of the specification |" in card


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["round_1", "control"])
def test_killed_in_any_stage_it_ends_in_the_same_bytes(
    stage: str, reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == stage and record.get("step") == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: run(tmp_path, CONTROL, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert made(tmp_path) == made(reference[0])
    assert _without_times(metrics(tmp_path)) == _without_times(metrics(reference[0]))


def _without_times(records: list[Any]) -> list[Any]:
    return [
        (phase, step, {k: v for k, v in values.items() if not k.startswith("performance/")})
        for phase, step, values in records
    ]


def losing(model: ForgeNetwork, share: float) -> float:
    """An accuracy of which rounded models lose a share."""
    return 0.8 * share if model.packing else 0.8


@pytest.mark.slow
def test_what_costs_too_much_is_put_back_and_a_kill_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy of rounded models is said to be half of the parent's."""
    monkeypatch.setattr(RoundedTraining, "_accuracy", lambda self, model: losing(model, 0.5))

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == "put_back_2" and record.get("step") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    result = run(tmp_path / "a", f"{PHASE}.most_reverts=2")["results"]["bitnet"]
    costs = result.artifacts["tables"][1]
    assert [row[4] for row in costs[-2:]] == ["int8", "int8"]
    assert all(row[4] in ("ternary", "int4g32") for row in costs[1:-2])
    sets = (f"{PHASE}.most_reverts=2",)
    child = forked(lambda: run(tmp_path / "b", *sets, listener=die))
    assert exit_code(child) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path / "b"))) == 0
    assert made(tmp_path / "b") == made(tmp_path / "a")


def test_a_model_that_never_learned_to_think_is_rounded_too(tmp_path: Path) -> None:
    result = run(tmp_path, thinks=False)["results"]["bitnet"]
    assert result.artifacts["tables"][0][0][1:-2] == ["reasoning", "memory", "adaptive"]


@pytest.mark.parametrize(
    ("ladder", "stages", "limit"),
    [("conservative", 3, 0.02), ("standard", 1, 0.05), ("aggressive", 1, 0.10)],
)
def test_a_ladder_rounds_more_and_more_and_puts_back_beyond_its_limit(
    ladder: str, stages: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(f"{PHASE}.ladder={ladder}", f"{PHASE}.embedding_codec=int8")
    model = ForgeNetwork(settings.model)
    packing = plan_packing(model, "ternary", "int8", 8)
    names = {kind_of(name) for name in packing.matrices}
    costs = [Sensitivity(kind, 1, 0.1 * n, 0.0) for n, kind in enumerate(sorted(names))]
    taken: list[tuple[str, set[str], int]] = []

    def go_on(self: Any, before: LatentModel, packing: Any, stage: str, steps: int) -> Any:
        int8 = {n for n, m in packing.matrices.items() if m.codec.name == "int8"}
        taken.append((stage, {*packing.matrices}, len(int8)))
        return replace(before, packing=packing, steps=before.steps + steps)

    monkeypatch.setattr(RoundedTraining, "_go_on", go_on)
    unused: Any = None
    for lost, reverts in ((limit - 1e-3, 0), (limit + 1e-3, 3)):
        taken.clear()
        monkeypatch.setattr(RoundedTraining, "_lost", lambda self, model, number, lost=lost: lost)
        training = RoundedTraining(unused, settings.phases.bitnet, unused, None, model)
        found = training.train(packing, costs)
        rounds = [own for stage, own, _ in taken if stage.startswith("round")]
        assert len(rounds) == stages and rounds[-1] == {*packing.matrices}
        assert all(one < two for one, two in itertools.pairwise(rounds))
        back = [count for stage, _, count in taken if stage.startswith("put_back")]
        assert len(back) == reverts and back == sorted(set(back))  # each puts back something
        assert found.steps == 7 + 2 * reverts and len(found.packing.matrices) == len(rounds[-1])


def test_sensitivity_is_of_one_kind_alone_and_leaves_the_model_as_it_was() -> None:
    settings = config()
    corpus = build_corpus(settings.phases.bitnet, settings.model)
    torch.manual_seed(0)
    model = ForgeNetwork(settings.model)
    for parameter in model.parameters():  # out projections begin at zero
        torch.nn.init.normal_(parameter, std=0.1) if parameter.ndim == 2 else None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    items = corpus.selection["memory"][:6]
    packing = plan_packing(model, "ternary", "int4g32", 8)
    found = {cost["kind"]: cost for cost in sensitivities(model, packing, items)}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    whole = measure(model, items, threshold=EVERY_STEP).nats_per_token
    state = {
        name: packing.matrices[name].rounded(tensor) if kind_of(name) == "blocks.mlp.up" else tensor
        for name, tensor in before.items()
    }
    model.load_state_dict(state)
    rise = measure(model, items, threshold=EVERY_STEP).nats_per_token - whole
    assert found["blocks.mlp.up"]["rise"] == pytest.approx(rise, abs=1e-6)
    assert found["blocks.mlp.up"]["outliers"] > 1 and found["embedding"]["outliers"] == 0


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("codec=int9", "ternary"),
        ("codec=step0.01", "step0.04"),
        ("embedding_codec=int3", "int4g32"),
        ("activation_bits=4", "0 or 8"),
        ("steps=0", "greater than or equal to 1"),
        ("ladder=steep", "conservative"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(f"{PHASE}.{setting}")


@pytest.mark.parametrize(
    "name",
    ["ternary", "ternary_spec", "int8", "int4g32", "step0.04", "step0.18", "step1.2345", "step2"],
)
def test_every_codec_that_settings_take_exists(name: str) -> None:
    assert config(f"{PHASE}.codec={name}").phases.bitnet.codec == name
    assert find_codec(name).name == name


@pytest.mark.parametrize("name", ["step1.", "step0.05123", "step8", "int4g0", "ternary_x"])
def test_a_codec_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="ternary_spec"):
        config(f"{PHASE}.codec={name}")


def test_a_calibration_file_that_is_not_there_is_refused_before_any_work() -> None:
    from agent_forge.phases.phase4_bitnet.phase import BitNetPhase

    settings = config(f"{PHASE}.calibration_dataset=nowhere.txt")
    with pytest.raises(ConfigError, match=r"nowhere\.txt is no file"):
        BitNetPhase(settings.phases.bitnet, settings).plan([])
