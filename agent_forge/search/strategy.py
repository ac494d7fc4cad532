"""What every strategy of search can do, so that whoever scores need not know which one it is."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from agent_forge.search.candidate import Candidate


@runtime_checkable
class Strategy(Protocol):
    """Ask, tell, advance, until it is finished.

    The order in which scores arrive changes nothing, and a strategy made from `state()` goes on
    exactly as this one would.
    """

    def ask(self) -> list[Candidate]:
        """What this generation still wants scored, in a fixed order."""

    def tell(self, key: str, score: float, *, holdout: float | None = None) -> None:
        """The score of a candidate, higher is better; -inf if it failed."""

    def advance(self) -> None:
        """Close the generation once nothing is left to ask."""

    @property
    def finished(self) -> str | None:
        """Why there is no further generation, or None."""

    @property
    def champion(self) -> Candidate | None:
        """The best so far; None as long as nothing has a score."""

    def state(self) -> dict[str, Any]:
        """Everything that was told, as JSON."""
