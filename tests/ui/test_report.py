"""The report of a run: one file, that loads nothing, with numbers that its files have."""

from __future__ import annotations

import calendar
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_forge.cli import report as command
from agent_forge.errors import AlreadyExists
from agent_forge.pipeline.run_view import RunView
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore
from agent_forge.ui.report import MOST_SAID, MOST_TOLD, OURS, render, write_report
from agent_forge.ui.theme import cell, plain
from tests.support.command_line import Forge
from tests.support.pages import HOSTILE, Page, hostile_run
from tests.support.recorded_runs import ENVIRONMENT, NAME, RECORDED
from tests.support.toy_runs import toy_config, toy_run

MOST_BYTES = 6_000_000
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w])")


@pytest.fixture(scope="module")
def view() -> RunView:
    return RunView(SessionStore(RECORDED), NAME)


@pytest.fixture(scope="module")
def text(view: RunView) -> str:
    return render(view)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


# -- one file --------------------------------------------------------------------------------------


def test_it_is_small_and_has_all(page: Page, text: str) -> None:
    assert len(text.encode()) < MOST_BYTES
    words = {text for _, text in page.read}
    for name in ("cognate", "evomerge", "quietstar", "bitnet", "forge", "baking", "edge"):
        assert name in words
    assert len(page.titles) == len(page.charts) == 35
    assert "What it says" in words and "Thoughts" in words and "A conversation" in words
    places = [attrs["data-figure"] for _, attrs in page.elements if "data-figure" in attrs]
    assert places == [str(n) for n in range(len(page.charts))]


def test_it_loads_nothing(page: Page) -> None:
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        assert "src" not in attrs and not any(name.startswith("on") for name in attrs)
        assert (attrs.get("href") or "#").startswith("#")
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules.pop("default-src") == "'none'"  # so no connection, font, frame or form
    assert rules.pop("img-src") == "data: blob:"
    assert set(rules) == {"script-src", "style-src"} and set(rules.values()) == {"'unsafe-inline'"}
    assert not any(re.search(r"@import|url\(", style) for style in page.styles)
    assert "<" not in page.scripts[0]  # nothing in the figures can end their script
    own = page.scripts[2]
    assert not re.search(r"fetch|XMLHttp|WebSocket|import\(|https?:", own) and len(own) < 5000


def test_links_lead_to_what_is_there(page: Page) -> None:
    there = {attrs.get("id") for _, attrs in page.elements}
    links = [str(a["href"])[1:] for t, a in page.elements if t == "a"]
    assert len(links) == 8 and set(links) <= there


def test_it_has_what_it_takes_to_make_the_run_again(view: RunView, page: Page) -> None:
    words = " ".join(text for _, text in page.read)
    assert view.config_hash in words and "trunk_steps: 400" in words
    for phase in view.phases:
        for path in phase.models:
            assert files.read_json(path / "metadata.json")["sha256"] in words
        assert phase.headline is not None and phase.headline["verdict"] in words


# -- where it is written ---------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> RunView:
    shutil.copytree(RECORDED, tmp_path / "storage")
    return RunView(SessionStore(tmp_path / "storage"), NAME)


def test_it_is_written_into_the_run_and_again(copy: RunView) -> None:
    path = write_report(copy)
    first = path.read_bytes()
    assert path == copy.folder / "report.html" and OURS in first
    path.write_bytes(OURS + b"an older one")
    assert write_report(copy) == path and path.read_bytes() == first


def test_what_is_no_report_is_not_overwritten(copy: RunView, tmp_path: Path) -> None:
    own = tmp_path / "thesis.html"
    own.write_text("<h1>mine</h1>")
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (own, folder):
        with pytest.raises(AlreadyExists, match="is no report"):
            write_report(copy, place)
    assert own.read_text() == "<h1>mine</h1>"


