"""One evolution in a folder of its own, for the command line and Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from agent_forge.contract.phase import ModelRef
from agent_forge.merge.output import refuse_foreign, write
from agent_forge.phases.phase2_evomerge import report as reporting
from agent_forge.phases.phase2_evomerge.checks import CHAMPION
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs, write_begun
from agent_forge.phases.phase2_evomerge.journal import LOG, WEIGHTS
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop, Listener
from agent_forge.phases.phase2_evomerge.report import EvolutionReport
from agent_forge.store import files, lock

BARS = " .:-=+*#%@"


class EvolutionResult(NamedTuple):
    """What came out of an evolution: its end, the verdict if there is one, and the champion."""

    loop: EvolutionLoop
    report: EvolutionReport | None
    model: ModelRef


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
) -> EvolutionResult:
    """Run an evolution in a folder of its own, or go on with it, to the champion and the verdict.

    The folder is locked, notes what it was begun with, and gets the champion; `listen` is told
    "begun" when it can be resumed.
    """
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
        loop = EvolutionLoop(inputs, device, listen=listen, should_stop=should_stop)
        write_begun(inputs, loop.fingerprint)
        listen({"event": "begun"})
        loop.run()
        report = reporting.measure_verdict(loop)
        model, search = _save(loop, report), loop.search
        log: dict[str, Any] = {"history": search.history, "operators": search.operator_gains}
        log |= {"combo_usage": search.combo_usage, "seconds": loop.seconds}
        files.write_json(folder / LOG, files.finite(log))
        return EvolutionResult(loop, report, model)


def _save(loop: EvolutionLoop, report: EvolutionReport | None) -> ModelRef:
    """Write the champion into the folder of the evolution; an earlier one stays until it fits."""
    target, beside = loop.folder / CHAMPION, reporting.champion_files(loop, report)
    if target.exists():
        refuse_foreign(target)
    built = files.unfinished(target)
    try:
        write(loop.weights.weights(loop.champion.key), built, beside=beside)
        reporting.confirm_champion(built, loop, report)
        files.publish(built, target)
    finally:
        if built.exists():
            files.remove_tree(built, loop.folder)
    return ModelRef(CHAMPION, target, {})
