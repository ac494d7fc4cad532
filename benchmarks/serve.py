"""Many clients of one server at once: time to the first token, lost answers, memory.

    python benchmarks/serve.py [--model DIR] [--clients 1 8 64] [--tokens 64]

`forge serve` as a process of its own, an untrained network in the shape of the preset tiny unless a
model is named; each client streams one chat with the official client and tries no second time.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import torch
from results import record

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.pipeline.config import load_config
from agent_forge.store import files, tensors

BENCHMARK, PRESET = "serve", "tiny"
VOCABULARY = "model.vocab_size=300"  # nearly all of them tokens that show


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    network = ForgeNetwork(load_config(preset=PRESET, sets=(VOCABULARY,)).model)
    weights, _ = tensors.split_tied(network.state_dict())
    with files.staging(folder) as stage:
        with stage.writing("model.safetensors") as writer:
            tensors.write_tensors(writer, weights, {"format": "pt"})
        stage.write_json("config.json", config_dict(network.settings))
        for name, content in Tokenizer.train(["a b c d e"] * 9, 300).files().items():
            stage.write_bytes(name, content)
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def one(client: Any, model: str, number: int, tokens: int) -> tuple[float, int]:
    """Seconds to the first text, and how many tokens came in all."""
    began, first, count = time.perf_counter(), 0.0, 0
    asked = {"role": "user", "content": "a b c d e " * (1 + number % 4)}
    options = {"max_tokens": tokens, "seed": number, "stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(
        model=model, messages=[asked], stream=True, reasoning_effort="none", **options
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content and not first:
            first = time.perf_counter() - began
        count = chunk.usage.completion_tokens if chunk.usage else count
    if not count:
        raise RuntimeError("the stream has no end")
    return first, count


async def many(url: str, model: str, clients: int, tokens: int) -> dict[str, Any]:
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": 120}
    async with openai.AsyncOpenAI(base_url=url, **options) as client:
        began = time.perf_counter()
        asked = (one(client, model, number, tokens) for number in range(clients))
        found = await asyncio.gather(*asked, return_exceptions=True)
        seconds = time.perf_counter() - began
    done = [answer for answer in found if isinstance(answer, tuple)]
    firsts = sorted(first for first, _ in done)
    return {
        "lost": clients - len(done),
        "first_token_p50_s": round(firsts[len(firsts) // 2], 3),
        "first_token_p95_s": round(firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))], 3),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(count for _, count in done) / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = given.model or write_model(Path(work) / "tiny")
        port = free_port()
        command = [sys.executable, "-m", "agent_forge", "serve", "--port", str(port)]
        command += ["--storage", work, "--model", str(folder)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            url, name = f"http://127.0.0.1:{port}/v1", folder.name
            for _ in range(600):
                try:
                    httpx2.get(f"{url}/models")
                    break
                except httpx2.TransportError:
                    time.sleep(0.1)
            asyncio.run(many(url, name, 2, 4))  # it is open now
            for clients in given.clients:
                before = psutil.Process(server.pid).memory_info().rss
                values = asyncio.run(many(url, name, clients, given.tokens))
                grown = psutil.Process(server.pid).memory_info().rss - before
                cell = {"model": name, "clients": clients, "tokens": given.tokens}
                record(BENCHMARK, cell, {**values, "grown_mb": round(grown / 1e6, 1)})
        finally:
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    main()
