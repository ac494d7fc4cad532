"""Shared fixtures of the evolution tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

OWN = """
calls = 0
def size(model):
    return sum(float(p.detach().abs().sum()) for p in model.parameters())
def sometimes(model):
    global calls
    calls += 1
    if calls % 5 == 0:
        raise KeyError("a bad moment")
    return size(model)
def never(model):
    raise AttributeError("no such thing")
def nan(model):
    return float("nan")
def words(model):
    return "many"
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of someone's own in the working directory."""
    (tmp_path / "own_fitness.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_fitness", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path
