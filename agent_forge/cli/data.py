"""`forge data ls`, `fetch`, `verify` and `show`: the datasets, and what is in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.config import JSON
from agent_forge.cli.output import emit_json, emit_table, size

if TYPE_CHECKING:
    from agent_forge.data.dataset_rows import Example
    from agent_forge.errors import ForgeError

FOLDER = typer.Option(
    Path("data"), "--data-dir", envvar="AGENT_FORGE_DATA", help="The folder of all datasets."
)
COUNTED_BYTES = 50_000_000  # larger sets are only counted by verify

app = typer.Typer(
    name="data",
    help="List, download, check and show datasets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def ls(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """List the known datasets and which are on this machine."""
    from agent_forge.data.datasets import DATASETS

    sets = [_listed(name, folder) for name in DATASETS]
    if as_json:
        emit_json(data_dir=str(folder), datasets=sets)
        return
    rows = []
    for s in sets:
        local = "damaged" if s["problem"] else "yes" if s["files"] else "no"
        count = None if s["examples"] is None else f"{s['examples']:,}"
        space = size(s["bytes"]) if s["files"] else None
        rows.append((s["name"], s["category"], s["stage"], local, count, space, s["licence"]))
    emit_table(("dataset", "category", "stage", "local", "examples", "size", "licence"), rows)


def _listed(name: str, folder: Path) -> dict[str, Any]:
    from agent_forge.data.datasets import find, local_files, read
    from agent_forge.errors import ForgeError

    dataset = find(name)
    paths = local_files(dataset, folder)
    n_bytes = sum(path.stat().st_size for path in paths)
    examples, problem = None, ""
    if paths and n_bytes <= COUNTED_BYTES:
        try:
            examples = sum(1 for _ in read(name, folder))
        except ForgeError as error:
            problem = str(error)
    fields = ("category", "stage", "hub", "config", "licence")
    return {
        "name": name,
        **{field: getattr(dataset, field) for field in fields},
        "files": [str(path) for path in paths],
        "bytes": n_bytes,
        "examples": examples,
        "problem": problem,
    }


@app.command()
def fetch(
    names: list[str] = typer.Argument(help="The datasets to download."),
    limit: int = typer.Option(
        20_000, "--limit", min=0, max=10**12, help="Most rows of each published split; 0 means all."
    ),
    folder: Path = FOLDER,
    as_json: bool = JSON,
) -> None:
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
    if as_json:
        emit_json(data_dir=str(folder), fetched=fetched)
        return
    counts = [f"{sum(r['examples'].values()):,}" for r in fetched]
    rows = [(r["name"], r["hub"], n, r["licence"]) for r, n in zip(fetched, counts, strict=True)]
    emit_table(("dataset", "from", "examples", "licence"), rows)


@app.command()
def verify(
    names: list[str] | None = typer.Argument(
        None, help="The datasets to read; all local ones if none is named."
    ),
    folder: Path = FOLDER,
    as_json: bool = JSON,
) -> None:
    """Read every line of datasets and name what is damaged.

    Counts examples and copies too. The exit code is 4 if anything is damaged.
    """
    from agent_forge.data import datasets
    from agent_forge.errors import DamagedFile

    for name in names or ():
        datasets.find(name)
    known = datasets.DATASETS
    absent = set(datasets.missing(known, folder))
    reports: list[dict[str, Any]] = []
    damaged: list[ForgeError] = []
    for name in names or (name for name in known if name not in absent):
        try:
            reports.append(datasets.verify(name, folder))
        except DamagedFile as error:
            damaged.append(error)
            typer.echo(f"damaged: {error}", err=True)
    if as_json and not damaged:
        emit_json(data_dir=str(folder), verified=reports)
    elif reports and not as_json:
        rows = []
        for r in reports:
            copies = (r["duplicates"], r["in_two_splits"], size(r["bytes"]))
            rows.append((r["name"], r["examples"], *r["splits"].values(), *copies))
        columns = ("dataset", "examples", *datasets.SPLITS, "copies", "in two splits", "size")
        emit_table(columns, rows)
    if damaged:
        raise damaged[0]
    if not reports:
        typer.echo(f"no datasets in {folder} yet", err=True)


@app.command()
def show(
    name: str = typer.Argument(help="A dataset, or the path of a file or folder of your own."),
    n: int = typer.Option(3, "-n", min=1, max=1_000_000, help="The number of examples to show."),
    split: str | None = typer.Option(None, "--split", help="Only train, selection or verdict."),
    folder: Path = FOLDER,
    as_json: bool = JSON,
) -> None:
    """Show the first examples as a model would get them."""
    examples = list(itertools.islice(_read(name, folder, split), n))
    if as_json:
        emit_json(name=name, examples=[asdict(example) for example in examples])
        return
    for example in examples:
        print(f"--- {example.source} ({example.split})")
        if example.prompt:
            print(f"prompt: {_shown(example.prompt)}")
        print(f"learned: {_shown(example.completion)}")
    if not examples:
        typer.echo(f"{name} has no such examples", err=True)


def _read(name: str, folder: Path, split: str | None) -> Iterator[Example]:
    from agent_forge.data import datasets

    if name not in datasets.DATASETS and (Path(name).exists() or "." in name or "/" in name):
        return datasets.read_own(Path(name), split=split)
    return datasets.read(name, folder, split=split)


def _shown(text: str) -> str:
    """Text for a terminal: control characters other than line ends could rewrite the screen."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
