"""A short evolution whose scores depend on the candidates' keys alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_forge.search.candidate import Candidate
from agent_forge.search.evolution import EvolutionSearch
from agent_forge.search.settings import EvolutionSettings

GROUPS = ("embeddings", "layers.0", "layers.1", "rest")
LAYERS = ("0", "1")
Score = Callable[[Candidate], float]


def by_key(candidate: Candidate) -> float:
    """A score that is different for every candidate and depends on nothing else."""
    return int(candidate.key[8:16], 16) / 2**32


def start(
    seed: int = 0, parents: int = 3, layers: tuple[str, ...] = LAYERS, **settings: Any
) -> EvolutionSearch:
    return EvolutionSearch(
        EvolutionSettings(**{"strategy": "spec", **settings}),
        parents=parents,
        groups=GROUPS,
        seed=seed,
        layers=layers,
    )


def step(evolution: EvolutionSearch, score: Score = by_key, diversity: float | None = None) -> None:
    for candidate in evolution.ask():
        evolution.tell(candidate.key, score(candidate))
    if diversity is not None:
        evolution.tell_distances(2 * diversity, 2.0)
    evolution.advance()


def run(
    evolution: EvolutionSearch, score: Score = by_key, diversity: float | None = None
) -> EvolutionSearch:
    while evolution.finished is None:
        step(evolution, score, diversity)
    return evolution
