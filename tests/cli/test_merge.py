"""`forge merge` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from agent_forge.merge.combos import ALL, combo_name
from agent_forge.model.card import read_head
from agent_forge.model.folder import open_weights
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.merge_models import make_models, tuned

MODELS = "--models m/a,m/b,m/c"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, forge: Forge) -> None:
    """forge has changed to tmp_path already."""
    make_models(tmp_path / "m")


def test_a_recipe_of_mergekit(forge: Forge, tmp_path: Path) -> None:
    recipe = {
        "merge_method": "ties",
        "base_model": "m/base",
        "models": [{"model": "m/a"}, {"model": "m/b", "parameters": {"weight": 0.5}}],
        "parameters": {"density": 0.5, "normalize": True, "int8_mask": True},
        "dtype": "float32",
    }
    Path("r.yml").write_text(yaml.safe_dump(recipe))
    result = forge("merge r.yml out")
    assert (result.code, result.out) == (0, "out\n")
    assert "ETA" in result.err and "/s" in result.err and "peak memory" in result.err
    files.verify(tmp_path / "out")
    again = forge("merge out/recipe.yml again --json").document["merged"][0]
    assert again["sha256"]["model.safetensors"] == files.sha256_of(Path("out/model.safetensors"))
    assert again["bytes"] > 0 and again["seconds"] > 0 and again["peak_memory_bytes"] > 0
    assert again["replaced_by_mean"] == []


def test_a_few_options_are_enough(forge: Forge) -> None:
    assert forge(f"merge {MODELS} mean").code == 0
    wanted = sum(tuned(i)[UP] for i in (1, 2, 3)) / 3
    torch.testing.assert_close(open_weights("mean")[UP], wanted)
    line = f"merge {MODELS} --base m/base --method task_arithmetic out"
    assert forge(f"{line} --set parameters.weight=0.5 --set out_dtype=bfloat16").code == 0
    base = tuned(0)[UP]
    wanted = base + sum(0.5 * (tuned(i)[UP] - base) for i in (1, 2, 3))
    assert torch.equal(open_weights("out")[UP], wanted.bfloat16()) or torch.allclose(
        open_weights("out")[UP].float(), wanted, rtol=1e-2
    )


def test_options_stand_above_the_recipe(forge: Forge) -> None:
    models = [{"model": "m/a"}, {"model": "m/b"}]
    data = {"merge_method": "dare_linear", "base_model": "m/base", "models": models, "seed": 1}
    Path("r.yml").write_text(yaml.safe_dump({**data, "parameters": {"density": 0.5}}))
    hashes = [
        forge(f"merge r.yml out{i} --json {options}").document["merged"][0]["sha256"]
        for i, options in enumerate(("", "--seed 1", "--seed 2", "--threads 1"))
    ]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]


def test_one_combo_and_all_of_them(forge: Forge) -> None:
    assert forge(f"merge {MODELS} --base m/base --combo slerp-ties-dfs one").code == 0
    result = forge(f"merge {MODELS} --base m/base --combo all eight")
    assert result.out.splitlines() == [f"eight/{combo_name(n)}" for n in ALL]
    one, other = (open_weights(f) for f in ("one", "eight/slerp-ties-dfs"))
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_dry_run_writes_nothing(forge: Forge, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = forge(f"merge {MODELS} out --dry-run")
    assert result.code == 0 and "can be merged: yes" in result.err
    assert "parameters" in result.out
    document = forge(f"merge {MODELS} --base m/base --method ties out --dry-run --json").document
    assert document["verdict"] == "yes" and document["problems"] == []
    assert {"seconds", "memory_bytes", "output_bytes", "free_bytes"} <= set(document["facts"])
    assert yaml.safe_load(document["mergekit"])["merge_method"] == "ties"
    assert forge(f"merge {MODELS} --combo 3 out --dry-run --json").document["mergekit"] is None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_that_says_no(forge: Forge) -> None:
    config = Path("m/b/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mistral"}))
    result = forge(f"merge {MODELS} out --dry-run")
    assert result.code == 2 and "different architectures" in result.out
    assert "can be merged: no" in result.err
    result = forge(f"merge {MODELS} out")
    assert result.code == 2 and "different architectures" in result.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("merge", 2, "Missing argument"),
        ("merge out", 2, "a recipe and one folder"),
        (f"merge r.yml out {MODELS}", 2, "one folder to write"),
        ("merge none.yml out", 2, "cannot read none.yml"),
        (f"merge {MODELS} --method tise out", 2, "did you mean 'ties'"),
        (f"merge {MODELS} --method ties out", 2, "needs a base_model"),
        (f"merge {MODELS} --combo 8 out", 2, "unknown combo"),
        (f"merge {MODELS} --set parameters.wight=1 out", 2, "did you mean 'weight'"),
        (f"merge {MODELS},m/none out", 2, "m/none does not exist"),
        (f"merge {MODELS} m", 2, "m holds a parent"),
        (f"merge {MODELS} . --force", 2, ". holds a parent"),
        (f"merge {MODELS} --max-ram 5 out", 5, "MB of memory"),
        (f"merge {MODELS} --base m/base out", 2, "linear has no base"),
        (f"merge {MODELS} --base m/base --method linear out", 2, "linear has no base"),
        ("merge m/a out", 2, "m/a is a folder, not a recipe"),
        (f"merge {MODELS} --set parameters.weight=.inf out", 2, "inf is not a finite number"),
    ],
)
def test_mistakes(line: str, code: int, told: str, forge: Forge) -> None:
    result = forge(line)
    assert (result.code, result.out) == (code, "")
    assert told in result.err and "Traceback" not in result.err
    assert not Path("out").exists()


def test_the_card_says_what_it_is_a_merge_of(forge: Forge) -> None:
    assert forge(f"merge {MODELS} --base m/base --method task_arithmetic out").code == 0
    head = read_head(Path("out"))
    assert head is not None and head["base_model"] == ["base", *"abc"]
    assert head["base_model_relation"] == "merge" and head["library_name"] == "transformers"
    assert head["tags"] == ["merge", "agent-forge"]


def test_force_replaces(forge: Forge) -> None:
    assert forge(f"merge {MODELS} out").code == 0
    assert forge(f"merge {MODELS} out").code == 2
    assert forge(f"merge {MODELS} --method slerp out --force").code == 0
    assert "slerp" in Path("out/README.md").read_text()
    assert forge(f"merge {MODELS} m/a --force").code == 2  # a parent


def test_warnings_are_told(forge: Forge) -> None:
    config = Path("m/b/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 3.0}))
    result = forge(f"merge {MODELS} out")
    assert result.code == 0 and "warning:" in result.err and "rope_theta" in result.err


def test_the_commands_of_the_docs_run(forge: Forge, tmp_path: Path) -> None:
    make_models(tmp_path / "here")
    for path in list(Path("here").iterdir()):
        path.rename(path.name)
    models = [{"model": "a"}, {"model": "b"}]
    Path("config.yml").write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
    text = (Path(__file__).parents[2] / "docs" / "merging.md").read_text()
    lines = [line[8:].split("#")[0] for line in text.splitlines() if line.startswith("$ forge ")]
    assert len(lines) > 5
    for line in lines:
        result = forge(f"{line} --force")
        assert result.code == 0, f"{line}: {result.err}"
