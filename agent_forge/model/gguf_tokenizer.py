"""A tokenizer in the form of GGUF, and the Modelfile of Ollama: how a model is talked to.

llama.cpp has its own code for the words that a text is parted into, by name: a tokenizer whose
words it does not know would give other tokens, so it is refused.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from agent_forge.errors import ConfigError, HostileInput
from agent_forge.model.chat import render

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens in GGUF
GPT2, DIGITS = "<gpt2>", "<digits>"
# Of a model and of added tokens: what llama.cpp does not read.
UNREAD = ("byte_fallback", "end_of_word_suffix", "continuing_subword_prefix")
FLAGS = ("lstrip", "rstrip", "single_word")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What parts a text into words -> the name that llama.cpp has for it.
WORDS = {(GPT2,): "gpt-2", (DIGITS, GPT2): "smollm", (_WORDS % r"\p{N}",): "qwen2"}
WORDS |= {(_WORDS % r"\p{N}{1,3}",): "llama-bpe"}
# Turns of conversations that Ollama is told of: ChatML, Llama 3, Zephyr.
TURNS = (
    "<|im_start|>{role}\n{content}<|im_end|>\n",
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "<|{role}|>\n{content}</s>\n",
)


def add_tokenizer(writer: Any, tokenizer: Any, rows: int, ends: frozenset[int]) -> None:
    """Put a byte-level BPE tokenizer into the head of a GGUF file; `rows` has the embedding."""
    vocabulary = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:  # as text it would have a line for each id
        raise ConfigError(f"the tokenizer has tokens beyond the {rows} rows of the embedding")
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_words_of(core))
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in vocabulary.items():
        tokens[i], kinds[i] = text, NORMAL
    for i, token in tokenizer.added_tokens_decoder.items():
        tokens[i], kinds[i] = token.content, CONTROL if token.special else USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = core["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    _add_special(writer, tokenizer, ends)
    if isinstance(template := tokenizer.chat_template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _words_of(core: dict[str, Any]) -> str:
    """What llama.cpp calls the way in which a tokenizer parts a text into words."""
    model, normalizer = core["model"], (core.get("normalizer") or {}).get("type")
    words = tuple(_parts(core.get("pre_tokenizer") or {}))
    name = WORDS.get(words)
    plain = model["type"] == "BPE" and model.get("merges") and not any(map(model.get, UNREAD))
    plain = plain and '"ByteLevel"' in json.dumps(core["pre_tokenizer"])
    plain = plain and not any(token.get(flag) for token in core["added_tokens"] for flag in FLAGS)
    usual = normalizer is None or (name == "qwen2" and normalizer == "NFC")
    usual = usual and model.get("ignore_merges", False) == (name == "llama-bpe")
    if name is None or not plain or not usual:
        known = "GPT-2, SmolLM, Qwen2 and Llama 3"
        hint = f"byte-level BPE as of {known} is written; llama.cpp has a converter for more"
        raise ConfigError("the tokenizer is none that llama.cpp is known to read alike", hint=hint)
    return name


def _parts(step: dict[str, Any]) -> Iterator[str]:
    kind = step.get("type")
    if kind == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _parts(inner)
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        yield from [GPT2] if step.get("use_regex", True) else []
    elif kind == "Digits" and step.get("individual_digits"):
        yield DIGITS
    elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        yield step["pattern"].get("Regex", "")
    else:
        yield f"<{kind}>"


def _add_special(writer: Any, tokenizer: Any, ends: frozenset[int]) -> None:
    """Say which tokens begin and end texts and answers."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if ends and eos not in ends:
        eos = min(ends)
    others = sorted(ends - {eos})
    ids = {"bos": bos, "eos": eos, "eot": others[0] if others else None}
    ids |= {"unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    for name, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    first, last = _around(tokenizer)
    if first not in ([], [bos]) or last not in ([], [eos]):
        raise ConfigError("the tokenizer adds more to a text than llama.cpp can: a start, an end")
    form = chat_form(tokenizer)
    writer.add_add_bos_token(bool(first) and (form is None or bool(form.start)))
    writer.add_add_eos_token(bool(last))


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    begin = whole.index(bare[0])
    return whole[:begin], whole[begin + len(bare) :]


class ChatForm(NamedTuple):
    """A conversation of a form that Ollama can be told."""

    turn: str
    start: str  # what the template writes before the first turn
    system: str  # what the template says where nobody is the system


def chat_form(tokenizer: Any) -> ChatForm | None:
    """The form that the chat template of a tokenizer has; None if it is none that is known."""
    for turn in TURNS if tokenizer.chat_template else ():
        for start in dict.fromkeys(("", tokenizer.bos_token or "")):
            if (system := _default_system(tokenizer, turn, start)) is not None:
                return ChatForm(turn, start, system)
    return None


def modelfile(name: str, tokenizer: Any, ends: frozenset[int]) -> str:
    """The Modelfile for a GGUF file beside it."""
    lines = [f"FROM ./{name}"]
    if form := chat_form(tokenizer):
        adds = bool(_around(tokenizer)[0])
        if adds and not form.start:
            _refuse_marks(tokenizer.bos_token, "\n", "\r")
            what = f"a conversation begins without {tokenizer.bos_token}, as its template has it"
            lines.append(f"# By this file {what}; so does a plain text.")
        start = "" if adds else form.start  # else llama.cpp adds it
        _refuse_marks(start, '"""', "{{")
        shown = form.turn.format(role="{{ .Role }}", content="{{ .Content }}")
        messages = f"{start}{{{{- range .Messages }}}}{shown}{{{{ end }}}}"
        lines.append(f'TEMPLATE """{messages}{_opening(form.turn)}"""')
        told = form.system and '"""' not in form.system
        lines += [f'SYSTEM """{form.system}"""'] if told else []
    for end in sorted(ends):
        added = tokenizer.added_tokens_decoder.get(end)
        text = added.content if added else tokenizer.decode([end])
        _refuse_marks(text, '"""')
        quote = '"""' if '"' in text or "\n" in text else '"'  # nothing in between is an escape
        lines.append(f"PARAMETER stop {quote}{text}{quote}")
    return "\n".join(lines) + "\n"


def _refuse_marks(text: str, *marks: str) -> None:
    """Refuse a token that would end its place in a Modelfile and go on with lines of its own."""
    if any(mark in text for mark in marks):
        problem = f"the tokenizer has {text[:60]!r}, which cannot stand in a Modelfile"
        raise HostileInput(problem, hint="look at where the model is from")


def _opening(turn: str) -> str:
    """How an answer begins."""
    return turn.partition("{content}")[0].format(role="assistant")


def _default_system(tokenizer: Any, turn: str, start: str) -> str | None:
    """What a chat template says where nobody is the system; None if its turns, or what is before
    the first one, are others."""

    def shown(roles: Sequence[str]) -> str:
        messages = [{"role": role, "content": f"what {role} says"} for role in roles]
        return render(tokenizer, messages, reply=True)

    def expected(roles: Sequence[str]) -> str:
        turns = (turn.format(role=role, content=f"what {role} says") for role in roles)
        return "".join(turns) + _opening(turn)

    try:
        if shown(whole := ("system", "user", "assistant", "user")) != start + expected(whole):
            return None
        text, asked = shown(("user",)), expected(("user",))
    except ConfigError:  # its template refuses such conversations
        return None
    before, after = turn.partition("{content}")[::2]
    begin, end = start + before.format(role="system"), after + asked
    if text.startswith(begin) and text.endswith(end):
        return text[len(begin) : -len(end)]
    return "" if text == start + asked else None
