"""Hugging Face interop: our directories open with the Auto classes, and theirs is our network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.errors import ConfigError
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.hf import ForgeConfig, ForgeForCausalLM, build_network, config_dict
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.networks import network, tokens


@pytest.fixture
def saved(sessions: SessionStore) -> Path:
    """A model directory of ours, made by the store."""
    model = network(sw_window=16)
    storage = ModelStorage(sessions.root, sessions.registry, build_network)
    storage.save_model(model, "s1", "cognate", "m1", {}, config=config_dict(model.settings))
    loaded, _ = storage.load_model("cognate.m1.s1")
    assert torch.equal(loaded(tokens(9)), model(tokens(9)))
    return storage.find("cognate.m1.s1")


def test_a_directory_of_ours_opens_with_the_auto_classes(saved: Path) -> None:
    config = AutoConfig.from_pretrained(saved)
    assert isinstance(config, ForgeConfig) and config.sw_window == 16
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert isinstance(model, ForgeForCausalLM)
    with torch.no_grad():
        assert torch.equal(model(tokens(40)).logits, network(sw_window=16)(tokens(40)))


def test_transformers_saves_and_opens_it_again(saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(model(tokens(20)).logits, again(tokens(20)).logits)
    assert again.config.settings() == model.config.settings()


def test_generate_of_transformers_equals_ours(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    prompt = torch.tensor([[5, 6, 7]])
    theirs = model.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
    (ours,) = generate(
        model.network, [[5, 6, 7]], SamplingSettings(max_new_tokens=10, halt_threshold=1.0)
    )
    assert theirs[0, 3:].tolist() == ours.tokens


def test_rows_padded_on_the_left_are_as_they_are_alone(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    rows = [[5, 6, 7, 8, 9, 3], [11, 4], [2, 2, 13]]
    longest = max(map(len, rows))
    batch = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        logits = model(batch, attention_mask=mask).logits
        for i, row in enumerate(rows):
            alone = model(torch.tensor([row])).logits[0]
            assert torch.allclose(logits[i, longest - len(row) :], alone, atol=1e-5)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **how)[:, longest:].tolist()
    for row, made in zip(rows, together, strict=True):
        assert model.generate(torch.tensor([row]), **how)[0, len(row) :].tolist() == made


def test_labels_give_the_loss_of_the_next_token(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    x = tokens(12)
    labels = x.clone()
    labels[:, :4] = -100
    out = model(x, labels=labels)
    logits = out.logits[:, 3:-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, x[:, 4:].flatten())
    assert torch.allclose(out.loss, expected, atol=1e-5)


def test_a_config_that_does_not_fit_is_refused() -> None:
    shape = config_dict(network().settings)
    with pytest.raises(ConfigError, match="d_model"):
        ForgeConfig(**{**shape, "d_model": 65})
    with pytest.raises(ConfigError, match="n_layers"):
        build_network({**shape, "n_layers": 0})
