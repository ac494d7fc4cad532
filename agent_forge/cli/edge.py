"""`forge edge`: a model of ours made smaller for a device, as a bundle that runs there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agent_forge.cli.output import emit, emit_json, emit_table
from agent_forge.cli.run import advise, conduct
from agent_forge.errors import AlreadyExists, ConfigError
from agent_forge.store import files

if TYPE_CHECKING:
    from agent_forge.pipeline.config import PipelineConfig

PHASE = "edge"
MODEL_TYPE = "agent_forge"  # of config.json, as in model/folder.py


def edge(
    model: str,
    out: Path,
    target: str,
    steps: int | None,
    preset: str | None,
    sets: list[str],
    seed: int,
    storage: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a model of ours smaller for a device (Phase 7 alone), and write a bundle for it."""
    from agent_forge.contract.phase import ModelRef
    from agent_forge.model.locate import locate_model
    from agent_forge.store.records import learned_record

    if out.exists():
        raise AlreadyExists(f"{out} exists; it stays", hint="name a folder that does not")
    own = [f"phases.{PHASE}.target={target}", f"runtime.seed={seed}", f"storage.root={storage}"]
    own += [] if steps is None else [f"phases.{PHASE}.cut_steps={steps}"]
    place = Path(locate_model(model, storage))
    config = _config(place, preset, (*own, *sets))
    if dry_run:
        from agent_forge.pipeline.orchestrator import PipelineOrchestrator

        plan = PipelineOrchestrator(config=config).controller(PHASE).plan(())
        return emit(as_json, ("", ""), [*asdict(plan).items()], **asdict(plan))
    given = ModelRef(place.name, place, learned_record(place))
    display = "none" if as_json else "auto"
    outcome = conduct(display, config, only=PHASE, given=[given], foreign=True)
    if not outcome["success"]:
        advise(storage, outcome)
        raise typer.Exit(outcome["exit_code"])
    from agent_forge.native.bundle import write_bundle

    result = outcome["results"][PHASE]
    sizes = write_bundle(result.artifacts["models"][-1].path, out)
    told = {"bundle": str(out), "session_id": outcome["session_id"], "files": sizes}
    if as_json:
        about = {"summary": result.artifacts["summary"], "metrics": result.metrics}
        return emit_json(**told, **about, tables=result.artifacts["tables"])
    head, *rows = result.artifacts["tables"][0]
    emit_table(head, rows)
    print(out)
    typer.echo(f"{result.artifacts['summary']}\nnext: make -C {out}", err=True)


def _config(place: Path, preset: str | None, sets: tuple[str, ...]) -> PipelineConfig:
    """The config of a run of Phase 7 alone, with the shape of this model."""
    from agent_forge.config.load import validate
    from agent_forge.config.settings import ModelSettings
    from agent_forge.pipeline.config import load_config

    record = files.read_json(place / "config.json")
    if not isinstance(record, dict) or record.get("model_type") != MODEL_TYPE:
        hint = "forge quantize makes those of other makers smaller"
        raise ConfigError(f"{place} holds no network of Agent Forge", hint=hint)
    shape = {name: record[name] for name in ModelSettings.model_fields if name in record}
    settings = validate(ModelSettings, shape, str(place / "config.json"))
    return load_config(preset=preset, sets=sets).model_copy(update={"model": settings})
