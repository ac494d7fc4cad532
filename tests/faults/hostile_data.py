"""Files of data that are broken, hostile, or larger than they look."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.hostile_goods import (
    EITHER,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    Case,
    Change,
    directory,
    fifo,
    linked,
)

ROWS: list[Any] = [{"prompt": f"{n}+{n}=", "completion": f" {n + n}"} for n in range(60)]
FEW = {"evo": EITHER, "evo-dry": EITHER}  # an evolution needs more of it


def lines(*rows: Any) -> bytes:
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows).encode() + b"\n"


def data(
    name: str,
    content: bytes | Callable[[], bytes],
    allowed: frozenset[int] = REFUSED,
    *,
    file: str = "data.jsonl",
    **rest: Any,
) -> Case:
    def make(folder: Path, good: Path) -> str:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content())
        return str(folder / file)

    return Case(f"data: {name}", "data", make, allowed, **rest)


def after(name: str, row: Any, allowed: frozenset[int] = REFUSED, **rest: Any) -> Case:
    """Good rows and then this one."""
    return data(name, lines(*ROWS, row), allowed, **{"where": {"show": EITHER}, **rest})


def bomb(line: bytes, times: int = 3000) -> Callable[[], bytes]:
    """Gigabytes in some megabytes: gzip members may follow one another."""
    return lambda: gzip.compress(line * (10_000_000 // len(line)), 6) * times


def row(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "completion": "b", **values}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


USER = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "b"}
DATA = (
    data("nothing is wrong", lines(*ROWS), RIGHT),
    data(
        "nothing is wrong with gzip", lambda: gzip.compress(lines(*ROWS)), RIGHT, file="d.jsonl.gz"
    ),
    data(
        "a mark and odd line ends",
        b"\xef\xbb\xbf" + lines(*ROWS).replace(b"\n", b"\r\n\r\n"),
        RIGHT,
    ),
    data("empty", b""),
    data("only blanks", b" \n\t\n\n"),
    data("only blanks in a text", b" \n\t\n\n", file="data.txt"),
    data(
        "one word",  # of which the first letter is given
        b"word",
        file="data.txt",
        where=dict.fromkeys(("show", "eval", "compare"), EITHER),
    ),
    data(
        "no UTF-8",
        lines(*ROWS) + b'{"prompt": "\xff", "completion": "b"}\n',
        where={"show": EITHER},
    ),
    data("no UTF-8 at once", b"\xff\xff\xff\n"),
    data("UTF-16", lines(*ROWS).decode().encode("utf-16")),
    data("UTF-16 without a mark", lines(*ROWS).decode().encode("utf-16-le")),
    data("a zero", b'{"prompt": "a\0", "completion": "b"}\n'),
    data("a zero in a text", b"once upon a \0 time", file="data.txt"),
    data("a line of 70 MB", lambda: b'{"prompt": "' + b"a" * (70 << 20) + b'"}\n', TOO_LARGE),
    data("a text of one line of 70 MB", lambda: b"a" * (70 << 20), TOO_LARGE, file="data.txt"),
    data("deep", b"[" * 100_000 + b"\n"),
    data("no JSON", b"not json\n"),
    data("JSON over lines", b'{"prompt": "a",\n"completion": "b"}\n'),
    data("cut in a row", lines(*ROWS)[:-9], where={"show": EITHER}),
    after("many digits", '{"prompt": ' + "9" * 5000 + ', "completion": "b"}'),
    after("NaN", '{"prompt": NaN, "completion": "b"}'),
    after("infinity", '{"prompt": "a", "completion": 1e999}'),
    after("a number", 7),
    after("nothing", None),
    after("a list", ["a", "b"]),
    after("an object of nothing", {}),
    after("a text between rows", "a text"),
    after("other fields", {"input": "a", "output": "b"}),
    after("no completion", {"prompt": "a"}),
    after("an empty completion", row(completion="")),
    after("a completion that is a list", row(completion=["b"])),
    after("a completion that is an object", row(completion={"a": 1})),
    after("a prompt that is nothing", row(prompt=None)),
    after("a prompt that is empty", row(prompt="")),
    after("half a surrogate", '{"prompt": "a\\ud800", "completion": "b"}'),
    after("choices without the completion", row(choices=["x", "y"])),
    after("choices that are text", row(choices="b")),
    after("choices of numbers and nothing", row(choices=["b", None])),
    after("choices that are empty", row(choices=["b", ""])),
    after("choices twice", row(choices=["b", "b", "c"]), EITHER),
    after("one choice", row(choices=["b"]), EITHER),
    after("a repeated field", '{"prompt": "a", "prompt": "c", "completion": "b"}', EITHER),
    after("a million choices", row(choices=["b", *map(str, range(100_000))]), EITHER | TOO_LARGE),
    after("an answer that is only marks", row(completion="\u202e\u200b"), EITHER),
    after("messages that are text", {"messages": "a"}),
    after("messages of nothing", {"messages": []}),
    after("messages of numbers", said(1, 2)),
    after("messages without a role", said({"content": "a"})),
    after("messages of an unknown role", said({"role": "evil", "content": "a"}, REPLY)),
    after("messages without an answer", said(USER)),
    after("messages that begin with an answer", said(REPLY), EITHER),
    after("messages with odd fields", said({**USER, "evil": {"a": [1]}}, REPLY), EITHER),
    after("a message that is nothing", said(USER, {"role": "assistant", "content": None})),
    after("a message that is a list", said(USER, {"role": "assistant", "content": [1]})),
    after("calls that are text", said(USER, {"role": "assistant", "tool_calls": "x"}), EITHER),
    after("a text beside answers", {"text": "once upon a time"}),
    after("a text that is a number", {"text": 5}),
    data(
        "a text of marks", "\u202e\x1b[31m red \x07 \u2028".encode() * 40, EITHER, file="data.txt"
    ),
    data("an unknown kind", lines(*ROWS), file="data.evil"),
    data("no kind", lines(*ROWS), file="data"),
    data("a pickle", b"\x80\x04\x95.", file="data.pkl"),
    data("a table that is none", b'a,b\n"1', file="data.csv"),
    data("a table of other columns", b"a,b\n1,2\n", file="data.csv"),
    data("a table with more cells", b"prompt,completion\n1,2,3\n", EITHER, file="data.csv"),
    data("a list that is an object", b'{"a": {"prompt": 1}}', file="data.json"),
    data("a list that is a number", b"7", file="data.json"),
    data("a list that is deep", b"[" * 100_000, file="data.json"),
    data("parquet that is none", b"PAR1 no PAR1", file="data.parquet"),
    data("gzip that is none", b"not gzip", file="data.jsonl.gz"),
    data(
        "gzip that is cut",
        lambda: gzip.compress(lines(*ROWS))[:-30],
        file="data.jsonl.gz",
        where={"show": EITHER},
    ),
    data("a bomb of zeros", bomb(b"\0"), TOO_LARGE, file="data.jsonl.gz"),
    data("a bomb of spaces", bomb(b" "), TOO_LARGE, file="data.jsonl.gz"),
    data("a bomb of line ends", bomb(b"\n"), TOO_LARGE, file="data.jsonl.gz"),
    data(
        "a bomb of rows",
        bomb(lines(row())),
        TOO_LARGE,
        file="data.jsonl.gz",
        where={"show": EITHER},
    ),
)


def _place(
    name: str, change: Change, file: str = "data.jsonl", allowed: frozenset[int] = REFUSED
) -> Case:
    def make(folder: Path, good: Path) -> str:
        change(folder)
        return str(folder / file)

    return Case(f"data: {name}", "data", make, allowed)


PLACES = (
    _place("not there", lambda folder: None),
    _place("a pipe", fifo("data.jsonl")),
    _place("an empty folder", directory("data.jsonl")),
    _place("a device", linked("data.jsonl", lambda folder: "/dev/zero")),
    _place("a device of chance", linked("data.jsonl", lambda folder: "/dev/urandom")),
    _place(
        "a link to itself", linked("data.jsonl", lambda folder: "data.jsonl"), allowed=TOO_LARGE
    ),
    _place("a folder of pipes", lambda f: (directory("d")(f), fifo("d/data.jsonl")(f)), "d"),
    _place(
        "a folder of itself", lambda f: (directory("d")(f), linked("d/d", lambda x: ".")(f)), "d"
    ),
    _place("a long name", lambda folder: None, "a" * 5000 + ".jsonl", TOO_LARGE),
)

CASES: tuple[Case, ...] = (*DATA, *PLACES)
