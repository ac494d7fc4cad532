"""Verifiers: each returns True if a model's text is a right answer, and says what it forgives.

Only the first line that is not empty counts, unless said otherwise: models go on talking.
"""

import csv
import io
import json
import re
from pprint import saferepr
from typing import Any

import yaml

from agent_forge.data.tasks.base import Task

NUMBER = re.compile(r"(?<![\w.,-])-?\d+(?!\w|[.,]\d)")
CHOICE = re.compile(r"\(?([A-Za-z])(?:[).:]|$)")
ARTICLES = ("a ", "an ", "the ", "to ")
MAX_TEXT = 20_000  # longer answers are not parsed


def symbols(task: Task, text: str) -> bool:
    """The same symbols in the same order; blanks between them do not count."""
    return "".join(first_line(text).split()) == "".join(task.answer.split())


def number(task: Task, text: str) -> bool:
    """The first whole number in the first line is the answer; words around it do not count."""
    found = NUMBER.search(first_line(text))
    return found is not None and found.group() == task.answer


def words(task: Task, text: str) -> bool:
    """The same words; case, a leading article and a final full stop do not count."""
    return plain(first_line(text)) == plain(task.answer)


def letter(task: Task, text: str) -> bool:
    """The letter of the choice, alone or marked as one: `B`, `b.`, `(B)`, `B) the text`."""
    found = CHOICE.match(first_line(text))
    return found is not None and found.group(1).upper() == task.answer


def whole_text(task: Task, text: str) -> bool:
    """All of the text is the answer; only blanks and line ends may differ."""
    return text.split() == task.answer.split()


def value(task: Task, text: str) -> bool:
    """One value, bare or in quotes; numbers as numbers; a final dot does not count."""
    return _scalar(first_line(text)) == _scalar(task.answer)


def json_document(task: Task, text: str) -> bool:
    """All of the text is JSON with the same content; layout and order of keys do not count."""
    return _same_document(task.answer, text, json.loads)


def yaml_document(task: Task, text: str) -> bool:
    """All of the text is YAML with the same content; anchors and aliases are refused."""
    return not set(text) & set("&*") and _same_document(task.answer, text, yaml.safe_load)


def csv_document(task: Task, text: str) -> bool:
    """All of the text is CSV with the same header and rows; quotes and line ends do not count."""
    return _same_document(task.answer, text, _csv_rows)


def document_share(accept: Any, answer: str, text: str) -> float | None:
    """The share of a document's values that a text has in their places; None if the text is no
    document of that kind."""
    if (accept is yaml_document and set(text) & set("&*")) or len(text) > MAX_TEXT:
        return None
    try:
        parse: Any = PARSERS[accept]
        wanted, found = _values(parse(answer)), _values(parse(text))
    except Exception:  # noqa: BLE001 - what a model wrote may break a parser in any way
        return None
    return sum(found.get(place) == value for place, value in wanted.items()) / len(wanted)


def _values(document: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], str]:
    """All plain values of a document, by where they stand."""
    pairs: Any = document.items() if isinstance(document, dict) else None
    pairs = enumerate(document) if isinstance(document, list) else pairs
    if pairs is None:
        return {place: saferepr(document)}
    return {k: v for key, part in pairs for k, v in _values(part, (*place, key)).items()}


def first_line(text: str) -> str:
    """The first line that is not empty, without blanks around it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def plain(text: str) -> str:
    """Lower case, single blanks, no leading article, no final full stop."""
    text = " ".join(text.lower().split()).rstrip(".!").rstrip()
    for article in ARTICLES:
        text = text.removeprefix(article)
    return text


def _scalar(text: str) -> str:
    text = text.strip().rstrip(".,").strip("\"'").strip()
    return str(int(text)) if re.fullmatch(r"-?\d{1,18}", text) else text


def _csv_rows(text: str) -> list[list[str]]:
    rows = csv.reader(io.StringIO(text.strip()), skipinitialspace=True, strict=True)
    return [[cell.strip() for cell in row] for row in rows]


PARSERS = {json_document: json.loads, yaml_document: yaml.safe_load, csv_document: _csv_rows}


def _same_document(answer: str, text: str, parse: Any) -> bool:
    try:
        # Types count, the order of keys does not.
        return len(text) <= MAX_TEXT and saferepr(parse(answer)) == saferepr(parse(text))
    except Exception:  # noqa: BLE001 - what a model wrote may break a parser in any way
        return False
