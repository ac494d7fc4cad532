"""Batches from token documents: packed whole, mixed by weights, resumed to the byte.

Each source is an endless stream: its documents in a new order every epoch, with an end-of-text
after each. The next document of a row comes from the source that is furthest behind its share of
tokens, so that every batch is a sample of the whole mix. A document that does not fit into the
rest of a row begins the next one; one that no row can hold is cut and goes on at its next turn.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from agent_forge.config.load import did_you_mean
from agent_forge.data.tokenizer import END_OF_TEXT, SPECIAL
from agent_forge.errors import ConfigError

IGNORE = -100  # the target of a position that learns nothing
END = SPECIAL[END_OF_TEXT]
Documents = Sequence[Sequence[int]]  # token ids; bools where they say which are learned
Ints = NDArray[np.int64]
Mix = Mapping[str, float]


@dataclass(frozen=True)
class TokenizedItem:
    """An item to be measured on: token ids, and of each whether it is asked for."""

    ids: Sequence[int]
    asked: Sequence[bool]


class TokenizedDataset:
    """Documents as one flat array. `learned` says which tokens are learned; None means all."""

    # The target of a position is the next token of its document. Where the last token is learned,
    # so is the end-of-text after it; nothing is ever predicted from there into the next document.

    def __init__(self, name: str, documents: Documents, learned: Documents | None = None) -> None:
        self.name = name
        if not documents:
            raise ConfigError(f"source {name!r} has no documents")
        if learned is not None and len(learned) != len(documents):
            raise ConfigError(f"source {name!r}: {len(documents)} documents, {len(learned)} masks")
        sizes = np.array([len(document) for document in documents], dtype=np.int64)
        if not sizes.all():
            raise ConfigError(f"document {int(sizes.argmin()) + 1} of source {name!r} is empty")
        self.lengths: Ints = sizes + 1
        self.starts: Ints = np.cumsum(self.lengths) - self.lengths
        ends = self.starts + sizes
        self.tokens = np.full(int(self.lengths.sum()), END, dtype=np.int32)
        mask = np.ones(len(self.tokens), dtype=bool)
        for i, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            self.tokens[start:end] = documents[i]
            if learned is not None:
                if len(learned[i]) != end - start:
                    raise ConfigError(f"the mask of document {i + 1} of {name!r} does not fit it")
                mask[start:end] = learned[i]
        mask[ends] = mask[ends - 1]
        self.targets = np.full(len(self.tokens), IGNORE, dtype=np.int32)
        self.targets[:-1][mask[1:]] = self.tokens[1:][mask[1:]]
        self.targets[ends] = IGNORE
        if (self.targets == IGNORE).all():
            raise ConfigError(f"source {name!r} has nothing to learn from")

    def fingerprint(self) -> str:
        """sha256 of what the stream consists of."""
        digest = hashlib.sha256(self.name.encode())
        for array in (self.tokens, self.targets, self.lengths):
            digest.update(array.tobytes())
        return digest.hexdigest()


class _Stream:
    """The position in a source's stream, and the order of its documents in this epoch."""

    def __init__(self, source: TokenizedDataset, seed: int) -> None:
        self.source, self.seed = source, seed
        self.seek(0, 0)

    def seek(self, epoch: int, at: int) -> None:
        key = hashlib.sha256(f"{self.seed}/{self.source.name}/{epoch}".encode()).digest()[:8]
        self.epoch, self.at = epoch, at
        self.order = shuffled(len(self.source.lengths), int.from_bytes(key, "little"))
        self.ends = np.cumsum(self.source.lengths[self.order])

    def take(self, room: int, length: int) -> slice | None:
        """Where the rest of the present document is, at most `room` tokens of it."""
        # None if the room would cut what a whole row of `length` can hold.
        document = int(np.searchsorted(self.ends, self.at, side="right"))
        left = int(self.ends[document]) - self.at
        if room < left <= length:
            return None
        original = self.order[document]
        start = int(self.source.starts[original] + self.source.lengths[original]) - left
        self.at += min(left, room)
        if self.at == self.ends[-1]:
            self.seek(self.epoch + 1, 0)
        return slice(start, start + min(left, room))


