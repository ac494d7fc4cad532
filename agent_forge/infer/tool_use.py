"""Replies with tools, for our networks: a call is carried out, its result is read, and so on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from agent_forge.data.tokenizer import (
    END_OF_CALL,
    END_OF_RESULT,
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL,
    TOOL_CALL,
    TOOL_RESULT,
    Tokenizer,
)
from agent_forge.infer.generate import GeneratedText, SamplingSettings, generate
from agent_forge.infer.thinking import (
    BEGIN,
    CALL_IDS,
    END,
    RESULT_IDS,
    THOUGHT_IDS,
    Ids,
    SpokenPiece,
    ThinkMode,
    first_thought,
    shown,
)
from agent_forge.infer.tools import Toolbox, ToolResult
from agent_forge.model.opened import ForgeModel

CALL, END_CALL = SPECIAL[TOOL_CALL], SPECIAL[END_OF_CALL]
ENDS = frozenset((SPECIAL[END_OF_TURN], SPECIAL[END_OF_TEXT]))
MOST_CALLS = 4  # of a reply
NO_END = "error: the call has no end"


@dataclass
class ToolReply:
    """A reply: the tools that were called on the way, and the answer."""

    ids: list[int]  # the prompt, calls, results and the answer with its end
    own: list[bool] = field(init=False)  # of each, whether the model said it
    calls: list[ToolResult] = field(default_factory=list)
    answer: str = ""

    def __post_init__(self) -> None:
        self.own = [False] * len(self.ids)

    def add(self, ids: Ids, *, own: bool = True) -> None:
        self.ids += ids
        self.own += [own] * len(ids)


def reply_with_tools(
    network: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Ids],
    toolbox: Toolbox,
    sampling: SamplingSettings,
    most_calls: int = MOST_CALLS,
) -> list[ToolReply]:
    """The replies to every prompt, without thoughts; all prompts take their turns together."""
    replies = [ToolReply(list(prompt)) for prompt in prompts]
    live = replies
    for left in range(most_calls, -1, -1):
        found = generate(network, [r.ids for r in live], bounded(sampling, calls=left > 0))
        calling = []
        for reply, text in zip(live, found, strict=True):
            if take_call(reply, text, tokenizer, toolbox):
                calling.append(reply)
            else:
                reply.answer = shown(tokenizer, text.tokens)
                reply.add([*text.tokens, *([] if text.truncated else [SPECIAL[END_OF_TURN]])])
        if not (live := calling):
            break
    return replies


def stream_with_tools(
    model: ForgeModel,
    prompt: Ids,
    sampling: SamplingSettings,
    mode: ThinkMode,
    toolbox: Toolbox,
) -> Iterator[SpokenPiece]:
    """A reply as it comes: its thought if there is one, calls with their results, the answer."""
    ids = list(prompt)
    if (thought := first_thought(model, ids, sampling, mode)) is not None:
        yield SpokenPiece(shown(model.tokenizer, thought, specials=True), "thought")
        ids += [BEGIN, *thought, END]
    reply = ToolReply(ids)
    for left in range(MOST_CALLS, -1, -1):
        said = generate(model.network, [reply.ids], bounded(sampling, calls=left > 0))[0]
        if not take_call(reply, said, model.tokenizer, toolbox):
            yield SpokenPiece(model.decode(said.tokens))
            break
        made = reply.calls[-1]
        yield SpokenPiece(json.dumps(made.request) if made.request else made.call, "call")
        yield SpokenPiece(made.text, "result")


def asked_prompt(tokenizer: Tokenizer, question: str, system: str = "") -> list[int]:
    """A question up to where the reply begins."""
    turns = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*turns, {"role": "user", "content": question}], reply=True)


def result_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What a tool said, as the model is told it."""
    return tokenizer.compose(SPECIAL[TOOL_RESULT], text, SPECIAL[END_OF_RESULT])


def take_call(
    reply: ToolReply, said: GeneratedText, tokenizer: Tokenizer, toolbox: Toolbox
) -> bool:
    """Carry out the call that a reply goes on with; False if it goes on without one. One that was
    cut off, or has no end, is not carried out: half of it may mean something else."""
    if CALL not in said.tokens:
        return False
    call = shown(tokenizer, said.tokens[said.tokens.index(CALL) + 1 :])
    ended = said.stop_token == END_CALL
    result = toolbox.call(call) if ended else ToolResult(call, {}, NO_END, ok=False)
    reply.calls.append(result)
    reply.add([*said.tokens, END_CALL])
    reply.add(result_ids(tokenizer, result.text), own=False)
    return True


def bounded(sampling: SamplingSettings, *, calls: bool) -> SamplingSettings:
    """Up to the end of a call or of the reply; results are never the model's to say."""
    never = THOUGHT_IDS | RESULT_IDS | (frozenset() if calls else CALL_IDS)
    ends = sampling.stop_tokens | ENDS | ({END_CALL} if calls else frozenset())
    return replace(sampling, banned_tokens=sampling.banned_tokens | never, stop_tokens=ends)
