"""/v1 as OpenAI has it: models, chat/completions, completions; whole, or by server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from agent_forge.api.questions import ChatQuestion, CompletionQuestion, Question, ToolChoice
from agent_forge.errors import ConfigError
from agent_forge.infer.chat import check_prompt
from agent_forge.infer.generate import CACHED_TOKENS, UNKNOWN, SamplingSettings
from agent_forge.infer.open_models import Open, OpenModels
from agent_forge.infer.replies import Piece, Reply, ToolUse, chat_ids, decode_behind
from agent_forge.infer.scheduler import Scheduler
from agent_forge.infer.thinking import ThinkMode
from agent_forge.infer.tools import Tool, Toolbox
from agent_forge.model.catalog import Catalog
from agent_forge.model.opened import ForgeModel

LOOK_EVERY_S = 0.5  # whether a client is still there
EFFORTS: dict[str, ThinkMode] = {"none": "off", "minimal": "free"}  # others are forced


@dataclass
class Models:
    """What /v1 answers with."""

    catalog: Catalog
    open: OpenModels
    scheduler: Scheduler
    run_tools: bool


def routes(models: Models) -> APIRouter:
    """The endpoints of /v1."""
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.get("/models")
    def list_models() -> dict[str, Any]:
        """All models that can be asked by their ids."""
        rows = models.catalog.rows()
        data = [_entry(row["model_id"], row["created_at"]) for row in rows]
        return {"object": "list", "data": [_entry(name, 0) for name in models.catalog.given] + data}

    @router.get("/models/{model:path}")
    def retrieve_model(model: str) -> dict[str, Any]:
        """One model."""
        return _entry(model, (models.catalog.find(model) / "config.json").stat().st_mtime)

    @router.post("/chat/completions", response_model=None)
    async def chat(asked: ChatQuestion, request: Request) -> dict[str, Any] | StreamingResponse:
        """The next message of a conversation."""
        reply = await run_in_threadpool(_chat_reply, models, asked)
        return await _answer(models.scheduler, Chat(asked, reply), request)

    @router.post("/completions", response_model=None)
    async def complete(
        asked: CompletionQuestion, request: Request
    ) -> dict[str, Any] | StreamingResponse:
        """A text goes on."""
        reply = await run_in_threadpool(_completion_reply, models, asked)
        return await _answer(models.scheduler, Completion(asked, reply), request)

    return router


def _entry(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "agent-forge"}


# -- from a question to a reply --------------------------------------------------------------------


def _chat_reply(models: Models, asked: ChatQuestion) -> Reply:
    opened = models.open.open(models.catalog.find(asked.model))
    said = [message.plain() for message in asked.messages]
    for message in said:
        if message["content"] or message["role"] == "user":
            check_prompt(message["content"], f"the message of {message['role']}")
    tools = _tools(asked, opened, models.run_tools)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ConfigError("top_logprobs needs logprobs: true")
    with opened.lock:
        ids = chat_ids(opened.model, said)
    ours = isinstance(opened.model, ForgeModel)
    effort = asked.reasoning_effort or ("minimal" if ours else "none")
    reply = partial(Reply, mode=EFFORTS.get(effort, "forced"), tools=tools)
    count = (asked.top_logprobs or 0) if asked.logprobs else None
    return _bounded(reply, opened, asked, ids, asked.max_completion_tokens, count)


def _completion_reply(models: Models, asked: CompletionQuestion) -> Reply:
    opened = models.open.open(models.catalog.find(asked.model))
    check_prompt(asked.prompt)
    with opened.lock:
        ids = opened.model.encode(asked.prompt)
    return _bounded(partial(Reply, goes_on=True), opened, asked, ids, None, asked.logprobs)


def _bounded(
    make: Callable[..., Reply],
    opened: Open,
    asked: Question,
    ids: Sequence[int],
    tokens: int | None,
    likeliest: int | None,
) -> Reply:
    """A reply with as many tokens as the model and the caches have room for."""
    sampling = asked.sampling(tokens or asked.max_tokens, secrets.randbits(63))
    longest = min(opened.model.max_length or CACHED_TOKENS, CACHED_TOKENS)
    if len(ids) >= longest:
        problem = f"the prompt has {len(ids):,} tokens, the model reads {longest:,}"
        raise ConfigError(problem, hint="shorten it, or begin a new conversation")
    most = min(sampling.max_new_tokens, longest - len(ids))
    values = {**vars(sampling), "max_new_tokens": most}
    options = {"likeliest": likeliest, "streamed": asked.stream, "together": opened.together}
    return make(opened.model, ids, SamplingSettings(**values), **options)


def _tools(asked: ChatQuestion, opened: Open, run_tools: bool) -> ToolUse | None:
    """The tools of a request, or those that this server runs; None if there are none to call."""
    choice = asked.tool_choice
    if not asked.tools:
        if choice not in (None, "none", "auto"):
            raise ConfigError("tool_choice needs tools")
        own = opened.tools if run_tools and choice != "none" else None
        return ToolUse(own, False) if own else None
    if opened.tools is None:
        problem = "this model was not taught to call tools: models of Phase 6 and later are"
        raise ConfigError(problem, hint="leave tools out")
    functions = [schema.function for schema in asked.tools]
    told = [(f.name, f.description, f.parameters.model_dump()) for f in functions]
    box = Toolbox([Tool(*about, run=_nothing) for about in told])
    if isinstance(choice, ToolChoice):
        if choice.function.name not in box.names:
            raise ConfigError(f"tool_choice {choice.function.name!r} is none of the tools")
        return ToolUse(box, True, f"{choice.function.name} ")
    return None if choice == "none" else ToolUse(box, True, "" if choice == "required" else None)


def _nothing(**arguments: Any) -> str:
    return ""  # the client carries its calls out


# -- from pieces to what a client reads ------------------------------------------------------------


class Chat:
    """The form of chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Question, reply: Reply) -> None:
        self.asked, self.reply, self.calls = asked, reply, 0
        self.before, self.offset = reply.before, 0  # of the next token whose probability is told
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head = {**head, "model": asked.model}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds to a message."""
        name = "content" if piece.kind == "answer" else "reasoning_content"
        added: dict[str, Any] = {name: piece.text} if piece.text else {}
        if piece.calls:
            added["tool_calls"] = [
                {"index": self.calls + i, "id": f"call_{secrets.token_hex(12)}"}
                | {"type": "function", "function": call}
                for i, call in enumerate(piece.calls)
            ]
            self.calls += len(piece.calls)
        if piece.carried_out:
            added["carried_out"] = piece.carried_out
        return added

    def choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        """One chunk."""
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, **self.delta(piece)}, "logprobs": self.logprobs([piece])}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for piece in pieces:
            for name, value in self.delta(piece).items():
                message[name] = (message.get(name) or type(value)()) + value
        for call in message.get("tool_calls", ()):
            del call["index"]
        if message["content"] is None and not self.calls:
            message["content"] = ""
        return {"message": message, "logprobs": self.logprobs(pieces)}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Of every token of the answer."""
        if self.reply.likeliest is None:
            return None
        return {"content": [entry for piece in pieces for entry in self._entries(piece)]}

    def _entries(self, piece: Piece) -> list[dict[str, Any]]:
        rows = piece.likeliest or [{}] * len(piece.tokens)
        numbers = zip(piece.tokens, piece.log_probabilities, rows, strict=False)
        entries = []
        for token, value, row in numbers:
            own, *others = (self._token(*one) for one in [(token, value), *row.items()])
            entries.append({**own, "top_logprobs": others})
            self.before = [token]
        return entries

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = decode_behind(self.reply.model, self.before, [token])
        as_bytes = None if UNKNOWN in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": max(value, -9999.0), "bytes": as_bytes}

    def usage(self) -> dict[str, Any]:
        read, written = self.reply.prompt_tokens, self.reply.written
        details = {"reasoning_tokens": self.reply.thought_tokens}
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return {**counts, "total_tokens": read + written, "completion_tokens_details": details}


