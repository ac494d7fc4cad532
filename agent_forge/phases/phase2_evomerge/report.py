"""After an evolution: the verdict on unseen items, and what is written beside the champion."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agent_forge.errors import ForgeError, PhaseFailed
from agent_forge.evals import model_under_test
from agent_forge.evals.comparison import Comparison, compare
from agent_forge.evals.domains import copies_told
from agent_forge.evals.fitness import DomainFitness, FitnessScore
from agent_forge.evals.model_under_test import CONFIRMED, ItemScores, ModelUnderTest
from agent_forge.model.opened import open_model
from agent_forge.phases.phase2_evomerge.checks import HEALED
from agent_forge.phases.phase2_evomerge.inputs import MODEL_NAMES
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.search.candidate import lineage
from agent_forge.store import files

REASONS = {"converged": "threshold_met", "generations": "max_generations"}  # as the guide has it


class ModelOnDisk(str):
    """The reference of a model that is measured as its files have it; a candidate has a key."""


@dataclass(frozen=True)
class Baseline:
    """A model that the champion is compared with."""

    score: FitnessScore
    comparison: Comparison

    def sentence(self) -> str:
        """The champion's gain over it in words."""
        return self.comparison.overall.sentence("it")


@dataclass(frozen=True)
class EvolutionReport:
    """How the champion does on items that the search never saw."""

    champion: FitnessScore
    baselines: dict[str, Baseline]
    best_parent: str
    perplexity: float  # of the champion, a token
    retention: dict[str, float] = field(default_factory=dict)
    items: tuple[ItemScores, ...] = ()  # of the champion, by domain

    def sentences(self) -> list[str]:
        """The result in words, the best parent first."""
        best = self.best_parent
        named = {f"best parent, {best}": self.baselines[best]}
        named |= {name: b for name, b in self.baselines.items() if name != best}
        return [f"{n}: {b.sentence()}{b.comparison.worse_domains()}" for n, b in named.items()]

    def scores(self) -> dict[str, FitnessScore]:
        """The score of every model, the champion's first."""
        return {MODEL_NAMES[0]: self.champion} | {n: b.score for n, b in self.baselines.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "champion": asdict(self.champion),
            "best_parent": self.best_parent,
            "perplexity": self.perplexity,
            "retention": self.retention,
            "rivals": {name: asdict(baseline) for name, baseline in self.baselines.items()},
            "sentences": self.sentences(),
        }

    def table(self) -> list[str]:
        """The measured values of every model, as Markdown."""
        head = ["model", "fitness", *self.champion.raw]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for name, score in self.scores().items():
            values = [score.fitness, *(score.raw[column] for column in head[2:])]
            lines.append(f"| {name} | {' | '.join(f'{value:.4f}' for value in values)} |")
        return lines


def measure_verdict(loop: EvolutionLoop) -> EvolutionReport | None:
    """Compare champion and baselines on the untouched items; None if there are no such items."""
    if not loop.inputs.splits:
        return None
    domains, names, s = loop.inputs.splits["verdict"], loop.inputs.names, loop.settings
    weights = s.fitness_weights, s.fitness_floors, s.domain_weights
    shared = DomainFitness(loop.evaluator.model_under_test, domains, *weights)
    items: dict[str, list[ItemScores]] = {}
    scores: dict[str, FitnessScore] = {}
    for name, model in {MODEL_NAMES[0]: loop.champion.key, **_baselines(loop)}.items():
        loop.proceed("during the verdict")
        loop.listen({"event": "verdict", "model": name})
        if isinstance(model, ModelOnDisk):  # it may have another config or tokenizer
            try:
                opened = model_under_test.open_model_under_test(model)
            except (ForgeError, OSError):
                loop.journal.require_files()  # if one is gone, that is why
                raise
            opened.model.to(next(loop.evaluator.model.parameters()).device)
            fitness = DomainFitness(opened, domains, *weights)
        else:
            fitness = shared
            loop.evaluator.fill(model)
            fitness.use(loop.evaluator.model, *loop.weights.size(model))
        items[name] = fitness.measure()
        scores[name] = fitness.score_of(items[name])
    loop.journal.require_files()
    own, own_score = items.pop(MODEL_NAMES[0]), scores.pop(MODEL_NAMES[0])
    baselines = {n: Baseline(scores[n], compare(its, own, domains)) for n, its in items.items()}
    best = max(names, key=lambda name: scores[name].quality)
    nats = sum(sum(o.loss) for o in own) / sum(sum(o.tokens) for o in own)
    retention = {}  # accuracy of the champion over that of the best parent, for every domain
    for key in own_score.raw:
        most = max(scores[name].raw[key] for name in names)
        if key.endswith("/accuracy") and most > 0:
            retention[key.removesuffix("/accuracy")] = own_score.raw[key] / most
    measured = math.exp(min(700, nats)), retention, tuple(own)
    return EvolutionReport(own_score, baselines, best, *measured)


def _baselines(loop: EvolutionLoop) -> dict[str, str]:
    """What the champion has to beat: parents, average, best combo, base, and joint training."""
    candidates, scores, inputs = loop.search.candidates, loop.search.scores, loop.inputs
    combos = [c.key for c in candidates.values() if c.origin.startswith("combo ")]
    measured = [key for key in combos if math.isfinite(scores.get(key, math.nan))]
    parents = map(ModelOnDisk, inputs.parent_refs)
    models: dict[str, str] = dict(zip(inputs.names, parents, strict=True))
    _, average, combo, base, joint, healed = MODEL_NAMES
    models[average] = next(key for key, c in candidates.items() if c.kind == "average")
    if measured:
        models[combo] = max(measured, key=lambda key: scores[key])
    on_disk = {base: inputs.base_ref, joint: inputs.control_ref}
    on_disk[healed] = str(loop.folder / HEALED) if loop.settings.heal else None
    return models | {name: ModelOnDisk(ref) for name, ref in on_disk.items() if ref is not None}


