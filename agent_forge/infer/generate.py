"""The one generation engine, for our networks and for causal language models of transformers.

What all prompts begin with is read once and its cache copied. The rows of a batch then keep in
step: they read together up to the end of the shortest prompt, and from there on one token a row,
the next of its prompt while there is one, else a new one. So nothing is padded or masked, each
token of a row is computed once, and any network with a cache will do. A row that has ended leaves
the batch. Each draws from a generator of its own: its text does not depend on the others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError
from agent_forge.model.network import ForgeNetwork

LOWEST_TEMPERATURE = 0.001  # above 0: logits over less could overflow
CACHED_TOKENS = 16_384  # of all rows of a batch: what the caches hold
TAIL = 8  # tokens that are decoded to look for a stop string, beside its own length
Decode = Callable[[Sequence[int]], str]
ProgressCallback = Callable[[int, int], None]  # (tokens that are done, of how many)


def no_progress(done: int, total: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and what ends a text. Temperature 0 takes the likeliest."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    halt_threshold: float | None = None  # of our networks; None = the model's own

    def __post_init__(self) -> None:
        low, high = LOWEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
        if self.temperature and not low <= self.temperature <= high:
            raise ValueError(f"temperature is 0, or from {low} to {high:.0f}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("top_k is at least 0, top_p is above 0 and at most 1")
        if self.max_new_tokens < 1 or not 0 <= self.seed < 2**63:
            raise ValueError("max_new_tokens is at least 1, seed is from 0 to 2**63 - 1")


@dataclass
class Generated:
    """The continuation of one prompt.

    `steps` and `log_probabilities` have an entry for each token, and one for the stop token.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""  # empty without a way to decode
    stopped_by: str = ""  # length, token or string; empty while it goes on
    stop_token: int | None = None  # the one that ended it; not among the tokens
    steps: list[int] = field(default_factory=list)  # recursion steps of our networks
    log_probabilities: list[float] = field(default_factory=list)  # of the network itself, in nats

    @property
    def truncated(self) -> bool:
        """True if the text had no end where the limit was."""
        return self.stopped_by == "length"


def generate(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    decode: Decode | None = None,
    progress: ProgressCallback = no_progress,
) -> list[Generated]:
    """Continue every prompt; returns the results in the order of the prompts."""
    return _generate(network, prompts, [0] * len(prompts), sampling, decode, progress)


def rollouts(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    samples: int = 1,
    decode: Decode | None = None,
    progress: ProgressCallback = no_progress,
) -> list[list[Generated]]:
    """Continue every prompt `samples` times; returns them with log-probabilities, by prompt.

    A log-probability is that of the network itself, whatever the temperature, top_k and top_p.
    """
    rows = [prompt for prompt in prompts for _ in range(samples)]
    numbers = [number for _ in prompts for number in range(samples)]
    found = _generate(network, rows, numbers, sampling, decode, progress, log_probabilities=True)
    return [found[i : i + samples] for i in range(0, len(found), samples)]


@torch.no_grad()
def stream(
    network: nn.Module, prompt: Sequence[int], sampling: Sampling, decode: Decode
) -> Iterator[str]:
    """Continue one prompt piece by piece. Text that could become a stop string is held back."""
    reader, result, shown = _reader(network, sampling, batched=False), Generated(), 0
    batch = _Batch(reader, [prompt], [result], [reader.generator(prompt)], sampling, decode)
    longest = max(map(len, sampling.stop_strings), default=1)
    while not result.stopped_by:
        batch.advance()
        text = result.text
        if not result.stopped_by:
            text = decode(result.tokens)
            text = text[: max(shown, len(text) - longest + 1)]
        if len(text) > shown and not text.endswith("\ufffd"):  # half a character is no text yet
            yield text[shown:]
            shown = len(text)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token by the rules of `sampling`."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits = logits_V.float() / sampling.temperature
    if sampling.top_k and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        sorted_p, order = probabilities.sort(descending=True, stable=True)
        outside = sorted_p.cumsum(-1) - sorted_p >= sampling.top_p  # the first one always stays
        probabilities[order[outside]] = 0
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Items of similar length together, longest last; which go together depends on lengths only."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with; each keeps one to itself."""
    if not prompts:
        return 0
    first, last, shortest = min(prompts), max(prompts), min(map(len, prompts))
    alike = (a == b for a, b in zip(first, last, strict=False))
    return next((i for i, same in enumerate(alike) if not same or i == shortest - 1), 0)


