"""Tracking: files that are the truth, views that can fail without harm."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from agent_forge.cli.sync import SPACES
from agent_forge.config.settings import TrackingSettings
from agent_forge.errors import DiskFull
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore, read_session
from agent_forge.track import progress as progress_module
from agent_forge.track import wandb_sink
from agent_forge.track.journal import Journal, read_lines
from agent_forge.track.logs import logging_to
from agent_forge.track.progress import MODES, clock, describe, eta_s, make_progress
from agent_forge.track.sync import replay, truth_id
from agent_forge.track.tracker import METRICS_FILE, Tracker, last_metrics, sample, sampling
from agent_forge.track.wandb_sink import WandbSink, tables_of
from tests.support.command_line import Forge
from tests.support.fake_trackio import FakeTrackio
from tests.support.fake_wandb import FakeWandb
from tests.support.polling import until


def lines(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_lines(path)]


def test_a_journal_grows_and_a_phase_takes_its_own_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "x.jsonl")
    journal.sync()
    assert journal.keep("a", 5) == 0
    for n, phase in enumerate("aabab"):
        journal.write({"n": n, "phase": phase})
    journal.sync()
    assert journal.keep("a", 2) == 2  # the third of a goes, b stays as it is
    assert [r["n"] for r in lines(journal.path)] == [0, 1, 2, 4]
    assert journal.keep("a", 9) == 2 and journal.keep("c", 0) == 0
    journal.write({"n": 5, "phase": "a"})
    assert [r["n"] for r in lines(journal.path)] == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="JSON compliant"):
        journal.write({"n": float("nan")})


def test_half_a_line_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')
    assert lines(path) == [{"n": 1}]
    Journal(path).write({"n": 3})
    assert lines(path) == [{"n": 1}, {"n": 3}]
    path.write_bytes(b'{"torn')
    Journal(path)
    assert path.read_bytes() == b"" and lines(tmp_path / "none") == []


def test_a_reader_comes_back_for_more_and_steps_over_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n":1}\nrubbish\n[]\n{"n":2}\n')
    *_, (offset, last) = read_lines(path)
    assert last == {"n": 2} and list(read_lines(path, offset)) == []
    with path.open("ab") as more:
        more.write(b'{"n":3}\n')
    assert [r for _, r in read_lines(path, offset)] == [{"n": 3}]


def test_the_tracker_records_and_passes_on(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    tracker = Tracker(tmp_path, listeners=[heard.append])
    tracker.log("toy", 1, {"toy/loss": 0.5})
    tracker.log("toy", 2, {"toy/loss": 0.25})
    tracker.event("phase_started", phase="toy")
    tracker.tell({"event": "step", "step": 1})
    assert [r["event"] for r in heard] == ["phase_started", "step"]
    tracker.event("odd", path=tmp_path)
    assert lines(tmp_path / "events.jsonl").pop()["path"] == str(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    tracker.event("phase_started", phase="toy")
    assert [r["event"] for r in lines(tmp_path / "events.jsonl")] == ["phase_started"]
    assert last_metrics(tmp_path) == {"toy/loss": {"value": 0.25, "step": 2, "phase": "toy"}}


def test_a_view_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def broken(record: dict[str, Any]) -> None:
        raise BrokenPipeError("nobody reads any more")

    tracker = Tracker(tmp_path, listeners=[broken, lambda r: heard.append(r["event"])])
    tracker.event("one")
    tracker.event("two")
    assert heard == ["one", "two"] and caplog.text.count("is left out") == 1


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl")

    def write(n: int) -> None:
        for i in range(50):
            journal.write({"thread": n, "i": i, "text": "x" * 200})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(journal.path)) == 200


# -- the sampler ----------------------------------------------------------------------------------


def test_the_sampler_measures_this_machine(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    journal = tmp_path / "metrics.jsonl"
    with sampling(tracker, tmp_path, 0.02):
        until(lambda: journal.exists() and len(lines(journal)) >= 2)
    found = last_metrics(tmp_path)
    assert 1 < found["system/process_rss_mb"]["value"] < psutil.virtual_memory().total / 1e6
    assert found["system/disk_free_mb"]["value"] > 0
    assert found["system/process_rss_mb"]["step"] is None
    count = len(lines(journal))
    time.sleep(0.1)
    assert len(lines(journal)) == count


def test_the_sampler_can_be_off_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(tmp_path)
    with sampling(tracker, tmp_path, 0):
        time.sleep(0.05)
    assert not (tmp_path / "metrics.jsonl").exists()

    calls: list[Any] = []

    def full(*values: Any) -> None:
        calls.append(values)
        raise DiskFull(tmp_path, 1, 0)

    monkeypatch.setattr(tracker, "log", full)
    with sampling(tracker, tmp_path, 0.01):
        until(lambda: len(calls) > 2)
        assert "sampler" in {thread.name for thread in threading.enumerate()}


def test_a_gpu_is_sampled_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (10**9, 4 * 10**9))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert sample(psutil.Process(), tmp_path)["system/gpu_memory_used_mb"] == 3000


# -- logs -----------------------------------------------------------------------------------------


def test_both_kinds_of_loggers_arrive_as_json(tmp_path: Path) -> None:
    with logging_to(tmp_path, "INFO"):
        structlog.stdlib.get_logger("agent_forge.a").info("hello", step=3)
        logging.getLogger("agent_forge.b").warning("old %s", "style")
        logging.getLogger("agent_forge.b").debug("too quiet")
        logging.getLogger("someone.else").warning("not ours")
    logging.getLogger("agent_forge.b").warning("after the run")
    first, second = lines(tmp_path / "log.jsonl")
    assert (first["event"], first["step"], first["logger"]) == ("hello", 3, "agent_forge.a")
    assert (second["event"], second["level"]) == ("old style", "warning")


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with logging_to(tmp_path):
        logging.getLogger("agent_forge").warning("%d is no number", "x")
    (tmp_path / "log.jsonl").unlink(missing_ok=True)
    (tmp_path / "log.jsonl").mkdir()
    with logging_to(tmp_path):
        logging.getLogger("agent_forge").warning("x")


# -- progress -------------------------------------------------------------------------------------

LOOP = {"event": "loop", "name": "toy", "first": 10, "total": 100}


def step(n: int) -> dict[str, Any]:
    return {"event": "step", "phase": "toy", "stage": "main", "step": n, "total": 100}


def test_the_time_left_follows_the_pace_of_this_process() -> None:
    assert eta_s(5, 0, 90) is None and eta_s(30, 30, 60) == 60
    assert [clock(s) for s in (None, 0, 59.6, 3723)] == ["-", "0:00", "1:00", "1:02:03"]


def test_plain_lines_come_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    out = io.StringIO()
    with make_progress("plain", out) as display:
        display(LOOP)
        for n in range(11, 41):
            now = float(n - 10)
            display(step(n))
        display({"event": "phase_completed", "phase": "toy", "seconds": 1.5, "time": 0})
    assert out.getvalue().splitlines() == [
        "toy step 20/100, ETA 1:20",
        "toy step 30/100, ETA 1:10",
        "toy step 40/100, ETA 1:00",
        "toy: phase completed (seconds 1.5)",
    ]


def test_the_time_left_is_that_of_the_whole_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    out = io.StringIO()
    with make_progress("json", out) as display:
        display({"event": "phase_started", "phase": "toy"})
        now = 100.0  # reading data takes its time once, not at every step
        display({**LOOP, "phase": "toy", "name": "toy a", "first": 100})  # done before a kill
        display({**LOOP, "phase": "toy", "name": "toy b", "first": 50})
        now = 120.0
        display({**step(60), "stage": "b", "done": 160, "left": 240})
        assert json.loads(out.getvalue().splitlines()[-1])["eta_s"] == 20 * 240 / 10
        now = 130.0
        display({**LOOP, "phase": "other", "name": "other"})
        now = 135.0
        display({**step(20), "phase": "other"})
    assert json.loads(out.getvalue().splitlines()[-1])["eta_s"] == 5 * 80 / 10


def test_a_merge_is_told_in_bytes_and_an_evolution_as_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    out, bars = io.StringIO(), io.StringIO()
    generation = {"event": "generation", "generation": 0, "generations": 3, "left": 3, "best": 0.5}
    generation |= {"mean": None, "diversity": None, "cache_hits": 1, "origin": "combo 2"}
    generation |= {"scores": {"maths": 0.25, "code": 1.5}, "elapsed_s": 90.0}
    known = {**generation, "tokens_per_s": 1234.0, "eta_s": 120.0, "budget_s": 300.0}
    candidate = {"event": "candidate", "key": "0123456789", "problem": None, "seconds": 1.25}
    with make_progress("plain", out) as plain, make_progress("bars", bars) as drawn:
        for display in (plain, drawn):
            now = 0.0
            display({"event": "loop", "name": "merge", "first": 0})
            now = 2.0
            for done in (10**6, 2 * 10**6):
                told = {"event": "step", "phase": "merge", "unit": "bytes", "step": done}
                display({**told, "total": 2 * 10**6})
            for record in (candidate, {**candidate, "problem": "NaN"}, known, generation):
                display(record)
            now = 14.0
            display({"event": "begun"})
            display(candidate)
            display({"event": "verdict", "model": "champion", "number": 2, "models": 7})
    assert out.getvalue().splitlines() == [
        "merge 2.0 MB of 2.0 MB, 1.0 MB/s, ETA 0:00",
        "a candidate takes about 1.2 s",
        "  candidate 01234567 failed: NaN",
        "  gen    best    mean     maths      code  tokens/s             time      ETA  champion",
        "    0  0.5000     nan    0.2500    1.5000     1,234     1:30 of 5:00     2:00  combo 2",
        "    0  0.5000     nan    0.2500    1.5000         -             1:30        -  combo 2",
        "  3 candidates measured",
        "measuring champion on unseen items (2 of 7)",
    ]
    assert "2.0 MB of 2.0 MB" in bars.getvalue() and "combo 2" in bars.getvalue()


def test_steps_end_the_work_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that would be shown as going on, and its line would keep those of the steps away."""
    monkeypatch.setattr(progress_module, "EVERY_S", 0.02)
    monkeypatch.setattr(progress_module, "BEAT_S", 0.005)
    out = io.StringIO()
    with make_progress("plain", out) as display:
        display({"event": "work", "what": "the holdout", "expected_s": 1.0})
        until(lambda: "the holdout: 0:00" in out.getvalue())
        display({**step(1), "phase": "heal"})
        before = out.getvalue().count("the holdout")
        time.sleep(0.06)
        display({**step(2), "phase": "heal"})
    assert out.getvalue().count("the holdout") == before and "heal step 2/" in out.getvalue()


