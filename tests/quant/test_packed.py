"""Packed models: they open as any other, and a damaged one is refused by name."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.errors import ConfigError, DamagedFile, ForgeError
from agent_forge.model.folder import open_weights
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.phases.training import LatentModel
from agent_forge.quant.layers import plan_packing, round_inputs
from agent_forge.quant.packed import KEY, Packing, packing_of
from agent_forge.train.corpus import build_corpus
from tests.support.quietstar_runs import config

CODES = "blocks.0.attention.q.weight.codes"


@pytest.fixture(scope="module")
def network() -> ForgeNetwork:
    torch.manual_seed(1)
    return ForgeNetwork(config().model)


@pytest.fixture(scope="module")
def folder(network: ForgeNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model as it is handed on: weights, config, tokenizer, without a manifest."""
    place = tmp_path_factory.mktemp("packed")
    write(place, network, plan_packing(network, "ternary", "int4g32", 8))
    return place


def write(place: Path, network: ForgeNetwork, packing: Packing) -> None:
    save_file(dict(packing.pack(network.state_dict()).tensors), place / "model.safetensors")
    record = {**config_dict(network.settings), KEY: packing.to_json()}
    (place / "config.json").write_text(json.dumps(record))
    tokenizer = build_corpus(config().phases.quietstar, network.settings).tokenizer
    for name, content in tokenizer.files().items():
        (place / name).write_bytes(content)


def packing_in(folder: Path) -> Packing:
    found = packing_of(json.loads((folder / "config.json").read_text()), folder)
    assert found is not None
    return found


def test_it_opens_as_what_was_packed(folder: Path, network: ForgeNetwork) -> None:
    opened: Any = open_model(folder).network
    packing = packing_in(folder)
    expected = copy.deepcopy(network)
    expected.load_state_dict(packing.rounded(network.state_dict()))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        plain = expected.eval()(tokens)
        round_inputs(expected, packing.with_rounded_inputs)
        assert torch.equal(opened(tokens), expected(tokens))
        assert not torch.equal(opened(tokens), plain)  # its inputs are rounded too


def test_its_weights_are_read_decoded_for_merges_and_others(
    folder: Path, network: ForgeNetwork
) -> None:
    weights = open_weights(folder)
    assert set(weights) == set(network.state_dict()) and KEY not in weights.config
    expected = packing_in(folder).rounded(network.state_dict())
    for name in weights:
        assert weights.specs[name].shape == expected[name].shape
        assert torch.equal(weights[name].float(), expected[name].float())


def test_what_is_packed_is_small_and_the_rest_is_fp16(network: ForgeNetwork) -> None:
    packing = plan_packing(network, "ternary", "int4g32", 8)
    state = network.state_dict()
    assert {n for n, t in state.items() if t.ndim == 2} - {*packing.matrices} == {
        "halting.head.weight"
    }
    packed = packing.pack(state).tensors
    assert {t.dtype for n, t in packed.items() if not n.endswith(".codes")} <= {
        torch.float16,
        torch.int64,
    }
    with pytest.raises(ConfigError, match="does not fit fp16"):
        packing.pack({**state, "norm.gain": state["norm.gain"] * 1e6})
    with pytest.raises(ConfigError, match=r"embedding\.weight is to be packed"):
        packing.pack({name: tensor for name, tensor in state.items() if name != "embedding.weight"})


@pytest.mark.parametrize("codec", ["ternary", "ternary_spec", "ternary_bitnet", "int3g32"])
def test_weights_that_are_trained_on_begin_as_what_was_opened(
    codec: str, network: ForgeNetwork, tmp_path: Path
) -> None:
    packing = plan_packing(network, codec, "int4g32", 8)
    write(tmp_path, network, packing)
    opened = open_model(tmp_path).network
    assert isinstance(opened, ForgeNetwork)
    again = LatentModel.of(opened).opened().state_dict()
    assert all(torch.equal(again[name], t) for name, t in opened.state_dict().items())


def test_embeddings_may_stay_fp16(network: ForgeNetwork) -> None:
    packing = plan_packing(network, "ternary")
    assert "embedding.weight" not in packing.matrices and not packing.with_rounded_inputs
    assert packing_of({KEY: {"quant_method": "gptq"}}, "x") is None and packing_of({}, "x") is None


def damage(folder: Path, copied: Path, change: Any) -> Path:
    """A copy of the folder with something changed in its tensors and its record."""
    shutil.copytree(folder, copied)
    tensors = load_file(copied / "model.safetensors")
    record = json.loads((copied / "config.json").read_text())
    change(tensors, record[KEY])
    save_file(tensors, copied / "model.safetensors")
    (copied / "config.json").write_text(json.dumps(record))
    return copied


def of_q(record: dict[str, Any]) -> dict[str, Any]:
    return record["matrices"][CODES.removesuffix(".codes")]  # type: ignore[no-any-return]


DAMAGES: dict[str, Any] = {
    "codes too few": lambda t, r: t.update({CODES: t[CODES][:-1].clone()}),
    "codes too many": lambda t, r: t.update({CODES: torch.cat([t[CODES], t[CODES][:1]])}),
    "codes of another type": lambda t, r: t.update({CODES: t[CODES].to(torch.int8)}),
    "codes no trits": lambda t, r: t[CODES].fill_(255),
    "codes gone": lambda t, r: t.pop(CODES),
    "scales gone": lambda t, r: t.pop(CODES.replace("codes", "scales")),
    "scales nan": lambda t, r: t[CODES.replace("codes", "scales")].fill_(float("nan")),
    "scales wide": lambda t, r: t.update({(n := CODES.replace("codes", "scales")): t[n].float()}),
    "scales turned": lambda t, r: t.update(
        {(n := CODES.replace("codes", "scales")): t[n].t().contiguous()}
    ),
    "packed and whole": lambda t, r: t.update({CODES.removesuffix(".codes"): torch.zeros(16, 16)}),
    "version": lambda t, r: r.update(version=2),
    "no matrices": lambda t, r: r.pop("matrices"),
    "activation bits": lambda t, r: r.update(activation_bits=4),
    "codec": lambda t, r: of_q(r).update(codec="int9"),
    "codec missing": lambda t, r: of_q(r).pop("codec"),
    "shape": lambda t, r: of_q(r).update(shape=[16, -16]),
    "shape swapped": lambda t, r: of_q(r).update(shape=[8, 32]),
    "shape huge": lambda t, r: of_q(r).update(shape=[2**30, 2**30]),
    "shape of floats": lambda t, r: of_q(r).update(shape=[16.0, 16.0]),
    "turned": lambda t, r: of_q(r).update(turned="yes"),
    "not a record": lambda t, r: r["matrices"].update({CODES.removesuffix(".codes"): 3}),
    "unknown matrix": lambda t, r: r["matrices"].update({"x.weight": of_q(r)}),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    copied = damage(folder, tmp_path / "copy", DAMAGES[what])
    with pytest.raises(DamagedFile) as refused:
        open_model(copied)
    assert refused.value.exit_code == 4
    with pytest.raises(DamagedFile):
        weights = open_weights(copied)
        [weights[name] for name in weights]


def test_random_bytes_never_crash_it(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = (folder / "model.safetensors").read_bytes()
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    refused = 0
    for _ in range(60):
        content = bytearray(whole)
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
        for _ in range(rng.randrange(1, 20)):
            place = rng.randrange(len(content) if rng.random() < 0.3 else min(3000, len(content)))
            content[place] = rng.randrange(256)
        (copied / "model.safetensors").write_bytes(bytes(content))
        try:
            open_model(copied)
        except ForgeError:
            refused += 1
    assert refused > 30
