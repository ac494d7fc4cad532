"""Where weights come from: shards, pickles, adapters, vocabularies that differ."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.errors import ConfigError, DamagedFile, HostileInput, NotFound
from agent_forge.merge.engine import Parents, merge
from agent_forge.merge.output import write
from agent_forge.merge.preflight import check_target, preflight
from agent_forge.merge.recipe import Recipe
from agent_forge.merge.vocabulary import read_tokens
from agent_forge.model.folder import open_weights
from agent_forge.model.weights import at_layer, layer_of
from tests.support.merge_models import NAMES, family, make_models, recipe, save, tuned, with_tokens

UP = "model.layers.0.mlp.up_proj.weight"


def linear(*models: Path | str, **fields: Any) -> Recipe:
    listed = [{"model": str(m)} for m in models]
    return Recipe.model_validate({"merge_method": "linear", "models": listed, **fields})


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.7.w1.weight", 3),
        ("transformer.h.11.attn.c_attn.bias", 11),
        ("h.0.ln_1.weight", 0),
        ("blocks.2.attention.q.weight", 2),
        ("model.norm.weight", None),
        ("layers.weight", None),
    ],
)
def test_layers_by_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
    assert at_layer(name, 5) == (
        name
        if layer is None
        else name.replace(f".{layer}.", ".5.", 1)
        if not name.startswith("h.")
        else "h.5.ln_1.weight"
    )


def test_pickles_and_shards_of_pickles(tmp_path: Path) -> None:
    state = tuned(1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    torch.save(state, whole / "pytorch_model.bin")
    parts.mkdir()
    table = {}
    for i, names in enumerate((list(state)[:3], list(state)[3:])):
        torch.save({n: state[n] for n in names}, parts / f"p{i}.bin")
        table |= dict.fromkeys(names, f"p{i}.bin")
    (parts / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    for folder in (whole, parts, whole / "pytorch_model.bin"):
        weights = open_weights(folder)
        assert set(weights) == set(state)
        assert all(torch.equal(weights[n], state[n]) for n in state)
        assert weights.specs[UP].shape == tuple(state[UP].shape)


def test_a_model_that_is_there_twice_is_the_one_that_transformers_takes(tmp_path: Path) -> None:
    for file, value in (("model.safetensors", 1.0), ("part.safetensors", 2.0)):
        save_file({"w": torch.full((2,), value)}, tmp_path / file)
    index = {"weight_map": {"w": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_weights(tmp_path)["w"].tolist() == [1.0, 1.0]


def test_what_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, told in ((tmp_path / "none", "does not exist"), (tmp_path / "empty", "no weights")):
        with pytest.raises(NotFound, match=told):
            open_weights(place)
    with pytest.raises(NotFound, match="does not exist"):
        open_weights(f"{tmp_path}/none+{tmp_path}/empty")


def test_an_index_cannot_reach_outside(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    for table, error in (
        ({"w": "../other.safetensors"}, HostileInput),
        ({"w": "gone.safetensors"}, DamagedFile),
        ({"w": 3}, DamagedFile),
    ):
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(error):
            open_weights(folder)
    save_file({"v": torch.ones(2)}, folder / "part.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(DamagedFile, match="'w' is missing"):
        open_weights(folder)


def test_names_of_the_first_gpt2_files(tmp_path: Path) -> None:
    state, config = family("gpt2")
    bare = {n.removeprefix("transformer."): t for n, t in tuned(1, "gpt2").items()}
    save(tmp_path / "bare", bare, config)
    save(tmp_path / "full", tuned(2, "gpt2"), config)
    merged = merge(linear(tmp_path / "bare", tmp_path / "full"))
    assert set(merged) == set(state)
    name = "transformer.h.1.attn.c_attn.weight"
    wanted = (tuned(1, "gpt2")[name] + tuned(2, "gpt2")[name]) / 2
    torch.testing.assert_close(merged[name], wanted)


# -- adapters -------------------------------------------------------------------------------------


def adapter(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    out, inner = tuned(0)[UP].shape
    g = torch.Generator().manual_seed(9)
    save_file(
        {
            f"base_model.model.{UP.removesuffix('.weight')}.lora_A.weight": torch.randn(
                2, inner, generator=g
            ),
            f"base_model.model.{UP.removesuffix('.weight')}.lora_B.weight": torch.randn(
                out, 2, generator=g
            ),
            "base_model.model.model.norm.weight": torch.full((inner,), 7.0),
        },
        folder / "adapter_model.safetensors",
    )
    layer = UP.removesuffix(".weight")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [layer], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("settings", "scale"), [({}, 2.0), ({"use_rslora": True}, 4 / 2**0.5)])
def test_an_adapter_on_its_base(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    lora = adapter(tmp_path / "lora", base_model_name_or_path=str(root / "base"), **settings)
    from agent_forge.store.tensors import read_tensors

    parts = read_tensors(lora / "adapter_model.safetensors")
    b, a = (next(t for n, t in parts.items() if f"lora_{x}" in n) for x in "BA")
    wanted = tuned(0)[UP] + scale * (b @ a)
    for place in (f"{root / 'base'}+{lora}", lora):
        weights = open_weights(str(place))
        torch.testing.assert_close(weights[UP], wanted)
        assert torch.equal(weights["model.norm.weight"], torch.full((16,), 7.0))
        assert torch.equal(weights["lm_head.weight"], tuned(0)["lm_head.weight"])
    merged = merge(linear(f"{root / 'base'}+{lora}", root / "base"))
    torch.testing.assert_close(merged[UP], (wanted + tuned(0)[UP]) / 2)
    assert weights.sha256() != open_weights(root / "base").sha256()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"x": 1}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "only LoRA"),
    ],
)
def test_adapters_that_cannot_be_applied(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    root = make_models(tmp_path / "m")
    lora = adapter(tmp_path / "lora", **settings)
    with pytest.raises(ConfigError, match=told):
        open_weights(f"{root / 'base'}+{lora}")


def test_an_adapter_alone_is_put_on_the_base_that_it_names(tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    with pytest.raises(NotFound, match="not on this machine"):
        open_weights(adapter(tmp_path / "lora"))
    lora = adapter(tmp_path / "lora2", base_model_name_or_path=str(root / "base"))
    assert torch.equal(open_weights(lora)[UP], open_weights(f"{root / 'base'}+{lora}")[UP])


@pytest.mark.parametrize("settings", [{"r": None}, {"r": 0}, {"lora_alpha": None}])
def test_an_adapter_without_a_rank_or_a_scale(settings: dict[str, Any], tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    lora = adapter(tmp_path / "lora", **settings)
    with pytest.raises(DamagedFile, match=r"adapter_config\.json is damaged: (r|lora_alpha) is"):
        open_weights(f"{root / 'base'}+{lora}")
    (lora / "adapter_config.json").write_text("[]")
    for place in (lora, f"{root / 'base'}+{lora}"):
        with pytest.raises(DamagedFile, match="not a record"):
            open_weights(place)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "norm"])
def test_an_adapter_whose_shapes_do_not_fit(part: str, tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    lora = adapter(tmp_path / "lora")
    path = lora / "adapter_model.safetensors"
    state = {n: t[:-1].clone() if part in n else t for n, t in load_file(path).items()}
    save_file(state, path)
    name = "norm" if part == "norm" else "up_proj"
    told = r"does not have the rank 2" if part == "lora_A" else rf"do not fit .*{name}\.weight of "
    with pytest.raises((ConfigError, DamagedFile), match=told):
        open_weights(f"{root / 'base'}+{lora}")


def test_an_adapter_for_another_model(tmp_path: Path) -> None:
    base = save(tmp_path / "g", tuned(0, "gpt2"), family("gpt2")[1])
    with pytest.raises(ConfigError, match="no counterpart"):
        open_weights(f"{base}+{adapter(tmp_path / 'lora')}")


# -- vocabularies ---------------------------------------------------------------------------------


@pytest.fixture
def vocabularies(tmp_path: Path) -> Path:
    """base has 46 tokens and two padding rows; a has two more, b numbers some differently."""
    root = make_models(tmp_path / "m")
    words = [f"w{i}" for i in range(46)]
    for name in NAMES:
        tokens = {w: i for i, w in enumerate(words)}
        if name == "b":
            tokens["w0"], tokens["w1"] = 1, 0
        with_tokens(root / name, tokens, ["<x>", "<y>"] if name == "a" else [])
    return root


def test_union(vocabularies: Path, tmp_path: Path) -> None:
    merged = merge(recipe(vocabularies, "task_arithmetic", tokenizer="union"))
    embed = "model.embed_tokens.weight"
    assert merged.specs[embed].shape == (48, 16) and merged.config["vocab_size"] == 48
    base, a, b, c = (tuned(i)[embed] for i in range(4))
    torch.testing.assert_close(merged[embed][0], a[0] + b[1] + c[0] - 2 * base[0])
    torch.testing.assert_close(merged[embed][46], a[46])  # a alone has it, so all get its row
    write(merged, tmp_path / "out")
    tokens = read_tokens(tmp_path / "out")
    assert tokens is not None and (tokens["<x>"], tokens["<y>"], tokens["w0"]) == (46, 47, 0)


def test_the_row_of_a_token_that_a_model_lacks(vocabularies: Path) -> None:
    tokens = {f"w{i}": i for i in range(46) if i != 5}
    with_tokens(vocabularies / "b", tokens)
    embed = "model.embed_tokens.weight"
    base, a, _, c = (tuned(i)[embed][5] for i in range(4))
    merged = merge(recipe(vocabularies, "task_arithmetic", tokenizer="base"))
    torch.testing.assert_close(merged[embed][5], a + c - base)  # b gets the base's: no change
    merged = merge(recipe(vocabularies, "linear", tokenizer="union"))
    torch.testing.assert_close(merged[embed][5], (a + c) / 2)  # no base: the mean of the others


def test_base_or_a_model(vocabularies: Path) -> None:
    merged = merge(recipe(vocabularies, "task_arithmetic", tokenizer_source="base"))
    assert merged.specs["lm_head.weight"].shape == (46, 16)
    b = str(vocabularies / "b")
    merged = merge(recipe(vocabularies, "task_arithmetic", tokenizer_source=b))
    base, own = tuned(0)["lm_head.weight"], tuned(2)["lm_head.weight"]
    a, c = tuned(1)["lm_head.weight"], tuned(3)["lm_head.weight"]
    torch.testing.assert_close(merged["lm_head.weight"][0], own[0] + a[1] + c[1] - 2 * base[1])
    padded = {"source": "base", "pad_to_multiple_of": 32}
    merged = merge(recipe(vocabularies, "linear", tokenizer=padded))
    assert merged["lm_head.weight"].shape == (64, 16)
    with pytest.raises(ConfigError, match="neither base nor union"):
        merge(recipe(vocabularies, "linear", tokenizer="elsewhere"))


def test_different_vocabularies_need_a_word(vocabularies: Path) -> None:
    state = tuned(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], state[name][:2]])
    config = {**family("llama")[1], "vocab_size": 50}
    wide = save(vocabularies / "wide", state, config)
    with_tokens(wide, {f"w{i}": i for i in range(46)}, ["<x>", "<y>"])
    models = [vocabularies / "b", wide]
    with pytest.raises(ConfigError, match=r"different shapes") as caught:
        merge(linear(*models))
    assert "tokenizer: union" in caught.value.hint
    report = preflight(linear(*models), vocabularies / "out")
    assert report.verdict == "no"
    told = " ".join(problem.what for problem in report.problems)
    assert "2 tokens" in told and "'<x>', '<y>'" in told
    assert preflight(linear(*models, tokenizer="union"), vocabularies / "out").verdict == "yes"


# -- preflight ------------------------------------------------------------------------------------


def test_a_model_without_a_config_is_named(tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    (root / "a" / "config.json").unlink()
    report = preflight(linear(root / "a", root / "b"), tmp_path / "out")
    assert report.verdict == "no"
    assert [p.what for p in report.problems] == [f"{root}/a has no config.json"]
    (root / "b" / "config.json").unlink()
    report = preflight(linear(root / "a", root / "b"), tmp_path / "out")
    assert report.verdict == "with care" and len(report.problems) == 2


def test_models_that_fit(tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    report = preflight(recipe(root, "ties"), tmp_path / "out")
    assert (report.verdict, report.problems) == ("yes", [])
    assert report.facts["parameters"] == sum(t.numel() for t in tuned(0).values())
    assert report.facts["output_bytes"] == 4 * report.facts["parameters"]
    distance = report.facts["distance"][str(root / "a")]
    assert distance == pytest.approx(0.05, rel=0.1)
    assert report.facts["seconds"] > 0 and report.facts["memory_bytes"] > 0


@pytest.mark.parametrize(
    ("config", "verdict", "told"),
    [
        ({"model_type": "mistral"}, "no", "different architectures"),
        ({"rope_theta": 5e5}, "with care", "rope_theta"),
        ({"tie_word_embeddings": True}, "with care", "ties the head"),
        ({"rms_norm_eps": 0.1}, "yes", "rms_norm_eps"),
    ],
)
def test_configs_that_differ(
    config: dict[str, Any], verdict: str, told: str, tmp_path: Path
) -> None:
    root = make_models(tmp_path / "m")
    path = root / "b" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    report = preflight(recipe(root), tmp_path / "out")
    assert report.verdict == verdict
    assert any(told in p.what and p.remedy for p in report.problems)


def test_models_of_different_bases(tmp_path: Path) -> None:
    root = make_models(tmp_path / "m")
    stranger = {n: t + torch.randn(t.shape) for n, t in tuned(0).items()}
    save(root / "stranger", stranger, family("llama")[1])
    report = preflight(linear(root / "a", root / "stranger"), tmp_path / "out")
    assert report.verdict == "with care"
    assert "hardly come from one base" in report.problems[0].what
    twins = preflight(
        linear(root / "a", save(root / "twin", tuned(1), family("llama")[1])), tmp_path
    )
    assert "equals" in twins.problems[0].what


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_forge.store import files

    root = make_models(tmp_path / "m")
    monkeypatch.setattr(files, "free_bytes", lambda path: 100)
    report = preflight(recipe(root), tmp_path / "out")
    check_target(report, [tmp_path / "out"], force=False, max_ram=None)
    assert report.verdict == "no" and "100 free" in report.problems[0].what
    assert report.error is not None and report.error.exit_code == 5
    assert [problem.level for problem in report.problems].count("error") == 1


def test_seven_billion_parameters_are_judged_within_a_second(tmp_path: Path) -> None:
    """Files of 13 GB that take no disk: a header and a hole."""
    shapes = {"model.embed_tokens.weight": [32000, 4096], "lm_head.weight": [32000, 4096]}
    shapes["model.norm.weight"] = [4096]
    for i in range(32):
        for part, shape in (
            ("self_attn.q_proj", [4096, 4096]),
            ("self_attn.k_proj", [4096, 4096]),
            ("self_attn.v_proj", [4096, 4096]),
            ("self_attn.o_proj", [4096, 4096]),
            ("mlp.gate_proj", [11008, 4096]),
            ("mlp.up_proj", [11008, 4096]),
            ("mlp.down_proj", [4096, 11008]),
            ("input_layernorm", [4096]),
            ("post_attention_layernorm", [4096]),
        ):
            shapes[f"model.layers.{i}.{part}.weight"] = shape
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    for name in NAMES:
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + offset)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert offset > 13e9

    def seconds() -> float:
        began = time.perf_counter()
        report = preflight(recipe(tmp_path, "ties"), tmp_path / "out", Parents())
        assert report.facts["parameters"] > 6e9
        return time.perf_counter() - began

    assert any(seconds() < 1 for _ in range(5))