@pytest.mark.parametrize("mode", ["plain", "bars"])
def test_long_work_is_shown_to_go_on(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Also where nothing is told meanwhile; and once how long it takes to stop."""
    monkeypatch.setattr(progress_module, "EVERY_S", 0.02)
    monkeypatch.setattr(progress_module, "BEAT_S", 0.005)
    out = io.StringIO()
    with make_progress(mode, out) as display:
        display({**LOOP, "phase": "toy", "name": "toy"})
        display({**step(1), "phase": "toy"})
        display({"event": "work", "what": "gradient 3", "expected_s": 95.0})
        display({"event": "tokens", "done": 1200})
        if mode == "plain":  # bars are drawn on a terminal, and elsewhere at the end
            until(lambda: "gradient 3: 0:00 of about 1:35, 1,200 tokens" in out.getvalue())
        display.ask_stop()
        stops = "finishing the present candidate, about 95 s; again to leave at once"
        until(lambda: stops in out.getvalue())
        display({"event": "verdict", "model": "base", "expected_s": None})
        until(lambda: mode == "bars" or "base on unseen items: 0:00" in out.getvalue())
        time.sleep(0.05)
    assert "base on unseen items: 0:00" in out.getvalue()
    assert out.getvalue().count("again to leave") == 1
    before = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == before  # it ended with the display


def test_json_lines_are_json() -> None:
    out = io.StringIO()
    with make_progress("json", out) as display:
        for record in (LOOP, step(20), {"event": "x", "path": Path("p")}):
            display(record)
    parsed = [json.loads(line) for line in out.getvalue().splitlines()]
    assert parsed[1]["step"] == 20 and parsed[1]["eta_s"] >= 0 and parsed[2]["path"] == "p"


def test_bars_are_drawn() -> None:
    out = io.StringIO()
    with make_progress("bars", out) as display:
        for record in (LOOP, step(50), {"event": "run_completed", "session": "[s1]"}):
            display(record)
    assert "50/100" in out.getvalue() and "run completed (session [s1])" in out.getvalue()


def test_the_display_fits_the_place() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    kinds = {mode: type(make_progress(mode, Terminal())).__name__ for mode in MODES}
    assert kinds["auto"] == kinds["bars"] == "BarProgress"
    assert type(make_progress("auto", io.StringIO())).__name__ == "PlainProgress"
    out = io.StringIO()
    with make_progress("none", out) as display:
        display(LOOP)
        display(step(1))
    assert out.getvalue() == ""
    assert describe({"event": "run_started"}) == "run started"
    handoff = {"event": "handoff", "phase": "evomerge", "passed": True, "warnings": []}
    handoff["measured"] = {"fitness[0]": 0.77453905, "num_models": 3}
    told = "evomerge: handoff (passed True, measured fitness[0] 0.774539, num_models 3)"
    assert describe(handoff) == told
    assert describe({"event": "x", "warnings": ["a", "b"]}) == "x (warnings a; b)"


# -- W&B ------------------------------------------------------------------------------------------


def mirror(tmp_path: Path, patience_s: float = 5) -> WandbSink:
    tracking = TrackingSettings(wandb_project="p", wandb_timeout_s=patience_s)
    return WandbSink(tmp_path / "s1", tracking, {"a": 1})


def drive(sink: WandbSink, tmp_path: Path) -> float:
    began = time.monotonic()
    for phase in ("toy", "edge"):
        sink.begin(phase)
        sink.log(phase, 1, {"toy/loss": 0.5})
        sink.artifact("m1", tmp_path)
        sink.end()
    sink.close()
    return time.monotonic() - began


def test_one_run_a_phase_grouped_by_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    drive(mirror(tmp_path), tmp_path)
    inits = [call[1] for call in wandb.calls if call[0] == "init"]
    assert [i["name"] for i in inits] == ["toy_s1", "edge_s1"]
    assert {(i["group"], i["project"], i["mode"]) for i in inits} == {("s1", "p", "offline")}
    kinds = [call[0] for call in wandb.calls]
    assert kinds == ["init", "log", "reference", "artifact", "finish"] * 2


@pytest.mark.parametrize("place", ["wandb", ".wandb", "s1/wandb"])
def test_a_folder_does_not_send_the_key_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """wandb obeys the settings in the folder that it is started in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(parents=True)
    file, said = tmp_path / place / "settings", "[default]\nentity = me\nproject = p\n"
    for offline, more in ((True, "base_url = http://x\n"), (False, ""), (False, "base_url = x\n")):
        file.write_text(said + more)
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        tracking = TrackingSettings(wandb_project="p", wandb_offline=offline)
        drive(WandbSink(tmp_path / "s1", tracking, {}), tmp_path)
        refused = bool(more) and not offline
        assert bool(wandb.calls) != refused and ("sets base_url" in caplog.text) == refused


def test_git_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of a repository may name programs that git runs."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")
    drive(mirror(tmp_path), tmp_path)
    begun = [call[1]["settings"] for call in wandb.calls if call[0] == "init"]
    assert begun and all(own["disable_git"] and not own["save_code"] for own in begun)


