"""Settings: which source wins, one error for all mistakes, one hash, and no hostile input."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_forge.config.load import (
    MAX_FILE_BYTES,
    PHASE_FOLDER,
    PIPELINE_FILE,
    _StrictLoader,
    merge,
    parse_json,
    parse_set,
    parse_yaml,
    preset_names,
    read_file,
    to_yaml,
    validate,
)
from agent_forge.config.settings import Settings
from agent_forge.errors import ConfigError
from agent_forge.pipeline.config import PhaseConfigs, PipelineConfig, config_folder, load_config
from tests.support.settings import LEAVES, Key

Parse = Callable[[str, str], dict[str, Any]]
Write = Callable[[str, str | bytes], Path]
PARSERS = pytest.mark.parametrize("parse", [parse_yaml, parse_json])
# preset -> vocab_size, d_model, n_layers, millions of weights
SIZES = {
    "smoke": (512, 64, 2, 0.13),
    "tiny": (2048, 128, 4, 1.17),
    "toy": (2048, 128, 4, 1.17),
    "small": (4096, 192, 5, 2.99),
    "25m": (32768, 512, 8, 25.25),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below tmp_path and return its path."""

    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def refused(*words: str, **sources: Any) -> str:
    """The message with which load_config refuses these sources; it has all these words."""
    with pytest.raises(ConfigError) as error:
        load_config(**sources)
    for word in words:
        assert word in str(error.value)
    return str(error.value)


# -- which source wins ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_set_beats_file_beats_preset_beats_default(name: str, write: Write) -> None:
    data = {"preset": "small", "model": {"n_layers": 7, "d_mem": 33}, "runtime": {"seed": 1}}
    path = write(name, json.dumps(data))
    config = load_config(path=path, sets=("model.d_mem=44", "runtime.seed=2", "runtime.seed=3"))
    assert config.preset == "small"
    assert config.runtime.check_every_steps == 50  # a default that no preset touches
    assert config.model.d_model == 192  # the preset, over the default 128
    assert config.model.n_layers == 7  # the file, over the preset's 5
    assert config.model.d_mem == 44  # --set, over the file
    assert config.runtime.seed == 3  # the last --set


def test_without_sources_the_tiny_preset_is_used(write: Write) -> None:
    assert load_config() == load_config(preset="tiny") == load_config(path=write("c.yaml", ""))
    assert load_config().preset == "tiny"


def test_preset_can_be_named_by_option_file_or_set(write: Write) -> None:
    path = write("c.yaml", "preset: smoke\n")
    assert load_config(preset="smoke") == load_config(path=path)
    assert load_config(preset="smoke") == load_config(sets=("preset=smoke",))
    assert load_config(preset="smoke", path=path).preset == "smoke"


def test_two_presets_that_differ_are_refused(write: Write) -> None:
    path = write("c.yaml", "preset: small\n")
    refused("'smoke'", "'small'", str(path), preset="smoke", path=path)
    refused("'smoke'", "'small'", "--set", preset="smoke", sets=("preset=small",))


@pytest.mark.parametrize("name", ["tinny", "", "../tiny", "_x"])
def test_unknown_preset(name: str) -> None:
    refused("unknown preset", "tiny", preset=name)


@pytest.mark.parametrize("value", ["5", "[tiny]", "{a: 1}", "false"])
def test_preset_that_is_not_a_name(value: str, write: Write) -> None:
    refused("unknown preset", path=write("c.yaml", f"preset: {value}\n"))


