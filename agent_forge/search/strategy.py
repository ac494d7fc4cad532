"""What every strategy of search can do, so that whoever scores need not know which one it is."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from agent_forge.search.candidate import Candidate


@runtime_checkable
class Strategy(Protocol):
    """Ask what to score, tell the scores (-inf: failed), advance, until it is finished.

    The order in which scores arrive changes nothing, and a strategy made from `state()`, which is
    JSON, goes on exactly as this one would. There is no champion before the first score.
    """

    def ask(self) -> list[Candidate]: ...
    def tell(self, key: str, score: float, *, holdout: float | None = None) -> None: ...
    def advance(self) -> None: ...
    @property
    def finished(self) -> str | None: ...
    @property
    def champion(self) -> Candidate | None: ...
    def state(self) -> dict[str, Any]: ...
