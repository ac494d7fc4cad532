"""/v1, asked by the real client: chats, streams, tools, thoughts, limits, and many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import psutil
import pytest
from tokenizers import Tokenizer as Words
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agent_forge.api.openai import _tools
from agent_forge.api.questions import ChatQuestion
from agent_forge.infer import open_models
from agent_forge.infer.scheduler import Scheduler
from agent_forge.infer.tools import Toolbox, builtin_tools
from tests.support.eval_models import llama
from tests.support.polling import until
from tests.support.serving import MODEL, Server, scripted, serving, small_model

HELLO: Any = [{"role": "user", "content": "copy k m a"}]
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("api") / "storage"
    small_model(root)
    other = llama(tmp_path_factory.mktemp("given") / "Other.Llama-1")
    with serving(root, given=[str(other)]) as found:
        yield found


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def speaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose only model, which was taught to use tools, says what it is told to."""

    def start(*script: str, **options: Any) -> Any:
        small_model(tmp_path / "storage", tools=["calc"])
        monkeypatch.setattr(open_models, "open_model", lambda place: scripted(*script))
        return serving(tmp_path / "storage", **options)

    return start


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[list[Any], str]:
    chunks = list(client.chat.completions.create(stream=True, **asked))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    return chunks, "".join(texts)


# -- chats and completions -------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, "sessions/s1/phase1_cognate/small", "Other.Llama-1"])
def test_a_stream_says_what_a_whole_reply_says(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 30, "seed": 7, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    chunks, text = streamed(client, **asked, stream_options={"include_usage": True})
    assert text == whole.choices[0].message.content and text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 30 and whole.usage.prompt_tokens > 5
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 2


def test_seeds_temperature_and_stop_act(client: openai.OpenAI) -> None:
    def say(**options: Any) -> Any:
        given: Any = {"model": MODEL, "prompt": "copy", "max_tokens": 24, "seed": 1, **options}
        return client.completions.create(**given).choices[0]

    assert say().text == say().text != say(seed=2).text
    assert say(temperature=0).text == say(temperature=0, seed=2).text != say().text
    assert say(top_p=1e-6).text == say(temperature=0).text
    text = say().text
    stop = text[9:12]
    assert say().finish_reason == "length"
    ended = say(stop=[stop, "\x00never"])
    assert ended.text == text[: text.index(stop)] and ended.finish_reason == "stop"


def test_log_probabilities_are_of_each_token(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].logprobs is not None
    rows = whole.choices[0].logprobs.content or []
    assert "".join(row.token for row in rows) == whole.choices[0].message.content
    for row in rows:
        assert row.logprob == row.top_logprobs[0].logprob <= 0 and len(row.top_logprobs) == 3
    chunks, _ = streamed(client, **asked)
    assert [r for c in chunks for r in c.choices[0].logprobs.content] == rows
    legacy = client.completions.create(model=MODEL, prompt="copy", max_tokens=8, logprobs=2, seed=1)
    found: Any = legacy.choices[0].logprobs
    assert "".join(found.tokens) == legacy.choices[0].text and len(found.top_logprobs) == 8
    assert found.text_offset[1] == len(found.tokens[0])


def test_a_completion_goes_on_where_its_prompt_ends(tmp_path: Path) -> None:
    """Also where tokens by themselves lose the blank before them; and the tokens are the text."""
    folder = llama(tmp_path / "words")
    words = Words(WordLevel({f"\u2581w{i}": i for i in range(260)}, unk_token="\u2581w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    with serving(tmp_path, given=[str(folder)]) as server:
        asked: Any = {"model": "words", "prompt": "w1 w2", "max_tokens": 9, "seed": 1}
        whole = server.client().completions.create(**asked, logprobs=2).choices[0]
        assert whole.text.startswith(" w") and len(whole.text.split()) == 9
        assert "".join(whole.logprobs.tokens) == whole.text
        assert all(t.startswith(" w") for row in whole.logprobs.top_logprobs for t in row)
        chunks = list(server.client().completions.create(**asked, logprobs=2, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        told = [chunk.choices[0].logprobs for chunk in chunks]
        assert [n for one in told for n in one.text_offset] == whole.logprobs.text_offset
        assert whole.logprobs.text_offset[3] == len("".join(whole.logprobs.tokens[:3]))


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {MODEL, "Other.Llama-1"}
    assert client.models.retrieve(MODEL).owned_by == "agent-forge"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("cognate.none.s1")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "no call"),
        ({"n": 2}, "n: "),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CALC]}, "not taught"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"messages": [{"role": "user", "content": "a b " * 20_000}]}, "the model reads"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Server, asked: Any, said: str) -> None:
    found = post(server, "chat/completions", {"model": MODEL, "messages": HELLO, **asked})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error" and said in error["message"]


