"""What one evolution has measured, the next one of the same models need not measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_forge.evals.fitness import DomainFitness
from agent_forge.phases.phase2_evomerge import journal
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.store.paths import USER_FOLDER
from tests.support.evo_models import FASTEST, job, outcome

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a user whose candidates all take long enough."""
    monkeypatch.setenv(USER_FOLDER, str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(journal, "WORTH_S", 0.0)
    return tmp_path / "home" / "cache" / journal.USER_CACHE


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every score that is measured."""
    found: list[str] = []
    score = DomainFitness.score

    def counting(self: DomainFitness) -> Any:
        found.append(self.name)
        return score(self)

    monkeypatch.setattr(DomainFitness, "score", counting)
    return found


def evolve(folder: Path, **more: Any) -> dict[str, Any]:
    settings = {**FASTEST, "use_holdout_validation": False, "workers": 1, **more}
    return outcome(run_evolution(job(folder, **settings)).loop.folder)


def test_another_evolution_measures_nothing_twice(
    tmp_path: Path, cache: Path, measured: list[str]
) -> None:
    first = evolve(tmp_path / "a")
    count = len(measured)
    assert count and len(cache.read_text().splitlines()) == count
    assert evolve(tmp_path / "b") == first and len(measured) == count
    evolve(tmp_path / "c", fitness_subset_size=9)  # other items
    evolve(tmp_path / "d", enable_caching=False)
    assert len(measured) > 2 * count


@pytest.mark.parametrize("damage", ["foreign", "half a line", "no numbers", "a folder"])
def test_a_cache_that_is_not_ours_or_damaged_is_passed_over(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    wanted = evolve(tmp_path / "a")
    lines = [json.loads(line) for line in cache.read_text().splitlines()]
    content = {
        "foreign": "dear diary\n",
        "half a line": json.dumps(lines[0])[:-9],
        "no numbers": "".join(json.dumps({**x, "score": {"fitness": "1"}}) + "\n" for x in lines),
    }
    cache.unlink()
    if damage == "a folder":
        cache.mkdir()
    else:
        cache.write_text(content[damage])
    caplog.clear()
    assert evolve(tmp_path / "b") == wanted
    if damage in ("foreign", "a folder"):
        assert [r for r in caplog.records if "earlier evolutions are not used" in r.message]
        assert damage == "a folder" or cache.read_text() == content["foreign"]


def test_a_place_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file")
    evolve(tmp_path / "a")
    assert len([r for r in caplog.records if "are not kept" in r.message]) == 1


def test_what_was_known_tells_no_speed(tmp_path: Path, cache: Path) -> None:
    settings = {**FASTEST, "use_holdout_validation": False, "workers": 1}
    first = run_evolution(job(tmp_path / "a", **settings)).loop.pace
    again = run_evolution(job(tmp_path / "b", **settings)).loop.pace
    assert first.tokens_per_s and again.tokens_per_s is None and again.verdict_s is None


def test_what_is_measured_in_no_time_is_not_kept(tmp_path: Path, cache: Path) -> None:
    journal.WORTH_S = 1000.0  # the fixture puts it back
    evolve(tmp_path / "a")
    assert not cache.exists()
