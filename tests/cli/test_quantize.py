"""`forge quantize`: models of any maker in few bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.evals.model_under_test import ModelUnderTest
from agent_forge.model.opened import open_model
from agent_forge.phases import quantise
from agent_forge.quant.layers import compute_rounded, plan_packing
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.eval_models import FAMILIES
from tests.support.tokenizers import CHAT, byte_tokenizer

STORIES = [
    f"{name} has {n} red {thing} and a dog. " * 4
    for name in ("Ann", "Bob", "Cem", "Dora")
    for thing in ("balls", "cups", "hats")
    for n in range(20)
]


def model(place: Path, kind: str) -> Path:
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **FAMILIES[kind])
    AutoModelForCausalLM.from_config(shape).save_pretrained(place)
    byte_tokenizer(CHAT).save_pretrained(place)
    return place


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_model_is_written_small_and_opens_as_what_it_was_rounded_to(
    kind: str, tmp_path: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", kind), tmp_path / "out"
    result = forge(f"quantize {parent} {out} --json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["original_bytes"] / told["packed_bytes"] > 4 and told["comparison"] is None
    network, packed = open_model(parent).network, open_model(out).network
    packing = plan_packing(network, "ternary", "int4g32", 8)
    expected = packing.rounded(network.state_dict())
    for name, tensor in packed.state_dict().items():
        assert torch.equal(tensor.float(), expected[name].float()), name
    assert forge(f"generate {out} 12+1 --max-tokens 3").code == 0
    assert "base_model_relation: quantized" in (out / "README.md").read_text()


def test_training_through_the_rounding_helps_on_texts_it_did_not_learn_from(
    tmp_path: Path, forge: Forge
) -> None:
    parent, data = model(tmp_path / "parent", "llama"), tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    bits = []
    for steps in (0, 30):
        out = tmp_path / f"out{steps}"
        command = f"quantize {parent} {out} --data {data} --steps {steps} --rate 0.01 --json"
        result = forge(command)
        assert result.code == 0, result.err
        told = json.loads(result.out)
        assert "its parent" in told["sentence"]
        bits.append(told["comparison"]["overall"]["bits_per_byte"]["candidate"])
    assert bits[1] < bits[0] - 0.1
    again = forge(f"quantize {parent} {tmp_path / 'again'} --data {data} --steps 30 --rate 0.01")
    assert again.code == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out30", "again")]
    assert weights[0] == weights[1]


def test_wrong_choices_are_not_learned(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, data = model(tmp_path / "parent", "llama"), tmp_path / "own.jsonl"
    rows = [
        {"prompt": f"{n} plus {n} is", "completion": f" {2 * n}", "choices": [f" {2 * n}", " x"]}
        for n in range(200)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[list[int]] = []
    batch = quantise._batch
    monkeypatch.setattr(
        quantise, "_batch", lambda items: seen.extend(i.ids for i in items) or batch(items)
    )
    result = forge(f"quantize {parent} {tmp_path / 'out'} --data {data} --steps 6")
    assert result.code == 0, result.err
    wrong = open_model(parent).tokenizer(" x").input_ids[-1]
    assert len(seen) == 48 and all(wrong not in ids for ids in seen)


def test_transformers_does_not_open_it_with_gaps(tmp_path: Path, forge: Forge) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    assert forge(f"quantize {parent} {out}").code == 0
    with pytest.raises(ValueError, match="quant"):
        AutoModelForCausalLM.from_pretrained(out)


def test_a_tied_head_is_what_was_trained(tmp_path: Path, forge: Forge) -> None:
    torch.manual_seed(0)
    shape = AutoConfig.for_model("llama", **FAMILIES["llama"], tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "parent")
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "parent")
    options = "--embedding ternary --json"
    assert forge(f"quantize {tmp_path / 'parent'} {tmp_path / 'out'} {options}").code == 0
    network = open_model(tmp_path / "parent").network
    request = quantise.QuantiseRequest("", tmp_path, embedding="ternary")
    packing = request.packing(network)
    compute_rounded(network, packing)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = (
            network(tokens).logits,
            open_model(tmp_path / "out").network(tokens).logits,
        )
    assert float((expected - found).abs().max()) < 1e-3 * float(expected.abs().max())


def test_what_cannot_be_done_is_refused_before_any_work(tmp_path: Path, forge: Forge) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    for line, told in (
        (f"quantize {parent} {out} --codec int9", "there is no codec"),
        (f"quantize {parent} {out} --codec fp16 --dry-run", "there is no codec"),
        (f"quantize {parent} {out} --embedding x", "there is no codec"),
        (f"quantize {parent} {out} --activation-bits 4", "neither 0 nor 8"),
        (f"quantize {parent} {out} --steps 5", "something to learn from"),
        (f"quantize {parent} {parent / 'inside'}", "lies in the model it is made of"),
        (f"quantize {tmp_path / 'nowhere'} {out}", "nowhere"),
    ):
        result = forge(line)
        assert result.code in (2, 4) and told in result.err, line
        assert not out.exists()
    assert forge(f"quantize {parent} {out} --dry-run").code == 0 and not out.exists()
    assert forge(f"quantize {parent} {out}").code == 0
    refused = forge(f"quantize {out} {tmp_path / 'twice'}")
    assert refused.code == 2 and "packed already" in refused.err
    assert forge(f"quantize {parent} {out}").code == 2  # it exists
    assert forge(f"quantize {parent} {out} --force --codec int4g32").code == 0


def test_texts_that_the_tokenizer_loses_are_refused_before_anything_is_written(
    tmp_path: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    place, data = parent / "tokenizer.json", tmp_path / "own.jsonl"
    deaf = {"type": "Replace", "pattern": {"String": "z"}, "content": ""}
    place.write_text(json.dumps({**json.loads(place.read_text()), "normalizer": deaf}))
    data.write_text("".join(json.dumps({"text": f"{text}a zebra"}) + "\n" for text in STORIES[:40]))
    result = forge(f"quantize {parent} {out} --data {data}")
    assert result.code == 2 and "loses the character 'z'" in result.err
    assert not out.exists()


def test_a_packed_model_can_be_compared_merged_and_measured(tmp_path: Path, forge: Forge) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    assert forge(f"quantize {parent} {out} --embedding int8").code == 0
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES[:40]))
    assert forge(f"eval {out} --data {data}").code == 0
    assert forge(f"compare {parent} {out} --data {data}").code == 0
    merged = forge(f"merge --models {parent},{out} --method linear {tmp_path / 'merged'}")
    assert merged.code == 0, merged.err
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


def test_interrupted_while_it_measures_nothing_is_there_and_the_old_model_stays(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = model(tmp_path / "m", "llama"), tmp_path / "out"
    rows = (json.dumps({"text": story}) for story in STORIES[:60])
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def small(*more: str) -> Any:
        return forge(f"quantize {place} {out} --data {tmp_path / 'texts.jsonl'} {' '.join(more)}")

    with monkeypatch.context() as patch:
        patch.setattr(ModelUnderTest, "measure_all", interrupted)
        assert small().code == 1 and not out.exists()
    assert small("--codec", "int8").code == 0
    before = files.sha256_of(out / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(ModelUnderTest, "measure_all", interrupted)
        assert small("--force").code == 1
    assert files.sha256_of(out / "model.safetensors") == before
    assert not [path for path in tmp_path.iterdir() if "out" in path.name and path != out]
