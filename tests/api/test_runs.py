"""Runs over HTTP and WebSocket: started, followed to their end without a gap, stopped, resumed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import websockets

from agent_forge.api import allowed, runs
from agent_forge.pipeline import jobs
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import read_lines
from tests.support.polling import until
from tests.support.serving import Server, serving, small_model
from tests.support.toy_runs import die_at, exit_code, folder, forked, toy_run

SLOWLY = ("phases.toy.steps=60",)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    small_model(tmp_path)
    with serving(tmp_path) as found:
        yield found


def measured(root: Path) -> list[Any]:
    return [record["metrics"] for _, record in read_lines(folder(root) / "metrics.jsonl")]


async def follow(server: Server, start: int = 0, most: int = 1 << 30) -> list[Any]:
    """The messages behind a number; the connection is cut after so many."""
    url, found = f"ws://{server.address}/ws?session=r&from={start}", list[Any]()
    async with websockets.connect(url) as socket:
        async for message in socket:
            found.append(json.loads(message))
            if len(found) == most:
                socket.transport.abort()  # the cable is pulled
                break
    return found


def test_a_run_is_followed_to_its_end_over_cut_connections(server: Server, tmp_path: Path) -> None:
    def pause(record: Any) -> None:
        if record["event"] == "step":
            until(lambda: not (tmp_path / "wait").exists())

    (tmp_path / "wait").touch()
    child = forked(lambda: toy_run(tmp_path, *SLOWLY, listener=pause))
    until(lambda: (folder(tmp_path) / "session.json").exists())

    async def all_of_it() -> list[Any]:
        found, cuts = list[Any](), iter([1, 3, 5, 7])
        (tmp_path / "wait").unlink()
        while not found or "metrics" in found[-1] or found[-1]["status"] == "running":
            start = found[-1]["event"] if found else 0
            found += await follow(server, start, next(cuts, 1 << 30))
        return found

    found = asyncio.run(all_of_it())
    assert exit_code(child) == 0
    lines = [message for message in found if "metrics" in message]
    assert [line["metrics"] for line in lines] == measured(tmp_path) and len(lines) > 20
    first = lines[0]["event"]
    assert [line["event"] for line in lines] == list(range(first, first + len(lines)))
    assert found[-1]["status"] == "completed" and found[-1]["progress"] == 1
    assert not any("restart" in message for message in found)


@pytest.mark.slow
def test_an_evolution_is_started_and_followed_over_cut_connections(
    server: Server, tmp_path: Path
) -> None:
    kinds = ("reasoning", "memory_integration", "adaptive_computation")
    about = [{"specialization": kind, "final_loss": 5.0} for kind in kinds]
    models = [small_model(tmp_path, f"m{i}", i, **told) for i, told in enumerate(about)]
    config = {"generations": 2, "strategy": "spec", "gate_policy": "warn"}
    body = {"models": models, "config": config, "preset": "smoke", "session": "r"}
    url = f"{server.url}/phases/evomerge"
    found = httpx2.post(f"{url}/start", json=body, timeout=300)
    assert found.status_code == 202, found.text
    assert httpx2.get(f"{url}/status").json()["session"] == "r"

    async def all_of_it() -> list[Any]:
        found, cuts = list[Any](), iter([1, 2, 1])
        while not found or "metrics" in found[-1] or found[-1]["status"] == "running":
            start = found[-1]["event"] if found else 0
            found += await follow(server, start, next(cuts, 1 << 30))
        return found

    told = asyncio.run(all_of_it())
    assert told[-1]["status"] == "completed"
    lines = [message for message in told if "metrics" in message]
    assert [line["metrics"] for line in lines] == measured(tmp_path)
    best = [line["best_fitness"] for line in lines if line.get("best_fitness") is not None]
    assert len(best) >= 2 and httpx2.get(f"{url}/results").json()["models"]


def test_a_resumed_run_says_that_it_begins_again(server: Server, tmp_path: Path) -> None:
    child = forked(lambda: toy_run(tmp_path, listener=die_at("step", 13)))
    assert exit_code(child) == -signal.SIGKILL
    before = asyncio.run(follow(server))
    assert before[-1]["status"] == "interrupted"
    assert exit_code(forked(lambda: toy_run(tmp_path, resume=True))) == 0
    after = asyncio.run(follow(server, before[-1]["event"]))
    assert after[0]["restart"] and after[-1]["status"] == "completed"
    assert [m["metrics"] for m in after if "metrics" in m] == measured(tmp_path)
    assert {m["event"] for m in after}.isdisjoint(m["event"] for m in before)
    assert len(asyncio.run(follow(server, after[-1]["event"]))) == 1  # how it stands, no more


def test_an_evolution_is_told_as_the_specification_has_it(server: Server, tmp_path: Path) -> None:
    toy_run(tmp_path)
    record = {"phase": "evomerge", "step": 25, "time": 1.0}
    record["metrics"] = {"generation/best_fitness": 0.85, "generation/diversity_score": 0.32}
    with (folder(tmp_path) / "metrics.jsonl").open("a") as writer:
        writer.write(json.dumps(record) + "\n")
    message = next(m for m in asyncio.run(follow(server)) if m.get("phase") == "evomerge")
    told = ("phase", "generation", "total_generations", "progress", "best_fitness", "diversity")
    assert [message[name] for name in told] == ["evomerge", 25, 50, 0.5, 0.85, 0.32]


def test_phases_and_runs_tell_what_their_files_say(server: Server, tmp_path: Path) -> None:
    toy_run(tmp_path)
    ask = httpx2.Client(base_url=server.url)
    state = json.loads((folder(tmp_path) / "toy" / "state.json").read_text())
    results = ask.get("/phases/toy/results").json()
    assert results["metrics"] == state["metrics"] and results["models"] == ["toy.linear.r"]
    assert ask.get("/runs/r/results").json()["phases"] == [results]
    status = ask.get("/phases/toy/status?session=r").json()
    assert (status["status"], status["progress"]) == ("completed", 1.0)
    assert ask.get("/runs/r").json()["phases"] == [status]
    assert [row["session_id"] for row in ask.get("/runs").json()["runs"]] == ["r", "s1"]
    rows = ask.get("/runs/r/metrics").json()["metrics"]
    course = ask.get("/runs/r/metrics", params={"name": rows[0]["name"]}).json()["metrics"][0]
    assert course["values"][-1] == rows[0]["latest"] and len(course["values"]) == rows[0]["count"]
    for path in ("/runs/none", "/phases/evomerge/status", "/phases/evomerge/results", "/x"):
        found = ask.get(path)
        assert found.status_code == 404 and set(found.json()) == {"error", "hint"}
    assert ask.get("/phases/alchemy/status").status_code == 400


def test_a_run_has_the_phases_that_it_was_asked_for(server: Server, tmp_path: Path) -> None:
    """So a status can be asked for at once behind a start."""
    asked = {"session_id": "begun", "details": {"asked": {"phases": ["evomerge"]}}}
    SessionStore(tmp_path).create({"phases": {}}, "a: 1\n", **asked)
    found = httpx2.get(f"{server.url}/phases/evomerge/status").json()
    assert (found["session"], found["status"], found["best_fitness"]) == ("begun", "waiting", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/phases/evomerge/start", {"models": ["cognate.none.s1"]}),
        ("/phases/evomerge/start", {"models": ["../x"]}),
        ("/phases/evomerge/start", {"config": {"generatoins": 3}}),
        ("/phases/evomerge/start", {"config": {"generations": -3}}),
        ("/phases/evomerge/start", {"config": {"x=1 --set y": 3}}),
        ("/phases/evomerge/start", {"generations": 3}),
        ("/runs", {"preset": "gigantic"}),
        ("/runs", {"models": ["cognate.small.s1"]}),
        ("/runs", {"session": "../x", "preset": "toy"}),
        ("/runs", {"session": "s1", "preset": "toy"}),
        ("/runs/s1/stop", {}),
        ("/runs/none/resume", {}),
    ],
)
def test_what_cannot_start_is_refused(
    server: Server, tmp_path: Path, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> str:
        raise AssertionError("a process was started")

    monkeypatch.setattr(jobs, "_spawn", started)
    found = httpx2.post(server.url + path, json=body)
    assert 400 <= found.status_code < 500 and found.json()["error"], found.text


OUTSIDE: list[dict[str, Any]] = [
    {"storage": {"root": "/tmp/elsewhere"}},
    {"tracking": {"wandb_enabled": True, "wandb_offline": False}},
    {"cleanup_policy": {"max_sessions_total": 1}},
    *(
        {"phases": {phase: told}}
        for phase, told in [
            ("evomerge", {"fitness": "touch {outside}.ran; echo 1"}),
            ("evomerge", {"cluster": "ray://evil.example:1"}),
            ("evomerge", {"data": ["{outside}"]}),
            ("evomerge", {"heal_data": ["../outside.jsonl"]}),
            ("cognate", {"texts": ["sessions/../../outside.jsonl"]}),
            ("cognate", {"texts": ["link.jsonl"]}),
            ("cognate", {"texts": "{outside}"}),
            ("cognate", {"texts": [{"a": 1}]}),
            ("cognate", {"data_dir": "/tmp"}),
            ("quietstar", {"traces": ["sessions/none.jsonl"]}),
            ("baking", {"persona": "{outside}"}),
            ("bitnet", {"calibration_dataset": "{outside}"}),
        ]
    ),
]


@pytest.mark.parametrize("config", OUTSIDE, ids=str)
def test_no_setting_names_code_or_leads_out_of_the_root(
    server: Server, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Any]()
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: started.append(command))
    outside = tmp_path.parent / "outside.jsonl"
    outside.write_text('{"text": "secret"}\n')
    (tmp_path / "link.jsonl").symlink_to(outside)
    asked = json.loads(json.dumps(config).replace("{outside}", str(outside)))
    found = httpx2.post(f"{server.url}/runs", json={"preset": "smoke", "config": asked})
    assert found.status_code == 400 and found.json()["error"] and not started, found.text
    assert "secret" not in found.text


def test_files_below_the_root_and_names_are_settings(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Any]()
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: started.append(command))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text("{}")
    config = {"data": ["mine/a.jsonl"], "domain_weights": {"a": 2.0}}
    body = {"models": ["cognate.small.s1"] * 3, "config": config}
    found = httpx2.post(f"{server.url}/phases/evomerge/start", json=body)
    assert found.status_code == 202, found.text
    place = json.dumps([str((tmp_path / "mine/a.jsonl").resolve())])
    assert f"--set=phases.evomerge.data={place}" in started[0]


def test_so_many_runs_are_at_work_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: name)
    rows = [{"status": "running"}] * runs.MOST_RUNS
    monkeypatch.setattr(runs, "all_runs", lambda store: rows)
    found = httpx2.post(f"{server.url}/runs", json={"preset": "toy"})
    assert found.status_code == 409 and "at work" in found.json()["error"]
    rows.pop()
    assert httpx2.post(f"{server.url}/runs", json={"preset": "toy"}).status_code == 202


def test_every_free_text_is_decided(server: Server) -> None:
    """A new setting that holds one begins refused; say here what it is."""
    known = allowed.FILES | allowed.NAMES | allowed.WORDS.keys()
    refused = {"root", "wandb_project", "schedule_cleanup", "fitness", "cluster", "data_dir"}
    assert known | refused == allowed.FREE_TEXTS


def test_a_start_names_folders_and_settings(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[Any] = []
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: spawned.append(command))
    config = {"generations": 3, "gates": {}, "strategy": "spec"}
    body = {"models": ["cognate.small.s1"] * 3, "config": config, "session": "new"}
    assert httpx2.post(f"{server.url}/phases/evomerge/start", json=body).status_code == 202
    place = str((tmp_path / "sessions/s1/phase1_cognate/small").resolve())
    expected = ["run", "--session=new", "--only=evomerge", f"--models={','.join([place] * 3)}"]
    sets = ["generations=3", "gates={}", 'strategy="spec"']
    assert spawned == [expected + [f"--set=phases.evomerge.{item}" for item in sets]]


@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed(server: Server, tmp_path: Path) -> None:
    ask = httpx2.Client(base_url=server.url, timeout=300)
    body = {"preset": "toy", "session": "r", "config": {"phases": {"toy": {"steps": 100_000}}}}
    assert ask.post("/runs", json=body).json()["status"] == "running"
    until(lambda: len(measured(tmp_path)) > 3)
    assert ask.post("/runs/r/resume").status_code == 409
    assert ask.post("/runs/r/stop").status_code == 202
    until(lambda: ask.get("/runs/r").json()["status"] == "paused")
    assert ask.post("/runs/r/resume").status_code == 202
    until(lambda: ask.get("/runs/r").json()["status"] == "running")
    pid = json.loads((folder(tmp_path) / "run.lock").read_text())["pid"]
    ask.post("/runs/r/stop")
    until(lambda: ask.get("/runs/r").json()["status"] == "paused")
    assert pid != os.getpid()
