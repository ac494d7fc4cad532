"""`forge eval` and `forge compare`: what models can do, on files, generated tasks and packs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from agent_forge.cli.config import JSON, MAX_SEED
from agent_forge.cli.data import FOLDER
from agent_forge.cli.generate import MODEL
from agent_forge.cli.output import emit_json, emit_table
from agent_forge.evals.harness import PREFIX as HARNESS

if TYPE_CHECKING:
    from agent_forge.evals.comparison import Verdict
    from agent_forge.evals.domains import Domain
    from agent_forge.evals.likelihood import ItemScores

DATA = typer.Option(
    [],
    "--data",
    metavar="FILE",
    help="Text, or JSONL with prompt and completion (and choices) or messages; repeatable, each"
    " file is a domain.",
)
TASKS = typer.Option(
    [], "--tasks", metavar="NAME", help="Generated tasks: a family or a domain; repeatable."
)
PACK = typer.Option(
    [],
    "--pack",
    metavar="NAME",
    help="math, code, multilingual, structured, a published set of the data folder such as gsm8k,"
    " or for eval lm-eval:TASK; repeatable.",
)
SHOTS = typer.Option(
    None,
    "--shots",
    min=0,
    max=1000,
    help="Worked examples before each item of a pack; else as it says.",
)
ITEMS = typer.Option(
    None,
    "--items",
    min=1,
    max=1_000_000,
    help="Of each domain; else 2000 tasks, 500 of a generated pack, all of a file or set.",
)
SPLIT = typer.Option(
    None,
    "--split",
    help="selection, holdout or verdict; else the verdict of tasks and packs, and all of a file.",
)
LEVEL = typer.Option("1-20", "--level", help="Of generated tasks, 1 to 100: one, or a range.")


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
    """Measure a model: accuracy, perplexity and bits per byte of each domain."""
    harness = [name for name in pack if name.startswith(HARNESS)]
    own = [name for name in pack if name not in harness]
    domains: list[Domain] = []
    if data or tasks or own or not harness:
        domains = _domains([model], data, tasks, items, split, level, _Packs(own, shots, folder))
    outcomes = _measured(model, domains, as_json) if domains else []
    rows = [_row(d, o, _ours(model)) for d, o in zip(domains, outcomes, strict=True)]
    if harness:
        from agent_forge.evals.harness import measure

        names = [name.removeprefix(HARNESS) for name in harness]
        rows += measure(model, names, limit=items, shots=shots, folder=folder)
    if as_json:
        emit_json(model=str(model), split=split, domains=rows)
        return
    emit_table(*_table(rows))


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells; the rates of written answers only where there are any."""
    numbers = {"perplexity": "perplexity", "bits/byte": "bits_per_byte"}
    numbers |= {"nats/token": "nats_per_token", "steps": "steps"}
    shares = {"accuracy": "accuracy", "majority": "majority", "n-gram": "ngram", "chance": "chance"}
    if any(row.get("truncated") is not None for row in rows):
        shares |= {"truncated": "truncated", "empty": "empty", "cut": "cut"}
    lines = []
    for row in rows:
        line = [row["domain"], row["items"]]
        line += [
            _percent(row.get(key) if key != "chance" else row.get(key) or None)
            for key in shares.values()
        ]
        lines.append([*line, *(_number(row.get(key)) for key in numbers.values())])
    return ["domain", "items", *shares, *numbers], lines


def compare(
    reference: Path = typer.Argument(help="A: the model directory to beat."),
    candidate: Path = typer.Argument(help="B: the one that may be better."),
    data: list[Path] = DATA,
    tasks: list[str] = TASKS,
    pack: list[str] = PACK,
    shots: int | None = SHOTS,
    folder: Path = FOLDER,
    items: int | None = ITEMS,
    split: str | None = SPLIT,
    level: str = LEVEL,
    seed: int = typer.Option(0, "--seed", min=0, max=MAX_SEED, help="Of the resampling."),
    as_json: bool = JSON,
) -> None:
    """Say whether B is better than A on the same items: paired tests, 95 % intervals."""
    models = [reference, candidate]
    packs = _Packs(pack, shots, folder)
    domains = _domains(models, data, tasks, items, split, level, packs)
    from agent_forge.evals.comparison import PairedScores, compare_scores
    from agent_forge.evals.domains import smallest_gain

    measured = zip(domains, *(_measured(m, domains, as_json) for m in models), strict=True)
    found = compare_scores(
        [PairedScores(d.name, a, b, d.sizes, d.exact) for d, a, b in measured], seed=seed
    )
    sentence = found.overall.sentence(str(reference))
    answers = sum(len(d.examples) for d in domains if d.exact)
    detectable = smallest_gain(answers) if answers else None
    if as_json:
        verdicts = {v.name: _gains(v) for v in found.domains}
        emit_json(
            **{"reference": str(reference), "candidate": str(candidate), "seed": seed},
            **{"domains": verdicts, "overall": _gains(found.overall), "sentence": sentence},
            smallest_gain=detectable,
        )
        return
    several = [found.overall] if len(domains) > 1 else []
    emit_table(
        ("domain", "measure", "n", "A", "B", "gain of B", "95 % interval", "p", "verdict"),
        [line for verdict in (*found.domains, *several) for line in _lines(verdict)],
    )
    print(f"{candidate}: {sentence}")
    if detectable:
        points = f"{100 * detectable:.1f} points"
        typer.echo(f"{answers} answers can show gains from about {points} on", err=True)


