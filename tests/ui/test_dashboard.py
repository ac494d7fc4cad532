"""The pages of the dashboard: on no run, a finished, a running, a failed and a damaged one; what
they show is in the run's files; what they are told is done by processes of their own."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import streamlit as st

from agent_forge.infer.scheduler import QueueFull
from agent_forge.infer.tools import Toolbox, builtin_tools
from agent_forge.pipeline import jobs
from agent_forge.pipeline.run_view import MOST_POINTS, RunView
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore
from agent_forge.track.progress import clock, size
from agent_forge.ui.dashboard import comparison, configuration, playground, state, system
from agent_forge.ui.theme import cell
from tests.support.dashboard import PAGES, Browser, numbers, recorded, values
from tests.support.serving import MODEL, scripted, small_model

HOSTILE = "<img src=x onerror=alert(1)>![a](http://evil.example/a.png)[b](javascript:c) $x$ :red[d]"
RUN_PAGES = [page for page in PAGES if page not in ("configuration", "system")]


@pytest.fixture
def browser(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    yield Browser(monkeypatch, root)
    st.cache_resource.clear()


@pytest.fixture
def finished(root: Path) -> SessionStore:
    return recorded(root)


# -- every page, whatever there is -----------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_nothing_stored(browser: Browser, root: Path, page: str) -> None:
    shown = browser.open(page)
    assert not shown.error and shown.title[0].value
    assert not root.exists(), "looking creates nothing"
    if page in RUN_PAGES:
        assert shown.info or page == "comparison"


@pytest.mark.parametrize("page", PAGES)
def test_a_finished_run(browser: Browser, finished: SessionStore, page: str) -> None:
    before = snapshot(finished.path("done"))
    shown = browser.open(page)
    assert not shown.error, browser.texts()
    assert shown.sidebar.selectbox(key="run").value == "done"
    assert snapshot(finished.path("done")) == before, "a page writes nothing into a run"


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("status", ["running", "failed", "damaged", "strange"])
def test_runs_that_are_not_finished(browser: Browser, root: Path, status: str, page: str) -> None:
    store = recorded(root, status=status if status in ("running", "failed") else "completed")
    folder = store.path("done")
    if status == "damaged":
        (folder / "session.json").write_text("{")
        (folder / "metrics.jsonl").write_bytes(b"\xff\x00rubbish\n")
        shutil.rmtree(root / "registry")
    if status == "strange":
        for place in folder.glob("phase*/state.json"):
            artifacts = {"headline": {"before": {}, "after": "x"}, "tables": [[["a"], 3]]}
            record = {"status": "completed", "artifacts": artifacts, "inputs": [3], "seconds": "x"}
            files.write_checked(place, record)
    if status == "running":
        with lock.exclusive(folder):
            shown = browser.open(page)
        assert not shown.error and "running" in browser.texts()[0] + str(browser.texts())
    else:
        shown = browser.open(page)
    if status == "failed" and page == "overview":
        assert shown.error[0].value == "The run failed" and "not finite" in shown.code[0].value
    if status == "damaged" and page in ("overview", "phases", "evolution"):
        assert not shown.sidebar.selectbox(key="run").options and shown.info


def test_a_run_with_a_damaged_record_beside_a_good_one(browser: Browser, root: Path) -> None:
    recorded(root, "bad")
    recorded(root, "good")
    browser.open("overview", "bad")
    (root / "sessions" / "bad" / "session.json").write_text("{")
    time.sleep(state.FRESH_S)
    shown = browser.open("overview")
    assert shown.error[0].value == "This cannot be shown" and "damaged" in shown.code[0].value
    shutil.rmtree(root / "sessions" / "bad")
    shown = browser.open("overview", "good")
    assert not shown.error and shown.metric


# -- what is shown is in the files -----------------------------------------------------------------


def explained(root: Path, session: str) -> Callable[[str], bool]:
    """True for a number, as it is written, that stands in the files of a run, or is one of them as
    people read it: a time, a size, a share, a count of lines."""
    folder, records, told = root / "sessions" / session, list[Any](), set[str]()
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".yaml"):
            text = path.read_text()
            records += [*values(json.loads(text))] if path.suffix == ".json" else [text]
        elif path.suffix == ".jsonl":
            records += [
                v for line in path.read_text().splitlines() for v in values(json.loads(line))
            ]
            records.append(len(path.read_text().splitlines()))
        if path.is_file():
            records.append(path.stat().st_size)
    row = RunView(SessionStore(root), session)._row
    models = SessionStore(root).registry.search_models()
    records += [*values(row), *values([dict(model) for model in models]), len(models)]
    for value in records:
        forms = [str(value)]
        if isinstance(value, int | float):
            forms += [
                cell(float(value)),
                f"{value:,}",
                f"{value:.1f}",
                f"{value:.0f}",
                f"{value:.0%}",
            ]
            forms += [f"{value / 100:.0%}", size(value), size(value * 1e6), f"{value:g}"]
            moment = state.moment(value)
            forms += [clock(value)] if abs(value) < 1e7 else [moment, moment[:16]]
        told.update(number for form in forms for number in numbers(form))
    return lambda number: number in told


ALLOWED = {*map(str, range(1, 9)), "100"}  # the numbers of phases; a finished phase is 100 % done


@pytest.mark.parametrize("page", [p for p in RUN_PAGES if p not in ("comparison", "playground")])
def test_every_number_is_in_the_files(browser: Browser, finished: SessionStore, page: str) -> None:
    browser.open(page)
    known = explained(finished.root, "done")
    found = {number for text in browser.texts() for number in numbers(text)}
    whole = f"{sum(71.3 * n for n in range(1, 5)):.0f}"  # seconds of work, of all phases
    strange = {number for number in found - ALLOWED - {whole} if not known(number)}
    assert len(found) > 5 and strange == set()
    measured = {v for _, v in series(finished, "done")}
    for figure in browser.figures():
        drawn = [v for trace in figure["data"] for v in trace.get("y") or [] if is_number(v)]
        if page == "evolution" and drawn and "generation" in str(figure["layout"]["xaxis"]):
            assert set(drawn) <= measured


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def series(store: SessionStore, session: str) -> Iterator[tuple[str, float]]:
    for line in (store.path(session) / "metrics.jsonl").read_text().splitlines():
        yield from json.loads(line)["metrics"].items()


def test_a_number_of_nowhere_is_noticed(
    browser: Browser, finished: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "cell", lambda *_: "0.98765")
    browser.open("overview")
    known = explained(finished.root, "done")
    assert any("0.98765" in text for text in browser.texts()) and not known("0.98765")


def test_what_was_not_measured_is_a_dash(browser: Browser, root: Path) -> None:
    SessionStore(root).create({}, "", session_id="new", details={"asked": {"phases": ["cognate"]}})
    shown = browser.open("overview")
    assert [metric.value for metric in shown.metric] == ["-"]
    shown = browser.open("phases")
    assert {metric.value for metric in shown.metric} == {"-"}


def test_it_goes_on_reading(browser: Browser, root: Path) -> None:
    store = recorded(root, status="running")
    record = files.read_checked(store.path("done") / "phase3_quietstar" / "state.json")
    del record["artifacts"]
    place = store.path("done") / "phase3_quietstar" / "state.json"
    files.write_checked(place, {**record, "status": "running"})
    shown = browser.open("overview")
    assert [m.value for m in shown.metric if m.label.startswith("loss")] == ["3.079"]
    line = {"phase": "quietstar", "step": 41, "time": 1, "metrics": {"a/train/loss_avg_100": 0.77}}
    with (store.path("done") / "metrics.jsonl").open("a") as writer:
        writer.write(json.dumps(line) + "\n")
    time.sleep(state.FRESH_S)
    shown = browser.open("overview")
    assert [m.value for m in shown.metric if m.label.startswith("loss")] == ["0.77"]


def test_figures_are_drawn_again_only_for_what_is_new(finished: SessionStore) -> None:
    run = state.OpenRun(finished, "done")
    first = run.figures("cognate", "light")
    assert run.figures("cognate", "light") is first
    assert run.figures("cognate", "dark") is not first
    line = {"phase": "cognate", "step": 41, "time": 1, "metrics": {"a/train/loss_avg_100": 0.77}}
    with (finished.path("done") / "metrics.jsonl").open("a") as writer:
        writer.write(json.dumps(line) + "\n")
    run.view.refresh()
    again = run.figures("cognate", "light")
    assert again is not first and again[0][1].data[0].y[-1] == 0.77


def test_a_run_is_read_by_one_at_a_time(
    finished: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two browsers show one run: neither sees it change while it draws."""
    monkeypatch.setattr(state, "FRESH_S", -1.0)
    run, at_once, most = state.OpenRun(finished, "done"), 0, 0

    def refresh() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1

    monkeypatch.setattr(run.view, "refresh", refresh)

    def look() -> None:
        for _ in range(3):
            with run.reading():
                pass

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


