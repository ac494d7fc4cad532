"""Broken and hostile model folders: code, pickles, links, lies about tensors, odd configs.

`CASES` has these and those of hostile_settings, hostile_tokenizers, hostile_adapters and
hostile_files: every way we could think of to make a command run code, hang, ask, change its input,
end without a name for what is wrong, or give a number that the files do not hold.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from agent_forge.store import files
from tests.faults import hostile_adapters, hostile_files, hostile_settings, hostile_tokenizers
from tests.faults.hostile_goods import (
    BAD,
    CONFIG,
    EITHER,
    INDEX,
    MERGES,
    REFUSED,
    RIGHT,
    SHARDS,
    TOO_LARGE,
    WEIGHTS,
    Canary,
    Case,
    Change,
    State,
    bytes_of,
    changed,
    code,
    config,
    copied,
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
    pickled,
    raw_safetensors,
    read,
    renamed,
    save,
    sharded,
    singing,
    tensors,
    text,
    torch_file,
    weight_map,
    without,
)

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
BIN = "pytorch_model.bin"
MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"}
REMOTE = {kind: f"someone/evil--{name}" for kind, name in MAP.items()}
TOKENS = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
CONTENT = lenient("evo-dry", "merge-dry")  # a dry run reads no weights


# -- code -----------------------------------------------------------------------------------------

CODE = (
    model("nothing is wrong", allowed=RIGHT),
    model("nothing is wrong with gpt2", allowed=RIGHT, family="gpt2"),
    model("nothing is wrong with tied qwen2", allowed=RIGHT, family="qwen2"),
    model("nothing is wrong with ours", allowed=RIGHT, family="ours"),
    model("code for a known type", config(auto_map=MAP), code("evil.py"), allowed=EITHER),
    model("code for a known type, remote", config(auto_map=REMOTE), allowed=EITHER),
    model("code for an unknown type", config(model_type="evil", auto_map=MAP), code("evil.py")),
    model("code for an unknown type, remote", config(model_type="evil", auto_map=REMOTE)),
    model("code for no type", no_keys(CONFIG, "model_type"), config(auto_map=MAP), code("evil.py")),
    model("an unknown type", config(model_type="evil")),
    model("an unknown type with its file", config(model_type="evil"), code("modeling_evil.py")),
    model(
        "code for the tokenizer",
        keys("tokenizer_config.json", auto_map=TOKENS, tokenizer_class="EvilTokenizer"),
        code("evil.py"),
        allowed=EITHER,
    ),
    model(
        "code for the tokenizer, old form",
        keys("tokenizer_config.json", auto_map=TOKENS["AutoTokenizer"]),
        code("evil.py"),
        allowed=EITHER,
    ),
    model(
        "code for generation",
        keys("generation_config.json", auto_map={"GenerationConfig": "evil.EvilConfig"}),
        code("evil.py"),
        allowed=EITHER,
    ),
    model(
        "code for a processor",
        keys("processor_config.json", auto_map={"AutoProcessor": "evil.Evil"}),
        keys("preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Evil"}),
        code("evil.py"),
        allowed=EITHER,
    ),
    model(
        "custom_generate",
        code("custom_generate/generate.py"),
        text("custom_generate/requirements.txt", "evil\n"),
        allowed=EITHER,
    ),
    model(
        "a modelling file that nobody names",
        code("modeling_llama.py"),
        code("configuration_llama.py"),
        code("__init__.py"),
        code("setup.py"),
        code("conftest.py"),
        allowed=RIGHT,
    ),
    model(
        "a module as tokenizer class",
        keys("tokenizer_config.json", tokenizer_class="evil.EvilTokenizer"),
        code("evil.py"),
        allowed=EITHER,
    ),
    model("architectures name a module", config(architectures=["os.system"]), allowed=EITHER),
    model("a type that is a path", config(model_type="../evil"), code("modeling_evil.py")),
    model("a type with dots", config(model_type="llama.evil")),
    model("attention from the hub", config(attn_implementation="someone/evil"), allowed=EITHER),
    model(
        "attention from the hub, inner name",
        config(_attn_implementation="someone/evil", _attn_implementation_internal="someone/evil"),
        allowed=EITHER,
    ),
    model("kernels from the hub", config(use_kernels=True, kernel_config={"x": 1}), allowed=EITHER),
    model("another folder's name", config(_name_or_path="someone/evil"), allowed=RIGHT),
    model(
        "a tokenizer file elsewhere",
        keys("tokenizer_config.json", tokenizer_file="/etc/passwd", vocab_file="/etc/passwd"),
        allowed=EITHER,
    ),
    model(
        "a tokenizer's name elsewhere",
        keys("tokenizer_config.json", name_or_path="someone/evil", _name_or_path="someone/evil"),
        allowed=EITHER,
    ),
    model(
        "a whole model with an adapter_config",
        text("adapter_config.json", json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8})),
        allowed=EITHER,
    ),
)


# -- pickles --------------------------------------------------------------------------------------


def _bin(content: object = None, **how: bool) -> tuple[Change, Change]:
    """The weights as a pickle instead of safetensors; `content` joins the tensors."""
    extra = {} if content is None else {"x": content}
    made = torch_file(BIN, lambda bad: {**load_file(bad / WEIGHTS), **extra}, **how)
    return made, without(WEIGHTS)


def _evil_bin(**how: bool) -> tuple[Change, Change]:
    made = torch_file(BIN, lambda bad: {"w": torch.ones(2), "x": Canary(bad.parent)}, **how)
    return made, without(WEIGHTS)


def _packed(bad: Path) -> None:
    """A torch file whose archive is compressed: 200 MB of zeros in a few bytes."""
    torch.save({"w": torch.zeros(50_000_000)}, bad / "plain")
    deflated = zipfile.ZipFile(bad / BIN, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with zipfile.ZipFile(bad / "plain") as plain, deflated as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    (bad / "plain").unlink()


def _evil_shards(bad: Path) -> None:
    torch.save({"w": Canary(bad.parent)}, bad / "a.bin")
    index = {"metadata": {}, "weight_map": {"w": "a.bin"}}
    (bad / f"{BIN}.index.json").write_text(json.dumps(index))


def _raw(name: str) -> Change:
    return lambda bad: text(name, pickled(bad.parent))(bad)


PICKLES = (
    model("weights as a pickle", *_bin(), allowed=RIGHT),
    model("weights as an old pickle", *_bin(_use_new_zipfile_serialization=False), allowed=EITHER),
    model("weights within a checkpoint", *_bin(), allowed=RIGHT)._replace(
        make=changed(
            torch_file(BIN, lambda bad: {"state_dict": load_file(bad / WEIGHTS)}), without(WEIGHTS)
        ),
        allowed=EITHER,
    ),
    model("a pickle with code", *_evil_bin()),
    model("an old pickle with code", *_evil_bin(_use_new_zipfile_serialization=False)),
    model("a raw pickle with code", _raw(BIN), without(WEIGHTS)),
    model("a pickle with code for safetensors", _raw(WEIGHTS)),
    model("a pickle with code beside the weights", _raw(BIN), allowed=EITHER),
    model("a shard with code", _evil_shards, without(WEIGHTS)),
    model("a shard with code beside the weights", _evil_shards, allowed=EITHER),
    model(
        "what trainers leave",
        *(_raw(name) for name in ("training_args.bin", "optimizer.pt", "rng_state.pth")),
        *(_raw(name) for name in ("scheduler.pt", "model.pkl", "tokenizer.pkl", "model.ckpt")),
        allowed=RIGHT,
    ),
    model("a pickle for config.json", _raw(CONFIG)),
    model("a pickle for tokenizer.json", _raw("tokenizer.json"), where=lenient("evo", *MERGES)),
    model("a pickle for tokenizer.model", _raw("tokenizer.model"), allowed=EITHER),
    model("a pickle of numbers", *_bin(7)),
    model("a pickle of a list", torch_file(BIN, lambda bad: [torch.ones(2)]), without(WEIGHTS)),
    model("a pickle that is no pickle", text(BIN, "no pickle"), without(WEIGHTS)),
    model("a truncated pickle", *_bin(), bytes_of(BIN, lambda data: data[:-4000])),
    model("a packed pickle", _packed, without(WEIGHTS), allowed=TOO_LARGE),
    model(
        "a pickle of one number as many",
        torch_file(BIN, lambda bad: {EMBED: torch.ones(1).expand(1 << 40)}),
        without(WEIGHTS),
        allowed=TOO_LARGE,
    ),
    model(
        "a pickle of another kind, deep", text(BIN, pickle.dumps({"a": {1, 2}})), without(WEIGHTS)
    ),
)


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
    *([model("weights that may not be read", _unreadable)] if os.getuid() else []),
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


GPT2_MASK = {f"transformer__h__{n}__attn__bias": torch.ones(1, 1, 64, 64) for n in range(2)}
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
    model("an unknown tensor", more(evil__weight=torch.ones(4))),
    model("an unknown tensor in a layer", more(model__layers__0__evil__weight=torch.ones(4))),
    model("a bias too many", more(**{(Q + ".bias").replace(".", "__"): torch.ones(16)})),
    model("a bias of the head", more(lm_head__bias=torch.ones(260))),
    model("a tensor with an odd name", more(**{"../../evil\n\u202e": torch.ones(4)})),
    model(
        "positions of old Llamas",
        more(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)),
        allowed=EITHER,
    ),
    model(
        "masks of old GPT-2s",
        more(**GPT2_MASK),
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
    model("weights in double precision", each(Tensor.double), allowed=RIGHT),
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
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    model(
        "a tied head that differs",
        more(lm_head__weight=torch.ones(260, 16)),
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


# -- ours -----------------------------------------------------------------------------------------


def readable(path: Path) -> object:
    try:
        return read(path)
    except ValueError:
        return None


def reseal(bad: Path) -> None:
    """A manifest that fits what is there: only the content can be wrong."""
    (bad / files.MANIFEST).unlink(missing_ok=True)
    if isinstance(metadata := readable(bad / "metadata.json"), dict):
        metadata["sha256"] = files.sha256_of(bad / WEIGHTS)
        (bad / "metadata.json").write_text(json.dumps(metadata))
    names = sorted(path.name for path in bad.iterdir() if path.is_file())
    records = {
        n: {"sha256": files.sha256_of(bad / n), "bytes": (bad / n).stat().st_size} for n in names
    }
    (bad / files.MANIFEST).write_bytes(files.sealed({"files": records}))


def ours(name: str, *changes: Change, **rest: object) -> Case:
    """A case of our own network, with a manifest that fits."""
    return model(name, *changes, reseal, family="ours", **rest)


def _record(**values: object) -> Change:
    """The manifest with other records, sealed again."""

    def change(bad: Path) -> None:
        known = read(bad / files.MANIFEST)["files"]
        (bad / files.MANIFEST).write_bytes(files.sealed({"files": {**known, **values}}))

    return change


ANY_SHA = {"sha256": "0" * 64, "bytes": 3}
EVERY_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OURS = (
    model("a changed weight of ours", bytes_of(WEIGHTS, lambda d: d[:-1] + b"\1"), family="ours"),
    model("a changed config of ours", config(t_max=2), family="ours"),
    model(
        "a changed tokenizer of ours",
        bytes_of("tokenizer.json", lambda d: d + b" "),
        family="ours",
        where=lenient("evo", *MERGES),
    ),
    model("a manifest without a checksum", keys(files.MANIFEST, checksum=""), family="ours"),
    model("a manifest that is no JSON", text(files.MANIFEST, "{"), family="ours"),
    model("a manifest that is a list", text(files.MANIFEST, "[]"), family="ours"),
    model("a manifest of lists", _record(**{WEIGHTS: []}), family="ours"),
    model("a manifest with a wrong hash", _record(**{WEIGHTS: ANY_SHA}), family="ours"),
    model("a manifest that names more", _record(**{"x.bin": ANY_SHA}), family="ours"),
    model("a manifest that names outside", _record(**{"../x": ANY_SHA}), family="ours"),
    model("a manifest that names the root", _record(**{"/etc/passwd": ANY_SHA}), family="ours"),
    model("a manifest that is a pipe", fifo(files.MANIFEST), family="ours"),
    model(
        "no manifest",
        without(files.MANIFEST),
        family="ours",
        where=lenient("evo", "evo-first", "evo-dry", *MERGES),
    ),
    model(
        "no metadata of ours",
        without("metadata.json", "metrics.json", files.MANIFEST),
        allowed=RIGHT,
        family="ours",
    ),
    ours(
        "metadata that is no JSON",
        text("metadata.json", "{"),
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    ours(
        "metadata that is a list",
        text("metadata.json", "[]"),
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    ours(
        "metadata of a later version",
        keys("metadata.json", schema_version=99),
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    ours(
        "tied weights that are not there",
        keys("metadata.json", tied_weights={"a": "b"}),
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    ours(
        "tied weights that are a list",
        keys("metadata.json", tied_weights=["a"]),
        where=lenient("evo", "evo-dry", *MERGES),
    ),
    ours("more layers of ours than in the file", config(n_layers=3)),
    ours("fewer layers of ours than in the file", config(n_layers=1)),
    ours("a billion layers of ours", config(n_layers=10**9), allowed=TOO_LARGE),
    ours("a vocabulary of ours of a billion", config(vocab_size=10**9), allowed=TOO_LARGE),
    ours("a width of ours that is text", config(d_model="wide")),
    ours("a config of ours that is a list", text(CONFIG, "[]")),
    ours("a setting that ours does not have", config(evil=1), allowed=EITHER),
    ours("a billion recursion steps", config(t_max=10**9), allowed=EITHER, same=False),
    ours("an unknown tensor in ours", more(evil=torch.ones(3))),
    ours("no embedding of ours", lost("embedding")),
    ours("no block of ours", lost("blocks.1.")),
    ours("NaN in ours", each(lambda t: t * math.nan), where=CONTENT),
    ours("whole numbers as weights of ours", each(lambda t: (9 * t).to(torch.int8))),
    ours("a matrix of ours that is turned", mapped("projection.weight", lambda t: t.T)),
    ours("code for ours", config(auto_map=MAP), code("evil.py"), allowed=EITHER),
    ours(
        "no tokenizer of ours", without(*EVERY_TOKENIZER), where=lenient("evo", "evo-dry", *MERGES)
    ),
    ours(
        "a truncated tokenizer of ours",
        bytes_of("tokenizer.json", lambda d: d[:500]),
        where=lenient("evo", *MERGES),
    ),
)


# -- places ---------------------------------------------------------------------------------------


def _file(folder: Path, good: Path) -> str:
    return str(copied(good, folder / BAD) / WEIGHTS)


def _empty(folder: Path, good: Path) -> str:
    (folder / BAD).mkdir()
    return str(folder / BAD)


def _code_as_model(folder: Path, good: Path) -> str:
    (folder / "evil.py").write_text(singing(folder))
    return str(folder / "evil.py")


def _named(name: str) -> object:
    return lambda folder, good: str(copied(good, folder / name))


PLACES = (
    Case(
        "a file of weights for a folder",
        "model",
        _file,
        where=lenient(*MERGES, "evo", "evo-first", "evo-dry"),
        says="folder",
    ),
    Case("an empty folder", "model", _empty),
    Case("a model that is not there", "model", lambda folder, good: str(folder / "nowhere")),
    Case("a file of code", "model", _code_as_model),
    Case("a model that is the root", "model", lambda folder, good: "/"),
    Case("a model that is an address", "model", lambda folder, good: "https://example.org/x"),
    Case("a name that is too long", "model", lambda f, g: str(f / ("a" * 5000)), TOO_LARGE),
    Case("a model of nobody's home", "model", lambda folder, good: "~nobody-knows/x"),
    Case("a name with a plus", "model", _named("a+b"), RIGHT),
    Case("a name with a space", "model", _named("a b"), RIGHT),
    Case("a name with a line end", "model", _named("a\nb"), EITHER),
    Case("a name with a colour", "model", _named("a\x1b[31mb"), EITHER),
    Case("a name with brackets", "model", _named("[red]{x}%s"), RIGHT),
)

CASES: tuple[Case, ...] = (
    *(*CODE, *PICKLES, *SHARDED, *FILES, *TENSORS, *OURS, *PLACES),
    *hostile_settings.CASES,
    *hostile_tokenizers.CASES,
    *hostile_adapters.CASES,
    *hostile_files.CASES,
)
