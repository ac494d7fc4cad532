"""Files of weights that are broken, lie about their tensors, or are none."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.faults.hostile_goods import (
    CONFIG,
    CONTENT,
    EITHER,
    INDEX,
    MERGES,
    REFUSED,
    RIGHT,
    SHARDS,
    TOO_LARGE,
    WEIGHTS,
    Case,
    Change,
    State,
    bytes_of,
    config,
    directory,
    each,
    fifo,
    headed,
    keys,
    lenient,
    linked,
    lost,
    mapped,
    model,
    more,
    moved_out,
    no_keys,
    raw_safetensors,
    read,
    renamed,
    save,
    sharded,
    tensors,
    text,
    weight_map,
    without,
)

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


# -- shards and links -----------------------------------------------------------------------------


def _first(where: str) -> Change:
    """The first tensor is said to be there."""
    return weight_map(lambda table: table.update({min(table): where}))


def _outside(bad: Path) -> None:
    """A shard in the folder above, which the index reaches through `..`."""
    shutil.move(bad / SHARDS[0], bad.parent / SHARDS[0])
    weight_map(lambda table: {k: v if v != SHARDS[0] else f"../{v}" for k, v in table.items()})(bad)


def _absolute(bad: Path) -> None:
    weight_map(lambda table: {k: v if v != SHARDS[0] else str(bad / v) for k, v in table.items()})(
        bad
    )


def _in_both(bad: Path) -> None:
    """A tensor that the second shard has too, with other numbers; the index names the first."""
    one, two = (load_file(bad / shard) for shard in SHARDS)
    name = min(one)
    save(bad / SHARDS[1], {**two, name: torch.zeros_like(one[name])})


def _twice_in_index(bad: Path) -> None:
    """JSON may repeat a key: the first says the wrong shard, the last the right one."""
    written = (bad / INDEX).read_text()
    name = min(read(bad / INDEX)["weight_map"])
    repeated = written.replace('"weight_map": {', f'"weight_map": {{"{name}": "{SHARDS[1]}", ')
    (bad / INDEX).write_text(repeated)


def _both_forms(bad: Path) -> None:
    """Shards that say one thing, a single file that says another."""
    whole = (bad / WEIGHTS).read_bytes()
    each(lambda t: t * 0)(bad)
    sharded(bad)
    (bad / WEIGHTS).write_bytes(whole)


def shards(name: str, *changes: Change, allowed: frozenset[int] = REFUSED, **rest: object) -> Case:
    return model(name, sharded, *changes, allowed=allowed, **rest)


SHARDED = (
    shards("two shards", allowed=RIGHT),
    shards("a shard that the index does not name", text("x.safetensors", "x"), allowed=RIGHT),
    shards("a shard above the folder", _outside),
    shards("a shard by its whole path", _absolute),
    shards("a shard of another place", _first("/etc/passwd")),
    shards("a shard without a name", _first("")),
    shards("a shard that is the folder", _first(".")),
    shards("a shard whose name is a number", weight_map(lambda t: t.update({min(t): 7}))),
    shards("a shard with a zero in its name", _first("a\0b")),
    shards("a shard with a long name", _first("a" * 5000), allowed=TOO_LARGE),
    shards("a missing shard", without(SHARDS[1])),
    shards("a truncated shard", bytes_of(SHARDS[1], lambda data: data[:-100])),
    shards("a shard that is a pipe", fifo(SHARDS[1])),
    shards("a shard that is a folder", directory(SHARDS[1])),
    shards("a shard that lacks its tensor", _first(SHARDS[1])),
    shards("a tensor that no shard has", weight_map(lambda t: t.update({"x": SHARDS[0]}))),
    shards("a tensor in two shards", _in_both, allowed=EITHER),
    shards("a tensor twice in the index", _twice_in_index, allowed=EITHER),
    shards("a tensor that the index leaves out", weight_map(lambda t: t.pop(min(t)) and None)),
    shards("an index of nothing", weight_map(lambda t: {})),
    shards("an index that is a list", weight_map(list)),
    shards("an index without its table", no_keys(INDEX, "weight_map")),
    shards("an index that is no JSON", text(INDEX, "{")),
    shards("an index that is a number", text(INDEX, "7")),
    shards("an index that is a pipe", fifo(INDEX)),
    shards("an index with a wrong size", keys(INDEX, metadata={"total_size": 3}), allowed=EITHER),
    shards("an index without metadata", no_keys(INDEX, "metadata"), allowed=EITHER),
    shards("an index with odd metadata", keys(INDEX, metadata=[1]), allowed=EITHER),
    shards(
        "an index of many shards",
        weight_map(lambda t: t.update({f"x.{n}": f"{n}.safetensors" for n in range(50_000)})),
    ),
    model("shards and a whole that differ", _both_forms, allowed=EITHER, same=False),
    shards("shards that lie elsewhere", moved_out(SHARDS[0]), moved_out(SHARDS[1]), allowed=EITHER),
    model("weights that lie elsewhere", moved_out(WEIGHTS), allowed=EITHER),
    model("a config that lies elsewhere", moved_out(CONFIG), allowed=EITHER),
    model("weights that link to themselves", linked(WEIGHTS, lambda bad: WEIGHTS)),
    model("weights that link to nothing", linked(WEIGHTS, lambda bad: "nowhere")),
    model("weights that link to a device", linked(WEIGHTS, lambda bad: "/dev/null")),
    model("a config that links to itself", linked(CONFIG, lambda bad: CONFIG)),
)


# -- files of weights -----------------------------------------------------------------------------


def _no_weights(*names: str) -> tuple[Change, ...]:
    return without(WEIGHTS), *(text(name, "x" * 64) for name in names)


def _entry(edit: str, value: object) -> Change:
    """One field of one tensor's entry in the header."""
    return headed(lambda header: header[Q + ".weight"].update({edit: value}))


