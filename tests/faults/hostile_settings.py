"""Configs of models that are broken, lie or ask for more than any machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.hostile_goods import (
    AS_SECOND,
    BAD,
    CONFIG,
    EITHER,
    REFUSED,
    RIGHT,
    SHAPE,
    TOO_LARGE,
    WEIGHTS,
    Case,
    Make,
    bytes_of,
    config,
    directory,
    fifo,
    keys,
    linked,
    mapped,
    model,
    no_keys,
    read,
    tensors,
    text,
    without,
)

GENERATION = "generation_config.json"


def odd(name: str, allowed: frozenset[int] = REFUSED, *, same: bool = True, **values: Any) -> Case:
    """A config that a network cannot be built from, or hardly."""
    return model(name, config(**values), allowed=allowed, where=AS_SECOND, same=same)


def lie(name: str, family: str = "llama", **values: Any) -> Case:
    """A config that does not fit the tensors: to be refused by every command."""
    return model(name, config(**values), family=family, allowed=TOO_LARGE)


LIES = (
    lie("more layers than in the file", num_hidden_layers=3),
    lie("fewer layers than in the file", num_hidden_layers=1),
    lie("no layers", num_hidden_layers=0),
    lie("more layers than in the file of gpt2", "gpt2", n_layer=3),
    lie("a vocabulary larger than the embedding", vocab_size=300),
    lie("a vocabulary smaller than the embedding", vocab_size=100),
    lie("a width that is too large", hidden_size=32),
    lie("a width that is too small", hidden_size=8),
    lie("an inner width that is wrong", intermediate_size=99),
    lie("heads that do not divide the width", num_attention_heads=3),
    lie("fewer heads for keys than in the file", num_key_value_heads=1),
    lie("an odd head", head_dim=7),
    lie("biases that are not in the file", attention_bias=True),
    lie("biases of the MLP that are not in the file", mlp_bias=True),
    lie("attention to another model that is not in the file", "gpt2", add_cross_attention=True),
    lie("positions of gpt2 that are not in the file", "gpt2", n_positions=128),
    lie("another type of network", model_type="gpt_neox"),
    lie("a type that is nearly the same", model_type="mixtral"),
)
COUNTS = ("two", None, [2], -1, 10**9, {"a": 1}, 2.5, True)
TYPES = (
    *(odd(f"layers: {json.dumps(value)}", TOO_LARGE, num_hidden_layers=value) for value in COUNTS),
    *(
        odd(f"width: {json.dumps(value)}", TOO_LARGE, hidden_size=value)
        for value in ("x", None, -16, 0, 10**9)
    ),
    *(
        odd(f"vocabulary: {json.dumps(value)}", TOO_LARGE, vocab_size=value)
        for value in ("x", -1, 0, 10**12)
    ),
    *(
        odd(f"heads: {json.dumps(value)}", num_attention_heads=value)
        for value in ("x", 0, -2, 10**9)
    ),
    odd("no heads for keys", num_key_value_heads=0),
    odd("an activation that does not exist", hidden_act="evil"),
    odd("an activation that is nothing", hidden_act=None),
    odd("an activation that is a number", hidden_act=7),
    odd("an epsilon that is text", rms_norm_eps="x"),
    odd("an epsilon that is a list", rms_norm_eps=[1]),
    odd("an epsilon below 0", EITHER, rms_norm_eps=-5.0, same=False),
    odd("a spread that is text", EITHER, initializer_range="x"),
    odd("a dropout of 2", EITHER, attention_dropout=2.0),
    odd("a dropout that is text", EITHER, attention_dropout="x"),
    *(
        odd(f"positions: {json.dumps(value)}", EITHER, max_position_embeddings=value)
        for value in (0, -1, 10**9, "x", None, 1e9, [64])
    ),
    odd("one position", EITHER, max_position_embeddings=1, same=False),
    *(
        odd(f"type of the weights: {json.dumps(value)}", EITHER, dtype=value, torch_dtype=value)
        for value in ("float7", 5, {"a": 1}, "int8", "os.system", "nn", ["float32"])
    ),
    odd("a type that the weights do not have", RIGHT, dtype="bfloat16"),
    *(
        odd(f"rope: {json.dumps(value)}", EITHER, rope_scaling=value, rope_parameters=value)
        for value in ("x", 7, [], {"type": "evil"}, {"rope_type": "yarn", "factor": "x"})
    ),
    odd(
        "rope without its numbers",
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4},
    ),
    *(
        odd(f"rope theta: {json.dumps(value)}", EITHER, same=False, **_rope)
        for value in ("x", 0, -1.0, [1])
        for _rope in ({"rope_theta": value, "rope_parameters": {"rope_theta": value}},)
    ),
    *(
        odd(f"end: {json.dumps(value)}", EITHER, eos_token_id=value, same=False)
        for value in ("x", 10**9, -5, [1, "x"], {"a": 1}, 1.5)
    ),
    odd("a padding outside the vocabulary", EITHER, pad_token_id=10**9),
    odd("a padding below 0", EITHER, pad_token_id=-1),
    odd("a padding that is text", EITHER, pad_token_id="x"),
    odd("a beginning that is text", EITHER, bos_token_id="x"),
    odd("kinds of layers that do not exist", EITHER, layer_types=["evil", "evil"]),
    odd("kinds of layers for other layers", EITHER, layer_types=["full_attention"] * 7),
    odd("results as a tuple", EITHER, return_dict=False),
    odd("results as a tuple, old form", EITHER, use_return_dict=False, torchscript=True),
    odd("more results than asked for", EITHER, output_attentions=True, output_hidden_states=True),
    odd("without a cache", EITHER, use_cache=False),
    odd("a cache that is text", EITHER, use_cache="no"),
    odd("labels that are text", EITHER, id2label="x", num_labels=-1),
    odd("labels that are a list", EITHER, id2label=[1, 2], label2id=7),
    odd("a problem that does not exist", EITHER, problem_type="evil"),
    odd("architectures that are a number", EITHER, architectures=7),
    odd("architectures that are none", EITHER, architectures=[]),
    odd("architectures of numbers", EITHER, architectures=[7, None]),
    odd("an architecture for other work", EITHER, architectures=["LlamaForSequenceClassification"]),
    odd("an encoder and a decoder", EITHER, is_encoder_decoder=True),
    odd("attention that does not exist", EITHER, attn_implementation="evil"),
    odd("attention that is not installed", EITHER, attn_implementation="flash_attention_2"),
    odd("a version to come", RIGHT, transformers_version="99.9.9"),
    odd("a version that is a list", EITHER, transformers_version=[1]),
    odd("tied that is text", EITHER, tie_word_embeddings="no", same=False),
    odd("keys that are methods", EITHER, to_dict=1, get_text_config=1, to_json_string=1),
    odd("keys that are classes", EITHER, __class__="x", __dict__={"a": 1}, __init__=1),
    odd("keys that are properties", EITHER, use_return_dict="x", name_or_path=7, num_labels="x"),
    odd("parts of many models", EITHER, text_config={"model_type": "evil"}, vision_config={}),
    odd("parts that are text", EITHER, text_config="x"),
    odd("a chunk that is text", EITHER, chunk_size_feed_forward="x", pruned_heads={"0": [0]}),
    odd(
        "bytes in four", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    odd("gptq", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
    odd("a quantization that does not exist", quantization_config={"quant_method": "evil"}),
    odd("a quantization that is text", EITHER, quantization_config="x"),
    odd("a quantization that is nothing", EITHER, quantization_config={}),
    *(
        model(f"type: {json.dumps(value)}", config(model_type=value))
        for value in (None, 7, [], {}, "", " llama ", "LLAMA", "auto")
    ),
)


# -- config.json as a file ------------------------------------------------------------------------


def _spaced(content: bytes) -> bytes:
    return content + b" " * 100_000_000


def _deep(content: bytes) -> bytes:
    return content.rstrip()[:-1] + b', "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _again(**values: Any) -> Any:
    """Keys of the config again, at its end."""
    return lambda content: content.rstrip()[:-1] + b", " + json.dumps(values).encode()[1:]


def _first(content: bytes) -> bytes:
    return b'{"num_hidden_layers": 9, ' + content.lstrip()[1:]


def _written(value: str) -> Any:
    """A value of JSON that Python's own writer would not write."""
    return lambda content: content.rstrip()[:-1] + f', "rms_norm_eps": {value}}}'.encode()


