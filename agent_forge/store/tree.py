"""Nested state as tensors plus JSON, and back, exactly: no pickle.

`pack` walks dicts, lists, tuples and plain values; each tensor is taken out under its path and
replaced by a reference. Keys that JSON has no form for (ints), tuples, bytes and non-finite floats
are tagged. `unpack(*pack(value)) == value`, types included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

TAG = "$"


def pack(value: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a nested value into its tensors (by path) and a JSON skeleton."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _pack(value, "", tensors)


def unpack(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Put a packed value together again."""
    if isinstance(skeleton, list):
        return [unpack(tensors, item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if TAG not in skeleton:
        return {key: unpack(tensors, item) for key, item in skeleton.items()}
    kind, content = skeleton[TAG], skeleton["value"]
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(unpack(tensors, item) for item in content)
    if kind == "dict":
        return {unpack(tensors, key): unpack(tensors, item) for key, item in content}
    raise ValueError(f"unknown tag {kind!r} in packed state")


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {TAG: "tensor", "value": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(value.copy())
        return {TAG: "array", "value": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: "float", "value": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {TAG: "bytes", "value": value.hex()}
    if isinstance(value, list):
        return [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        items = [_pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {TAG: "tuple", "value": items}
    if isinstance(value, dict):
        return _pack_dict(value, path, tensors)
    raise TypeError(f"state at {path or '/'} is a {type(value).__name__}, which cannot be kept")


def _pack_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) for key in value) and TAG not in value:
        return {key: _pack(item, f"{path}/{key}", tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if isinstance(key, torch.Tensor | np.ndarray | list | dict):
            raise TypeError(f"state at {path or '/'} has a key of type {type(key).__name__}")
        pairs.append([_pack(key, "", {}), _pack(item, f"{path}/{key!r}", tensors)])
    return {TAG: "dict", "value": pairs}
