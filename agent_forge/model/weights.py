"""Weights: a lazy mapping name -> tensor over files, modules, adapters, and what a merge computes.

Files stay mapped: a set of models larger than the memory can be merged.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.errors import DamagedFile, HostileInput
from agent_forge.quant.packed import KEY, packing_of
from agent_forge.store import files, tensors
from agent_forge.store.tensors import TensorSpec, spec_of

NAMES: dict[str, Any] = files.read_json(Path(__file__).with_name("names.json"))
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
LAYER = re.compile(r"^(|.*?\.)(layers|layer|blocks|block|h)\.(\d+)\.")
TOKEN_EMBEDDING = re.compile(r"(^|\.)(embed(_tokens|_in|ding)|word_embeddings|wte)\.weight$")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# GPT-NeoX calls its head embed_out, LFM2 its last norm embedding_norm.
BEFORE_LAYERS = re.compile(r"embed(?!_out|ding_norm)|wte|wpe|project_in|(?<!output_)projection")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # as configs call it
# Files beside the weights that change what a model computes; an adapter has settings of its own.
SETTINGS_FILES = NAMES["settings_files"]
TEMPLATES = "additional_chat_templates"  # a folder of further ones; its `default` comes first
# Lists in a config with an entry for each layer; GPT-Neo has its own in a form of its own.
EACH_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "indexer_types")


@dataclass(eq=False, repr=False)
class Weights(Mapping[str, Tensor]):
    """Tensors by name, read or computed when asked for."""

    specs: dict[str, TensorSpec]
    tensor_of: Callable[[str], Tensor]
    label: str = "memory"
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    sources: Sequence[Path] = ()  # the files that the tensors come from

    def derived(self, tensor_of: Callable[[str], Tensor], **changes: Any) -> Weights:
        """Weights of the same model with other tensors; `changes` are arguments of Weights."""
        same = {field.name: getattr(self, field.name) for field in fields(Weights)}
        return Weights(**{**same, "tensor_of": tensor_of, **changes})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.specs:
            raise KeyError(name)
        return self.tensor_of(name)

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

    @cached_property
    def by_layer(self) -> dict[int | None, list[str]]:
        """The names of each layer, and under None of those outside the layers."""
        names: dict[int | None, list[str]] = defaultdict(list)
        for name in self.specs:
            names[layer_of(name)].append(name)
        return names

    @cached_property
    def embedding(self) -> str:
        """The name of the token embedding; empty if there is none."""
        return next(filter(TOKEN_EMBEDDING.search, self.specs), "")

    @cached_property
    def head(self) -> str:
        """The name of the head; empty if there is none."""
        return next(filter(HEAD.search, self.specs), "")

    def used_as(self, name: str) -> str:
        """The tensor that is used as `name`: a tied head is the embedding; empty if none is."""
        tied = HEAD.search(name) and self.config.get("tie_word_embeddings") is not False
        return name if name in self.specs else self.embedding if tied else ""

    def sha256(self) -> str:
        """One hash of all that the tensors come from; a folder with a manifest is verified."""
        digest = hashlib.sha256()
        if not self.sources:
            for name in sorted(self.specs):
                digest.update(f"{name} {self.specs[name]}".encode())
                flat = self[name].detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
            return digest.hexdigest()
        hashes = self.verify()
        digest.update(" ".join(hashes).encode())
        return hashes[0] if len(hashes) == 1 else digest.hexdigest()

    def settings_files(self) -> list[tuple[str, Path]]:
        """The files beside the weights that change what the model computes, by name."""
        folders = [*([self.folder] if self.folder else []), *(p.parent for p in self.sources)]
        found = []
        for folder in dict.fromkeys(folders):
            further = [f"{TEMPLATES}/{path.name}" for path in further_templates(folder)]
            named = ((name, folder / name) for name in (*SETTINGS_FILES, *further))
            found += [(name, path) for name, path in named if path.is_file()]
        return found

    def settings_sha256(self) -> str:
        """One hash of these files."""
        lines = (f"{name} {files.sha256_of(path)}\n" for name, path in self.settings_files())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def verify(self) -> list[str]:
        """The sha256 of every file; one that differs from the manifest beside it is damaged."""
        hashes = []
        for path in self.sources:
            manifest = (path.parent / files.MANIFEST).is_file()
            records = files.verify(path.parent, content=False) if manifest else {}
            hashes.append(checked_sha256(path, records.get(path.name)))
        return hashes


def further_templates(folder: Path) -> list[Path]:
    """The chat templates of a model that are files of their own in a folder."""
    return sorted(path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file())


def checked_sha256(path: Path, record: Mapping[str, Any] | None) -> str:
    """The sha256 of a file; one that differs from the record in a manifest is damaged."""
    sha256 = files.sha256_of(path)
    if record is not None and record["sha256"] != sha256:
        raise DamagedFile(path, f"sha256 {sha256[:12]}..., expected {record['sha256'][:12]}...")
    return sha256


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for those outside the layers."""
    match = LAYER.match(name)
    return int(match.group(3)) if match else None


def at_layer(name: str, layer: int) -> str:
    return LAYER.sub(lambda m: f"{m.group(1)}{m.group(2)}.{layer}.", name, count=1)


def layer_count(weights: Weights) -> int:
    return 1 + max((n for n in weights.by_layer if n is not None), default=-1)


