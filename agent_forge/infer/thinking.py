"""Thoughts before answers, for our networks: think, then answer, in batches or as they come.

A reply is `[thinking]` thought `[/endthinking]` answer. `forced` begins every reply with a thought,
`free` leaves it to the model, `off` forbids it: the tokens of thinking are then never chosen. A
thought has a limit of tokens; one that does not end there is closed, and the answer follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from agent_forge.contract.phase import SIZE_CLASSES
from agent_forge.data.tokenizer import (
    END_OF_CALL,
    END_OF_RESULT,
    END_OF_THINKING,
    SPECIAL,
    STRATEGIES,
    THINKING,
    TOOL_CALL,
    TOOL_RESULT,
    Tokenizer,
)
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import GeneratedText, SamplingSettings, generate, stream
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import ForgeModel, OpenedModel

ThinkMode = Literal["off", "free", "forced"]
BEGIN, END = SPECIAL[THINKING], SPECIAL[END_OF_THINKING]
TAG_IDS = frozenset(SPECIAL[tag] for tag in STRATEGIES)
THOUGHT_IDS = TAG_IDS | {BEGIN, END}
CALL_IDS = frozenset((SPECIAL[TOOL_CALL], SPECIAL[END_OF_CALL]))
RESULT_IDS = frozenset((SPECIAL[TOOL_RESULT], SPECIAL[END_OF_RESULT]))  # for tools alone to say
TOOL_IDS = CALL_IDS | RESULT_IDS
THOUGHT_TOKENS = 256  # at most, unless said otherwise
# Thoughts for one position, and their tokens, by size class of the model.
PARALLEL_THOUGHTS = {"tiny": (8, 20), "small": (6, 15), "medium": (4, 12), "large": (4, 10)}
Ids = Sequence[int]


def think_mode(text: str) -> ThinkMode:
    """The mode of this name."""
    for mode in get_args(ThinkMode):
        if mode == text:
            return mode  # type: ignore[no-any-return]
    raise ConfigError(f"--think {text}: off, free or forced")


def think(
    network: nn.Module,
    prompts: Sequence[Ids],
    sampling: SamplingSettings,
    *,
    tag: int | None = None,
    samples: int = 1,
    log_probabilities: bool = False,
) -> list[GeneratedText]:
    """The thoughts about every prompt, without their ends. With `tag` each begins with that token,
    which is then the first of its tokens."""
    first = [] if tag is None else [tag]
    begun = [[*prompt, BEGIN, *first] for prompt in prompts]
    ends = sampling.stop_tokens | {END}
    inside = replace(sampling, stop_tokens=ends, banned_tokens=sampling.banned_tokens | {BEGIN})
    thoughts = generate(
        network, begun, inside, samples=samples, log_probabilities=log_probabilities
    )
    for thought in thoughts:
        thought.tokens = [*first, *thought.tokens]
    return thoughts


def answer(
    network: nn.Module,
    prompts: Sequence[Ids],
    thoughts: Sequence[Ids] | None,
    sampling: SamplingSettings,
    *,
    samples: int = 1,
) -> list[GeneratedText]:
    """The answers to every prompt after the thought that is given with it; None: no thoughts."""
    if thoughts is not None:
        pairs = zip(prompts, thoughts, strict=True)
        prompts = [[*prompt, BEGIN, *thought, END] for prompt, thought in pairs]
    without = replace(sampling, banned_tokens=sampling.banned_tokens | THOUGHT_IDS)
    return generate(network, prompts, without, samples=samples)


def shown(tokenizer: Tokenizer, ids: Ids, *, specials: bool = False) -> str:
    """The text of ids that a network wrote, without those that the tokenizer does not have."""
    return tokenizer.decode((i for i in ids if i < tokenizer.vocab_size), specials=specials)


@torch.no_grad()
def cache_bytes(network: ForgeNetwork, ids: Ids) -> int:
    """What the cache of a text holds."""
    cache = network.new_cache()
    network.predict(torch.tensor([list(ids)], device=next(network.parameters()).device), cache)
    kept = [tensor for layer in cache.layers for tensor in (layer.k, layer.v)]
    tensors = [tensor for tensor in (*kept, *cache.memory.values()) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class ThoughtGenerator:
    """Several thoughts for each prompt at once, as many and as long as suits the model's size."""

    network: ForgeNetwork
    temperature: float = 1.0
    top_p: float = 0.9
    seed: int = 0

    @property
    def default_counts(self) -> tuple[int, int]:
        """How many thoughts, and how many tokens each at most."""
        weights = self.network.settings.parameters()
        return PARALLEL_THOUGHTS[next(n for n, most in SIZE_CLASSES.items() if weights < most)]

    @torch.no_grad()
    def generate_thoughts(
        self, prompts: Sequence[Ids], num_thoughts: int = 0, max_tokens: int = 0
    ) -> list[list[GeneratedText]]:
        """For each prompt its thoughts, with the log-probability of every token."""
        count, longest = self.default_counts
        count, longest = num_thoughts or count, max_tokens or longest
        how = SamplingSettings(longest, self.temperature, top_p=self.top_p, seed=self.seed)
        found = think(self.network, prompts, how, samples=count, log_probabilities=True)
        return [found[i : i + count] for i in range(0, len(found), count)]


@dataclass(frozen=True)
class SpokenPiece:
    """A piece of a reply as it comes."""

    text: str
    kind: Literal["thought", "call", "result", "answer"] = "answer"


def stream_thinking(
    model: OpenedModel,
    prompt: Ids,
    sampling: SamplingSettings,
    mode: ThinkMode,
    thought_tokens: int = THOUGHT_TOKENS,
) -> Iterator[SpokenPiece]:
    """A reply piece by piece, the thought first if there is one."""
    if not isinstance(model, ForgeModel):  # it may think in words of its own
        if mode == "forced":
            problem = "this model was not taught to think: only models of Phase 3 and later are"
            raise ConfigError(problem, hint="leave --think out")
        pieces = stream(model.network, prompt, sampling, model.decode, model.byte_tokens)
        yield from map(SpokenPiece, pieces)
        return
    ids = list(prompt)
    if (thought := first_thought(model, ids, sampling, mode, thought_tokens)) is not None:
        yield SpokenPiece(shown(model.tokenizer, thought, specials=True), "thought")
        ids += [BEGIN, *thought, END]
    never = sampling.banned_tokens | THOUGHT_IDS | TOOL_IDS  # nobody would carry a call out
    without = replace(sampling, banned_tokens=never)
    pieces = stream(model.network, ids, without, model.decode, model.byte_tokens)
    yield from map(SpokenPiece, pieces)


def first_thought(
    model: ForgeModel,
    prompt: Ids,
    sampling: SamplingSettings,
    mode: ThinkMode,
    thought_tokens: int = THOUGHT_TOKENS,
) -> list[int] | None:
    """What a model thinks before it replies; None if it does not."""
    if mode == "free":
        peek = replace(sampling, max_new_tokens=1, stop_tokens=frozenset())
        mode = "forced" if generate(model.network, [prompt], peek)[0].tokens == [BEGIN] else "off"
    if mode == "off":
        return None
    bounded = replace(sampling, max_new_tokens=thought_tokens)
    return think(model.network, [prompt], bounded)[0].tokens
