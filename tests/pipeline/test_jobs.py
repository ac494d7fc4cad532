"""Runs as processes of their own: real ones, of the toy phase."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from agent_forge.errors import AlreadyExists, AlreadyInUse, NameRefused, NotFound
from agent_forge.pipeline import jobs
from agent_forge.pipeline.jobs import StartRefused, resume_run, start_run, stop_run
from agent_forge.pipeline.run_view import RunView
from agent_forge.store import lock
from agent_forge.store.sessions import SessionStore, read_session
from agent_forge.ui.dashboard import configuration
from tests.support.polling import until
from tests.support.toy_runs import SMALL, toy_run

pytestmark = pytest.mark.slow
LONG = (*SMALL, "phases.toy.steps=1000000", "phases.toy.checkpoint_every_steps=1000")


def status(store: SessionStore, session: str) -> str:
    return RunView(store, session).status


def gone(pid: int) -> bool:
    """True once there is no such process, not even a dead one that nobody took note of."""
    return not psutil.pid_exists(pid)


def own_zombies() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


def test_started_stopped_and_resumed(root: Path) -> None:
    store = SessionStore(root)
    assert start_run(store, preset="toy", sets=LONG, session="a") == "a"
    pid = lock.announced(store.path("a"))["pid"]
    assert status(store, "a") == "running" and pid != os.getpid()
    with pytest.raises(AlreadyInUse, match=f"process {pid}"):
        resume_run(store, "a")
    until(lambda: list(store.path("a").glob("toy/checkpoints/*/step_*")))
    stop_run(store, "a")
    until(lambda: gone(pid))
    assert status(store, "a") == "paused"
    done = RunView(store, "a").latest("toy/loss")
    with pytest.raises(NotFound, match="a is not running"):
        stop_run(store, "a")
    assert resume_run(store, "a") == "a"
    again = lock.announced(store.path("a"))["pid"]
    assert status(store, "a") == "running" and again != pid and done is not None
    os.kill(again, signal.SIGKILL)
    until(lambda: gone(again))
    assert status(store, "a") == "interrupted" and not own_zombies()


def test_no_module_of_the_folder_it_is_started_in_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dashboard may be started in a folder that was downloaded."""
    hostile = tmp_path / "model"
    (hostile / "agent_forge").mkdir(parents=True)
    for name in ("yaml.py", "torch.py", "agent_forge/__init__.py"):
        (hostile / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    store = SessionStore(root.resolve())
    monkeypatch.chdir(hostile)
    name = start_run(store, preset="toy", sets=(*SMALL, "phases.toy.steps=1"))
    until(lambda: not lock.is_busy(store.path(name)))
    assert status(store, name) == "completed"
    monkeypatch.setenv("FORGE_STORAGE", str(store.root))
    assert configuration.estimated("preset: toy\n")["phases"]
    assert not (tmp_path / "ran").exists()


def test_a_run_that_ends_at_once_was_started(root: Path) -> None:
    store = SessionStore(root)
    name = start_run(store, preset="toy", sets=(*SMALL, "phases.toy.steps=1"))
    assert name.startswith("session_")
    until(lambda: not lock.is_busy(store.path(name)))
    assert status(store, name) == "completed"
    assert resume_run(store, name) == name  # nothing is left to do: no error
    until(lambda: not lock.is_busy(store.path(name)))
    until(lambda: not own_zombies())


def test_a_name_is_free_whenever_it_is_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs within a second have two names."""
    store, made = SessionStore(root), []

    def spawn(store: SessionStore, session: str, command: list[str]) -> str:
        store.create({}, "", session_id=session)
        made.append(command)
        return session

    monkeypatch.setattr(jobs, "_spawn", spawn)
    assert len({start_run(store) for _ in range(3)}) == 3
    start_run(store, session="x", preset="toy", sets=["--a=b"], only="toy", models=["m", "n"])
    assert made[-1] == [
        *("run", "--session=x", "--preset=toy", "--only=toy", "--models=m,n", "--set=--a=b")
    ]


def test_what_is_refused_before_a_process_is_started(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    store = SessionStore(root)
    store.create({}, "", session_id="a")
    with pytest.raises(AlreadyExists, match="'a' exists"):
        start_run(store, preset="toy", session="a")
    for name in ("../a", "--json", "a/b", "A"):
        with pytest.raises(NameRefused):
            start_run(store, session=name)
        with pytest.raises(NameRefused):
            resume_run(store, name)
        with pytest.raises(NameRefused):
            stop_run(store, name)
    with pytest.raises(NotFound, match="no session 'b'"):
        resume_run(store, "b")
    with pytest.raises(NotFound, match="no session 'b'"):
        stop_run(store, "b")
    with lock.exclusive(store.path("a")), pytest.raises(AlreadyInUse, match="in use"):
        resume_run(store, "a")


def test_a_run_that_has_stopped_may_end_what_it_is_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process writes a report after its record says that it paused."""
    store, busy = SessionStore(root), list[bool]()
    store.create({}, "", session_id="a")
    store.set_status("a", "paused")
    looks = lambda store, session, command: busy.append(lock.is_busy(store.path(session)))  # noqa: E731
    monkeypatch.setattr(jobs, "_spawn", looks)
    with contextlib.ExitStack() as ending:
        ending.enter_context(lock.exclusive(store.path("a")))
        threading.Timer(0.3, ending.pop_all().close).start()
        resume_run(store, "a")
    assert busy == [False]
    monkeypatch.setattr(jobs, "ENDING_S", 0.1)
    with lock.exclusive(store.path("a")), pytest.raises(AlreadyInUse, match="in use"):
        resume_run(store, "a")


def test_what_the_process_refuses_is_told(root: Path, tmp_path: Path) -> None:
    store = SessionStore(root)
    config = tmp_path / "c.yaml"
    config.write_text("preset: toy\nphases: {toy: {stepz: 2}}\n")
    with pytest.raises(StartRefused, match="did you mean 'steps'") as refused:
        start_run(store, config=config)
    assert refused.value.exit_code == 2 and not str(refused.value).startswith("error")
    with pytest.raises(StartRefused, match=r"--models goes with --only"):
        start_run(store, preset="toy", models=["x"])
    assert not (root / "sessions").exists()
    until(lambda: not own_zombies())


def test_two_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lost the race for a session is told so, and not that the other's run is its own."""
    store = SessionStore(root)
    start_run(store, preset="toy", sets=LONG, session="a")
    pid = lock.announced(store.path("a"))["pid"]
    monkeypatch.setattr(lock, "is_busy", lambda folder: True)
    with pytest.raises(StartRefused, match="in use by process"):
        jobs._spawn(store, "a", ["resume", "a"])
    monkeypatch.undo()
    assert lock.announced(store.path("a"))["pid"] == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))


