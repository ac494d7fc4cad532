"""From presets, files and `--set` to one checked config: defaults < preset < file < --set.

All problems are reported at once, by key, with the nearest known key, before any work starts.
Reading a file never runs code: YAML tags are refused. Aliases are read as long as what they stand
for stays small, which is known before it is made. Repeated keys are refused, since one is lost.
"""

import contextlib
import difflib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agent_forge.config import strict_json
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.config.settings import Settings
from agent_forge.errors import ConfigError

PIPELINE_FILE = "pipeline_config.yaml"
PHASE_FOLDER = "phase_configs"
SUFFIXES = (".yaml", ".yml", ".json")
MAX_FILE_BYTES = 1 << 20
MAX_SIZE = 2_000_000  # characters of a YAML file, with those that its aliases stand for
VALUE_SIZE = 100  # and so many for each value, since reading it takes as long
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MERGE_TAG = "tag:yaml.org,2002:merge"
PRESETS = resources.files("agent_forge.config") / "presets"
C = TypeVar("C", bound=Settings)
Data = dict[str, Any]


def load(
    cls: type[C], *, preset: str | None = None, path: Path | None = None, sets: Sequence[str] = ()
) -> C:
    """Return the config that these sources give, or raise one ConfigError with all problems."""
    given = read_file(path) if path is not None else {}
    for item in sets:
        given = merge(given, parse_set(item))
    named = [name for name in (preset, given.pop("preset", None)) if name is not None]
    if len(named) == 2 and named[0] != named[1]:
        text = f"--preset says {preset!r} but {path or '--set'} says {named[1]!r}"
        raise ConfigError(text, hint="name one of them")
    name = named[0] if named else "tiny"
    if name not in (known := preset_names()):
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(str(name), known)}")
    settings = parse_yaml((PRESETS / f"{name}.yaml").read_text(), f"preset {name}")
    data = merge({**settings, "preset": name}, given)
    sources = [f"preset {name}", *([str(path)] if path else []), *(["--set"] if sets else [])]
    return validate(cls, data, " + ".join(sources))