@pytest.mark.parametrize("trouble", ["init", "log", "artifact", "finish", "missing"])
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_whatever_wandb_does_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    how: str,
) -> None:
    wandb = None if trouble == "missing" else FakeWandb(trouble, how)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    seconds = drive(mirror(tmp_path, patience_s=0.05), tmp_path)
    assert seconds < 15  # each of them would take 30
    assert len([r for r in caplog.records if "W&B is left out" in r.message]) == 1
    if wandb is not None:
        wandb.released.set()


def test_offline_the_wait_is_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    sink = mirror(tmp_path, patience_s=10)
    began = sink._began
    for elapsed, patience in ((1, 5), (140, 7), (10_000, 10)):
        monkeypatch.setattr(wandb_sink.time, "monotonic", lambda e=elapsed: began + e)
        assert sink._patience() == pytest.approx(patience)
    sink._offline = False
    monkeypatch.setattr(wandb_sink.time, "monotonic", lambda: began)
    assert sink._patience() == 10
    monkeypatch.undo()


def test_a_queue_that_overflows_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = FakeWandb("init", "hang")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb_sink, "MAX_WAITING", 5)
    sink = mirror(tmp_path)
    sink.begin("toy")
    until(sink._calls.empty)  # it hangs in this W&B: later, it would find that of another test
    for n in range(20):
        sink.log("toy", n, {})
    assert "are waiting" in caplog.text
    wandb.released.set()