@torch.no_grad()
def _generate(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],  # which sample of its prompt each row is
    sampling: Sampling,
    decode: Decode | None,
    progress: ProgressCallback,
    *,
    log_probabilities: bool = False,
) -> list[Generated]:
    if sampling.stop_strings and decode is None:
        raise ValueError("stop strings need a way to decode")
    if not all(prompts):
        raise ConfigError("a prompt has at least one token")
    results = [Generated() for _ in prompts]
    start, shared = _reader(network, sampling), shared_prefix(list(map(tuple, prompts)))
    if shared:
        start.read(torch.tensor([list(prompts[0][:shared])]))
    done, total = 0, sum(map(len, prompts))
    for rows in batches([len(p) + sampling.max_new_tokens for p in prompts], CACHED_TOKENS):
        batch = _Batch(
            start.copy(),
            [prompts[i] for i in rows],
            [results[i] for i in rows],
            [own_generator(sampling.seed, prompts[i], numbers[i]) for i in rows],
            sampling,
            decode,
            shared=shared,
            log_probabilities=log_probabilities,
        )
        while batch.live:
            batch.advance()
        done += sum(len(prompts[i]) for i in rows)
        progress(done, total)
    return results


def own_generator(seed: int, prompt: Sequence[int], number: int = 0) -> torch.Generator:
    """A random stream of its own for every seed, prompt and sample of that prompt."""
    value = seed
    for token in (*prompt, *([-1 - number] if number else [])):
        value = (value * 1_000_003 + token + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(value)


class _Batch:
    """Prompts that are continued in step, of which the reader has read the shared beginning."""

    def __init__(
        self,
        reader: _ForgeReader | _TransformersReader,
        prompts: Sequence[Sequence[int]],
        results: Sequence[Generated],
        generators: Sequence[torch.Generator],
        sampling: Sampling,
        decode: Decode | None,
        *,
        shared: int = 0,
        log_probabilities: bool = False,
    ) -> None:
        self.reader, self.prompts, self.results = reader, prompts, results
        self.generators, self.sampling, self.decode = generators, sampling, decode
        self.log_probabilities = log_probabilities
        self.live = list(range(len(prompts)))  # rows that have not ended
        self.place = min(map(len, prompts))  # tokens of a row before the next one
        self.tokens = torch.tensor([list(prompt[shared : self.place]) for prompt in prompts])
        if shared:
            reader.select(torch.zeros(len(prompts), dtype=torch.long))

    def advance(self) -> None:
        """One more token for every row that has not ended."""
        logits_BV, steps_B = self.reader.read(self.tokens)
        likeliest = logits_BV.argmax(-1).tolist() if self.sampling.temperature == 0 else []
        staying, following = [], []
        for i, row in enumerate(self.live):
            prompt, result = self.prompts[row], self.results[row]
            if self.place < len(prompt):
                token = prompt[self.place]
            else:
                token = likeliest[i] if likeliest else self._draw(logits_BV[i], row)
                result.steps.append(int(steps_B[i]))
                if self.log_probabilities:
                    logits_V = logits_BV[i].float()
                    result.log_probabilities.append(float(logits_V.log_softmax(-1)[token]))
                self._add(result, token)
            if not result.stopped_by:
                staying.append(i)
                following.append(token)
        if staying and len(staying) < len(self.live):
            self.reader.select(torch.tensor(staying))
        self.live = [self.live[i] for i in staying]
        self.tokens = torch.tensor(following)[:, None]
        self.place += 1

    def _draw(self, logits_V: Tensor, row: int) -> int:
        return choose(logits_V, self.sampling, self.generators[row])

    def _add(self, result: Generated, token: int) -> None:
        """Take one more token into a result, and end it if it is to end."""
        stops = self.sampling.stop_strings
        if token in self.sampling.stop_tokens:
            result.stopped_by, result.stop_token = "token", token
        else:
            result.tokens.append(token)
            if stops and self._holds(result.tokens[-TAIL - max(map(len, stops)) :]):
                result.stopped_by = "string"
            elif len(result.tokens) == self.sampling.max_new_tokens:
                result.stopped_by = "length"
        if result.stopped_by and self.decode:
            text = self.decode(result.tokens)
            ends = [text.find(stop) for stop in stops if stop in text]
            result.text = text[: min(ends)] if ends and result.stopped_by == "string" else text

    def _holds(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None
        text = self.decode(tokens)
        return any(stop in text for stop in self.sampling.stop_strings)


# -- the two kinds of networks, with what they have read ------------------------------------------


class _ForgeReader:
    """Our network, with its keys, values and memory."""

    def __init__(self, network: ForgeNetwork, sampling: Sampling) -> None:
        self.network, self.sampling, self.cache = network.eval(), sampling, network.new_cache()
        self.device = next(network.parameters()).device

    def read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the last position, and the recursion steps of each row."""
        threshold = self.sampling.halt_threshold
        return self.network.predict(tokens_BT.to(self.device), self.cache, threshold=threshold)

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows of what was read."""
        rows = rows_B.to(self.device)
        for layer in self.cache.layers:
            if layer.k is not None and layer.v is not None:
                layer.k, layer.v = layer.k[rows], layer.v[rows]
        carry = self.cache.memory.carry
        carry.update({name: state[rows] for name, state in carry.items()})

    def copy(self) -> _ForgeReader:
        return copy.deepcopy(self, {id(self.network): self.network})

    def generator(self, prompt: Sequence[int]) -> torch.Generator:
        """The random stream of a single prompt."""
        return own_generator(self.sampling.seed, prompt)


class _TransformersReader:
    """A causal language model of transformers. Without a cache it reads the whole text again."""

    def __init__(self, network: nn.Module, sampling: Sampling, *, batched: bool) -> None:
        self.network, self.sampling, self.batched = network.eval(), sampling, batched
        self.device = next(network.parameters()).device
        self.past: Any = None
        self.text_BT: Tensor | None = None  # what was read, where there is no cache
        known = inspect.signature(network.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens_BT.to(self.device)
        if self.text_BT is not None:
            tokens = torch.cat([self.text_BT, tokens], 1)
        out = self.network(tokens, past_key_values=self.past, use_cache=True, **self.last_only)
        self.past = getattr(out, "past_key_values", None)
        self.text_BT = tokens if self.past is None else None
        if self.batched and not hasattr(self.past, "batch_select_indices"):
            raise ConfigError(
                f"{type(self.network).__name__} keeps no cache whose rows can be chosen",
                hint="measure it by likelihood: --tasks or --data",
            )
        return out.logits[:, -1], torch.ones(len(tokens), dtype=torch.long)

    def select(self, rows_B: Tensor) -> None:
        self.past.batch_select_indices(rows_B.to(self.device))

    def copy(self) -> _TransformersReader:
        return copy.deepcopy(self, {id(self.network): self.network})

    def generator(self, prompt: Sequence[int]) -> torch.Generator:
        """The random stream of a single prompt: of the seed alone, as it always was."""
        return torch.Generator().manual_seed(self.sampling.seed)


def _reader(
    network: nn.Module, sampling: Sampling, *, batched: bool = True
) -> _ForgeReader | _TransformersReader:
    if isinstance(network, ForgeNetwork):
        return _ForgeReader(network, sampling)
    return _TransformersReader(network, sampling, batched=batched)