class Completion(Chat):
    """The form of completions."""

    kind = chunk_kind = "text_completion"

    def choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self.logprobs([piece])}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"text": "".join(p.text for p in pieces), "logprobs": self.logprobs(pieces)}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.reply.likeliest is None:
            return None
        rows = [entry for piece in pieces for entry in self._entries(piece)]
        tokens = [row["token"] for row in rows]
        *places, self.offset = itertools.accumulate(map(len, tokens), initial=self.offset)
        top = [{one["token"]: one["logprob"] for one in row["top_logprobs"]} for row in rows]
        values = [row["logprob"] for row in rows]
        lists = {"tokens": tokens, "token_logprobs": values, "text_offset": places}
        return {**lists, "top_logprobs": top if self.reply.likeliest else None}


async def _answer(
    scheduler: Scheduler, form: Chat, request: Request
) -> dict[str, Any] | StreamingResponse:
    queue: asyncio.Queue[Piece] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
            loop.call_soon_threadsafe(queue.put_nowait, piece)

    form.reply.tell = tell
    scheduler.submit(form.reply)
    pieces = _pieces(scheduler, form.reply, queue, request)
    if form.asked.stream:
        return StreamingResponse(_events(form, pieces), media_type="text/event-stream")
    found = [piece async for piece in pieces]
    if not found or not found[-1].finish:  # nobody is there to read it
        return {}
    whole = await run_in_threadpool(form.whole, found)
    choice = {"index": 0, **whole, "finish_reason": found[-1].finish}
    return {**form.head, "object": form.kind, "choices": [choice], "usage": form.usage()}


async def _pieces(
    scheduler: Scheduler, reply: Reply, queue: asyncio.Queue[Piece], request: Request
) -> AsyncIterator[Piece]:
    """The pieces of a reply up to its end; a client that has gone frees its place."""
    try:
        while True:
            try:
                piece = await asyncio.wait_for(queue.get(), LOOK_EVERY_S)
            except TimeoutError:
                if await request.is_disconnected():
                    return
                continue
            if piece.error:
                raise piece.error
            yield piece
            if piece.finish:
                return
    finally:
        scheduler.cancel(reply)


async def _events(form: Chat, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
    """A reply as server-sent events."""
    head, first = {**form.head, "object": form.chunk_kind}, True
    options = form.asked.stream_options
    with_usage = options is not None and options.include_usage
    unknown = {"usage": None} if with_usage else {}
    try:
        async for piece in pieces:
            choice = {"index": 0, **form.choice(piece, first)}
            choice["finish_reason"], first = piece.finish or None, False
            yield _event({**head, "choices": [choice], **unknown})
        if with_usage:
            yield _event({**head, "choices": [], "usage": form.usage()})
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the headers are gone: it is said in the stream
        yield _event({"error": {"message": str(error), "type": type(error).__name__}})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
