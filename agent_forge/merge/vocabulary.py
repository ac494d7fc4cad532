"""Vocabularies that differ: whose tokens the result has, and which row each of them gets.

The vocabulary is read from tokenizer.json (or vocab.json and added_tokens.json). Rows of every
model's embedding and head are put in the order of the new vocabulary. A token that a model lacks
gets the row of the only model that has it, else the base's, else the mean of those that have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_forge.errors import ConfigError, DamagedFile, PathDisappeared
from agent_forge.merge.recipe import Recipe, TokenizerChoice
from agent_forge.model.folder import VOCABULARIES
from agent_forge.model.weights import SETTINGS_FILES, Weights, further_templates, is_vocabulary
from agent_forge.store import files
from agent_forge.store.tensors import TensorSpec

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = [n for n in SETTINGS_FILES if n not in ("config.json", "adapter_config.json")]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


@dataclass(frozen=True)
class Vocabulary:
    """The folder that the tokenizer of the result comes from, and what is added to it."""

    folder: Path | None
    added: dict[str, dict[str, Any]] = field(default_factory=dict)  # by token, as files have it
    size: int = 0  # rows of the embedding


def read_tokens(folder: Path | None) -> dict[str, int] | None:
    """Every token of a model's tokenizer with its id; None if it has no tokenizer."""
    if folder is None:
        return None
    if (folder / TOKENIZER).is_file():
        content = files.read_json(folder / TOKENIZER)
        try:
            words = content["model"]["vocab"]
            if isinstance(words, list):  # unigram: [token, score] in the order of ids
                words = {token: i for i, (token, _) in enumerate(words)}
            added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
            return {str(token): int(i) for token, i in {**words, **added}.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFile(folder / TOKENIZER, f"not a tokenizer ({error!r})") from error
    if (folder / "vocab.json").is_file():
        extra = folder / "added_tokens.json"
        tokens = files.read_json(folder / "vocab.json")
        added = files.read_json(extra) if extra.is_file() else {}
        if not isinstance(tokens, dict) or not isinstance(added, dict):
            raise DamagedFile(folder / "vocab.json", "not a vocabulary")
        return {**tokens, **added}
    return None


def rows_of(weights: Weights) -> int | None:
    return weights.specs[weights.embedding].shape[0] if weights.embedding else None


def align(
    recipe: Recipe, choice: TokenizerChoice, models: Mapping[str, Weights]
) -> tuple[dict[str, Weights], Vocabulary]:
    """The models with their vocabularies made equal, and the vocabulary that they have then."""
    references, source, multiple = recipe.references(), choice.source, choice.pad_to_multiple_of
    base = references[0]  # the first model counts as one if there is no other
    owner = base if source in ("base", "union") else source
    if owner not in references:
        kinds = "neither base nor union nor a model of the merge"
        raise ConfigError(f"tokenizer {source!r} is {kinds}")
    known = {ref: _usable(models[ref]) for ref in references}
    for ref in references:
        folder = models[ref].folder
        unread = folder and any((folder / name).is_file() for name in VOCABULARIES)
        if known[ref] is None and (unread or ref in (base, owner)):
            hint = "leave tokenizer out of the recipe if all vocabularies are equal"
            raise ConfigError(f"{ref} has no {TOKENIZER}: its vocabulary is not known", hint=hint)
    tokens = {ref: own or known[base] or {} for ref, own in known.items()}
    result = dict(tokens[owner])
    added: dict[str, dict[str, Any]] = {}
    if source == "union":
        first = following = max(result.values(), default=-1) + 1
        for ref in references:
            flags = _flags(models[ref].folder)
            for token in sorted(tokens[ref], key=tokens[ref].__getitem__):
                if token not in result:
                    result[token] = following
                    entry = {flag: bool(flags.get(token, {}).get(flag)) for flag in FLAGS}
                    added[token] = {"id": following, "content": token, **entry}
                    following += 1
        # A tokenizer numbers what is added by itself, after all that it has.
        if added and {*(read_tokens(models[owner].folder) or {}).values()} != {*range(first)}:
            problem = f"{owner} has tokens without a row, or numbers without a token"
            hint = "no token can be added to these: name a tokenizer instead of union"
            raise ConfigError(problem, hint=hint)
    n = max(result.values()) + 1
    size = -(-n // (multiple or 1)) * (multiple or 1)
    tables = {ref: torch.full((n,), -1, dtype=torch.long) for ref in references}
    for ref, table in tables.items():  # new id -> the id in a model, -1 where it has no such token
        for token, i in result.items():
            table[i] = tokens[ref].get(token, -1)
    aligned = {ref: _aligned(ref, recipe.base_model, models, tables, size) for ref in references}
    return {**models, **aligned}, Vocabulary(models[owner].folder, added, size)


def _flags(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The tokens that were added to a model's tokenizer, as its file has them."""
    path = folder / TOKENIZER if folder else None
    content = files.read_json(path) if path and path.is_file() else {}
    return {entry["content"]: entry for entry in content.get("added_tokens") or []}


def _usable(weights: Weights) -> dict[str, int] | None:
    """The tokens that have a row in the embedding."""
    tokens, rows = read_tokens(weights.folder), rows_of(weights)
    if tokens is None or rows is None:
        return None
    return {token: i for token, i in tokens.items() if i < rows}


def _aligned(
    ref: str, base: str | None, models: Mapping[str, Weights], tables: dict[str, Tensor], size: int
) -> Weights:
    """A model whose embedding and head have `size` rows, the first ones as the tables say."""
    weights, n = models[ref], len(tables[ref])
    specs = dict(weights.specs)
    for name in filter(is_vocabulary, weights):
        specs[name] = TensorSpec(specs[name].dtype, (size, *specs[name].shape[1:]))

    def get(name: str) -> Tensor:
        if not is_vocabulary(name):
            return weights[name]
        names = {r: models[r].used_as(name) for r in tables}
        tensors = {r: models[r][own] for r, own in names.items() if own}
        missing = tables[ref] < 0
        rows = tensors[ref][tables[ref].clamp(min=0)]
        rows[missing] = _substitutes(tensors, tables, missing, base).to(rows.dtype)
        if size == n:
            return rows
        padding = rows.float().mean(0, keepdim=True).to(rows.dtype)
        return torch.cat([rows, padding.expand(size - n, *rows.shape[1:])])

    return weights.derived(get, specs=specs, config={**weights.config, "vocab_size": size})


def _substitutes(
    tensors: Mapping[str, Tensor], tables: Mapping[str, Tensor], missing: Tensor, base: str | None
) -> Tensor:
    """Rows for tokens that a model lacks: the base's, else the mean of those that have them."""
    width = next(iter(tensors.values())).shape[1:]
    total = torch.zeros(int(missing.sum()), *width)
    count = torch.zeros(len(total))
    for ref, tensor in tensors.items():
        old = tables[ref][missing]
        has = old >= 0
        total[has] += tensor[old[has]].float()
        count[has] += 1
    total /= count.clamp(min=1).reshape(-1, *[1] * len(width))
    if base is not None and base in tensors:
        old = tables[base][missing]
        total[old >= 0] = tensors[base][old[old >= 0]].float()
    return total


def write_tokenizer(
    stage: files.StagedFolder, folder: Path | None, added: Mapping[str, Mapping[str, Any]]
) -> None:
    """Copy a tokenizer; tokens that came from other models are added to it."""
    # Chat templates in a folder of their own come into its config: a model's folder is flat.
    if folder is None:
        return
    if not folder.is_dir():
        raise PathDisappeared(folder, hint="put it back, then run it again")
    templates = further_templates(folder)
    changed = {*([CONFIG, TOKENIZER] if added else []), *([CONFIG, TEMPLATE] if templates else [])}
    for name in TOKENIZER_FILES:
        if (folder / name).is_file() and name not in changed:
            stage.copy(folder / name)
    if not changed:
        return
    config = files.read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if added:
        content = files.read_json(folder / TOKENIZER)
        content["added_tokens"] = [*(content.get("added_tokens") or []), *added.values()]
        stage.write_bytes(TOKENIZER, files.to_json(content, sort_keys=False))
        if isinstance(config.get("added_tokens_decoder"), dict):
            for entry in added.values():
                flags = {key: value for key, value in entry.items() if key != "id"}
                config["added_tokens_decoder"][str(entry["id"])] = flags
    if templates:
        own = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
        paths = {**own, **{path.stem: path for path in templates}}
        config["chat_template"] = [{"name": n, "template": _text(p)} for n, p in paths.items()]
    if config:
        stage.write_bytes(CONFIG, files.to_json(config, sort_keys=False))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "not UTF-8 text") from error
