"""Weights: a lazy mapping name -> tensor over files, modules, adapters, and what a merge computes.

Nothing is read before a tensor is asked for, and files stay mapped: a set of models larger than
the memory can be merged. `specs` (types and shapes) come from headers alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError, DamagedFile, HostileInput, NotFound
from agent_forge.store import files
from agent_forge.store.tensors import (
    MappedTensors,
    Spec,
    read_weights,
    spec_of,
    write_data,
    write_header,
)

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_PREFIX = "base_model.model."
LAYER = re.compile(r"^(|.*?\.)(layers|layer|blocks|block|h)\.(\d+)\.")
TOKEN_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|embedding)\.weight$"
)
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
BEFORE_LAYERS = re.compile(r"embed|wte|wpe|projection")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # as configs call it
EACH_LAYER = ("layer_types", "no_rope_layers")  # lists in a config with an entry for each layer


class Weights(Mapping[str, Tensor]):
    """Tensors by name, read or computed when asked for."""

    def __init__(
        self,
        specs: Mapping[str, Spec],
        get: Callable[[str], Tensor],
        *,
        label: str = "memory",
        config: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        sources: Sequence[Path] = (),
    ) -> None:
        self.specs = dict(specs)
        self._get = get
        self.label = label
        self.config = dict(config or {})
        self.folder = folder
        self._by_layer: dict[int | None, list[str]] | None = None
        self.sources = tuple(sources)  # the files that the tensors come from

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.specs:
            raise KeyError(name)
        return self._get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def parameters(self) -> int:
        return sum(spec.numel for spec in self.specs.values())

    def by_layer(self) -> dict[int | None, list[str]]:
        """The names of each layer, and under None of those outside the layers."""
        if self._by_layer is None:
            self._by_layer = {}
            for name in self.specs:
                self._by_layer.setdefault(layer_of(name), []).append(name)
        return self._by_layer

    def sha256(self) -> str:
        """One hash of all that the tensors come from; a folder with a manifest is verified."""
        digest = hashlib.sha256()
        if not self.sources:
            for name in sorted(self.specs):
                digest.update(f"{name} {self.specs[name]}".encode())
                flat = self[name].detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
            return digest.hexdigest()
        found = [files.sha256_of(path) for path in self.sources]
        for path, value in zip(self.sources, found, strict=True):
            _compare_with_manifest(path, value)
        return found[0] if len(found) == 1 else _joined(found)


def _joined(hashes: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _compare_with_manifest(path: Path, found: str) -> None:
    if not (path.parent / files.MANIFEST).is_file():
        return
    record = files.verify(path.parent, content=False).get(path.name)
    if record is not None and record["sha256"] != found:
        raise DamagedFile(path, f"sha256 {found[:12]}..., expected {record['sha256'][:12]}...")


# -- names ----------------------------------------------------------------------------------------


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for those outside the layers."""
    match = LAYER.match(name)
    return int(match.group(3)) if match else None


def at_layer(name: str, layer: int) -> str:
    """The same tensor in another layer."""
    return LAYER.sub(lambda m: f"{m.group(1)}{m.group(2)}.{layer}.", name, count=1)


def layer_count(weights: Weights) -> int:
    return 1 + max((n for n in weights.by_layer() if n is not None), default=-1)


