"""After an evolution: the verdict on unseen items, and what is written beside the champion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agent_forge.errors import ForgeError, PhaseFailed
from agent_forge.evals import model_under_test
from agent_forge.evals.comparison import ACCURACY, BITS, Comparison, compare, correct_together
from agent_forge.evals.domains import Domain, copies_told
from agent_forge.evals.ensemble import Ensemble
from agent_forge.evals.fitness import DomainFitness, FitnessScore
from agent_forge.evals.likelihood import TokenLosses
from agent_forge.evals.model_under_test import CONFIRMED, ItemScores, ModelUnderTest
from agent_forge.model.card import card_head
from agent_forge.model.opened import open_model
from agent_forge.phases.phase2_evomerge import told
from agent_forge.phases.phase2_evomerge.checks import HEALED
from agent_forge.phases.phase2_evomerge.inputs import MODEL_NAMES
from agent_forge.phases.phase2_evomerge.journal import LOG
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.search.candidate import SHORT, lineage
from agent_forge.store import files

AVERAGE = MODEL_NAMES[1]
FINAL_METRICS = {  # and which figure of the summary each of them is
    "phase/initial_fitness": "initial_fitness",
    "phase/final_fitness": "final_fitness",
    "phase/fitness_improvement": "fitness_improvement",
    "phase/compression_ratio": "compression_ratio",
    "phase/champion_combo_id": "best_combo",
    "phase/champion_combo_binary": "champion_combo_binary",
    "final/best_combo": "best_combo",
    "final/best_fitness": "best_fitness",
    "final/generations": "generations_run",
    "final/improvement_pct": "improvement_pct",
    "handoff/champion_fitness": "best_fitness",
}
REASONS = {"converged": "threshold_met", "generations": "max_generations"}  # as the guide has it


class ModelOnDisk(str):
    """The reference of a model that is measured as its files have it; a candidate has a key."""


@dataclass(frozen=True)
class Baseline:
    """A model that the champion is compared with."""

    score: FitnessScore
    comparison: Comparison  # its p are corrected for those of the others

    def sentence(self) -> str:
        """The champion's gain over it in words."""
        return self.comparison.overall.sentence("it")


@dataclass(frozen=True)
class Ceiling:
    """What the parents reach together without being one model: a bound, and no rival."""

    raw: dict[str, float]  # what is known of each domain
    parents: dict[str, str] = field(default_factory=dict)  # by domain, where one was chosen

    @property
    def bits_per_byte(self) -> float:
        """The mean over domains."""
        bits = [value for name, value in self.raw.items() if name.endswith("/bits_per_byte")]
        return sum(bits) / len(bits)


Measured = Mapping[str, tuple[FitnessScore, Sequence[ItemScores]]]  # by name of the model
ENSEMBLE, ORACLE = "ceiling: ensemble of parents", "ceiling: best parent of each domain"


@dataclass(frozen=True)
class EvolutionReport:
    """How the champion does on items that the search never saw."""

    champion: FitnessScore
    baselines: dict[str, Baseline]
    best_parent: str
    perplexity: float  # of the champion, a token
    retention: dict[str, float] = field(default_factory=dict)
    items: tuple[ItemScores, ...] = ()  # of the champion, by domain
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    replicates: tuple[dict[str, Any], ...] = ()  # what the search gave with each seed
    measured: Measured = field(default_factory=dict)  # all others than the champion

    def sentences(self) -> list[str]:
        """The result in words, the best parent first."""
        best = self.best_parent
        named = {f"best parent, {best}": self.baselines[best]}
        named |= {name: b for name, b in self.baselines.items() if name != best}
        return [f"{n}: {b.sentence()}{b.comparison.worse_domains()}" for n, b in named.items()]

    @property
    def share_of_oracle(self) -> float | None:
        """The share of the way in loss from the plain average to the best parent of each domain."""
        if ORACLE not in self.ceilings or AVERAGE not in self.baselines:
            return None
        bits = self.baselines[AVERAGE].comparison.overall.gains[BITS]
        way = bits.reference - self.ceilings[ORACLE].bits_per_byte
        return bits.value / way if way > 0 else None

    def notes(self) -> list[str]:
        """What has to be known beside the sentences: corrections, ceilings, other seeds."""
        found = [f"p is corrected over these {len(self.baselines)} comparisons (Holm)"]
        if (share := self.share_of_oracle) is not None:
            way = "of the way in loss from the plain average to the best parent of each domain"
            found.append(f"the champion went {share:.0%} {way}, chosen on items of the search")
        if self.replicates:
            found.append(self._replicates_told())
        return found

    def _replicates_told(self) -> str:
        won = {
            rival: sum(row["verdicts"][rival] == "better" for row in self.replicates)
            for rival in self.replicates[0]["verdicts"]
        }
        seeds = ", ".join(str(row["seed"]) for row in self.replicates)
        beaten = ", ".join(f"the {rival} in {count}" for rival, count in won.items())
        first = f"the champion is that of seed {self.replicates[0]['seed']}"
        searches = f"of {len(self.replicates)} searches (seeds {seeds})"
        return f"{searches} the champion beat {beaten}; {first}"

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
            "notes": self.notes(),
            "ceilings": {
                name: {**asdict(c), "bits_per_byte": c.bits_per_byte}
                for name, c in self.ceilings.items()
            },
            "share_of_oracle": self.share_of_oracle,
            "replicates": list(self.replicates),
        }

    def rows(self) -> list[list[str]]:
        """The name, fitness and figures of every model, then of the ceilings."""
        columns = list(self.champion.raw)
        rows = [
            [name, *(f"{x:.4f}" for x in (s.fitness, *(s.raw[c] for c in columns)))]
            for name, s in self.scores().items()
        ]
        for name, ceiling in self.ceilings.items():
            known = (ceiling.raw.get(column) for column in columns)
            rows.append([name, "-", *("-" if x is None else f"{x:.4f}" for x in known)])
        return rows

    def table(self) -> list[str]:
        """The measured values of every model, as Markdown."""
        head = ["model", "fitness", *self.champion.raw]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows()]
        return lines