def _gains(verdict: Verdict) -> dict[str, Any]:
    return {name: {**asdict(g), "verdict": g.verdict} for name, g in verdict.gains.items()}


def _lines(verdict: Verdict) -> list[tuple[Any, ...]]:
    """A line of the table for each measure, accuracy in points."""
    from agent_forge.evals.comparison import UNITS

    lines = []
    for measure, (scale, unit) in UNITS.items():
        if gain := verdict.gains.get(measure):
            values = (gain.reference, gain.candidate, gain.value, gain.low, gain.high)
            a, b, value, low, high = (f"{scale * x:.{1 if scale > 1 else 4}f}" for x in values)
            name = f"{measure}, {unit}" if scale > 1 else unit
            interval = f"{low}..{high}"
            row = (verdict.name, name, gain.n, a, b, value, interval, f"{gain.p:.4f}")
            lines.append((*row, gain.verdict))
    return lines


def _domains(
    models: Sequence[Path],
    data: list[Path],
    names: list[str],
    items: int | None,
    split: str | None,
    level: str,
    packs: _Packs,
) -> list[Domain]:
    """What is asked for; everything that can be wrong with it is said before a model is loaded."""
    from agent_forge.errors import ConfigError
    from agent_forge.evals.benchmarks import from_benchmarks
    from agent_forge.evals.domains import TASK_ITEMS, from_files, from_tasks, part

    if packs.shots is not None and not packs.names:
        raise ConfigError("--shots are worked examples of a pack", hint="name one: --pack NAME")
    levels = _levels(level)
    ours = [_ours(model) for model in models]
    domains = [part(domain, split, items) for domain in from_files(data)]
    if names or (not data and not packs.names and all(ours)):
        domains += from_tasks(
            names, split=split or "verdict", count=items or TASK_ITEMS, levels=levels
        )
    domains += from_benchmarks(
        packs.names,
        split=split,
        count=items,
        levels=levels,
        folder=packs.folder,
        shots=packs.shots,
    )
    if not domains:
        raise ConfigError("nothing to measure", hint="--data FILE, --tasks NAME or --pack NAME")
    if len({domain.name for domain in domains}) < len(domains):
        raise ConfigError(
            "two of the files, tasks and packs have the same name",
            hint="rename the file, or measure them one after the other",
        )
    return domains


class _Packs(NamedTuple):
    """The packs that are wanted, and where the published ones are."""

    names: list[str]
    shots: int | None
    folder: Path


def _ours(model: Path) -> bool:
    from agent_forge.model.folder import MODEL_TYPE, read_config

    return bool(read_config(model)["model_type"] == MODEL_TYPE)


def _levels(text: str) -> tuple[int, int]:
    from agent_forge.data.tasks.base import MAX_LEVEL
    from agent_forge.errors import ConfigError

    low, dash, high = text.partition("-")
    given = (low, high if dash else low)
    ends = [int(end) for end in given if end.isdecimal() and len(end) < 10]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MAX_LEVEL:
        raise ConfigError(
            f"--level {text!r} is no level and no range of levels",
            hint=f"levels go from 1 to {MAX_LEVEL}: such as 7, or 1-20",
        )
    return ends[0], ends[1]


def _measured(model: Path, domains: Sequence[Domain], quiet: bool) -> list[ItemScores]:
    """The outcome of every domain, with progress for who waits."""
    from agent_forge.errors import DamagedFile, NotFinite
    from agent_forge.evals.model_under_test import open_model_under_test
    from agent_forge.track.progress import make_progress

    subject = open_model_under_test(model)
    outcomes = []
    with make_progress("none" if quiet else "auto", sys.stderr) as view:
        for domain in domains:
            prepared = subject.prepare(domain)
            total = prepared.tokens
            what = f"{model.name} on {domain.name}, tokens"
            view({"event": "loop", "name": what, "first": 0, "total": total})

            def step(done: int, total: int, what: str = what) -> None:
                view({"event": "step", "phase": what, "step": done, "total": total})

            try:
                outcomes.append(subject.measure(prepared, progress=step))
            except NotFinite as error:
                raise DamagedFile(model, str(error)) from error
    return outcomes


def _row(domain: Domain, outcome: ItemScores, recursive: bool) -> dict[str, Any]:
    from agent_forge.evals.domains import beyond_chance, perplexity_score

    bits = outcome.bits_per_byte(sum(domain.sizes))
    guesses = domain.baselines()
    return {
        "domain": domain.name,
        "items": len(domain.examples),
        "accuracy": outcome.accuracy if domain.exact else None,
        "chance": domain.chance if domain.exact else None,
        "beyond_chance": beyond_chance(outcome.accuracy, domain.chance) if domain.exact else None,
        "majority": guesses.get("majority"),
        "ngram": guesses.get("ngram"),
        "perplexity": math.exp(min(700, outcome.nats_per_token)),
        "bits_per_byte": bits,
        "unigram_bits_per_byte": domain.unigram_bits,
        "perplexity_score": perplexity_score(bits, domain.unigram_bits),
        "nats_per_token": outcome.nats_per_token,
        "steps": outcome.mean_steps if recursive else None,
        "truncated": _share(outcome.truncated),
        "empty": _share(outcome.empty),
        "cut": _share(outcome.cut),
    }


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
