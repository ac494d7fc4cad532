"""What runs leave for W&B, read back from its offline files; needs the extra `wandb`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_forge.track.journal import read_lines
from agent_forge.track.sync import WHOLE
from tests.support.cognate_settings import QUICK
from tests.support.evo_models import evo_line
from tests.support.toy_runs import folder
from tests.support.wandb_files import Written

pytest.importorskip("wandb", reason="the extra wandb is not installed: make EXTRAS=dev,wandb")
pytestmark = pytest.mark.slow
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
    written = Written(path)
    logged = {name: len(values) for name, values in written.logged.items()}
    for name in OF_A_GENERATION:
        assert logged[f"generation/{name}"] == 2, name
    assert all(logged[name] == 2 for name in OF_002)
    assert all(logged[name] == 1 for name in OF_THE_PHASE)
    assert {f"combo/{n}/usage" for n in range(8)} <= {*logged}
    assert logged["elite1_fitness"] == logged["elite2_fitness"] == 2
    assert logged["generation/loser_combo_1"] == logged["generation/loser_combo_2"] == 1
    models = {"model_gen_0": "model", "model_gen_1": "model", "champion.x": "model"}
    assert written.artifacts == models | {"config.x": "config"}
    assert {"population_size", "mutation_rate", "fitness_weights"} <= written.settings
    assert (written.name, written.group, written.project) == ("evomerge_x", "x", "mine")
    champions = written.table("champions")
    assert champions["columns"][:3] == ["generation", "origin", "best"]
    assert [row[0] for row in champions["data"]] == [0, 1]
    assert champions["data"][1][2] == written.logged["best_fitness"][1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a run `r` of Phase 1 alone, which was mirrored."""
    root = tmp_path_factory.mktemp("wandb") / "storage"
    line = ["run", "--preset", "smoke", "--only", "cognate", "--session", "r"]
    for item in ("tracking.wandb_enabled=true", "tracking.wandb_timeout_s=60", *QUICK):
        line += ["--set", item]
    assert forge(root, *line, "--progress", "none")
    return root


def forge(root: Path, *line: str) -> str:
    """What a command prints, in a process of its own: W&B keeps one run a process."""
    command = [sys.executable, "-m", "agent_forge", *line, "--storage", str(root)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measured(root: Path) -> dict[str, list[float]]:
    """What the phase measured, by name, in its order."""
    values: dict[str, list[float]] = {}
    for _, record in read_lines(folder(root) / "metrics.jsonl"):
        for name, value in record["metrics"].items() if record["phase"] != "system" else ():
            values.setdefault(name, []).append(value)
    return values


NAMES = ("reasoning", "memory_integration", "adaptive_computation")
MODELS = {f"cognate.tinytitan-{name}.r" for name in NAMES}


def test_a_phase_in_the_files_of_wandb(trained: Path) -> None:
    (path,) = folder(trained).rglob("wandb/offline-run-*/*.wandb")
    written = Written(path)
    assert written.is_finished
    assert (written.name, written.group, written.project) == ("cognate_r", "r", "agent-forge")
    assert len(measured(trained)) > 30
    assert {name: written.logged[name] for name in measured(trained)} == measured(trained)
    models = dict.fromkeys({*MODELS, "cognate.trunk.r"}, "model")
    assert written.artifacts == models | {"config.r": "config"}
    state = json.loads((folder(trained) / "phase1_cognate" / "state.json").read_text())
    columns, *rows = state["artifacts"]["tables"][0]
    table = written.table("tables_0")
    assert table["columns"] == columns and [row[0] for row in table["data"]] == [r[0] for r in rows]


def test_a_run_is_replayed(trained: Path) -> None:
    """From its files, into one run; whether it was mirrored while it ran makes no difference."""
    for place in folder(trained).glob("wandb/offline-run-*"):
        shutil.rmtree(place)
    told = json.loads(forge(trained, "sync", "r", "--json"))
    (path,) = Path(told["place"]).glob("*.wandb")
    written = Written(path)
    assert written.is_finished
    assert (written.name, written.group) == (told["name"], "r") and told["id"] in told["name"]
    named = {f"cognate/{name}": values for name, values in measured(trained).items()}
    assert {name: written.logged[name] for name in named} == named
    seconds = written.logged["seconds"]
    assert len(seconds) == told["sent"] and seconds == sorted(seconds) and seconds[0] > 0
    assert written.artifacts == dict.fromkeys(MODELS, "model") | {"config.r": "config"}
    assert {"config_hash", "phases", "session_id"} <= written.settings
    events = [text.split(" (")[0] for _, text in written.table("events")["data"]]
    assert events[:2] == ["run started", "cognate: phase started"]
    assert events[-1] == "run completed"
    assert written.table("phases")["data"][0][:2] == ["cognate", "completed"]
    assert written.table("cognate/tables_0")["data"]

    again = json.loads(forge(trained, "sync", "r", "--json"))
    assert again == {**told, "sent": 0}  # it is there
    (Path(told["place"]) / WHOLE).unlink()  # as if it had been stopped on the way
    assert json.loads(forge(trained, "sync", "r", "--json"))["sent"] == told["sent"]
    with (folder(trained) / "metrics.jsonl").open("a") as more:
        more.write('{"phase": "cognate", "step": 99, "time": 9e9, "metrics": {"x": 0.5}}\n')
    grown = json.loads(forge(trained, "sync", "r", "--json"))
    assert grown["id"] != told["id"] and grown["sent"] == told["sent"] + 1
