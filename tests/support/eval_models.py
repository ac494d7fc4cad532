"""Small untrained models on disk, with a tokenizer: one of ours and a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.model.hf import config_dict
from agent_forge.store.models import ModelStorage
from tests.support.networks import shaken
from tests.support.tokenizers import CHAT, TEXTS, byte_tokenizer

SIZES = {"vocab_size": 260, "initializer_range": 0.2, "max_position_embeddings": 64}
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **WIDTHS, **HEADS},
    "mistral": {**SIZES, **WIDTHS, **HEADS, "sliding_window": 8},
    "qwen2": {**SIZES, **WIDTHS, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma": {**SIZES, **WIDTHS, **HEADS},
    "gpt_neox": {**SIZES, **WIDTHS, "num_attention_heads": 2},
    "gpt2": {
        **{"vocab_size": 260, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "initializer_range": 0.2,
    },
}


def own_model(storage: ModelStorage, name: str, seed: int) -> Path:
    model = shaken(seed)
    tokenizer = Tokenizer.train(TEXTS * 9, model.settings.vocab_size)
    config = config_dict(model.settings)
    files = tokenizer.files()
    storage.save_model(model, "s1", "cognate", name, {}, config=config, tokenizer_files=files)
    return storage.find(f"cognate.{name}.s1")


def llama(place: Path, seed: int = 0, template: str | None = CHAT, longest: int = 64) -> Path:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=longest,
    )
    LlamaForCausalLM(shape).save_pretrained(place)
    byte_tokenizer(template).save_pretrained(place)
    return place
