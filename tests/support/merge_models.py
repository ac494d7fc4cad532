"""Small models on disk for the merge tests: a base and fine-tunes of it, of several families."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.merge.combos import ALL, combo_name
from agent_forge.merge.engine import merge
from agent_forge.merge.output import ProgressCallback, WrittenMerge, write_folders
from agent_forge.merge.recipe import Recipe

NAMES = ("base", "a", "b", "c")
OWN = {
    "vocab_size": 300,
    **{"embed_rank": 8, "d_model": 16, "n_layers": 2, "n_heads": 2, "ffn_hidden": 24},
    **{"d_mem": 8, "gate_hidden": 8, "trm_hidden": 16},
}


@functools.cache
def family(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the config of a small model of this family."""
    torch.manual_seed(0)
    if name == "forge":
        from agent_forge.model.hf import config_dict
        from agent_forge.model.network import ForgeNetwork

        settings = ModelSettings.model_validate(OWN)
        return ForgeNetwork(settings).state_dict(), config_dict(settings)
    from transformers import (
        AutoModelForCausalLM,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
    )

    common = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**common, **heads),
        "qwen2": lambda: Qwen2Config(**common, **heads, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**common, **heads, head_dim=8, tie_word_embeddings=True),
        "gemma3": lambda: Gemma3TextConfig(**common, **heads, head_dim=8, sliding_window=16),
        "gpt2": lambda: GPT2Config(vocab_size=48, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    }
    model = AutoModelForCausalLM.from_config(configs[name]())
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return state, json.loads(json.dumps(config, default=str))


def tuned(number: int, kind: str = "llama", scale: float = 0.05) -> dict[str, Tensor]:
    """Model 0 is the base; another one lies a little away from it."""
    base, _ = family(kind)
    own = torch.Generator().manual_seed(number)
    norms = 0.1 if kind in ("qwen3", "gemma3") else 0.0  # which are all alike in a new network
    return {
        name: t.clone()
        + (scale * (t.std(unbiased=False) or norms) * torch.randn(t.shape, generator=own))
        if number and t.is_floating_point()
        else t.clone()
        for name, t in base.items()
    }


def save(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_models(root: Path, kind: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """root/base, a, b, c."""
    for number, name in enumerate(NAMES):
        state = {k: v.to(dtype) for k, v in tuned(number, kind).items()}
        save(root / name, state, family(kind)[1])
    return root


def recipe(root: Path, method: str = "linear", **fields: Any) -> Recipe:
    """A recipe for the three fine-tunes below `root`, with their base where the method has one."""
    data: dict[str, Any] = {"models": [{"model": str(root / n)} for n in NAMES[1:]]}
    if method != "combo":
        data["merge_method"] = method
    if method not in ("linear", "slerp", "passthrough"):
        data["base_model"] = str(root / "base")
    return Recipe.model_validate({**data, **fields})


def write_combos(
    recipe: Recipe,
    folder: Path,
    which: Sequence[int] = ALL,
    progress: ProgressCallback | None = None,
) -> dict[int, WrittenMerge]:
    """Combos of the same parents, one folder each, as `forge merge --combo all` writes them."""
    folders: dict[int | None, Path] = {n: folder / combo_name(n) for n in which}
    written = write_folders(merge(recipe), folders, progress=progress)
    return {n: written[n] for n in which}


def with_tokens(folder: Path, tokens: dict[str, int], added: list[str] = []) -> None:  # noqa: B006
    entries = [{"id": len(tokens) + i, "content": t} for i, t in enumerate(added)]
    content = {"model": {"type": "BPE", "vocab": tokens}, "added_tokens": entries}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}}))
