"""Make a champion again from its lineage, byte by byte."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFinite, NotFound
from agent_forge.merge.output import ProgressCallback, write
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.checks import refuse_place
from agent_forge.phases.phase2_evomerge.inputs import open_models
from agent_forge.search.candidate import Candidate, lineage
from agent_forge.store import files, paths

MOST = 10_000  # models, candidates and layers that a lineage may have
LINEAGE_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(NotFinite, RuntimeError),
)


def replay(path: Path, target: Path, progress: ProgressCallback | None = None) -> str:
    """Write the champion of a lineage to a folder; returns the sha256 of its weights."""
    if target.exists():
        raise AlreadyExists(f"{target} exists", hint="name a folder that does not")
    paths.require_writable(target.parent)
    record, candidates = _read_lineage(path)
    refs = [source["model"] for source in record["models"]]
    parents, base = open_models(refs, refs.pop() if record["has_base"] else None)
    for weights, source in zip(
        [*parents, *([base] if base else [])], record["models"], strict=True
    ):
        if weights.sha256() != source["sha256"]:
            raise ConfigError(f"{weights.label} is not the model that the lineage names")
        found = weights.settings_sha256()
        if source.get("settings_sha256", found) != found:
            problem = "its config, tokenizer or adapter settings are not those of the lineage"
            raise ConfigError(f"{weights.label}: {problem}")
    refuse_place(target, [source["model"] for source in record["models"]])
    own = f"{files.TEMP}{secrets.token_hex(4)}-{target.name}.weights"
    scratch = files.nearest_folder(target.parent) / own
    try:
        with _as_damage(path):
            champion = CandidateWeights(parents, base, candidates, scratch).weights(record["key"])
        written = write(champion, target, progress=progress)
    finally:
        if scratch.exists():
            files.remove_tree(scratch, scratch.parent)
    return next(iter(written.sha256.values()))


def _read_lineage(path: Path) -> tuple[dict[str, Any], dict[str, Candidate]]:
    """The record of a champion's making and the candidates in it; any other file is refused."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}", hint="a champion has its lineage.json beside it")
    record = files.read_json(path)
    with _as_damage(path):
        record = record.get("lineage", record)  # or the metadata of a pipeline's champion
        known = {data["key"]: Candidate.from_json(data) for data in record["candidates"]}
        models = [(source["model"], source["sha256"]) for source in record["models"]]
        layers = [len(c.operation.get("layers") or ()) for c in known.values()]
        if max(len(models), len(known), *layers) > MOST:
            raise ValueError(f"more than {MOST:,} models, candidates or layers")
        parents = range(len(models) - {False: 0, True: 1}[record["has_base"]])
        for candidate in lineage(known, record["key"]):  # all of them are there
            if candidate.kind == "parent" and candidate.operation["index"] not in parents:
                raise ValueError(f"there is no parent {candidate.operation['index']}")
    return record, known


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a lineage that was not written here is about the lineage."""
    try:
        yield
    except LINEAGE_ERRORS as error:
        problem = f"not the lineage of a champion ({type(error).__name__}: {error})"
        hint = "give the lineage.json beside a champion"
        raise DamagedFile(path, problem, hint=hint) from error
