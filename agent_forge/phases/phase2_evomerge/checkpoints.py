"""What an evolution leaves on its way for people: how it stood, and its best model of then."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_forge import errors
from agent_forge.merge.output import refuse_foreign, write
from agent_forge.model.weights import Weights
from agent_forge.store import files

CHECKPOINT_NAME = re.compile(r"evolution_checkpoint_gen_(0|[1-9]\d{0,8})\.json")
BEST_NAME = re.compile(r"gen_(0|[1-9]\d{0,8})_best_model")


def checkpoint_place(folder: Path, generation: int) -> Path:
    return folder / f"evolution_checkpoint_gen_{generation}.json"


def best_place(folder: Path, generation: int) -> Path:
    return folder / f"gen_{generation}_best_model"


def write_checkpoint(folder: Path, content: Mapping[str, Any], keep_every: int) -> bool:
    """Write a small readable file; of the older ones of this evolution every so many stay. True, if
    there was one of this generation and it had another champion."""
    generation, before = content["generation"], content["champion"]
    with suppress(errors.DamagedFile, OSError):
        before = files.read_checked(checkpoint_place(folder, generation)).get("champion")
    files.write_checked(checkpoint_place(folder, generation), dict(content))
    for number, old in _numbered(folder, CHECKPOINT_NAME):
        if number < generation and number % keep_every:
            with suppress(errors.DamagedFile, OSError):  # what is not of this evolution stays
                if files.read_checked(old).get("fingerprint") == content["fingerprint"]:
                    files.remove(old)
    return bool(before != content["champion"])


def write_best(
    folder: Path, generation: int, weights: Callable[[], Weights], keep_last: int, new: bool
) -> None:
    """Write the champion of a generation, if it is `new` or not there; the last few are kept."""
    best = best_place(folder, generation)
    if new and best.is_dir() and not best.is_symlink():
        with suppress(errors.AlreadyExists):
            refuse_foreign(best)
            files.remove_tree(best, folder)
    if not best.exists() and not best.is_symlink():
        write(weights(), best)
    for _, old in _numbered(folder, BEST_NAME)[:-keep_last]:
        with suppress(errors.AlreadyExists):  # it holds what was not written here: it stays
            refuse_foreign(old)
            files.remove_tree(old, folder)


def _numbered(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """What the folder holds under this name, by generation."""
    matches = ((name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)
