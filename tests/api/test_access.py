"""Who may come in: tokens, hosts, other sites, sizes; and what the command says of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import websockets

from agent_forge.api import app
from agent_forge.api.app import MOST_BYTES
from agent_forge.cli import serve
from tests.support.command_line import Forge
from tests.support.polling import until
from tests.support.serving import MODEL, Server, serving, small_model

TOKEN = "sesame-open-1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("access") / "storage"
    small_model(place)
    return place


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(root) as found:
        yield found


async def follow(server: Server, **headers: str) -> int:
    """The number of messages of a run that never measured anything."""
    url = f"ws://{server.address}/ws?session=s1"
    async with websockets.connect(url, additional_headers=headers) as socket:
        return len([message async for message in socket])


def test_a_token_is_needed_for_everything(root: Path) -> None:
    with serving(root, token=TOKEN) as server:
        for place in ("/openapi.json", "/v1/models", "/runs", "/nothing", "/phases/toy/status"):
            refused = httpx2.get(server.url + place)
            assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
            for wrong in ("", "Bearer", f"Bearer {TOKEN}x", "Bearer \u00e9", f"Basic {TOKEN[:-1]}"):
                headers = {b"Authorization": wrong.encode()}
                assert httpx2.get(server.url + place, headers=headers).status_code == 401
        assert server.client(api_key=TOKEN).models.list().data[0].id == MODEL
        for wrong in ({}, {"Authorization": "Bearer no"}):
            with pytest.raises(websockets.InvalidStatus):
                asyncio.run(follow(server, **wrong))
        assert asyncio.run(follow(server, Authorization=f"Bearer {TOKEN}")) > 0


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[::1", "", "0"])
def test_a_rebound_name_is_refused(server: Server, host: str) -> None:
    assert httpx2.get(f"{server.url}/v1/models", headers={"Host": host}).status_code in (400, 403)
    if host:
        with pytest.raises(websockets.InvalidStatus):
            asyncio.run(follow(server, Host=host))


def test_other_sites_cannot_ask_and_get_no_cors(server: Server) -> None:
    for origin in ("http://evil.example", "null", f"https://evil.example/{server.address}"):
        found = httpx2.post(f"{server.url}/runs/s1/stop", headers={"Origin": origin})
        assert found.status_code == 403
        assert not any(name.startswith("access-control") for name in found.headers)
        with pytest.raises(websockets.InvalidStatus):
            asyncio.run(follow(server, Origin=origin))
    assert httpx2.get(f"{server.url}/runs", headers={"Origin": server.url}).status_code == 200
    plain = {"Content-Type": "text/plain"}  # what a page may send without asking first
    assert httpx2.post(f"{server.url}/runs", content="{}", headers=plain).status_code == 400


def test_small_answers_are_sent_at_once() -> None:
    """asyncio turns Nagle's delay off, 40 ms an answer, where it knows the protocol."""
    with serve.listening("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_who_comes_before_the_server_is_ready_waits() -> None:
    with serve.listening("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname(), timeout=5).close()


def test_bodies_are_limited(server: Server) -> None:
    url, large = f"{server.url}/v1/completions", b"x" * (MOST_BYTES + 1)
    assert httpx2.post(url, content=large).status_code == 413
    chunks = (large[i : i + 65536] for i in range(0, len(large), 65536))  # without a length
    assert httpx2.post(url, content=chunks).status_code == 413
    nested = b'{"model": ' + b"[" * 100_000
    found = httpx2.post(url, content=nested, headers={"Content-Type": "application/json"})
    assert found.status_code == 400 and found.json()["error"]["message"]


def test_a_body_has_to_come(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.1)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: 9\r\n\r\n"
        )
        slow.sendall(head.encode())
        assert slow.recv(99).startswith(b"HTTP/1.1 408")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_how_much_is_served(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[app.Serving] = []
    made = app.create_app
    monkeypatch.setattr(app, "create_app", lambda one: told.append(one) or made(one))
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    assert forge("serve --port 0 --queue 3 --memory 0.5 --tools").code == 0
    (serving,) = told
    assert (serving.places, serving.most_bytes, serving.run_tools) == (3, 500_000_000, True)


def test_the_command_says_what_is_missing(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_TOKEN", raising=False)
    found = forge("serve --host 0.0.0.0")
    assert found.code == 2 and "token" in found.err and "FORGE_TOKEN" in found.err
    assert forge("serve --token short").code == 2
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        found = forge(f"serve --port {busy.getsockname()[1]}")
        assert found.code == 6 and "in use" in found.err and "--port" in found.err
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    for line, extra in (("serve", "api"), ("serve --mcp", "mcp")):
        found = forge(line)
        assert found.code == 2 and f"agent-forge[{extra}]" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_while_it_answers(root: Path, tmp_path: Path, kind: signal.Signals) -> None:
    said = (tmp_path / "said").open("w+")
    command = [*(sys.executable, "-m", "agent_forge", "serve"), "--port", "0"]
    environment = {**os.environ, "FORGE_TOKEN": TOKEN}
    process = subprocess.Popen(
        [*command, "--storage", str(root)], stderr=said, cwd=tmp_path, env=environment
    )
    try:
        text = until(lambda: "(" in (text := (tmp_path / "said").read_text()) and text)
        url = next(word for word in text.split() if word.startswith("http"))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        until(lambda: _status(f"{url}/runs", headers) == 200)
        body: Any = {"model": MODEL, "prompt": "copy", "max_tokens": 16_000, "stream": True}
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            process.send_signal(kind)
            assert process.wait(30) in (0, 1)
    finally:
        process.kill()
    text = (tmp_path / "said").read_text()
    assert "Traceback" not in text and "defect" not in text, text


def _status(url: str, headers: dict[str, str]) -> int:
    try:
        return httpx2.get(url, headers=headers).status_code
    except httpx2.TransportError:
        return 0
