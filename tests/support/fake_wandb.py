"""A stand-in for the module wandb."""

from __future__ import annotations

import threading
import types
from typing import Any


class FakeWandb(types.ModuleType):
    """Records calls; can raise or hang in any of them."""

    def __init__(self, trouble: str = "", how: str = "", hangs_s: float = 30) -> None:
        super().__init__("wandb")
        self.trouble, self.how, self.hangs_s = trouble, how, hangs_s
        self.calls: list[tuple[Any, ...]] = []
        self.released = threading.Event()
        self.Settings = dict
        self.Artifact = lambda name, type: types.SimpleNamespace(
            add_reference=lambda uri: self._call("reference", name, uri),
            add_file=lambda path: self._call("file", name, type, path),
        )
        self.Table = lambda columns, data: ("table", columns, data)

    def _call(self, name: str, *details: Any) -> None:
        if name == self.trouble and self.how == "raise":
            raise RuntimeError("no answer from the server")
        if name == self.trouble and self.how == "hang":
            self.released.wait(self.hangs_s)
        self.calls.append((name, *details))

    def init(self, **settings: Any) -> Any:
        self._call("init", settings)
        return types.SimpleNamespace(
            log=lambda values: self._call("log", values),
            define_metric=lambda name, step_metric: None,
            log_artifact=lambda artifact: self._call("artifact"),
            finish=lambda: self._call("finish"),
        )
