"""What an attack on model folders found: code, templates, adapters that were trusted."""

from __future__ import annotations

import io
import json
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
    pipelines,
)
from transformers.integrations import hub_kernels

from agent_forge.errors import ConfigError, DamagedFile, HostileInput
from agent_forge.evals.domains import from_files
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.infer.chat import open_chat_model
from agent_forge.merge.engine import merge
from agent_forge.merge.output import write
from agent_forge.merge.recipe import Recipe, TokenizerChoice
from agent_forge.model import load  # which keeps transformers from running code
from agent_forge.model.folder import open_weights
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.store import files
from tests.faults import hostile_goods as goods
from tests.support.adapters import adapted
from tests.support.command_line import Forge
from tests.support.eval_models import llama
from tests.support.evo_models import PARENTS, begin, family, journal
from tests.support.merge_models import family as family_of
from tests.support.merge_models import save, tuned, with_tokens
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


def of_two_files(place: Path, private: Path) -> Path:
    """A model whose tokenizer is a vocab.json and merges.txt, and a vocabulary outside of it."""
    llama(place)
    (place / "tokenizer.json").unlink()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<e>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    (place / "vocab.json").write_text(json.dumps(words))
    (place / "merges.txt").write_text("#version: 0.2\n")
    private.write_text(json.dumps({**words, "a secret": 257}))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<e>")
    settings = {"tokenizer_class": "GPT2Tokenizer", **named}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


OPENED: dict[str, tuple[str, Any]] = {
    "vocab": ("tokenizer_config", {"vocab": "PRIVATE"}),
    "merges": ("tokenizer_config", {"merges": "PRIVATE"}),
    "by position": ("tokenizer_config", {"init_inputs": ["PRIVATE"]}),
    "of special tokens": ("special_tokens_map", {"vocab": "PRIVATE"}),
    "a name where we are": ("tokenizer_config", {"vocab": "private.json"}),
    "of any name": ("tokenizer_config", {"rules": "PRIVATE"}),
    "one more record": ("tokenizer_config", {"dictionary_kwargs": {"path": "PRIVATE"}}),
    "within the folder": ("tokenizer_config", {"vocab": "m/vocab.json"}),
    "upwards": ("tokenizer_config", {"rules": "m/../private.json"}),
}


@pytest.mark.parametrize("case", OPENED)
@pytest.mark.parametrize("command", ["eval m --data d.jsonl", "export m out/m.gguf"])
def test_no_file_outside_of_a_model_is_opened(
    command: str, case: str, tmp_path: Path, forge: Forge
) -> None:
    """Settings of a tokenizer are arguments to it, and some are opened if they are texts."""
    place = of_two_files(tmp_path / "m", tmp_path / "private.json")
    rows(tmp_path / "d.jsonl")
    stem, settings = OPENED[case]
    text = json.dumps(settings).replace("PRIVATE", str(tmp_path / "private.json"))
    edit(place / f"{stem}.json", **json.loads(text))
    result = forge(command)
    assert result.code == 4 and f"{stem}.json: " in result.err, result.err
    assert next(iter(settings)).split("_")[0] in result.err or "path" in result.err
    assert not (tmp_path / "out").exists()


def test_texts_of_a_tokenizer_that_open_nothing(tmp_path: Path, forge: Forge) -> None:
    place = of_two_files(tmp_path / "m", tmp_path / "private.json")
    rows(tmp_path / "d.jsonl")
    free = {"name_or_path": str(tmp_path / "private.json"), "pad_token": "/", "language": "en"}
    edit(place / "tokenizer_config.json", **free, end_of_call="</call>", vocab=None, merges=None)
    assert forge("eval m --data d.jsonl").code == 0


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
    opened = open_model_under_test(model)
    return float(opened.measure(opened.prepare(from_files([data])[0])).loss[0])


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