def with_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The config of a model that has these layers of another one, in this order."""
    found = {key: len(layers) if key in DEPTHS else value for key, value in config.items()}
    for key in EACH_LAYER:
        if isinstance(values := found.get(key), list):
            found[key] = [values[min(layer, len(values) - 1)] for layer in layers]
    return found


def is_tied(weights: Weights) -> bool:
    """Whether a model says that its head is its embedding."""
    return bool(weights.config.get("tie_word_embeddings"))


# -- opening --------------------------------------------------------------------------------------


def open_weights(place: str | Path) -> Weights:
    """A model folder or file; `base+adapter` puts a LoRA adapter on a base."""
    text = str(place)
    path = Path(text).expanduser()
    if not path.exists() and "+" in text:
        base, _, adapter = text.rpartition("+")
        return adapt(open_weights(base), Path(adapter).expanduser())
    if not path.exists():
        raise NotFound(f"{text} does not exist", hint="a model is a folder or file on this machine")
    if path.is_file():
        return _opened(text, path.parent, {"": path})
    if (path / ADAPTER).is_file():
        return adapt(_base_of_adapter(path), path)
    for name in (INDEX[0], SINGLE[0], INDEX[1], SINGLE[1]):
        if (path / name).is_file():
            single = {"": path / name}
            return _opened(text, path, _indexed(path / name) if name in INDEX else single)
    raise NotFound(f"{text} holds no weights", hint=f"it needs one of {', '.join(SINGLE + INDEX)}")


def from_memory(model: nn.Module | Mapping[str, Tensor], label: str = "memory") -> Weights:
    """A module or state dict as weights."""
    if isinstance(model, Weights):
        return model
    state = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    specs = {name: spec_of(tensor) for name, tensor in state.items()}
    return Weights(specs, lambda name: state[name].detach(), label=label)


def _indexed(index: Path) -> dict[str, Path]:
    """Tensor name -> shard, from an index file that may name nothing outside its folder."""
    content = files.read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise DamagedFile(index, "not an index of shards")
    for shard in set(table.values()):
        if Path(shard).name != shard:
            raise HostileInput(f"{index} names {shard!r}, which is outside its folder")
        if not (index.parent / shard).is_file():
            raise DamagedFile(index.parent / shard, "missing, but the index names it")
    return {name: index.parent / shard for name, shard in table.items()}


def _opened(label: str, folder: Path, where: dict[str, Path]) -> Weights:
    shards: dict[Path, Mapping[str, Tensor]] = {}
    specs: dict[str, Spec] = {}
    place: dict[str, Path] = {}
    for path in sorted(set(where.values())):
        shards[path] = content = _open_file(path)
        wanted = content if "" in where else [name for name in where if where[name] == path]
        for name in wanted:
            if name not in content:
                raise DamagedFile(path, f"tensor {name!r} is missing, but the index names it")
            known = content.specs if isinstance(content, MappedTensors) else None
            specs[name] = known[name] if known else spec_of(content[name])
            place[name] = path
    config_file = folder / "config.json"
    config = files.read_json(config_file) if config_file.is_file() else {}
    if not isinstance(config, dict):
        raise DamagedFile(config_file, "not a record")
    bare = config.get("model_type") == "gpt2" and any(name.startswith("h.") for name in specs)
    prefix = "transformer." if bare else ""  # the first GPT-2 files name tensors without it
    return Weights(
        {prefix + name: spec for name, spec in specs.items()},
        lambda name: shards[place[name.removeprefix(prefix)]][name.removeprefix(prefix)],
        label=label,
        config=config,
        folder=folder,
        sources=sorted(shards),
    )


def _open_file(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        return MappedTensors(path)
    return read_weights(path, mapped=True)


# -- adapters -------------------------------------------------------------------------------------


def _base_of_adapter(folder: Path) -> Weights:
    base = str(_adapter_settings(folder).get("base_model_name_or_path") or "")
    if not base or not Path(base).exists():
        raise NotFound(
            f"{folder} is an adapter for {base or 'an unnamed base'}, which is not on this machine",
            hint=f"name the base as well: BASE+{folder}",
        )
    return open_weights(base)


def _adapter_settings(folder: Path) -> dict[str, Any]:
    settings = files.read_json(folder / ADAPTER)
    if not isinstance(settings, dict):
        raise DamagedFile(folder / ADAPTER, "not a record")
    return settings


def adapt(base: Weights, folder: Path) -> Weights:
    """A base with a LoRA adapter on it: W + scale * B A, computed when a tensor is asked for."""
    if not (folder / ADAPTER).is_file():
        raise NotFound(f"{folder} has no {ADAPTER}", hint="name a LoRA adapter's folder")
    settings = _adapter_settings(folder)
    path = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if path is None:
        raise DamagedFile(folder, f"it has none of {', '.join(ADAPTER_FILES)}")
    for key in ("use_dora", "alpha_pattern", "rank_pattern", "megatron_config"):
        if settings.get(key):
            raise ConfigError(f"{folder}: {key!r} of an adapter is not supported")
    if str(settings.get("peft_type", "LORA")).upper() != "LORA":
        raise ConfigError(f"{folder}: only LoRA adapters are supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not (isinstance(rank, int | float) and rank > 0 and isinstance(alpha, int | float)):
        raise DamagedFile(folder / ADAPTER, "r and lora_alpha have to be numbers, and r above 0")
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    turned = bool(settings.get("fan_in_fan_out"))
    pairs, replaced = _split_adapter(base, _open_file(path), path)
    for name in (*pairs, *replaced):
        a, b = (pairs[name][half].shape for half in "AB") if name in pairs else ((), ())
        update = (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else ()
        shape = tuple(replaced[name].shape) if name in replaced else update[:: -1 if turned else 1]
        if shape != base.specs[name].shape:
            raise ConfigError(
                f"{path}: its shapes do not fit {name} of {base.label}",
                hint="put the adapter on the base that it was trained on",
            )

    def get(name: str) -> Tensor:
        if name in replaced:
            return replaced[name].to(base.specs[name].dtype)
        weight = base[name]
        if name not in pairs:
            return weight
        update = scale * (pairs[name]["B"].float() @ pairs[name]["A"].float())
        return (weight.float() + (update.T if turned else update)).to(weight.dtype)

    return Weights(
        base.specs,
        get,
        label=f"{base.label}+{folder}",
        config=base.config,
        folder=base.folder,
        sources=[*base.sources, path] if base.sources else [],
    )


def _split_adapter(
    base: Weights, tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The A and B of each weight, and the weights that the adapter replaces altogether."""
    pairs: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(ADAPTER_PREFIX).replace(".modules_to_save.", ".")
        match = re.fullmatch(r"(.*)\.lora_([AB])(?:\.default)?\.weight", name)
        target = f"{match.group(1)}.weight" if match else name
        if target not in base.specs:
            raise ConfigError(f"{path}: {key!r} has no counterpart in {base.label}")
        if match:
            pairs.setdefault(target, {})[match.group(2)] = tensor
        else:
            replaced[target] = tensor
    for name, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise DamagedFile(path, f"one half of the update of {name!r} is missing")
    return pairs, replaced


# -- writing --------------------------------------------------------------------------------------


def shards_of(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, list[str]]:
    """File name -> the tensors in it, filled in order up to `shard_bytes` each."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    n = len(shards)
    if n == 1:
        return {SINGLE[0]: shards[0]}
    return {f"model-{i:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(shards, 1)}


def writing_shards(
    stage: files.Stage, specs: Mapping[str, Spec], shard_bytes: int
) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    """Write a model tensor by tensor: yields each name with the function that takes its tensor."""
    shards = shards_of(specs, shard_bytes)
    for file, names in shards.items():
        with stage.writing(file) as writer:
            part = {name: specs[name] for name in names}
            for name in write_header(writer, part, {"format": "pt"}):
                yield name, partial(write_data, writer)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        table = {name: file for file, names in shards.items() for name in names}
        stage.write_json(INDEX[0], {"metadata": {"total_size": total}, "weight_map": table})
