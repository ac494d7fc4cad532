"""Preflight: can models be merged? Answered from headers and configs, before any work.

Every problem comes with its remedy. Nothing but small samples of the weights is read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from agent_forge.errors import ConfigError, ForgeError
from agent_forge.merge import spectral
from agent_forge.merge.combos import COMBO, combo_stages
from agent_forge.merge.engine import MergedWeights
from agent_forge.merge.output import (
    anonymous_bytes,
    need_bytes,
    refuse_existing,
    refuse_unusable,
    require_room,
)
from agent_forge.merge.plan import MergePlan, Parents, make_plan
from agent_forge.merge.recipe import Recipe
from agent_forge.merge.vocabulary import read_tokens, rows_of
from agent_forge.model.load import check_tensors
from agent_forge.model.weights import Weights, is_tied
from agent_forge.store import files
from agent_forge.store.paths import require_writable

SAMPLED_TENSORS = 8
SAMPLED_ELEMENTS = 1 << 14
FAR = 0.5  # relative distance above which two models hardly come from one base
# Settings without effect on a merge, and settings that are compared on their own.
WITHOUT_EFFECT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
WITHOUT_EFFECT |= {"architectures", "model_type", "tie_word_embeddings", "vocab_size"}
# CPU nanoseconds an element and input, as measured by benchmarks/merge.py on one core.
COST_NS = {"task_arithmetic": 1.2, "ties": 6.0, "dare_linear": 4.0, "dare_ties": 6.0}
COST_NS |= {"breadcrumbs": 6.0, "breadcrumbs_ties": 8.0, COMBO: 10.0}
COST_NS |= {"sce": 30.0, "ram": 4.0, "ramplus_tl": 10.0, "arcee_fusion": 30.0}
COST_NS |= dict.fromkeys(("della", "della_linear"), 150.0)
COST_DEFAULT_NS, HASH_AND_WRITE_NS = 1.5, 2.0
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class MergeProblem:
    """Something that stands in the way (error) or that one should know (warning, note)."""

    level: Level
    what: str
    remedy: str = ""
    cause: ForgeError | None = None


@dataclass
class MergePreflight:
    """The verdict and what it rests on."""

    problems: list[MergeProblem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    plan: MergePlan | None = None

    @property
    def verdict(self) -> str:
        levels = {problem.level for problem in self.problems}
        return "no" if "error" in levels else "with care" if "warning" in levels else "yes"

    @property
    def error(self) -> ForgeError | None:
        """The first problem that stands in the way, as an exception."""
        errors = (p for p in self.problems if p.level == "error")
        return next((p.cause or ConfigError(p.what, hint=p.remedy) for p in errors), None)

    def require(self) -> MergePlan:
        if self.error is not None:
            raise self.error
        assert self.plan is not None
        return self.plan

    def add(self, level: Level, what: str, remedy: str) -> None:
        self.problems.append(MergeProblem(level, what, remedy))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turn an error of ours in the block into a problem."""
        try:
            yield
        except ForgeError as error:
            self.problems.append(MergeProblem("error", str(error), error.hint, error))


def preflight(recipe: Recipe, out: Path, parents: Parents | None = None) -> MergePreflight:
    """Report all that could go wrong, and forecast disk, memory and time."""
    report, models = MergePreflight(), dict[str, Weights]()
    opened = Parents() if parents is None else parents
    for ref in recipe.references():
        with report.noting():
            opened.open([ref])
            _check_alone(report, ref, opened[ref])
            models[ref] = opened[ref]
    if len(models) == len(recipe.references()):
        _compare_configs(report, models)
        _compare_tokens(report, recipe, models)
        dtypes = {ref: {str(s.dtype) for s in w.specs.values()} for ref, w in models.items()}
        types = {ref: sorted(n.removeprefix("torch.") for n in dtypes[ref]) for ref in models}
        report.facts["types"] = types
        if len({tuple(names) for names in types.values()}) > 1:
            report.add("note", f"the models have different types: {types}", "set out_dtype")
        with report.noting():
            report.plan = make_plan(recipe, opened)
        if report.plan is not None:
            with report.noting():
                refuse_unusable(report.plan)
            _same_base(report, recipe, models)
            _forecast(report, report.plan, out)
    return report


def check_target(
    report: MergePreflight, folders: Sequence[Path], *, force: bool, max_ram: int | None
) -> None:
    """Add what the writer would refuse: a folder, the disk or the memory."""
    if report.plan is None:
        return
    merged = MergedWeights(report.plan)
    with report.noting():
        for folder in folders:
            refuse_existing(folder, merged, force, look=True)
            require_writable(folder.parent)
        require_room(folders, merged, max_ram)


def _check_alone(report: MergePreflight, ref: str, weights: Weights) -> None:
    """Report tensors that are not those of the network in the config, and a head that differs."""
    if not weights.config or not weights.sources:
        return
    if not check_tensors(weights):
        kind = weights.config.get("model_type")
        report.add("note", f"{ref}: its tensors were not compared with a network {kind!r}", "")
    if weights.config.get("tie_word_embeddings") and not is_tied(weights):
        what = f"{ref}: its config ties the head to the embedding, its file has another head"
        report.add("warning", what, "the head in the file counts; the result is not tied")


