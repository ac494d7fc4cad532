"""One exception per way to fail. Each carries its exit code and, where there is one, the next step.

Exit codes: 1 failed, 2 usage or invalid config, 3 handoff not met, 4 damaged or hostile input,
5 resources (disk, memory), 6 run directory busy, 130 interrupted and resumable.
"""

from __future__ import annotations

from pathlib import Path


class ForgeError(Exception):
    """A failure that a user can read: what is wrong, and in `hint` what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def pauses(self) -> bool:
        """Whether a run that it stopped can simply go on later: resources, or a request."""
        return self.exit_code in (5, 130)


class ConfigError(ForgeError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class NameRefused(ForgeError):
    """A name that could leave the storage root, or that some file system would not take."""

    exit_code = 2


class NotFound(ForgeError):
    """What was asked for does not exist."""

    exit_code = 2


class AlreadyExists(ForgeError):
    """Something that must not be overwritten is in the way."""

    exit_code = 2


class DamagedFile(ForgeError):
    """A file is not what was written: truncated, altered, missing or unreadable."""

    exit_code = 4

    def __init__(self, path: Path | str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{path} is damaged: {problem}", hint=hint)
        self.path = Path(path)
        self.problem = problem


class HostileInput(ForgeError):
    """Input that would run code, exhaust the machine or reach outside its place."""

    exit_code = 4


class TooNew(ForgeError):
    """Written by a newer version than this one: refused, not guessed."""

    exit_code = 4


class DiskFull(ForgeError):
    """Not enough disk for what is about to be written, or the disk filled up while writing."""

    exit_code = 5

    def __init__(self, path: Path | str, needed: int, free: int) -> None:
        super().__init__(
            f"not enough disk at {path}: {needed:,} bytes needed, {free:,} free",
            hint="free some space (forge clean --dry-run shows what could go), then run it again",
        )
        self.needed = needed
        self.free = free


class CannotWrite(ForgeError):
    """The disk refused a change: no permission, read-only, or failing."""

    exit_code = 5

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(
            f"cannot write {path}: {problem}",
            hint="check the disk and the permissions of the storage folder",
        )


class NotEnough(ForgeError):
    """Not enough memory for what is about to start."""

    exit_code = 5


class WorkersLost(ForgeError):
    """The workers are gone, or die whatever they are given: the run pauses and can go on."""

    exit_code = 5


class HandoffRefused(ForgeError):
    """A model does not fulfil what the next phase requires."""

    exit_code = 3


class NotFinite(ForgeError):
    """A measured value is NaN or infinite: the run stops at its last good checkpoint."""


class Diverged(ForgeError):
    """Training ran away; no weight was changed by the step that raised it."""


class PhaseFailed(ForgeError):
    """A phase ended without success."""


class Gone(ForgeError):
    """A file or folder that was there when the work began has disappeared under it."""

    exit_code = 5

    def __init__(self, path: Path, *, hint: str = "") -> None:
        while not path.parent.exists() and path != path.parent:
            path = path.parent
        super().__init__(f"{path} is gone: it was removed or moved meanwhile", hint=hint)


class Interrupted(ForgeError):
    """Stopped on request, with everything saved."""

    exit_code = 130


class Cancelled(Interrupted):
    """Stopped on request, with nothing that could be resumed."""

    exit_code = 1


class Busy(ForgeError):
    """Another process holds the run directory."""

    exit_code = 6
