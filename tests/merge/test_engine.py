"""The engine: whole models, in memory and on disk, from several families of parents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotEnough, NotFinite
from agent_forge.merge import output
from agent_forge.merge.combos import ALL, combo_name
from agent_forge.merge.engine import MergedWeights, Parents, merge
from agent_forge.merge.output import write
from agent_forge.merge.recipe import Recipe, read_recipe
from agent_forge.model.folder import open_weights
from agent_forge.store import files
from tests.support.merge_models import NAMES, family, make_models, recipe, save, tuned, write_combos

FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "gemma3", "forge")


def in_memory(kind: str = "llama") -> Parents:
    return Parents({name: tuned(i, kind) for i, name in enumerate(NAMES)})


def combo(number: int = 0, **fields: Any) -> Recipe:
    models = [{"model": name} for name in NAMES[1:]]
    return Recipe.model_validate(
        {"models": models, "base_model": "base", "combo": number, **fields}
    )


def load(folder: Path, kind: str) -> torch.Tensor:
    """Open a folder as a user would, and return the logits of a short text."""
    if kind == "forge":
        from agent_forge.model.hf import ForgeForCausalLM

        model: Any = ForgeForCausalLM.from_pretrained(folder)
    else:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    logits: torch.Tensor = model(torch.tensor([[1, 2, 3]])).logits
    return logits


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_eight_combos_load_and_are_finite(kind: str, tmp_path: Path) -> None:
    root = make_models(tmp_path / "models", kind)
    written = write_combos(recipe(root, "combo", combo=0), tmp_path / "out")
    assert sorted(written) == list(ALL)
    logits = [load(written[n].folder, kind) for n in ALL]
    assert all(bool(x.isfinite().all()) for x in logits)
    assert len({files.sha256_of(written[n].folder / "model.safetensors") for n in ALL}) > 4


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["linear", "ties", "della", "sce", "karcher", "tsv_m", "swudi"])
def test_methods_on_networks_with_normed_queries_and_tied_heads(
    kind: str, method: str, tmp_path: Path
) -> None:
    """Written, opened again, and what it says is near what its parents say."""
    root = make_models(tmp_path / "models", kind)
    parameters = {"density": 0.5} if method == "della" else {}
    write(merge(recipe(root, method, parameters=parameters)), tmp_path / "out")
    tensors = open_weights(tmp_path / "out")
    assert any("q_norm" in name for name in tensors) and "lm_head.weight" not in tensors
    found, base = (load(f, kind).detach() for f in (tmp_path / "out", root / "base"))
    assert not torch.equal(found, base)
    assert float((found - base).norm()) < 0.6 * float(base.norm())


@pytest.mark.parametrize("number", ALL)
def test_one_combo_is_the_same_alone_and_among_eight(number: int) -> None:
    parents = in_memory()
    alone = merge(combo(number), parents)
    eight = merge(combo(), in_memory())
    together = {name: eight.combos(name)[number] for name in eight}
    assert set(alone) == set(together)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_few_versions_of_a_large_tensor_are_held_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_models(tmp_path / "models")
    whole = write_combos(recipe(root, "combo", combo=0), tmp_path / "whole")
    monkeypatch.setattr(output, "TOGETHER_BYTES", 7000)
    calls: list[tuple[str, int]] = []
    real = MergedWeights.combos

    def combos(self: MergedWeights, name: str, which: Any = ALL) -> Any:
        calls.append((name, len(which)))
        return real(self, name, which)

    monkeypatch.setattr(MergedWeights, "combos", combos)
    parts = write_combos(recipe(root, "combo", combo=0), tmp_path / "parts")
    assert {count for _, count in calls} > {8} and len(calls) > len({name for name, _ in calls})
    assert all(parts[n].sha256 == whole[n].sha256 for n in ALL)


def test_the_base_may_be_the_mean() -> None:
    merged = merge(combo(4, base_model=None), in_memory())
    assert all(bool(merged[name].isfinite().all()) for name in merged)


def test_slerp_of_the_whole_model() -> None:
    by_tensor = merge(combo(4, parameters={"drop_rate": 0.0}), in_memory())
    whole = merge(combo(4, parameters={"drop_rate": 0.0, "whole_model": True}), in_memory())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(by_tensor[name], whole[name])
    torch.testing.assert_close(by_tensor[name], whole[name], rtol=0.05, atol=0.01)


HUGE = torch.linspace(1.7e38, 3.4e38, 50)


def test_a_combo_that_cannot_be_used_becomes_the_mean(tmp_path: Path) -> None:
    """DARE overflows here, and what was made with TIES is not said to have done the same."""
    same = torch.arange(50.0)
    states = [{"w": HUGE, "v": same}, {"w": -HUGE, "v": same}, {"w": 0 * HUGE, "v": 0 * same}]
    names = [str(save(tmp_path / str(i), s, {})) for i, s in enumerate(states)]
    models = [{"model": n, "parameters": {"weight": i}} for i, n in enumerate(names[:2], 1)]
    fields = {"base_model": names[2], "models": models, "combo": 0}
    written = write_combos(Recipe.model_validate(fields), tmp_path / "out", which=(0, 2))
    for n, one in written.items():  # layers by DARE or by TIES
        overflows = combo_name(n).split("-")[1] == "dare"
        assert one.notes == ([("w", "NaN or infinity", n)] if overflows else []), combo_name(n)
        assert ("NaN" in (one.folder / "README.md").read_text()) == overflows
        assert bool(open_weights(one.folder)["w"].isfinite().all())


def test_a_constant_combo_becomes_the_mean_unless_the_parents_are_constant() -> None:
    same = {"w": torch.arange(4.0), "n": torch.ones(4)}
    base = {"w": torch.zeros(4), "n": torch.ones(4)}
    models = [{"model": "a"}, {"model": "b"}]
    one = Recipe.model_validate(
        {"base_model": "z", "models": models, "combo": 0, "parameters": {"drop_rate": 0.9999}}
    )
    merged = merge(one, Parents({"a": same, "b": same, "z": base}))
    for _ in range(2):
        assert torch.equal(merged["n"], torch.ones(4))
        assert torch.equal(merged["w"], torch.arange(4.0))
    assert merged.notes == [("w", "no variance", 0)]


def test_a_constant_result_of_a_method_is_what_was_asked_for() -> None:
    scale = [{"filter": "mlp", "value": 0.0}, {"value": 1.0}]
    data = {"merge_method": "passthrough", "models": [{"model": "a"}]}
    merged = merge(Recipe.model_validate({**data, "parameters": {"scale": scale}}), in_memory())
    for name in merged:
        assert torch.equal(merged[name], tuned(1)[name] * (".mlp." not in name)), name
    assert merged.notes == []


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "nuslerp"])
def test_a_method_that_gives_infinity_is_an_error(method: str) -> None:
    models = [{"model": "a"}, {"model": "b"}]
    data = {"merge_method": method, "base_model": "c", "models": models}
    parents = Parents({"a": {"w": HUGE}, "b": {"w": -HUGE}, "c": {"w": -HUGE}})
    data["parameters"] = {"weight": 3} | ({"normalize": False} if method == "linear" else {})
    with pytest.raises(NotFinite, match=f"{method} gives NaN or infinity for w"):
        merge(Recipe.model_validate(data), parents)["w"]


@pytest.mark.parametrize("weights", [(1, -1), (0, 0)])
@pytest.mark.parametrize("method", ["linear", "multislerp"])
def test_weights_that_sum_to_zero(method: str, weights: tuple[int, int]) -> None:
    models = [{"model": n, "parameters": {"weight": w}} for n, w in zip("ab", weights, strict=True)]
    one = Recipe.model_validate({"merge_method": method, "models": models})
    with pytest.raises(ConfigError, match=f"{method}: the weights sum to zero"):
        merge(one, in_memory())["lm_head.weight"]


@pytest.mark.parametrize("method", [2, "linear", "ties"])
@pytest.mark.parametrize("broken", ["b", "base"])
def test_a_parent_with_nan_is_named(method: int | str, broken: str) -> None:
    parents = in_memory()
    state = tuned(1)
    state["model.norm.weight"][0] = float("nan")
    parents[broken] = Parents({broken: state})[broken]
    chosen = {"combo": method} if isinstance(method, int) else {"merge_method": method}
    models = [{"model": name} for name in NAMES[1:]]
    one = Recipe.model_validate({"models": models, "base_model": "base", **chosen})
    with pytest.raises(DamagedFile, match=rf"^{broken} is damaged: model\.norm\.weight holds NaN"):
        merge(one, parents)["model.norm.weight"]


def test_whole_numbers_have_to_agree() -> None:
    one = {"w": torch.rand(3), "steps": torch.tensor([4])}
    two = {"w": torch.rand(3), "steps": torch.tensor([5])}
    linear = Recipe.model_validate(
        {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}
    )
    assert merge(linear, Parents({"a": one, "b": dict(one)}))["steps"] == 4
    with pytest.raises(ConfigError, match="whole numbers"):
        merge(linear, Parents({"a": one, "b": two}))["steps"]


# -- layers ---------------------------------------------------------------------------------------


def test_layers_can_be_named(tmp_path: Path) -> None:
    merged = merge(combo(2, layers={"0": 2, "1": 0}), in_memory())
    plain = merge(combo(2, layers={"0": 0}), in_memory())
    b = tuned(2)
    for name in merged:
        wanted = b[name] if ".layers.0." in name else plain[name]
        assert torch.equal(merged[name], wanted), name


def test_layers_that_were_chosen_can_be_named() -> None:
    free = merge(combo(0), in_memory())
    chosen = free.chosen_layers(0)
    assert set(chosen) == {"0", "1"}
    named = merge(combo(0, layers=chosen), in_memory())
    assert all(torch.equal(named[name], free[name]) for name in named)


def test_layers_without_data_go_to_the_most_central() -> None:
    """Parents that agree, in layer 1 only: there sparse DARE is further from them than they are."""
    parents = in_memory()
    shared = tuned(9, scale=0.5)
    states = [tuned(i) for i in (1, 2, 3)]
    for state in states:
        for name in state:
            if ".layers.1." in name:
                state[name] = shared[name] + 0.1 * (state[name] - tuned(0)[name])
    parents.update(Parents(dict(zip("abc", states, strict=True))))
    chosen = merge(combo(0), parents).chosen_layers(0)
    assert chosen["0"] == 0 and chosen["1"] > 0
    merged = merge(combo(0), parents)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(merged[name], states[chosen["1"] - 1][name])


# -- on disk --------------------------------------------------------------------------------------


def test_a_folder_from_which_the_same_bytes_can_be_made(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models", dtype=torch.bfloat16)
    (root / "base" / "tokenizer.json").write_text('{"model": {"vocab": {"x": 0}}}')
    first = write(
        merge(recipe(root, "dare_ties", seed=3, parameters={"density": 0.4})), tmp_path / "one"
    )
    again = write(merge(read_recipe(tmp_path / "one" / "recipe.yml")), tmp_path / "two")
    assert first.sha256 == again.sha256 and first.bytes == again.bytes > 0
    assert {p.name for p in (tmp_path / "one").iterdir()} == {
        *("model.safetensors", "config.json", "tokenizer.json", "recipe.yml", "README.md"),
        "manifest.json",
    }
    files.verify(tmp_path / "one")
    card = (tmp_path / "one" / "README.md").read_text()
    for name in NAMES:
        assert files.sha256_of(root / name / "model.safetensors") in card
    assert "seed 3" in card and "dare_ties" in card
    other = write(
        merge(recipe(root, "dare_ties", seed=4, parameters={"density": 0.4})), tmp_path / "three"
    )
    assert other.sha256 != first.sha256
    assert first.peak_bytes > 0


def test_a_combo_can_be_made_again(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    eight = write_combos(recipe(root, "combo", combo=0), tmp_path / "out")
    for n in (0, 7):
        folder = tmp_path / "out" / combo_name(n)
        again = write(merge(read_recipe(folder / "recipe.yml")), tmp_path / f"again{n}")
        assert again.sha256 == eight[n].sha256


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_models(tmp_path / "models")
    merged = merge(recipe(root))
    write(merged, tmp_path / "whole")
    monkeypatch.setattr(output, "SHARD_BYTES", 5000)
    written = write(merged, tmp_path / "parts")
    assert len(written.sha256) > 2
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(written.sha256)
    whole, parts = open_weights(tmp_path / "whole"), open_weights(tmp_path / "parts")
    assert set(whole) == set(parts)
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    assert torch.equal(load(tmp_path / "parts", "llama"), load(tmp_path / "whole", "llama"))


def test_the_type_of_the_result(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models", dtype=torch.bfloat16)
    for dtype, out_dtype, expected in (
        (None, None, torch.bfloat16),
        ("float32", None, torch.float32),
        ("float32", "float16", torch.float16),
    ):
        merged = merge(recipe(root, dtype=dtype, out_dtype=out_dtype))
        assert {spec.dtype for spec in merged.specs.values()} == {expected}
        assert merged["lm_head.weight"].dtype == expected
        if dtype:
            assert merged.config["dtype"] == str(expected).removeprefix("torch.")


def test_stacked_layers_change_the_config_and_load(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    parts = [
        {"sources": [{"model": str(root / n), "layer_range": r}]}
        for n, r in (("a", [0, 2]), ("b", [1, 2]))
    ]
    merged = merge(Recipe.model_validate({"merge_method": "passthrough", "slices": parts}))
    write(merged, tmp_path / "out")
    assert merged.config["num_hidden_layers"] == 3
    assert bool(load(tmp_path / "out", "llama").isfinite().all())


def test_a_tied_and_an_untied_model(tmp_path: Path) -> None:
    _, config = family("llama")
    tied = {k: v for k, v in tuned(1).items() if k != "lm_head.weight"}
    save(tmp_path / "tied", tied, {**config, "tie_word_embeddings": True})
    save(tmp_path / "free", tuned(2), config)
    models = [{"model": str(tmp_path / n)} for n in ("tied", "free")]
    merged = merge(Recipe.model_validate({"merge_method": "linear", "models": models}))
    head = (tied["model.embed_tokens.weight"] + tuned(2)["lm_head.weight"]) / 2
    torch.testing.assert_close(merged["lm_head.weight"], head)
    assert merged.config["tie_word_embeddings"] is False
    both = [
        {"model": str(tmp_path / "tied")},
        {"model": str(save(tmp_path / "t2", tied, {**config, "tie_word_embeddings": True}))},
    ]
    assert "lm_head.weight" not in merge(
        Recipe.model_validate({"merge_method": "linear", "models": both})
    )


def test_nothing_is_overwritten_unless_told(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    (tmp_path / "out").mkdir()
    with pytest.raises(AlreadyExists):
        write(merge(recipe(root)), tmp_path / "out")
    write(merge(recipe(root)), tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="is a parent"):
        write(merge(recipe(root)), root / "a", force=True)


def test_a_memory_limit_is_checked_before_the_work(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    with pytest.raises(NotEnough, match="MB of memory"):
        write(merge(recipe(root)), tmp_path / "out", max_ram=1_000_000)
    assert not (tmp_path / "out").exists()
    ceiling = output.anonymous_bytes() + 500_000_000
    written = write(merge(recipe(root)), tmp_path / "out", max_ram=ceiling)
    assert written.peak_bytes < ceiling


def test_a_parent_that_is_not_what_the_recipe_says(tmp_path: Path) -> None:
    root = make_models(tmp_path / "models")
    write(merge(recipe(root)), tmp_path / "one")
    state = load_file(root / "a" / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, root / "a" / "model.safetensors")
    with pytest.raises(DamagedFile, match="the recipe says"):
        write(merge(read_recipe(tmp_path / "one" / "recipe.yml")), tmp_path / "two")
    assert not (tmp_path / "two").exists()
