"""How coherent a thought is with what it is about: four scores from 0 to 1 and their weighted mean.

semantic   how near thought and question are: the cosine of their mean token vectors in a frozen
           network, or of what a sentence model makes of them
logical    the share of claims that hold, by the item itself or by arithmetic; 0.5 if none can be
           checked
relevance  the share of the question's symbols that the thought takes up
fluency    how likely the frozen network finds the thought: exp(-nats a token)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from agent_forge.data import traces
from agent_forge.data.loader import TokenizedItem
from agent_forge.data.tasks import Task
from agent_forge.data.tasks.reasoning import ADVANCE
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.evals.model_under_test import measure
from agent_forge.infer.thinking import BEGIN, END, shown
from agent_forge.model.network import ForgeNetwork

WEIGHTS = {"semantic": 0.30, "logical": 0.30, "relevance": 0.25, "fluency": 0.15}
VALID = 0.70  # coherence from which on a thought counts as valid
UNCHECKED = 0.5
Vectors = NDArray[np.float64]
Embed = Callable[[Sequence[str]], Vectors]  # texts to one vector each, as sentence models do
Scores = dict[str, float]


@dataclass(frozen=True)
class CoherenceValidator:
    """Scores thoughts. `embed` replaces the network's own vectors for the semantic score."""

    network: ForgeNetwork
    tokenizer: Tokenizer
    embed: Embed | None = None

    def validate_thought(
        self, thought: str, context: str, task: Task | None = None
    ) -> tuple[float, Scores]:
        """The coherence of one thought about a question, and its four scores."""
        strategy, claims = traces.parse(thought)
        tag = [traces.TAGS[strategy]] if strategy in traces.TAGS else []
        ids = [i for text in claims or (thought,) for i in (*tag, *self.tokenizer.encode(text))]
        scores = self.validate([context], [ids], [task])[0]
        return coherence(scores), scores

    def validate(
        self,
        questions: Sequence[str],
        thoughts: Sequence[Sequence[int]],
        tasks: Sequence[Task | None],
    ) -> list[Scores]:
        """The four scores of many thoughts."""
        asked = self.tokenizer.encode_batch(questions)
        columns = {
            "semantic": self._semantic(questions, asked, thoughts),
            "logical": [self._logical(*pair) for pair in zip(thoughts, tasks, strict=True)],
            "relevance": [_relevance(*pair) for pair in zip(asked, thoughts, strict=True)],
            "fluency": self._fluency(questions, thoughts),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _semantic(
        self,
        questions: Sequence[str],
        asked: Sequence[Sequence[int]],
        thoughts: Sequence[Sequence[int]],
    ) -> list[float]:
        if self.embed:
            texts = [shown(self.tokenizer, thought) for thought in thoughts]
            a, b = self.embed(questions), self.embed(texts)
        else:
            a, b = self._means(asked), self._means(thoughts)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = (a * b).sum(1) / np.maximum(norms, 1e-12)
        return np.clip(cosines, 0.0, 1.0).tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _means(self, rows: Sequence[Sequence[int]]) -> Vectors:
        """The mean vector of each row's tokens; of an empty one nothing."""
        table = self.network.embedding.weight.double().cpu().numpy()
        return np.stack([table[list(row)].mean(0) if row else 0 * table[0] for row in rows])

    def _logical(self, thought: Sequence[int], task: Task | None) -> float:
        strategy, claims = traces.parse(shown(self.tokenizer, thought, specials=True))
        if task is None or task.family not in ADVANCE:
            return _arithmetic(shown(self.tokenizer, thought))
        if not claims or task.family not in traces.ABOUT[strategy].families:
            return 0.0
        own = traces.Trace(task, strategy, claims)
        claims, wanted = map(traces.steady, (own, traces.write_trace(task, strategy, Random(0))))
        held = sum(a == b for a, b in zip(claims, wanted, strict=False))
        return held / max(len(claims), len(wanted), 1)

    def _fluency(self, questions: Sequence[str], thoughts: Sequence[Sequence[int]]) -> list[float]:
        turns = [[{"role": "user", "content": question}] for question in questions]
        items = []
        for turn, thought in zip(turns, thoughts, strict=True):
            given = [*self.tokenizer.encode_chat(turn, reply=True), BEGIN]
            mask = [False] * len(given) + [True] * (len(thought) + 1)
            items.append(TokenizedItem([*given, *thought, END], mask))
        scores = measure(self.network, items, threshold=1.0)
        return [float(np.exp(-a / n)) for a, n in zip(scores.loss, scores.tokens, strict=True)]


def coherence(scores: Scores) -> float:
    """The weighted mean of the four scores."""
    return sum(weight * scores[name] for name, weight in WEIGHTS.items())


def _relevance(question: Sequence[int], thought: Sequence[int]) -> float:
    symbols = set(question)
    return len(symbols & set(thought)) / max(1, len(symbols))


def _arithmetic(text: str) -> float:
    found = [traces.equation_holds(match) for match in traces.ARITHMETIC.finditer(text)]
    return sum(found) / len(found) if found else UNCHECKED
