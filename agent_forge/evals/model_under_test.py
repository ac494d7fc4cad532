"""A model that is measured on domains, ours or any causal language model.

Of a conversation the last reply is asked for, written as the model's own chat form has it, with the
end of the turn; of a prompt its completion. Where an example has choices, the right one has to be
the likeliest a byte; elsewhere an answer is right when it is what greedy generation would write.
What is longer than the model can read is asked piece by piece, each with half of what fits before
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from agent_forge.data.readers import Example
from agent_forge.data.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL, Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.evals.domains import Domain, answer, reply_of
from agent_forge.evals.greedy import Answer, Rules, generate
from agent_forge.evals.likelihood import (
    TOKENS_A_BATCH,
    ItemScores,
    ProgressCallback,
    TokenizedItem,
    measure,
)
from agent_forge.model.chat import render
from agent_forge.model.folder import home_of, open_model
from agent_forge.model.load import encode as ids_of
from agent_forge.model.load import end_tokens
from agent_forge.model.network import ForgeNetwork

LOGITS_AT_ONCE = 1 << 26  # 256 MB in single precision
LEAST_TOKENS = 2  # that a model has to read: one given, one asked
ENDS = frozenset((SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]))

Encode = Callable[[Example], tuple[list[int], int]]  # ids, and where those that are asked begin


@dataclass(frozen=True)
class TokenizedDomain:
    """A domain as tokens. An answer may take several items, an example several answers.

    The first answer of an example is the right one.
    """

    items: list[TokenizedItem]
    answer_of: NDArray[np.int64]  # each item
    example_of: NDArray[np.int64]  # each answer
    sizes: NDArray[np.int64]  # of the answers, in bytes
    domain: Domain | None = None  # whose answers are written, to these prompts
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        """What there is to read."""
        return sum(len(item.ids) for item in self.items) + sum(map(len, self.prompts))


@dataclass(frozen=True)
class ModelUnderTest:
    """A model with what it takes to ask it."""

    model: nn.Module
    encode: Encode
    longest: int  # tokens that it can read
    batch_tokens: int
    vocab_size: int
    given: Callable[[Example], list[int]]  # the ids of what an answer is written to
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    chats: bool  # whether it was taught to

    def prepare(self, domain: Domain) -> TokenizedDomain:
        """The tokens of a domain, for as many models of this shape as there are."""
        items: list[TokenizedItem] = []
        answer_of: list[int] = []
        example_of: list[int] = []
        sizes: list[int] = []
        for number, example in enumerate(domain.examples):
            for variant in _variants(example):
                ids, start = self.encode(variant)
                if max(ids) >= self.vocab_size:
                    raise ConfigError(
                        f"token {max(ids)} is outside the vocabulary of {self.vocab_size}",
                        hint="the tokenizer in the folder does not fit the model",
                    )
                pieces = list(windows(ids, start, self.longest))
                if not pieces:
                    raise ConfigError(f"{domain.name}: example {number + 1} is a single token")
                items += pieces
                answer_of += [len(sizes)] * len(pieces)
                example_of.append(number)
                sizes.append(len(answer(variant).encode()))
        prepared = TokenizedDomain(
            items, np.array(answer_of), np.array(example_of), np.array(sizes)
        )
        if domain.writing is None:
            return prepared
        prompts = tuple(tuple(self.given(example)) for example in domain.examples)
        return replace(prepared, domain=domain, prompts=prompts)

    def measure(
        self,
        prepared: TokenizedDomain,
        *,
        threshold: float | None = None,
        progress: ProgressCallback = lambda done, total: None,
    ) -> ItemScores:
        """What came out for each example of a domain."""
        found = measure(
            self.model,
            prepared.items,
            threshold=threshold,
            batch_tokens=self.batch_tokens,
            progress=lambda done, total: progress(done, prepared.tokens),
        )
        outcome = _joined(prepared, found)
        if not np.isfinite(outcome.loss).all():
            raise NotFinite("the model gives a loss that is not finite: its weights are damaged")
        if prepared.domain is None:
            return outcome
        read = prepared.tokens - sum(map(len, prepared.prompts))
        answers, cut = self.write(
            prepared.domain,
            prepared.prompts,
            progress=lambda done, total: progress(read + done, prepared.tokens),
        )
        graded = zip(prepared.domain.tasks, answers, strict=True)
        return replace(
            outcome,
            right=[prepared.domain.grade(task, answer.text) for task, answer in graded],
            truncated=[answer.truncated for answer in answers],
            empty=[not answer.text.strip() for answer in answers],
            cut=cut,
        )

    def write(
        self,
        domain: Domain,
        prompts: Sequence[tuple[int, ...]],
        *,
        progress: ProgressCallback = lambda done, total: None,
    ) -> tuple[list[Answer], list[bool]]:
        """The answers of the model, and which prompts lost their beginning to fit."""
        assert domain.writing
        most = min(domain.writing.max_new_tokens, self.longest // 2)
        room = self.longest - most
        chatting = self.chats and bool(domain.examples[0].messages)
        rules = Rules(self.decode, self.ends, most, () if chatting else domain.writing.stop)
        fitting = [prompt[-room:] for prompt in prompts]
        answers = generate(self.model, fitting, rules, progress=progress)
        return answers, [len(prompt) > room for prompt in prompts]


def open_model_under_test(ref: str | Path) -> ModelUnderTest:
    """A model (a folder, or base+adapter), ready to be measured."""
    return model_under_test(*open_model(ref), home_of(ref))


def model_under_test(model: nn.Module, foreign: Any, home: Path) -> ModelUnderTest:
    """A network with the tokenizer in its home, ready to be measured."""
    if isinstance(model, ForgeNetwork):
        tokenizer = Tokenizer.load(home)
        tokenizer.fits(model.settings)
        size = model.settings.vocab_size
        given, decode = partial(_own_given, tokenizer), partial(_own_text, tokenizer)
        reading = (_own(tokenizer), TOKENS_A_BATCH, TOKENS_A_BATCH, size)
        return ModelUnderTest(model, *reading, given, decode, ENDS, True)
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    reads = getattr(model.config, "max_position_embeddings", None) or TOKENS_A_BATCH
    if not isinstance(reads, int) or reads < LEAST_TOKENS:
        raise DamagedFile(home / "config.json", f"max_position_embeddings is {reads!r}")
    batch = min(TOKENS_A_BATCH, max(1, LOGITS_AT_ONCE // size))
    reading = (_foreign(foreign), min(reads, TOKENS_A_BATCH), batch, size)
    decode = partial(foreign.decode, skip_special_tokens=True)
    given, chats = partial(_foreign_given, foreign), bool(foreign.chat_template)
    ends = end_tokens(home, model, foreign)
    return ModelUnderTest(model, *reading, given, decode, ends, chats)


def windows(ids: Sequence[int], start: int, longest: int) -> Iterator[TokenizedItem]:
    """Pieces of at most `longest` tokens that ask for every token from `start` on once."""
    done, end = start, min(longest, len(ids))
    while True:
        if end > done:
            first = max(0, end - longest)
            yield TokenizedItem(ids[first:end], [i >= done for i in range(first, end)])
            done = end
        if end == len(ids):
            return
        end = min(end + longest // 2, len(ids))


def _variants(example: Example) -> Iterator[Example]:
    """The example itself, then with each wrong choice, once, as its answer."""
    yield example
    last = reply_of(example)
    for choice in dict.fromkeys(example.choices):
        if choice != example.completion:
            turns = [dict(message) for message in example.messages]
            if last is not None:
                turns[last]["content"] = choice
            yield replace(example, completion=choice, messages=tuple(turns))


def _joined(prepared: TokenizedDomain, found: ItemScores) -> ItemScores:
    """Items to answers, answers to examples."""
    of = prepared.answer_of
    tokens = np.bincount(of, found.tokens)
    loss = np.bincount(of, found.loss)
    steps = np.bincount(of, np.multiply(found.steps, found.tokens)) / tokens
    exact = np.bincount(of, np.logical_not(found.right)) == 0
    first = np.flatnonzero(np.diff(prepared.example_of, prepend=-1))
    a_byte = loss / prepared.sizes
    likelier = np.add.reduceat(a_byte <= a_byte[first][prepared.example_of], first, dtype=int)
    alone = np.diff(first, append=len(a_byte)) == 1
    right = np.where(alone, exact[first], likelier == 1)
    return ItemScores(
        right.tolist(),
        loss[first].tolist(),
        tokens[first].astype(int).tolist(),
        steps[first].tolist(),
    )


def _own_given(tokenizer: Tokenizer, example: Example) -> list[int]:
    last = reply_of(example)
    if last is None:
        return tokenizer.encode(example.prompt)
    return tokenizer.encode_chat(example.messages[:last], reply=True)


def _own_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A network may have more ids than the tokenizer has tokens."""
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)


