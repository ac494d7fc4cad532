"""The examples of the specification, run as near to the text as they can be."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.errors import ConfigError, ForgeError
from agent_forge.interfaces import (
    CheckpointManager,
    ModelHandoffValidator,
    ModelRegistry,
    ModelStorage,
    MuGrokConfig,
    MuonGrokfast,
    PhaseController,
    PhaseResult,
    PipelineOrchestrator,
    SessionCleanupManager,
)
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.pipeline.given import save_inputs
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import read_session
from tests.support.forge_runs import ternary_model
from tests.support.networks import shaken

SMOKE = "preset: smoke\nphases:\n  bitnet: {steps: 2, evaluation_items: 4, examples: 30}\n"
ALL = ["cognate", "evomerge", "quietstar", "bitnet", "forge", "baking", "edge", "final_compression"]


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_optimizer_has_all_keys_of_the_example() -> None:
    """2.1, `MuGrokConfig.from_phase(1)` and the YAML of the preset of Phase 1."""
    text = {"alpha": 0.98, "lam": 0.3, "k": 3, "beta": 0.9, "weight_decay": 0.05, "lr": 0.001}
    text |= {"qkclip_tau": 30.0, "mlarope_protected": True, "fallback_lr": 0.001}
    named: dict[str, Any] = {"kind": "muon_grokfast", "qkclip_per_head": True, "fallback": "adamw"}
    own = MuGrokConfig(**text, **named)
    assert (own.muon_lr, own.grokfast_lambda, own.ns_steps, own.momentum) == (0.001, 0.3, 3, 0.9)
    assert own == MuGrokConfig(**text), "what names the only choice there is changes nothing"
    for name, other in (("kind", "adam"), ("fallback", "sgd"), ("qkclip_per_head", False)):
        with pytest.raises(ValueError, match=f"{name}: .* is all that there is"):
            MuGrokConfig(**{name: other})
    model = shaken(0)
    optimizer = MuonGrokfast(model.parameters(), config=MuGrokConfig.from_phase(1))
    optimizer.zero_grad()
    model(torch.ones(1, 4, dtype=torch.long)).logsumexp(-1).mean().backward()
    before = model.projection.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.projection.weight)
    rl = MuGrokConfig.from_phase(3)
    assert (rl.muon_lr, rl.fallback_lr, rl.grokfast_alpha) == (5e-4, 1e-4, 0.98)
    assert (rl.grokfast_lambda, rl.qk_clip_threshold, rl.kl_coefficient) == (0.1, 25.0, 0.1)


def test_storage_works_alone_on_a_fresh_folder() -> None:
    """3.1.1, with a session that nobody has made."""
    model, metadata = shaken(1), {"specialization": "reasoning", "final_loss": 1.5, "seed": 42}
    storage = ModelStorage()
    saved = storage.save_model(model, "session-1", "cognate", "model_1", metadata)
    for found, record in (
        storage.load_model(saved),
        storage.load_model(session_id="session-1", phase_name="cognate"),
        ModelStorage().load_model(model_id=saved),
    ):
        assert isinstance(found, ForgeNetwork) and found.settings == model.settings
        state = found.state_dict()
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert metadata.items() <= record.items()
    again = storage.save_model(
        model=model,
        session_id="session-1",
        phase_name="cognate",
        model_name="model_2",
        metadata={"seed": 7},
    )
    assert storage.load_model(again)[1]["seed"] == 7
    assert Path("storage/sessions/session-1/phase1_cognate/model_1/metadata.json").is_file()


def test_the_registry_of_the_example() -> None:
    """3.1.2: the three tables, WAL, and three threads' calls; a file is named by its folder."""
    ModelStorage().save_model(shaken(0), "pipeline-123", "cognate", "a", {})
    registry = ModelRegistry()
    registry.register_model(
        session_id="pipeline-123", phase_name="cognate", model_path="./storage/b/model.pt"
    )
    assert {row["model_name"] for row in registry.search_models(phase="cognate")} == {"a", "b"}
    assert registry.get_session_status("pipeline-123")["status"] == "completed"
    assert registry.checkpoint_wal() and registry.vacuum_incremental(pages=100) >= 0
    connection = sqlite3.connect(registry.db_path)
    kinds = "SELECT name FROM sqlite_master WHERE type = 'table'"
    tables = {name for (name,) in connection.execute(kinds)}
    assert {"models", "phase_handoffs", "sessions"} <= tables
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_cleanup_takes_a_registry_and_a_storage() -> None:
    """3.1.3: completed sessions go after 30 days, failed ones after 7."""
    storage, registry = ModelStorage(), ModelRegistry()
    now = time.time()
    for name, status, days in (("old", "completed", 31), ("new", "completed", 29)):
        storage.save_model(shaken(0), name, "cognate", "a", {})
        _ends(registry, name, status, now - days * 86_400)
    for name, days in (("broken", 8), ("fallen", 6)):
        storage.save_model(shaken(0), name, "cognate", "a", {})
        _ends(registry, name, "failed", now - days * 86_400)
    cleanup = SessionCleanupManager(registry, storage)
    cleanup.cleanup_old_sessions()
    assert {p.name for p in Path("storage/sessions").glob("[a-z]*")} == {"new", "fallen"} | {
        p.name for p in Path("storage/sessions").glob("*.lock")
    }
    assert {row["session_id"] for row in registry.get_all_sessions()} == {"new", "fallen"}
    cleanup.checkpoint_and_vacuum()
    cleanup.auto_cleanup_on_session_complete("fallen")
    assert registry.get_session_status("fallen")["status"] == "completed"
    with pytest.raises(ConfigError, match="is not the registry of"):
        SessionCleanupManager(ModelRegistry("elsewhere/registry/model_registry.db"), storage)