def test_the_command_says_where_it_is(forge: Forge, copy: RunView, tmp_path: Path) -> None:
    there = forge(f"report {NAME}")
    assert (there.code, there.out.strip()) == (0, f"storage/sessions/{NAME}/report.html")
    found = forge(f"report {NAME} --out mine.html --json").document
    assert found["bytes"] == (tmp_path / "mine.html").stat().st_size
    (tmp_path / "x.txt").write_text("x")
    refused = forge(f"report {NAME} --out x.txt")
    assert refused.code == 2 and "no report" in refused.err
    assert forge("report nobody").code == 2


@pytest.mark.slow
def test_a_run_ends_with_its_report(forge: Forge, root: Path) -> None:
    sets = "--set phases.toy.steps=24 --set tracking.sample_every_s=0"
    done = forge(f"run --preset toy --session r --storage {root} {sets}")
    path = root / "sessions" / "r" / "report.html"
    assert done.code == 0 and f"report: {path}" in done.err
    found = Page(path.read_text(encoding="utf-8"))
    assert found.titles == ["Training loss"] and len(found.charts[0]["data"][0]["x"]) == 24
    bad = forge(f"run --preset toy --session bad --storage {root} {sets} --set seed=x")
    assert bad.code == 2 and "report:" not in bad.err  # nothing ran


@pytest.mark.slow
def test_a_failed_run_has_a_report_that_says_why(root: Path) -> None:
    outcome = toy_run(root, "phases.toy.learning_rate=1e30", "phases.toy.steps=200")
    path = command.report_at_end(root, outcome)
    assert outcome["status"] == "failed" and path is not None
    words = [text for _, text in Page(path.read_text(encoding="utf-8")).read]
    assert f"failed: {outcome['error']}" in words


def test_a_report_that_cannot_be_made_ends_no_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = {"status": "completed", "session_id": "never"}
    assert command.report_at_end(root, outcome) is None
    assert "no report was made" in capsys.readouterr().err
    assert command.report_at_end(root, {**outcome, "status": "paused"}) is None
    assert capsys.readouterr().err == ""


def test_a_run_that_has_not_begun_a_phase(root: Path) -> None:
    config = toy_config(root)
    store = SessionStore(root)
    asked = {"asked": {"phases": ["cognate", "evomerge"]}}
    store.create(config.model_dump(mode="json"), "x: 1\n", session_id="s1", details=asked)
    found = Page(render(RunView(store, "s1")))
    words = [text for _, text in found.read]
    assert words.count("waiting") == 2 and not found.charts
    assert not any(tag == "a" for tag, _ in found.elements)


# -- whatever is in the files ----------------------------------------------------------------------


def test_hostile_texts_stay_text(root: Path, page: Page) -> None:
    found = Page(render(hostile_run(root)))
    tags = {tag for tag, _ in found.elements}
    assert tags <= {tag for tag, _ in page.elements}
    assert [t for t, _ in found.elements].count("script") == 3 and "img" not in tags
    assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
    words = [text for _, text in found.read]
    clean = plain(HOSTILE, MOST_TOLD)
    assert words.count(clean) >= 4 and "\x00" not in " ".join(words)
    assert max(map(len, words)) < 2000  # of 100,000 letters the first
    assert len(found.charts) == 4


def test_nothing_that_was_not_measured_is_a_number(view: RunView, page: Page) -> None:
    words = [text for _, text in page.read]
    assert words.count("-") > 10  # what majority and n-gram have no steps for, and others
    assert not {"nan", "NaN", "inf", "None", "null"} & set(words)


# -- every number is in the run's files ------------------------------------------------------------


class Known(NamedTuple):
    """What the files of a run say: numbers, and texts with what stands in them."""

    numbers: set[float]
    shown: set[str]  # numbers as tables show them
    texts: set[str]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif not isinstance(value, bool) and value is not None:
        yield value


def read_all(folder: Path) -> Known:
    """All leaves of all files of a run."""
    numbers: set[float] = set()
    texts: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json":
            found = [json.loads(path.read_text())]
        elif path.suffix == ".jsonl":
            found = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            continue
        for leaf in (leaf for content in found for leaf in leaves(content)):
            if isinstance(leaf, str):
                texts.add(leaf)
                numbers |= {float(leaf)} if re.fullmatch(r"\d+(\.\d+)?", leaf) else set()
            else:
                numbers.add(float(leaf))
    shown = {cell(n) for n in numbers} | {f"{n:g}" for n in numbers}
    shown |= {f"{int(n):,}" for n in numbers if n.is_integer() and abs(n) < 2**53}
    shown |= {str(int(n)) for n in numbers if n.is_integer() and abs(n) < 2**53}
    return Known(numbers, shown, texts)