def test_one_that_does_not_begin(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.05)
    with pytest.raises(AlreadyInUse, match="did not begin within"):
        start_run(SessionStore(root), preset="toy", sets=SMALL, session="a")
    monkeypatch.undo()
    store = SessionStore(root)
    until(lambda: (store.path("a") / "session.json").is_file())
    until(lambda: status(store, "a") == "completed")
    until(lambda: gone(lock.announced(store.path("a"))["pid"]))


def test_it_outlives_its_starter(root: Path) -> None:
    program = (
        "import sys; from agent_forge.store.sessions import SessionStore\n"
        "from agent_forge.pipeline.jobs import start_run\n"
        "start_run(SessionStore(sys.argv[1]), preset='toy', sets=sys.argv[2:], session='a')\n"
    )
    steps = "phases.toy.steps=20000"
    starter = [sys.executable, "-c", program, str(root), *SMALL, steps]
    # Its own group, as a terminal's; all of that is ended.
    process = subprocess.Popen(starter, start_new_session=True)
    assert process.wait() == 0
    store = SessionStore(root)
    pid = lock.announced(store.path("a"))["pid"]
    for kind in (signal.SIGHUP, signal.SIGINT):
        with contextlib.suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(process.pid, kind)
    before = RunView(store, "a")
    assert before.status == "running"
    time.sleep(0.2)
    stop_run(store, "a")
    until(lambda: gone(pid))
    assert status(store, "a") == "paused"
    assert [e["event"] for e in RunView(store, "a").events][-1] == "run_paused"


def asked(root: Path, session: str) -> dict[str, object]:
    return dict(read_session(SessionStore(root).find(session))["asked"])


def test_it_has_what_the_command_line_would_have(root: Path) -> None:
    """The settings of a started run are those of the command, in the given storage."""
    store = SessionStore(root)
    start_run(store, preset="toy", sets=(*SMALL, "phases.toy.steps=3"), session="a")
    until(lambda: status(store, "a") == "completed")
    assert toy_run(root, "phases.toy.steps=3")["success"]
    both = [RunView(store, name) for name in ("a", "r")]
    configs = [json.dumps({**view.config, "storage": None}) for view in both]
    assert configs[0] == configs[1] and asked(root, "a") == asked(root, "r")
    assert both[0].series["toy", "toy/loss"].values == both[1].series["toy", "toy/loss"].values