def test_the_thread_ends_however_fast_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, hand_over = mirror(tmp_path), WandbSink._hand_over

    def and_wait(self: WandbSink, call: Any) -> None:
        hand_over(self, call)
        self._calls.join()

    monkeypatch.setattr(WandbSink, "_hand_over", and_wait)
    sink.close()
    until(lambda: not sink._thread.is_alive())


# -- tables, and trackio ---------------------------------------------------------------------------


def test_the_tables_among_what_a_phase_recorded() -> None:
    said = [{"prompt": "a", "text": "b"}, {"prompt": "c", "more": 1}]
    other = {
        "summary": "x",
        "list": [1, 2],
        "uneven": [["a"], ["b", "c"]],
        "none": [],
        "head": [["a"]],
    }
    found = dict(tables_of({"samples": said, "tables": [[["m", "n"], ["x", 1]]], **other}))
    assert found == {
        "samples": [["prompt", "text", "more"], ["a", "b", None], ["c", None, 1]],
        "tables_0": [["m", "n"], ["x", 1]],
    }


def test_a_phase_with_tables_and_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    about, sink = tmp_path / "config.yaml", mirror(tmp_path)
    about.write_text("preset: toy\n")
    sink.begin("toy", about)
    sink.tables({"thoughts": [["", "n", "mixed"], ["a", 1, 2], ["b", None, "x"]]})
    sink.end()
    sink.close()
    kinds = [call[0] for call in wandb.calls]
    assert kinds == ["init", "file", "artifact", "log", "finish"]
    assert wandb.calls[1][1:] == ("config.s1", "config", str(about))
    table = ("table", ["-", "n", "mixed"], [["a", 1.0, "2"], ["b", None, "x"]])
    assert wandb.calls[3][1] == {"thoughts": table}  # W&B wants one type a column


