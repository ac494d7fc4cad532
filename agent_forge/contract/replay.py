"""What a resumed phase replays instead of doing it again: decisions and measurements.

Nearly everything in a run follows from config and seed. What does not (a decision that looked at a
clock or a memory limit), and what is long and no step (a round of a search, an evaluation), is on
the disk before it takes effect, so that a killed run goes on with the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from agent_forge.store import files
from agent_forge.track.journal import Journal, read_lines

DECISIONS = "decisions.json"
MEASUREMENTS = "measurements.jsonl"


@dataclass
class _DecisionFile:
    path: Path | None
    made: list[dict[str, Any]] = field(default_factory=list)


class Decisions:
    """What was decided, by name and step; without a folder it is remembered in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file, self._stage = _DecisionFile(folder / DECISIONS if folder else None), ""
        if self._file.path and self._file.path.exists():
            self._file.made = files.read_checked(self._file.path)["decisions"]

    def of(self, stage: str) -> Decisions:
        """The decisions of one stage of the phase, in the same file."""
        view = Decisions()
        view._file, view._stage = self._file, stage
        return view

    def record(self, name: str, step: int, value: Any) -> None:
        """Decide; it is on the disk when this returns."""
        decision = {"stage": self._stage, "name": name, "step": step, "value": value}
        made = [*self._file.made, decision]
        if self._file.path:
            files.write_bytes(self._file.path, files.with_checksum({"decisions": made}))
        self._file.made = made

    def latest(self, name: str, step: int) -> Any:
        """The last decision of this name that holds at a step, or None."""
        return self.at(step).get(name)

    def at(self, step: int) -> dict[str, Any]:
        """All decisions that hold at a step; of one name, that of the latest step."""
        mine = [d for d in self._file.made if d["stage"] == self._stage and d["step"] <= step]
        return {d["name"]: d["value"] for d in sorted(mine, key=lambda d: int(d["step"]))}


class Measurements:
    """Values that were computed once, by record and key, in a file of JSON lines."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = folder / MEASUREMENTS, fingerprint
        self._known = {
            (line["record"], line["key"]): line["value"]
            for _, line in read_lines(self._path)
            if line.get("fingerprint") == fingerprint
        }

    def once(self, record: str, key: str, compute: Callable[[], Any]) -> Any:
        """The recorded value, or what `compute` returns, recorded before anybody uses it.

        It is returned as JSON gives it back, the first time as every other time: a dataclass as a
        dictionary, a tuple as a list.
        """
        if (record, key) not in self._known:
            value = compute()
            plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            line = {"record": record, "key": key, "value": plain, "fingerprint": self._fingerprint}
            journal = Journal(self._path)
            journal.write(line)
            journal.sync()
            self._known[record, key] = json.loads(json.dumps(plain))
        return self._known[record, key]
