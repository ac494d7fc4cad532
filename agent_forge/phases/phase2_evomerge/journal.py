"""What an evolution finds on the disk of what was measured before: its journal, and the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_forge.errors import DamagedFile
from agent_forge.phases.phase2_evomerge.evaluator import CACHED
from agent_forge.store import files
from agent_forge.track.journal import read_lines

BEGUN = "evolution.json"  # beside the journal: what `forge evo` began it with
FIRST = "begun"  # the record that a journal begins with
LOST = (
    "put a copy of the file back, or begin anew in another folder: with fitness_cache.jsonl"
    " copied there what was measured is not measured again"
)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """What the journal of an evolution says; [] if none has begun.

    A damaged line is left out, and what it said is measured again. But without the first nobody
    knows which evolution it is of.
    """
    second = path.read_bytes().find(b"\n") + 1 if path.exists() else 0
    if not second:  # there is nothing, or half a line
        return []
    lines = list(read_lines(path))
    end, first = lines[0] if lines else (0, {})
    if end != second or first.get("record") != FIRST or "fingerprint" not in first:
        problem = "its first line, which says which evolution it is of, is missing or unreadable"
        raise DamagedFile(path, problem, hint=LOST)
    if _begun(path.with_name(BEGUN)) not in (None, first["fingerprint"]):
        raise DamagedFile(path, f"its first line is of another evolution than {BEGUN}", hint=LOST)
    return [line for _, line in lines if "record" in line]


def _begun(path: Path) -> str | None:
    """The fingerprint of what a folder was begun with, as far as it can be read."""
    try:
        return str(files.read_checked(path)["fingerprint"])
    except (FileNotFoundError, DamagedFile):
        return None


def read_cache(path: Path | None) -> dict[str, Any]:
    """What was measured before, by weights and evaluation."""
    if path is None or not path.exists():
        return {}
    known = (record for _, record in read_lines(path, 0))
    return {r["place"]: {name: r[name] for name in CACHED} for r in known if set(CACHED) <= set(r)}
