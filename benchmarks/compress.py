"""How much of a model is left at how many bytes: the curve of Phase 8, and rivals at equal bytes.

    python benchmarks/compress.py --work W                     everything that is missing
    python benchmarks/compress.py --work W --study frontier    one study
    python benchmarks/compress.py --tables                     write the tables from what is there

`frontier`: Phase 8 behind the models of Phase 4 that are in W, or else in benchmarks/models, of
`tiny` and `small`: eight points and two students, with FP32 weights that are trained as long and
students without a teacher; gates are open, so that the table shows where they would break.
`rivals`: in `tiny`, integers in 2, 3, 4 and 8 bits and ternary weights, each beside steps with an
entropy coder of about as many bytes, trained as long from one parent of Phase 3 (made in W if it is
not there) through its rounding; inputs of layers stay as they are. Bytes are told behind xz too.
There are no such steps for int8: the finest take 6.7 bits. A run that was interrupted goes on.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bitnet import PHASE as BITNET
from bitnet import packed, ternary
from results import command, run_phase

from agent_forge.store.records import read_metadata

NAME, SEEDS = "compress", (1, 2, 3)
PHASE = "phases.final_compression"
POINTS = {"tiny": [4, 6, 8, 12, 16, 20, 25, 30], "small": [4, 6, 8, 12, 16, 20, 25, 30]}
STUDENTS = {"tiny": [60, 100], "small": [100, 160, 280]}
OPEN = ("first_gate", "coded_gate", "student_gate", "least_retention", "least_of_each")
# A step of s times the spread of a normal row takes about 2.05 - log2(s) bits.
RIVALS = {
    "int8": ("int8", "int8"),
    "int4, groups of 32": ("int4g32", "int4g32"),
    "steps for int4": ("step0.18", "int4g32"),
    "int3, groups of 32": ("int3g32", "int4g32"),
    "steps for int3": ("step0.37", "int4g32"),
    "int2, groups of 32": ("int2g32", "int4g32"),
    "steps for int2": ("step0.73", "int4g32"),
    "ternary": ("ternary", "int4g32"),
    "steps for ternary": ("step1.35", "int4g32"),
}
ALIKE = (f"{BITNET}.activation_bits=0", f"{BITNET}.most_reverts=0")  # what one alone would bear
STUDIES = ("frontier", "rivals")


def frontier(work: Path, preset: str, seed: int) -> dict[str, Any]:
    """One run of Phase 8 with all gates open, and what became of every point."""
    sets = [f"{PHASE}.ratios={POINTS[preset]}", f"{PHASE}.student_ratios={STUDENTS[preset]}"]
    sets += [f"{PHASE}.control=true", *(f"{PHASE}.{gate}=0" for gate in OPEN)]
    given, session = packed(work, preset, seed), f"compress_{preset}_{seed}"
    result, took = run_phase(work, "final_compression", session, given, preset, seed, sets)
    curve, kinds = result.artifacts["tables"]
    return {
        "curve": curve,
        "kinds": kinds,
        "points": result.artifacts["points"],
        "chosen": result.artifacts["chosen"],
        "left_out": result.artifacts["left_out"],
        "input_sha256": read_metadata(given).sha256,
        **took,
    }


def rival(work: Path, variant: str, seed: int) -> dict[str, Any]:
    """One run of Phase 4 with a codec, and the bytes that it takes."""
    codec, embedding = RIVALS[variant]
    sets = (f"{BITNET}.codec={codec}", f"{BITNET}.embedding_codec={embedding}", *ALIKE)
    name = f"rival_{''.join(c if c.isalnum() else '_' for c in variant)}_"
    found = ternary(work, "tiny", seed, *sets, name=name, control=False)
    session = "".join(c if c.isalnum() else "_" for c in f"bitnet_tiny_{name}{seed}".lower())
    folder = work / "sessions" / session / "phase4_bitnet" / "packed"
    weights = (folder / "model.safetensors").read_bytes()
    return {**found, "bytes": len(weights), "bytes_behind_xz": len(lzma.compress(weights))}


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    if study in (None, "frontier"):
        for preset, seed in product(POINTS, SEEDS):
            cell = {"study": "frontier", "preset": preset, "seed": seed}
            yield cell, partial(frontier, work, preset, seed)
    if study in (None, "rivals"):
        for variant, seed in product(RIVALS, SEEDS):
            cell = {"study": "rivals", "preset": "tiny", "variant": variant, "seed": seed}
            yield cell, partial(rival, work, variant, seed)


def frontier_table(rows: list[dict[str, Any]]) -> list[str]:
    """Every point of every run: bytes, and what is kept of the FP32 control's accuracy."""
    found = [row for row in rows if row["study"] == "frontier"]
    if not found:
        return ["(not measured yet)"]
    head = ["run", "point", "bytes", "times smaller", "bits a weight", "accuracy, %"]
    head += ["of the input's, %", "of the FP32 control's, %"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in found:
        accuracy = {own[0]: own[4] for own in row["curve"][1:-1]}
        for name, size, ratio, bits, own, share, _ in row["curve"][1:-1]:
            kept = "-" if not accuracy.get("fp32_control") else own / accuracy["fp32_control"]
            shares = (f"{100 * s:.1f}" if isinstance(s, float) else str(s) for s in (share, kept))
            told = f"{ratio:.1f} | {bits:.2f} | {100 * own:.1f} | {' | '.join(shares)}"
            lines.append(f"| {row['preset']}, {row['seed']} | {name} | {size} | {told} |")
    return lines


def rival_table(rows: list[dict[str, Any]]) -> list[str]:
    """Each rival and the steps of about as many bytes, means over the seeds that are there."""
    found = [row for row in rows if row["study"] == "rivals"]
    if not found:
        return ["(not measured yet)"]
    head = ["codec", "seeds", "bytes", "behind xz", "accuracy, %", "of the parent's, %"]
    head.append("perplexity of answers, of the parent's")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variant in RIVALS:
        if own := [row for row in found if row["variant"] == variant]:
            pairs = [(r["accuracy"]["ternary"], r["accuracy"]["parent"]) for r in own]
            values = [
                *(_mean([r[key] for r in own]) for key in ("bytes", "bytes_behind_xz")),
                100 * _mean([now["mean"] for now, _ in pairs]),
                100 * _mean([now["mean"] / was["mean"] for now, was in pairs]),
                _mean([now["perplexity"] / was["perplexity"] for now, was in pairs]),
            ]
            sizes, shares = (f"{v:,.0f}" for v in values[:2]), (f"{v:.1f}" for v in values[2:4])
            told = " | ".join([*sizes, *shares, f"{values[4]:.3f}"])
            lines.append(f"| {variant} | {len(own)} | {told} |")
    return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    tables = {"frontier": frontier_table, "rivals": rival_table}
    command(str(__doc__), NAME, list(STUDIES), cells, tables, "final_compression.md")