def three(root: Path, words: dict[str, int]) -> Recipe:
    """A union of a, with these words, and b, which has two tokens more."""
    config = family_of("llama")[1]
    for n, name in enumerate("ab"):
        place = save(root / name, tuned(n), config)
        plain = {f"w{i}": i for i in range(46)}
        with_tokens(place, plain if n else words, ["<x>", "<y>"] if n else [])
    models = [{"model": str(root / name)} for name in "ab"]
    return Recipe(merge_method="linear", models=models, tokenizer="union")


WORDS = {f"w{i}": i for i in range(46)}


@pytest.mark.parametrize("words", [WORDS | {"<pad>": 48}, {f"w{i}": i for i in range(46) if i - 9}])
def test_tokens_are_added_only_where_they_get_the_number_of_their_row(
    tmp_path: Path, words: dict[str, int]
) -> None:
    """A token without a row, or a gap: the tokenizer would number the added ones in another way."""
    with pytest.raises(ConfigError, match="without a row, or numbers without a token"):
        merge(three(tmp_path, words))


def test_a_vocabulary_that_is_not_read_is_not_taken_for_the_base_s(tmp_path: Path) -> None:
    recipe = three(tmp_path, WORDS)
    (tmp_path / "b" / "tokenizer.json").rename(tmp_path / "b" / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"b has no tokenizer\.json"):
        merge(recipe)


def test_numbers_of_tokens_in_a_config_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    recipe = three(tmp_path, WORDS)
    edit(tmp_path / "a" / "config.json", eos_token_id=3, pad_token_id=4)
    edit(tmp_path / "b" / "config.json", eos_token_id=46)
    goods.no_keys("config.json", "pad_token_id")(tmp_path / "b")
    for choice, wanted in (("union", (3, 4)), (str(tmp_path / "b"), (46, None))):
        config = merge(
            recipe.model_copy(update={"tokenizer": TokenizerChoice(source=choice)})
        ).config
        assert (config["eos_token_id"], config["pad_token_id"]) == wanted


def test_the_bias_of_a_head_follows_its_tokens(tmp_path: Path) -> None:
    own = {**tuned(1), "lm_head.bias": torch.arange(48.0)}
    by_token = ("lm_head.weight", "lm_head.bias", "model.embed_tokens.weight")
    turned = {name: t.flip(0) if name in by_token else t for name, t in own.items()}
    for name, state in (("a", own), ("b", turned)):  # one model, its tokens in another order
        place = save(tmp_path / name, state, family_of("llama")[1])
        with_tokens(place, {f"w{i}": i if name == "a" else 47 - i for i in range(48)})
    models = [{"model": str(tmp_path / name)} for name in "ab"]
    merged = merge(Recipe(merge_method="linear", models=models, tokenizer="base"))
    assert all(torch.allclose(merged[name], own[name]) for name in by_token)


# -- templates and networks -----------------------------------------------------------------------

TURN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}SLOT{% endfor %}"


@pytest.mark.parametrize(
    ("slot", "told"),
    [
        ("{{ ['a', 'b'] | random }}", "random"),
        ("{{ [['a', 'b']] | map('random') | first }}", "random"),
        ("{{ lipsum(1, false) }}", "lipsum"),
        ("{% set f = 'ran' ~ 'dom' %}{{ [range(10 ** 9)] | map(f) | first }}", "powers"),
        ("{% set f = 'ran' ~ 'dom' %}{{ [range(99999)] | map(f) | first }}", "twice"),
        ("{{ m.items }}", "memory"),
    ],
)
def test_a_template_says_the_same_each_time(
    slot: str, told: str, tmp_path: Path, forge: Forge
) -> None:
    place = llama(tmp_path / "m", template=TURN.replace("SLOT", slot))
    data = rows(tmp_path / "d.jsonl", chat=True)
    result = forge(f"eval {place} --data {data}")
    assert result.code == 2 and told in result.err


def test_a_number_does_not_depend_on_the_day(tmp_path: Path) -> None:
    data, losses = rows(tmp_path / "d.jsonl", chat=True), []
    for n, slot in enumerate(("{{ strftime_now('%d %b %Y %H:%M:%S') }}", "26 Jul 2024 00:00:00")):
        place = llama(tmp_path / str(n), template=TURN.replace("SLOT", slot))
        losses.append(measured(place, data))
    assert losses[0] == losses[1]
    chat = open_chat_model(tmp_path / "0").opened
    ids = chat.encode_chat([{"role": "user", "content": "hi"}])
    assert str(datetime.now().year) in chat.decode(ids)  # a conversation is held today


