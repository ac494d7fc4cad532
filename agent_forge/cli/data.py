"""`forge data ls`, `fetch`, `verify` and `show`: the datasets, and what is in them."""

import itertools
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from agent_forge.cli.output import emit, emit_json, plain, size
from agent_forge.errors import DamagedFile, ForgeError

LINE_ENDS = "\n\t"  # may stand in an example
DETAILS = ("category", "stage", "hub", "config", "licence")
COUNTED_BYTES = 50_000_000  # larger sets are only counted by verify


def ls(folder: Path, as_json: bool) -> None:
    """List the known datasets and which are on this machine."""
    from agent_forge.data.datasets import DATASETS, local_files, read

    sets, rows = [], []
    for name, dataset in DATASETS.items():
        paths = local_files(dataset, folder)
        n_bytes = sum(path.stat().st_size for path in paths)
        examples, problem = None, ""
        if paths and n_bytes <= COUNTED_BYTES:
            try:
                examples = sum(1 for _ in read(name, folder))
            except ForgeError as error:
                problem = str(error)
        details = {field: getattr(dataset, field) for field in DETAILS}
        stored = {"files": [str(path) for path in paths], "bytes": n_bytes}
        sets.append({"name": name, **details, **stored, "examples": examples, "problem": problem})
        local = "damaged" if problem else "yes" if paths else "no"
        count = None if examples is None else f"{examples:,}"
        space = size(n_bytes) if paths else None
        rows.append((name, dataset.category, dataset.stage, local, count, space, dataset.licence))
    columns = ("dataset", "category", "stage", "local", "examples", "size", "licence")
    emit(as_json, columns, rows, data_dir=str(folder), datasets=sets)


def fetch(names: list[str], limit: int, folder: Path, as_json: bool) -> None:
    """Download datasets from the Hugging Face hub.

    This needs the extra `data`.
    """
    from agent_forge.data import datasets

    for name in names:
        datasets.find(name)
    fetched: list[dict[str, Any]] = []
    for name in names:
        typer.echo(f"fetching {name}", err=True)
        fetched.append(datasets.fetch(name, folder, limit=limit))
    counts = [f"{sum(r['examples'].values()):,}" for r in fetched]
    rows = [(r["name"], r["hub"], n, r["licence"]) for r, n in zip(fetched, counts, strict=True)]
    columns = ("dataset", "from", "examples", "licence")
    emit(as_json, columns, rows, data_dir=str(folder), fetched=fetched)


def verify(names: list[str] | None, folder: Path, as_json: bool) -> None:
    """Read every line of datasets and name what is damaged.

    Counts examples and copies too. The exit code is 4 if anything is damaged.
    """
    from agent_forge.data import datasets

    for name in names or ():
        datasets.find(name)
    local = [name for name in datasets.DATASETS if not datasets.missing([name], folder)]
    reports: list[dict[str, Any]] = []
    damaged: list[ForgeError] = []
    for name in names or local:
        try:
            reports.append(datasets.verify(name, folder))
        except DamagedFile as error:
            damaged.append(error)
            typer.echo(f"damaged: {error}", err=True)
    rows = []
    for r in reports:
        copies = (r["duplicates"], r["in_two_splits"], size(r["bytes"]))
        rows.append((r["name"], r["examples"], *r["splits"].values(), *copies))
    columns = ("dataset", "examples", *datasets.SPLITS, "copies", "in two splits", "size")
    if not (as_json and damaged):
        emit(as_json, columns, rows, data_dir=str(folder), verified=reports)
    if damaged:
        raise damaged[0]
    if not reports:
        typer.echo(f"no datasets in {folder} yet", err=True)


def show(name: str, n: int, split: str | None, folder: Path, as_json: bool) -> None:
    """Show the first examples as a model would get them."""
    from agent_forge.data import datasets

    own = name not in datasets.DATASETS and (Path(name).exists() or "." in name or "/" in name)
    read = partial(datasets.read_own, Path(name)) if own else partial(datasets.read, name, folder)
    examples = list(itertools.islice(read(split=split), n))
    if as_json:
        return emit_json(name=name, examples=[asdict(example) for example in examples])
    for example in examples:
        print(f"--- {example.source} ({example.split})")
        if example.prompt:
            print(f"prompt: {plain(example.prompt, LINE_ENDS)}")
        print(f"learned: {plain(example.completion, LINE_ENDS)}")
    if not examples:
        typer.echo(f"{name} has no such examples", err=True)
