"""Rows of a dataset from the answers of an endpoint; a run that was killed goes on.

Beside the file of rows, FILE.journal has a line before each request is sent (its worst case in
USD) and one after its reply, with the real price and the row or the reason of its rejection. Each
is on the disk before the next request is sent. So a finished request is never sent again, the cost
cap holds over all runs, and the rows can be written again from the journal alone.
"""

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent_forge import platform
from agent_forge.data.endpoint import GO_ON, ChatRequest, Endpoint, ReplyRejected
from agent_forge.data.endpoint_cost import Note, Spending
from agent_forge.errors import AlreadyExists, AlreadyInUse, DamagedFile, EndpointFailed
from agent_forge.store import files
from agent_forge.track.journal import Journal, read_lines

BEGUN = {"record": "begun", "schema_version": files.SCHEMA_VERSION}
MAX_REASON = 100  # characters
MAX_UNUSABLE = 20  # replies in a row that are no answers: the endpoint is broken, not a model
R = TypeVar("R", bound=ChatRequest)


class GeneratedRows(NamedTuple):
    """What the runs on one file have come to."""

    accepted: int
    rejected: dict[str, int]
    spent_usd: float


def journal_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.journal")  # of no suffix that datasets are read by


def read_journal(out: Path) -> list[dict[str, Any]]:
    """Return the records of a file's journal; one with a damaged line is refused, since what it
    cost would be forgotten."""
    path = journal_path(out)
    if not os.path.lexists(path):
        if os.path.lexists(out):
            hint = "choose another file, or move it elsewhere"
            raise AlreadyExists(f"{out} exists and has no {path.name}", hint=hint)
        return []
    files.require_own(path, path.lstat())
    records = [record for _, record in read_lines(path)]
    first = records[0] if records else {}
    files.refuse_newer(path, first)
    if first != BEGUN or len(records) != path.read_bytes().count(b"\n"):
        hint = "its cost is not known any more: begin anew in another file"
        raise DamagedFile(path, "a line is not as it was written", hint=hint)
    return records[1:]


def finished(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the record of each request that is finished, by its key."""
    return {record["key"]: record for record in records if record["record"] == "done"}


def spent_usd(records: Sequence[Mapping[str, Any]]) -> float:
    """Return what was spent, with the worst case of each request that was left under way."""
    spending = Spending(math.inf)
    for record in records:
        spending.count(record["record"], record["usd"])
    return spending.usd


def generate_rows(
    endpoint: Endpoint,
    requests: Sequence[R],
    accept: Callable[[R, str], dict[str, Any]],
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GeneratedRows:
    """Ask the models in turn (request i goes to model i mod n) and keep what `accept` returns.

    `accept` raises ValueError with the reason if an answer is malformed or wrong.
    """
    with _held_journal(out) as (journal, records):
        endpoint.spending.carry(spent_usd(records))
        _write_missing(out, records)
        done, unusable = finished(records), 0
        models = endpoint.settings.models
        for index, request in enumerate(requests):
            progress(index, len(requests))
            if request.key in done:
                continue
            about = {"key": request.key, "model": models[index % len(models)]}
            with endpoint.spending.noted(_noting(journal, about)):
                result, is_usable = _ask(endpoint, request, about["model"], accept)
            record = {"record": "done", **about, **result}
            _durably(journal, record)
            done[request.key] = record
            if "row" in record:
                files.append(out, _line(record["row"]))
            unusable = 0 if is_usable else unusable + 1
            if unusable == MAX_UNUSABLE:
                problem = f"the last {unusable} replies were no answers ({record['rejected']})"
                raise EndpointFailed(problem, hint=GO_ON)
        progress(len(requests), len(requests))
        files.sync(out)
    return summary(done, endpoint.spending.usd)


def summary(done: Mapping[str, Mapping[str, Any]], spent_usd: float) -> GeneratedRows:
    reasons = Counter(r["rejected"] for r in done.values() if "rejected" in r)
    return GeneratedRows(len(done) - reasons.total(), dict(reasons.most_common()), spent_usd)


def _ask(
    endpoint: Endpoint, request: R, model: str, accept: Callable[[R, str], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Return what a request came to, and whether its reply was an answer, right or wrong."""
    try:
        answer = endpoint.complete(request.messages, model)
    except ReplyRejected as error:
        return {"usd": error.cost_usd, "rejected": _reason(error)}, False
    tokens = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    found = {"usd": answer.cost_usd, **tokens}
    try:
        row = accept(request, answer.text)
        _line(row)
    except ValueError as error:
        return {**found, "rejected": _reason(error)}, True
    return {**found, "row": row}, True


def _reason(error: ValueError) -> str:
    return str(error)[:MAX_REASON] or type(error).__name__


def _noting(journal: Journal, about: Mapping[str, Any]) -> Note:
    def note(record: str, usd: float) -> None:
        _durably(journal, {"record": record, **about, "usd": usd})

    return note


def _durably(journal: Journal, record: Mapping[str, Any]) -> None:
    journal.write(record)
    journal.sync()


@contextlib.contextmanager
def _held_journal(out: Path) -> Iterator[tuple[Journal, list[dict[str, Any]]]]:
    """Yield the journal of a file, which no other process has meanwhile, and its records."""
    path = journal_path(out)
    if not read_journal(out) and not path.exists():
        with files.writing(path, replace=False) as writer:
            writer.write(_line(BEGUN))
    with files.disk_errors(path):
        fd = os.open(path, os.O_RDWR | platform.NO_FOLLOW)
    try:
        if not platform.try_lock(fd):
            raise AlreadyInUse(f"{out} is being written by another process", hint="wait for it")
        yield Journal(path, checked=True), read_journal(out)
    finally:
        os.close(fd)


def _write_missing(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append the rows that the journal has and the file lacks: it was cut short by a kill."""
    whole = b"".join(_line(record["row"]) for record in records if "row" in record)
    content = out.read_bytes() if out.exists() else b""
    if not whole.startswith(content):
        hint = f"move it elsewhere: the rows are written again from {journal_path(out).name}"
        raise DamagedFile(out, "its rows are not those that were written", hint=hint)
    end = content.rfind(b"\n") + 1
    files.cut(out, end)
    files.append(out, whole[end:])


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
