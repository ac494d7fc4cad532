"""Nested state as tensors plus JSON, and back, exactly: no pickle.

`pack` walks dicts, lists, tuples and plain values and replaces each tensor by a reference; what
JSON has no form for (int keys, tuples, bytes, non-finite floats) is tagged. `unpack(*pack(value))`
equals the value, types and order included, and tensors that shared memory share it again.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from agent_forge.store.tensors import memory_key

TAG = "$"


def pack(value: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a nested value into its tensors and a JSON skeleton."""
    packer = _Packer()
    return packer.tensors, packer.pack(value, "")


def unpack(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Put a packed value together again."""
    if isinstance(skeleton, list):
        return [unpack(tensors, item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if TAG not in skeleton:
        return {key: unpack(tensors, item) for key, item in skeleton.items()}
    kind, content = skeleton[TAG], skeleton["value"]
    readers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda key: tensors[key],
        "array": lambda key: tensors[key].numpy(),
        "float": float,
        "bytes": bytes.fromhex,
        "tuple": lambda items: tuple(unpack(tensors, items)),
        "dict": lambda pairs: {unpack(tensors, k): unpack(tensors, v) for k, v in pairs},
    }
    if kind not in readers:
        raise ValueError(f"unknown tag {kind!r} in packed state")
    return readers[kind](content)


def same(one: Any, other: Any) -> bool:
    """True if two nested values are equal to the bit, types included."""
    tensors, skeleton = pack(one)
    others, other_skeleton = pack(other)
    if skeleton != other_skeleton or tensors.keys() != others.keys():
        return False
    pairs = [(tensor, others[key].to(tensor.device)) for key, tensor in tensors.items()]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class _Packer:
    """Walks over a value; `path` is where in it, for names and messages."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._kept: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "value": self._keep(value, path)}
        if isinstance(value, np.ndarray):
            return {TAG: "array", "value": self._keep(torch.from_numpy(value.copy()), path)}
        if isinstance(value, float) and not math.isfinite(value):
            return {TAG: "float", "value": repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, bytes):
            return {TAG: "bytes", "value": value.hex()}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {TAG: "tuple", "value": items}
        if isinstance(value, dict):
            return self._pack_dict(value, path)
        raise TypeError(f"state at {path or '/'} is a {type(value).__name__}, which cannot be kept")

    def _pack_dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise TypeError(f"state at {path or '/'} has a tensor as a key")
            pairs.append([self.pack(key, path), self.pack(item, f"{path}/{key!r}")])
        return {TAG: "dict", "value": pairs}

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        """Keep a tensor once, however many names it has. The number makes its key unique."""
        place = memory_key(tensor)
        key = self._kept.get(place) if tensor.numel() else None
        if key is None:
            key = f"{len(self.tensors)}{path}"
            self.tensors[key] = tensor
            self._kept[place] = key
        return key
