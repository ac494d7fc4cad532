"""`forge eval` and `forge compare`: what models can do, on files, generated tasks and packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.output import emit, emit_json, emit_table
from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.evals.lm_eval_harness import PREFIX as HARNESS
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.evals.domains import Domain
    from agent_forge.evals.model_under_test import ItemScores

SHARES = {"accuracy": "accuracy", "majority": "majority", "n-gram": "ngram", "chance": "chance"}
WRITTEN_SHARES = ("truncated", "empty", "cut")
NUMBERS = {"perplexity": "perplexity", "bits/byte": "bits_per_byte"}
NUMBERS |= {"nats/token": "nats_per_token", "steps": "steps"}


def eval(
    model: Path,
    data: list[Path],
    tasks: list[str],
    pack: list[str],
    shots: int | None,
    folder: Path,
    items: int | None,
    split: str | None,
    level: str,
    as_json: bool,
) -> None:
    """Measure accuracy, perplexity and bits per byte of a model."""
    harness = [name for name in pack if name.startswith(HARNESS)]
    own = [name for name in pack if name not in harness]
    from agent_forge.model.locate import locate_model

    levels, path = _levels(level), Path(locate_model(model))
    rows: list[dict[str, Any]] = []
    if data or tasks or own or not harness:
        domains = _domains([path], data, tasks, own, shots, folder, items, split, levels)
        scores = _measured(model, path, domains, as_json)
        recursive = _is_ours(path)
        rows = [_row(d, s, recursive) for d, s in zip(domains, scores, strict=True)]
    if harness:
        from agent_forge.evals.lm_eval_harness import measure

        names = [name.removeprefix(HARNESS) for name in harness]
        rows += measure(path, names, limit=items, shots=shots, folder=folder)
    emit(as_json, *_table(rows), model=str(model), split=split, domains=rows)


def compare(
    reference: Path,
    candidate: Path,
    data: list[Path],
    tasks: list[str],
    pack: list[str],
    shots: int | None,
    folder: Path,
    items: int | None,
    split: str | None,
    level: str,
    seed: int,
    as_json: bool,
) -> None:
    """Test whether model B is better than model A on the same items."""
    from agent_forge.model.locate import locate_model

    levels = _levels(level)
    paths = {model: Path(locate_model(model)) for model in (reference, candidate)}
    domains = _domains([*paths.values()], data, tasks, pack, shots, folder, items, split, levels)
    from agent_forge.evals import comparison

    scores = [_measured(model, paths[model], domains, as_json) for model in (reference, candidate)]
    result = comparison.compare(scores[0], scores[1], domains, seed)
    sentence = result.overall.sentence(str(reference))
    answers, detectable = comparison.detectable_gain(domains)
    rates = [
        {"model": str(model), "domain": domain.name, **_rates(found)}
        for model, own in zip((reference, candidate), scores, strict=True)
        for domain, found in zip(domains, own, strict=True)
    ]
    if as_json:
        named = {"reference": str(reference), "candidate": str(candidate), "seed": seed}
        told = {"sentence": sentence, "smallest_gain": detectable, "rates": rates}
        return emit_json(**named, **result.to_json(), **told)
    emit_table(comparison.COLUMNS, result.rows())
    print(f"{candidate}: {sentence}")
    for row in rates:
        if said := ", ".join(f"{row[name]:.1%} {name}" for name in WRITTEN_SHARES if row[name]):
            typer.echo(f"{row['model']} on {row['domain']}: {said}", err=True)
    if detectable:
        points = f"{100 * detectable:.1f} points"
        typer.echo(f"{answers} answers can show gains from about {points} on", err=True)


def _is_ours(model: Path) -> bool:
    from agent_forge.model.folder import MODEL_TYPE, read_config

    return bool(read_config(model)["model_type"] == MODEL_TYPE)


def _domains(
    models: Sequence[Path],
    data: list[Path],
    tasks: list[str],
    packs: list[str],
    shots: int | None,
    folder: Path,
    items: int | None,
    split: str | None,
    levels: tuple[int, int],
) -> list[Domain]:
    """What is to be measured; everything wrong with it is said before a model is loaded."""
    from agent_forge.evals.benchmarks import from_benchmarks
    from agent_forge.evals.domains import TASK_ITEMS, from_files, from_tasks, part

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
        hint = "rename the file, or measure them one after the other"
        raise ConfigError("two of the files, tasks and packs have the same name", hint=hint)
    return domains


def _levels(text: str) -> tuple[int, int]:
    from agent_forge.data.tasks.base import MAX_LEVEL

    low, dash, high = text.partition("-")
    ends = [int(end) for end in (low, high if dash else low) if end.isdecimal() and len(end) < 10]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MAX_LEVEL:
        hint = f"levels go from 1 to {MAX_LEVEL}: such as 7, or 1-20"
        raise ConfigError(f"--level {text!r} is no level and no range of levels", hint=hint)
    return ends[0], ends[1]


def _measured(model: Path, path: Path, domains: Sequence[Domain], quiet: bool) -> list[ItemScores]:
    """The scores of a model on every domain, with progress on stderr."""
    from agent_forge.evals.model_under_test import open_model_under_test

    opened, scores = open_model_under_test(path), []
    with make_progress("none" if quiet else "auto") as view:

        def progress(what: str, done: int, total: int) -> None:
            view({"event": "step", "phase": what, "step": done, "total": total})

        try:
            for domain in domains:
                prepared, what = opened.prepare(domain), f"{model.name} on {domain.name}, tokens"
                view({"event": "loop", "name": what, "first": 0, "total": prepared.tokens})
                scores.append(opened.measure(prepared, progress=partial(progress, what)))
        except NotFinite as error:
            raise DamagedFile(model, str(error)) from error
    return scores


def _row(domain: Domain, scores: ItemScores, recursive: bool) -> dict[str, Any]:
    from agent_forge.evals.domains import beyond_chance, perplexity_score

    bits = scores.bits_per_byte(sum(domain.sizes))
    guesses = domain.baselines()
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
        **_rates(scores),
    }


def _rates(scores: ItemScores) -> dict[str, float | None]:
    """The shares of answers and prompts that say little of a model; None where none is known."""
    flags = {name: getattr(scores, name) for name in WRITTEN_SHARES}
    return {name: sum(own) / len(own) if own else None for name, own in flags.items()}


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells; the rates of written answers and of cut prompts where there are any."""
    known = (name for name in WRITTEN_SHARES if any(row.get(name) is not None for row in rows))
    shares = SHARES | {name: name for name in known}

    def cell(row: dict[str, Any], key: str, form: str) -> str | None:
        value = row.get(key)
        return None if value is None or (key == "chance" and not value) else format(value, form)

    lines = [
        [row["domain"], row["items"]]
        + [cell(row, key, ".1%") for key in shares.values()]
        + [cell(row, key, ".4g") for key in NUMBERS.values()]
        for row in rows
    ]
    return ["domain", "items", *shares, *NUMBERS], lines
