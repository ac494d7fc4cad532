"""The registered models: found by their names, looked at one by one or two side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ForgeError
from agent_forge.model.catalog import Catalog
from agent_forge.store import files
from agent_forge.store.records import CARD, read_metadata, read_state
from agent_forge.track.progress import size
from agent_forge.ui.dashboard import state

CARD_BYTES = 200_000  # of a card that are shown
ALL = "all"
Row = dict[str, Any]


def render() -> None:
    """The page."""
    with state.problems():
        rows = Catalog(state.store()).rows()
        if not rows:
            st.info("No models yet: each phase of a run registers what it made.")
            return
        found = _filtered(rows)
        st.caption(f"{len(found)} of {len(rows)} models")
        _list(found)
        if found:
            names = [row["model_id"] for row in found]
            left, right = st.columns(2)
            first = left.selectbox("Model", names, key="model")
            options: dict[str, Any] = {"index": None, "placeholder": "choose a second one"}
            second = right.selectbox("Compare with", names, key="model-second", **options)
            by_name = {row["model_id"]: row for row in found}
            if second and first != second:
                _compared(by_name[first], by_name[second])
            else:
                _one(by_name[first])


def _filtered(rows: Sequence[Row]) -> list[Row]:
    """Those that the filters leave."""
    columns = st.columns([2, 1, 1, 1])
    text = columns[0].text_input("Search", key="model-search", placeholder="a part of the name")
    phases = [name for name in ORDER if any(row["phase_name"] == name for row in rows)]
    runs = sorted({str(row["session_id"]) for row in rows})
    tags = sorted({str(tag) for row in rows for tag in row["tags"]})
    phase = columns[1].selectbox("Phase", [ALL, *phases], key="model-phase")
    run = columns[2].selectbox("Of the run", [ALL, *runs], key="model-run")
    tag = columns[3].selectbox("Tag", [ALL, *tags], key="model-tag")
    return [
        row
        for row in rows
        if text.strip().lower() in row["model_id"].lower()
        and phase in (ALL, row["phase_name"])
        and run in (ALL, row["session_id"])
        and (tag == ALL or tag in row["tags"])
    ]


def _list(rows: Sequence[Row]) -> None:
    head = ("model", "phase", "weights", "size", "made (UTC)", "tags")
    told = [
        (
            row["model_id"],
            row["phase_name"],
            _count(row["parameters"]),
            _megabytes(row["size_mb"]),
            state.moment(row["created_at"]),
            ", ".join(row["tags"]),
        )
        for row in rows
    ]
    state.table([head, *told], key="model-list")


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _megabytes(value: Any) -> str:
    return size(value * 1e6) if isinstance(value, int | float) else "-"


def _one(row: Row) -> None:
    """A model: what is recorded of it, what it was made from, its files, its card."""
    folder = Path(row["model_path"])
    columns = st.columns(3)
    columns[0].metric("weights", _count(row["parameters"]))
    columns[1].metric("size", _megabytes(row["size_mb"]))
    columns[2].metric("made (UTC)", state.moment(row["created_at"])[:16])
    card, about, parents, there = st.tabs(["Card", "Record", "Lineage", "Files"])
    with card, state.problems("There is no card"):
        text = _card(folder)
        st.code(text, language=None, wrap_lines=True)
    with about, state.problems("There is no record"):
        record = read_metadata(folder).model_dump()
        record["created_at"] = state.moment(record["created_at"])
        state.table([("name", "value"), *record.items()], key="model-record")
    with parents, state.problems("Its lineage is not known"):
        steps = list(lineage(str(row["session_id"]), str(row["phase_name"]), row["model_name"]))
        state.table([("made by", "model", "from"), *steps], key="model-lineage")
        if row["phase_name"] == "evomerge":
            _evolved(str(row["session_id"]))
    with there, state.problems("Its files cannot be listed"):
        sizes = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir())]
        told = [(name, size(count)) for name, count in sizes]
        state.table([("file", "size"), *told], key="model-files")


def _evolved(session: str) -> None:
    with state.opened(session) as run:
        shown = run.figures("evomerge", state.theme())
        for title, figure in shown:
            if title.startswith("Lineage"):
                state.draw(figure, "model-evolved")


def _card(folder: Path) -> str:
    with (folder / CARD).open("rb") as reader:
        return reader.read(CARD_BYTES).decode("utf-8", errors="replace")


def lineage(session: str, phase: str, model: str) -> Iterator[tuple[str, str, str]]:
    """The phases that a model went through, from its own back to the first: what each made of
    what."""
    seen = set[tuple[str, str]]()
    while phase in ORDER and (session, phase) not in seen:
        seen.add((session, phase))
        record = read_state(state.store().path(session) / phase_folder(phase)) or {}
        inputs = [Path(str(place)) for place in record.get("inputs") or []]
        yield phase, model, ", ".join(place.name for place in inputs) or "-"
        folders = {place.parent.name for place in inputs}
        before = [name for name in ORDER if phase_folder(name) in folders]
        if not before:
            return
        place = inputs[0]
        phase, model = before[0], ", ".join(one.name for one in inputs)
        session = place.parent.parent.name


def _compared(first: Row, second: Row) -> None:
    """What is recorded of two models, side by side; what differs comes first."""
    records = [_record(row) for row in (first, second)]
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [(name, *(record.get(name) for record in records)) for name in names]
    rows.sort(key=lambda row: row[1] == row[2])
    state.table([("", first["model_id"], second["model_id"]), *rows], key="models-compared")


def _record(row: Row) -> Row:
    told = {
        "phase": row["phase_name"],
        "run": row["session_id"],
        "weights": _count(row["parameters"]),
        "size": _megabytes(row["size_mb"]),
        "made (UTC)": state.moment(row["created_at"]),
    }
    with contextlib.suppress(ForgeError, OSError):
        record = read_metadata(Path(row["model_path"])).model_dump()
        told |= {
            name: value
            for name, value in record.items()
            if name not in row and isinstance(value, str | int | float)
        }
    with contextlib.suppress(OSError):
        told["files together"] = size(files.tree_bytes(Path(row["model_path"])))
    return told
