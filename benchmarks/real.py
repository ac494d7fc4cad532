"""EvoMerge on a real model of 135M weights, against what people do today.

    python benchmarks/experts.py W/experts            the three experts (AGENT_FORGE_DATA is needed)
    python benchmarks/real.py --work W                everything that is missing, cell by cell
    python benchmarks/real.py --work W --study models one study
    python benchmarks/real.py --tables                write the tables from what is there

Studies: `models` measures the base, the experts, their ensemble, plain average and spectral merges;
`practitioner` tries the usual grid of task arithmetic, TIES and DARE-TIES and takes the best by the
items that the searches select by; `search` runs `forge evo --heal 0.2` for an hour, on three seeds
(`auto` is its champion when four fifths of the hour are over, `auto healed` what healing makes of
it in the last), and one-family CMA-ES with as many tokens on the same items, without races. All are
measured on the verdict part of the data, which no search sees, in fp32: nats an answer token, mean
over the three domains, and accuracy. W keeps models, evolutions and item scores; no cell takes much
more than an hour.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from experts import EXPERTS
from results import command, done

from agent_forge.evals import domains as scoring
from agent_forge.evals.comparison import Comparison, compare
from agent_forge.evals.ensemble import Ensemble
from agent_forge.evals.likelihood import TokenLosses
from agent_forge.evals.model_under_test import (
    ItemScores,
    ModelUnderTest,
    open_model_under_test,
)
from agent_forge.merge.output import write
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.track.journal import read_lines

NAME = "real"
SEEDS = (1, 2, 3)
MINUTES, HEAL = 60, 0.2
SELECTION, VERDICT = 64, 150  # items of each domain
WEIGHTS, DENSITIES = (0.3, 0.5, 0.7, 1.0), (0.2, 0.5, 0.8)
AVERAGE, ENSEMBLE = "plain average", "ensemble of the experts"
SPECTRAL = ("tsv_m", "iso_c", "swudi", "task_arithmetic + svc")  # with their own scale, unsearched
AUTO, CMA_ES = "auto", "cma-es"
ONE_FAMILY = ("strategy=cma-es", "per_layer=false", "early_stopping=false", "racing=false")


def refs(work: Path) -> dict[str, str]:
    """The experts as `forge` takes them."""
    base = work / "experts" / "base"
    return {name: f"{base}+{work / 'experts' / name}" for name in EXPERTS}


def items(work: Path, split: str, count: int) -> list[scoring.Domain]:
    files = [work / "experts" / f"{name}.jsonl" for name in EXPERTS]
    return [scoring.part(domain, split, count) for domain in scoring.from_files(files)]


def measured(work: Path, ref: str, split: str, count: int, keep: str = "") -> list[ItemScores]:
    """The item scores of a model; `keep` names a file that they are kept in."""
    path = work / "scores" / f"{keep.replace(' ', '_')}.json"
    if keep and path.exists():
        return [ItemScores(**row) for row in json.loads(path.read_text())]
    model = opened(ref)
    prepared = [model.prepare(domain) for domain in items(work, split, count)]
    scores = model.measure_all(prepared)
    if keep:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([asdict(own) for own in scores]))
    return scores


def opened(ref: str) -> ModelUnderTest:
    torch.set_num_threads(1)
    return replace(open_model_under_test(ref, fast=True), threads=os.cpu_count() or 1)


def summary(scores: Sequence[ItemScores]) -> dict[str, Any]:
    nats = {n: round(s.nats_per_token, 4) for n, s in zip(EXPERTS, scores, strict=True)}
    right = {n: round(s.accuracy, 4) for n, s in zip(EXPERTS, scores, strict=True)}
    mean = round(sum(nats.values()) / len(nats), 4)
    return {"mean_nats": mean, "nats": nats, "accuracy": right}


def forge(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "agent_forge", *words], check=True, stdout=sys.stderr)


def merged(
    work: Path, method: str, parameters: dict[str, Any], own: dict[str, Any], **more: str
) -> Path:
    """A merge of the experts by mergekit's YAML, in a folder that the next one replaces."""
    recipe = {
        **more,
        "merge_method": method,
        "models": [{"model": ref, "parameters": own} for ref in refs(work).values()],
        "parameters": parameters,
        "dtype": "bfloat16",
    }
    if method != "linear":
        recipe["base_model"] = str(work / "experts" / "base")
    (work / "recipe.yml").write_text(yaml.safe_dump(recipe))
    forge("merge", str(work / "recipe.yml"), str(work / "merged"), "--force")
    return work / "merged"


