"""Writing a merged model: a Hugging Face folder that appears whole or not at all.

Beside the weights it holds config.json, the tokenizer, recipe.yml (from which the same bytes can
be made again), the card and a manifest of sha256 sums.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agent_forge import platform
from agent_forge.errors import (
    AlreadyExists,
    ConfigError,
    DamagedFile,
    HostileInput,
    NotEnough,
)
from agent_forge.merge.combos import ALL, combo_name
from agent_forge.merge.engine import TOGETHER_BYTES, Merged, Note, merge, portions
from agent_forge.merge.inputs import RUN
from agent_forge.merge.plan import Parents
from agent_forge.merge.recipe import Recipe, to_yaml
from agent_forge.merge.vocabulary import write_tokenizer
from agent_forge.model.weights import Weights, shards_of, writing_shards
from agent_forge.store import files
from agent_forge.store.places import require_short
from agent_forge.store.tensors import Spec

SHARD_BYTES = 5_000_000_000
SCRATCH_BYTES = 24 * 4 * RUN  # of the arithmetic, for each thread
OVERHEAD_BYTES = 1 << 20
SHOWN = 8  # files in a message
ProgressCallback = Callable[[str, int, int], None]  # tensor, bytes done, bytes in all


@dataclass
class Written:
    """What was written, and what it took."""

    folder: Path
    bytes: int
    seconds: float
    peak_bytes: int  # memory that cannot be given back; mapped files are not in it
    sha256: dict[str, str] = field(default_factory=dict)  # of each file of weights
    notes: list[Note] = field(default_factory=list)


def anonymous_bytes() -> int:
    """Memory of this process without the files that it has mapped."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def lineage(merged: Merged) -> dict[str, dict[str, str]]:
    """The hashes of every parent, as a recipe has them; one that differs from it is an error."""
    models = {ref: merged.plan.models[ref] for ref in merged.recipe.references()}
    weights = {ref: model.sha256() for ref, model in models.items()}
    settings = {ref: model.settings_sha256() for ref, model in models.items() if model.folder}
    _compare(weights, merged.recipe.parents, "sha256")
    what = "its config, tokenizer or adapter settings were changed: sha256"
    _compare(settings, merged.recipe.parents_settings, what)
    return {"parents": weights, "parents_settings": settings}


def _compare(found: Mapping[str, str], expected: Mapping[str, str], what: str) -> None:
    for ref, value in expected.items():
        if ref in found and found[ref] != value:
            raise DamagedFile(ref, f"{what} {found[ref][:12]}..., the recipe says {value[:12]}...")


