"""`forge init` and `forge validate`: write a config folder, check a config."""

from __future__ import annotations

from pathlib import Path

import typer

from agent_forge.cli.output import emit_json

MAX_SEED = 2**63 - 1
PRESET = typer.Option(None, "--preset", help="toy, smoke, tiny (default), small or 25m.")
SETS = typer.Option([], "--set", metavar="KEY=VALUE", help="Override one setting; repeatable.")
JSON = typer.Option(False, "--json", help="Print one JSON document.")


def init(
    folder: Path = typer.Argument(Path("config"), help="Where to write the config folder."),
    preset: str | None = PRESET,
    sets: list[str] = SETS,
    force: bool = typer.Option(False, "--force", help="Overwrite files that exist."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only list the files."),
) -> None:
    """Write pipeline_config.yaml and phase_configs/*.yaml, ready to edit."""
    from agent_forge.errors import AlreadyExists
    from agent_forge.pipeline.config import config_folder, load_config
    from agent_forge.store import files

    texts = config_folder(load_config(preset=preset, sets=tuple(sets)))
    paths = {folder / name: text for name, text in texts.items()}
    if folder.exists() and not folder.is_dir():
        raise AlreadyExists(f"{folder} exists and is not a folder", hint="name another one")
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there and not force:
        raise AlreadyExists(f"{there[0]} exists", hint="--force overwrites it")
    for path, text in paths.items():
        if not dry_run:
            files.write_bytes(path, text.encode())
    for path in paths:
        print(path)


def validate(
    path: Path | None = typer.Argument(None, help="A YAML or JSON file, or a config folder."),
    preset: str | None = PRESET,
    sets: list[str] = SETS,
    as_json: bool = JSON,
) -> None:
    """Check a config and print it as it would be used, with its hash."""
    from agent_forge.config.load import to_yaml
    from agent_forge.pipeline.config import load_config

    config = load_config(preset=preset, path=path, sets=tuple(sets))
    digest = config.canonical_hash()
    if as_json:
        emit_json(
            valid=True,
            config_hash=digest,
            parameters=config.model.parameters(),
            config=config.model_dump(mode="json"),
        )
        return
    print(to_yaml(config), end="")
    weights = f"{config.model.parameters():,} weights a model"
    typer.echo(f"valid, hash {digest[:12]}, {weights}", err=True)
