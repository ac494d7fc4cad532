"""Conversations with one model or two at once: thoughts, calls of tools, answers, as they come."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from agent_forge.errors import ConfigError, ForgeError
from agent_forge.model.catalog import Catalog
from agent_forge.ui.dashboard import state

if TYPE_CHECKING:  # torch is loaded when a model is opened, and not before
    from agent_forge.infer.open_models import Open, OpenModels
    from agent_forge.infer.replies import Piece, Reply
    from agent_forge.infer.scheduler import Scheduler
    from agent_forge.infer.thinking import ThinkMode

MOST_BYTES = 2 << 30  # that open models hold
PLACES = 16  # replies that may wait
DRAW_S = 0.15  # between two looks at a reply that grows
TOY = "toy"  # the phase whose models say nothing
TALK = "talk"  # the key of the turns of this browser
MODES: dict[ThinkMode, str] = {"free": "as it likes", "off": "never", "forced": "always"}


@dataclass
class Said:
    """What a model replied: its thought, its calls, its answer."""

    model: str
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # with their results
    answer: str = ""
    note: str = ""  # why it ended early

    def add(self, piece: Piece) -> None:
        if piece.kind == "thought":
            self.thought += piece.text
        else:
            self.answer += piece.text
        self.calls += [(str(one["call"]), str(one["result"])) for one in piece.carried_out]
        if piece.error is not None:
            self.note = str(piece.error)
        elif piece.finish == "length":
            self.note = "the longest reply was reached"


@dataclass
class Turn:
    """What was asked, and what each model replied."""

    asked: str
    replies: list[Said] = field(default_factory=list)


class Asked(NamedTuple):
    """How replies are to be."""

    system: str
    mode: ThinkMode
    temperature: float
    tokens: int
    seed: int
    tools: bool


class Engine(NamedTuple):
    models: OpenModels
    scheduler: Scheduler


@st.cache_resource(show_spinner=False)
def _engine() -> Engine:
    """The models that are open and the thread that computes, for all who talk."""
    import torch

    from agent_forge.infer.open_models import OpenModels
    from agent_forge.infer.scheduler import Scheduler

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # runs go on meanwhile
    return Engine(OpenModels(MOST_BYTES), Scheduler(PLACES))


def render() -> None:
    """The page."""
    with state.problems():
        names = [
            row["model_id"] for row in Catalog(state.store()).rows() if row["phase_name"] != TOY
        ]
        if not names:
            st.info("No models yet: each phase of a run registers what it made.")
            return
        left, right, end = st.columns([3, 3, 1], vertical_alignment="bottom")
        first = left.selectbox("Model", names, key="talk-model")
        options: dict[str, Any] = {"index": None, "placeholder": "none: one model alone"}
        second = right.selectbox("Second model", names, key="talk-second", **options)
        if end.button("New", key="talk-new", help="begin a new conversation"):
            st.session_state[TALK] = []
        asked = _settings()
        chosen = [first, *([second] if second else [])]
        turns: list[Turn] = st.session_state.setdefault(TALK, [])
        for turn in turns:
            _show(turn)
        if text := st.chat_input("Say something", key="say", max_chars=100_000):
            turns.append(Turn(text, [Said(name) for name in chosen]))
            _answer(turns, asked)


def _settings() -> Asked:
    """How replies are to be."""
    with st.expander("Settings"):
        system = st.text_input("System prompt", key="talk-system")
        columns = st.columns(5, vertical_alignment="bottom")
        options: dict[str, Any] = {"key": "talk-think", "format_func": MODES.__getitem__}
        mode = columns[0].selectbox("Thoughts", list(MODES), **options)
        options = {"min_value": 0.0, "max_value": 5.0, "step": 0.1}
        temperature = columns[1].number_input("Temperature", key="talk-temperature", **options)
        options = {"min_value": 1, "max_value": 4096, "value": 128}
        tokens = columns[2].number_input("Longest reply (tokens)", key="talk-tokens", **options)
        seed = columns[3].number_input("Seed", key="talk-seed", min_value=0, value=0)
        tools = columns[4].toggle("Tools", value=True, key="talk-tools", help="that it was taught")
    return Asked(system, mode, temperature, int(tokens), int(seed), tools)


def _show(turn: Turn) -> None:
    """A turn that is over."""
    with st.chat_message("user"):
        st.text(turn.asked)
    for column, said in zip(st.columns(len(turn.replies)), turn.replies, strict=True):
        with column, st.chat_message("assistant"):
            _show_reply(said)


def _show_reply(said: Said) -> None:
    """A reply, as far as it has come: plain text, whatever a model says."""
    st.caption("model")
    st.text(said.model)
    if said.thought:
        st.caption("thinks")
        st.code(said.thought, language=None, wrap_lines=True)
    for call, result in said.calls:
        st.caption("calls a tool")
        st.code(f"{call}\n= {result}", language=None, wrap_lines=True)
    st.text(said.answer)
    if said.note:
        st.warning("It ended early." if said.answer or said.thought else "It did not answer.")
        st.text(said.note)


def _answer(turns: Sequence[Turn], asked: Asked) -> None:
    """Let the models reply to the last turn, and show it as it comes."""
    turn = turns[-1]
    with st.chat_message("user"):
        st.text(turn.asked)
    places = []
    for column in st.columns(len(turn.replies)):
        with column, st.chat_message("assistant"):
            places.append(st.empty())
    waiting: queue.SimpleQueue[tuple[int, Piece]] = queue.SimpleQueue()
    replies: dict[int, Reply] = {}
    try:
        with st.spinner("Opening ..."):
            engine, catalog = _engine(), Catalog(state.store())
            for number, said in enumerate(turn.replies):
                try:
                    model = engine.models.open(catalog.find(said.model))
                    reply = _reply(model, _messages(turns, number, asked), asked)
                    reply.tell = partial(_put, waiting, number)
                    engine.scheduler.submit(reply)
                    replies[number] = reply
                except (ForgeError, OSError) as error:
                    said.note = str(error)
                _draw(places[number], said)
        _follow(turn, set(replies), waiting, places)
    finally:  # also if whoever asked has gone elsewhere
        for reply in replies.values():
            engine.scheduler.cancel(reply)


def _put(waiting: queue.SimpleQueue[tuple[int, Piece]], number: int, piece: Piece) -> None:
    waiting.put((number, piece))


def _follow(
    turn: Turn, left: set[int], waiting: queue.SimpleQueue[tuple[int, Piece]], places: Sequence[Any]
) -> None:
    """Take the pieces of replies as they come, until all have ended."""
    drawn = time.monotonic()
    while left:
        changed = False
        with contextlib.suppress(queue.Empty):
            number, piece = waiting.get(timeout=DRAW_S)
            turn.replies[number].add(piece)
            changed = True
            if piece.finish or piece.error is not None:
                left.discard(number)
        if not left or (not changed) or time.monotonic() - drawn > DRAW_S:
            for place, said in zip(places, turn.replies, strict=True):
                _draw(place, said)
            drawn = time.monotonic()


def _draw(place: Any, said: Said) -> None:
    with place.container():
        _show_reply(said)


def _messages(turns: Sequence[Turn], number: int, asked: Asked) -> list[dict[str, Any]]:
    """The conversation as one of the models has it."""
    said: list[dict[str, Any]] = []
    if asked.system:
        said.append({"role": "system", "content": asked.system})
    for turn in turns:
        said.append({"role": "user", "content": turn.asked})
        if turn is not turns[-1] and number < len(turn.replies):
            said.append({"role": "assistant", "content": turn.replies[number].answer})
    return said


def _reply(opened: Open, messages: Sequence[dict[str, Any]], asked: Asked) -> Reply:
    """A reply that is yet to be written, with as many tokens as there is room for."""
    from agent_forge.infer.chat import check_prompt
    from agent_forge.infer.generate import CACHED_TOKENS, SamplingSettings
    from agent_forge.infer.replies import Reply, ToolUse, chat_ids
    from agent_forge.model.opened import ForgeModel

    check_prompt(messages[-1]["content"])
    with opened.lock:
        ids = chat_ids(opened.model, messages)
    longest = min(opened.model.max_length or CACHED_TOKENS, CACHED_TOKENS)
    if len(ids) >= longest:
        problem = f"the conversation has {len(ids):,} tokens, the model reads {longest:,}"
        raise ConfigError(problem, hint="begin a new one")
    most = min(asked.tokens, longest - len(ids))
    sampling = SamplingSettings(most, asked.temperature, seed=asked.seed)
    ours = isinstance(opened.model, ForgeModel)
    mode = "off" if asked.mode == "free" and not ours else asked.mode
    tools = ToolUse(opened.tools, False) if asked.tools and opened.tools else None
    return Reply(opened.model, ids, sampling, mode=mode, tools=tools)
