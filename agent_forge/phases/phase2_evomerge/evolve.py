"""An evolution from beginning to end, for the command line and for Python."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.config.load import did_you_mean, parse_set, read_one, validate
from agent_forge.config.load import merge as join
from agent_forge.errors import (
    AlreadyExists,
    ConfigError,
    DamagedFile,
    ForgeError,
    NotFinite,
    NotFound,
    PhaseFailed,
)
from agent_forge.merge.output import ProgressCallback, refuse_foreign, write
from agent_forge.model.locate import locate_parents
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evomerge import (
    OTHERS,
    EvolutionReport,
    Inputs,
    champion_files,
    confirm_champion,
    figures,
    listening,
    measure_verdict,
    refuse_senseless,
    resolve,
    splits_of,
)
from agent_forge.phases.phase2_evomerge.journal import BEGUN, read_journal
from agent_forge.phases.phase2_evomerge.prepare import open_parents, prepare
from agent_forge.phases.phase2_evomerge.run import CACHE, JOURNAL, WEIGHTS, EvolutionRun
from agent_forge.phases.phase2_evomerge.staff import crew_of
from agent_forge.search.candidate import Candidate
from agent_forge.search.candidate import lineage as ancestors
from agent_forge.search.settings import ACTS_IN
from agent_forge.store import files, lock, places

CHAMPION = "champion"
GIVEN = "parent_"  # begins the folders of networks that were given in memory
BARS = " .:-=+*#%@"
AUTO = "auto"
MOST = 10_000  # models, candidates and layers that a lineage may have
LINEAGE_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(NotFinite, RuntimeError),
)
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
    inputs: Inputs
    seed: int
    folder: Path
    names: tuple[str, ...]  # of the parents, for people

    @classmethod
    def of(
        cls,
        settings: EvoMergeSettings,
        refs: Sequence[str],
        base: str | None,
        seed: int,
        folder: Path,
        storage: Path = Path("storage"),
        names: Sequence[str] = (),
    ) -> Job:
        parents, known = locate_parents(refs, storage)
        below = locate_parents([base], storage)[0][0] if base else known
        if len({*names, *OTHERS}) < len(names) + len(OTHERS):
            raise ConfigError(f"the names {', '.join(names)} do not tell all models apart")
        refuse_place(folder, [*parents, *([below] if below else [])])
        _refuse_fewer(folder, settings.generations)
        settings = _split_as_begun(settings, folder)
        inputs = resolve(settings, parents, below, folder)
        return cls(settings, inputs, seed, folder, tuple(names or _names(parents)))

    @property
    def disk_bytes(self) -> int:
        """What the evolution has on the disk at most."""
        return self.settings.models_on_disk * self.inputs.nbytes // len(self.inputs.parents)

    def require_room(self) -> None:
        """Refuse an evolution that the disk cannot hold; what it has written is there already."""
        written = files.tree_bytes(self.folder) if self.folder.exists() else 0
        files.require_space(self.folder, max(0, self.disk_bytes - written))


@dataclass(frozen=True)
class Evolved:
    """What came out."""

    folder: Path
    model_path: Path
    origin: str
    reason: str
    curve: list[float]
    figures: dict[str, Any]
    conclusion: EvolutionReport | None
    seconds: dict[str, float]  # spent on merging, on measuring, and in all

    @property
    def fitness(self) -> float:
        return self.curve[-1]

    @property
    def generations(self) -> int:
        return len(self.curve) - 1

    def plot(self) -> str:
        """The best fitness of each generation as a line of characters."""
        low, high = min(self.curve), max(self.curve)
        span = (high - low) or 1.0
        marks = [BARS[round((value - low) / span * (len(BARS) - 1))] for value in self.curve]
        return f"{low:.4f} [{''.join(marks)}] {high:.4f}"


def settings_of(
    config: str | None, sets: Sequence[str], changes: Mapping[str, Any]
) -> EvoMergeSettings:
    """Defaults < preset or file < --set, options; the last two may not contradict each other.

    The strategy is `auto`, which found most in the measurements of docs/evomerge.md, unless a file,
    a preset of the guide or a setting that `auto` does not have asks for the scheme of the guide.
    """
    merged: dict[str, Any] = {}
    if config in PRESETS:
        merged = dict(PRESETS[config])
    elif config is not None:
        if not Path(config).exists():
            known = did_you_mean(config, list(PRESETS))
            raise ConfigError(f"{config!r} is neither a file nor a preset{known}")
        merged = read_one(Path(config))
    given: dict[str, Any] = {}
    for text in sets:
        given = join(given, parse_set(text))
    for name, value in changes.items():
        if given.get(name, value) != value:
            raise ConfigError(f"{name} is {given[name]} by --set and {value} by its own option")
    merged = join(merged, given)
    if config is None and all(AUTO in ACTS_IN.get(name, (AUTO,)) for name in merged):
        merged = {"strategy": AUTO, **merged}
    return validate(EvoMergeSettings, {**merged, **changes}, config or "options")


def check_early(settings: EvoMergeSettings, folder: Path, parents: int) -> None:
    """What can be checked before the models are there: they may still have to be trained."""
    refuse_place(folder, [])
    _refuse_fewer(folder, settings.generations)
    refuse_senseless(settings, splits_of(settings), parents)


def opened(place: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of an evolution, given that or a checkpoint in it, and how it was last run."""
    if place.suffix == ".pt" or not place.exists():
        raise NotFound(
            f"{place} is no checkpoint of this version"
            if place.suffix == ".pt"
            else f"there is no {place}",
            hint="they are called evolution_checkpoint_gen_N.json; the folder itself will do too",
        )
    folder = place if place.is_dir() else place.parent
    if not (folder / BEGUN).is_file():
        raise NotFound(f"{folder} holds no evolution", hint=f"it would have a file {BEGUN}")
    record = _begun(folder)
    if place.is_file() and files.read_checked(place).get("fingerprint") != record["fingerprint"]:
        raise ConfigError(f"{place} is of another evolution than the one in its folder")
    return folder, record


