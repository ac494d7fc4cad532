"""`forge edge`: a model of ours, from wherever, becomes a bundle for a device."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.errors import HandoffRefused
from agent_forge.model.opened import open_model
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from tests.support import edge_runs, forge_runs
from tests.support.command_line import Forge
from tests.support.edge_runs import FEW, brief, made
from tests.support.eval_models import FAMILIES
from tests.support.toy_runs import SMALL, exit_code, folder, forked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
SETS = " ".join(f"--set '{text}'" for text in (*SMALL, *FEW))
KEPT = f"{edge_runs.PHASE}.least_retention=0.0001"


def test_a_model_of_any_phase_becomes_a_bundle(tmp_path: Path, forge: Forge) -> None:
    given, out = forge_runs.ternary_model(tmp_path, phase="bitnet").path, tmp_path / "out"
    line = f"edge {given} {out} --preset smoke --storage {tmp_path} {SETS} --set {KEPT}"
    assert forge(f"{line} --dry-run").code == 0 and not out.exists()
    with brief():
        result = forge(f"{line} --target laptop --steps 2 --json")
    assert result.code == 0, result.err
    told = result.document
    assert told["summary"].startswith("laptop: ") and told["metrics"]["cuts_kept"] == 2
    assert {"model.safetensors", "config.json", "forge_run.c"} <= set(told["files"])
    assert (out / "Makefile").is_file() and open_model(out).network is not None
    again = forge(line)
    assert again.code == 2 and "exists" in again.err


def test_models_of_other_makers_are_refused(tmp_path: Path, forge: Forge) -> None:
    parent = tmp_path / "parent"
    shape = AutoConfig.for_model("llama", **FAMILIES["llama"])
    AutoModelForCausalLM.from_config(shape).save_pretrained(parent)
    refused = forge(f"edge {parent} {tmp_path / 'out'} --storage {tmp_path}")
    assert refused.code == 2 and "forge quantize" in refused.err
    mine = forge_runs.ternary_model(tmp_path).path
    refused = forge(f"edge {mine} {tmp_path / 'out'} --storage {tmp_path} --target watch")
    assert refused.code == 2 and not (tmp_path / "out").exists()


def test_a_model_from_elsewhere_goes_on_after_a_kill(tmp_path: Path) -> None:
    """What the rules of a handoff ask for is not asked of it, then neither."""

    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == "cut_1" and record.get("step") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(root: Path, listener: Any = None, foreign: bool = True) -> dict[str, Any]:
        begun = (folder(root) / "session.json").exists()
        sets = (f"storage.root={root}", *SMALL, *forge_runs.SHAPE, *FEW, KEPT)
        orchestrator = PipelineOrchestrator(
            config=load_config(preset="smoke", sets=sets),
            session_id="r",
            resume=begun,
            listeners=[listener] if listener else [],
        )
        given = None if begun else [forge_runs.ternary_model(root, phase="bitnet")]
        with brief():
            how = {} if begun else {"foreign": foreign}
            return orchestrator.run(only="edge", input_models=given, **how)

    assert exit_code(forked(lambda: run(tmp_path / "a", die))) == -signal.SIGKILL
    assert run(tmp_path / "a")["success"] and run(tmp_path / "b")["success"]
    assert made(tmp_path / "a") == made(tmp_path / "b")
    refused = run(tmp_path / "c", foreign=False)
    assert refused["exit_code"] == HandoffRefused.exit_code
