"""Workers on a Ray cluster: one that exists, or one of this machine for as long as the pool is open.

Ray lives in a process of its own, the driver, and this one never imports it: when a cluster goes
away, Ray waits for a minute or ends its process, as it likes, and here it is an error either way.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from agent_forge.errors import WorkersLost
from agent_forge.workers import worker
from agent_forge.workers.pool import Failure, Plan, Pool
from agent_forge.workers.processes import Link, thread_environment

ALIVE_EVERY_S = 1.0
SILENCE_S = 60.0  # of a driver that should say every second that the cluster answers
PROBE_S = 20.0
CLOSE_S = 10.0
OBJECT_BYTES = 1 << 27  # what passes through Ray are short texts


class Cluster(Pool):
    """`count` actors, asked through the driver."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._link = Link(plan, self._inbox, driver=f"{__name__}:drive")
        self._lost = False

    def close(self) -> None:
        if not self._lost:
            self._link.say(None)
            try:
                self._link.process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._lost = True
        self._link.end()

    def _give(self) -> None:
        while self._waiting:
            self._link.say(self._waiting.popleft())

    def _step(self) -> None:
        try:
            _, words = self._inbox.get(timeout=SILENCE_S)
        except queue.Empty:
            words = ["gone", f"it has not answered for {SILENCE_S:g} s"]
        said, *rest = words or ("gone", "Ray ended its process")
        if said == "done":
            self._done(*rest)
        elif said == "lost":
            number, kind, how = rest
            if number is not None:
                self._outcomes[number] = Failure(kind, how)
            if kind == "died":
                self._died(how)
        elif said == "refused":
            self._refuse(*rest)
        elif said == "gone":
            self._lost = True
            raise WorkersLost(
                f"the Ray cluster is gone: {rest[0]}",
                hint="the run is paused: resume it when the cluster is back, or without Ray",
            )


class Actor:
    """A worker of the cluster; it is told what to build, so that a failure of that has a name."""

    def prepare(self, make: str, arguments: dict[str, Any], threads: int) -> str:
        self.threads = threads
        self.work, problem = worker.build(make, arguments, threads)
        return problem

    def run(self, task: str) -> tuple[str | None, str]:
        assert self.work is not None
        return worker.answer(self.work, task, self.threads)


def nothing() -> None:
    """A task for a cluster that may be gone."""


def drive(plan: dict[str, Any], lines: worker.Lines, outward: IO[bytes]) -> None:
    """The driver: connect, keep `count` actors busy, say every second that the cluster answers."""
    guard = threading.Lock()

    def say(*words: Any) -> None:
        with guard:
            worker.say(outward, *words)

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory(prefix="forge-ray-", ignore_cleanup_errors=True) as folder:
        try:
            _connect(plan, folder)
        except (OSError, RuntimeError, ValueError) as error:
            say("gone", f"{type(error).__name__}: {error}")
            return
        import ray

        tasks: worker.Lines = queue.SimpleQueue()
        for _ in range(plan["count"]):
            threading.Thread(target=_keep, args=(plan, tasks, say), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=ALIVE_EVERY_S)
            except queue.Empty:
                ray.cluster_resources()  # does not return while the cluster is gone
                say("alive")
                continue
            if line is None:
                break
            tasks.put(line)
        ray.shutdown()
    os._exit(0)  # the threads still wait for answers


def _connect(plan: dict[str, Any], folder: str) -> None:
    import ray

    own: dict[str, Any] = {
        "num_cpus": plan["count"] * plan["threads"],
        "include_dashboard": False,
        "object_store_memory": OBJECT_BYTES,
        "_temp_dir": folder,
    }
    ray.init(
        plan["address"] or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if plan["address"] else own),
    )


def _keep(plan: dict[str, Any], tasks: worker.Lines, say: Any) -> None:
    """Keep one actor at work; when it is lost, with the task that it has, start another."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    while True:
        number, lost = None, "died"
        actor = (
            ray.remote(Actor)
            .options(
                num_cpus=plan["threads"],
                num_gpus=1 if plan["devices"] else 0,  # never run on a cluster with GPUs
                runtime_env={"env_vars": thread_environment(plan["threads"])},
            )
            .remote()
        )
        try:
            problem = ray.get(
                actor.prepare.remote(plan["make"], plan["arguments"], plan["threads"])
            )
            if problem:
                say("refused", problem)
                return
            while True:
                number, task = tasks.get()
                say("done", number, *ray.get(actor.run.remote(task), timeout=plan["seconds"]))
                number = None
        except RayTaskError as error:  # agent_forge itself is not there
            say("refused", str(error))
            return
        except GetTimeoutError:
            ray.kill(actor)
            say("lost", number, "timeout", f"more than {plan['seconds']:g} s")
        except RayError as error:
            how = " ".join(str(error).split())
            try:  # is it the actor, or everything?
                ray.get(ray.remote(nothing).options(num_cpus=0).remote(), timeout=PROBE_S)
            except RayError:
                say("gone", how)
                return
            say("lost", number, "died", how)