def write(
    weights: Weights,
    folder: Path,
    *,
    force: bool = False,
    max_ram: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Written:
    """Write weights as a model folder, tensor by tensor; `beside` are further files of it."""
    refuse_existing(folder, weights, force)
    began, peak = time.monotonic(), anonymous_bytes()
    require_room([folder], weights, max_ram)
    recipe = _final_recipe(weights)
    clear_leftovers(folder)
    done = 0
    with contextlib.ExitStack() as claims, files.staging(folder, replace=force) as stage:
        claims.enter_context(claimed(stage.path))  # until it is published
        for name, put in writing_shards(stage, weights.specs, shard_bytes):
            put(weights[name])
            peak = max(peak, anonymous_bytes())
            done += weights.specs[name].nbytes
            if progress:
                progress(name, done, weights.nbytes)
        notes = list(weights.notes) if isinstance(weights, Merged) else []
        _write_rest(stage, weights, recipe, notes)
        for name, content in (beside or {}).items():
            stage.write_bytes(name, content)
        refuse_existing(folder, weights, force)  # another merge may have been faster
    hashes = {name: stage.records[name]["sha256"] for name in shards_of(weights.specs, shard_bytes)}
    return Written(folder, done, time.monotonic() - began, peak, hashes, notes)


def write_combos(
    recipe: Recipe,
    folder: Path,
    *,
    parents: Parents | None = None,
    which: Sequence[int] = ALL,
    force: bool = False,
    max_ram: int | None = None,
    threads: int = 1,
    progress: ProgressCallback | None = None,
) -> dict[int, Written]:
    """Write several combos of the same parents, one folder each, in one pass over the parents."""
    began, peak = time.monotonic(), anonymous_bytes()
    merged = merge(recipe, parents, threads=threads)
    folders = {n: folder / combo_name(n) for n in which}
    for path in folders.values():
        refuse_existing(path, merged, force)
    require_room(list(folders.values()), merged, max_ram)
    hashes = lineage(merged)
    for path in folders.values():
        clear_leftovers(path)
    done = 0

    def notes_of(combo: int) -> list[Note]:
        return [note for note in merged.notes if note.combo == combo]

    with contextlib.ExitStack() as claims, contextlib.ExitStack() as stack:
        stages = {n: stack.enter_context(files.staging(folders[n], replace=force)) for n in which}
        for stage in stages.values():
            claims.enter_context(claimed(stage.path))
        writers = [writing_shards(stages[n], merged.specs, SHARD_BYTES) for n in which]
        for puts in zip(*writers, strict=True):
            name = puts[0][0]
            for group in portions(which, merged.specs[name].nbytes, _room(max_ram)):
                versions = merged.combos(name, group)
                peak = max(peak, anonymous_bytes())
                for n in group:
                    puts[list(which).index(n)][1](versions.pop(n))
            done += merged.specs[name].nbytes
            if progress:
                progress(name, done * len(which), merged.nbytes * len(which))
        for n in which:
            own = {"combo": n, **hashes, "layers": merged.chosen_layers(n)}
            single = recipe.model_copy(update=own)
            _write_rest(stages[n], merged, single, notes_of(n))
        for path in folders.values():
            refuse_existing(path, merged, force)  # another merge may have been faster
    seconds = time.monotonic() - began
    return {
        n: Written(
            folders[n],
            done,
            seconds,
            peak,
            {f: stages[n].records[f]["sha256"] for f in shards_of(merged.specs, SHARD_BYTES)},
            notes_of(n),
        )
        for n in which
    }


def _room(max_ram: int | None) -> int:
    return TOGETHER_BYTES if max_ram is None else min(TOGETHER_BYTES, max_ram - anonymous_bytes())


def refuse_existing(folder: Path, weights: Weights, force: bool) -> None:
    """Refuse to replace what is there unless told to, and all that we did not write ourselves.

    A folder in a parent, and one that a parent or the current folder lies in, is always refused.
    """
    require_short(folder)
    models = list(weights.plan.models.values()) if isinstance(weights, Merged) else [weights]
    kept = {m.folder for m in models if m.folder} | {p.parent for m in models for p in m.sources}
    kept |= {p.resolve().parent for m in models for p in m.sources}  # a file may be a link
    here, other = folder.resolve(), "name another folder"
    for what, places in (("a parent of this merge", kept), ("the current folder", {Path.cwd()})):
        for place in (p.resolve() for p in places):
            inside = place in here.parents and places is kept
            if here == place or here in place.parents or inside:
                relation = "is" if here == place else "lies in" if inside else "holds"
                raise ConfigError(f"{folder} {relation} {what}", hint=other)
    if folder.name in ("", ".."):
        raise ConfigError(f"{folder} is not the name of a folder to write", hint=other)
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise AlreadyExists(f"{folder} exists", hint="name another folder, or replace it: --force")
    refuse_foreign(folder)


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace anything but an empty folder and a model as it was written here."""
    if folder.is_symlink() or not folder.is_dir():
        raise AlreadyExists(f"{folder} is no folder, so it is not replaced")
    there = {path.name for path in folder.iterdir()}
    own: set[str] = set()
    if files.MANIFEST in there:
        with contextlib.suppress(DamagedFile, HostileInput):  # changed: all of it may be someone's
            own = {*files.verify(folder), files.MANIFEST}
    if strange := sorted(there - own):
        listed = ", ".join(strange[:SHOWN]) + (" ..." if len(strange) > SHOWN else "")
        raise AlreadyExists(
            f"{folder} is not replaced: it holds what was not written here ({listed})",
            hint="name another folder, or move these files away",
        )


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the lock of an unfinished folder, which says that its writer lives."""
    fd = _open_folder(folder)
    try:
        if fd is not None:
            platform.try_lock(fd)
        yield
    finally:
        if fd is not None:
            os.close(fd)


def clear_leftovers(folder: Path) -> None:
    """Remove what a merge into this folder left behind when it was killed."""
    own = re.compile(rf"{re.escape(files.TEMP)}[0-9a-f]{{8}}-{re.escape(folder.name)}")
    there = folder.parent.iterdir() if folder.parent.is_dir() else []
    for path in [entry for entry in there if own.fullmatch(entry.name)]:
        fd = _open_folder(path)
        if fd is not None:
            if platform.try_lock(fd):
                files.remove_tree(path, folder.parent)
            os.close(fd)


def _open_folder(folder: Path) -> int | None:
    with contextlib.suppress(OSError):  # Windows has no such descriptors; leftovers stay there
        return os.open(folder, os.O_RDONLY | platform.NO_FOLLOW)
    return None


def need_bytes(specs: Mapping[str, Spec], threads: int = 1) -> int:
    """Memory that a merge takes beside what the process has already."""
    largest = max((spec.nbytes for spec in specs.values()), default=0)
    return largest + threads * SCRATCH_BYTES


def require_room(folders: Sequence[Path], weights: Weights, max_ram: int | None) -> None:
    """Refuse what the disk or the memory cannot hold, before any work."""
    files.require_space(folders[0], len(folders) * (weights.nbytes + OVERHEAD_BYTES))
    needed = anonymous_bytes() + need_bytes(weights.specs)
    if max_ram is not None and needed > max_ram:
        raise NotEnough(
            f"this merge takes about {needed / 1e6:.0f} MB of memory,"
            f" {max_ram / 1e6:.0f} MB are allowed",
            hint="the largest tensor has to fit; raise --max-ram",
        )


# -- the files beside the weights -----------------------------------------------------------------


def _final_recipe(weights: Weights) -> Recipe | None:
    """The recipe with all that is needed to make the same bytes again."""
    if not isinstance(weights, Merged):
        return None
    update: dict[str, object] = {**lineage(weights)}
    if weights.recipe.combo is not None:
        update["layers"] = weights.chosen_layers(weights.recipe.combo)
    return weights.recipe.model_copy(update=update)


def _write_rest(
    stage: files.StagedFolder, weights: Weights, recipe: Recipe | None, notes: Sequence[Note]
) -> None:
    if weights.config:
        stage.write_bytes("config.json", files.to_json(weights.config, sort_keys=False))
    if recipe is None and weights.folder is not None:
        write_tokenizer(stage, weights.folder, {})
    if recipe is not None and isinstance(weights, Merged):
        vocabulary = weights.plan.vocabulary
        first = weights.plan.models[recipe.references()[0]].folder
        owner = vocabulary.folder if vocabulary else first
        write_tokenizer(stage, owner, vocabulary.added if vocabulary else {})
        stage.write_bytes("recipe.yml", to_yaml(recipe).encode())
        stage.write_bytes("README.md", card(weights, recipe, notes).encode())


def card(weights: Weights, recipe: Recipe, notes: Sequence[Note]) -> str:
    """The model card: what was merged, how, and from which bytes."""
    how = recipe.merge_method if recipe.combo is None else combo_name(recipe.combo)
    lines = [
        *("---", "library_name: transformers", "tags:", "- merge", "---"),
        *("# Merged model", ""),
        f"Merged with agent-forge: **{how}**, seed {recipe.seed},"
        f" {weights.parameters:,} parameters.",
        *("", "| parent | sha256 of its weights |", "|---|---|"),
        *(f"| `{ref}` | `{digest}` |" for ref, digest in recipe.parents.items()),
        *("", "`forge merge recipe.yml OUT` makes the same bytes again from the same parents:"),
        *("", "```yaml", to_yaml(recipe).rstrip(), "```", ""),
    ]
    if notes:
        lines += ["Replaced by the plain mean of the parents, because the method gave"]
        lines += ["", *(f"- {note.problem}: `{note.name}`" for note in notes), ""]
    return "\n".join(lines)
