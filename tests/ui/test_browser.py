"""The dashboard in a real Chromium: all pages of a run while it goes on and when it is done, runs
that are started and stopped there, conversations, several windows, its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from agent_forge.pipeline import jobs
from agent_forge.pipeline.run_view import RunView
from agent_forge.store import lock
from agent_forge.store.sessions import SessionStore
from agent_forge.track.tracker import METRICS_FILE
from tests.support.chromium import (
    ERRORS,
    FIGURES,
    PAGES,
    Dashboard,
    Window,
    chromium,
    dashboard,
    hosts,
    until,
)
from tests.support.toy_runs import toy_run

pytestmark = pytest.mark.browser
WHOLE = "whole"  # the run of all phases
WHOLE_S = 1200.0  # that it may take on a loaded machine; alone it is two minutes
STEPS = 40_000  # of the toy phase: about 20 s
THINKS, SAYS = f"quietstar.reasoning.{WHOLE}", f"baking.packed.{WHOLE}"
SMALL_RUN = "r"  # of `toy_run`
PERCENT = re.compile(r"(\d+)% done")
MACHINE = ("memory is ", "the disk of ")  # alarms, which a machine may well give
SIDEBAR = "[data-testid=stSidebar]"
ASKED = (
    "[data-testid=stChatMessage]:has([data-testid=stChatMessageAvatarUser]) [data-testid=stText]"
)
REPLIES = "[data-testid=stChatMessage]:has([data-testid=stChatMessageAvatarAssistant])"
GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}
# What is to be read on a page of any run that has begun, and on one of a run that is done; and how
# many figures it has then.
BEGUN = {
    "Overview": ("1 cognate", "8 final_compression", "Stop", "Resume"),
    "Phase details": ("Phase", "Metric", "status", "done"),
    "Evolution": (),
    "Models": (),
    "Playground": (),
    "Compare runs": ("Settings that differ", "What each phase changed"),
    "Configuration": ("Preset", "Settings (YAML)", "Validate", "Estimate", "Start"),
    "System": ("processor", "memory", "disk left"),
}
DONE: dict[str, tuple[tuple[str, ...], int]] = {
    "Overview": (("on unseen items", "Time of each phase", "Last events"), 4),
    "Phase details": (("Training loss", "Tables", "What it says", "Models"), 2),
    "Evolution": (("best fitness", "Diversity", "Lineage", "Best candidates"), 5),
    "Models": ((" models", "Compare with", "Card", "Lineage", "Files", "Made by phase"), 0),
    "Playground": (("Second model", "Settings"), 0),
    "Compare runs": ((), 0),
    "Configuration": ((), 0),
    "System": (("time before now",), 1),
}


# -- a browser, a dashboard, runs ------------------------------------------------------------------


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def store(driver: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> SessionStore:
    """A storage root with a small run that is done; made once there is a browser."""
    root = tmp_path_factory.mktemp("storage")
    assert toy_run(root)["success"]
    return SessionStore(root)


@pytest.fixture(scope="session")
def served(store: SessionStore) -> Iterator[Dashboard]:
    with dashboard(store.root) as found:
        yield found


@pytest.fixture(scope="session")
def process(store: SessionStore) -> Iterator[subprocess.Popen[bytes]]:
    """A run of all phases; it goes on while other tests look at other things."""
    command = [sys.executable, "-m", "agent_forge", "run", "--preset=smoke", f"--session={WHOLE}"]
    with (store.root / "whole.log").open("wb") as log:
        begun = subprocess.Popen([*command, f"--storage={store.root}"], stdout=log, stderr=log)
    yield begun
    begun.kill()
    begun.wait()


@pytest.fixture(scope="session")
def running(store: SessionStore, process: subprocess.Popen[bytes]) -> str:
    """The run of all phases, at work."""
    until(lambda: process.poll() is not None or is_live(store, WHOLE))
    return WHOLE


@pytest.fixture(scope="session")
def finished(store: SessionStore, process: subprocess.Popen[bytes]) -> str:
    """The run of all phases, done."""
    assert process.wait(WHOLE_S) == 0, (store.root / "whole.log").read_text()[-4000:]
    return WHOLE


@contextlib.contextmanager
def opened(driver: webdriver.Chrome, served: Dashboard) -> Iterator[Window]:
    """A window; what it shows comes from nowhere else, and breaks nothing."""
    window = Window(driver, served.url)
    assert hosts(driver) == {"localhost"}
    yield window
    window.close()
    assert hosts(driver) <= {"localhost"}  # of all windows; others may have asked for the list
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.fixture
def window(driver: webdriver.Chrome, served: Dashboard) -> Iterator[Window]:
    with opened(driver, served) as found:
        yield found


@pytest.fixture(scope="module")
def watching(driver: webdriver.Chrome, served: Dashboard, running: str) -> Iterator[Window]:
    """One window for all pages of a run that is not there for long."""
    with opened(driver, served) as found:
        found.choose("Run", running)
        yield found


@pytest.fixture(scope="module")
def reading(driver: webdriver.Chrome, served: Dashboard, finished: str) -> Iterator[Window]:
    """One window for all pages of a run that is done."""
    with opened(driver, served) as found:
        found.choose("Run", finished)
        yield found


def is_live(store: SessionStore, session: str) -> bool:
    """True once a run has measured something, until it ends."""
    folder = store.path(session)
    return (folder / METRICS_FILE).is_file() and lock.is_busy(folder)


def steps_done(store: SessionStore, session: str) -> int:
    series = RunView(store, session).series.get(("toy", "toy/loss"))
    return max(step or 0 for step in series.steps) if series else 0


# -- every page ------------------------------------------------------------------------------------


def look_at(window: Window, page: str, path: Path) -> None:
    """Both themes of a page: its ground and that of its figures; no box of an error."""
    for theme in sorted(GROUNDS, key=lambda theme: theme != window.themed):  # as it is first
        window.theme(theme)
        until(lambda ground=GROUNDS[theme]: window.grounds() == {ground})
        window.settle()
        window.save(path.with_name(f"{path.name}-{theme}.png"))
        alarms = MACHINE if page == "System" else ()
        assert [told for told in window.texts(ERRORS) if not told.startswith(alarms)] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_a_run_that_goes_on(
    watching: Window, store: SessionStore, running: str, pictures: Path, page: str
) -> None:
    watching.go(page)
    for text in BEGUN[page]:
        watching.see(text)
    look_at(watching, page, pictures / f"{PAGES[page] or 'overview'}-running")
    assert is_live(store, running), "it was over before it was looked at"


# -- runs from the page ----------------------------------------------------------------------------


def start(window: Window, session: str, steps: int) -> None:
    """Start a run of the toy phase."""
    window.go("Configuration")
    window.choose("Preset", "toy")
    window.fill("Name of the run", session)
    window.fill("Settings (YAML)", f"preset: toy\nphases: {{toy: {{steps: {steps}}}}}\n")
    window.press("Validate")
    window.see("These settings can be used.")
    window.press("Start")
    until(lambda: window.has("Run", session))  # another run may be at work until then
    window.see("running", SIDEBAR)
    window.go("Overview")


def shares(window: Window) -> list[int]:
    """How much of the run is done, in percent, as it changes: four values."""
    seen: list[int] = []

    def changed() -> bool:
        share = int(PERCENT.findall(window.text(SIDEBAR))[0])
        if share not in seen[-1:]:
            seen.append(share)
        return len(seen) > 3

    until(changed)
    return seen


def test_a_run_is_started_stopped_and_resumed(window: Window, store: SessionStore) -> None:
    start(window, "made", STEPS)
    window.mark()
    seen = shares(window)
    assert seen == sorted(seen) and window.is_marked(), "it advances, and is not loaded again"
    window.press("Stop")
    window.press("Stop this run")
    window.see("paused", SIDEBAR)
    until(lambda: not lock.is_busy(store.path("made")))
    stopped = steps_done(store, "made")
    assert RunView(store, "made").status == "paused" and 0 < stopped < STEPS
    window.press("Resume")
    window.see("running", SIDEBAR)
    window.see("completed", SIDEBAR)
    assert RunView(store, "made").status == "completed" and steps_done(store, "made") == STEPS
    assert window.texts(ERRORS) == [] and window.is_marked()


def test_runs_go_on_when_the_dashboard_ends(driver: webdriver.Chrome, store: SessionStore) -> None:
    with dashboard(store.root) as found:
        window = Window(driver, found.url)
        start(window, "left", 10**8)
        assert found.end() == 0
        window.close()
        driver.get_log("browser")  # that it lost its server
    begun = steps_done(store, "left")
    until(lambda: steps_done(store, "left") > begun)
    jobs.stop_run(store, "left")
    until(lambda: not lock.is_busy(store.path("left")))
    assert RunView(store, "left").status == "paused"


# -- a run that is done ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_a_run_that_is_done(reading: Window, pictures: Path, page: str) -> None:
    reading.go(page)
    texts, figures = DONE[page]
    for text in (*BEGUN[page], *texts):
        reading.see(text)
    until(lambda: reading.count(FIGURES) >= figures)
    look_at(reading, page, pictures / f"{PAGES[page] or 'overview'}-done")


def replies(window: Window, count: int) -> list[str]:
    """What models have said, each behind its name, once so many have said all."""
    until(lambda: window.count(REPLIES) == count)
    window.settle()
    return [" ".join(text.split()) for text in window.texts(REPLIES)]


def test_a_model_thinks_and_answers(window: Window, finished: str, pictures: Path) -> None:
    window.go("Playground")
    window.choose("Model", THINKS)
    window.unfold("Settings")
    window.choose("Thoughts", "always")
    window.say("rot, add 3, rev : 48213")
    (reply,) = replies(window, 1)
    thought, answer = (
        window.text(f"{REPLIES} code"),
        window.texts(f"{REPLIES} [data-testid=stText]"),
    )
    assert f"model {THINKS} thinks {thought}" in reply and thought
    assert answer[0] == THINKS and answer[1], "the name, and what it answers"
    window.save(pictures / "playground-thinks.png")
    window.press("New")
    until(lambda: window.count(REPLIES) == 0)
    assert window.texts(ERRORS) == []


def test_two_models_side_by_side(window: Window, finished: str, pictures: Path) -> None:
    window.go("Playground")
    window.choose("Model", SAYS)
    window.choose("Second model", THINKS)
    window.say("Who are you?")
    for name, reply in zip((SAYS, THINKS), replies(window, 2), strict=True):
        assert reply.rpartition(name)[2], "it says something"
    places = window.run(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect().x)",
        REPLIES,
    )
    assert places[0] < places[1]
    window.save(pictures / "playground-two.png")
    assert window.texts(ERRORS) == []


def test_two_windows_at_once(window: Window, served: Dashboard, finished: str) -> None:
    """Each has its own run and its own conversation, while both are open."""
    window.choose("Run", finished)
    window.go("Playground")
    other = Window(window.driver, served.url)
    other.choose("Run", SMALL_RUN)
    other.go("Playground")
    for one, text in ((window, "first"), (other, "second")):
        one.look()
        one.choose("Model", SAYS)
        one.say(text)
    for one, text, run in ((other, "second", SMALL_RUN), (window, "first", finished)):
        one.look()
        assert len(replies(one, 1)) == 1
        assert one.texts(ASKED) == [text]
        one.go("Phase details")
        one.see(f"run {run} | config")
    other.close()
