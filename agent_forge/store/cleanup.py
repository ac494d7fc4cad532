"""Which old sessions are removed: a pure function decides, SessionCleanupManager carries it out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_forge.config.settings import CleanupSettings
from agent_forge.errors import Busy, ForgeError, HostileInput
from agent_forge.store import files, lock
from agent_forge.store.sessions import SESSION_FILE, SessionStore

DAY_S = 86_400
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


class SessionCleanupManager:
    """Carries out the policy: on request, at start-up and after a session completes."""

    def __init__(self, sessions: SessionStore, policy: CleanupSettings) -> None:
        self.sessions = sessions
        self.policy = policy
        self.kept: list[tuple[str, ForgeError]] = []

    def plan(self, **which: Any) -> list[CleanupRemoval]:
        """Return what would be removed now, with its bytes; for `which` see plan_cleanup."""
        rows: list[dict[str, Any]] = []
        for row in self.sessions.registry.get_all_sessions():
            status = self.sessions.status(row)
            if status == "missing":  # an unmounted disk, perhaps: it goes when its time has come
                status = "interrupted" if row["status"] == "running" else row["status"]
            try:
                self.sessions.path(row["session_id"])
                rows.append({**row, "status": status})
            except ForgeError as error:
                self.kept.append((row["session_id"], error))
        ends = {row["session_id"]: row["end_time"] for row in rows}
        reasons = plan_cleanup(rows, self.policy, time.time(), **which)
        sizes = {name: files.tree_bytes(self.sessions.path(name)) for name in reasons}
        return [CleanupRemoval(n, why, sizes[n], ends[n]) for n, why in reasons.items()]

    def remove(self, removals: Sequence[CleanupRemoval]) -> list[CleanupRemoval]:
        """Remove sessions and return those that are gone; `kept` tells which stayed and why."""
        gone: list[CleanupRemoval] = []
        with self.sessions.changing():
            for removal in removals:
                try:
                    gone += [removal] if self._remove(removal) else []
                except ForgeError as error:
                    log.warning("%s stays: %s", removal.session_id, error)
                    self.kept.append((removal.session_id, error))
        return gone

    def _remove(self, removal: CleanupRemoval) -> bool:
        path = self.sessions.path(removal.session_id)
        exists = path.exists()
        if exists:
            if not (path / SESSION_FILE).is_file():
                hint = "move it elsewhere; what is in it was not written here"
                raise HostileInput(f"{path} is no session: it has no {SESSION_FILE}", hint=hint)
            with lock.exclusive(path):
                row = self.sessions.registry.get_session_status(path.name)
                if row["end_time"] != removal.end_time:
                    raise Busy(f"session {path.name} was resumed meanwhile")
                files.remove_tree(path, self.sessions.root / "sessions")
        return self.sessions.registry.delete_session(path.name) or exists

    def cleanup_old_sessions(self, *, keep: Collection[str] = ()) -> list[CleanupRemoval]:
        """Remove what the policy no longer wants; nothing if automatic cleaning is off."""
        if not self.policy.auto_cleanup_enabled:
            return []
        gone = self.remove(self.plan(keep=keep))
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
        self.sessions.registry.checkpoint_wal()
        return self.sessions.registry.vacuum_incremental()
