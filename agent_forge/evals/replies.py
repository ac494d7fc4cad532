"""What a model says and calls when it is asked, with real tools: which of its replies are right."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_forge.data import exchanges
from agent_forge.data.exchanges import Card, Exchange
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.infer.generate import SamplingSettings
from agent_forge.infer.tool_use import ToolReply, asked_prompt, reply_with_tools
from agent_forge.infer.tools import Toolbox, builtin_tools
from agent_forge.model.network import ForgeNetwork
from agent_forge.store import files

GREEDY = SamplingSettings(max_new_tokens=64)  # of an answer, or of a call


@dataclass(frozen=True)
class Replies:
    """A model's replies to exchanges: which are right, and what it called."""

    asked: Sequence[Exchange]
    right: list[bool]
    called: list[str]  # the first tool of each; empty if there was none
    said: list[str]

    def share(self, kind: str = "") -> float:
        own = [r for e, r in zip(self.asked, self.right, strict=True) if kind in ("", e.kind)]
        return sum(own) / len(own) if own else 0.0


@dataclass(frozen=True)
class Asker:
    """Asks networks questions, with real tools in a folder of the files that they are about."""

    tokenizer: Tokenizer
    card: Card

    def ask(
        self,
        network: ForgeNetwork,
        asked: Sequence[Exchange],
        split: str,
        system: str = "",
        sampling: SamplingSettings = GREEDY,
    ) -> Replies:
        """A model's replies to exchanges of a split."""
        questions = [own.question for own in asked]
        replies = self.replies(network, questions, split, system, sampling)
        right = [self._is_right(own, reply) for own, reply in zip(asked, replies, strict=True)]
        called = [r.calls[0].request.get("name", "?") if r.calls else "" for r in replies]
        return Replies(asked, right, called, [reply.answer for reply in replies])

    def replies(
        self,
        network: ForgeNetwork,
        questions: Sequence[str],
        split: str,
        system: str = "",
        sampling: SamplingSettings = GREEDY,
    ) -> list[ToolReply]:
        """What it says and calls, greedily unless said otherwise."""
        prompts = [asked_prompt(self.tokenizer, question, system) for question in questions]
        with _files() as folder:
            tools = builtin_tools(folder, lambda: exchanges.moment(split))
            return reply_with_tools(network, self.tokenizer, prompts, Toolbox(tools), sampling)

    def _is_right(self, own: Exchange, reply: ToolReply) -> bool:
        """The answer, and behind it the tool that it has to come from or none."""
        called = [call.request.get("name") for call in reply.calls]
        if own.kind in exchanges.SLOTS:
            tools = self.card.tools
            said = exchanges.answers_slot(self.card.persona, tools, own.kind, reply.answer)
            return said and not called
        wanted = [own.kind] if own.call else []
        return called == wanted and reply.answer.strip() == own.answer


@contextmanager
def _files() -> Iterator[Path]:
    """A folder of the files that questions are about."""
    with tempfile.TemporaryDirectory(prefix="agent_forge_") as place:
        for name, text in exchanges.asked_files().items():
            files.write_bytes(Path(place, name), text.encode())
        yield Path(place)
