"""notebooks/tour.ipynb runs from its first cell to its last, and is committed without outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parent.parent.parent
TOUR = REPOSITORY / "notebooks" / "tour.ipynb"
OLD = REPOSITORY / "tests" / "compat" / "run"  # three trained specialists, a second to open


def test_it_is_committed_without_outputs_and_paths() -> None:
    text = TOUR.read_text(encoding="utf-8")
    book = json.loads(text)
    nbformat.validate(nbformat.from_dict(book))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 5 and text.isascii() and len(text) < 20_000
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert not any(place in text for place in ("/tmp", "/home", "/root", "/Users", "C:\\"))


def told(book: Any) -> str:
    """What its cells printed."""
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]
    return "".join(out.get("text", "") for out in outputs)


def figures(book: Any) -> list[dict[str, Any]]:
    """The figures that it showed."""
    kind = "application/vnd.plotly.v1+json"
    data = [out.get("data", {}) for cell in book.cells for out in cell.get("outputs", [])]
    return [one[kind] for one in data if kind in one]


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False], ids=["a run is there", "none is"])
def test_it_runs(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = tmp_path / "storage"
    if given:
        shutil.copytree(OLD, storage)
        monkeypatch.setenv("FORGE_SESSION", "old")
    else:
        monkeypatch.delenv("FORGE_SESSION", raising=False)
    monkeypatch.setenv("FORGE_STORAGE", str(storage))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(TOUR, as_version=4)
    NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    said = told(book)
    assert ("old" in said.split()[0]) == given and "cognate" in said
    assert "merged: " in said and "95 % interval" in said and "sort 52814 ->" in said
    shown = figures(book)
    assert len(shown) >= 2 and all(figure["data"] for figure in shown)
    assert "model.safetensors" in str(book.cells)
    names = sorted(path.name for path in (storage / "sessions").iterdir() if path.is_dir())
    assert len(names) == 1  # a run was made only if there was none
