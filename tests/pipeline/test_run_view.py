"""A run as its files tell it: incremental, bounded, and whatever is in the files."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from agent_forge.errors import ConfigError, NotFound
from agent_forge.model.catalog import Catalog
from agent_forge.pipeline import run_view
from agent_forge.pipeline.run_view import MOST_POINTS, RunView, Series, all_runs
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import Journal
from tests.support.eval_models import llama
from tests.support.toy_runs import toy_config, toy_run

PHASES = ["cognate", "evomerge"]


@pytest.fixture
def store(root: Path) -> SessionStore:
    """A storage with a session that was begun for two phases."""
    store = SessionStore(root)
    asked = {"asked": {"phases": PHASES}, "config_hash": "abc"}
    store.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1", details=asked)
    return store


def metrics(store: SessionStore) -> Path:
    return store.path("s1") / "metrics.jsonl"


def line(step: Any, value: Any, name: str = "loss", phase: str = "cognate") -> bytes:
    record = {"phase": phase, "step": step, "time": 1000.0 + step, "metrics": {name: value}}
    return json.dumps(record).encode() + b"\n"


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as writer:
        writer.write(b"".join(lines))


def loss(view: RunView) -> Series:
    return view.series["cognate", "loss"]


def test_only_what_is_new_is_read(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    append(metrics(store), *(line(n, n / 2) for n in range(3)))
    view = RunView(store, "s1")
    assert (loss(view).steps, loss(view).values) == ([0, 1, 2], [0.0, 0.5, 1.0])
    assert loss(view).times == [1000.0, 1001.0, 1002.0] and loss(view).latest == 1.0
    starts: list[int] = []
    real = run_view.read_lines
    monkeypatch.setattr(
        run_view, "read_lines", lambda path, start: (starts.append(start), real(path, start))[1]
    )
    append(metrics(store), line(3, 1.5))
    view.refresh()
    assert loss(view).steps == [0, 1, 2, 3] and starts == [3 * len(line(0, 0.5))]
    view.refresh()
    assert loss(view).count == 4 and view.latest("loss") == 1.5
    assert view.latest("loss", "evomerge") is None and view.latest("none") is None


def test_half_a_line_is_left_for_later(store: SessionStore) -> None:
    append(metrics(store), line(0, 1), line(1, 2)[:-20])
    view = RunView(store, "s1")
    assert loss(view).steps == [0]
    append(metrics(store), line(1, 2)[-20:])
    view.refresh()
    assert loss(view).steps == [0, 1]


@pytest.mark.parametrize("how", ["replaced", "truncated", "rewritten in place", "same length"])
def test_a_file_that_was_written_again_is_read_again(store: SessionStore, how: str) -> None:
    """A resumed run takes back what it logged after its last checkpoint."""
    append(metrics(store), *(line(n, n) for n in range(6)))
    view = RunView(store, "s1")
    if how == "replaced":
        assert Journal(metrics(store)).keep("cognate", 2) == 2
    elif how == "truncated":
        os.truncate(metrics(store), 2 * len(line(0, 0)))
    else:
        again = 6 if how == "same length" else 9
        metrics(store).write_bytes(b"".join(line(n, 9 - n) for n in range(again)))
    view.refresh()
    steps = [0, 1] if how in ("replaced", "truncated") else list(range(again))
    assert loss(view).steps == steps and loss(view).count == len(steps)
    append(metrics(store), line(7, 7.5))
    view.refresh()
    assert loss(view).values[-1] == 7.5 and loss(view).count == len(steps) + 1


def test_events_are_read_again_too(store: SessionStore) -> None:
    path = store.path("s1") / "events.jsonl"
    append(path, b'{"event": "a"}\n', b'{"event": "b"}\n')
    view = RunView(store, "s1")
    files.write_bytes(path, b'{"event": "c"}\n')
    view.refresh()
    assert [e["event"] for e in view.events] == ["c"]


def test_only_the_newest_events_are_kept(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "MOST_EVENTS", 5)
    append(store.path("s1") / "events.jsonl", *(b'{"event": "%d"}\n' % n for n in range(9)))
    assert [e["event"] for e in RunView(store, "s1").events] == list("45678")


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, MOST_POINTS + 2, 7777])
def test_a_long_series_keeps_its_ends(count: int) -> None:
    series = Series()
    for n in range(count):
        series.add(n, 1000.0 + n, float(n))
        assert series.latest == n
    assert series.count == count and series.steps[0] == 0 and series.steps[-1] == count - 1
    assert len(series.steps) == len(series.times) == len(series.values) <= MOST_POINTS + 1
    assert series.steps[:-1] == list(range(0, count - 1, series.every))[: len(series.steps) - 1]
    assert count <= MOST_POINTS or len(series.steps) > MOST_POINTS / 2


@pytest.mark.slow
def test_a_long_run_is_read_fast_in_bounded_memory(store: SessionStore) -> None:
    """The bar of a page that refreshes: 50,000 lines under a second, then only what is new."""
    names = [f"train/m{n}" for n in range(4)]
    values = dict.fromkeys(names, 1 / 7)
    rows = ({"phase": "cognate", "step": n, "time": n, "metrics": values} for n in range(50_000))
    many = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    append(metrics(store), many)
    began = time.process_time()
    view = RunView(store, "s1")
    assert time.process_time() - began < 2  # measured 0.4
    append(metrics(store), line(50_000, 1.0))
    began = time.process_time()
    view.refresh()
    assert time.process_time() - began < 0.2  # measured 0.002
    append(metrics(store), many)
    tracemalloc.start()
    view.refresh()
    grown, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 2e6 and peak < 4e6 < len(many)
    assert {len(s.values) <= MOST_POINTS + 1 for s in view.series.values()} == {True}
    assert view.series["cognate", names[0]].count == 100_000


DAMAGED = (
    b"rubbish\n",
    b"\xff\xfe\x00\n",
    b"[1, 2]\n",
    b"null\n",
    b"[" * 100_000 + b"\n",
    b'{"phase": "cognate", "metrics": []}\n',
    b'{"phase": "cognate", "metrics": {"loss": "1"}}\n',
    b'{"phase": "cognate", "metrics": {"loss": NaN, "x": Infinity}}\n',
    b'{"phase": "cognate", "metrics": {"loss": 1' + b"0" * 400 + b"}}\n",
    b'{"phase": "cognate", "crc": 7, "metrics": {"loss": 5}}\n',
    b'{"phase": "cognate", "crc": 7, "metrics": {"loss": NaN}}\n',
    b"\n",
)


def test_damaged_lines_are_stepped_over(store: SessionStore) -> None:
    append(metrics(store), line(0, 1), *DAMAGED, line(1, 2))
    append(metrics(store), b'{"phase": "cognate", "step": "x", "time": "y", "metrics": {"z": 1}}\n')
    events = store.path("s1") / "events.jsonl"
    append(events, *DAMAGED, b'{"event": ["run_started"], "phases": 3}\n')
    append(events, b'{"event": "phase_started", "time": "now", "phase": "cognate"}\n')
    view = RunView(store, "s1")
    assert loss(view).values == [1.0, 2.0]
    assert view.series["cognate", "z"].steps == [None]
    assert {name for _, name in view.series} == {"loss", "z"}
    view.refresh()
    assert loss(view).count == 2


def test_hostile_records_and_names(store: SessionStore, tmp_path: Path) -> None:
    """They are kept as text for the page to escape; none of them is a way out of the run."""
    name, phase = "<script>x</script>\x1b[2J", "../../etc"
    append(metrics(store), line(0, 1.0, name, phase))
    folder = store.path("s1") / "phase1_cognate"
    folder.mkdir()
    outputs = [{"name": n} for n in ("../../../etc", "/etc", "ok", "..", ".", "a/b")]
    record = {"status": "completed", "seconds": "x", "artifacts": [], "metrics": None}
    files.write_checked(folder / "state.json", {**record, "outputs": [*outputs, 3, {}]})
    view = RunView(store, "s1")
    assert view.series[phase, name].values == [1.0]
    shown = view.phase("cognate")
    assert shown.models == [folder / "ok"]
    assert (shown.seconds, shown.artifacts, shown.metrics, shown.headline) == (None, {}, {}, None)
    with pytest.raises(NotFound, match="no phase"):
        view.phase("nothing")
    with pytest.raises(Exception, match="not allowed"):
        RunView(store, "../s1")


@pytest.mark.parametrize("asked", [None, 3, {"phases": "cognate"}, {"phases": [[1], None]}])
def test_a_record_of_another_making(root: Path, asked: Any) -> None:
    SessionStore(root).create({}, "", session_id="s1", details={"asked": asked})
    assert RunView(SessionStore(root), "s1").phases == []


# -- statuses, shares and times --------------------------------------------------------------------


def begin(store: SessionStore, phase: str, **state: Any) -> Path:
    folder = store.path("s1") / f"phase{PHASES.index(phase) + 1}_{phase}"
    files.write_checked(folder / "state.json", {"phase": phase, "status": "running", **state})
    return folder


def test_the_statuses(store: SessionStore) -> None:
    begin(store, "cognate", status="completed", seconds=3)
    begin(store, "evomerge")
    view = RunView(store, "s1")

    def statuses() -> list[str]:
        view.refresh()
        return [view.status, *(phase.status for phase in view.phases)]

    assert statuses() == ["interrupted", "completed", "interrupted"] and not view.is_live
    assert [phase.share for phase in view.phases] == [1.0, None]
    assert view.phase("cognate").seconds == 3 and view.phase("cognate").number == 1
    with lock.exclusive(store.path("s1")):
        assert statuses() == ["running", "completed", "running"] and view.is_live
    for status in ("paused", "failed"):
        store.set_status("s1", status)
        assert statuses() == [status, "completed", status]
    store.set_status("s1", "completed")  # a phase that did not end cannot have completed
    assert statuses() == ["completed", "completed", "interrupted"]
    (store.path("s1") / "phase2_evomerge" / "state.json").write_text("{")
    assert statuses() == ["completed", "completed", "damaged"]  # it has begun, so it waits for none
    shutil.rmtree(store.path("s1") / "phase2_evomerge")
    assert statuses() == ["completed", "completed", "waiting"]
    shutil.rmtree(store.path("s1"))
    with pytest.raises(NotFound, match="is gone"):
        view.refresh()


def tell(store: SessionStore, **event: Any) -> None:
    append(store.path("s1") / "events.jsonl", json.dumps(event).encode() + b"\n")


def test_share_and_time_left(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(run_view.time, "time", lambda: now)
    begin(store, "cognate", status="completed")
    begin(store, "evomerge")
    tell(store, event="run_started", time=900.0, phases="cognate evomerge")
    tell(store, event="phase_started", time=980.0, phase="evomerge")
    with lock.exclusive(store.path("s1")):
        view = RunView(store, "s1")
        assert view.phase("evomerge").share is None  # the registry still has the phase before
        store.registry.update_session("s1", current_phase="evomerge", progress_percent=60)
        view.refresh()
        phase = view.phase("evomerge")
        assert (view.progress, phase.share) == (0.6, pytest.approx(0.2))
        assert phase.eta_s == pytest.approx(20 * 0.8 / 0.2)


def test_share_and_time_left_after_a_resume(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry counts the phases that the newest process was asked for; what was done before
    has no pace."""
    now = 1000.0
    monkeypatch.setattr(run_view.time, "time", lambda: now)
    begin(store, "cognate", status="completed")
    begin(store, "evomerge")
    tell(store, event="run_started", time=100.0, phases="cognate evomerge")
    tell(store, event="phase_started", time=200.0, phase="evomerge")
    tell(store, event="run_resumed", time=990.0, phases="evomerge")
    tell(store, event="phase_resumed", time=991.0, phase="evomerge")
    store.registry.update_session("s1", current_phase="evomerge", progress_percent=50)
    with lock.exclusive(store.path("s1")):
        view = RunView(store, "s1")
        assert view.phase("evomerge").share == 0.5 and view.phase("evomerge").eta_s is None
        now = 1010.0
        store.registry.update_session("s1", progress_percent=75)
        view.refresh()
        phase = view.phase("evomerge")
        assert phase.share == 0.75 and phase.eta_s == pytest.approx(10)
        store.registry.update_session("s1", progress_percent=40)  # as after a roll back
        view.refresh()
        assert view.phase("evomerge").eta_s is None


