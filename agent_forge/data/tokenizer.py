"""The tokenizer: byte-level BPE with single digits and special tokens at fixed low ids.

Any text comes back exactly, because every byte is a token. `encode` reads special names in a text
as letters; their ids are placed by `compose` and `chat` alone. The files are those of Hugging Face:
`AutoTokenizer` gives the same ids, but for special names inside a message of its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from agent_forge.config.settings import ModelSettings
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.store import files

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
END_OF_TURN = "<|end|>"
TOOL_CALL, END_OF_CALL = "<|tool_call|>", "<|end_call|>"
TOOL_RESULT, END_OF_RESULT = "<|tool_result|>", "<|end_result|>"
THINKING, END_OF_THINKING = "[thinking]", "[/endthinking]"
ROLES = ("system", "user", "assistant")
STRATEGIES = ["<step>", "<mece>", "<falsify>", "<expert>", "<orthogonal>"]
STRATEGIES += ["<doubt>", "<bayesian>", "<multidomain>", "<correct>", "<uncertain>"]
_NAMES = [END_OF_TEXT, PADDING, *(f"<|{role}|>" for role in ROLES), END_OF_TURN]
_NAMES += [TOOL_CALL, END_OF_CALL, TOOL_RESULT, END_OF_RESULT]
_NAMES += [THINKING, END_OF_THINKING, *STRATEGIES]
SPECIAL: dict[str, int] = {name: i for i, name in enumerate(_NAMES)}
SMALLEST_VOCAB = len(SPECIAL) + 256

FILE = "tokenizer.json"
_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
CHAT_TEMPLATE = "".join(map(str.strip, _template.splitlines()))
Message = Mapping[str, Any]


def behind_thought(
    ids: Sequence[int],
    marks: tuple[int, int] = (SPECIAL[THINKING], SPECIAL[END_OF_THINKING]),
    *,
    within: bool = False,
) -> Sequence[int]:
    """What is said behind the last thought; nothing if that has no end. `within`: the ids begin in
    a thought."""
    last = next((n for n in reversed(range(len(ids))) if ids[n] in marks), -1)
    open_thought = within if last < 0 else ids[last] == marks[0]
    return [] if open_thought else ids[last + 1 :]


class Tokenizer:
    """Text to ids and back. Made by `train` or `load`."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.encode_special_tokens = True  # special names in a text are text
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._json = core.to_str().encode()
        added = core.get_added_tokens_decoder().items()
        self._specials = {i: token.content.encode() for i, token in added if token.special}
        self._bytes = _byte_table(core)
        self.vocab_size: int = max(core.get_vocab().values(), default=-1) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn up to `vocab_size` tokens from texts: the same texts give the same bytes."""
        if vocab_size < SMALLEST_VOCAB:
            needed = f"{len(SPECIAL)} special tokens and 256 bytes need {SMALLEST_VOCAB}"
            raise ConfigError(f"a vocabulary of {vocab_size} is too small: {needed}")
        core = tokenizers.Tokenizer(models.BPE())
        digits = pre_tokenizers.Digits(individual_digits=True)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        sizes: set[int] = set()

        def checked(text: str) -> str:
            _refuse_surrogates(text)
            sizes.add(len(text))
            return text

        core.train_from_iterator(map(checked, texts), trainer)
        if not any(sizes):
            raise ConfigError("a tokenizer cannot be trained on no text")
        return cls(core)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer.json of a folder; it need not be one of ours (see `fits`)."""
        path = folder / FILE
        if not path.is_file():
            raise NotFound(f"{folder} has no {FILE}")
        content = path.read_bytes()
        try:
            core = tokenizers.Tokenizer.from_buffer(content)
            refuse_chance(core, folder)
            return cls(core)
        except ConfigError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise DamagedFile(path, f"not a tokenizer ({error})") from error

    def pruned(self, documents: Sequence[Sequence[int]]) -> tuple[Tokenizer, list[int]]:
        """A tokenizer of what these documents use, special tokens and bytes, and the ids that its
        tokens have here. Their texts are read as before; others may take more tokens."""
        self._require_specials()
        record = json.loads(self._json)
        ids: dict[str, int] = record["model"]["vocab"]
        merges = [tuple(pair) for pair in record["model"]["merges"]]
        words = {
            word
            for text in {self.decode(run) for own in documents for run in _between_specials(own)}
            for word, _ in self._core.pre_tokenizer.pre_tokenize_str(text)
        }
        # A word that is a token is read at once; of others, the way to their tokens is needed.
        parts = {t.value for w in words - ids.keys() for t in self._core.model.tokenize(w)}
        for first, second in reversed(merges):
            if first + second in parts:
                parts |= {first, second}
        names = {i: name for name, i in ids.items()}
        used = {names[i] for document in documents for i in {*document}}
        kept = {w for w in words if w in ids} | parts | used | {n for n in ids if len(n) == 1}
        before = sorted(ids[name] for name in kept | set(SPECIAL))
        record["model"]["vocab"] = {names[i]: new for new, i in enumerate(before)}
        record["model"]["merges"] = [list(pair) for pair in merges if "".join(pair) in parts]
        record["model"]["ignore_merges"] = True
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(record))), before

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Special names in it are plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        for text in texts:
            _refuse_surrogates(text)
        batch = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """The text of ids; special tokens are left out, or shown by name."""
        if self._bytes is None:
            return str(self._core.decode(list(ids), skip_special_tokens=not specials))
        shown = self._specials if specials else {}
        try:
            text = b"".join(shown.get(i) or self._bytes[i] for i in ids)
        except KeyError as error:
            raise ConfigError(f"no token has the id {error.args[0]}") from None
        return text.decode(errors="replace")

    def compose(self, *parts: str | int) -> list[int]:
        """Texts and ids in a row: a text is read as plain text, an id stays as it is."""
        self._require_specials()
        encoded = iter(self.encode_batch([part for part in parts if isinstance(part, str)]))
        ids: list[int] = []
        for part in parts:
            ids.extend(next(encoded) if isinstance(part, str) else [part])
        return ids

    def encode_chat(self, messages: Sequence[Message], *, reply: bool = False) -> list[int]:
        """The ids of a conversation; with `reply` it ends where the assistant is to go on."""
        return self.chat(messages, reply=reply)[0]

    def chat(
        self, messages: Sequence[Message], *, reply: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and of each whether the assistant says it (is learned)."""
        ids: list[int] = []
        said: list[bool] = []
        for number, message in enumerate(messages, start=1):
            piece = self.compose(*_parts(message, number))
            ids += piece
            said += [False] + [message["role"] == "assistant"] * (len(piece) - 1)
        if reply:
            ids.append(SPECIAL["<|assistant|>"])
            said.append(False)
        return ids, said

    def _require_specials(self) -> None:
        for name, i in SPECIAL.items():
            if self._specials.get(i) != name.encode():
                problem = f"this tokenizer has no special token {name} at id {i}"
                raise ConfigError(problem, hint="use a tokenizer that agent-forge trained")

    def fits(self, settings: ModelSettings) -> None:
        """Refuse a tokenizer that a network of this shape cannot be used with."""
        self._require_specials()
        if self.vocab_size > settings.vocab_size:
            counts = f"{self.vocab_size} tokens, the model only {settings.vocab_size}"
            hint = f"--set model.vocab_size={self.vocab_size}, or train a smaller tokenizer"
            raise ConfigError(f"the tokenizer has {counts}", hint=hint)

    def files(self) -> dict[str, bytes]:
        """The files of Hugging Face, by name, as ModelStorage.save_model takes them."""
        named = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": PADDING}
        config = {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        ends = [SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]]
        generation = {"eos_token_id": ends, "pad_token_id": SPECIAL[PADDING]}
        records = {"tokenizer_config": config, "special_tokens_map": named}
        records["generation_config"] = generation
        return {FILE: self._json} | {f"{n}.json": files.to_json(r) for n, r in records.items()}


def _between_specials(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The runs of ordinary tokens."""
    for special, run in groupby(ids, lambda i: i < len(SPECIAL)):
        if not special:
            yield tuple(run)


def refuse_chance(core: tokenizers.Tokenizer, folder: Path) -> None:
    """Refuse a tokenizer that draws lots: a text would have other tokens each time."""
    if dropout := getattr(core.model, "dropout", None):
        hint = f"set model.dropout to null in the {FILE} of a copy"
        problem = f"its tokenizer draws lots (dropout is {dropout:g}): tokens differ each time"
        raise ConfigError(f"{folder}: {problem}", hint=hint)


def _parts(message: Message, number: int) -> list[str | int]:
    """A message as texts and special ids; the first of them says who speaks."""
    role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"message {number} has no text as its content")
    if role == "tool":
        return [SPECIAL[TOOL_RESULT], content, SPECIAL[END_OF_RESULT]]
    if role not in ROLES:
        raise ConfigError(f"message {number}: role {role!r} is none of {(*ROLES, 'tool')}")
    parts: list[str | int] = [SPECIAL[f"<|{role}|>"], content]
    for call in calls:
        function = call.get("function") or call
        try:
            asked = {"name": function["name"], "arguments": function["arguments"]}
        except KeyError as error:
            raise ConfigError(f"message {number}: a tool call has no {error}") from None
        text = json.dumps(asked, ensure_ascii=False)
        parts += [SPECIAL[TOOL_CALL], text, SPECIAL[END_OF_CALL]]
    return [*parts, SPECIAL[END_OF_TURN]]


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"character {error.start} of a text is half a surrogate pair") from None


def _byte_table(core: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes of every id, nothing for a special one; None where tokens are not bytes."""
    if not isinstance(core.decoder, decoders.ByteLevel):
        return None
    # How byte-level BPE writes each byte as one printable character.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + i): byte for i, byte in enumerate(shifted)}
    table: dict[int, bytes] = {}
    added = core.get_added_tokens_decoder()
    for token, i in core.get_vocab().items():
        if i in added:
            table[i] = b"" if added[i].special else token.encode()
        elif letters.keys() >= set(token):
            table[i] = bytes(letters[letter] for letter in token)
        else:
            return None
    return table