def together(work: Path) -> dict[str, Any]:
    """What the experts say together: the mean of their probabilities, token by token."""
    domains, ensemble = items(work, "verdict", VERDICT), Ensemble()
    for ref in refs(work).values():
        model = opened(ref)
        prepared = [model.prepare(domain) for domain in domains]
        losses: list[TokenLosses] = [{} for _ in domains]
        model.measure_all(prepared, token_losses=losses)
        ensemble.add(prepared, losses)
    return summary(ensemble.scores())


def one_model(work: Path, name: str) -> dict[str, Any]:
    if name == ENSEMBLE:
        return together(work)
    ref = str(work / "experts" / "base") if name == "base" else refs(work).get(name, "")
    if name == AVERAGE:
        ref = str(merged(work, "linear", {}, {"weight": 1.0}))
    elif name in SPECTRAL:
        method, _, post_pass = name.partition(" + ")
        more = {"post_pass": post_pass} if post_pass else {}
        ref = str(merged(work, method, {}, {"weight": 1.0}, **more))
    return summary(measured(work, ref, "verdict", VERDICT, name))


def grid() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What is usually tried: equal weights, and shares that are kept."""
    for weight in WEIGHTS:
        yield "task_arithmetic", {}, {"weight": weight}
    for method, weight, density in product(("ties", "dare_ties"), WEIGHTS, DENSITIES):
        yield method, {"normalize": False}, {"weight": weight, "density": density}


def practitioner(work: Path) -> dict[str, Any]:
    """The best of the grid by the selection items; the grid goes on where it was interrupted."""
    path, began = work / "grid.jsonl", time.monotonic()
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for method, parameters, own in grid():
        cell = {"method": method, **own}
        if not any(cell.items() <= row.items() for row in known):
            folder = merged(work, method, parameters, own)
            found = summary(measured(work, str(folder), "selection", SELECTION))
            known.append({**cell, "parameters": parameters, "mean_nats": found["mean_nats"]})
            with path.open("a") as writer:
                writer.write(json.dumps(known[-1]) + "\n")
    best = min(known, key=lambda row: row["mean_nats"])
    own = {key: best[key] for key in ("weight", "density") if key in best}
    folder = merged(work, best["method"], best["parameters"], own)
    found = summary(measured(work, str(folder), "verdict", VERDICT, "practitioner"))
    return {**found, "recipe": best, "tried": len(known), "wall_s": round(time.monotonic() - began)}


def searched(work: Path, name: str, seed: int) -> dict[str, Any]:
    """One evolution by the command, and its champion on the verdict items."""
    folder = work / f"evo_{name}_{seed}"
    words = ["--base-models", ",".join(refs(work).values())]
    words += ["--base", str(work / "experts" / "base"), "--seed", str(seed)]
    for domain in EXPERTS:
        words += ["--data", str(work / "experts" / f"{domain}.jsonl")]
    if name == AUTO:
        words += ["--time-budget", str(MINUTES), "--heal", str(HEAL)]
    else:  # as many tokens as `auto` had, on the same items
        for text in (*ONE_FAMILY, *_bounds(work, seed)):
            words += ["--set", text]
    began, cpu = time.monotonic(), _cpu_of_children()
    if (folder / "evolution.json").exists():
        forge("evo", "--resume", str(folder))
    else:
        forge("evo", *words, "--output-dir", str(folder))
    wall, cpu = time.monotonic() - began, _cpu_of_children() - cpu
    scores = measured(work, str(folder / "champion"), "verdict", VERDICT, f"{name} {seed}")
    tokens = sum(line.get("tokens", 0) for _, line in read_lines(folder / JOURNAL))
    cores = round(cpu / wall / (os.cpu_count() or 1), 3)
    costs = {"tokens": tokens, "wall_s": round(wall), "cpu_s": round(cpu), "cores_busy": cores}
    found = {**summary(scores), **costs, **_against(work, scores)}
    if name == AUTO:
        healed = measured(work, str(folder / "healed"), "verdict", VERDICT, f"healed {seed}")
        found["healed"] = {**summary(healed), **_against(work, healed)}
        found |= {"tokens_each": _tokens_each(folder), "at_a_third": _at_a_third(work, folder)}
        found["items"] = resume_inputs(folder, None, None).settings.fitness_subset_size
    return found


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tokens_each(folder: Path) -> int:
    """Tokens of a candidate that was measured whole."""
    lines = [line for _, line in read_lines(folder / JOURNAL) if line["record"] == "candidate"]
    return max(int(line["tokens"]) for line in lines)


def _bounds(work: Path, seed: int) -> list[str]:
    wanted = {"study": "search", "search": AUTO, "seed": seed}
    own = next(row for row in done(NAME) if wanted.items() <= row.items())
    evaluations = int(own["tokens"]) // int(own["tokens_each"])
    items = f"fitness_subset_size={own['items']}"
    return [f"max_evaluations={evaluations}", "generations=1000", items]


def _at_a_third(work: Path, folder: Path) -> dict[str, Any]:
    """The best candidate when a third of the tokens was spent, on the verdict items."""
    lines = [line for _, line in read_lines(folder / JOURNAL)]
    limit, spent, best = sum(line.get("tokens", 0) for line in lines) / 3, 0, None
    for line in lines:
        spent += line.get("tokens", 0)
        whole = line["record"] == "candidate" and line["score"] and not line.get("dropped")
        if spent <= limit and whole and (best is None or line["score"]["fitness"] > best[0]):
            best = line["score"]["fitness"], line["key"]
    assert best is not None
    loop = EvolutionLoop(resume_inputs(folder, None, None))
    loop.run()  # by its journal
    target = work / "at_a_third"
    write(loop.weights.weights(best[1]), target, force=True)
    return summary(measured(work, str(target), "verdict", VERDICT))


def _against(work: Path, scores: Sequence[ItemScores]) -> dict[str, Any]:
    """The comparison with the practitioner's best and the average, if they are measured."""
    found: dict[str, Any] = {}
    for name in ("practitioner", AVERAGE):
        path = work / "scores" / f"{name.replace(' ', '_')}.json"
        if path.exists():
            known = [ItemScores(**row) for row in json.loads(path.read_text())]
            result: Comparison = compare(known, scores, items(work, "verdict", VERDICT))
            found[f"over {name}"] = result.overall.to_json()
    return found


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    if study in (None, "models"):
        for name in ("base", *EXPERTS, AVERAGE, ENSEMBLE, *SPECTRAL):
            yield {"study": "models", "model": name}, partial(one_model, work, name)
    if study in (None, "practitioner"):
        yield {"study": "practitioner"}, partial(practitioner, work)
    if study in (None, "search"):
        for seed, name in product(SEEDS, (AUTO, CMA_ES)):
            cell = {"study": "search", "search": name, "seed": seed}
            yield cell, partial(searched, work, name, seed)