def with_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The config of a model that has these layers of another one, in this order."""
    # Where the layers are of several kinds the config says so for each, also if it did not before:
    # what transformers takes for granted goes by the number of a layer.
    from agent_forge.model.load import layer_kinds  # loads transformers, which takes seconds

    new = {key: len(layers) if key in DEPTHS else value for key, value in config.items()}
    granted = layer_kinds(config, computed=False)
    for key in EACH_LAYER:
        values = new.get(key) or granted.get(key)
        if isinstance(values, list) and (key in config or len({*map(str, values)}) > 1):
            new[key] = [values[min(layer, len(values) - 1)] for layer in layers]
    if "attention_types" in new and (kinds := granted.get("attention_layers")):
        new["attention_types"] = [[[kinds[layer] for layer in layers], 1]]
        new.pop("attention_layers", None)
    return new


def is_tied(weights: Weights) -> bool:
    """True if the head of a model is its embedding: its file holds no other one."""
    # Some architectures are tied without a word in their config: then the file counts.
    said = weights.config.get("tie_word_embeddings")
    head, embedding = weights.head, weights.embedding
    if not weights.config or said is False or (said is None and head):
        return False
    return not (head and embedding) or torch.equal(weights[head], weights[embedding])


def is_vocabulary(name: str) -> bool:
    """True for the embedding, the head and its bias, which have a row for each token."""
    return bool(TOKEN_EMBEDDING.search(name) or HEAD.search(name.replace(".bias", ".weight")))


def with_same_heads(models: Sequence[Weights]) -> list[Weights]:
    """The same models; where only some have a head of their own, all get one."""
    tied = [is_tied(weights) for weights in models]
    if all(tied) or not any(tied):
        return list(models)
    head = next(weights.head for weights in models if weights.head)

    def untied(weights: Weights) -> Weights:
        """A tied model with its embedding as its head."""
        return weights.derived(
            lambda name: weights[weights.embedding if name == head else name],
            specs={**weights.specs, head: weights.specs[weights.embedding]},
            config={**weights.config, "tie_word_embeddings": False},
        )

    return [untied(w) if is_one else w for w, is_one in zip(models, tied, strict=True)]


def from_memory(model: nn.Module | Mapping[str, Tensor], label: str = "memory") -> Weights:
    if isinstance(model, Weights):
        return model
    state = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    specs = {name: spec_of(tensor) for name, tensor in state.items()}
    return Weights(specs, lambda name: state[name].detach(), label=label)


def read_index(index: Path) -> dict[str, Path]:
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


def read_shards(label: str, file: Path) -> Weights:
    """The weights in a file or in the shards of an index, read when asked for."""
    where = read_index(file) if file.name in INDEX else {"": file}
    shards: dict[Path, Mapping[str, Tensor]] = {}
    specs: dict[str, TensorSpec] = {}
    place: dict[str, Path] = {}
    for path in sorted(set(where.values())):
        shards[path] = content = open_file(path)
        wanted = content if "" in where else [name for name in where if where[name] == path]
        for name in wanted:
            if name not in content:
                raise DamagedFile(path, f"tensor {name!r} is missing, but the index names it")
            headers = content.specs if isinstance(content, tensors.MappedTensors) else None
            specs[name] = headers[name] if headers else spec_of(content[name])
            place[name] = path
        if extra := sorted(set(content) - set(wanted)):
            raise DamagedFile(path, f"tensor {extra[0]!r} is in it, but the index does not say so")
    config_file = file.with_name("config.json")
    config = files.read_json(config_file) if config_file.is_file() else {}
    if not isinstance(config, dict):
        raise DamagedFile(config_file, "not a record")
    stem = "transformer."  # the first GPT-2 files name tensors without it
    bare = config.get("model_type") == "gpt2" and any(name.startswith("h.") for name in specs)
    bare = bare and not any(name.startswith(stem) for name in specs)
    names = {stem + n if bare and not HEAD.search(n) else n: n for n in specs}
    weights = Weights(
        {name: specs[old] for name, old in names.items()},
        lambda name: shards[place[names[name]]][names[name]],
        label=label,
        config=config,
        folder=file.parent,
        sources=tuple(sorted(shards)),
    )
    return decoded(weights)


def decoded(weights: Weights) -> Weights:
    """The weights of a packed model, each decoded when it is asked for; others as they are."""
    if (packing := packing_of(weights.config, weights.label)) is None:
        return weights
    specs = {
        name: TensorSpec(torch.float32, matrix.shape) if matrix else weights.specs[name]
        for name in packing.names(weights.specs, weights.label)
        for matrix in [packing.matrices.get(name)]
    }
    config = {key: value for key, value in weights.config.items() if key != KEY}
    of = partial(packing.tensor, stored=weights, place=weights.label)
    return weights.derived(of, specs=specs, config=config)


def open_file(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file; a pickle is read as data alone, never run."""
    safe = path.suffix == ".safetensors"
    return tensors.MappedTensors(path) if safe else tensors.read_weights(path, mapped=True)


def shards_of(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, list[str]]:
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
    stage: files.StagedFolder, specs: Mapping[str, TensorSpec], shard_bytes: int
) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    """Write a model tensor by tensor: yields each name with the function that takes its tensor."""
    shards = shards_of(specs, shard_bytes)
    for file, names in shards.items():
        with stage.writing(file) as writer:
            part = {name: specs[name] for name in names}
            for name in tensors.write_header(writer, part, {"format": "pt"}):
                yield name, partial(tensors.write_data, writer)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        table = {name: file for file, names in shards.items() for name in names}
        stage.write_json(INDEX[0], {"metadata": {"total_size": total}, "weight_map": table})
