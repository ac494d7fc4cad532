"""The docs are true: generated ones fit the code, and what they name exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.store.records import HandoffRecord, ModelMetadata
from tests.support.command_line import Forge
from tests.support.documents import generate

ROOT = Path(__file__).resolve().parent.parent
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)(?:\[[^`]*\])?`")
SYSTEM = "home|Users|root|work|tmp|mnt|opt|var|etc|usr|srv|media|private|Volumes"
ABSOLUTE = re.compile(rf"(?<![\w./:~-])(?:file://)?/(?:{SYSTEM})\b|\b[A-Za-z]:\\\w")


DOCUMENTS: dict[str, str] = generate.documents()


# -- generated ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_generated_docs_are_up_to_date(name: str) -> None:
    committed = (ROOT / "docs" / name).read_bytes()
    assert committed.decode() == DOCUMENTS[name], "run: make docs"


def test_no_generated_doc_is_left_over() -> None:
    schemas = {f"schemas/{path.name}" for path in (ROOT / "docs" / "schemas").iterdir()}
    assert schemas == set(DOCUMENTS) - {"reference.md", "tasks.md"}


def test_generating_does_not_depend_on_the_surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"COLUMNS": "200", "FORGE_STORAGE": "/x", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert generate.documents() == DOCUMENTS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_generated_docs_are_plain(name: str) -> None:
    text = DOCUMENTS[name]
    assert text.isascii() and "\x1b" not in text and text.endswith("\n")
    assert not ABSOLUTE.search(text)


@pytest.mark.parametrize("name", generate.commands())
def test_every_command_and_option_has_a_help_text(name: str) -> None:
    command = generate.commands()[name]
    assert command.help and command.help.strip().endswith(".")
    assert all(param.help for param in command.params)
    assert f"### `forge {name}`\n" in DOCUMENTS["reference.md"]


SETTINGS = {key: text for key, _, text in generate.settings(PipelineConfig())}


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_has_a_description(key: str) -> None:
    assert SETTINGS[key]
    assert f"\n| `{key}` | " in DOCUMENTS["reference.md"]


def test_schemas_describe_what_is_written() -> None:
    """The names in a schema are those of the real records."""
    models: dict[str, type[BaseModel]] = {
        "config": PipelineConfig,
        "metadata": ModelMetadata,
        "handoff": HandoffRecord,
    }
    for name, model in models.items():
        schema = json.loads(DOCUMENTS[f"schemas/{name}.schema.json"])
        assert list(schema["properties"]) == sorted(model.model_fields)
    config = json.loads(DOCUMENTS["schemas/config.schema.json"])
    assert set(config["properties"]) == set(load_config().model_dump())
    assert config["additionalProperties"] is False


# -- written by hand ------------------------------------------------------------------------------


def test_readme_has_no_absolute_paths() -> None:
    assert not ABSOLUTE.search((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see /home/me/x", True),
        ("`/home/me/forge`", True),
        ("(/tmp)", True),
        (r"C:\Users", True),
        ("file:///usr/x", True),
        ("https://example.org/home/x", False),
        ("storage/tmp/x", False),
        ("either/or", False),
    ],
)
def test_absolute_paths_are_recognised(text: str, found: bool) -> None:
    assert bool(ABSOLUTE.search(text)) == found


def defined(path: Path) -> set[str]:
    """The test functions of a file, those in classes as Class::name."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {
            prefix + function.name
            for function in inner
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and function.name.startswith("test")
        }
    return names


def missing_ids(text: str) -> list[str]:
    """The test ids in a text that no test has."""
    return [
        f"{file}::{name}"
        for file, name in TEST_ID.findall(text)
        if not (ROOT / file).is_file() or name not in defined(ROOT / file)
    ]


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert len(TEST_ID.findall(text)) == len(re.findall(r"`tests/[^`]*::", text)) > 0
    assert missing_ids(text) == []


def test_missing_ids_are_noticed() -> None:
    here = "tests/test_docs.py"
    good = f"`{here}::test_missing_ids_are_noticed` and `{here}::test_readme_has_no_absolute_paths`"
    assert missing_ids(good) == []
    bad = [f"{here}::test_nothing", "tests/test_nowhere.py::test_x", f"{here}::missing_ids"]
    assert missing_ids(" ".join(f"`{name}`" for name in bad)) == bad


@pytest.mark.slow
def test_the_commands_of_the_readme_run(forge: Forge) -> None:
    """Every `forge` line of the README, in its order, ends well; so does its Python."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ forge ([^#\n]*)", text, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        result = forge(line.strip())
        assert result.code == 0, f"forge {line}: {result.err}"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102


def test_every_link_between_the_docs_leads_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