# -- names and texts of others ---------------------------------------------------------------------


def test_hostile_texts_are_plain(browser: Browser, finished: SessionStore) -> None:
    """They stand in texts, code, tables and choices alone, which parse no Markdown and no HTML."""
    folder = finished.path("done")
    (folder / "phase1_cognate" / "model" / "README.md").write_text(HOSTILE)
    place = folder / "phase4_bitnet" / "state.json"
    headline = {"measure": HOSTILE, "before": 1, "after": 2, "verdict": HOSTILE}
    artifacts = {
        "headline": headline,
        "tables": [[[HOSTILE], [HOSTILE]], [[HOSTILE, HOSTILE], [1, 2]]],
    }
    record = {**files.read_checked(place), "artifacts": artifacts, "metrics": {HOSTILE: HOSTILE}}
    files.write_checked(place, {k: v for k, v in record.items() if k != "checksum"})
    line = {"phase": "bitnet", "step": 1, "time": 1, "metrics": {HOSTILE: 1, f"{HOSTILE}/loss": 2}}
    with (folder / "metrics.jsonl").open("a") as writer:
        writer.write(json.dumps(line) + "\n")
    with (folder / "events.jsonl").open("a") as writer:
        writer.write(json.dumps({"event": HOSTILE, "phase": HOSTILE, "time": 1}) + "\n")
    seen = 0
    for page in PAGES:
        shown = browser.open(page)
        if page == "phases":
            shown.selectbox(key="phase-done").select("bitnet").run()
            shown.selectbox(key="metric-done-bitnet").select(HOSTILE).run()
        if page == "models":
            shown.selectbox(key="model").select("cognate.model.done").run()
        assert not shown.exception
        parsed = [*shown.markdown, *shown.caption, *shown.error, *shown.warning, *shown.info]
        for text in [*(e.value for e in parsed), *(m.label + m.value for m in shown.metric)]:
            assert "evil" not in text and "onerror" not in text
        assert all("onerror" not in tab.label for tab in shown.tabs)
        seen += sum("evil" in text for text in browser.texts())
        assert all("<img" not in json.dumps(figure) for figure in browser.figures())
    assert seen > 5


