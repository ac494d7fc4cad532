"""`forge push`: a model for others."""

from pathlib import Path

import typer

from agent_forge.cli.output import emit, emit_json, size
from agent_forge.errors import ConfigError


def push(
    source: Path, repo: str, private: bool, revision: str | None, dry_run: bool, as_json: bool
) -> None:
    """Upload a model folder to a Hugging Face hub, or only say what would be uploaded."""
    from agent_forge.model.hub import endpoint, plan_upload, upload

    if repo.count("/") != 1:
        raise ConfigError(f"{repo!r} is no name of a repository", hint="OWNER/NAME")
    plan = plan_upload(source, repo)
    sizes = {name: path.stat().st_size for name, path in plan.files.items()}
    about = {"repo": repo, "endpoint": endpoint(), "private": private, "revision": revision}
    if dry_run:
        emit(as_json, ("file", "bytes"), [*sizes.items()], **about, card=plan.card, files=sizes)
        said = [f"{key}: {value}" for key, value in plan.card.items()] or ["no metadata"]
        typer.echo("the card says " + "; ".join(said), err=True)
        return typer.echo(f"{size(sum(sizes.values()))} would go to {endpoint()}/{repo}", err=True)
    url, commit = upload(plan, private=private, revision=revision)
    if as_json:
        return emit_json(**about, url=url, commit=commit, card=plan.card, files=sizes)
    print(url)