def real_table(rows: list[dict[str, Any]]) -> list[str]:
    """Loss and accuracy of every model on the verdict items, and the way to the oracle."""
    models = {r["model"]: r for r in rows if r["study"] == "models"}
    if not {*EXPERTS, AVERAGE} <= {*models}:
        return ["(not measured yet)"]
    oracle = {d: min(models[e]["nats"][d] for e in EXPERTS) for d in EXPERTS}
    best, start = sum(oracle.values()) / len(oracle), models[AVERAGE]["mean_nats"]
    named = list(models.items())
    named += [("practitioner's best", r) for r in rows if r["study"] == "practitioner"]
    searches = [r for r in rows if r["study"] == "search"]
    for r in searches:
        told = f"seed {r['seed']}"
        named.append((f"{r['search']}, {told}", r))
        if "healed" in r:
            named += [(f"auto at a third of the tokens, {told}", r["at_a_third"])]
            named += [(f"auto healed, {told}", r["healed"])]
    head = ["model", "nats a token", *EXPERTS, "way to the oracle", "accuracy, science"]
    head += ["over the practitioner", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in named:
        way = f"{(start - row['mean_nats']) / (start - best):.0%}"
        cells = [f"{row['mean_nats']:.4f}", *(f"{row['nats'][d]:.4f}" for d in EXPERTS), way]
        gain = row.get("over practitioner", {}).get("nats_per_token")
        told = f"{gain['value']:+.4f} (p = {gain['p']:.4f})" if gain else "-"
        minutes = f"{row['wall_s'] / 60:.0f}" if "wall_s" in row else "-"
        cells += [f"{row['accuracy'][EXPERTS[-1]]:.3f}", told, minutes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| oracle: each domain's own expert | {best:.4f} | ")
    lines[-1] += " | ".join(f"{oracle[d]:.4f}" for d in EXPERTS) + " | 100% | - | - | - |"
    return lines


if __name__ == "__main__":
    studies = ("models", "practitioner", "search")
    command(str(__doc__), NAME, studies, cells, {"real": real_table}, "evomerge.md")
