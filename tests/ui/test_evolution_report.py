"""The report of a folder of forge evo, which is no run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from agent_forge.errors import DamagedFile
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.pipeline.evolution_view import EvolutionView
from agent_forge.store import files
from agent_forge.ui.figures import figures_of
from agent_forge.ui.report import render
from tests.support.command_line import Forge
from tests.support.evo_models import evolved
from tests.support.pages import Page

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished evolution of three small Llamas."""
    return Path(shutil.copytree(evolved(), tmp_path / "mine"))


def figures(folder: Path) -> dict[str, go.Figure]:
    return dict(figures_of(EvolutionView(folder), "evomerge"))


def lines(found: go.Figure) -> dict[str, list[Any]]:
    return {trace.name: list(trace.y) for trace in found.data if trace.name}


def test_it_has_the_figures_of_the_phase(folder: Path) -> None:
    found, log = figures(folder), files.read_json(folder / "evolution_log.json")
    titles = ["Evolution", "Diversity", "Combinations", "Lineage of the champion"]
    assert list(found)[:5] == [*titles, "Gain of the champion over each"]
    drawn = lines(found["Evolution"])
    assert drawn["best so far"] == [entry["best"] for entry in log["history"]]
    assert drawn["worst to best"] == [entry["highest"] for entry in log["history"]]
    assert set(drawn["plain average"]) == {log["references"]["plain_average_fitness"]}
    assert sum(name.startswith("parent ") for name in drawn) == 3
    assert log["technique"] in " ".join(found["Evolution"].layout.title.text.split("<br>"))
    bars = found["Combinations"].data[0]
    assert {int(n, 2): used for n, used in zip(bars.x, bars.y, strict=True)} == {
        int(n): used for n, used in log["combo_usage"].items()
    }


def test_the_command_takes_the_folder(forge: Forge, folder: Path) -> None:
    done = forge("report mine")
    assert (done.code, done.out.strip()) == (0, "mine/report.html")
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    words = [text for _, text in page.read]
    verdict = files.read_json(folder / "champion" / "verdict.json")
    assert "Run mine" in words and set(verdict["sentences"]) <= set(words)
    assert files.read_checked(folder / BEGUN)["fingerprint"] in words


def test_one_that_goes_on_shows_what_it_has(folder: Path) -> None:
    shutil.rmtree(folder / "champion")
    (folder / "evolution_log.json").unlink()
    view = EvolutionView(folder)
    assert view.status == "interrupted" and view.phases[0].models == []
    found = figures(folder)
    assert "Evolution" in found and "Gain of the champion over each" not in found
    assert "interrupted" in render(view)


def test_a_damaged_one_is_named(forge: Forge, folder: Path) -> None:
    (folder / BEGUN).write_text("{}")
    with pytest.raises(DamagedFile, match=BEGUN):
        EvolutionView(folder)
    assert forge("report mine").code == 4