def _ends(registry: ModelRegistry, session: str, status: str, at: float) -> None:
    """Let a session have ended some time ago, in its folder and in the registry."""
    from agent_forge.store.sessions import SessionStore

    SessionStore(registry.root).set_status(session, status)  # type: ignore[arg-type]
    connection = sqlite3.connect(registry.db_path)
    times = "UPDATE sessions SET start_time = ?, end_time = ? WHERE session_id = ?"
    connection.execute(times, (at, at, session))
    connection.commit()
    connection.close()


def test_a_session_is_as_old_as_the_last_model_in_it() -> None:
    storage, registry = ModelStorage(), ModelRegistry()
    storage.save_model(shaken(0), "mine", "cognate", "a", {})
    _ends(registry, "mine", "completed", time.time() - 31 * 86_400)
    storage.save_model(shaken(0), "mine", "cognate", "b", {})
    SessionCleanupManager(registry, storage).cleanup_old_sessions()
    assert {row["model_name"] for row in registry.search_models()} == {"a", "b"}


def test_checkpoints_of_the_example() -> None:
    """3.1.4: the last five are kept."""
    model = shaken(2)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager()
    for step in range(7):
        path = manager.save_checkpoint(model, optimizer, epoch=1, step=step, metadata={"a": step})
    checkpoint = manager.load_checkpoint(str(path))
    assert checkpoint["epoch"] == 1 and checkpoint["step"] == 6
    assert checkpoint["metadata"] == {"a": 6}
    shaken(3).load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    assert len(list(Path("storage/checkpoints").glob("step_*"))) == 5
    assert "model_state_dict" in checkpoint and "something else" not in checkpoint
    with pytest.raises(KeyError):
        checkpoint["something else"]


def test_handoffs_of_the_example() -> None:
    """3.1.4, the second: the rules are there without being given."""
    validator = ModelHandoffValidator()
    records = [{"specialization": "a", "final_loss": 1.0, "seed": 1}] * 3
    models = [shaken(0)] * 3
    asked = {"source_phase": "cognate", "target_phase": "evomerge"}
    assert validator.validate_handoff(**asked, models=models[:1], metadata=records[:1]) == (
        False,
        "expected 3 models, got 1",
    )
    accepted, message = validator.validate_handoff(**asked, models=models, metadata=records)
    assert not accepted and "min_parameters is 2.25e+07" in message  # as the text has it
    small = {"evomerge": {"min_parameters": 1, "max_parameters": 10**6}}
    scaled = ModelHandoffValidator(thresholds=small)
    assert scaled.validate_handoff("cognate", "evomerge", models, records)[0]
    assert validator.validate_handoff("edge", "cognate", [], []) == (
        False,
        "no handoff is defined from edge to cognate",
    )
    for source, target, key in (
        ("evomerge", "quietstar", "fitness"),
        ("quietstar", "bitnet", "coherence_score"),
        ("bitnet", "forge", "compression_ratio"),
    ):
        accepted, message = validator.validate_handoff(source, target, [shaken(0)], [{}])
        assert not accepted and f"'{key}' is missing" in message
        assert (source, target) in ModelHandoffValidator.HANDOFF_RULES


