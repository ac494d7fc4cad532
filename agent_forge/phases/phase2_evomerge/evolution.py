"""One evolution from its inputs to the champion, for the pipeline, the command line and Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.contract.phase import ModelRef
from agent_forge.merge.output import refuse_foreign, write
from agent_forge.phases.phase2_evomerge.checks import CHAMPION
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs, write_begun
from agent_forge.phases.phase2_evomerge.journal import LOG, WEIGHTS
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop, Listener
from agent_forge.phases.phase2_evomerge.report import (
    EvolutionReport,
    champion_files,
    confirm_champion,
    measure_verdict,
    summary,
)
from agent_forge.store import files, lock

BARS = " .:-=+*#%@"
Save = Callable[[EvolutionLoop, EvolutionReport | None], ModelRef]


@dataclass(frozen=True)
class EvolutionResult:
    """What came out of an evolution."""

    loop: EvolutionLoop
    report: EvolutionReport | None
    model: ModelRef

    @property
    def folder(self) -> Path:
        return self.loop.folder

    @property
    def model_path(self) -> Path:
        return self.model.path

    @property
    def origin(self) -> str:
        return self.loop.champion.origin

    @property
    def reason(self) -> str:
        return self.loop.reason

    @property
    def curve(self) -> list[float]:
        """The best fitness of each generation."""
        return [entry["best"] for entry in self.loop.search.history]

    @property
    def fitness(self) -> float:
        return self.curve[-1]

    @property
    def generations(self) -> int:
        return len(self.curve) - 1

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.loop)

    def plot(self) -> str:
        """The best fitness of each generation as a line of characters."""
        low, high = min(self.curve), max(self.curve)
        span = (high - low) or 1.0
        marks = [BARS[round((value - low) / span * (len(BARS) - 1))] for value in self.curve]
        return f"{low:.4f} [{''.join(marks)}] {high:.4f}"


def run_evolution(
    inputs: EvolutionInputs,
    *,
    device: str = "cpu",
    listen: Listener = lambda record: None,
    should_stop: Callable[[], bool] = lambda: False,
    save: Save | None = None,
) -> EvolutionResult:
    """Run an evolution, or go on with it, to the champion and the verdict.

    `save` stores the champion. Without it the folder is the evolution's own: it is locked, notes
    what it was begun with, and gets the champion; `listen` is told "begun" when it can be resumed.
    """
    if save is not None:
        return _run(inputs, device, listen, should_stop, save)
    inputs.require_room()
    folder = inputs.folder
    with files.disk_errors(folder):
        files.disk.make_directory(folder)
    with lock.held(folder):
        files.remove_leftovers(folder, deep=False)  # what is deeper may be someone's
        if (folder / WEIGHTS).is_dir():
            files.remove_leftovers(folder / WEIGHTS)
        for note in inputs.notes:
            listen({"event": "note", "text": note})
        result = _run(inputs, device, listen, should_stop, None)
        search = result.loop.search
        log: dict[str, Any] = {"history": search.history, "operators": search.operator_gains}
        log |= {"combo_usage": search.combo_usage, "seconds": result.loop.seconds}
        files.write_bytes(folder / LOG, files.to_json(files.finite(log)))
        return result


def _run(
    inputs: EvolutionInputs,
    device: str,
    listen: Listener,
    should_stop: Callable[[], bool],
    save: Save | None,
) -> EvolutionResult:
    inputs.refuse_damaged()
    loop = EvolutionLoop(inputs, device, listen=listen, should_stop=should_stop)
    if save is None:
        write_begun(inputs, loop.fingerprint)
        listen({"event": "begun"})
    loop.run()
    report = measure_verdict(loop)
    model = (save or _save)(loop, report)
    if save is not None:
        confirm_champion(model.path, loop, report)
    return EvolutionResult(loop, report, model)


def _save(loop: EvolutionLoop, report: EvolutionReport | None) -> ModelRef:
    """Write the champion into the folder of the evolution; an earlier one stays until it fits."""
    target, beside = loop.folder / CHAMPION, champion_files(loop, report)
    if target.exists():
        refuse_foreign(target)
    built = files.unfinished(target)
    try:
        write(loop.weights.weights(loop.champion.key), built, beside=beside)
        confirm_champion(built, loop, report)
        files.publish(built, target)
    finally:
        if built.exists():
            files.remove_tree(built, loop.folder)
    return ModelRef(CHAMPION, target, {})