def _repeated(content: bytes) -> bytes:
    """A header that has a tensor twice."""
    size = int.from_bytes(content[:8], "little")
    head = content[8 : 8 + size].rstrip()
    entry = json.dumps({NORM: json.loads(head)[NORM]})[1:-1].encode()
    return raw_safetensors(head[:-1] + b"," + entry + b"}", content[8 + size :])


def _claims(content: bytes, size: int) -> bytes:
    return size.to_bytes(8, "little") + content[8:]


def _unreadable(bad: Path) -> None:
    (bad / WEIGHTS).chmod(0)


FILES = (
    model("no weights", *_no_weights()),
    model("weights of other makers", *_no_weights("tf_model.h5", "flax_model.msgpack", "x.gguf")),
    model("weights of another name", lambda bad: (bad / WEIGHTS).rename(bad / "x.safetensors")),
    model("empty weights", text(WEIGHTS, "")),
    model("weights of seven bytes", text(WEIGHTS, "1234567")),
    model("weights of text", text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid x\n")),
    model("truncated by a byte", bytes_of(WEIGHTS, lambda data: data[:-1])),
    model("truncated in half", bytes_of(WEIGHTS, lambda data: data[: len(data) // 2])),
    model("truncated in the header", bytes_of(WEIGHTS, lambda data: data[:200])),
    model("longer than it says", bytes_of(WEIGHTS, lambda data: data + b"more")),
    model("a header longer than the file", bytes_of(WEIGHTS, lambda d: _claims(d, len(d) + 1))),
    model("a header of a gigabyte", bytes_of(WEIGHTS, lambda d: _claims(d, 1 << 30))),
    model("a header of 2^64 - 1", bytes_of(WEIGHTS, lambda d: _claims(d, (1 << 64) - 1))),
    model("a header of no length", bytes_of(WEIGHTS, lambda d: _claims(d, 0))),
    model("a header that is no JSON", text(WEIGHTS, raw_safetensors(b"{no json}", b"1234"))),
    model("a header that is a list", text(WEIGHTS, raw_safetensors([1, 2]))),
    model("a header that is no UTF-8", text(WEIGHTS, raw_safetensors(b'{"\xff": 1}'))),
    model("a header that is deep", text(WEIGHTS, raw_safetensors(b'{"a":' + b"[" * 100_000))),
    model("a header without tensors", text(WEIGHTS, raw_safetensors({}))),
    model("a tensor twice in the header", bytes_of(WEIGHTS, _repeated), allowed=EITHER),
    model("overlapping tensors", _entry("data_offsets", [0, 1024])),
    model("offsets beyond the file", _entry("data_offsets", [1 << 40, (1 << 40) + 1024])),
    model("offsets that go back", _entry("data_offsets", [1024, 0])),
    model("negative offsets", _entry("data_offsets", [-1024, 0])),
    model("offsets that are text", _entry("data_offsets", ["0", "1024"])),
    model("a shape beyond 2^64", _entry("shape", [1 << 62, 1 << 62])),
    model("a negative shape", _entry("shape", [-16, -16])),
    model("a shape of a terabyte", _entry("shape", [1 << 20, 1 << 20])),
    model("a type that does not exist", _entry("dtype", "F7")),
    model("metadata that is a number", headed(lambda header: header.update(__metadata__=7))),
    model("no metadata", headed(lambda header: header.pop("__metadata__")), allowed=EITHER),
    model(
        "metadata of another maker",
        headed(lambda header: header.update(__metadata__={"format": "tf"})),
        allowed=EITHER,
    ),
    model("weights that are a pipe", fifo(WEIGHTS)),
    model("weights that are a folder", directory(WEIGHTS)),
    *([model("weights that may not be read", _unreadable)] if getattr(os, "getuid", int)() else []),
)


# -- tensors --------------------------------------------------------------------------------------


def _set(value: float) -> Change:
    def edit(tensor: Tensor) -> Tensor:
        tensor.view(-1)[1] = value
        return tensor

    return mapped(NORM, edit)


def _shifted(state: State) -> State:
    """Layer 1 is called layer 2, so layer 1 is missing."""
    return {name.replace("layers.1.", "layers.2."): t for name, t in state.items()}


GPT2_MASK = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 64, 64) for n in range(2)}
TENSORS = (
    model("no query projection", lost(Q)),
    model("no head", lost("lm_head")),
    model("no last norm", lost(NORM)),
    model("no embedding", lost(EMBED)),
    model("no last layer", lost("layers.1.")),
    model("no first layer", lost("layers.0.")),
    model("a layer with the wrong number", tensors(_shifted)),
    model("only an embedding", tensors(lambda state: {EMBED: state[EMBED]})),
    model("no bias of gpt2", lost("h.0.attn.c_attn.bias"), family="gpt2"),
    model("no bias of qwen2", lost("layers.0.self_attn.q_proj.bias"), family="qwen2"),
    model("no embedding of qwen2", lost("embed_tokens"), family="qwen2"),
    model("a layer too many", tensors(lambda s: {**s, **_shifted(s)})),
    model("an unknown tensor", more({"evil.weight": torch.ones(4)})),
    model("an unknown tensor in a layer", more({"model.layers.0.evil.weight": torch.ones(4)})),
    model("a bias too many", more({Q + ".bias": torch.ones(16)})),
    model("a bias of the head", more({"lm_head.bias": torch.ones(260)})),
    model("a tensor with an odd name", more({"../../evil\n\u202e": torch.ones(4)})),
    model(
        "positions of old Llamas",
        more({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        allowed=EITHER,
    ),
    model(
        "masks of old GPT-2s",
        more(GPT2_MASK),
        allowed=RIGHT,
        family="gpt2",
        where=lenient("evo", "evo-first", "evo-dry", *MERGES),
    ),
    model(
        "names of old GPT-2s",
        renamed(lambda name: name.removeprefix("transformer.")),
        allowed=RIGHT,
        family="gpt2",
    ),
    model(
        "names without their prefix", renamed(lambda n: n.removeprefix("model.")), allowed=EITHER
    ),
    model("names of another model", renamed(lambda name: f"evil.{name}")),
    model("names of a parallel run", renamed(lambda name: f"module.{name}"), allowed=EITHER),
    model(
        "a bias of another shape",
        mapped("transformer.h.0.attn.c_attn.bias", lambda t: t[:40]),
        family="gpt2",
    ),
    model("a matrix that is turned", mapped("model.layers.0.mlp.up_proj.weight", lambda t: t.T)),
    model("a matrix that is flat", mapped(Q + ".weight", lambda t: t.reshape(-1))),
    model("a matrix with an axis more", mapped(Q + ".weight", lambda t: t[None])),
    model("a norm of one element", mapped(NORM, lambda t: t[:1])),
    model("a norm that is a number", mapped(NORM, lambda t: t[0])),
    model("a tensor of no size", mapped(Q + ".weight", lambda t: t[:0])),
    model("an embedding with fewer rows", mapped(EMBED, lambda t: t[:100])),
    model("an embedding with more rows", mapped(EMBED, lambda t: torch.cat([t, t]))),
    model("a head with fewer rows", mapped("lm_head.weight", lambda t: t[:100])),
    model("whole numbers as weights", each(lambda t: (100 * t).to(torch.int8))),
    model("one matrix of whole numbers", mapped(Q + ".weight", lambda t: (9 * t).to(torch.int32))),
    model("truth values as weights", mapped(Q + ".weight", lambda t: t > 0)),
    model(
        "weights in eight bits",
        each(lambda t: t.to(torch.float8_e4m3fn)),
        allowed=EITHER,
        same=False,
    ),
    model("weights in double precision", each(Tensor.double), allowed=RIGHT, same=False),
    model("weights in half precision", each(Tensor.half), allowed=RIGHT, same=False),
    model(
        "weights in two types", mapped(Q + ".weight", Tensor.bfloat16), allowed=RIGHT, same=False
    ),
    model("weights that are all 0", each(torch.zeros_like), allowed=EITHER, same=False),
    model("NaN", _set(math.nan), where=CONTENT),
    model("infinity", _set(math.inf), where=CONTENT),
    model("minus infinity", _set(-math.inf), where=CONTENT),
    model("all NaN", each(lambda t: t * math.nan), where=CONTENT),
    model(
        "so large that it overflows",
        each(lambda t: t * 1e30),
        allowed=EITHER,
        same=False,
    ),
    model(
        "a tied head that differs",
        more({"lm_head.weight": torch.ones(260, 16)}),
        family="qwen2",
        allowed=EITHER,
        same=False,
    ),
    model(
        "a tied head that is equal",
        tensors(lambda s: {**s, "lm_head.weight": s[EMBED].clone()}),
        family="qwen2",
        allowed=RIGHT,
    ),
    model(
        "tied, but with a head of its own",
        config(tie_word_embeddings=True),
        allowed=EITHER,
        same=False,
    ),
    model("not tied, and no head", config(tie_word_embeddings=False), family="qwen2"),
)

CASES: tuple[Case, ...] = (*SHARDED, *FILES, *TENSORS)