def test_a_result_and_a_controller() -> None:
    """3.2.1: the fields of a result, and what a controller has to be able to do."""
    result = PhaseResult(True, None, "toy", {"a": 1.0}, {}, 0.5)
    assert (result.success, result.error, result.phase_name) == (True, None, "toy")
    assert (result.model, result.metrics, result.duration_seconds) == (None, {"a": 1.0}, 0.5)
    with pytest.raises(TypeError, match="abstract"):
        PhaseController(None, None)  # type: ignore[abstract]


def test_the_orchestrator_of_the_example() -> None:
    """3.2.2: a path, eight controllers, a whole run and a single phase."""
    Path("config.yaml").write_text("preset: toy\n")
    orchestrator = PipelineOrchestrator("config.yaml")
    assert [*orchestrator.phases] == [*orchestrator.PHASE_SEQUENCE] == ALL
    assert all(isinstance(own, PhaseController) for own in orchestrator.phases.values())
    assert orchestrator.storage.base_path == Path("storage")
    assert isinstance(orchestrator.handoff_validator, ModelHandoffValidator)
    outcome = asyncio.run(orchestrator.run_full_pipeline())
    assert outcome["success"] and outcome["session_id"] and "toy" in outcome["results"]
    assert outcome["final_model"] is not None
    result = asyncio.run(PipelineOrchestrator("config.yaml").run_single_phase("toy"))
    assert result.success and result.phase_name == "toy"


def test_a_single_phase_of_a_network_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """3.2.2, `run_single_phase(name, input_models=[model])`: it is saved where it can be found."""
    Path("config.yaml").write_text(SMOKE)
    orchestrator = PipelineOrchestrator("config.yaml")
    torch.manual_seed(0)
    network = ForgeNetwork(orchestrator.config.model)
    result = asyncio.run(orchestrator.run_single_phase("bitnet", input_models=[network]))
    assert result.success and result.metrics["compression_ratio"] > 4, result.error
    assert "the tokenizer of this config's first phase" in caplog.text
    (asked,) = read_session(_session(orchestrator))["asked"]["models"]
    saved, _ = orchestrator.storage.load_model(phase_name="quietstar", model_name="given_1")
    assert (Path(asked) / "tokenizer.json").is_file() and asked.endswith("given_1")
    state = saved.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in network.state_dict().items())


def test_a_network_in_memory_keeps_its_tokenizer_and_what_it_learned(tmp_path: Path) -> None:
    """It goes on as from its folder; a run that is resumed finds it."""
    given = ternary_model(tmp_path / "before")
    whole = given.path.with_name("dequantised")
    Path("config.yaml").write_text(SMOKE)
    orchestrator = PipelineOrchestrator("config.yaml")
    (ref,) = save_inputs(orchestrator, "forge", [open_model(whole).network])
    assert ref.metadata["levels"] == read_metadata(whole).model_dump()["levels"]
    for name in ("tokenizer.json", "config.json"):
        assert (ref.path / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(ConfigError, match="a packed network is given by its folder"):
        save_inputs(orchestrator, "forge", [open_model(given.path).network])


def test_inputs_that_cannot_be_given_are_refused_before_any_session() -> None:
    Path("config.yaml").write_text(SMOKE)
    orchestrator = PipelineOrchestrator("config.yaml")
    network = ForgeNetwork(orchestrator.config.model)
    for phase, models, told in (
        ("bitnet", [torch.nn.Linear(2, 2)], "a network in memory is one of ours"),
        ("evomerge", [network], "evomerge takes 3 models, got 1"),
        ("cognate", [network], "begins from nothing"),
    ):
        with pytest.raises(ConfigError, match=told):
            asyncio.run(orchestrator.run_single_phase(phase, input_models=models))
    assert not Path("storage/sessions").exists()


def _session(orchestrator: PipelineOrchestrator) -> Path:
    return orchestrator.sessions.find(str(orchestrator.session_id))


def test_what_cannot_be_a_name_is_refused() -> None:
    for name in ("../x", "", "a/b"):
        with pytest.raises(ForgeError):
            ModelStorage().save_model(shaken(0), name, "cognate", "a", {})
    assert not [path for path in Path().rglob("*") if path.name in ("x", "a", "b")]