FILE = (
    model("no config", without(CONFIG)),
    model("an empty config", text(CONFIG, "")),
    model("a config that is no JSON", text(CONFIG, "model_type: llama")),
    model("a config that is cut", bytes_of(CONFIG, lambda data: data[:-20])),
    model("a config that is a list", text(CONFIG, '["llama"]')),
    model("a config that is a number", text(CONFIG, "7")),
    model("a config that is nothing", text(CONFIG, "null")),
    model("a config of a type alone", text(CONFIG, '{"model_type": "llama"}'), allowed=TOO_LARGE),
    model("a config with NaN", bytes_of(CONFIG, _written("NaN")), where=AS_SECOND),
    model(
        "a config with infinity", bytes_of(CONFIG, _written("1e999")), allowed=EITHER, same=False
    ),
    model("a config of many digits", bytes_of(CONFIG, _written("9" * 5000)), where=AS_SECOND),
    model("a config of 100 MB", bytes_of(CONFIG, _spaced), allowed=EITHER | TOO_LARGE),
    model("a config that is deep", bytes_of(CONFIG, _deep), allowed=EITHER),
    model("a config with a mark", bytes_of(CONFIG, lambda d: b"\xef\xbb\xbf" + d), allowed=EITHER),
    model(
        "a config in UTF-16",
        bytes_of(CONFIG, lambda d: d.decode().encode("utf-16")),
        allowed=EITHER,
    ),
    model(
        "a config that is no UTF-8", bytes_of(CONFIG, lambda d: d.replace(b"llama", b"ll\xffma"))
    ),
    model("a config with zeros", bytes_of(CONFIG, lambda data: data + b"\0\0")),
    model("a key that is repeated, wrongly", bytes_of(CONFIG, _again(num_hidden_layers=9))),
    model("a key that is repeated, rightly", bytes_of(CONFIG, _first), allowed=EITHER),
    model("a config that is a folder", directory(CONFIG)),
    model("a config that is a pipe", fifo(CONFIG)),
    model("a config that is a device", linked(CONFIG, lambda bad: "/dev/null")),
    model("a config with half a surrogate", config(note="\ud800"), allowed=EITHER),
    model("a config with many keys", config(**{f"k{n}": n for n in range(20_000)}), allowed=EITHER),
)


