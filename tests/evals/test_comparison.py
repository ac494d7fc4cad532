"""All that is told about two or more models on the same domains comes from one comparison."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from agent_forge.data.dataset_rows import Example
from agent_forge.evals.comparison import (
    ACCURACY,
    BITS,
    COLUMNS,
    DISCORDANT,
    NATS,
    Gain,
    PairedScores,
    compare,
    compare_scores,
    correct_together,
    detectable_gain,
    holm,
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


def test_the_measure_that_can_tell_is_told_first() -> None:
    """Free answers that nobody gets right: accuracy says nothing, loss does."""
    loss = np.linspace(1.0, 2.0, ITEMS)
    before, after = ItemScores([False] * ITEMS, loss.tolist(), [2] * ITEMS, []), scores(1, 0.5)
    found = compare([before], [after], DOMAINS[:1]).overall
    assert found.measures() == [BITS, ACCURACY]
    told = found.sentence("it")
    assert told.startswith("better than it by 0.")
    assert told.endswith(f"; accuracy cannot tell: 0.0 % and 2.5 %, 1 of {ITEMS} answers differ")
    few, enough = (
        compare([scores(0, 2.0)], [scores(n, 2.0)], DOMAINS[:1]).overall
        for n in (DISCORDANT - 1, DISCORDANT)
    )
    assert few.measures()[0] == BITS and enough.measures()[0] == ACCURACY
    assert "points" not in few.sentence() and enough.gains[ACCURACY].discordant == DISCORDANT
    assert compare(BEFORE[2:], AFTER[2:], DOMAINS[2:]).overall.measures() == [BITS]


def test_holm_by_hand() -> None:
    assert holm([]) == [] and holm([0.03]) == [0.03]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.02, 0.02]) == [0.04, 0.04]


def test_holm_is_closed_testing_by_bonferroni() -> None:
    """Each p becomes the largest, over all sets with it, of set size times the least p within."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 5):
        for _ in range(20):
            p = rng.random(size) ** 3
            sets = [s for n in range(1, size + 1) for s in itertools.combinations(range(size), n)]
            by_hand = [
                max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s)
                for i in range(size)
            ]
            found = holm(p.tolist())
            assert found == pytest.approx(by_hand)
            assert all(a >= b for a, b in zip(found, p, strict=True))


def test_comparisons_of_one_verdict_are_corrected_together() -> None:
    rng = np.random.default_rng(1)
    own = [ItemScores([False] * ITEMS, rng.normal(2, 0.1, ITEMS).tolist(), [2] * ITEMS, [])]
    rivals = [
        [ItemScores([False] * ITEMS, rng.normal(2 + gain, 0.1, ITEMS).tolist(), [2] * ITEMS, [])]
        for gain in (0.05, 0.02, 0.0)
    ]
    alone = [compare(rival, own, DOMAINS[:1]) for rival in rivals]
    together = correct_together(alone)
    for measure in (ACCURACY, BITS, NATS):
        p = [c.overall.gains[measure].p for c in alone]
        assert [c.overall.gains[measure].p for c in together] == p
        assert [c.overall.gains[measure].p_holm for c in together] == holm(p)
        assert [c.domains[0].gains[measure].p_holm for c in together] == holm(p)
    assert (
        correct_together(alone[:1])[0].overall.gains[BITS].p_holm == alone[0].overall.gains[BITS].p
    )


def test_the_corrected_p_decides_and_is_told() -> None:
    once = Gain(2.0, 1.9, 0.1, 0.01, 0.19, 0.02, 50)
    several = Gain(2.0, 1.9, 0.1, 0.01, 0.19, 0.02, 50, p_holm=0.06)
    assert (once.verdict, several.verdict) == ("better", "unclear")
    assert "p = 0.020" in once.sentence(BITS, "it") and "p = 0.060" in several.sentence(BITS, "it")
