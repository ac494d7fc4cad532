"""What `forge evo` leaves for W&B, read back from its offline files; needs the extra `wandb`."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.evo_models import evo_line

pytest.importorskip("wandb", reason="the extra wandb is not installed: make EXTRAS=dev,wandb")
pytestmark = pytest.mark.slow
HEADER, BLOCK = 7, 32768
OF_A_GENERATION = (  # specification 2.2.8
    *("best_fitness", "avg_fitness", "min_fitness", "max_fitness", "diversity_score"),
    *("fitness_std", "best_perplexity", "best_accuracy", "best_speed_tps", "best_memory_mb"),
)
OF_002 = ("generation", "best_fitness", "avg_fitness", "population_size", "add_avg", "add_best")
OF_THE_PHASE = (
    *("phase/initial_fitness", "phase/final_fitness", "phase/fitness_improvement"),
    *("phase/compression_ratio", "phase/duration_seconds", "handoff/champion_fitness"),
    *("final/best_fitness", "final/generations", "final/improvement_pct"),
)


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: blocks of parts, each with its length and kind."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + HEADER])
        whole = (
            content[at + HEADER : at + HEADER + length]
            if kind in (1, 2)
            else (whole + content[at + HEADER : at + HEADER + length])
        )
        at += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record


def test_an_evolution_in_the_files_of_wandb(tmp_path: Path) -> None:
    line = evo_line("--set", "wandb_project=mine", "--set", "wandb_offline=true")
    line[line.index("--gens") + 1] = "1"
    subprocess.run(
        [sys.executable, "-m", "agent_forge", *line],
        cwd=tmp_path,
        env={**os.environ, "WANDB_SILENT": "true"},
        check=True,
        capture_output=True,
    )
    (path,) = (tmp_path / "x").rglob("*.wandb")
    logged: dict[str, int] = {}
    artifacts, settings = [], set()
    for record in records(path):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            logged[name] = logged.get(name, 0) + 1
        if record.HasField("artifact"):
            artifacts.append(record.artifact.name)
        for item in (*record.run.config.update, *record.config.update):
            settings.add(item.key or item.nested_key[0])
    for name in OF_A_GENERATION:
        assert logged[f"generation/{name}"] == 2, name
    assert all(logged[name] == 2 for name in OF_002)
    assert all(logged[name] == 1 for name in OF_THE_PHASE)
    assert {f"combo/{n}/usage" for n in range(8)} <= {*logged}
    assert logged["elite1_fitness"] == logged["elite2_fitness"] == 2
    assert logged["generation/loser_combo_1"] == logged["generation/loser_combo_2"] == 1
    assert artifacts == ["model_gen_0", "model_gen_1"]
    assert {"population_size", "mutation_rate", "fitness_weights"} <= settings