def measure_verdict(loop: EvolutionLoop, known: Measured | None = None) -> EvolutionReport | None:
    """Compare champion and baselines on the untouched items; None if there are no such items.
    What is `known` of them, from the same search with another seed, is not measured again."""
    if not loop.inputs.splits:
        return None
    domains, names = loop.inputs.splits["verdict"], loop.inputs.names
    measured, ensemble = dict(known or {}), Ensemble()
    shared = _verdict_fitness(loop, loop.evaluator.model_under_test)
    for name, model in {MODEL_NAMES[0]: loop.champion.key, **_baselines(loop)}.items():
        if name in measured:
            continue
        loop.proceed("during the verdict")
        loop.listen({"event": "verdict", "model": name})
        if isinstance(model, ModelOnDisk):  # it may have another config or tokenizer
            fitness = _verdict_fitness(loop, _opened(loop, model))
        else:
            fitness = shared
            loop.evaluator.fill(model, exact=True)
            fitness.use(loop.evaluator.model, *loop.weights.size(model))
        if name in names:
            tokens: list[TokenLosses] = [{} for _ in domains]
            items = fitness.model_under_test.measure_all(fitness.prepared, token_losses=tokens)
            ensemble.add(fitness.prepared, tokens)
        else:
            items = fitness.measure()
        measured[name] = fitness.score_of(items), items
    loop.journal.require_files()
    own_score, own = measured.pop(MODEL_NAMES[0])
    compared = correct_together([compare(its, own, domains) for _, its in measured.values()])
    pairs_of = zip(measured.items(), compared, strict=True)
    baselines = {name: Baseline(score, found) for (name, (score, _)), found in pairs_of}
    nats = sum(sum(o.loss) for o in own) / sum(sum(o.tokens) for o in own)
    return EvolutionReport(
        own_score,
        baselines,
        _best_parent(names, baselines),
        math.exp(min(700, nats)),
        _retention(own_score, [baselines[name].score for name in names]),
        tuple(own),
        {} if known else _ceilings(loop, domains, ensemble, baselines),
        measured=measured,
    )


def _verdict_fitness(loop: EvolutionLoop, subject: ModelUnderTest) -> DomainFitness:
    s = loop.settings
    weights = s.fitness_weights, s.fitness_floors, s.domain_weights
    fitness = DomainFitness(subject, loop.inputs.splits["verdict"], *weights)
    fitness.leave_out(loop.floor)
    return fitness


def _opened(loop: EvolutionLoop, model: ModelOnDisk) -> ModelUnderTest:
    try:
        opened = model_under_test.open_model_under_test(model, fast=loop.settings.fast)
    except (ForgeError, OSError):
        loop.journal.require_files()  # if one is gone, that is why
        raise
    opened.model.to(next(loop.evaluator.model.parameters()).device)
    return replace(opened, threads=loop.evaluator.model_under_test.threads)


def _best_parent(names: Sequence[str], baselines: Mapping[str, Baseline]) -> str:
    """The best by accuracy, where that tells any parent from the champion; else by loss."""
    overall = {name: baselines[name].comparison.overall for name in names}
    if any(found.measures()[0] == ACCURACY for found in overall.values()):
        return max(names, key=lambda name: overall[name].gains[ACCURACY].reference)
    return min(names, key=lambda name: overall[name].gains[BITS].reference)


