"""All that is told about two or more models on the same domains comes from one comparison."""

from __future__ import annotations

import pytest

from agent_forge.data.dataset_rows import Example
from agent_forge.evals.comparison import (
    ACCURACY,
    BITS,
    COLUMNS,
    PairedScores,
    compare,
    compare_scores,
    detectable_gain,
)
from agent_forge.evals.domains import Domain, smallest_gain
from agent_forge.evals.model_under_test import ItemScores

ITEMS = 40


def scores(right: int, loss: float) -> ItemScores:
    """The first `right` items are right; each has the same loss."""
    return ItemScores([i < right for i in range(ITEMS)], [loss] * ITEMS, [2] * ITEMS, [])


def domain(name: str, exact: bool = True) -> Domain:
    return Domain(name, tuple(Example(f"{i} ", "four") for i in range(ITEMS)), exact)


DOMAINS = [domain("sums"), domain("words"), domain("text", exact=False)]
BEFORE = [scores(5, 3.0), scores(30, 2.0), scores(0, 4.0)]
AFTER = [scores(35, 2.0), scores(10, 3.0), scores(0, 3.0)]


def test_scores_are_paired_by_domain() -> None:
    found = compare(BEFORE, AFTER, DOMAINS, seed=7)
    pairs = [
        PairedScores(d.name, a, b, d.sizes, d.exact)
        for d, a, b in zip(DOMAINS, BEFORE, AFTER, strict=True)
    ]
    assert found == compare_scores(pairs, seed=7)
    with pytest.raises(ValueError, match="shorter"):
        compare(BEFORE[:2], AFTER, DOMAINS)


def test_one_comparison_gives_verdict_sentence_rows_and_json() -> None:
    found = compare(BEFORE, AFTER, DOMAINS)
    assert found.worse_domains().startswith("; on words worse than it by 50.0 points")
    rows = found.rows()
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[0] for row in rows[:2]] == ["sums", "sums"] and rows[-1][0] == "all domains"
    assert rows[3][:5] == ("words", "accuracy, points", ITEMS, "75.0", "25.0")
    told = found.to_json()
    assert list(told["domains"]) == ["sums", "words", "text"]
    assert told["overall"][ACCURACY]["verdict"] == found.overall.gains[ACCURACY].verdict
    assert found.overall.gains[ACCURACY].candidate == pytest.approx((35 + 10) / 2 / ITEMS)
    alone = compare(BEFORE[2:], AFTER[2:], DOMAINS[2:])
    assert alone.overall.gains[BITS].verdict == "better" and alone.worse_domains() == ""
    assert {row[0] for row in alone.rows()} == {"text"}


def test_only_answers_count_for_the_gain_that_can_be_shown() -> None:
    assert detectable_gain(DOMAINS) == (2 * ITEMS, smallest_gain(2 * ITEMS))
    assert detectable_gain(DOMAINS[2:]) == (0, None)
