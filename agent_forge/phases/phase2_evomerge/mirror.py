"""W&B as a mirror of an evolution: its generations, their best models, and what came out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_forge.config.settings import TrackingSettings
from agent_forge.phases.phase2_evomerge.checkpoints import best_place, checkpoint_place
from agent_forge.phases.phase2_evomerge.checks import CHAMPION
from agent_forge.phases.phase2_evomerge.config import BEGUN, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.documents import RunPlace
from agent_forge.track.tracker import Listener
from agent_forge.track.wandb_sink import WandbSink

PHASE = "evomerge"
PREFIX = "generation/"  # of metrics, which the documents name with it and without it
PATIENCE_S = 30.0
CHAMPION_COLUMNS = ("generation", "origin", "best", "mean", "diversity")


@contextlib.contextmanager
def mirrored(
    listen: Listener, place: RunPlace, settings: EvoMergeSettings, folder: Path
) -> Iterator[Listener]:
    """Pass events on; if a W&B project is named, what is measured goes there too."""
    if not place.wandb_project:
        yield listen
        return
    tracking = TrackingSettings(
        wandb_project=place.wandb_project,
        wandb_offline=place.wandb_offline,
        wandb_timeout_s=PATIENCE_S,
    )
    sink = WandbSink(folder, tracking, settings.model_dump(mode="json"))
    champions: list[dict[str, Any]] = []  # of the generations

    def both(record: dict[str, Any]) -> None:
        if record["event"] == "begun":  # from here on the folder is its own
            sink.begin(PHASE, folder / BEGUN)
        elif record["event"] == "generation" and "replicate" not in record:
            number, metrics = record["generation"], record["metrics"]
            plain = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
            size = {"generation": number, "population_size": settings.population_size}
            sink.log(PHASE, number, {**size, **plain, **metrics})
            champion = {key: record[key] for key in CHAMPION_COLUMNS}
            champions.append(champion | record.get("scores", {}))
            best = best_place(folder, number)  # a checkpoint has what it takes to make it again
            kept = best if best.is_dir() else checkpoint_place(folder, number)
            if kept.exists():  # one that is resumed has left it behind
                sink.artifact(f"model_gen_{number}", kept)
        elif record["event"] == "result":
            sink.log(PHASE, None, record["metrics"])
            sink.tables({"champions": champions})
            sink.artifact(f"champion.{folder.name}", folder / CHAMPION)
        listen(record)

    try:
        yield both
    finally:
        sink.end()
        sink.close()