def post(server: Server, place: str, body: Any) -> httpx2.Response:
    """Asked as no client would: with half of a surrogate pair, for example."""
    kind = {"Content-Type": "application/json"}
    return httpx2.post(f"{server.url}/v1/{place}", content=json.dumps(body), headers=kind)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "..",
            "../storage",
            "../given",
            "sessions/../../given",
            "/etc",
            "//etc",
            "sessions/s1/..",
        ),
        *("cognate.small.s1/..", "sessions\\s1", "a\x00b", "%2e%2e/x", "..%2fx", ".", "", "link"),
        *("link/model", "\u2025/x", "sessions/s1/phase1_cognate/small/", "~", "cognate...s1"),
        *("a+b", "x" * 5000, "\ud800"),
    ],
)
def test_names_cannot_leave_the_root(server: Server, name: str) -> None:
    root = server.models.catalog.store.root
    (root / "link").is_symlink() or (root / "link").symlink_to(root / "sessions")
    (root.parent / "given").mkdir(exist_ok=True)
    (root.parent / "given" / "config.json").write_text("{}")
    found = post(server, "completions", {"model": name, "prompt": "x"})
    assert found.status_code in (400, 404, 422), found.text
    assert "error" in found.json() and str(root.resolve()) not in found.text


@pytest.mark.parametrize("path", ["..%2F..%2Fgiven", "%2Fetc", "a%00b", "link", "%ff", "%2e%2e"])
def test_paths_cannot_leave_the_root(server: Server, path: str) -> None:
    for place in (f"/v1/models/{path}", f"/runs/{path}", f"/runs/{path}/results"):
        found = httpx2.get(server.url + place)
        assert found.status_code in (400, 404), (place, found.text)


# -- tools and thoughts ----------------------------------------------------------------------------

