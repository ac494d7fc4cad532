"""The orchestrator: order, handoffs, skipping, resuming, failing and telling about all of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhasePlan,
    PhaseResult,
)
from agent_forge.errors import AlreadyInUse, ConfigError, DamagedFile, NotFound
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.environment import StopSignals, prepare, snapshot
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.cleanup import SessionCleanupManager
from agent_forge.store.registry import ModelRegistry
from agent_forge.track.journal import read_lines
from tests.support.fake_wandb import FakeWandb
from tests.support.toy_runs import (
    SMALL,
    change_settings,
    folder,
    metrics,
    outcome,
    toy_config,
    toy_run,
)

SETS = (*SMALL, "phases.evomerge.gates={min_parameters: 1, max_parameters: 100}")


class Cognate(PhaseController):
    """Stands in for Phase 1: three real models, one metadata record each."""

    name = "cognate"
    fitness = 0.9

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        return PhasePlan(3)

    def run(self, ctx: PhaseContext) -> PhaseResult:
        noise = ctx.generator("noise")
        done = Counter()
        for step in ctx.steps(3, {"done": done}, stage="train"):
            done.n += 1
            ctx.log(step, {"toy/loss": 1 / step})
        models = []
        for n in range(3):
            weights = {"w": torch.randn(2, 2, generator=noise)}
            record = {"specialization": f"s{n}", "final_loss": 0.1, "seed": n}
            models.append(ctx.save_model(f"model_{n}", weights, record))
        return PhaseResult(True, None, self.name, {"done": done.n}, {"models": models}, 0.0)


class EvoMerge(PhaseController):
    """Stands in for Phase 2: the mean of what it was handed."""

    name = "evomerge"

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        return PhasePlan(1, parameters=4)

    def run(self, ctx: PhaseContext) -> PhaseResult:
        weights = torch.stack([ref.weights()["w"] for ref in ctx.inputs]).mean(0)
        record = {"fitness": 0.9, "merge_technique": "mean"}
        merged = ctx.save_model("merged", {"w": weights}, record)
        ctx.log(None, {"toy/final_loss": weights.mean().abs()})
        artifacts = {"models": [merged], "where": merged.path, "odd": float("nan")}
        metrics = {"mean": weights.mean().item(), "technique": "mean"}
        return PhaseResult(True, nn.Linear(2, 2, bias=False), self.name, metrics, artifacts, 0.0)


class Counter:
    """The smallest stateful part."""

    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


TWO: dict[str, type[PhaseController]] = {"cognate": Cognate, "evomerge": EvoMerge}


def orchestrator(root: Path, *sets: str, **options: Any) -> PipelineOrchestrator:
    config = load_config(preset="smoke", sets=(f"storage.root={root}", *SETS, *sets))
    options.setdefault("controllers", TWO)
    return PipelineOrchestrator(config=config, session_id="r", **options)


def events(root: Path) -> list[str]:
    return [
        " ".join([record["event"], *([record["phase"]] if "phase" in record else [])])
        for _, record in read_lines(folder(root) / "events.jsonl")
    ]


def test_phases_that_do_not_exist_yet_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert orchestrator(tmp_path).phase_names() == ["cognate", "evomerge"]
    assert "not in this version" in caplog.text and "final_compression" in caplog.text


def test_every_number_of_a_card_was_measured(tmp_path: Path) -> None:
    toy_run(tmp_path)
    model = folder(tmp_path) / "toy" / "linear"
    measured: dict[str, Any] = {}
    for _, record in read_lines(folder(tmp_path) / "metrics.jsonl"):
        measured |= record["metrics"]
    metrics_of_card = files.read_json(model / "metrics.json")
    assert metrics_of_card
    for name, value in metrics_of_card.items():
        assert measured[name] == value
        assert f"| {name} | {value:.6g} |" in (model / "README.md").read_text()


def test_phases_run_in_order_and_hand_over(tmp_path: Path) -> None:
    result = orchestrator(tmp_path).run()
    assert result["success"] and list(result["results"]) == ["cognate", "evomerge"]
    assert isinstance(result["final_model"], nn.Linear)
    assert events(tmp_path) == [
        *("run_started", "phase_started cognate", "phase_completed cognate"),
        *("handoff evomerge", "phase_started evomerge", "phase_completed evomerge"),
        "run_completed",
    ]
    registry = ModelRegistry(tmp_path / "registry" / "model_registry.db")
    handoffs = registry.get_handoffs("r")
    assert [h["validation_status"] for h in handoffs] == ["passed"] * 3
    assert handoffs[0]["validation_metrics"]["parameters[2]"] == 4
    row = registry.get_session_status("r")
    assert (row["status"], row["progress_percent"], row["current_phase"]) == (
        *("completed", 100, "evomerge"),
    )


def test_what_is_done_is_skipped_and_said(tmp_path: Path) -> None:
    first = orchestrator(tmp_path).run()
    again = orchestrator(tmp_path, resume=True).run()
    assert again["success"]
    assert [r.artifacts["skipped"] for r in again["results"].values()] == [True, True]
    assert again["results"]["evomerge"].metrics == first["results"]["evomerge"].metrics
    assert events(tmp_path)[-4:] == [
        *("run_resumed", "phase_skipped cognate", "phase_skipped evomerge", "run_completed"),
    ]


@pytest.mark.parametrize("how", ["damaged", "removed", "exchanged"])
def test_a_phase_whose_output_is_not_what_it_was_is_done_again(tmp_path: Path, how: str) -> None:
    orchestrator(tmp_path).run()
    measured = metrics(tmp_path)
    before = (folder(tmp_path) / "phase1_cognate/model_1/model.safetensors").read_bytes()
    model = folder(tmp_path) / "phase1_cognate" / "model_1"
    if how == "damaged":
        (model / "model.safetensors").write_bytes(b"x")
    elif how == "removed":
        files.remove_tree(model, tmp_path)
    else:
        other = files.read_json(model.with_name("model_2") / "metadata.json")
        with files.staging(model) as stage:
            stage.copy(model.with_name("model_2") / "model.safetensors")
            stage.write_json("metadata.json", other)
    result = orchestrator(tmp_path, resume=True).run()
    assert result["success"] and "skipped" not in result["results"]["cognate"].artifacts
    assert result["results"]["evomerge"].artifacts["skipped"]  # same bytes again, same inputs
    assert (model / "model.safetensors").read_bytes() == before
    assert sorted(metrics(tmp_path), key=str) == sorted(measured, key=str)
    assert "again" in (folder(tmp_path) / "log.jsonl").read_text()


def test_another_config_makes_it_anew_and_the_rest_follows(tmp_path: Path) -> None:
    orchestrator(tmp_path).run()
    change_settings(tmp_path, "seed: 42", "seed: 43")
    result = orchestrator(tmp_path, resume=True).run()
    assert result["success"]
    assert not any("skipped" in r.artifacts for r in result["results"].values())
    assert [step for _, step, _ in metrics(tmp_path) if step] == [1, 2, 3]
    assert [phase for phase, _, _ in metrics(tmp_path)].count("evomerge") == 2


def test_a_missed_gate_stops_with_exit_3(tmp_path: Path) -> None:
    result = orchestrator(
        tmp_path, "phases.evomerge.gates={max_parameters: 3}", "phases.evomerge.gate_policy=fail"
    ).run()
    assert (result["success"], result["exit_code"]) == (False, 3)
    assert result["failed_handoff"] == "cognate -> evomerge"
    assert "parameters is 4, max_parameters is 3" in result["error"]
    assert result["completed_phases"] == ["cognate"]
    registry = ModelRegistry(tmp_path / "registry" / "model_registry.db")
    assert registry.get_handoffs("r")[0]["validation_status"] == "failed"
    assert registry.get_session_status("r")["status"] == "failed"


def test_a_missed_gate_can_warn(tmp_path: Path) -> None:
    sets = ("phases.evomerge.gates={max_parameters: 3}", "phases.evomerge.gate_policy=warn")
    assert orchestrator(tmp_path, *sets).run()["success"]
    (handoff,) = (
        record
        for _, record in read_lines(folder(tmp_path) / "events.jsonl")
        if record["event"] == "handoff"
    )
    assert handoff["passed"] and "max_parameters is 3" in handoff["warnings"][0]
    assert "going on" in (folder(tmp_path) / "log.jsonl").read_text()


class Failing(Cognate):
    def run(self, ctx: PhaseContext) -> PhaseResult:
        return PhaseResult(False, None, self.name, {}, {}, 0.0, error="no data")


class Crashing(Cognate):
    def run(self, ctx: PhaseContext) -> PhaseResult:
        raise ZeroDivisionError("a defect")


class Silent(Cognate):
    def run(self, ctx: PhaseContext) -> PhaseResult:
        return None  # type: ignore[return-value]


class Picky(EvoMerge):
    def validate_input(self, models: Sequence[ModelRef]) -> tuple[bool, str]:
        return False, "these do not suit"


class Careless(Cognate):
    def run(self, ctx: PhaseContext) -> PhaseResult:
        ctx.log(1, {"toy/unheard_of": 1.0})
        raise AssertionError("not reached")


def test_a_failing_phase_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    result = orchestrator(tmp_path, controllers={**TWO, "cognate": Failing}).run()
    assert (result["exit_code"], result["failed_phase"]) == (1, "cognate")
    assert result["error"] == "cognate: no data" and result["completed_phases"] == []
    result = orchestrator(tmp_path / "2", controllers={**TWO, "cognate": Silent}).run()
    assert result["error"] == "cognate returned NoneType"


def test_a_defect_is_recorded_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        orchestrator(tmp_path, controllers={**TWO, "cognate": Crashing}).run()
    for name in ("session.json", "phase1_cognate/state.json"):
        assert files.read_checked(folder(tmp_path) / name)["status"] == "failed"
    assert "ZeroDivisionError" in (folder(tmp_path) / "events.jsonl").read_text()
    with pytest.raises(ValueError, match="not in contract/metrics"):
        orchestrator(tmp_path / "2", controllers={**TWO, "cognate": Careless}).run()


def test_a_phase_may_refuse_its_input(tmp_path: Path) -> None:
    result = orchestrator(tmp_path, controllers={**TWO, "evomerge": Picky}).run()
    assert result["exit_code"] == 3 and "these do not suit" in result["error"]


def test_one_phase_alone_takes_what_the_session_has(tmp_path: Path) -> None:
    result = orchestrator(tmp_path).run(only="evomerge")
    assert result["exit_code"] == 3 and "expected 3 models, got 0" in result["error"]
    result = orchestrator(tmp_path, resume=True).run(only="cognate")
    assert result["success"] and list(result["results"]) == ["cognate"]
    result = orchestrator(tmp_path, resume=True).run(start="evomerge")
    assert result["success"] and list(result["results"]) == ["evomerge"]


def test_a_resumed_run_keeps_to_what_was_asked(tmp_path: Path) -> None:
    assert list(orchestrator(tmp_path).run(only="cognate")["results"]) == ["cognate"]
    again = orchestrator(tmp_path, resume=True).run()
    assert again["success"] and list(again["results"]) == ["cognate"]
    more = orchestrator(tmp_path, resume=True).run(start="evomerge")  # unless it is asked for
    assert list(more["results"]) == ["evomerge"]
    begun = orchestrator(tmp_path / "x").run(start="evomerge")
    assert begun["exit_code"] == 3
    again = orchestrator(tmp_path / "x", resume=True).run()
    assert again["exit_code"] == 3 and not again["results"]  # nobody asked for Phase 1
    whole = orchestrator(tmp_path / "y").run()
    assert list(orchestrator(tmp_path / "y", resume=True).run()["results"]) == list(
        whole["results"]
    )


def test_the_async_facade_runs_off_the_loop(tmp_path: Path) -> None:
    async def work() -> tuple[dict[str, Any], PhaseResult, PhaseResult]:
        runner = orchestrator(tmp_path)
        full = await runner.run_full_pipeline()
        again = orchestrator(tmp_path, resume=True)
        models = full["results"]["cognate"].artifacts["models"]
        single = await again.run_single_phase("evomerge", models)
        bad = await orchestrator(tmp_path / "2").run_single_phase("evomerge")
        return full, single, bad

    full, single, bad = asyncio.run(work())
    assert full["success"] and single.success and single.phase_name == "evomerge"
    assert (full["status"], full["completed_phases"]) == ("completed", ["cognate", "evomerge"])
    assert not bad.success and "expected 3 models" in (bad.error or "")


def test_a_cancelled_task_stops_the_run(tmp_path: Path) -> None:
    running = threading.Event()

    class Endless(Cognate):
        def run(self, ctx: PhaseContext) -> PhaseResult:
            for _ in ctx.steps(10**6, {"done": Counter()}):
                running.set()
                time.sleep(0.01)
            raise AssertionError("not reached")

    runner = orchestrator(tmp_path, controllers={"cognate": Endless})

    async def work() -> None:
        task = asyncio.create_task(runner.run_full_pipeline())
        assert await asyncio.to_thread(running.wait, 60)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert files.read_checked(folder(tmp_path) / "session.json")["status"] == "paused"


def test_models_that_are_given_are_judged_and_remembered(tmp_path: Path) -> None:
    made = orchestrator(tmp_path / "first").run(only="cognate")
    models = made["results"]["cognate"].artifacts["models"]
    result = orchestrator(tmp_path).run(only="evomerge", input_models=models[:1])
    assert result["exit_code"] == 3 and "expected 3 models, got 1" in result["error"]
    assert result["failed_handoff"] == "cognate -> evomerge"
    assert orchestrator(tmp_path, resume=True).run(only="evomerge", input_models=models)["success"]
    files.remove_tree(folder(tmp_path) / "phase2_evomerge" / "merged", tmp_path)
    assert orchestrator(tmp_path, resume=True).run(only="evomerge")["success"]


def test_a_copied_run_can_be_resumed(tmp_path: Path) -> None:
    orchestrator(tmp_path / "a").run(only="cognate")
    (tmp_path / "b" / "sessions").mkdir(parents=True)
    shutil.copytree(folder(tmp_path / "a"), folder(tmp_path / "b"))
    result = orchestrator(tmp_path / "b", resume=True).run()
    assert result["success"] and result["results"]["cognate"].artifacts["skipped"]


def test_running_out_of_memory_pauses(tmp_path: Path) -> None:
    class Greedy(Cognate):
        def run(self, ctx: PhaseContext) -> PhaseResult:
            raise MemoryError("no more")

    result = orchestrator(tmp_path, controllers={"cognate": Greedy}).run()
    assert (result["exit_code"], result["status"]) == (5, "paused")


def test_tidying_up_may_fail_without_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise AlreadyInUse("someone else tidies up")

    monkeypatch.setattr(SessionCleanupManager, "tidy_up", busy)
    result = orchestrator(tmp_path).run()
    assert result["success"] and "could not" in (folder(tmp_path) / "log.jsonl").read_text()


def test_other_versions_are_told_on_resume(tmp_path: Path) -> None:
    orchestrator(tmp_path).run()
    path = folder(tmp_path) / "session.json"
    record = files.read_checked(path)
    record["environment"]["packages"]["torch"] = "0.1"
    path.write_bytes(files.with_checksum(record))
    orchestrator(tmp_path, resume=True).run()
    assert "versions have changed" in (folder(tmp_path) / "log.jsonl").read_text()


def test_a_stage_is_used_once_and_its_parts_stay_the_same(tmp_path: Path) -> None:
    class Twice(Cognate):
        def run(self, ctx: PhaseContext) -> PhaseResult:
            for _ in range(2):
                list(ctx.steps(2, {"done": Counter()}))
            raise AssertionError("not reached")

    with pytest.raises(ValueError, match="used twice"):
        orchestrator(tmp_path, controllers={"cognate": Twice}).run()

    class Renamed(Cognate):
        def run(self, ctx: PhaseContext) -> PhaseResult:
            list(ctx.steps(3, {"other": Counter()}))
            raise AssertionError("not reached")

    result = orchestrator(tmp_path, controllers={"cognate": Renamed}, resume=True).run()
    assert result["exit_code"] == 2 and "holds ['done']" in result["error"]

    class Forgetful(Counter):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = 7

    class Inexact(Cognate):
        def run(self, ctx: PhaseContext) -> PhaseResult:
            list(ctx.steps(3, {"done": Forgetful()}))
            raise AssertionError("not reached")

    result = orchestrator(tmp_path, controllers={"cognate": Inexact}, resume=True).run()
    assert "did not come back" in result["error"]


def test_names_are_checked_before_anything_starts(tmp_path: Path) -> None:
    runner = orchestrator(tmp_path)
    for options, sign in (
        ({"only": "evomrge"}, "did you mean 'evomerge'"),
        ({"only": "cognate", "start": "cognate"}, "contradict"),
        ({"start": "toy"}, "not enabled"),
        ({"only": "edge"}, "does not have edge yet"),
    ):
        with pytest.raises(ConfigError, match=sign):
            runner.run(**options)  # type: ignore[arg-type]
    assert not folder(tmp_path).exists()


def test_a_plan_creates_nothing(tmp_path: Path) -> None:
    plans = orchestrator(tmp_path / "x").plan()
    assert {name: plan.steps for name, plan in plans.items()} == {"cognate": 3, "evomerge": 1}
    assert not (tmp_path / "x").exists()


def test_a_config_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("preset: toy\nphases: {toy: {steps: 3}}\n")
    runner = PipelineOrchestrator("c.yaml")
    assert runner.run()["success"]
    assert runner.session_id and runner.session_id.startswith("session_")


def test_resuming_needs_a_session_and_its_config(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        orchestrator(tmp_path, resume=True)
    orchestrator(tmp_path).run()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("sessions", "registry"):
        (tmp_path / name).rename(moved / name)
    assert orchestrator(moved, resume=True).run()["success"]  # the root may move
    (folder(moved) / "session.json").write_text("{}")
    with pytest.raises(DamagedFile):
        orchestrator(moved, resume=True).run()


def test_an_edited_config_is_refused_and_a_lost_one_is_not_missed(tmp_path: Path) -> None:
    orchestrator(tmp_path).run()
    path = folder(tmp_path) / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("seed: 42", "seed: 43"))
    with pytest.raises(ConfigError, match=r"edited since the run began: runtime\.seed"):
        orchestrator(tmp_path, resume=True)
    path.write_text("{")
    assert orchestrator(tmp_path, resume=True).run()["success"]
    path.unlink()
    assert orchestrator(tmp_path, resume=True).run()["success"]


def test_a_run_survives_an_update_that_adds_a_setting(tmp_path: Path) -> None:
    orchestrator(tmp_path).run()
    record = files.read_checked(folder(tmp_path) / "session.json")
    del record["config"]["phases"]["evomerge"]["layer_paths"]
    (folder(tmp_path) / "session.json").write_bytes(files.with_checksum(record))

    class Settings(EvoMergeSettings):
        added: int = 3

    class Updated(EvoMerge):
        def __init__(self, config: EvoMergeSettings, shared: Any) -> None:
            super().__init__(Settings(**dict(config)), shared)

    updated = {**TWO, "evomerge": Updated}
    again = orchestrator(tmp_path, resume=True, controllers=updated).run()
    assert [r.artifacts["skipped"] for r in again["results"].values()] == [True, True]


def test_old_sessions_go_when_a_run_starts_and_completes(tmp_path: Path) -> None:
    sets = ("cleanup_policy.max_sessions_total=1",)
    for n in range(3):
        runner = orchestrator(tmp_path, *sets)
        runner.session_id = f"run{n}"
        assert runner.run()["success"]
    names = {p.name for p in (tmp_path / "sessions").iterdir() if p.is_dir()}
    assert names == {"run2"}


def test_the_session_knows_where_it_ran(tmp_path: Path) -> None:
    toy_run(tmp_path)
    record = json.loads((folder(tmp_path) / "session.json").read_text())
    environment = record["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["cores"] >= 1 and environment["cpu"] and environment["argv"]
    assert record["config_hash"] == toy_config(tmp_path).canonical_hash()
    assert snapshot()["git_commit"] is None or len(snapshot()["git_commit"]) == 40


def test_device_and_threads_are_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    runtime = load_config(sets=("runtime.threads=1", "runtime.device=cpu")).runtime
    assert prepare(runtime) == "cpu" and torch.get_num_threads() == 1
    with pytest.raises(ConfigError, match="not there"):
        prepare(load_config(sets=("runtime.device=cuda",)).runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert prepare(load_config(sets=("runtime.threads=1",)).runtime) == "cuda"
    torch.set_num_threads(before)


def test_signals_stay_with_the_main_thread() -> None:
    stopper = StopSignals()
    problems: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with stopper.on_signals():
                pass
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert problems == [] and not stopper()


def test_a_stop_before_a_phase_pauses(tmp_path: Path) -> None:
    runner = orchestrator(tmp_path)
    runner.stopper.request()
    result = runner.run()
    assert (result["exit_code"], result["status"]) == (130, "paused")
    assert result["error"] == "stopped before phase cognate"


def test_progress_is_in_the_registry_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_forge.pipeline import orchestrator as module

    monkeypatch.setattr(module, "REGISTRY_EVERY_S", 0)
    seen: list[tuple[str, float]] = []
    registry = ModelRegistry(tmp_path / "registry" / "model_registry.db")

    def listen(record: dict[str, Any]) -> None:
        if record["event"] == "checkpoint":
            row = registry.get_session_status("r")
            seen.append((row["status"], round(row["progress_percent"])))

    toy_run(tmp_path, listener=listen)
    assert seen == [("running", 21), *(("running", p) for p in (42, 62, 83, 100))]


@pytest.mark.parametrize("how", ["absent", "raise", "hang"])
def test_a_tracker_outage_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    toy_run(tmp_path / "plain")
    wandb = None if how == "absent" else FakeWandb("log", how)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sets = ("tracking.wandb_enabled=true", "tracking.wandb_timeout_s=0.01")
    assert toy_run(tmp_path, *sets)["success"]
    assert outcome(tmp_path) == outcome(tmp_path / "plain")
    log = (folder(tmp_path) / "log.jsonl").read_text()
    assert log.count("W&B is left out") == 1
    if wandb:
        wandb.released.set()


def test_wandb_gets_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    sets = ("tracking.wandb_timeout_s=5", "tracking.wandb_project=mine")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    toy_run(tmp_path, "tracking.wandb_enabled=true", "tracking.wandb_offline=false", *sets)
    settings = next(call[1] for call in wandb.calls if call[0] == "init")
    assert (settings["mode"], settings["project"]) == ("online", "mine")
    logged = [call[1] for call in wandb.calls if call[0] == "log"]
    truth = [
        {**record["metrics"], **({"step": record["step"]} if record["step"] else {})}
        for _, record in read_lines(folder(tmp_path) / "metrics.jsonl")
    ]
    assert logged == truth
    assert [call[1] for call in wandb.calls if call[0] == "reference"] == ["toy.linear.r"]


def test_a_config_from_elsewhere_removes_no_sessions(tmp_path: Path) -> None:
    """A session stays for as long as the policy says that it was begun with."""
    mine, theirs = (
        orchestrator(tmp_path),
        orchestrator(
            tmp_path, "cleanup_policy.max_session_age_days=0", "cleanup_policy.max_sessions_total=1"
        ),
    )
    for runner, name in ((mine, "mine"), (theirs, "theirs"), (theirs, "later")):
        runner.session_id = name
        assert runner.run()["success"]
    assert {p.name for p in (tmp_path / "sessions").iterdir() if p.is_dir()} == {"mine", "later"}