def test_no_page_asks_for_html_of_others() -> None:
    for path in Path(state.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "unsafe_allow" not in text and "st.table" not in text
        assert re.findall(r"st\.html\((.*?)\)\n", text) in ([], ['f"<style>{STYLE}</style>"'])
        assert ":material/" not in text or path.name != "app.py"


# -- choosing, comparing ---------------------------------------------------------------------------


def test_a_metric_is_drawn(browser: Browser, finished: SessionStore) -> None:
    shown = browser.open("phases")
    shown.selectbox(key="phase-done").select("cognate").run()
    shown.selectbox(key="metric-done-cognate").select("a/train/loss_avg_100").run()
    chosen = browser.figures()[0]
    assert chosen["data"][0]["y"] == [v for n, v in series(finished, "done") if "loss" in n][:40]
    assert "n = 40 points" in json.dumps(chosen["layout"])


def test_models_are_found_and_compared(browser: Browser, finished: SessionStore) -> None:
    shown = browser.open("models")
    assert len(shown.dataframe[0].value) == 4
    shown.text_input(key="model-search").set_value("BIT").run()
    assert list(shown.dataframe[0].value["model"]) == ["bitnet.model.done"]
    shown.text_input(key="model-search").set_value("").run()
    shown.selectbox(key="model-tag").select("demo").run()
    assert list(shown.dataframe[0].value["model"]) == ["cognate.model.done"]
    assert "1237 items" in shown.code[0].value
    shown.selectbox(key="model-tag").select("all").run()
    shown.selectbox(key="model").select("quietstar.model.done").run()
    lineage = next(t.value for t in shown.dataframe if "made by" in t.value.columns)
    assert list(lineage["made by"]) == ["quietstar", "evomerge", "cognate"]
    assert list(lineage["from"]) == ["model", "model", "-"]
    shown.selectbox(key="model-second").select("bitnet.model.done").run()
    table = shown.dataframe[1].value
    cells = {row[0]: row[1:] for row in table.values.tolist()}
    assert cells["gain"] == ["3.332", "4.332"] and cells["weights"] == ["24", "24"]
    assert table.values.tolist()[0][0] != "run", "what differs comes first"


def test_runs_are_compared(browser: Browser, root: Path) -> None:
    recorded(root)
    recorded(root, "other", shift=0.07)
    shown = browser.open("comparison")
    settings, headlines = (table.value for table in shown.dataframe)
    rows = {row[0]: row[1:] for row in settings.values.tolist()}
    assert rows == {"runtime.seed": rows["runtime.seed"]}
    assert sorted(rows["runtime.seed"]) == ["31", "38"]
    assert dict(zip(headlines.columns, headlines.values.tolist()[0], strict=True)) == {
        "phase": "cognate",
        "done: before": "0.1234",
        "done: after": "0.1531",
        "done: time": "71.3 s",
        "other: before": "0.1934",
        "other: after": "0.2231",
        "other: time": "71.3 s",
    }
    (figure,) = browser.figures()
    assert sorted(trace["name"] for trace in figure["data"]) == ["done", "other"]
    assert len({trace["line"]["color"] for trace in figure["data"]}) == 2
    known = [explained(root, name) for name in ("done", "other")]
    found = {number for text in browser.texts() for number in numbers(text)} - ALLOWED
    assert {number for number in found if not any(own(number) for own in known)} == set()
    shown.selectbox(key="compared-metric").select(("evomerge", "generation/best_fitness")).run()
    assert browser.figures()[0]["data"][0]["y"][0] == pytest.approx(0.3019 * 1.001)
    shown.multiselect(key="compared").set_value(["done"]).run()
    assert not shown.dataframe and not shown.exception


def test_what_has_no_steps_is_compared_over_time(root: Path) -> None:
    """A long series is thinned: the place of a point in it is not when it was measured."""
    store = recorded(root)
    record = {"phase": "system", "step": None, "metrics": {"cpu_percent": 5.0}}
    with (store.path("done") / "metrics.jsonl").open("a") as writer:
        for n in range(MOST_POINTS + 500):
            writer.write(json.dumps({**record, "time": 1.7e9 + 10 * n}) + "\n")
    series = RunView(store, "done").series
    x, unit = state.along(series["system", "cpu_percent"])
    assert x[:2] == [0, 20] and "time" in unit
    x, unit = state.along(series["cognate", "a/train/loss_avg_100"])
    assert x == list(range(1, 41)) and unit == "step"


def test_settings_that_one_run_does_not_have() -> None:
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 5}}
    rows = comparison.differing([dict(comparison.flat(one)), dict(comparison.flat(other))])
    assert rows == [("b.c", "2", "5"), ("b.d", "3", None)]


