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


def write_checkpoint(folder: Path, content: Mapping[str, Any], keep_every: int) -> None:
    """Write a small readable file; of the older ones of this evolution every so many stay."""
    generation = content["generation"]
    files.write_checked(folder / f"evolution_checkpoint_gen_{generation}.json", dict(content))
    for number, old in _numbered(folder, CHECKPOINT_NAME):
        if number < generation and number % keep_every:
            with suppress(errors.DamagedFile, OSError):  # what is not of this evolution stays
                if files.read_checked(old).get("fingerprint") == content["fingerprint"]:
                    files.remove(old)


def write_best(
    folder: Path, generation: int, weights: Callable[[], Weights], keep_last: int
) -> None:
    """Write the champion of a generation; the last few are kept."""
    best = folder / f"gen_{generation}_best_model"
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
