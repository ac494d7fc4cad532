"""From models on disk to an evolution, and from an evolution to a verdict.

Three disjoint sets of items are made from what is given: the search looks at `selection`, `holdout`
decides when to stop, and only the comparison at the end reads `verdict`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, PhaseFailed
from agent_forge.evals.benchmarks import from_names
from agent_forge.evals.comparison import Comparison, PairedScores, compare_scores
from agent_forge.evals.domains import (
    Domain,
    copies_hint,
    copies_told,
    from_files,
    part,
    smallest_gain,
)
from agent_forge.evals.likelihood import ItemScores
from agent_forge.evals.model_under_test import ModelUnderTest, confirm
from agent_forge.merge.preflight import preflight
from agent_forge.merge.recipe import ModelInput, Recipe
from agent_forge.model.folder import MODEL_TYPE, open_weights, read_config
from agent_forge.model.load import open_tokenizer
from agent_forge.model.opened import open_model
from agent_forge.model.weights import DEPTHS, Weights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.fitness import (
    DomainFitness,
    Score,
    function_of,
    is_function,
)
from agent_forge.phases.phase2_evomerge.run import EvolutionRun, Listener
from agent_forge.phases.phase2_evomerge.twins import refuse_twins
from agent_forge.search.candidate import lineage
from agent_forge.search.continuous import pymoo
from agent_forge.store import files
from agent_forge.workers import require_ray

log = logging.getLogger(__name__)
LEAST_ITEMS = 20  # of a split of someone's own data
CONFIRMED = 8  # items of each domain that the written champion is measured on again
OTHERS = ("champion", "plain average", "best combo of generation 0", "base", "joint training")
CONTROL = "control"  # beside the trunk of Phase 1: trained on everything for as long
REASONS = {"converged": "threshold_met", "generations": "max_generations"}  # as the guide has it
LARGE_BYTES = 1_000_000_000  # the specification's limit for all parents together


@dataclass(frozen=True)
class Inputs:
    """The models of an evolution by reference (a folder, or base+adapter), and what is measured."""

    parents: tuple[str, ...]
    base: str | None
    splits: Mapping[str, Sequence[Domain]]
    nbytes: int  # of all parents
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """A model that the champion is compared with."""

    score: Score
    comparison: Comparison


@dataclass(frozen=True)
class EvolutionReport:
    """How the champion does on items that the search never saw."""

    champion: Score
    rivals: dict[str, Baseline]
    best_parent: str
    perplexity: float  # of the champion, a token
    retention: dict[str, float] = field(default_factory=dict)
    outcomes: tuple[ItemScores, ...] = ()  # of the champion, by domain

    def sentences(self) -> list[str]:
        """The result in words, the best parent first."""
        names = [self.best_parent, *(n for n in self.rivals if n != self.best_parent)]
        return [
            f"{'best parent, ' if name == self.best_parent else ''}{name}: "
            + self.rivals[name].comparison.overall.sentence("it")
            + _losses(self.rivals[name].comparison)
            for name in names
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "champion": asdict(self.champion),
            "best_parent": self.best_parent,
            "perplexity": self.perplexity,
            "retention": self.retention,
            "rivals": {
                name: {"score": asdict(rival.score), "comparison": asdict(rival.comparison)}
                for name, rival in self.rivals.items()
            },
            "sentences": self.sentences(),
        }


# -- before ---------------------------------------------------------------------------------------


def resolve(
    settings: EvoMergeSettings, parents: Sequence[str], base: str | None, out: Path
) -> Inputs:
    """Check everything that can be checked before the first weight is read."""
    if len(parents) < 2:
        raise ConfigError(
            f"{len(parents)} model is nothing to merge", hint="give two or more; three are usual"
        )
    if len(set(parents)) < len(parents):
        raise ConfigError("a model is given twice; merged with itself it stays what it is")
    recipe = Recipe(
        merge_method="linear" if base is None else "task_arithmetic",
        models=[ModelInput(model=ref, parameters={"weight": 1.0}) for ref in parents],
        base_model=base,
    )
    report = preflight(recipe, out)
    report.require()
    notes = [f"{p.what}" for p in report.problems if p.level == "warning"]
    opened = [open_weights(ref) for ref in parents]
    refuse_twins(opened)
    _check_tokenizer(opened[0])
    if settings.layer_paths and not {*DEPTHS} & {*opened[0].config}:
        raise ConfigError(
            f"layer_paths: the config of {parents[0]} does not say how many layers it has",
            hint="do without: --set layer_paths=0",
        )
    size = sum(weights.nbytes for weights in opened)
    if size > LARGE_BYTES:
        notes.append(
            f"the parents have {size / 1e9:.1f} GB together: every candidate reads them all,"
            f" and those in files take up to {3 * size / 1e9:.0f} GB of disk"
        )
    splits = splits_of(settings)
    refuse_senseless(settings, splits, len(parents))
    notes += [*_what_can_be_seen(splits), *copies_told(splits.get("verdict", ()))]
    return Inputs(tuple(parents), base, splits, size, tuple(notes))


def _check_tokenizer(first: Weights) -> None:
    """Refuse parents without config or tokenizer; every candidate gets those of the first."""
    if first.folder is None or not first.config:
        raise ConfigError(
            f"{first.label} has no config.json: there is nothing to put the weights into",
            hint="give the folder of a whole model, or BASE+ADAPTER",
        )
    if read_config(first.folder)["model_type"] == MODEL_TYPE:
        Tokenizer.load(first.folder)
    else:
        open_tokenizer(first.folder)


def splits_of(settings: EvoMergeSettings) -> dict[str, list[Domain]]:
    """The items of each split, by domain."""
    few, many = settings.fitness_subset_size, settings.verdict_items
    counts = {"verdict": many}
    if not settings.fitness:
        counts |= {"selection": few}
        if settings.use_holdout_validation:
            counts |= {"holdout": few}
    if settings.data:
        whole = from_files([Path(name) for name in settings.data], settings.split_by)
        return {s: [_enough(d, s, limit) for d in whole] for s, limit in counts.items()}
    if settings.fitness:
        return {}
    levels = (1, settings.max_level)
    return {
        split: from_names(
            settings.tasks, split=split, count=count, levels=levels, split_by=settings.split_by
        )
        for split, count in counts.items()
    }


def _enough(domain: Domain, split: str, limit: int) -> Domain:
    """The part of someone's own data that a split gets; too little of it is refused."""
    there = domain.parts.count(split)
    least = min(LEAST_ITEMS, limit) if domain.exact else 1
    if there < least:
        hint = "give more data: half of it is for selection, a third for the verdict"
        if split == "holdout":
            hint += "; or do without a holdout: --set use_holdout_validation=false"
        raise ConfigError(
            f"{domain.name} has {there} items for {split}; {least} are the least",
            hint=hint + copies_hint(domain),
        )
    return part(domain, split, limit)


