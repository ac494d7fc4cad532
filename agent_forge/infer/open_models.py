"""The models that are open."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from agent_forge.infer.chat import toolbox_of
from agent_forge.infer.generate import rows_can_be_chosen
from agent_forge.infer.scheduler import QueueFull
from agent_forge.infer.tools import Toolbox
from agent_forge.model.catalog import CONFIG
from agent_forge.model.opened import OpenedModel, open_model

WEIGHTS = "*.safetensors"


class Open:
    """An open model, and the tools that it was taught."""

    def __init__(self, folder: Path) -> None:
        self.model: OpenedModel = open_model(folder)
        self.tools: Toolbox | None = toolbox_of(folder, None, None)
        self.lock = threading.Lock()  # of its tokenizer
        weights = [*self.model.network.parameters(), *self.model.network.buffers()]
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        self.together = _together(self.model.network)


def _together(network: nn.Module) -> bool:
    """True if rows of a batch can be read together."""
    try:
        with torch.no_grad():
            return rows_can_be_chosen(network)
    except Exception:  # noqa: BLE001 - it fails where it is asked
        return False


class OpenModels:
    """Models that are opened once; the longest unused are let go when they hold too many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._open: dict[tuple[Any, ...], Open] = {}  # the longest unused first
        self._let_go: WeakKeyDictionary[OpenedModel, int] = WeakKeyDictionary()  # but maybe in use
        self._lock = threading.Lock()

    def open(self, folder: Path) -> Open:
        """The model in a folder; it is opened again if its files were changed."""
        found = [path.stat() for path in (folder / CONFIG, *sorted(folder.glob(WEIGHTS)))]
        key = (folder, *((s.st_ino, s.st_size, s.st_mtime_ns) for s in found))
        with self._lock:
            self._open[key] = model = self._open.pop(key, None) or self._new(folder)
            while len(self._open) > 1 and self.bytes > self.most_bytes:
                gone = self._open.pop(next(iter(self._open)))
                self._let_go[gone.model] = gone.bytes
        return model

    def _new(self, folder: Path) -> Open:
        """One more; refused while replies are being written by too many that were let go."""
        gc.collect()  # a reply is a cycle
        if sum(self._let_go.values()) > self.most_bytes:
            raise QueueFull("models that are in use fill the memory", hint="try again later")
        return Open(folder)

    @property
    def bytes(self) -> int:
        """What the open models hold."""
        return sum(model.bytes for model in self._open.values())