@pytest.fixture(scope="module")
def known(view: RunView) -> Known:
    return read_all(view.folder)


def test_every_number_that_is_read_is_in_the_files(view: RunView, page: Page, known: Known) -> None:
    """Tables, verdicts, samples and the lines around them. What is derived is listed here."""
    seconds = [phase.state["seconds"] for phase in view.phases]
    derived = {f"{s:.1f} s" for s in seconds}  # a time, rounded
    derived |= {f"{phase.number} {phase.name}" for phase in view.phases}  # the number of a phase
    derived |= {f"{name} {n}" for name, n in ENVIRONMENT["packages"].items()}
    begun = [f"{sum(seconds):.0f} s of work", f"seed {view.config['runtime']['seed']}"]
    begun += [f"config {view.config_hash[:12]}", f"preset {view.config['preset']}"]
    said_by_models = {plain(t.strip("`"), MOST_SAID).strip() for t in known.texts}
    texts = known.texts | said_by_models | {*page.titles}
    texts |= {t.replace("_", " ").replace("/", " / ") for t in known.texts}  # heads of tables
    yaml = (view.folder / "config.yaml").read_text()
    checked = 0
    for tag, said in page.read:
        if tag == "pre":
            assert set(NUMBER.findall(said)) <= set(NUMBER.findall(yaml))
        elif said.startswith("begun "):
            date, _, rest = said.removeprefix("begun ").partition(" UTC, ")
            at = calendar.timegm(time.strptime(date, "%Y-%m-%d %H:%M:%S"))
            assert at == int(view.session["created_at"]) and sorted(rest.split(", ")) == sorted(
                begun
            )
        else:
            whole = said.removeprefix("At its handoff: ").removeprefix("Config ")
            there = whole in texts | derived | known.shown
            checked += there and bool(NUMBER.search(said))
            assert there or not NUMBER.search(said), (tag, said)
    assert checked > 300


Derived = Callable[[RunView, Sequence[float]], list[float]]


def since_start(view: RunView, drawn: Sequence[float]) -> list[float]:
    """The time of the readings of the machine since the first."""
    times = view.series["system", "system/process_rss_mb"].times
    return [t - times[0] for t in times]


def steps(view: RunView, drawn: Sequence[float]) -> list[float]:
    """How many merges lie between a candidate and the parents: whole, from 0 on."""
    ranks = sorted(set(drawn))
    assert ranks == list(range(len(ranks)))
    return list(drawn)


def places(view: RunView, drawn: Sequence[float]) -> list[float]:
    """Where a candidate is drawn among those of its column: it says nothing."""
    assert all(y <= 0 and y == int(y) for y in drawn)
    return list(drawn)


def looks(view: RunView, drawn: Sequence[float]) -> list[float]:
    """The number of each look."""
    return list(range(1, len(view.phase("forge").artifacts["looks"]) + 1))


def wide(view: RunView, drawn: Sequence[float]) -> list[float]:
    """From a value to the ends of its interval: differences, checked in test_figures."""
    assert all(length >= 0 for length in drawn)
    return list(drawn)


DERIVED: dict[tuple[str, str], Derived] = {
    ("Processor", "x"): since_start,
    ("Memory", "x"): since_start,
    ("Lineage of the champion", "x"): steps,
    ("Lineage of the champion", "y"): places,
    ("Levels of the curriculum", "x"): looks,
    ("Gain of the champion over each", "error_x"): wide,
    ("How far each family reaches", "error_x"): wide,
}


