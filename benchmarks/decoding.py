"""How long a step-coded network of 25M weights takes to open, on one thread.

    python benchmarks/decoding.py

Random weights in the shape of the preset 25m: body in steps of 1.0, embedding in steps of 0.5. In
CPU time, the best of the rounds: Python's decoder alone (`Packing.unpack`), a model that Python
opens, a token step made of it, and a whole process of the C program that writes one token.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import record

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.infer.native import native_decoder
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import ForgeModel, open_model
from agent_forge.native.bundle import write_bundle
from agent_forge.pipeline.config import load_config
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY, PackedState
from agent_forge.store import files, tensors

BENCHMARK = "decoding"
PRESET, BODY, EMBEDDING, ROUNDS = "25m", "step1.0", "step0.5", 5


def packed() -> tuple[ForgeNetwork, PackedState]:
    torch.manual_seed(0)
    model = ForgeNetwork(load_config(preset=PRESET).model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model, plan_packing(model, BODY, EMBEDDING).pack(model.state_dict())


def write(model: ForgeNetwork, state: PackedState, folder: Path) -> None:
    with files.staging(folder) as stage:
        with stage.writing("model.safetensors") as writer:
            tensors.write_tensors(writer, state.tensors, {"format": "pt"})
        config = {**config_dict(model.settings), KEY: state.packing.to_json()}
        stage.write_json("config.json", config)
        for name, content in Tokenizer.train(["a b c d e"] * 9, 512).files().items():
            stage.write_bytes(name, content)


def seconds(what: Callable[[], object]) -> float:
    """CPU time of this process, the best of the rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        what()
        found.append(time.process_time() - start)
    return round(min(found), 3)


def program_seconds(bundle: Path, **environment: str) -> float:
    """CPU time of a process that writes one token, the best of the rounds."""
    found = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ["./forge_run", ".", "--ids", "99", "--tokens", "1"]
        options = {**os.environ, **environment}
        subprocess.run(command, cwd=bundle, stdout=subprocess.DEVNULL, env=options, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(found), 3)


def main() -> None:
    torch.set_num_threads(1)
    model, state = packed()
    weights = model.settings.parameters()
    with tempfile.TemporaryDirectory() as place:
        folder, bundle = Path(place) / "model", Path(place) / "bundle"
        write(model, state, folder)
        values = {
            "python_decode_s": seconds(lambda: state.packing.unpack(state.tensors, folder)),
            "python_open_s": seconds(lambda: open_model(folder)),
        }
        opened = open_model(folder)
        assert isinstance(opened, ForgeModel)
        start = time.process_time()
        if native_decoder(opened.network):
            values["native_step_s"] = round(time.process_time() - start, 3)
        write_bundle(folder, bundle)
        subprocess.run(["make", "-s"], cwd=bundle, check=True)
        values["program_s"] = program_seconds(bundle)
        size = (folder / "model.safetensors").stat().st_size
    cell = {"model": f"{weights:,} weights", "body": BODY, "embedding": EMBEDDING}
    record(
        BENCHMARK, cell, {**values, "bytes": size, "bits_per_weight": round(8 * size / weights, 3)}
    )


if __name__ == "__main__":
    main()
