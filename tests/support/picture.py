"""Take the picture of the dashboard that stands in the README, of any run.

    forge run --preset tiny --session tiny
    python -m tests.support.picture storage tiny docs/images/dashboard.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.chromium import Window, chromium, dashboard


def take(root: Path, session: str, path: Path, page: str, theme: str) -> None:
    """What a page shows of a run."""
    with chromium() as driver, dashboard(root) as served:
        window = Window(driver, served.url)
        window.theme(theme)
        window.choose("Run", session)
        window.go(page)
        window.save(path)


if __name__ == "__main__":
    root, session, path, *more = sys.argv[1:]
    page, theme = (*more, "Overview", "light")[:2] if not more else (*more, "light")[:2]
    take(Path(root), session, Path(path), page, theme)
