"""Workers on a Ray cluster: one that exists, or one of this machine while the pool is open.

Ray lives in a process of its own, the driver, and this one never imports it: when a cluster goes
away, Ray waits for a minute or ends its process, as it likes, and here it is an error either way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from agent_forge.errors import WorkersLost
from agent_forge.workers import worker
from agent_forge.workers.pool import Pool, refused
from agent_forge.workers.processes import Link, thread_variables

ALIVE_EVERY_S = 1.0
SILENCE_S = 60.0  # of a driver that should say every second that the cluster answers
PROBE_S = 20.0
CLOSE_S = 10.0
OBJECT_BYTES = 1 << 27  # what passes through Ray are short texts


class Cluster(Pool):
    """`count` actors, asked through the driver."""

    _gone = False

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._link = Link(plan, self._inbox, driver=f"{__name__}:drive")

    def close(self) -> None:
        if not self._gone:
            self._link.say(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._link.process.wait(CLOSE_S)
        self._link.end()

    def _give(self) -> None:
        while self._waiting:
            self._link.say(self._waiting.popleft())

    def _step(self) -> None:
        try:
            _, words = self._inbox.get(timeout=SILENCE_S)
        except queue.Empty:
            words = ["gone", f"it has not answered for {SILENCE_S:g} s"]
        said, *rest = words or ["gone", "Ray ended its process"]
        if said == "done":
            self._done(*rest)
        elif said == "lost":
            self._lost(*rest)
        elif said == "refused":
            raise refused(*rest)
        elif said == "gone":
            self._gone = True
            raise WorkersLost(
                f"the Ray cluster is gone: {rest[0]}",
                hint="the run is paused: resume it when the cluster is back, or without Ray",
            )


def drive(plan: dict[str, Any], lines: worker.Lines, outward: IO[bytes]) -> None:
    """The driver: connect, keep the actors busy, say every second that the cluster answers."""
    guard = threading.Lock()

    def say(*words: Any) -> None:
        with guard:
            worker.say(outward, *words)

    with tempfile.TemporaryDirectory(prefix="forge-ray-", ignore_cleanup_errors=True) as folder:
        try:
            has = _connect(plan, folder)
        except (OSError, RuntimeError, ValueError) as error:
            return say("gone", f"{type(error).__name__}: {error}")
        for name, each in (("CPU", plan["threads"]), ("GPU", min(plan["devices"], 1))):
            if has.get(name, 0) < plan["count"] * each:
                return say("refused", f"of {plan['count'] * each} {name} it has {has.get(name, 0)}")
        tasks: worker.Lines = queue.SimpleQueue()
        for _ in range(plan["count"]):
            threading.Thread(target=_keep, args=(plan, tasks, say), daemon=True).start()
        _forward(lines, tasks, say)
    os._exit(0)  # the threads still wait for answers


def _connect(plan: dict[str, Any], folder: str) -> dict[str, float]:
    """Join the cluster, or start one here; tell what it has."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    own = {"num_cpus": plan["count"] * plan["threads"], "include_dashboard": False}
    own |= {"object_store_memory": OBJECT_BYTES, "_temp_dir": folder}
    ray.init(
        plan["address"] or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if plan["address"] else own),
    )
    worker.ignore_stop_signals()  # Ray has put a handler of its own in place
    has: dict[str, float] = ray.cluster_resources()
    return has


def _forward(lines: worker.Lines, tasks: worker.Lines, say: Callable[..., None]) -> None:
    """Pass tasks on until the caller says that it is over."""
    import ray

    while True:
        try:
            line = lines.get(timeout=ALIVE_EVERY_S)
        except queue.Empty:
            ray.cluster_resources()  # does not return while the cluster is gone
            say("alive")
            continue
        if line is None:
            ray.shutdown()
            return
        tasks.put(line)


class Actor:
    """A worker of the cluster; it is told what to build, so that a failure of that has a name."""

    def __init__(self) -> None:
        with contextlib.suppress(ValueError):  # Ray did not start it in a main thread
            worker.ignore_stop_signals()

    def prepare(self, make: str, arguments: dict[str, Any], threads: int) -> str:
        self.threads = threads
        self.work, problem = worker.build(make, arguments, threads)
        return problem

    def run(self, task: str) -> tuple[str | None, str]:
        assert self.work
        return worker.answer(self.work, task, self.threads)


def _keep(plan: dict[str, Any], tasks: worker.Lines, say: Callable[..., None]) -> None:
    """Keep one actor at work; when it is lost, with the task that it has, start another."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    threads, seconds = plan["threads"], plan["seconds"]
    new = ray.remote(Actor).options(
        num_cpus=threads,
        num_gpus=min(plan["devices"], 1),  # never run on a cluster with GPUs
        runtime_env={"env_vars": thread_variables(threads)},
    )
    while True:
        number, actor = None, new.remote()
        try:
            problem = ray.get(actor.prepare.remote(plan["make"], plan["arguments"], threads))
            while not problem:
                number, task = tasks.get()
                say("done", number, *ray.get(actor.run.remote(task), timeout=seconds))
                number = None
            return say("refused", problem)
        except RayTaskError as error:  # agent_forge itself is not there
            return say("refused", str(error))
        except GetTimeoutError:
            ray.kill(actor)
            say("lost", number, "timeout", f"more than {seconds:g} s")
        except RayError as error:
            how = " ".join(str(error).split())
            try:  # is it the actor, or everything?
                ray.get(ray.remote(lambda: 0).options(num_cpus=0).remote(), timeout=PROBE_S)
            except RayError:
                return say("gone", how)
            say("lost", number, "died", how)
