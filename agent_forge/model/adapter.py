"""LoRA adapters as peft writes them: W + scale * B A, computed when a tensor is asked for; with
DoRA every output of that then has the length that was learned for it.

Only what gives the weights of peft's `merge_and_unload` is read; all else is refused by name. Some
initialisations (PiSSA, OLoRA, LoftQ ...) change the base as well: its file gives another model.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import regex
from torch import Tensor

from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.model import weights
from agent_forge.model.weights import INDEX, NAMES, SINGLE, Weights
from agent_forge.store import files

SETTINGS = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
LENGTHS = "magnitude_vector"
_ENDS = r"(?:\.default)?(?:\.weight)?"
PART = re.compile(rf"(.*)\.lora_(?:([AB])(?:\.default)?\.weight|({LENGTHS}){_ENDS})")
BETWEEN = re.compile(r"\.(modules_to_save|base_layer)\.")  # where peft puts a weight of the base
EMBEDDING = re.compile(r"(^|\.)(embed_\w+|\w*embeddings?|embed_in|wte|wpe)$")  # no linear layers
UNCHANGED_BASE = (None, True, False, "gaussian", "eva")  # initialisations that leave the base alone
TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt")  # architectures whose layers are Conv1D
# Settings that are handled here, or that say how the adapter was trained and not what it is.
KNOWN = NAMES["adapter_settings"]
MERGE_FIRST = "merge it into its base with peft (merge_and_unload), and give the merged model"


def is_adapter(folder: Path) -> bool:
    """True if the folder holds an adapter; one with a whole model beside it says two things."""
    there = (folder / SETTINGS).is_file()
    if there and any((folder / name).is_file() for name in (*SINGLE, *INDEX)):
        hint = "give the model and the adapter as two folders: MODEL+ADAPTER"
        raise ConfigError(f"{folder} holds a whole model and an adapter", hint=hint)
    return there


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter, after a check that all of them are understood."""
    if not is_adapter(folder):
        raise NotFound(f"{folder} has no {SETTINGS}", hint="name a LoRA adapter's folder")
    settings = files.read_json(folder / SETTINGS)
    if not isinstance(settings, dict):
        raise DamagedFile(folder / SETTINGS, "not a record")
    if str(settings.get("peft_type", "LORA")).upper() != "LORA":
        raise ConfigError(f"{folder}: only LoRA adapters are supported")
    for key, value in settings.items():
        if value and key not in KNOWN:
            raise ConfigError(f"{folder}: {key!r} of an adapter is not supported", hint=MERGE_FIRST)
    for key in ("modules_to_save", "layers_pattern"):
        value = settings.get(key)
        texts = value if isinstance(value, list) else [value or ""]
        if not all(isinstance(text, str) for text in texts):
            raise DamagedFile(folder / SETTINGS, f"{key} is {str(value)[:60]}")
    start = settings.get("init_lora_weights")
    if not isinstance(start, str | bool | None) or start not in UNCHANGED_BASE:
        problem = f"{folder}: init_lora_weights {start!r} changed the base as well"
        raise ConfigError(problem, hint=MERGE_FIRST)
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise DamagedFile(folder / SETTINGS, f"{key} is {value!r}, a number above 0 is needed")
    return settings


