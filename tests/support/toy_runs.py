"""Small real runs of the toy phase, in this process or in a forked one, for the run tests."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.track.journal import read_lines

SMALL = (
    "phases.toy.steps=24",
    "phases.toy.width=4",
    "phases.toy.checkpoint_every_steps=5",
    "tracking.sample_every_s=0",
    "storage.reserve_disk_mb=0",
    "storage.keep_checkpoints=2",
)
Listener = Callable[[dict[str, Any]], None]


def toy_config(root: Path, *sets: str) -> PipelineConfig:
    return load_config(preset="toy", sets=(f"storage.root={root}", *SMALL, *sets))


def toy_run(
    root: Path, *sets: str, resume: bool = False, listener: Listener | None = None, **options: Any
) -> dict[str, Any]:
    """Run or resume the session `r` below `root`."""
    orchestrator = PipelineOrchestrator(
        config=toy_config(root, *sets),
        session_id="r",
        resume=resume,
        listeners=[listener] if listener else [],
        **options,
    )
    return orchestrator.run()


def folder(root: Path) -> Path:
    return root / "sessions" / "r"


def metrics(root: Path) -> list[Any]:
    """What the run measured, without times."""
    return [
        (record["phase"], record["step"], {**record["metrics"], "phase/duration_seconds": 0})
        for _, record in read_lines(folder(root) / "metrics.jsonl")
    ]


def outcome(root: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was killed."""
    model = folder(root) / "toy" / "linear"
    files.verify(model)
    return {
        "weights": files.sha256_of(model / "model.safetensors"),
        "metrics": metrics(root),
        "status": json.loads((folder(root) / "session.json").read_text())["status"],
        "strays": [str(p) for p in root.rglob("*") if p.name.startswith((".tmp", ".ready"))],
    }


def forked(work: Callable[[], object]) -> int:
    """Start `work` in a forked child, which is cheap: torch is loaded already."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a child reports by its exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def resume_until_done(root: Path) -> None:
    """Start or go on, as the state of the directory demands."""
    begun = (folder(root) / "session.json").exists()
    result = toy_run(root, resume=begun)
    assert result["success"], result


def die_at(kind: str, count: int) -> Listener:
    """A listener that kills its own process at the count-th event of a kind."""
    seen = 0

    def listen(record: dict[str, Any]) -> None:
        nonlocal seen
        if record["event"] == kind:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    return listen


def change_settings(root: Path, old: str, new: str) -> None:
    """Another config in both places, as if the session had been made with it."""
    path = folder(root) / "config.yaml"
    path.write_text(path.read_text().replace(old, new))
    config = load_config(path=path).model_dump(mode="json")
    record = files.read_checked(folder(root) / "session.json")
    (folder(root) / "session.json").write_bytes(files.with_checksum({**record, "config": config}))
