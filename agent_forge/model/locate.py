"""From what a user calls a model to its path: a path, a run, an id of the hub, or an alias.

`base+adapter` names two models. state.json of a phase lists the models that a run handed over.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_forge.config.load import did_you_mean
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.store import files
from agent_forge.store.container import SUFFIX, unpacked
from agent_forge.store.paths import SAFE_NAME
from agent_forge.store.sessions import SessionStore

ALIASES: dict[str, str] = files.read_json(Path(__file__).with_name("names.json"))["hub_aliases"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TRUNK = "trunk"  # what Phase 1 trains its specialists from


def locate_model(ref: str | Path, storage: Path | None = None) -> str:
    """The path of one model, downloaded if need be; a run stands for the model it ended with."""
    text = str(ref)
    if _exists(text):
        return _folder_of(text)
    root = storage or Path(os.environ.get("FORGE_STORAGE", "storage"))
    return "+".join(_one(part, root) for part in text.split("+"))


def locate_parents(refs: Sequence[str], storage: Path) -> tuple[list[str], str | None]:
    """The paths of models to merge, and their base; one run means its specialists and trunk."""
    if len(refs) == 1 and (specialists := specialists_of(refs[0], storage)):
        return specialists
    located = (locate_model(ref, storage) for ref in refs)
    parts = ([path] if _exists(path) else path.split("+") for path in located)
    return ["+".join(str(Path(path).resolve()) for path in several) for several in parts], None


def specialists_of(session: str, storage: Path) -> tuple[list[str], str] | None:
    """The specialists of a run and their trunk; None unless it has finished Phase 1."""
    models = handed_over(session, "cognate", storage)
    trunk = Path(models[0]).with_name(TRUNK) if models else None
    if trunk is None or not all(Path(p, "config.json").is_file() for p in (*models, str(trunk))):
        return None
    return models, str(trunk)


def newest_session(storage: Path) -> str | None:
    """The newest run that has finished Phase 1."""
    if not storage.exists():
        return None
    sessions = (row["session_id"] for row in SessionStore(storage).registry.get_all_sessions())
    return next((name for name in sessions if specialists_of(name, storage)), None)


def _exists(ref: str) -> bool:
    try:
        return Path(ref).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no name of a file
        return False


def _folder_of(ref: str) -> str:
    """A path that exists; of a model in one file, the folder that it is unpacked into."""
    path = Path(ref).expanduser()
    return str(unpacked(path)) if path.suffix == SUFFIX and path.is_file() else ref


def _one(ref: str, storage: Path) -> str:
    if _exists(ref):
        return _folder_of(ref)
    if SAFE_NAME.fullmatch(ref) and (storage / "sessions" / ref).is_dir():
        return _final_model(ref, storage)
    name = ALIASES.get(ref.lower(), ref)
    if HUB_ID.fullmatch(name):
        return _download(name)
    near = did_you_mean(ref, list(ALIASES))
    hint = "give a folder, an id of the Hugging Face hub (owner/name), or a session of forge run"
    ready = Path(ref).with_name(f"{files.READY}{Path(ref).name}")
    if ready.is_dir():
        hint = f"its writer was killed when it was done: rename {ready} to {ref}"
    raise NotFound(f"{ref} is not a folder, and no run has that name{near}", hint=hint)


def _final_model(session: str, storage: Path) -> str:
    """The one model that the last finished phase of a run handed over."""
    for phase in reversed(ORDER):
        if models := handed_over(session, phase, storage):
            if len(models) == 1:
                return models[0]
            hint = f"one of {', '.join(models)}"
            raise ConfigError(f"run {session} ends with {len(models)} models", hint=hint)
    raise NotFound(f"run {session} has no finished phase", hint=f"forge resume {session}")


def handed_over(session: str, phase: str, storage: Path) -> list[str]:
    """The models that a phase of a run handed over; none unless it is finished."""
    if not SAFE_NAME.fullmatch(session):
        return []
    folder = storage / "sessions" / session / phase_folder(phase)
    try:
        state: dict[str, Any] = files.read_checked(folder / "state.json")
    except (FileNotFoundError, DamagedFile):
        return []
    names = [str(output["name"]) for output in state.get("outputs", [])]
    return [str(folder / name) for name in names if SAFE_NAME.fullmatch(name)]


def _download(name: str) -> str:
    """The folder of a model of the hub, fetched unless it is on this disk."""
    from huggingface_hub import errors, snapshot_download

    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return str(snapshot_download(name, allow_patterns=wanted))
    except errors.GatedRepoError as error:
        hint = "accept it on its page, then `hf auth login`"
        raise ConfigError(f"{name} asks for a licence to be accepted", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(f"the hub has no model {name!r}, or it is private") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        kind, hint = type(error).__name__, "check the connection, or give a folder on this disk"
        problem = f"{name} does not exist on this disk and could not be downloaded ({kind})"
        raise NotFound(problem, hint=hint) from error
