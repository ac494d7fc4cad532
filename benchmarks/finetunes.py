"""Three fine-tunes of one small Llama, for whoever wants something real to merge.

    AGENT_FORGE_DATA=data python benchmarks/finetunes.py OUT --seed 1

writes OUT/base, OUT/shakespeare, OUT/wiki, OUT/maths (full fine-tunes of stories260K), OUT/control
(trained on all three texts for as many steps as the three together), and OUT/*.jsonl: text that
none of them was trained on. Then:

    forge evo --base-models OUT/shakespeare,OUT/wiki,OUT/maths --base OUT/base \\
        --data OUT/shakespeare.jsonl --data OUT/wiki.jsonl --data OUT/maths.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "stories260K/hf"
DOMAINS = ("shakespeare", "wiki", "maths")
STEPS, ROWS, LENGTH, RATE = 400, 8, 192, 1e-3
PASSAGE = 400  # characters of a piece of text to measure on
TRAINED = 0.8  # of a text; the rest is to measure on


def texts(data: Path) -> dict[str, str]:
    """One text a domain."""
    maths = (data / "gsm8k" / "train.jsonl").read_text().splitlines()
    pairs = (json.loads(line) for line in maths)
    found = (
        (data / "tiny_shakespeare" / "input.txt").read_text(),
        (data / "wikitext2" / "valid.txt").read_text(),
        "\n".join(f"{p['question']}\n{p['answer']}\n" for p in pairs)[:1_000_000],
    )
    return dict(zip(DOMAINS, found, strict=True))


def trained(base: Path, streams: list[torch.Tensor], steps: int, seed: int) -> Any:
    """The base after so many steps of AdamW; each row is from one of the streams in turn."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        rows = []
        for n in range(ROWS):
            stream = streams[(step * ROWS + n) % len(streams)]
            start = int(rng.integers(len(stream) - LENGTH))
            rows.append(stream[start : start + LENGTH])
        batch = torch.stack(rows)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def make(data: Path, out: Path, seed: int) -> None:
    """Train what is missing."""
    base = data / MODEL
    if not base.is_dir():
        raise SystemExit(f"no {base}: set AGENT_FORGE_DATA to the folder of datasets")
    shutil.copytree(base, out / "base", dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    streams: dict[str, torch.Tensor] = {}
    for name, text in texts(data).items():
        cut = int(len(text) * TRAINED)
        streams[name] = torch.tensor(tokenizer(text[:cut])["input_ids"])
        rest = text[cut:]
        pieces = [rest[i : i + PASSAGE] for i in range(0, len(rest) - PASSAGE, PASSAGE)]
        lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
        (out / f"{name}.jsonl").write_text(lines)
    jobs = {name: ([stream], STEPS) for name, stream in streams.items()}
    jobs["control"] = ([*streams.values()], STEPS * len(streams))
    for name, (given, steps) in jobs.items():
        if not (out / name / "config.json").exists():
            model = trained(base, given, steps, seed)
            model.save_pretrained(out / name)
            tokenizer.save_pretrained(out / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    make(Path(os.environ.get("AGENT_FORGE_DATA", "data")), asked.out.absolute(), asked.seed)
