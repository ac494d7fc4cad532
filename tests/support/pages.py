"""Pages as tests look at them, and a run whose texts want to be more than text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from agent_forge.pipeline.run_view import RunView
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore
from agent_forge.track.journal import Journal

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\u202e\x00"
VOID = {"meta", "img", "br", "input", "link", "hr"}


class Page(HTMLParser):
    """A page taken apart: elements, what people read, and its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.read: list[tuple[str, str]] = []  # innermost element and text
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        inner = self._open[-1] if self._open else ""
        if inner in ("script", "style"):
            (self.scripts if inner == "script" else self.styles)[-1] += data
        elif data.strip():
            self.read.append((inner, data.strip()))

    @property
    def charts(self) -> list[dict[str, Any]]:
        return list(json.loads(self.scripts[0])["charts"])

    @property
    def titles(self) -> list[str]:
        """Of the charts, in their order."""
        return [str(attrs["aria-label"]) for tag, attrs in self.elements if tag == "figure"]


def hostile_run(root: Path) -> RunView:
    """A run whose names and texts want to be more than text."""
    store = SessionStore(root)
    details = {"asked": {"phases": ["cognate", "bitnet"]}, "config_hash": HOSTILE}
    store.create({"preset": HOSTILE}, "preset: x\n", session_id="s1", details=details)
    folder = store.path("s1")
    state = {
        "status": "completed",
        "phase": HOSTILE,
        "seconds": "1 s",
        "metrics": {},
        "outputs": [{"name": "../.."}, {"name": HOSTILE}, "x", {"name": "gone"}],
        "artifacts": {
            "headline": {"measure": HOSTILE, "before": None, "after": HOSTILE, "verdict": HOSTILE},
            "zeros": {f"blocks.0.{HOSTILE}.weight": 0.5},
            "tables": [
                [["matrices", "codec", "nats more alone"], [HOSTILE, HOSTILE, 0.5]],
                [[HOSTILE], ["x" * 100_000]],
                [["one row"]],
            ],
            "samples": [{"prompt": HOSTILE, "text": "`" + HOSTILE * 100}],
            "thoughts": [["question"], [HOSTILE]],
        },
    }
    for name in ("phase1_cognate", "phase4_bitnet"):
        files.disk.make_directory(folder / name)
        files.write_bytes(folder / name / "state.json", files.with_checksum(state))
    journal = Journal(folder / "metrics.jsonl")
    for step in range(5):
        values = {f"{HOSTILE}/train/loss_avg_100": 1.0 + step, f"{HOSTILE}/accuracy/x": 0.5}
        values |= {f"m/accuracy/{n}{HOSTILE}": 0.5 for n in range(3)}
        journal.write({"phase": "cognate", "step": step, "time": step, "metrics": values})
    Journal(folder / "events.jsonl").write(
        {"event": "handoff", "phase": "bitnet", "warnings": [HOSTILE]}
    )
    return RunView(store, "s1")
