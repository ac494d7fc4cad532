"""A folder of forge evo as others see it: like a run that has Phase 2 alone.

It has no metrics.jsonl: what its generations measured stands in its log, or in its newest
checkpoint as long as it goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_forge.errors import ForgeError
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.pipeline.run_view import PhaseView, RunView, Series
from agent_forge.store import files, lock
from agent_forge.track.journal import read_lines

PHASE, CHAMPION = "evomerge", "champion"
LOG, CHECKPOINTS = "evolution_log.json", "evolution_checkpoint_gen_*.json"
MEASURED = {  # in a generation, by the names of a run's metrics
    "best_fitness": "best",
    "avg_fitness": "mean",
    "min_fitness": "lowest",
    "max_fitness": "highest",
    "diversity_score": "diversity",
}


def is_evolution(folder: Path) -> bool:
    """True for a folder that forge evo made."""
    return (folder / BEGUN).is_file()


class EvolutionView(RunView):
    """One evolution in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.session_id = folder, folder.resolve().name
        self.refresh()

    def refresh(self) -> None:
        """Read all of it again: an evolution has few generations."""
        begun = files.read_checked(self.folder / BEGUN)
        self.session = {
            "created_at": (self.folder / BEGUN).stat().st_mtime,
            "config": {
                "phases": {PHASE: begun["settings"]},
                "runtime": {"seed": begun["seed"]},
            },
            "config_hash": begun["fingerprint"],
            "environment": {k: begun.get(k) for k in ("parents", "base", "device")},
        }
        verdict = self._read(f"{CHAMPION}/verdict.json")
        busy = "running" if lock.is_busy(self.folder) else "interrupted"
        self.status = "completed" if verdict else busy
        self.events, self.series, self._row = [], {}, {}
        for name, step, value in self._measured():
            self.series.setdefault((PHASE, name), Series()).add(step, 0.0, value)
        state: dict[str, Any] = {"status": self.status, "artifacts": _artifacts(verdict)}
        state["outputs"] = [{"name": CHAMPION}] if verdict else []
        state["metrics"] = {"best_merge_technique": self._read(LOG).get("technique")}
        self.phases = [PhaseView(PHASE, 2, self.folder, self.status, state=state)]

    def _read(self, name: str) -> dict[str, Any]:
        """A file of the folder; empty if there is none that can be read."""
        with contextlib.suppress(ForgeError, OSError):
            found = files.read_json(self.folder / name)
            return found if isinstance(found, dict) else {}
        return {}

    def _measured(self) -> Iterator[tuple[str, int | None, float]]:
        """What each generation measured, and each combination: name, generation, value."""
        saved = sorted(self.folder.glob(CHECKPOINTS), key=lambda p: int(p.stem.rpartition("_")[2]))
        newest = saved[-1].name if saved else LOG
        log = self._read(LOG) or self._read(newest)
        history = log.get("history", [])
        for name, value in log.get("references", {}).items() if history else ():
            yield f"generation/{name}", history[-1]["generation"], value
        for entry in history:
            for name, key in MEASURED.items():
                if isinstance(value := entry.get(key), int | float):
                    yield f"generation/{name}", entry["generation"], value
        made: dict[int, list[float]] = {n: [] for n in range(8)}
        for _, record in read_lines(self.folder / "journal.jsonl"):
            score, operation = record.get("score") or {}, record.get("operation") or {}
            if operation.get("kind") == "merge" and "fitness" in score:
                made[operation["combo"]].append(score["fitness"])
        for n, fitness in made.items() if history else ():
            yield f"combo/{n}/usage", None, len(fitness)
            if fitness:
                yield f"combo/{n}/avg_fitness", None, fmean(fitness)


def _artifacts(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What Phase 2 of a run records of a verdict; empty without one."""
    rivals, champion = verdict.get("rivals") or {}, verdict.get(CHAMPION) or {}
    best, names = verdict.get("best_parent"), list(champion.get("raw", {}))
    if not champion or best not in rivals:
        return {}
    scores = {CHAMPION: champion, **{name: rival["score"] for name, rival in rivals.items()}}
    rows = [[name, *(own["raw"].get(key) for key in names)] for name, own in scores.items()]
    sentences = [*verdict.get("sentences", []), *verdict.get("notes", [])]
    measure = {"measure": "fitness, best parent -> champion", "verdict": sentences[0]}
    ends = {"before": rivals[best]["score"]["fitness"], "after": champion["fitness"]}
    tables = [[["model", *names], *rows], [["verdict"], *([text] for text in sentences)]]
    return {"verdict": verdict, "headline": measure | ends, "tables": tables}
