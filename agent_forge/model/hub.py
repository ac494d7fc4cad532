"""Uploading a model to a Hugging Face hub: what can be wrong with it is told before any request.

The folder is only read. A token comes from HF_TOKEN or `hf auth login`, the hub from HF_ENDPOINT.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    disable_progress_bars,
    validate_repo_id,
)

from agent_forge.errors import ConfigError, ForgeError, NotFound
from agent_forge.model.adapter import is_adapter
from agent_forge.model.card import read_head
from agent_forge.model.gguf import MODELFILE
from agent_forge.model.opened import open_model
from agent_forge.store import files
from agent_forge.store.records import CARD

REFUSED = (401, 403, 404)


class PlannedUpload(NamedTuple):
    """A checked model: its files by their names in the repository, and what its card says."""

    repo: str
    files: dict[str, Path]
    card: dict[str, Any]


def plan_upload(folder: Path, repo: str) -> PlannedUpload:
    """Check that a folder is a whole model with a card, without a request."""
    try:
        validate_repo_id(repo)
    except errors.HFValidationError as error:
        hint = "a repository is called OWNER/NAME"
        raise ConfigError(f"{repo!r} cannot be a repository: {error}", hint=hint) from None
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder", hint="forge models lists the models of runs")
    if is_adapter(folder):
        hint = f"make it whole first: forge merge --models BASE+{folder} OUT"
        raise ConfigError(f"{folder} is an adapter, not a whole model", hint=hint)
    open_model(folder)
    if not (folder / CARD).is_file():
        raise NotFound(f"{folder} has no card ({CARD})", hint="write one: what it is, made of what")
    listed: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # Of an editor, of git, unfinished; or an export of the model.
        hidden = any(part.startswith(".") for part in name.parts)
        exported = path.name.lower().endswith((".gguf", MODELFILE.lower()))
        if hidden or exported or (path.is_dir() and not path.is_symlink()):
            continue
        files.refuse_leaving(path)
        if not path.is_file():
            raise ConfigError(f"{path} is no file", hint="remove it, or put a file in its place")
        listed[name.as_posix()] = path
    return PlannedUpload(repo, listed, read_head(folder) or {})


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def upload(plan: PlannedUpload, *, private: bool, revision: str | None) -> tuple[str, str]:
    """Upload a model in one commit, so that a hub shows all of it or nothing; returns its address
    and the commit's."""
    if (token := get_token()) is None:
        hint = "hf auth login, or HF_TOKEN=..., with a token that may write"
        raise ConfigError(f"there is no token for {endpoint()}", hint=hint)
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=endpoint(), token=token, library_name="agent-forge")
    with _told_plainly(plan.repo):
        place = api.create_repo(plan.repo, private=private or None, exist_ok=True)
        if private and not api.model_info(place.repo_id).private:
            hint = "make it private on its page first, or do without --private"
            raise ConfigError(f"{place.repo_id} is there already, and public", hint=hint)
        if revision:
            api.create_branch(place.repo_id, branch=revision, exist_ok=True)
        added = [CommitOperationAdd(name, str(path)) for name, path in plan.files.items()]
        message = "Upload model with agent-forge"
        done = api.create_commit(place.repo_id, added, commit_message=message, revision=revision)
    return str(place), str(done.commit_url)


@contextlib.contextmanager
def _told_plainly(repo: str) -> Iterator[None]:
    """Turn what the hub's library raises into one line; no address with a signature is in it."""
    try:
        yield
    except errors.HfHubHTTPError as error:
        status, said = error.response.status_code, " ".join((error.server_message or "").split())
        problem = f"{endpoint()} refused {repo} ({status}{': ' if said else ''}{said})"
        hint = "is the name right, and may the token write there?" if status in REFUSED else ""
        raise ForgeError(problem, hint=hint) from error
    except (HTTPError, OSError, RuntimeError, ValueError, LookupError) as error:
        kind = type(error.__cause__ or error).__name__
        hint = "check the connection and HF_ENDPOINT, then run it again"
        raise ForgeError(f"{repo} was not uploaded to {endpoint()} ({kind})", hint=hint) from error