# -- whole runs ------------------------------------------------------------------------------------


def test_a_real_run(root: Path) -> None:
    assert toy_run(root)["success"]
    store = SessionStore(root)
    view = RunView(store, "r")
    (phase,) = view.phases
    assert (view.status, phase.status) == ("completed", "completed")
    assert (phase.name, phase.number) == ("toy", 0)
    assert view.progress == 1 and view.series["toy", "toy/loss"].count == 24
    assert phase.models == [store.path("r") / "toy" / "linear"] and phase.models[0].is_dir()
    assert view.config["phases"]["toy"]["steps"] == 24 and phase.purpose
    assert view.config_hash == toy_config(root).canonical_hash()
    (row,) = all_runs(store)
    assert (row["session_id"], row["status"]) == ("r", "completed")


def test_runs_without_a_registry(store: SessionStore, root: Path) -> None:
    """Copied in, or its registry lost: what there is, is shown, and looking creates nothing."""
    assert toy_run(root)["success"]
    (root / "sessions" / "other").mkdir()
    shutil.rmtree(root / "registry")
    fresh = SessionStore(root)
    rows = all_runs(fresh)
    assert [(r["session_id"], r["status"]) for r in rows] == [
        ("r", "completed"),
        ("s1", "interrupted"),
    ]
    assert rows[0]["progress_percent"] is None and rows[0]["end_time"] > rows[0]["start_time"]
    view = RunView(fresh, "r")
    assert view.status == "completed" and view.progress is None
    assert view.phase("toy").share == 1.0
    assert Catalog(fresh).rows() == []
    assert not (root / "registry").exists()
    assert all_runs(SessionStore(root / "nothing")) == []


def test_a_damaged_registry_hides_no_run(store: SessionStore, root: Path) -> None:
    (root / "registry" / "model_registry.db").write_bytes(b"rubbish" * 1000)
    assert [row["session_id"] for row in all_runs(SessionStore(root))] == ["s1"]
    assert RunView(SessionStore(root), "s1").status == "interrupted"


def test_a_model_is_named_by_the_folder_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = llama(tmp_path / "mine")
    monkeypatch.chdir(place)
    for ref in (".", "./", str(place)):
        assert Catalog(SessionStore(tmp_path / "s"), [ref]).find("mine").samefile(place)
    with pytest.raises(ConfigError, match="another model named mine"):
        Catalog(SessionStore(tmp_path / "s"), [".", str(place)])
    monkeypatch.chdir(place.rename(tmp_path / "an odd one"))
    with pytest.raises(ConfigError, match="'an odd one' cannot be asked for by name"):
        Catalog(SessionStore(tmp_path / "s"), ["."])
