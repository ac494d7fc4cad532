"""What the code computes, as hashes: `python -m tests.golden.freeze` writes them to frozen.json.

They were written before the package was rearranged and are never made again to please a change: a
hash that moves says that behaviour moved. Text and recipes are the same on every machine. Trained
weights depend on how a CPU adds, so those hashes are kept by CPU; elsewhere only the losses are
compared, within a tolerance (tests/golden/test_golden.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from agent_forge.data.tasks import FAMILIES, make
from agent_forge.evals.benchmarks import BENCHMARKS, from_benchmarks
from agent_forge.evals.domains import evaluation_hash, from_files, from_tasks
from agent_forge.track.journal import read_lines
from tests.support.command_line import start
from tests.support.evo_models import PARENTS, family

FROZEN = Path(__file__).parent / "frozen.json"
METHODS = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "dare_ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.5, "gamma": 0.01},
    "breadcrumbs_ties": {"density": 0.5, "gamma": 0.01},
    "nuslerp": {},
    "multislerp": {},
    "model_stock": {},
}
FOLDERS = {
    "flores": "flores200_dev",
    "flores_language": "flores200_dev",
    "jsontestsuite": "json_test_suite",
}
TIMED = ("seconds", "cpu", "elapsed", "time", "latency", "duration", "tokens_per_s", "speed_tps")
TIMED += ("system/",)


def cpu() -> str:
    """What decides the last bits of a sum: the CPU's kind and the kernels that torch takes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    parts = [found.get(name, "?") for name in ("vendor_id", "cpu family", "model")]
    return "/".join([*parts, torch.backends.cpu.get_cpu_capability(), torch.__version__])


def digest(parts: Iterable[Any]) -> str:
    text = "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the same on every machine ---------------------------------------------------------------------


def tasks() -> dict[str, str]:
    """Every family of generated tasks, 40 items of each split."""
    found = {}
    for name in FAMILIES:
        made = [
            make(name, split, i, level=(1, 20 + 80 * (i % 2)))
            for split in ("train", "selection", "verdict")
            for i in range(40)
        ]
        found[name] = digest(
            [t.family, t.level, t.split, t.question, t.answer, t.steps, t.distractors, t.tests]
            for t in made
        )
    return found


def evaluations() -> dict[str, str]:
    """What each generated benchmark asks, as the keys of the fitness cache have it."""
    packs = ("math", "code", "multilingual", "structured")
    found = {
        name: evaluation_hash(from_benchmarks([name], split="verdict", count=9)) for name in packs
    }
    for split in ("selection", "holdout", "verdict"):
        found[f"tasks {split}"] = evaluation_hash(from_tasks(split=split, count=9), racing=True)
    found["file"] = evaluation_hash(from_files([family() / "add.jsonl"]))
    return found


def published() -> dict[str, str]:
    """The same of every published set that is on this machine."""
    folder = data_folder()
    return {
        name: evaluation_hash(from_benchmarks([name], split="verdict", count=9, folder=folder))
        for name, pack in BENCHMARKS.items()
        if not pack.families and (folder / FOLDERS.get(name, name)).exists()
    }


def data_folder() -> Path:
    return Path(os.environ.get("AGENT_FORGE_DATA", Path(__file__).parents[3] / "shared" / "data"))


# -- by CPU ----------------------------------------------------------------------------------------


def merges(work: Path) -> dict[str, str]:
    """One merge a method, and the eight combos in one pass."""
    found = {}
    for method, more in METHODS.items():
        weight = {} if method == "model_stock" else {"parameters": {"weight": 0.4}}
        names = PARENTS[:2] if method == "nuslerp" else PARENTS
        models = [{"model": str(family() / name), **weight} for name in names]
        recipe: dict[str, Any] = {"merge_method": method, "models": models, "parameters": more}
        if method not in ("linear", "nuslerp", "multislerp"):
            recipe["base_model"] = str(family() / "base")
        found[method] = merged(work, method, recipe)
    found["slerp"] = merged(
        work,
        "slerp",
        {
            "merge_method": "slerp",
            "base_model": str(family() / PARENTS[0]),
            "models": [{"model": str(family() / name)} for name in PARENTS[:2]],
            "parameters": {"t": 0.3},
        },
    )
    given = ",".join(str(family() / name) for name in PARENTS)
    forge(f"merge {work / 'combos'} --models {given} --base {family() / 'base'} --combo all", work)
    for folder in sorted(path for path in (work / "combos").iterdir() if path.is_dir()):
        found[f"combo {folder.name}"] = file_digest(folder / "model.safetensors")
    return found


def merged(work: Path, name: str, recipe: dict[str, Any]) -> str:
    path = work / f"{name}.yml"
    path.write_text(json.dumps(recipe))
    forge(f"merge {path} {work / name} --seed 7", work)
    return file_digest(work / name / "model.safetensors")


SECOND = ("auto_version=2", "methods=[]")  # auto as it was before it began at spectral methods


