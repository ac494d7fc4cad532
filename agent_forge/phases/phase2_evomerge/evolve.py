"""An evolution from beginning to end, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.config.load import check, did_you_mean, parse_set, read_one
from agent_forge.config.load import merge as join
from agent_forge.errors import ConfigError, NotFound, PhaseFailed
from agent_forge.merge.output import write
from agent_forge.merge.weights import open_weights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evomerge import (
    Conclusion,
    Inputs,
    champion_files,
    conclude,
    prepare,
    resolve,
)
from agent_forge.phases.phase2_evomerge.nursery import Nursery
from agent_forge.phases.phase2_evomerge.run import CACHE, EvolutionRun
from agent_forge.phases.phase2_evomerge.sources import locate
from agent_forge.search.candidate import Candidate
from agent_forge.store import files, lock

BEGUN = "evolution.json"  # what a folder was begun with
CHAMPION = "champion"
BARS = " .:-=+*#%@"
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"generations": 20, "population_size": 4, "fitness_subset_size": 100},
    "production": {
        "generations": 100,
        "convergence_patience": 10,
        "min_diversity": 0.35,
        "fitness_subset_size": 1000,
    },
    "speed": {"fitness_weights": {"perplexity": 0.3, "accuracy": 0.2, "speed": 0.4, "memory": 0.1}},
}


@dataclass(frozen=True)
class Job:
    """An evolution that can be started: everything in it was checked."""

    settings: EvoMergeSettings
    parents: tuple[str, ...]
    inputs: Inputs
    seed: int
    folder: Path

    @classmethod
    def of(
        cls,
        settings: EvoMergeSettings,
        refs: Sequence[str],
        base: str | None,
        seed: int,
        folder: Path,
        storage: Path = Path("storage"),
    ) -> Job:
        parents, known = locate(refs, storage)
        below = locate([base], storage)[0][0] if base else known
        inputs = resolve(settings, parents, below, folder)
        return cls(settings, tuple(parents), inputs, seed, folder)


@dataclass(frozen=True)
class Evolved:
    """What came out."""

    folder: Path
    model_path: Path
    origin: str
    fitness: float
    generations: int
    reason: str
    curve: list[float]
    conclusion: Conclusion | None

    def plot(self) -> str:
        """The best fitness of each generation as a line of characters."""
        low, high = min(self.curve), max(self.curve)
        span = (high - low) or 1.0
        marks = [BARS[round((value - low) / span * (len(BARS) - 1))] for value in self.curve]
        return f"{low:.4f} [{''.join(marks)}] {high:.4f}"


def settings_of(
    preset: str | None, path: Path | None, sets: Sequence[str], changes: Mapping[str, Any]
) -> EvoMergeSettings:
    """Defaults < preset < file < --set < options."""
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}{did_you_mean(preset, list(PRESETS))}")
    merged: dict[str, Any] = dict(PRESETS.get(preset or "", {}))
    if path is not None:
        merged |= read_one(path)
    for text in sets:
        merged = join(merged, parse_set(text))
    return check(EvoMergeSettings, {**merged, **changes}, str(path or "options"))


def resumed(place: Path, gens: int | None, minutes: float | None) -> Job:
    """The evolution in a folder, with the settings that it was begun with."""
    if place.suffix == ".pt":
        raise NotFound(
            f"{place} is no checkpoint of this version",
            hint="they are called evolution_checkpoint_gen_N.json; the folder itself will do too",
        )
    folder = place if place.is_dir() else place.parent
    if not (folder / BEGUN).is_file():
        raise NotFound(f"{folder} holds no evolution", hint=f"it would have a file {BEGUN}")
    record = files.read_sealed(folder / BEGUN)
    settings = check(EvoMergeSettings, record["settings"], str(folder / BEGUN))
    update: dict[str, Any] = {"generations": gens, "time_budget_minutes": minutes}
    settings = settings.model_copy(update={k: v for k, v in update.items() if v is not None})
    inputs = resolve(settings, record["parents"], record["base"], folder)
    return Job(settings, tuple(record["parents"]), inputs, record["seed"], folder)


def evolve(
    job: Job,
    *,
    device: str = "cpu",
    listen: Callable[[dict[str, Any]], None] = lambda record: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evolved:
    """Run it, or go on with it, to the champion and the verdict."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with lock.held(job.folder):
        _begin(job)
        for note in job.inputs.notes:
            listen({"event": "note", "text": note})
        material = prepare(job.settings, job.inputs, device, job.folder)
        run = EvolutionRun(
            job.settings,
            material,
            job.folder,
            seed=job.seed,
            cache=job.folder / CACHE,
            listen=listen,
            should_stop=should_stop,
        )
        run.run()
        champion = run.search.champion
        if champion is None:
            raise PhaseFailed("no candidate could be measured")
        names = _names(job.parents)
        conclusion = conclude(run, job.inputs, names)
        target = job.folder / CHAMPION
        beside = champion_files(run, job.inputs, conclusion)
        write(run.nursery.weights(champion.key), target, force=True, beside=beside)
        log: dict[str, Any] = {"history": run.search.history}
        log |= {"operators": run.search.operator_gains}
        log |= {"combo_usage": run.search.combo_usage, "seconds": run.seconds}
        files.write_json(job.folder / "evolution_log.json", files.finite(log))
        return Evolved(
            job.folder,
            target,
            champion.origin,
            run.search.scores[champion.key],
            run.search.history[-1]["generation"],
            run.reason,
            [entry["best"] for entry in run.search.history],
            conclusion,
        )


def replay(lineage: Path, target: Path) -> str:
    """Make a champion again from its lineage; returns the sha256 of its weights."""
    record = files.read_json(lineage)
    parents = [open_weights(ref) for ref in record["parents"]]
    for weights, digest in zip(parents, record["parents"].values(), strict=True):
        if weights.sha256() != digest:
            raise ConfigError(f"{weights.label} is not the parent that the lineage names")
    base = open_weights(record["base"]) if record["base"] else None
    known = {data["key"]: Candidate.from_json(data) for data in record["candidates"]}
    nursery = Nursery(parents, base, known, target.parent / f".{target.name}.weights")
    written = write(nursery.weights(record["key"]), target)
    nursery.keep([])
    return next(iter(written.sha256.values()))


def _begin(job: Job) -> None:
    """Note what the folder is begun with; another evolution in it is refused by its journal."""
    path = job.folder / BEGUN
    if not path.exists():
        record = {
            "settings": job.settings.model_dump(mode="json"),
            "parents": list(job.parents),
            "base": job.inputs.base,
            "seed": job.seed,
        }
        files.write_bytes(path, files.sealed(record))


def _names(parents: Sequence[str]) -> list[str]:
    """Short names of the parents; paths where the last parts coincide."""
    short = [Path(ref).name for ref in parents]
    return short if len(set(short)) == len(short) else list(parents)