# -- settings, starting, stopping ------------------------------------------------------------------


def test_settings_are_checked(browser: Browser, root: Path) -> None:
    shown = browser.open("configuration")
    begin = shown.text_area[0].value
    assert f"root: {root}" in begin
    shown.button(key="validate").click().run()
    assert shown.success and "as the preset has them" in browser.texts()
    shown.text_area[0].set_value(begin.replace("seed: 42", "seed: 7")).run()
    shown.button(key="validate").click().run()
    assert shown.dataframe[0].value.values.tolist() == [["runtime.seed", "42", "7"]]
    for text, said in {
        "preset: smoke\nphases: {cognate: {trunk_stepz: 1}}": "did you mean 'trunk_steps'?",
        "preset: smoke\nruntime: {seed: x}": "config.yaml: runtime.seed",
        "a: !!python/object:os.system {}": "tags",
        "\x00": "not usable as YAML",
    }.items():
        shown.text_area[0].set_value(text).run()
        for key in ("validate", "estimate", "start"):
            shown.button(key=key).click().run()
            assert shown.error and said in shown.code[0].value and not shown.success
            assert "/tmp" not in shown.code[0].value.replace(str(root), "")
    assert not root.exists()
    shown.selectbox(key="preset").select("toy").run()
    assert shown.text_area[0].value.startswith("preset: toy")


