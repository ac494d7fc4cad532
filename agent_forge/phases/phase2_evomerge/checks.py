"""What an evolution refuses before any work: places, models and settings that do not fit."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.evals.domains import Domain, reply_of
from agent_forge.evals.fitness import is_function, require_module
from agent_forge.merge.output import refuse_foreign
from agent_forge.model.chat import render_reply
from agent_forge.model.folder import MODEL_TYPE, read_config
from agent_forge.model.load import computing_settings, open_tokenizer
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge import journal
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.search.continuous import pymoo
from agent_forge.store import files, lock, paths
from agent_forge.workers import require_ray

CHAMPION, HEALED = "champion", "healed"
HEAL = "heal"  # checkpoints of healing, and the split of what is only taught
Splits = Mapping[str, Sequence[Domain]]
IN_MEMORY = "parent_"  # begins the folders of networks that were given in memory
GLANCE_TENSORS, GLANCE_ELEMENTS = 8, 256  # compared before two models are compared as a whole


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
    for name in (*journal.FILES, CHAMPION, HEALED, HEAL):
        files.refuse_link(here / name)
    for name in (CHAMPION, HEALED):
        if (here / name).exists():
            refuse_foreign(here / name)
    names = {path.name for path in here.iterdir()} if here.exists() else set()
    foreign = names - {lock.LOCK_FILE, journal.CACHE}
    foreign = {name for name in foreign if not name.startswith((IN_MEMORY, "."))}
    if foreign and not _is_evolution(here):
        raise ConfigError(f"{folder} is no evolution and holds {min(foreign)}", hint=other)
    paths.require_writable(folder)


def _is_evolution(folder: Path) -> bool:
    """True if the record or the journal in a folder is that of an evolution, not only its name."""
    with contextlib.suppress(DamagedFile):
        return bool(journal.begun_or_none(folder) or journal.read_journal(folder))
    return False


def refuse_fewer(folder: Path, settings: EvoMergeSettings) -> None:
    """Refuse to end before what a folder already holds: its champion would be replaced."""
    done, scores = measured_until_now(folder)
    most = "--set max_evaluations=", scores, settings.max_evaluations or scores
    asked = {"generations": ("--gens ", done, settings.generations), "scores": most}
    for what, (option, there, wanted) in asked.items():
        if wanted < there:
            hint = f"give {option}{there} or more, or another folder for a shorter evolution"
            raise ConfigError(f"{folder} holds {there} {what}, {wanted} are asked for", hint=hint)


def measured_until_now(folder: Path) -> tuple[int, int]:
    """How many generations and scores the folder of an evolution holds."""
    records = journal.read_journal(folder)
    done = max((r["generation"] for r in records if r["record"] == "distances"), default=0)
    return done, sum(r["record"] == "candidate" for r in records)


def refuse_twins(models: Sequence[Weights]) -> None:
    """Refuse two models with the same weights. What differs at a glance is read no further."""
    seen: dict[bytes, list[Weights]] = {}
    for model in models:
        glance = hashlib.sha256()
        for name in sorted(model.specs)[:: max(1, len(model.specs) // GLANCE_TENSORS)]:
            first = model[name].detach().reshape(-1)[:GLANCE_ELEMENTS].cpu().contiguous()
            glance.update(first.view(torch.uint8).numpy().data)
        alike = seen.setdefault(glance.digest(), [])
        for other in alike:
            if model.sha256() == other.sha256():
                hint = "merged with itself a model stays what it is: leave one of them out"
                raise ConfigError(f"{model.label} has the same weights as {other.label}", hint=hint)
        alike.append(model)


def refuse_other_networks(models: Sequence[Weights]) -> None:
    """Refuse models that compute otherwise than the first; of our own, only the halting differs."""
    if models[0].config.get("model_type") == MODEL_TYPE:
        return
    first, *others = (computing_settings(model.config, model.label) for model in models)
    for model, other in zip(models[1:], others, strict=True):
        for key in sorted(k for k in {*first, *other} if first.get(k) != other.get(k)):
            hint = "merge fine-tunes of one base; or make the configs equal, if that is right"
            values = f"{key} is {other.get(key)!r}, not {first.get(key)!r}"
            problem = f"{model.label} computes in another way than {models[0].label}: {values}"
            raise ConfigError(problem, hint=hint)


def check_folder(model: Weights) -> Path:
    """Refuse a model without config or tokenizer; returns its folder."""
    if model.folder is None or not model.config:
        problem = f"{model.label} has no config.json: there is nothing to put the weights into"
        raise ConfigError(problem, hint="give the folder of a whole model, or BASE+ADAPTER")
    read_config(model.folder)
    return model.folder


def check_answers(models: Sequence[Weights], splits: Splits) -> None:
    """Refuse conversations whose answers a chat template of these models does not show."""
    chats = [e for d in splits.get("verdict", ()) for e in d.examples if e.messages]
    theirs = [m for m in models if chats and m.config["model_type"] != MODEL_TYPE]
    tokenizers = (open_tokenizer(check_folder(model)) for model in theirs)
    for tokenizer in {str(t.chat_template): t for t in tokenizers if t.chat_template}.values():
        for example in chats:
            render_reply(tokenizer, example.messages[: (reply_of(example) or 0) + 1])


def has_chat_form(model: Weights) -> bool:
    """True if a model was taught to chat; a tokenizer that cannot be opened is refused."""
    folder = check_folder(model)
    if model.config["model_type"] == MODEL_TYPE:
        return bool(Tokenizer.load(folder))
    return bool(open_tokenizer(folder).chat_template)


def check_settings(settings: EvoMergeSettings, splits: Splits, parents: int) -> None:
    """Refuse what does not fit these domains and parents, or needs what is not installed."""
    if settings.heal and not settings.time_budget_minutes and not settings.heal_steps:
        hint = "give --time-budget MINUTES, or --set heal_steps=200"
        raise ConfigError("heal is a share of the time budget, and there is none", hint=hint)
    if settings.executor == "ray":
        require_ray()
    if settings.replicates > 1 and not splits:
        problem = "replicates are compared on unseen items, and beside your own fitness are none"
        raise ConfigError(problem, hint="give them: --data FILE")
    if settings.strategy == "nsga2":
        pymoo()
    if is_function(settings.fitness):
        require_module(settings.fitness)
    if len(settings.parent_weights) not in (0, parents):
        raise ConfigError(f"{len(settings.parent_weights)} parent_weights, {parents} parents")
    if max(settings.layer_parents, default=0) >= parents:
        numbers = f"layer_parents {settings.layer_parents}: parents are numbered 0 to {parents - 1}"
        raise ConfigError(numbers)
    domains = splits.get("selection") or splits.get("verdict", ())
    names, exact = [d.name for d in domains], [d.name for d in domains if d.exact]
    measures = [f"{name}/bits_per_byte" for name in names] + [f"{name}/accuracy" for name in exact]
    for setting, allowed in (("fitness_floors", measures), ("domain_weights", names)):
        for name in getattr(settings, setting):
            if name not in allowed:
                raise ConfigError(f"{setting}: no {name!r}", hint=f"known: {', '.join(allowed)}")
    if names and not any(settings.domain_weights.get(name, 1.0) for name in names):
        raise ConfigError("domain_weights: no domain counts", hint="one has to be above 0")
    if domains and not exact and not settings.fitness_weights.get("perplexity"):
        hint = "give data with prompt and completion, or perplexity a weight"
        problem = "fitness_weights count accuracy, and there are no answers to be right"
        raise ConfigError(problem, hint=hint)
