"""What an attack on model folders found: code, templates, adapters that were trusted."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
    pipelines,
)
from transformers.integrations import hub_kernels

from agent_forge.errors import HostileInput
from agent_forge.model import load  # noqa: F401 - what keeps transformers from running code
from tests.support.command_line import Forge
from tests.support.eval_models import llama

EVIL = "Evil"
AUTO = ("AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoModelForCausalLM")


def edit(path: Path, **values: Any) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **values}))


def rows(path: Path, chat: bool = False) -> Path:
    lines: list[dict[str, Any]] = [{"prompt": f"a {i}", "completion": " b"} for i in range(8)]
    if chat:
        roles = ("user", "a"), ("assistant", "b")
        lines = [
            {"messages": [{"role": r, "content": f"{c} {i}"} for r, c in roles]} for i in (1, 2)
        ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


# -- code -----------------------------------------------------------------------------------------


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that code of a folder would make; whoever is asked says yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return tmp_path / "canary"


def evil(place: Path, canary: Path, kind: str) -> Path:
    """A folder that asks for code of its own to be run."""
    names: dict[str, Any] = dict.fromkeys(AUTO, f"evil.{EVIL}")
    names["AutoTokenizer"] = [f"evil.{EVIL}"] * 2
    llama(place)
    edit(place / "config.json", model_type=kind, auto_map=names)
    for stem in ("tokenizer", "processor"):
        edit(place / f"{stem}_config.json", tokenizer_class=EVIL, auto_map=names)
    (place / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass {EVIL}: pass\n")
    return place


def refused(canary: Path) -> None:
    assert not canary.exists()
    assert sys.stdin.tell() == 0, "it read from stdin"


@pytest.mark.parametrize(
    "command", ["generate m hi", "chat m", "eval m --data d.jsonl", "compare m m --data d.jsonl"]
)
@pytest.mark.parametrize("slot", ["tokenizer_config.json", "config.json"])
def test_no_second_folder_is_opened(
    command: str, slot: str, tmp_path: Path, canary: Path, forge: Forge
) -> None:
    """A processor as tokenizer opens the folder that its own settings name."""
    place = llama(tmp_path / "m")
    evil(place / "sub", canary, "vit")
    if slot == "config.json":
        (place / "tokenizer_config.json").unlink()
    edit(place / slot, tokenizer_class="DiaProcessor")
    named = {"audio_tokenizer_class": "AutoTokenizer", "audio_tokenizer_name_or_path": "m/sub"}
    edit(place / "processor_config.json", processor_class="DiaProcessor", audio_tokenizer=named)
    rows(tmp_path / "d.jsonl")
    result = forge(command)
    refused(canary)
    assert result.code == 4 and "DiaProcessor" in result.err and "[y/N]" not in result.out


@pytest.mark.parametrize("trust", [None, True])
@pytest.mark.parametrize("kind", ["vit", "llama", "unheard_of"])
@pytest.mark.parametrize("auto", [AutoConfig, AutoTokenizer, AutoProcessor, AutoModelForCausalLM])
def test_transformers_runs_no_code_and_asks_nobody(
    auto: Any, kind: str, trust: bool | None, tmp_path: Path, canary: Path
) -> None:
    place = evil(tmp_path / "m", canary, kind)
    with pytest.raises(HostileInput, match="m asks for code of its own"):
        auto.from_pretrained(place, trust_remote_code=trust)
    refused(canary)


def test_no_other_way_leads_to_code(tmp_path: Path, canary: Path) -> None:
    place = evil(tmp_path / "m", canary, "llama")
    (place / "custom_generate").mkdir()
    shutil.copy(place / "evil.py", place / "custom_generate" / "generate.py")
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=0, vocab_size=4))
    with pytest.raises(HostileInput):
        model.generate(custom_generate=str(place), trust_remote_code=True)
    with pytest.raises(HostileInput):
        pipelines.get_class_from_dynamic_module(f"evil.{EVIL}", str(place))
    with pytest.raises(HostileInput):
        dynamic_module_utils.get_class_in_module(EVIL, place / "evil.py")
    with pytest.raises(HostileInput):
        hub_kernels.get_kernel("someone/something")
    refused(canary)
