"""Phase 7: what matters least is cut, the rest does what it did, and a kill costs nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.infer.native import native_decoder
from agent_forge.model.hf import config_dict
from agent_forge.model.opened import open_model
from agent_forge.native.decoder import NativeCache
from agent_forge.phases.phase7_edge.config import TARGETS
from agent_forge.phases.phase7_edge.profiling import Profiler
from agent_forge.phases.phase7_edge.pruning import (
    CHANNELS,
    HEADS,
    LAYERS,
    Cut,
    Importance,
    cuts_of,
    importance_of,
)
from agent_forge.phases.phase7_edge.search import MET, EdgeSearch
from agent_forge.phases.skills import retention
from agent_forge.phases.training import LatentModel
from agent_forge.quant.layers import plan_packing
from agent_forge.store.records import read_metadata
from tests.support.edge_runs import PHASE, as_if_able, config, made, run
from tests.support.networks import network
from tests.support.tokenizers import TOKENIZER
from tests.support.toy_runs import exit_code, folder, forked, metrics

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
TOKENS = torch.randint(0, 500, (2, 24), generator=torch.Generator().manual_seed(1))
ITEMS = [TokenizedItem(row.tolist(), [False] * 4 + [True] * 20) for row in TOKENS]
CUTS = {
    CHANNELS: Cut(CHANNELS, (tuple(range(8, 40)), tuple(range(0, 64, 2)), tuple(range(32)))),
    HEADS: Cut(HEADS, ((1,), (0,), (1,))),
    LAYERS: Cut(LAYERS, ((0, 2),)),
}


def latent(packed: bool = True) -> LatentModel:
    """A model whose every part does something."""
    model = network(ffn_hidden=64, n_heads=2, n_layers=3)
    packing = plan_packing(model, "ternary", "int4g32", 8) if packed else None
    return LatentModel(model.settings, model.state_dict(), packing)


def without(model: LatentModel, cut: Cut) -> LatentModel:
    """A model of the same shape in which what a cut takes away gives nothing."""
    s, state = model.settings, {name: t.clone() for name, t in model.state.items()}
    for number in range(s.n_layers):
        down, out = (f"blocks.{number}.{n}.weight" for n in ("mlp.down", "attention.out"))
        if cut.kind == LAYERS and number not in cut.kept[0]:
            state[down].zero_(), state[out].zero_()
        if cut.kind == CHANNELS:
            state[down][:, [i for i in range(s.ffn_hidden) if i not in cut.kept[number]]] = 0
        if cut.kind == HEADS:
            gone = [i for i in range(s.d_model) if i // s.head_width not in cut.kept[number]]
            state[out][:, gone] = 0
    return LatentModel(s, state, model.packing)


# -- mathematics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CUTS)
def test_what_is_left_does_what_it_did(kind: str) -> None:
    """Where what is taken away gave nothing, the function is the same."""
    model = without(latent(packed=False), CUTS[kind])
    smaller = CUTS[kind].apply(model)
    with torch.no_grad():
        before, after = (own.whole()(TOKENS) for own in (model, smaller))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    other = CUTS[kind].apply(latent(packed=False)).whole()
    assert (other(TOKENS) - latent(packed=False).whole()(TOKENS)).abs().max() > 0.01


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", CUTS)
def test_a_smaller_model_has_the_shape_and_the_weights_that_it_says(
    kind: str, packed: bool
) -> None:
    model = latent(packed)
    smaller = CUTS[kind].apply(model)
    own = smaller.opened()
    assert sum(p.numel() for p in own.parameters()) == smaller.settings.parameters()
    assert smaller.settings.parameters() < model.settings.parameters()
    shape = config_dict(smaller.settings)
    assert ("head_size" in shape) == (kind == HEADS)
    assert smaller.settings == ModelSettings.model_validate(
        {name: shape[name] for name in ModelSettings.model_fields if name in shape}
    )
    if packed:
        assert smaller.packing is not None and model.packing is not None
        state = smaller.packing.pack(smaller.state)
        opened = smaller.packing.unpack(state.tensors, "here")
        rounded = smaller.packing.rounded(smaller.state)
        assert all(torch.equal(t.float(), rounded[n].float()) for n, t in opened.items())
        codecs = {m.codec.name for m in smaller.packing.matrices.values()}
        assert codecs == {m.codec.name for m in model.packing.matrices.values()}


@pytest.mark.parametrize("packed", [True, False])
def test_a_dead_channel_and_a_dead_head_matter_least(packed: bool) -> None:
    model = latent(packed)
    state = {name: t.clone() for name, t in model.state.items()}
    state["blocks.1.mlp.down.weight"][:, 5] = 0
    state["blocks.0.mlp.down.weight"][:, 6] *= 20
    state["blocks.1.attention.out.weight"][:, 32:] = 0
    own = LatentModel(model.settings, state, model.packing).opened()
    found = importance_of(own, ITEMS)
    assert int(found.channels[1].argmin()) == 5 and found.channels[1][5] == 0
    assert found.heads[1].argmin() == 1 and found.heads[1][1] == 0 < found.heads[1][0]
    if not packed:  # rounding makes rows of one scale
        assert int(found.channels[0].argmax()) == 6
    kept = cuts_of(own.settings, found, [CHANNELS, HEADS], 0.125)
    assert [cut.kind for cut in kept] == [CHANNELS, HEADS]
    assert len(kept[0].kept[0]) == 56 and 5 not in kept[0].kept[1]
    assert kept[1].kept[1] == (0,)


def test_importance_is_that_of_the_formula() -> None:
    """The change of the loss when a channel is scaled, for small scales."""
    model = latent(packed=False).whole()
    one = ITEMS[:1]
    found = importance_of(model, one)
    weight = model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
    losses = []
    for scale in (1.01, 0.99):
        with torch.no_grad():
            weight[:, 3] *= scale  # type: ignore[index]
            logits = model(TOKENS[:1])[0, 3:23]
            losses.append(torch.nn.functional.cross_entropy(logits, TOKENS[0, 4:], reduction="sum"))
            weight[:, 3] /= scale  # type: ignore[index]
    slope = abs(float(losses[0] - losses[1])) / 0.02
    assert slope <= float(found.channels[0][3]) * 1.05  # the tokens' parts may cancel
    assert slope > 0


def test_nothing_is_cut_away_whole() -> None:
    settings = network(ffn_hidden=8, n_layers=1, n_heads=1).settings
    ones = Importance([torch.ones(8)], [torch.ones(1)])
    assert cuts_of(settings, ones, [CHANNELS, HEADS, LAYERS], 0.9) == []
    wider = network(ffn_hidden=20, n_layers=1, n_heads=2).settings
    ones = Importance([torch.ones(20)], [torch.ones(2)])
    found = cuts_of(wider, ones, [CHANNELS, HEADS, LAYERS], 0.01)
    assert [(cut.kind, len(cut.kept[0])) for cut in found] == [(CHANNELS, 12), (HEADS, 1)]


@pytest.mark.parametrize("kind", CUTS)
def test_the_native_step_of_a_smaller_model_is_that_of_torch(kind: str) -> None:
    own = CUTS[kind].apply(latent()).opened()
    if (decoder := native_decoder(own)) is None:
        pytest.skip("there is no native step")
    cache: NativeCache = decoder.new_cache()
    logits, _ = decoder.read(TOKENS[0].tolist(), cache, threshold=1.0)
    wanted = own.predict(TOKENS[:1], threshold=1.0)[0][0]
    assert (logits - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("head_size", [3, -2])
def test_bad_heads_are_refused(head_size: int) -> None:
    with pytest.raises(ValueError):
        ModelSettings(head_size=head_size)


def test_retention_is_of_the_mean_and_of_every_kind() -> None:
    before = {"memory": [True, True, False, False], "tools": [True, True]}
    after = {"memory": [True, False, False, False], "tools": [True, True]}
    assert retention(before, after) == {"memory": 0.5, "tools": 1.0, "mean": 1.25 / 1.5}
    assert retention({"tools": [False]}, {"tools": [True]}) == {}
    assert retention({**before, "none": [False]}, {**after, "none": [True]})["tools"] == 1.0


@pytest.mark.slow
def test_the_program_tells_its_memory(tmp_path: Path) -> None:
    if not shutil.which("cc") or not Path("/proc/self/status").exists():
        pytest.skip("there is no cc, or no record of memory")
    profiler = Profiler(tmp_path, TOKENIZER, "cpu")
    found = [profiler.memory(own) for own in (latent(), CUTS[HEADS].apply(latent(packed=False)))]
    assert all(memory is not None and 0.5 < memory < 50 for memory in found)


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run with two cuts that are kept."""
    root = tmp_path_factory.mktemp("edge")
    with pytest.MonkeyPatch.context() as patch:
        as_if_able(patch)
        return root, run(root, f"{PHASE}.kinds=[heads, channels]")


