"""LoRA adapters: what peft itself makes of them is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.merge.engine import merge
from agent_forge.merge.recipe import Recipe
from agent_forge.model.folder import open_weights
from agent_forge.model.weights import is_tied
from tests.support.adapters import adapted
from tests.support.tokenizers import byte_tokenizer

LINEAR = ["q_proj", "down_proj"]
# What is handled, each as peft saves it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": LINEAR}),
    "every linear layer": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilised": ("llama", {"target_modules": LINEAR, "use_rslora": True}),
    "gaussian": ("llama", {"target_modules": LINEAR, "init_lora_weights": "gaussian"}),
    "random start": ("llama", {"target_modules": LINEAR, "init_lora_weights": False}),
    "whole modules": ("llama", {"target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
    "head": ("llama", {"target_modules": [*LINEAR, "lm_head"]}),
    "a pattern": ("llama", {"target_modules": r".*\.\d+\.(self_attn|mlp)\.(q|down)_proj"}),
    "layers by name": (
        "llama",
        {"target_modules": LINEAR, "layers_to_transform": [1], "layers_pattern": ["layers"]},
    ),
    "one layer": ("llama", {"target_modules": LINEAR, "layers_to_transform": [1]}),
    "excluded": (
        "llama",
        {"target_modules": LINEAR, "exclude_modules": ["model.layers.0.mlp.down_proj"]},
    ),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "biases of adapted layers": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "transposed": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "tied": ("qwen2", {"target_modules": LINEAR}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "dora, transposed": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "dora, biases, rslora": (
        "qwen2",
        {"target_modules": ["q_proj"], "bias": "all", "use_dora": True, "use_rslora": True},
    ),
}
# What changes more than W + B A, or what peft alone knows how to put together.
REFUSED: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "loftq": {"init_lora_weights": "loftq"},
    "corda": {"init_lora_weights": "corda"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "lora_bias": {"lora_bias": True},
    "target_parameters": {"target_parameters": ["q_proj.weight"]},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "use_bdlora": {"use_bdlora": {"x": 1}},
    "something_new": {"something_new": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_one_adapter_is_what_peft_merges(name: str, tmp_path: Path) -> None:
    base, lora = adapted(tmp_path, *KINDS[name])
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora)
    wanted = loaded.merge_and_unload().state_dict()
    found = open_weights(f"{base}+{lora}")
    changed = 0
    for tensor in found:
        torch.testing.assert_close(found[tensor], wanted[tensor], atol=1e-6, rtol=1e-6)
        changed += not torch.equal(found[tensor], open_weights(base)[tensor])
    assert changed  # the adapter did something


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "tsv_m"])
def test_adapters_of_different_ranks_merge_as_what_they_add(method: str, tmp_path: Path) -> None:
    """Each alone at weight 1 is itself; together they are the weighted sum of what each adds."""
    ranks: list[dict[str, Any]] = [{"r": 2}, {"r": 5, "use_rslora": True}, {"r": 8}]
    refs, base = [], tmp_path / "0" / "base"
    for i, own in enumerate(ranks):
        _, lora = adapted(tmp_path / str(i), "qwen2", {"target_modules": LINEAR, **own})
        refs.append(f"{base}+{lora}")
    weights = [0.5, 0.3, -0.2]
    start, models = open_weights(base), [open_weights(ref) for ref in refs]

    def merged(given: list[float], **fields: Any) -> Any:
        listed = [
            {"model": ref, "parameters": {"weight": weight}}
            for ref, weight in zip(refs, given, strict=True)
            if weight
        ]
        plain = {"merge_method": method, "models": listed, **fields}
        if method != "linear":
            plain["base_model"] = str(base)
        return merge(Recipe.model_validate(plain))

    for i, model in enumerate(models):
        alone = merged([float(j == i) for j in range(3)])
        for name in alone:
            torch.testing.assert_close(alone[name], model[name], atol=1e-5, rtol=1e-5)
    if method == "task_arithmetic":
        for name, tensor in merged(weights).items():
            deltas = [w * (m[name] - start[name]) for w, m in zip(weights, models, strict=True)]
            torch.testing.assert_close(tensor, start[name] + sum(deltas), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_lora_is_refused_by_name(name: str, tmp_path: Path) -> None:
    base, lora = adapted(tmp_path, "llama", {"target_modules": LINEAR})
    path = lora / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **REFUSED[name]}))
    with pytest.raises(ConfigError, match=name) as caught:
        open_weights(f"{base}+{lora}")
    assert "merge_and_unload" in caught.value.hint


def test_lengths_of_dora_that_are_missing_or_too_many(tmp_path: Path) -> None:
    for number, (had, said) in enumerate([(True, False), (False, True)]):
        given = {"target_modules": LINEAR, "use_dora": had}
        base, lora = adapted(tmp_path / str(number), "llama", given)
        path = lora / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": said}))
        with pytest.raises((DamagedFile, ConfigError), match="lengths of"):
            open_weights(f"{base}+{lora}")


@pytest.mark.parametrize("rank", [2, 8, 4.5])
def test_a_rank_that_does_not_fit_the_tensors(rank: float, tmp_path: Path) -> None:
    base, lora = adapted(tmp_path, "llama", {"target_modules": LINEAR})
    path = lora / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": rank}))
    with pytest.raises(DamagedFile, match=f"does not have the rank {rank}"):
        open_weights(f"{base}+{lora}")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_layer_decides_how_it_is_stored_not_the_word(kind: str, tmp_path: Path) -> None:
    target = "attn.c_proj" if kind == "gpt2" else "q_proj"  # square: no shape would tell
    settings = {"target_modules": [target], "fan_in_fan_out": kind == "gpt2"}
    base, lora = adapted(tmp_path, kind, settings)
    path = lora / "adapter_config.json"
    wrong = {**json.loads(path.read_text()), "fan_in_fan_out": kind != "gpt2"}
    path.write_text(json.dumps(wrong))
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora)
    wanted, found = loaded.merge_and_unload().state_dict(), open_weights(f"{base}+{lora}")
    for tensor in found:
        torch.testing.assert_close(found[tensor], wanted[tensor], atol=1e-6, rtol=1e-6)


def test_a_model_that_is_tied_without_saying_so(tmp_path: Path) -> None:
    """GPT-2 on the hub: its config leaves out what its architecture takes for granted."""
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["wte"]}
    base, lora = adapted(tmp_path, "gpt2", settings)
    config = json.loads((base / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (base / "config.json").write_text(json.dumps(config))
    assert is_tied(open_weights(base))
    with pytest.raises(ConfigError, match="as embedding and as head"):
        open_weights(f"{base}+{lora}")


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_weight_with_two_uses_is_not_changed_for_one(module: str, tmp_path: Path) -> None:
    """peft changes the embedding of a tied model and leaves its head, which no file can say."""
    settings = {"target_modules": LINEAR, "modules_to_save": [module]}
    base, lora = adapted(tmp_path, "qwen2", settings)
    with pytest.raises(ConfigError, match=r"as embedding and as head|no counterpart"):
        open_weights(f"{base}+{lora}")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"target_modules": ["q_proj"]}, "holds an update of .*down_proj"),
        ({"target_modules": [*LINEAR, "v_proj"]}, "has no update of .*v_proj"),
        ({"layers_to_transform": [0]}, "holds an update of .*layers.1"),
        ({"layers_to_transform": 0}, "holds an update of .*layers.1"),
        ({"layers_to_transform": "0"}, "layers_to_transform is 0"),
        ({"exclude_modules": ["q_proj"]}, "holds an update of .*q_proj"),
        ({"exclude_modules": ".*q_proj"}, "holds an update of .*q_proj"),
        ({"target_modules": ".*q_proj"}, "holds an update of .*down_proj"),
        ({"target_modules": "(" * 3}, "cannot be used"),
        ({"target_modules": r"(\w|\w\w|.)*q" * 2}, "cannot be used"),
        ({"target_modules": None}, "does not name the layers"),
        ({"target_modules": [7]}, "does not name the layers"),
    ],
)
def test_tensors_and_settings_name_the_same_layers(
    changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Peft passes over what does not fit, so that the numbers would be of another model."""
    base, lora = adapted(tmp_path, "llama", {"target_modules": LINEAR})
    path = lora / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(DamagedFile, match=told):
        open_weights(f"{base}+{lora}")


def test_a_name_that_peft_would_pass_over(tmp_path: Path) -> None:
    base, lora = adapted(tmp_path, "llama", {"target_modules": LINEAR})
    path = lora / "adapter_model.safetensors"
    tensors = {name.removeprefix("base_model.model."): t for name, t in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(DamagedFile, match="does not begin with"):
        open_weights(f"{base}+{lora}")


def test_an_adapter_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its own one would read texts in another way; a copy of its base's says nothing new."""
    base, lora = adapted(tmp_path, *KINDS["plain"])
    tokenizer = byte_tokenizer()
    for place in (base, lora):
        tokenizer.save_pretrained(place)
    assert open_weights(f"{base}+{lora}").specs
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(lora)
    with pytest.raises(ConfigError, match="another chat template"):
        open_weights(f"{base}+{lora}")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(base)
    with pytest.raises(ConfigError, match="another list of added tokens"):
        open_weights(f"{base}+{lora}")