class BatchLoader:
    """Batches of `batch` rows of `length` tokens. `state_dict` is all that the next one needs."""

    def __init__(
        self,
        sources: Sequence[TokenizedDataset],
        mix: Mix,
        *,
        batch: int,
        length: int,
        seed: int,
        vocab_size: int,
    ) -> None:
        names = [source.name for source in sources]
        if len(set(names)) != len(names) or not names:
            raise ConfigError(f"sources need names of their own, found {names}")
        if batch < 1:
            raise ConfigError(f"a batch of {batch} rows holds nothing")
        for source in sources:
            low, high = int(source.tokens.min()), int(source.tokens.max())
            if low < 0 or high >= vocab_size:
                token = f"source {source.name!r} has the token {high if low >= 0 else low}"
                problem = f"{token}, the vocabulary of the model ends at {vocab_size - 1}"
                raise ConfigError(problem, hint="encode it with the tokenizer of the model")
        self.batch = batch
        self._streams = {source.name: _Stream(source, seed) for source in sources}
        self._credit = dict.fromkeys(names, 0.0)
        prints = "".join(source.fingerprint() for source in sources)
        self._made_of = hashlib.sha256(f"{seed}/{prints}".encode()).hexdigest()
        self.use(mix, length)

    def use(self, mix: Mix, length: int) -> None:
        """Change the weights or the length of rows; every source goes on where it is."""
        for name, weight in mix.items():
            if name not in self._streams:
                hint = did_you_mean(name, list(self._streams))
                raise ConfigError(f"the mix names an unknown source {name!r}{hint}")
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"the weight of {name!r} is {weight}; 0 or more is expected")
        total = sum(mix.values())
        if not 0 < total < math.inf:
            raise ConfigError(f"the weights of the mix add up to {total}")
        if length < 2:
            raise ConfigError(f"rows of {length} tokens teach nothing")
        # Shares that sum to 1, without the zeros, in the order of the sources.
        self._mix = {name: mix[name] / total for name in self._streams if mix.get(name)}
        self.length = length

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens_BT and targets_BT; a target is the next token, IGNORE where it is not learned."""
        tokens = np.full((self.batch, self.length), END, dtype=np.int64)
        targets = np.full_like(tokens, IGNORE)
        for row in range(self.batch):
            while (targets[row] == IGNORE).all():  # a piece of a long prompt teaches nothing
                self._fill(tokens[row], targets[row])
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _fill(self, tokens: Ints, targets: Ints) -> None:
        """Put documents into a row for as long as they fit."""
        tokens[:], targets[:] = END, IGNORE
        at = 0
        while at < self.length:
            name = max(self._mix, key=lambda name: self._credit[name])
            stream = self._streams[name]
            place = stream.take(self.length - at, self.length)
            if place is None:
                return
            size = place.stop - place.start
            tokens[at : at + size] = stream.source.tokens[place]
            targets[at : at + size] = stream.source.targets[place]
            at += size
            for other, share in self._mix.items():
                self._credit[other] += share * size
            self._credit[name] -= size

    def state_dict(self) -> dict[str, Any]:
        at = {name: [stream.epoch, stream.at] for name, stream in self._streams.items()}
        state = {"made_of": self._made_of, "mix": dict(self._mix), "length": self.length}
        return {**state, "credit": dict(self._credit), "at": at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["made_of"] != self._made_of:
            raise ConfigError("the data or the seed is not what the checkpoint was made with")
        self._mix, self.length = dict(state["mix"]), state["length"]
        self._credit = dict(state["credit"])
        for name, (epoch, at) in state["at"].items():
            self._streams[name].seek(epoch, at)


def shuffled(n: int, key: int) -> Ints:
    """The numbers below n in an order that depends on the key alone, on any machine."""
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


@dataclass(frozen=True)
class CurriculumStage:
    """A part of a curriculum: its share of the steps, and what is learned in it."""

    share: float
    mix: Mix
    length: int


class Schedule(Protocol):
    """What says which stage a step belongs to."""

    @property
    def stages(self) -> Sequence[CurriculumStage]: ...
    def at(self, step: int, total: int) -> CurriculumStage: ...


class Curriculum:
    """Stages one after the other; which one a step belongs to follows from its number alone."""

    def __init__(self, stages: Sequence[CurriculumStage]) -> None:
        self.stages: Sequence[CurriculumStage] = tuple(stages)
        total = sum(stage.share for stage in stages)
        if not all(stage.share > 0 for stage in stages) or abs(total - 1) > 1e-6:
            raise ConfigError(f"shares of a curriculum are above 0 and add up to 1, not {total}")

    def at(self, step: int, total: int) -> CurriculumStage:
        """The stage of a step, counted from 0, of `total`; steps beyond are of the last stage."""
        if step < 0 or total < 1:
            raise ConfigError(f"step {step} of {total} is in no stage")
        passed = 0.0
        for stage in self.stages:
            passed += stage.share
            if step < round(passed * total):
                return stage
        return self.stages[-1]
