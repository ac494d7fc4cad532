"""A packed model on one thread: the C program of a bundle, the native step, and torch.

    python benchmarks/edge.py MODEL    # the folder of a packed model of ours

Each way reads the same prompt and then writes 200 tokens, always the likeliest, beyond any end; in
CPU time, the best of the rounds, as other work on a machine only adds. Ways take turns. Loading is
left out; for the program it is also told on its own: a whole process that writes one token.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import record

from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.infer.thinking import THOUGHT_IDS
from agent_forge.model.opened import ForgeModel, open_model
from agent_forge.native import backend
from agent_forge.native.bundle import write_bundle

BENCHMARK = "edge"
PROMPT, TOKENS, ROUNDS = "Once upon a time there was a small robot who", 200, 5


def by_python(model: ForgeModel, way: str) -> float:
    """Tokens a second; `way` is torch or native."""
    os.environ["FORGE_NO_NATIVE"] = "1" if way == "torch" else "0"
    ids = model.encode(PROMPT)
    how = SamplingSettings(TOKENS, banned_tokens=THOUGHT_IDS | model.end_tokens)
    generate(model.network, [ids], replace(how, max_new_tokens=1))
    start = time.process_time()
    generate(model.network, [ids], how)
    return TOKENS / (time.process_time() - start)


def by_step(model: ForgeModel) -> float:
    """Tokens a second of the native step alone, without what `generate` does around it."""
    os.environ["FORGE_NO_NATIVE"] = "0"
    decoder = native_decoder(model.network)
    assert decoder is not None
    cache = decoder.new_cache()
    logits, _ = decoder.read(model.encode(PROMPT), cache)
    banned = sorted(THOUGHT_IDS | model.end_tokens)
    start = time.process_time()
    for _ in range(TOKENS):
        logits[banned] = -torch.inf
        logits, _ = decoder.read([int(logits.argmax())], cache)
    return TOKENS / (time.process_time() - start)


def by_program(folder: Path, **environment: str) -> float:
    """Tokens a second, of what it wrote."""
    command = ["./forge_run", ".", PROMPT, "--bench", "--tokens", str(TOKENS)]
    options: dict[str, Any] = {"env": {**os.environ, **environment}, "check": True, "text": True}
    said = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, **options).stdout
    return float(said.splitlines()[1].split()[-2])


def start_seconds(folder: Path) -> float:
    """CPU time of a whole process that writes one token."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["./forge_run", ".", PROMPT, "--tokens", "1"]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path, help="folder of a packed model of ours")
    folder = parser.parse_args().model
    torch.set_num_threads(1)
    model = open_model(folder)
    assert isinstance(model, ForgeModel)
    ways = "torch", "native", "native_step", "program", "program_plain"
    rates: dict[str, list[float]] = {way: [] for way in ways}
    starts = []
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "bundle"
        write_bundle(folder, bundle)
        subprocess.run(["make", "-s"], cwd=bundle, check=True)
        for _ in range(ROUNDS):
            rates["torch"].append(by_python(model, "torch"))
            rates["native"].append(by_python(model, "native"))
            rates["native_step"].append(by_step(model))
            rates["program"].append(by_program(bundle))
            rates["program_plain"].append(by_program(bundle, FORGE_PLAIN_C="1"))
            starts.append(start_seconds(bundle))
        size = (bundle / "forge_run").stat().st_size
    os.environ["FORGE_NO_NATIVE"] = "0"
    values = {f"{way}_tokens_per_s": round(max(found)) for way, found in rates.items()}
    cell = {"model": f"{model.network.settings.parameters():,} weights", "tokens": TOKENS}
    more = {"backend": backend(), "start_ms": round(min(starts) * 1e3, 1), "program_bytes": size}
    record(BENCHMARK, cell, {**values, **more})


if __name__ == "__main__":
    main()