CALLS = ("<|tool_call|>", "calc 6*7", "<|end_call|>", "<|tool_result|>", "42", "<|end_result|>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_carries_out_its_own_tools(speaking: Any, stream: bool) -> None:
    question: Any = {"role": "user", "content": "what is 6 times 7"}
    with speaking("I see. ", *CALLS, "It is 42.") as server:
        client, asked = server.client(), {"model": MODEL, "tools": [CALC], "temperature": 0}
        if stream:
            chunks, text = streamed(client, messages=[question], **asked)
            (call,) = [c for k in chunks for c in k.choices[0].delta.tool_calls or ()]
            assert (call.index, text) == (0, "I see. ")
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            choice = client.chat.completions.create(messages=[question], **asked).choices[0]
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I see. "
        assert json.loads(call.function.arguments) == {"expression": "6*7"}
        said = {"role": "assistant", "content": "I see. "}
        said["tool_calls"] = [{"id": call.id, "type": "function", "function": call.function}]
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        asked["messages"] = [question, said, result]
        answer = client.chat.completions.create(**asked).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("It is 42.", "stop")


def test_built_in_tools_run_only_when_the_server_was_told_so(speaking: Any) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
    with speaking(*CALLS, "It is 42.", run_tools=True) as server:
        message: Any = server.client().chat.completions.create(**asked).choices[0].message
        assert message.content == "It is 42." and not message.tool_calls
        assert message.carried_out == [{"call": "calc 6*7", "result": "42"}]
        _, text = streamed(server.client(), **asked)
        assert text == "It is 42."
    with speaking(*CALLS, "It is 42.") as server:  # no call can be said: something else is
        message = server.client().chat.completions.create(max_tokens=1, **asked).choices[0].message
        assert not hasattr(message, "carried_out") and not message.tool_calls


@pytest.mark.parametrize(("choice", "run"), [(None, True), ("auto", True), ("none", False)])
def test_a_choice_of_the_tools_of_the_server(choice: Any, run: bool) -> None:
    asked = ChatQuestion(model=MODEL, messages=HELLO, tool_choice=choice)
    opened: Any = SimpleNamespace(tools=Toolbox(builtin_tools(None)))
    assert (_tools(asked, opened, run_tools=True) is not None) == run


def test_a_call_can_be_asked_for_and_a_bad_one_is_told_to_the_model(speaking: Any) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "tools": [CALC]}
    with speaking(*CALLS) as server:
        for choice in ("required", {"type": "function", "function": {"name": "calc"}}):
            found = server.client().chat.completions.create(tool_choice=choice, **asked).choices[0]
            assert found.message.tool_calls[0].function.name == "calc"
        with pytest.raises(openai.BadRequestError, match="none of the tools"):
            other: Any = {"type": "function", "function": {"name": "read"}}
            server.client().chat.completions.create(tool_choice=other, **asked)
    unknown = "error: there is no tool 'look'; there are: calc"
    script = ("<|tool_call|>", "look", "<|end_call|>", "<|tool_result|>", unknown)
    with speaking(*script, "<|end_result|>", "I cannot.") as server:
        message = server.client().chat.completions.create(**asked).choices[0].message
        assert (message.content, message.tool_calls) == ("I cannot.", None)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_reasoning(speaking: Any, stream: bool) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
    with speaking("[thinking]", "<step>", "6 times 7", "[/endthinking]", "It is 42.") as server:
        client = server.client()
        if stream:
            chunks, text = streamed(client, **asked)
            deltas = [chunk.choices[0].delta for chunk in chunks]
            thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        else:
            reply: Any = client.chat.completions.create(**asked)
            thought, text = reply.choices[0].message.reasoning_content, ""
            text = reply.choices[0].message.content
            assert reply.usage.completion_tokens_details.reasoning_tokens > 1
        assert (thought, text) == ("<step>6 times 7", "It is 42.")


def test_models_that_were_not_taught_to_think_are_not_forced(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="taught to think"):
        client.chat.completions.create(
            model="Other.Llama-1", messages=HELLO, reasoning_effort="high"
        )


