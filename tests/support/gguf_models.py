"""Small models of the shapes that are written as GGUF, with a tokenizer of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.support.tokenizers import TOKENIZER, byte_tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "Be kind.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    **{"vocab_size": 520, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
WIDE = {"head_dim": 16}  # wider than hidden_size / heads
# Each by its name, with what transformers can read back from GGUF first.
READ_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied and wide": ("llama", {"tie_word_embeddings": True, **WIDE}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biased": ("llama", {"attention_bias": True}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
}


def make_gguf_model(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Save a model with random weights, none of them at its initial value; returns its network."""
    settings = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**{**SIZES, **changes})
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(settings).to(dtype).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    network.save_pretrained(folder)
    for name, content in TOKENIZER.files().items():
        (folder / name).write_bytes(content)
    return network


def put_template(folder: Path, template: str | None) -> None:
    """Give a model another chat template."""
    path = folder / "tokenizer_config.json"
    said = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
    path.write_text(json.dumps({**said, **({"chat_template": template} if template else {})}))


def put_byte_tokenizer(folder: Path) -> None:
    """Give a model a tokenizer with a token a byte."""
    byte_tokenizer(CHATML).save_pretrained(folder)
