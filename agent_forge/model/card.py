"""The head of a model card: the YAML by which a hub lists a model under what it was merged from."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_forge.config.load import dump_yaml, parse_yaml
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.model.folder import CONFIG, MODEL_TYPE
from agent_forge.model.locate import HUB_ID
from agent_forge.store import files
from agent_forge.store.records import CARD

CARD_CHARACTERS = 1 << 20
HEAD = re.compile(r"---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+|--+|\.\.+")  # what no name of a model of a hub has


def card_head(
    refs: Iterable[str],
    config: Mapping[str, Any],
    tags: Sequence[str] = ("merge",),
    relation: str = "merge",
) -> str:
    """The head of the card of what was made of these models; its last line has no end."""
    head: dict[str, Any] = {"base_model": list(dict.fromkeys(n for r in refs for n in names(r)))}
    head |= {"base_model_relation": relation, "pipeline_tag": "text-generation"}
    if library := _library(config.get("model_type")):
        head["library_name"] = library
    return f"---\n{dump_yaml({**head, 'tags': [*tags, 'agent-forge']})}---"


def _library(model_type: Any) -> str | None:
    """What opens a model of this type; None if nothing is known to."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES
    return "agent-forge" if model_type == MODEL_TYPE else "transformers" if known else None


def names(ref: str) -> list[str]:
    """What a hub calls a model: the id that its place, card or config has, else its folder's name.

    The base_model of its card is not its own name but that of the model it was made from.
    """
    parts = [ref] if Path(ref).exists() else ref.split("+")
    return [_name(Path(part).expanduser().absolute()) for part in parts]


def _name(path: Path) -> str:
    folder = path.parent if path.is_file() else path
    cached = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    if cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    card: Mapping[str, Any] = {}
    config: Any = {}
    try:
        card = read_head(folder) or {}
        config = files.read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    except (ConfigError, DamagedFile, OSError):  # one that no hub could read names nothing
        pass
    index = card.get("model-index")
    first = index[0] if isinstance(index, list) and index else None
    said = [card.get("model_name"), first.get("name") if isinstance(first, Mapping) else None]
    said += [config.get("_name_or_path") if isinstance(config, Mapping) else None]
    for name in said:
        if isinstance(name, str) and HUB_ID.fullmatch(name) and name[0] != ".":
            return name
    return NO_NAME.sub("-", folder.name).strip("-.") or "model"


def read_head(folder: Path) -> dict[str, Any] | None:
    """The head of a model's card; None if it has no card or the card has none."""
    path = folder / CARD
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as reader:
        found = HEAD.match(reader.read(CARD_CHARACTERS))
    return parse_yaml(found[1], str(path)) if found else None
