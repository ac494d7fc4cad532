"""The native token step: what torch computes, past the window, with halting, on any path."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import SamplingSettings, generate, stream
from agent_forge.infer.native import native_decoder
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import ForgeModel, open_model
from agent_forge.native import backend
from agent_forge.native.decoder import NativeDecoder
from agent_forge.quant.layers import plan_packing, round_inputs
from agent_forge.quant.packed import KEY
from agent_forge.store import files, tensors
from tests.support.native_build import NAME
from tests.support.networks import network

TEXT = torch.randint(0, 512, (110,), generator=torch.Generator().manual_seed(5)).tolist()
# Sizes that are no multiple of any tile, and heads of 2 * 7.
ODD: dict[str, object] = {
    "d_model": 42,
    "n_heads": 3,
    "embed_rank": 21,
    "ffn_hidden": 51,
    "d_mem": 19,
    "gate_hidden": 11,
    "trm_hidden": 13,
    "vocab_size": 515,
}
PRUNED = {**ODD, "n_heads": 2, "head_size": 14}  # heads that do not fill the width
WIDE = {"n_heads": 3, "head_size": 30}  # and that are wider together


def packed(bits: int, body: str = "ternary", embedding: str = "int4g32", **changes: Any) -> Any:
    """A network as it is after it was packed and opened, of which positions halt after 1 to 3
    steps. Without rounded inputs (bits 0) nothing lies between two roundings."""
    model = network(**changes)
    with torch.no_grad():
        model.halting.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
        model.halting.head.bias.fill_(0.2)
        model.halting.mean_target.copy_(torch.tensor([0.3, 0.5, 0.9]))
    packing = plan_packing(model, body, embedding, bits)
    model.load_state_dict(packing.rounded(model.state_dict()))
    round_inputs(model, packing.with_rounded_inputs)
    model.packing = packing
    return model


def decoder_of(model: ForgeNetwork) -> NativeDecoder:
    found = native_decoder(model)
    assert found is not None
    return found


def by_torch(model: ForgeNetwork, text: list[int], **options: Any) -> tuple[Tensor, list[int]]:
    cache = model.new_cache()
    read = [model.predict(torch.tensor([[token]]), cache, **options) for token in text]
    return torch.cat([logits for logits, _ in read]), [int(steps) for _, steps in read]


def by_native(model: ForgeNetwork, text: list[int], *more: Any) -> tuple[Tensor, list[int]]:
    decoder = decoder_of(model)
    cache = decoder.new_cache()
    read = [decoder.read([token], cache, *more) for token in text]
    return torch.stack([logits for logits, _ in read]), [steps for _, steps in read]


def apart(found: Tensor, wanted: Tensor) -> Tensor:
    """How far logits are apart, for each token, of the largest."""
    return (found - wanted).abs().amax(1) / wanted.abs().amax(1)


# -- against torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize(
    "changes",
    [
        {"embed_rank": 64},
        {"sw_window": 1},
        {"sw_window": 6},
        {"sw_window": 100},
        {"sw_window": 9, **ODD},
        PRUNED,
        WIDE,
    ],
    ids=["grows", "window 1", "window 6", "to its window", "odd sizes", "pruned", "wide heads"],
)
@pytest.mark.usefixtures("native")
def test_a_step_is_that_of_torch(
    changes: dict[str, object], plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_PLAIN_C", plain)
    model = packed(0, **changes)
    (found, steps), (wanted, wanted_steps) = by_native(model, TEXT), by_torch(model, TEXT)
    assert float(apart(found, wanted).max()) < 1e-5
    assert steps == wanted_steps and {*steps} == {1, 2, 3}


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
@pytest.mark.usefixtures("native")
def test_it_halts_where_torch_does(threshold: float) -> None:
    model = packed(0)
    found, wanted = by_native(model, TEXT, threshold), by_torch(model, TEXT, threshold=threshold)
    assert found[1] == wanted[1] and float(apart(found[0], wanted[0]).max()) < 1e-5
    if threshold in (0, 1):
        assert {*found[1]} == {1 if threshold == 0 else 3}


@pytest.mark.parametrize("changes", [{}, ODD, PRUNED], ids=["even sizes", "odd sizes", "pruned"])
@pytest.mark.usefixtures("native")
def test_with_rounded_inputs_it_differs_only_between_two_roundings(changes: Any) -> None:
    # Of texts of one token, so that a number that was rounded the other way stays in its own.
    model = packed(8, **changes)
    found, wanted = (
        torch.cat([read(model, [token])[0] for token in range(120)])
        for read in (by_native, by_torch)
    )
    differences = apart(found, wanted)
    assert float((differences < 1e-5).float().mean()) > 0.9
    assert float(differences.max()) < 0.1


@pytest.mark.parametrize("embedding", ["", "int8", "int4", "int4g20", "ternary", "step0.3"])
@pytest.mark.parametrize("body", ["ternary", "ternary_bitnet", "int4g32", "int8", "step1.5"])
@pytest.mark.usefixtures("native")
def test_whatever_the_codecs_are(body: str, embedding: str) -> None:
    model = packed(0, body, embedding)
    found, wanted = by_native(model, TEXT[:20]), by_torch(model, TEXT[:20])
    assert found[1] == wanted[1] and float(apart(found[0], wanted[0]).max()) < 1e-5


@pytest.mark.parametrize(
    "changes", [{"sw_window": 6}, {"sw_window": 9, **ODD}, {"sw_window": 6, **PRUNED}]
)
def test_every_path_gives_the_same_bits(
    native: Any, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.has_avx2():
        pytest.skip("no AVX2 here")
    model, found = packed(8, **changes), []
    for plain, name in (("0", "avx2"), ("1", "c")):
        monkeypatch.setenv("FORGE_PLAIN_C", plain)
        assert backend() == decoder_of(model).backend == name
        found.append(by_native(model, TEXT))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.usefixtures("native")
def test_a_text_at_once_is_the_text_token_by_token() -> None:
    model = packed(8, sw_window=70)
    decoder = decoder_of(model)
    cache = decoder.new_cache()
    decoder.read(TEXT[:100], cache)
    copied = copy.deepcopy(cache)
    found = decoder.read(TEXT[100:], cache)
    logits, steps = by_native(model, TEXT)
    assert torch.equal(found[0], logits[-1]) and found[1] == steps[-1]
    assert torch.equal(decoder.read(TEXT[100:], copied)[0], logits[-1])  # a copy goes its own way


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [512], [-1], [3, 10**12], [2**70]])
@pytest.mark.usefixtures("native")
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    decoder = decoder_of(packed(8))
    cache = decoder.new_cache()
    with pytest.raises(ConfigError, match="cannot be read"):
        decoder.read(tokens, cache)
    assert cache.position == 0


def made(model: Any, **changes: Any) -> NativeDecoder:
    half = model.settings.d_model // model.settings.n_heads // 2
    options = {"decays": model.memory.decays(torch.zeros(1)), "frequencies": torch.ones(half)}
    state = {**model.state_dict(), **changes.pop("state", {})}
    return NativeDecoder(model.settings, state, model.packing, **{**options, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"state": {"norm.gain": torch.ones(63)}},
        {"state": {"norm.gain": torch.full((64,), torch.nan)}},
        {"state": {"memory.down.weight": torch.zeros(32, 65)}},
        {"state": {"blocks.1.mlp.up.weight": torch.full((128, 64), torch.nan)}},
        {"state": {"embedding.weight": torch.full((512, 32), torch.nan)}},
        {"decays": torch.ones(31)},
        {"frequencies": torch.tensor([])},
    ],
    ids=["short", "nan", "wide", "nan ternary", "nan embedding", "decays", "frequencies"],
)
@pytest.mark.usefixtures("native")
def test_a_network_that_does_not_fit_is_refused(changes: Any) -> None:
    model = packed(8)
    assert made(model).new_cache().position == 0
    with pytest.raises(ConfigError):
        made(model, **changes)


@pytest.mark.usefixtures("native")
def test_a_network_without_one_of_its_weights_is_refused() -> None:
    model = packed(8)
    state = {name: t for name, t in model.state_dict().items() if name != "recursion.z_start"}
    with pytest.raises(ConfigError, match=r"recursion\.z_start is missing"):
        NativeDecoder(
            model.settings,
            state,
            model.packing,
            decays=model.memory.decays(torch.zeros(1)),
            frequencies=torch.ones(16),
        )


# -- when it is used -------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(8)
    assert native_decoder(model) is not None
    monkeypatch.setenv("FORGE_NO_NATIVE", "1")
    assert backend() == "torch" and native_decoder(model) is None
    with pytest.raises(ConfigError, match="not built"):
        made(model)


def test_without_the_module_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    model = packed(0)
    assert backend() == "torch" and native_decoder(model) is None
    (found,) = generate(model, [TEXT[:5]], SamplingSettings(max_new_tokens=3))
    assert found.tokens[0] == int(by_torch(model, TEXT[:5])[0][-1].argmax())


@pytest.mark.usefixtures("native")
def test_it_is_made_once_and_again_for_other_weights() -> None:
    model = packed(8)
    first = native_decoder(model)
    assert first is not None and native_decoder(model) is first
    with torch.no_grad():
        model.norm.gain.add_(1)
    second = native_decoder(model)
    assert second is not None and second is not first
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.add_(0.01)  # no longer ternary
    assert native_decoder(model) is None
    model.packing = None
    assert native_decoder(model) is None


@pytest.fixture
def torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise AssertionError("torch computed a step")

    monkeypatch.setattr(ForgeNetwork, "predict", refuse)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "prompts",
    [[TEXT[:4], TEXT[:9], TEXT[20:30]], [TEXT[:9]]],
    ids=["of their own", "with a beginning that is read once"],
)
@pytest.mark.usefixtures("native")
def test_texts_are_those_of_torch(
    prompts: list[list[int]], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(0)
    sampling = SamplingSettings(max_new_tokens=12, temperature=temperature, seed=3)
    found = generate(model, prompts, sampling, samples=2)
    monkeypatch.setenv("FORGE_NO_NATIVE", "1")
    assert found == generate(model, prompts, sampling, samples=2)


@pytest.mark.usefixtures("native", "torch_is_not_asked")
def test_a_text_does_not_depend_on_its_batch_even_with_rounded_inputs() -> None:
    model, prompts = packed(8), [TEXT[:4], TEXT[:9], TEXT[20:30]]
    sampling = SamplingSettings(max_new_tokens=12)
    alone = [generate(model, [prompt], sampling)[0] for prompt in prompts]
    assert generate(model, prompts, sampling) == alone


@pytest.mark.usefixtures("native", "torch_is_not_asked")
def test_an_opened_packed_model_is_read_natively(tmp_path: Path) -> None:
    model = packed(8)
    config = {**config_dict(model.settings), KEY: model.packing.to_json()}
    with files.staging(tmp_path / "model") as stage:
        with stage.writing("model.safetensors") as writer:
            packed_state = model.packing.pack(model.state_dict()).tensors
            tensors.write_tensors(writer, packed_state, {"format": "pt"})
        stage.write_json("config.json", config)
        for name, content in Tokenizer.train(["a b c d e"] * 9, 512).files().items():
            stage.write_bytes(name, content)
    opened = open_model(tmp_path / "model")
    assert isinstance(opened, ForgeModel) and opened.network.packing == model.packing
    sampling = SamplingSettings(max_new_tokens=6)
    pieces = stream(opened.network, TEXT[:5], sampling, opened.decode)
    (wanted,) = generate(model, [TEXT[:5]], sampling, decode=opened.decode)
    assert "".join(pieces) == wanted.text and len(wanted.tokens) == 6
