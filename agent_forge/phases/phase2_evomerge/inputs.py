"""Before an evolution: settings and models are checked, the models opened, the data split.

Three disjoint splits are made of the items: candidates are measured on `selection`, `holdout`
decides when to stop, and only the comparison at the end reads `verdict`.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from agent_forge.config.load import did_you_mean, parse_set, read_one, validate
from agent_forge.config.load import merge as join
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.evals.benchmarks import from_names
from agent_forge.evals.domains import (
    Domain,
    copies_hint,
    copies_told,
    from_files,
    part,
    smallest_gain,
)
from agent_forge.evals.fitness import function_of, is_function
from agent_forge.merge.output import refuse_foreign
from agent_forge.merge.plan import Parents
from agent_forge.merge.preflight import preflight
from agent_forge.merge.recipe import ModelInput, Recipe
from agent_forge.model.folder import MODEL_TYPE, open_weights, read_config
from agent_forge.model.load import open_tokenizer
from agent_forge.model.locate import locate_parents
from agent_forge.model.weights import DEPTHS, Weights, with_same_heads
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.journal import BEGUN, CACHE, JOURNAL, read_journal
from agent_forge.search.continuous import pymoo
from agent_forge.search.settings import ACTS_IN
from agent_forge.store import files, lock, paths
from agent_forge.store.tensors import first_not_finite
from agent_forge.workers import require_ray

LEAST_ITEMS = 20  # of a split of the user's own data
LARGE_BYTES = 1_000_000_000  # the specification's limit for all parents together
CHAMPION = "champion"
CONTROL = "control"  # beside the trunk of Phase 1: trained on everything for as long
MODEL_NAMES = (CHAMPION, "plain average", "best combo of generation 0", "base", "joint training")
IN_MEMORY = "parent_"  # begins the folders of networks that were given in memory
AUTO = "auto"
GLANCE_TENSORS, GLANCE_ELEMENTS = 8, 256  # compared before two models are compared as a whole
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"generations": 20, "population_size": 4, "fitness_subset_size": 100},
    "production": {
        **{"generations": 100, "convergence_patience": 10},
        **{"min_diversity": 0.35, "fitness_subset_size": 1000},
    },
    "speed": {"fitness_weights": {"perplexity": 0.3, "accuracy": 0.2, "speed": 0.4, "memory": 0.1}},
}


@dataclass(frozen=True)
class EvolutionInputs:
    """All that an evolution starts from, checked: settings, opened models, and split items."""

    settings: EvoMergeSettings
    parent_refs: tuple[str, ...]  # a folder each, or base+adapter
    base_ref: str | None
    parents: tuple[Weights, ...]
    base: Weights | None
    splits: Mapping[str, Sequence[Domain]]
    folder: Path
    seed: int = 0
    names: tuple[str, ...] = ()  # of the parents, for people
    control_ref: str | None = None  # a model that was trained on everything for as long
    notes: tuple[str, ...] = ()

    @property
    def refs(self) -> list[str]:
        """The parents in their order, then the base."""
        return [*self.parent_refs, *([self.base_ref] if self.base_ref else [])]

    @property
    def models(self) -> list[Weights]:
        return [*self.parents, *([self.base] if self.base else [])]

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """The sha256 of every model's weights."""
        return tuple(weights.sha256() for weights in self.models)

    @property
    def nbytes(self) -> int:
        """Bytes of all parents."""
        return sum(weights.nbytes for weights in self.parents)

    @property
    def disk_bytes(self) -> int:
        """The most that the evolution has on the disk."""
        return self.settings.models_on_disk * self.nbytes // len(self.parents)

    def require_room(self) -> None:
        """Refuse an evolution that the disk cannot hold; what it has written is there already."""
        written = files.tree_bytes(self.folder) if self.folder.exists() else 0
        files.require_space(self.folder, max(0, self.disk_bytes - written))

    def refuse_damaged(self) -> None:
        """Refuse models whose weights are not finite."""
        for weights in self.models:
            if bad := first_not_finite(weights):
                problem = f"{bad} holds NaN or infinity"
                raise DamagedFile(weights.label, problem, hint="fetch it again")


