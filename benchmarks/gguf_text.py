"""What llama.cpp says from a GGUF file, beside what `forge generate` says from the folder.

    python benchmarks/gguf_text.py --model FOLDER [--prompts 20]     # needs the extra llama

Claim: the same greedy text. Both sides have one thread and the same prompts, and the end of an
answer counts on both; llama.cpp keeps its cache in fp32. One cell for each type of weights. Where
texts differ, `alike` is the share of characters before the first difference.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results import done, record

from agent_forge.infer.chat import open_chat_model
from agent_forge.infer.generate import SamplingSettings
from agent_forge.model.chat import shared
from agent_forge.model.gguf import DTYPES, export_gguf

BENCHMARK, NEW_TOKENS = "gguf", 48
PROMPTS = """The capital of France is
Once upon a time, a small robot
1234 + 5678 =
def fibonacci(n):
The three states of matter are
import numpy as np
Dear Sir or Madam,
Water boils at 100 degrees because
SELECT name FROM
The quick brown fox
In 1969, two people
A prime number is
<html><body>
If all cats are mammals, then
The recipe needs 2 eggs, 250 g of flour and
Q: How many legs has a spider? A:
for (int i = 0; i < 10; i++) {
My favourite book is
The sum of the angles of a triangle
Le chat est""".splitlines()


def say_ours(folder: str, prompts: list[str]) -> list[str]:
    model = open_chat_model(folder)
    settings = SamplingSettings(NEW_TOKENS, 0.0, 0, 1.0, 0)
    return ["".join(model.complete(prompt, settings)) for prompt in prompts]


def say_llama_cpp(file: Path, prompts: list[str]) -> list[str]:
    from llama_cpp import Llama

    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "seed": 0, "verbose": False}
    model = Llama(str(file), **options, type_k=0, type_v=0)
    ask = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "repeat_penalty": 1.0}
    return [model.create_completion(p, **ask)["choices"][0]["text"] for p in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--dtype", choices=list(DTYPES), help="only this type")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    prompts, ours, ours_s = PROMPTS[: asked.prompts], list[str](), 0.0
    for dtype in [asked.dtype] if asked.dtype else DTYPES:
        cell = {"model": asked.model.name, "dtype": dtype, "prompts": len(prompts)}
        if any(cell.items() <= row.items() for row in done(BENCHMARK)):
            continue
        if not ours:
            began = time.process_time()
            ours = say_ours(str(asked.model), prompts)
            ours_s = time.process_time() - began
        between = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            export_gguf(str(asked.model), file, dtype, overwrite=False, dry_run=False)
            size, written = file.stat().st_size, time.process_time()
            theirs = say_llama_cpp(file, prompts)
        alike = [shared(a, b) / max(len(a), len(b), 1) for a, b in zip(ours, theirs, strict=True)]
        values = {"equal": sum(a == b for a, b in zip(ours, theirs, strict=True))}
        values |= {"alike": round(sum(alike) / len(alike), 4), "bytes": size}
        values |= {"export_s": round(written - between, 2)}
        values |= {"ours_s": round(ours_s, 2)}
        values |= {"llama_cpp_s": round(time.process_time() - written, 2)}
        record(BENCHMARK, cell, values)


if __name__ == "__main__":
    main()
