"""What an attack on model folders found: code, templates, adapters that were trusted."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
from agent_forge.evals.domains import from_files
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.merge.engine import merge
from agent_forge.merge.output import write
from agent_forge.merge.recipe import Recipe
from agent_forge.model import load  # noqa: F401 - what keeps transformers from running code
from agent_forge.model.folder import open_weights
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from tests.faults.test_attack_evolution import begin
from tests.merge.test_weights import with_tokens
from tests.support.command_line import Forge
from tests.support.eval_models import llama
from tests.support.evo_models import PARENTS, family, journal
from tests.support.merge_models import family as family_of
from tests.support.merge_models import save, tuned
from tests.support.tokenizers import CHAT

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


# -- settings -------------------------------------------------------------------------------------


def measured(model: Path, data: Path) -> float:
    domains = from_files([data])
    return float(open_model_under_test(model).measure_all(domains)[0].loss[0])


def test_further_chat_templates_are_settings(tmp_path: Path, forge: Forge) -> None:
    place, data = llama(tmp_path / "m"), rows(tmp_path / "d.jsonl", chat=True)
    plain, before = measured(place, data), open_weights(place).settings_sha256()
    further = place / "additional_chat_templates" / "default.jinja"
    further.parent.mkdir()
    further.write_text(CHAT.replace("[end]", "[and so on]"))
    wanted = measured(place, data)
    assert wanted != plain and open_weights(place).settings_sha256() != before
    assert forge(f"merge --models {place} out").code == 0
    assert measured(tmp_path / "out", data) == wanted
    further.write_text(CHAT)
    result = forge("merge out/recipe.yml again")
    assert result.code == 4 and "were changed" in result.err


def test_a_cached_fitness_is_of_these_settings(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(family(), models)
    run_evolution(begin(models, tmp_path / "one", enable_caching=True))
    for name in ("base", *PARENTS):
        edit(models / name / "config.json", rms_norm_eps=0.5)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "fitness_cache.jsonl", tmp_path / "two")
    run_evolution(begin(models, tmp_path / "two", enable_caching=True))
    for old, new in zip(*(journal(tmp_path / name) for name in ("one", "two")), strict=True):
        assert old["key"] == new["key"] and old["score"]["raw"] != new["score"]["raw"]


def test_the_head_of_a_token_that_only_a_tied_model_has(tmp_path: Path) -> None:
    state, config = tuned(1), family_of("llama")[1]
    own = {k: v for k, v in tuned(2).items() if k != "lm_head.weight"}
    for name, tensors, tied in (("a", state, False), ("b", own, True)):
        place = save(tmp_path / name, tensors, {**config, "tie_word_embeddings": tied})
        with_tokens(place, {f"w{i}": i for i in range(46)}, ["<x>"] if tied else [])
    embedding = own["model.embed_tokens.weight"][46]
    for first, second in ("ab", "ba"):
        models = [{"model": str(tmp_path / name)} for name in (first, second)]
        merged = merge(Recipe(merge_method="linear", models=models, tokenizer="union"))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            torch.testing.assert_close(merged[name][46], embedding)


def test_a_special_token_stays_special_in_a_union(tmp_path: Path) -> None:
    config = family_of("llama")[1]
    for n, name in enumerate("ab"):
        place = save(tmp_path / name, tuned(n), config)
        with_tokens(place, {f"w{i}": i for i in range(46)}, ["<x>"] if n else [])
        content = json.loads((place / "tokenizer.json").read_text())
        flags = {"special": True, "normalized": False, "rstrip": True}
        content["added_tokens"] = [{**entry, **flags} for entry in content["added_tokens"]]
        (place / "tokenizer.json").write_text(json.dumps(content))
    models = [{"model": str(tmp_path / name)} for name in "ab"]
    write(merge(Recipe(merge_method="linear", models=models, tokenizer="union")), tmp_path / "out")
    added = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
    assert added[0]["content"] == "<x>" and added[0]["special"] and added[0]["rstrip"]
    known = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert known["added_tokens_decoder"]["46"]["special"]
