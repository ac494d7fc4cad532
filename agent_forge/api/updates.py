"""/ws: what a run measures, one message a line of its metrics, numbered; and how it stands.

`?session=S&from=N` goes on behind message N of an earlier connection. A run that is resumed writes
some lines again: then a message with `restart` says so, and all follow from the first. The upper
digits of a number tell one version of the file from another, the lower ones count its lines.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, WebSocket
from fastapi.concurrency import run_in_threadpool
from starlette.websockets import WebSocketDisconnect

from agent_forge.api.runs import newest_run, progress
from agent_forge.errors import ForgeError
from agent_forge.pipeline.run_view import BEGINS
from agent_forge.store.sessions import SessionStore, read_session
from agent_forge.track.journal import read_lines
from agent_forge.track.tracker import EVENTS_FILE, METRICS_FILE

LINES = 10**9  # more than a run has
VERSIONS = 9_000_000  # of a file that are told apart; JavaScript has integers up to 9e15
LOOK_EVERY_S = 0.3
MOST_LINES = 500  # that are read at once
MOST_FOLLOWERS = 64
TRY_LATER = 1013
Message = dict[str, Any]


class Follower:
    """Reads what a run measures from a number on."""

    def __init__(self, store: SessionStore, session: str, start: int) -> None:
        self.store, self.session, self.number = store, session, start
        self.folder = store.find(session)
        self.config = read_session(self.folder)["config"]
        self._file = self.folder / METRICS_FILE
        self._offset, self._line = 0, 0  # how far it was read
        self._begun: dict[str, int] = {}  # how often each phase began
        self._events_read = 0
        self._told: Message = {}

    def read(self) -> tuple[list[Message], bool]:
        """What is new, at most some hundred messages, and whether that was all for ever."""
        standing = self._standing()
        version = self._version()
        messages = self._lines(version) if version is not None else []
        ended = standing["status"] != "running" and not messages
        if standing != self._told and len(messages) < MOST_LINES:
            messages.append({**standing, "event": self.number})
            self._told = standing
        return messages, ended

    def _standing(self) -> Message:
        """How the run stands now."""
        status = read_session(self.folder)["status"]
        row: Any = {"session_id": self.session, "status": status}
        with contextlib.suppress(ForgeError):  # without it, its directory tells enough
            row = {**self.store.registry.get_session_status(self.session), "status": status}
        share, phase = row.get("progress_percent"), row.get("current_phase")
        told = {"session": self.session, "status": self.store.status(row), "phase": phase}
        return {**told, "progress": None if share is None else share / 100}

    def _version(self) -> int | None:
        """Which file of metrics it is: a phase that begins again may have it written anew."""
        for offset, record in read_lines(self.folder / EVENTS_FILE, self._events_read):
            self._events_read = offset
            if record.get("event") in BEGINS:
                phase = str(record.get("phase"))
                self._begun[phase] = self._begun.get(phase, 0) + 1
        again = sum(self._begun.values()) - len(self._begun)
        try:
            return (self._file.stat().st_ino * 31 + again) % VERSIONS
        except FileNotFoundError:
            return None

    def _lines(self, version: int) -> list[Message]:
        offset, line, number, messages = self._offset, self._line, self.number, list[Message]()
        if number // LINES != version:
            if number:
                messages.append({"session": self.session, "restart": True})
            offset, line, number = 0, 0, version * LINES
        for offset_behind, record in read_lines(self._file, offset):
            offset, line = offset_behind, line + 1
            if version * LINES + line > number:
                number = version * LINES + line
                messages.append({**self._message(record), "event": number})
            if len(messages) >= MOST_LINES:
                break
        if self._version() != version:  # it was written anew meanwhile: read that instead
            return []
        for message in messages[:1]:
            message.setdefault("event", version * LINES)
        self._offset, self._line, self.number = offset, line, number
        return messages

    def _message(self, record: Message) -> Message:
        phase, step = record.get("phase"), record.get("step")
        values = record.get("metrics")
        values = values if isinstance(values, dict) else {}
        told = {"session": self.session, "phase": phase, "step": step, "time": record.get("time")}
        told |= progress(self.config, str(phase), step, values)
        return {**told, "metrics": values}


def routes(store: SessionStore) -> APIRouter:
    """The WebSocket."""
    router, followers = APIRouter(), set[WebSocket]()

    @router.websocket("/ws")
    async def updates(
        socket: WebSocket,
        session: Annotated[str | None, Query(max_length=64)] = None,
        start: Annotated[int, Query(alias="from", ge=0, lt=2**63)] = 0,
    ) -> None:
        await socket.accept()
        if len(followers) >= MOST_FOLLOWERS:
            return await socket.close(TRY_LATER, "too many follow already")
        followers.add(socket)
        try:
            name = session if session else await run_in_threadpool(newest_run, store)
            follower = await run_in_threadpool(Follower, store, name, start)
            await _follow(socket, follower)
        except ForgeError as error:
            await socket.send_json({"error": str(error), "hint": error.hint})
            await socket.close(1008, "see the error")
        except (WebSocketDisconnect, RuntimeError):
            pass  # whoever followed has gone
        finally:
            followers.discard(socket)

    return router


async def _follow(socket: WebSocket, follower: Follower) -> None:
    """Send what is new until the run has ended or nobody listens."""
    listening = asyncio.create_task(_until_gone(socket))
    try:
        while not listening.done():
            messages, ended = await run_in_threadpool(follower.read)
            for message in messages:
                await socket.send_json(message)
            if ended:
                return await socket.close()
            if len(messages) < MOST_LINES:
                await asyncio.wait([listening], timeout=LOOK_EVERY_S)
    finally:
        listening.cancel()


async def _until_gone(socket: WebSocket) -> None:
    """Read and forget what a follower sends: it has nothing to say."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await socket.receive_text()
