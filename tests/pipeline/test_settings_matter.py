"""Every setting changes something that a user can see; accepted and ignored is a defect.

Each key has a check: given two values, what they change must differ. A new field without a check
fails the first test.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.config.load import to_yaml
from agent_forge.config.phases import ORDER
from agent_forge.contract.handoff import RULES, QualityGate
from agent_forge.errors import ConfigError
from agent_forge.model.loss import language_loss
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.cleanup import SessionCleanupManager, plan_cleanup
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import read_lines
from tests.support import (
    baking_runs,
    bitnet_runs,
    cognate_settings,
    compression_runs,
    edge_runs,
    evomerge_settings,
    forge_runs,
    quietstar_runs,
)
from tests.support.fake_wandb import FakeWandb
from tests.support.handoffs import GOOD, models
from tests.support.networks import shaken
from tests.support.settings import LEAVES
from tests.support.toy_runs import folder, toy_run

GATE_KEYS = ("gates", "gate_policy")
Check = Callable[[str, Path, pytest.MonkeyPatch], Any]


def weights(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    toy_run(root, setting)
    return files.sha256_of(folder(root) / "toy" / "linear" / "model.safetensors")


def parameters(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    return load_config(sets=(setting,)).model.parameters()


def checkpoints(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    seen: list[list[str]] = []
    place = folder(root) / "toy/checkpoints/main"

    def look(record: dict[str, Any]) -> None:
        if record["event"] == "checkpoint":
            seen.append(sorted(p.name for p in place.glob("step_*")))

    toy_run(root, setting, listener=look)
    return seen[-1]


def exit_code(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    return toy_run(root, setting)["exit_code"]


def looks(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    from agent_forge.pipeline import phase_run

    seen: list[Path] = []
    patch.setattr(phase_run, "check_during", lambda folder, config: seen.append(folder))
    toy_run(root, setting)
    return len(seen)


def threads(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    import torch

    asked: list[int] = []
    patch.setattr(torch, "set_num_threads", asked.append)
    toy_run(root, setting)
    return asked


def device(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    import torch

    patch.setattr(torch.cuda, "is_available", lambda: True)
    from agent_forge.pipeline.environment import prepare

    return prepare(load_config(sets=(setting, "runtime.threads=1")).runtime)


def place(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.chdir(root)
    config = load_config(preset="toy", sets=(setting, "phases.toy.steps=1"))
    assert PipelineOrchestrator(config=config).run()["success"]
    return [p.name for p in root.iterdir()]


def samples(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    toy_run(root, "phases.toy.steps=300", setting)
    lines = [r for _, r in read_lines(folder(root) / "metrics.jsonl") if r["phase"] == "system"]
    return bool(lines)


def log_lines(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    toy_run(root, setting)
    path = folder(root) / "log.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def mirrored(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    wandb = FakeWandb()
    patch.setitem(sys.modules, "wandb", wandb)
    enabled = () if "enabled" in setting else ("tracking.wandb_enabled=true",)
    toy_run(root, *enabled, setting)
    settings = [call[1] for call in wandb.calls if call[0] == "init"]
    return [(s["mode"], s["project"]) for s in settings]


def patience(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.setitem(sys.modules, "wandb", FakeWandb("finish", "hang", hangs_s=0.8))
    toy_run(root, "tracking.wandb_enabled=true", setting)
    return "W&B is left out" in (folder(root) / "log.jsonl").read_text()


TOKENS = torch.arange(2 * 60).view(2, 60) * 7 % 512


def logits(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    with torch.no_grad():
        return shaken(0, setting)(TOKENS).sum().item()


def loss(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    generator = torch.Generator().manual_seed(0)
    return language_loss(shaken(0, setting), (TOKENS, TOKENS), generator).total.item()


def halting_steps(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    return shaken(0, setting).predict(TOKENS)[1].tolist()


def calibration(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    model = shaken(0, setting)
    language_loss(model, (TOKENS, TOKENS), torch.Generator().manual_seed(0))
    model.halting.end_step()
    return model.halting.mean_probability.tolist()


NOW = 1e9
HISTORY = [
    {"session_id": f"{status}{age}", "status": status, "start_time": NOW - age * 86_400}
    | {"end_time": NOW - age * 86_400}
    for status in ("completed", "failed")
    for age in (1, 10, 50)
]


def removed(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    policy = load_config(sets=(setting,)).cleanup_policy
    return set(plan_cleanup(HISTORY, policy, NOW))


def automatic(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    few = "cleanup_policy.max_sessions_total=1"
    toy_run(root, few)
    config = load_config(sets=(setting, few))
    sessions = SessionStore(root)
    sessions.create({}, "", session_id="s2")
    return len(SessionCleanupManager(sessions, config.cleanup_policy).cleanup_old_sessions())


def upkeep(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    sessions = SessionStore(root)
    sessions.create({}, "", session_id="s1")
    manager = SessionCleanupManager(sessions, load_config(sets=(setting,)).cleanup_policy)
    tended: list[int] = []
    patch.setattr(manager, "checkpoint_and_vacuum", lambda: tended.append(1))
    manager.auto_cleanup_on_session_complete("s1")
    return len(tended)


def schedule(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The line that `forge clean --cron` prints for a config file with this schedule."""
    path = root / "c.yaml"
    path.write_text(to_yaml(load_config(sets=(setting,))))
    command = [sys.executable, "-c", "from agent_forge.cli import main; main()"]
    done = subprocess.run(
        [*command, "clean", "--cron", "--config", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def chosen(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    config = load_config(sets=(f"storage.root={root}", setting))
    everything: Any = dict.fromkeys(ORDER, "x")
    return PipelineOrchestrator(config=config, controllers=everything).phase_names()


GATED = {to: rule.gates[0] for (_, to), rule in RULES.items() if rule.gates}


def verdict(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """Whether a model that misses the first gate may go on."""
    target = setting.split(".")[1]
    gate = GATED[target]
    bad = gate.threshold * (0.5 if gate.name.startswith("min_") else 2)
    config = load_config(preset="25m", sets=(f"storage.root={root}", setting))
    source = next(a for a, b in RULES if b == target)
    handed = models(target, int(bad) if gate.key == "parameters" else 25_000_000)
    return PipelineOrchestrator(config=config).handoff_validator.validate_handoff(
        source, target, handed, [{**GOOD[target], gate.key: bad}] * len(handed)
    )


def loose(gate: QualityGate) -> str:
    """A threshold that everything passes."""
    return f"{{{gate.name}: {1e-12 if gate.name.startswith('min_') else 1e12}}}"


CHECKS: dict[str, tuple[Check, str, str]] = {
    "preset": (parameters, "tiny", "small"),
    "runtime.seed": (weights, "1", "2"),
    "runtime.device": (device, "cpu", "cuda"),
    "runtime.threads": (threads, "1", "2"),
    "runtime.reserve_memory_mb": (exit_code, "0", "1e12"),
    "runtime.check_every_steps": (looks, "2", "5"),
    "storage.root": (place, "here", "there"),
    "storage.keep_checkpoints": (checkpoints, "1", "3"),
    "storage.reserve_disk_mb": (exit_code, "0", "1e12"),
    "tracking.wandb_enabled": (mirrored, "true", "false"),
    "tracking.wandb_offline": (mirrored, "true", "false"),
    "tracking.wandb_project": (mirrored, "a", "b"),
    "tracking.wandb_timeout_s": (patience, "0.01", "20"),
    "tracking.sample_every_s": (samples, "0", "0.01"),
    "tracking.log_level": (log_lines, "INFO", "ERROR"),
    "cleanup_policy.max_session_age_days": (removed, "5", "20"),
    "cleanup_policy.max_failed_session_age_days": (removed, "5", "20"),
    "cleanup_policy.max_sessions_total": (removed, "1", "100"),
    "cleanup_policy.checkpoint_every_n_sessions": (upkeep, "1", "2"),
    "cleanup_policy.auto_cleanup_enabled": (automatic, "true", "false"),
    "cleanup_policy.schedule_cleanup": (schedule, "0 0 * * *", "1 0 * * *"),
    **{
        f"model.{name}": (parameters, "64", "96")
        for name in (
            *("embed_rank", "n_layers", "ffn_hidden", "d_mem"),
            *("gate_hidden", "trm_hidden"),
        )
    },
    "model.d_model": (parameters, "128", "192"),
    "model.vocab_size": (parameters, "512", "1024"),
    "model.sw_window": (logits, "8", "1024"),
    "model.memory_capacity": (logits, "16", "4096"),
    "model.surprise_weight": (logits, "0.1", "0.9"),
    "model.novelty_weight": (logits, "0.1", "0.9"),
    "model.t_max": (logits, "1", "3"),
    "model.micro_steps": (logits, "1", "2"),
    "model.n_heads": (logits, "2", "4"),
    "model.head_size": (parameters, "0", "8"),
    "model.supervised_share": (loss, "0.2", "0.8"),
    "model.gate_entropy_weight": (loss, "0.001", "0.1"),
    "model.halt_margin": (loss, "0.0", "10"),
    "model.halt_loss_weight": (loss, "0.1", "0.5"),
    "model.halt_threshold": (halting_steps, "0.0", "1.0"),
    "model.halt_ema": (calibration, "0.5", "0.98"),
    "phases.toy.steps": (weights, "3", "4"),
    "phases.toy.width": (weights, "2", "3"),
    "phases.toy.learning_rate": (weights, "1e-3", "1e-2"),
    "phases.toy.checkpoint_every_steps": (checkpoints, "5", "11"),
    **cognate_settings.CHECKS,
    **evomerge_settings.CHECKS,
    **quietstar_runs.CHECKS,
    **bitnet_runs.CHECKS,
    **forge_runs.CHECKS,
    **baking_runs.CHECKS,
    **edge_runs.CHECKS,
    **compression_runs.CHECKS,
    **{f"phases.{name}.enabled": (chosen, "true", "false") for name in ORDER},
    **{f"phases.{name}.gate_policy": (verdict, "fail", "warn") for name in GATED},
    **{f"phases.{name}.gates": (verdict, "{}", loose(gate)) for name, gate in GATED.items()},
}
# The phases do not exist yet.
LATER = {f"phases.{name}.checkpoint_every_steps" for name in ORDER[8:]}
# Refused where they could change nothing: see below.
REFUSED = {f"phases.{name}.{key}" for name in set(ORDER) - set(GATED) for key in GATE_KEYS}
REFUSED.add("phases.evomerge.checkpoint_every_steps")


def test_every_setting_has_a_check() -> None:
    assert {".".join(key) for key in LEAVES} == set(CHECKS) | LATER | REFUSED


TRAINS = {*cognate_settings.CHECKS, *evomerge_settings.CHECKS, *quietstar_runs.CHECKS}
TRAINS |= {*bitnet_runs.CHECKS, *forge_runs.CHECKS, *baking_runs.CHECKS, *edge_runs.CHECKS}
TRAINS |= {*compression_runs.CHECKS}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.slow] * (key in TRAINS)) for key in CHECKS]
)
def test_a_setting_changes_something(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, one, two = CHECKS[key]
    found = []
    for name, value in (("one", one), ("two", two)):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            found.append(check(f"{key}={value}", tmp_path / name, patch))
    assert found[0] != found[1]


@pytest.mark.parametrize("name", sorted(set(ORDER) - set(GATED)))
def test_gates_that_could_change_nothing_are_refused(name: str) -> None:
    for setting in ("gates={min_fitness: 1}", "gate_policy=warn"):
        with pytest.raises(ConfigError, match=f"phases.{name}"):
            load_config(sets=(f"phases.{name}.{setting}",))


def test_an_evolution_counts_generations_not_steps() -> None:
    with pytest.raises(ConfigError, match="set checkpoint_every instead"):
        load_config(sets=("phases.evomerge.checkpoint_every_steps=7",))


def test_an_unknown_gate_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'min_fitness'"):
        load_config(sets=("phases.quietstar.gates={min_fitnes: 1}",))