def validate(cls: type[C], data: Mapping[str, Any], source: str, also: Sequence[str] = ()) -> C:
    """Return the data as a config of the class; every problem is in one message. `also` are names
    that an unknown key may stand for, beside the fields of the class."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problems = [_problem(cls, details, also) for details in error.errors()]
    raise ConfigError(f"{source}: " + "; ".join(problems))


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if p.name[0] != "_")


def read_file(path: Path) -> Data:
    """Return the settings of a YAML or JSON file, or of a config folder."""
    in_folder = path.name == PIPELINE_FILE and (path.parent / PHASE_FOLDER).is_dir()
    with _reading(path):
        if path.is_dir() or in_folder:
            return _read_folder(path if path.is_dir() else path.parent)
        return read_one(path)


def _read_folder(folder: Path) -> Data:
    """Join the files of a config folder into one mapping."""
    data = read_one(folder / PIPELINE_FILE)
    phases = data.get("phases") or {}
    if not isinstance(phases, dict):
        raise ConfigError(f"{folder / PIPELINE_FILE}: phases: names with settings are expected")
    known = {f"{phase_folder(name)}.yaml": name for name in ORDER}
    for file in sorted((folder / PHASE_FOLDER).glob("*")):
        if file.suffix not in SUFFIXES or file.name.startswith("."):
            continue
        name = known.get(file.name)
        if name is None:
            raise ConfigError(f"{file}: no phase has that file; known: {', '.join(known)}")
        if name in phases:
            raise ConfigError(f"phase {name!r} is set in {PIPELINE_FILE} and again in {file}")
        phases[name] = read_one(file)
    return {**data, "phases": phases} if phases else data


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or path}: {error.strerror}") from error


def read_one(path: Path, names: Collection[str] | None = None) -> Data:
    """Return the settings of one YAML or JSON file; for `names` see parse_yaml."""
    with _reading(path):
        from_shell = Path("/dev") in path.absolute().parents  # the pipe of <(command)
        if path.is_fifo() and not from_shell:
            raise ConfigError(f"{path} is a pipe, not a file: its writer may never come")
        with path.open("rb") as reader:
            content = reader.read(MAX_FILE_BYTES + 1)  # a device has no size, so count what comes
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is too large; a config has at most {MAX_FILE_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if path.suffix == ".json":
        return parse_json(text, str(path))
    return parse_yaml(text, str(path), names)


def parse_yaml(text: str, source: str, names: Collection[str] | None = None) -> Data:
    """Return a YAML document without keys that are none of `names` and only carry an anchor."""
    try:
        loader = _StrictLoader(text)
        root = loader.get_single_node()
        carriers = loader.carriers(root)
        data = None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source}: not usable as YAML: {reason}") from error
    left_out = set() if names is None else carriers - {*names}
    return {key: value for key, value in _mapping(data, source).items() if key not in left_out}


def parse_json(text: str, source: str) -> Data:
    try:
        data = strict_json.parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not usable as JSON: {error}") from error
    return _mapping(data, source)


def parse_set(item: str) -> Data:
    """Return `a.b=value` as nested data; the value is read as YAML."""
    key, equals, value = item.partition("=")
    parts = key.split(".")
    if not equals or len(parts) > 10 or not all(part.strip() for part in parts):
        raise ConfigError(f"--set {item!r} is not of the form path.to.key=value")
    if value.startswith("*"):  # a cron schedule; YAML would take it for an alias
        value = json.dumps(value)
    parsed = parse_yaml(f"value: {value}", f"--set {item}")
    if list(parsed) != ["value"]:
        raise ConfigError(f"--set {item!r} has more than one value")
    data: Any = parsed["value"]
    for part in reversed(parts):
        data = {part.strip(): data}
    return dict(data)


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Data:
    """Join nested mappings key by key; where both have a value, that of `high` is taken."""
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known one, or all."""
    if not known:
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def dump_yaml(data: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Return data as YAML that parse_yaml reads back as it is."""
    return yaml.dump(dict(data), None, _Dumper, sort_keys=sort_keys, width=1000)


def to_yaml(config: Settings) -> str:
    """Return the config as YAML, with each field's meaning beside it."""
    return "\n".join(_yaml_lines(config, "")) + "\n"


def _yaml_lines(config: BaseModel, indent: str) -> list[str]:
    lines: list[str] = []
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            lines += [] if indent else [""]
            lines += [f"{indent}{name}:", *_yaml_lines(value, indent + "  ")]
            continue
        text = dump_yaml({name: value}, sort_keys=True).strip()
        if info.description and "\n" not in text:
            text = f"{text}  # {info.description}"
        lines += [indent + line for line in text.split("\n")]
    return lines


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses tags, repeated keys, endless numbers and excessive aliases."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}  # of the nodes that are complete
        self._total = 0  # with what the aliases stand for
        self._anchored: set[yaml.Node] = set()

    def carriers(self, root: yaml.Node | None) -> set[str]:
        """Return the keys of the document whose value has an anchor."""
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        return {str(key.value) for key, value in pairs if value in self._anchored}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise yaml.YAMLError(f"tags ({tag}) are not allowed")
        node = super().compose_node(parent, index)
        if node is None:
            return None
        own = VALUE_SIZE + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise yaml.YAMLError(f"the alias *{event.anchor} stands within what it stands for")
            own = self._sizes[node]
        else:
            self._anchored |= {node} if event.anchor else set()
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                parts = itertools.chain(*parts)  # keys and values
            self._sizes[node] = own + sum(self._sizes[part] for part in parts)
        self._total += own
        if self._total > MAX_SIZE:
            limits = f"{MAX_SIZE // VALUE_SIZE:,} values or {MAX_SIZE:,} characters"
            raise yaml.YAMLError(f"more than {limits}, with those that its aliases stand for")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping without repeated keys; what `<<` brings in may be written again."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        named = [k.value if k.tag == MERGE_TAG else self.construct_object(k) for k in keys]
        for name, count in Counter(named).items():
            if count > 1:
                raise yaml.YAMLError(f"key {name!r} appears twice")
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag in NUMBER_TAGS and len(node.value) > 64:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters")
        return super().construct_scalar(node)


class _Dumper(yaml.SafeDumper):
    """A SafeDumper without aliases that quotes texts which our loader would take for numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 reads 1e-3 as a text; everyone who writes it means a number.
for _yaml in (_StrictLoader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), None
    )


def _mapping(data: Any, source: str) -> Data:
    if data is None:
        return {}
    odd = [key for key in data if not isinstance(key, str)] if isinstance(data, dict) else []
    if odd:
        raise ConfigError(f"{source}: the key {odd[0]!r} is not a name")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: settings are names with values, not a {type(data).__name__}")
    return data


def _problem(cls: type[BaseModel], details: Any, also: Sequence[str]) -> str:
    """Return one line for one pydantic error, in the user's words."""
    path = [str(part) for part in details["loc"]]
    where = ".".join(path)
    if details["type"] == "extra_forbidden":
        known = _fields_at(cls, path[:-1]) + ([*also] if len(path) == 1 else [])
        return f"unknown key {where!r}{did_you_mean(path[-1], list(dict.fromkeys(known)))}"
    reason = details["msg"].removeprefix("Value error, ")
    value = details["input"]
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool | None) else ""
    return f"{where or 'config'}: {reason}{shown}"


def _fields_at(cls: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path:
        if part.isdigit():  # a place in a list
            continue
        field = cls.model_fields.get(part)
        options = (field.annotation, *get_args(field.annotation)) if field else ()
        classes = [c for c in options if isinstance(c, type) and issubclass(c, BaseModel)]
        if not classes:
            return []
        cls = classes[0]
    return list(cls.model_fields)
