"""The head of a card: whose merge a model is, as a hub reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_forge.model.card import card_head, names, read_head


def head(text: str) -> dict[str, Any]:
    before, block, after = f"{text}\n".split("---\n", 2)
    assert before == after == ""
    return dict(yaml.safe_load(block))


def model(folder: Path, card: str = "", **config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if card:
        (folder / "README.md").write_text(card)
    return str(folder)


def test_a_parent_has_its_id_of_the_hub_or_the_name_of_its_folder(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--a-name" / "snapshots" / ("0" * 40)
    assert names(model(cached)) == ["owner/a-name"]
    assert names(model(tmp_path / "x", _name_or_path="owner/x-1")) == ["owner/x-1"]
    assert names(model(tmp_path / "y", "---\nmodel_name: me/y\n---\n# y\n")) == ["me/y"]
    index = "---\nmodel-index:\n- name: me/z\n---\n"
    assert names(model(tmp_path / "z", index)) == ["me/z"]
    made_from = "---\nbase_model: somebody/else\n---\n"
    assert names(model(tmp_path / "fine tuned (2)", made_from)) == ["fine-tuned-2"]
    assert names(str(tmp_path / "x" / "config.json")) == ["owner/x-1"]


@pytest.mark.parametrize(
    "name", ["/home/me/x", "../x/y", "./x", "../x", "a b/c", 7, None, ["a/b"], ""]
)
def test_no_path_is_taken_for_an_id(tmp_path: Path, name: Any) -> None:
    ref = model(tmp_path / "own", f"---\nmodel_name: {json.dumps(name)}\n---\n", _name_or_path=name)
    assert names(ref) == ["own"]


@pytest.mark.parametrize("card", ["---\n: [\n---\n", "---\n- a\n---\n", "# none", "---\nendless"])
def test_a_card_that_says_nothing_is_no_error(tmp_path: Path, card: str) -> None:
    ref = model(tmp_path / "own", card)
    (tmp_path / "own" / "config.json").write_text("{")
    assert names(ref) == ["own"]


def test_the_head_lists_every_part_of_a_merge_once(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b", _name_or_path="owner/b")
    said = head(card_head([a, f"{a}+{b}"], {"model_type": "llama"}, ("merge", "evolution")))
    assert said == {
        "base_model": ["a", "owner/b"],
        "base_model_relation": "merge",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["merge", "evolution", "agent-forge"],
    }
    assert str(tmp_path) not in card_head([a, b], {})


def test_the_library_is_the_one_that_opens_it() -> None:
    assert head(card_head(["a"], {"model_type": "agent_forge"}))["library_name"] == "agent-forge"
    assert "library_name" not in head(card_head(["a"], {"model_type": "nobody_knows"}))
    assert "library_name" not in head(card_head(["a"], {}))


def test_a_head_is_read_back(tmp_path: Path) -> None:
    text = card_head(["123", "yes", "a: b"], {"model_type": "qwen2"})
    place = Path(model(tmp_path / "m", f"{text}\n# Title\n\n---\nnot: this\n---\n"))
    assert read_head(place) == head(text) and head(text)["base_model"] == ["123", "yes", "a-b"]
    (place / "README.md").write_text("# none")
    assert read_head(place) is None and read_head(tmp_path) is None
