"""Workers: the same results in the same order, whoever dies, hangs or goes away meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agent_forge import platform
from agent_forge.errors import ConfigError, ForgeError, WorkersLost
from agent_forge.workers import WorkerFailure, WorkerPool, open_pool, ray_pool
from tests.support.extras import RAY
from tests.support.polling import until

MAKE = "tests.support.toy_work:make"
ROOT = Path(__file__).parents[2]
EXECUTORS = pytest.mark.parametrize("kind", ["inline", "processes", RAY])
APART = pytest.mark.parametrize("kind", ["processes", RAY])  # workers that can die alone


def run(pool: WorkerPool, *tasks: tuple[str, Any]) -> list[Any]:
    """The outcomes of tasks that are submitted all at once."""
    for number, (name, value) in enumerate(tasks):
        pool.submit(number, {name: value})
    numbers, outcomes = zip(*pool.results(), strict=True)
    assert numbers == tuple(range(len(tasks)))
    return list(outcomes)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = children()
    yield
    gone_soon(children() - before)


def gone_soon(pids: set[int], seconds: float = 30.0) -> None:
    until(lambda: not any(map(alive, pids)), seconds)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_in(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text()))


# -- the same everywhere --------------------------------------------------------------------------


def varied() -> list[tuple[str, Any]]:
    """Tasks of all kinds that end in another order than they begin, and fail in between."""
    slow = [("slow", 0.3 if i % 4 == 0 else 0.001 * i) for i in range(12)]
    data = [("echo", {"a": [1, None, "\u00e9\n", 0.1 + 0.2], "b": float("inf")}), ("spoil", [1, 2])]
    return [*slow, ("fail", "no such head"), *data, ("odd", 0), ("leave", 3), *slow[:3]]


@EXECUTORS
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_outcomes_are_equal_whoever_has_worked(kind: str, count: int) -> None:
    with open_pool("inline", 1, MAKE, {"base": 7}) as pool:
        expected = run(pool, *varied())
    assert expected[0] == [7, 0.3] and expected[12] == WorkerFailure(
        "raised", "ValueError: no such head"
    )
    assert expected[14] == [1, 2, 0]
    assert expected[15].message.startswith("TypeError") and expected[16].kind == "raised"
    if (kind, count) != ("inline", 1):
        with open_pool(kind, count, MAKE, {"base": 7}) as pool:
            assert run(pool, *varied()) == expected


def test_who_is_done_first_does_not_come_first(tmp_path: Path) -> None:
    with open_pool("processes", 2, MAKE) as pool:
        pool.submit(10, {"wait": str(tmp_path / "x")})  # ends when the last has ended
        pool.submit(11, {"echo": 1})
        pool.submit(12, {"touch": str(tmp_path / "x")})
        assert list(pool.results()) == [(10, "there"), (11, 1), (12, None)]


@EXECUTORS
@pytest.mark.slow
def test_floats_have_the_same_bits(kind: str) -> None:
    sizes = [("sum", 50_000 + 1000 * i) for i in range(4)]
    torch.set_num_threads(2)  # of this process: it is not what counts
    try:
        with open_pool("inline", 1, "tests.support.toy_work:make_with_torch") as pool:
            expected = run(pool, *sizes)
        with open_pool(kind, 2, "tests.support.toy_work:make_with_torch") as pool:
            assert run(pool, *sizes) == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@EXECUTORS
@pytest.mark.slow
def test_a_task_has_the_threads_that_it_was_given(kind: str) -> None:
    for threads in (1, 2):
        with open_pool(kind, 1, "tests.support.toy_work:make_with_torch", threads=threads) as pool:
            got = run(pool, ("threads", None), ("environment", "OMP_NUM_THREADS"))
        assert got[0] == threads
        assert kind == "inline" or got[1] == str(threads)
    assert torch.get_num_threads() == 1


@EXECUTORS
def test_more_can_be_submitted_while_results_come(kind: str) -> None:
    seen = []
    with open_pool(kind, 2, MAKE) as pool:
        pool.submit(3, {"echo": 3})
        for number, outcome in pool.results():
            seen.append(outcome)
            if number < 20:
                pool.submit(number + 4, {"echo": number + 4})
                if number == 3:
                    pool.submit(8, {"echo": 8})
            if number == 7:
                break
        assert next(pool.results()) == (8, 8)
    assert seen == [3, 7]


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_numbers_grow_and_tasks_are_plain(kind: str) -> None:
    with open_pool(kind, 1, MAKE) as pool:
        with pytest.raises(TypeError):
            pool.submit(0, {"echo": {1, 2}})
        pool.submit(4, {"echo": 4})
        with pytest.raises(ValueError, match="task 4 comes after task 4"):
            pool.submit(4, {"echo": 4})
        assert list(pool.results()) == [(4, 4)]
        assert list(pool.results()) == []


@APART
def test_what_the_work_prints_and_reads_is_its_own(kind: str) -> None:
    text = '["done", "7", ""]\n'  # just what a worker says
    with open_pool(kind, 1, MAKE) as pool:
        assert run(pool, ("print", text), ("echo", 1)) == [[text, ""], 1]


@APART
def test_large_tasks_and_results_pass(kind: str) -> None:
    large = ["x" * 1000] * 2000
    with open_pool(kind, 2, MAKE) as pool:
        assert run(pool, *[("echo", [large, i]) for i in range(4)]) == [
            [large, i] for i in range(4)
        ]


# -- workers that fail ----------------------------------------------------------------------------


@APART
def test_a_worker_that_dies_costs_its_task(kind: str) -> None:
    deaths = [("signal", signal.SIGKILL), ("exit", 3), ("segfault", 0), ("exit", 0)]
    tasks = [task for death in deaths for task in (death, ("echo", 1), ("echo", 2))]
    with open_pool(kind, 2, MAKE) as pool:
        outcomes = run(pool, *tasks)
    assert [o.kind if isinstance(o, WorkerFailure) else o for o in outcomes] == ["died", 1, 2] * 4
    if kind == "processes":
        messages = ["SIGKILL", "exit code 3", "SIGSEGV", "exit code 0"]
        assert [outcome.message for outcome in outcomes[::3]] == messages


@APART
def test_a_worker_killed_from_outside_costs_its_task(kind: str, tmp_path: Path) -> None:
    with open_pool(kind, 2, MAKE) as pool:
        pool.submit(0, {"announce": str(tmp_path / "pid")})
        for number in (1, 2, 3):
            pool.submit(number, {"echo": number})
        killer = threading.Thread(target=lambda: os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL))
        killer.start()
        (_, first), *rest = pool.results()
        killer.join()
        assert first.kind == "died" and rest == [(1, 1), (2, 2), (3, 3)]


@APART
def test_a_worker_killed_while_idle_costs_nothing(kind: str) -> None:
    with open_pool(kind, 1, MAKE) as pool:
        [pid] = run(pool, ("pid", 0))
        os.kill(pid, signal.SIGKILL)
        gone_soon({pid})
        if kind == "processes":  # its threads may end a moment later
            until(lambda: platform.has_ended(pid))
        pool.submit(1, {"pid": 0})
        [(_, outcome)] = pool.results()
        if kind == "processes":  # Ray tells of it only when the actor is asked
            assert isinstance(outcome, int) and outcome != pid


@APART
def test_what_raises_leaves_its_worker(kind: str) -> None:
    with open_pool(kind, 1, MAKE) as pool:
        before, failure, after = run(pool, ("pid", 0), ("fail", "x"), ("pid", 0))
    assert before == after and failure == WorkerFailure("raised", "ValueError: x")
    assert before != os.getpid()


@EXECUTORS
def test_a_task_without_time_left_costs_itself(kind: str) -> None:
    with open_pool(kind, 2, MAKE, seconds=0.8) as pool:
        endless = 1.0 if kind == "inline" else 1000.0
        began = time.monotonic()
        outcomes = run(pool, ("slow", 0.01), ("slow", endless), ("echo", 1), ("echo", 2))
    assert outcomes == [[0, 0.01], WorkerFailure("timeout", "more than 0.8 s"), 1, 2]
    assert time.monotonic() - began < 60


def test_the_end_of_one_that_was_given_up_is_not_taken_for_another() -> None:
    with open_pool("processes", 1, MAKE, seconds=0.5) as pool:
        late, *pids = run(pool, ("slow", 1000), *[("pid", 0), ("slow", 0.2)] * 3)
    assert late.kind == "timeout" and len(set(pids[::2])) == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_half_an_answer_is_none() -> None:
    with open_pool("processes", 1, MAKE) as pool:
        assert run(pool, ("half", None), ("echo", 1)) == [WorkerFailure("died", "exit code 4"), 1]


def test_a_fork_that_keeps_the_pipe_open_hides_no_death(tmp_path: Path) -> None:
    with open_pool("processes", 1, MAKE) as pool:
        outcomes = run(pool, ("fork", str(tmp_path / "pid")), ("echo", 1))
    os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
    assert outcomes == [WorkerFailure("died", "exit code 5"), 1]


@EXECUTORS
def test_a_factory_that_fails_is_an_error_at_once(kind: str) -> None:
    with open_pool(kind, 2, "tests.support.toy_work:make_fails") as pool:
        pool.submit(0, {"echo": 1})
        with pytest.raises(
            ForgeError, match="cannot be set up: NotEnough: no room for the parents"
        ):
            list(pool.results())
    with open_pool(kind, 1, "tests.no_such_module:make") as pool:
        pool.submit(0, {"echo": 1})
        with pytest.raises(ForgeError, match="ModuleNotFoundError"):
            list(pool.results())


@APART
def test_workers_that_always_die_are_not_replaced_for_ever(kind: str) -> None:
    with open_pool(kind, 1, "tests.support.toy_work:make_dies") as pool:
        pool.submit(0, {"echo": 1})
        with pytest.raises(WorkersLost, match="5 workers died") as caught:
            list(pool.results())
    assert caught.value.pauses and "fewer workers" in caught.value.hint


def test_tasks_that_all_kill_their_workers_pause_the_run() -> None:
    with open_pool("processes", 1, MAKE) as pool:
        for number in range(9):
            pool.submit(number, {"exit": 1})
        results = pool.results()
        assert [next(results)[1].kind for _ in range(4)] == ["died"] * 4
        with pytest.raises(WorkersLost):
            next(results)


def test_deaths_with_something_done_in_between_go_on() -> None:
    with open_pool("processes", 1, MAKE) as pool:
        outcomes = run(pool, *[("exit", 1), ("echo", 1)] * 8)
    assert outcomes == [WorkerFailure("died", "exit code 1"), 1] * 8


# -- the end of it --------------------------------------------------------------------------------


@APART
def test_closing_is_quick_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    before = children()
    with open_pool(kind, 2, MAKE) as pool:
        pool.submit(0, {"announce": str(tmp_path / "0")})
        pool.submit(1, {"announce": str(tmp_path / "1")})
        waiting = pool.results()
        threading.Thread(target=lambda: interrupt_when(tmp_path / "0", tmp_path / "1")).start()
        with pytest.raises(KeyboardInterrupt):
            next(waiting)
        pids = {pid_in(tmp_path / "0"), pid_in(tmp_path / "1")}
        began = time.monotonic()
    took = time.monotonic() - began
    gone_soon(pids | (children() - before))
    assert took < 12.0  # the tasks would take 1000


def interrupt_when(*paths: Path) -> None:
    for path in paths:
        pid_in(path)
    os.kill(os.getpid(), signal.SIGINT)


CALLER = """
import sys
from agent_forge.workers import open_pool
pool = open_pool(sys.argv[1], 2, "tests.support.toy_work:make")
try:
    for number in (0, 1):
        pool.submit(number, {"announce": sys.argv[2] + str(number)})
    list(pool.results())