def adapt(base: Weights, folder: Path) -> Weights:
    settings = read_settings(folder)
    mine, own = _tokenizer(base.folder) if base.folder else {}, _tokenizer(folder)
    if others := [n for n, value in own.items() if value not in (None, mine.get(n, value))]:
        hint = "copy the tokenizer files that are right into a copy of the base, and give that"
        raise ConfigError(f"{folder} has another {others[0]} than its base", hint=hint)
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise DamagedFile(folder, f"it has none of {', '.join(FILES)}")
    rank = settings["r"]
    scale: float = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    tensors = weights.open_file(path)
    pairs, lengths, replaced = _split(base, tensors, path)
    _refuse_others(base, tensors, set(pairs), settings, path)
    for name, (a, b) in pairs.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise DamagedFile(path, f"the update of {name} does not have the rank {rank} of its r")
    for name in pairs if settings.get("use_dora") else lengths:
        if name not in lengths or lengths[name].shape != pairs[name][1].shape[:1]:
            raise DamagedFile(path, f"use_dora does not fit the lengths of {name}")
        if EMBEDDING.search(name.removesuffix(".weight")) or not settings.get("use_dora"):
            problem = f"{path}: the lengths of {name} are not those of a linear layer's DoRA"
            raise ConfigError(problem, hint=MERGE_FIRST)
    for module in settings.get("modules_to_save") or []:
        if not any(f".{module}." in f".{name}" for name in replaced):
            raise DamagedFile(path, f"{module!r} of modules_to_save is not in it")
    # Stored as inputs x outputs; as in peft the architecture counts, not the word in the settings.
    kind, said = base.config.get("model_type"), settings.get("fan_in_fan_out")
    conv1d = {n for n in pairs if kind in TRANSPOSED and weights.layer_of(n) is not None}
    turned = conv1d if kind is not None else {*pairs} if said else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in replaced.items()}
    for name, (a, b) in pairs.items():
        shapes[name] = (b.shape[0], a.shape[1])[:: -1 if name in turned else 1]
    for name, shape in shapes.items():
        if shape != base.specs[name].shape:
            problem = f"{path}: its shapes do not fit {name} of {base.label}"
            raise ConfigError(problem, hint="put the adapter on the base that it was trained on")
    twice = [name for name in shapes if weights.is_vocabulary(name)]
    if twice and weights.is_tied(base):
        problem = f"{path} changes {twice[0]}, which {base.label} uses as embedding and as head"
        raise ConfigError(problem, hint=MERGE_FIRST)

    def get(name: str) -> Tensor:
        weight = base[name] if name not in replaced else replaced[name].to(base.specs[name].dtype)
        if name not in pairs:
            return weight
        a, b = pairs[name]
        update = scale * (b.float() @ a.float())
        whole: Tensor = weight.float() + (update.T if name in turned else update)
        if name in lengths:
            outputs = whole.T if name in turned else whole
            outputs.mul_((lengths[name].float() / outputs.norm(dim=1))[:, None])
        return whole.to(weight.dtype)

    sources = (*base.sources, path) if base.sources else ()
    return base.derived(get, label=f"{base.label}+{folder}", sources=sources)


def _tokenizer(folder: Path) -> dict[str, Any]:
    """What the tokenizer files of a folder say about how a text is read."""
    names = ("tokenizer.json", "tokenizer_config.json")
    whole, config = (files.read_json(p) if (p := folder / n).is_file() else {} for n in names)
    path = folder / "chat_template.jinja"
    said = config if isinstance(config, dict) else {}
    try:
        chat = path.read_text("utf-8") if path.is_file() else said.get("chat_template")
    except UnicodeDecodeError as error:
        raise DamagedFile(path, f"it is not UTF-8 ({error.reason})") from error
    keys = {"vocabulary": "model", "list of added tokens": "added_tokens"}
    known = keys.items() if isinstance(whole, dict) else ()
    return {n: whole[key] for n, key in known if key in whole} | {"chat template": chat}


def _split(
    base: Weights, tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """The A and B of each weight, DoRA's lengths, and what the adapter replaces altogether."""
    halves: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DamagedFile(path, f"{key!r} holds no weights but whole numbers")
        if not key.startswith(PREFIX):  # peft would leave it out
            raise DamagedFile(path, f"{key!r} does not begin with {PREFIX!r}")
        name = BETWEEN.sub(".", key.removeprefix(PREFIX))
        match = PART.fullmatch(name)
        target = f"{match.group(1)}.weight" if match else name
        if target not in base.specs:
            raise ConfigError(f"{path}: {key!r} has no counterpart in {base.label}")
        own = (match[2] or match[3]) if match else target
        place = halves.setdefault(target, {}) if match else replaced
        if own in place:
            raise DamagedFile(path, f"{key!r} and another one are the same tensor")
        place[own] = tensor
    if not tensors:
        raise DamagedFile(path, "it holds no tensors")
    lengths = {n: pair.pop(LENGTHS) for n, pair in halves.items() if LENGTHS in pair}
    for name, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise DamagedFile(path, f"one half of the update of {name!r} is missing")
        if f"{PREFIX}{name}" in tensors:  # peft would leave it out
            raise DamagedFile(path, f"it holds an update of {name!r}, and {name!r} itself")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}, lengths, replaced


