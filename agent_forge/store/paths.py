"""What may be a name, where things live below the storage root, and what can be written to."""

import os
import re
from pathlib import Path

from agent_forge.config.phases import phase_folder
from agent_forge.errors import CannotWrite, ConfigError, NameRefused
from agent_forge.store import files

SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
RESERVED = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")  # device names on Windows
CHECKPOINTS = "checkpoints"  # folder beside the models of a phase
NAME_BYTES, PATH_BYTES = 255, 4096  # the longest that file systems take
USER_FOLDER, USER_HOME = "FORGE_CACHE", "~/.cache/agent-forge"
MARK_BYTES = len(f"{files.TRASH}00000000-")  # what an unfinished folder has before its name


def safe_name(name: str, kind: str = "name") -> str:
    """Return the name if it can be one path segment on every system."""
    if not SAFE_NAME.fullmatch(name) or RESERVED.fullmatch(name):
        hint = "use 1 to 64 of a-z, 0-9, '_' and '-', beginning with a letter or digit"
        raise NameRefused(f"{kind} {name!r} is not allowed", hint=hint)
    return name


def child(root: Path, *names: str) -> Path:
    """Return root/names...; every name is safe and no link on the way leads elsewhere."""
    path = root
    for name in names:
        path = files.refuse_link(path / safe_name(name))
    return path


def model_id_for(session_id: str, phase_name: str, model_name: str) -> str:
    """Return one id per place: saving a model again keeps its id, and dots keep places apart."""
    return f"{phase_name}.{model_name}.{session_id}"


def model_directory(root: Path, session_id: str, phase_name: str, model_name: str) -> Path:
    """Return where a model lives: storage/sessions/<session>/<phase folder>/<model>."""
    if model_name == CHECKPOINTS:
        raise NameRefused(f"a model cannot be named {model_name!r}: its checkpoints live there")
    folder = phase_folder(safe_name(phase_name, "phase"))
    return child(root, "sessions", session_id, folder, model_name)


def user_cache() -> Path:
    """The folder of this user's cache."""
    try:
        return Path(os.environ.get(USER_FOLDER) or Path(USER_HOME).expanduser())
    except RuntimeError:
        problem = f"this user has no home; {USER_FOLDER} can name a folder"
        raise CannotWrite(USER_HOME, problem) from None


def require_root(root: Path) -> None:
    """Refuse a storage root that is something else than a folder."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is not a folder")


def require_writable(folder: Path) -> None:
    """Refuse a folder that could not be written; the probe leaves no trace."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CannotWrite(folder, f"{there} is not a folder")
    probe = files.unfinished(files.nearest_folder(folder) / "probe")
    with files.disk_errors(folder):
        os.close(files.disk.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        files.disk.remove(probe)


def require_short(folder: Path) -> None:
    """Refuse a folder whose name, or that of its unfinished version, the disk would not take."""
    sizes = [len(os.fsencode(part)) for part in folder.parts]
    sizes[-1:] = [MARK_BYTES + size for size in sizes[-1:]]
    whole = len(os.fsencode(folder.absolute())) + MARK_BYTES + NAME_BYTES
    if max(sizes, default=0) > NAME_BYTES or whole > PATH_BYTES:
        hint = f"the name of a folder has at most {NAME_BYTES - MARK_BYTES} bytes here"
        raise NameRefused(f"{str(folder)[:60]}... is too long a name", hint=hint)