def evolution(work: Path, strategy: str, sets: Iterable[str] = ()) -> dict[str, Any]:
    """Champion and journal of three small Llamas."""
    given = ",".join(str(family() / name) for name in PARENTS)
    data = " ".join(f"--data {family() / f'{name}.jsonl'}" for name in PARENTS)
    out = work / strategy
    more = "".join(f" --set {item}" for item in sets)
    forge(
        f"evo --base-models {given} --base {family() / 'base'} {data} --gens 3 --seed 5"
        f" --output-dir {out} --set strategy={strategy} --set fitness_subset_size=24"
        f" --set verdict_items=30 --set workers=1 --set checkpoint_every=1{more}",
        work,
    )
    lines = [line for _, line in read_lines(out / "journal.jsonl")]
    verdict = json.loads((out / "champion" / "verdict.json").read_text())
    return {
        "champion": file_digest(out / "champion" / "model.safetensors"),
        "journal": digest(untimed(line) for line in lines),
        "verdict": digest([untimed(measured(verdict))]),
        "fitness": verdict["champion"]["fitness"],
    }


def run(work: Path, preset: str, sets: Iterable[str] = ()) -> dict[str, Any]:
    """Phases 1 and 2: weights of every model, metrics without their times, one loss."""
    old = (f"phases.evomerge.{item}" for item in SECOND)
    more = " ".join(f"--set {item}" for item in (*sets, *old))
    forge(
        f"run --preset {preset} --session golden --set runtime.threads=1"
        f" --set tracking.sample_every_s=0 --set phases.quietstar.enabled=false"
        f" --set phases.bitnet.enabled=false --set phases.forge.enabled=false"
        f" --set phases.baking.enabled=false --set phases.edge.enabled=false"
        f" --set phases.final_compression.enabled=false {more}",
        work,
    )
    folder = work / "storage" / "sessions" / "golden"
    found: dict[str, Any] = {
        f"{path.parent.parent.name}/{path.parent.name}": file_digest(path)
        for path in sorted(folder.glob("phase*/*/model.safetensors"))
    }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = digest(untimed(line) for line in lines)
    losses = [line["metrics"].get("phase/avg_final_loss") for line in lines]
    found["loss"] = next(loss for loss in losses if loss is not None)
    return found


SHORT = (
    *("phases.cognate.trunk_steps=6", "phases.cognate.branch_steps=3"),
    *("phases.cognate.items_per_family=30", "phases.cognate.evaluation_items=6"),
    *("phases.cognate.min_diversity=0", "phases.evomerge.generations=1"),
    *("phases.evomerge.fitness_subset_size=6", "phases.evomerge.verdict_items=8"),
)


TOLD = ("sentences", "notes", "replicates", "ceilings", "share_of_oracle", "p_holm", "discordant")


def measured(value: Any) -> Any:
    """A verdict without what is concluded from it: that may be told in another way."""
    if isinstance(value, dict):
        return {k: measured(v) for k, v in value.items() if k not in TOLD}
    return [measured(v) for v in value] if isinstance(value, list) else value


def untimed(value: Any) -> Any:
    """The same without what a clock said."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in TIMED)}
        return {k: untimed(v) for k, v in kept.items()}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def forge(line: str, work: Path) -> str:
    """stdout of a command; whatever it is, it has to end well.

    Forked where that can be done: torch is loaded already, and has one thread.
    """
    if hasattr(os, "fork") and torch.get_num_threads() == 1:
        forked = start(work, line.split()).ended()
        assert forked.code == 0, f"forge {line}: {forked.err[-2000:]}"
        return (work / ".out").read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("FORGE_STORAGE", None)
    words = [sys.executable, "-m", "agent_forge", *line.split()]
    ended = subprocess.run(words, cwd=work, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, f"forge {line}: {ended.stderr[-2000:]}"
    return ended.stdout


PORTABLE: dict[str, Callable[[], dict[str, Any]]] = {
    "tasks": tasks,
    "evaluations": evaluations,
    "published": published,
}
BY_CPU: dict[str, Callable[[Path], dict[str, Any]]] = {
    "merges": merges,
    "evolution spec": lambda work: evolution(work, "spec"),
    "evolution auto": lambda work: evolution(work, "auto", SECOND),
    "evolution auto 3": lambda work: evolution(work, "auto"),
    "smoke": lambda work: run(work, "smoke"),
    "short tiny": lambda work: run(work, "tiny", SHORT),
}


def main() -> None:
    torch.set_num_threads(1)  # as the tests have it: the small models are trained here
    known = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    for name, freeze in PORTABLE.items():
        known.setdefault(name, freeze())
    mine = known.setdefault("by cpu", {}).setdefault(cpu(), {})
    for name, freeze_in in BY_CPU.items():
        if name not in mine:
            with tempfile.TemporaryDirectory() as work:
                mine[name] = freeze_in(Path(work))
    FROZEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
