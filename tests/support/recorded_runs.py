"""Write the run that the tests of figures and reports look at: what its files say, no weights.

    forge run --preset smoke --session recorded --storage /tmp/r \\
        --set phases.evomerge.generations=4 --set phases.cognate.trunk_steps=400 \\
        --set phases.cognate.branch_steps=60 --set phases.quietstar.steps=150 \\
        --set phases.bitnet.steps=40
    python -m tests.support.recorded_runs /tmp/r/sessions/recorded

Of the steps of a training every tenth is kept. Nothing in it names the machine that it ran on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agent_forge.store import files
from agent_forge.track.journal import CHECKSUM

RECORDED = Path(__file__).parent.parent / "ui" / "recorded"
NAME = "recorded"
SHOWN = ("loss_avg_100", "evaluation_loss")  # of what a step of a training logs
EVERY = 10
CHECKED = ("session.json", "state.json")
KEPT = ("*/metadata.json", "*/lineage.json", "state.json", "evolution/journal.jsonl")
ENVIRONMENT: dict[str, Any] = {
    "agent_forge": "0.1.0",
    "argv": ["forge", "run", "--preset", "smoke", "--session", NAME],
    "cores": 2,
    "packages": {"torch": "2.13.0"},
}


def record(source: Path) -> None:
    """Keep what a run says of itself."""
    kept = [source / name for name in ("session.json", "config.yaml", "events.jsonl")]
    kept += [path for name in KEPT for path in sorted(source.glob(f"phase*/{name}"))]
    for path in kept:
        target = RECORDED / "sessions" / NAME / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = "".join(map(_line, text.splitlines()))
        target.write_bytes(_anywhere(text, source, path.name).encode())
    lines = (source / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shown = "".join(json.dumps(r) + "\n" for r in map(_shown, map(json.loads, lines)) if r)
    (RECORDED / "sessions" / NAME / "metrics.jsonl").write_text(shown, encoding="utf-8")


def _line(text: str) -> str:
    """A line without the checksum that it no longer has once a path in it was changed."""
    line = json.loads(text)
    line.pop(CHECKSUM, None)
    return json.dumps(line) + "\n"


def _anywhere(text: str, source: Path, name: str) -> str:
    """A file of a run as if it had been made in ./storage."""
    text = text.replace(str(source.parent.parent), "storage")
    if name not in CHECKED:
        return text
    content = json.loads(text)
    del content["checksum"]
    if "environment" in content:
        content["environment"] = ENVIRONMENT
    return files.with_checksum(content).decode()


def _shown(line: dict[str, Any]) -> dict[str, Any] | None:
    """A line of metrics.jsonl with what is shown of it; None for the steps between."""
    step, metrics = line["step"], line["metrics"]
    if not any("/train/" in name for name in metrics):
        return line
    values = {n: v for n, v in metrics.items() if n.endswith(SHOWN) or "/train/" not in n}
    first = step is None or step % EVERY == 0 or step == 1
    return {**line, "metrics": values} if values and first else None


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
