"""`forge eval` and `forge compare`: what models can do, on files, generated tasks and packs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from agent_forge.cli.config import JSON, MAX_SEED
from agent_forge.cli.data import FOLDER
from agent_forge.cli.generate import MODEL, MODEL_FORMS
from agent_forge.cli.output import emit_json, emit_table
from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.evals.lm_eval_harness import PREFIX as HARNESS

if TYPE_CHECKING:
    from agent_forge.evals.domains import Domain
    from agent_forge.evals.model_under_test import ItemScores

DATA = typer.Option(
    [],
    "--data",
    metavar="FILE",
    help="A file to measure on: text, or JSONL with prompt and completion (and choices) or"
    " messages. Repeatable; each file is a domain.",
)
TASKS = typer.Option(
    [], "--tasks", metavar="NAME", help="Generated tasks: a family or a domain. Repeatable."
)
PACK = typer.Option(
    [],
    "--pack",
    metavar="NAME",
    help="A benchmark: math, code, multilingual, structured, a published set of the data folder"
    " such as gsm8k, or, for eval, lm-eval:TASK. Repeatable.",
)
SHOTS = typer.Option(
    None,
    "--shots",
    min=0,
    max=1000,
    help="How many worked examples stand before each item of a pack. Each pack has a default.",
)
ITEMS = typer.Option(
    None,
    "--items",
    min=1,
    max=1_000_000,
    help="How many items of each domain are asked. Default: 2000 tasks, 500 of a generated pack,"
    " all of a file or published set.",
)
SPLIT = typer.Option(
    None,
    "--split",
    help="The part to measure on: selection, holdout or verdict. Default: the verdict of tasks and"
    " packs, all of a file.",
)
LEVEL = typer.Option(
    "1-20", "--level", help="The difficulty of generated tasks: a level from 1 to 100, or a range."
)
SHARES = {"accuracy": "accuracy", "majority": "majority", "n-gram": "ngram", "chance": "chance"}
WRITTEN_SHARES = ("truncated", "empty", "cut")
NUMBERS = {
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "nats/token": "nats_per_token",
    "steps": "steps",
}


def eval(
    model: Path = MODEL,
    data: list[Path] = DATA,
    tasks: list[str] = TASKS,
    pack: list[str] = PACK,
    shots: int | None = SHOTS,
    folder: Path = FOLDER,
    items: int | None = ITEMS,
    split: str | None = SPLIT,
    level: str = LEVEL,
    as_json: bool = JSON,
) -> None:
    """Measure accuracy, perplexity and bits per byte of a model."""
    harness = [name for name in pack if name.startswith(HARNESS)]
    own = [name for name in pack if name not in harness]
    wanted = _Wanted(data, tasks, own, shots, folder, items, split, _levels(level))
    (place,) = _located([model])
    rows: list[dict[str, Any]] = []
    if data or tasks or own or not harness:
        domains = _domains([place], wanted)
        scores = _measured(model, place, domains, as_json)
        recursive = _is_ours(place)
        rows = [_row(d, s, recursive) for d, s in zip(domains, scores, strict=True)]
    if harness:
        from agent_forge.evals.lm_eval_harness import measure

        names = [name.removeprefix(HARNESS) for name in harness]
        rows += measure(place, names, limit=items, shots=shots, folder=folder)
    if as_json:
        emit_json(model=str(model), split=split, domains=rows)
        return
    emit_table(*_table(rows))


def compare(
    reference: Path = typer.Argument(help=f"A: the model to beat. {MODEL_FORMS}"),
    candidate: Path = typer.Argument(help="B: the model that may be better."),
    data: list[Path] = DATA,
    tasks: list[str] = TASKS,
    pack: list[str] = PACK,
    shots: int | None = SHOTS,
    folder: Path = FOLDER,
    items: int | None = ITEMS,
    split: str | None = SPLIT,
    level: str = LEVEL,
    seed: int = typer.Option(0, "--seed", min=0, max=MAX_SEED, help="Seed of the resampling."),
    as_json: bool = JSON,
) -> None:
    """Test whether model B is better than model A on the same items."""
    wanted = _Wanted(data, tasks, pack, shots, folder, items, split, _levels(level))
    models = [reference, candidate]
    places = _located(models)
    domains = _domains(places, wanted)
    from agent_forge.evals import comparison

    scores = [_measured(*pair, domains, as_json) for pair in zip(models, places, strict=True)]
    found = comparison.compare(scores[0], scores[1], domains, seed)
    sentence = found.overall.sentence(str(reference))
    answers, detectable = comparison.detectable_gain(domains)
    if as_json:
        named = {"reference": str(reference), "candidate": str(candidate), "seed": seed}
        emit_json(**named, **found.to_json(), sentence=sentence, smallest_gain=detectable)
        return
    emit_table(comparison.COLUMNS, found.rows())
    print(f"{candidate}: {sentence}")
    if detectable:
        points = f"{100 * detectable:.1f} points"
        typer.echo(f"{answers} answers can show gains from about {points} on", err=True)


class _Wanted(NamedTuple):
    """What the options ask for."""

    data: list[Path]
    tasks: list[str]
    packs: list[str]
    shots: int | None
    folder: Path
    items: int | None
    split: str | None
    levels: tuple[int, int]


def _located(models: Sequence[Path]) -> list[Path]:
    from agent_forge.model.locate import locate_model

    return [Path(locate_model(model)) for model in models]


def _is_ours(model: Path) -> bool:
    from agent_forge.model.folder import MODEL_TYPE, read_config

    return bool(read_config(model)["model_type"] == MODEL_TYPE)


def _domains(models: Sequence[Path], wanted: _Wanted) -> list[Domain]:
    """What is to be measured; everything wrong with it is said before a model is loaded."""
    from agent_forge.evals.benchmarks import from_benchmarks
    from agent_forge.evals.domains import TASK_ITEMS, from_files, from_tasks, part

    data, tasks, packs, shots, folder, items, split, levels = wanted
    if shots is not None and not packs:
        raise ConfigError("--shots are worked examples of a pack", hint="name one: --pack NAME")
    ours = [_is_ours(model) for model in models]
    domains = [part(domain, split, items) for domain in from_files(data)]
    if tasks or (not data and not packs and all(ours)):
        count = items or TASK_ITEMS
        domains += from_tasks(tasks, split=split or "verdict", count=count, levels=levels)
    domains += from_benchmarks(
        packs, split=split, count=items, levels=levels, folder=folder, shots=shots
    )
    if not domains:
        raise ConfigError("nothing to measure", hint="--data FILE, --tasks NAME or --pack NAME")
    if len({domain.name for domain in domains}) < len(domains):
        raise ConfigError(
            "two of the files, tasks and packs have the same name",
            hint="rename the file, or measure them one after the other",
        )
    return domains


def _levels(text: str) -> tuple[int, int]:
    from agent_forge.data.tasks.base import MAX_LEVEL

    low, dash, high = text.partition("-")
    given = (low, high if dash else low)
    ends = [int(end) for end in given if end.isdecimal() and len(end) < 10]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MAX_LEVEL:
        raise ConfigError(
            f"--level {text!r} is no level and no range of levels",
            hint=f"levels go from 1 to {MAX_LEVEL}: such as 7, or 1-20",
        )
    return ends[0], ends[1]


def _measured(model: Path, place: Path, domains: Sequence[Domain], quiet: bool) -> list[ItemScores]:
    """The scores of a model on every domain, with progress on stderr."""
    from agent_forge.evals.model_under_test import open_model_under_test
    from agent_forge.track.progress import make_progress

    opened = open_model_under_test(place)
    with make_progress("none" if quiet else "auto", sys.stderr) as view:

        def progress(domain: str, done: int, total: int) -> None:
            what = f"{model.name} on {domain}, tokens"
            if not done:
                view({"event": "loop", "name": what, "first": 0, "total": total})
                return
            view({"event": "step", "phase": what, "step": done, "total": total})

        try:
            return opened.measure_all(domains, progress)
        except NotFinite as error:
            raise DamagedFile(model, str(error)) from error


def _row(domain: Domain, scores: ItemScores, recursive: bool) -> dict[str, Any]:
    from agent_forge.evals.domains import beyond_chance, perplexity_score

    bits = scores.bits_per_byte(sum(domain.sizes))
    guesses = domain.baselines()
    written = {name: getattr(scores, name) for name in WRITTEN_SHARES}
    return {
        "domain": domain.name,
        "items": len(domain.examples),
        "accuracy": scores.accuracy if domain.exact else None,
        "chance": domain.chance if domain.exact else None,
        "beyond_chance": beyond_chance(scores.accuracy, domain.chance) if domain.exact else None,
        "majority": guesses.get("majority"),
        "ngram": guesses.get("ngram"),
        "perplexity": math.exp(min(700, scores.nats_per_token)),
        "bits_per_byte": bits,
        "unigram_bits_per_byte": domain.unigram_bits,
        "perplexity_score": perplexity_score(bits, domain.unigram_bits),
        "nats_per_token": scores.nats_per_token,
        "steps": scores.mean_steps if recursive else None,
        **{name: sum(flags) / len(flags) if flags else None for name, flags in written.items()},
    }


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells; the rates of written answers only where there are any."""
    written = any(row.get("truncated") is not None for row in rows)
    shares = SHARES | ({name: name for name in WRITTEN_SHARES} if written else {})

    def percent(row: dict[str, Any], key: str) -> str | None:
        value = row.get(key)
        return None if value is None or (key == "chance" and not value) else f"{value:.1%}"

    def number(value: float | None) -> str | None:
        return None if value is None else f"{value:.4g}"

    lines = [
        [row["domain"], row["items"]]
        + [percent(row, key) for key in shares.values()]
        + [number(row.get(key)) for key in NUMBERS.values()]
        for row in rows
    ]
    return ["domain", "items", *shares, *NUMBERS], lines