def _refuse_others(
    base: Weights, tensors: Iterable[str], updated: set[str], settings: dict[str, Any], path: Path
) -> None:
    """Refuse tensors that the settings do not call for, and layers without their update."""
    # peft passes over both in silence, so that the numbers would be those of another model.
    named = {
        name
        for name, spec in base.specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2
        if _is_target(name.removesuffix(".weight"), settings, path.with_name(SETTINGS))
    }
    for name in sorted(updated - named):
        raise DamagedFile(path, f"it holds an update of {name}, which {SETTINGS} does not name")
    for key in (key for key in tensors if ".lora_" not in key):  # weights of the base
        between = BETWEEN.search(key)
        module = BETWEEN.sub(".", key.removeprefix(PREFIX)).rpartition(".")[0]
        wrapped, kind = f"{module}.weight" in named, between and between[1]
        if wrapped != (kind == "base_layer") or (
            kind == "modules_to_save" and not _is_kept(module, settings)
        ):
            raise DamagedFile(path, f"peft leaves out {key!r}: {SETTINGS} does not call for it")
    every_layer = str(settings.get("target_modules")).lower() == "all-linear"
    for name in sorted(named - updated):
        # Experts may be one tensor in transformers; of all linear layers some may be no module.
        if ".experts." not in name and not every_layer:
            raise DamagedFile(path, f"it has no update of {name}, which {SETTINGS} names")


def _is_kept(module: str, settings: dict[str, Any]) -> bool:
    """True if an adapter has a whole module of its own in place of this one."""
    return any(f".{kept}." in f".{module}." for kept in settings.get("modules_to_save") or ())


def _is_target(module: str, settings: dict[str, Any], path: Path) -> bool:
    """True if peft would put an update on a layer."""
    targets: Any = settings.get("target_modules")
    layers = settings.get("layers_to_transform")
    if _matches(settings.get("exclude_modules") or (), module, path) or _is_kept(module, settings):
        return False
    if str(targets).lower() == "all-linear":
        return not (EMBEDDING.search(module) or weights.HEAD.search(f"{module}.weight"))
    if not _matches(targets, module, path):
        return False
    if isinstance(targets, str) or module in targets or layers is None or layers == []:
        return True
    wanted = layers if isinstance(layers, list) else [layers]
    if not all(isinstance(number, int) for number in wanted):
        raise DamagedFile(path, f"layers_to_transform is {str(layers)[:60]}")
    patterns = settings.get("layers_pattern") or []
    names = [rf"(?:^|.*?\.){p}" for p in ([patterns] if isinstance(patterns, str) else patterns)]
    for name in names or [r".*?\.[^.]*"]:
        if match := _match(rf"{name}\.(?P<layer>\d+)\..*", module, path):
            return int(match["layer"]) in wanted
    return False


def _matches(names: Any, module: str, path: Path) -> bool:
    """True if a layer is among names: a pattern, or a list of whole names or their ends."""
    if isinstance(names, str):
        return _match(names, module, path) is not None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DamagedFile(path, "it does not name the layers as peft does")
    return any(f".{module}".endswith(f".{name}") for name in names)


def _match(pattern: str, text: str, path: Path) -> Any:
    try:
        return regex.fullmatch(pattern, text, timeout=1)
    except (regex.error, TimeoutError) as error:
        raise DamagedFile(path, f"the pattern {pattern[:60]!r} cannot be used: {error}") from error
