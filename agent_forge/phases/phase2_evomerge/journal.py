"""What was measured, on disk: the journal and the cache of an evolution, and the user's cache."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from agent_forge.errors import (
    CannotWrite,
    ConfigError,
    DamagedFile,
    ForgeError,
    PathDisappeared,
)
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.store import files
from agent_forge.store.paths import user_cache
from agent_forge.track.journal import BEGINS, Journal, read_lines

log = logging.getLogger(__name__)
JOURNAL, WEIGHTS, CACHE = "journal.jsonl", "weights", "fitness_cache.jsonl"
LOG = "evolution_log.json"
FILES = (BEGUN, JOURNAL, CACHE, WEIGHTS, LOG)
FIRST = "begun"  # the record that a journal begins with
CACHED = ("score", "tokens", "dropped")  # a cached result counts as the tokens it stands for
STAMP = attrgetter("st_ino", "st_size", "st_mtime_ns")  # another version of a file has another
CACHE_BEGINS = b'{"place": '
USER_CACHE = "fitness.jsonl"
WORTH_S = 1.0  # of CPU time: what takes less is measured again
MOST_BYTES = 50_000_000  # then nothing is added
LOST = (
    "put a copy of the file back, or begin anew in another folder: with fitness_cache.jsonl"
    " copied there what was measured is not measured again"
)


class EvolutionJournal:
    """The records of one evolution; the journal of another is refused."""

    def __init__(self, folder: Path, models: Sequence[Weights], fingerprint: str) -> None:
        self.path = folder / JOURNAL
        self.records = read_journal(folder)
        if self.records and self.records[0]["fingerprint"] != fingerprint:
            hint = "go on with what it was begun with, or choose another folder"
            problem = f"{folder} holds an evolution of other models, data or settings"
            raise ConfigError(problem, hint=hint)
        self._fingerprint, self._file = fingerprint, Journal(self.path, checked=True)
        read = (path for m in models for path in (*m.sources, *dict(m.settings_files()).values()))
        self._stamps = {path: STAMP(path.stat()) for path in read}

    def begin(self, **rules: Any) -> dict[str, Any]:
        """The first record; a new journal gets one, with the rules that it is begun under."""
        if not self.records:
            self.write(FIRST, fingerprint=self._fingerprint, **rules)
        return self.records[0]

    def write(self, record: str, **values: Any) -> dict[str, Any]:
        if self.records:
            self.require_files()
        line = {"record": record, **values}
        self._file.write(line)
        self.records.append(line)
        return line

    def find(self, record: str, **wanted: Any) -> dict[str, Any] | None:
        """The first record of this name with these values."""
        for line in self.records:
            if line["record"] == record and all(line.get(k) == v for k, v in wanted.items()):
                return line
        return None

    def once(self, name: str, measure: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """The record of this name and key; if there is none, it is measured and written now."""
        return self.find(name, **key) or self.write(name, **key, **measure())

    def raw(self, key: str | None) -> dict[str, float]:
        """The figures behind the score of a candidate; empty if it has none."""
        record = (self.find("candidate", key=key) if key else None) or {}
        return dict((record.get("score") or {}).get("raw", {}))

    def best_parents(self, domains: Sequence[str]) -> dict[str, int]:
        """The number of the parent with the fewest bits a byte in each domain, of equals the first;
        empty if the fitness measured no bits."""
        measured = [r for r in self.records if r["record"] == "candidate"]
        parents = [r for r in measured if r["operation"]["kind"] == "parent"]
        raws = {r["operation"]["index"]: r["score"]["raw"] for r in parents}
        if not all(f"{name}/bits_per_byte" in raw for name in domains for raw in raws.values()):
            return {}
        return {n: min(raws, key=lambda i: (raws[i][f"{n}/bits_per_byte"], i)) for n in domains}

    def latest(self, key: str) -> Any:
        """The largest value of this key in any record; 0 if none has it."""
        return max((record.get(key, 0) for record in self.records), default=0)

    def tokens(self, generation: int) -> int:
        """Tokens that were evaluated until the end of a generation."""
        until = (r for r in self.records if r.get("generation", generation + 1) <= generation)
        return sum(r.get("tokens", 0) for r in until)

    def require_files(self) -> None:
        """Refuse to go on when the journal or a model is gone, or another one: what is mapped would
        still be read, and the result be written without what lies beside it."""
        if not self.path.exists():
            raise PathDisappeared(self.path, hint="what was in it is lost; begin it again")
        hint = "put it back, then resume: what was measured is kept"
        for path, stamp in self._stamps.items():
            if not path.exists():
                raise PathDisappeared(path, hint=hint)
            if STAMP(path.stat()) != stamp:
                raise ConfigError(f"{path} was changed under the evolution", hint=hint)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The records of the journal in a folder, but for damaged lines: these are measured again."""
    path = folder / JOURNAL
    content = path.read_bytes() if path.exists() else b""
    second = content.find(b"\n") + 1
    if not second and BEGINS.startswith(content[: len(BEGINS)]):  # there is nothing, or half a line
        return []
    lines = list(read_lines(path))
    end, first = lines[0] if lines else (0, {})
    if end != second or first.get("record") != FIRST or "fingerprint" not in first:
        problem = "its first line, which says which evolution it is of, is missing or unreadable"
        raise DamagedFile(path, problem, hint=LOST)
    begun = begun_or_none(folder) or first
    if begun["fingerprint"] != first["fingerprint"]:
        raise DamagedFile(path, f"its first line is of another evolution than {BEGUN}", hint=LOST)
    return [line for _, line in lines if "record" in line]


