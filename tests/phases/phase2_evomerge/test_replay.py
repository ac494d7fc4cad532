"""What a resumed phase replays: measurements by key, and models that are handed over by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.phase import NAMED_MODELS, ModelRef
from agent_forge.contract.replay import MEASUREMENTS, MeasurementLog
from agent_forge.errors import NameRefused
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import STATE_FILE


@dataclass
class Found:
    values: tuple[float, ...]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def compute() -> Found:
        calls.append("")
        return Found((0.1 + 0.2, 1e-300))

    first = MeasurementLog(tmp_path, "print").once("scores", "a", compute)
    again = MeasurementLog(tmp_path, "print")
    assert first == again.once("scores", "a", compute) == {"values": [0.1 + 0.2, 1e-300]}
    assert len(calls) == 1 and again.once("scores", "b", lambda: None) is None
    assert again.once("other", "a", lambda: 7) == 7 == again.once("other", "a", compute)
    assert MeasurementLog(tmp_path, "print").once("scores", "b", compute) is None  # None is a value


def test_a_line_that_was_torn_never_happened_and_the_next_is_whole(tmp_path: Path) -> None:
    MeasurementLog(tmp_path, "print").once("r", "1", lambda: 1)
    with (tmp_path / MEASUREMENTS).open("ab") as file:
        file.write(b'{"record":"r","key":"2","val')
    again = MeasurementLog(tmp_path, "print")
    assert (again.once("r", "1", lambda: 9), again.once("r", "2", lambda: 2)) == (1, 2)
    assert MeasurementLog(tmp_path, "print").once("r", "2", lambda: 9) == 2


def test_measurements_belong_to_settings_and_inputs(tmp_path: Path) -> None:
    MeasurementLog(tmp_path, "print").once("r", "1", lambda: 1)
    assert MeasurementLog(tmp_path, "another").once("r", "1", lambda: 2) == 2


def test_what_json_cannot_hold_is_not_recorded(tmp_path: Path) -> None:
    for value in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            MeasurementLog(tmp_path, "print").once("r", "1", lambda value=value: value)
    assert MeasurementLog(tmp_path, "print").once("r", "1", lambda: 1) == 1


def models(storage: ModelStorage, *names: str) -> ModelRef:
    """Models of one phase; returns the first."""
    for name in names:
        config = {"model_type": "x"}
        storage.save_model({"w": torch.ones(2)}, "s1", "cognate", name, {}, config=config)
    path = storage.find(f"cognate.{names[0]}.s1")
    return ModelRef(names[0], path, {})


def record(folder: Path, **artifacts: Any) -> None:
    files.write_bytes(folder / STATE_FILE, files.with_checksum({"artifacts": artifacts}))


def test_a_model_is_handed_over_by_the_name_that_was_recorded(storage: ModelStorage) -> None:
    handed = models(storage, "one", "root", "control")
    record(handed.path.parent, **{NAMED_MODELS: {"trunk": "root", "lost": "gone"}})
    trunk = handed.artifact("trunk")
    assert trunk is not None and trunk.path.name == "root" and trunk.metadata["sha256"]
    assert handed.artifact("control") is None is handed.artifact("lost")
    record(handed.path.parent, **{NAMED_MODELS: {"trunk": "../../elsewhere"}})
    with pytest.raises(NameRefused):
        handed.artifact("trunk")


def test_a_run_without_that_record_has_it_beside_the_model(storage: ModelStorage) -> None:
    handed = models(storage, "one", "trunk")
    for write in (lambda: None, lambda: record(handed.path.parent)):
        write()
        trunk = handed.artifact("trunk")
        assert trunk is not None and trunk.path.name == "trunk"
        assert handed.artifact("control") is None
