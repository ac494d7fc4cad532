"""Parsing JSON of other people: all numbers are finite, nesting has an end, keys are unique.

Python reads NaN and Infinity, which are no JSON, 1e999 as infinity, and of a repeated key the last
value; each of them would later become a wrong number instead of an error.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # of lists and objects within each other
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def parse(text: str, number: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text or raise a ValueError. `number` reads what has a fraction or
    an exponent instead of a float."""
    hooks: dict[str, Any] = {"parse_constant": _refuse, "parse_float": number or _finite}
    try:
        value = json.loads(text, object_pairs_hook=_unique, **hooks)
    except ArithmeticError as error:  # of _refuse
        where = _line(text, str(error)) if "\n" in text.strip() else ""
        raise ValueError(f"{where}{error} is not a finite number") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        holders = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for holder in holders for v in holder if isinstance(v, dict | list)]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key appears twice: {max(keys, key=keys.count)[:40]!r}")
    return data


def _refuse(word: str) -> float:
    raise ArithmeticError(word)


def _finite(word: str) -> float:
    value = float(word)
    return value if math.isfinite(value) else _refuse(word)


def _line(text: str, word: str) -> str:
    """Return the line of a word that is no part of a string."""
    matches = re.finditer(rf'"(?:[^"\\]|\\.)*"|{re.escape(word)}', text)
    start = next(match.start() for match in matches if match.group() == word)
    return f"line {text.count(chr(10), 0, start) + 1}: "
