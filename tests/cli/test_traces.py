"""`forge data traces`: what it says, sends and writes, and how it stops."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data import traces
from tests.support.chat_server import KEY, ChatServer, Question, answer, chat_server, hang, status
from tests.support.command_line import Forge, start
from tests.support.polling import until


def trace_requests(
    families: Sequence[str], strategies: Sequence[str], count: int, seed: int
) -> Iterator[Question]:
    words = "-".join([*families, *strategies, str(seed)])
    return (Question(f"{words}-{n}") for n in range(count))


def accept_reply(request: Question, text: str) -> dict[str, Any]:
    if "wrong" in text:
        raise ValueError("the answer is wrong")
    return {"question": request.key, "trace": text}


def local_rows(*wanted: Any) -> Iterator[dict[str, Any]]:
    return ({"question": request.key} for request in trace_requests(*wanted))


@pytest.fixture(autouse=True)
def makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for what words the tasks; the real one is tested in tests/data/test_traces.py."""
    for stand_in in (trace_requests, accept_reply, local_rows):
        monkeypatch.setattr(traces, stand_in.__name__, stand_in)
    monkeypatch.setenv("FORGE_ENDPOINT_KEY", KEY)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def line(server: ChatServer) -> str:
    pace = "--set requests_per_minute=60000 --set timeout_s=5"
    asked = f"data traces --generate --endpoint {server.url} --model lab/free"
    return f"{asked} --out t.jsonl --count 3 --seed 7 {pace}"


def rows(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_traces_of_an_endpoint(line: str, server: ChatServer, forge: Forge, tmp_path: Path) -> None:
    server.script = [answer("wrong")]
    result = forge(f"{line} --family arithmetic --strategy steps")
    assert result.code == 0 and result.err.startswith("at most: 3 requests, ")
    assert "the cap of $0.0000" in result.err.splitlines()[0]
    shown = [row.split() for row in result.out.splitlines()]
    assert shown[1:] == [
        ["accepted", "2"],
        ["spent", "$0.000000"],
        ["rejected:", "the", "answer", "is", "wrong", "1"],
    ]
    assert [r["question"] for r in rows(tmp_path / "t.jsonl")] == [
        f"arithmetic-steps-7-{n}" for n in (1, 2)
    ]
    again = forge(f"{line} --family arithmetic --strategy steps --json").document
    assert (again["accepted"], again["rejected"]) == (2, {"the answer is wrong": 1})
    assert len(server.asked) == 3 and KEY not in result.out + result.err


def test_a_dry_run_asks_for_the_models_alone(
    line: str, server: ChatServer, forge: Forge, tmp_path: Path
) -> None:
    paid = line.replace("lab/free", "lab/paid")
    slow = "--set requests_per_minute=30 --cost-cap 2 --dry-run"
    found = forge(f"{paid} {slow} --json").document
    estimate = found["estimate"]
    assert (estimate["requests"], estimate["completion_tokens"]) == (3, 3 * 1024)
    assert estimate["usd"] == pytest.approx(3 * 1024 * 2e-6 + estimate["prompt_tokens"] * 1e-6)
    assert estimate["minutes"] == 0.1 and estimate["cost_cap_usd"] == 2
    assert found["settings"]["key_variable"] == "FORGE_ENDPOINT_KEY" and KEY not in str(found)
    table = forge(f"{paid} {slow}").out
    assert "usd" in table and "minutes            0.1000" in table
    assert (server.asked, server.lists) == ([], 2) and list(tmp_path.iterdir()) == []
    forge(f"{paid} --cost-cap 2 --count 2")
    found = forge(f"{paid} --cost-cap 2 --dry-run --json").document
    assert found["estimate"]["requests"] == 1
    assert found["estimate"]["spent_usd"] == pytest.approx(40e-6)


def test_local_traces(forge: Forge, tmp_path: Path) -> None:
    assert forge("data traces --out t.jsonl --count 2 --dry-run --json").document["planned"] == 2
    assert list(tmp_path.iterdir()) == []
    assert forge("data traces --out t.jsonl --count 2 --json").document["written"] == 2
    assert rows(tmp_path / "t.jsonl") == [{"question": "0-0"}, {"question": "0-1"}]
    again = forge("data traces --out t.jsonl --count 5")
    assert again.code == 2 and "t.jsonl exists" in again.err
    assert forge("data traces --out t.jsonl --dry-run").code == 2
    assert len(rows(tmp_path / "t.jsonl")) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--out t.jsonl --model m", "are for --generate"),
        ("--out t.jsonl --cost-cap 0", "are for --generate"),
        ("--out t.jsonl --generate --model m", "needs an endpoint and a model"),
        ("--out t.jsonl --generate --endpoint https://host", "needs an endpoint and a model"),
        ("--out t.jsonl --generate --endpoint host --model m", "begins with https://"),
        ("--out t.jsonl --generate --endpoint http://10.0.0.1 --model m", "plain http"),
        (
            "--out t.jsonl --generate --endpoint https://host --model m --set max_token=5",
            "did you mean 'max_tokens'",
        ),
        ("--generate", "--out"),
    ],
)
def test_what_cannot_be_asked(options: str, told: str, forge: Forge, tmp_path: Path) -> None:
    result = forge(f"data traces {options}")
    assert (result.code, result.out) == (2, "") and told in result.err
    assert KEY not in result.err and list(tmp_path.iterdir()) == []