# -- from a user's words to inputs ----------------------------------------------------------------


def load_settings(
    config: str | None, sets: Sequence[str], options: Mapping[str, Any]
) -> EvoMergeSettings:
    """Defaults < preset or file < --set, options; the last two may not contradict each other.

    The strategy is `auto`, which found most in the measurements of docs/evomerge.md, unless a file,
    a preset of the guide or a setting that `auto` does not have asks for the scheme of the guide.
    """
    merged: dict[str, Any] = {}
    if config in PRESETS:
        merged = dict(PRESETS[config])
    elif config is not None:
        if not Path(config).exists():
            known = did_you_mean(config, list(PRESETS))
            raise ConfigError(f"{config!r} is neither a file nor a preset{known}")
        merged = read_one(Path(config))
    by_set: dict[str, Any] = {}
    for text in sets:
        by_set = join(by_set, parse_set(text))
    for name, value in options.items():
        if by_set.get(name, value) != value:
            raise ConfigError(f"{name} is {by_set[name]} by --set and {value} by its own option")
    merged = join(merged, by_set)
    if config is None and all(AUTO in ACTS_IN.get(name, (AUTO,)) for name in merged):
        merged = {"strategy": AUTO, **merged}
    return validate(EvoMergeSettings, {**merged, **options}, config or "options")


def check_before_models(settings: EvoMergeSettings, folder: Path, parents: int) -> None:
    """Check all that does not need the models: they may still have to be trained."""
    refuse_place(folder, [])
    _refuse_fewer(folder, settings.generations)
    check_settings(settings, split_items(settings), parents)


def locate_inputs(
    settings: EvoMergeSettings,
    refs: Sequence[str],
    base: str | None,
    seed: int,
    folder: Path,
    storage: Path = Path("storage"),
    names: Sequence[str] = (),
) -> EvolutionInputs:
    """The inputs of an evolution in a folder of its own, from whatever names its models."""
    parents, known = locate_parents(refs, storage)
    base = locate_parents([base], storage)[0][0] if base else known
    if len({*names, *MODEL_NAMES}) < len(names) + len(MODEL_NAMES):
        raise ConfigError(f"the names {', '.join(names)} do not tell all models apart")
    refuse_place(folder, [*parents, *([base] if base else [])])
    _refuse_fewer(folder, settings.generations)
    settings = _split_as_begun(settings, folder)
    names = names or _short_names(parents)
    control = control_beside(base)
    return open_inputs(settings, parents, base, folder, seed=seed, names=names, control=control)


def resume_inputs(
    place: Path, gens: int | None, minutes: float | None, sets: Sequence[str] = ()
) -> EvolutionInputs:
    """The evolution in a folder, with the settings that it was last run with.

    A fitness that is the user's own code has to be named again: a folder alone never runs any.
    """
    folder, record = find_evolution(place)
    fitness = record["settings"].get("fitness")
    if fitness and f"fitness={fitness}" not in sets:
        again = shlex.join(["--resume", str(place), "--set", f"fitness={fitness}"])
        problem = f"{folder} runs a fitness of its own for every candidate: {fitness!r}"
        raise ConfigError(problem, hint=f"if it is yours: forge evo {again}")
    paths.require_writable(folder)
    begun = {**EvoMergeSettings.BEFORE, **record["settings"]}
    options: dict[str, Any] = {"generations": gens, "time_budget_minutes": minutes}
    changed = {name: value for name, value in options.items() if value is not None}
    settings = validate(EvoMergeSettings, {**begun, **changed}, str(folder / BEGUN))
    _refuse_fewer(folder, settings.generations)
    parents, base, seed, names = (record[key] for key in ("parents", "base", "seed", "names"))
    control = control_beside(base)
    return open_inputs(settings, parents, base, folder, seed=seed, names=names, control=control)


