"""The C program of a bundle, models for it, and ways to spoil their folders."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_forge.data.tasks import make
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import ForgeModel, open_model
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY, PackedMatrix, Packing
from agent_forge.store import files, tensors
from tests.support.networks import network
from tests.support.tokenizers import TOKENIZER

# Sizes that are no multiple of any tile, and heads of 2 * 7.
ODD: dict[str, object] = {
    "d_model": 42,
    "n_heads": 3,
    "embed_rank": 21,
    "ffn_hidden": 51,
    "d_mem": 19,
    "gate_hidden": 11,
    "trm_hidden": 13,
    "vocab_size": 515,
}
STORIES = [make("story", "verdict", number, level=(20, 60)).question for number in range(50)]
Spoil = Callable[[Path], object]  # what is done to a folder
SANITIZED = "-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all"


@dataclass(frozen=True)
class Program:
    """forge_run as it was built from a bundle."""

    path: Path

    def run(self, model: Path, *given: str, text: str = "") -> subprocess.CompletedProcess[bytes]:
        """`text` is what it reads from stdin."""
        # What is read is kept until the end; a size that the system cannot give is refused.
        options = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
        command, environment = [str(self.path), str(model), *given], {**os.environ, **options}
        return subprocess.run(
            command, input=text.encode(), capture_output=True, env=environment, check=False
        )

    def output(self, model: Path, *given: str, text: str = "") -> str:
        done = self.run(model, *given, text=text)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode(errors="replace")

    def logits(self, model: Path, ids: list[int]) -> Tensor:
        said = self.output(model, "--ids", " ".join(map(str, ids)), "--logits")
        return torch.tensor([float(line) for line in said.split()])

    def refusal(self, model: Path, *given: str) -> str:
        done = self.run(model, *given)
        assert (done.returncode, done.stdout) == (2, b""), done
        return done.stderr.decode(errors="replace")


def save(model: ForgeNetwork, folder: Path, body: str, embedding: str, bits: int) -> Path:
    """A model folder; without a codec for the body, in whole fp32."""
    return write(model, folder, plan_packing(model, body, embedding, bits) if body else None)


def write(model: ForgeNetwork, folder: Path, packing: Packing | None) -> Path:
    config, state = config_dict(model.settings), model.state_dict()
    if packing:
        config, state = {**config, KEY: packing.to_json()}, dict(packing.pack(state).tensors)
    with files.staging(folder) as stage:
        with stage.writing("model.safetensors") as writer:
            tensors.write_tensors(writer, state, {"format": "pt"})
        stage.write_json("config.json", config)
        for name, content in TOKENIZER.files().items():
            stage.write_bytes(name, content)
    return folder


def in_steps(model: ForgeNetwork) -> Packing:
    """Steps for nearly all matrices; a ternary one, one of whole numbers, and one in fp16."""
    matrices = dict(plan_packing(model, "step1.5", "step0.3").matrices)
    for name, codec in (("gate.outer.weight", "ternary"), ("memory.down.weight", "int4g32")):
        matrices[name] = PackedMatrix(find_codec(codec), matrices[name].shape)
    del matrices["recursion.update.inner.weight"]
    return Packing(matrices)


def restless(**changes: Any) -> ForgeNetwork:
    """A network of which positions halt after 1 to 3 steps, and which seldom repeats a token."""
    model = network(**changes)
    with torch.no_grad():
        model.halting.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
        model.halting.head.bias.fill_(0.2)
        model.halting.mean_target.copy_(torch.tensor([0.3, 0.5, 0.9]))
        model.recursion.update.outer.weight.mul_(8)
    return model


def built(bundle: Path, folder: Path, flags: str) -> Program:
    shutil.copytree(bundle, folder)
    command = ["make", "-s", f"CFLAGS={flags} -Wall -Wextra -Werror"]
    subprocess.run(command, cwd=folder, check=True)
    return Program(folder / "forge_run")


def opened(folder: Path) -> ForgeModel:
    model = open_model(folder)
    assert isinstance(model, ForgeModel)
    return model


def by_torch(model: ForgeNetwork, ids: list[int]) -> Tensor:
    cache = model.new_cache()
    return [model.predict(torch.tensor([[token]]), cache)[0][0] for token in ids][-1]


def change(name: str, edit: Callable[[Any], object]) -> Spoil:
    """A folder in which the record `name`, or the header of the weights, is edited."""

    def spoil(folder: Path) -> None:
        content, size = (folder / name).read_bytes(), 0
        if name == "model.safetensors":
            (size,) = struct.unpack("<Q", content[:8])
        record = json.loads(content[8 : 8 + size] if size else content)
        edit(record)
        head = json.dumps(record).encode()
        new = struct.pack("<Q", len(head)) + head + content[8 + size :] if size else head
        (folder / name).write_bytes(new)

    return spoil


def cut(name: str, size: int) -> Spoil:
    """The first or, with a negative size, all but the last bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def put(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def entry(*path: str | int, value: Any) -> Callable[[Any], None]:
    def edit(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return edit