def _begun(folder: Path) -> dict[str, Any]:
    """What an evolution was begun with."""
    record = files.read_checked(folder / BEGUN)
    lists = [record.get(key) for key in ("parents", "names")]
    if not (
        all(isinstance(texts, list) and texts for texts in lists)
        and all(isinstance(text, str) for texts in lists for text in texts or ())
        and isinstance(record.get("settings"), dict)
        and isinstance(record.get("base"), str | None)
        and isinstance(record.get("seed"), int)
        and isinstance(record.get("fingerprint"), str)
    ):
        raise DamagedFile(folder / BEGUN, "not what an evolution was begun with")
    return record


def resumed(place: Path, gens: int | None, minutes: float | None, sets: Sequence[str] = ()) -> Job:
    """The evolution in a folder, with the settings that it was last run with.

    A fitness that is someone's own code has to be named again: a folder alone never runs any.
    """
    folder, record = opened(place)
    fitness = record["settings"].get("fitness")
    if fitness and f"fitness={fitness}" not in sets:
        again = shlex.join(["--resume", str(place), "--set", f"fitness={fitness}"])
        raise ConfigError(
            f"{folder} runs a fitness of its own for every candidate: {fitness!r}",
            hint=f"if it is yours: forge evo {again}",
        )
    places.require_writable(folder)
    begun = {**EvoMergeSettings.BEFORE, **record["settings"]}
    update: dict[str, Any] = {"generations": gens, "time_budget_minutes": minutes}
    changed = {name: value for name, value in update.items() if value is not None}
    settings = validate(EvoMergeSettings, {**begun, **changed}, str(folder / BEGUN))
    _refuse_fewer(folder, settings.generations)
    inputs = resolve(settings, record["parents"], record["base"], folder)
    return Job(settings, inputs, record["seed"], folder, tuple(record["names"]))


