"""`forge compress`: models of any maker, and of ours, in one small file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.evals.model_under_test import ItemScores
from agent_forge.model.locate import locate_model
from agent_forge.model.opened import open_model
from agent_forge.phases.compress import retention_of
from agent_forge.quant.codecs import StepCodec
from agent_forge.quant.packed import packing_of
from agent_forge.store import files
from agent_forge.store.container import read_container
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import learned_record
from tests.support.command_line import Forge
from tests.support.eval_models import FAMILIES, own_model
from tests.support.tokenizers import CHAT, byte_tokenizer

STORIES = [
    f"{name} has {n} red {thing} and a dog. " * 3
    for name in ("Ann", "Bob", "Cem", "Dora")
    for thing in ("balls", "cups", "hats")
    for n in range(8)
]
LARGER = {"llama": {"hidden_size": 48, "intermediate_size": 64}, "gpt2": {"n_embd": 48}}


def model(place: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **{**FAMILIES[kind], **LARGER[kind], **changes})
    AutoModelForCausalLM.from_config(shape).save_pretrained(place)
    byte_tokenizer(CHAT).save_pretrained(place)
    return place


def taught(place: Path) -> Path:
    """A Llama that knows its texts, so that rounding costs something."""
    parent = model(place, "llama")
    network, tokenizer = AutoModelForCausalLM.from_pretrained(parent), byte_tokenizer(CHAT)
    rows = torch.tensor([tokenizer(text).input_ids[:40] for text in STORIES])
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for start in range(80):
        batch = rows[start % 6 :: 6]
        optimizer.zero_grad()
        network(batch, labels=batch).loss.backward()
        optimizer.step()
    network.save_pretrained(parent)
    return parent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    return path


def parent_of(kind: str, tmp_path: Path, storage: ModelStorage) -> Path:
    if kind == "ours":
        return own_model(storage, "a", 1)
    if kind == "tied":
        return model(tmp_path / "parent", "llama", tie_word_embeddings=True)
    return model(tmp_path / "parent", kind)


@pytest.mark.parametrize("kind, ratio", [("llama", 6), ("gpt2", 6), ("tied", 6), ("ours", 5)])
def test_a_file_has_its_size_and_opens_alone_as_what_was_measured(
    kind: str, ratio: int, tmp_path: Path, data: Path, storage: ModelStorage, forge: Forge
) -> None:
    parent, out = parent_of(kind, tmp_path, storage), tmp_path / "small.forge"
    result = forge(f"compress {parent} {out} --ratio {ratio} --data {data} --json")
    assert result.code == 0, result.err
    told = result.document
    assert math.isclose(told["ratio"], ratio, rel_tol=0.02)
    assert told["file_bytes"] == out.stat().st_size > told["tokenizer_bytes"] > 0
    assert told["ratio_with_tokenizer"] == told["fp32_bytes"] / told["file_bytes"] < told["ratio"]
    assert math.isclose(told["bits_per_weight"], 32 / told["ratio"])
    (tmp_path / "elsewhere").mkdir()
    moved = out.rename(tmp_path / "elsewhere" / "m.forge")
    line = ["eval", str(moved), "--data", str(data), "--split", "verdict", "--json"]
    environment = {**os.environ, "FORGE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "agent_forge", *line]
    fresh = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    row = json.loads(fresh.stdout)["domains"][0]
    recorded = told["comparison"]["overall"]["bits_per_byte"]["candidate"]
    assert math.isclose(row["bits_per_byte"], recorded, rel_tol=1e-4)
    assert forge(f"generate {moved} 12+1 --max-tokens 3").code == 0


def test_steps_differ_by_kind_and_tied_or_turned_matrices_are_written_once(
    tmp_path: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "gpt2"), tmp_path / "small.forge"
    assert forge(f"compress {parent} {out} --ratio 5").code == 0
    folder = Path(locate_model(out))
    packing = packing_of(files.read_json(folder / "config.json"), folder)
    assert packing and not packing.activation_bits
    assert all(isinstance(m.codec, StepCodec) for m in packing.matrices.values())
    assert len({m.codec.name for m in packing.matrices.values()}) > 2
    assert packing.matrices["transformer.h.0.mlp.c_fc.weight"].turned
    assert "lm_head.weight" not in packing.matrices
    before, after = (open_model(place).network.state_dict() for place in (parent, folder))
    expected = packing.rounded({name: before[name] for name in packing.matrices})
    assert all(torch.equal(after[name], weight) for name, weight in expected.items())
    assert "README.md" not in read_container(out)


def test_what_a_model_of_ours_has_learned_is_in_the_file(
    tmp_path: Path, data: Path, storage: ModelStorage, forge: Forge
) -> None:
    parent, folder = own_model(storage, "a", 1), tmp_path / "copy"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_bytes((parent / name).read_bytes())
    learned = {"strategies": ["a"], "its secret": 1}
    (folder / "learned.json").write_text(json.dumps({"learned": learned}))
    assert forge(f"compress {folder} {tmp_path / 'm.forge'} --ratio 5 --data {data}").code == 0
    found = learned_record(Path(locate_model(tmp_path / "m.forge")))
    assert found == {"strategies": ["a"]}


def test_training_helps_and_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, data: Path, forge: Forge
) -> None:
    parent, found, written = model(tmp_path / "parent", "gpt2"), [], []
    for name, steps in (("a", 0), ("b", 25), ("c", 25)):
        out = tmp_path / f"{name}.forge"
        how = f"--ratio 7 --data {data} --steps {steps} --rate 0.01 --seed 3 --json"
        result = forge(f"compress {parent} {out} {how}")
        assert result.code == 0, result.err
        assert math.isclose(result.document["ratio"], 7, rel_tol=0.02)
        found.append(result.document["comparison"]["overall"]["bits_per_byte"]["candidate"])
        written.append(out.read_bytes())
    assert found[1] < found[0] - 0.1 and written[1] == written[2] != written[0]


def test_retention_is_kept_by_the_smallest_file_that_does(
    tmp_path: Path, data: Path, forge: Forge
) -> None:
    parent, ratios = taught(tmp_path / "parent"), []
    for share in (0.95, 0.6):
        out = tmp_path / f"{share}.forge"
        result = forge(f"compress {parent} {out} --retention {share} --data {data} --json")
        assert result.code == 0, result.err
        assert share <= result.document["retention"]
        ratios.append(result.document["ratio"])
    assert ratios[0] < ratios[1]


def test_the_retention_that_is_told_is_that_of_the_file(
    tmp_path: Path, data: Path, forge: Forge
) -> None:
    parent, out = taught(tmp_path / "parent"), tmp_path / "small.forge"
    how = f"--retention 0.6 --data {data} --steps 40 --rate 0.01 --json"
    told = forge(f"compress {parent} {out} {how}").document["retention"]
    before, after = (
        forge(f"eval {model} --data {data} --split selection --json").document["domains"][0]
        for model in (parent, out)
    )
    nats = before["nats_per_token"] - after["nats_per_token"]
    assert before["accuracy"] is None and told == pytest.approx(math.exp(nats), abs=0.001)


def test_retention_is_of_accuracy_where_the_model_has_some() -> None:
    class Asked:
        def __init__(self, exact: bool) -> None:
            self.exact = exact

    def scores(right: list[float], loss: float) -> list[ItemScores]:
        return [ItemScores(right, [loss] * len(right), [2] * len(right))]

    questions: Any = [Asked(True)]
    texts: Any = [Asked(False)]
    before, after = scores([1, 1, 0, 0], 2.0), scores([1, 0, 0, 0], 4.0)
    assert retention_of(questions, before, after) == 0.5
    assert math.isclose(retention_of(texts, before, after), math.exp(-1))
    unable = scores([0] * 99 + [1], 2.0)
    assert math.isclose(retention_of(questions, unable, scores([0] * 100, 4.0)), math.exp(-1))


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    tmp_path: Path, data: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "new" / "small.forge"
    result = forge(f"compress {parent} {out} --ratio 6 --data {data} --dry-run --json")
    assert result.code == 0 and not out.parent.exists()
    told = result.document
    assert told["target_bytes"] == round(told["fp32_bytes"] / 6)
    assert told["least_ratio"] < 6 < told["greatest_ratio"] and told["memory_bytes"] > 0
    result = forge(f"compress {parent} {out} --retention 0.9 --dry-run")
    assert result.code == 0 and "retention" in result.out and "target" not in result.out


def test_what_cannot_be_done_is_refused_before_any_work(
    tmp_path: Path, data: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "small.forge"
    (tmp_path / "folder.forge").mkdir()
    (tmp_path / "other.forge").write_text("mine")
    for more, told in (
        (f"{tmp_path / 'out'}", "does not end in .forge"),
        (f"{out} --ratio 8 --retention 0.9", "exclude each other"),
        (f"{out} --ratio 1", "not above 1"),
        (f"{out} --ratio nan", "not above 1"),
        (f"{out} --ratio 1.5", "cannot be reached"),
        (f"{out} --ratio 100000", "cannot be reached"),
        (f"{out} --retention 0", "not above 0"),
        (f"{out} --retention 1.1", "at most 1"),
        (f"{out} --steps 5", "something to learn from"),
        (f"{out} --data {tmp_path / 'nowhere.jsonl'}", "nowhere.jsonl"),
        (f"{parent / 'inside.forge'}", "lies in the model's folder"),
        (f"{tmp_path / 'folder.forge'} --force", "is no file"),
        (f"{tmp_path / 'other.forge'}", "exists"),
        (f"{tmp_path / 'other.forge'} --force", "no model in one file"),
        (f"{tmp_path / 'other.forge' / 'x.forge'}", "below a file"),
    ):
        for dry in ("", " --dry-run"):
            result = forge(f"compress {parent} {more}{dry}")
            assert result.code == 2 and told in result.err, (more, result)
            assert not out.exists()
    assert (tmp_path / "other.forge").read_text() == "mine"
    assert forge(f"compress {tmp_path / 'nowhere'} {out}").code == 2


def test_a_file_is_replaced_by_force_alone_and_not_compressed_again(
    tmp_path: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "small.forge"
    assert forge(f"compress {parent} {out} --ratio 5").code == 0
    before = out.read_bytes()
    assert forge(f"compress {parent} {out} --ratio 6").code == 2 and out.read_bytes() == before
    again = forge(f"compress {out} {tmp_path / 'twice.forge'}")
    assert again.code == 2 and "packed already" in again.err
    told = forge(f"compress {parent} {out} --ratio 6 --force")
    assert told.code == 0 and "times smaller" in told.err and "its parent" in told.err
    assert len(out.read_bytes()) < len(before)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_file_that_scores_otherwise_does_not_take_its_place(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_forge.phases.compress import Compression

    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "small.forge"
    monkeypatch.setattr(Compression, "_rounded", lambda self, packing, state: self.tested)
    result = forge(f"compress {parent} {out} --ratio 8")
    assert result.code == 1 and "does not score what was measured" in result.err
    assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"parent"}
