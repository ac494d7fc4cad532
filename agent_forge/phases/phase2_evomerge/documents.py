"""The words of the documents: other names of settings, models with weights, and what runs where.

`in_our_words` turns them into our settings, for `forge evo --config`, --set and Python alike. What
is given also chooses the strategy, if that is not given: the first in which all of it acts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from agent_forge.config.load import validate
from agent_forge.config.settings import Settings
from agent_forge.errors import ConfigError
from agent_forge.search.settings import ACTS_IN, setting

C = TypeVar("C", bound=Settings)
Device = Literal["auto", "cpu", "cuda", "mps"]
# The documents have two names for these settings; a field has the first.
ALIASES = {
    "elite_count": "elite_size",
    "generations": "max_generations",
    "mutation_sigma": "mutation_strength",
    "convergence_patience": "plateau_patience",
    "convergence_threshold": "plateau_threshold",
    "output_dir": "checkpoint_dir",
    "workers": "num_workers",
}
FIELDS = {alias: name for name, alias in ALIASES.items()}
OPERATORS = {  # of merge_operators
    "linear_weight": "linear_weight",
    "slerp_t": "slerp_t",
    "dare_threshold": "drop_rate",
    "dare_amplification": "amplification",
    "frankenmerge_layers": "layer_parents",
    "dfs_merge_ratio": "dfs_ratio",
}
PACKS = {"structured_data": "structured"}  # of evaluation_weights; the others have our names
STRATEGIES = ("auto", "spec", "ga")  # that are chosen by what is given


class BaseModelConfig(Settings):
    """One of the models."""

    name: str = setting(..., "what it is called in verdict and card")
    path: str = setting(..., "a folder, or an id of the Hugging Face hub")
    weight: float = setting(1.0, "its share in the first merges, beside those of the others", gt=0)
    domain_specialty: str = setting("", "what it is good at: told with its name")

    @property
    def told(self) -> str:
        return self.name + (f" ({self.domain_specialty})" if self.domain_specialty else "")


class RunPlace(Settings):
    """What an evolution begins with and where it runs: beside its settings."""

    base_models: list[BaseModelConfig] = setting([], "the models, each with a name and a path")
    seed: int = setting(42, "every random choice derives from it", ge=0, lt=2**63)
    base: str | None = setting(None, "the model that all others were fine-tuned from")
    tokenizer: str | None = setting(None, "folder with the tokenizer of networks that name none")
    output_dir: str = setting("evomerge", "folder of journal, checkpoints and champion")
    device: Device = setting("auto", "where candidates are measured; they are merged on the CPU")
    fitness_device: Device | Literal[""] = setting("", "the same; it is used instead if given")
    cpu_offload: bool = setting(False, "measure on the CPU, whatever the device")
    enable_parallel: bool = setting(True, "false: one worker, whatever their number")
    wandb_project: str = setting("", "W&B project that generations are mirrored to")
    wandb_offline: bool = setting(False, "keep what is for W&B in files")

    @property
    def measured_on(self) -> str:
        return "cpu" if self.cpu_offload else self.fitness_device or self.device


def by_first_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the first of their names; two names of one have to agree. Paths become texts."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own, value = FIELDS.get(name, name), str(value) if isinstance(value, Path) else value
        if found.setdefault(own, value) != value:
            both = f"{given[own]!r} and {given[ALIASES[own]]!r}"
            raise ConfigError(f"{own} and {ALIASES[own]} are one thing: {both}")
    return found


def validated(cls: type[C], found: Mapping[str, Any], source: str, given: Iterable[str]) -> C:
    """`found` as settings; what is wrong is told by the names that were given."""
    also = [*RunPlace.model_fields, *FIELDS, "merge_operators", "evaluation_weights"]
    try:
        return validate(cls, found, source, also)
    except ConfigError as error:
        told = str(error).removeprefix(f"{source}: ")
        for name in {*given} & {*FIELDS}:
            told = re.sub(rf"\b{FIELDS[name]}\b", name, told)
        raise ConfigError(f"{source}: {told}", hint=error.hint) from None


def in_our_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the documents' words say, as settings and places of ours."""
    found = by_first_names(given)
    found = _with_operators(found, found.pop("merge_operators", None) or {})
    if "base_models" in found:
        if not found["base_models"]:
            hint = "list two or more, or leave it out"
            raise ConfigError("base_models names no models", hint=hint)
        place = validate(RunPlace, {"base_models": found["base_models"]}, "base_models")
        weights = [model.weight for model in place.base_models]
        if len({*weights}) > 1:
            found = _agreeing(found, "base_models", {"parent_weights": weights})
    if (wanted := found.pop("evaluation_weights", None)) is not None:
        found = _with_evaluators(found, wanted)
    if "strategy" not in found:
        needed = [name for name in found if name in ACTS_IN]
        fitting = (s for s in STRATEGIES if all(s in ACTS_IN[name] for name in needed))
        if (strategy := next(fitting, "auto")) != "auto":
            found["strategy"] = strategy
    return found


def _with_operators(found: dict[str, Any], operators: Any) -> dict[str, Any]:
    """What `merge_operators` say, as settings of the first combos."""
    if not isinstance(operators, Mapping):
        raise ConfigError("merge_operators has a value for each of its names")
    named: dict[str, Any] = {OPERATORS.get(n, str(n)): operators[n] for n in operators}
    if (threshold := named.pop("ties_threshold", None)) is not None:
        if not isinstance(threshold, int | float):
            raise ConfigError(f"merge_operators.ties_threshold: {threshold!r} is no number")
        named["keep"] = round(1 - threshold, 12)  # 0.2 of 0.8
    if unknown := sorted({*operators} - {*OPERATORS, "ties_threshold"}):
        hint = f"known: {', '.join([*OPERATORS, 'ties_threshold'])}"
        raise ConfigError(f"merge_operators has no {unknown[0]!r}", hint=hint)
    return _agreeing(found, "merge_operators", named)


def _with_evaluators(found: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Weights of domains; without data these are the packs of that name: code is run, numbers are
    checked, documents are parsed."""
    if not isinstance(wanted, Mapping):
        raise ConfigError("evaluation_weights has a number for each domain")
    if found.get("data") or found.get("tasks"):
        return _agreeing(found, "evaluation_weights", {"domain_weights": dict(wanted)})
    named = {PACKS.get(name, name): weight for name, weight in wanted.items()}
    tasks = [f"pack:{name}" for name in named]
    return _agreeing(found, "evaluation_weights", {"domain_weights": named, "tasks": tasks})


def _agreeing(found: dict[str, Any], where: str, more: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in more.items():
        if found.get(name, value) != value:
            raise ConfigError(f"{where} and {name} are one thing: {value!r} and {found[name]!r}")
    return {**found, **more}
