"""The application: who may come in, how errors look, and what is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import agent_forge
from agent_forge.api import openai, runs, updates
from agent_forge.errors import AlreadyExists, AlreadyInUse, ForgeError, NotFound
from agent_forge.infer.open_models import OpenModels
from agent_forge.infer.scheduler import QueueFull, Scheduler
from agent_forge.model.catalog import Catalog
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore

MOST_BYTES = 1 << 20  # of a body
BODY_S = 30.0  # in which it comes
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STATUS: dict[type[ForgeError], int] = {NotFound: 404, AlreadyExists: 409, AlreadyInUse: 409}
BY_EXIT_CODE = {4: 422, 5: 503}
RETRY_AFTER_S = 1


class Problem(BaseModel):
    """What is wrong, and what can be done; under /v1 `error` is an object as OpenAI has it."""

    error: str | dict[str, str | int | None]
    hint: str = ""


class Json(JSONResponse):
    """JSON in ASCII: texts from outside may have characters that UTF-8 does not."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        except ValueError:
            return json.dumps(files.finite(content), separators=(",", ":")).encode()


@dataclass(frozen=True)
class Serving:
    """What `forge serve` is told."""

    store: SessionStore
    given: Sequence[str] = ()
    token: str = ""
    places: int = 64
    most_bytes: int = 2 << 30
    run_tools: bool = False


class Server(uvicorn.Server):
    """A server whose replies end when it is told to stop, so that it need not wait for them."""

    def __init__(self, settings: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(settings)
        self._scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._scheduler.close).start()
        super().handle_exit(sig, frame)


def create_app(serving: Serving) -> FastAPI:
    """The application of one storage root."""
    catalog = Catalog(serving.store, serving.given)
    scheduler = Scheduler(serving.places)
    models = openai.Models(catalog, OpenModels(serving.most_bytes), scheduler, serving.run_tools)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = FastAPI(
        title="Agent Forge",
        version=agent_forge.__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        default_response_class=Json,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}},
    )
    app.include_router(openai.routes(models))
    app.include_router(runs.routes(serving.store, catalog))
    app.include_router(updates.routes(serving.store))
    app.add_middleware(Guard, token=serving.token)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.state.models = models
    return app


# -- errors ----------------------------------------------------------------------------------------


def problem(path: str, status: int, message: str, hint: str = "", kind: str = "") -> Json:
    """An error in the form of the place where it happened."""
    headers = {}
    if status == 429:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body: dict[str, Any] = {"error": message, "hint": hint}
    if path.startswith("/v1/"):
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        text = f"{message}; {hint}" if hint else message
        body = {"error": {"message": text, "type": kind, "param": None, "code": None}}
    return Json(body, status, headers)


async def _forge_error(request: Request, error: Exception) -> Json:
    assert isinstance(error, ForgeError)
    if isinstance(error, QueueFull):
        return problem(request.url.path, 429, str(error), error.hint, "rate_limit_error")
    by_kind = (status for kind, status in STATUS.items() if isinstance(error, kind))
    status = next(by_kind, BY_EXIT_CODE.get(error.exit_code, 400))
    return problem(request.url.path, status, str(error), error.hint)


async def _invalid(request: Request, error: Exception) -> Json:
    assert isinstance(error, RequestValidationError)
    told = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()]
    return problem(request.url.path, 400, "; ".join(told[:5])[:2000])


async def _http_error(request: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    return problem(request.url.path, error.status_code, str(error.detail))


async def _no_resources(request: Request, error: Exception) -> Json:
    return problem(request.url.path, 503, f"{type(error).__name__}: {error}"[:500])


async def _defect(request: Request, error: Exception) -> Json:
    text = f"unexpected {type(error).__name__}: {error}"[:500]
    return problem(request.url.path, 500, text, "this is a defect; the server's log says where")


HANDLERS: dict[type[Exception], Callable[[Request, Exception], Any]] = {
    ForgeError: _forge_error,
    RequestValidationError: _invalid,
    HTTPException: _http_error,
    OSError: _no_resources,
    MemoryError: _no_resources,
    Exception: _defect,
}


# -- who may come in -------------------------------------------------------------------------------


class Guard:
    """Refuses other hosts' names, pages of other sites, missing tokens and large bodies."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refused := self._refused(headers):
            return await _refuse(scope, receive, send, *refused)
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            try:
                async with asyncio.timeout(BODY_S):
                    body = await _body(headers, receive)
            except TimeoutError:
                return await _refuse(scope, receive, send, 408, "the body did not come in time")
            if body is None:
                return await _refuse(scope, receive, send, 413, "a body has at most 1 MB")
            receive = _again(body, receive)
        await self.app(scope, receive, send)

    def _refused(self, headers: dict[bytes, str]) -> tuple[int, str] | None:
        """The status and the reason; None if a request may come in."""
        host = headers.get(b"host", "")
        if not self.token and _hostname(host) not in LOOPBACK:  # a page that had its name rebound
            return 403, "this server answers to localhost and 127.0.0.1 alone"
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("//")[2] != host:
            return 403, "pages of other sites may not ask"
        given = headers.get(b"authorization", "").partition(" ")[2].strip()
        if self.token and not secrets.compare_digest(given.encode(), self.token.encode()):
            return 401, "a token is needed: Authorization: Bearer TOKEN"
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
    else:
        await problem(scope["path"], status, reason)(scope, receive, send)


async def _body(headers: dict[bytes, str], receive: Receive) -> bytes | None:
    """The whole body; None if it is too large."""
    length, body = headers.get(b"content-length", ""), bytearray()
    more = not (length.isdecimal() and int(length[:20]) > MOST_BYTES)
    if not more:
        return None
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read; then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
