"""A run of W&B, read back from its offline file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: blocks of parts, each with its length and kind."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + HEADER])
        whole = (
            content[at + HEADER : at + HEADER + length]
            if kind in (1, 2)
            else (whole + content[at + HEADER : at + HEADER + length])
        )
        at += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record


class Written:
    """What W&B would upload."""

    def __init__(self, path: Path) -> None:
        self.files = path.parent / "files"
        self.logged: dict[str, list[Any]] = {}
        self.artifacts: dict[str, str] = {}
        self.settings: set[str] = set()
        self.name = self.group = self.project = ""
        self.is_finished = False
        for record in records(path):
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                self.logged.setdefault(name, []).append(json.loads(item.value_json))
            if record.HasField("artifact") and record.artifact.type != "run_table":
                self.artifacts[record.artifact.name] = record.artifact.type
            if record.HasField("run"):
                run = record.run
                self.name, self.group, self.project = run.display_name, run.run_group, run.project
            for item in (*record.run.config.update, *record.config.update):
                self.settings.add(item.key or item.nested_key[0])
            self.is_finished |= record.HasField("exit")

    def table(self, name: str) -> dict[str, Any]:
        """The content of a table that was logged."""
        (place,) = self.logged[f"{name}/path"]
        return dict(json.loads((self.files / place).read_text()))