# -- what is wrong is told, all at once -----------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("modle", "model"),
        ("model.d_modle", "d_model"),
        ("runtime.sede", "seed"),
        ("storage.rot", "root"),
        ("cleanup_policy.max_sessions_totl", "max_sessions_total"),
        ("phases.evomerg", "evomerge"),
        ("phases.cognate.enabld", "enabled"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    refused(f"unknown key {key!r}; did you mean {meant!r}?", sets=(f"{key}=1",))


def test_unknown_key_far_from_all_lists_them() -> None:
    refused("unknown key 'runtime.zzz'; known: seed, device, threads", sets=("runtime.zzz=1",))


def test_all_problems_are_in_one_error(write: Write) -> None:
    text = "modle: {}\nruntime: {seed: -1, device: tpu}\nmodel: {n_layers: two, d_modle: 8}\n"
    message = refused(str(write("c.yaml", text)), path=write("c.yaml", text))
    for problem in (
        "unknown key 'modle'",
        "runtime.seed: Input should be greater than or equal to 0 (got -1)",
        "runtime.device: Input should be 'auto', 'cpu', 'cuda' or 'mps' (got 'tpu')",
        "model.n_layers: Input should be a valid integer",
        "unknown key 'model.d_modle'",
    ):
        assert problem in message
    assert message.count(";") >= 4


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("model.d_model=129", "d_model 129 over n_heads 4"),
        ("model.d_model=132", "d_model 132 over n_heads 4"),  # 33 is whole, but odd
        ("model.n_heads=3", "d_model 128 over n_heads 3"),
        ("model.embed_rank=129", "embed_rank 129 is larger than d_model 128"),
        ("model.vocab_size=299", "greater than or equal to 300"),
        ("model.d_model.deeper=1", "model.d_model: Input should be a valid integer"),
        ("model=1", "model: Input should be a valid dictionary"),
        ("model=", "model: Input should be a valid dictionary"),
        ("storage.root=", "storage.root: Input should be a valid string"),
        ("storage.root=''", "storage.root: String should have at least 1 character"),
        ("runtime.seed=9223372036854775808", "less than 9223372036854775808"),
        ("cleanup_policy.schedule_cleanup=0 0 * *", "five fields"),
        ("cleanup_policy.schedule_cleanup='@reboot x * * *'", "five fields"),
        ('cleanup_policy.schedule_cleanup="0 0 *;x * *"', "five fields"),
    ],
)
def test_values_that_do_not_fit(item: str, problem: str) -> None:
    refused(problem, sets=(item,))


def test_cron_schedule_is_kept_on_one_line() -> None:
    config = load_config(sets=(r'cleanup_policy.schedule_cleanup="0 3\n*  * mon-fri"',))
    assert config.cleanup_policy.schedule_cleanup == "0 3 * * mon-fri"


# -- presets, the hash, and the form --------------------------------------------------------------


def test_the_shipped_presets_are_the_expected_ones() -> None:
    assert preset_names() == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_preset_has_its_sizes_and_round_trips(name: str) -> None:
    config = load_config(preset=name)
    m = config.model
    found = (m.vocab_size, m.d_model, m.n_layers, round(m.parameters() / 1e6, 2))
    assert found == SIZES[name]
    again = validate(PipelineConfig, parse_yaml(to_yaml(config), name), name)
    assert again == config
    assert again.canonical_hash() == config.canonical_hash()


def reverse(value: Any) -> Any:
    """The same data with the keys of every mapping in the opposite order."""
    if not isinstance(value, dict):
        return value
    return {key: reverse(inner) for key, inner in reversed(value.items())}


def test_hash_does_not_depend_on_the_order_of_keys() -> None:
    config = load_config(preset="small")
    data = config.model_dump()
    assert list(reverse(data)) != list(data)
    assert validate(PipelineConfig, reverse(data), "x").canonical_hash() == config.canonical_hash()


def test_hash_is_the_sha256_of_sorted_compact_json() -> None:
    """Runs store it, so its form must not change."""

    class Pair(Settings):
        b: float = 1
        a: str = "x"

    assert Pair().canonical_hash() == hashlib.sha256(b'{"a":"x","b":1.0}').hexdigest()


def another(value: Any, annotation: Any) -> Any:
    """A value of the type that is not this one."""
    if get_origin(annotation) is Literal:
        return next(choice for choice in get_args(annotation) if choice != value)
    if isinstance(value, bool | None):
        return not value
    if isinstance(value, dict):
        return {**value, "another": 1.0}
    if isinstance(value, list):
        return [*value, "another"]
    return value + (1 if isinstance(value, int | float) else "x")