def evolve(
    job: Job,
    *,
    device: str = "cpu",
    listen: Callable[[dict[str, Any]], None] = lambda record: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evolved:
    """Run it, or go on with it, to the champion and the verdict.

    `listen` is told "begun" when the evolution is one that can go on after whatever happens.
    """
    job.require_room()
    with files.disk_errors(job.folder):
        files.disk.make_directory(job.folder)
    with lock.held(job.folder):
        files.remove_leftovers(job.folder, deep=False)  # what is deeper may be someone's
        if (job.folder / WEIGHTS).is_dir():
            files.remove_leftovers(job.folder / WEIGHTS)
        for note in job.inputs.notes:
            listen({"event": "note", "text": note})
        material = prepare(job.settings, job.inputs, device, job.folder)
        run = EvolutionRun(
            job.settings,
            material,
            job.folder,
            seed=job.seed,
            cache=job.folder / CACHE,
            crew=crew_of(job.settings, job.inputs, device, job.folder),
            listen=listening(job.settings, listen),
            should_stop=should_stop,
        )
        _begin(job, run.fingerprint)
        listen({"event": "begun"})
        run.run()
        champion = run.search.champion
        if champion is None:
            raise PhaseFailed("no candidate could be measured")
        conclusion = measure_verdict(run, job.inputs, job.names)
        target = job.folder / CHAMPION
        beside = champion_files(run, job.inputs, conclusion)
        write(run.nursery.weights(champion.key), target, force=True, beside=beside)
        try:
            confirm_champion(target, run, job.inputs, conclusion)
        except ForgeError:
            files.remove_tree(target, job.folder)
            raise
        log: dict[str, Any] = {"history": run.search.history}
        log |= {"operators": run.search.operator_gains}
        log |= {"combo_usage": run.search.combo_usage, "seconds": run.seconds}
        files.write_json(job.folder / "evolution_log.json", files.finite(log))
        return Evolved(
            job.folder,
            target,
            champion.origin,
            run.reason,
            [entry["best"] for entry in run.search.history],
            figures(run),
            conclusion,
            dict(run.seconds),
        )


def replay(lineage: Path, target: Path, progress: ProgressCallback | None = None) -> str:
    """Make a champion again from its lineage; returns the sha256 of its weights."""
    if target.exists():
        raise AlreadyExists(f"{target} exists", hint="name a folder that does not")
    places.require_writable(target.parent)
    record, known = _lineage(lineage)
    sources = record["models"]
    parents = [source["model"] for source in sources]
    models, base = open_parents(parents, parents.pop() if record["has_base"] else None)
    for weights, source in zip([*models, *([base] if base else [])], sources, strict=True):
        if weights.sha256() != source["sha256"]:
            raise ConfigError(f"{weights.label} is not the model that the lineage names")
    own = f"{files.TEMP}{secrets.token_hex(4)}-{target.name}.weights"
    scratch = places.nearest(target.parent) / own
    try:
        with _as_damage(lineage):
            made = CandidateWeights(models, base, known, scratch).weights(record["key"])
        written = write(made, target, progress=progress)
    finally:
        if scratch.exists():
            files.remove_tree(scratch, scratch.parent)
    return next(iter(written.sha256.values()))


def _lineage(path: Path) -> tuple[dict[str, Any], dict[str, Candidate]]:
    """The record of a champion's making and the candidates in it; what is none is named."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}", hint="a champion has its lineage.json beside it")
    record = files.read_json(path)
    with _as_damage(path):
        record = record.get("lineage", record)  # or the metadata of a pipeline's champion
        known = {data["key"]: Candidate.from_json(data) for data in record["candidates"]}
        models = [(source["model"], source["sha256"]) for source in record["models"]]
        if max(len(models), len(known), *map(_length, known.values())) > MOST:
            raise ValueError(f"more than {MOST:,} models, candidates or layers")
        parents = range(len(models) - {False: 0, True: 1}[record["has_base"]])
        for made in ancestors(known, record["key"]):  # all of them are there
            if made.kind == "parent" and made.operation["index"] not in parents:
                raise ValueError(f"there is no parent {made.operation['index']}")
    return record, known


def _length(candidate: Candidate) -> int:
    return len(candidate.operation.get("layers") or ())


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a lineage that we did not write is about the lineage."""
    try:
        yield
    except LINEAGE_ERRORS as error:
        raise _no_lineage(path, error) from error


def _no_lineage(path: Path, error: Exception) -> DamagedFile:
    return DamagedFile(
        path,
        f"not the lineage of a champion ({type(error).__name__}: {error})",
        hint="give the lineage.json beside a champion",
    )


def refuse_place(folder: Path, models: Sequence[str]) -> None:
    """Refuse a folder that cannot be written, or in which it could replace what is not its own."""
    here, other = folder.resolve(), "name another folder with --output-dir"
    there = next(place for place in (here, *here.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{folder} cannot be a folder: {there} is a file", hint=other)
    for ref in models:
        parts = [ref] if Path(ref).exists() else ref.split("+")
        for place in (Path(part).expanduser().resolve() for part in parts):
            inside = here in place.parents
            own = inside and place.relative_to(here).parts[0].startswith(GIVEN)
            if here == place or place in here.parents or (inside and not own):
                relation = "holds" if inside else "is" if here == place else "lies in"
                raise ConfigError(f"{folder} {relation} the model {place}", hint=other)
    if (here / CHAMPION).exists():
        refuse_foreign(here / CHAMPION)
    names = {path.name for path in here.iterdir()} if here.exists() else set()
    strange = sorted(n for n in names - {lock.LOCK_FILE, CACHE} if not n.startswith((GIVEN, ".")))
    if strange and not names & {BEGUN, JOURNAL}:
        raise ConfigError(f"{folder} is no evolution and holds {strange[0]}", hint=other)
    places.require_writable(folder)


def _refuse_fewer(folder: Path, generations: int) -> None:
    """Refuse to end before what a folder already holds: its champion would be replaced."""
    records = read_journal(folder / JOURNAL)
    done = max((r["generation"] for r in records if r["record"] == "distances"), default=0)
    if generations < done:
        raise ConfigError(
            f"{folder} holds {done} generations, {generations} are asked for",
            hint=f"give --gens {done} or more, or another folder for a shorter evolution",
        )


def _split_as_begun(settings: EvoMergeSettings, folder: Path) -> EvoMergeSettings:
    """The settings, with the split of the evolution in a folder where they do not name one."""
    if "split_by" in settings.model_fields_set or not (folder / BEGUN).is_file():
        return settings
    try:
        record = _begun(folder)
    except DamagedFile:  # it is written anew; the journal refuses other items than its own
        return settings
    begun = {**EvoMergeSettings.BEFORE, **record["settings"]}
    return settings.model_copy(update={"split_by": begun["split_by"]})


def _begin(job: Job, fingerprint: str) -> None:
    """Note what the folder is run with, for whoever goes on; the journal refused any other."""
    settings = job.settings.model_dump(mode="json")
    record = {
        "settings": {**settings, "data": [str(Path(name).resolve()) for name in settings["data"]]},
        "parents": list(job.inputs.parents),
        "names": list(job.names),
        "base": job.inputs.base,
        "seed": job.seed,
        "fingerprint": fingerprint,
    }
    files.write_bytes(job.folder / BEGUN, files.with_checksum(record))


def _names(parents: Sequence[str]) -> list[str]:
    """Short names of the parents; paths where these would not tell all models apart."""
    short = [Path(ref).name for ref in parents]
    return short if len({*short, *OTHERS}) == len(short) + len(OTHERS) else list(parents)
