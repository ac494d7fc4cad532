"""The worker's side: build the work function once, then answer one task after the other.

Run as a program this is a worker process; the other executors call `build` and `answer` as they
are, so a task is treated the same wherever it runs. Only the standard library is imported here:
everything heavy comes after the environment and the import path are those that the caller gave.
"""

from __future__ import annotations

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
Lines = queue.SimpleQueue[Any]


def build(make: str, arguments: dict[str, Any], threads: int) -> tuple[Work | None, str]:
    """Call `module:function`: it returns the work function. Or what went wrong."""
    return _attempt(lambda: find(make)(**arguments), threads)


def answer(work: Work, task: str, threads: int) -> tuple[str | None, str]:
    """The result of one task, both as JSON; or what went wrong, which may be the JSON."""
    return _attempt(lambda: json.dumps(work(json.loads(task))), threads)


def find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _attempt(call: Callable[[], Any], threads: int) -> tuple[Any, str]:
    """What the call gives, or what it raised; torch has exactly `threads` threads meanwhile."""
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


def say(outward: IO[bytes], *words: Any) -> None:
    outward.write(json.dumps(words).encode() + b"\n")
    outward.flush()


def serve(plan: dict[str, Any], lines: Lines, outward: IO[bytes]) -> None:
    """Answer tasks until the caller ends this process."""
    work, problem = build(plan["make"], plan["arguments"], plan["threads"])
    say(outward, "ready", problem)
    while work:
        say(outward, "done", *answer(work, lines.get(), plan["threads"]))


def _read(inward: IO[bytes], lines: Lines) -> None:
    """Pass on what the caller says; when it ends, so does this process with all it has started."""
    for line in inward:
        lines.put(json.loads(line))
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
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inward, lines), daemon=True).start()
    plan = lines.get()
    sys.path[:] = plan["path"]
    (find(plan["driver"]) if plan["driver"] else serve)(plan, lines, outward)


if __name__ == "__main__":
    main()
