"""Candidates: what to do, to which other candidates. Together they are a graph without cycles.

A candidate is named by what it is made of, so the same one made twice has the same key:

    parent   {index}                     one of the models that the search began with
    average  {}                          the plain mean of its inputs
    merge    {combo, weights, drop_rate, keep, scale, layers, seed}, and perhaps amplification and
                                         dfs_ratio:
                                         base + scale * (combo of the inputs - base); `weights` has
                                         one number an input for every group, `layers` is what
                                         FrankenMerge takes for a layer ({} leaves it to decide)
    blend    {method, coefficients, density, scale, seed}
                                         base + scale * the sum of c * (parent - base), each made
                                         sparse and put to the vote as the method says; `density`
                                         is the share that is kept, one number a group
    method   {method, seed}              what a merge method makes of the inputs, with equal weights
    stretch  {scale}                     base + scale * (input - base)
    shift    {coefficients}              input + sum over parents of c * (parent - base), with one
                                         number a parent for every group
    noise    {sigma, rate, seed}         input + Gaussian noise on a share of the weights
    path     {layers}                    [input, layer] for every layer, in this order, and outside
                                         the layers what the first input has. Its shape is its own,
                                         so nothing but another path is made from it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The fields of each kind of operation, and how many inputs it takes at least and at most.
KINDS: dict[str, tuple[set[str], int, int | None]] = {
    "parent": ({"index"}, 0, 0),
    "average": (set(), 1, None),
    "merge": ({"combo", "weights", "drop_rate", "keep", "scale", "layers", "seed"}, 2, None),
    "blend": ({"method", "coefficients", "density", "scale", "seed"}, 2, None),
    "method": ({"method", "seed"}, 2, None),
    "stretch": ({"scale"}, 1, 1),
    "shift": ({"coefficients"}, 1, 1),
    "noise": ({"sigma", "rate", "seed"}, 1, 1),
    "path": ({"layers"}, 1, None),
}
OPTIONAL = {"merge": {"amplification", "dfs_ratio"}}
SHORT = 8  # digits of a key that a person gets to see


@dataclass(frozen=True)
class Candidate:
    """A node of the graph; `origin` tells people where it came from and is no part of the key."""

    operation: Mapping[str, Any] = field(compare=False)
    inputs: tuple[str, ...] = field(default=(), compare=False)
    origin: str = field(default="", compare=False)
    key: str = field(init=False)  # alone says whether two are the same

    def __post_init__(self) -> None:
        kind = self.operation.get("kind")
        if kind not in KINDS:
            raise ValueError(f"unknown kind of candidate {kind!r}; known: {', '.join(KINDS)}")
        fields, least, most = KINDS[kind]
        if set(self.operation) - OPTIONAL.get(kind, set()) != {"kind", *fields}:
            raise ValueError(f"{kind!r} has the fields {sorted(fields)}, not those given")
        if len(self.inputs) < least or (most is not None and len(self.inputs) > most):
            raise ValueError(f"{kind!r} cannot have {len(self.inputs)} inputs")
        content = [self.operation, self.inputs]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        object.__setattr__(self, "operation", json.loads(text)[0])  # shared with nobody
        object.__setattr__(self, "key", hashlib.sha256(text.encode()).hexdigest())

    @property
    def kind(self) -> str:
        return str(self.operation["kind"])

    def to_json(self) -> dict[str, Any]:
        made_from = {"operation": dict(self.operation), "inputs": list(self.inputs)}
        return {"key": self.key, **made_from, "origin": self.origin}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Candidate:
        """The candidate of `to_json`; raises ValueError if its key does not fit its content."""
        made = cls(data["operation"], tuple(data["inputs"]), data["origin"])
        if made.key != data["key"]:
            raise ValueError(f"candidate {data['key'][:SHORT]} is not what its key says")
        return made


def lineage(candidates: Mapping[str, Candidate], key: str) -> list[Candidate]:
    """A candidate with all that it was made from, each after its inputs."""
    found: dict[str, Candidate] = {}
    waiting = [key]
    while waiting:
        candidate = candidates[waiting[-1]]
        missing = [i for i in candidate.inputs if i not in found]
        if missing:
            waiting += reversed(missing)
        else:
            found[waiting.pop()] = candidate
    return list(found.values())
