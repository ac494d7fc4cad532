"""Which old sessions are removed: a pure function decides, SessionCleanupManager carries it out."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_forge.config.load import validate
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.config.settings import CleanupSettings
from agent_forge.errors import AlreadyInUse, ForgeError, HostileInput
from agent_forge.store import files, lock
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import SESSION_FILE, SessionStore, read_session

DAY_S = 86_400
# What lies in a session beside the files that a manifest names. A phase that writes others adds
# their names to PHASE_FILES: a session that holds a name which is not here is never removed.
WANDB = r"wandb/(((offline-)?run-|latest-run).*|debug[\w-]*\.log)"
EVOLUTION_FILES = (
    r"run\.lock|stop|evolution(_log|_checkpoint_gen_\d+)?\.json|(journal|fitness_cache)\.jsonl"
    rf"|weights/(workers/tmp\w{{8}}/)?[0-9a-f]{{24}}\.safetensors|{WANDB}"
)
PHASE_FILES = (
    r"(state|decisions)\.json|measurements\.jsonl"
    r"|checkpoints/([\w-]+/)?step_\d{8,}/(tensors\.safetensors|(state|manifest)\.json)"
    rf"|evolution/(replicate_\d+/)?({EVOLUTION_FILES})"
)
PHASE = "|".join(map(phase_folder, ORDER))
OWN_FILES = re.compile(
    rf"session\.json|config\.yaml|report\.html|run\.lock|stop|(log|metrics|events)\.jsonl|{WANDB}"
    rf"|({PHASE})/({PHASE_FILES})"
)
OWN_MODELS = re.compile(
    rf"({PHASE})/evolution/(replicate_\d+/)?(champion|gen_\d+_best_model|parent_\d+)"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CleanupRemoval:
    """A session that is to be removed, and why."""

    session_id: str
    reason: str
    bytes: int
    end_time: float | None


def plan_cleanup(
    sessions: Sequence[Mapping[str, Any]],
    policy: CleanupSettings,
    now: float,
    *,
    keep: Collection[str] = (),
    age_days: float | None = None,
    failed: bool = False,
    everything: bool = False,
) -> dict[str, str]:
    """Return the sessions to remove, with reasons. Running ones and those in `keep` always stay.

    By policy: completed and failed ones past their age, then the oldest beyond the total. Paused
    and interrupted sessions can be resumed and only go by the total. `age_days` replaces both
    ages, `failed` takes all failed ones, `everything` takes all that are not running or kept.
    """
    asked = age_days is not None or failed or everything
    ages = {"completed": policy.max_session_age_days, "failed": policy.max_failed_session_age_days}
    if asked:
        ages = {} if age_days is None else dict.fromkeys(ages, age_days)
    reasons: dict[str, str] = {}
    free = [s for s in sessions if s["status"] != "running" and s["session_id"] not in keep]
    for session in free:
        status = session["status"]
        age = (now - (session["end_time"] or session["start_time"])) / DAY_S
        if everything:
            reasons[session["session_id"]] = "all were asked for"
        elif failed and status == "failed":
            reasons[session["session_id"]] = "failed"
        elif age > ages.get(status, math.inf):
            reasons[session["session_id"]] = f"{status} {age:.0f} days ago"
    if not asked:
        excess = len(sessions) - len(reasons) - policy.max_sessions_total
        left = [s for s in free if s["session_id"] not in reasons]
        for session in sorted(left, key=lambda s: s["start_time"])[: max(0, excess)]:
            reasons[session["session_id"]] = f"more than {policy.max_sessions_total} sessions"
    return reasons


def refuse_foreign(session: Path) -> None:
    """Refuse a folder that is no session, or in which there is what no run has written."""
    if not session.exists():
        return
    hint = "move elsewhere what was not written here, then clean again"
    if not (session / SESSION_FILE).is_file():
        raise HostileInput(f"{session} is no session: it has no {SESSION_FILE}", hint=hint)
    for folder, directories, names in os.walk(session):
        place = Path(folder)
        there = {*directories, *names} - _files_of_model(place, session)
        for path in (place / name for name in sorted(there)):
            inner = path.relative_to(session)
            own = bool(OWN_FILES.fullmatch(inner.as_posix()))
            own = own or any(map(files.LEFTOVER.fullmatch, inner.parts))
            if path.name == lock.STOP_FILE:
                own = own and lock.is_stop_request(path)
            if path.is_symlink() or not (own or path.is_dir()):
                raise HostileInput(f"{session} holds {inner}, which no run has written", hint=hint)


def _files_of_model(folder: Path, session: Path) -> set[str]:
    """The files that were written with a model of a session; a copy of one is somebody's."""
    with contextlib.suppress(ForgeError, OSError):
        inner = folder.relative_to(session).as_posix()
        if OWN_MODELS.fullmatch(inner) or read_metadata(folder).model_name == folder.name:
            return {*files.verify(folder), files.MANIFEST}
    return set()