@needs_fork
def test_it_hands_over_a_smaller_model_that_knows_what_it_learned(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    root, outcome = reference
    result = outcome["results"]["edge"]
    own = open_model(folder(root) / "phase7_edge" / "packed").network
    given = open_model(root / "sessions" / "before" / "phase6_baking" / "packed").network
    whole = open_model(folder(root) / "phase7_edge" / "dequantised").network
    assert own.packing is not None and whole.packing is None
    assert own.settings.parameters() < given.settings.parameters()
    assert whole.settings == own.settings
    metadata = read_metadata(result.artifacts["models"][0].path).model_dump()
    wanted = {"size_mb", "accuracy_retention", "inference_latency_ms", "deployment"}
    assert {*wanted, "tools", "persona", "strategies", "levels"} <= set(metadata)
    assert metadata["deployment"]["device"] == "phone"
    card = (result.artifacts["models"][0].path / "README.md").read_text()
    assert "| cut | of |" in card and "| deployment |" in card and "| ms a token |" in card


@needs_fork
def test_cuts_follow_until_there_are_enough(reference: tuple[Path, dict[str, Any]]) -> None:
    artifacts = reference[1]["results"]["edge"].artifacts
    assert [own["taken_back"] for own in artifacts["cuts"]] == ["", ""]
    assert artifacts["ended"].startswith("2 cuts are made: ") and "bytes" in artifacts["ended"]
    profiles = artifacts["performance_profile"]
    assert profiles["model"]["model_bytes"] < profiles["input"]["model_bytes"]


@needs_fork
def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    own = {metric.name for metric in METRICS if metric.phase == "edge"} - {"edge/memory_mb"}
    names = {name for _, _, values in metrics(reference[0]) for name in values}
    assert not own - {found.name for name in names if (found := find_metric(name))}


@needs_fork
def test_it_stops_as_soon_as_the_target_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch)
    one_cut = run(tmp_path, f"{PHASE}.share=0.999", f"{PHASE}.cuts=9")["results"]["edge"]
    assert one_cut.artifacts["ended"] == MET and len(one_cut.artifacts["cuts"]) == 1
    assert one_cut.metrics["target_met"] == 1.0


