"""LoRA adapters that are broken, hostile, or of a kind that plain arithmetic gets wrong.

Where an adapter is right, or may be used, a sound model with the same weights is made beside it: a
command that uses the adapter has to measure what that one does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.faults.hostile_goods import (
    CONTENT,
    EITHER,
    LIKE,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    WEIGHTS,
    Canary,
    Case,
    Change,
    Make,
    State,
    bytes_of,
    code,
    config,
    copied,
    directory,
    fifo,
    keys,
    moved_out,
    no_keys,
    save,
    singing,
    text,
    torch_file,
    without,
)

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
RANK, ALPHA = 4, 8
TARGETS = {
    "llama": [f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qv"],
    "qwen2": [f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qo"],
    "gpt2": [f"transformer.h.{n}.attn.c_attn" for n in (0, 1)],
}
Merge = Callable[[State, State], State]  # weights of the base and the adapter -> of both together


# -- good ones ------------------------------------------------------------------------------------


def put(folder: Path, base: Path, family: str) -> Path:
    """A LoRA adapter for a model, as peft writes it."""
    folder.mkdir(parents=True)
    own = torch.Generator().manual_seed(7)
    weights, made = load_file(base / WEIGHTS), {}
    turned = family == "gpt2"  # its matrices have the inputs in rows
    for target in TARGETS[family]:
        rows, columns = weights[f"{target}.weight"].shape[:: -1 if turned else 1]
        made[f"{PREFIX}{target}.lora_A.weight"] = torch.randn(RANK, columns, generator=own)
        made[f"{PREFIX}{target}.lora_B.weight"] = torch.randn(rows, RANK, generator=own) / 9
    save(folder / TENSORS, made)
    settings = {
        "base_model_name_or_path": str(base),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({target.rpartition(".")[2] for target in TARGETS[family]}),
        "bias": "none",
        "fan_in_fan_out": turned,
        "init_lora_weights": True,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / SETTINGS).write_text(json.dumps(settings))
    return folder


def added(scale: float = ALPHA / RANK, *, turned: bool = False) -> Merge:
    """W + scale * B A, as the paper has it."""

    def merge(weights: State, adapter: State) -> State:
        merged = dict(weights)
        for name, a in adapter.items():
            if not name.endswith(".lora_A.weight"):
                continue
            target = name.removeprefix(PREFIX).replace(".lora_A", "")
            update = scale * (adapter[name.replace("lora_A", "lora_B")] @ a)
            merged[target] = weights[target] + (update.T if turned else update)
        return merged

    return merge


def adapter(
    name: str,
    *changes: Change,
    like: Merge | None = None,
    alone: bool = False,
    family: str = "llama",
    **rest: Any,
) -> Case:
    """A good adapter with changes, given as BASE+ADAPTER or `alone`; `like` is what both are."""

    def make(folder: Path, good: Path) -> str:
        place = put(folder / "adapter", good, family)
        for change in changes:
            change(place)
        if like is not None:
            sound = copied(good, folder / LIKE)
            save(sound / WEIGHTS, like(load_file(good / WEIGHTS), load_file(place / TENSORS)))
        return str(place) if alone else f"{good}+{place}"

    given = {"same": like is not None, "family": family, **rest}
    return Case(f"adapter: {name}", "adapter", make, **given)


def settings(
    name: str, allowed: frozenset[int] = REFUSED, *, like: Any = None, **values: Any
) -> Case:
    """An adapter whose settings say something else."""
    return adapter(name, keys(SETTINGS, **values), allowed=allowed, like=like)


GOOD = (
    adapter("nothing is wrong", allowed=RIGHT, like=added()),
    adapter("nothing is wrong, alone", allowed=RIGHT, like=added(), alone=True),
    adapter("nothing is wrong with gpt2", allowed=RIGHT, like=added(turned=True), family="gpt2"),
    adapter("nothing is wrong with qwen2", allowed=RIGHT, like=added(), family="qwen2"),
    settings("rank-stabilised", RIGHT, like=added(ALPHA / math.sqrt(RANK)), use_rslora=True),
    settings("gaussian start", RIGHT, like=added(), init_lora_weights="gaussian"),
    settings("no start", RIGHT, like=added(), init_lora_weights=False),
    settings("of a later version", EITHER, like=added(), peft_version="99.0", new_field=None),
    settings("alpha of 0", EITHER, like=added(0.0), lora_alpha=0),
    settings("alpha below 0", EITHER, like=added(-2.0), lora_alpha=-8),
    settings("alpha that is a fraction", EITHER, like=added(0.625), lora_alpha=2.5),
    adapter("a file that lies elsewhere", moved_out(TENSORS), allowed=EITHER),
)


# -- kinds that are not plain ---------------------------------------------------------------------

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
CHANGED_BASE = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")


def more(extra: State) -> Change:
    return _edited(lambda state: {**state, **extra})


def _edited(edit: Callable[[State], State]) -> Change:
    return lambda place: save(place / TENSORS, edit(load_file(place / TENSORS)))


def _patterned(weights: State, both: State) -> State:
    """The first layer with half of alpha."""
    halved = {k: v / 2 if "layers.0" in k and "lora_B" in k else v for k, v in both.items()}
    return added()(weights, halved)


def _dora(weights: State, both: State) -> State:
    """The direction of W + BA, with the given lengths of rows."""
    merged = added()(weights, both)
    for name, size in both.items():
        if "magnitude" in name:
            target = name.removeprefix(PREFIX).replace(".lora_magnitude_vector", "") + ".weight"
            lengths = merged[target].norm(dim=1, keepdim=True)
            merged[target] = merged[target] * size[:, None] / lengths
    return merged


def _with_magnitudes(state: State) -> State:
    sizes = {
        k.replace("lora_A.weight", "lora_magnitude_vector"): torch.full((16,), 0.5)
        for k in state
        if "lora_A" in k
    }
    return {**state, **sizes}


def _replaced(weights: State, both: State) -> State:
    return {**added()(weights, both), "lm_head.weight": torch.full((260, 16), 0.01)}


ONE_TOKEN = "model.embed_tokens.token_adapter.trainable_tokens_delta"
BIASED = "transformer.h.0.attn.c_attn"
HEAD = {f"{PREFIX}lm_head.weight": torch.full((260, 16), 0.01)}
KINDS = (
    *(settings(f"started by {how}", init_lora_weights=how) for how in CHANGED_BASE),
    settings("started by eva", EITHER, like=added(), init_lora_weights="eva"),
    settings("started by nobody knows what", EITHER, like=added(), init_lora_weights="evil"),
    settings("started by a number", EITHER, like=added(), init_lora_weights=7),
    settings("alphas by pattern", EITHER, like=_patterned, alpha_pattern={"layers.0.*": 4}),
    settings("ranks by pattern that do not fit", rank_pattern={"q_proj": 2}),
    settings("patterns that are text", alpha_pattern="x", rank_pattern=7),
    adapter(
        "DoRA",
        keys(SETTINGS, use_dora=True),
        _edited(_with_magnitudes),
        allowed=EITHER,
        like=_dora,
    ),
    settings("DoRA without lengths", use_dora=True),
    adapter("lengths without DoRA", _edited(_with_magnitudes)),
    settings("layers again", layer_replication=[[0, 2], [1, 2]]),
    settings("megatron", EITHER, like=added(), megatron_config={"a": 1}, megatron_core="evil.core"),
    settings("modules to leave out", EITHER, like=added(), exclude_modules=["k_proj"]),
    settings("modules to leave out that are there", EITHER, exclude_modules=["q_proj"]),
    settings("layers to change", EITHER, like=added(), layers_to_transform=[0, 1]),
    adapter(
        "a module of its own",
        keys(SETTINGS, modules_to_save=["lm_head"]),
        more(HEAD),
        allowed=EITHER,
        like=_replaced,
    ),
    settings("a module of its own that is not there", modules_to_save=["lm_head"]),
    settings("all biases, of which there are none", EITHER, like=added(), bias="all"),
    adapter(
        "all biases",
        keys(SETTINGS, bias="all"),
        more({f"{PREFIX}{BIASED}.base_layer.bias": torch.ones(48)}),
        family="gpt2",
        allowed=EITHER,
        like=lambda w, both: {**added(turned=True)(w, both), f"{BIASED}.bias": torch.ones(48)},
    ),
    adapter(
        "biases of LoRA",
        keys(SETTINGS, bias="lora_only"),
        more({f"{Q0}.bias": torch.ones(16)}),
    ),
    adapter(
        "biases of B",
        keys(SETTINGS, lora_bias=True),
        more({f"{Q0}.lora_B.bias": torch.ones(16)}),
    ),
    settings("biases of B that are not there", lora_bias=True),
    settings("biases that do not exist", EITHER, like=added(), bias="evil"),
    settings("tokens to train that are not there", trainable_token_indices=[1, 2]),
    adapter(
        "tokens to train",
        keys(SETTINGS, trainable_token_indices=[1]),
        more({f"{PREFIX}{ONE_TOKEN}": torch.ones(1, 16)}),
    ),
    settings("parameters to train", target_parameters=["mlp.up_proj.weight"]),
    settings("quantization-aware", EITHER, use_qalora=True, qalora_group_size=8),
    settings("turned, though it is not", EITHER, fan_in_fan_out=True),
    adapter(
        "not turned, though it is",
        keys(SETTINGS, fan_in_fan_out=False),
        family="gpt2",
        allowed=EITHER,
        like=added(turned=True),
    ),
    settings("for classes", EITHER, like=added(), task_type="SEQ_CLS"),
    *(
        settings(f"of kind {kind}", peft_type=kind)
        for kind in ("IA3", "PROMPT_TUNING", "PREFIX_TUNING", "LOHA", "ADALORA", "VERA", "EVIL", 7)
    ),
    adapter("of no kind", no_keys(SETTINGS, "peft_type"), allowed=EITHER, like=added()),
)


# -- what is broken -------------------------------------------------------------------------------


def _one(name: str, edit: Callable[[Tensor], Tensor]) -> Change:
    return _edited(lambda state: {**state, name: edit(state[name])})


def _lost(*parts: str) -> Change:
    return _edited(lambda s: {k: v for k, v in s.items() if not any(p in k for p in parts)})


RANKS = (0, -4, "four", None, 10**9, 2.5, True, [4], 99, 2)
ALPHAS = ("x", None, [8], "8")
BROKEN = (
    *(settings(f"rank: {json.dumps(value)}", r=value) for value in RANKS),
    *(settings(f"alpha: {json.dumps(value)}", lora_alpha=value) for value in ALPHAS),
    adapter("alpha that overflows", keys(SETTINGS, lora_alpha=1e300), where=CONTENT),
    adapter(
        "alpha that is no number",
        bytes_of(SETTINGS, lambda d: d.replace(b'"lora_alpha": 8', b'"lora_alpha": NaN')),
    ),
    adapter(
        "alpha that is infinite",
        bytes_of(SETTINGS, lambda d: d.replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')),
    ),
    adapter("one half is missing", _lost("layers.0.self_attn.q_proj.lora_B")),
    adapter("nothing in it", _edited(lambda state: {})),
    adapter(
        "a layer that is not there",
        _edited(lambda s: {k.replace("layers.1", "layers.7"): v for k, v in s.items()}),
    ),
    adapter(
        "a module that is not there",
        _edited(lambda s: {k.replace("q_proj", "evil"): v for k, v in s.items()}),
    ),
    adapter("an unknown tensor", more({"evil": torch.ones(3)})),
    adapter(
        "a whole matrix of the base",
        more({f"{Q0}.weight": torch.ones(16, 16)}),
    ),
    adapter("halves that do not fit each other", _one(f"{Q0}.lora_A.weight", lambda t: t[:2])),
    adapter(
        "of another width",
        _edited(
            lambda s: {k: torch.cat([v, v], dim=1) if "lora_A" in k else v for k, v in s.items()}
        ),
    ),
    adapter("of a convolution", _edited(lambda s: {k: v[..., None, None] for k, v in s.items()})),
    adapter(
        "of whole numbers", _edited(lambda s: {k: (9 * v).to(torch.int8) for k, v in s.items()})
    ),
    adapter("NaN", _one(f"{Q0}.lora_B.weight", lambda t: t * math.nan), where=CONTENT),
    adapter("infinity", _one(f"{Q0}.lora_A.weight", lambda t: t / 0), where=CONTENT),
    adapter(
        "so large that it overflows",
        _edited(lambda s: {k: v * 1e30 for k, v in s.items()}),
        where=CONTENT,
    ),
    adapter(
        "names of peft's memory",
        _edited(lambda s: {k.replace(".weight", ".default.weight"): v for k, v in s.items()}),
        allowed=EITHER,
    ),
    adapter(
        "names of another adapter",
        _edited(lambda s: {k.replace(".weight", ".evil.weight"): v for k, v in s.items()}),
    ),
    adapter(
        "names without peft's prefix",
        _edited(lambda s: {k.removeprefix(PREFIX): v for k, v in s.items()}),
        allowed=EITHER,
    ),
    adapter("no settings", without(SETTINGS)),
    adapter("settings that are no JSON", text(SETTINGS, "{")),
    adapter("settings that are a list", text(SETTINGS, "[]")),
    adapter("settings that are nothing", text(SETTINGS, "{}")),
    adapter("settings that are a pipe", fifo(SETTINGS)),
    adapter("settings that are a folder", directory(SETTINGS)),
    adapter("no tensors", without(TENSORS)),
    adapter("truncated tensors", bytes_of(TENSORS, lambda data: data[:-9])),
    adapter("tensors that are a pipe", fifo(TENSORS)),
    adapter(
        "a pickle with code",
        torch_file("adapter_model.bin", lambda p: {"w": Canary(p.parent)}),
        without(TENSORS),
    ),
    adapter(
        "a pickle with code beside it",
        torch_file("adapter_model.bin", lambda p: {"w": Canary(p.parent)}),
        allowed=EITHER,
    ),
    adapter(
        "code",
        keys(SETTINGS, auto_mapping={"base_model_class": "Evil", "parent_library": "evil"}),
        code("evil.py"),
        code("__init__.py"),
        allowed=EITHER,
    ),
    settings(
        "a corda file elsewhere",
        EITHER,
        corda_config={"cache_file": "/etc/passwd"},
        eva_config={"rho": "x"},
    ),
    settings("targets that are text", EITHER, like=added(), target_modules="all-linear"),
    settings("targets that are a number", EITHER, like=added(), target_modules=7),
    settings("a pattern that takes for ever", EITHER, target_modules="(.*)*" * 20 + "x"),
)


# -- bases ----------------------------------------------------------------------------------------


def _base(
    name: str, value: Callable[[Path], Any], allowed: frozenset[int] = REFUSED, **rest: Any
) -> Case:
    """An adapter alone that names this as its base."""

    def change(place: Path) -> None:
        keys(SETTINGS, base_model_name_or_path=value(place))(place)

    return adapter(name, change, alone=True, allowed=allowed, **rest)


def _other_adapter(place: Path) -> str:
    """Two adapters that name each other."""
    other = copied(place, place.parent / "other")
    keys(SETTINGS, base_model_name_or_path=str(place))(other)
    return str(other)


def _hostile_base(place: Path) -> str:
    """A base with an unknown type, code and nothing else that would be missing."""
    good = Path(json.loads((place / SETTINGS).read_text())["base_model_name_or_path"])
    base = copied(good, place.parent / "base")
    names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"}
    config(model_type="evil", auto_map=names)(base)
    (base / "evil.py").write_text(singing(place.parent))
    return str(base)


def _halved_base(place: Path) -> str:
    good = Path(json.loads((place / SETTINGS).read_text())["base_model_name_or_path"])
    base = copied(good, place.parent / "base")
    weights = load_file(base / WEIGHTS)
    save(base / WEIGHTS, {k: v for k, v in weights.items() if "layers.1.mlp" not in k})
    return str(base)


def _given(
    name: str, ref: Callable[[Path, Path, Path], str], allowed: frozenset[int] = REFUSED
) -> Case:
    """What the user names, from the case's folder, a good model and a good adapter of it."""

    def make(folder: Path, good: Path) -> str:
        return ref(folder, good, put(folder / "adapter", good, "llama"))

    return Case(f"adapter: {name}", "adapter", make, allowed, same=False)