# -- many at once ----------------------------------------------------------------------------------


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let every token of every batch take so long."""
    advance = Scheduler._advance

    def slowly(*given: Any) -> None:
        time.sleep(seconds)
        advance(*given)

    monkeypatch.setattr(Scheduler, "_advance", slowly)


def test_many_at_once_get_the_answers_of_one_alone(server: Server) -> None:
    """64 clients; requests together, no answer lost, the same answer as if alone."""
    tokens = 16

    def asked(number: int) -> Any:
        text = "copy " + "k m a t " * (number % 5 + 1)
        messages = [{"role": "user", "content": text}]
        return {"model": MODEL, "messages": messages, "seed": number, "max_tokens": tokens}

    alone = [server.client().chat.completions.create(**asked(n)) for n in range(0, 64, 9)]
    before = psutil.Process().memory_info().rss

    async def all_at_once() -> list[Any]:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **given) as client:
            return await asyncio.gather(*(one(client, n) for n in range(64)))

    async def one(client: Any, number: int) -> Any:
        if number % 2 == 0:
            return (
                (await client.chat.completions.create(**asked(number))).choices[0].message.content
            )
        stream = await client.chat.completions.create(stream=True, **asked(number))
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    said = asyncio.run(all_at_once())
    assert len(said) == 64 and all(said)
    assert [said[n] for n in range(0, 64, 9)] == [a.choices[0].message.content for a in alone]
    assert psutil.Process().memory_info().rss - before < 200e6
    assert server.scheduler.load == (0, 0)


def test_a_full_queue_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch)
    small_model(tmp_path)
    body = {"model": MODEL, "prompt": "copy", "max_tokens": 300, "temperature": 1, "stream": True}
    with serving(tmp_path, places=2) as server, httpx2.Client(timeout=30) as web:
        server.scheduler.cached_tokens = 1  # one at a time
        url, open_ones = f"{server.url}/v1/completions", []
        try:
            for number in range(3):
                request = web.build_request("POST", url, json={**body, "seed": number})
                open_ones.append(web.send(request, stream=True))
                until(lambda: sum(server.scheduler.load) == len(open_ones))
                until(lambda: server.scheduler.load[1] == 1)
            refused = web.post(url, json=body)
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                server.client().completions.create(model=MODEL, prompt="x")
        finally:
            for stream in open_ones:
                stream.close()
        until(lambda: server.scheduler.load == (0, 0), 10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disappears_frees_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slow_down(monkeypatch)
    small_model(tmp_path)
    body = json.dumps({"model": MODEL, "prompt": "copy", "max_tokens": 4000, "stream": stream})
    with serving(tmp_path) as server:
        server.client().models.list()
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.address}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            until(lambda: server.scheduler.load == (0, 1))
        began = time.monotonic()
        until(lambda: server.scheduler.load == (0, 0), 5)
        assert time.monotonic() - began < 5


def test_an_open_model_is_kept_until_its_files_change_or_others_need_the_room(
    tmp_path: Path,
) -> None:
    names = [small_model(tmp_path, f"m{seed}", seed) for seed in range(3)]
    with serving(tmp_path) as server:
        models, places = server.models.open, [server.models.catalog.find(name) for name in names]
        one, two = (models.open(place) for place in places[:2])
        assert models.open(places[0]) is one and models.bytes == one.bytes + two.bytes
        models.most_bytes = one.bytes + two.bytes
        three = models.open(places[2])  # `two` is the longest unused
        assert models.open(places[0]) is one and models.open(places[2]) is three
        assert models.open(places[1]) is not two
        del two, three
        (places[1] / "config.json").touch()
        assert models.open(places[1]) is not models.open(places[0])


def test_models_that_are_in_use_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    names = [small_model(tmp_path, f"m{seed}", seed) for seed in range(4)]
    with serving(tmp_path, most_bytes=0) as server:  # one is open at a time
        models, places = server.models.open, [server.models.catalog.find(name) for name in names]
        for place in places:
            models.open(place)
        one = models.open(places[0]).model  # as a reply that is being written holds it
        models.open(places[1])
        with pytest.raises(openai.RateLimitError, match="in use"):
            server.client().completions.create(model=names[2], prompt="x", max_tokens=1)
        assert server.client().completions.create(model=names[1], prompt="x", max_tokens=1)
        del one
        assert server.client().completions.create(model=names[2], prompt="x", max_tokens=1)


def test_a_model_that_fails_hurts_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many wait for it together, while another is continued."""
    slow_down(monkeypatch)
    small_model(tmp_path)
    given = [str(llama(tmp_path / "given"))]
    with serving(tmp_path, given=given) as server, ThreadPoolExecutor() as pool:
        opened = server.models.open.open(server.models.catalog.find("given")).model

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the network is broken")

        def ask(number: int) -> Any:
            with pytest.raises(openai.InternalServerError) as broken:
                server.client().completions.create(model="given", prompt="x")
            return broken.value.body

        monkeypatch.setattr(opened.network, "forward", fails)
        asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 20, "stream": True}
        stream = server.client().completions.create(**asked)
        assert next(iter(stream)).choices
        assert {found["type"] for found in pool.map(ask, range(4))} == {"server_error"}
        assert list(stream)[-1].choices[0].finish_reason
        assert server.scheduler.load == (0, 0)
