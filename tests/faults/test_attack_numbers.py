"""What an attack on numbers found: texts that are not asked as they are counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from agent_forge.config import strict_json
from agent_forge.data.row_files import rows as rows_of
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, HostileInput
from agent_forge.evals.domains import answer, from_files
from agent_forge.infer.generate import SamplingSettings, generate, stream
from agent_forge.merge.engine import merge
from agent_forge.merge.recipe import Recipe
from agent_forge.model.chat import render_reply
from agent_forge.model.folder import open_weights
from agent_forge.model.load import open_tokenizer
from agent_forge.model.opened import TransformersModel, open_model
from agent_forge.store.registry import ModelRegistry
from tests.support.eval_models import llama
from tests.support.merge_models import family, save
from tests.support.tokenizers import CHAT, TOKENIZER, byte_tokenizer

ASKED = {"role": "user", "content": "what is it?"}
SYSTEM = {"role": "system", "content": "be brief"}
REPLY = {"role": "assistant", "content": "a bird"}
SAID = "{{ m['content'] }}"
OTHER = "transformers_weights"


def opened(place: Path, template: str = CHAT, **tokenizer: Any) -> TransformersModel:
    """A model whose tokenizer.json and template are these."""
    model = llama(place, template=template, longest=512)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= tokenizer.pop("model", {})
    path.write_text(json.dumps({**content, **tokenizer}))
    found = open_model(model)
    assert isinstance(found, TransformersModel)
    return found


# -- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["file", "config", "text_config"])
def test_weights_that_transformers_would_take_from_another_file(tmp_path: Path, how: str) -> None:
    model, other = llama(tmp_path / "m"), llama(tmp_path / "n", seed=1)
    name = "shard-00000-model-00001-of-00001.safetensors" if how == "file" else "x.safetensors"
    (model / name).write_bytes((other / "model.safetensors").read_bytes())
    if how != "file":
        config, named = json.loads((model / "config.json").read_text()), {OTHER: name}
        config |= named if how == "config" else {how: named}
        (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(HostileInput, match=r"shard-00000" if how == "file" else OTHER):
        open_weights(model)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"c": 1, "c": 1}}]'])
def test_a_key_that_is_there_twice(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="appears twice"):
        strict_json.parse(text)
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DamagedFile, match=r"line 1: .*appears twice"):
        list(rows_of(tmp_path / "x.jsonl"))


@pytest.mark.parametrize("end", ["", "-wal", "-journal"])
def test_a_registry_with_a_second_name(end: str, tmp_path: Path) -> None:
    place = tmp_path / "registry" / "model_registry.db"
    registry = ModelRegistry(place)
    registry.checkpoint_wal()
    mine = tmp_path / "mine"
    mine.write_bytes(place.read_bytes())
    Path(f"{place}{end}").unlink(missing_ok=True)
    Path(f"{place}{end}").hardlink_to(mine)
    with pytest.raises(HostileInput, match="is a link"):
        ModelRegistry(place)


# -- tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_that_draws_lots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draws lots \(dropout is 0\.5"):
        opened(tmp_path / "m", model={"dropout": 0.5})
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    llama(tmp_path / "m")
    settings["sp_model_kwargs"] = {"enable_sampling": True, "alpha": 0.1, "nbest_size": -1}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="sp_model_kwargs"):
        open_tokenizer(tmp_path / "m")
    own = json.loads(TOKENIZER.files()["tokenizer.json"])
    own["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match="draws lots"):
        Tokenizer.load(tmp_path)


def drops(pattern: str, content: str = "") -> dict[str, Any]:
    change = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
    return {"normalizer": change}


ACCENTS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}


@pytest.mark.parametrize(
    ("settings", "text", "told"),
    [
        (drops(r"[-+*/=]"), "1 + 2 = 3", r"\+"),
        (drops(r"\p{So}"), "bird \U0001f426", "1F426"),
        ({"normalizer": ACCENTS}, "a caf\u00e9", "00E9"),
        (drops(r"[.,;!]"), "a, b.", "','"),
        (drops(r"\u200b"), "a\u200bb", "200B"),
        (drops("b", "a"), "a b c", "'b'"),
        (drops("ab", "ba"), "ab ba", "a part of a text"),
        (drops(" "), "a b c d", "blanks"),
        (drops(r"\s+", " "), "if a:\n        b", "blanks"),
    ],
)
def test_a_tokenizer_that_loses_characters(
    settings: dict[str, Any], text: str, told: str, tmp_path: Path
) -> None:
    for change in ({}, settings):
        model = opened(tmp_path / f"m{len(change)}", **change)
        ways = (
            lambda model=model: model.encode_answer("so:", f" {text}"),
            lambda model=model: model.encode_reply([ASKED, {**REPLY, "content": text}]),
        )
        for way in ways:
            if not change:
                ids, start = way()
                assert text in model.decode(ids[start:])
                continue
            with pytest.raises(ConfigError, match=f"the tokenizer loses .*{told}"):
                way()


def test_what_ordinary_tokenizers_change(tmp_path: Path) -> None:
    for n, change in enumerate(("Lowercase", "NFC", "NFKC", "NFD")):
        model = opened(tmp_path / str(n), normalizer={"type": change})
        ids, start = model.encode_answer("so:", " A Caf\u00e9 \u00bd \ufb01n \U0001f426.\n\n b")
        assert start == 3 and len(ids) > 20


def test_every_byte_of_an_answer_is_asked_for(tmp_path: Path) -> None:
    """Also where the first token is made of the prompt and a part of the answer."""
    model = opened(tmp_path / "m")
    assert len(model.encode(" 7x")) == 2
    ids, start = model.encode_answer(" ", "7x")
    assert model.decode(ids[start:]) == "7x" and start == 1
    ids, start = model.encode_answer("c ", "7x")  # the token of both is asked for
    assert model.decode(ids[start:]) == " 7x" and start == 1


ADDS_B = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "b", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"b": {"id": "b", "ids": [65], "tokens": ["b"]}},
}


@pytest.mark.parametrize("settings", [{"post_processor": ADDS_B}, drops(r":\z", ":b")])
def test_a_tokenizer_that_adds_what_answers_begin_with(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """It would be given with the prompt, and never asked for."""
    model = opened(tmp_path / "m", **settings)
    assert model.decode(model.encode("a:")) == "a:b"
    ids, start = model.encode_answer("a:", "cbc")
    assert model.decode(ids[start:]) in ("cbc", "cbcb")
    with pytest.raises(ConfigError, match="adds to a prompt what the answer begins with"):
        model.encode_answer("a:", "bb")


# -- templates ------------------------------------------------------------------------------------

THINKS = CHAT.replace(
    SAID, "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}" + SAID
)
EMPTY = CHAT.replace(
    "[{{ m['role'] }}]",
    "[{{ m['role'] }}]{% if loop.last and m.role == 'assistant' %}<>{% endif %}",
)
MOVED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}</s>{% endif %}{% endfor %}"
)
HIDDEN = "{% if messages[-1].role == 'user' or m.role != 'user' %}" + SAID + "{% endif %}"
TURN = "{{ m['role'] }}]"


@pytest.mark.parametrize(
    ("template", "reply", "told"),
    [
        (THINKS, {"reasoning_content": "it flies"}, "more of an answer.*reasoning_content"),
        (
            THINKS.replace(SAID, SAID + "{{ m.tool_calls }}"),
            {"reasoning_content": "it flies", "tool_calls": [{"name": "f", "arguments": "{}"}]},
            "more of an answer.*reasoning_content",
        ),
        (MOVED, {}, "shows what was asked in another way"),
        (CHAT.replace(SAID, HIDDEN), {}, "shows what was asked in another way"),
        (CHAT.replace(SAID, "{{ m['content'] | length }}" + SAID), {}, "or adds to it"),
        (CHAT.replace(SAID, SAID + "{{ m['content'] | length }}"), {}, "or adds to it"),
        (CHAT.replace(SAID, "{{ m['content'] | truncate(3, true, '') }}"), {}, "leaves out"),
        (CHAT.replace(SAID, "{{ m['content'] | upper }}"), {}, "or adds to it"),
        (CHAT.replace(SAID, "{{ m['content'] | replace('d', '') }}"), {}, "leaves out"),
        (CHAT.replace("[end]", "[{{ messages[1].content }}]"), {}, "or adds to it"),
        (
            CHAT.replace(TURN, TURN + "{% if loop.last %}{{ messages[1].content }}{% endif %}"),
            {},
            "in another way",
        ),
        (
            CHAT.replace("{% for m in messages %}", "{% for m in messages | reverse %}"),
            {},
            "in another way|or adds",
        ),
    ],
)
def test_a_template_that_asks_for_more_or_less_than_the_answer(
    template: str, reply: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        render_reply(byte_tokenizer(template), [SYSTEM, ASKED, {**REPLY, **reply}])


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        (CHAT, "a bird[end]"),
        (CHAT.replace(SAID, "{{ m['content'] | trim }}"), "a bird[end]"),
        (THINKS, "a bird[end]"),
        (EMPTY, "<>a bird[end]"),  # as Qwen3 has it
        (CHAT.replace("[assistant]{% endif %}", "[assistant]<think>\n{% endif %}"), "a bird[end]"),
        (CHAT.replace(TURN, TURN + " "), " a bird[end]"),
        (CHAT.replace(TURN, TURN + "{{ loop.index }}:"), "3:a bird[end]"),
    ],
)
def test_an_answer_is_asked_with_what_the_template_puts_around_it(
    template: str, asked: str
) -> None:
    reply = {**REPLY, "weight": 1, "id": "x"}
    given, whole = render_reply(byte_tokenizer(template), [SYSTEM, ASKED, reply])
    assert whole.removeprefix(given) == asked and ASKED["content"] in given


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "x" * 999, "type": "function", "function": function}


CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} SLOT>{% endfor %}"


@pytest.mark.parametrize(
    ("slot", "told"), [("{{ c.function.arguments | tojson }}", ""), ("", "leaves out")]
)
def test_calls_are_counted_as_they_are_shown(slot: str, told: str, tmp_path: Path) -> None:
    made = call(town="Ulm", days=[1, 2.5], note="a\n'b'")
    reply = {**REPLY, "content": None, "tool_calls": [made]}
    template = CHAT.replace(SAID, SAID + CALLS.replace("SLOT", slot))
    data = tmp_path / "x.jsonl"
    data.write_text(json.dumps({"messages": [ASKED, reply]}))
    (example,) = from_files([data])[0].examples
    assert answer(example) == json.dumps(made["function"])  # and nothing of its id
    model = opened(tmp_path / "m", template)
    if told:
        with pytest.raises(ConfigError, match=told):
            model.encode_reply(example.messages)
        return
    ids, start = model.encode_reply(example.messages)
    assert model.decode(ids[start:]).startswith("<weather {")


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tools", "functions", "documents", "system"])
def test_what_belongs_to_a_question_is_read_or_refused(name: str, tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    for row in ({"messages": [ASKED, REPLY]}, {"prompt": "a", "completion": "b"}):
        data.write_text(json.dumps({**row, name: []}))
        assert len(from_files([data])[0].examples) == 1
        data.write_text(json.dumps({**row, name: [{"name": "weather"}]}))
        with pytest.raises(DamagedFile, match=f"line 1: field '{name}' is not read"):
            from_files([data])


CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"
THAI = "\u0e19\u0e49\u0e33\u0e40\u0e22\u0e47\u0e19"  # its first letter has a mark


@pytest.mark.parametrize(
    ("text", "given", "old"),
    [
        (f"{CHINESE}\n{CHINESE}\n", CHINESE[0], CHINESE),
        (f" {CHINESE}\n", f" {CHINESE[0]}", None),
        (f"{THAI} {THAI}", THAI[:2], THAI),
        ("ACGTACGT\n", "A", None),
        ("A bird sings.\n", "A", "A"),
        ("https://a.b/c is it\n", "https://a.b/c", "https://a.b/c"),
        ("e\u0301tude\n", "e\u0301", None),
        ("\U0001f469\u200d\U0001f680\U0001f680\n", "\U0001f469\u200d\U0001f680", None),
    ],
)
def test_a_text_without_spaces_keeps_its_first_line(
    text: str, given: str, old: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "so it is"}))
    found = from_files([data])[0].examples
    assert found[0].prompt == given and found[0].prompt + found[0].completion == text
    before = from_files([data], "prompt")[0].examples  # of an older evolution
    assert [e.prompt for e in before] == [old, "so"] if old else ["so"]


# -- generation -----------------------------------------------------------------------------------


def test_a_long_row_of_byte_tokens_is_streamed_as_it_is_decoded() -> None:
    """As Llama writes what its vocabulary lacks: of a row that breaks off, no byte is shown."""
    birds = "\U0001f426" * 30
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    core = Core(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = core.encode(f"a\n{birds}a{birds}").ids
    assert core.decode(ids) == f"a\n{birds}a{birds}"

    class Says(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.said = torch.nn.Parameter(torch.zeros(1)), 0

        def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
            logits = torch.zeros(1, 1, len(names))
            logits[0, 0, ids[tokens.shape[1] - 1]] = 1.0
            return type("Out", (), {"past_key_values": None, "logits": logits})

    def decode(tokens: Sequence[int]) -> str:
        return str(core.decode(list(tokens)))

    stops: tuple[tuple[str, ...], ...] = ((), ("\ufffd a",))
    for most in (3, 10, 40, len(ids) - 1, len(ids)):
        for stop in stops:
            sampling = SamplingSettings(most, stop_strings=stop)
            pieces = list(stream(Says(), [0], sampling, decode, frozenset(range(1, 257))))
            assert "".join(pieces) == decode(ids[:most])
    assert generate(Says(), [[0]], SamplingSettings(40), decode=decode)[0].text == decode(ids[:40])
    lines = core.encode(f"{birds}\na").ids
    ids[: len(lines)] = lines  # a stop string that is a part of a row
    found = generate(
        Says(), [[0]], SamplingSettings(99 + len(lines), stop_strings=("\n",)), decode=decode
    )
    assert (found[0].text, found[0].stopped_by) == (birds, "string")


def hybrid(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "Qwen3Next":
        shape |= {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
        shape |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
        shape |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
        shape |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    elif kind == "Lfm2":
        shape |= {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    else:
        shape |= {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8}
        shape |= {"mamba_n_groups": 1, "head_dim": 8, "mamba_chunk_size": 8}
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


@pytest.mark.parametrize("kind", ["Qwen3Next", "Lfm2", "FalconH1"])
def test_many_answers_of_a_network_with_states(kind: str) -> None:
    model = hybrid(kind)
    prompts = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 9, 10, 11], [5, 3]]
    found = generate(model, prompts, SamplingSettings(6, stop_tokens=frozenset([3, 4, 11])))
    for prompt, one in zip(prompts, found, strict=True):
        text = list(prompt)
        while len(text) < len(prompt) + 6:
            with torch.no_grad():
                token = int(model(torch.tensor([text])).logits[0, -1].argmax())
            if token in (3, 4, 11):
                break
            text.append(token)
        assert one.tokens == text[len(prompt) :]


# -- merges ---------------------------------------------------------------------------------------


def test_row_wise_nuslerp_of_a_vector_is_that_of_the_vector(tmp_path: Path) -> None:
    """mergekit transposes what has two dimensions; a vector has one."""
    state, config = family("llama")
    own = torch.Generator().manual_seed(0)
    for name in "ab":
        drawn = {key: torch.randn(t.shape, generator=own) for key, t in state.items()}
        save(tmp_path / name, drawn, config)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 1.0}} for name in "ab"]

    def merged(**parameters: bool) -> Any:
        recipe = {"merge_method": "nuslerp", "models": models, "parameters": parameters}
        return merge(Recipe.model_validate(recipe))

    whole = merged(nuslerp_flatten=True)["model.norm.weight"]
    rows = merged(nuslerp_flatten=False, nuslerp_row_wise=True)["model.norm.weight"]
    torch.testing.assert_close(rows, whole)
