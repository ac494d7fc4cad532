"""A picture of the browser of each test that fails."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "build" / "browser"


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where pictures of pages are kept."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    driver = item.funcargs.get("driver")
    if report.failed and driver is not None:
        path = PICTURES / f"failed-{re.sub(r'[^a-zA-Z0-9_]+', '-', item.name)}-{report.when}.png"
        with contextlib.suppress(Exception):  # a browser that has crashed
            path.parent.mkdir(parents=True, exist_ok=True)
            driver.save_screenshot(str(path))
            report.sections.append(("Picture of the browser", str(path)))
    return report
