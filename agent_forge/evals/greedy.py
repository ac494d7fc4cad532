"""Greedy answers to many prompts at once: those that one prompt at a time would give.

What all prompts begin with is read once and its cache copied. The rows of a batch then keep in
step: they read together up to the end of the shortest prompt, and from there on one token a row,
the next of its prompt while there is one, else the likeliest. So nothing is padded or masked, each
token of a row is computed once, and any network with a cache will do. Logits are computed for the
last position only. Who has ended leaves the batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError
from agent_forge.evals.likelihood import ProgressCallback, batches
from agent_forge.model.network import ForgeNetwork

TOKENS_AT_ONCE = 16_384  # of all rows of a batch: what the caches hold
TAIL = 8  # tokens that are decoded to look for a stop string, beside its own length


@dataclass
class Answer:
    """What was written for one prompt. `truncated`: it had no end where the limit was."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    truncated: bool = False


@dataclass(frozen=True)
class Rules:
    """When an answer ends, and how its tokens become text."""

    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()

    def add(self, answer: Answer, token: int) -> bool:
        """Take one more token; whether the answer goes on."""
        if token in self.ends:
            answer.text = self.decode(answer.tokens)
            return False
        answer.tokens.append(token)
        if self.stop:
            tail = self.decode(answer.tokens[-TAIL - max(map(len, self.stop)) :])
            if any(stop in tail for stop in self.stop):
                text = self.decode(answer.tokens)
                answer.text = text[: min(text.find(s) for s in self.stop if s in text)]
                return False
        if len(answer.tokens) < self.max_new_tokens:
            return True
        answer.text, answer.truncated = self.decode(answer.tokens), True
        return False


class Reader(Protocol):
    """A network that remembers what it has read."""

    def read(self, tokens_BT: Tensor) -> Tensor: ...  # logits of the last position
    def select(self, rows_B: Tensor) -> None: ...  # go on with these rows of what was read


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    rules: Rules,
    *,
    progress: ProgressCallback = lambda done, total: None,
) -> list[Answer]:
    """An answer to every prompt, in their order."""
    if not all(prompts):
        raise ConfigError("a prompt has at least one token")
    model.eval()
    answers = [Answer() for _ in prompts]
    shared = shared_prefix(prompts)
    device = next(model.parameters()).device
    start = _reader(model)
    if shared:
        start.read(torch.tensor([prompts[0][:shared]], device=device))
    done, total = 0, sum(map(len, prompts))
    for rows in batches([len(p) + rules.max_new_tokens for p in prompts], TOKENS_AT_ONCE):
        _batch(
            copy.deepcopy(start, {id(model): model}),  # the cache, not the model
            [prompts[i] for i in rows],
            [answers[i] for i in rows],
            shared,
            rules,
        )
        done += sum(len(prompts[i]) for i in rows)
        progress(done, total)
    return answers


def shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with; each keeps one to itself."""
    if not prompts:
        return 0
    first, last, shortest = min(prompts), max(prompts), min(map(len, prompts))
    alike = (a == b for a, b in zip(first, last, strict=False))
    return next((i for i, same in enumerate(alike) if not same or i == shortest - 1), 0)


def _batch(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    shared: int,
    rules: Rules,
) -> None:
    """Write the answers of some prompts."""
    live = list(range(len(prompts)))
    place = min(map(len, prompts))
    tokens = torch.tensor([list(prompt[shared:place]) for prompt in prompts])
    if shared:
        reader.select(torch.zeros(len(prompts), dtype=torch.long))
    while True:
        chosen = reader.read(tokens).argmax(-1).tolist()
        staying, following = [], []
        for i, (row, token) in enumerate(zip(live, chosen, strict=True)):
            given = place < len(prompts[row])
            if given or rules.add(answers[row], token):
                staying.append(i)
                following.append(prompts[row][place] if given else token)
        if not staying:
            return
        if len(staying) < len(live):
            reader.select(torch.tensor(staying))
            live = [live[i] for i in staying]
        tokens = torch.tensor(following)[:, None]
        place += 1


def _reader(model: nn.Module) -> Reader:
    return _Own(model) if isinstance(model, ForgeNetwork) else _Foreign(model)


class _Own:
    """Our network, with its keys, values and memory."""

    def __init__(self, model: ForgeNetwork) -> None:
        self.model, self.cache = model, model.new_cache()
        self.device = next(model.parameters()).device

    def read(self, tokens_BT: Tensor) -> Tensor:
        return self.model.predict(tokens_BT.to(self.device), self.cache)[0]

    def select(self, rows_B: Tensor) -> None:
        rows = rows_B.to(self.device)
        for layer in self.cache.layers:
            if layer.k is not None and layer.v is not None:
                layer.k, layer.v = layer.k[rows], layer.v[rows]
        carry = self.cache.memory.carry
        carry.update({name: state[rows] for name, state in carry.items()})


class _Foreign:
    """Any causal language model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.past: Any = None
        known = inspect.signature(model.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def read(self, tokens_BT: Tensor) -> Tensor:
        out = self.model(
            tokens_BT.to(self.device), past_key_values=self.past, use_cache=True, **self.last_only
        )
        self.past = getattr(out, "past_key_values", None)
        if not hasattr(self.past, "batch_select_indices"):
            raise ConfigError(
                f"{type(self.model).__name__} keeps no cache whose rows can be chosen",
                hint="measure it by likelihood: --tasks or --data",
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def select(self, rows_B: Tensor) -> None:
        self.past.batch_select_indices(rows_B.to(self.device))
