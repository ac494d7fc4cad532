"""P5, P6: loading never runs code, and no name leaves the storage root."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_forge.errors import DamagedFile, ForgeError, HostileInput, NameRefused
from agent_forge.model.hf import build_network, config_dict
from agent_forge.store import files, paths
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.models import ModelStorage, load_directory
from agent_forge.store.paths import model_directory
from agent_forge.store.sessions import SessionStore
from agent_forge.store.tensors import read_weights
from tests.support.faults import Canary
from tests.support.networks import network
from tests.support.pico import Pico


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_the_canary_sings_when_it_is_unpickled(canary: Path) -> None:
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()


@pytest.mark.parametrize("form", ["zip", "legacy", "raw"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ""])
def test_a_hostile_pickle_is_refused(tmp_path: Path, canary: Path, form: str, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    if form == "raw":
        path.write_bytes(pickle.dumps(Canary(canary)))
    else:
        content = {"w": torch.ones(2), "x": Canary(canary)}
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises((HostileInput, DamagedFile)) as caught:
        read_weights(path)
    assert caught.value.exit_code == 4 and not canary.exists()


def test_a_pickle_in_place_of_any_file_of_a_model_is_not_run(
    storage: ModelStorage, pico: Pico, canary: Path
) -> None:
    storage.save_model(pico, "s1", "cognate", "m1", {})
    path = storage.find("cognate.m1.s1")
    good = {p.name: p.read_bytes() for p in path.iterdir() if p.name != files.MANIFEST}
    for victim in ("model.safetensors", "config.json", "metadata.json"):
        with files.staging(path) as stage:  # with a manifest that fits: only the content is wrong
            for name, content in good.items():
                stage.write_bytes(name, pickle.dumps(Canary(canary)) if name == victim else content)
        with pytest.raises(DamagedFile, match=victim):
            load_directory(path)
    assert not canary.exists()


def test_code_named_in_a_config_is_not_run(storage: ModelStorage, canary: Path) -> None:
    """auto_map asks transformers to import the file beside the weights; ours is opened without."""
    from transformers import AutoModelForCausalLM

    model = network()
    config = {
        **config_dict(model.settings),
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    }
    storage.save_model(model, "s1", "cognate", "m1", {}, config=config)
    path = storage.find("cognate.m1.s1")
    (path / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: pass\n")
    ModelStorage(storage.base_path, storage.registry, build_network).load_model("cognate.m1.s1")
    with pytest.raises(HostileInput, match="none is ever run"):  # whoever asks for it
        AutoModelForCausalLM.from_pretrained(path)
    unknown = files.to_json({**config, "model_type": "evil"})
    (path / "config.json").write_bytes(unknown)  # a type that only that file could explain
    with pytest.raises(HostileInput, match="none is ever run"):
        AutoModelForCausalLM.from_pretrained(path)
    assert not canary.exists()


def test_a_pickle_in_place_of_a_checkpoint_is_not_run(tmp_path: Path, canary: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint({"w": torch.ones(2)}, step=1)
    record = (tmp_path / "step_00000001" / "state.json").read_bytes()
    with files.staging(tmp_path / "step_00000002") as stage:
        stage.write_bytes("tensors.safetensors", pickle.dumps(Canary(canary)))
        stage.write_bytes("state.json", record)
    assert manager.load_checkpoint().step == 1 and not canary.exists()


hostile_names = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        [
            *("", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", "~", "con", "nul", "com1"),
            *("\u2024\u2024", "\uff0e\uff0e", "a" * 65, "A", "-x", "_x", ".hidden", "a b", "a\n"),
            *("\u0131d", "1\u0301", "a:b", "a*"),
        ]
    ),
    st.from_regex(re.compile(r"[./\\~]{1,4}[a-z]{0,3}"), fullmatch=True),
)


@settings(max_examples=300, deadline=None)
@given(hostile_names)
def test_a_name_is_one_plain_segment_or_refused(name: str) -> None:
    root = Path("/srv/storage")
    try:
        path = paths.child(root, name)
    except NameRefused:
        return
    assert path.parent == root and re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name)


@settings(max_examples=100, deadline=None)
@given(*[st.just("ok") | st.just("checkpoints") | hostile_names] * 3)
def test_no_model_directory_leaves_the_root(session: str, phase: str, model: str) -> None:
    root = Path("/srv/storage")
    try:
        path = model_directory(root, session, phase, model)
    except NameRefused:
        return
    assert path.is_relative_to(root / "sessions") and ".." not in path.parts


@settings(max_examples=60, deadline=None)
@given(name=hostile_names)
def test_a_session_store_takes_no_hostile_id(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    base = tmp_path_factory.mktemp("names")
    store = SessionStore(base / "storage")
    try:
        store.create({}, "", session_id=name or "..")
    except ForgeError:
        assert list((base / "storage").glob("sessions/*")) in (
            [],
            [base / "storage/sessions/run.lock"],
        )
    assert {p.name for p in base.iterdir()} == {"storage"}


def test_a_planted_link_is_not_followed(storage: ModelStorage, pico: Pico, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (storage.base_path / "sessions" / "s1" / "phase1_cognate").symlink_to(outside)
    with pytest.raises(HostileInput):
        storage.save_model(pico, "s1", "cognate", "m1", {})
    assert list(outside.iterdir()) == []
