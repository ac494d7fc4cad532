"""Which settings a request may have: none that names code, an address or a place outside the root.

Texts that are free are refused unless they are known here; a new setting begins refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from agent_forge.errors import ConfigError
from agent_forge.model.catalog import Catalog
from agent_forge.pipeline.config import PipelineConfig

SECTIONS = ("preset", "runtime", "model", "phases")  # others are for whoever runs the server
FILES = {"data", "heal_data", "texts", "traces"}  # read below the storage root alone
NAMES = {"families", "edge_families", "tasks", "strategies", "tools", "datasets", "preset", "codec"}
WORDS = {"persona": ("zoe", "otto", "nora"), "calibration_dataset": ("tasks",)}  # else a file
KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_DEEP = 8


def sets_of(config: dict[str, Any], catalog: Catalog) -> list[str]:
    """The settings of a request as items of --set, with the places of files; others are refused."""
    return [f"{'.'.join(path)}={json.dumps(value)}" for path, value in _leaves(config, catalog)]


def _leaves(
    config: dict[str, Any], catalog: Catalog, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        path = (*above, key)
        if not KEY.fullmatch(key) or len(path) > MOST_DEEP:
            raise ConfigError(f"{'.'.join(path)[:200]!r} is no name of a setting")
        if path[0] not in SECTIONS or key in FREE_TEXTS - FILES - NAMES - WORDS.keys():
            hint = "whoever runs it sets that: forge run"
            raise ConfigError(f"{'.'.join(path)} is not set through the server", hint=hint)
        if key in WORDS and value not in WORDS[key]:
            raise ConfigError(f"{'.'.join(path)} is one of {', '.join(WORDS[key])} here")
        if key in FILES:
            value = [_place(name, catalog) for name in value] if isinstance(value, list) else value
        if isinstance(value, dict) and value:
            yield from _leaves(value, catalog, path)
        else:
            yield path, value


def _place(name: Any, catalog: Catalog) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{name!r} is no name of a file")
    place = catalog.below(name, "file").resolve()
    if not place.is_file():
        raise ConfigError(f"there is no file {name[:200]!r} below the storage root")
    return str(place)


def _free_texts(cls: type[BaseModel]) -> Iterator[str]:
    """The names of settings whose values hold a text of any kind."""
    for name, field in cls.model_fields.items():
        for kind in _kinds(field.annotation):
            if kind is str:
                yield name
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _free_texts(kind)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types in an annotation; of a dictionary those of its values."""
    inner = get_args(annotation)
    if get_origin(annotation) is dict:
        inner = inner[1:]
    yield annotation
    for one in inner:
        yield from _kinds(one)


FREE_TEXTS = {*_free_texts(PipelineConfig)}
