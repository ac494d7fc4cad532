"""Conversations as text: chat templates are programs of a model's maker, so they get limits.

What they write may depend on the conversation alone: a number would else be another one each time.
"""

import contextlib
import ctypes
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension

from agent_forge import platform
from agent_forge.data.dataset_rows import arguments_of
from agent_forge.errors import ConfigError, ForgeError

SECONDS = 3.0
CHARACTERS = 1 << 20
MEMORY_BYTES = 1 << 26  # beside what the process has
DATE = datetime(2024, 7, 26)  # today, for templates, while a model is measured: as Llama has it
ADDRESS = " at 0x"
BY_CHANCE = ("random", "lipsum")  # what jinja2 has that differs each time
QUESTION, ANSWER = "zqxquestionzqx", "zqxanswerzqx"  # stand for what is said: see render_reply
SAID = ("role", "content", "tool_calls")  # what a message may have that is asked for
MARKS = re.compile(r"[\s\"'\\]+")  # what differs between ways to write the same arguments


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
    """A conversation up to its last message, as the model is given it, and with that message.

    What is asked is the second text behind the first one: the answer, with nothing around it but
    what the template writes whatever is said. A row of which that is not true is refused.
    """
    show = partial(render, tokenizer, date=date)
    *before, last = messages
    prompt, whole = show(before, reply=True), show(messages, reply=False).rstrip()
    if more := sorted(last.keys() - SAID):
        last = {key: last[key] for key in SAID if key in last}
        if show([*before, last], reply=False).rstrip() != whole:
            raise _another(f"writes more of an answer than its content: {', '.join(more)}")
    if calls := bool(last.get("tool_calls")):
        frame, end = "", len(whole)
    else:
        told = [{**m, "content": m.get("content") and QUESTION} for m in before]
        other = show([*told, {**last, "content": ANSWER}], reply=False).rstrip()
        frame, end = _answer_in(whole, str(last.get("content") or ""), other)
    start = shared(prompt, whole[:end])
    # Only the beginning of a reply may be written in another way once it is answered.
    if start < len(prompt) and start < len(show(before, reply=False).rstrip()):
        raise _another("shows what was asked in another way once it is answered")
    if calls:
        _refuse_hidden(last, whole[start:])
    elif not frame.endswith(whole[start:end]):
        raise _another("leaves out a part of the answer, or adds to it")
    return whole[:start], whole


def _answer_in(whole: str, answer: str, other: str) -> tuple[str, int]:
    """What is before the answer in another conversation, and where that of this one begins; behind
    them both have to be alike."""
    frame, shown, behind = other.partition(ANSWER)
    for text in (answer, answer.strip(), answer.lstrip(), answer.rstrip()):
        if shown and ANSWER not in behind and whole.endswith(text + behind):
            return frame, len(whole) - len(text + behind)
    raise _another("leaves out a part of the answer, or adds to it")


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many entries, or characters, both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _refuse_hidden(last: Mapping[str, Any], asked: str) -> None:
    """Refuse an answer of which the text, or what it calls and with what, is not in what is asked.

    Arguments may be shown as they are or as JSON, and a part of them only once for itself.
    """
    waiting: list[Any] = [last.get("content") or ""]
    for function in (call.get("function") or call for call in last["tool_calls"]):
        waiting += [function.get("name"), arguments_of(function)]
    said = list[str]()
    for value in waiting:  # which grows
        if isinstance(value, Mapping | list):
            waiting += [*value, *(value.values() if isinstance(value, Mapping) else ())]
        elif value is not None and not isinstance(value, bool):
            said.append(value if isinstance(value, str) else json.dumps(value))
    left = MARKS.sub("", asked)
    for text in sorted(said, key=len, reverse=True):
        forms = (MARKS.sub("", form) for form in (text, json.dumps(text, ensure_ascii=False)))
        shown = next((form for form in forms if form in left), None)
        if shown is None:
            raise _another("leaves out a part of the answer")
        left = left.replace(shown, " ", 1) if shown else left


def _another(problem: str) -> ForgeError:
    hint = "give rows whose answers it shows whole, or prompt and completion"
    return ConfigError(f"the chat template {problem}", hint=hint)


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
        _check_steady(str(text))


@lru_cache(maxsize=16)
def _check_steady(text: str) -> None:
    ast = Environment(extensions=["jinja2.ext.loopcontrols", GenerationTag]).parse(text)
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
