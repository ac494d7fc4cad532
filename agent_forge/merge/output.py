"""Writing a merged model: a Hugging Face folder that appears whole or not at all.

Beside the weights it holds config.json, the tokenizer, recipe.yml (from which the same bytes can
be made again), the card and a manifest of sha256 sums.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from agent_forge import platform
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotEnough
from agent_forge.merge import spectral
from agent_forge.merge.combos import combo_name
from agent_forge.merge.engine import MergedWeights, TensorProblem, output_config
from agent_forge.merge.plan import MergePlan
from agent_forge.merge.recipe import Recipe, to_yaml
from agent_forge.merge.tensor_inputs import RUN
from agent_forge.merge.vocabulary import Vocabulary, write_tokenizer
from agent_forge.model.card import card_head
from agent_forge.model.load import check_result, layer_kinds
from agent_forge.model.weights import Weights, shards_of, writing_shards
from agent_forge.store import files
from agent_forge.store.paths import require_short
from agent_forge.store.tensors import TensorSpec

CARD = Path(__file__).with_name("card.md")
SHARD_BYTES = 5_000_000_000
TOGETHER_BYTES = 256_000_000  # versions of one tensor that are held at the same time
SCRATCH_BYTES = 24 * 4 * RUN  # of the arithmetic
OVERHEAD_BYTES = 1 << 20
SHOWN = 8  # files in a message
SETTINGS_CHANGED = "its config, tokenizer or adapter settings were changed: "
ProgressCallback = Callable[[str, int, int], None]  # tensor, bytes done, bytes in all


@dataclass
class WrittenMerge:
    """What was written, and what it took."""

    folder: Path
    bytes: int
    seconds: float
    peak_bytes: int  # memory that cannot be given back; mapped files are not in it
    sha256: dict[str, str]  # of each file of weights
    notes: list[TensorProblem]


def anonymous_bytes() -> int:
    """Memory of this process without the files that it has mapped."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def lineage(merged: MergedWeights) -> dict[str, dict[str, str]]:
    """The hashes of every parent, as a recipe has them; one that differs from it is an error."""
    models = {ref: merged.plan.models[ref] for ref in merged.recipe.references()}
    hashes = {"parents": {ref: model.sha256() for ref, model in models.items()}}
    hashes["parents_settings"] = {r: m.settings_sha256() for r, m in models.items() if m.folder}
    for key, found in hashes.items():
        for ref, value in getattr(merged.recipe, key).items():
            if ref in found and found[ref] != value:
                what = "" if key == "parents" else SETTINGS_CHANGED
                differs = f"{found[ref][:12]}..., the recipe says {value[:12]}..."
                raise DamagedFile(ref, f"{what}sha256 {differs}")
    return hashes


def refuse_unusable(plan: MergePlan) -> None:
    """Refuse a result that could not be opened, or whose layers would be taken for others."""
    config = output_config(plan)
    if not config or not all(weights.sources for weights in plan.models.values()):
        return
    kinds = {str(weights.config.get("model_type")) for weights in plan.models.values()}
    if len(kinds) > 1:
        named = " and ".join(sorted(kinds))
        raise ConfigError(f"{named} are different architectures", hint="merge like with like")
    hint = "take other layers, or slices of models whose layers are all alike"
    try:
        check_result(config, plan.specs, "the result")
        found = layer_kinds(config)
    except DamagedFile as error:
        raise ConfigError(f"the result would be no model: {error.problem}", hint=hint) from error
    n = 0
    for source in (part.sources[0] for part in plan.recipe.slices):
        own = layer_kinds(plan.models[source.model].config)
        for layer in range(*source.layer_range):
            for key, values in own.items():
                if key in found and str(found[key][n]) != str(values[layer]):
                    problem = f"layer {layer} of {source.model} is {values[layer]}"
                    raise ConfigError(f"{problem}, layer {n} of the result is not", hint=hint)
            n += 1


def write(weights: Weights, folder: Path, **options: Any) -> WrittenMerge:
    """Write weights as a model folder, with the options of `write_folders`."""
    combo = weights.recipe.combo if isinstance(weights, MergedWeights) else None
    return write_folders(weights, {combo: folder}, **options)[combo]


