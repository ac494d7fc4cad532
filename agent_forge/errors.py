"""One exception per way to fail. Each carries its exit code and, where there is one, the next step.

Exit codes: 1 failed, 2 usage or invalid config, 3 handoff not met, 4 damaged or hostile input,
5 resources (disk, memory), 6 run directory busy, 130 interrupted and resumable.
"""

from pathlib import Path


class ForgeError(Exception):
    """A failure that a user can read: what is wrong, and in `hint` what to do about it."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def pauses(self) -> bool:
        """True if a run that it stopped can go on later: resources were short, or it was asked."""
        return self.exit_code in (5, 130)


class ConfigError(ForgeError, exit_code=2):
    """A setting is unknown, malformed or contradicts another."""


class NameRefused(ForgeError, exit_code=2):
    """A name that could leave the storage root, or that some file system would not take."""


class NotFound(ForgeError, exit_code=2):
    """What was asked for does not exist."""


class AlreadyExists(ForgeError, exit_code=2):
    """Something that must not be overwritten is in the way."""


class DamagedFile(ForgeError, exit_code=4):
    """A file is not what was written: truncated, altered, missing or unreadable."""

    def __init__(self, path: Path | str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{path} is damaged: {problem}", hint=hint)
        self.path = Path(path)
        self.problem = problem


class HostileInput(ForgeError, exit_code=4):
    """Input that would run code, exhaust the machine or reach outside its place."""


class WrittenByNewerVersion(ForgeError, exit_code=4):
    """Written by a newer version than this one: refused, not guessed."""


class DiskFull(ForgeError, exit_code=5):
    """Not enough disk for what is about to be written, or the disk filled up while writing."""

    def __init__(self, path: Path | str, needed: int, free: int) -> None:
        text = f"not enough disk at {path}: {needed:,} bytes needed, {free:,} free"
        hint = "free some space (forge clean --dry-run shows what could go), then run it again"
        super().__init__(text, hint=hint)


class CannotWrite(ForgeError, exit_code=5):
    """The disk refused a change: no permission, read-only, or failing."""

    def __init__(self, path: Path | str, problem: str) -> None:
        hint = "check the disk and the permissions of the storage folder"
        super().__init__(f"cannot write {path}: {problem}", hint=hint)


class NotEnough(ForgeError, exit_code=5):
    """Not enough memory for what is about to start."""


class WorkersLost(ForgeError, exit_code=5):
    """The workers are gone, or die whatever they are given: the run pauses and can go on."""


class EndpointFailed(ForgeError, exit_code=5):
    """An endpoint refuses, or does not answer: what is done is kept, and it can go on later."""


class CostCapReached(ForgeError, exit_code=5):
    """The next request might cost more than is left below the cap."""


class HandoffRefused(ForgeError, exit_code=3):
    """A model does not fulfil what the next phase requires."""


class NotFinite(ForgeError):
    """A measured value is NaN or infinite: the run stops at its last good checkpoint."""


class Diverged(ForgeError):
    """Training ran away; no weight was changed by the step that raised it."""


class PhaseFailed(ForgeError):
    """A phase ended without success."""


class PathDisappeared(ForgeError, exit_code=5):
    """A file or folder that was there when the work began has disappeared under it."""

    def __init__(self, path: Path, *, hint: str = "") -> None:
        while not path.parent.exists() and path != path.parent:
            path = path.parent
        super().__init__(f"{path} is gone: it was removed or moved meanwhile", hint=hint)


class Interrupted(ForgeError, exit_code=130):
    """Stopped on request, with everything saved."""


class Cancelled(Interrupted, exit_code=1):
    """Stopped on request, with nothing that could be resumed."""


class AlreadyInUse(ForgeError, exit_code=6):
    """Another process holds the run directory."""