def _compare_configs(report: MergePreflight, models: dict[str, Weights]) -> None:
    """Compare architecture, tied weights, positions, and whatever else shapes the network."""
    configured = {ref: weights for ref, weights in models.items() if weights.config}
    level: Level = "error" if configured else "warning"
    for ref in (ref for ref in models if ref not in configured):
        remedy = "put the one of its model beside its weights"
        report.add(level, f"{ref} has no config.json", remedy)
    (first_ref, first), *others = (configured or models).items()
    named = first.config.get("architectures")
    report.facts["architecture"] = named[0] if named and isinstance(named, list) else "unknown"
    for ref, weights in others:
        pair = f"{first_ref} and {ref}"
        kinds = [config.get("model_type") for config in (first.config, weights.config)]
        if kinds[0] != kinds[1]:
            what = f"{pair} are different architectures ({kinds[0]} and {kinds[1]})"
            report.add("error", what, "merge like with like")
            continue
        if is_tied(weights) != is_tied(first):
            what = f"{pair}: only one has its head tied to its embedding"
            report.add("warning", what, "the result gets a head of its own")
        for key in sorted({*first.config, *weights.config} - WITHOUT_EFFECT):
            one, two = first.config.get(key), weights.config.get(key)
            if one != two:
                what = f"{pair} differ in {key}: {one!r} and {two!r}"
                level = "warning" if "rope" in key else "note"
                report.add(level, what, f"the result takes that of {first_ref}")


def _compare_tokens(report: MergePreflight, recipe: Recipe, models: dict[str, Weights]) -> None:
    (first_ref, first), *others = models.items()
    tokens = read_tokens(first.folder)
    report.facts["vocabulary"] = rows_of(first)
    for ref, weights in others:
        theirs = read_tokens(weights.folder)
        if tokens is None or theirs is None or theirs == tokens:
            continue
        added = sorted(set(theirs) - set(tokens), key=theirs.__getitem__)
        lost = len(set(tokens) - set(theirs))
        moved = sum(theirs[t] != i for t, i in tokens.items() if t in theirs)
        shown = ", ".join(map(repr, added[:8])) + (", ..." if len(added) > 8 else "")
        what = f"{ref} has {len(added)} tokens that {first_ref} lacks ({shown})" if added else ""
        what = what or f"{ref} and {first_ref} have different vocabularies"
        what += f", lacks {lost}, and numbers {moved} differently"
        if recipe.vocabulary():
            report.add("note", what, "the recipe makes the vocabularies equal")
        else:
            report.add("warning", what, "tokenizer: union (or base) in the recipe aligns them")


def _same_base(report: MergePreflight, recipe: Recipe, models: dict[str, Weights]) -> None:
    """The distance between the models on samples of some matrices, relative to their size."""
    (first_ref, first), *others = models.items()
    if recipe.slices:
        return
    matrices = [name for name, spec in first.specs.items() if len(spec.shape) == 2]
    picked = matrices[:: max(1, len(matrices) // SAMPLED_TENSORS)]
    distances: dict[str, float] = {}
    for ref, weights in others:
        apart = size = 0.0
        for name in picked:
            if name in weights.specs and weights.specs[name].shape == first.specs[name].shape:
                a, b = (w[name].reshape(-1)[:SAMPLED_ELEMENTS].double() for w in (first, weights))
                apart += float(torch.sum((a - b) ** 2))
                size += float(torch.sum(a**2))
        distances[ref] = (apart / size) ** 0.5 if size else 0.0
        if distances[ref] > FAR:
            apart_by = f"{ref} is far from {first_ref} (relative distance {distances[ref]:.2f})"
            remedy = "merge fine-tunes of the same base; others average to noise"
            report.add("warning", f"{apart_by}: they hardly come from one base", remedy)
        elif distances[ref] == 0:
            report.add("note", f"{ref} equals {first_ref} on all samples", "is it listed twice?")
    report.facts["distance"] = {ref: round(value, 4) for ref, value in distances.items()}


def _forecast(report: MergePreflight, plan: MergePlan, out: Path) -> None:
    recipe, specs = plan.recipe, plan.specs.values()
    nbytes, count = sum(s.nbytes for s in specs), sum(s.numel for s in specs)
    inputs = max(len(job.inputs) + (job.base is not None) for job in plan.jobs.values())
    cost = COST_NS.get(recipe.merge_method, COST_DEFAULT_NS)
    if recipe.combo is not None and combo_stages(recipe.combo)[2] == "dfs":
        cost *= 1.5
    seconds = count * inputs * (cost + HASH_AND_WRITE_NS) * 1e-9 + 0.5
    if recipe.is_spectral():
        seconds += spectral.cost(plan.specs, len(recipe.references()))[1]
    report.facts |= {
        "parameters": count,
        "tensors": len(plan.jobs),
        "output_bytes": nbytes,
        "free_bytes": files.free_bytes(out),
        "seconds": round(seconds, 1),
        "memory_bytes": anonymous_bytes() + need_bytes(plan.specs, recipe),
    }
