"""Conversations as text: chat templates are programs of a model's maker, so they get limits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension

from agent_forge import platform
from agent_forge.errors import ConfigError, ForgeError

SECONDS = 3.0
CHARACTERS = 1 << 20
MEMORY_BYTES = 1 << 26  # beside what the process has


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, reply: bool) -> str:
    """The conversation as the model reads it; `reply`: up to where its next answer begins."""
    given = tokenizer.chat_template
    templates = given.values() if isinstance(given, Mapping) else [given]
    try:
        parser = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
        if any(parser.parse(str(text)).find(nodes.Pow) for text in templates):
            raise ValueError("powers (**) are not computed: one of them can take forever")
        with _time_limit(SECONDS), platform.memory_limit(MEMORY_BYTES):
            turns = [dict(message) for message in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=reply)
    except _TooSlow:
        raise _refused(f"takes more than {SECONDS:g} s") from None
    except Exception as error:
        raise _refused(f"refuses a conversation ({type(error).__name__}: {error})") from error
    if not isinstance(text, str):
        raise _refused(f"gives {type(text).__name__} instead of text")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise _refused("gives half a surrogate pair")
    if len(text) > CHARACTERS:
        raise _refused(f"gives {len(text):,} characters; at most {CHARACTERS:,} are read")
    return text


class Generation(Extension):
    """The block that marks what an assistant says, which transformers knows."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _refused(problem: str) -> ForgeError:
    hint = "give the examples as prompt and completion, or mend the template"
    return ConfigError(f"the chat template of the model {problem}", hint=hint)


class _TooSlow(BaseException):
    """Raised in a thread whose time is up; no template can catch it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in this thread, whichever it is, if the block takes longer."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def late() -> None:
        with lock:
            if not over:
                error = ctypes.py_object(_TooSlow)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
