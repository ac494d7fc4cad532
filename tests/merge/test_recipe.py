"""Recipes: mergekit's YAML is read as it is, and what has no effect is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agent_forge.errors import ConfigError
from agent_forge.merge.engine import Parents, merge
from agent_forge.merge.plan import make_plan
from agent_forge.merge.recipe import (
    Recipe,
    parse_recipe,
    read_recipe,
    resolve,
    to_mergekit,
    to_yaml,
)

TWO: dict[str, Any] = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}
STACK: dict[str, Any] = {"merge_method": "passthrough", "models": [{"model": "a"}]}
CRUMBS: dict[str, Any] = {"merge_method": "breadcrumbs", "base_model": "base"}
LAYERS = 3


def state(value: float, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in ("attn", "mlp")]
    everything = ["model.embed_tokens.weight", *names, "model.norm.weight", "lm_head.weight"]
    return {name: torch.full((2, 2), value + n) for n, name in enumerate(everything)}


def parents() -> Parents:
    return Parents({"a": state(0.0), "b": state(100.0), "base": state(1000.0)})


def plan(text: str) -> dict[str, Any]:
    return dict(make_plan(parse_recipe(text), parents()).jobs)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"merge_methd": "linear"}, "merge_methd'; did you mean 'merge_method'"),
        ({"merge_method": "tie"}, "did you mean 'ties'"),
        ({"merge_method": "dela"}, "unknown merge_method 'dela'"),
        ({"parameters": {"wieght": 1}}, "no parameter 'wieght'.*did you mean 'weight'"),
        ({"parameters": {"density": 0.5}}, "linear has no parameter 'density'"),
        ({"parameters": {"weight": "heavy"}}, "'heavy' is not a finite number"),
        ({"parameters": {"weight": math.inf}}, "parameters.weight: inf is not a finite number"),
        ({"parameters": {"weight": [1, math.nan]}}, "nan is not a finite number"),
        ({"parameters": {"weight": 1e39}}, "is not a finite number"),
        ({"parameters": {"normalize": 3}}, "3 is not true or false"),
        ({"parameters": {"weight": {"vale": 1}}}, "conditional value"),
        ({"parameters": {"weight": []}}, r"parameters\.weight: the list is empty"),
        ({"parameters": {"weight": {"value": []}}}, "the list is empty"),
        ({"parameters": {"weight": [1, {"value": 2}]}}, "numbers, or conditional values, not both"),
        ({"parameters": {"weight": [[1], [2]]}}, "numbers, or conditional values, not both"),
        ({**STACK, "parameters": {"scale": [None, 1]}}, "numbers, or conditional values"),
        ({"merge_method": "slerp", "parameters": {"t": 1.5}}, "1.5 is not between 0.0 and 1.0"),
        ({**CRUMBS, "parameters": {"density": 1.1}}, "1.1 is not between"),
        ({**CRUMBS, "parameters": {"density": [0.1, -0.1]}}, "-0.1 is not between"),
        ({**CRUMBS, "parameters": {"gamma": -1}}, "-1.0 is not between"),
        ({"merge_method": "karcher", "parameters": {"max_iter": 2.5}}, "2.5 is no whole number"),
        ({"chat_template": "auto"}, "unknown key 'chat_template'"),
        ({"modules": {}}, "unknown key 'modules'"),
        ({"dtype": "bfloat15"}, "did you mean 'bfloat16'"),
        ({"models": []}, "exactly one of models and slices"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "listed twice"),
        ({"merge_method": "ties"}, "ties needs a base_model"),
        ({"merge_method": "passthrough"}, "takes exactly 1"),
        ({"merge_method": "nuslerp", "base_model": "b"}, "takes exactly 2"),
        (
            {"merge_method": "sce", "base_model": "b", "parameters": {"top": 1}},
            "no parameter 'top'",
        ),
        (
            {"merge_method": "ram", "base_model": "b", "parameters": {"epsilon": -1}},
            "epsilon: -1.0 is not between",
        ),
        ({"merge_method": "nearswap", "models": [{"model": "a"}]}, "nearswap needs a base_model"),
        ({"merge_method": "combo"}, "go together"),
        ({"combo": 6}, "go together"),
        ({"merge_method": "combo", "combo": 1, "layers": {"0": 1}}, "FrankenMerge alone"),
        ({"merge_method": "combo", "combo": 0, "layers": {"0": 3}}, "1 to 2 are the models"),
        ({"merge_method": "combo", "combo": 0, "parameters": {"drop_rate": 1}}, "not between"),
        ({"merge_method": "combo", "combo": 0, "parameters": {"keep": 0}}, "not between"),
        ({"tokenizer": "base", "tokenizer_source": "base"}, "say the same"),
        ({"tokenizer": {"source": "base", "tokens": {}}}, "tokenizer.tokens"),
        (
            {"models": [{"model": "a", "parameters": {"normalize": True}}, {"model": "b"}]},
            "is of the whole merge",
        ),
        (
            {"models": [{"model": "a", "weight": 1}, {"model": "b"}]},
            "unknown key 'models.0.weight'; known: model, parameters",
        ),
        ({"models": [{"model": {"model": {"path": "a", "revision": "x"}}}]}, "a valid string"),
    ],
)
def test_what_a_recipe_cannot_say(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_recipe(yaml.safe_dump({**TWO, **change}))


def test_a_recipe_without_a_method() -> None:
    with pytest.raises(ConfigError, match="merge_method is missing; known: linear, slerp"):
        parse_recipe(yaml.safe_dump({"models": TWO["models"]}))


@pytest.mark.parametrize("own", [False, True])
def test_a_filter_that_matches_nothing(own: bool) -> None:
    setting = [{"filter": "atn", "value": 1}, {"filter": "lm_head", "value": 2}, {"value": 3}]
    given = {"parameters": {"weight": setting}}
    models = [{"model": "a", **(given if own else {})}, {"model": "b"}]
    with pytest.raises(ConfigError, match=r"parameters\.weight: the filter 'atn' matches no"):
        plan(yaml.safe_dump({**TWO, "models": models, **({} if own else given)}))
    setting[0]["filter"] = "attn"
    assert plan(yaml.safe_dump({**TWO, **given}))


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_recipe(tmp_path / "none.yml")


def test_what_mergekit_users_write_is_accepted() -> None:
    recipe = parse_recipe(
        """
        models:
          - model: {model: {path: a}, lora: {path: x}}
            parameters:
          - model: b
            parameters: {density: [1, 0.7, 0.1], weight: 1e-1}
        base_model: base
        merge_method: ties
        parameters: {normalize: true, int8_mask: true}
        dtype: torch.bfloat16
        tokenizer_source: union
        """
    )
    assert recipe.models[0].model == "a+x"
    assert recipe.dtype == "bfloat16"
    choice = recipe.vocabulary()
    assert choice is not None and choice.source == "union"


@pytest.mark.parametrize(
    ("setting", "name", "position", "value"),
    [
        (0.3, "x", 0.5, 0.3),
        ("1e-3", "x", 0.5, 0.001),
        ([0, 1], "x", 0.25, 0.25),
        ([0, 0.5, 0], "x", 0.5, 0.5),
        ([0, 1, 0], "x", 1.0, 0.0),
        ([7], "x", 0.9, 7.0),
        ({"value": 2}, "x", 0.0, 2.0),
        ([{"filter": "mlp", "value": [0, 10]}, {"value": 3}], "l.mlp.w", 0.5, 5.0),
        ([{"filter": "mlp", "value": [0, 10]}, {"value": 3}], "l.attn.w", 0.5, 3.0),
        ([{"filter": "mlp", "value": 1}], "l.attn.w", 0.5, None),
        ([], "x", 0.5, None),
    ],
)
def test_values(setting: Any, name: str, position: float, value: float | None) -> None:
    assert resolve(setting, name, position, 1.0) == value


def test_gradients_run_over_the_layers_and_filters_choose_tensors() -> None:
    jobs = plan(
        """
        merge_method: linear
        models:
          - model: a
            parameters: {weight: [0, 1]}
          - model: b
            parameters: {weight: [{filter: attn, value: 5}]}
        parameters: {weight: 9}
        """
    )
    weights = {name: job.params["weight"] for name, job in jobs.items()}
    assert [weights[f"model.layers.{i}.attn.weight"] for i in range(3)] == [
        [0, 5],
        [0.5, 5],
        [1, 5],
    ]
    assert weights["model.layers.1.mlp.weight"] == [0.5, 9]
    assert weights["model.norm.weight"] == [0, 9]  # outside the layers the first value stands


def test_slices_stack_layers() -> None:
    recipe = parse_recipe(
        """
        merge_method: passthrough
        slices:
          - sources: [{model: a, layer_range: [0, 2]}]
          - sources: [{model: b, layer_range: [1, 3], parameters: {scale: 2}}]
        """
    )
    merged = merge(recipe, parents())
    a, b = state(0.0), state(100.0)
    assert merged.plan.layers == (0, 1, 1, 2)
    assert torch.equal(merged["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"], 2 * b["lm_head.weight"])
    for out, (source, layer, scale) in enumerate([(a, 0, 1), (a, 1, 1), (b, 1, 2), (b, 2, 2)]):
        wanted = source[f"model.layers.{layer}.mlp.weight"] * scale
        assert torch.equal(merged[f"model.layers.{out}.mlp.weight"], wanted)


@pytest.mark.parametrize(
    ("slices", "told"),
    [
        ("[{sources: [{model: a, layer_range: [0, 4]}]}]", "has 3 layers, not 4"),
        ("[{sources: [{model: a, layer_range: [-1, 2]}]}]", r"layer_range\.0.* \(got -1\)"),
        ("[{sources: [{model: a, layer_range: [2, 2]}]}]", "at least one"),
        (
            "[{sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [0, 2]}]}]",
            "equally many",
        ),
    ],
)
def test_slices_that_do_not_fit(slices: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(f"merge_method: linear\nslices: {slices}")


def test_a_base_that_is_not_listed_takes_part_where_mergekit_adds_it() -> None:
    linear = plan(yaml.safe_dump({**TWO, "base_model": "base"}))
    assert [ref for ref, _ in linear["model.norm.weight"].inputs] == ["a", "b", "base"]
    text = "merge_method: slerp\nbase_model: b\nmodels: [{model: a}, {model: b}]"
    assert [ref for ref, _ in plan(text)["model.norm.weight"].inputs] == ["b", "a"]
    text = "merge_method: ties\nbase_model: b\nmodels: [{model: a}, {model: b}]"
    job = plan(text)["model.norm.weight"]
    assert ([ref for ref, _ in job.inputs], job.base[0]) == (["a"], "b")


def test_yaml_and_back() -> None:
    recipe = Recipe.model_validate({"models": TWO["models"], "combo": "110", "seed": 5})
    assert parse_recipe(to_yaml(recipe)) == recipe
    assert recipe.canonical_hash() == parse_recipe(to_yaml(recipe)).canonical_hash()


def test_export_to_mergekit() -> None:
    recipe = Recipe.model_validate({**TWO, "merge_method": "slerp", "seed": 3})
    exported = yaml.safe_load(to_mergekit(recipe))
    assert exported == {
        "merge_method": "slerp",
        "models": TWO["models"],
        "base_model": "a",
        "parameters": {"t": 0.5},
    }
    one, other = (merge(r, parents()) for r in (recipe, parse_recipe(to_mergekit(recipe))))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for data in (
        {"models": TWO["models"], "combo": 1},
        {**TWO, "merge_method": "slerp", "models": [{"model": n} for n in ("a", "b", "base")]},
    ):
        with pytest.raises(ConfigError):
            to_mergekit(Recipe.model_validate(data))
