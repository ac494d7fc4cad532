"""Before an evolution: settings and models are checked, the models opened, the data split.

Three disjoint splits are made of the items: candidates are measured on `selection`, `holdout`
decides when to stop, and only the comparison at the end reads `verdict`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from agent_forge.config.load import did_you_mean, parse_set, read_one, validate
from agent_forge.config.load import merge as join
from agent_forge.data.dataset_rows import Example
from agent_forge.data.near_copies import BY_PASSAGE
from agent_forge.errors import ConfigError, DamagedFile, ForgeError, NotFound
from agent_forge.evals import domains
from agent_forge.evals.benchmarks import CHOICE, EVERY_DOMAIN, from_names
from agent_forge.evals.comparison import detectable_gain
from agent_forge.evals.domains import Domain
from agent_forge.evals.fitness import source_sha256
from agent_forge.evals.graders import IN_PART
from agent_forge.merge.plan import Parents
from agent_forge.merge.preflight import preflight
from agent_forge.merge.recipe import ModelInput, Recipe
from agent_forge.model.folder import MODEL_TYPE
from agent_forge.model.locate import locate_parents
from agent_forge.model.weights import DEPTHS, Weights, with_same_heads
from agent_forge.phases.phase2_evomerge import checks, documents
from agent_forge.phases.phase2_evomerge.budget import FIELDS, MOST_ITEMS, EvolutionPlan
from agent_forge.phases.phase2_evomerge.checkpoints import CHECKPOINT_NAME
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, Splits
from agent_forge.phases.phase2_evomerge.config import (
    BEGUN,
    OUTSIDE,
    EvoMergeSettings,
    refuse_outside,
)
from agent_forge.phases.phase2_evomerge.journal import begun_or_none, read_begun
from agent_forge.store import files
from agent_forge.store.records import read_metadata
from agent_forge.store.tensors import first_not_finite

T = TypeVar("T")
LEAST_ITEMS = 20  # of a split of the user's own data
LARGE_BYTES = 1_000_000_000  # the specification's limit for all parents together
CONTROL = "control"  # beside the trunk of Phase 1: trained on everything for as long
MODEL_NAMES = (
    *(CHAMPION, "plain average", "best combo of generation 0", "base", "joint training"),
    "healed champion",
)
PRESETS: dict[str, Any] = json.loads(Path(__file__).with_name("presets.json").read_text())


def with_base(parents: Sequence[T], base: T | None) -> list[T]:
    """The parents in their order, then the base if there is one."""
    return [*parents, *([] if base is None else [base])]


@dataclass(frozen=True)
class EvolutionInputs:
    """All that an evolution starts from, checked: settings, opened models, and split items."""

    settings: EvoMergeSettings
    parent_refs: tuple[str, ...]  # a folder each, or base+adapter
    base_ref: str | None
    parents: tuple[Weights, ...]
    base: Weights | None
    splits: Splits
    folder: Path
    seed: int = 0
    names: tuple[str, ...] = ()  # of the parents, for people
    control_ref: str | None = None  # a model that was trained on everything for as long
    notes: tuple[str, ...] = ()
    plan: EvolutionPlan | None = None  # of a time budget, once it is made
    branch: tuple[int, int] | None = None  # the generation after which it has another seed

    @property
    def verdict_models(self) -> int:
        """How many models the verdict measures: beside the parents champion, average and combo."""
        others = self.base is not None, self.control_ref is not None, self.settings.heal > 0
        return len(self.parents) + 3 + sum(others)

    @property
    def seeds(self) -> str:
        """The seed, and that of a branch, for people."""
        later = f", {self.branch[1]} after generation {self.branch[0]}" if self.branch else ""
        return f"{self.seed}{later}"

    @property
    def refs(self) -> list[str]:
        return with_base(self.parent_refs, self.base_ref)

    @property
    def models(self) -> list[Weights]:
        return with_base(self.parents, self.base)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        return tuple(weights.sha256() for weights in self.models)

    @property
    def nbytes(self) -> int:
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
        for model in self.models:
            if bad := first_not_finite(model):
                problem = f"{bad} holds NaN or infinity"
                raise DamagedFile(model.label, problem, hint="fetch it again")


def load_settings(
    config: str | None, sets: Sequence[str], options: Mapping[str, Any]
) -> tuple[EvoMergeSettings, documents.RunPlace]:
    """Defaults < preset or file < --set, options; the last two may not contradict each other."""
    merged: dict[str, Any] = PRESETS.get(config or "", {})
    file_names: Mapping[str, Any] = {}
    if config is not None and config not in PRESETS:
        if not Path(config).exists():
            known = did_you_mean(config, list(PRESETS))
            raise ConfigError(f"{config!r} is neither a file nor a preset{known}")
        file_names = read_one(Path(config))
        merged = documents.by_first_names(file_names)
    by_set: dict[str, Any] = {}
    for text in sets:
        by_set = join(by_set, documents.by_first_names(parse_set(text)))
    refuse_outside(merged, str(config), sets)
    for name, value in options.items():
        if by_set.get(name, value) != value:
            raise ConfigError(f"{name} is {by_set[name]} by --set and {value} by its own option")
    given, source = documents.in_our_words({**join(merged, by_set), **options}), config or "options"
    where = {name: given.pop(name) for name in documents.RunPlace.model_fields if name in given}
    names = {name for text in sets for name in parse_set(text)} | {*file_names}
    place = documents.validated(documents.RunPlace, where, source, names)
    if place.tokenizer:
        hint = "a model in a folder has its own there"
        raise ConfigError(f"{source}: tokenizer is for networks in memory", hint=hint)
    if not place.enable_parallel:
        given["workers"] = 1
    return documents.validated(EvoMergeSettings, given, source, names), place


def with_default_budget(
    settings: EvoMergeSettings, folder: Path, minutes: float
) -> EvoMergeSettings:
    """The settings with a time budget, if nothing else bounds an evolution that is new."""
    bounds = {"time_budget_minutes", "generations", "max_evaluations", "fitness"}
    if bounds & settings.model_fields_set or (folder / BEGUN).is_file():
        return settings
    return settings.model_copy(update={"time_budget_minutes": minutes})


def check_before_models(settings: EvoMergeSettings, folder: Path, parents: int) -> None:
    """Check all that does not need the models: they may still have to be trained."""
    checks.refuse_place(folder, [])
    checks.refuse_fewer(folder, settings)
    checks.check_settings(settings, split_items(settings), parents)


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
    parents, known_base = locate_parents(refs, storage)
    base = locate_parents([base], storage)[0][0] if base else known_base
    if not _tells_apart(names):
        raise ConfigError(f"the names {', '.join(names)} do not tell all models apart")
    short = [Path(ref).name for ref in parents]
    names = names or (short if _tells_apart(short) else parents)
    return open_inputs(settings, parents, base, folder, seed, names)


def resume_inputs(
    place: Path, gens: int | None, minutes: float | None, sets: Sequence[str] = (), **more: Any
) -> EvolutionInputs:
    """The evolution in a folder, with the settings that it was last run with. `sets` names again
    the user's own code and cluster: a folder alone never reaches either."""
    folder, record = find_evolution(place)
    refuse_outside(record["settings"], str(folder), sets)
    if others := set(sets) - {f"{name}={record['settings'].get(name) or ''}" for name in OUTSIDE}:
        hint = "leave it out, or begin anew with it in another folder"
        raise ConfigError(f"{folder} was begun without {', '.join(others)}", hint=hint)
    options: dict[str, Any] = {"generations": gens, "time_budget_minutes": minutes, **more}
    if gens is not None and record.get("plan"):  # these are to be, whatever the plan has
        options = {"max_evaluations": 0, **options, "time_budget_minutes": minutes or 0.0}
    changed = {name: value for name, value in options.items() if value is not None}
    known = {**EvoMergeSettings.BEFORE, **record["settings"], **changed}
    settings = validate(EvoMergeSettings, known, str(folder / BEGUN))
    parents, base, seed, names = (record[key] for key in ("parents", "base", "seed", "names"))
    if len(names) != len(parents) or not _tells_apart(names):
        raise DamagedFile(folder / BEGUN, f"its names {names} do not tell its models apart")
    return open_inputs(settings, parents, base, folder, seed, names)


