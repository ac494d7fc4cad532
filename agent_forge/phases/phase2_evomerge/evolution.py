"""One evolution from its inputs to its champion, and how to make that again, byte by byte."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agent_forge.contract.phase import ModelRef
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFinite, NotFound
from agent_forge.evals import model_under_test
from agent_forge.merge.output import ProgressCallback, refuse_foreign, write
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge import heal as healing
from agent_forge.phases.phase2_evomerge import inputs as opening
from agent_forge.phases.phase2_evomerge import report as reporting
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, HEAL, HEALED, refuse_place
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.journal import LOG, WEIGHTS
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.planning import decided, plan_lines
from agent_forge.phases.phase2_evomerge.report import EvolutionReport
from agent_forge.phases.phase2_evomerge.told import champion_lineage, reference_fitness
from agent_forge.search.candidate import SHORT, Candidate, lineage
from agent_forge.store import files, lock, paths
from agent_forge.track.tracker import Listener
from agent_forge.train.lora import linear_layers

SAME_FOR_ALL_SEEDS = ("plain average", "base", "joint training")
NO_HEALING: dict[str, Any] = {"heal": 0.0, "heal_steps": 0, "heal_data": []}
LINEAGE = "lineage.json"
BARS = " .:-=+*#%@"
MOST = 10_000  # models, candidates and layers that a lineage may have
LINEAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)

Save = Callable[[EvolutionLoop, EvolutionReport | None], ModelRef]


class EvolutionResult(NamedTuple):
    """What came out of an evolution: its end, the verdict if there is one, and the champion; where
    it was asked for, the champion after healing too."""

    loop: EvolutionLoop
    report: EvolutionReport | None
    model: ModelRef
    healed: healing.HealedChampion | None = None


def plot(curve: Sequence[float]) -> str:
    """Values as a line of characters, between the least and the most of them."""
    low, high = min(curve), max(curve)
    span = (high - low) or 1.0
    marks = [BARS[round((value - low) / span * (len(BARS) - 1))] for value in curve]
    return f"{low:.4f} [{''.join(marks)}] {high:.4f}"


def run_evolution(
    inputs: EvolutionInputs,
    *,
    device: str = "cpu",
    listen: Listener = lambda record: None,
    should_stop: Callable[[], bool] = lambda: False,
    save: Save | None = None,
    spent_s: float = 0.0,
) -> EvolutionResult:
    """Run an evolution, or go on with it, to the champion and the verdict. `save` stores the
    champion of a run; without it the folder is the evolution's own and gets the champion. Of a
    time budget `spent_s` are gone already."""
    with contextlib.nullcontext() if save else _own_folder(inputs):
        inputs = decided(inputs, device, spent_s)
        for note in () if save else (*inputs.notes, *plan_lines(inputs)):
            listen({"event": "note", "text": note})
        loop = EvolutionLoop(inputs, device, listen=listen, should_stop=should_stop)
        if loop.settings.heal:
            linear_layers(loop.evaluator.model)  # without any it is refused before the work
        if not save:
            opening.write_begun(loop.inputs, loop.fingerprint, device)
            listen({"event": "begun"})  # from here on it can be resumed
        loop.run()
        healed = _heal(loop) if loop.settings.heal else None
        report = reporting.measure_verdict(loop)
        if report is not None and inputs.settings.replicates > 1:
            quiet = listen if not save else lambda record: None  # a run logs its own search
            report = replace(report, replicates=_replicates(loop, report, device, quiet))
        saved = (save or _save)(loop, report)
        if not loop.settings.heal and (loop.folder / HEALED).is_dir():
            place = loop.folder / HEALED if save else _named_after_champion(loop)
            old = f"{place} was healed before: this verdict is not about it"
            listen({"event": "note", "text": old})
        listen({"event": "result", "metrics": reporting.final_metrics(loop, report)})
        return EvolutionResult(loop, report, saved, healed)


@contextlib.contextmanager
def _own_folder(inputs: EvolutionInputs) -> Iterator[None]:
    """Hold the folder of an evolution, swept of what a killed one left there."""
    inputs.require_room()
    folder = inputs.folder
    with files.disk_errors(folder):
        files.disk.make_directory(folder)
    with lock.held(folder):
        files.remove_leftovers(folder, deep=False)  # what is deeper may be someone's
        for name in (WEIGHTS, HEAL):
            if (folder / name).is_dir():
                files.remove_leftovers(folder / name)
        yield


def _replicates(
    loop: EvolutionLoop, report: EvolutionReport, device: str, listen: Listener
) -> tuple[dict[str, Any], ...]:
    """What the same search amounts to with each of several seeds, its own first. The others are
    evolutions in folders of their own; what one amounted to stands in the journal of the first."""
    inputs, settings = loop.inputs, loop.settings
    until = [settings.generations, settings.max_evaluations, settings.time_budget_minutes]
    until += [settings.replicates, settings.verdict_items]
    same = (*inputs.names, *(name for name in opening.MODEL_NAMES if name in SAME_FOR_ALL_SEEDS))
    known = {name: report.measured[name] for name in same if name in report.measured}

    def search(number: int, seed: int) -> dict[str, Any]:
        folder = loop.folder / f"replicate_{number}"
        listen({"event": "note", "text": f"search {number} of {settings.replicates}: seed {seed}"})
        files.refuse_link(folder)
        with files.disk_errors(folder):
            files.disk.make_directory(folder)
        files.remove_leftovers(folder)
        alone = settings.model_copy(update=NO_HEALING)  # that is for the champion alone
        its_inputs = replace(inputs, settings=alone, seed=seed, folder=folder, branch=None)

        def tell(event: dict[str, Any]) -> None:
            listen({**event, "replicate": number})

        again = EvolutionLoop(its_inputs, device, listen=tell, should_stop=loop.should_stop)
        again.run()
        found = reporting.measure_verdict(again, known)
        assert found is not None
        again.weights.keep([])
        return reporting.replicate_row(seed, found)

    if inputs.branch is not None:  # one that begins elsewhere has no others to be compared with
        listen({"event": "note", "text": "a branch has no replicates: they are whole searches"})
        return ()
    rows = [reporting.replicate_row(inputs.seed, report)]
    for number in range(2, settings.replicates + 1):
        seed = (inputs.seed + number - 1) % 2**63
        record = loop.journal.once(
            "replicate", partial(search, number, seed), number=number, until=until
        )
        rows.append({name: record[name] for name in rows[0]})
    return tuple(rows)


def _save(loop: EvolutionLoop, report: EvolutionReport | None) -> ModelRef:
    """Write champion and log into the evolution's folder; an earlier one stays until it fits."""
    target, weights = loop.folder / CHAMPION, loop.weights.weights(loop.champion.key)
    confirm = partial(reporting.confirm_champion, loop=loop, report=report)
    _publish(weights, target, reporting.champion_files(loop, report), confirm)
    search, path = loop.search, loop.folder / LOG
    log: dict[str, Any] = {"history": search.history, "operators": search.operator_gains}
    log |= {"combo_usage": search.combo_usage, "seconds": loop.seconds}
    log |= {"references": reference_fitness(search), "technique": loop.technique}
    files.make_way(path, lambda path: "history" in files.read_json(path))
    files.write_bytes(path, files.to_json(files.finite(log)))
    return ModelRef(CHAMPION, target, {})