def change(config: Any, key: Key) -> Any:
    """The config with another value in one field; whether it fits the others does not matter."""
    inner = getattr(config, key[0])
    new = (
        change(inner, key[1:])
        if key[1:]
        else another(inner, type(config).model_fields[key[0]].annotation)
    )
    return config.model_copy(update={key[0]: new})


@pytest.mark.parametrize("key", LEAVES, ids=".".join)
def test_hash_changes_with_every_field(key: Key) -> None:
    default = PipelineConfig()
    changed = change(default, key)
    assert changed != default
    assert changed.canonical_hash() != default.canonical_hash()


@pytest.mark.parametrize("key", LEAVES, ids=".".join)
def test_configs_are_frozen(key: Key) -> None:
    section: Any = PipelineConfig()
    for name in key[:-1]:
        section = getattr(section, name)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section, key[-1], getattr(section, key[-1]))


TEXTS = st.text(min_size=1).filter(str.isprintable) | st.sampled_from(["1e3", "-2E-5", "1.e0"])


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(TEXTS)
def test_any_text_survives_yaml(root: str) -> None:
    assert_survives_yaml(root)


@pytest.mark.soak
@settings(deadline=None, max_examples=500)
@given(TEXTS)
def test_five_hundred_texts_survive_yaml(root: str) -> None:
    assert_survives_yaml(root)


def assert_survives_yaml(root: str) -> None:
    config = PipelineConfig.model_validate({"storage": {"root": root}})
    assert validate(PipelineConfig, parse_yaml(to_yaml(config), "x"), "x") == config


# -- the config folder ----------------------------------------------------------------------------


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    """What `forge init --preset smoke` writes."""
    for name, text in config_folder(load_config(preset="smoke")).items():
        write(f"conf/{name}", text)
    return tmp_path / "conf"


def test_folder_reads_back_equal(write: Write, tmp_path: Path) -> None:
    config = load_config(preset="small", sets=("phases.edge.enabled=false", "runtime.seed=7"))
    texts = config_folder(config)
    for name, text in texts.items():
        write(f"conf/{name}", text)
    assert len(texts) == 1 + len(PhaseConfigs.model_fields)
    assert load_config(path=tmp_path / "conf") == config
    assert load_config(path=tmp_path / "conf" / PIPELINE_FILE) == config


def test_folder_with_the_pipeline_file_only(write: Write) -> None:
    path = write(f"conf/{PIPELINE_FILE}", "preset: smoke\n")
    assert load_config(path=path.parent) == load_config(preset="smoke")


def test_folder_edit_of_a_phase_file_counts(folder: Path) -> None:
    (folder / PHASE_FOLDER / "phase2_evomerge.yaml").write_text("enabled: false\n")
    phases = load_config(path=folder).phases
    assert (phases.cognate.enabled, phases.evomerge.enabled) == (True, False)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (PIPELINE_FILE, "phases: {cognate: {}}\n", "phase 'cognate' is set in pipeline_config"),
        (PIPELINE_FILE, "phases: [cognate]\n", "phases: names with settings"),
        (PIPELINE_FILE, "phases: yes\n", "phases: names with settings"),
        (PIPELINE_FILE, "- a\n", "not a list"),
        (f"{PHASE_FOLDER}/phase9_magic.yaml", "enabled: true\n", "phase9_magic.yaml"),
        (f"{PHASE_FOLDER}/cognate.yaml", "enabled: true\n", ", phase2_evomerge.yaml, "),
        (f"{PHASE_FOLDER}/phase1_cognate.yml", "enabled: true\n", "phase1_cognate.yml"),
        (f"{PHASE_FOLDER}/phase1_cognate.json", "{}", "phase1_cognate.json"),
        (f"{PHASE_FOLDER}/phase1_cognate.yaml", "[1]\n", "phase1_cognate.yaml"),
        (f"{PHASE_FOLDER}/phase1_cognate.yaml", "enabld: true\n", "did you mean 'enabled'"),
    ],
)
def test_folder_with_a_mistake(folder: Path, name: str, text: str, problem: str) -> None:
    (folder / name).write_text(text)
    refused(problem, path=folder)


