"""Workers on a Ray cluster: one that exists, or one of this machine while the pool is open.

Ray lives in a process of its own, the driver, and this one never imports it: when a cluster goes
away, Ray waits for a minute or ends its process, as it likes, and here it is an error either way.
"""

import contextlib
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from agent_forge.errors import WorkersLost
from agent_forge.workers import pools, worker

ALIVE_EVERY_S = 1.0
SILENCE_S = 60.0  # of a driver that should report every second that the cluster answers
PROBE_S = 20.0
CLOSE_S = 10.0
OBJECT_BYTES = 1 << 27  # what passes through Ray are short texts
Send = Callable[..., None]


class RayPool(pools.WorkerPool):
    """`count` actors, asked through the driver."""

    _gone = False

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._driver = pools.WorkerProcess(settings, self._inbox, driver=f"{__name__}:drive")

    def close(self) -> None:
        if not self._gone:
            self._driver.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.process.wait(CLOSE_S)
        self._driver.end()

    def _assign(self) -> None:
        while self._waiting:
            self._driver.send(self._waiting.popleft())

    def _step(self) -> None:
        try:
            _, message = self._inbox.get(timeout=SILENCE_S)
        except queue.Empty:
            message = ["gone", f"it has not answered for {SILENCE_S:g} s"]
        event, *rest = message or ["gone", "Ray ended its process"]
        if event == "done":
            self._done(*rest)
        elif event == "lost":
            self._lost(*rest)
        elif event == "refused":
            raise pools.not_set_up(*rest)
        elif event == "gone":
            self._gone = True
            hint = "the run is paused: resume it when the cluster is back, or without Ray"
            raise WorkersLost(f"the Ray cluster is gone: {rest[0]}", hint=hint)


def drive(settings: dict[str, Any], inbox: worker.Messages, outward: IO[bytes]) -> None:
    """The driver: connect, keep the actors busy, report every second that the cluster answers."""
    lock = threading.Lock()
    count = settings["count"]

    def send(*message: Any) -> None:
        with lock:
            worker.send(outward, *message)

    with tempfile.TemporaryDirectory(prefix="forge-ray-", ignore_cleanup_errors=True) as folder:
        try:
            has = _connect(settings, folder)
        except (OSError, RuntimeError, ValueError) as error:
            return send("gone", f"{type(error).__name__}: {error}")
        for name, each in (("CPU", settings["threads"]), ("GPU", min(settings["devices"], 1))):
            if has.get(name, 0) < count * each:
                return send("refused", f"of {count * each} {name} it has {has.get(name, 0)}")
        tasks: worker.Messages = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_run_actor, args=(settings, tasks, send), daemon=True).start()
        _forward(inbox, tasks, send)
    os._exit(0)  # the threads still wait for results


def _connect(settings: dict[str, Any], folder: str) -> dict[str, float]:
    """Join the cluster, or start one here; returns its resources."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.chdir(folder)  # Ray lets workers import what lies in the folder that a driver is in
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not settings["address"]:
        options |= {"num_cpus": settings["count"] * settings["threads"], "_temp_dir": folder}
        options |= {"object_store_memory": OBJECT_BYTES, "include_dashboard": False}
    ray.init(settings["address"] or "local", **options)
    worker.ignore_stop_signals()  # Ray has put a handler of its own in place
    return dict(ray.cluster_resources())


def _forward(inbox: worker.Messages, tasks: worker.Messages, send: Send) -> None:
    """Pass tasks on until the caller says that it is over."""
    import ray

    while True:
        try:
            task = inbox.get(timeout=ALIVE_EVERY_S)
        except queue.Empty:
            ray.cluster_resources()  # does not return while the cluster is gone
            send("alive")
            continue
        if task is None:
            ray.shutdown()
            return
        tasks.put(task)


class RayWorker:
    """A worker of the cluster; `prepare` builds its work, so that a failure of that has a name."""

    def __init__(self) -> None:
        with contextlib.suppress(ValueError):  # Ray did not start it in a main thread
            worker.ignore_stop_signals()

    def prepare(self, settings: dict[str, Any]) -> str:
        self.threads = settings["threads"]
        self.work, problem = worker.build(settings)
        return problem

    def run(self, task: str) -> tuple[str | None, str]:
        assert self.work
        return worker.run_task(self.work, task, self.threads)


def _run_actor(settings: dict[str, Any], tasks: worker.Messages, send: Send) -> None:
    """Keep one actor at work; when it is lost, with the task that it has, start another."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    new = ray.remote(RayWorker).options(
        num_cpus=settings["threads"],
        num_gpus=min(settings["devices"], 1),  # never run on a cluster with GPUs
        runtime_env={"env_vars": pools.thread_variables(settings["threads"])},
    )
    while True:
        number, actor = None, new.remote()
        try:
            problem = ray.get(actor.prepare.remote(settings))
            while not problem:
                number, task = tasks.get()
                send("done", number, *ray.get(actor.run.remote(task), timeout=settings["seconds"]))
                number = None
            return send("refused", problem)
        except RayTaskError as error:  # agent_forge itself is not there
            return send("refused", str(error))
        except GetTimeoutError:
            ray.kill(actor)
            send("lost", number, "timeout", pools.too_long(settings["seconds"]))
        except RayError as error:
            how = " ".join(str(error).split())
            try:  # is it the actor, or everything?
                ray.get(ray.remote(lambda: 0).options(num_cpus=0).remote(), timeout=PROBE_S)
            except RayError:
                return send("gone", how)
            send("lost", number, "died", how)
