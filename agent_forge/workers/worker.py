"""The worker's side: build the work function once, then run one task after the other.

Run as a program this is a worker process; the other executors call `build` and `run_task` as they
are, so a task is treated the same wherever it runs. Only the standard library is imported here:
everything heavy comes after the environment and the import path are those that the caller gave.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

Work = Callable[[Any], Any]
Messages = queue.SimpleQueue[Any]


def build(settings: dict[str, Any]) -> tuple[Work | None, str]:
    """The work function that the function `make` returns, or None and what went wrong."""
    return _attempt(lambda: find(settings["make"])(**settings["arguments"]), settings["threads"])


def run_task(work: Work, task: str, threads: int) -> tuple[str | None, str]:
    """The result of one task, both as JSON; or None and what went wrong, which may be the JSON."""
    return _attempt(lambda: json.dumps(work(json.loads(task))), threads)


def find(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _attempt(call: Callable[[], Any], threads: int) -> tuple[Any, str]:
    """What the call returns, or what it raised; torch has exactly `threads` threads meanwhile."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    try:
        if torch:
            torch.set_num_threads(threads)
        return call(), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it belongs to the task
        return None, f"{type(error).__name__}: {error}"
    finally:
        if torch:
            torch.set_num_threads(before)


def send(outward: IO[bytes], *message: Any) -> None:
    outward.write(json.dumps(message).encode() + b"\n")
    outward.flush()


def serve(settings: dict[str, Any], inbox: Messages, outward: IO[bytes]) -> None:
    """Run tasks until the caller ends this process."""
    work, problem = build(settings)
    send(outward, "ready", problem)
    while work:
        send(outward, "done", *run_task(work, inbox.get(), settings["threads"]))


def _receive(inward: IO[bytes], inbox: Messages) -> None:
    """Queue what the caller sends; when it ends, so does this process with all it has started."""
    for line in inward:
        inbox.put(json.loads(line))
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def ignore_stop_signals() -> None:
    """Leave it to the caller when to stop: a shutdown signals every process of a run at once."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def main() -> None:
    """Take the pipes for the caller alone: what the work prints goes to stderr."""
    ignore_stop_signals()
    inward, outward = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    inbox: Messages = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inward, inbox), daemon=True).start()
    settings = inbox.get()
    sys.path[:] = settings["path"]
    (find(settings["driver"]) if settings["driver"] else serve)(settings, inbox, outward)


if __name__ == "__main__":
    main()
