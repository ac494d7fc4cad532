"""The name of every setting."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from agent_forge.pipeline.config import PipelineConfig

Key = tuple[str, ...]


def leaves(config: BaseModel, above: Key = ()) -> Iterator[Key]:
    """Every field that is not a section."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name)


LEAVES = list(leaves(PipelineConfig()))
