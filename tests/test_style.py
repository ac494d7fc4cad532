"""How the code is built: layers import downward only, functions are short, one durable writer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "agent_forge"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS_FOLDER = Path(__file__).parent
TESTS = sorted(TESTS_FOLDER.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
# Two phases and the foundation had 24,000. What came since: likelihoods that are read once, work
# planned from time, verdicts corrected together with ceilings and replicates, healing (26,900);
# all methods of mergekit and spectral ones, GGUF, the hub, and the documents' words (28,950);
# Phase 3: thoughts as data in ten strategies, thinking at inference, the judge of thoughts;
# traces of a chat endpoint below a cost cap, in a file that goes on after a kill (960);
# worked examples of any form, start tokens of Modelfiles, refusals of the writer (285);
# spectral merges where auto begins (30); texts that share passages, near-copies in verdicts (230);
# the second step of Phase 3: branches of texts, two rewards, what guards them (790);
# answers behind thoughts, passages of long answers, rows whose answers are marked as wrong (115);
# codecs and packed models (520), Phase 4 on them and forge quantize (980), the native step (300),
# ternary GGUF (45), what few wrong answers allow (10); Phase 5: an adaptive test of ability (120),
# three draws, hints and walls, own thoughts by three rules, rounds that are taken back (1,280),
# a self-model (55); thoughts that templates open and other mends of two attacks (75); Phase 6:
# tools that are carried out and contained (790), what is said with them and by a persona (270),
# rounds of both (870), forge bake: any prompt into any model (725); a bundle without Python (100);
# mends of an attack on tools (80); Phase 7: heads that do not fill the width, and what it cuts,
# measures and takes back, forge edge (1,150); Phase 8: an entropy coder and codecs of steps (190),
# a model in one file (130), vocabularies that are used (45), allocation, points and gates (700),
# what a model has learned, asked in one place for both (210); forge compress (530); a run as its
# files tell it and runs started from elsewhere (300), models that a single phase is given (20),
# weights that are trained on from models of any ternary rule (40); figures and the report of a run
# (1,060); forge sync (170); forge serve: batches for many clients, its API, MCP (1,870); what a
# start over HTTP may name, and what an attack on it found (190); reports of evolutions (220); the
# dashboard: eight pages (1,640); mends of an attack, two newcomers and a cold reader (90); programs
# that are learned because they passed (50), the specification's examples as they stand (195), mends
# of another attack (20), FP32 controls and any codec beside ternary weights (15), and what a cold
# reader and one more attack found in these (90).
MAX_LINES = 48_895

# Lowest first. A module imports from layers below its own, and from its own folder.
LAYERS = (
    ("errors", "config"),
    ("quant",),
    ("platform", "store", "track", "search"),
    ("workers", "sandbox", "native"),
    ("model", "optim", "data"),
    ("contract",),
    ("infer",),
    ("evals", "train", "merge"),
    ("phases",),
    ("pipeline",),
    ("cli", "ui", "api", "evomerge_pipeline", "interfaces"),
    ("__main__",),
)
# Within one layer, who may import whom.
WITHIN = {("config", "errors"), ("store", "platform"), ("track", "platform"), ("track", "store")}
WITHIN |= {("model", "data")}  # an open model has its tokenizer
WITHIN |= {("cli", "ui"), ("cli", "api")}  # forge report, dashboard and serve
LAZY = {"torch", "transformers", "numpy", "scipy", "pandas", "ray"}  # not for the command line
TORCH_FREE = ("errors", "config", "platform", "sandbox", "workers", "cli", "pipeline")
# The file system is changed in one place; these are the ways around it.
WRITING_CALLS = {
    *(
        "write_text",
        "write_bytes",
        "unlink",
        "rmdir",
        "rmtree",
        "copyfile",
        "copytree",
        "save_file",
    ),
    *("move", "removedirs", "remove", "rename", "renames", "replace", "save", "save_pretrained"),
    *("symlink_to", "hardlink_to", "touch", "ftruncate", "truncate", "makedirs"),
}
# A lock is written in place; what hostile code left in its folder is removed, whatever it is;
# the folders that it sees are in memory, as long as it runs.
EXCEPTIONS = {
    "agent_forge.store.lock": {"ftruncate", "os.ftruncate"},
    "agent_forge.sandbox.run": {"rename", "rmdir", "unlink"},
    "agent_forge.sandbox.child": {"makedirs", "os.makedirs"},
}
WRITING_MODULES = {"os", "shutil", "torch", "np", "numpy", "safetensors", "json", "pickle"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part(module: str) -> str:
    """`agent_forge.store.files` -> `store`."""
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imports(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            if inner.module == "agent_forge":
                yield from (f"agent_forge.{alias.name}" for alias in inner.names)
            else:
                yield inner.module


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_downward_only(path: Path) -> None:
    mine = part(name_of(path))
    if mine == "__init__":
        return
    for module in imports(tree(path)):
        if not module.startswith("agent_forge."):
            continue
        other = part(module)
        if other == mine:
            continue
        below = level(other) < level(mine)
        assert below or (mine, other) in WITHIN, f"{mine} must not import {module}"


def room(module: str) -> str:
    """`agent_forge.phases.phase1_cognate.config` -> `phase1_cognate`; "" where no phase lives."""
    name = [*module.split("."), "", ""][2] if part(module) == "phases" else ""
    return name if name.startswith("phase") else ""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_phase_imports_no_other_phase(path: Path) -> None:
    mine = room(name_of(path))
    others = {room(module) for module in imports(tree(path))} - {"", mine}
    assert not mine or not others, f"{mine} must not import {others}"


def test_each_phase_is_a_room() -> None:
    assert room("agent_forge.phases.phase1_cognate.config") == "phase1_cognate"
    assert room("agent_forge.phases.training") == room("agent_forge.phases") == ""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_answers_at_once_loads_nothing_heavy(path: Path) -> None:
    if part(name_of(path)) not in TORCH_FREE:
        return
    for node in tree(path).body:  # the top level only: inside functions it is fine
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        assert not {m.split(".")[0] for m in imports(node)} & LAZY


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_and_files_are_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def writing_calls(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            yield "open"
        if not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        owner_name = owner.id if isinstance(owner, ast.Name) else ""
        call = node.func.attr
        if call in WRITING_CALLS - {"replace", "remove", "save"} and owner_name not in (
            "files",
            "stage",
        ):
            yield call
        if call in WRITING_CALLS and owner_name in WRITING_MODULES:
            yield f"{owner_name}.{call}"
        if call == "open" and any(
            isinstance(a, ast.Constant) and isinstance(a.value, str) and set(a.value) & set("wax+")
            for a in node.args
        ):
            yield "open for writing"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_one_module_changes_the_file_system(path: Path) -> None:
    if name_of(path) in ("agent_forge.store.files", "agent_forge.store.disk"):
        assert set(writing_calls(path)), "this test would no longer see a write"
        return
    assert set(writing_calls(path)) <= EXCEPTIONS.get(name_of(path), set())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_source_is_ascii_and_says_what_it_is(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()
    assert ast.get_docstring(tree(path)), "a module begins with what it is"


def test_the_package_stays_small() -> None:
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in MODULES) <= MAX_LINES


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(TESTS_FOLDER)))
def test_no_test_module_imports_another(path: Path) -> None:
    """What tests share is in tests/support, or in a module beside them that has no tests."""
    imported: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    assert [name for name in imported if re.match(r"(tests\.(\w+\.)*)?test_", name)] == []


def test_tests_mirror_the_package() -> None:
    """Each folder of tests is a folder of the package, or one of those that test the whole."""
    folders = {path.parent.relative_to(TESTS_FOLDER) for path in TESTS_FOLDER.rglob("test_*.py")}
    whole = {Path(), Path("faults"), Path("golden"), Path("compat")}
    assert {folder for folder in folders - whole if not (PACKAGE / folder).is_dir()} == set()
