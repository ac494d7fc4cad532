"""Scores that were measured in other evolutions of this user, by content: nothing twice.

A line of `fitness.jsonl` has the key and the result of a candidate that was measured whole. The key
says weights, settings of the model, items, way of reading, and what else decides the last bits. The
file lies in `$FORGE_CACHE`, else in ~/.cache/agent-forge; one that cannot be used costs a warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from agent_forge.errors import ForgeError
from agent_forge.phases.phase2_evomerge.journal import CACHED, read_cache
from agent_forge.store import files

log = logging.getLogger(__name__)
VARIABLE, DEFAULT, NAME = "FORGE_CACHE", "~/.cache/agent-forge", "fitness.jsonl"
WORTH_S = 1.0  # of CPU time: what takes less is measured again
MOST_BYTES = 50_000_000  # then nothing is added


class UserCache:
    """Results by key; `threads` is what torch has for one of them, `split_by` says which blanks
    of an answer count."""

    def __init__(self, threads: int, split_by: str) -> None:
        packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "agent-forge")]
        self._machine = [*packages, torch.backends.cpu.get_cpu_capability(), f"threads {threads}"]
        self._machine.append(split_by)

    @cached_property
    def _path(self) -> Path | None:
        """The file; None if there is no folder for it."""
        try:
            return Path(os.environ.get(VARIABLE) or Path(DEFAULT).expanduser()) / NAME
        except RuntimeError:  # a user without a home
            return None

    @cached_property
    def _known(self) -> dict[str, Any]:
        try:
            return {k: v for k, v in read_cache(self._path).items() if _is_whole(v)}
        except (ForgeError, OSError) as error:
            log.warning("scores of earlier evolutions are not used: %s", error)
            self._path = None
            return {}

    def get(self, place: str) -> dict[str, Any] | None:
        return self._known.get(self._key(place))

    def put(self, place: str, result: dict[str, Any], seconds: float) -> None:
        """Add a result that took so many seconds of CPU time."""
        known = self._known
        if self._path is None or seconds < WORTH_S or not _is_whole(result):
            return
        line = {"place": self._key(place), **{name: result[name] for name in CACHED}}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists() or self._path.stat().st_size < MOST_BYTES:
                files.append(self._path, json.dumps(line).encode() + b"\n")
                known[line["place"]] = {name: result[name] for name in CACHED}
        except (ForgeError, OSError) as error:
            log.warning("scores are not kept for other evolutions: %s", error)
            self._path = None

    def _key(self, place: str) -> str:
        return " ".join([place, *self._machine])


def _is_whole(result: Any) -> bool:
    """True for a candidate that was measured on all items, with numbers that can be used."""
    try:
        score, tokens = result["score"], result["tokens"]
        numbers = [score["fitness"], *score["parts"].values(), *score["raw"].values(), tokens]
        return not result["dropped"] and all(map(math.isfinite, numbers))
    except (KeyError, TypeError, AttributeError):
        return False
