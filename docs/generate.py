"""Write docs/reference.md and docs/schemas/ from the code (make docs); a test compares them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from agent_forge.cli import app
from agent_forge.contract.metrics import METRICS
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.store import files
from agent_forge.store.metadata import HandoffRecord, ModelMetadata

DOCS = Path(__file__).resolve().parent
PRESET = "tiny"
NETWORKS = ("smoke", "tiny", "small", "25m")
SCHEMAS: dict[str, type[BaseModel]] = {
    "config": PipelineConfig,
    "metadata": ModelMetadata,
    "handoff": HandoffRecord,
}


def documents() -> dict[str, str]:
    """Every generated file: path below docs/ -> text."""
    texts = {"reference.md": reference()}
    for name, model in SCHEMAS.items():
        texts[f"schemas/{name}.schema.json"] = files.to_json(model.model_json_schema()).decode()
    return texts


def reference() -> str:
    """The help of every command, all settings, and all metrics."""
    lines = ["# Reference", "", "Written by `make docs`; do not edit.", "", "## Commands", ""]
    for name in ("", *commands()):
        title = f"forge {name}".strip()
        lines += [f"### `{title}`", "", "```text", help_text(name), "```", ""]
    lines += ["## Settings", "", f"The defaults are those of the preset `{PRESET}`.", ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    for key, value, description in settings(load_config(preset=PRESET)):
        cells = (f"`{key}`", f"`{json.dumps(value)}`", description)
        lines.append(" | ".join(["", *(cell.replace("|", r"\|") for cell in cells), ""]).strip())
    lines += ["", "## Where the weights of the network sit", ""]
    shapes = {name: load_config(preset=name).model for name in NETWORKS}
    lines += [f"| part | {' | '.join(NETWORKS)} |", "|---" * (len(NETWORKS) + 1) + "|"]
    for part in next(iter(shapes.values())).weights():
        counts = (f"{shape.weights()[part]:,}" for shape in shapes.values())
        lines.append(f"| {part} | {' | '.join(counts)} |")
    totals = (f"{shape.parameters():,}" for shape in shapes.values())
    lines.append(f"| all | {' | '.join(totals)} |")
    lines += ["", "## Metrics", "", "Everything that a run may log to `metrics.jsonl`.", ""]
    lines += ["| name | phase | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.phase} | {m.unit} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines) + "\n"


def commands(group: Any = None, above: str = "") -> dict[str, Any]:
    """The commands of `forge` by name, those of a group after it."""
    found: dict[str, Any] = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        found[f"{above}{name}"] = command
        if hasattr(command, "commands"):
            found |= commands(command, f"{above}{name} ")
    return found


def help_text(command: str) -> str:
    """What `forge COMMAND --help` prints on a terminal of 80 columns."""
    args = [*command.split(), "--help"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, args, prog_name="forge")
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def settings(config: BaseModel, above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every setting of a config: key, value, description."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value, field.description or ""


if __name__ == "__main__":
    for name, text in documents().items():
        files.write_text(DOCS / name, text)
