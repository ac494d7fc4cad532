"""What an attack on merging and opening models found: wrong weights in silence, results that no
command can open, edits that nobody noticed. Each of these was possible once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.merge.engine import merge
from agent_forge.merge.output import write
from agent_forge.merge.preflight import preflight
from agent_forge.merge.recipe import Recipe, read_recipe
from agent_forge.model.opened import open_model
from tests.faults import hostile_goods as goods
from tests.support.command_line import Forge
from tests.support.tokenizers import byte_tokenizer

UP = "model.layers.0.mlp.up_proj.weight"
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 260}
ONE = {"num_hidden_layers": 1}
State = dict[str, torch.Tensor]


def copy(family: str, target: Path, *changes: goods.Change) -> Path:
    """A sound small model of a family, with these changes."""
    folder = goods.copied(goods.goods() / family / "a", target)
    for change in changes:
        change(folder)
    return folder


def made(target: Path, model_type: str, seed: int = 0, **shape: Any) -> Path:
    """A small model of another family, as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SMALL, **shape})
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    return target


def linear(*models: Path | str, **fields: Any) -> Recipe:
    listed = [{"model": str(model)} for model in models]
    return Recipe.model_validate({"merge_method": "linear", "models": listed, **fields})


# -- tensors that the network does not ask for ----------------------------------------------------


def beside(name: str, other: str) -> goods.Change:
    """Another tensor of the shape of one that is there."""
    return goods.tensors(lambda s: {**s, other: torch.randn(s[name].shape)})


