"""The native part as its sources are now, whether it is installed or not, and the C program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agent_forge.native.bundle import write_bundle
from tests.support.native_build import CAN_BUILD, NAME, build, load
from tests.support.programs import SANITIZED, Program, built, in_steps, restless, save, write


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if not CAN_BUILD:
        pytest.skip("there is no compiler")
    return load(build(tmp_path_factory.mktemp("native")))


@pytest.fixture
def native(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("FORGE_NO_NATIVE", "FORGE_PLAIN_C"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, NAME, compiled)
    yield compiled


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "packed"
    return save(restless(sw_window=24), folder, "ternary", "int4g32", 8)


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = restless(sw_window=24)
    return write(model, tmp_path_factory.mktemp("models") / "steps", in_steps(model))


@pytest.fixture(scope="session")
def bundle(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(packed, out)
    return out


@pytest.fixture(scope="session")
def program(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return built(bundle, tmp_path_factory.mktemp("built") / "quick", "-O2")


@pytest.fixture(scope="session")
def sanitized(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("built")
    probe = ["cc", "-x", "c", "-fsanitize=address,undefined", "-", "-o", str(folder / "probe")]
    if subprocess.run(probe, input=b"int main(void) { return 0; }", check=False).returncode:
        pytest.skip("cc has no sanitizers")
    return built(bundle, folder / "sanitized", SANITIZED)


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "model")
