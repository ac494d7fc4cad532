"""The one generation engine, for our networks and for causal language models of transformers.

What all prompts begin with is read once and its cache copied. The rows of a batch then keep in
step: together up to the end of the shortest prompt, from there on one token a row, the next of its
prompt or a new one. So nothing is padded or masked, and any network with a cache will do. Each row
draws from a generator of its own: its text does not depend on the others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError
from agent_forge.infer.native import native_decoder
from agent_forge.model.network import ForgeNetwork
from agent_forge.native.decoder import NativeCache, NativeDecoder

LOWEST_TEMPERATURE = 0.001  # above 0: logits over less could overflow
CACHED_TOKENS = 16_384  # of all rows of a batch: what the caches hold
HELD_BACK = 8  # characters: half of one, or a space that the next ones would take away
KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")  # caches of transformers
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
TAIL = 8  # tokens that are decoded to look for a stop string, beside its own length
Decode = Callable[[Sequence[int]], str]
ProgressCallback = Callable[[int, int], None]  # (tokens that are done, of how many)


def no_progress(done: int, total: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen, and what ends a text. Temperature 0 takes the likeliest."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    banned_tokens: frozenset[int] = frozenset()  # that are never chosen
    halt_threshold: float | None = None  # of our networks; None = the model's own

    def __post_init__(self) -> None:
        low, high = LOWEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
        if self.temperature and not low <= self.temperature <= high:
            raise ConfigError(f"temperature is 0, or from {low} to {high:.0f}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError("top_k is at least 0, top_p is above 0 and at most 1")
        if self.max_new_tokens < 1 or not 0 <= self.seed < 2**63:
            raise ConfigError("max_new_tokens is at least 1, seed is from 0 to 2**63 - 1")


@dataclass
class GeneratedText:
    """The continuation of one prompt; lists have an entry for each token and for a stop token."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""  # empty without a way to decode
    stopped_by: str = ""  # length, token (not among the tokens) or string; empty while it goes on
    stop_token: int | None = None  # the one that ended it
    steps: list[int] = field(default_factory=list)  # recursion steps of our networks
    # In nats, of the network itself, whatever the temperature, top_k and top_p; if asked for.
    log_probabilities: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)  # of each place, if asked for

    @property
    def truncated(self) -> bool:
        """True if the text had no end where the limit was."""
        return self.stopped_by == "length"


@torch.no_grad()
def generate(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    *,
    samples: int = 1,
    log_probabilities: bool = False,
    decode: Decode | None = None,
    progress: ProgressCallback = no_progress,
) -> list[GeneratedText]:
    """Continue every prompt `samples` times; returns all samples of the first prompt, and so on."""
    if sampling.stop_strings and decode is None:
        raise ValueError("stop strings need a way to decode")
    if not all(prompts):
        raise ConfigError("a prompt has at least one token")
    start, alone = reader_of(network, sampling), not rows_can_be_chosen(network)
    shared = 0 if alone else shared_prefix(list(map(tuple, prompts)))
    if shared:
        start.read(torch.tensor([list(prompts[0][:shared])]))
    numbered = [(prompt, number) for prompt in prompts for number in range(samples)]
    told = 0 if log_probabilities else None
    rows = [Row(list(p), sampling, decode, told, sample=number) for p, number in numbered]
    done, total = 0, sum(len(row.prompt) for row in rows)
    lengths, most = [row.most_tokens for row in rows], CACHED_TOKENS
    for chosen in batches(lengths, 0 if alone else most):
        reader, live = start.copy(), [rows[i] for i in chosen]
        if shared:
            reader.select(torch.zeros(len(live), dtype=torch.long))
        batch = Batch(reader, live, shared)
        while batch.live:
            batch.advance()
        done += sum(len(rows[i].prompt) for i in chosen)
        progress(done, total)
    return [row.result for row in rows]


@torch.no_grad()
def stream(
    network: nn.Module,
    prompt: Sequence[int],
    sampling: SamplingSettings,
    decode: Decode,
    byte_tokens: frozenset[int] = frozenset(),
) -> Iterator[str]:
    """Continue one prompt piece by piece. Text that could become a stop string, or be decoded in
    another way once more is known (as a row of `byte_tokens`), is held back."""
    ours = isinstance(network, ForgeNetwork)  # others draw from the seed alone, as they always did
    row = Row(list(prompt), sampling, decode, ours=ours)
    batch, shown = Batch(reader_of(network, sampling), [row]), 0
    while not row.result.stopped_by:
        batch.advance()
        text = row.settled_text(byte_tokens)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)