def confirm_champion(folder: Path, loop: EvolutionLoop, report: EvolutionReport | None) -> None:
    """The file has to score what the verdict says; without a verdict, to hold what was measured."""
    if report is None:  # a fitness of the user's own may take hours, so the weights are compared
        loop.evaluator.fill(loop.champion.key)
        state = open_model(folder).network.state_dict()
        for name, tensor in loop.evaluator.model.state_dict().items():
            if not torch.equal(tensor.cpu().float(), state[name].float()):
                raise PhaseFailed(f"{folder} does not hold the weights that were measured: {name}")
        return
    few = [d.select(range(len(d.examples[:CONFIRMED]))) for d in loop.inputs.splits["verdict"]]
    recorded = [loss for items in report.items for loss in items.loss[:CONFIRMED]]

    def measure(model: ModelUnderTest) -> list[float]:
        parts = [model.prepare(replace(domain, writing=None)) for domain in few]
        return [loss for part in parts for loss in model.measure(part).loss]

    model_under_test.confirm(folder, measure, recorded)


def summary(loop: EvolutionLoop) -> dict[str, Any]:
    """The specification's figures of an evolution, on what the search saw."""
    search, champion = loop.search, loop.champion
    end = search.scores[champion.key]
    start = max(v for k, v in search.scores.items() if search.candidates[k].kind == "parent")
    record = loop.journal.find("candidate", key=champion.key) or {}
    merges = [c for c in lineage(search.candidates, champion.key) if c.kind == "merge"]
    last = search.history[-1]
    return {
        **{"best_fitness": end, "initial_fitness": start, "improvement": end - start},
        "improvement_pct": (end - start) / abs(start) if start else 0.0,
        "improvement_over_generation_0": end - search.history[0]["best"],
        "generations_run": last["generation"],
        "convergence_reason": REASONS.get(loop.reason, loop.reason),
        "final_diversity": last["diversity"],
        "best_combo": merges[-1].operation["combo"] if merges else None,
        "combo_usage": search.combo_usage,
        "fitness_components": (record.get("score") or {}).get("parts", {}),
        "best_generation": int(record.get("generation", 0)),
    }


def champion_lineage(loop: EvolutionLoop) -> dict[str, Any]:
    """All that it takes to make the champion again."""
    inputs, key = loop.inputs, loop.champion.key
    settings = (model.settings_sha256() for model in inputs.models)
    rows = zip(inputs.refs, inputs.hashes, settings, strict=True)
    models = [{"model": ref, "sha256": sha, "settings_sha256": own} for ref, sha, own in rows]
    return {
        "key": key,
        "seed": inputs.seed,
        "models": models,  # the parents, then the base
        "has_base": inputs.base is not None,
        "candidates": [c.to_json() for c in lineage(loop.search.candidates, key)],
    }


def champion_files(loop: EvolutionLoop, report: EvolutionReport | None) -> dict[str, bytes]:
    """What stands beside the champion's weights: lineage, verdict, card."""
    head = ("---", "library_name: transformers", "tags:", "- merge", "- evolution", "---")
    card = "\n".join([*head, "# Evolved merge", "", *markdown(loop, report), ""])
    return {
        "lineage.json": files.to_json(champion_lineage(loop)),
        "verdict.json": files.to_json(files.finite(report.to_json() if report else {})),
        "README.md": card.encode(),
    }


def markdown(loop: EvolutionLoop, report: EvolutionReport | None) -> list[str]:
    """What was merged, what came out, and whether it is better, as lines of Markdown."""
    inputs, search = loop.inputs, loop.search
    lines = [
        f"Champion of {search.history[-1]['generation']} generations after generation 0"
        f" ({len(search.scores)} candidates, seed {inputs.seed}, ended: {loop.reason}),"
        f" made by: {loop.champion.origin}.",
        *("", "| parent | sha256 of its weights |", "|---|---|"),
    ]
    parents = zip(inputs.parent_refs, inputs.hashes, strict=False)
    lines += [f"| `{Path(ref).name}` | `{sha}` |" for ref, sha in parents]
    base = f"`{Path(inputs.base_ref).name}`" if inputs.base_ref else "none, their mean"
    lines += ["", f"Base: {base}."]
    if failed := sum(score == -math.inf for score in search.scores.values()):
        lines += [f"{failed} candidates failed; the journal says why."]
    for split, domains in inputs.splits.items():
        counts = ", ".join(f"{d.name} {len(d.examples)}" for d in domains)
        lines += [f"Items for {split}: {counts}."]
    if loop.settings.split_by != "content":  # the card of an older evolution stays as it was
        lines += [f"There are {note}." for note in copies_told(inputs.splits.get("verdict", ()))]
    lines += ["", "## Verdict", ""]
    if report is None:
        lines += ["There are no unseen items: the fitness was a function or command of the user."]
    else:
        lines += ["On items that the search never saw (of bits per byte fewer are better):", ""]
        lines += [f"- {sentence}" for sentence in report.sentences()]
        lines += ["", *report.table()]
    again = "`forge evo replay lineage.json OUT` makes the same weights from the same parents."
    return [*lines, "", again]