class SessionCleanupManager:
    """Carries out the policy: on request, at start-up and after a session completes."""

    def __init__(self, sessions: SessionStore, policy: CleanupSettings) -> None:
        self.sessions = sessions
        self.policy = policy
        self.kept: list[tuple[str, ForgeError]] = []

    def plan(self, *, by_own_policy: bool = False, **which: Any) -> list[CleanupRemoval]:
        """Return what would be removed now; `by_own_policy`: by that it was begun with, too."""
        rows: list[dict[str, Any]] = []
        for row in self.sessions.registry.get_all_sessions():
            status = self.sessions.status(row)
            if status == "missing":  # an unmounted disk, perhaps: it goes when its time has come
                status = "interrupted" if row["status"] == "running" else row["status"]
            try:
                self.sessions.path(row["session_id"])
                rows.append({**row, "status": status})
            except ForgeError as error:
                self._keep(row["session_id"], error)
        ends, removals = {row["session_id"]: row["end_time"] for row in rows}, []
        for name, reason in plan_cleanup(rows, self.policy, now := time.time(), **which).items():
            path = self.sessions.path(name)
            try:
                if by_own_policy and path.exists():  # a config from elsewhere removes nothing
                    own = read_session(path)["config"].get("cleanup_policy", dict(self.policy))
                    policy = validate(CleanupSettings, own, name)
                    if name not in plan_cleanup(rows, policy, now, **which):
                        continue
                refuse_foreign(path)
                removals.append(CleanupRemoval(name, reason, files.tree_bytes(path), ends[name]))
            except ForgeError as error:
                self._keep(name, error)
        return removals

    def _keep(self, session_id: str, error: ForgeError) -> None:
        log.warning("%s stays: %s", session_id, error)
        self.kept.append((session_id, error))

    def remove(self, removals: Sequence[CleanupRemoval]) -> list[CleanupRemoval]:
        """Remove sessions and return those that are gone; `kept` tells which stayed and why."""
        gone: list[CleanupRemoval] = []
        with self.sessions.changing():
            for removal in removals:
                try:
                    gone += [removal] if self._remove(removal) else []
                except ForgeError as error:
                    self._keep(removal.session_id, error)
        return gone

    def _remove(self, removal: CleanupRemoval) -> bool:
        path = self.sessions.path(removal.session_id)
        if exists := path.exists():
            refuse_foreign(path)
            with lock.exclusive(path):
                files.remove_leftovers(path)  # a version that was replaced may hold what is foreign
                refuse_foreign(path)
                row = self.sessions.registry.get_session_status(path.name)
                if row["end_time"] != removal.end_time:
                    raise AlreadyInUse(f"session {path.name} was resumed meanwhile")
                files.remove_tree(path, self.sessions.root / "sessions")
        return self.sessions.registry.delete_session(path.name) or exists

    def cleanup_old_sessions(self, *, keep: Collection[str] = ()) -> list[CleanupRemoval]:
        """Remove what neither this policy nor the one that a session was begun with wants."""
        if not self.policy.auto_cleanup_enabled:
            return []
        gone = self.remove(self.plan(keep=keep, by_own_policy=True))
        for removal in gone:
            log.warning("old session %s was removed: %s", removal.session_id, removal.reason)
        return gone

    def auto_cleanup_on_session_complete(self, session_id: str) -> list[CleanupRemoval]:
        """Mark a session completed, then clean up."""
        self.sessions.set_status(session_id, "completed")
        return self.tidy_up(session_id)

    def tidy_up(self, session_id: str) -> list[CleanupRemoval]:
        """After a session has completed: tend the database every N sessions, and clean."""
        if self.sessions.registry.count_completed() % self.policy.checkpoint_every_n_sessions == 0:
            self.checkpoint_and_vacuum()
        return self.cleanup_old_sessions(keep={session_id})

    def checkpoint_and_vacuum(self) -> int:
        """Empty the write-ahead log and give free pages back; return the bytes reclaimed."""
        return self.sessions.registry.vacuum_incremental()