def run_of_a_phase(root: Path) -> Path:
    """A run directory with metrics, also damaged ones, events and the record of a phase."""
    asked = {"details": {"config_hash": "abc", "created_at": 100.0}, "session_id": "s1"}
    folder = SessionStore(root).create({"tracking": {"wandb_project": "p"}}, "a: 1\n", **asked)
    tracker = Tracker(folder)
    tracker.event("run_started", session="s1")
    for step in (1, 2):
        tracker.log("cognate", step, {"train/loss": 1 / step, "cognate/loss": 2.0})
    tracker.log("system", None, {"system/cpu_percent": 50.0})
    with tracker.metrics.path.open("a") as more:
        more.write('rubbish\n{"phase": "cognate", "metrics": 3, "time": 1}\n{"phase": "toy"}\n')
    headline = {"measure": "accuracy", "before": None, "after": 0.5, "verdict": "better"}
    artifacts = {"headline": headline, "thoughts": [{"prompt": "p", "thought": "t"}]}
    outputs = [{"name": name} for name in ("m1", "../../out", "gone")]
    state = {"status": "completed", "seconds": 3.5, "artifacts": artifacts, "outputs": outputs}
    (folder / "phase1_cognate" / "m1").mkdir(parents=True)
    files.write_checked(folder / "phase1_cognate" / "state.json", state)
    return folder