def _other_family(folder: Path, good: Path, place: Path) -> str:
    return f"{good.parent.parent / 'gpt2' / 'a'}+{place}"


def _tied_head(folder: Path, good: Path) -> str:
    """An update of a head that is the embedding: only the head changes."""
    place = put(folder / "adapter", good, "qwen2")
    own = torch.Generator().manual_seed(3)
    a, b = torch.randn(RANK, 16, generator=own), torch.randn(260, RANK, generator=own)
    names = (f"{PREFIX}lm_head.lora_A.weight", f"{PREFIX}lm_head.lora_B.weight")
    save(place / TENSORS, dict(zip(names, (a, b), strict=True)))
    keys(SETTINGS, target_modules=["lm_head"])(place)
    weights = load_file(good / WEIGHTS)
    sound = copied(good, folder / LIKE)
    head = weights["model.embed_tokens.weight"] + ALPHA / RANK * (b @ a)
    save(sound / WEIGHTS, {**weights, "lm_head.weight": head})
    config(tie_word_embeddings=False)(sound)
    return f"{good}+{place}"


make_tied: Make = _tied_head
BASES = (
    _base("base: itself", str),
    _base("base: another adapter, of this one", _other_adapter),
    _base("base: an address", lambda place: "https://example.org/evil"),
    _base("base: of the hub", lambda place: "someone/evil"),
    _base("base: a path that is relative", lambda place: "../base"),
    _base("base: nothing", lambda place: None),
    _base("base: empty", lambda place: ""),
    _base("base: the folder above", lambda place: ".."),
    _base("base: a number", lambda place: 7),
    _base("base: a list", lambda place: ["a"]),
    _base("base: the root", lambda place: "/"),
    _base("base: a file", lambda place: "/etc/passwd"),
    _base("base: a long name", lambda place: "a" * 5000, TOO_LARGE),
    _base("base: a name with a zero", lambda place: "a\0b"),
    _base("base: one with code", _hostile_base),
    _base("base: one that lacks tensors", _halved_base),
    _given("of another family", _other_family),
    _given("a model for an adapter", lambda folder, good, place: f"{good}+{good}"),
    _given("an adapter for a base", lambda folder, good, place: f"{place}+{good}"),
    _given("twice", lambda folder, good, place: f"{good}+{place}+{place}", EITHER),
    _given("nothing for an adapter", lambda folder, good, place: f"{good}+"),
    _given("nothing for a base", lambda folder, good, place: f"+{place}"),
    _given("an adapter that is not there", lambda folder, good, place: f"{good}+{folder / 'no'}"),
    _given("a base that is not there", lambda folder, good, place: f"{folder / 'no'}+{place}"),
    _given("a plus", lambda folder, good, place: "+"),
    Case("adapter: of a head that is tied", "adapter", make_tied, EITHER, family="qwen2"),
)

CASES: tuple[Case, ...] = (*GOOD, *KINDS, *BROKEN, *BASES)
