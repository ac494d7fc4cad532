"""Settings of a run: begun with a preset, edited, checked, started as a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from agent_forge.config.load import MAX_FILE_BYTES, preset_names, to_yaml
from agent_forge.errors import ConfigError, ForgeError
from agent_forge.pipeline import jobs
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.store import files
from agent_forge.track.progress import size
from agent_forge.ui.dashboard import state
from agent_forge.ui.dashboard.comparison import differing, flat

FILE = "config.yaml"
PATIENCE_S = 120  # for an estimate
FIRST = "smoke"


def render() -> None:
    """The page."""
    names = preset_names()
    left, right = st.columns(2)
    preset = left.selectbox("Preset", names, index=names.index(FIRST), key="preset")
    session = right.text_input("Name of the run", key="session-name", placeholder="a time stamp")
    begin = to_yaml(begun_with(preset))
    text = st.text_area("Settings (YAML)", begin, height=420, key=f"settings-{preset}")
    columns = st.columns([1, 1, 1, 5])
    check = columns[0].button("Validate", key="validate")
    estimate = columns[1].button("Estimate", key="estimate", help="what it would take")
    start = columns[2].button("Start", key="start", type="primary")
    if check:
        with state.problems("These settings cannot be used"):
            _tell(validated(text), preset)
    if estimate:
        with state.problems("It cannot be estimated"), st.spinner("Estimating ..."):
            _tell_estimate(estimated(text))
    if start:
        with state.problems("It was not started"):
            with st.spinner("Starting ..."):
                begun = started(text, session.strip() or None)
            state.go_to(begun)


def begun_with(preset: str) -> PipelineConfig:
    """The settings of a preset, below this storage root."""
    return load_config(preset=preset, sets=(f"storage.root={json.dumps(str(state.root()))}",))


@contextlib.contextmanager
def _file(text: str) -> Iterator[Path]:
    """The settings as a file while somebody reads it; errors have its name without the folder."""
    if len(text.encode(errors="replace")) > MAX_FILE_BYTES:
        raise ConfigError(f"settings have at most {MAX_FILE_BYTES:,} bytes")
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        path = Path(folder) / FILE
        files.write_bytes(path, text.encode(errors="replace"))
        try:
            yield path
        except ForgeError as error:
            error.args = (str(error).replace(str(path), FILE),)
            raise


def validated(text: str) -> PipelineConfig:
    """The settings as they would be used; a ConfigError says all that is wrong with them."""
    with _file(text) as path:
        return load_config(path=path)


def _tell(config: PipelineConfig, preset: str) -> None:
    st.success("These settings can be used.", icon=":material/check:")
    digest, weights = config.canonical_hash()[:12], config.model.parameters()
    st.text(f"hash {digest}, {weights:,} weights a model")
    both = (begun_with(preset), config)
    changed = differing([dict(flat(one.model_dump(mode="json"))) for one in both])
    if changed:
        state.table([("setting", f"preset {preset}", "here"), *changed], key="changed")
    else:
        st.caption("as the preset has them")


def estimated(text: str) -> dict[str, Any]:
    """What `forge run --dry-run` says of these settings."""
    validated(text)
    with _file(text) as path:
        command = [*jobs.FORGE, "run", "--dry-run", "--json"]
        command += [f"--config={path}", f"--storage={state.root()}"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"no estimate came within {PATIENCE_S} s") from None
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip().removeprefix("error: ")
            raise ConfigError(text or f"it ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _tell_estimate(found: Mapping[str, Any]) -> None:
    head = ("phase", "steps", "weights", "disk", "memory")
    rows = [
        (
            row["phase"],
            row["steps"],
            row["parameters"],
            size(row["disk_bytes"]),
            size(row["memory_bytes"]),
        )
        for row in found["phases"]
    ]
    state.table([head, *rows], key="estimated")
    st.text(f"config {found['config_hash'][:12]}, {size(found['free_bytes'])} free")


def started(text: str, session: str | None) -> str:
    """Start a run with these settings; its session, once it is at work."""
    validated(text)
    with _file(text) as path:
        return jobs.start_run(state.store(), config=path, session=session)
