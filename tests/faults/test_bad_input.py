"""A person's mistake ends with what is wrong and an exit code: never as a defect, nor in work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.command_line import Forge, Result
from tests.merge_models import make_models

QUICK_S = 20.0  # far below what the work itself would take


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code and said these words, and nothing about a defect."""
    assert result.code == code, result
    for word in words:
        assert word in result.err, result.err
    for never in ("Traceback", "unexpected", "defect"):
        assert never not in result.err, result.err


# -- recipes --------------------------------------------------------------------------------------

# As people write it for mergekit: names and factors stand once, and `<<` brings them in.
WITH_ANCHORS = """
first_model: &first {root}/a
factor: &factor 0.5
weakened: &weakened
  parameters:
    scale:
      - filter: o_proj
        value: *factor
      - filter: down_proj
        value: *factor
      - value: 1.0
slices:
  - sources:
      - &layers
        model: *first
        layer_range: [0, 2]
  - sources:
      - <<: [*layers, *weakened]
        layer_range: [0, 1]
  - sources:
      - <<: *layers
        model: {root}/b
merge_method: passthrough
dtype: float32
"""
WITHOUT_ANCHORS = """
slices:
  - sources: [{{model: {root}/a, layer_range: [0, 2]}}]
  - sources:
      - model: {root}/a
        layer_range: [0, 1]
        parameters:
          scale: [{{filter: o_proj, value: 0.5}}, {{filter: down_proj, value: 0.5}}, {{value: 1.0}}]
  - sources: [{{model: {root}/b, layer_range: [0, 2]}}]
merge_method: passthrough
dtype: float32
"""


def laughs(levels: int) -> str:
    """Nine times the line before, again and again."""
    lines = ["l0: &l0 [lol, lol]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (laughs(30), "that its aliases stand for"),
        ("a: &a {" + ", ".join(f"k{i}: 1" for i in range(900)) + "}\n"
         + "".join(f"m{i}: {{<<: [*a, *a, *a]}}\n" for i in range(90)), "aliases stand for"),
        ("merge_method: &m [*m]", "the alias *m stands within what it stands for"),
        ("merge_method: *linear", "undefined alias 'linear'"),
        ("models: !!python/name:os.system", "tags"),
        ("dtype: float32\ndtype: float16", "'dtype' appears twice"),
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_hostile_recipe_is_not_expanded(
    forge: Forge, tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "r.yml").write_text(text)
    began = time.monotonic()
    refused(forge("merge r.yml out --dry-run"), 2, "r.yml", word)
    assert time.monotonic() - began < QUICK_S


def test_a_recipe_with_anchors_is_what_it_stands_for(forge: Forge, tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    for name, text in (("with", WITH_ANCHORS), ("without", WITHOUT_ANCHORS)):
        (tmp_path / f"{name}.yml").write_text(text.format(root=root))
    found = [forge(f"merge {n}.yml out --dry-run --json").document for n in ("with", "without")]
    assert found[0]["recipe"] == found[1]["recipe"] and found[0]["verdict"] != "no"
    assert forge("merge with.yml out").code == 0
    assert "&" not in (tmp_path / "out" / "recipe.yml").read_text()


def test_a_key_that_carries_no_anchor_is_still_unknown(forge: Forge, tmp_path: Path) -> None:
    text = WITH_ANCHORS.format(root=tmp_path).replace("&factor 0.5", "0.5").replace("*factor", "1")
    (tmp_path / "r.yml").write_text(text)
    refused(forge("merge r.yml out --dry-run"), 2, "unknown key 'factor'")
