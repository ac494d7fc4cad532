"""Likelihoods of causal language models; of those of transformers without waste.

Logits are computed where they are asked for: a hook hands the head these positions alone, so what
follows it (a bias, a scale, a softcap) stays the network's own. What all rows of a batch begin with
is read once, and so is a prompt that several answers continue; rows of equal beginnings share the
cache, so nothing in it is padded. Both ways are tried against the plain forward when a model is
loaded (`Reading.tried`), and a network that gives other logits is read the plain way.

Which items go together depends on the items alone. Threads take whole batches, so their number
changes no bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import TransformersReader, batches
from agent_forge.model.network import ForgeNetwork

LARGE = 20_000_000  # weights: from here on a batch keeps a core busy, so batches go to threads
LARGE_BATCH = 512  # tokens: more of them save no time, and fewer threads would share them
WORTH = 64  # tokens that have to be saved before a beginning is read by itself
LOGITS_AT_ONCE = 1 << 21  # in single precision: 8 MB, which stay in the cache of the CPU
CHUNK = 1024  # positions of a network of ours whose logits exist at once
TRIED = 1e-3  # nats: logits of another way of reading may differ by this much
TRIED_HALF = 0.5  # the same in bfloat16: the mean of a position, and of these the median
TRIAL_TOKENS = 24
PROBED, PROBES = (256, 512, 512), 8  # rows, width and outputs of a layer: some milliseconds in all
T = TypeVar("T")
TokenLosses = dict[int, NDArray[np.float64]]  # by item: nats of each of its asked tokens
# Of an item: all right, its loss in nats, its asked tokens, and the mean recursion steps of these.
Row = tuple[bool, float, int, float]
_asked_for: ContextVar[Tensor | None] = ContextVar("asked_for", default=None)


class Batch(NamedTuple):
    """Items that are read together."""

    prompts: list[list[int]]  # the items that continue each prompt
    shared: int = 0  # tokens that all items begin with, read once
    prompt: int = 0  # tokens that those of each prompt begin with; at least `shared`


@dataclass(frozen=True)
class Reading:
    """What a network can do to be read faster."""

    selects: bool  # its head takes asked positions alone
    caches: bool  # it goes on from copied rows of its cache

    @classmethod
    @torch.no_grad()
    def tried(cls, network: nn.Module) -> Reading:
        """What the network does as its plain forward does, tried on a few tokens."""
        n, (first, *others) = TRIAL_TOKENS, _trial_tokens(network)
        texts = [first[: n // 2] + row[: n // 2 + i] for i, row in enumerate(others)]
        texts[1][: 3 * n // 4] = texts[0][: 3 * n // 4]  # two prompts, each with two answers
        texts[3][: 3 * n // 4] = texts[2][: 3 * n // 4]
        items = [TokenizedItem(ids, [i > 3 * n // 4 for i in range(len(ids))]) for ids in texts]
        network.eval()
        whole = _losses(network, items, Batch([[0], [1], [2], [3]]), cls(False, False))[1]

        def same(reading: Reading, batch: Batch) -> bool:
            try:
                with selecting(network, reading):
                    found = _losses(network, items, batch, reading)[1]
            except (ConfigError, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                return False
            return found.shape == whole.shape and bool((found - whole).abs().max() < TRIED)

        selects = same(cls(True, False), Batch([[0], [1], [2], [3]]))
        chain = Batch([[0, 1], [2, 3]], n // 2, 3 * n // 4)
        return cls(selects, same(cls(selects, True), chain))


PLAIN = Reading(selects=False, caches=False)


def _trial_tokens(network: Any) -> list[list[int]]:
    """Five rows of tokens, the same ones for every network of a vocabulary."""
    vocab, own = network.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(0)
    return torch.randint(vocab, (5, TRIAL_TOKENS), generator=own).tolist()


def is_large(network: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in network.parameters()) >= LARGE


@torch.no_grad()
def halve(network: nn.Module) -> bool:
    """Give the network weights in bfloat16; False if it cannot work with them, and has its own
    type again. Buffers stay: angles of positions would suffer."""
    device, dtype = next(network.parameters()).device, next(network.parameters()).dtype
    tokens = torch.tensor(_trial_tokens(network)[:1], device=device)
    whole = network(tokens).logits.float().log_softmax(-1)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with suppress(RuntimeError):  # types that do not go together
        found = network(tokens).logits.float().log_softmax(-1)
        if bool((found - whole).abs().mean(-1).median() < TRIED_HALF):
            return True
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return False


def plan(
    items: Sequence[TokenizedItem], examples: Sequence[int], most: int, reading: Reading
) -> list[Batch]:
    """Batches of at most so many tokens; `examples` has that of each item."""
    by_example: dict[int, list[int]] = {}
    for number, example in enumerate(examples):
        by_example.setdefault(example, []).append(number)
    alone, continued = list[int](), dict[int, list[list[int]]]()  # the latter by length of prompt
    for own in by_example.values():
        length = _beginning([items[n] for n in own]) if reading.caches else 0
        if length * (len(own) - 1) >= WORTH:
            continued.setdefault(length, []).append(own)
        else:
            alone += own
    begin = _beginning([items[n] for n in alone]) if reading.caches and alone else 0
    found = []
    for rows in batches([len(items[n].ids) - begin for n in alone], most):
        found.append(_sharing([[alone[i]] for i in rows], items, reading))
    for length, prompts in sorted(continued.items()):
        sizes = [sum(len(items[n].ids) - length for n in own) + length for own in prompts]
        for rows in batches(sizes, most):
            found.append(_sharing([prompts[i] for i in rows], items, reading, length))
    return found


def _sharing(
    prompts: list[list[int]], items: Sequence[TokenizedItem], reading: Reading, prompt: int = 0
) -> Batch:
    """A batch whose common beginning is read by itself where that is worth it."""
    shared = _beginning([items[n] for own in prompts for n in own]) if reading.caches else 0
    shared = shared if shared * (len(prompts) - 1) >= WORTH else 0
    return Batch(prompts, shared, max(shared, prompt))


def _beginning(items: Sequence[TokenizedItem]) -> int:
    """How many tokens all items begin with, up to the one before the first that is asked for."""
    texts = [tuple(item.ids) for item in items]
    columns = zip(min(texts), max(texts), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], columns))
    starts = (next(i for i in range(1, len(item.ids)) if item.asked[i]) for item in items)
    return max(0, min(same, min(starts) - 1))


@contextmanager
def selecting(network: nn.Module, reading: Reading) -> Iterator[None]:
    """Within the block the head takes what `_asked_for` selects; it is entered outside threads."""
    if not reading.selects:
        yield
        return
    head: Any = network.get_output_embeddings()  # type: ignore[operator]

    def select(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        wanted = _asked_for.get()
        return inputs if wanted is None else (inputs[0][wanted][None], *inputs[1:])

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def asked_logits(
    forward: Callable[[Tensor], Any], tokens: Tensor, wanted: Tensor, reading: Reading
) -> Tensor:
    """The logits at the wanted positions, row by row."""
    if not reading.selects:
        return torch.as_tensor(forward(tokens).logits[wanted])
    before = _asked_for.set(wanted)
    try:
        return torch.as_tensor(forward(tokens).logits.flatten(0, -2))
    finally:
        _asked_for.reset(before)


def _losses(
    network: nn.Module,
    items: Sequence[TokenizedItem],
    batch: Batch,
    reading: Reading,
    threshold: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every asked token of a batch: whether it is the likeliest, its loss, its recursion steps
    (until the halting `threshold`), and its row."""
    device = next(network.parameters()).device
    order = [items[n] for own in batch.prompts for n in own]
    forward: Callable[[Tensor], Any] = network
    if batch.prompt:
        first = [torch.tensor(items[own[0]].ids[: batch.prompt]) for own in batch.prompts]
        reader, begun = TransformersReader(network), batch.shared
        if begun:
            reader.read(first[0][None, :begun])
        if batch.prompt > begun:
            if begun:
                reader.select(torch.zeros(len(first), dtype=torch.long))
            reader.read(torch.stack(first)[:, begun:])
        owners = [i for i, own in enumerate(batch.prompts) for _ in own]
        read_alone = batch.prompt == begun  # then the cache has one row
        reader.select(torch.tensor([0 if read_alone else i for i in owners]))
        forward = reader.forward
    rest = [TokenizedItem(i.ids[batch.prompt :], i.asked[batch.prompt :]) for i in order]
    tokens, asked = padded(rest, device)
    wanted, targets = asked[:, 1:], tokens[:, 1:][asked[:, 1:]]
    parts: Iterable[Tensor]
    if isinstance(network, ForgeNetwork):
        x = network.features(tokens[:, :-1]).x[wanted]
        answers, steps = network.decide(x, threshold=threshold)
        parts = (network.logits(network.hidden(y)) for y in torch.split(answers, CHUNK))
        rows = CHUNK
    else:
        logits = asked_logits(forward, tokens[:, :-1], wanted, reading)
        steps, rows = torch.ones_like(targets), max(1, LOGITS_AT_ONCE // logits.shape[-1])
        parts = torch.split(logits, rows)
    right, losses = [], []
    for part, target in zip(parts, torch.split(targets, rows), strict=True):
        single = part.float()
        losses.append(F.cross_entropy(single, target, reduction="none"))
        right.append(single.argmax(-1) == target)
    return torch.cat(right), torch.cat(losses), steps, wanted.nonzero()[:, 0]


def padded(items: Sequence[TokenizedItem], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows filled up behind their end, where nothing that is asked for can see it."""
    longest = max(len(item.ids) for item in items)
    tokens = torch.zeros(len(items), longest, dtype=torch.long)
    asked = torch.zeros(len(items), longest, dtype=torch.bool)
    for row, item in enumerate(items):
        tokens[row, : len(item.ids)] = torch.as_tensor(item.ids)
        asked[row, : len(item.ids)] = torch.as_tensor(item.asked)
    asked[:, 0] = False  # nothing comes before the first token
    if not asked.any(1).all():
        raise ConfigError("an item asks for no token")
    return tokens.to(device), asked.to(device)


def score_batch(
    network: nn.Module,
    items: Sequence[TokenizedItem],
    batch: Batch,
    reading: Reading,
    token_losses: TokenLosses | None = None,
    threshold: float | None = None,
) -> list[tuple[int, Row]]:
    """The result of each item of a batch; `selecting` has been entered."""
    right, losses, steps, owners = _losses(network, items, batch, reading, threshold)
    found = []
    for place, number in enumerate(n for own in batch.prompts for n in own):
        mine = owners == place
        numbers = float(losses[mine].sum()), int(mine.sum()), float(steps[mine].float().mean())
        found.append((number, (bool(right[mine].all()), *numbers)))
        if token_losses is not None:
            token_losses[number] = losses[mine].double().cpu().numpy()
    return found


def in_threads(jobs: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """The results of jobs, in their order, from so many threads with one of torch's own each; 0
    means this thread with all that it has. Gradients and autocast are as the caller has them."""
    if not threads:
        yield from (job() for job in jobs)
        return
    gradients, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    own = torch.get_num_threads()

    def run(job: Callable[[], T]) -> T:
        torch.set_num_threads(1)
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, autocast):
            return job()

    try:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(run, jobs)
    finally:
        torch.set_num_threads(own)


def faster_in_bf16() -> bool:
    """True if a linear layer in bfloat16 takes clearly less time than in single precision here."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(PROBED[:2], dtype=dtype), torch.ones(PROBED[1:], dtype=dtype)
        took = []
        for _ in range(PROBES):
            began = time.perf_counter()
            F.linear(x, weight)
            took.append(time.perf_counter() - began)
        seconds[dtype] = min(took)
    return 1.2 * seconds[torch.bfloat16] < seconds[torch.float32]