def find_evolution(place: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of an evolution, given that or a checkpoint in it, and what it was begun with."""
    hint = "they are called evolution_checkpoint_gen_N.json; the folder itself will do too"
    if place.suffix == ".pt":
        raise NotFound(f"{place} is no checkpoint of this version", hint=hint)
    if not place.exists():
        raise NotFound(f"there is no {place}", hint=hint)
    folder = place if place.is_dir() else place.parent
    if not (folder / BEGUN).is_file():
        raise NotFound(f"{folder} holds no evolution", hint=f"it would have a file {BEGUN}")
    record = _read_begun(folder)
    if place.is_file() and files.read_checked(place).get("fingerprint") != record["fingerprint"]:
        raise ConfigError(f"{place} is of another evolution than the one in its folder")
    return folder, record


def _read_begun(folder: Path) -> dict[str, Any]:
    """What an evolution was begun with."""
    record = files.read_checked(folder / BEGUN)
    lists = [record.get(key) for key in ("parents", "names")]
    if not (
        all(isinstance(texts, list) and texts for texts in lists)
        and all(isinstance(text, str) for texts in lists for text in texts or ())
        and isinstance(record.get("settings"), dict)
        and isinstance(record.get("base"), str | None)
        and isinstance(record.get("seed"), int)
        and isinstance(record.get("fingerprint"), str)
    ):
        raise DamagedFile(folder / BEGUN, "not what an evolution was begun with")
    return record


def write_begun(inputs: EvolutionInputs, fingerprint: str) -> None:
    """Note what the folder is run with, for whoever goes on; the journal refused any other."""
    record = {
        "settings": portable_settings(inputs.settings),
        "parents": list(inputs.parent_refs),
        "names": list(inputs.names),
        "base": inputs.base_ref,
        "seed": inputs.seed,
        "fingerprint": fingerprint,
    }
    files.write_bytes(inputs.folder / BEGUN, files.with_checksum(record))


def portable_settings(settings: EvoMergeSettings) -> dict[str, Any]:
    """The settings as JSON, the same from whatever folder they are read."""
    data = [str(Path(name).resolve()) for name in settings.data]
    return {**settings.model_dump(mode="json"), "data": data}


def _split_as_begun(settings: EvoMergeSettings, folder: Path) -> EvoMergeSettings:
    """The settings, with the split of the evolution in a folder where they do not name one."""
    if "split_by" in settings.model_fields_set or not (folder / BEGUN).is_file():
        return settings
    try:
        record = _read_begun(folder)
    except DamagedFile:  # it is written anew; the journal refuses other items than its own
        return settings
    begun = {**EvoMergeSettings.BEFORE, **record["settings"]}
    return settings.model_copy(update={"split_by": begun["split_by"]})


def control_beside(base: str | None) -> str | None:
    """The jointly trained model of the run whose trunk is the base, if it is one."""
    folder = Path(base).parent / CONTROL if base else None
    return str(folder) if folder and (folder / "config.json").exists() else None


def _short_names(parents: Sequence[str]) -> list[str]:
    """Short names of the parents; paths where these would not tell all models apart."""
    short = [Path(ref).name for ref in parents]
    return short if len({*short, *MODEL_NAMES}) == len(short) + len(MODEL_NAMES) else list(parents)


# -- checks ---------------------------------------------------------------------------------------


def refuse_place(folder: Path, models: Sequence[str]) -> None:
    """Refuse a folder that cannot be written, or in which it could replace what is not its own."""
    here, other = folder.resolve(), "name another folder with --output-dir"
    there = next(place for place in (here, *here.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{folder} cannot be a folder: {there} is a file", hint=other)
    for ref in models:
        parts = [ref] if Path(ref).exists() else ref.split("+")
        for place in (Path(name).expanduser().resolve() for name in parts):
            inside = here in place.parents
            own = inside and place.relative_to(here).parts[0].startswith(IN_MEMORY)
            if here == place or place in here.parents or (inside and not own):
                relation = "holds" if inside else "is" if here == place else "lies in"
                raise ConfigError(f"{folder} {relation} the model {place}", hint=other)
    if (here / CHAMPION).exists():
        refuse_foreign(here / CHAMPION)
    names = {path.name for path in here.iterdir()} if here.exists() else set()
    foreign = names - {lock.LOCK_FILE, CACHE}
    foreign = {name for name in foreign if not name.startswith((IN_MEMORY, "."))}
    if foreign and not names & {BEGUN, JOURNAL}:
        raise ConfigError(f"{folder} is no evolution and holds {min(foreign)}", hint=other)
    paths.require_writable(folder)


def _refuse_fewer(folder: Path, generations: int) -> None:
    """Refuse to end before what a folder already holds: its champion would be replaced."""
    records = read_journal(folder / JOURNAL)
    done = max((r["generation"] for r in records if r["record"] == "distances"), default=0)
    if generations < done:
        raise ConfigError(
            f"{folder} holds {done} generations, {generations} are asked for",
            hint=f"give --gens {done} or more, or another folder for a shorter evolution",
        )


def open_inputs(
    settings: EvoMergeSettings,
    parent_refs: Sequence[str],
    base_ref: str | None,
    folder: Path,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    control: str | None = None,
    always_verdict: bool = False,
) -> EvolutionInputs:
    """Open the models, and check all that can be checked before every weight is read."""
    if len(parent_refs) < 2:
        hint = "give two or more; three are usual"
        raise ConfigError(f"{len(parent_refs)} model is nothing to merge", hint=hint)
    if len(set(parent_refs)) < len(parent_refs):
        raise ConfigError("a model is given twice; merged with itself it stays what it is")
    recipe = Recipe(
        merge_method="linear" if base_ref is None else "task_arithmetic",
        models=[ModelInput(model=ref, parameters={"weight": 1.0}) for ref in parent_refs],
        base_model=base_ref,
    )
    opened = Parents()
    report = preflight(recipe, folder, opened)
    report.require()
    notes = [f"{p.what}" for p in report.problems if p.level == "warning"]
    parents = [opened[ref] for ref in parent_refs]
    _refuse_twins(parents)
    _check_tokenizer(parents[0])
    if settings.layer_paths and not {*DEPTHS} & {*parents[0].config}:
        problem = f"layer_paths: the config of {parent_refs[0]} does not say how many layers it has"
        raise ConfigError(problem, hint="do without: --set layer_paths=0")
    size = sum(weights.nbytes for weights in parents)
    if size > LARGE_BYTES:
        notes.append(
            f"the parents have {size / 1e9:.1f} GB together: every candidate reads them all,"
            f" and those in files take up to {3 * size / 1e9:.0f} GB of disk"
        )
    splits = split_items(settings, always_verdict)
    check_settings(settings, splits, len(parents))
    notes += [*_visible_gain(splits), *copies_told(splits.get("verdict", ()))]
    models = open_models(parent_refs, base_ref, opened)
    more: dict[str, Any] = {"seed": seed, "names": tuple(names), "notes": tuple(notes)}
    refs = tuple(parent_refs), base_ref
    return EvolutionInputs(settings, *refs, *models, splits, folder, **more, control_ref=control)


def open_models(
    parent_refs: Sequence[str], base_ref: str | None, opened: Parents | None = None
) -> tuple[tuple[Weights, ...], Weights | None]:
    """The weights of all parents and of the base; if one has a head of its own, all have one."""
    refs = [*parent_refs, *([base_ref] if base_ref else [])]
    models = with_same_heads([opened[ref] if opened else open_weights(ref) for ref in refs])
    return tuple(models[: len(parent_refs)]), models[-1] if base_ref else None


def _refuse_twins(models: Sequence[Weights]) -> None:
    """Refuse two models with the same weights. What differs at a glance is read no further."""
    seen: dict[bytes, list[Weights]] = {}
    for model in models:
        alike = seen.setdefault(_glance(model), [])
        for other in alike:
            if model.sha256() == other.sha256():
                raise ConfigError(
                    f"{model.label} has the same weights as {other.label}",
                    hint="merged with itself a model stays what it is: leave one of them out",
                )
        alike.append(model)


def _glance(model: Weights) -> bytes:
    """A hash of the first elements of some tensors."""
    digest = hashlib.sha256()
    for name in sorted(model.specs)[:: max(1, len(model.specs) // GLANCE_TENSORS)]:
        first = model[name].detach().reshape(-1)[:GLANCE_ELEMENTS].cpu().contiguous()
        digest.update(first.view(torch.uint8).numpy().data)
    return digest.digest()


def _check_tokenizer(first: Weights) -> None:
    """Refuse parents without config or tokenizer; every candidate gets those of the first."""
    if first.folder is None or not first.config:
        problem = f"{first.label} has no config.json: there is nothing to put the weights into"
        raise ConfigError(problem, hint="give the folder of a whole model, or BASE+ADAPTER")
    if read_config(first.folder)["model_type"] == MODEL_TYPE:
        Tokenizer.load(first.folder)
    else:
        open_tokenizer(first.folder)


def check_settings(
    settings: EvoMergeSettings, splits: Mapping[str, Sequence[Domain]], parents: int
) -> None:
    """Refuse what does not fit these domains and parents, or needs what is not installed."""
    if settings.executor == "ray":
        require_ray()
    if settings.strategy == "nsga2":
        pymoo()
    if is_function(settings.fitness):
        function_of(settings.fitness)
    if len(settings.parent_weights) not in (0, parents):
        raise ConfigError(f"{len(settings.parent_weights)} parent_weights, {parents} parents")
    domains = splits.get("selection") or splits.get("verdict", ())
    names = [d.name for d in domains]
    measures = [f"{name}/bits_per_byte" for name in names]
    measures += [f"{d.name}/accuracy" for d in domains if d.exact]
    for setting, allowed in (("fitness_floors", measures), ("domain_weights", names)):
        for name in getattr(settings, setting):
            if name not in allowed:
                raise ConfigError(f"{setting}: no {name!r}", hint=f"known: {', '.join(allowed)}")
    if names and not any(settings.domain_weights.get(name, 1.0) for name in names):
        raise ConfigError("domain_weights: no domain counts", hint="one has to be above 0")
    answers = any(domain.exact for domain in domains)
    if domains and not answers and not settings.fitness_weights.get("perplexity"):
        raise ConfigError(
            "fitness_weights count accuracy, and there are no answers to be right",
            hint="give data with prompt and completion, or perplexity a weight",
        )


# -- items ----------------------------------------------------------------------------------------


def split_items(
    settings: EvoMergeSettings, always_verdict: bool = False
) -> dict[str, list[Domain]]:
    """The items of each split, by domain.

    With a fitness of the user's own there is only the verdict: on data, or if it always is to be.
    """
    counts = {"verdict": settings.verdict_items}
    if not settings.fitness:
        counts["selection"] = settings.fitness_subset_size
        if settings.use_holdout_validation:
            counts["holdout"] = settings.fitness_subset_size
    if settings.data:
        whole = from_files([Path(name) for name in settings.data], settings.split_by)
        return {s: [_part(d, s, limit) for d in whole] for s, limit in counts.items()}
    if settings.fitness and not always_verdict:
        return {}
    how: dict[str, Any] = {"levels": (1, settings.max_level), "split_by": settings.split_by}
    return {s: from_names(settings.tasks, split=s, count=n, **how) for s, n in counts.items()}


def _part(domain: Domain, split: str, limit: int) -> Domain:
    """The part of the user's data that a split gets; too little of it is refused."""
    count = domain.parts.count(split)
    least = min(LEAST_ITEMS, limit) if domain.exact else 1
    if count < least:
        hint = "give more data: half of it is for selection, a third for the verdict"
        if split == "holdout":
            hint += "; or do without a holdout: --set use_holdout_validation=false"
        problem = f"{domain.name} has {count} items for {split}; {least} are the least"
        raise ConfigError(problem, hint=hint + copies_hint(domain))
    return part(domain, split, limit)


def _visible_gain(splits: Mapping[str, Sequence[Domain]]) -> list[str]:
    """A note on the smallest gain that the verdict can show."""
    answers = sum(len(d.examples) for d in splits.get("verdict", ()) if d.exact)
    if not answers:
        return []
    points = 100 * smallest_gain(answers)
    return [f"{answers} answers for the verdict: gains from about {points:.1f} points on show"]