ALIASES = {
    "no prefix": ("llama", UP, UP.removeprefix("model.")),
    "the prefix twice": ("llama", "model.norm.weight", "model.model.norm.weight"),
    "a norm without prefix": ("llama", "model.norm.weight", "norm.weight"),
    "bare gpt2": ("gpt2", "transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
    "a bias": ("gpt2", "transformer.h.0.attn.c_attn.bias", "h.0.attn.c_attn.bias"),
    "ours": ("ours", "projection.weight", "network.projection.weight"),
}


@pytest.mark.parametrize("case", ALIASES)
def test_a_second_name_for_a_tensor(tmp_path: Path, case: str) -> None:
    """transformers lets it replace the right one, or leaves it out, without a word."""
    family, name, other = ALIASES[case]
    forget = goods.without("manifest.json", "metadata.json")
    good = copy(family, tmp_path / "good", forget)
    bad = copy(family, tmp_path / "bad", forget, beside(name, other))
    with pytest.raises(DamagedFile, match=other.replace(".", r"\.")):
        open_model(bad)
    error = preflight(linear(good, bad), tmp_path / "out").error
    assert isinstance(error, DamagedFile) and other in str(error)


def test_two_heads_under_two_names(tmp_path: Path) -> None:
    model = made(tmp_path / "neox", "gpt_neox", **ONE)
    open_model(model)
    goods.tensors(lambda s: {**s, "lm_head.weight": torch.randn(260, 16)})(model)
    goods.tensors(lambda s: {**s, "embed_out.weight": torch.randn(260, 16)})(model)
    with pytest.raises(DamagedFile, match=r"embed_out\.weight, lm_head\.weight"):
        open_model(model)


def test_an_expert_twice(tmp_path: Path) -> None:
    """Experts that transformers joins into one tensor, and one of them without its prefix."""
    model = made(tmp_path / "m", "mixtral", **ONE, num_key_value_heads=2, num_local_experts=2)
    open_model(model)
    names: list[str] = []
    goods.tensors(lambda s: names.extend(s))(model)
    expert = next(name for name in names if "experts.0." in name)
    beside(expert, expert.removeprefix("model."))(model)
    with pytest.raises(DamagedFile, match="two names for one"):
        open_model(model)


def old_buffers(s: State) -> State:
    names = ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    return {**s, **{name: torch.ones(1, 1, 4, 4) for name in names}}


def bare(s: State) -> State:
    return {k.removeprefix("transformer."): v for k, v in old_buffers(s).items()}


def with_head(s: State) -> State:
    return {**bare(s), "lm_head.weight": s["transformer.wte.weight"].clone()}


def rotary(s: State) -> State:
    return {**s, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


@pytest.mark.parametrize(
    ("family", "edit"),
    [("gpt2", old_buffers), ("gpt2", bare), ("gpt2", with_head), ("llama", rotary)],
)
def test_what_old_files_hold_besides(
    tmp_path: Path, family: str, edit: Callable[[State], State]
) -> None:
    """Buffers that were once saved, and the names of the first GPT-2 files."""
    good = open_model(copy(family, tmp_path / "good")).network.state_dict()
    found = open_model(copy(family, tmp_path / "old", goods.tensors(edit))).network.state_dict()
    assert {*found} == {*good}
    assert all(torch.equal(found[name], good[name]) for name in good)


def test_the_command_names_the_tensor(tmp_path: Path, forge: Forge) -> None:
    copy("llama", tmp_path / "bad", beside(UP, UP.removeprefix("model.")))
    result = forge(f"eval bad --data {goods.goods()}/rows.jsonl")
    assert result.code == 4 and "layers.0.mlp.up_proj.weight" in result.err


# -- parents that were edited ---------------------------------------------------------------------


def lora(target: Path, alpha: int) -> Path:
    """An adapter of one layer for the small Llama."""
    target.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": [UP[:-7]]}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    name, shapes = f"base_model.model.{UP[:-7]}", {"A": (2, 16), "B": (24, 2)}
    update = {f"{name}.lora_{half}.weight": torch.randn(s) for half, s in shapes.items()}
    save_file(update, target / "adapter_model.safetensors")
    return target


def test_an_adapter_with_another_scale_is_another_parent(tmp_path: Path, forge: Forge) -> None:
    """Its weights are the same file, so their hash alone does not tell."""
    copy("llama", tmp_path / "a")
    copy("llama", tmp_path / "b")
    lora(tmp_path / "lora", 8)
    assert forge("merge --models a+lora,b m1").code == 0
    again = forge("merge m1/recipe.yml m2")
    assert again.code == 0
    recipe = (tmp_path / "m1/recipe.yml").read_text()
    assert (tmp_path / "m2/recipe.yml").read_text() == recipe
    lora(tmp_path / "lora", 80)
    changed = forge("merge m1/recipe.yml m3")
    assert changed.code == 4 and "a+lora is damaged" in changed.err
    assert "adapter settings" in changed.err and not (tmp_path / "m3").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_edited_settings_of_a_parent(tmp_path: Path, forge: Forge, name: str) -> None:
    for model in "ab":
        copy("llama", tmp_path / model)
    assert forge("merge --models a,b m1").code == 0
    goods.keys(name, note=1)(tmp_path / "b")
    assert forge("merge m1/recipe.yml m2").code == 4


def test_a_recipe_of_an_older_version_still_holds(tmp_path: Path, forge: Forge) -> None:
    """It knows the hashes of the weights alone."""
    copy("llama", tmp_path / "a")
    copy("llama", tmp_path / "b")
    assert forge("merge --models a,b m1").code == 0
    recipe = yaml.safe_load((tmp_path / "m1/recipe.yml").read_text())
    assert set(recipe.pop("parents_settings")) == set(recipe["parents"]) == {"a", "b"}
    (tmp_path / "old.yml").write_text(yaml.safe_dump(recipe))
    assert forge("merge old.yml m2").code == 0
    weights = [(tmp_path / m / goods.WEIGHTS).read_bytes() for m in ("m1", "m2")]
    assert weights[0] == weights[1]


# -- files that are not what they seem ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.json", "configuration_files", "config.4.0.0.json"),
        ("tokenizer_config.json", "fast_tokenizer_files", "tokenizer.4.0.0.json"),
        ("config.json", "transformers_weights", "model.4.0.0.safetensors"),
    ],
)
@pytest.mark.parametrize("line", ["eval bad --data {}/rows.jsonl", "merge --models bad,good out"])
def test_files_of_other_versions(
    tmp_path: Path, forge: Forge, line: str, name: str, key: str, value: str
) -> None:
    """transformers would read another config or tokenizer than the one that we see."""
    copy("llama", tmp_path / "good")
    bad = copy("llama", tmp_path / "bad", goods.keys(name, **{key: [value]}))
    (bad / value).write_bytes((bad / value.replace(".4.0.0", "")).read_bytes())
    result = forge(line.format(goods.goods()))
    assert result.code == 4 and key in result.err


