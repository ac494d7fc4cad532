"""`forge init` and `forge validate`: write a config folder, check a config."""

from __future__ import annotations

from pathlib import Path

import typer

from agent_forge.cli.output import emit_json
from agent_forge.errors import AlreadyExists
from agent_forge.store import files


def init(folder: Path, preset: str | None, sets: list[str], force: bool, dry_run: bool) -> None:
    """Write pipeline_config.yaml and phase_configs/*.yaml, ready to edit."""
    from agent_forge.pipeline.config import config_folder, load_config

    texts = config_folder(load_config(preset=preset, sets=tuple(sets)))
    paths = {folder / name: text for name, text in texts.items()}
    if folder.exists() and not folder.is_dir():
        raise AlreadyExists(f"{folder} exists and is not a folder", hint="name another one")
    existing = [path for path in paths if path.exists() or path.is_symlink()]
    if existing and not force:
        raise AlreadyExists(f"{existing[0]} exists", hint="--force overwrites it")
    for path, text in paths.items():
        if not dry_run:
            files.write_text(path, text)
    for path in paths:
        print(path)


def validate(path: Path | None, preset: str | None, sets: list[str], as_json: bool) -> None:
    """Check a config and print it as it would be used, with its hash."""
    from agent_forge.config.load import to_yaml
    from agent_forge.pipeline.config import load_config

    config = load_config(preset=preset, path=path, sets=tuple(sets))
    digest, parameters = config.canonical_hash(), config.model.parameters()
    if as_json:
        content = config.model_dump(mode="json")
        return emit_json(valid=True, config_hash=digest, parameters=parameters, config=content)
    print(to_yaml(config), end="")
    typer.echo(f"valid, hash {digest[:12]}, {parameters:,} weights a model", err=True)
