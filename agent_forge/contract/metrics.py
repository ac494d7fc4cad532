"""The table of metric names that a run may log; `{}` in a name stands for one segment."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    phase: str
    unit: str
    meaning: str


TABLE = Path(__file__).with_name("metrics.json")
METRICS = tuple(Metric(*row) for row in json.loads(TABLE.read_text(encoding="utf-8")))
PATTERNS = {m: re.compile(re.escape(m.name).replace(r"\{\}", r"[^/]+")) for m in METRICS}


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The entry that a logged name belongs to."""
    return next((metric for metric, pattern in PATTERNS.items() if pattern.fullmatch(name)), None)
