"""Decisions that had to look at a clock or a memory limit, recorded before they take effect.

Everything else in a run follows from config and seed. These do not, so a killed run that resumes
finds them here and does the same at the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_forge.store import files

FILE = "decisions.json"


class Decisions:
    """What was decided, by name and step; without a folder it is remembered in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder else None
        self._made: list[dict[str, Any]] = []
        if self._path and self._path.exists():
            self._made = files.read_sealed(self._path)["decisions"]

    def record(self, name: str, step: int, value: Any) -> None:
        """Decide; it is on the disk when this returns."""
        made = [*self._made, {"name": name, "step": step, "value": value}]
        if self._path:
            files.write_bytes(self._path, files.sealed({"decisions": made}))
        self._made = made

    def latest(self, name: str, step: int) -> Any:
        """The last decision of this name that holds at a step, or None."""
        held = [d for d in self._made if d["name"] == name and d["step"] <= step]
        newest = max((d["step"] for d in held), default=None)
        return [d["value"] for d in held if d["step"] == newest][-1] if held else None

    def at(self, step: int) -> dict[str, Any]:
        """All that holds at a step."""
        names = dict.fromkeys(d["name"] for d in self._made if d["step"] <= step)
        return {name: self.latest(name, step) for name in names}
