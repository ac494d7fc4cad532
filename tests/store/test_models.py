"""Model directories: complete, registered, verified on load, readable by other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from agent_forge.errors import (
    AlreadyInUse,
    ConfigError,
    DamagedFile,
    DiskFull,
    NameRefused,
    NotFound,
    PhaseFailed,
    WrittenByNewerVersion,
)
from agent_forge.store import files, lock
from agent_forge.store.models import ModelStorage, load_directory
from tests.support.pico import Pico


def save(storage: ModelStorage, model: nn.Module, name: str = "m1") -> str:
    return storage.save_model(
        model,
        "s1",
        "cognate",
        name,
        {"specialization": "reasoning", "final_loss": 2.5},
        config={"model_type": "pico"},
        metrics={"loss/final": 2.5, "accuracy": None, "note|x": "a\nb"},
        tags=["best"],
    )


def test_a_model_comes_back_as_it_was(storage: ModelStorage, pico: Pico) -> None:
    model_id = save(storage, pico)
    assert model_id == "cognate.m1.s1"
    tokens = torch.tensor([[0, 1, 2, 3]])
    for model, metadata in (
        storage.load_model(model_id),
        storage.load_model(session_id="s1", phase_name="cognate"),
    ):
        assert torch.equal(model(tokens), pico(tokens))
        assert metadata["specialization"] == "reasoning"
    weights = load_directory(storage.find(model_id))[0]
    assert torch.equal(weights["layer.weight"], pico.layer.weight)


def test_a_model_that_is_refused_is_neither_stored_nor_registered(
    storage: ModelStorage, pico: Pico
) -> None:
    """The check sees the whole directory before anybody else does."""

    def refuse(folder: Path) -> None:
        load_directory(folder)
        raise PhaseFailed("it is not what was measured")

    for earlier in (False, True):
        if earlier:
            storage.save_model(pico, "s1", "cognate", "m1", {"seed": 1})
        with pytest.raises(PhaseFailed):
            storage.save_model(pico, "s1", "cognate", "m1", {"seed": 2}, check=refuse)
        assert [row["metadata"]["seed"] for row in storage.registry.search_models()] == [
            1
        ] * earlier
        names = [path.name for path in (storage.base_path / "sessions" / "s1").rglob("*m1")]
        assert names == ["m1"] * earlier
    storage.save_model(pico, "s1", "cognate", "m1", {"seed": 3}, check=files.verify)
    assert load_directory(storage.find("cognate.m1.s1"))[1]["seed"] == 3


def test_the_directory_is_complete(storage: ModelStorage, pico: Pico) -> None:
    storage.save_model(pico, "s1", "cognate", "m1", {}, tokenizer_files={"tokenizer.json": b"{}"})
    path = storage.find("cognate.m1.s1")
    assert path == storage.base_path / "sessions/s1/phase1_cognate/m1"
    assert {p.name for p in path.iterdir()} == {
        *("model.safetensors", "config.json", "metadata.json", "metrics.json"),
        *("README.md", "tokenizer.json", "manifest.json"),
    }


def test_tied_weights_are_stored_and_counted_once(storage: ModelStorage, pico: Pico) -> None:
    path = storage.find(save(storage, pico))
    assert set(load_file(path / "model.safetensors")) == {
        *("embed.weight", "layer.weight", "layer.bias"),
    }
    weights, metadata, _ = load_directory(path)
    assert metadata["tied_weights"] == {"head.weight": "embed.weight"}
    assert metadata["parameters"] == 4 * 3 + 3 * 3 + 3
    assert metadata["size_mb"] == (path / "model.safetensors").stat().st_size / 1e6
    assert weights["head.weight"] is weights["embed.weight"]
    model, _ = storage.load_model("cognate.m1.s1")
    assert isinstance(model, Pico) and model.head.weight is model.embed.weight


def test_the_card_shows_what_was_recorded(storage: ModelStorage, pico: Pico) -> None:
    path = storage.find(save(storage, pico))
    card = (path / "README.md").read_text()
    assert "| specialization | reasoning |" in card and "| loss/final | 2.5 |" in card
    assert "| accuracy | - |" in card and "| note\\|x | a b |" in card
    storage.save_model(pico, "s1", "cognate", "bare", {})
    card = (storage.find("cognate.bare.s1") / "README.md").read_text()
    assert "Nothing was measured" in card


def test_equal_weights_give_the_same_file(storage: ModelStorage, pico: Pico) -> None:
    first = files.sha256_of(storage.find(save(storage, pico)) / "model.safetensors")
    second = files.sha256_of(storage.find(save(storage, pico, "m2")) / "model.safetensors")
    assert first == second == storage.registry.get_model("cognate.m1.s1")["metadata"]["sha256"]


def test_saving_again_replaces_the_model(storage: ModelStorage, pico: Pico) -> None:
    save(storage, pico)
    nn.init.zeros_(pico.layer.weight)
    save(storage, pico)
    weights = load_directory(storage.find("cognate.m1.s1"))[0]
    assert not weights["layer.weight"].any()
    assert len(storage.registry.search_models()) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "metadata.json"])
def test_a_flipped_bit_in_any_file_is_noticed(storage: ModelStorage, pico: Pico, name: str) -> None:
    path = storage.find(save(storage, pico)) / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=name):
        storage.load_model("cognate.m1.s1")


def test_metadata_that_is_none_is_damage(storage: ModelStorage, pico: Pico) -> None:
    path = storage.find(save(storage, pico))
    good = {p.name: p.read_bytes() for p in path.iterdir() if p.name != files.MANIFEST}
    record = json.loads(good["metadata.json"])
    for change, error in (
        ({"model_id": 7}, DamagedFile),
        ({"parameters": "many"}, DamagedFile),
        ({"tied_weights": {"head.weight": "nothing"}}, DamagedFile),
        ({"schema_version": 2}, WrittenByNewerVersion),
    ):
        with files.staging(path) as stage:
            for name, content in {**good, "metadata.json": b""}.items():
                changed = files.to_json({**record, **change})
                stage.write_bytes(name, content or changed)
        with pytest.raises(error):
            load_directory(path)
    with files.staging(path) as stage:
        stage.write_json("metadata.json", record)
    with pytest.raises(DamagedFile, match="it has no model"):
        load_directory(path)


def test_two_swapped_directories_are_noticed(storage: ModelStorage, pico: Pico) -> None:
    one, two = (storage.find(save(storage, pico, name)) for name in ("m1", "m2"))
    one.rename(one.with_name("x"))
    two.rename(one)
    one.with_name("x").rename(two)
    with pytest.raises(DamagedFile, match=r"it says it is cognate\.m2\.s1"):
        storage.load_model("cognate.m1.s1")


def test_what_is_not_finite_was_not_measured(storage: ModelStorage, pico: Pico) -> None:
    nan = float("nan")
    storage.save_model(pico, "s1", "cognate", "m1", {"final_loss": nan}, metrics={"loss": [nan]})
    path = storage.find("cognate.m1.s1")
    assert files.read_json(path / "metadata.json")["final_loss"] is None
    assert files.read_json(path / "metrics.json") == {"loss": [None]}


def test_metadata_cannot_overwrite_what_was_measured(storage: ModelStorage, pico: Pico) -> None:
    storage.save_model(pico, "s1", "cognate", "m1", {"parameters": 10**9, "sha256": "x"})
    metadata = json.loads((storage.find("cognate.m1.s1") / "metadata.json").read_text())
    assert metadata["parameters"] == 24 and len(metadata["sha256"]) == 64


def test_bad_input_is_refused_before_anything_is_written(
    storage: ModelStorage, pico: Pico, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="no session"):
        storage.save_model(pico, "s2", "cognate", "m1", {})
    for session, phase, name in (("..", "cognate", "m"), ("s1", "/x", "m"), ("s1", "cognate", "")):
        with pytest.raises(NameRefused):
            storage.save_model(pico, session, phase, name, {})
    with monkeypatch.context() as patch:
        patch.setattr(files, "free_bytes", lambda path: 10)
        with pytest.raises(DiskFull, match="bytes needed, 10 free"):
            save(storage, pico)
    assert not list(storage.base_path.glob("sessions/*/*/*"))


def test_a_session_in_use_by_another_process_is_busy(
    storage: ModelStorage, pico: Pico, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.platform, "try_lock", lambda fd: False)
    with pytest.raises(AlreadyInUse):
        save(storage, pico)


def test_loading_needs_a_builder(storage: ModelStorage, pico: Pico) -> None:
    save(storage, pico)
    with pytest.raises(ConfigError, match="build"):
        ModelStorage(storage.base_path).load_model("cognate.m1.s1")


def test_a_model_loads_with_transformers(storage: ModelStorage, tmp_path: Path) -> None:
    """A tied Llama saved by us is an ordinary Hugging Face directory."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).eval()
    storage.save_model(llama, "s1", "cognate", "llama", {}, config=config.to_dict())
    again = AutoModelForCausalLM.from_pretrained(storage.find("cognate.llama.s1")).eval()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens).logits, llama(tokens).logits)