@needs_fork
def test_a_server_gets_what_came_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_able(monkeypatch)
    loose = (f"{PHASE}.latency_ms=1e6", f"{PHASE}.tokens_per_s=1e-6")  # however busy it is here
    own = (f"{PHASE}.target=server", f"{PHASE}.share=0", *loose)
    result = run(tmp_path, *own)["results"]["edge"]
    assert result.artifacts["ended"] == MET and result.artifacts["cuts"] == []
    given = open_model(tmp_path / "sessions" / "before" / "phase6_baking" / "packed").network
    assert all(torch.equal(t, given.state_dict()[n]) for n, t in result.model.state_dict().items())


@needs_fork
@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ({"memory": [50, 50, 40]}, "mean 90.0%"),
        ({"tools": [50, 50, 44]}, "tools 88.0%"),
        ({"persona": [50, 50, 44]}, "persona 88.0%"),
    ],
    ids=["mean", "tools", "persona"],
)
def test_a_cut_that_breaks_the_gate_is_taken_back(
    looks: dict[str, list[int]], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cut loses too much: what is handed over is what the first one left."""
    as_if_able(monkeypatch, **looks)
    states = []
    distilled = EdgeSearch._distilled

    def noted(own: EdgeSearch, model: LatentModel, number: int) -> LatentModel:
        states.append(distilled(own, model, number))
        return states[-1]

    monkeypatch.setattr(EdgeSearch, "_distilled", noted)
    result = run(tmp_path, f"{PHASE}.cuts=5", f"{PHASE}.least_retention=0.901")["results"]["edge"]
    assert told in result.artifacts["ended"] and "retention gate" in result.artifacts["ended"]
    assert [bool(own["taken_back"]) for own in result.artifacts["cuts"]] == [False, True]
    left = states[0].opened().state_dict()
    assert all(torch.equal(t, left[n]) for n, t in result.model.state_dict().items())
    assert (folder(tmp_path) / "events.jsonl").read_text().count("rolled_back") == 1


@needs_fork
def test_real_scores_come_back_with_the_weights(tmp_path: Path) -> None:
    """Nothing is made up: the weights before the first cut are asked again."""
    patch = pytest.MonkeyPatch()
    with patch.context() as own:
        own.setattr(EdgeSearch, "_lost", lambda *_: "mean 10.0%")
        result = run(tmp_path)["results"]["edge"]
    assert [bool(own["taken_back"]) for own in result.artifacts["cuts"]] == [True]


@needs_fork
def test_weights_that_a_cut_goes_back_to_have_the_recorded_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch, 50, 10)
    look = EdgeSearch.right

    def otherwise(own: EdgeSearch, model: Any, name: str) -> Any:
        found = look(own, model, name)
        return {**found, "tools": [True] * 100} if "again" in name else found

    monkeypatch.setattr(EdgeSearch, "right", otherwise)
    with pytest.raises((DamagedFile, AssertionError), match="score otherwise"):
        run(tmp_path)


@needs_fork
@pytest.mark.parametrize(("stage", "step"), [("cut_1", 1), ("cut_2", 3)])
def test_killed_in_any_cut_it_ends_in_the_same_bytes(
    stage: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == stage and record.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sets = f"{PHASE}.least_retention=0.0001"
    assert exit_code(forked(lambda: run(tmp_path / "a", sets, listener=die))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path / "a"))) == 0
    run(tmp_path / "b", sets)
    assert made(tmp_path / "a") == made(tmp_path / "b")
    assert _without_clocks(metrics(tmp_path / "a")) == _without_clocks(metrics(tmp_path / "b"))


@needs_fork
def test_a_clock_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on with other clocks tells and does what it did before it was killed."""
    sets = (f"{PHASE}.least_retention=0.0001", f"{PHASE}.share=1", f"{PHASE}.latency_ms=0.000001")

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == "cut_2" and record.get("step") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: run(tmp_path, *sets, listener=die))) == -signal.SIGKILL
    monkeypatch.setattr(Profiler, "measure", _fast_later(Profiler.measure))
    artifacts = run(tmp_path)["results"]["edge"].artifacts
    assert len(artifacts["cuts"]) == 2 and artifacts["cuts"][0]["profile"]["token_ms"] > 1e-6
    assert artifacts["ended"] == MET


def _fast_later(measure: Any) -> Any:
    def faster(own: Profiler, models: Any) -> Any:
        assert "cut_1" not in models and len(models) == 2  # these were measured before the kill
        return {name: {**p, "token_ms": 1e-7} for name, p in measure(own, models).items()}

    return faster


def _without_clocks(rows: Any) -> Any:
    clocks = ("_ms", "per_second", "ratio")
    return [
        (phase, step, {n: v for n, v in values.items() if not n.endswith(clocks)})
        for phase, step, values in rows
    ]


@pytest.mark.parametrize("sets", [("kinds=[]",), ("kinds=[heads, heads]",), ("target=watch",)])
def test_settings_that_cannot_be_are_refused(sets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        config(*(f"{PHASE}.{text}" for text in sets))


def test_limits_of_the_device_can_be_replaced() -> None:
    own = config(f"{PHASE}.target=pi", f"{PHASE}.share=0", f"{PHASE}.size_mb=3").phases.edge
    assert own.limits == TARGETS["pi"]._replace(size_mb=3.0)
