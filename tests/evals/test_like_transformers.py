"""The numbers of `forge eval` are those of plain transformers in single precision, item by item.

Small random models of six families: tied or not, in three types, in one file, in shards or pickled,
and with a LoRA adapter beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.command_line import Forge
from tests.support.eval_models import FAMILIES
from tests.support.tokenizers import byte_tokenizer

pytestmark = pytest.mark.slow

QUERIES = {"gpt2": "attn.c_attn", "gpt_neox": "attention.query_key_value"}
RANK, ALPHA = 4, 8


class Spec(NamedTuple):
    """A model to build."""

    family: str
    tied: bool = False
    dtype: str = "float32"
    form: str = "single"  # single | shards | bin
    adapter: bool = False


SPECS = (
    *(Spec(family) for family in FAMILIES),
    *(Spec(family, tied=True) for family in FAMILIES),
    Spec("llama", False, "bfloat16"),
    Spec("llama", True, "bfloat16", "shards"),
    Spec("llama", False, "float16"),
    Spec("llama", False, "float32", "shards"),
    Spec("llama", False, "float32", "bin"),
    Spec("mistral", True, "float16", "shards"),
    Spec("qwen2", True, "bfloat16"),
    Spec("qwen2", True, "float32", "bin"),
    Spec("gpt2", True, "float16", "bin"),
    Spec("gpt2", True, "float32", "shards"),
    Spec("gemma", True, "bfloat16", "shards"),
    Spec("gpt_neox", False, "bfloat16", "bin"),
    Spec("llama", adapter=True),
    Spec("llama", True, "bfloat16", "shards", adapter=True),
    Spec("qwen2", True, adapter=True),
    Spec("gpt2", True, adapter=True),
    Spec("mistral", dtype="float16", adapter=True),
)


# -- models ---------------------------------------------------------------------------------------


def build(spec: Spec, place: Path) -> str:
    """Write the model; what `forge eval` is given for it."""
    torch.manual_seed(len(spec.family) + 7 * spec.tied)
    config = AutoConfig.for_model(
        spec.family, **FAMILIES[spec.family], tie_word_embeddings=spec.tied
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, spec.dtype))
    base = place / "model"
    model.save_pretrained(base, max_shard_size="5KB" if spec.form == "shards" else "1GB")
    assert (len(list(base.glob("*.safetensors"))) > 1) == (spec.form == "shards")
    if spec.form == "bin":
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    byte_tokenizer().save_pretrained(base)
    return f"{base}+{_adapter(spec, model, place / 'adapter')}" if spec.adapter else str(base)


def _adapter(spec: Spec, model: nn.Module, place: Path) -> Path:
    """A LoRA adapter of all query matrices."""
    place.mkdir()
    halves = {}
    target = QUERIES.get(spec.family, "self_attn.q_proj")
    for name, weight in model.named_parameters():
        if name.endswith(f"{target}.weight"):
            rows, columns = weight.shape[:: -1 if spec.family == "gpt2" else 1]
            key = f"base_model.model.{name.removesuffix('.weight')}"
            halves[f"{key}.lora_A.weight"] = torch.randn(RANK, columns)
            halves[f"{key}.lora_B.weight"] = torch.randn(rows, RANK) / 4
    save_file(halves, place / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    settings |= {"fan_in_fan_out": spec.family == "gpt2", "task_type": "CAUSAL_LM"}
    settings |= {"target_modules": [target.rpartition(".")[2]], "init_lora_weights": True}
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place


def plain(spec: Spec, place: Path) -> nn.Module:
    """The model as transformers opens it, with W + alpha / r * B A where there is an adapter."""
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).eval()
    if spec.adapter:
        halves = load_file(place / "adapter" / "adapter_model.safetensors")
        state = model.state_dict()
        for key, a in halves.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").replace("lora_A.", "")
                update = ALPHA / RANK * (halves[key.replace("lora_A", "lora_B")] @ a)
                whole = state[name] + (update.T if spec.family == "gpt2" else update)
                state[name].copy_(whole.to(getattr(torch, spec.dtype)))  # as a merge stores it
    return model


# -- what is measured -----------------------------------------------------------------------------


def prompts() -> Iterator[str]:
    for number in range(16):
        yield f"{7 * number} is {chr(97 + number)}"


def write_data(model: nn.Module, tokenizer: Any, place: Path) -> None:
    """Answers of which the model gives some, choices, and texts."""
    answers = []
    for prompt in prompts():
        said = tokenizer.decode(logits_of(model, tokenizer(prompt).input_ids)[-1].argmax())
        printable = len(said) == 1 and said.isascii() and said.isprintable() and said.strip()
        answers.append({"prompt": prompt, "completion": said if printable else f" {len(prompt)}7"})
    choices = [
        {"prompt": p, "completion": f" {n}", "choices": [f" {n}", f" {n}{n}", " no"]}
        for n, p in enumerate(prompts())
    ]
    texts = [{"text": f"Once upon {n} times there were 7 cats."} for n in range(5)]
    for name, rows in (("answers", answers), ("choices", choices), ("texts", texts)):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@torch.no_grad()
def logits_of(model: nn.Module, ids: list[int]) -> Tensor:
    return torch.as_tensor(model(torch.tensor([ids])).logits[0])


def asked(
    model: nn.Module, tokenizer: Any, prompt: str, completion: str
) -> tuple[float, int, bool]:
    """Nats and number of the tokens of a completion, and whether greedy generation gives them."""
    before, ids = tokenizer(prompt).input_ids, tokenizer(prompt + completion).input_ids
    start = 0
    while start < len(before) and before[start] == ids[start]:
        start += 1
    logits = logits_of(model, ids)[start - 1 : -1]
    targets = torch.tensor(ids[start:])
    chosen = logits.log_softmax(-1)[range(len(targets)), targets]
    return -float(chosen.sum()), len(targets), bool((logits.argmax(-1) == targets).all())


def expected(model: nn.Module, tokenizer: Any, path: Path) -> dict[str, float]:
    """The numbers of a file, by a loop over its rows."""
    nats = tokens = size = right = 0.0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "text" in row:
            first = row["text"].split(" ")[0]
            row = {"prompt": first, "completion": row["text"].removeprefix(first)}
        loss, count, greedy = asked(model, tokenizer, row["prompt"], row["completion"])
        a_byte = {
            choice: asked(model, tokenizer, row["prompt"], choice)[0] / len(choice.strip())
            for choice in row.get("choices", ())
        }
        best = min(a_byte, key=a_byte.__getitem__, default="")
        right += best == row["completion"] if a_byte else greedy
        nats, tokens, size = nats + loss, tokens + count, size + len(row["completion"].strip())
    numbers = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
    return numbers if "text" in rows[0] else {**numbers, "accuracy": right / len(rows)}


# -- the test -------------------------------------------------------------------------------------


def named(spec: Spec) -> str:
    adapter = ["adapter"] if spec.adapter else []
    return "-".join([spec.family, "tied" if spec.tied else "untied", *spec[2:4], *adapter])


@pytest.mark.parametrize("spec", SPECS, ids=named)
def test_eval_measures_what_transformers_does(spec: Spec, tmp_path: Path, forge: Forge) -> None:
    given = build(spec, tmp_path)
    model, tokenizer = plain(spec, tmp_path), AutoTokenizer.from_pretrained(tmp_path / "model")
    write_data(model, tokenizer, tmp_path)
    names = ("answers", "choices", "texts")
    data = " ".join(f"--data {name}.jsonl" for name in names)
    result = forge(f"eval {given} {data} --json")
    assert result.code == 0, result.err
    for name, row in zip(names, result.document["domains"], strict=True):
        right = expected(model, tokenizer, tmp_path / f"{name}.jsonl")
        found = {key: row[key] for key in right}
        assert found == pytest.approx(right, rel=1e-4, abs=1e-6), name
