"""Structured data: read a field of JSON, YAML or CSV, and write one form as another.

Answers are parsed and compared, so layout, quotes and the order of keys do not matter.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, family, load, scaled, wording
from agent_forge.data.tasks.memory import PEOPLE

Record = dict[str, Any]

_data = load("structured")
CONVERSIONS = _data["wordings"]
VALUES: dict[str, Sequence[str | int]] = _data["words"]
VALUES |= {name: range(*bounds) for name, bounds in _data["ranges"].items()}


def to_yaml(records: list[Record]) -> str:
    """A list of mappings, one key a line; the values need no quotes."""
    entries = ("\n  ".join(f"{key}: {value}" for key, value in r.items()) for r in records)
    return "\n".join(f"- {entry}" for entry in entries)


def to_csv(records: list[Record]) -> str:
    """A header and one line a record; the values hold no commas."""
    rows = [list(records[0]), *(record.values() for record in records)]
    return "\n".join(",".join(map(str, row)) for row in rows)


Write = Callable[[list[Record]], str]
FORMS: dict[str, Write] = {"JSON": json.dumps, "YAML": to_yaml, "CSV": to_csv}


def table(level: int, rng: Random, fewest: int = 1) -> Operands:
    """Field names, then rows; every row begins with a name that occurs once."""
    fields = rng.sample(tuple(VALUES), scaled(level, fewest, 7))
    names = rng.sample(PEOPLE, scaled(level, fewest, 12))
    columns = (rng.choices(VALUES[field], k=len(names)) for field in fields)
    return (("name", *fields), *zip(names, *columns, strict=True))


def question(level: int, rng: Random) -> Operands:
    """A person, a field, and the table to look in; at least two rows and two fields."""
    fields, *rows = table(level, rng, fewest=2)
    return rng.choice(rows)[0], rng.choice(fields[1:]), fields, *rows


def extract(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    name, field, fields, *rows = operands
    form = rng.choice(list(FORMS))
    records = _records(fields, rows)
    gaps = {"document": FORMS[form](records), "form": form, "field": field, "name": name}
    text = wording("extract_field", split, rng, **gaps)
    record = next(record for record in records if record["name"] == name)
    near = [*(r[field] for r in records[:3]), *[*record.values()][:2], rng.choice(VALUES[field])]
    return TaskContent(text, str(record[field]), tuple(map(str, near)))


def convert(target: str, operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    fields, *rows = operands
    form = rng.choice([name for name in FORMS if name != target])
    records = _records(fields, rows)
    template, write = rng.choice(CONVERSIONS[split]), FORMS[target]
    text = template.format(document=FORMS[form](records), form=form, target=target)
    field, place = rng.choice(fields[1:]), int(rng.random() * len(records))
    changed = [dict(record) for record in records]
    while changed[place][field] == records[place][field]:
        changed[place][field] = rng.choice(VALUES[field])
    shorter = [{k: v for k, v in record.items() if k != field} for record in records]
    longer = [*records, changed[place]]
    return TaskContent(text, write(records), tuple(map(write, (changed, shorter, longer))))


def _records(fields: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[Record]:
    return [dict(zip(fields, row, strict=True)) for row in rows]


FAMILIES = [family("extract_field", question, extract, verifiers.value)]
_accept = (verifiers.json_document, verifiers.yaml_document, verifiers.csv_document)
for _form, _is_right in zip(FORMS, _accept, strict=True):
    _own = {s: [t.replace("{target}", _form) for t in texts] for s, texts in CONVERSIONS.items()}
    FAMILIES.append(family(f"to_{_form.lower()}", table, partial(convert, _form), _is_right, _own))
