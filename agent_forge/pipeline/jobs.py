"""Runs as processes of their own: started, resumed and stopped for a dashboard or an API.

Whoever starts one may end: the run goes on, and everything it tells is in its run directory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from agent_forge import platform
from agent_forge.errors import AlreadyInUse, ForgeError, NotFound
from agent_forge.pipeline.environment import request_stop
from agent_forge.store import lock
from agent_forge.store.sessions import SESSION_FILE, SessionStore, read_session

FORGE = (sys.executable, "-P", "-m", "agent_forge")  # with no module of the folder it begins in
PATIENCE_S = 180.0  # until a run has its lock; torch takes seconds to load
ENDING_S = 20.0  # that a run which has stopped may take to write its report
MOST_TEXT = 4000  # characters of what a process said that ended at once
_starting = threading.Lock()  # a process that starts takes seconds of a core


class StartRefused(ForgeError, exit_code=2):
    """A run that ended before it had begun, with what it said."""


def start_run(
    store: SessionStore,
    *,
    preset: str | None = None,
    config: Path | None = None,
    sets: Sequence[str] = (),
    only: str | None = None,
    models: Sequence[str] = (),
    session: str | None = None,
) -> str:
    """Start `forge run` and return its session, once that exists and is at work."""
    name = store.new_path(session).name
    store.check_new(name)
    given = {"preset": preset, "config": config, "only": only, "models": ",".join(models)}
    command = [f"--{key}={value}" for key, value in given.items() if value]
    command += [f"--set={item}" for item in sets]
    return _spawn(store, name, ["run", f"--session={name}", *command])


def resume_run(store: SessionStore, session: str) -> str:
    """Go on with a session that is not at work; one that has stopped may end what it is at."""
    folder, began = store.find(session), time.monotonic()
    while _is_ending(folder) and time.monotonic() - began < ENDING_S:
        time.sleep(0.05)
    if lock.is_busy(folder):
        raise lock.busy(folder)
    return _spawn(store, session, ["resume", session])


def stop_run(store: SessionStore, session: str) -> None:
    """Ask a run to stop after its present step and save everything."""
    folder = store.find(session)
    if not lock.is_busy(folder):
        raise NotFound(f"{session} is not running", hint="nothing needs to be stopped")
    request_stop(folder)


def _spawn(store: SessionStore, session: str, command: Sequence[str]) -> str:
    """Start a command that works on a session, and wait until it does; one at a time."""
    if not _starting.acquire(blocking=False):
        raise AlreadyInUse("another run is being started", hint="try again in some seconds")
    try:
        return _begin(store, session, command)
    finally:
        _starting.release()


def _begin(store: SessionStore, session: str, command: Sequence[str]) -> str:
    said = tempfile.TemporaryFile()  # noqa: SIM115 - the process has it as long as it lives
    process = subprocess.Popen(
        [
            *(*FORGE, *command),
            *("--storage", str(store.root.resolve()), "--progress", "none"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        **platform.new_group(),
    )
    threading.Thread(target=process.wait, daemon=True).start()  # whoever ends is taken note of
    record = store.path(session) / SESSION_FILE
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        if record.is_file() and _works_on(process, record.parent):
            return session
        if process.poll() is not None:
            if process.returncode == 0:  # it was done before anybody looked
                return session
            said.seek(0)
            text = said.read(MOST_TEXT).decode(errors="replace").strip()
            raise StartRefused(text.removeprefix("error: ") or f"ended with {process.returncode}")
        time.sleep(0.05)
    raise AlreadyInUse(f"{session} did not begin within {PATIENCE_S:g} s", hint="forge status")


def _is_ending(folder: Path) -> bool:
    """True if a run has stopped, and its process has not ended yet."""
    return lock.is_busy(folder) and read_session(folder)["status"] != "running"


def _works_on(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """True if a run has begun and this process, or one that it started to be what it is, has it."""
    holder = lock.announced(folder).get("pid") if lock.is_busy(folder) else None
    with contextlib.suppress(psutil.Error):
        own = (process.pid, *(child.pid for child in psutil.Process(process.pid).children()))
        return holder in own and read_session(folder)["status"] == "running"
    return False