def begun_or_none(folder: Path) -> dict[str, Any] | None:
    """What the evolution in a folder was begun with; None if that is missing or unreadable."""
    try:
        return read_begun(folder)
    except (FileNotFoundError, DamagedFile):
        return None


def read_begun(folder: Path) -> dict[str, Any]:
    """What an evolution was begun with."""
    record = files.read_checked(folder / BEGUN)
    lists = [record.get(key) for key in ("parents", "names")]
    kinds = {"settings": dict, "base": str | None, "seed": int, "fingerprint": str}
    if not (
        all(isinstance(texts, list) and texts for texts in lists)
        and all(isinstance(text, str) for texts in lists for text in texts or ())
        and all(isinstance(record.get(key), kind) for key, kind in kinds.items())
    ):
        raise DamagedFile(folder / BEGUN, "not what an evolution was begun with")
    branch = record.get("branch", [0, 0])
    if not isinstance(branch, list) or len(branch) != 2 or {*map(type, branch)} != {int}:
        raise DamagedFile(folder / BEGUN, f"{branch!r} is not a generation and a seed")
    return record


def read_cache(path: Path | None) -> dict[str, Any]:
    """Earlier results, by weights and evaluation."""
    if path is None or not path.exists():
        return {}
    files.require_own(path, path.lstat())
    known = [record for _, record in read_lines(path, 0)]
    with path.open("rb") as reader:
        begins = CACHE_BEGINS.startswith(reader.read(len(CACHE_BEGINS)))
    if not begins and not any("place" in record for record in known):
        raise DamagedFile(path, "no results of an evolution are in it", hint="move it elsewhere")
    return {r["place"]: {name: r[name] for name in CACHED} for r in known if set(CACHED) <= set(r)}


def cached(path: Path | None, place: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a cache keeps of a result; it is added to the file, if there is one."""
    kept = {name: result[name] for name in CACHED}
    if path is not None:
        files.append(path, json.dumps({"place": place, **kept}).encode() + b"\n")
    return kept


class UserCache:
    """Scores of candidates that were measured whole in any evolution of this user, by weights,
    settings of the model, items, way of reading, and what else decides the last bits: `threads` is
    what torch has for one of them, `split_by` says which blanks of an answer count. A file that
    cannot be used costs a warning."""

    def __init__(self, threads: int, split_by: str) -> None:
        packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "agent-forge")]
        machine = torch.backends.cpu.get_cpu_capability(), f"threads {threads}", split_by
        self._suffix = " ".join(["", *packages, *machine])

    @cached_property
    def _path(self) -> Path | None:
        """The file; None if there is no folder for it."""
        try:
            return user_cache() / USER_CACHE
        except CannotWrite:  # a user without a home
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
        return self._known.get(place + self._suffix)

    def put(self, place: str, result: dict[str, Any], seconds: float) -> None:
        """Add a result that took so many seconds of CPU time."""
        known = self._known
        if self._path is None or seconds < WORTH_S or not _is_whole(result):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists() or self._path.stat().st_size < MOST_BYTES:
                known[place + self._suffix] = cached(self._path, place + self._suffix, result)
        except (ForgeError, OSError) as error:
            log.warning("scores are not kept for other evolutions: %s", error)
            self._path = None


def _is_whole(result: Any) -> bool:
    """True for a candidate that was measured on all items, with numbers that can be used."""
    try:
        score, tokens = result["score"], result["tokens"]
        numbers = [score["fitness"], *score["parts"].values(), *score["raw"].values(), tokens]
        return not result["dropped"] and all(map(math.isfinite, numbers))
    except (KeyError, TypeError, AttributeError):
        return False
