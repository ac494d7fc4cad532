"""Tasks for workers: in this process, in processes of this machine, on a Ray cluster. No torch.

Which of them it is, how many and who is done first changes nothing: each task runs alone in its
worker with a fixed number of threads, and the results come in the order of submission.

pools      what every executor promises; the ones in this process and in processes of this machine
ray_pool   workers on a Ray cluster
worker     the worker's side, the same for all three
"""

import importlib.util
import json
from typing import Any

from agent_forge.errors import ConfigError
from agent_forge.workers.pools import InlinePool, ProcessPool, WorkerFailure, WorkerPool
from agent_forge.workers.ray_pool import RayPool

__all__ = ["EXECUTORS", "WorkerFailure", "WorkerPool", "open_pool", "require_ray"]

EXECUTORS: dict[str, type[WorkerPool]]
EXECUTORS = {"inline": InlinePool, "processes": ProcessPool, "ray": RayPool}


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        hint = "pip install -c constraints.txt -e '.[cluster]'"
        raise ConfigError("Ray is not installed", hint=hint)


def open_pool(
    kind: str,
    count: int,
    make: str,
    arguments: dict[str, Any] | None = None,
    *,
    threads: int = 1,
    seconds: float | None = None,
    devices: int = 0,
    address: str | None = None,
) -> WorkerPool:
    """Workers that each call `make` ("module:function") once, for the function that does a task.

    `threads` is what torch and the like may use for one task, `seconds` how long a task may take.
    With `devices` GPUs each worker has one for itself. `address` is that of a Ray cluster where
    agent_forge is installed; without it Ray is started here. Inline takes one task at a time.
    """
    if devices and count > devices and kind == "processes":
        raise ConfigError(f"{count} workers want a GPU each and there are {devices}")
    if kind == "ray":
        require_ray()
    settings = {"count": count, "make": make, "arguments": json.loads(json.dumps(arguments or {}))}
    settings |= {"threads": threads, "seconds": seconds, "devices": devices, "address": address}
    return EXECUTORS[kind](settings)
