"""`forge merge`: one merge today, from mergekit's YAML, a recipe of ours, or a few options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge import platform
from agent_forge.cli.output import emit_json, emit_table, plain, size
from agent_forge.errors import Cancelled, ConfigError
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.merge.output import ProgressCallback, WrittenMerge
    from agent_forge.merge.preflight import MergePreflight
    from agent_forge.merge.recipe import Recipe

REFERENCES = ("model", "base_model", "tokenizer_source", "source")  # what names a model in a recipe


def merge(
    paths: list[Path],
    models: str | None,
    method: str | None,
    combo: str | None,
    base: str | None,
    sets: list[str],
    seed: int | None,
    max_ram: float | None,
    threads: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Merge models into one, or only check them (--dry-run)."""
    if len(paths) != (1 if models else 2):
        needed = "one folder to write is" if models else "a recipe and one folder to write are"
        example = "forge merge RECIPE.yml OUT, or forge merge --models a,b --method linear OUT"
        raise ConfigError(f"{needed} needed", hint=example)
    named = [{"model": ref.strip()} for ref in (models or "").split(",") if ref.strip()]
    options: dict[str, Any] = {"models": named or None, "merge_method": method, "combo": combo}
    options |= {"base_model": base, "seed": seed}
    given = {key: value for key, value in options.items() if value is not None}
    out, eight = paths[-1], combo == "all"
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
        plan = report.require()
        for problem in report.problems:
            typer.echo(f"{problem.level}: {plain(problem.what)}; {plain(problem.remedy)}", err=True)
        import torch

        from agent_forge.merge.engine import MergedWeights
        from agent_forge.merge.output import write_folders

        torch.set_num_threads(1)  # the engine spreads runs over threads itself
        weights = MergedWeights(plan, threads=threads or os.cpu_count() or 1)
        with make_progress() as display:
            display({"event": "loop", "name": "merge", "first": 0})

            def progress(name: str, done: int, total: int) -> None:
                watch(name, done, total)
                step = {"event": "step", "phase": "merge", "unit": "bytes"}
                display({**step, "step": done, "total": total})

            written = write_folders(weights, folders, force, max_bytes, progress=progress)
        _report([*written.values()], as_json)


@contextlib.contextmanager
def whole_or_nothing(out: Path) -> Iterator[ProgressCallback]:
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

    source = paths[0] if len(paths) == 2 else None
    if source and source.is_dir():
        hint = f"name the file ({source / 'recipe.yml'}), or the models with --models"
        raise ConfigError(f"{source} is a folder, not a recipe", hint=hint)
    data = joined(read_data(source) if source else {}, given)
    for item in sets:
        data = joined(data, parse_set(item))
    if "models" in given and not {"merge_method", "combo"} & set(data):
        data["merge_method"] = "linear"
    recipe = validate(Recipe, data, str(source or "the options"))
    if "base_model" in given and recipe.method().base == "ignored":
        hint = "leave it out, or list it among the models to merge it too"
        raise ConfigError(f"{recipe.merge_method} has no base, so --base has no meaning", hint=hint)
    return recipe


def _located(recipe: Recipe, named: set[str | None]) -> Recipe:
    """The recipe with paths of the models that the command line names, which alone are fetched, and
    of models in one file."""
    from agent_forge.config.load import validate
    from agent_forge.merge.recipe import Recipe
    from agent_forge.model.locate import locate_model
    from agent_forge.store.container import SUFFIX

    wanted = {ref for ref in recipe.references() if ref in named or Path(ref).suffix == SUFFIX}
    located = {ref: locate_model(ref) for ref in wanted}
    if all(ref == path for ref, path in located.items()):
        return recipe

    def replaced(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: replaced(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        return located.get(value, value) if key in REFERENCES else value

    data = replaced(recipe.model_dump(exclude_unset=True))
    data["parents"] = {located.get(ref, ref): digest for ref, digest in recipe.parents.items()}
    return validate(Recipe, data, "the recipe")


def _show(report: MergePreflight, recipe: Recipe, as_json: bool) -> None:
    """Print the verdict of a dry run."""
    from agent_forge.merge.recipe import to_mergekit

    problems = [{"level": p.level, "what": p.what, "remedy": p.remedy} for p in report.problems]
    if as_json:
        exported = None
        with contextlib.suppress(ConfigError):
            exported = to_mergekit(recipe)
        forecast = {"verdict": report.verdict, "problems": problems, "facts": report.facts}
        asked = {"recipe": recipe.model_dump(mode="json"), "recipe_hash": recipe.canonical_hash()}
        return emit_json(**forecast, **asked, mergekit=exported)
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
        rows: list[dict[str, Any]] = []
        for w in written:
            rows.append({"folder": str(w.folder), "bytes": w.bytes, "seconds": round(w.seconds, 3)})
            rows[-1] |= {"peak_memory_bytes": w.peak_bytes, "sha256": w.sha256}
            rows[-1] |= {"replaced_by_mean": [note._asdict() for note in w.notes]}
        return emit_json(merged=rows)
    for w in written:
        print(w.folder)
    first, count = written[0], sum(len(w.notes) for w in written)
    replaced = f", {count} tensors replaced by the mean (see the card)" if count else ""
    cost = f"in {first.seconds:.1f} s, peak memory {size(first.peak_bytes)}"
    typer.echo(f"{len(written)} x {size(first.bytes)} {cost}{replaced}", err=True)
