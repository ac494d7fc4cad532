"""Generation with keys, values and memory cached: greedy or sampled, batched, with stop strings.

Prompts of one length share a batch, so that no padding is ever seen; each prompt draws from a
generator of its own, so that its text does not depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agent_forge.model.network import ForgeNetwork

COLDEST = 0.001  # temperature that is told from 0: logits over less could overflow
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    halt_threshold: float | None = None  # None = the model's own

    def __post_init__(self) -> None:
        if self.temperature and not COLDEST <= self.temperature <= 1 / COLDEST:
            raise ValueError(f"temperature is 0, or from {COLDEST} to {1 / COLDEST:.0f}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("top_k is at least 0, top_p is above 0 and at most 1")
        if self.max_new_tokens < 1 or not 0 <= self.seed < 2**63:
            raise ValueError("max_new_tokens is at least 1, seed is from 0 to 2**63 - 1")


@dataclass
class Generated:
    """What came out for one prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped_by: str = "length"  # length, token, string
    steps: list[int] = field(default_factory=list)  # recursion steps that each token took


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


def generate(
    model: ForgeNetwork,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    decode: Decode | None = None,
) -> list[Generated]:
    """Continue every prompt; results in the order of the prompts."""
    if sampling.stop_strings and decode is None:
        raise ValueError("stop strings need a way to decode")
    if any(not prompt for prompt in prompts):
        raise ValueError("a prompt has at least one token")
    results: dict[int, Generated] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        batch = _Batch(model, [prompts[i] for i in rows], sampling, decode)
        while not batch.done():
            batch.advance()
        results |= dict(zip(rows, batch.results, strict=True))
    return [results[i] for i in range(len(prompts))]


def stream(
    model: ForgeNetwork, prompt: Sequence[int], sampling: Sampling, decode: Decode
) -> Iterator[str]:
    """Continue one prompt piece by piece. Text that could become a stop string is held back."""
    batch = _Batch(model, [prompt], sampling, decode)
    result, shown = batch.results[0], 0
    longest = max((len(s) for s in sampling.stop_strings), default=1)
    while not batch.done():
        batch.advance()
        held = 0 if batch.done() else longest - 1
        text = result.text[: max(shown, len(result.text) - held)]
        if len(text) > shown and not text.endswith("\ufffd"):  # half a character is no text yet
            yield text[shown:]
            shown = len(text)


class _Batch:
    """Prompts of one length on their way."""

    def __init__(
        self,
        model: ForgeNetwork,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        decode: Decode | None,
    ) -> None:
        self.model, self.sampling, self.decode = model.eval(), sampling, decode
        self.results = [Generated() for _ in prompts]
        self._active = [True] * len(prompts)
        self._cache = model.new_cache()
        device = next(model.parameters()).device
        self._next = torch.tensor([list(p) for p in prompts], device=device)
        self._generators = [_generator(sampling.seed, prompt) for prompt in prompts]

    def done(self) -> bool:
        return not any(self._active)

    def advance(self) -> None:
        """One more token for every prompt that has not stopped."""
        logits, steps = self.model.predict(
            self._next, self._cache, threshold=self.sampling.halt_threshold
        )
        chosen = []
        for row, result in enumerate(self.results):
            token = choose(logits[row], self.sampling, self._generators[row])
            chosen.append(token)
            if self._active[row]:
                self._add(row, result, token, int(steps[row]))
        self._next = torch.tensor(chosen, device=self._next.device)[:, None]

    def _add(self, row: int, result: Generated, token: int, steps: int) -> None:
        result.steps.append(steps)
        if token in self.sampling.stop_tokens:
            result.stopped_by, self._active[row] = "token", False
            return
        result.tokens.append(token)
        if self.decode is not None:
            result.text = self.decode(result.tokens)
            found = [result.text.find(s) for s in self.sampling.stop_strings if s in result.text]
            if found:
                result.text = result.text[: min(found)]
                result.stopped_by, self._active[row] = "string", False
        if len(result.tokens) == self.sampling.max_new_tokens:
            self._active[row] = False


def _generator(seed: int, prompt: Sequence[int]) -> torch.Generator:
    """A stream of its own for every seed and prompt."""
    value = seed
    for token in prompt:
        value = (value * 1_000_003 + token + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(value)