def _heal(loop: EvolutionLoop) -> healing.HealedChampion:
    """Teach the champion and write what comes out beside it."""
    healed = healing.heal(loop)
    again = champion_lineage(loop, loop.champion.key)
    beside = healed.files(again, reporting.evolved_head(loop))
    holdout, recorded = loop.inputs.splits["holdout"], healed.losses

    def confirm(built: Path) -> None:
        model_under_test.confirm(built, lambda model: model.first_losses(holdout), recorded)

    _publish(healed.weights, loop.folder / HEALED, beside, confirm)
    return healed


def _named_after_champion(loop: EvolutionLoop) -> Path:
    """Where a model that was healed before is: one of another champion than today's gets the name
    of that one, unless it holds more than was written here."""
    place = loop.folder / HEALED
    with contextlib.suppress(AlreadyExists, DamagedFile, LookupError, TypeError, OSError):
        key = str(files.read_json(place / "healing.json")["champion"]["key"])[:SHORT]
        away = place.with_name(f"{HEALED}_of_{key}")
        if not loop.champion.key.startswith(key) and key.isalnum() and not away.exists():
            refuse_foreign(place, "lineage.json")
            files.publish(place, away, replace=False)
            return away
    return place


def _publish(
    weights: Weights, target: Path, beside: dict[str, bytes], confirm: Callable[[Path], None]
) -> None:
    """Write a model aside, and put it in place if the file holds what was measured."""
    if target.exists():
        refuse_foreign(target, LINEAGE)
    with files.building(target) as built:
        write(weights, built, beside=beside)
        confirm(built)
        files.publish(built, target)


