"""Decisions that had to look at a clock or a memory limit, recorded before they take effect.

Everything else in a run follows from config and seed. These do not, so a killed run that resumes
finds them here and does the same at the same step of the same stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_forge.store import files

FILE = "decisions.json"


@dataclass
class _Book:
    path: Path | None
    made: list[dict[str, Any]] = field(default_factory=list)


class Decisions:
    """What was decided, by name and step; without a folder it is remembered in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._book, self._stage = _Book(folder / FILE if folder else None), ""
        if self._book.path and self._book.path.exists():
            self._book.made = files.read_checked(self._book.path)["decisions"]

    def of(self, stage: str) -> Decisions:
        """Those of one stage of the phase, in the same file."""
        view = Decisions()
        view._book, view._stage = self._book, stage
        return view

    def record(self, name: str, step: int, value: Any) -> None:
        """Decide; it is on the disk when this returns."""
        decision = {"stage": self._stage, "name": name, "step": step, "value": value}
        made = [*self._book.made, decision]
        if self._book.path:
            files.write_bytes(self._book.path, files.with_checksum({"decisions": made}))
        self._book.made = made

    def latest(self, name: str, step: int) -> Any:
        """The last decision of this name that holds at a step, or None."""
        held = [d for d in self._held(step) if d["name"] == name]
        newest = max((d["step"] for d in held), default=None)
        return [d["value"] for d in held if d["step"] == newest][-1] if held else None

    def at(self, step: int) -> dict[str, Any]:
        """All that holds at a step."""
        return {d["name"]: self.latest(d["name"], step) for d in self._held(step)}

    def _held(self, step: int) -> list[dict[str, Any]]:
        return [d for d in self._book.made if d["stage"] == self._stage and d["step"] <= step]
