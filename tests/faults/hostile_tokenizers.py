"""Tokenizers and chat templates that are broken, do not fit their model, or attack the reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.hostile_goods import (
    AS_SECOND,
    EITHER,
    MERGES,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    Case,
    Change,
    bytes_of,
    canary_of,
    changed,
    directory,
    fifo,
    keys,
    lenient,
    linked,
    model,
    read,
    text,
    without,
)
from tests.support.tokenizers import CHAT

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL, JINJA = "special_tokens_map.json", "chat_template.jinja"
# Only conversations go through a template.
SILENT = lenient("generate", "evo", "evo-dry", *MERGES)


def edited(edit: Callable[[dict[str, Any]], object]) -> Change:
    """tokenizer.json, edited in place."""

    def change(bad: Path) -> None:
        content = read(bad / TOKENIZER)
        edit(content)
        (bad / TOKENIZER).write_text(json.dumps(content))

    return change


def tokens(name: str, edit: Callable[[dict[str, Any]], object], **rest: Any) -> Case:
    return model(name, edited(edit), **{"where": AS_SECOND, **rest})


def vocabulary(edit: Callable[[dict[str, int]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda content: edit(content["model"]["vocab"])


def _settings(name: str, /, **values: Any) -> Case:
    """A tokenizer_config.json with odd values, which a reader may refuse or not need."""
    return model(name, keys(SETTINGS, **values), allowed=EITHER)


def _processor(ids: list[int]) -> dict[str, Any]:
    """A start that the tokenizer puts before every text."""
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}},
    }


def _added(number: int, content: str = "<evil>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **flags}


def _split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that cuts by a regular expression, then into bytes."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {"type": "Sequence", "pretokenizers": [cut, {**plain, "use_regex": False}]}


TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 1 << 20}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}

TOKENS = (
    model("no tokenizer", without(TOKENIZER, SETTINGS, SPECIAL), where=AS_SECOND),
    model("no tokenizer.json", without(TOKENIZER), where=AS_SECOND),
    model("an empty tokenizer", text(TOKENIZER, ""), where=AS_SECOND),
    model("a tokenizer that is cut", bytes_of(TOKENIZER, lambda data: data[:900]), where=AS_SECOND),
    model("a tokenizer that is a list", text(TOKENIZER, "[]"), where=AS_SECOND),
    model("a tokenizer of nothing", text(TOKENIZER, "{}"), where=AS_SECOND),
    model("a tokenizer that is a pipe", fifo(TOKENIZER), where=AS_SECOND),
    model("a tokenizer that is a folder", directory(TOKENIZER), where=AS_SECOND),
    model(
        "a tokenizer that is a device", linked(TOKENIZER, lambda bad: "/dev/null"), where=AS_SECOND
    ),
    model("a tokenizer that is deep", text(TOKENIZER, "[" * 100_000), where=AS_SECOND),
    model(
        "a tokenizer that is not there, by another's file",
        without(TOKENIZER, SETTINGS),
        text("tokenizer.model", "no model"),
        where=AS_SECOND,
    ),
    model(
        "words without merges",
        without(TOKENIZER, SETTINGS),
        text("vocab.json", '{"a": 0}'),
        where=AS_SECOND,
    ),
    model(
        "words that are a list",
        without(TOKENIZER, SETTINGS),
        text("vocab.json", '["a"]'),
        text("merges.txt", "\x00"),
        where=AS_SECOND,
    ),
    tokens("an unknown kind of tokenizer", lambda c: c["model"].update(type="Evil")),
    tokens("an unknown pre-tokenizer", lambda c: c.update(pre_tokenizer={"type": "Evil"})),
    tokens("an unknown normalizer", lambda c: c.update(normalizer={"type": "Evil"})),
    tokens("an unknown decoder", lambda c: c.update(decoder={"type": "Evil"})),
    tokens("a tokenizer of a later version", lambda c: c.update(version="99.0")),
    tokens("no words", lambda c: c["model"].update(vocab={}, merges=[])),
    tokens("words that are a number", lambda c: c["model"].update(vocab=7)),
    tokens("words that are a list of words", lambda c: c["model"].update(vocab=["a", "b"])),
    tokens("merges of words that are not there", lambda c: c["model"].update(merges=[["x", "yz"]])),
    tokens("ids that are text", vocabulary(lambda v: v.update(a="x"))),
    tokens("ids below 0", vocabulary(lambda v: v.update(a=-1))),
    tokens("ids beyond 2^32", vocabulary(lambda v: v.update(a=1 << 40))),
    tokens(
        "ids beyond the embedding",
        vocabulary(lambda v: v.update({k: i + 4000 for k, i in v.items()})),
    ),
    tokens("an id of a billion", vocabulary(lambda v: v.update({"=": 10**9})), allowed=EITHER),
    tokens(
        "two words of one id", vocabulary(lambda v: v.update(a=v["b"])), allowed=EITHER, same=False
    ),
    tokens(
        "more words than the model knows",
        vocabulary(lambda v: v.update({f"w{n}": 1000 + n for n in range(5000)})),
        allowed=EITHER,
    ),
    tokens(
        "an added word beyond the embedding",
        lambda c: c["added_tokens"].append(_added(9999)),
        allowed=EITHER,
    ),
    tokens(
        "an added word that is a word",
        lambda c: c["added_tokens"].append(_added(9999, "=")),
        allowed=EITHER,
    ),
    tokens("added words that are text", lambda c: c.update(added_tokens="x")),
    tokens("an added word of a negative id", lambda c: c["added_tokens"].append(_added(-1))),
    tokens(
        "an added word that is empty",
        lambda c: c["added_tokens"].append(_added(258, "")),
        allowed=EITHER,
    ),
    tokens(
        "a start beyond the embedding",
        lambda c: c.update(post_processor=_processor([9999])),
        where={**AS_SECOND, **lenient("chat")},  # a template has its own start
    ),
    tokens("a start of nothing", lambda c: c.update(post_processor=_processor([])), allowed=EITHER),
    tokens(
        "a start of many tokens",
        lambda c: c.update(post_processor=_processor([1] * 10**5)),
        allowed=EITHER | TOO_LARGE,
        same=False,
    ),
    tokens(
        "a tokenizer that cuts texts", lambda c: c.update(truncation=TRUNCATION), allowed=EITHER
    ),
    tokens("a tokenizer that fills texts up", lambda c: c.update(padding=PADDING), allowed=EITHER),
    tokens(
        "a tokenizer that forgets merges",
        lambda c: c["model"].update(dropout=1.0),
        allowed=EITHER,
        same=False,
    ),
    tokens(
        "a tokenizer that forgets more than all",
        lambda c: c["model"].update(dropout=7.0),
        allowed=EITHER,
        same=False,
    ),
    tokens("a pattern that is none", lambda c: c.update(pre_tokenizer=_split("(["))),
    tokens(
        "texts that vanish",
        lambda c: c.update(
            normalizer={"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}
        ),
        where={**AS_SECOND, "chat": EITHER},  # the ends of lines are left
        same=False,
    ),
    model(
        "a pattern that takes for ever",
        edited(lambda c: c.update(pre_tokenizer=_split("(x+x+)+y"))),
        keys(SETTINGS, chat_template="{{ 'x' * 5000 }}!" + CHAT),
        without(JINJA),
        allowed=EITHER | TOO_LARGE,
        talks=True,
        same=False,
    ),
    model("no tokenizer_config", without(SETTINGS), allowed=EITHER),
    model("a tokenizer_config that is no JSON", text(SETTINGS, "{"), allowed=EITHER),
    model("a tokenizer_config that is a list", text(SETTINGS, "[]"), allowed=EITHER),
    model("a tokenizer_config that is a pipe", fifo(SETTINGS), allowed=EITHER),
    model("a tokenizer_config that is a folder", directory(SETTINGS), allowed=EITHER),
    model("special tokens that are no JSON", text(SPECIAL, "{"), allowed=EITHER),
    model("special tokens that are a list", text(SPECIAL, "[1]"), allowed=EITHER),
    model("special tokens that are a pipe", fifo(SPECIAL), allowed=EITHER),
    model("added tokens that are no JSON", text("added_tokens.json", "{"), allowed=EITHER),
    _settings("an end that is a number", eos_token=5),
    _settings("an end that is a list", eos_token=["a"]),
    _settings("an end that is nothing", eos_token=None),
    _settings("an end that the words lack", eos_token="<evil>", bos_token="<worse>"),
    _settings("a start without content", bos_token={"__type": "AddedToken"}),
    _settings("a side that does not exist", padding_side="up", truncation_side="down"),
    _settings("added words without a number", added_tokens_decoder={"x": {"content": "a"}}),
    _settings("added words that are numbers", added_tokens_decoder={"5": 7}),
    _settings("added words of a billion", added_tokens_decoder={"1000000000": {"content": "<e>"}}),
    _settings("special words that are text", extra_special_tokens="x"),
    _settings("special words that are numbers", additional_special_tokens=[1, None]),
    _settings("a length below 0", model_max_length=-5),
    _settings("a length that is text", model_max_length="x"),
    _settings("a length of 1", model_max_length=1),
    _settings("a class that is a number", tokenizer_class=7),
    _settings("a class that is nothing", tokenizer_class=None),
    _settings("a class that does not exist", tokenizer_class="EvilTokenizerFast"),
    _settings("cleaning that is text", clean_up_tokenization_spaces="maybe"),
    _settings("a keyword that is in use", name="x", tokenizer_object="x", self="x"),
    _settings("a tokenizer of the hub", backend="evil", fix_mistral_regex=True),
    model(
        "another class of tokenizer",
        keys(SETTINGS, tokenizer_class="BertTokenizer"),
        allowed=EITHER,
        same=False,
    ),
)


# -- templates ------------------------------------------------------------------------------------


def template(name: str, written: Any, allowed: frozenset[int] = REFUSED, **rest: Any) -> Case:
    """A model with this chat template, asked to talk."""
    change = keys(SETTINGS, chat_template=written)
    where = SILENT if 0 not in allowed else lenient("evo", "evo-dry", *MERGES)
    defaults: dict[str, Any] = {"talks": True, "where": where, "same": False}
    return model(name, change, without(JINJA), allowed=allowed, **{**defaults, **rest})


def escape(name: str, expression: str) -> Case:
    """A template that reaches for Python: `MAKE` stands for the name of the canary."""

    def change(bad: Path) -> None:
        written = "{{ " + expression.replace("MAKE", repr(str(canary_of(bad.parent)))) + " }}"
        keys(SETTINGS, chat_template=written + CHAT)(bad)

    made = changed(change, without(JINJA))
    return Case(name, "model", made, talks=True, where=SILENT, allowed=EITHER, same=False)


LOOP = "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
QUIET = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = (
    model("a conversation", talks=True, allowed=RIGHT),
    template("no template", None, EITHER),
    template("a template with a wrong end", "{% for m in messages %}"),
    template("a template with an unknown tag", "{% evil %}"),
    template("a template with an unknown filter", "{{ messages | evil }}"),
    template("a template with an unknown test", "{{ messages is evil }}"),
    template("a template that refuses", "{{ raise_exception('not for you') }}", says="not for you"),
    template("a template with an unknown name", "{{ evil.worse.worst }}"),
    template("a template that calls nothing", "{{ evil() }}"),
    template("a template that divides by 0", "{{ 1 / 0 }}"),
    template("a template that adds what cannot be", "{{ messages + 1 }}"),
    template("a template that looks too far", "{{ messages[99].content.x }}"),
    template("a template that reads a file", "{% include '/etc/passwd' %}"),
    template("a template that imports", "{% import 'os' as os %}{{ os }}"),
    template("a template that extends", "{% extends '/etc/passwd' %}"),
    template("a template that changes the messages", "{{ messages.clear() }}", EITHER),
    template("a template that loops", LOOP),
    template("a template that loops quietly", QUIET),
    template("a template that calls itself", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    template("a template that writes a terabyte", "{{ 'x' * 10**13 }}", TOO_LARGE),
    template("a template that fills a line up", "{{ 'x' | center(10**13) }}", TOO_LARGE),
    template("a template that writes a wide number", "{{ '%10000000000000d' % 1 }}", TOO_LARGE),
    template("a template that writes 10 MB", "{{ 'x' * 10**7 }}" + CHAT, EITHER | TOO_LARGE),
    template("a template that counts too far", "{{ range(10**12) | list }}", TOO_LARGE),
    template("a template with a large power", "{{ 3 ** (10 ** 9) }}", TOO_LARGE),
    template(
        "a template that doubles itself",
        "{% set n = namespace(x='x') %}{% for i in range(45) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        TOO_LARGE,
    ),
    template("a template of nothing", "{# nothing #}"),
    template("a template that is empty", "", EITHER),
    template("a template of spaces", "  \n ", EITHER | REFUSED),
    template("a template that forgets the answer", "{{ messages[0].content }}", EITHER),
    template("a template with a zero", "{{ '\\0' }}" + CHAT, EITHER),
    template("a template with half a surrogate", "\ud800" + CHAT, EITHER),
    template("a template of half a surrogate", "{{ '\\ud800' }}" + CHAT, EITHER),
    template("a template that is a number", 7, EITHER),
    template("a template that is a list", ["x"], EITHER),
    template("a template that is an object", {"a": 1}, EITHER),
    template("templates by name", [{"name": "default", "template": CHAT}], EITHER, same=True),
    template("templates by name, none of them first", [{"name": "x", "template": CHAT}], EITHER),
    template("templates without names", [{"x": 1}], EITHER),
    template("a template that is deep", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    template("a template of many blocks", "{% if 1 %}" * 300 + "x" + "{% endif %}" * 300, EITHER),
    escape("a template that asks for classes", "''.__class__.__mro__[1].__subclasses__()"),
    escape("a template that climbs by cycler", "cycler.__init__.__globals__.os.mkdir(MAKE)"),
    escape("a template that climbs by lipsum", "lipsum.__globals__['os'].mkdir(MAKE)"),
    escape(
        "a template that climbs by itself",
        "self.__init__.__globals__.__builtins__.__import__('os').mkdir(MAKE)",
    ),
    escape(
        "a template that climbs by a function",
        "raise_exception.__globals__['__builtins__']['__import__']('os').mkdir(MAKE)",
    ),
    escape(
        "a template that climbs by a clock",
        "strftime_now.__globals__['__builtins__']['__import__']('os').mkdir(MAKE)",
    ),
    escape("a template that climbs by attr", "(lipsum | attr('__globals__'))['os'].mkdir(MAKE)"),
    escape("a template that climbs by format", "'{0.__class__.__mro__}'.format(messages)"),
    escape(
        "a template that climbs by a map",
        "([lipsum] | map(attribute='__globals__') | list)[0]['os'].mkdir(MAKE)",
    ),
    *(
        model(
            f"a template file {how}", change, talks=True, where=SILENT, allowed=allowed, same=False
        )
        for how, change, allowed in (
            ("with a wrong end", text(JINJA, "{% for m in messages %}"), REFUSED),
            ("that is empty", text(JINJA, ""), EITHER),
            ("that is no UTF-8", text(JINJA, b"\xff\xfe{{"), REFUSED),
            ("that is a pipe", fifo(JINJA), EITHER),
            ("that is a folder", directory(JINJA), EITHER),
            ("that loops", text(JINJA, LOOP), REFUSED),
            ("of another name", text("additional_chat_templates/x.jinja", "{% evil %}"), EITHER),
            ("of old form", text("chat_template.json", '{"chat_template": 7}'), EITHER),
        )
    ),
)

CASES: tuple[Case, ...] = (*TOKENS, *TEMPLATES)
