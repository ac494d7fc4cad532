"""Inputs that the fuzzer of the C program begins with: small models, one of each codec.

    python -m tests.support.fuzz_corpus FOLDER

Each file is config.json, tokenizer.json and model.safetensors, as fuzz_reader.c splits them.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.model.network import ForgeNetwork
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import PackedMatrix, Packing
from tests.support.networks import network
from tests.support.programs import write

SPLIT = b"\xff\xfe\xff\xfe"
SIZES = {
    "vocab_size": 300,
    "embed_rank": 2,
    "d_model": 8,
    "n_layers": 1,
    "n_heads": 2,
    "ffn_hidden": 3,
    "d_mem": 2,
    "gate_hidden": 2,
    "trm_hidden": 2,
    "sw_window": 3,
    "t_max": 2,
    "micro_steps": 1,
}
# Body, embedding, bits of inputs, rank and width; the wider ones have codes for two lanes.
MODELS = {
    "fp32": ("", "", 0, 2, 8),
    "ternary": ("ternary", "int4g32", 8, 2, 8),
    "integers": ("int4g32", "int8", 0, 2, 8),
    "odd": ("int3g4", "ternary_bitnet", 0, 2, 8),
    "steps": ("step1.5", "step0.3", 0, 2, 8),
    "lanes": ("step0.04", "step8", 0, 16, 16),
    "mixed": ("step1.5", "", 8, 16, 16),
}


def packing_of(model: ForgeNetwork, body: str, embedding: str, bits: int) -> Packing | None:
    """A packing; without a codec for the embedding, one with matrices of several kinds."""
    if not body:
        return None
    matrices = dict(plan_packing(model, body, embedding, bits).matrices)
    if not embedding:
        name, other = "memory.up.weight", "memory.down.weight"
        matrices[name] = PackedMatrix(find_codec("ternary"), matrices[name].shape)
        del matrices[other]
    return Packing(matrices, bits)


def codes_last(content: bytes) -> bytes:
    """The same weights, those of the embedding at the end: who reads on reads beyond the file."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), b""
    names = [name for name in header if name != "__metadata__"]
    for name in sorted(names, key=lambda name: (name.endswith(".codes"), "embedding" in name)):
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [len(data), len(data) + end - start]
        data += content[8 + size + start : 8 + size + end]
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.train(["the then there"] * 3, 300)
    for name, (body, embedding, bits, rank, width) in MODELS.items():
        model = network(**{**SIZES, "embed_rank": rank, "d_model": width})
        with tempfile.TemporaryDirectory() as place:
            packing = packing_of(model, body, embedding, bits)
            folder = write(model, Path(place) / "model", packing)
            config, weights = (folder / n for n in ("config.json", "model.safetensors"))
            record = json.loads(tokenizer.files()["tokenizer.json"])
            parts = json.dumps(json.loads(config.read_bytes())), json.dumps(record)
            joined = [*(part.encode() for part in parts), codes_last(weights.read_bytes())]
            (out / name).write_bytes(SPLIT.join(joined))


if __name__ == "__main__":
    main()