def test_an_infinite_limit_in_a_config(tmp_path: Path, forge: Forge) -> None:
    """As transformers writes Mamba2: {"__float__": "Infinity"} in time_step_limit."""
    shape = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 16}
    for seed, name in enumerate("ab"):
        made(tmp_path / name, "mamba2", seed, **ONE, **shape, tie_word_embeddings=False)
    assert "__float__" in (tmp_path / "a/config.json").read_text()
    assert forge("merge --models a,b m").code == 0
    assert "__float__" in (tmp_path / "m/config.json").read_text()
    for model in "am":
        assert open_model(tmp_path / model).network.config.time_step_limit[1] == float("inf")


def eight_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn)


def test_weights_of_eight_bits_are_measured_and_not_merged(tmp_path: Path, forge: Forge) -> None:
    for name in "ab":
        copy("llama", tmp_path / name, goods.each(eight_bits))
    data = f"--data {goods.goods()}/rows.jsonl"
    assert forge(f"eval a {data}").code == 0
    for line in ("merge --models a,b out", f"evo --base-models a,b {data} --output-dir out"):
        for option in ("", " --dry-run"):
            result = forge(line + option)
            assert result.code == 2 and "8 bits" in result.out + result.err
    assert not (tmp_path / "out").exists()
    assert forge("merge --models a,b --set out_dtype=bfloat16 out").code == 0
    found, wanted = open_model(tmp_path / "out").network, open_model(tmp_path / "a").network
    assert torch.equal(found.state_dict()[UP], wanted.state_dict()[UP])


def nested(weight: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([weight, weight])


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.uint8).view(torch.float4_e2m1fn_x2)


ODD = {
    "sparse": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "meta": lambda weight: weight.to("meta"),
    "nested": nested,
    "float4": four_bits,
    "complex": lambda weight: weight.to(torch.complex64),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore")
def test_a_pickle_of_tensors_that_are_not_plain(tmp_path: Path, forge: Forge, kind: str) -> None:
    edit: Callable[[torch.Tensor], torch.Tensor] = ODD[kind]  # type: ignore[assignment]
    odd = goods.torch_file(
        "pytorch_model.bin", lambda bad: (s := load_file(bad / goods.WEIGHTS)) | {UP: edit(s[UP])}
    )
    copy("llama", tmp_path / "bad", odd, goods.without(goods.WEIGHTS))
    copy("llama", tmp_path / "good")
    data = f"--data {goods.goods()}/rows.jsonl"
    for line in (f"eval bad {data}", "generate bad hello", "merge --models good,bad out"):
        result = forge(line)
        assert result.code == 4 and UP in result.err and "only plain tensors" in result.err


# -- places that cannot be written ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [("x" * 239, 0), ("x" * 240, 2), ("x" * 245, 2), ("y" * 300 + "/x", 2), ("x/" * 2100, 2)],
    ids=["just right", "one too many", "with a mark", "a folder above", "a whole path"],
)
def test_names_too_long_for_the_disk(tmp_path: Path, forge: Forge, name: str, code: int) -> None:
    """A dry run and a run say the same, before the work."""
    for model in "ab":
        copy("llama", tmp_path / model)
    before = sorted(tmp_path.iterdir())
    for option in (" --dry-run", ""):
        result = forge(f"merge --models a,b {name}{option}")
        assert result.code == code and ("too long" in result.out + result.err) == (code != 0)
        assert sorted(tmp_path.iterdir()) == before or not (code or option)