def _foreign_given(tokenizer: Any, example: Example) -> list[int]:
    given, _, plain = _written(tokenizer, example)
    return ids_of(tokenizer, given, special=plain)


def _own(tokenizer: Tokenizer) -> Encode:
    """As our models learn: special tokens by their ids."""

    def encode(example: Example) -> tuple[list[int], int]:
        last = reply_of(example)
        if last is None:
            prompt = tokenizer.encode(example.prompt)
            return prompt + tokenizer.encode(example.completion), len(prompt)
        ids = tokenizer.encode_chat(example.messages[: last + 1])
        return ids, len(tokenizer.encode_chat(example.messages[:last], reply=True))

    return encode


def _foreign(tokenizer: Any) -> Encode:
    """As its maker's tokenizer reads the whole text: asked is all from where the prompt differs.

    So a token that reaches from the prompt into the answer is asked for, and a template may write
    a finished turn in another way than one that begins.
    """

    def encode(example: Example) -> tuple[list[int], int]:
        given, whole, plain = _written(tokenizer, example)
        before = ids_of(tokenizer, given, special=plain)
        ids = ids_of(tokenizer, whole, special=plain)
        pairs = enumerate(zip(before, ids, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(before), len(ids) - 1))
        return ids, max(start, 1)

    return encode


def _written(tokenizer: Any, example: Example) -> tuple[str, str, bool]:
    """What is given, that with the answer, and whether the tokenizer adds its own start to it."""
    last = reply_of(example)
    if last is None:
        return example.prompt, example.prompt + example.completion, True
    if not tokenizer.chat_template:  # never taught to chat: it goes on with the text
        given = f"{example.prompt}\n"
        return given, given + answer(example), True
    turns = example.messages[: last + 1]
    given = render(tokenizer, turns[:-1], reply=True)
    return given, render(tokenizer, turns, reply=False).rstrip(), False