def replay(path: Path, target: Path, progress: ProgressCallback | None = None) -> str:
    """Write the champion of a lineage to a folder; returns the sha256 of its weights."""
    if target.exists():
        raise AlreadyExists(f"{target} exists", hint="name a folder that does not")
    paths.require_writable(target.parent)
    record, candidates = _read_lineage(path)
    refs = [source["model"] for source in record["models"]]
    parents, base = opening.open_models(refs, refs.pop() if record["has_base"] else None)
    for weights, source in zip(opening.with_base(parents, base), record["models"], strict=True):
        if weights.sha256() != source["sha256"]:
            raise ConfigError(f"{weights.label} is not the model that the lineage names")
        own_settings = weights.settings_sha256()
        if source.get("settings_sha256", own_settings) != own_settings:
            problem = "its config, tokenizer or adapter settings are not those of the lineage"
            raise ConfigError(f"{weights.label}: {problem}")
    refuse_place(target, [source["model"] for source in record["models"]])
    place = files.nearest_folder(target.parent) / f"{target.name}.weights"
    with files.building(place) as scratch:
        with _as_damage(path):
            champion = CandidateWeights(parents, base, candidates, scratch).weights(record["key"])
        written = write(champion, target, progress=progress)
    return next(iter(written.sha256.values()))


def _read_lineage(path: Path) -> tuple[dict[str, Any], dict[str, Candidate]]:
    """The record of a champion's making and the candidates in it; any other file is refused."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}", hint="a champion has its lineage.json beside it")
    record = _read_record(path)
    if record.get("taught"):
        problem = f"{path}: this model was taught {record['taught']}: no merge alone makes it again"
        hint = "the lineage.json of the champion beside it can be replayed"
        raise ConfigError(problem, hint=hint)
    with _as_damage(path):
        known = {data["key"]: Candidate.from_json(data) for data in record["candidates"]}
        models = [(source["model"], source["sha256"]) for source in record["models"]]
        layers = [len(c.operation.get("layers") or ()) for c in known.values()]
        if max(len(models), len(known), *layers) > MOST:
            raise ValueError(f"more than {MOST:,} models, candidates or layers")
        parents = range(len(models) - {False: 0, True: 1}[record["has_base"]])
        for candidate in lineage(known, record["key"]):  # all of them are there
            if candidate.kind == "parent" and candidate.operation["index"] not in parents:
                raise ValueError(f"there is no parent {candidate.operation['index']}")
    return record, known


def _read_record(path: Path) -> dict[str, Any]:
    """A lineage, alone or in the metadata of a pipeline's champion; what is none is refused."""
    try:
        record = files.read_json(path)
    except DamagedFile:
        if path.name == LINEAGE:
            raise
        record = None
    record = record.get("lineage", record) if isinstance(record, dict) else None
    if not isinstance(record, dict) or not {"key", "candidates", "models"} & {*record}:
        problem = f"{path} is not the lineage of a champion"
        raise ConfigError(problem, hint=f"give the {LINEAGE} beside a champion")
    return record


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a lineage that was not written here is about the lineage."""
    try:
        yield
    except (*LINEAGE_ERRORS, NotFinite) as error:
        problem = f"not the lineage of a champion ({type(error).__name__}: {error})"
        hint = f"give the {LINEAGE} beside a champion"
        raise DamagedFile(path, problem, hint=hint) from error
