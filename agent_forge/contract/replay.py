"""What a resumed phase replays instead of doing it again: decisions and measurements.

What does not follow from config and seed (a decision that looked at a clock or a memory limit),
and what is long and no step (a round of a search), is on the disk before it takes effect.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Self

from agent_forge.store import files
from agent_forge.track.journal import Journal, read_lines

DECISIONS = "decisions.json"
MEASUREMENTS = "measurements.jsonl"


class DecisionLog:
    """What was decided, by name and step; without a folder it is remembered in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path, self._stage = folder / DECISIONS if folder else None, ""
        self._decisions: list[dict[str, Any]] = []
        if self._path and self._path.exists():
            self._decisions = files.read_checked(self._path)["decisions"]

    def of(self, stage: str) -> Self:
        """The decisions of one stage of the phase, in the same file and list."""
        view = copy.copy(self)
        view._stage = stage
        return view

    def record(self, name: str, step: int, value: Any) -> None:
        """Decide; it is on the disk when this returns."""
        decision = {"stage": self._stage, "name": name, "step": step, "value": value}
        if self._path:
            files.write_checked(self._path, {"decisions": [*self._decisions, decision]})
        self._decisions.append(decision)

    def at(self, step: int) -> dict[str, Any]:
        """All decisions that hold at a step; of one name, that of the latest step."""
        mine = [d for d in self._decisions if d["stage"] == self._stage and d["step"] <= step]
        return {d["name"]: d["value"] for d in sorted(mine, key=lambda d: int(d["step"]))}


def are_measurements(path: Path) -> bool:
    """True if a file has values that a phase measured, or nothing."""
    return not path.stat().st_size or any("fingerprint" in line for _, line in read_lines(path))


class MeasurementLog:
    """Values that were computed once, by record and key, in a file of JSON lines."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = folder / MEASUREMENTS, fingerprint
        self._values = {
            (line["record"], line["key"]): line["value"]
            for _, line in read_lines(self._path)
            if line.get("fingerprint") == fingerprint
        }

    def once(self, record: str, key: str, compute: Callable[[], Any]) -> Any:
        """The value of `compute()`, which a resumed phase does not compute again.

        It is on the disk before it is returned, always as JSON gives it back: a dataclass as a
        dictionary, a tuple as a list. What `compute` would log is to be logged from its value, so
        that it is logged in a resumed run as well.
        """
        if (record, key) not in self._values:
            value = compute()
            plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            line = {"record": record, "key": key, "value": plain, "fingerprint": self._fingerprint}
            journal = Journal(self._path)
            journal.write(line)
            journal.sync()
            self._values[record, key] = json.loads(json.dumps(plain))
        return self._values[record, key]
