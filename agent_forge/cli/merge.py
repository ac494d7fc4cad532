"""`forge merge`: one merge today, from mergekit's YAML, a recipe of ours, or a few options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge import platform
from agent_forge.cli.config import JSON, MAX_SEED, SETS
from agent_forge.cli.output import emit_json, emit_table, plain, size
from agent_forge.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from agent_forge.merge.output import WrittenMerge
    from agent_forge.merge.preflight import Preflight
    from agent_forge.merge.recipe import Recipe

REFERENCES = ("model", "base_model", "tokenizer_source", "source")  # what names a model in a recipe
Progress = Callable[[str, int, int], None]  # tensor, bytes done, bytes in all


def merge(
    paths: list[Path] = typer.Argument(
        help="Two paths: a recipe and the folder to write; the folder alone with --models.",
        metavar="[RECIPE] OUT",
    ),
    models: str | None = typer.Option(
        None, "--models", metavar="A,B,C", help="Models: folders, runs, hub ids, BASE+ADAPTER."
    ),
    method: str | None = typer.Option(
        None, "--method", help="The method: linear, slerp, ties, dare_ties, ..."
    ),
    combo: str | None = typer.Option(
        None, "--combo", help="0 to 7, 110, slerp-ties-frankenmerge, or all (eight folders)."
    ),
    base: str | None = typer.Option(
        None, "--base", help="The model that task vectors are differences from."
    ),
    sets: list[str] = SETS,
    seed: int | None = typer.Option(
        None, "--seed", min=0, max=MAX_SEED, help="The seed of random masks."
    ),
    max_ram: float | None = typer.Option(
        None, "--max-ram", metavar="MB", min=1, max=1e9, help="Refuse to use more memory than this."
    ),
    threads: int = typer.Option(
        0, "--threads", min=0, max=1024, help="The number of CPU threads; 0 means all cores."
    ),
    force: bool = typer.Option(False, "--force", help="Replace an earlier model in OUT."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Only check, and forecast disk, memory and time."
    ),
    as_json: bool = JSON,
) -> None:
    """Merge models into one, or only check them (--dry-run)."""
    _check_paths(paths, bool(models))
    named = [{"model": ref.strip()} for ref in (models or "").split(",") if ref.strip()]
    said = {"models": named or None, "merge_method": method, "combo": combo, "base_model": base}
    given = {key: value for key, value in (*said.items(), ("seed", seed)) if value is not None}
    out, eight = paths[-1], given.get("combo") == "all"
    with whole_or_nothing(out) as watch:
        recipe = _recipe({**given, "combo": 0} if eight else given, sets, paths)
        recipe = _located(recipe, {base, *(model["model"] for model in named)})
        from agent_forge.merge.combos import ALL, combo_name
        from agent_forge.merge.preflight import check_target, preflight

        report = preflight(recipe, out)
        max_bytes = None if max_ram is None else int(max_ram * 1e6)
        folders: dict[int | None, Path]
        folders = {n: out / combo_name(n) for n in ALL} if eight else {recipe.combo: out}
        check_target(report, list(folders.values()), force=force, max_ram=max_bytes)
        if dry_run:
            _show(report, recipe, as_json)
            raise typer.Exit(report.error.exit_code if report.error else 0)
        report.require()
        for problem in report.problems:
            typer.echo(f"{problem.level}: {plain(problem.what)}; {plain(problem.remedy)}", err=True)
        cores = threads or os.cpu_count() or 1
        _report(_write(recipe, folders, force, max_bytes, cores, watch), as_json)


def _check_paths(paths: list[Path], named: bool) -> None:
    if len(paths) != (1 if named else 2):
        needed = "one folder to write is" if named else "a recipe and one folder to write are"
        example = "forge merge RECIPE.yml OUT, or forge merge --models a,b --method linear OUT"
        raise ConfigError(f"{needed} needed", hint=example)


@contextlib.contextmanager
def whole_or_nothing(out: Path) -> Iterator[Progress]:
    """Run a block that an interrupt ends with nothing written.

    Yields a function that is to be told of the progress: from the last byte on signals are
    ignored, since putting the model in its place takes an instant.
    """
    with contextlib.ExitStack() as ignoring:

        def progress(name: str, done: int, total: int) -> None:
            if done == total:
                ignoring.enter_context(platform.on_stop_signals(lambda name: None))

        try:
            yield progress
        except KeyboardInterrupt:
            raise Cancelled(f"interrupted: nothing was written to {out}") from None


def _recipe(given: dict[str, Any], sets: list[str], paths: list[Path]) -> Recipe:
    """The file, then the options, then --set: the later ones stand."""
    from agent_forge.config.load import merge as joined
    from agent_forge.config.load import parse_set, validate
    from agent_forge.merge.recipe import Recipe, read_data

    if len(paths) == 2 and paths[0].is_dir():
        hint = f"name the file ({paths[0] / 'recipe.yml'}), or the models with --models"
        raise ConfigError(f"{paths[0]} is a folder, not a recipe", hint=hint)
    data = read_data(paths[0]) if len(paths) == 2 else {}
    data = joined(data, given)
    for item in sets:
        data = joined(data, parse_set(item))
    if "models" in given and not {"merge_method", "combo"} & set(data):
        data["merge_method"] = "linear"
    recipe = validate(Recipe, data, str(paths[0]) if len(paths) == 2 else "the options")
    if "base_model" in given and recipe.method().base == "ignored":
        hint = "leave it out, or list it among the models to merge it too"
        raise ConfigError(f"{recipe.merge_method} has no base, so --base has no meaning", hint=hint)
    return recipe


def _located(recipe: Recipe, named: set[str | None]) -> Recipe:
    """The same recipe with the paths of the models that the command line names.

    They may be runs, hub ids or aliases. A recipe alone makes nothing be fetched.
    """
    from agent_forge.config.load import validate
    from agent_forge.merge.recipe import Recipe
    from agent_forge.model.locate import locate_model

    places = {ref: locate_model(ref) for ref in recipe.references() if ref in named}
    if all(ref == place for ref, place in places.items()):
        return recipe

    def replaced(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: replaced(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        return places.get(value, value) if key in REFERENCES else value

    data = replaced(recipe.model_dump(exclude_unset=True))
    data["parents"] = {places.get(ref, ref): digest for ref, digest in recipe.parents.items()}
    return validate(Recipe, data, "the recipe")


def _write(
    recipe: Recipe,
    folders: Mapping[int | None, Path],
    force: bool,
    max_bytes: int | None,
    threads: int,
    watch: Progress,
) -> list[WrittenMerge]:
    import torch

    from agent_forge.merge.engine import merge as merge_weights
    from agent_forge.merge.output import write_folders
    from agent_forge.track.progress import make_progress

    torch.set_num_threads(1)  # the engine spreads runs over threads itself
    with make_progress() as display:
        display({"event": "loop", "name": "merge", "first": 0})

        def progress(name: str, done: int, total: int) -> None:
            watch(name, done, total)
            told = {"event": "step", "phase": "merge", "unit": "bytes"}
            display({**told, "step": done, "total": total})

        weights = merge_weights(recipe, threads=threads)
        return [*write_folders(weights, folders, force, max_bytes, progress=progress).values()]


def _show(report: Preflight, recipe: Recipe, as_json: bool) -> None:
    """The verdict of a dry run."""
    from agent_forge.merge.recipe import to_mergekit

    problems = [{"level": p.level, "what": p.what, "remedy": p.remedy} for p in report.problems]
    if as_json:
        exported = None
        with contextlib.suppress(ConfigError):
            exported = to_mergekit(recipe)
        emit_json(
            verdict=report.verdict,
            problems=problems,
            facts=report.facts,
            recipe=recipe.model_dump(mode="json"),
            recipe_hash=recipe.canonical_hash(),
            mergekit=exported,
        )
        return
    if problems:
        emit_table(("", "what", "remedy"), [tuple(p.values()) for p in problems])
    facts = dict(report.facts)
    for key in ("output_bytes", "free_bytes", "memory_bytes"):
        if key in facts:
            facts[key.removesuffix("_bytes")] = size(facts.pop(key))
    emit_table(("forecast", ""), list(facts.items()))
    typer.echo(f"can be merged: {report.verdict}", err=True)


def _report(written: list[WrittenMerge], as_json: bool) -> None:
    if as_json:
        emit_json(merged=[_row(w) for w in written])
        return
    for w in written:
        print(w.folder)
    first, count = written[0], sum(len(w.notes) for w in written)
    replaced = f", {count} tensors replaced by the mean (see the card)"
    typer.echo(
        f"{len(written)} x {size(first.bytes)} in {first.seconds:.1f} s,"
        f" peak memory {size(first.peak_bytes)}{replaced if count else ''}",
        err=True,
    )


def _row(written: WrittenMerge) -> dict[str, Any]:
    return {
        "folder": str(written.folder),
        "bytes": written.bytes,
        "seconds": round(written.seconds, 3),
        "peak_memory_bytes": written.peak_bytes,
        "sha256": written.sha256,
        "replaced_by_mean": [note._asdict() for note in written.notes],
    }
