"""The model card: README.md of a model directory, made from what was recorded, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_forge.store.metadata import ModelMetadata


def render_card(metadata: ModelMetadata, metrics: Mapping[str, Any], story: str = "") -> str:
    """A card of the metadata and of the metrics that the run measured; `story` is Markdown."""
    extra = dict(metadata.model_extra or {})
    samples = extra.pop("samples", [])
    if story:  # it tells what these hold, and for people
        extra = {name: v for name, v in extra.items() if not isinstance(v, dict | list)}
    lines = [
        "---",
        "library_name: agent-forge",
        "---",
        f"# {metadata.model_name}",
        "",
        f"Made by phase `{metadata.phase_name}` of run `{metadata.session_id}`.",
        "",
        "| | |",
        "|---|---|",
        f"| model id | `{metadata.model_id}` |",
        f"| parameters | {metadata.parameters:,} |",
        f"| size | {metadata.size_mb:.2f} MB |",
        f"| sha256 | `{metadata.sha256}` |",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in sorted(extra.items())),
        "",
        *([story, ""] if story else []),
        *_samples(samples),
        "## Measured",
        "",
    ]
    if not metrics:
        return "\n".join([*lines, "Nothing was measured on this model.", ""])
    rows = (f"| {_cell(name)} | {_cell(value)} |" for name, value in sorted(metrics.items()))
    return "\n".join([*lines, "| metric | value |", "|---|---|", *rows, ""])


def _samples(samples: Any) -> list[str]:
    """What the model said, prompt by prompt; nothing where no samples were kept."""
    if not isinstance(samples, list) or not samples:
        return []
    lines = ["## Samples", ""]
    for sample in samples:
        lines += [f"> {_cell(sample['prompt'])}", "", _cell(sample["text"]), ""]
    return lines


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
