"""A model that is measured on domains, ours or any causal language model.

Of a conversation the last reply is asked for, written as the model's own chat form has it, with the
end of the turn; of a prompt its completion. Where an example has choices, the right one has to be
the likeliest a byte; elsewhere every token of the answer, as greedy generation would write it.
Batches are made by length alone, so that a score does not depend on what else is measured. With a
`reading` (likelihood.py) models of transformers are measured faster, to the same but for last bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agent_forge.data.dataset_rows import Example
from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError, NotFinite, PhaseFailed
from agent_forge.evals import likelihood
from agent_forge.evals.domains import Domain, answer, reply_of
from agent_forge.evals.likelihood import PLAIN, Reading, TokenLosses
from agent_forge.infer import generate as generation
from agent_forge.infer.generate import ProgressCallback, no_progress
from agent_forge.model.opened import Asked, OpenedModel, TransformersModel, open_model

TOKENS_A_BATCH = 4096
EVERY_STEP = 1.0  # a halting threshold that is never reached
LOGITS_AT_ONCE = 1 << 26  # 256 MB in single precision
Prompts = Sequence[tuple[int, ...]]
CONFIRMED = 8  # items of each domain that a written model is measured on again
TOLERANCE = 1e-4  # relative: fp32 sums differ in their last bits from batch to batch


@dataclass
class ItemScores:
    """The scores of each item, in their order."""

    right: list[float] = field(default_factory=list)  # 1 or 0, or a share by a grader in part
    loss: list[float] = field(default_factory=list)  # nats, summed over the asked tokens
    tokens: list[int] = field(default_factory=list)  # asked
    steps: list[float] = field(default_factory=list)  # recursion steps, mean over those tokens
    # Of generated answers:
    truncated: list[bool] = field(default_factory=list)  # without an end where the limit was
    empty: list[bool] = field(default_factory=list)  # nothing but blanks
    # Beyond what the model can read at once; where no answer is generated, empty if none is:
    cut: list[bool] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def nats_per_token(self) -> float:
        return sum(self.loss) / sum(self.tokens)

    @property
    def mean_steps(self) -> float:
        return sum(s * n for s, n in zip(self.steps, self.tokens, strict=True)) / sum(self.tokens)

    def bits_per_byte(self, asked_bytes: int) -> float:
        return sum(self.loss) / math.log(2) / asked_bytes


@torch.no_grad()
def measure(
    model: nn.Module,
    items: Sequence[TokenizedItem],
    *,
    threshold: float | None = None,
    batch_tokens: int = TOKENS_A_BATCH,
    progress: ProgressCallback = no_progress,
    token_losses: TokenLosses | None = None,
) -> ItemScores:
    """Score every item. `threshold` is that of halting; 1 takes all recursion steps. If given,
    `token_losses` gets the loss of every asked token."""
    if not items:
        raise ConfigError("there is nothing to measure: no items")
    model.eval()
    lengths, done, results = [len(item.ids) for item in items], 0, dict[int, likelihood.Row]()
    for rows in generation.batches(lengths, batch_tokens):
        batch = likelihood.Batch([[n] for n in rows])
        results.update(likelihood.score_batch(model, items, batch, PLAIN, token_losses, threshold))
        done += sum(lengths[n] for n in rows)
        progress(done, sum(lengths))
    return _in_order(results)


def _in_order(rows: Mapping[int, likelihood.Row]) -> ItemScores:
    columns: Any = zip(*(rows[i] for i in range(len(rows))), strict=True)
    return ItemScores(*map(list, columns))


@dataclass(frozen=True)
class TokenizedDomain:
    """A domain as tokens: items of answers, answers of examples, of which the first is right."""

    items: list[TokenizedItem]
    answer_of: NDArray[np.int64]  # each item
    example_of: NDArray[np.int64]  # each answer
    sizes: NDArray[np.int64]  # of the answers, in bytes that count
    cut: list[bool]  # examples whose answer is not measured after all of the prompt
    domain: Domain | None = None  # whose answers are generated from these prompts
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.items) + sum(map(len, self.prompts))

    @property
    def right_answers(self) -> NDArray[np.int64]:
        """The right answer of each example, which is its first."""
        return np.flatnonzero(np.diff(self.example_of, prepend=-1))

    def right_items(self, turns: int = 1, turn: int = 0) -> list[int]:
        """The items of right answers; of several turns, each has other examples."""
        right = self.right_answers
        chosen = {*right[turn % turns :: turns].tolist()} or {int(right[0])}
        return [n for n, answer in enumerate(self.answer_of.tolist()) if answer in chosen]


@dataclass(frozen=True)
class ModelUnderTest:
    """What it takes to measure a model; another network of its vocabulary may be `model`."""

    model: nn.Module
    opened: OpenedModel
    longest: int  # tokens of an item
    batch_tokens: int
    reading: Reading | None = None  # None: the plain forward
    threads: int = 0  # that share the batches of a reading; 0: this one

    def encode(self, example: Example) -> Asked:
        """The ids of an example with its answer, and where the answer begins."""
        last = reply_of(example)
        if last is None:
            return self.opened.encode_answer(example.prompt, example.completion)
        if not self.opened.chats:
            return self.opened.encode_answer(f"{example.prompt}\n", answer(example))
        return self.opened.encode_reply(example.messages[: last + 1])

    def encode_prompt(self, example: Example) -> list[int]:
        """The ids of an example up to where its answer is to be written."""
        last = reply_of(example)
        if last is None or not self.opened.chats:
            return self.opened.encode(example.prompt + ("" if last is None else "\n"))
        return self.opened.encode_chat(example.messages[:last])

    def prepare(self, domain: Domain) -> TokenizedDomain:
        """The tokens of a domain, for this model and all others with its tokenizer."""
        items: list[TokenizedItem] = []
        answer_of, example_of, sizes = list[int](), list[int](), list[int]()
        cut = [False] * len(domain.examples)
        for number, example in enumerate(domain.examples):
            for variant in variants(example):
                ids, start = self.encode(domain.asked(variant))
                cut[number] |= domain.exact and len(ids) > self.longest
                pieces = list(windows(ids, start, self.longest))
                if not pieces:
                    raise ConfigError(f"{domain.name}: example {number + 1} is a single token")
                items += pieces
                answer_of += [len(sizes)] * len(pieces)
                example_of.append(number)
                sizes.append(len(domain.counted(variant).encode()))
        places = np.array(answer_of), np.array(example_of), np.array(sizes)
        prepared = TokenizedDomain(items, *places, cut if any(cut) else [])
        if domain.writing is None:
            return prepared
        prompts = tuple(tuple(self.encode_prompt(example)) for example in domain.examples)
        return replace(prepared, domain=domain, prompts=prompts)

    def measure(
        self, prepared: TokenizedDomain, progress: ProgressCallback = no_progress
    ) -> ItemScores:
        """The scores of each example of a domain."""
        return self.measure_all([prepared], progress)[0]

    def measure_all(
        self,
        prepared: Sequence[TokenizedDomain],
        progress: ProgressCallback = no_progress,
        token_losses: Sequence[TokenLosses | None] = (),
    ) -> list[ItemScores]:
        """The scores of each example of every domain; their batches are shared out together. If
        given, `token_losses` gets the loss of every asked token, domain by domain."""
        total = sum(domain.tokens for domain in prepared)
        losses = token_losses or [None] * len(prepared)
        by_item = self._read(prepared, losses, lambda done: progress(done, total))
        found, done = [], sum(len(item.ids) for domain in prepared for item in domain.items)
        for domain, scores in zip(prepared, by_item, strict=True):
            if not np.isfinite(scores.loss).all():  # also of wrong choices
                problem = "the model gives a loss that is not finite: its weights are damaged"
                raise NotFinite(problem)
            of_examples = by_example(domain, scores)
            if domain.domain is None:
                found.append(replace(of_examples, cut=domain.cut))
            else:
                told = partial(_further, progress, done, total)
                found.append(self._graded(domain, domain.domain, of_examples, told))
                done += sum(map(len, domain.prompts))
        return found

    def first_losses(self, domains: Sequence[Domain]) -> list[float]:
        """The losses on the first items of each domain, which `confirm` measures again."""
        few = (domain.select(range(len(domain.examples[:CONFIRMED]))) for domain in domains)
        parts = [self.prepare(replace(domain, writing=None)) for domain in few]
        return [loss for part in parts for loss in self.measure(part).loss]

    def _read(
        self,
        prepared: Sequence[TokenizedDomain],
        losses: Sequence[TokenLosses | None],
        progress: Callable[[int], None],
    ) -> list[ItemScores]:
        """The scores of each item of every domain."""
        model, reading, done = self.model, self.reading or PLAIN, 0
        model.eval()
        score = partial(likelihood.score_batch, model)
        plans = [
            likelihood.plan(d.items, d.example_of[d.answer_of].tolist(), self.batch_tokens, reading)
            for d in prepared
        ]
        places = [(d, batch) for d, batches in enumerate(plans) for batch in batches]
        jobs = [partial(score, prepared[d].items, b, reading, losses[d]) for d, b in places]
        rows: list[dict[int, likelihood.Row]] = [{} for _ in prepared]
        with torch.no_grad(), likelihood.selecting(model, reading):
            results = likelihood.in_threads(jobs, self.threads)
            for (d, _), result in zip(places, results, strict=True):
                rows[d].update(result)
                done += sum(len(prepared[d].items[n].ids) for n, _ in result)
                progress(done)
        return [_in_order(of_domain) for of_domain in rows]

    def _graded(
        self,
        prepared: TokenizedDomain,
        domain: Domain,
        scores: ItemScores,
        progress: ProgressCallback,
    ) -> ItemScores:
        """The scores of a domain whose answers are written."""
        answers, cut = self.write(domain, prepared.prompts, progress)
        graded = zip(domain.tasks, answers, strict=True)
        return replace(
            scores,
            right=[domain.grade(task, answer.text) for task, answer in graded],
            truncated=[answer.truncated for answer in answers],
            empty=[not answer.text.strip() for answer in answers],
            cut=cut,
        )

    def write(
        self, domain: Domain, prompts: Prompts, progress: ProgressCallback = no_progress
    ) -> tuple[list[generation.GeneratedText], list[bool]]:
        """The greedy answers of the model, each behind its thought if it has one, and of each
        prompt whether its beginning was cut."""
        assert domain.writing
        most = min(domain.writing.max_new_tokens, self.longest // 2)
        room = self.longest - most
        chatting = self.opened.chats and bool(domain.examples[0].messages)
        stops = () if chatting else domain.writing.stop
        ends, decode = self.opened.end_tokens, self.opened.decode_answer
        sampling = generation.SamplingSettings(most, stop_tokens=ends, stop_strings=stops)
        fitting = [prompt[-room:] for prompt in prompts]
        texts = generation.generate(self.model, fitting, sampling, decode=decode, progress=progress)
        return texts, [len(prompt) > room for prompt in prompts]


def _further(progress: ProgressCallback, before: int, total: int, done: int, _: int) -> None:
    """Progress of a part, told as that of the whole."""
    progress(before + done, total)


def open_model_under_test(ref: str | Path, *, fast: bool = False) -> ModelUnderTest:
    """The model in a folder or of `base+adapter`, ready to be measured."""
    return model_under_test(open_model(ref), fast=fast)


def model_under_test(opened: OpenedModel, *, fast: bool = False) -> ModelUnderTest:
    """`fast`: a model of transformers is read as likelihood.py does."""
    longest, batch = min(opened.max_length or TOKENS_A_BATCH, TOKENS_A_BATCH), TOKENS_A_BATCH
    if not isinstance(opened, TransformersModel):
        return ModelUnderTest(opened.network, opened, longest, batch)
    batch = min(batch, max(1, LOGITS_AT_ONCE // opened.vocab_size))  # they exist at once
    if not fast:
        return ModelUnderTest(opened.network, opened, longest, batch)
    if likelihood.is_large(opened.network):
        batch = min(batch, likelihood.LARGE_BATCH)
    reading = Reading.tried(opened.network)
    return ModelUnderTest(opened.network, opened, longest, batch, reading)


def confirm(
    folder: Path, measure: Callable[[ModelUnderTest], Sequence[float]], recorded: Sequence[float]
) -> None:
    """Open a model from the disk; refuse it unless it scores on a few items what was recorded."""
    found = np.asarray(measure(open_model_under_test(folder)), float)
    expected = np.asarray(recorded, float)
    if found.shape == expected.shape and np.allclose(found, expected, TOLERANCE, TOLERANCE):
        return
    hint = "nothing is handed over; check the disk and the memory of this machine, run it again"
    nats = f"{found.sum():.6g} nats on {len(expected)} items, {expected.sum():.6g} were recorded"
    raise PhaseFailed(f"{folder} does not score what was measured: {nats}", hint=hint)


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


def variants(example: Example) -> Iterator[Example]:
    """The example itself, then with each wrong choice, once, as its answer."""
    yield example
    last = reply_of(example)
    for choice in dict.fromkeys(example.choices):
        if choice != example.completion:
            turns = [dict(message) for message in example.messages]
            if last is not None:
                turns[last]["content"] = choice
            yield replace(example, completion=choice, messages=tuple(turns))


def by_example(prepared: TokenizedDomain, by_item: ItemScores) -> ItemScores:
    """Scores of items joined to those of answers, and these to those of examples."""
    of = prepared.answer_of
    tokens = np.bincount(of, by_item.tokens)
    loss = np.bincount(of, by_item.loss)
    steps = np.bincount(of, np.multiply(by_item.steps, by_item.tokens)) / tokens
    exact = np.bincount(of, np.logical_not(by_item.right)) == 0
    first = prepared.right_answers
    a_byte = loss / prepared.sizes
    likelier = np.add.reduceat(a_byte <= a_byte[first][prepared.example_of], first, dtype=int)
    alone = np.diff(first, append=len(a_byte)) == 1
    right = np.where(alone, exact[first], likelier == 1)
    columns = (right, loss[first], tokens[first].astype(int), steps[first])
    return ItemScores(*(column.tolist() for column in columns))
