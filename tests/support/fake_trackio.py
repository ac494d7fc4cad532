"""A stand-in for the module trackio, which is not installed here: what its documentation says of
0.30 that we use. It has no modes, references, ids or own steps, and refuses what it does not know.
"""

from __future__ import annotations

import types
from typing import Any


class FakeTrackio(types.ModuleType):
    """Records what each of its runs was given."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: list[Run] = []

    def init(
        self,
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        settings: Any = None,
    ) -> Run:
        self.runs.append(Run({"project": project, "name": name, "group": group, "config": config}))
        return self.runs[-1]

    class Table:
        """Of rows as dictionaries; columns are accepted there and have no effect."""

        def __init__(self, columns: Any = None, data: Any = None, rows: Any = None) -> None:
            assert isinstance(data, list) and all(isinstance(row, dict) for row in data)
            self.data = data

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            self.name, self.type, self.files = name, type, list[str]()

        def add_file(self, local_path: str, name: str | None = None) -> None:
            self.files.append(local_path)


class Run:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.logged, self.artifacts = settings, list[dict[str, Any]](), list[Any]()
        self.finished = False

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(metrics)

    def log_artifact(self, artifact: Any) -> None:
        assert artifact.files  # an empty one is refused
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.finished = True