def test_a_run_goes_to_trackio(tmp_path: Path) -> None:
    """A run is replayed through the same class, with another library."""
    folder, library = run_of_a_phase(tmp_path / "storage"), FakeTrackio()
    for _ in range(2):  # it has no ids: the same run is there twice, under one name
        told = replay(folder, read_session(folder), TrackingSettings(wandb_project="p"), library)
    assert told["sent"] == 3 and told["place"] is None
    run = library.runs[0]
    assert [r.settings["name"] for r in library.runs] == [told["name"]] * 2
    assert told["name"] == f"s1_{truth_id(folder)}"
    assert (run.settings["project"], run.settings["group"], run.finished) == ("p", "s1", True)
    assert run.settings["config"]["config_hash"] == "abc"
    first, second, third, *tables = run.logged
    assert first.pop("seconds") <= second.pop("seconds") <= third.pop("seconds")
    assert first == {"cognate/step": 1, "cognate/train/loss": 1.0, "cognate/loss": 2.0}
    assert second == {"cognate/step": 2, "cognate/train/loss": 0.5, "cognate/loss": 2.0}
    assert third == {"system/cpu_percent": 50.0}
    found = {name: table.data for row in tables for name, table in row.items()}
    assert [e["event"] for e in found["events"]] == ["run started (session s1)"]
    (phase,) = found["phases"]
    assert (phase["phase"], phase["seconds"], phase["after"]) == ("cognate", 3.5, 0.5)
    assert phase["before"] is None and phase["says"] == "better"
    assert found["cognate/thoughts"] == [{"prompt": "p", "thought": "t"}]
    assert [(a.name, a.type) for a in run.artifacts] == [("config.s1", "config")]


def test_models_are_named_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, wandb = run_of_a_phase(tmp_path / "storage"), FakeWandb()
    replay(folder, read_session(folder), TrackingSettings(), wandb)
    (init,) = [call[1] for call in wandb.calls if call[0] == "init"]
    assert (init["id"], init["mode"], init["dir"]) == (truth_id(folder), "offline", str(folder))
    (place,) = [call[1:] for call in wandb.calls if call[0] == "reference"]
    model = folder / "phase1_cognate" / "m1"
    assert place == ("cognate.m1.s1", model.resolve().as_uri())  # not what lies outside
    before = truth_id(folder)
    Tracker(folder).event("run_resumed")
    assert truth_id(folder) != before


def test_a_replay_that_fails_says_so(tmp_path: Path) -> None:
    """Other than beside a run, where an outage is a warning."""
    folder, wandb = run_of_a_phase(tmp_path / "storage"), FakeWandb("log", "raise")
    with pytest.raises(RuntimeError, match="no answer"):
        replay(folder, read_session(folder), TrackingSettings(), wandb)
    assert wandb.calls[-1][0] == "finish"


def test_a_run_without_metrics_is_sent_too(
    forge: Forge, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_of_a_phase(root) / METRICS_FILE).unlink()
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    assert "0 lines of metrics" in forge("sync s1").err


def test_forge_sync(forge: Forge, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of_a_phase(root)
    library, wandb = FakeTrackio(), FakeWandb()
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in SPACES:
        monkeypatch.delenv(name, raising=False)
    result = forge("sync s1 --to trackio")
    assert result.code == 0 and result.out.startswith("s1_") and "3 lines" in result.err
    assert library.runs[0].settings["project"] == "p"
    assert forge("sync s1 --online --json").document["sent"] == 3
    assert [call[1]["mode"] for call in wandb.calls if call[0] == "init"] == ["online"]
    refused = {
        "sync nobody": "no session 'nobody'",
        "sync ../s1": "not allowed",
        "sync s1 --to mlflow": "wandb or trackio",
        "sync s1 --to trackio --online": "neither is set",
    }
    for line, said in refused.items():
        assert (result := forge(line)).code == 2 and said in result.err
    monkeypatch.setenv(SPACES[0], "somebody/space")  # it would send there on its own
    assert "--online is not given" in forge("sync s1 --to trackio").err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "wandb is not installed" in forge("sync s1").err
    assert len(library.runs) == 1