def test_folder_without_the_pipeline_file(folder: Path, tmp_path: Path) -> None:
    (folder / PIPELINE_FILE).unlink()
    refused(f"cannot read {folder / PIPELINE_FILE}: No such file", path=folder)
    (tmp_path / "empty").mkdir()
    refused(PIPELINE_FILE, "No such file", path=tmp_path / "empty")


# -- broken and hostile input ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "x: !!python/object/apply:os.system ['touch {canary}']\n",
        "!!python/object/apply:os.system ['touch {canary}']\n",
        "? !!python/object/apply:os.system ['touch {canary}']\n: 1\n",
        "x: !!python/object/new:os.system ['touch {canary}']\n",
        "x: !!python/object/apply:subprocess.check_output [['touch', '{canary}']]\n",
        "x: !!python/name:os.system\n",
        "x: !!python/module:os\n",
        "x: !custom {{a: 1}}\n",
    ],
)
def test_yaml_tags_never_run(template: str, write: Write, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = template.format(canary=canary)
    refused("tags (", "are not allowed", path=write("c.yaml", text))
    with pytest.raises(ConfigError):
        parse_set("x=" + text.removeprefix("x: ").strip())
    assert not canary.exists()


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "more than 20,000 values"),
        (
            "a: &a [" + "x, " * 300 + "]\n" + "b: [" + "*a, " * 100 + "]\n",
            "that its aliases stand for",
        ),
        ("a: &a " + "x" * 500_000 + "\nb: [*a, *a, *a, *a]\n", "2,000,000 characters"),
        ("a: [" + "1, " * 20_000 + "]\n", "more than 20,000 values"),
        ("&a [*a]", "the alias *a stands within what it stands for"),
        ("a: &a {b: 1, c: {<<: *a}}\n", "the alias *a stands within what it stands for"),
        ("a: *b\n", "undefined alias 'b'"),
        ("<<: 5\n", "expected a mapping or list of mappings"),
        ("<<: {a: 1}\n<<: {b: 1}\n", "'<<' appears twice"),
        ("x: {<<: {a: 1, a: 2}}\n", "'a' appears twice"),
        ("a: 1\na: 2\n", "'a' appears twice"),
        ("x: {a: 1, a: 2}\n", "'a' appears twice"),
        ("a: 1\n'a': 2\n", "'a' appears twice"),
        ("{" * 100_000, "recursion"),
        ("[" * 100_000, "recursion"),
        ("- " * 100_000, "recursion"),
        ("? " * 100_000, "recursion"),
        ("a: !!bool foo\n", "tags"),
        ("a: !!int ''\n", "tags"),
        ("a: !!timestamp x\n", "tags"),
        ('a: "\\UFFFFFFFF"\n', "too large"),
        ("a: 2001-99-99\n", "month"),
        ("a: 0x" + "f" * 5000, "a number of 5002 characters"),
        ("a: 1" + ":1" * 5000, "a number of 10001 characters"),
        ("a: 1" + ":1" * 300 + ".5", "a number of"),
        ("a: [\n", "flow node"),
        ("\tx: 1", "cannot start any token"),
        ("--- {}\n--- {}\n", "single document"),
        ("\0", "special characters"),
        ("? [a]\n: 1\n", "unhashable key"),
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_yaml_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^src: not usable as YAML: ") as error:
        parse_yaml(text, "src")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: &a {x: 1}\nb: *a\n", {"a": {"x": 1}, "b": {"x": 1}}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}),
        ("<<: [{x: 1}, {x: 2, y: 2}]\n", {"x": 1, "y": 2}),
        ("b: {<<: &c {<<: {x: 1}, x: 2}}\nc: *c\n", {"b": {"x": 2}, "c": {"x": 2}}),
        ("'<<': 1\n", {"<<": 1}),
    ],
)
def test_aliases_and_merge_keys_are_read(text: str, data: dict[str, object]) -> None:
    assert parse_yaml(text, "src") == data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 2}', "a key appears twice"),
        ('{"x": {"a": 1, "a": 2}}', "a key appears twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": -Infinity}', "-Infinity is not a finite number"),
        ('{"b": "NaN",\n "a": -1e999}', "line 2: -1e999 is not a finite number"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ('{"a":' * 100_000, "nested deeper than 100 levels"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested deeper than 100 levels"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"a": 1', "delimiter"),
        ("{'a': 1}", "double quotes"),
        ("", "Expecting value"),
    ],
    ids=lambda text: text[:12],
)
def test_json_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^src: not usable as JSON: ") as error:
        parse_json(text, "src")
    assert problem in str(error.value)


