"""Write reference.md, tasks.md and schemas/ from the code (make docs); a test compares them."""

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
from agent_forge.data.tasks import FAMILIES, Task, make
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.store import files
from agent_forge.store.records import HandoffRecord, ModelMetadata

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
    texts = {"reference.md": reference(), "tasks.md": tasks()}
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


TASKS = """\
# Tasks

Written by `make docs`; do not edit.

Every family makes items of level 1 (short, small numbers) to 100, from a seed, with an exact
verifier; nothing is downloaded. `agent_forge.data.tasks.make` is a pure function of its arguments
and `is_right` is true if a text answers a task:

```python
from agent_forge.data.tasks import is_right, make

task = make("word_problem", "train", 7, level=(1, 20))
assert is_right(task, task.answer)
```

The three splits (`train`, `selection`, `verdict`) share no operands: a hash of what an item asks
decides its split. They share no wording either, except where a family has none (bare symbols).
Learnable: a model of 1M weights learns low levels in about a minute on a CPU. Read accuracies
beside `agent_forge.data.baselines`. The examples are of level 10, shortened where they are long.
"""
LONGEST = 160  # characters of an example


def tasks() -> str:
    """Every family of tasks, with an example."""
    head = ["family", "domain", "category", "asks for", "question", "answer", "learnable"]
    lines = [TASKS, f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for family in FAMILIES.values():
        task = example(family.name)
        cells = [f"`{family.name}`", family.domain, family.category, family.summary]
        cells += [code(task.question), code(task.answer), "yes" if family.learnable else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def example(family: str) -> Task:
    """The first item of level 10 that plain text can show."""
    items = (make(family, "train", index, level=10) for index in range(100))
    return next(task for task in items if (task.question + task.answer).isascii())


def code(text: str) -> str:
    """A text in one cell of a table, each line of it in the type of code."""
    short = text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."
    lines = (line.replace("|", r"\|") for line in short.split("\n"))
    return "<br>".join(f"`{line}`" for line in lines if line.strip())


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
        files.write_bytes(DOCS / name, text.encode())