except KeyboardInterrupt:
    pool.close()
    print("interrupted", flush=True)
"""  # a script with no guard around what it does, as notebooks and beginners write them


@contextlib.contextmanager
def caller(kind: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    """Another process with a busy pool, and all the processes below it."""
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    process = subprocess.Popen(
        [sys.executable, str(script), kind, str(tmp_path / "pid")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        busy = {pid_in(tmp_path / "pid0"), pid_in(tmp_path / "pid1")}
        below = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        yield process, busy | below
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@APART
def test_workers_end_with_a_caller_that_is_killed(kind: str, tmp_path: Path) -> None:
    with caller(kind, tmp_path) as (process, pids):
        assert len(pids) >= 2 and all(map(alive, pids))
        process.kill()
        gone_soon(pids)


@APART
def test_an_interrupt_reaches_the_caller_alone(kind: str, tmp_path: Path) -> None:
    with caller(kind, tmp_path) as (process, pids):
        if kind == "processes":
            for pid in pids:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    os.kill(pid, number)
            time.sleep(0.3)
            assert all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert said == b"interrupted\n" and process.returncode == 0
        gone_soon(pids)


# -- a cluster ------------------------------------------------------------------------------------


def parts_of_ray(*names: str) -> set[int]:
    """The processes of the cluster below this process."""
    below = psutil.Process().children(recursive=True)
    return {child.pid for child in below if child.name() in names}


@pytest.mark.parametrize("kind", [RAY])
@pytest.mark.parametrize("parts", [("raylet",), ("gcs_server",), ("raylet", "gcs_server")])
def test_a_cluster_that_goes_away_pauses_the_run(
    kind: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "SILENCE_S", 20.0)
    with open_pool(kind, 2, MAKE) as pool:
        assert run(pool, ("echo", 1), ("echo", 2)) == [1, 2]
        pool.submit(2, {"announce": str(tmp_path / "pid")})
        pool.submit(3, {"slow": 0.5})

        def kill() -> None:
            pid_in(tmp_path / "pid")
            for pid in parts_of_ray(*parts):
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(WorkersLost, match="the Ray cluster is gone") as caught:
            next(pool.results())
        killer.join()
        assert time.monotonic() - began < 60
    assert caught.value.pauses and "resume" in caught.value.hint


@pytest.mark.parametrize("kind", [RAY])
def test_a_cluster_that_is_there_is_used_and_left(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "SILENCE_S", 30.0)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster alone
    ray, address = str(Path(sys.executable).with_name("ray")), "127.0.0.1:26379"
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        start = ["start", "--head", "--port=26379", "--num-cpus=2", f"--temp-dir={folder}"]
        settings = ["--include-dashboard=false", "--object-store-memory=100000000", "--block"]
        head = subprocess.Popen(
            [ray, *start, *settings],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until(lambda: parts_of_ray("raylet"))
            time.sleep(3)
            for _ in range(2):  # it is still there after the first pool has closed
                with open_pool(kind, 2, MAKE, address=address) as pool:
                    assert run(pool, *varied()[:4])[0] == [0, 0.3]
            with open_pool(kind, 3, MAKE, address=address) as pool:
                pool.submit(0, {"echo": 1})
                with pytest.raises(ForgeError, match="of 3 CPU it has 2"):
                    next(pool.results())
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        with open_pool(kind, 1, MAKE, address=address) as pool:
            pool.submit(0, {"echo": 1})
            with pytest.raises(WorkersLost):
                next(pool.results())


# -- what is refused before any work --------------------------------------------------------------


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="a GPU each and there are 2"):
        open_pool("processes", 3, MAKE, devices=2)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        open_pool("ray", 1, MAKE)
    assert ".[cluster]" in caught.value.hint


def test_each_worker_has_a_gpu_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers are told; no machine with a GPU has run this."""
    for visible, expected in (("", ["0", "1"]), ("4,6", ["4", "6"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with open_pool("processes", 2, MAKE, devices=2) as pool:
            seen = run(pool, *[("environment", "CUDA_VISIBLE_DEVICES")] * 8)
        assert set(seen) == set(expected)