def refuse_senseless(
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
    domains = splits.get("selection", ())
    names = [d.name for d in domains]
    known = [f"{name}/bits_per_byte" for name in names]
    known += [f"{d.name}/accuracy" for d in domains if d.exact]
    for field_name, allowed in (("fitness_floors", known), ("domain_weights", names)):
        for name in getattr(settings, field_name):
            if name not in allowed:
                raise ConfigError(f"{field_name}: no {name!r}", hint=f"known: {', '.join(allowed)}")
    if names and not any(settings.domain_weights.get(name, 1.0) for name in names):
        raise ConfigError("domain_weights: no domain counts", hint="one has to be above 0")
    answers = any(domain.exact for domain in domains)
    if domains and not answers and not settings.fitness_weights.get("perplexity"):
        raise ConfigError(
            "fitness_weights count accuracy, and there are no answers to be right",
            hint="give data with prompt and completion, or perplexity a weight",
        )


def listening(settings: EvoMergeSettings, listen: Listener) -> Listener:
    """The listener, with a warning if generation 0 gives the search nothing to go by."""

    def told(record: dict[str, Any]) -> None:
        listen(record)
        first = record["event"] == "generation" and record["generation"] == 0
        if first and settings.fitness_floors and record["best"] == 0:
            log.warning(
                "no model of generation 0 meets fitness_floors (%s): all have the fitness 0",
                ", ".join(f"{name} {floor:g}" for name, floor in settings.fitness_floors.items()),
            )

    return told


def _what_can_be_seen(splits: Mapping[str, Sequence[Domain]]) -> list[str]:
    answers = sum(len(d.examples) for d in splits.get("verdict", ()) if d.exact)
    if not answers:
        return []
    points = 100 * smallest_gain(answers)
    return [f"{answers} answers for the verdict: gains from about {points:.1f} points on show"]


# -- afterwards -----------------------------------------------------------------------------------


def measure_verdict(
    run: EvolutionRun, inputs: Inputs, names: Sequence[str]
) -> EvolutionReport | None:
    """Champion, parents, average, base and best combo on the untouched items; None without any."""
    champion = run.search.champion
    if not inputs.splits or champion is None:
        return None
    domains = inputs.splits["verdict"]
    s = run.settings
    how = s.fitness_weights, s.fitness_floors, s.domain_weights
    fitness = DomainFitness(run.material.subject, domains, *how)
    found: dict[str, list[ItemScores]] = {}
    scores: dict[str, Score] = {}
    model = run.material.subject.model
    for name, rival in {OTHERS[0]: champion.key, **_rivals(run, names)}.items():
        run.proceed("during the verdict")
        if isinstance(rival, Weights):
            fitness.use(model)
            state = model.state_dict()
            for tensor in run.nursery.specs:
                state[tensor].copy_(rival[tensor])
        else:
            run.bench.fill(rival)
            fitness.use(run.bench.model, *run.nursery.size(rival))
        run.listen({"event": "verdict", "model": name})
        found[name] = fitness.outcomes()
        scores[name] = fitness.judge(found[name])
    run.require_there()
    own, mine = found.pop(OTHERS[0]), scores.pop(OTHERS[0])
    rivals = {
        name: Baseline(scores[name], _compared(domains, outcomes, own))
        for name, outcomes in found.items()
    }
    best = max(names, key=lambda name: scores[name].quality)
    nats = sum(sum(o.loss) for o in own) / sum(sum(o.tokens) for o in own)
    kept = _retention(mine, [scores[name] for name in names])
    return EvolutionReport(mine, rivals, best, math.exp(min(700, nats)), kept, tuple(own))


def confirm_champion(
    folder: Path, run: EvolutionRun, inputs: Inputs, conclusion: EvolutionReport | None
) -> None:
    """The file has to score what the verdict says; without a verdict, to hold what was measured."""
    if conclusion is None:
        _compare_weights(folder, run)
        return
    few = [_first_few(domain) for domain in inputs.splits["verdict"]]
    recorded = [o.loss[: len(d.examples)] for d, o in zip(few, conclusion.outcomes, strict=True)]

    def measured(subject: ModelUnderTest) -> list[float]:
        return [loss for d in few for loss in subject.measure(subject.prepare(d)).loss]

    confirm(folder, measured, [loss for losses in recorded for loss in losses])


def _first_few(domain: Domain) -> Domain:
    """The first items of a domain, by likelihood alone."""
    return replace(
        domain,
        examples=domain.examples[:CONFIRMED],
        tasks=domain.tasks[:CONFIRMED],
        writing=None,
    )


def _compare_weights(folder: Path, run: EvolutionRun) -> None:
    """A fitness of one's own may take hours, so the weights themselves are compared."""
    champion = run.search.champion
    assert champion is not None
    run.bench.fill(champion.key)
    measured, found = run.bench.model.state_dict(), open_model(folder).network.state_dict()
    for name, tensor in measured.items():
        if not torch.equal(tensor.cpu().float(), found[name].float()):
            raise PhaseFailed(f"{folder} does not hold the weights that were measured: {name}")


def _compared(
    domains: Sequence[Domain], reference: Sequence[ItemScores], own: Sequence[ItemScores]
) -> Comparison:
    return compare_scores(
        [
            PairedScores(d.name, a, b, d.sizes, d.exact)
            for d, a, b in zip(domains, reference, own, strict=True)
        ]
    )


def _rivals(run: EvolutionRun, names: Sequence[str]) -> dict[str, str | Weights]:
    """What the champion has to beat, by name: candidates, the base, and Phase 1's control."""
    candidates = run.search.candidates
    parents = [key for key, c in candidates.items() if c.kind == "parent"]
    combos = [c for c in candidates.values() if c.origin.startswith("combo ")]
    scores = run.search.scores
    known = {c.key: scores[c.key] for c in combos if math.isfinite(scores.get(c.key, math.nan))}
    rivals: dict[str, str | Weights] = dict(zip(names, parents, strict=True))
    _, average, combo, below, joint = OTHERS
    rivals[average] = next(key for key, c in candidates.items() if c.kind == "average")
    if known:
        rivals[combo] = max(known, key=lambda key: known[key])
    base = run.material.base
    if base is not None:
        rivals[below] = base
        if base.folder is not None and (base.folder.parent / CONTROL / "config.json").exists():
            rivals[joint] = open_weights(base.folder.parent / CONTROL)
    return rivals


def _losses(comparison: Comparison) -> str:
    """Where a model is worse than another, though it need not be so over all."""
    if len(comparison.domains) < 2:
        return ""
    told = {domain.name: domain.sentence("it").split(" (")[0] for domain in comparison.domains}
    return "".join(f"; on {n} {said}" for n, said in told.items() if said.startswith("worse"))


def _retention(own: Score, parents: Sequence[Score]) -> dict[str, float]:
    """Accuracy of the champion over that of the best parent, for every domain."""
    found = {}
    for name, value in own.raw.items():
        best = max(parent.raw[name] for parent in parents)
        if name.endswith("/accuracy") and best > 0:
            found[name.removesuffix("/accuracy")] = value / best
    return found


def figures(run: EvolutionRun) -> dict[str, Any]:
    """The specification's figures of an evolution, on what the search saw."""
    search, first = run.search, run.search.history[0]
    champion = search.champion
    assert champion is not None
    end = search.scores[champion.key]
    start = max(v for k, v in search.scores.items() if search.candidates[k].kind == "parent")
    score = run.score_of(champion.key)
    made = reversed(lineage(search.candidates, champion.key))
    return {
        **{"best_fitness": end, "initial_fitness": start, "improvement": end - start},
        "improvement_pct": (end - start) / abs(start) if start else 0.0,
        "improvement_over_generation_0": end - first["best"],
        "generations_run": search.history[-1]["generation"],
        "convergence_reason": REASONS.get(run.reason, run.reason),
        "final_diversity": search.history[-1]["diversity"],
        "best_combo": next((c.operation["combo"] for c in made if c.kind == "merge"), None),
        "combo_usage": search.combo_usage,
        "fitness_components": score.parts if score else {},
        "best_generation": run.generation_of(champion.key),
    }


def ancestry(run: EvolutionRun, inputs: Inputs) -> dict[str, Any]:
    """All that it takes to make the champion again."""
    champion = run.search.champion
    assert champion is not None
    models = [*inputs.parents, *([inputs.base] if inputs.base else [])]
    return {
        "key": champion.key,
        "seed": run.search.seed,
        "models": [  # the parents in their order, then the base
            {"model": ref, "sha256": digest}
            for ref, digest in zip(models, run.material.hashes, strict=True)
        ],
        "has_base": inputs.base is not None,
        "candidates": [c.to_json() for c in lineage(run.search.candidates, champion.key)],
    }


def champion_files(
    run: EvolutionRun, inputs: Inputs, conclusion: EvolutionReport | None
) -> dict[str, bytes]:
    """What stands beside the champion's weights: card, lineage, verdict."""
    return {
        "lineage.json": files.to_json(ancestry(run, inputs)),
        "verdict.json": files.to_json(files.finite(conclusion.to_json() if conclusion else {})),
        "README.md": card(run, inputs, conclusion).encode(),
    }


def card(run: EvolutionRun, inputs: Inputs, conclusion: EvolutionReport | None) -> str:
    """The model card."""
    head = ("---", "library_name: transformers", "tags:", "- merge", "- evolution", "---")
    return "\n".join([*head, "# Evolved merge", "", *story(run, inputs, conclusion), ""])


def story(run: EvolutionRun, inputs: Inputs, conclusion: EvolutionReport | None) -> list[str]:
    """What was merged, what came out, and whether it is better, as lines of Markdown."""
    champion = run.search.champion
    assert champion is not None
    last = run.search.history[-1]
    lines = [
        f"Champion of {last['generation']} generations after generation 0"
        f" ({len(run.search.scores)} candidates, seed {run.search.seed}, ended: {run.reason}),"
        f" made by: {champion.origin}.",
        *("", "| parent | sha256 of its weights |", "|---|---|"),
        *(
            f"| `{Path(ref).name}` | `{digest}` |"
            for ref, digest in zip(inputs.parents, run.material.hashes, strict=False)
        ),
    ]
    failed = sum(score == float("-inf") for score in run.search.scores.values())
    lines += ["", f"Base: {f'`{Path(inputs.base).name}`' if inputs.base else 'none, their mean'}."]
    lines += [f"{failed} candidates failed; the journal says why."] if failed else []
    counts = {s: [f"{d.name} {len(d.examples)}" for d in of] for s, of in inputs.splits.items()}
    lines += [f"Items for {split}: {', '.join(each)}." for split, each in counts.items()]
    if run.settings.split_by == "prompt":  # the card of an older evolution stays as it was
        lines += [f"There are {note}." for note in copies_told(inputs.splits.get("verdict", ()))]
    lines += ["", "## Verdict", ""]
    if conclusion is None:
        lines += ["There are no unseen items: the fitness was a function or command of the user."]
    else:
        lines += ["On items that the search never saw (of bits per byte fewer are better):", ""]
        lines += [f"- {sentence}" for sentence in conclusion.sentences()]
        lines += ["", *table(conclusion)]
    again = "`forge evo replay lineage.json OUT` makes the same weights from the same parents."
    return [*lines, "", again]


def table(conclusion: EvolutionReport) -> list[str]:
    """Raw figures of every model, as Markdown."""
    columns = list(conclusion.champion.raw)
    rows = {"champion": conclusion.champion}
    rows |= {name: rival.score for name, rival in conclusion.rivals.items()}
    return [
        f"| model | fitness | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
        *(
            f"| {name} | {score.fitness:.4f} | "
            + " | ".join(f"{score.raw[column]:.4f}" for column in columns)
            + " |"
            for name, score in rows.items()
        ),
    ]
