"""`forge doctor`: what this machine has, what is missing and how to get it."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import typer

from agent_forge.cli.output import emit, size
from agent_forge.cli.runs import has_registry
from agent_forge.errors import ForgeError
from agent_forge.store import files

EXTRAS = {
    "wandb": ("wandb", "Weights & Biases as a mirror of the metrics"),
    "cluster": ("ray", "workers on a Ray cluster"),
    "multi": ("pymoo", "multi-objective search"),
    "data": ("datasets", "datasets from the Hugging Face hub"),
    "eval": ("lm-eval", "tasks of lm-evaluation-harness"),
    "dashboard": ("streamlit", "runs and models in a browser"),
    "api": ("fastapi", "runs and models for other programs"),
    "mcp": ("mcp", "results for assistants"),
    "gguf": ("gguf", "models for llama.cpp and Ollama"),
    "llama": ("llama-cpp-python", "tests that run such models"),
}
LOW_DISK_BYTES = 5 * 10**9
LOW_MEMORY_BYTES = 2 * 10**9


class DoctorFinding(NamedTuple):
    name: str
    status: str  # ok, optional (not there, not needed), problem
    details: str
    remedy: str = ""


def doctor(storage: Path, repair: bool, as_json: bool) -> None:
    """Check this machine, the optional parts and the registry."""
    findings = list(_findings(storage, repair))
    healthy = all(finding.status != "problem" for finding in findings)
    content = [finding._asdict() for finding in findings]
    columns = ("what", "status", "found", "to get it")
    emit(as_json, columns, findings, healthy=healthy, findings=content)
    if not healthy:
        raise typer.Exit(1)


def _findings(storage: Path, repair: bool) -> Iterator[DoctorFinding]:
    from importlib import metadata  # slow to load

    yield DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.system()}")
    yield DoctorFinding("cpu", "ok", f"{os.cpu_count()} cores, {platform.machine()}")
    memory, free = psutil.virtual_memory(), files.free_bytes(storage.resolve())
    available = f"{size(memory.available)} free of {size(memory.total)}"
    clean = "forge clean --dry-run shows what could go"
    for name, details, low, remedy in (
        ("memory", available, memory.available < LOW_MEMORY_BYTES, "close programs"),
        ("disk", f"{size(free)} free", free < LOW_DISK_BYTES, clean),
    ):
        yield DoctorFinding(name, "problem" if low else "ok", details, remedy if low else "")
    yield _torch()
    for extra, (package, purpose) in EXTRAS.items():
        try:
            yield DoctorFinding(extra, "ok", f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            remedy = f"pip install -c constraints.txt -e '.[{extra}]'"
            yield DoctorFinding(extra, "optional", f"not installed: {purpose}", remedy)
    yield _sandbox()
    yield _registry(storage, repair)


def _torch() -> DoctorFinding:
    try:
        import torch
    except ImportError as error:
        return DoctorFinding("torch", "problem", str(error), "pip install torch")
    device = f"CPU with {torch.get_num_threads()} threads (no GPU; none is needed)"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif torch.backends.mps.is_available():
        device = "Apple GPU (mps)"
    return DoctorFinding("torch", "ok", f"{torch.__version__}, {device}")


def _sandbox() -> DoctorFinding:
    from agent_forge import sandbox

    try:
        layers = sandbox.layers()
    except (ForgeError, OSError) as error:
        return DoctorFinding("sandbox", "optional", str(error), getattr(error, "hint", ""))
    held = ", ".join(name for name in layers if layers[name])
    if missing := ", ".join(name for name in layers if not layers[name]):
        remedy = f"docs/sandbox.md tells what it means to be without {missing}"
        return DoctorFinding("sandbox", "optional", held, remedy)
    return DoctorFinding("sandbox", "ok", held)


def _registry(storage: Path, repair: bool) -> DoctorFinding:
    from agent_forge.store.sessions import SessionStore, repair_registry

    try:
        if repair:
            report = repair_registry(storage)
            status = "problem" if "not readable" in report else "ok"
            return DoctorFinding("registry", status, report)
        if not has_registry(storage):
            return DoctorFinding("registry", "ok", f"nothing is stored in {storage} yet")
        store = SessionStore(storage)
        store.registry.integrity_check()
        store.registry.search_models()
        listed = {row["session_id"] for row in store.registry.get_all_sessions()}
        unlisted = [p.name for p in store.run_directories() if p.name not in listed]
    except (ForgeError, OSError) as error:
        return DoctorFinding("registry", "problem", str(error), getattr(error, "hint", ""))
    if unlisted:
        details = f"not listed: {', '.join(unlisted[:5])}"
        return DoctorFinding("registry", "problem", details, "forge doctor --repair")
    return DoctorFinding("registry", "ok", str(storage / "registry"))
