"""What ternary weights cost: sizes on disk, accuracy against the parent given the same tokens.

    python benchmarks/bitnet.py --work W                     everything that is missing
    python benchmarks/bitnet.py --work W --study retention   one study
    python benchmarks/bitnet.py --tables                     write the tables from what is there

The parents are models of Phase 3 in W, made if they are not there. `sizes`: what the shapes of the
presets take on disk. `retention`: Phase 4 of `tiny` and `small` with the control that had as many
tokens by the same optimizer, three seeds. `variants`: other rules, the specification's optimizer,
and integers of about as many bytes, in `tiny`, beside the ternary model and the control of
`retention` with their seed. A run that was interrupted goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from quietstar import reasoning
from results import command, run_phase

from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.pipeline.config import load_config
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY
from agent_forge.store import files, tensors

NAME = "bitnet"
SEEDS, ITEMS = (1, 2, 3), 700
MODELS = Path(__file__).parent / "models"
PHASE = "phases.bitnet"
VARIANTS = {
    "rule of the specification": (f"{PHASE}.codec=ternary_spec",),
    "rule of BitNet": (f"{PHASE}.codec=ternary_bitnet",),
    "optimizer of the specification": (
        f"{PHASE}.train.optimizer.muon_lr=2e-4",
        f"{PHASE}.train.optimizer.grokfast_lambda=1.5",
    ),
    "labels alone": (f"{PHASE}.parent_share=0",),
    "parent alone": (f"{PHASE}.parent_share=1",),
    "int3, groups of 32": (f"{PHASE}.codec=int3g32",),
    "int2, groups of 32": (f"{PHASE}.codec=int2g32",),
    "steps, entropy-coded": (f"{PHASE}.codec=step1.35",),
}
STUDIES = ("sizes", "retention", "variants")


def sizes(preset: str, embedding: str) -> dict[str, Any]:
    """Bytes of the files of a network with random weights, which have the size of any others."""
    torch.manual_seed(0)
    network = ForgeNetwork(load_config(preset=preset).model)
    packing = plan_packing(network, "ternary", "" if embedding == "fp16" else embedding, 8)
    config = config_dict(network.settings)
    written = {}
    kinds = {
        "fp32": (network.state_dict(), config),
        "packed": (packing.pack(network.state_dict()).tensors, {**config, KEY: packing.to_json()}),
    }
    with tempfile.TemporaryDirectory() as place:
        for kind, (state, record) in kinds.items():
            with files.staging(Path(place) / kind) as stage:
                with stage.writing("model.safetensors") as writer:
                    tensors.write_tensors(writer, state, {"format": "pt"})
                stage.write_json("config.json", record)
            names = ("model.safetensors", "config.json")
            written[kind] = sum((Path(place) / kind / name).stat().st_size for name in names)
    ratio = round(written["fp32"] / written["packed"], 2)
    return {"fp32_bytes": written["fp32"], "packed_bytes": written["packed"], "ratio": ratio}


def ternary(
    work: Path, preset: str, seed: int, *more: str, name: str = "", control: bool = True
) -> dict[str, Any]:
    """One run of Phase 4, and what it measured."""
    sets = (f"{PHASE}.control={str(control).lower()}", f"{PHASE}.thought_items={ITEMS}", *more)
    given, session = reasoning(work, preset, seed), f"bitnet_{preset}_{name}{seed}"
    result, took = run_phase(work, "bitnet", session, given, preset, seed, sets)
    accuracy, costs, _ = result.artifacts["tables"]
    head = accuracy[0][1:]
    return {
        "accuracy": {row[0]: dict(zip(head, row[1:], strict=True)) for row in accuracy[1:]},
        "codecs": {row[0]: row[4] for row in costs[1:]},
        "metrics": result.metrics,
        **took,
    }


def packed(work: Path, preset: str, seed: int) -> Path:
    """The ternary model that studies of later phases begin with: that of W, or the one that is kept
    here; made if there is neither."""
    path = work / "sessions" / f"bitnet_{preset}_{seed}" / "phase4_bitnet" / "packed"
    kept = MODELS / f"bitnet_{preset}_{seed}"
    if not (path / "manifest.json").exists():
        if kept.is_dir():
            return kept
        ternary(work, preset, seed, control=False)
    return path


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    if study in (None, "sizes"):
        for preset, codec in product(("25m", "small", "tiny"), ("fp16", "int8", "int4g32")):
            cell = {"study": "sizes", "preset": preset, "embedding": codec}
            yield cell, partial(sizes, preset, codec)
    if study in (None, "retention"):
        for preset, seed in product(("tiny", "small"), SEEDS):
            cell = {"study": "retention", "preset": preset, "seed": seed}
            yield cell, partial(ternary, work, preset, seed)
    if study in (None, "variants"):
        for (variant, sets), seed in product(VARIANTS.items(), SEEDS):
            cell = {"study": "variants", "preset": "tiny", "variant": variant, "seed": seed}
            name = "".join(c if c.isalnum() else "_" for c in variant) + "_"
            yield cell, partial(ternary, work, "tiny", seed, *sets, name=name, control=False)


def size_table(rows: list[dict[str, Any]]) -> list[str]:
    """Bytes on disk, weights and config."""
    found = [row for row in rows if row["study"] == "sizes"]
    if not found:
        return ["(not measured yet)"]
    lines = ["| shape | embedding | FP32, bytes | packed, bytes | ratio |", "|---|---|---|---|---|"]
    for row in found:
        sizes = f"{row['fp32_bytes']:,} | {row['packed_bytes']:,} | {row['ratio']}"
        lines.append(f"| {row['preset']} | {row['embedding']} | {sizes} |")
    return lines


def retention_table(rows: list[dict[str, Any]], study: str = "retention") -> list[str]:
    """Accuracy of every model of a run, and what is kept of the control's."""
    order = [*VARIANTS]
    found = [row for row in rows if row["study"] == study]
    found.sort(key=lambda row: order.index(row["variant"]) if "variant" in row else 0)
    if not found:
        return ["(not measured yet)"]
    controls = {
        (row["preset"], row["seed"]): row["accuracy"]["control"]
        for row in rows
        if row["study"] == "retention"
    }
    lines = ["| run | mean: parent | rounded | ternary | control | kept, mean | kept, least |"]
    lines[0] += " perplexity to the control's | loss taken back | times smaller |"
    lines.append("|" + "---|" * 10)
    for row in found:
        of = {**row["accuracy"], "control": controls[row["preset"], row["seed"]]}
        columns = [c for c in of["parent"] if c not in ("mean", "perplexity")]
        shares = [of["ternary"][c] / of["control"][c] for c in columns if of["control"][c]]
        name = ", ".join(str(row[k]) for k in ("preset", "variant", "seed") if k in row)
        means = " | ".join(f"{100 * of[m]['mean']:.1f}" for m in of)
        kept = (
            f"{100 * of['ternary']['mean'] / of['control']['mean']:.1f} | {100 * min(shares):.1f}"
        )
        worse = 100 * (of["ternary"]["perplexity"] / of["control"]["perplexity"] - 1)
        back, ratio = (
            row["metrics"][k] for k in ("perplexity_recovery_percent", "compression_ratio")
        )
        lines.append(f"| {name} | {means} | {kept} | {worse:+.1f} % | {back:.0f} % | {ratio:.1f} |")
    return lines


if __name__ == "__main__":
    tables = {
        "sizes": size_table,
        "retention": retention_table,
        "variants": partial(retention_table, study="variants"),
    }
    command(str(__doc__), NAME, list(STUDIES), cells, tables, "bitnet.md")
