"""Marks for what needs an optional dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest

from agent_forge.search.portfolio import STRATEGIES

NEEDS_PYMOO = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('pymoo')")
RAY = pytest.param(
    "ray",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the extra cluster (ray) is not installed"
    ),
)


def with_pymoo(names: Iterable[str] = STRATEGIES) -> list[Any]:
    return [pytest.param(n, marks=NEEDS_PYMOO) if n == "nsga2" else n for n in names]
