"""PhaseReport: one description of what a phase found. Result, card and screens come from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_forge.contract.phase import NAMED_MODELS, ModelRef, PhaseContext, PhaseResult

Table = list[list[Any]]  # its first row is the head


@dataclass(frozen=True)
class Headline:
    """A phase in one line: a measure on unseen items, before and after it, and the verdict."""

    measure: str
    before: float | None  # None where nothing went in
    after: float
    verdict: str


@dataclass
class PhaseReport:
    """What a phase found, told once."""

    headline: Headline
    summary: str
    metrics: Mapping[str, Any] = field(default_factory=dict)  # by the specification's names
    tables: Sequence[Table] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # whatever else is worth recording

    def card(self) -> str:
        """The verdict and the first table as Markdown, for the cards of the models."""
        tables = [_markdown(table) for table in self.tables[:1]]
        return "\n\n".join(["## Measured on unseen items", self.headline.verdict, *tables])

    def result(
        self,
        ctx: PhaseContext,
        models: Sequence[ModelRef],
        model: Any = None,
        *,
        named: Mapping[str, ModelRef] | None = None,
    ) -> PhaseResult:
        """The result of the phase: `models` go on to the next one, `named` ones can be asked for.

        `model` is the network in memory that the specification's result carries.
        """
        artifacts = {
            "models": list(models),
            **self.details,
            "summary": self.summary,
            "tables": list(self.tables),
            "headline": asdict(self.headline),
            NAMED_MODELS: {name: ref.name for name, ref in (named or {}).items()},
        }
        return PhaseResult(True, model, ctx.phase, dict(self.metrics), artifacts, ctx.seconds)


def _markdown(table: Table) -> str:
    rows = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in table]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