# -- our own folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", b"1e-06", b"5e-01"),
        ("tokenizer.json", b'"b"', b'"B"'),
        ("chat_template.jinja", b"assistant", b"Assistant"),
        (goods.WEIGHTS, b"", b""),
    ],
)
def test_an_edit_that_keeps_the_size(
    tmp_path: Path, forge: Forge, name: str, old: bytes, new: bytes
) -> None:
    """The manifest knows the sha256 of every file that we wrote; each command compares them."""
    for model in "ab":
        copy("llama", tmp_path / model)
    assert forge("merge --models a,b m").code == 0
    assert forge("generate m hello").code == 0
    path = tmp_path / "m" / name
    content = path.read_bytes()
    edited = content.replace(old, new) if old else content[:-1] + bytes([content[-1] ^ 1])
    assert edited != content and len(edited) == len(content)
    path.write_bytes(edited)
    data = f"--data {goods.goods()}/rows.jsonl"
    for line in (
        f"eval m {data}",
        "generate m hello",
        "merge --models m,a out --dry-run",
        "merge --models a,m out",
        f"evo --base-models m,a {data} --output-dir out --dry-run",
    ):
        result = forge(line)
        told = result.out + result.err
        assert result.code == 4 and "sha256" in told and name.split(".")[0] in told, line


# -- slices ---------------------------------------------------------------------------------------


def sliced(folder: Path, *parts: tuple[str, int, int]) -> str:
    """A recipe of these layers of these models."""
    sources = [[{"model": model, "layer_range": [start, stop]}] for model, start, stop in parts]
    recipe = {"merge_method": "passthrough", "slices": [{"sources": s} for s in sources]}
    (folder / "slices.yml").write_text(json.dumps(recipe))
    return "merge slices.yml out"


def four_layers(target: Path, model_type: str, **shape: Any) -> Path:
    return made(target, model_type, num_hidden_layers=4, num_key_value_heads=2, **shape)


def test_layers_keep_their_kind_where_the_config_does_not_name_it(
    tmp_path: Path, forge: Forge
) -> None:
    """Gemma 2 as it was published: every other layer has a window, from the first one on."""
    model = four_layers(tmp_path / "g", "gemma2", head_dim=8, sliding_window=4)
    wanted = open_model(model).network.config.layer_types[1:4]
    goods.no_keys("config.json", "layer_types")(model)
    assert forge(sliced(tmp_path, ("g", 1, 4))).code == 0
    found = open_model(tmp_path / "out").network.config
    assert found.layer_types == wanted and found.num_hidden_layers == 3
    assert len({*wanted}) == 2


def test_layers_of_gpt_neo_keep_their_kind(tmp_path: Path, forge: Forge) -> None:
    made(tmp_path / "n", "gpt_neo", num_layers=4, num_heads=2, window_size=4,
         attention_types=[[["global", "local"], 2]])  # fmt: skip
    assert forge(sliced(tmp_path, ("n", 1, 2), ("n", 0, 2))).code == 0
    assert open_model(tmp_path / "out").network.config.attention_layers == [
        "local",
        "global",
        "local",
    ]


