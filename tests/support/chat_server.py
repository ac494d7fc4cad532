"""A chat endpoint on this machine: it answers, or misbehaves as a test has scripted it.

Each completion takes the next behaviour of `script`, or answers when there is none left. What was
asked, with which key, and what a provider would bill for it is kept.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent_forge.data.endpoint import Clock

KEY = "sk-aKeyOfThisTest"
FREE = {"id": "lab/free", "pricing": {"prompt": "0", "completion": "0"}, "context_length": 8192}
PAID = {"id": "lab/paid", "pricing": {"prompt": "0.000001", "completion": "0.000002"}}
UNPRICED = {"id": "lab/unpriced", "object": "model"}
Behaviour = Callable[["_Handler"], None]


class FakeClock(Clock):
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.time, self.slept = 100.0, list[float]()

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds
        self.slept.append(seconds)


@dataclass(frozen=True)
class Question:
    """A request whose key is also what is asked."""

    key: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.key}]


class ChatServer(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.listed: Any = {"data": [FREE, PAID, UNPRICED]}
        self.script: list[Behaviour] = []
        self.listings: list[Behaviour] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lists = 0
        self.billed_usd = 0.0
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def questions(self) -> Counter[str]:
        """How often each question was asked."""
        return Counter(body["messages"][-1]["content"] for body in self.asked)

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        server = self.server
        server.lists += 1
        server.keys.append(self.headers.get("Authorization"))
        if server.listings:
            return server.listings.pop(0)(self)
        self.send({"data": []} if self.path != "/v1/models" else server.listed)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.keys.append(self.headers.get("Authorization"))
        server.asked.append({**body, "path": self.path})
        (server.script.pop(0) if server.script else answer())(self)

    def bill(self, prompt: Any, completion: Any) -> None:
        is_counted = isinstance(prompt, int) and isinstance(completion, int)
        if is_counted and self.server.asked[-1]["model"] == PAID["id"]:
            self.server.billed_usd += prompt * 1e-6 + completion * 2e-6

    def send(self, content: Any, status: int = 200, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def completion(text: Any = "four", finish: Any = "stop", **usage: Any) -> dict[str, Any]:
    """The body of a reply."""
    counted = {"prompt_tokens": 10, "completion_tokens": 5, **usage}
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": counted}


def answer(text: str = "", **usage: Any) -> Behaviour:
    """Answer with a text, or by repeating the question."""

    def behave(handler: _Handler) -> None:
        said = text or f"<{handler.server.asked[-1]['messages'][-1]['content']}>"
        body = completion(said, **usage)
        counted = body["usage"]
        handler.bill(counted["prompt_tokens"], counted["completion_tokens"])
        handler.send(body)

    return behave


def body(content: Any) -> Behaviour:
    """Status 200 with any content."""
    return lambda handler: handler.send(content)


def status(code: int, message: str = "", **headers: str) -> Behaviour:
    """An error as OpenAI words it."""
    return lambda handler: handler.send({"error": {"message": message}}, code, **headers)


def hang(handler: _Handler) -> None:
    """Never answer; the provider bills the longest answer all the same."""
    handler.bill(250, handler.server.asked[-1]["max_tokens"] if handler.server.asked else 0)
    handler.server.over.wait(30)


def reset(handler: _Handler) -> None:
    """Break the connection."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()
    handler.close_connection = True


def cut_short(handler: _Handler) -> None:
    """Promise more bytes than come."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(json.dumps(completion()).encode())
    handler.close_connection = True


def trickle(begins: bytes) -> Behaviour:
    """Send a byte now and then, for ten seconds: no single wait is long."""

    def behave(handler: _Handler) -> None:
        handler.wfile.write(begins)
        for _ in range(500):
            if handler.server.over.wait(0.02):
                return
            handler.wfile.write(b" ")

    return behave


def flood(handler: _Handler) -> None:
    """Send bytes without an end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not handler.server.over.is_set():
        handler.wfile.write(b"[" * 65536)


def repeat_key(code: int) -> Behaviour:
    """Repeat what was sent as the key, as some endpoints do in their errors."""

    def behave(handler: _Handler) -> None:
        said = f"Incorrect API key provided: {handler.headers['Authorization']}"
        handler.send(completion(said) if code == 200 else {"error": {"message": said}}, code)

    return behave


@contextlib.contextmanager
def chat_server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
