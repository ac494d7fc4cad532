"""The native part, compiled from the sources that are there now."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
NAME = "agent_forge.native._native"
SETUP = runpy.run_path(str(ROOT / "setup.py"))
INCLUDE = sysconfig.get_paths()["include"]
CAN_BUILD = bool(shutil.which("gcc")) and (Path(INCLUDE) / "Python.h").is_file()


def build(folder: Path, *flags: str) -> Path:
    """Compile as setup.py does, with more flags behind its own; a warning is an error."""
    target = folder / "_native.abi3.so"
    sources = [str(ROOT / "agent_forge" / "native" / name) for name in SETUP["SOURCES"]]
    strict = ["-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{INCLUDE}"]
    command = ["gcc", *SETUP["FLAGS"], *strict, *flags, *sources, "-lm", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
