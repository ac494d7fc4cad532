"""Small trained models for the evolution tests: a base, three specialists of it, and their data."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.stats  # noqa: F401 - takes a second, and forks have it then
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from agent_forge.phases.phase2_evomerge import parallel
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs, locate_inputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.store import files
from agent_forge.track.journal import read_lines
from tests.support.command_line import start
from tests.support.tokenizers import byte_tokenizer

PARENTS = ("twice", "add", "next")  # in no order that a file would sort them into
FEW: dict[str, Any] = {
    "strategy": "spec",
    "generations": 2,
    "fitness_subset_size": 24,
    "verdict_items": 30,
    "checkpoint_every": 1,
    "convergence_threshold": 1e-9,
}
FASTEST: dict[str, Any] = {"generations": 0, "fitness_subset_size": 8, "verdict_items": 20}


def rows(name: str) -> list[tuple[str, str]]:
    """Prompts and answers that a model of a thousand weights learns in a second."""
    pairs = [(a, b) for a in range(26) for b in range(10)]
    if name == "add":
        return [(f"{a}+{b}=", str((a + b) % 10)) for a, b in pairs]
    if name == "next":
        return [(f"{b} after {chr(97 + a)}: ", chr(97 + (a + 1) % 26)) for a, b in pairs]
    return [(f"twice {chr(97 + a)}{b} ", f"{chr(97 + a)}{chr(97 + a)}") for a, b in pairs]


@functools.cache
def family() -> Path:
    """A folder with the Llamas base, twice, add, next and twice.jsonl, add.jsonl, next.jsonl."""
    root = Path(_folder().name)
    for name in PARENTS:
        lines = [json.dumps({"prompt": p, "completion": c}) for p, c in rows(name)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape)
    _learn(model, [pair for name in PARENTS for pair in rows(name)], 150, 1e-2)
    _save(model, root / "base")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for name in PARENTS:
        model.load_state_dict(state)
        _learn(model, rows(name), 25, 4e-3)
        _save(model, root / name)
    return root


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="evo-models-")


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _learn(model: nn.Module, pairs: Sequence[tuple[str, str]], steps: int, rate: float) -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer(p + c).input_ids for p, c in pairs]
    longest = max(map(len, ids))
    padded = torch.tensor([row + [-100] * (longest - len(row)) for row in ids])
    optimizer = torch.optim.Adam(model.parameters(), rate)
    own = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = padded[torch.randint(len(padded), (32,), generator=own)]
        logits = model(batch[:, :-1].clamp(min=0)).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def files_of(root: Path) -> list[str]:
    return [str(root / f"{name}.jsonl") for name in PARENTS]


def evo_line(*more: str, models: Path | None = None) -> list[str]:
    """`forge evo` of the three, or of copies of them, into the folder x; generation 0 alone."""
    root = models or family()
    line = ["evo", "--base-models", ",".join(str(root / name) for name in PARENTS)]
    line += ["--base", str(root / "base"), "--gens", "0", "--seed", "1", "--output-dir", "x"]
    for path in files_of(family()):
        line += ["--data", path]
    for item in ("fitness_subset_size=8", "verdict_items=8", "strategy=spec"):
        line += ["--set", item]
    return [*line, *more]


@functools.cache
def evolved() -> Path:
    """What `evo_line` leaves if nobody interrupts it; not to be changed."""
    place = Path(_folder().name) / "evolved"
    place.mkdir()
    assert start(place, evo_line()).ended().code == 0
    return place / "x"


def job(folder: Path, *, base: bool = True, seed: int = 1, **settings: Any) -> EvolutionInputs:
    """A quick evolution of the three, into a folder."""
    root = family()
    data = {} if {"data", "tasks", "fitness"} & set(settings) else {"data": files_of(root)}
    wanted = EvoMergeSettings.model_validate({**FEW, **data, **settings})
    parents = [str(root / name) for name in PARENTS]
    return locate_inputs(wanted, parents, str(root / "base") if base else None, seed, folder)


# Real workers load torch each; those of this process are built and asked in the same way.
POOLS = pytest.mark.parametrize(
    "kind", ["inline", pytest.param("processes", marks=pytest.mark.soak)]
)


def use_pool(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Let evolutions with workers have workers of this kind."""
    real = parallel.open_pool
    patch.setattr(parallel, "open_pool", lambda _, *given, **more: real(kind, *given, **more))


WEIGHTS_FILE = "model.safetensors"


def journal(folder: Path, record: str = "candidate") -> list[dict[str, Any]]:
    return [r for _, r in read_lines(folder / JOURNAL) if r["record"] == record]


def outcome(folder: Path) -> dict[str, Any]:
    """All of a finished evolution that must not depend on how often it was interrupted."""
    champion = folder / "champion"
    files.verify(champion)
    steady = ("lineage.json", "verdict.json", "README.md", "model.safetensors")
    found: dict[str, Any] = {name: files.sha256_of(champion / name) for name in steady}
    log = json.loads((folder / "evolution_log.json").read_text())
    found["history"] = log["history"]
    found["journal"] = [
        {k: v for k, v in r.items() if k not in ("elapsed", "cpu")}
        for _, r in read_lines(folder / JOURNAL)
    ]
    found["strays"] = [p.name for p in folder.rglob(".*")]
    return found


def three(root: Path) -> str:
    return ",".join(str(root / name) for name in PARENTS)


def largest(model: Any) -> float:
    """A fitness of one's own."""
    return max(float(weight.detach().abs().max()) for weight in model.parameters())


def begin(models: Path, folder: Path, **more: Any) -> EvolutionInputs:
    """An evolution of copies of the three, which may be edited."""
    settings = job(folder, **{**FASTEST, **more}).settings
    settings = settings.model_copy(
        update={"data": [str(models / f"{name}.jsonl") for name in PARENTS]}
    )
    refs = [str(models / name) for name in PARENTS]
    return locate_inputs(settings, refs, str(models / "base"), 5, folder)
