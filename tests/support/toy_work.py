"""Work functions for the tests of the workers: what `make` names, and what a worker can suffer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_forge.errors import NotEnough
from tests.support.polling import until


def make(base: int = 0) -> Callable[[dict[str, Any]], Any]:
    """A task names what to do, and with which value."""

    def work(task: dict[str, Any]) -> Any:
        (name, value), *rest = task.items()
        assert not rest
        return DEEDS[name](base, value)

    return work


def _slow(base: int, seconds: float) -> list[float]:
    time.sleep(seconds)
    return [base, seconds]


def _fail(_: int, text: str) -> None:
    raise ValueError(text)


def _announce(_: int, path: str) -> None:
    """Write this process's id, then never end."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(1000)


def _wait(_: int, path: str) -> str:
    """Return when a file is there, or fail if it is not after a minute."""
    return str(until(lambda: Path(path).exists() and "there"))


def _print(_: int, text: str) -> list[str]:
    sys.stdout.write(text)
    sys.stdout.flush()
    os.write(1, text.encode())
    return [text, sys.stdin.read()]


def _leave_a_fork(_: int, path: str) -> None:
    """Die while a forked child still has the pipe open."""
    if os.fork() == 0:
        os.setsid()  # out of reach of what kills the group
        Path(path).write_text(str(os.getpid()))
        time.sleep(30)
        os._exit(0)
    os._exit(5)


def _stop_in_the_middle(_: int, __: None) -> None:
    """Die with half an answer said."""
    for fd in range(3, 30):
        with contextlib.suppress(OSError):
            os.write(fd, b'["done", "1')
    os._exit(4)


def _threads(_: int, __: None) -> int:
    import torch

    return torch.get_num_threads()


def _sum(base: int, size: int) -> str:
    """A float that depends on how the work is split among threads."""
    import torch

    generator = torch.Generator().manual_seed(base + size)
    values = torch.rand(size, 300, generator=generator)
    return float((values.T @ values).sum()).hex()


def _environment(_: int, name: str) -> str | None:
    time.sleep(0.3)  # so that no worker does it all
    return os.environ.get(name)


def _spoil(_: int, task: list[int]) -> list[int]:
    task.append(0)
    return task


DEEDS: dict[str, Callable[[int, Any], Any]] = {
    "slow": _slow,
    "fail": _fail,
    "exit": lambda _, code: os._exit(code),
    "leave": lambda _, code: sys.exit(code),
    "signal": lambda _, number: os.kill(os.getpid(), number),
    "segfault": lambda *_: ctypes.string_at(0),
    "pid": lambda *_: os.getpid(),
    "echo": lambda _, value: value,
    "odd": lambda *_: {1, 2},
    "environment": _environment,
    "announce": _announce,
    "wait": _wait,
    "touch": lambda _, path: Path(path).touch(),
    "print": _print,
    "fork": _leave_a_fork,
    "half": _stop_in_the_middle,
    "threads": _threads,
    "sum": _sum,
    "spoil": _spoil,
}


def make_with_torch() -> Callable[[dict[str, Any]], Any]:
    import torch  # noqa: F401 - so that its threads can be set

    return make()


def make_heavy() -> Callable[[dict[str, Any]], Any]:
    import torch  # noqa: F401
    import transformers

    assert transformers.AutoModelForCausalLM
    return make()


def make_fails() -> None:
    raise NotEnough("no room for the parents")


def make_dies() -> None:
    os._exit(9)
