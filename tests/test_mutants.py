"""Each mutant of tests/mutants.py still finds its line, so that `make soak` can break it."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_a_mutant_occurs_exactly_once(mutant: Mutant) -> None:
    source = (ROOT / "agent_forge" / mutant.file).read_text(encoding="utf-8")
    broken = mutant.apply(source)
    assert broken != source
    ast.parse(broken)
    assert (ROOT / mutant.test).is_file()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("source", ["", "x = 1\nx = 1\n"])
def test_a_line_that_is_missing_or_ambiguous_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="times, not once"):
        Mutant("m", "f.py", "x = 1", "x = 2", "t.py").apply(source)
