"""Replies that a scheduler writes: a thought, calls of tools and the answer, told as they grow."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from agent_forge.data.tokenizer import END_OF_TURN, SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import GeneratedText, Row, SamplingSettings
from agent_forge.infer.scheduler import Request
from agent_forge.infer.thinking import (
    BEGIN,
    END,
    THOUGHT_IDS,
    THOUGHT_TOKENS,
    TOOL_IDS,
    ThinkMode,
    shown,
)
from agent_forge.infer.tool_use import (
    CALL,
    END_CALL,
    MOST_CALLS,
    ToolReply,
    bounded,
    result_ids,
    take_call,
)
from agent_forge.infer.tools import Toolbox, ToolError
from agent_forge.model.opened import END_OF_THOUGHT, THOUGHT, ForgeModel, OpenedModel

FEW = 4  # tokens
Finish = Literal["", "stop", "length", "tool_calls"]
Kind = Literal["answer", "thought"]


@dataclass
class Piece:
    """What is new of a reply; the last one has a finish or an error."""

    text: str = ""
    kind: Kind = "answer"
    tokens: list[int] = field(default_factory=list)  # of an answer, if log-probabilities are asked
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)  # that the client is to carry out
    carried_out: list[dict[str, Any]] = field(default_factory=list)  # calls, by this machine
    finish: Finish = ""
    error: Exception | None = None


@dataclass(frozen=True)
class ToolUse:
    """The tools of a reply; those of the client are carried out by the client."""

    box: Toolbox
    by_client: bool
    begin: str | None = None  # what a call that has to be made begins with


class Reply(Request):
    """One reply of a model, told piece by piece."""

    def __init__(
        self,
        model: OpenedModel,
        ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        mode: ThinkMode = "off",
        tools: ToolUse | None = None,
        likeliest: int | None = None,
        streamed: bool = True,
        together: bool = True,
        goes_on: bool = False,  # the answer continues the prompt: a blank between them is told
    ) -> None:
        if mode == "forced" and not isinstance(model, ForgeModel):
            raise ConfigError("this model was not taught to think", hint="ask for no reasoning")
        self.model, self.ids, self.mode, self.tools = model, list(ids), mode, tools
        ends = sampling.stop_tokens | model.end_tokens
        self.sampling = replace(sampling, stop_tokens=ends)
        self.likeliest, self.streamed = likeliest, streamed
        self.before = self.ids[-FEW:] if goes_on else []  # what its text is decoded behind
        self.tell: Callable[[Piece], object] = lambda piece: None
        self.prompt_tokens, self.written, self.thought_tokens = len(self.ids), 0, 0
        self.finish: Finish = "stop"
        self._within = model.opens_thought(self.ids)  # of a model that thinks in words of its own
        super().__init__(model.network, together)

    # -- what it is made of --

    def work(self) -> Iterator[Row | Callable[[], object]]:
        if not isinstance(self.model, ForgeModel):
            yield from self._write(self.ids, self.sampling, "answer")
        else:
            yield from self._think(self.model)
            yield from self._speak(self.model)

    def _think(self, model: ForgeModel) -> Iterator[Row]:
        """Its thought, if there is one, becomes a part of its ids."""
        if self.mode == "free":
            peek = replace(self.sampling, max_new_tokens=1, stop_tokens=frozenset())
            row = Row(self.ids, peek)
            yield row
            self.mode = "forced" if row.result.tokens == [BEGIN] else "off"
        if self.mode == "off":
            return
        never = self.sampling.banned_tokens | {BEGIN}
        inside = replace(
            self._left(least=2),
            stop_tokens=self.sampling.stop_tokens | {END},
            banned_tokens=never,
            stop_strings=(),
        )
        row = yield from self._write([*self.ids, BEGIN], inside, "thought")
        self.thought_tokens = len(row.result.tokens)
        self.ids += [BEGIN, *row.result.tokens, END]

    def _speak(self, model: ForgeModel) -> Iterator[Row | Callable[[], object]]:
        """Calls with their results, and the answer."""
        if self.tools is None:
            never = self.sampling.banned_tokens | THOUGHT_IDS | TOOL_IDS  # nobody carries one out
            yield from self._write(self.ids, replace(self._left(), banned_tokens=never), "answer")
            return
        reply, box, begin = ToolReply(self.ids), self.tools.box, list[int]()
        if self.tools.begin is not None:
            begin = model.tokenizer.compose(CALL, self.tools.begin)
        for left in range(MOST_CALLS, -1, -1):
            how = bounded(self._left(), calls=left > 0)
            row = yield from self._write([*reply.ids, *begin], how, "answer", begin)
            said = replace(row.result, tokens=[*begin, *row.result.tokens])
            begin = []
            if CALL not in said.tokens:
                return
            if self.tools.by_client and (call := self._call(model, box, said)):
                self.finish = "tool_calls"
                self.tell(Piece(calls=[call]))
                return
            yield partial(take_call, reply, said, model.tokenizer, box)
            made = reply.calls[-1]
            if not self.tools.by_client:
                self.tell(Piece(carried_out=[{"call": made.call, "result": made.text}]))
            if self.written >= self.sampling.max_new_tokens:
                self.finish = "length"
                return

    def _call(self, model: ForgeModel, box: Toolbox, said: GeneratedText) -> dict[str, Any] | None:
        """A call for the client; None if it is none of its tools, which the model is told."""
        if said.stop_token != END_CALL:
            return None
        try:
            text = shown(model.tokenizer, said.tokens[said.tokens.index(CALL) + 1 :])
            tool, arguments = box.read(text)
        except ToolError:
            return None
        return {"name": tool.name, "arguments": json.dumps(arguments)}

    def _left(self, least: int = 1) -> SamplingSettings:
        """How it goes on: with the tokens that are left, half of them for a thought."""
        most = max(1, (self.sampling.max_new_tokens - self.written) // least)
        return replace(
            self.sampling, max_new_tokens=min(most, THOUGHT_TOKENS) if least > 1 else most
        )

    # -- as it grows --

    def _write(
        self, ids: Sequence[int], sampling: SamplingSettings, kind: Kind, begin: Sequence[int] = ()
    ) -> Generator[Row, None, Row]:
        def decode(tokens: Sequence[int]) -> str:
            if kind == "thought" and isinstance(self.model, ForgeModel):
                return shown(self.model.tokenizer, tokens, specials=True)
            said = tokens[: tokens.index(CALL)] if CALL in tokens and self.tools else tokens
            return "" if begin else decode_behind(self.model, self.before, said)

        self._kind, self._shown, self._told = kind, 0, 0
        row = Row(list(ids), sampling, decode, self.likeliest if kind == "answer" else None)
        yield row
        self.written += len(row.result.steps)
        self.finish = "length" if row.result.truncated else "stop"
        return row

    def look(self, row: Row) -> None:
        done = bool(row.result.stopped_by)
        if row.decode is None or not (done or self.streamed):
            return
        text = row.settled_text(self.model.byte_tokens)
        for kind, part in self._parts(text, done):
            if part:
                self.tell(self._piece(row, kind, part))
        if done and self.likeliest is not None and self._told < len(row.result.tokens):
            self.tell(self._piece(row, self._kind, ""))

    def _parts(self, text: str, done: bool) -> Iterator[tuple[Kind, str]]:
        """What is new of a text; a model may think in words of its own before it answers."""
        if self._kind == "answer" and not isinstance(self.model, ForgeModel):
            begin = len(THOUGHT) if text.lstrip().startswith(THOUGHT) else 0
            if begin:
                self._within, begin = True, text.index(THOUGHT) + begin
            if self._within:
                end = text.find(END_OF_THOUGHT)
                yield "thought", text[max(begin, self._shown) : end if end >= 0 else len(text)]
                self._shown = max(self._shown, len(text) if end < 0 else end)
                if end < 0:
                    return
                self._shown = max(self._shown, end + len(END_OF_THOUGHT))
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        yield self._kind, new

    def _piece(self, row: Row, kind: Kind, text: str) -> Piece:
        if kind == "thought" or self.likeliest is None:
            return Piece(text, kind)
        first, self._told = self._told, len(row.result.tokens)
        new, result = slice(first, self._told), row.result
        numbers = result.log_probabilities[new], result.likeliest[new]
        return Piece(text, kind, result.tokens[new], *numbers)

    def end(self, error: Exception | None) -> None:
        self.tell(Piece(error=error) if error else Piece(finish=self.finish))


def decode_behind(model: OpenedModel, before: Sequence[int], ids: Sequence[int]) -> str:
    """What tokens add to the text of those before; by themselves many lose their first blank."""
    known, whole = model.decode(before), model.decode([*before, *ids])
    return whole[len(known) :] if whole.startswith(known) else model.decode(ids)


def chat_ids(model: OpenedModel, messages: Sequence[dict[str, Any]]) -> list[int]:
    """A conversation up to where the next reply begins. Calls of ours are written as the model was
    taught to: in a reply that goes on behind their results."""
    if not isinstance(model, ForgeModel):
        return model.encode_chat(messages)
    tokenizer, ids, open_reply = model.tokenizer, list[int](), False
    for number, message in enumerate(messages, start=1):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            if not open_reply:
                raise ConfigError(f"message {number} is the result of no call")
            ids += result_ids(tokenizer, content)
            continue
        if open_reply and role != "assistant":
            ids, open_reply = [*ids, SPECIAL[END_OF_TURN]], False
        ids += tokenizer.compose(*([] if open_reply else [SPECIAL[f"<|{role}|>"]]), content)
        for call in message.get("tool_calls") or ():
            ids += tokenizer.compose(CALL, _call_text(call["function"], number), END_CALL)
        open_reply = bool(message.get("tool_calls"))
        if not open_reply:
            ids.append(SPECIAL[END_OF_TURN])
    return ids if open_reply else [*ids, SPECIAL["<|assistant|>"]]


def _call_text(function: dict[str, Any], number: int) -> str:
    """A call in the short form: the name and the arguments in their order."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
        words = [str(value) for value in arguments.values()]
    except (ValueError, AttributeError, RecursionError):
        problem = f"message {number}: the arguments of a call are no JSON object"
        raise ConfigError(problem) from None
    return " ".join([function["name"], *words])
