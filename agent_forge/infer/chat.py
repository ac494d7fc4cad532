"""Talking to a model: it continues a text, or replies to a conversation, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from agent_forge.data.row_files import MAX_CHARACTERS
from agent_forge.data.tokenizer import Message
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.infer.generate import SamplingSettings
from agent_forge.infer.thinking import SpokenPiece, ThinkMode, stream_thinking
from agent_forge.infer.tool_use import stream_with_tools
from agent_forge.infer.tools import Toolbox, builtin_tools, own_tools
from agent_forge.model.opened import ForgeModel, OpenedModel, TransformersModel, open_model
from agent_forge.store.records import learned_record


class ChatModel:
    """An open model that can be talked to; with a toolbox it may call tools."""

    def __init__(self, opened: OpenedModel, toolbox: Toolbox | None = None) -> None:
        self.opened, self.toolbox = opened, toolbox

    def complete(self, text: str, sampling: SamplingSettings) -> Iterator[str]:
        ids = self.opened.encode(check_prompt(text))
        return (piece.text for piece in self._stream(ids, sampling, "off", None))

    def reply(self, messages: Sequence[Message], sampling: SamplingSettings) -> Iterator[str]:
        """The answer alone."""
        pieces = self.think_and_reply(messages, sampling, "off")
        return (piece.text for piece in pieces if piece.kind == "answer")

    def think_and_reply(
        self, messages: Sequence[Message], sampling: SamplingSettings, mode: ThinkMode
    ) -> Iterator[SpokenPiece]:
        """The thought, if there is one, calls with their results, and the answer."""
        check_prompt(messages[-1]["content"])
        return self._stream(self.opened.encode_chat(messages), sampling, mode, self.toolbox)

    def _stream(
        self, ids: list[int], sampling: SamplingSettings, mode: ThinkMode, toolbox: Toolbox | None
    ) -> Iterator[SpokenPiece]:
        longest, most = self.opened.max_length, sampling.max_new_tokens
        if longest is not None:
            if len(ids) >= longest:
                problem = f"the text has {len(ids):,} tokens, the model reads {longest:,}"
                raise ConfigError(problem, hint="shorten it, or begin a new conversation")
            most = min(most, longest - len(ids))
        ends = sampling.stop_tokens | self.opened.end_tokens
        bounded = replace(sampling, max_new_tokens=most, stop_tokens=ends)
        if toolbox and isinstance(self.opened, ForgeModel):
            return stream_with_tools(self.opened, ids, bounded, mode, toolbox)
        return stream_thinking(self.opened, ids, bounded, mode)


def open_chat_model(ref: str | Path, toolbox: Toolbox | None = None) -> ChatModel:
    """The model in a folder or of `base+adapter`, ready to be talked to, today."""
    opened = open_model(ref)
    if isinstance(opened, TransformersModel):
        opened.date = datetime.now()
    return ChatModel(opened, toolbox)


def toolbox_of(folder: Path, own: Path | None, files: Path | None) -> Toolbox | None:
    """The tools that a model was taught, as its record says, those of the user's file instead of
    those of the same name, and the files that they may read; None if it was taught none."""
    taught = learned_record(folder).get("tools")
    if taught is not None and not (
        isinstance(taught, list) and all(isinstance(name, str) for name in taught)
    ):
        raise DamagedFile(folder, "its record of tools is no list of names")
    if files and not files.is_dir():
        raise ConfigError(f"--files {files} is no folder")
    if not taught:
        if own or files:
            problem = "this model was not taught to call tools: models of Phase 6 and later are"
            raise ConfigError(problem, hint="leave --tools and --files out")
        return None
    found = {tool.name: tool for tool in builtin_tools(files) if tool.name in taught}
    found |= {tool.name: tool for tool in (own_tools(own) if own else ())}
    return Toolbox(list(found.values()))


def check_prompt(text: str, what: str = "the prompt") -> str:
    """Return the text unless it is empty, too long, or not UTF-8."""
    if not text:
        raise ConfigError(f"{what} is empty")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{what} has more than the {MAX_CHARACTERS:,} characters that are read")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{what} is not UTF-8 text")
    return text
