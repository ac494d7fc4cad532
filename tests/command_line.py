"""The real command line, run within a test's process."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from agent_forge.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout, which has to be one JSON document and nothing else."""
        return dict(json.loads(self.out))


Forge = Callable[..., Result]


def run_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Result:
    """Run `forge LINE`; what it printed and its exit code."""
    monkeypatch.setattr(sys, "argv", ["forge", *shlex.split(line)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return Result(int(ended.value.code or 0), *capsys.readouterr())