def test_a_start_that_is_refused(
    browser: Browser, finished: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = browser.open("configuration")
    for name, said in {
        "done": "'done' exists",
        "../x": "not allowed",
        "a/b": "not allowed",
    }.items():
        shown.text_input(key="session-name").set_value(name).run()
        shown.button(key="start").click().run()
        assert shown.error[0].value == "It was not started" and said in shown.code[0].value

    def refuse(*args: Any, **options: Any) -> str:
        raise jobs.StartRefused(f"no memory {HOSTILE}", hint="close something")

    monkeypatch.setattr(jobs, "start_run", refuse)
    shown.text_input(key="session-name").set_value("new").run()
    shown.button(key="start").click().run()
    assert shown.code[0].value.startswith("no memory <img")
    assert shown.code[0].value.endswith("next: close something")


def test_one_start_at_a_time(browser: Browser, root: Path) -> None:
    with jobs._starting:
        shown = browser.open("configuration")
        shown.button(key="start").click().run()
    assert "another run is being started" in shown.code[0].value and not root.exists()


def test_an_estimate(browser: Browser, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    row = {"phase": "toy", "steps": 3, "parameters": 4, "disk_bytes": 5e6, "memory_bytes": 6e6}
    found = {"phases": [row], "config_hash": "abc", "free_bytes": 7e9}

    def run(command: list[str], **options: Any) -> Any:
        asked.append(Path(command[-2].partition("=")[2]).read_text())
        return SimpleNamespace(returncode=0, stdout=json.dumps(found).encode())

    monkeypatch.setattr(configuration.subprocess, "run", run)
    shown = browser.open("configuration")
    shown.button(key="estimate").click().run()
    assert shown.dataframe[0].value.values.tolist() == [["toy", "3", "4", "5.0 MB", "6.0 MB"]]
    assert asked == [shown.text_area[0].value]


def test_stop_and_resume(browser: Browser, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = recorded(root, status="running")
    shown = browser.open("overview")
    assert shown.button(key="stop-now") and not shown.button(key="resume").disabled
    shown.button(key="stop-now").click().run()
    assert "is not running" in shown.code[0].value
    assert "It was asked to stop." not in browser.texts()
    with lock.exclusive(store.path("done")):
        shown = browser.open("overview")
        assert shown.button(key="resume").disabled
        shown.button(key="stop-now").click().run()
        assert lock.is_stop_request(store.path("done") / lock.STOP_FILE) and not shown.error
    resumed: list[str] = []
    monkeypatch.setattr(jobs, "resume_run", lambda store, name: resumed.append(name))
    shown = browser.open("overview")
    shown.button(key="resume").click().run()
    assert resumed == ["done"] and not shown.error

    def refuse(store: SessionStore, name: str) -> None:
        raise jobs.StartRefused("its files are damaged")

    monkeypatch.setattr(jobs, "resume_run", refuse)
    shown.button(key="resume").click().run()
    assert shown.error[0].value == "It does not go on"
    assert shown.code[0].value == "its files are damaged"


# -- conversations ---------------------------------------------------------------------------------


@pytest.fixture
def talk(root: Path, browser: Browser) -> Iterator[Browser]:
    small_model(root)
    small_model(root, "other", seed=1)
    yield browser
    playground._engine().scheduler.close()


def say(browser: Browser, text: str) -> list[playground.Turn]:
    browser.app.chat_input[0].set_value(text).run()
    assert not browser.app.exception, [e.message for e in browser.app.exception]
    turns: list[playground.Turn] = browser.app.session_state[playground.TALK]
    return turns


def test_a_chat_answers(talk: Browser) -> None:
    shown = talk.open("playground")
    shown.number_input(key="talk-tokens").set_value(12).run()
    shown.number_input(key="talk-temperature").set_value(1.0).run()
    shown.selectbox(key="talk-model").select(MODEL).run()
    (turn,) = say(talk, "hello there")
    (said,) = turn.replies
    assert said.model == MODEL and (said.answer or said.thought) and "longest" in said.note
    assert "hello there" in talk.texts() and said.answer.strip() in talk.texts()
    shown.selectbox(key="talk-second").select("cognate.other.s1").run()
    turns = say(talk, "and now?")
    assert [len(turn.replies) for turn in turns] == [1, 2]
    assert turns[1].replies[0].answer != turns[1].replies[1].answer
    again = talk.open("playground")
    assert len(again.chat_message) == 5
    shown.button(key="talk-new").click().run()
    assert not shown.chat_message


def test_the_history_is_told_to_each_model() -> None:
    asked = playground.Asked("be kind", "free", 0.0, 9, 0, True)
    said = [playground.Said("a", answer="one"), playground.Said("b", answer="two")]
    turns = [playground.Turn("first", said), playground.Turn("second", said)]
    for number, answer in enumerate(("one", "two")):
        messages = playground._messages(turns, number, asked)
        assert [m["content"] for m in messages] == ["be kind", "first", answer, "second"]
    assert len(playground._messages(turns, 2, asked)) == 3


def test_thoughts_and_calls_are_shown(talk: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("<|tool_call|>", "calc 6*7", "<|end_call|>", "<|tool_result|>", "42", "<|end_result|>")
    model = scripted("[thinking]", "what is", "[/endthinking]", *call, "It is 42.")
    box = Toolbox([tool for tool in builtin_tools(None) if tool.name == "calc"])
    opened = SimpleNamespace(model=model, tools=box, lock=threading.Lock())
    monkeypatch.setattr(playground._engine().models, "open", lambda folder: opened)
    shown = talk.open("playground")
    (turn,) = say(talk, "6 times 7?")
    (said,) = turn.replies
    assert (said.thought, said.answer.strip(), said.note) == ("what is", "It is 42.", "")
    assert said.calls == [("calc 6*7", "42")]
    assert [c.value for c in shown.code] == ["what is", "calc 6*7\n= 42"]


def test_what_cannot_be_said(talk: Browser, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = talk.open("playground")
    shown.selectbox(key="talk-model").select(MODEL).run()
    (turn,) = say(talk, "word " * 40_000)
    assert turn.replies[0].note and not turn.replies[0].answer
    (root / "sessions/s1/phase1_cognate/small/model.safetensors").write_bytes(b"rubbish")
    turns = say(talk, "hello")
    assert "damaged" in turns[1].replies[0].note and shown.warning


def test_one_of_two_is_refused(talk: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seen = playground._engine().scheduler.submit, list[Any]()

    def full(request: Any) -> None:
        seen.append(request)
        if len(seen) == 2:
            raise QueueFull("too many wait")
        submit(request)

    monkeypatch.setattr(playground._engine().scheduler, "submit", full)
    shown = talk.open("playground")
    shown.number_input(key="talk-tokens").set_value(4).run()
    shown.selectbox(key="talk-second").select("cognate.other.s1").run()
    (turn,) = say(talk, "hello")
    assert turn.replies[1].note == "too many wait" and not shown.error
    assert turn.replies[0].note == "the longest reply was reached"


def test_a_reply_that_nobody_waits_for_is_let_go(
    talk: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gone = playground._engine(), list[Any]()
    monkeypatch.setattr(engine.scheduler, "cancel", gone.append)

    def leave(*args: Any) -> None:
        raise KeyboardInterrupt  # as streamlit ends a script: none of the exceptions

    monkeypatch.setattr(playground, "_follow", leave)
    asked = playground.Asked("", "off", 0.0, 9, 0, True)
    with pytest.raises(KeyboardInterrupt):
        playground._answer([playground.Turn("x", [playground.Said(MODEL)])], asked)
    assert len(gone) == 1


# -- this machine ----------------------------------------------------------------------------------


GPU = system.Gpu(10.0, 1000.0, 10_000.0, 60.0)
CALM = system.Reading(0.0, 5.0, 50.0, 1, 2, 3, 50 * 10**9)


@pytest.mark.parametrize(
    ("reading", "gpu", "said"),
    [
        (CALM, GPU, []),
        (CALM._replace(memory=74.9), None, []),
        (CALM._replace(memory=75.0), None, [(False, "memory is 75 % full")]),
        (CALM._replace(memory=90.0), None, [(True, "memory is 90 % full")]),
        (CALM._replace(free=10**10 + 1), None, []),
        (CALM._replace(free=9 * 10**9), None, [(False, "has 9.0 GB left")]),
        (CALM._replace(free=4 * 10**9), None, [(True, "has 4.0 GB left")]),
        (CALM._replace(free=None), None, []),
        (CALM, GPU._replace(memory=8000.0), [(False, "GPU is 80 % full")]),
        (CALM, GPU._replace(memory=9500.0), [(True, "GPU is 95 % full")]),
        (CALM, GPU._replace(celsius=75.0), [(False, "75 degrees")]),
        (CALM, GPU._replace(celsius=80.0), [(True, "80 degrees")]),
        (CALM, GPU._replace(memory_total=0.0), []),
    ],
)
def test_alarms(reading: system.Reading, gpu: system.Gpu | None, said: list[Any]) -> None:
    found = system.alarms(reading, gpu)
    assert [alarm.critical for alarm in found] == [critical for critical, _ in said]
    assert all(text in alarm.text for alarm, (_, text) in zip(found, said, strict=True))
    assert all(alarm.remedy for alarm in found)


def test_alarms_are_shown(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "alarms", lambda *_: [system.Alarm(True, "a", "b")])
    assert browser.open("system").error[0].value == "a: b"


def test_readings_are_kept_five_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORGE_STORAGE", str(tmp_path))
    now = 1000.0
    monkeypatch.setattr(system.time, "time", lambda: now)
    machine = system.Machine()
    first = machine.read()
    assert machine.read() is first and first.cpu is None and first.free
    for _ in range(200):
        now += system.EVERY_S
        machine.read()
    ages = [now - reading.at for reading in machine.readings]
    assert max(ages) <= system.KEPT_S and len(ages) == 150
    assert machine.readings[-1].cpu is not None


def test_the_processor_is_read_in_any_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORGE_STORAGE", str(tmp_path))
    spent = iter([(1000.0, 600.0), (1100.0, 610.0), (1200.0, 660.0)])
    monkeypatch.setattr(system, "seconds_spent", lambda: next(spent))
    now = 1000.0
    monkeypatch.setattr(system.time, "time", lambda: now)
    machine, read = system.Machine(), []
    for _ in range(3):
        now += system.EVERY_S
        thread = threading.Thread(target=lambda: read.append(machine.read().cpu))
        thread.start()
        thread.join()
    assert read == [None, 90, 50]


def test_the_load_of_the_processor_is_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the mean over the time in which nobody looked."""
    monkeypatch.setenv("FORGE_STORAGE", str(tmp_path))
    spent = ((100.0 * n, 40.0 * n) for n in itertools.count())
    monkeypatch.setattr(system, "seconds_spent", lambda: next(spent))
    now = 1000.0
    monkeypatch.setattr(system.time, "time", lambda: now)
    machine = system.Machine()
    seen = []
    for seconds in (0, 2, 60, 2, 1000, 2):
        now += seconds
        seen.append(machine.read().cpu is not None)
    assert seen == [False, True, False, True, False, True]


def test_a_gpu_that_answers_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    for script, found in {
        "echo '35, 2048, 8192, 61'": system.Gpu(35.0, 2048.0, 8192.0, 61.0),
        "echo '[N/A], 1, 2, 3'": None,
        "echo no devices": None,
        "exit 9": None,
        "true": None,
    }.items():
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(system, "_nvidia_smi", lambda: str(program))
        assert system.read_gpu() == found
    monkeypatch.setattr(system, "_nvidia_smi", lambda: None)
    assert system.read_gpu() is None


def test_memory_of_a_run(
    root: Path, finished: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_STORAGE", str(root))
    assert system.run_bytes("done") is None
    with lock.exclusive(finished.path("done")):
        assert (system.run_bytes("done") or 0) > 10**7
