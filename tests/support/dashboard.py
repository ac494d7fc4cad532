"""Pages of the dashboard as a test sees them, and a recorded run of all phases to show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.pipeline.config import load_config
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.pico import Pico, build

APP = Path(__file__).parents[2] / "agent_forge" / "ui" / "dashboard" / "app.py"
PAGES = (
    *("overview", "phases", "evolution", "models", "playground", "comparison"),
    *("configuration", "system"),
)
FINISHED = ("cognate", "evomerge", "quietstar", "bitnet")


class Browser:
    """One browser: the page that it shows, and what a person reads there."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        patch.setenv("FORGE_STORAGE", str(root))
        self.app = AppTest.from_file(str(APP), default_timeout=60)

    def open(self, page: str, run: str | None = None) -> AppTest:
        """Go to a page, and choose a run."""
        self.app._page_hash = calc_hash(page)
        self.app.run()
        if run is not None:
            self.app.sidebar.selectbox(key="run").select(run).run()
        assert not self.app.exception, [e.message for e in self.app.exception]
        return self.app

    def texts(self) -> list[str]:
        """All that is shown as text, with tables and the labels of what can be chosen."""
        kinds = ("text", "code", "markdown", "caption", "error", "warning", "info", "success")
        found = [str(e.value) for kind in kinds for e in getattr(self.app, kind)]
        found += [f"{e.label} {e.value}" for e in self.app.metric]
        found += [str(e.proto.text) for e in self.app.get("progress")]
        for table in self.app.dataframe:
            found += [str(name) for name in table.value.columns]
            found += [str(value) for row in table.value.values.tolist() for value in row]
        return found

    def figures(self) -> list[dict[str, Any]]:
        return [json.loads(element.proto.spec) for element in self.app.get("plotly_chart")]


NUMBER = re.compile(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")


def numbers(text: str) -> list[str]:
    """The numbers in a text as they are written; those within names are none."""
    return NUMBER.findall(re.sub(r"[A-Za-z_][\w.-]*\d[\w.-]*|[0-9a-f]{12,}", " ", text))


def values(record: Any) -> Iterator[Any]:
    """All numbers and texts of a record, at any depth."""
    if isinstance(record, dict):
        yield from record
        for value in record.values():
            yield from values(value)
    elif isinstance(record, list):
        for value in record:
            yield from values(value)
    elif not isinstance(record, bool) and record is not None:
        yield record


# -- a recorded run --------------------------------------------------------------------------------


def recorded(
    root: Path, session: str = "done", status: str = "completed", shift: float = 0.0
) -> SessionStore:
    """A run of four phases as its files would be, each number of its own."""
    store = SessionStore(root)
    config = load_config(preset="smoke", sets=(f"runtime.seed={round(31 + 100 * shift)}",))
    asked = {"asked": {"phases": list(ORDER[1:])}, "config_hash": config.canonical_hash()}
    path = store.create(config.model_dump(mode="json"), "", session_id=session, details=asked)
    lines, events = list[dict[str, Any]](), [{"event": "run_started", "time": 1.7e9, "phases": ""}]
    for number, name in enumerate(FINISHED, start=1):
        made = _made(store, session, name, number)
        files.write_checked(path / phase_folder(name) / "state.json", _state(name, number, shift))
        lines += [_line(name, step, number, shift) for step in range(1, 41)]
        events.append({"event": "phase_completed", "time": 1.7e9 + number, "phase": name})
        assert made.is_dir()
    error = {"error": "loss is not finite at step 17"} if status == "failed" else {}
    events.append({"event": f"run_{status}", "time": 1.7e9 + 77, **error})
    for file, rows in (("metrics.jsonl", lines), ("events.jsonl", events)):
        (path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    journal = path / phase_folder("evomerge") / "evolution" / "journal.jsonl"
    journal.parent.mkdir()
    journal.write_text("".join(json.dumps(row) + "\n" for row in _candidates()))
    store.registry.update_session(session, progress_percent=43.0, current_phase="bitnet")
    store.set_status(session, status)
    return store


def _made(store: SessionStore, session: str, phase: str, number: int) -> Path:
    """A model with its card and what else is recorded of it."""
    storage = ModelStorage(store.root, store.registry, build)
    told: dict[str, Any] = {"tags": ["demo"] if number == 1 else []}
    told |= {"card_text": f"# {phase}\n{number * 1237} items\n"}
    storage.save_model(Pico(), session, phase, "model", {"gain": 0.3317 + number}, **told)
    return store.path(session) / phase_folder(phase) / "model"


def _state(name: str, number: int, shift: float) -> dict[str, Any]:
    before, after = 0.1234 * number + shift, 0.1531 * number + shift
    headline = {"measure": "accuracy", "before": before, "after": after, "verdict": "it is better"}
    table = [["domain", "before", "after"], ["memory", 0.5171 * number, 0.6173 * number]]
    source = f"/elsewhere/sessions/done/{phase_folder(FINISHED[number - 2])}/model"
    return {
        "phase": name,
        "status": "completed",
        "seconds": 71.3 * number,
        "inputs": [source] if number > 1 else [],
        "outputs": [{"name": "model", "sha256": ""}],
        "metrics": {"final_loss": 2.7182 * number},
        "artifacts": {"headline": headline, "tables": [table]},
    }


def _line(name: str, step: int, number: int, shift: float) -> dict[str, Any]:
    if name == "evomerge":
        measured = {"generation/best_fitness": 0.3019, "generation/avg_fitness": 0.2917}
        measured |= {"generation/diversity_score": 0.5441, "generation/min_fitness": 0.1907}
        measured = {key: value * (1 + step / 1000) for key, value in measured.items()}
    else:
        measured = {"a/train/loss_avg_100": 3.14159 / step + number + shift}
    return {"phase": name, "step": step, "time": 1.7e9 + step, "metrics": measured}


def _candidates() -> Iterator[dict[str, Any]]:
    for number in range(3):
        about = {"record": "candidate", "key": f"{number:064x}", "generation": 4 + number}
        score = {"fitness": 0.2713 + number / 100}
        yield {**about, "origin": "sample", "score": score, "operation": {"kind": "mutation"}}
