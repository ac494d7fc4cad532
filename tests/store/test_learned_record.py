"""What a model's record says that it has learned, whichever command wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_forge.errors import DamagedFile
from agent_forge.store.records import BAKING, learned_record


def test_records_of_forge_bake_are_read_and_nothing_is_made_up(tmp_path: Path) -> None:
    assert learned_record(tmp_path) == {}
    for content, learned in ({"learned": {"tools": ["calc"]}}, {"tools": ["calc"]}), ([1], {}):
        (tmp_path / BAKING).write_text(json.dumps(content))
        assert learned_record(tmp_path) == learned
    (tmp_path / BAKING).write_text('{"learned": 5}')
    assert learned_record(tmp_path) == {}


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(DamagedFile, match=r"not the metadata of a model \(model_id: .*\)$") as told:
        learned_record(tmp_path)
    assert "\n" not in str(told.value)


def test_a_file_of_that_name_of_another_maker_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"license": "mit", "tags": ["chat"]}')
    (tmp_path / BAKING).write_text('{"learned": {"tools": ["calc"]}}')
    assert learned_record(tmp_path) == {"tools": ["calc"]}
    (tmp_path / "metadata.json").write_text('{"phase_name": "baking"}')
    with pytest.raises(DamagedFile, match="not the metadata"):
        learned_record(tmp_path)
