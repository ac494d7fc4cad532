"""Where the models of an evolution come from: folders, adapters, runs, or the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from agent_forge.config.load import did_you_mean
from agent_forge.config.phases import phase_folder
from agent_forge.errors import ConfigError, NotFound
from agent_forge.phases.phase1_cognate import NAMES
from agent_forge.store.paths import SAFE_NAME
from agent_forge.store.sessions import SessionStore

KNOWN = {
    "deepseek": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "nemotron": "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B",
    "qwen2": "Qwen/Qwen2-1.5B-Instruct",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TRUNK = "trunk"


def locate(refs: Sequence[str], storage: Path) -> tuple[list[str], str | None]:
    """Folders of the models, and their base where it is known.

    A single name may be a finished run, whose three specialists and trunk are meant.
    """
    if len(refs) == 1 and (found := of_session(refs[0], storage)):
        return found
    return ["+".join(_folder(part) for part in ref.split("+")) for ref in refs], None


def of_session(session: str, storage: Path) -> tuple[list[str], str] | None:
    """The specialists of a run and their trunk, if it has finished Phase 1."""
    if not SAFE_NAME.fullmatch(session):
        return None
    folder = storage / "sessions" / session / phase_folder("cognate")
    if not all((folder / name / "config.json").is_file() for name in (*NAMES, TRUNK)):
        return None
    return [str(folder / name) for name in NAMES], str(folder / TRUNK)


def newest_session(storage: Path) -> str | None:
    """The newest run that has finished Phase 1."""
    if not storage.exists():
        return None
    for row in SessionStore(storage).registry.get_all_sessions():
        if of_session(row["session_id"], storage):
            return str(row["session_id"])
    return None


def _folder(ref: str) -> str:
    if Path(ref).exists():
        return str(Path(ref).resolve())
    name = KNOWN.get(ref.lower(), ref)
    if not HUB_ID.fullmatch(name):
        raise NotFound(
            f"there is no model {ref!r}{did_you_mean(ref, list(KNOWN))}",
            hint="a folder, an id of the Hugging Face hub (owner/name), or a session of forge run",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return str(snapshot_download(name, allow_patterns=wanted))
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} asks for a licence to be accepted",
            hint="accept it on its page, then `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(f"the hub has no model {name!r}, or it is private") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise NotFound(
            f"{name} is not on this disk and could not be downloaded ({type(error).__name__})",
            hint="check the connection, or download it elsewhere and give its folder",
        ) from error
