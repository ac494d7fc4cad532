"""What is told of an evolution: generations, their metrics, and how a champion was made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agent_forge.merge.combos import combo_stages
from agent_forge.search.base import SearchStrategy
from agent_forge.search.candidate import Candidate, lineage
from agent_forge.search.continuous import coefficients_of

if TYPE_CHECKING:
    from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop

NAMES = {"linear": "Linear", "frankenmerge": "FrankenMerge"}  # the others are abbreviations
BLENDS = {"linear": "task arithmetic", "dare_linear": "DARE", "dare_ties": "DARE + TIES"}
MOVES = {
    "gradient": "gradient step{} on per-layer weights",
    "sample": "CMA-ES sample{} of per-layer weights",
    "noise": "mutation{} by noise",
    "path": "change{} of the order of layers",
    "shift": "shift{} along task vectors",
}
PER_BYTE = "/bits_per_byte"


def technique(search: SearchStrategy, key: str, names: Sequence[str]) -> str:
    """How a candidate was made, in words: what it began as, and what was done to it since."""
    first, moves = search.way_to(key)
    scaled = first.kind == "stretch"
    first = search.candidates[first.inputs[0]] if scaled else first
    parts = [_beginning(first, search.space.parents, names) + ", scaled" * scaled]
    for move, run in groupby(moves):
        count = len(list(run))
        words = MOVES.get(move, "mutation{} of the recipe").format("s" * (count > 1))
        parts.append(f"{count} {words}")
    return ", then ".join(parts)


def _beginning(first: Candidate, parents: Sequence[str], names: Sequence[str]) -> str:
    operation = first.operation
    if first.kind == "parent":
        return f"{names[operation['index']]} as it is"
    if first.kind == "average":
        return "the plain average"
    if first.kind == "merge":
        told = " + ".join(map(_name, combo_stages(operation["combo"])))
        return told if first.inputs == tuple(parents) else f"{told} of earlier merges"
    return BLENDS.get(str(operation.get("method")), _name(str(operation.get("method", first.kind))))


def _name(technique: str) -> str:
    return NAMES.get(technique, technique.upper().replace("_", "-"))


def champion_combo(search: SearchStrategy, key: str) -> int | None:
    """The last combo that a candidate was made by; None if there was none."""
    merges = [c for c in lineage(search.candidates, key) if c.kind == "merge"]
    return int(merges[-1].operation["combo"]) if merges else None


def parent_weights(
    search: SearchStrategy, key: str, names: Sequence[str]
) -> dict[str, float] | None:
    """How much of each parent's task vector is in a candidate, mean over groups; None where trims
    and votes decide."""
    anchor, point = coefficients_of(search.space, search.candidates, key)
    rows = point.reshape(-1, len(names))
    return None if anchor else dict(zip(names, rows.mean(0).round(6).tolist(), strict=True))


def champion_lineage(loop: EvolutionLoop, key: str) -> dict[str, Any]:
    """All that it takes to make a candidate again."""
    inputs = loop.inputs
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


def generation_record(loop: EvolutionLoop) -> dict[str, Any]:
    """The event of a generation that has just been closed."""
    search, entry, settings = loop.search, loop.search.history[-1], loop.settings
    key, elapsed = entry["champion"], loop.elapsed()
    return {
        **entry,
        "event": "generation",
        "generations": settings.generations,
        "left": search.generations_left(),
        "origin": technique(search, key, loop.inputs.names) if key else "none",
        "cache_hits": loop.cache_hits,
        "seconds": dict(loop.seconds),
        # By domain: accuracy, which comes last, or bits a byte where there are no answers.
        "scores": {name.rpartition("/")[0]: v for name, v in loop.journal.raw(key).items()},
        "tokens_per_s": loop.pace.tokens_per_s,
        "elapsed_s": elapsed,
        "eta_s": loop.pace.eta_s(search, elapsed),
        "budget_s": 60 * settings.minutes_each,
        "metrics": generation_metrics(loop),
    }


def generation_metrics(loop: EvolutionLoop) -> dict[str, float]:
    """The numbers of the generation that was just closed, by the names of the documents."""
    search, entry = loop.search, loop.search.history[-1]
    records = [
        record
        for record in loop.journal.records
        if record["record"] == "candidate" and record["generation"] == entry["generation"]
    ]
    scored = [record for record in records if record["score"] and not record.get("dropped")]
    found: dict[str, float | None] = {
        "best_fitness": entry["best"],
        "avg_fitness": entry["mean"],
        "min_fitness": entry["lowest"],
        "max_fitness": entry["highest"],
        "fitness_std": entry["fitness_std"],
        "diversity_score": entry["diversity"],
        "failed": entry["failed"],
        "mutation_count": entry["mutations"],
        "best_speed_tps": loop.pace.tokens_per_s,
        **reference_fitness(search),
        **_of_champion(loop, entry["champion"]),
        **_of_domains([record["score"]["raw"] for record in scored]),
        **{f"elite{n}_fitness": search.scores[e] for n, e in enumerate(entry["elites"], 1)},
        **_combos_chosen(search, entry["elites"], records),
    }
    known = {f"generation/{name}": value for name, value in found.items() if value is not None}
    return known | _of_combos(search)


def reference_fitness(search: SearchStrategy) -> dict[str, float]:
    """The fitness of the parents and of their average, by what counts now."""
    keys = {f"parent_{n}": key for n, key in enumerate(search.space.parents)}
    keys["plain_average"] = search.average
    scores = {f"{name}_fitness": search.scores.get(key, math.nan) for name, key in keys.items()}
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _of_champion(loop: EvolutionLoop, key: str | None) -> dict[str, float]:
    raw = loop.journal.raw(key)
    bits = [value for name, value in raw.items() if name.endswith(PER_BYTE)]
    right = [value for name, value in raw.items() if name.endswith("/accuracy")]
    found = {"best_perplexity": 2 ** fmean(bits)} if bits else {}
    if right:
        found["best_accuracy"] = fmean(right)
    if key:
        parent = loop.inputs.nbytes / len(loop.inputs.parents)
        found["best_memory_mb"] = loop.weights.size(key)[1] * parent / 1e6
    return found


def _of_domains(raws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean and the best of each domain: accuracy, or bits a byte where there are no answers."""
    found: dict[str, float] = {}
    for name in raws[0] if raws else ():
        domain, _, measure = name.rpartition("/")
        if not domain:  # of a fitness of the user's own
            continue
        values = [raw[name] for raw in raws]
        if measure == "accuracy" or f"{domain}/accuracy" not in raws[0]:
            best = max(values) if measure == "accuracy" else min(values)
            name = domain.replace("/", "_")
            found |= {f"{name}_avg": fmean(values), f"{name}_best": best}
    return found


def _of_combos(search: SearchStrategy) -> dict[str, float]:
    found: dict[str, float] = {}
    for combo, scores in search.combo_scores.items():
        found[f"combo/{combo}/usage"] = len(scores)
        if finite := [score for score in scores if math.isfinite(score)]:
            found[f"combo/{combo}/avg_fitness"] = fmean(finite)
    return found


def _combos_chosen(
    search: SearchStrategy, elites: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    begun = Counter(champion_combo(search, key) for key in elites)
    found = {f"elite_combo_{combo}": float(n) for combo, n in begun.items() if combo is not None}
    losers = [r for r in records if r["origin"].startswith("losers ")]
    chosen = (r["operation"]["combo"] for r in losers)
    return found | {f"loser_combo_{n}": combo for n, combo in enumerate(chosen, 1)}