def drawn_numbers(trace: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    for key in ("x", "y", "z", "r", "error_x"):
        value = trace.get(key, [])
        if isinstance(value, dict):
            value = [value.get("array", []), value.get("arrayminus", [])]
        flat = [n for n in leaves(value) if isinstance(n, int | float)]
        if flat:
            yield key, flat


def test_every_number_that_is_drawn_is_in_the_files(
    view: RunView, page: Page, known: Known
) -> None:
    checked, used = 0, set()
    for title, chart in zip(page.titles, page.charts, strict=True):
        for trace in chart["data"]:
            for key, values in drawn_numbers(trace):
                if (title, key) in DERIVED:
                    used.add((title, key))
                    assert values == pytest.approx(DERIVED[title, key](view, values))
                    continue
                missing = [v for v in values if v not in known.numbers]
                assert not missing, (title, trace.get("name"), key, missing[:3])
                checked += len(values)
    assert used == set(DERIVED) and checked > 1000


def counts(view: RunView, phase: str, *ends: str) -> int:
    """How many values of these metrics a phase measured."""
    names = [(p, n) for p, n in view.series if p == phase and n.endswith(ends)]
    return sum(view.series[name].count for name in names)


def test_every_number_of_a_caption_is_in_the_files(view: RunView, page: Page, known: Known) -> None:
    """`n = ` counts what was measured; all others are settings, or in the recipe."""
    losses = {counts(view, p.name, "loss_avg_100", "evaluation_loss") for p in view.phases}
    journal = (view.folder / "phase2_evomerge" / "evolution" / "journal.jsonl").read_text()
    artifacts = {phase.name: phase.artifacts for phase in view.phases}
    edges = [
        s.latest for (p, n), s in view.series.items() if n.endswith("/items") and "/edge/" in n
    ]
    derived: dict[str, set[float]] = {
        "Training loss": {100.0, *losses},
        "Time of each phase": {8},
        "Processor": {counts(view, "system", "rss_mb"), 100},
        "Memory": {counts(view, "system", "rss_mb")},
        "Evolution": {journal.count('"record": "candidate"')},
        "Diversity": {counts(view, "evomerge", "generation/diversity_score")},
        "Combinations": {sum(view.latest(f"combo/{n}/usage") or 0 for n in range(8))},
        "Gain of the champion over each": {95, 0},
        "How far each family reaches": {90, sum(n for n in edges if n)},
        "Weights that are 0": {len(artifacts["bitnet"]["zeros"])},
        "Levels of the curriculum": {len(artifacts["forge"]["looks"])},
        "Rounds of baking": {len(artifacts["baking"]["rounds"])},
        "Size against quality": {
            len(artifacts["edge"]["cuts"]) + 1,
            len(artifacts["final_compression"]["points"]),
        },
    }
    for title, chart in zip(page.titles, page.charts, strict=True):
        caption = " ".join(chart["layout"]["title"]["text"].split("<br>"))
        own = caption.replace(f"run {NAME}", "").replace(view.config_hash[:12], "")
        recipe = str(view.phase("evomerge").metrics["best_merge_technique"])
        own = own.replace(recipe, "")
        for token in NUMBER.findall(own):
            value = float(token.replace(",", ""))
            allowed = derived.get(title, set()) | known.numbers
            assert value in allowed, (title, caption, token)
        for n in re.findall(r"n = ([\d,]+)", own):
            listed = derived.get(title) or known.numbers
            assert float(n.replace(",", "")) in listed | _settings(view), (title, caption)


def _settings(view: RunView) -> set[float]:
    """Whole numbers of the settings of all phases, and what a verdict was asked."""
    found = set(leaves(view.config["phases"]))
    found |= set(leaves(view.phase("evomerge").artifacts["verdict"]))
    return {float(n) for n in found if isinstance(n, int)}


def test_thresholds_that_are_drawn_are_settings(view: RunView, page: Page) -> None:
    levels = [s["y0"] for c in page.charts for s in c["layout"].get("shapes", []) if s["y0"]]
    own = {n for n in leaves(view.config["phases"]) if isinstance(n, float)} | {0.75}
    assert levels and set(levels) <= own  # 0.75: from there on a size counts as solved
    assert not any(math.isnan(level) for level in levels)
