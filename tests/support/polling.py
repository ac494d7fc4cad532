"""Wait for what another process or thread does, as long as a loaded machine may take for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0


def until(holds: Callable[[], Any], seconds: float = PATIENCE_S, every_s: float = 0.01) -> Any:
    """What `holds` returns as soon as it is true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(every_s)
    return found
