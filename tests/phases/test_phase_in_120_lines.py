"""What is shared suffices: a complete training phase takes 120 lines, and survives being killed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_forge.config.settings import PhaseSettings
from agent_forge.contract.phase import ModelRef
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import PhaseFailed
from agent_forge.evals.model_under_test import confirm
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.phases import training
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import SessionStore
from agent_forge.train.corpus import build_corpus
from tests.support import distil_phase
from tests.support.distil_phase import DistilPhase, DistilSettings
from tests.support.toy_runs import SMALL, die_at, exit_code, folder, forked, metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
SHAPE = (
    *("model.vocab_size=300", "model.embed_rank=8", "model.d_model=16", "model.n_layers=2"),
    *("model.n_heads=2", "model.ffn_hidden=16", "model.d_mem=8", "model.gate_hidden=8"),
    *("model.trm_hidden=8", "runtime.threads=1", "phases.baking.checkpoint_every_steps=5"),
)
FEW: dict[str, Any] = {
    "families": ["digit_max", "copy", "rotate"],
    "items_per_family": 12,
    "evaluation_items": 9,
    "rows": 4,
    "row_tokens": 64,
}


def teacher(root: Path) -> ModelRef:
    """A model of another session, as Phase 5 would hand it over."""
    SessionStore(root).create({}, "", session_id="before")
    model = ForgeNetwork(load_config(preset="smoke", sets=SHAPE).model)
    corpus = build_corpus(DistilSettings(**FEW), model.settings)
    storage = ModelStorage(root)
    said = {"final_loss": 1.0, "final_accuracy": 0.5}
    shape, tokens = config_dict(model.settings), corpus.tokenizer.files()
    storage.save_model(
        model, "before", "forge", "grown", said, config=shape, tokenizer_files=tokens
    )
    path = storage.find("forge.grown.before")
    return ModelRef("grown", path, read_metadata(path).model_dump())


def run(root: Path, listener: Any = None) -> dict[str, Any]:
    def controller(config: Any, shared: Any) -> DistilPhase:
        common = config.model_dump(include=set(PhaseSettings.model_fields))
        return DistilPhase(DistilSettings(**common, **FEW), shared)

    torch.manual_seed(0)
    begun = (folder(root) / "session.json").exists()
    controllers: Any = {"baking": controller}
    orchestrator = PipelineOrchestrator(
        config=load_config(preset="smoke", sets=(f"storage.root={root}", *SMALL, *SHAPE)),
        session_id="r",
        resume=begun,
        controllers=controllers,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [teacher(root)]
    outcome = orchestrator.run(only="baking", input_models=given)
    assert outcome["success"], outcome
    return outcome


def result(root: Path) -> Any:
    """All of the phase that must not depend on how often it was killed."""
    place = folder(root) / "phase6_baking"
    state = json.loads((place / "state.json").read_text())
    weights = [files.sha256_of(place / n / "model.safetensors") for n in ("student", "control")]
    return weights, metrics(root), state["metrics"], state["artifacts"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root, told = tmp_path_factory.mktemp("distilled"), list[dict[str, Any]]()
    run(root, told.append)
    return root, told


def test_it_takes_at_most_120_lines() -> None:
    lines = Path(distil_phase.__file__).read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


def test_it_has_a_verdict_a_card_and_a_model_that_opens(done: tuple[Path, Any]) -> None:
    root, told = done
    artifacts = result(root)[-1]
    assert artifacts["headline"].keys() == {"measure", "before", "after", "verdict"}
    assert "a control of equal steps" in artifacts["headline"]["verdict"]
    student = folder(root) / "phase6_baking" / "student"
    card = (student / "README.md").read_text()
    assert "## Measured on unseen items" in card and "| teacher |" in card and "## Samples" in card
    logged = {name for _, _, values in metrics(root) for name in values}
    assert {"student/train/divergence", "control/train/loss", "student/accuracy/memory"} <= logged
    assert "control/train/divergence" not in logged
    reference = ModelRef("student", student, {})
    control = reference.artifact("control")
    assert control is not None and control.path == student.parent / "control"
    assert reference.artifact("trunk") is None
    steps = [record for record in told if record["event"] == "step"]
    assert [s["done"] + s["left"] for s in steps] == [27] * 27 and steps[-1]["stage"] == "verdict"


def test_a_model_that_does_not_score_what_was_measured_is_not_stored(
    tmp_path: Path, done: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(done[0], tmp_path / "copy")
    place = folder(tmp_path / "copy") / "phase6_baking"
    network = open_model(place / "student").network
    assert isinstance(network, ForgeNetwork)
    corpus = build_corpus(
        DistilSettings(**FEW), network.settings, Tokenizer.load(place / "student")
    )
    storage = ModelStorage(tmp_path / "copy")
    known = {row["model_id"] for row in storage.registry.search_models()}

    def save_model(name: str, weights: Any, metadata: Any, **options: Any) -> Any:
        made = storage.save_model(weights, "r", "baking", name, metadata, **options)
        return ModelRef(name, storage.find(made), metadata)

    context: Any = SimpleNamespace(save_model=save_model)
    monkeypatch.setattr(
        training,
        "confirm",
        lambda path, measure, recorded: confirm(path, measure, [loss + 1 for loss in recorded]),
    )
    for name in ("student", "another"):
        with pytest.raises(PhaseFailed, match="does not score what was measured"):
            training.save_network(context, corpus, network, name, {"attempt": 2}, {})
    assert {row["model_id"] for row in storage.registry.search_models()} == known
    assert "attempt" not in read_metadata(place / "student").model_dump()
    assert not (place / "another").exists() and not list(place.glob(".tmp-*"))


@pytest.mark.parametrize("count", [3, 17, 25])
def test_killed_and_resumed_it_ends_in_the_same_bytes(
    tmp_path: Path, done: tuple[Path, Any], count: int
) -> None:
    """Killed in the student, in the control and between two evaluations."""
    assert exit_code(forked(lambda: run(tmp_path, die_at("step", count)))) == -signal.SIGKILL
    assert exit_code(forked(lambda: run(tmp_path))) == 0
    assert result(tmp_path) == result(done[0])