# -- generation_config.json -----------------------------------------------------------------------


def speaks(name: str, **values: Any) -> Case:
    return model(name, keys(GENERATION, **values), allowed=EITHER)


SPEECH = (
    model("generation that is no JSON", text(GENERATION, "{"), allowed=EITHER),
    model("generation that is a list", text(GENERATION, "[]"), allowed=EITHER),
    model("generation that is nothing", text(GENERATION, ""), allowed=EITHER),
    model("generation that is a folder", directory(GENERATION), allowed=EITHER),
    model("generation that is a pipe", fifo(GENERATION), allowed=EITHER),
    model("no generation", without(GENERATION), allowed=RIGHT),
    *(
        speaks(f"end of generation: {json.dumps(value)}", eos_token_id=value)
        for value in ("x", 10**9, [10**9], {"a": 1}, [[1]])
    ),
    speaks("tokens that are text", max_new_tokens="many", max_length="x", min_length=-1),
    speaks("a temperature below 0", temperature=-1.0, do_sample=True, top_k="x", top_p=7),
    speaks("beams below 0", num_beams=-1, num_return_sequences=10**9),
    speaks("a cache that does not exist", cache_implementation="evil", use_cache="x"),
    speaks("a way to generate of the hub", custom_generate="someone/evil", trust_remote_code=True),
    speaks("words that stop it", stop_strings=[""], bad_words_ids=[[]], suppress_tokens=["x"]),
)


# -- models of other kinds ------------------------------------------------------------------------


def _other(kind: str) -> Make:
    """A small model that is no causal language model, with a good tokenizer beside it."""

    def make(folder: Path, good: Path) -> str:
        import transformers as hf

        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        small |= {"intermediate_size": 16}
        made = {
            "bert": lambda: hf.BertModel(hf.BertConfig(vocab_size=260, **small)),
            "bert for masks": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=260, **small)),
            "vit": lambda: hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **small)),
            "t5": lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=260, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "llama for classes": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SHAPE)),
            "llama without a head": lambda: hf.LlamaModel(hf.LlamaConfig(**SHAPE)),
        }[kind]()
        made.save_pretrained(folder / BAD)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / BAD / name).write_bytes((good / name).read_bytes())
        return str(folder / BAD)

    return make


KINDS = ("bert", "bert for masks", "vit", "t5", "llama for classes", "llama without a head")
OTHERS = tuple(Case(f"a model of another kind: {kind}", "model", _other(kind)) for kind in KINDS)


def _odd_heads(bad: Path) -> None:
    """Heads of 5 numbers: rotary positions turn pairs."""
    config(head_dim=5, hidden_size=16, num_attention_heads=2)(bad)
    for layer in range(read(bad / CONFIG)["num_hidden_layers"]):
        for name in "qkv":
            mapped(f"model.layers.{layer}.self_attn.{name}_proj.weight", lambda t: t[:10])(bad)
        mapped(f"model.layers.{layer}.self_attn.o_proj.weight", lambda t: t[:, :10])(bad)


SHAPES = (
    model("heads that cannot be turned", _odd_heads, where=AS_SECOND),
    model("a vocabulary that no tokenizer has", config(vocab_size=0), tensors(lambda s: {})),
    model("no type", no_keys(CONFIG, "model_type")),
    model(
        "weights that a config of gpt2 is beside", text(CONFIG, json.dumps({"model_type": "gpt2"}))
    ),
    model(
        "a config that names other weights",
        config(weights="/etc/passwd", gguf_file=WEIGHTS),
        allowed=EITHER,
    ),
)

CASES: tuple[Case, ...] = (*LIES, *TYPES, *FILE, *SPEECH, *OTHERS, *SHAPES)