def _retention(champion: FitnessScore, parents: Sequence[FitnessScore]) -> dict[str, float]:
    """The accuracy of the champion over that of the best parent, for every domain."""
    found = {}
    for key in champion.raw:
        most = max(parent.raw[key] for parent in parents)
        if key.endswith("/accuracy") and most > 0:
            found[key.removesuffix("/accuracy")] = champion.raw[key] / most
    return found


def _ceilings(
    loop: EvolutionLoop,
    domains: Sequence[Domain],
    ensemble: Ensemble,
    baselines: Mapping[str, Baseline],
) -> dict[str, Ceiling]:
    """The ensemble, if all parents read the same tokens, and the parent that was best at each
    domain on the items of the search, if the search had items."""
    found = {ENSEMBLE: Ceiling(ensemble.raw(domains))} if ensemble.alike else {}
    best = loop.journal.best_parents([domain.name for domain in domains])
    chosen = {domain: loop.inputs.names[number] for domain, number in best.items()}
    raw: dict[str, float] = {}
    for domain, parent in chosen.items():
        figures = baselines[parent].score.raw.items()
        raw |= {name: value for name, value in figures if name.rpartition("/")[0] == domain}
    return found | ({ORACLE: Ceiling(raw, chosen)} if chosen else {})


def _baselines(loop: EvolutionLoop) -> dict[str, str]:
    """What the champion has to beat: parents, average, best combo, base, and joint training."""
    candidates, scores, inputs = loop.search.candidates, loop.search.scores, loop.inputs
    first = (c for c in candidates.values() if loop.search.born(c.key) == 0)
    combos = [c.key for c in first if c.origin.startswith("combo ")]
    measured = [key for key in combos if math.isfinite(scores.get(key, math.nan))]
    parents = map(ModelOnDisk, inputs.parent_refs)
    models: dict[str, str] = dict(zip(inputs.names, parents, strict=True))
    _, average, combo, base, joint, healed = MODEL_NAMES
    models[average] = loop.search.average
    if measured:
        models[combo] = max(measured, key=lambda key: scores[key])
    on_disk = {base: inputs.base_ref, joint: inputs.control_ref}
    on_disk[healed] = str(loop.folder / HEALED) if loop.settings.heal else None
    return models | {name: ModelOnDisk(ref) for name, ref in on_disk.items() if ref is not None}


def replicate_row(seed: int, report: EvolutionReport) -> dict[str, Any]:
    """What one search amounts to: its champion against the best parent and the average."""
    rivals = {"best parent": report.best_parent, AVERAGE: AVERAGE}
    overall = {rival: report.baselines[name].comparison.overall for rival, name in rivals.items()}
    first = {rival: found.gains[found.measures()[0]] for rival, found in overall.items()}
    return {
        "seed": seed,
        "fitness": report.champion.fitness,
        "best_parent": report.best_parent,
        "verdicts": {rival: gain.verdict for rival, gain in first.items()},
        "gains": {rival: found.to_json() for rival, found in overall.items()},
    }


def confirm_champion(folder: Path, loop: EvolutionLoop, report: EvolutionReport | None) -> None:
    """The file has to score what the verdict says; without a verdict, to hold what was measured."""
    if report is None:  # a fitness of the user's own may take hours, so the weights are compared
        loop.evaluator.fill(loop.champion.key)
        state = open_model(folder).network.state_dict()
        for name, tensor in loop.evaluator.model.state_dict().items():
            if not torch.equal(tensor.cpu().float(), state[name].float()):
                raise PhaseFailed(f"{folder} does not hold the weights that were measured: {name}")
        return
    recorded = [loss for items in report.items for loss in items.loss[:CONFIRMED]]
    verdict = loop.inputs.splits["verdict"]
    model_under_test.confirm(folder, lambda model: model.first_losses(verdict), recorded)


def summary(loop: EvolutionLoop) -> dict[str, Any]:
    """The documents' figures of an evolution, on what the search saw."""
    search, key = loop.search, loop.champion.key
    end = search.scores[key]
    start = max(search.scores.get(parent, -math.inf) for parent in search.space.parents)
    record = loop.journal.find("candidate", key=key) or {}
    last, gain, combo = search.history[-1], end - start, told.champion_combo(search, key)
    weights = sum(spec.numel for spec in loop.inputs.parents[0].specs.values())
    return {
        **{"best_fitness": end, "initial_fitness": start, "final_fitness": end},
        **{"improvement": gain, "fitness_improvement": gain},
        "improvement_pct": (gain_pct := gain / abs(start) if start else 0.0),
        "fitness_improvement_percent": 100 * gain_pct,
        "improvement_over_generation_0": end - search.history[0]["best"],
        **{"generations_run": last["generation"], "generations_completed": last["generation"]},
        "convergence_reason": REASONS.get(loop.reason, loop.reason),
        "final_diversity": last["diversity"],
        "best_combo": combo,
        "champion_combo_binary": None if combo is None else f"{combo:03b}",
        "combo_usage": search.combo_usage,
        "best_merge_technique": loop.technique,
        "compression_ratio": float(len(loop.inputs.parents)),
        "parameters_before": weights * len(loop.inputs.parents),
        "parameters_after": sum(spec.numel for spec in loop.weights.specs_of(key).values()),
        "fitness_components": (record.get("score") or {}).get("parts", {}),
        "best_generation": int(record.get("generation", 0)),
    }