def test_the_cap_and_a_failing_endpoint_end_with_5(
    line: str, server: ChatServer, forge: Forge, tmp_path: Path
) -> None:
    paid = line.replace("lab/free", "lab/paid")
    result = forge(paid)
    assert result.code == 2 and "--cost-cap USD" in result.err
    result = forge(f"{paid} --cost-cap 0.00235")  # one at its worst, and what it really cost
    assert result.code == 5 and "a higher --cost-cap goes on" in result.err
    kept = len(rows(tmp_path / "t.jsonl"))
    assert kept > 0
    server.script = [status(400, "no")]
    assert forge(f"{paid} --cost-cap 1").code == 5
    assert forge(f"{paid} --cost-cap 1 --json").document["accepted"] == 3


# -- stopped ---------------------------------------------------------------------------------------

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM"])
def test_a_signal_finishes_the_request_and_says_how_to_go_on(
    kind: str, line: str, server: ChatServer, forge: Forge, tmp_path: Path
) -> None:
    def late(handler: Any) -> None:
        until(lambda: sent)
        answer()(handler)

    sent: list[str] = []
    server.script = [answer(), late]
    process = start(tmp_path, shlex.split(line))
    until(lambda: len(server.asked) == 2)
    process.send(kind)
    sent.append(kind)
    ended = process.ended()
    assert ended.code == 130 and "paused: 2 of 3 requests are done" in ended.err
    assert ended.err.endswith(f"next: forge {line}\n") and KEY not in ended.err
    assert len(rows(tmp_path / "t.jsonl")) == 2
    assert forge(line).code == 0
    assert len(rows(tmp_path / "t.jsonl")) == 3 == len(server.asked)


def test_a_second_signal_leaves_at_once(
    line: str, server: ChatServer, forge: Forge, tmp_path: Path
) -> None:
    server.script = [answer(), hang]
    process = start(tmp_path, shlex.split(line.replace("timeout_s=5", "timeout_s=60")))
    until(lambda: len(server.asked) == 2)
    process.send("SIGINT")
    process.send("SIGTERM")
    ended = process.ended()
    assert ended.code == 130 and "paused: 1 of 3 requests are done" in ended.err
    assert forge(line).code == 0 and len(rows(tmp_path / "t.jsonl")) == 3
    assert sorted(server.questions.values()) == [1, 1, 2]
