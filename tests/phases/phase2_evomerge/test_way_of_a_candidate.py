"""The way of a candidate stays short: docs/architecture.md shows it, and this traces it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import agent_forge
from agent_forge.cli import main
from tests.support.evo_models import evo_line

pytestmark = pytest.mark.slow
PACKAGE = str(Path(agent_forge.__file__).parent)
DEEPEST, ENTRIES = 25, 2
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


@pytest.mark.parametrize("strategy", ["spec", "auto"])
def test_the_way_from_command_to_champion_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    deepest: list[tuple[str, str]] = []
    entries: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        stack, at = list[tuple[str, str]](), frame
        while at.f_back is not None:
            if at.f_code.co_filename.startswith(PACKAGE) and at.f_code.co_name not in INNER:
                stack.append((at.f_code.co_filename, at.f_code.co_name))
            at = at.f_back
        if len(stack) > len(deepest):
            deepest[:] = stack
        moves = zip([("", ""), *stack], stack, strict=False)
        for module, count in Counter(new[0] for old, new in moves if new[0] != old[0]).items():
            entries[module] = max(entries[module], count)

    more = ("--set", f"strategy={strategy}", "--set", "workers=1", "--gens", "1")
    line = evo_line(*more, "--output-dir", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", ["forge", *line])
    sys.setprofile(trace)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.setprofile(None)
    assert not ended.value.code and (tmp_path / "out" / "champion").is_dir()
    assert len(deepest) <= DEEPEST, [name for _, name in reversed(deepest)]
    assert {m: n for m, n in entries.items() if n > ENTRIES} == {}
