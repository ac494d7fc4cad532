"""Reading likelihoods of a candidate: the fast way beside the plain one, and the matmul's peak.

    python benchmarks/reading.py --model FOLDER     # any folder that transformers opens

Claims, on one thread: in the precision that the probe chooses, reading reaches 0.7 of what a matmul
of the model's own size reaches; and where bfloat16 is fast, a model of 135M weights is measured on
48 items of 130 tokens in at most 15 CPU seconds.

Half of each item is asked for. Operations are counted as two a weight of the layers and token, and
two a weight of the head and asked token; attention is left out. Ways take turns, and so does the
matmul; the figure is the best of the rounds, in CPU seconds, as other work on a machine only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import record

from agent_forge.data.loader import TokenizedItem
from agent_forge.data.tasks import make
from agent_forge.evals import likelihood
from agent_forge.evals.model_under_test import ModelUnderTest, measure, open_model_under_test

BENCHMARK = "reading"
ITEMS, TOKENS, ROUNDS = 48, 130, 3
SHARE_OF_PEAK, SECONDS, WEIGHTS = 0.7, 15.0, 150_000_000  # the goals; up to so many weights
MATMULS = 20


def items(subject: ModelUnderTest) -> list[TokenizedItem]:
    """Pieces of generated stories."""
    ids: list[int] = []
    number = 0
    while len(ids) < ITEMS * TOKENS:
        task = make("story", "verdict", number, level=(20, 60))
        ids += subject.opened.encode(f"{task.question} {task.answer}")
        number += 1
    asked = [place >= TOKENS // 2 for place in range(TOKENS)]
    return [TokenizedItem(ids[n * TOKENS : (n + 1) * TOKENS], asked) for n in range(ITEMS)]


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def operations(model: Any, dtype: torch.dtype) -> tuple[float, Callable[[], Any], float]:
    """Those of reading all items; and a matmul of the model's widest layer, with its own."""
    head = model.get_output_embeddings().weight
    tables = {head.data_ptr(), model.get_input_embeddings().weight.data_ptr()}
    layers = [p for p in model.parameters() if p.ndim == 2 and p.data_ptr() not in tables]
    asked = ITEMS * (TOKENS - TOKENS // 2)
    every = 2 * ITEMS * TOKENS * sum(p.numel() for p in layers) + 2 * asked * head.numel()
    widest = max(layers, key=torch.numel)
    x, weight = torch.randn(likelihood.LARGE_BATCH, widest.shape[1]).to(dtype), widest.to(dtype)
    own = 2.0 * MATMULS * len(x) * widest.numel()
    return every, lambda: [F.linear(x, weight) for _ in range(MATMULS)], own


@torch.no_grad()
def measured(folder: Path) -> dict[str, Any]:
    half = likelihood.faster_in_bf16()
    plain, fast = open_model_under_test(folder), open_model_under_test(folder, fast=True)
    assert fast.reading
    half = half and likelihood.halve(fast.model)
    asked, reading = items(plain), fast.reading
    batches = likelihood.plan(asked, range(len(asked)), fast.batch_tokens, reading)

    def read() -> None:
        with likelihood.selecting(fast.model, reading):
            for batch in batches:
                likelihood.score_batch(fast.model, asked, batch, reading)

    every, matmul, own = operations(fast.model, torch.bfloat16 if half else torch.float32)
    matmul()
    took: dict[str, list[float]] = {"plain": [], "fast": [], "matmul": []}
    for _ in range(ROUNDS):
        took["matmul"].append(seconds(matmul))
        took["fast"].append(seconds(read))
        took["plain"].append(
            seconds(lambda: measure(plain.model, asked, batch_tokens=plain.batch_tokens))
        )
        took["matmul"].append(seconds(matmul))
    best = {way: min(own) for way, own in took.items()}
    peak = own / best["matmul"]
    return {
        "weights": sum(p.numel() for p in plain.model.parameters()),
        "precision": "bf16" if half else "fp32",
        "plain_cpu_s": round(best["plain"], 2),
        "fast_cpu_s": round(best["fast"], 2),
        "plain_tokens_per_s": round(ITEMS * TOKENS / best["plain"]),
        "fast_tokens_per_s": round(ITEMS * TOKENS / best["fast"]),
        "peak_gflops": round(peak / 1e9, 1),
        "share_of_peak": round(every / best["fast"] / peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="of the model in the results; else its folder's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = measured(options.model)
    record(BENCHMARK, {"model": options.name or options.model.name}, values)
    slow = values["precision"] == "bf16" and values["weights"] <= WEIGHTS
    slow = slow and values["fast_cpu_s"] > SECONDS
    raise SystemExit("missed" if slow or values["share_of_peak"] < SHARE_OF_PEAK else 0)


if __name__ == "__main__":
    main()