def write_folders(
    weights: Weights,
    folders: Mapping[int | None, Path],
    force: bool = False,
    max_ram: int | None = None,
    progress: ProgressCallback | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> dict[int | None, WrittenMerge]:
    """Write one folder a combo (None: no combo) in one pass, tensor by tensor; none appears before
    all are done. `beside` are further files of each, `max_ram` bounds the memory in bytes."""
    began = time.monotonic()
    for folder in folders.values():
        refuse_existing(folder, weights, force)
    require_room(list(folders.values()), weights, max_ram)
    if isinstance(weights, MergedWeights):
        refuse_unusable(weights.plan)
    parents = lineage(weights) if isinstance(weights, MergedWeights) else {}
    notes: dict[int | None, list[TensorProblem]] = {}
    with contextlib.ExitStack() as claims, contextlib.ExitStack() as staging:
        stages = {}
        for n, folder in folders.items():
            clear_leftovers(folder)
            stages[n] = staging.enter_context(files.staging(folder, replace=force))
            claims.enter_context(claimed(stages[n].path))  # until it is published
        peak = _write_tensors(weights, stages, max_ram, progress)
        for n, stage in stages.items():
            notes[n] = _write_rest(stage, weights, n, parents)
            for name, content in (beside or {}).items():
                stage.write_bytes(name, content)
        for folder in folders.values():
            refuse_existing(folder, weights, force)  # another merge may have been faster
    written, cost = {}, (weights.nbytes, time.monotonic() - began, peak)
    for n, stage in stages.items():
        hashes = {s: stage.records[s]["sha256"] for s in shards_of(weights.specs, SHARD_BYTES)}
        written[n] = WrittenMerge(folders[n], *cost, hashes, notes[n])
    return written


def _write_tensors(
    weights: Weights,
    stages: Mapping[int | None, files.StagedFolder],
    max_ram: int | None,
    progress: ProgressCallback | None,
) -> int:
    """Write all tensors; return the most memory in use while versions of one were held."""
    shards = [writing_shards(stage, weights.specs, SHARD_BYTES) for stage in stages.values()]
    done, peak = 0, anonymous_bytes()
    for puts in zip(*shards, strict=True):
        name, nbytes = puts[0][0], weights.specs[puts[0][0]].nbytes
        room = TOGETHER_BYTES if max_ram is None else max_ram - anonymous_bytes()
        together = max(1, min(TOGETHER_BYTES, room) // max(1, nbytes))
        todo = [(n, put) for n, (_, put) in zip(stages, puts, strict=True)]
        for start in range(0, len(todo), together):
            group = todo[start : start + together]
            combos = [n for n, _ in group if n is not None]
            versions: dict[Any, Tensor] = {}
            if combos and isinstance(weights, MergedWeights):
                versions |= weights.combos(name, combos)
            else:
                versions[None] = weights[name]
            peak = max(peak, anonymous_bytes())
            for n, put in group:
                put(versions.pop(n))
        done += nbytes
        if progress:
            progress(name, done * len(stages), weights.nbytes * len(stages))
    return peak


def refuse_existing(folder: Path, weights: Weights, force: bool, *, look: bool = False) -> None:
    """Refuse to replace what is there unless told to, and all that we did not write ourselves."""
    # A folder in a parent, and one that a parent or the current folder lies in, is always refused.
    require_short(folder)
    models = list(weights.plan.models.values()) if isinstance(weights, MergedWeights) else [weights]
    kept = {m.folder for m in models if m.folder} | {p.parent for m in models for p in m.sources}
    kept |= {p.resolve().parent for m in models for p in m.sources}  # a file may be a link
    here, other = folder.resolve(), "name another folder"
    own = (
        "a parent of this merge"
        if isinstance(weights, MergedWeights)
        else "the model it is made of"
    )
    for what, places in ((own, kept), ("the current folder", {Path.cwd()})):
        for place in (p.resolve() for p in places):
            inside = place in here.parents and places is kept
            if here == place or here in place.parents or inside:
                relation = "is" if here == place else "lies in" if inside else "holds"
                raise ConfigError(f"{folder} {relation} {what}", hint=other)
    if folder.name in ("", ".."):
        raise ConfigError(f"{folder} is not the name of a folder to write", hint=other)
    if not folder.exists() and not folder.is_symlink():
        with files.disk_errors(folder):
            if not look:
                files.finish_replace(folder)  # of a merge that was killed between its renames
        if not folder.exists():
            return
    if not force:
        raise AlreadyExists(f"{folder} exists", hint="name another folder, or replace it: --force")
    refuse_foreign(folder)


def refuse_foreign(folder: Path, mark: str = files.MANIFEST) -> None:
    """Refuse to replace anything but an empty folder and a model as it was written here."""
    if folder.is_symlink() or not folder.is_dir():
        raise AlreadyExists(f"{folder} is no folder, so it is not replaced")
    there = sorted(path.name for path in folder.iterdir())
    if strange := files.foreign(folder) or (there if mark not in there else []):
        listed = ", ".join(strange[:SHOWN]) + (" ..." if len(strange) > SHOWN else "")
        problem = f"{folder} is not replaced: it holds what was not written here ({listed})"
        raise AlreadyExists(problem, hint="name another folder, or move these files away")


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Hold the lock of an unfinished folder: its writer lives. Yields False if another has it."""
    fd = None
    with contextlib.suppress(OSError):  # Windows has no such descriptors; leftovers stay there
        fd = os.open(folder, os.O_RDONLY | platform.NO_FOLLOW)
    try:
        yield fd is not None and platform.try_lock(fd)
    finally:
        if fd is not None:
            os.close(fd)


def clear_leftovers(folder: Path) -> None:
    """Remove what a merge into this folder left behind when it was killed."""
    own = re.compile(rf"\.(tmp|old|trash)-[0-9a-f]{{8}}-{re.escape(folder.name)}")
    there = folder.parent.iterdir() if folder.parent.is_dir() else []
    for path in [entry for entry in there if own.fullmatch(entry.name) and entry.is_dir()]:
        with claimed(path) as abandoned:
            if abandoned and path.name.startswith(files.OLD):
                files.retire(path, folder)
            elif abandoned:
                files.remove_tree(path, folder.parent)


def need_bytes(specs: Mapping[str, TensorSpec], recipe: Recipe | None) -> int:
    """Memory that a merge takes beside what the process has already."""
    largest = max((spec.nbytes for spec in specs.values()), default=0)
    if recipe is not None and recipe.is_spectral():
        largest += spectral.cost(specs, len(recipe.references()))[0]
    return largest + SCRATCH_BYTES


def require_room(folders: Sequence[Path], weights: Weights, max_ram: int | None) -> None:
    """Refuse what the disk or the memory cannot hold, before any work."""
    files.require_space(folders[0], len(folders) * (weights.nbytes + OVERHEAD_BYTES))
    recipe = weights.recipe if isinstance(weights, MergedWeights) else None
    needed = anonymous_bytes() + need_bytes(weights.specs, recipe)
    if max_ram is not None and needed > max_ram:
        problem = f"this merge takes about {needed / 1e6:.0f} MB of memory"
        hint = "the largest tensor has to fit; raise --max-ram"
        raise NotEnough(f"{problem}, {max_ram / 1e6:.0f} MB are allowed", hint=hint)


def _write_rest(
    stage: files.StagedFolder, weights: Weights, combo: int | None, parents: Mapping[str, Any]
) -> list[TensorProblem]:
    """Write what stands beside the weights; return the notes on the tensors of this combo."""
    if weights.config:
        stage.write_bytes("config.json", files.to_json(weights.config, sort_keys=False))
    if not isinstance(weights, MergedWeights):
        write_tokenizer(stage, weights.folder, {})
        return []
    notes = [note for note in weights.notes if note.combo == combo]
    layers = {} if combo is None else weights.chosen_layers(combo)
    recipe = weights.recipe.model_copy(update={"combo": combo, "layers": layers, **parents})
    first = weights.plan.models[recipe.references()[0]].folder
    vocabulary = weights.plan.vocabulary or Vocabulary(first)
    write_tokenizer(stage, vocabulary.folder, vocabulary.added)
    stage.write_bytes("recipe.yml", to_yaml(recipe).encode())
    card = CARD.read_text(encoding="utf-8").format(
        head=card_head(recipe.references(), weights.config),
        method=recipe.merge_method if combo is None else combo_name(combo),
        seed=recipe.seed,
        parameters=weights.parameters,
        parents="\n".join(f"| `{ref}` | `{sha}` |" for ref, sha in recipe.parents.items()),
        recipe=to_yaml(recipe).rstrip(),
    )
    if notes:
        card += "\nReplaced by the plain mean of the parents, because the method gave\n\n"
    card += "".join(f"- {note.problem}: `{note.name}`\n" for note in notes)
    stage.write_bytes("README.md", card.encode())
    return notes
