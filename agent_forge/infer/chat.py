"""A model directory that speaks: ours with its caches and halting, or any causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from agent_forge.data.records import MAX_CHARACTERS
from agent_forge.data.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL, Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import Sampling, choose, stream
from agent_forge.model.chat import render
from agent_forge.model.folder import home_of, open_model
from agent_forge.model.load import encode, end_tokens
from agent_forge.model.network import ForgeNetwork

Message = Mapping[str, Any]
ENDS = frozenset((SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]))


class ChatModel(Protocol):
    """What can be talked to. Text comes piece by piece."""

    def complete(self, text: str, sampling: Sampling) -> Iterator[str]: ...
    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]: ...


def open_chat_model(ref: str | Path) -> ChatModel:
    """A model (a folder, or base+adapter), ready to speak."""
    model, tokenizer = open_model(ref)
    if isinstance(model, ForgeNetwork):
        own = Tokenizer.load(home_of(ref))
        own.fits(model.settings)
        return _Own(model, own)
    return _Foreign(model, tokenizer, end_tokens(home_of(ref), model, tokenizer))


def check_prompt(text: str, what: str = "the prompt") -> str:
    """The text, unless it is none: nothing at all, too much, or bytes that are not UTF-8."""
    if not text:
        raise ConfigError(f"{what} is empty")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{what} has more than the {MAX_CHARACTERS:,} characters that are read")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not UTF-8 text") from None
    return text


class _Own:
    def __init__(self, model: ForgeNetwork, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    def complete(self, text: str, sampling: Sampling) -> Iterator[str]:
        return self._say(self.tokenizer.encode(check_prompt(text)), sampling)

    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        check_prompt(messages[-1]["content"])
        return self._say(self.tokenizer.encode_chat(messages, reply=True), sampling)

    def _say(self, ids: list[int], sampling: Sampling) -> Iterator[str]:
        ending = _with_ends(sampling, ENDS)
        return stream(self.model, ids, ending, self._decode)

    def _decode(self, ids: Sequence[int]) -> str:
        """Text; a network may have more ids than the tokenizer has tokens."""
        return self.tokenizer.decode(i for i in ids if i < self.tokenizer.vocab_size)


class _Foreign:
    def __init__(self, model: nn.Module, tokenizer: Any, ends: frozenset[int]) -> None:
        self.model, self.tokenizer, self.ends = model, tokenizer, ends

    def complete(self, text: str, sampling: Sampling) -> Iterator[str]:
        return self._say(encode(self.tokenizer, check_prompt(text), special=True), sampling)

    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        check_prompt(messages[-1]["content"])
        if self.tokenizer.chat_template:
            text = render(self.tokenizer, messages, reply=True)
            ids = encode(self.tokenizer, text, special=False)
        else:  # a model that was never taught to chat goes on with the text
            text = "\n".join(m["content"] for m in messages)
            ids = encode(self.tokenizer, text, special=True)
        return self._say(ids, sampling)

    def _say(self, ids: list[int], sampling: Sampling) -> Iterator[str]:
        size = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        if max(ids) >= size:
            raise ConfigError(
                f"token {max(ids)} is outside the vocabulary of {size}",
                hint="the tokenizer in the folder does not fit the model",
            )
        reads = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        if len(ids) >= reads:
            raise ConfigError(
                f"the text has {len(ids):,} tokens, the model reads {reads:,}",
                hint="shorten it, or begin a new conversation",
            )
        most = min(sampling.max_new_tokens, reads - len(ids))
        return self._tokens(ids, _with_ends(replace(sampling, max_new_tokens=most), self.ends))

    @torch.no_grad()
    def _tokens(self, ids: list[int], sampling: Sampling) -> Iterator[str]:
        generator = torch.Generator().manual_seed(sampling.seed)
        made: list[int] = []
        shown, past, following = 0, None, torch.tensor([ids])
        while len(made) < sampling.max_new_tokens:
            out = self.model(following, past_key_values=past, use_cache=True)
            past = getattr(out, "past_key_values", None)
            token = choose(out.logits[0, -1].float(), sampling, generator)
            if token in sampling.stop_tokens:
                break
            made.append(token)
            # Without a cache the whole text is read again.
            following = torch.tensor([[token]] if past is not None else [[*ids, *made]])
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character is no text yet
                yield text[shown:]
                shown = len(text)


def _with_ends(sampling: Sampling, ends: frozenset[int]) -> Sampling:
    return replace(sampling, stop_tokens=sampling.stop_tokens | ends)