@PARSERS
@pytest.mark.parametrize("text", ["[1]", '"x"', "1", "true"])
def test_top_level_that_is_not_a_mapping(parse: Parse, text: str) -> None:
    with pytest.raises(ConfigError, match="src: settings are names with values, not a "):
        parse(text, "src")


@pytest.mark.parametrize("key", ["1", "1.5", "true", "~", "2001-01-01"])
def test_keys_that_are_not_names(key: str) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        parse_yaml(f"{key}: 1", "src")
    refused("model", "Keys should be strings", sets=(f"model={{{key}: 1}}",))


def test_lone_surrogates_are_refused(write: Write) -> None:
    refused("unicode", path=write("c.json", r'{"storage": {"root": "\ud800"}}'))
    refused("unicode", path=write("d.json", r'{"\ud800": 1}'))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("c.yaml", value) for value in (".nan", ".inf", "-.inf", "1.0e+999", "'inf'", "'nan'")),
        *(("c.json", value) for value in ("NaN", "Infinity", "1e999", '"inf"')),
    ],
)
def test_numbers_are_finite(name: str, text: str, write: Write) -> None:
    for key in ("cleanup_policy", "max_session_age_days"), ("runtime", "seed"):
        section = f'{{"{key[0]}": {{"{key[1]}": {text}}}}}'
        refused(path=write(name, section))


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe a: 1", "is not UTF-8 text (byte 0)"),
        ("a: \xe9".encode("latin-1"), "is not UTF-8 text (byte 3)"),
        (bytes(range(256)) * 8, "is not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "not usable as"),
        (b"#" * (MAX_FILE_BYTES + 1), "is too large"),
    ],
    ids=["utf16", "latin1", "garbage", "elf", "large"],
)
def test_files_that_are_no_config(name: str, content: bytes, problem: str, write: Write) -> None:
    path = write(name, content)
    refused(str(path), problem, path=path)


def test_a_file_of_the_largest_size_is_read(write: Write) -> None:
    head = b"preset: smoke\n#"
    path = write("c.yaml", head + b"x" * (MAX_FILE_BYTES - len(head)))
    assert load_config(path=path).preset == "smoke"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    refused("cannot read", "No such file", path=tmp_path / "missing.yaml")
    refused("cannot read", "too long", path=tmp_path / ("x" * 300))
    if Path("/dev/zero").exists():
        refused("is too large", path=Path("/dev/zero"))


def test_many_keys_take_no_quadratic_time() -> None:
    """Keys are looked up by hash, so two of them are hardly ever compared."""
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    class Loader(_StrictLoader):
        """Makes its keys from the class above."""

    Loader.add_constructor("tag:yaml.org,2002:str", lambda _, node: Name(node.value))
    text = "\n".join(f"k{i}: 1" for i in range(1000))
    assert len(yaml.load(text, Loader)) == 1000  # noqa: S506
    assert compared < 10_000


