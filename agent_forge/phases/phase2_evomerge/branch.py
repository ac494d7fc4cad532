"""Going on from a generation that an evolution has left behind: in a folder of its own.

The new folder has the journal until the end of that generation, so nothing is measured again, and
from there on random choices may have another seed.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from agent_forge.errors import AlreadyExists, ConfigError, NotFound
from agent_forge.phases.phase2_evomerge.checkpoints import CHECKPOINT_NAME, checkpoint_place
from agent_forge.phases.phase2_evomerge.checks import measured_until_now
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.phases.phase2_evomerge.journal import (
    FIRST,
    JOURNAL,
    begun_or_none,
    read_begun,
    read_journal,
)
from agent_forge.store import files
from agent_forge.track.journal import Journal

GUIDES_NAME = re.compile(r"generation_(0|[1-9]\d{0,8})\.pt")  # what the documents call them
GUIDES_FOLDER = "evomerge_checkpoints"
OF_ITS_END = ("stopped", "healed", "replicate")
SAME_NUMBERS = ("cma-es", "nsga2")  # their random numbers run through all generations


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
    record, lines = read_begun(folder), read_journal(folder)
    if not any(r["record"] == "distances" and r["generation"] == generation for r in lines):
        raise NotFound(f"{folder} did not get to the end of generation {generation}")
    if seed is not None and "branch" in record:
        raise ConfigError(f"{folder} is a branch with a seed of its own: it can have no other")
    if seed is not None:
        record["branch"] = [generation, seed]
    if target.exists():
        there = begun_or_none(target) or {}
        if all(there.get(key) == record.get(key) for key in ("fingerprint", "branch")):
            return target  # it was begun before
        hint = f"go on with it: forge evo --resume {target}; or name another: --output-dir"
        raise AlreadyExists(f"{target} exists", hint=hint)
    if seed is not None and record["settings"].get("strategy") in SAME_NUMBERS:
        strategy = record["settings"]["strategy"]
        problem = f"the random numbers of {strategy} run through all generations"
        raise ConfigError(f"{problem}: a branch of it has no seed of its own")
    built = files.unfinished(target)
    files.disk.make_directory(built)
    journal = Journal(built / JOURNAL, checked=True)
    for line in takewhile(lambda line: line.get("generation", 0) <= generation, lines):
        if line["record"] == FIRST and "branch" in record:
            line = {**line, "branch": record["branch"]}
        if line["record"] not in OF_ITS_END:
            journal.write(line)
    files.write_checked(built / BEGUN, record)
    files.publish(built, target)
    return target
