"""Broken and hostile model folders: code, pickles, links, lies about tensors, odd configs.

`CASES` has these and those of the other hostile modules beside this one: every way we could think
of to make a command run code, hang, ask, change its input, end without a name for what is wrong, or
give a number that the files do not hold.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from agent_forge.store import files
from tests.faults import (
    hostile_adapters,
    hostile_data,
    hostile_lineages,
    hostile_recipes,
    hostile_settings,
    hostile_tokenizers,
    hostile_weights,
)
from tests.faults.hostile_goods import (
    AS_SECOND,
    BAD,
    CONFIG,
    CONTENT,
    EITHER,
    MERGES,
    RIGHT,
    TOO_LARGE,
    WEIGHTS,
    Canary,
    Case,
    Change,
    bytes_of,
    changed,
    code,
    config,
    copied,
    each,
    fifo,
    keys,
    lenient,
    lost,
    mapped,
    model,
    more,
    no_keys,
    pickled,
    read,
    singing,
    text,
    torch_file,
    without,
)

EMBED = "model.embed_tokens.weight"
BIN = "pytorch_model.bin"
MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"}
REMOTE = {kind: f"someone/evil--{name}" for kind, name in MAP.items()}
TOKENS = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}


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
    (bad / files.MANIFEST).write_bytes(files.with_checksum({"files": records}))


def ours(name: str, *changes: Change, **rest: object) -> Case:
    """A case of our own network, with a manifest that fits."""
    return model(name, *changes, reseal, family="ours", **rest)


def sealed(name: str, change: Change) -> Case:
    """A case of our own network whose manifest is wrong."""
    return model(name, change, family="ours", where=CONTENT)


def _record(**values: object) -> Change:
    """The manifest with other records, sealed again."""

    def change(bad: Path) -> None:
        known = read(bad / files.MANIFEST)["files"]
        (bad / files.MANIFEST).write_bytes(files.with_checksum({"files": {**known, **values}}))

    return change


UNSEALED = {**AS_SECOND, **lenient("evo-first")}  # what has no manifest is not verified
ANY_SHA = {"sha256": "0" * 64, "bytes": 3}
EVERY_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OURS = (
    model("a changed weight of ours", bytes_of(WEIGHTS, lambda d: d[:-1] + b"\1"), family="ours"),
    model("a changed config of ours", config(t_max=2), family="ours", where=AS_SECOND),
    model(
        "a changed tokenizer of ours",
        bytes_of("tokenizer.json", lambda d: d + b" "),
        family="ours",
        where=AS_SECOND,
    ),
    model(
        "a manifest without a checksum",
        keys(files.MANIFEST, checksum=""),
        family="ours",
        where=CONTENT,
    ),
    sealed("a manifest that is no JSON", text(files.MANIFEST, "{")),
    sealed("a manifest that is a list", text(files.MANIFEST, "[]")),
    sealed("a manifest of lists", _record(**{WEIGHTS: []})),
    model(
        "a manifest with a wrong hash", _record(**{WEIGHTS: ANY_SHA}), family="ours", where=CONTENT
    ),
    model(
        "a manifest that names more", _record(**{"x.bin": ANY_SHA}), family="ours", where=CONTENT
    ),
    model(
        "a manifest that names outside", _record(**{"../x": ANY_SHA}), family="ours", where=CONTENT
    ),
    model(
        "a manifest that names the root",
        _record(**{"/etc/passwd": ANY_SHA}),
        family="ours",
        where=CONTENT,
    ),
    model("a manifest that is a pipe", fifo(files.MANIFEST), family="ours", where=UNSEALED),
    model(
        "no manifest",
        without(files.MANIFEST),
        family="ours",
        where=UNSEALED,
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
        where=AS_SECOND,
    ),
    ours(
        "metadata that is a list",
        text("metadata.json", "[]"),
        where=AS_SECOND,
    ),
    ours(
        "metadata of a later version",
        keys("metadata.json", schema_version=99),
        where=AS_SECOND,
    ),
    ours(
        "tied weights that are not there",
        keys("metadata.json", tied_weights={"a": "b"}),
        where=AS_SECOND,
    ),
    ours(
        "tied weights that are a list",
        keys("metadata.json", tied_weights=["a"]),
        where=AS_SECOND,
    ),
    ours("more layers of ours than in the file", config(n_layers=3)),
    ours("fewer layers of ours than in the file", config(n_layers=1)),
    ours("a billion layers of ours", config(n_layers=10**9), allowed=TOO_LARGE),
    ours("a vocabulary of ours of a billion", config(vocab_size=10**9), allowed=TOO_LARGE),
    ours("a width of ours that is text", config(d_model="wide")),
    ours("a config of ours that is a list", text(CONFIG, "[]")),
    ours("a setting that ours does not have", config(evil=1), allowed=EITHER),
    ours("a billion recursion steps", config(t_max=10**9), allowed=EITHER, same=False),
    ours("an unknown tensor in ours", more({"evil": torch.ones(3)})),
    ours("no embedding of ours", lost("embedding")),
    ours("no block of ours", lost("blocks.1.")),
    ours("NaN in ours", each(lambda t: t * math.nan), where=CONTENT),
    ours("whole numbers as weights of ours", each(lambda t: (9 * t).to(torch.int8))),
    ours("a matrix of ours that is turned", mapped("projection.weight", lambda t: t.T)),
    ours("code for ours", config(auto_map=MAP), code("evil.py"), allowed=EITHER),
    ours("no tokenizer of ours", without(*EVERY_TOKENIZER), where=AS_SECOND),
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
        allowed=EITHER,
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
    *(*CODE, *PICKLES, *OURS, *PLACES),
    *hostile_weights.CASES,
    *hostile_settings.CASES,
    *hostile_tokenizers.CASES,
    *hostile_adapters.CASES,
    *hostile_recipes.CASES,
    *hostile_data.CASES,
    *hostile_lineages.CASES,
)
