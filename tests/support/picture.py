"""Take the picture of the dashboard that stands in the README, of any run.

    forge run --preset tiny --session tiny
    python -m tests.support.picture storage tiny docs/images/dashboard.png

A page and a theme may follow, as "Phase details" dark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.chromium import FIGURES, Window, chromium, dashboard, until


def take(root: str, session: str, path: str, page: str = "Overview", theme: str = "light") -> None:
    """What a page shows of a run, once its figures are there."""
    with chromium() as driver, dashboard(Path(root)) as served:
        window = Window(driver, served.url)
        window.theme(theme)
        window.choose("Run", session)
        window.go(page)
        until(lambda: window.count(FIGURES))
        window.settle()
        window.save(Path(path))


if __name__ == "__main__":
    take(*sys.argv[1:])