def choose(logits_V: Tensor, sampling: SamplingSettings, generator: torch.Generator) -> int:
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
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with; each keeps one to itself."""
    columns = zip(min(prompts, default=())[:-1], max(prompts, default=())[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], columns))


def own_generator(seed: int, prompt: Sequence[int], number: int = 0) -> torch.Generator:
    """A random stream of its own for every seed, prompt and sample of that prompt."""
    value = seed
    for token in (*prompt, *([-1 - number] if number else [])):
        value = (value * 1_000_003 + token + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(value)


@dataclass(eq=False)
class Row:
    """One prompt of a batch, how it is continued, and what came of it so far."""

    prompt: list[int]
    sampling: SamplingSettings
    decode: Decode | None = None
    likeliest: int | None = None  # tokens told at each place; None: no log-probabilities at all
    sample: InitVar[int] = 0
    ours: InitVar[bool] = True
    result: GeneratedText = field(default_factory=GeneratedText)
    generator: torch.Generator = field(init=False)

    def __post_init__(self, sample: int, ours: bool) -> None:
        self.generator = own_generator(self.sampling.seed, self.prompt if ours else (), sample)

    @property
    def most_tokens(self) -> int:
        """What it may take of a cache."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def settled_text(self, byte_tokens: frozenset[int] = frozenset()) -> str:
        """The text so far without what the next tokens may change (see `stream`)."""
        result = self.result
        if result.stopped_by or self.decode is None:
            return result.text
        held = max(HELD_BACK, *map(len, self.sampling.stop_strings), 0)
        open_row = sum(1 for _ in takewhile(byte_tokens.__contains__, result.tokens[::-1]))
        return self.decode(result.tokens[: len(result.tokens) - open_row])[:-held]

    def next_token(self, place: int, logits_V: Tensor, steps: int) -> int:
        """The token at a place: of the prompt, or a new one by the network's logits."""
        if place < len(self.prompt):
            return self.prompt[place]
        token = choose(logits_V, self.sampling, self.generator)
        self.result.steps.append(steps)
        if self.likeliest is not None:
            log_p = logits_V.float().log_softmax(-1)
            self.result.log_probabilities.append(float(log_p[token]))
            if self.likeliest:
                top = log_p.topk(min(self.likeliest, len(log_p)))
                found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                self.result.likeliest.append(dict(found))
        self._add(token)
        return token

    def _add(self, token: int) -> None:
        """Take one more token into the result, and end it if it is to end."""
        result, sampling = self.result, self.sampling
        decode, stops = self.decode or (lambda ids: ""), sampling.stop_strings
        if token in sampling.stop_tokens:
            result.stopped_by, result.stop_token, stops = "token", token, ()
        else:
            result.tokens.append(token)
            tail = decode(result.tokens[-TAIL - max(map(len, stops)) :]) if stops else ""
            tail = decode(result.tokens) if UNKNOWN in tail else tail  # it began within a character
            # What is said within a thought, which a whole text alone shows, ends nothing.
            if any(s in tail for s in stops) and any(s in decode(result.tokens) for s in stops):
                result.stopped_by = "string"
            elif len(result.tokens) == sampling.max_new_tokens:
                result.stopped_by, stops = "length", ()
        if result.stopped_by:
            text = decode(result.tokens)
            result.text = text[: min((text.find(s) for s in stops if s in text), default=None)]


class Batch:
    """Rows that are continued in step; the reader has read the beginning that all share."""

    def __init__(self, reader: AnyReader, rows: list[Row], shared: int = 0) -> None:
        self.reader, self.live = reader, rows  # those that have not ended
        self.place = min(len(row.prompt) for row in rows)  # of the next token in each row
        self.tokens = torch.tensor([row.prompt[shared : self.place] for row in rows])

    @torch.no_grad()
    def advance(self) -> None:
        """One more token for every row that has not ended."""
        logits_BV, steps_B = self.reader.read(self.tokens)
        for banned in {row.sampling.banned_tokens for row in self.live} - {frozenset()}:
            rows = [i for i, row in enumerate(self.live) if row.sampling.banned_tokens == banned]
            logits_BV[torch.tensor(rows)[:, None], torch.tensor(sorted(banned))] = -torch.inf
        steps = steps_B.tolist()
        following = [
            row.next_token(self.place, logits_BV[i], steps[i]) for i, row in enumerate(self.live)
        ]
        self.tokens = torch.tensor(following)[:, None]
        self.place += 1
        self.keep([i for i, row in enumerate(self.live) if not row.result.stopped_by])

    def keep(self, staying: Sequence[int]) -> None:
        """Go on with these of the live rows."""
        if len(staying) < len(self.live):
            if staying:
                self.reader.select(torch.tensor(staying))
            self.live = [self.live[i] for i in staying]
            self.tokens = self.tokens[torch.tensor(staying, dtype=torch.long)]


