"""Data files for tests, in the format that their name asks for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def put(path: Path, *values: Any) -> Path:
    """Write rows in the format that the name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        lines = [",".join(values[0])] + [",".join(value.values()) for value in values]
        path.write_text("\n".join(lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        text = "".join(json.dumps(value) + "\n" for value in values).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
