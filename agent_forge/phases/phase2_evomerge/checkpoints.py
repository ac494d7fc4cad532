"""What an evolution leaves on its way for people: how it stood, and its best model of then.

One can go on from a generation that was left behind, in a folder of its own: it has the journal
until the end of that generation, so nothing is measured again, and from there on random choices may
have another seed.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFound
from agent_forge.merge.output import refuse_foreign, write
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge import journal as records
from agent_forge.phases.phase2_evomerge.checks import measured_until_now
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.store import files
from agent_forge.track.journal import Journal

CHECKPOINT_NAME = re.compile(r"evolution_checkpoint_gen_(0|[1-9]\d{0,8})\.json")
BEST_NAME = re.compile(r"gen_(0|[1-9]\d{0,8})_best_model")
GUIDES_NAME = re.compile(r"generation_(0|[1-9]\d{0,8})\.pt")  # what the documents call them
GUIDES_FOLDER = "evomerge_checkpoints"
OF_ITS_END = ("stopped", "healed", "replicate")
SAME_NUMBERS = ("cma-es", "nsga2")  # their random numbers run through all generations


def checkpoint_place(folder: Path, generation: int) -> Path:
    return folder / f"evolution_checkpoint_gen_{generation}.json"


def best_place(folder: Path, generation: int) -> Path:
    return folder / f"gen_{generation}_best_model"


def write_checkpoint(folder: Path, content: Mapping[str, Any], keep_every: int) -> bool:
    """Write a small readable file; of the older ones of this evolution every so many stay. True, if
    there was one of this generation and it had another champion."""
    generation, before = content["generation"], content["champion"]
    with suppress(DamagedFile, OSError):
        before = files.read_checked(checkpoint_place(folder, generation)).get("champion")
    files.write_checked(checkpoint_place(folder, generation), dict(content))
    for number, old in _numbered(folder, CHECKPOINT_NAME):
        if number < generation and number % keep_every:
            with suppress(DamagedFile, OSError):  # what is not of this evolution stays
                if files.read_checked(old).get("fingerprint") == content["fingerprint"]:
                    files.remove(old)
    return bool(before != content["champion"])


def write_best(
    folder: Path, generation: int, weights: Callable[[], Weights], keep_last: int, new: bool
) -> None:
    """Write the champion of a generation, if it is `new` or not there; the last few are kept."""
    best = best_place(folder, generation)
    if new and best.is_dir() and not best.is_symlink():
        with suppress(AlreadyExists):
            refuse_foreign(best)
            files.remove_tree(best, folder)
    if not best.exists() and not best.is_symlink():
        write(weights(), best)
    for _, old in _numbered(folder, BEST_NAME)[:-keep_last]:
        with suppress(AlreadyExists):  # it holds what was not written here: it stays
            refuse_foreign(old)
            files.remove_tree(old, folder)


def _numbered(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """What the folder holds under this name, by generation."""
    matches = ((name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def find_checkpoint(place: Path) -> Path:
    """A checkpoint, or the folder of an evolution, by the documents' names too."""
    parent = place.parent
    if not parent.exists() and parent.name == GUIDES_FOLDER:
        parent = parent.parent
    if not place.exists() and (named := GUIDES_NAME.fullmatch(place.name)):
        return checkpoint_place(parent, int(named[1]))
    return place if place.exists() else parent / place.name


def continued(
    place: Path, target: Path | None = None, seed: int | None = None, only_look: bool = False
) -> Path:
    """The folder to go on in: that of the checkpoint, if it is the newest and nothing else is
    asked for; else a new one, which goes on from the generation of the checkpoint."""
    place = find_checkpoint(place)
    named = CHECKPOINT_NAME.fullmatch(place.name)
    folder = place.parent if named else place
    if not place.exists() or not (folder / BEGUN).is_file():
        return place  # whoever opens it says what is wrong
    done, _ = measured_until_now(folder)
    generation = int(named[1]) if named else done
    if generation >= done and target is None and seed is None:
        return place
    if only_look:
        raise ConfigError("a branch has no plan of its own", hint="leave --dry-run out")
    target = target or folder.with_name(f"{folder.name}-gen-{generation}")
    record, lines = records.read_begun(folder), records.read_journal(folder)
    if not any(r["record"] == "distances" and r["generation"] == generation for r in lines):
        raise NotFound(f"{folder} did not get to the end of generation {generation}")
    if seed is not None and "branch" in record:
        raise ConfigError(f"{folder} is a branch with a seed of its own: it can have no other")
    if seed is not None:
        record["branch"] = [generation, seed]
    if target.exists():
        there = records.begun_or_none(target) or {}
        if all(there.get(key) == record.get(key) for key in ("fingerprint", "branch")):
            return target  # it was begun before
        hint = f"go on with it: forge evo --resume {target}; or name another: --output-dir"
        raise AlreadyExists(f"{target} exists", hint=hint)
    strategy = record["settings"].get("strategy")
    if seed is not None and strategy in SAME_NUMBERS:
        problem = f"the random numbers of {strategy} run through all generations"
        raise ConfigError(f"{problem}: a branch of it has no seed of its own")
    built = files.unfinished(target)
    files.disk.make_directory(built)
    journal = Journal(built / records.JOURNAL, checked=True)
    for line in takewhile(lambda line: line.get("generation", 0) <= generation, lines):
        if line["record"] == records.FIRST and "branch" in record:
            line = {**line, "branch": record["branch"]}
        if line["record"] not in OF_ITS_END:
            journal.write(line)
    files.write_checked(built / BEGUN, record)
    files.publish(built, target)
    return target