def final_metrics(loop: EvolutionLoop, report: EvolutionReport | None) -> dict[str, Any]:
    """What an evolution came to, by the names of the documents."""
    known = summary(loop)
    found = {name: known[figure] for name, figure in FINAL_METRICS.items()}
    found["phase/duration_seconds"] = loop.elapsed()
    if report is not None:
        found["phase/final_perplexity"] = report.perplexity
        found["phase/final_accuracy"] = report.champion.parts.get("accuracy", 0.0)
    return {name: value for name, value in found.items() if value is not None}


def artifacts(loop: EvolutionLoop, report: EvolutionReport | None, model: Path) -> dict[str, Any]:
    """What an evolution leaves, by the names of the documents."""
    search, names, key = loop.search, loop.inputs.names, loop.champion.key
    champions, known = [entry["champion"] for entry in search.history], summary(loop)
    parts = report.champion.parts if report else {}
    return {
        "evolution_log": str(loop.folder / LOG),
        "final_checkpoint": str(model),
        "model_id": f"evomerge_gen{known['generations_run']}_best_{key[:SHORT]}",
        "best_generation": known["best_generation"],
        "fitness_curve": loop.curve,
        "merge_history": [told.technique(search, k, names) if k else "none" for k in champions],
        "best_merge_weights": told.parent_weights(search, key, names),
        "phase_2_metrics": {
            "fitness": search.scores[key],
            "perplexity": report.perplexity if report else None,
            "accuracy": parts.get("accuracy"),
            "generations": known["generations_run"],
        },
        "ready_for_quietstar": report is not None,
        "verdict": report.to_json() if report else None,
    }


def champion_files(loop: EvolutionLoop, report: EvolutionReport | None) -> dict[str, bytes]:
    """What stands beside the champion's weights: lineage, verdict, card."""
    card = "\n".join([evolved_head(loop), "# Evolved merge", "", *markdown(loop, report), ""])
    return {
        "lineage.json": files.to_json(told.champion_lineage(loop, loop.champion.key)),
        "verdict.json": files.to_json(files.finite(report.to_json() if report else {})),
        "README.md": card.encode(),
    }


def evolved_head(loop: EvolutionLoop) -> str:
    """The head of the card of what was evolved."""
    return card_head(loop.inputs.refs, loop.inputs.parents[0].config, ("merge", "evolution"))


def markdown(loop: EvolutionLoop, report: EvolutionReport | None) -> list[str]:
    """What was merged, what came out, and whether it is better, as lines of Markdown."""
    inputs, search = loop.inputs, loop.search
    lines = [
        f"Champion of {search.history[-1]['generation']} generations after generation 0"
        f" ({len(search.scores)} candidates, seed {inputs.seeds}, ended: {loop.reason}),"
        f" made by: {loop.technique}.",
        *("", "| parent | sha256 of its weights |", "|---|---|"),
    ]
    parents = zip(inputs.parent_refs, inputs.hashes, strict=False)
    lines += [f"| `{Path(ref).name}` | `{sha}` |" for ref, sha in parents]
    base = f"`{Path(inputs.base_ref).name}`" if inputs.base_ref else "none, their mean"
    lines += ["", f"Base: {base}."]
    if failed := sum(score == -math.inf for score in search.scores.values()):
        lines += [f"{failed} candidates failed; the journal says why."]
    if loop.floor:
        floored = ", ".join(loop.floor)
        lines += [f"No parent is right more often than chance on {floored}: that had no weight."]
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
        lines += [f"- {sentence}" for sentence in [*report.sentences(), *report.notes()]]
        lines += ["", *report.table()]
    again = "`forge evo replay lineage.json OUT` makes the same weights from the same parents."
    made = lineage(search.candidates, loop.champion.key)
    if any(c.operation.get("method") == "regmean" for c in made):
        again = "RegMean has read the items of the search: without them it cannot be replayed."
    return [*lines, "", again]
