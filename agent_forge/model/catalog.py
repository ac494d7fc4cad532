"""Which models can be asked for, by names that stay below the storage root. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_forge.errors import ConfigError, NameRefused, NotFound
from agent_forge.model.locate import locate_model
from agent_forge.store import paths
from agent_forge.store.sessions import REGISTRY, SessionStore

PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
CONFIG = "config.json"


class Catalog:
    """Names of models: ids of the registry, folders below the root, and folders that were given."""

    def __init__(self, store: SessionStore, given: Sequence[str] = ()) -> None:
        self.store, self.given = store, dict[str, Path]()
        for ref in given:
            place = Path(ref)
            name = (place if place.name.strip(".") else place.resolve()).name
            if not PART.fullmatch(name):
                hint = "letters, digits, '.', '_' and '-', in a folder of another name"
                raise ConfigError(f"--model {ref}: {name!r} cannot be asked for by name", hint=hint)
            if name in self.given:
                raise ConfigError(f"--model {ref}: there is another model named {name}")
            self.given[name] = Path(locate_model(ref, store.root))

    def rows(self) -> list[dict[str, Any]]:
        """The registered models that are still there, newest first; looking creates nothing."""
        if not (self.store.root / REGISTRY).is_file():
            return []
        rows = self.store.registry.search_models()
        return [{**row} for row in rows if self._registered(row["model_id"])]

    def find(self, name: str) -> Path:
        """The folder of a model; whatever the name, none outside the root that was not given."""
        place = self.given.get(name) or self._registered(name) or self.below(name)
        if place is None or not (place / CONFIG).is_file():
            raise NotFound(f"no model {name[:200]!r}", hint="forge models lists them")
        return place

    def _registered(self, name: str) -> Path | None:
        phase, *rest = name.split(".")
        if len(rest) != 2 or not all(map(paths.SAFE_NAME.fullmatch, (phase, *rest))):
            return None
        place = paths.model_directory(self.store.root, rest[1], phase, rest[0])
        return place if (place / CONFIG).is_file() else None

    def below(self, name: str, what: str = "model") -> Path:
        """A place below the root; no part of its name can lead elsewhere, and no link does."""
        place = self.store.root
        for part in name.split("/"):
            place /= part
            if not PART.fullmatch(part) or place.is_symlink():
                hint = "give an id of forge models, or a path below the storage root"
                raise NameRefused(f"{name[:200]!r} is no name of a {what}", hint=hint)
        return place
