"""`forge doctor`: what this machine has, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer

from agent_forge.cli.config import JSON
from agent_forge.cli.output import emit_json, emit_table, size
from agent_forge.cli.runs import STORAGE, has_registry
from agent_forge.errors import ForgeError

EXTRAS = {
    "wandb": ("wandb", "Weights & Biases as a mirror of the metrics"),
    "cluster": ("ray", "workers on a Ray cluster"),
    "multi": ("pymoo", "multi-objective search"),
    "data": ("datasets", "datasets from the Hugging Face hub"),
    "eval": ("lm-eval", "tasks of lm-evaluation-harness"),
}
LOW_DISK_BYTES = 5 * 10**9
LOW_MEMORY_BYTES = 2 * 10**9


class DoctorFinding(NamedTuple):
    name: str
    status: str  # ok, optional (not there, not needed), problem
    details: str
    remedy: str = ""


def doctor(
    storage: Path = STORAGE,
    repair: bool = typer.Option(
        False, "--repair", help="Rebuild a damaged registry from the run directories."
    ),
    as_json: bool = JSON,
) -> None:
    """Check this machine, the optional parts and the registry."""
    own = (_native(), _sandbox(), _registry(storage, repair))
    findings = [*_machine(storage), _torch(), *_extras(), *own]
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        emit_json(healthy=not problems, findings=[finding._asdict() for finding in findings])
    else:
        emit_table(("what", "status", "found", "to get it"), findings)
    if problems:
        raise typer.Exit(1)


def _machine(storage: Path) -> Iterator[DoctorFinding]:
    import psutil

    from agent_forge.store import files

    yield DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.system()}")
    yield DoctorFinding("cpu", "ok", f"{os.cpu_count()} cores, {platform.machine()}")
    memory = psutil.virtual_memory()
    found = f"{size(memory.available)} free of {size(memory.total)}"
    low = memory.available < LOW_MEMORY_BYTES
    yield DoctorFinding(
        "memory", "problem" if low else "ok", found, "close programs" if low else ""
    )
    free = files.free_bytes(storage.resolve())
    low = free < LOW_DISK_BYTES
    remedy = "forge clean --dry-run shows what could go" if low else ""
    yield DoctorFinding("disk", "problem" if low else "ok", f"{size(free)} free", remedy)


def _torch() -> DoctorFinding:
    try:
        import torch
    except ImportError as error:
        return DoctorFinding("torch", "problem", str(error), "pip install torch")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif torch.backends.mps.is_available():
        device = "Apple GPU (mps)"
    else:
        device = f"CPU with {torch.get_num_threads()} threads (no GPU; none is needed)"
    return DoctorFinding("torch", "ok", f"{torch.__version__}, {device}")


def _extras() -> Iterator[DoctorFinding]:
    for extra, (package, purpose) in EXTRAS.items():
        try:
            yield DoctorFinding(extra, "ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            remedy = f"pip install -c constraints.txt -e '.[{extra}]'"
            yield DoctorFinding(extra, "optional", f"not installed: {purpose}", remedy)


def _native() -> DoctorFinding:
    compiler = shutil.which("cc") or shutil.which("clang") or shutil.which("cl")
    if compiler is None:
        return DoctorFinding("native", "optional", "no C compiler", "install gcc or clang")
    return DoctorFinding(
        "native", "ok", f"C compiler {Path(compiler).name}; this version has no kernels"
    )


def _sandbox() -> DoctorFinding:
    from agent_forge import sandbox

    try:
        layers = sandbox.layers()
    except (ForgeError, OSError) as error:
        return DoctorFinding("sandbox", "optional", str(error), getattr(error, "hint", ""))
    found = ", ".join(name for name, held in layers.items() if held)
    missing = [name for name in sandbox.LAYERS if not layers[name]]
    if missing:
        remedy = f"docs/sandbox.md tells what it means to be without {', '.join(missing)}"
        return DoctorFinding("sandbox", "optional", found, remedy)
    return DoctorFinding("sandbox", "ok", found)


def _registry(storage: Path, repair: bool) -> DoctorFinding:
    from agent_forge.store.sessions import SessionStore, repair_registry

    try:
        if repair:
            report = repair_registry(storage)
            return DoctorFinding(
                "registry", "problem" if "not readable" in report else "ok", report
            )
        if not has_registry(storage):
            return DoctorFinding("registry", "ok", f"nothing is stored in {storage} yet")
        store = SessionStore(storage)
        registry = store.registry
        registry.integrity_check()
        registry.search_models()
        listed = {row["session_id"] for row in registry.get_all_sessions()}
        unlisted = [p.name for p in store.run_directories() if p.name not in listed]
    except (ForgeError, OSError) as error:
        return DoctorFinding("registry", "problem", str(error), getattr(error, "hint", ""))
    if unlisted:
        found = f"not listed: {', '.join(unlisted[:5])}"
        return DoctorFinding("registry", "problem", found, "forge doctor --repair")
    return DoctorFinding("registry", "ok", str(storage / "registry"))
