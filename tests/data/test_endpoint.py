"""The client of chat endpoints against a real server: what it sends, pays, retries, refuses."""

from __future__ import annotations

import email.utils
import itertools
import logging
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_forge.config.load import validate
from agent_forge.data import endpoint_http
from agent_forge.data.endpoint import Endpoint, EndpointSettings, ReplyRejected
from agent_forge.data.endpoint_cost import Price
from agent_forge.data.endpoint_http import Address
from agent_forge.errors import ConfigError, CostCapReached, EndpointFailed, ForgeError, Interrupted
from tests.support.chat_server import (
    KEY,
    Behaviour,
    ChatServer,
    FakeClock,
    Question,
    answer,
    body,
    chat_server,
    completion,
    cut_short,
    flood,
    hang,
    repeat_key,
    reset,
    status,
    trickle,
)

ASK = [{"role": "user", "content": "2+2?"}]
Make = Callable[..., Endpoint]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make(server: ChatServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An endpoint at the server, with some settings of its own."""
    monkeypatch.delenv("FORGE_ENDPOINT_KEY", raising=False)

    def build(**changes: Any) -> Endpoint:
        usual = {"base_url": server.url, "models": ["lab/free"], "timeout_s": 5, "retries": 2}
        return Endpoint(EndpointSettings(**{**usual, **changes}), clock)

    return build


def worst_usd(max_tokens: int = 1024) -> float:
    """The worst case of ASK at lab/paid."""
    return (len(str(ASK)) + 256) * 1e-6 + max_tokens * 2e-6


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer(server: ChatServer, make: Make) -> None:
    found = make(max_tokens=64, temperature=0.5).complete(ASK, "lab/free")
    assert found == ("<2+2?>", 10, 5, 0.0)
    (asked,) = server.asked
    assert asked.pop("path") == "/v1/chat/completions"
    assert asked == {"model": "lab/free", "messages": ASK, "max_tokens": 64, "temperature": 0.5}
    assert server.keys == [None, None] and server.lists == 1


def test_the_price_is_of_counted_tokens_or_what_the_endpoint_says(
    server: ChatServer, make: Make
) -> None:
    endpoint = make(cost_cap_usd=1, models=["lab/paid"])
    server.script = [answer(), answer(cost=0.5), answer(cost=1e-9), answer(cost=-1)]
    costs = [endpoint.complete(ASK, "lab/paid").cost_usd for _ in range(4)]
    assert costs == pytest.approx([20e-6, 0.5, 20e-6, 20e-6])
    assert endpoint.spending.usd == pytest.approx(sum(costs))
    server.script = [answer(prompt_tokens=bad) for bad in (None, "10", -1, True, 1.5, 0)]
    server.script.append(answer(completion_tokens=0, cost="-5"))  # though it answers
    for _ in range(7):
        before = endpoint.spending.usd
        assert endpoint.complete(ASK, "lab/paid").prompt_tokens is None
        assert endpoint.spending.usd - before == pytest.approx(worst_usd())


def test_a_price_that_only_shows_in_the_reply_ends_a_free_run(
    server: ChatServer, make: Make
) -> None:
    endpoint = make()
    server.script = [answer(cost=0.01)]
    endpoint.complete(ASK, "lab/free")
    with pytest.raises(CostCapReached):
        endpoint.complete(ASK, "lab/free")
    assert len(server.asked) == 1


REJECTED: dict[str, tuple[Behaviour, str]] = {
    "html": (body(b"<html>hello</html>"), "not JSON"),
    "half": (body(b'{"choices": ['), "not JSON"),
    "not utf-8": (body(b"\xff\xfe"), "not JSON"),
    "nan": (body(b'{"choices": NaN}'), "not JSON"),
    "deep": (body(b"[" * 100_000), "not JSON"),
    "list": (body([1]), "not JSON"),
    "no choices": (body({"usage": {}}), "no choices"),
    "empty choices": (body({"choices": []}), "no choices"),
    "choices of another type": (body({"choices": "four"}), "no choices"),
    "choice of another type": (body({"choices": ["four"]}), "not text"),
    "message of another type": (body({"choices": [{"message": "four"}]}), "not text"),
    "text of another type": (body(completion(["four"])), "not text"),
    "no text": (body(completion(None)), "not text"),
    "reason of another type": (body(completion(finish=[1])), "not text"),
    "empty": (body(completion(" \n")), "empty"),
    "cut off": (body(completion(finish="length")), "ended by length"),
    "filtered": (body(completion(finish="content_filter")), "ended by content_filter"),
    "error without a code": (body({"error": {"message": "no"}}), "no choices"),
    "too large": (flood, "too large"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_reply_that_is_no_answer_is_rejected_by_name(
    name: str, server: ChatServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_http, "MAX_REPLY_BYTES", 1 << 20)
    behaviour, reason = REJECTED[name]
    server.script = [behaviour]
    endpoint = make(cost_cap_usd=1, models=["lab/paid"])
    with pytest.raises(ReplyRejected, match=reason) as rejected:
        endpoint.complete(ASK, "lab/paid")
    assert len(server.asked) == 1
    counted = name in ("text of another type", "no text", "reason of another type", "empty")
    counted = counted or name in ("cut off", "filtered")
    expected = 20e-6 if counted else worst_usd()
    assert rejected.value.cost_usd == endpoint.spending.usd == pytest.approx(expected)


# -- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        status(500),
        status(502),
        status(408),
        status(429),
        hang,
        reset,
        cut_short,
        trickle(b"HTTP/1.1 200 OK\r\nX-A: "),
        trickle(b"HTTP/1.1 200 OK\r\n\r\n"),
        body({"error": {"code": 429, "message": "slow down"}}),
    ],
)
def test_what_may_pass_is_tried_again(trouble: Behaviour, server: ChatServer, make: Make) -> None:
    server.script = [trouble]
    began = time.monotonic()
    assert make(timeout_s=0.2).complete(ASK, "lab/free").text == "<2+2?>"
    assert len(server.asked) == 2 and time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("trouble", "told"), [(hang, "in 0.1 s"), (status(503, "busy"), "503: busy")]
)
def test_trouble_that_stays_ends_in_bounded_time(
    trouble: Behaviour, told: str, server: ChatServer, make: Make, clock: FakeClock
) -> None:
    server.script = [trouble] * 9
    began = time.monotonic()
    with pytest.raises(EndpointFailed, match=told) as failed:
        make(timeout_s=0.1).complete(ASK, "lab/free")
    assert time.monotonic() - began < 3 and len(server.asked) == 3
    assert "run the same command again" in failed.value.hint


def test_an_endpoint_that_is_not_there_costs_nothing(server: ChatServer, make: Make) -> None:
    endpoint = make(cost_cap_usd=1, models=["lab/paid"])
    endpoint.list_models()
    server.over.set()
    server.shutdown()
    server.socket.close()
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        endpoint.complete(ASK, "lab/paid")
    assert endpoint.spending.usd == 0


@pytest.mark.parametrize(
    ("trouble", "unknown"),
    [(status(429), 0), (status(408), 1), (status(500), 1), (hang, 1), (reset, 1), (cut_short, 1)],
)
def test_what_might_have_been_billed_counts_at_its_worst(
    trouble: Behaviour, unknown: int, server: ChatServer, make: Make
) -> None:
    server.script = [trouble]
    endpoint = make(cost_cap_usd=1, models=["lab/paid"], timeout_s=0.2)
    endpoint.complete(ASK, "lab/paid")
    assert endpoint.spending.usd == pytest.approx(20e-6 + unknown * worst_usd())


def test_tries_are_further_and_further_apart(server: ChatServer, make: Make) -> None:
    def waits(seed: int) -> list[float]:
        endpoint = make(retries=7, seed=seed, requests_per_minute=60_000)
        endpoint.list_models()
        found: list[float] = []
        endpoint._pause = found.append  # type: ignore[method-assign]
        server.script = [status(500)] * 7
        endpoint.complete(ASK, "lab/free")
        return [seconds for seconds in found if seconds > 0.01]  # the others are for a turn

    first = waits(0)
    assert len(first) == 7
    for attempt, seconds in enumerate(first):
        ideal = min(60.0, 2.0**attempt)
        assert ideal / 2 <= seconds <= ideal * 1.5
    assert waits(0) == first != waits(1)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("7", 7, 7.01), ("0", 0, 1.5), ("nan", 0, 1.5), ("-5", 0, 1.5), ("soon", 0, 1.5)],
)
def test_retry_after_is_honoured(
    text: str, least: float, most: float, server: ChatServer, make: Make, clock: FakeClock
) -> None:
    endpoint = make(requests_per_minute=60_000)
    endpoint.list_models()
    clock.slept.clear()
    server.script = [status(429, Retry_After=text)]
    endpoint.complete(ASK, "lab/free")
    assert least <= sum(clock.slept) <= most


def test_retry_after_may_be_a_date_and_has_a_limit(
    server: ChatServer, make: Make, clock: FakeClock
) -> None:
    endpoint = make()
    endpoint.list_models()
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    server.script = [status(429, Retry_After=date)]
    before = clock.time
    endpoint.complete(ASK, "lab/free")
    assert 90 < clock.time - before < 105
    server.script = [status(429, "per day", Retry_After="86400")] * 3
    with pytest.raises(EndpointFailed, match="429: per day; it asks to wait 86400 s"):
        endpoint.complete(ASK, "lab/free")
    assert len(server.asked) == 3  # of which the last one once


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (400, EndpointFailed, "refused the request \\(400: no\\)"),
        (401, ConfigError, "refused the key of FORGE_ENDPOINT_KEY"),
        (402, EndpointFailed, "402: no"),
        (403, ConfigError, "refused the key"),
        (404, ConfigError, "no model 'lab/free' .*did you mean 'lab/fre'"),
        (422, EndpointFailed, "422"),
    ],
)
def test_a_refusal_ends_at_once(
    code: int, kind: type[ForgeError], told: str, server: ChatServer, make: Make
) -> None:
    server.listed["data"] = [*server.listed["data"], {"id": "lab/fre"}]
    server.script = [status(code, "no")]
    endpoint = make()
    with pytest.raises(kind, match=told) as refused:
        endpoint.complete(ASK, "lab/free")
    assert len(server.asked) == 1 and endpoint.spending.usd == 0
    assert ("is not set" in refused.value.hint) == (code in (401, 403))


def test_requests_are_spaced(server: ChatServer, make: Make, clock: FakeClock) -> None:
    endpoint = make(requests_per_minute=30)
    sent: list[float] = []
    real = endpoint._address.exchange

    def exchange(*arguments: Any) -> Any:
        sent.append(clock.time)
        return real(*arguments)

    endpoint._address.exchange = exchange  # type: ignore[method-assign]
    server.script = [answer(), status(500), answer()]
    for _ in range(3):
        endpoint.complete(ASK, "lab/free")
    assert len(sent) == 5  # the list, three requests, one of them twice
    assert min(b - a for a, b in itertools.pairwise(sent)) >= 2 - 1e-6


def test_waiting_ends_when_it_is_asked_to(server: ChatServer, make: Make, clock: FakeClock) -> None:
    endpoint = make()
    endpoint._should_stop = lambda: clock.time > 110
    server.script = [status(429, Retry_After="200")]
    with pytest.raises(Interrupted):
        endpoint.complete(ASK, "lab/free")
    assert clock.time < 112 and len(server.asked) == 1


# -- models and prices -----------------------------------------------------------------------------


def test_list_models(server: ChatServer, make: Make) -> None:
    price = {"prompt": "0.1", "completion": 0.2}
    server.listed = {
        "data": [
            {"id": "a", "pricing": {**price, "request": "0.3"}, "context_length": 100},
            {"id": "b", "pricing": {**price, "internal_reasoning": "0.9"}},
            {"id": "c", "pricing": {"prompt": "-1", "completion": "-1"}},
            {"id": "d", "pricing": {"prompt": "0.1"}, "context_length": "long"},
            {"id": "e", "pricing": {"prompt": "nan", "completion": "0"}},
            {"id": "f", "pricing": {**price, "request": "a lot"}},
            {"id": "g", "pricing": "free"},
            {"id": 5},
            "h",
        ]
    }
    found = make().list_models()
    assert found.pop("a") == ("a", Price(0.1, 0.2, 0.3), 100)
    assert found.pop("b") == ("b", Price(0.1, 0.9, 0.0), None)
    assert {m.name: m[1:] for m in found.values()} == dict.fromkeys("cdefg", (None, None))


@pytest.mark.parametrize("content", [{"data": {}}, [], b"<html>", {"models": []}])
def test_what_is_no_list_of_models(content: Any, server: ChatServer, make: Make) -> None:
    server.listings = [body(content)]
    with pytest.raises(EndpointFailed, match="no list of models"):
        make().list_models()


def test_an_address_without_models(server: ChatServer, make: Make) -> None:
    server.listings = [status(404)]
    with pytest.raises(ConfigError, match="/v1/models is not there"):
        make().list_models()


def test_an_unknown_model_is_refused_with_a_near_one(server: ChatServer, make: Make) -> None:
    endpoint = make(models=["lab/pay"])
    with pytest.raises(ConfigError, match="did you mean 'lab/paid'"):
        endpoint.estimate_cost([Question("a")])
    with pytest.raises(ConfigError, match="no model 'zzz'; it lists 3 others"):
        endpoint.complete(ASK, "zzz")
    assert server.asked == []


def test_what_is_not_free_needs_a_cap(server: ChatServer, make: Make) -> None:
    with pytest.raises(ConfigError, match="lab/paid is not free, and the cost cap is 0"):
        make(models=["lab/paid"]).complete(ASK, "lab/paid")
    assert server.asked == []


def test_a_model_without_a_price_is_for_this_machine_only(
    server: ChatServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make().complete(ASK, "lab/unpriced").cost_usd == 0
    monkeypatch.setattr(Address, "is_local", False)
    with pytest.raises(ConfigError, match="lists no price") as refused:
        make().complete(ASK, "lab/unpriced")
    assert "usd_per_million_prompt" in refused.value.hint
    with pytest.raises(ConfigError, match="lists no price"):
        make(usd_per_million_prompt=1).complete(ASK, "lab/unpriced")
    prices = {"usd_per_million_prompt": 1, "usd_per_million_completion": 2}
    found = make(cost_cap_usd=1, **prices).complete(ASK, "lab/unpriced")
    assert found.cost_usd == pytest.approx(20e-6)
    assert make(**prices).complete(ASK, "lab/free").cost_usd == 0  # the list has a price
    assert len(server.asked) == 3


def test_an_answer_that_the_context_cannot_hold_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="max_tokens 8192 leaves no room"):
        make(max_tokens=8192).complete(ASK, "lab/free")


def test_an_estimate_is_the_most_that_it_can_be(server: ChatServer, make: Make) -> None:
    models = ["lab/paid", "lab/free"]
    endpoint = make(models=models, cost_cap_usd=1, max_tokens=100, requests_per_minute=10)
    found = endpoint.estimate_cost([Question("2+2?")] * 5, done=())
    prompt = len(str(ASK)) + 256
    assert found[:3] == (5, 5 * prompt, 500) and found.minutes == 0.5
    assert found.usd == pytest.approx(3 * worst_usd(100))
    questions = [Question(key) for key in "abc"]
    assert endpoint.estimate_cost(questions, done={"a", "c"})[0] == 1
    assert endpoint.estimate_cost(questions, done={"a", "c"}).usd == 0  # b is asked of lab/free
    assert server.asked == []


def test_the_cap_holds_before_a_request_is_sent(server: ChatServer, make: Make) -> None:
    endpoint = make(models=["lab/paid"], cost_cap_usd=2.5 * worst_usd())
    server.script = [answer(prompt_tokens=None)] * 9  # each at its worst
    endpoint.complete(ASK, "lab/paid")
    endpoint.complete(ASK, "lab/paid")
    with pytest.raises(CostCapReached, match="next request may cost") as reached:
        endpoint.complete(ASK, "lab/paid")
    assert len(server.asked) == 2 and "--cost-cap" in reached.value.hint


def test_tries_stop_at_the_cap(server: ChatServer, make: Make) -> None:
    server.script = [status(500)] * 9
    with pytest.raises(CostCapReached):
        make(models=["lab/paid"], cost_cap_usd=2.5 * worst_usd(), retries=9).complete(
            ASK, "lab/paid"
        )
    assert len(server.asked) == 2


def test_a_huge_request_is_not_sent(server: ChatServer, make: Make) -> None:
    with pytest.raises(ConfigError, match="a request of"):
        make().complete([{"role": "user", "content": "x" * (1 << 20)}], "lab/free")
    assert server.asked == []


# -- the key ---------------------------------------------------------------------------------------


@pytest.fixture
def key(make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FORGE_ENDPOINT_KEY", KEY)
    return KEY


def test_the_key_is_sent_and_may_be_in_another_variable(
    key: str, server: ChatServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().complete(ASK, "lab/free")
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    make(key_variable="OTHER_KEY").complete(ASK, "lab/free")
    assert server.keys == [f"Bearer {KEY}"] * 2 + ["Bearer sk-other"] * 2


def test_the_key_is_not_sent_over_plain_http(
    key: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "create_connection", connect)
    for host in ("10.0.0.1", "0.0.0.0", "127.0.0.1.example.org", "localhost.example.org"):
        with pytest.raises(ConfigError, match="plain http"):
            make(base_url=f"http://{host}/v1")
    for url in ("http://localhost:1", "http://[::1]:1", "http://127.9.9.9:1", "https://10.0.0.1"):
        make(base_url=url)
    monkeypatch.delenv("FORGE_ENDPOINT_KEY")
    make(base_url="http://10.0.0.1/v1")  # nothing to see


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(code: int, key: str, server: ChatServer, make: Make) -> None:
    with chat_server() as other:
        away = {"Location": f"{other.url}/chat/completions?key={KEY}"}
        server.script = [lambda handler: handler.send({}, code, **away)]
        server.listings = [lambda handler: handler.send({}, code, **away)]
        with pytest.raises(EndpointFailed, match="points elsewhere"):
            make().list_models()
        with pytest.raises(EndpointFailed, match=f"points elsewhere.*{other.url}") as refused:
            make().complete(ASK, "lab/free")
        assert len(server.asked) == 1 and other.keys == [] and KEY not in str(refused.value)


def test_the_key_is_in_no_error_log_or_answer(
    key: str, server: ChatServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = make(retries=0)
    server.script = [repeat_key(code) for code in (200, 400, 401, 404, 500)]
    assert endpoint.complete(ASK, "lab/free").text.endswith("Bearer ***")
    for _ in range(4):
        with pytest.raises(ForgeError) as refused:
            endpoint.complete(ASK, "lab/free")
        assert "***" in str(refused.value)
        assert KEY not in str(refused.value) + refused.value.hint + caplog.text
    assert KEY not in repr(endpoint.settings) + repr(vars(endpoint.settings))


def test_a_long_message_does_not_end_within_the_key(
    key: str, server: ChatServer, make: Make
) -> None:
    server.script = [status(400, "x" * 190 + KEY + "y" * 9999)]
    with pytest.raises(EndpointFailed) as refused:
        make().complete(ASK, "lab/free")
    assert "sk-" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("bad", ["sk-a\nX-Evil: 1", "sk-a b", "sk-\u00e9"])
def test_what_cannot_be_a_key_is_refused_and_not_shown(
    bad: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_ENDPOINT_KEY", bad)
    with pytest.raises(ConfigError, match="FORGE_ENDPOINT_KEY is not a key") as refused:
        make()
    assert "sk-" not in str(refused.value)


def test_control_characters_of_an_endpoint_are_not_shown(server: ChatServer, make: Make) -> None:
    server.script = [status(400, "a\x1b[31mb\nc")]
    with pytest.raises(EndpointFailed, match=r"a \[31mb c"):
        make().complete(ASK, "lab/free")


@pytest.mark.parametrize(
    "changes",
    [
        {"base_url": "ftp://host"},
        {"base_url": "host/v1"},
        {"base_url": "https://"},
        {"base_url": "https://user:sk-secret@host/v1"},
        {"base_url": "https://host/v1?key=sk-secret"},
        {"base_url": "https://host:99999"},
        {"base_url": "https://key:sk-secret/v1"},
        {"base_url": "https://ho st/v1"},
        {"base_url": "https://a..b/v1"},
        {"key_variable": "sk-secret"},
        {"models": []},
        {"requests_per_minute": 0},
        {"cost_cap_usd": -1},
        {"cost_cap_usd": float("nan")},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    given = {"base_url": "https://host/v1", "models": ["m"], **changes}
    with pytest.raises(ConfigError) as refused:
        validate(EndpointSettings, given, "the endpoint")
    assert "secret" not in str(refused.value) + refused.value.hint


def test_who_cannot_prove_to_be_the_endpoint_gets_nothing(
    key: str, server: ChatServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = make(base_url=server.url.replace("http://", "https://"), retries=1)
    with pytest.raises(EndpointFailed, match="cannot be reached"):  # it speaks no TLS
        secure.list_models()

    def handshake(*_: Any, **__: Any) -> None:
        tries.append(1)
        error = ssl.SSLCertVerificationError("self-signed")
        error.verify_message = "self-signed certificate"
        raise error

    tries: list[int] = []
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", handshake)
    with pytest.raises(EndpointFailed, match="cannot prove who it is"):
        secure.list_models()
    assert server.keys == [] and tries == [1]


def test_it_loads_without_torch() -> None:
    code = "import agent_forge.data.endpoint_rows, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_that_is_no_secret_changes_no_answer(
    server: ChatServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`1` and `x` are what people give to servers of their own."""
    monkeypatch.setenv("FORGE_ENDPOINT_KEY", KEY)
    whole = make().complete(ASK, "lab/free").text
    for short in {*whole} - {" "}:
        monkeypatch.setenv("FORGE_ENDPOINT_KEY", short)
        assert make().complete(ASK, "lab/free").text == whole