def _tells_apart(names: Sequence[str]) -> bool:
    """True if these names of parents differ from each other and from all other models'."""
    return len({*names, *MODEL_NAMES}) == len(names) + len(MODEL_NAMES)


def find_evolution(place: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of an evolution, given that or a checkpoint in it, and what it was begun with."""
    hint = "they are called evolution_checkpoint_gen_N.json; the folder itself will do too"
    if not place.exists():
        raise NotFound(f"there is no {place}", hint=hint)
    folder = place if place.is_dir() else place.parent
    if not (folder / BEGUN).is_file():
        raise NotFound(f"{folder} holds no evolution", hint=f"it would have a file {BEGUN}")
    record = read_begun(folder)
    try:
        told = files.read_checked(place) if place.is_file() else record
    except DamagedFile:
        if CHECKPOINT_NAME.fullmatch(place.name):
            raise
        raise ConfigError(f"{place} is no checkpoint of an evolution", hint=hint) from None
    if told.get("fingerprint") != record["fingerprint"]:
        raise ConfigError(f"{place} is of another evolution than the one in its folder")
    return folder, record


def write_begun(inputs: EvolutionInputs, fingerprint: str, device: str) -> None:
    """Write the record that the evolution is resumed by, after the journal has accepted it."""
    record = {
        "settings": portable_settings(inputs.settings),
        "parents": list(inputs.parent_refs),
        "names": list(inputs.names),
        "base": inputs.base_ref,
        "seed": inputs.seed,
        "fingerprint": fingerprint,
        "device": device,  # another one has other last bits
        **hashes_beside_fingerprint(inputs),
        **({"plan": inputs.plan.to_json()} if inputs.plan else {}),
        **({"branch": list(inputs.branch)} if inputs.branch else {}),
    }
    files.write_checked(inputs.folder / BEGUN, record)


def hashes_beside_fingerprint(inputs: EvolutionInputs) -> dict[str, Any]:
    """Hashes of what the result depends on, but the fingerprint, which is older, leaves out."""
    verdict = inputs.splits.get("verdict", ())
    return {
        "model_settings": [model.settings_sha256() for model in inputs.models],
        "verdict": {str(inputs.settings.verdict_items): domains.evaluation_hash(verdict)},
        "fitness": source_sha256(inputs.settings.fitness),
    }


def refuse_changed(inputs: EvolutionInputs, record: Mapping[str, Any]) -> None:
    """Refuse to go on with models, unseen items or a fitness that were edited since then."""
    now, hint = hashes_beside_fingerprint(inputs), "back, or begin anew in another folder"
    before = record.get("model_settings", now["model_settings"])
    pairs = zip(inputs.refs, before, now["model_settings"], strict=False)
    if changed := [ref for ref, old, new in pairs if old != new]:
        edited = f"its config, tokenizer or adapter settings were changed since {inputs.folder}"
        raise ConfigError(f"{changed[0]}: {edited} was begun", hint=f"put them {hint}")
    if record.get("fitness", now["fitness"]) != now["fitness"]:
        problem = f"{inputs.settings.fitness} was changed since {inputs.folder} was begun"
        raise ConfigError(problem, hint=f"put the code {hint}")
    for count, new in now["verdict"].items():
        if record.get("verdict", {}).get(count, new) != new:
            problem = f"the items for the verdict were changed since {inputs.folder} was begun"
            raise ConfigError(problem, hint=f"put the data {hint}")


def portable_settings(settings: EvoMergeSettings) -> dict[str, Any]:
    """The settings as JSON, the same from whatever folder they are read."""
    files_named = {"data": settings.data, "heal_data": settings.heal_data}
    places = {key: [str(Path(n).resolve()) for n in names] for key, names in files_named.items()}
    return {**settings.model_dump(mode="json"), **places}


def made_beside(model: Path, name: str) -> str | None:
    """What a phase of a run made under this name, beside a model; a name alone makes none."""
    with contextlib.suppress(ForgeError, OSError):
        made, other = read_metadata(model), read_metadata(model.parent / name)
        if (made.session_id, made.phase_name) == (other.session_id, other.phase_name):
            return str(model.parent / name)
    return None


def open_inputs(
    settings: EvoMergeSettings,
    parent_refs: Sequence[str],
    base_ref: str | None,
    folder: Path,
    seed: int,
    names: Sequence[str],
    control_ref: str | None = None,
    in_run: bool = False,
) -> EvolutionInputs:
    """Open the models, and check all that can be checked before every weight is read."""
    record = None
    if not in_run:  # the folder is the evolution's own, and may hold an earlier part of it
        checks.refuse_place(folder, with_base(parent_refs, base_ref))
        record = begun_or_none(folder)
        settings = _as_begun(settings, record) if record else settings
        checks.refuse_fewer(folder, settings)
        control_ref = made_beside(Path(base_ref), CONTROL) if base_ref else None
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
    notes = [p.what for p in report.problems if p.level == "warning"]
    parents = [opened[ref] for ref in parent_refs]
    checks.refuse_twins(parents)
    chats = checks.has_chat_form(parents[0])
    checks.refuse_other_networks([opened[ref] for ref in with_base(parent_refs, base_ref)])
    if settings.layer_paths and not {*DEPTHS} & {*parents[0].config}:
        problem = f"layer_paths: the config of {parent_refs[0]} does not say how many layers it has"
        raise ConfigError(problem, hint="do without: --set layer_paths=0")
    if (size := sum(weights.nbytes for weights in parents)) > LARGE_BYTES:
        reads = f"the parents have {size / 1e9:.1f} GB together: every candidate reads them all"
        notes.append(f"{reads}, and those in files take up to {3 * size / 1e9:.0f} GB of disk")
    if not (settings.data or settings.tasks or settings.fitness or in_run):
        settings = _with_tasks(settings, parents[0], record)
    splits = all_items(settings, always_verdict=in_run)
    for ref in with_base(parent_refs, base_ref) if splits else ():
        checks.check_folder(opened[ref])  # the verdict opens each of them by itself
    checks.check_answers([opened[ref] for ref in with_base(parent_refs, base_ref)], splits)
    checks.check_settings(settings, splits, len(parents))
    verdict = splits.get("verdict", ())
    notes += _notes_on(settings, chats, verdict)
    models = open_models(parent_refs, base_ref, opened)
    given = settings, tuple(parent_refs), base_ref, *models, splits, folder, seed, tuple(names)
    made = (record or {}).get("plan")
    plan = EvolutionPlan.from_json(made, folder) if made else None
    branch = tuple(record["branch"]) if record and "branch" in record else None
    inputs = EvolutionInputs(*given, control_ref, tuple(notes), plan, branch)
    if record:
        refuse_changed(inputs, record)
    return inputs


def _with_tasks(
    settings: EvoMergeSettings, first: Weights, record: Mapping[str, Any] | None
) -> EvoMergeSettings:
    """Settings that name neither data nor tasks, with what it was begun with; models of others are
    asked in plain words, for they know nothing of our tasks."""
    ours = first.config.get("model_type") == MODEL_TYPE
    tasks = [] if ours else [f"{CHOICE}{name}" for name in EVERY_DOMAIN]
    tasks = record["settings"]["tasks"] if record else tasks
    return settings.model_copy(update={"tasks": tasks})


def _as_begun(settings: EvoMergeSettings, record: Mapping[str, Any]) -> EvoMergeSettings:
    """The settings, with what was decided when the evolution began where nothing else is given."""
    names = {*EvoMergeSettings.BEFORE}
    names |= {*FIELDS, "time_budget_minutes"} if record.get("plan") else set()
    begun = {**EvoMergeSettings.BEFORE, **record["settings"]}
    kept = {name: begun[name] for name in names - settings.model_fields_set if name in begun}
    return validate(EvoMergeSettings, {**settings.model_dump(exclude_unset=True), **kept}, BEGUN)


def _notes_on(settings: EvoMergeSettings, chats: bool, verdict: Sequence[Domain]) -> list[str]:
    """What a person should know of the items before the work begins."""
    notes = gain_notes(verdict) + domains.copies_told(verdict)
    if any(name.startswith(CHOICE) for name in settings.tasks):
        chances = ", ".join(f"{d.name} {d.chance:.0%}" for d in verdict)
        notes.append(f"measured on generated questions, by likelihood; chance: {chances}")
    if settings.data and chats:
        plain = [d.name for d in verdict if d.exact and not d.examples[0].messages]
        form = "without the chat form of the models; rows with messages have it"
        notes += [f"{', '.join(plain)}: measured as plain text, {form}"] if plain else []
    return notes


def gain_notes(verdict: Sequence[Domain]) -> list[str]:
    """How small a gain the items for the verdict can show."""
    notes, (answers, gain) = [], detectable_gain(verdict)
    if gain:
        points = f"gains from about {100 * gain:.1f} points on show"
        notes.append(f"{answers} answers for the verdict: {points}")
    if texts := sum(len(domain.examples) for domain in verdict if not domain.exact):
        share = f"a mean gain of {2.8 / math.sqrt(texts):.2f} of their spread shows"
        notes.append(f"{texts} texts for the verdict: {share}, which only measuring tells")
    return notes


def item_counts(settings: EvoMergeSettings) -> dict[str, dict[str, int]]:
    """How many items a plan may choose among, by split and domain."""
    most = {
        n: max(MOST_ITEMS, getattr(settings, n)) for n in ("fitness_subset_size", "verdict_items")
    }
    splits = split_items(settings.model_copy(update=most))
    return {s: {d.name: len(d.examples) for d in found} for s, found in splits.items()}


def open_models(
    parent_refs: Sequence[str], base_ref: str | None, opened: Parents | None = None
) -> tuple[tuple[Weights, ...], Weights | None]:
    """The weights of all parents and of the base; if one has a head of its own, all have one."""
    refs, opened = with_base(parent_refs, base_ref), opened or Parents()
    opened.open(refs)
    models = with_same_heads([opened[ref] for ref in refs])
    return tuple(models[: len(parent_refs)]), models[-1] if base_ref else None


def split_items(settings: EvoMergeSettings, always_verdict: bool = False) -> Splits:
    """The items of each split, by domain. A fitness of the user's own has those of the verdict
    alone: on data, or on generated tasks if `always_verdict`."""
    counts = {"verdict": settings.verdict_items}
    if not settings.fitness:
        counts["selection"] = settings.fitness_subset_size
        if settings.use_holdout_validation:
            counts["holdout"] = settings.fitness_subset_size
    if settings.data:
        whole = domains.from_files([Path(name) for name in settings.data], settings.split_by)
        splits = {s: [_part(d, s, limit) for d in whole] for s, limit in counts.items()}
        by = settings.split_by
        return domains.kept_apart(splits, by) if by in BY_PASSAGE else splits
    if settings.fitness and not always_verdict:
        return {}
    how: dict[str, Any] = {"levels": (1, settings.max_level), "split_by": settings.split_by}
    found = {s: from_names(settings.tasks, split=s, count=n, **how) for s, n in counts.items()}
    if settings.partial_credit:
        for split in {*found} - {"verdict"}:
            found[split] = [replace(d, grade=IN_PART.get(d.grade, d.grade)) for d in found[split]]
    return found


def _texts_to_teach(settings: EvoMergeSettings, splits: Splits) -> list[Domain]:
    """The user's texts for healing, without what holdout and verdict ask."""
    by, kept = settings.split_by, []
    kept_apart = [domain for split in ("holdout", "verdict") for domain in splits[split]]
    asked = {domains.split_hash(e, by, d.exact) for d in kept_apart for e in d.examples}
    # Of packs also what they ask without worked examples before it.
    bare = (Example(task.question, task.answer) for domain in kept_apart for task in domain.tasks)
    asked |= {domains.split_hash(example, by) for example in bare}
    for domain in domains.from_files([Path(name) for name in settings.heal_data], by):
        hashes = [domains.split_hash(example, by, domain.exact) for example in domain.examples]
        own_texts = domain.select(i for i, own in enumerate(hashes) if own not in asked)
        told = domains.told_by(kept_apart, by, whole=True) if by in BY_PASSAGE else []
        kept += domains.without_passages([own_texts], told, rows=True)
        if not kept[-1].examples:
            problem = f"{domain.name}: holdout and verdict ask all that is in it"
            raise ConfigError(f"heal_data: {problem}", hint="give other texts to teach with")
    return kept


def all_items(settings: EvoMergeSettings, always_verdict: bool = False) -> Splits:
    """The items of each split, and the user's texts for healing if there are any."""
    splits = split_items(settings, always_verdict)
    if settings.heal_data:
        splits = {**splits, checks.HEAL: _texts_to_teach(settings, splits)}
    return splits


def _part(domain: Domain, split: str, limit: int) -> Domain:
    """The part of the user's data that a split gets; too little of it is refused."""
    count = domain.parts.count(split)
    least = min(LEAST_ITEMS, limit) if domain.exact else 1
    if count < least:
        hint = "give more data: half of it is for selection, a third for the verdict"
        if split == "holdout":
            hint += "; or do without a holdout: --set use_holdout_validation=false"
        problem = f"{domain.name} has {count} items for {split}; {least} are the least"
        raise ConfigError(problem, hint=hint + domains.copies_hint(domain))
    return domains.part(domain, split, limit)