JAMBA = {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
DEEPSEEK |= {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("model_type", "shape", "told"), [("jamba", JAMBA, "mamba"), ("deepseek_v3", DEEPSEEK, "mlp")]
)
@pytest.mark.parametrize("option", ["", " --dry-run"])
def test_a_result_that_could_not_be_opened_is_not_written(
    tmp_path: Path, forge: Forge, model_type: str, shape: dict[str, Any], told: str, option: str
) -> None:
    """The config has no way to say that the layers begin with another kind."""
    four_layers(tmp_path / "m", model_type, **shape)
    assert forge(sliced(tmp_path, ("m", 0, 4)) + " --dry-run").code == 0
    result = forge(sliced(tmp_path, ("m", 1, 4)) + option)
    assert result.code == 2 and told in result.out + result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "parts", [(("m", 1, 3), ("m", 0, 4)), (("m", 0, 1), ("q", 1, 4))], ids=["kinds", "families"]
)
def test_python_writes_no_result_that_the_command_refuses(
    tmp_path: Path, forge: Forge, parts: tuple[tuple[str, int, int], ...]
) -> None:
    """Of layers of other kinds, and of another family whose tensors have the same names."""
    four_layers(tmp_path / "m", "deepseek_v3" if parts[0][1] else "llama", **DEEPSEEK)
    four_layers(tmp_path / "q", "mistral")
    refused = forge(sliced(tmp_path, *parts))
    assert refused.code == 2 and "out" not in {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"would be no model|different architectures"):
        write(merge(read_recipe(tmp_path / "slices.yml")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("order", ["tu", "ut"])
def test_slices_of_a_tied_and_an_untied_model(tmp_path: Path, forge: Forge, order: str) -> None:
    """The result gets a head of its own, as the warning says: that of the last model."""
    copy("llama", tmp_path / "u")
    copy("llama", tmp_path / "t", goods.lost("lm_head"), goods.config(tie_word_embeddings=True))
    result = forge(sliced(tmp_path, (order[0], 0, 1), (order[1], 1, 2)))
    assert result.code == 0 and "a head of its own" in result.err
    found = open_model(tmp_path / "out").network.state_dict()["lm_head.weight"]
    last = open_model(tmp_path / order[1]).network.state_dict()["lm_head.weight"]
    assert torch.equal(found, last)


LAST = {"gpt_neox": "embed_out.weight", "lfm2": "model.embedding_norm.weight"}


@pytest.mark.parametrize("family", LAST)
def test_what_follows_the_layers_is_of_the_last_slice(
    tmp_path: Path, forge: Forge, family: str
) -> None:
    """Their names say embedding, but they are a head and a last norm."""
    kinds = {"layer_types": ["full_attention"] * 2} if family == "lfm2" else {}
    for seed, name in enumerate("ab"):
        made(tmp_path / name, family, seed, num_hidden_layers=2, **kinds)
        goods.tensors(lambda s, n=seed: {k: t + n for k, t in s.items()})(tmp_path / name)  # type: ignore[misc]
    assert forge(sliced(tmp_path, ("a", 0, 1), ("b", 1, 2))).code == 0
    first, last, out = (load_file(tmp_path / n / goods.WEIGHTS) for n in ("a", "b", "out"))
    assert torch.equal(out[LAST[family]], last[LAST[family]])
    embedding = next(name for name in out if "embed_in" in name or "embed_tokens" in name)
    assert torch.equal(out[embedding], first[embedding])


# -- files beside the weights ---------------------------------------------------------------------


def test_a_file_of_weights_beside_a_config_that_asks_for_code(tmp_path: Path, forge: Forge) -> None:
    """Its config would be that of the result, which no command opens."""
    copy("llama", tmp_path / "a", goods.config(auto_map={"AutoModelForCausalLM": "evil.Evil"}))
    copy("llama", tmp_path / "b")
    result = forge(f"merge --models a/{goods.WEIGHTS},b/{goods.WEIGHTS} out")
    assert result.code == 4 and "auto_map" in result.err and not (tmp_path / "out").exists()


def test_the_config_says_what_type_the_tensors_have(tmp_path: Path, forge: Forge) -> None:
    def halved(state: State) -> State:
        return {name: tensor.bfloat16() for name, tensor in state.items()}

    copy("llama", tmp_path / "a", goods.tensors(halved), goods.config(dtype="bfloat16"))
    copy("llama", tmp_path / "b")
    for models, wanted in (("a,b", "float32"), ("a,a/", "bfloat16")):
        assert forge(f"merge --models {models} {wanted}").code == 0
        assert goods.read(tmp_path / wanted / "config.json")["dtype"] == wanted
        assert load_file(tmp_path / wanted / goods.WEIGHTS)[UP].dtype == getattr(torch, wanted)


def test_every_file_of_a_tokenizer_comes_along(tmp_path: Path, forge: Forge) -> None:
    """GPT-NeoX-japanese has an emoji.json beside its words, and cannot be opened without it."""
    for name in "ab":
        copy("llama", tmp_path / name, goods.text("emoji.json", "{}"))
    assert forge("merge --models a,b out").code == 0
    assert (tmp_path / "out" / "emoji.json").is_file()
