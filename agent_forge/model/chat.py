"""Conversations as text: chat templates are programs of a model's maker, so they get limits.

What they write may depend on the conversation alone: a number would else be another one each time.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension

from agent_forge import platform
from agent_forge.errors import ConfigError, ForgeError

SECONDS = 3.0
CHARACTERS = 1 << 20
MEMORY_BYTES = 1 << 26  # beside what the process has
DATE = datetime(2024, 7, 26)  # today, for templates, while a model is measured: as Llama has it
ADDRESS = " at 0x"
BY_CHANCE = ("random", "lipsum")  # what jinja2 has that differs each time


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, reply: bool, date: datetime = DATE
) -> str:
    """The conversation as the model reads it; `reply`: up to where its next answer begins."""
    texts: list[Any] = []
    kept: list[Any] = []  # alive, so that nothing lies where it lay before
    try:
        _refuse_unsteady(tokenizer.chat_template)
        for _ in range(2):
            kept.append([dict(message) for message in messages])
            with _today(date), _time_limit(SECONDS), platform.memory_limit(MEMORY_BYTES):
                options = {"tokenize": False, "add_generation_prompt": reply}
                texts.append(tokenizer.apply_chat_template(kept[-1], **options))
    except _TooSlow:
        raise _refused(f"takes more than {SECONDS:g} s") from None
    except Exception as error:
        raise _refused(f"refuses a conversation ({type(error).__name__}: {error})") from error
    text = texts[0]
    if not isinstance(text, str):
        raise _refused(f"gives {type(text).__name__} instead of text")
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise _refused("gives half a surrogate pair")
    if ADDRESS in text and ADDRESS not in str(messages):
        raise _refused("writes where something lies in memory")
    if text != texts[1]:
        raise _refused("gives something else when it is used twice")
    if len(text) > CHARACTERS:
        raise _refused(f"gives {len(text):,} characters; at most {CHARACTERS:,} are read")
    return text


def render_reply(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], date: datetime = DATE
) -> tuple[str, str]:
    """A conversation up to its last message, and with it; all of that has to be there."""
    given = render(tokenizer, messages[:-1], reply=True, date=date)
    whole = render(tokenizer, messages, reply=False, date=date).rstrip()
    said = [str(messages[-1].get("content") or "").strip()]
    for call in messages[-1].get("tool_calls") or ():
        said.append(str((call.get("function") or call).get("name")))
    pairs = enumerate(zip(given, whole, strict=False))
    alike = next((i for i, (a, b) in pairs if a != b), min(len(given), len(whole)))
    if any(text not in whole[max(0, alike - len(text)) :] for text in said):
        hint = "give rows whose answers it shows whole, or prompt and completion"
        raise ConfigError("the chat template leaves out a part of the answer", hint=hint)
    return given, whole


@contextlib.contextmanager
def _today(date: datetime) -> Iterator[None]:
    """Let `strftime_now` of templates give this date; transformers takes it from nowhere else."""
    from transformers.utils import chat_template_utils

    before = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: date)
    try:
        yield
    finally:
        chat_template_utils.datetime = before


def _refuse_unsteady(given: Any) -> None:
    """Refuse templates that could take forever, or that give something else each time."""
    for text in given.values() if isinstance(given, Mapping) else [given]:
        ast = Environment(extensions=["jinja2.ext.loopcontrols", GenerationTag]).parse(str(text))
        if ast.find(nodes.Pow):
            raise ValueError("powers (**) are not computed: one of them can take forever")
        filters = list(ast.find_all(nodes.Filter))  # one may be used by its name as a text
        used = [c.value for f in filters for c in f.find_all(nodes.Const)]
        used += [*(f.name for f in filters), *(n.name for n in ast.find_all(nodes.Name))]
        if name := next((name for name in BY_CHANCE if name in used), None):
            raise ValueError(f"{name} gives something else each time")


class GenerationTag(Extension):
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