def two_way(place: Path, **settings: Any) -> Gemma3ForCausalLM:
    llama(place)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4}
    torch.manual_seed(0)
    config = Gemma3TextConfig(vocab_size=260, initializer_range=0.4, **shape, **heads, **settings)
    model = Gemma3ForCausalLM(config)
    model.save_pretrained(place)
    return model


@pytest.mark.parametrize("rows_alike", [0, 2, 250])
def test_a_network_that_sees_the_answer(
    rows_alike: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_way(tmp_path / "m", use_bidirectional_attention=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[:rows_alike] = model.model.embed_tokens.weight[0]
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        open_model_under_test(tmp_path / "m")
    monkeypatch.setattr(load, "TWO_WAY", {})
    with pytest.raises(ConfigError, match="sees the token"):
        open_model_under_test(tmp_path / "m")


def test_a_network_that_sees_what_comes_before(tmp_path: Path) -> None:
    two_way(tmp_path / "m")
    assert open_model_under_test(tmp_path / "m").longest
    edit(tmp_path / "m" / "config.json", is_causal=False)
    with pytest.raises(ConfigError, match="is_causal"):
        open_model_under_test(tmp_path / "m")


# -- adapters -------------------------------------------------------------------------------------

LAYER = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("targets", "key", "shape"),
    [
        ("all-linear", "base_model.model.lm_head.lora_A.weight", (4, 16)),
        ("all-linear", "base_model.model.model.embed_tokens.lora_A.weight", (4, 16)),
        (["q_proj"], f"{LAYER}.self_attn.q_proj.bias", (16,)),
        (["q_proj"], f"{LAYER}.mlp.gate_proj.base_layer.weight", (24, 16)),
        (["q_proj"], f"{LAYER}.mlp.gate_proj.modules_to_save.weight", (24, 16)),
        (["q_proj"], "base_model.model.model.norm.modules_to_save.weight", (16,)),
        (["q_proj"], f"{LAYER}.self_attn.q_proj.modules_to_save.bias", (16,)),
    ],
)
def test_what_peft_leaves_out_of_an_adapter(
    targets: Any, key: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    base, lora = adapted(tmp_path, "llama", {"target_modules": targets})
    for name in ("config.json", "model.safetensors"):  # with biases, which the attacker's base had
        path = base / name
        if name == "config.json":
            edit(path, attention_bias=True)
            continue
        biases = {
            f"model.layers.{n}.self_attn.{p}_proj.bias": torch.zeros(16 if p in "qo" else 8)
            for n in (0, 1)
            for p in "qkvo"
        }
        save_file({**load_file(path), **biases}, path)
    edit(lora / "adapter_config.json", target_modules=targets)
    tensors = load_file(lora / "adapter_model.safetensors")
    tensors[key] = torch.ones(shape)
    if "lora_A" in key:
        tensors[key.replace("lora_A", "lora_B")] = torch.ones(48, 4)
    save_file(tensors, lora / "adapter_model.safetensors")
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora)
    wanted = loaded.merge_and_unload().state_dict()
    try:
        found = open_weights(f"{base}+{lora}")
    except DamagedFile as error:
        assert key.split(".lora_")[0].removeprefix("base_model.model.") in str(error)
        return
    pytest.fail(str([n for n in found if not torch.allclose(found[n], wanted[n], atol=1e-5)]))


# -- answers that a template hides -----------------------------------------------------------------

QUESTION = {"role": "user", "content": "what?"}
SAID = "{{ m['content'] }}"
HIDING = {
    "thoughts": CHAT.replace(SAID, "{{ m['content'].split('</think>')[-1] }}"),
    "tool calls": CHAT,
    "everything": CHAT.replace(SAID, "{% if m['role'] == 'user' %}" + SAID + "{% endif %}"),
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": 7}}}


@pytest.mark.parametrize("kind", HIDING)
def test_an_answer_that_the_template_hides_is_not_measured(
    kind: str, tmp_path: Path, forge: Forge
) -> None:
    """Few bits would be divided by many bytes that were never asked for."""
    reply: dict[str, Any] = {"role": "assistant", "content": "<think>long</think>7"}
    if kind == "tool calls":
        reply |= {"content": None, "tool_calls": [CALL]}
    lines = [
        json.dumps({"messages": [{**QUESTION, "content": f"{n}?"}, reply]}) for n in range(300)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines))
    model = llama(tmp_path / "hides", template=HIDING[kind], longest=256)
    result = forge(f"eval {model} --data {data}")
    assert result.code == 2 and "leaves out a part of the answer" in result.err
    whole = llama(tmp_path / "shows", seed=1, template=None, longest=256)
    line = f"evo --base-models {whole},{model} --data {data} --gens 0 --dry-run"
    result = forge(line)  # the verdict opens each parent with its own template
    assert result.code == 2 and "leaves out a part of the answer" in result.err


def test_an_answer_that_the_template_begins_is_whole(tmp_path: Path) -> None:
    begun = CHAT.replace("[assistant]{% endif %}", "[assistant]<think>{% endif %}")
    opened = open_model_under_test(llama(tmp_path / "m", template=begun, longest=256)).opened
    reply = {"role": "assistant", "content": "<think>so</think> 7 "}
    ids, start = opened.encode_reply([QUESTION, reply])
    assert opened.decode(ids[start:]) == "<think>so</think> 7 [end]"  # its bytes count


def test_a_text_that_the_tokenizer_drops_is_not_measured(tmp_path: Path, forge: Forge) -> None:
    """What is not read costs no bits, but it has bytes."""
    model, data = llama(tmp_path / "m"), rows(tmp_path / "x.jsonl")
    assert forge(f"eval {model} --data {data}").code == 0
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    drops = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": ""}
    path.write_text(json.dumps({**content, "normalizer": drops}))
    result = forge(f"eval {model} --data {data}")
    assert result.code == 2 and "the tokenizer loses the character" in result.err


# -- links ----------------------------------------------------------------------------------------


def test_what_a_link_names_outside_is_not_copied(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private")
    first, second = (llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    (first / "merges.txt").symlink_to(secret)
    recipe = {"merge_method": "linear", "models": [{"model": str(m)} for m in (first, second)]}
    with pytest.raises(HostileInput, match=r"merges\.txt is a link to .*secret\.txt"):
        write(merge(Recipe.model_validate(recipe)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub = tmp_path / "hub"  # laid out as the cache of the hub, which is made of links
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    (first / "merges.txt").unlink()
    shutil.move(first, hub / "snapshots" / "a")
    place = hub / "snapshots" / "a" / "tokenizer.json"
    shutil.move(place, hub / "blobs" / "0f")
    place.symlink_to("../../blobs/0f")
    recipe["models"] = [{"model": str(m)} for m in (place.parent, second)]
    write(merge(Recipe.model_validate(recipe)), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == place.read_bytes()


def test_a_folder_that_only_looks_ready_replaces_nothing(tmp_path: Path, forge: Forge) -> None:
    """As one that came with an archive: nobody asked for it, and a dry run changes nothing."""
    parents = [llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for name, pair in (
        ("mine", parents[:2]),
        (".ready-mine", parents[1:]),
        (".ready-none", parents[1:]),
    ):
        recipe = {"merge_method": "linear", "models": [{"model": str(m)} for m in pair]}
        write(merge(Recipe.model_validate(recipe)), tmp_path / name)
    before = {p: files.sha256_of(p) for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    for line in ("mine --dry-run", "mine", "none --dry-run"):
        forge(f"merge --models {parents[0]},{parents[1]} {tmp_path}/{line}")
        now = {p: files.sha256_of(p) for p in sorted(tmp_path.rglob("*")) if p.is_file()}
        assert now == before, line