# -- --set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", ["x", "", "=1", "=", ".=1", "a..b=1", ".a=1", "a.=1", " =1"])
def test_set_without_key_or_value(item: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form path\.to\.key=value"):
        parse_set(item)


@pytest.mark.parametrize("item", ["a=[", "a='", "a=: b", "a=1\nb: 2", "a=1\nvalue: 2"])
def test_set_with_a_bad_value(item: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set "):
        parse_set(item)


@pytest.mark.parametrize("item", ["model.d_model.c.d=1", "runtime.seed.x=1", "preset.x=1"])
def test_set_below_a_leaf(item: str) -> None:
    refused(item.split(".")[1] if item[0] != "p" else "preset", sets=(item,))


@pytest.mark.parametrize(
    ("item", "data"),
    [
        ("a=1", {"a": 1}),
        ("a.b.c=x=y", {"a": {"b": {"c": "x=y"}}}),
        (" a . b = true", {"a": {"b": True}}),
        ("a=", {"a": None}),
        ("a=[1, two]", {"a": [1, "two"]}),
        ("a={b: 1.5}", {"a": {"b": 1.5}}),
        ("a='1'", {"a": "1"}),
    ],
)
def test_set_reads_its_value_as_yaml(item: str, data: dict[str, Any]) -> None:
    assert parse_set(item) == data


# -- properties -----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *"[]{}:,-?&*!|>'\"%@`#~=<.0123456789xbaeEn_+ \n\t\\",
        *(": ", "- ", "!!bool ", "!!int ", "<<: ", "\\U", "FFFFFFFF", ".inf", ".nan", "0x"),
        *("2001-01-01", " 10:10:10", "true", "null", "1e9"),
    ]
)
TEXT = st.one_of(
    st.text(st.characters()),  # lone surrogates included
    st.lists(PIECES, max_size=40).map("".join),
    st.lists(PIECES, max_size=40).map(lambda pieces: "a: " + "".join(pieces)),
)


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: parse_yaml(text, "src"),
        lambda text: parse_json(text, "src"),
        parse_set,
        lambda text: parse_set(f"a.b={text}"),
    ],
    ids=["yaml", "json", "set", "set-value"],
)
def test_any_text_gives_data_or_config_error(parse: Callable[[str], dict[str, Any]]) -> None:
    @settings(deadline=None, max_examples=400)
    @given(TEXT)
    def holds(text: str) -> None:
        try:
            data = parse(text)
        except ConfigError:
            return
        assert isinstance(data, dict)
        assert all(isinstance(key, str) for key in data)

    holds()


@settings(deadline=None, max_examples=200)
@given(TEXT)
def test_any_set_gives_a_config_or_config_error(text: str) -> None:
    for key in ("model.d_model", "storage.root", "model", "preset"):
        try:
            config = load_config(sets=(f"{key}={text}",))
        except ConfigError:
            continue
        assert len(config.canonical_hash()) == 64


DATA = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), DATA, max_size=3)


def flat(data: Any, above: Key = ()) -> dict[Key, Any]:
    """Every value that is not a mapping with something in it, by its path."""
    if not isinstance(data, dict) or not data:
        return {above: data}
    return {k: v for key, inner in data.items() for k, v in flat(inner, (*above, key)).items()}


@settings(deadline=None, max_examples=120)
@given(MAPPINGS, MAPPINGS)
def test_merge_prefers_the_right_and_leaves_both_untouched(
    low: dict[str, Any], high: dict[str, Any]
) -> None:
    before = copy.deepcopy((low, high))
    joined = merge(low, high)
    assert (low, high) == before
    ours, right, left = flat(joined), flat(high), flat(low)
    assert all(ours[key] == value for key, value in right.items() if value != {})
    for key, value in left.items():  # what is only on the left stays
        on_the_way = {key[:i] for i in range(len(key) + 1)}
        if not on_the_way & set(right) and not any(k[: len(key)] == key for k in right):
            assert ours[key] == value
    assert merge(joined, high) == joined
    assert merge({}, high) == high
    assert merge(low, {}) == low


def test_read_file_takes_json_by_its_suffix(write: Write) -> None:
    text = '{"runtime": {"seed": 5}}'
    assert read_file(write("c.json", text)) == read_file(write("c.yaml", text)) == json.loads(text)
