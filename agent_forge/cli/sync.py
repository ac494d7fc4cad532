"""`forge sync`: what a run measured, in W&B or trackio."""

import importlib
import os
from pathlib import Path

import typer

from agent_forge.cli.output import emit_json
from agent_forge.errors import ConfigError

SPACES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # where trackio sends to, if it is told


def sync(session: str, to: str, online: bool, storage: Path, as_json: bool) -> None:
    """Copy what a run measured into one run of W&B or trackio, on this machine unless --online."""
    from agent_forge.config.settings import TrackingSettings
    from agent_forge.store.sessions import SessionStore, read_session
    from agent_forge.track.sync import replay

    folder = SessionStore(storage).find(session)
    record = read_session(folder)
    library = _library(to, online)
    project = record["config"].get("tracking", {}).get("wandb_project")
    settings = {"wandb_project": project} if project else {}
    told = replay(folder, record, TrackingSettings(wandb_offline=not online, **settings), library)
    if as_json:
        return emit_json(to=to, online=online, **told)
    print(told["place"] or told["name"])
    done = "it is there already" if told["known"] else f"{told['sent']} lines of metrics"
    typer.echo(f"{to} run {told['name']}: {done}", err=True)
    if told["place"] and not online:
        typer.echo(f"next: wandb sync {told['place']} uploads it", err=True)


def _library(to: str, online: bool) -> object:
    """The library to hand it to, if it goes where it is meant to."""
    if to not in ("wandb", "trackio"):
        raise ConfigError(f"--to {to!r}: wandb or trackio")
    if to == "trackio" and online != any(os.environ.get(name) for name in SPACES):
        state = "neither is set" if online else "one is set, and --online is not given"
        raise ConfigError(f"trackio sends to {' or '.join(SPACES)}: {state}")
    try:
        return importlib.import_module(to)
    except ImportError:
        raise ConfigError(f"{to} is not installed", hint=f"pip install {to}") from None
