"""Replies with tools: calls are carried out, results are read, in batches and in a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agent_forge.data.tokenizer import SPECIAL, Tokenizer
from agent_forge.infer import tool_use
from agent_forge.infer.generate import GeneratedText, SamplingSettings
from agent_forge.infer.tool_use import CALL, END_CALL, asked_prompt, reply_with_tools
from agent_forge.infer.tools import Toolbox, builtin_tools

SAMPLING = SamplingSettings(max_new_tokens=20)
CUT_OFF = "(cut off)"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is 6 times 7 calc 6*7 It is 42."] * 3, 400)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Any:
    """A model that says given things, one a turn and row; what it was given is noted."""
    given: list[tuple[list[list[int]], SamplingSettings]] = []

    def play(*turns: Sequence[tuple[str, ...]]) -> list[Any]:
        lines: Iterator[Sequence[tuple[str, ...]]] = iter(turns)

        def said(network: Any, prompts: Any, sampling: Any) -> list[GeneratedText]:
            given.append(([list(p) for p in prompts], sampling))
            rows = next(lines)
            assert len(rows) == len(prompts)
            return [_text(tokenizer, row) for row in rows]

        monkeypatch.setattr(tool_use, "generate", said)
        return given

    return play


def _text(tokenizer: Tokenizer, row: tuple[str, ...]) -> GeneratedText:
    parts = [SPECIAL.get(part, part) for part in row if part != CUT_OFF]
    if CUT_OFF in row:
        return GeneratedText(tokenizer.compose(*parts), stopped_by="length")
    end = END_CALL if "<|tool_call|>" in row else SPECIAL["<|end|>"]
    return GeneratedText(tokenizer.compose(*parts), stopped_by="token", stop_token=end)


def test_a_call_that_was_cut_off_is_not_carried_out(script: Any, tokenizer: Tokenizer) -> None:
    """`calc 48*7` is a call, and another one than `calc 48*73`."""
    script([("<|tool_call|>", "calc 48*7", CUT_OFF)], [("I am sorry.",)])
    prompt = asked_prompt(tokenizer, "what is 6 times 7")
    box = Toolbox(builtin_tools())
    (reply,) = reply_with_tools(nn.Identity(), tokenizer, [prompt], box, SAMPLING)
    assert reply.calls[0].text == tool_use.NO_END and not reply.calls[0].ok


def test_calls_are_carried_out_and_their_results_read(script: Any, tokenizer: Tokenizer) -> None:
    given = script(
        [("<|tool_call|>", "calc 6*7"), ("Hello.",)], [("<|tool_call|>", "calc 42+1")], [("43.",)]
    )
    prompts = [asked_prompt(tokenizer, text) for text in ("what is 6 times 7", "hello")]
    one, two = reply_with_tools(
        nn.Identity(), tokenizer, prompts, Toolbox(builtin_tools()), SAMPLING
    )
    assert [call.text for call in one.calls] == ["42", "43"] and one.answer == "43."
    assert two.answer == "Hello." and not two.calls
    told = tokenizer.decode(given[1][0][0], specials=True)
    assert told.endswith("<|tool_call|>calc 6*7<|end_call|><|tool_result|>42<|end_result|>")
    own = tokenizer.decode(
        [i for i, said in zip(one.ids, one.own, strict=True) if said], specials=True
    )
    assert own == "<|tool_call|>calc 6*7<|end_call|><|tool_call|>calc 42+1<|end_call|>43.<|end|>"


def test_a_model_never_writes_results_and_ends_its_calls(script: Any, tokenizer: Tokenizer) -> None:
    """After the last call that is allowed it can only answer."""
    call = ("<|tool_call|>", "calc 1+1")
    given = script([call], [call], [("2.",)])
    prompt = asked_prompt(tokenizer, "what is 6 times 7")
    box = Toolbox(builtin_tools())
    (reply,) = reply_with_tools(nn.Identity(), tokenizer, [prompt], box, SAMPLING, most_calls=2)
    assert len(reply.calls) == 2 and reply.answer == "2."
    for _, sampling in given:
        assert {SPECIAL["<|tool_result|>"], SPECIAL["<|end_result|>"]} <= sampling.banned_tokens
    assert END_CALL in given[0][1].stop_tokens and CALL not in given[0][1].banned_tokens
    assert CALL in given[2][1].banned_tokens


@pytest.mark.parametrize(
    "call", ["", "nothing", "calc", "calc 1/0", "calc 9**9**9", "python while"]
)
def test_a_call_that_fails_is_told_as_an_error(
    call: str, script: Any, tokenizer: Tokenizer
) -> None:
    script([("<|tool_call|>", call)], [("I am sorry.",)])
    prompt = asked_prompt(tokenizer, "what is 6 times 7")
    box = Toolbox(builtin_tools())
    (reply,) = reply_with_tools(nn.Identity(), tokenizer, [prompt], box, SAMPLING)
    assert reply.answer == "I am sorry." and not reply.calls[0].ok
    assert reply.calls[0].text.startswith("error: ") and "\n" not in reply.calls[0].text


def test_a_chat_shows_calls_and_results(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    from agent_forge.infer.chat import ChatModel
    from agent_forge.model.opened import ForgeModel

    script([("<|tool_call|>", "calc 6*7")], [("It is 42.",)])
    opened = ForgeModel.__new__(ForgeModel)
    opened.tokenizer, opened.network = tokenizer, torch.nn.Identity()  # type: ignore[assignment]
    chat = ChatModel(opened, Toolbox(builtin_tools()))
    turns = [{"role": "user", "content": "what is 6 times 7"}]
    pieces = list(chat.think_and_reply(turns, SAMPLING, "off"))
    said = [(piece.kind, piece.text) for piece in pieces]
    request = '{"name": "calc", "arguments": {"expression": "6*7"}}'
    assert said == [("call", request), ("result", "42"), ("answer", "It is 42.")]