class _Reader:
    """A network that remembers what it has read."""

    def __init__(self, network: nn.Module, sampling: SamplingSettings) -> None:
        self.network, self.sampling = network.eval(), sampling
        self.device = next(network.parameters()).device

    def copy(self) -> Any:
        return copy.deepcopy(self, {id(self.network): self.network})


class _ForgeReader(_Reader):
    """Our network, with its keys, values and memory."""

    network: ForgeNetwork

    def __init__(self, network: ForgeNetwork, sampling: SamplingSettings) -> None:
        super().__init__(network, sampling)
        self.cache = network.new_cache()

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
        memory = self.cache.memory
        memory.update({name: state[rows] for name, state in memory.items()})


class _NativeReader(_Reader):
    """A packed network of ours, row by row, each with a cache of its own."""

    def __init__(
        self, network: ForgeNetwork, sampling: SamplingSettings, decoder: NativeDecoder
    ) -> None:
        super().__init__(network, sampling)
        self.decoder = decoder
        self.caches: list[NativeCache] = []  # none before the first tokens

    def read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        self.caches = self.caches or [self.decoder.new_cache() for _ in tokens_BT]
        rows = zip(tokens_BT.tolist(), self.caches, strict=True)
        threshold = self.sampling.halt_threshold
        read = [self.decoder.read(tokens, cache, threshold) for tokens, cache in rows]
        return torch.stack([logits for logits, _ in read]), torch.tensor([n for _, n in read])

    def select(self, rows_B: Tensor) -> None:
        self.caches = [copy.deepcopy(self.caches[row]) for row in rows_B.tolist()]


class TransformersReader(_Reader):
    """A causal language model of transformers. Without a cache it reads the whole text again."""

    def __init__(
        self,
        network: nn.Module,
        sampling: SamplingSettings = SamplingSettings(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__(network, sampling)
        self.past: Any = None
        self.text_BT: Tensor | None = None  # what was read, where there is no cache
        known = inspect.signature(network.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # Bamba and MiniMax count positions from 0 again unless they are told them.
        self.numbered = "position_ids" in known and _has_states(network)
        self.length = 0  # tokens that the cache stands for

    def read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(tokens_BT, **self.last_only)
        return out.logits[:, -1], torch.ones(len(tokens_BT), dtype=torch.long)

    def forward(self, tokens_BT: Tensor, **more: Any) -> Any:
        """What the network says of these tokens, which from now on belong to what was read."""
        tokens = tokens_BT.to(self.device)
        if self.text_BT is not None:
            tokens = torch.cat([self.text_BT, tokens], 1)
        end = self.length + tokens.shape[1]
        places = torch.arange(self.length, end, device=self.device).expand(tokens.shape)
        options = {"use_cache": True, **({"position_ids": places} if self.numbered else {})}
        out = self.network(tokens, past_key_values=self.past, **options, **more)
        self.past = getattr(out, "past_key_values", None)
        self.text_BT, self.length = (tokens, 0) if self.past is None else (None, end)
        return out

    def select(self, rows_B: Tensor) -> None:
        self.past.batch_select_indices(rows_B.to(self.device))


AnyReader = _ForgeReader | _NativeReader | TransformersReader


def reader_of(network: nn.Module, sampling: SamplingSettings) -> AnyReader:
    if not isinstance(network, ForgeNetwork):
        return TransformersReader(network, sampling)
    if decoder := native_decoder(network):
        return _NativeReader(network, sampling, decoder)
    return _ForgeReader(network, sampling)


def _has_states(network: nn.Module) -> bool:
    """True if layers keep more of the past than keys and values, as their config or class says."""
    kinds = getattr(getattr(network, "config", None), "layer_types", None) or ()
    return bool(getattr(network, "_is_stateful", False)) or "linear_attention" in kinds


def rows_can_be_chosen(network: nn.Module) -> bool:
    """True if a cache holds keys and values alone; others are read row by row, each from its
    beginning: transformers leaves their states as they are when rows are chosen."""
    if isinstance(network, ForgeNetwork):
        return True
    reader = TransformersReader(network)
    reader.read(torch.zeros(1, 1, dtype=torch.long))
    layers = getattr(reader.past, "layers", [None])
    whole = all(type(layer).__name__ in KEYS_AND_VALUES for layer in layers)
    return whole and not _has_states(network)
