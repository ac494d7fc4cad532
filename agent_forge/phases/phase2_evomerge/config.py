"""Settings of Phase 2. Torch-free."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.data.near_copies import SplitBy
from agent_forge.errors import ConfigError
from agent_forge.search.settings import Count, EvolutionSettings, MethodName, setting

BEGUN = "evolution.json"  # beside the journal: what `forge evo` began it with, to resume it by
WEIGHTS = {"perplexity": 0.4, "accuracy": 0.3, "speed": 0.2, "memory": 0.1}
SPECTRAL: list[MethodName] = ["svc", "tsv_m"]  # methods of `auto`, unless they take long
# Settings that reach code or machines of somebody: no file names them alone.
OUTSIDE = {"fitness": "code to be run as fitness", "cluster": "a Ray cluster to send the work to"}
Items = Annotated[int, Field(ge=1, le=1_000_000)]


class MeasuredEvolutionSettings(EvolutionSettings):
    """How models are evolved, on what the candidates are measured, and what is kept."""

    fitness_weights: dict[str, float] = setting(WEIGHTS, "how much each part of the fitness counts")
    fitness_floors: dict[str, float] = setting(
        {}, "worst values, as maths/accuracy: 0.3 or code/bits_per_byte: 2; beyond one fitness is 0"
    )
    domain_weights: dict[str, float] = setting({}, "how much each domain counts; 1 if not named")
    mixed_precision: bool | None = setting(
        None, "measure candidates, but no verdict, in bfloat16; null = where that is faster"
    )
    fitness: str = setting("", "your own: module:function, or a command that prints a number")
    fitness_direction: Literal["maximize", "minimize"] = setting(
        "maximize", "whether more or less of your own fitness is better"
    )
    data: list[str] = setting([], "files to measure on, each a domain of its own")
    tasks: list[str] = setting([], "generated tasks or pack:NAME; none = the domains of Phase 1")
    split_by: SplitBy = setting(
        "overlap",
        "what decides the split of an example: what it asks, so that near-copies stay together, and"
        " no text or long answer shares a passage with the verdict's; or, as in evolutions begun"
        " before: the same of texts alone, what is asked, the question, its prompt, or prompt and"
        " answer",
    )
    partial_credit: bool = setting(
        False, "a part counts of code that runs and documents that parse; in the verdict never"
    )
    max_level: int = setting(20, "difficulty of the generated tasks", ge=1, le=100)
    fitness_subset_size: Items = setting(200, "items of each domain to measure a candidate on")
    verdict_items: Items = setting(2000, "unseen items of each domain for the verdict")
    use_holdout_validation: bool = setting(True, "stop by items that the search does not see")
    finalists: Count = setting(4, "best of the search that the holdout chooses the champion from")
    replicates: int = setting(
        1, "searches with further seeds, to see if it wins again", ge=1, le=99
    )
    reading: Literal["fast", "plain"] = setting(
        "fast",
        "how likelihoods of transformers models are read: fast, or plain, as in evolutions begun"
        " before and always in spec",
    )
    racing: bool | None = setting(
        None, "stop measuring a candidate that fell behind; null = but for spec and nsga2"
    )
    path_gate: float = setting(
        1.2,
        "a layer path goes if its first items take more than so many times the champion's bits",
        gt=0,
    )
    gradient_checkpointing: bool = setting(
        False, "grad, auto: compute activations again for a gradient, which takes less memory"
    )
    workers: int = setting(0, "candidates at once; 0 = one a core if that pays", ge=0, le=1024)
    worker_threads: int = setting(1, "CPU threads for each of them", ge=1, le=1024)
    executor: Literal["local", "ray"] = setting("local", "where to measure: here, or by Ray")
    cluster: str = setting("", "address of a Ray cluster; none = one is started here")
    enable_caching: bool = setting(True, "never measure the same weights twice")
    checkpoint_every: Count = setting(10, "generations between two saved best models")
    keep_best_models: Count = setting(2, "saved best models that are kept")
    time_budget_minutes: float = setting(
        0.0, "what items, evaluations and generations are planned for; 0 = no limit", ge=0
    )
    heal: float = setting(
        0.0, "share of the time in which experts teach the champion; 0 = none", ge=0, le=0.9
    )
    heal_steps: int = setting(0, "steps of that; 0 = as many as its time has", ge=0, le=1_000_000)
    heal_data: list[str] = setting([], "further files to teach with; nothing is measured on them")
    heal_rate: float = setting(3e-4, "AdamW's rate in healing", gt=0, le=1)
    heal_rank: int = setting(16, "rank of the change that healing makes (LoRA)", ge=1, le=1024)

    @property
    def minutes_each(self) -> float:
        """The time budget of one search; 0 if there is none."""
        return self.time_budget_minutes / self.replicates

    @property
    def fast(self) -> bool:
        """True if likelihoods are read fast; `spec` stays as it was to the last bit."""
        return self.reading == "fast" and self.strategy != "spec"

    @property
    def models_on_disk(self) -> int:
        """The most models in files at once: survivors and merges of two generations, saved best
        ones and the champion beside those that they replace, and one for a command as fitness."""
        merges = self.population_size if self.strategy == "ga" else max(0, self.triples)
        best = min(self.keep_best_models, self.generations // self.checkpoint_every + 1)
        more = (2 if self.fitness else 0) + (3 if self.heal else 0)
        more += len(SPECTRAL if self.methods is None else self.methods)
        return 2 * (self.elite_count + merges + 1) + self.replicates * best + 2 + more

    @field_validator("fitness_weights")
    @classmethod
    def _weights_are_known(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := set(value) - set(WEIGHTS):
            raise ValueError(f"unknown parts {sorted(unknown)}; known: {', '.join(WEIGHTS)}")
        if min(value.values(), default=0) < 0 or not sum(value.values()):
            raise ValueError("weights are 0 or more, and one of them is above 0")
        if not value.get("perplexity") and not value.get("accuracy"):
            raise ValueError("speed and memory alone tell no two merges apart")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> MeasuredEvolutionSettings:
        own, nsga2 = self.fitness, self.strategy == "nsga2"
        lacks = "which your own fitness has not"
        by_holdout = self.use_holdout_validation and not own and self.strategy != "spec"
        idle_finalists = self.finalists != type(self).model_fields["finalists"].default
        idle_gate = self.path_gate != type(self).model_fields["path_gate"].default
        for name in ("fitness_floors", "domain_weights", "mixed_precision", "racing"):
            if own and getattr(self, name):
                raise ValueError(f"{name} has no meaning for a fitness of your own")
        refused = {
            f"grad needs a loss to differentiate, {lacks}": own and self.strategy == "grad",
            f"nsga2 needs several domains, {lacks}": own and nsga2,
            "racing knows one fitness: nsga2 has one for every domain": self.racing and nsga2,
            f"layer_paths needs bits a byte, {lacks}": own and self.layer_paths,
            "path_gate has no meaning without layer_paths": idle_gate and not self.layer_paths,
            "finalists are chosen by the holdout, and not with spec": idle_finalists
            and not by_holdout,
            "cluster is an address for the executor ray": self.cluster and self.executor != "ray",
            "partial_credit is for packs that are written: tasks=[pack:code]": self.partial_credit
            and not any(name.startswith("pack:") for name in self.tasks),
            "gradient_checkpointing: only grad and auto take gradients": self.gradient_checkpointing
            and self.strategy not in ("grad", "auto"),
            "domain_weights are 0 or more": min(self.domain_weights.values(), default=0) < 0,
            "data and tasks exclude each other: measure on one of them": self.data and self.tasks,
            f"regmean needs items to read, {lacks}": own and "regmean" in (self.methods or ()),
            f"heal needs items to teach, {lacks}": own and self.heal,
            "heal chooses by holdout items: use_holdout_validation has to be true": self.heal
            and not self.use_holdout_validation,
            "heal_steps and heal_data have no meaning without heal: give --heal 0.2": not self.heal
            and (self.heal_steps or self.heal_data),
        }
        if problems := [text for text, holds in refused.items() if holds]:
            raise ValueError(problems[0])
        return self


class EvoMergeSettings(MeasuredEvolutionSettings, PhaseSettings):
    """The settings of the evolution as a phase."""

    BEFORE: ClassVar = {
        **{"split_by": "content", "strategy": "spec", "auto_version": 1, "reading": "plain"},
        **{"racing": False, "mixed_precision": False, "ga_version": 1, "methods": []},
    }

    @model_validator(mode="after")
    def _counts_generations(self) -> EvoMergeSettings:
        default = PhaseSettings.model_fields["checkpoint_every_steps"].default
        if self.checkpoint_every_steps != default:
            raise ValueError("an evolution counts generations: set checkpoint_every instead")
        return self


def refuse_outside(
    settings: Mapping[str, Any], source: str, sets: Sequence[str], prefix: str = ""
) -> None:
    """Refuse a file that names code or a cluster, unless the command line names the same."""
    for name, what in OUTSIDE.items():
        if (value := settings.get(name)) and (given := f"{prefix}{name}={value}") not in sets:
            hint = f"if it is yours, name it on the command line too: --set {shlex.quote(given)}"
            raise ConfigError(f"{source} names {what}: {value!r}; no file may", hint=hint)
