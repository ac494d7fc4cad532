"""What is taught about thinking: thoughts of every strategy, direct answers, pauses, and shares."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agent_forge.config.load import validate
from agent_forge.data import tasks, traces
from agent_forge.data.datasets import tokenise
from agent_forge.data.loader import (
    Curriculum,
    CurriculumStage,
    TokenizedDataset,
    TokenizedItem,
)
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.data.traces import Trace
from agent_forge.errors import ConfigError
from agent_forge.infer.thinking import BEGIN, END
from agent_forge.train.config import STEP, CorpusSettings, LessonSettings
from agent_forge.train.corpus import Corpus

log = logging.getLogger(__name__)
DIRECT, PAUSED, UNCERTAIN = "direct answers", "pauses", "uncertain"
Sure = Mapping[tuple[str, int], int]  # (family, level) -> how sure the model may be, 0 to 9


@dataclass(frozen=True)
class Lessons:
    """The new things to learn, as token documents, and their shares of a batch."""

    settings: LessonSettings
    traces: dict[str, list[Trace]]  # by strategy
    tokenizer: Tokenizer

    def sources(self) -> list[TokenizedDataset]:
        """Thoughts by strategy, and direct answers to the same items."""
        found = [self._thoughts(name, own) for name, own in self.traces.items()]
        return [*found, self.direct()]

    def direct(self) -> TokenizedDataset:
        examples = map(tasks.as_example, (trace.task for trace in self._every()))
        return TokenizedDataset(DIRECT, *tokenise(self.tokenizer, examples))

    def paused(self) -> TokenizedDataset:
        """The same items with as many dots as the thought has tokens; only answers are learned."""
        documents, masks = [], []
        for trace in self._every():
            ids, said = self.tokenizer.chat(tasks.as_example(trace.task).messages)
            start = said.index(True)
            dots = pauses(self.tokenizer, trace)
            documents.append([*ids[:start], BEGIN, *dots, END, *ids[start:]])
            masks.append([False] * (start + len(dots) + 2) + list(said[start:]))
        return TokenizedDataset(PAUSED, documents, masks)

    def curriculum(self, corpus: Corpus, strategies: Sequence[str]) -> Curriculum:
        """Easy strategies first, then all, beside the old tasks."""
        easy = [name for name in strategies if traces.ABOUT[name].easy]
        first, length = self.settings.easy_share, self.settings.row_tokens
        parts = ((first, easy), (1 - first, strategies))
        stages = [
            CurriculumStage(share, self.mix(corpus, own), length) for share, own in parts if share
        ]
        return Curriculum(stages)

    def mix(self, corpus: Corpus, strategies: Sequence[str]) -> dict[str, float]:
        """The weights of old tasks, direct answers and each strategy; they add up to 1."""
        return {**self._replay(corpus), **self.weights(1 - self.settings.replay_share, strategies)}

    def weights(self, total: float = 1.0, strategies: Sequence[str] = ()) -> dict[str, float]:
        """The weights of direct answers and each strategy, all or some, which add up to `total`."""
        direct = self.settings.direct_share
        shares = strategy_shares(self.settings, strategies or [*self.traces])
        thoughts = {name: total * (1 - direct) * share for name, share in shares.items()}
        return {DIRECT: total * direct, **thoughts}

    def control_mix(self, corpus: Corpus, name: str) -> dict[str, float]:
        """Old tasks as before, and one source instead of the thoughts."""
        return {**self._replay(corpus), name: 1 - self.settings.replay_share}

    def _replay(self, corpus: Corpus) -> dict[str, float]:
        share = self.settings.replay_share
        return {name: share * weight for name, weight in corpus.mix().items()} if share else {}

    def _every(self) -> list[Trace]:
        return [trace for own in self.traces.values() for trace in own]

    def _thoughts(self, name: str, own: Sequence[Trace]) -> TokenizedDataset:
        items = [trace_item(self.tokenizer, trace) for trace in own]
        longest = max(len(item.ids) for item in items)
        if longest >= self.settings.row_tokens:
            problem = f"a thought of the strategy {name} has {longest} tokens with its question"
            hint = f"row_tokens={longest + 1} of the phase, or lower levels"
            raise ConfigError(f"{problem}, more than fit a row", hint=hint)
        return TokenizedDataset(name, [i.ids for i in items], [i.asked for i in items])

    def held_out(self, count: int, split: str = "selection") -> list[TokenizedItem]:
        """Thoughts about items that are not taught: for evaluations during training, or others."""
        found = []
        for i in range(count):
            family = list(self.settings.ranges)[i % len(self.settings.ranges)]
            task = tasks.make(family, split, i, level=self.settings.ranges[family])
            found.append(trace_item(self.tokenizer, traces.write_trace(task, STEP, Random(i))))
        return found


def trace_item(tokenizer: Tokenizer, trace: Trace) -> TokenizedItem:
    """A thought with its question and answer as token ids; what is learned is asked for."""
    ids: list[int] = []
    asked: list[bool] = []
    for part, learned in zip(*traces.document(trace), strict=True):
        piece = tokenizer.encode(part) if isinstance(part, str) else [part]
        ids += piece
        asked += [learned] * len(piece)
    return TokenizedItem(ids, asked)


def strategy_shares(settings: LessonSettings, strategies: Sequence[str]) -> dict[str, float]:
    """How the thoughts are shared out: `step` has its share, the others share the rest evenly."""
    others = [name for name in strategies if name != STEP]
    step = (settings.step_share if others else 1.0) if STEP in strategies else 0.0
    shares = {name: (1 - step) / len(others) for name in others}
    return {**shares, STEP: step} if STEP in strategies else shares


def pauses(tokenizer: Tokenizer, trace: Trace) -> list[int]:
    """Dots in the number of the thought's tokens."""
    return tokenizer.encode(".") * len(tokenizer.compose(*trace.parts()))


def write_lessons(
    settings: LessonSettings, tokenizer: Tokenizer, seed: int, sure: Sure | None = None
) -> Lessons:
    """Thoughts of the settings' strategies, from templates and from the user's files. `uncertain`
    ones need to know how sure the model is: without it there are none."""
    taught = [name for name in settings.strategies if name != UNCERTAIN or sure is not None]
    found: dict[str, list[Trace]] = {}
    for name, share in strategy_shares(settings, taught).items():
        count = max(1, round(share * settings.examples))
        how: dict[str, Any] = {"seed": seed, "sure": sure, "turns": settings.turns}
        found[name] = list(traces.write_traces(name, count, settings.ranges, **how))
    for trace in own_traces(settings):
        found[trace.strategy].append(trace)
    return Lessons(settings, found, tokenizer)


def lessons_of_record(
    settings: CorpusSettings,
    record: Mapping[str, Any],
    tokenizer: Tokenizer,
    seed: int,
    **others: Any,
) -> Lessons | None:
    """What a model has learned about thinking, as its record says, to be taught on; None if it has
    learned nothing. `others` are settings of the lessons that a phase has no field for."""
    taught = [name for name in record.get("strategies", {}) if name != UNCERTAIN]
    if not taught or not record.get("levels"):
        return None
    own = settings.model_dump(include=set(LessonSettings.model_fields))
    own |= {"strategies": taught, "levels": record["levels"], **others}
    return write_lessons(validate(LessonSettings, own, "the record of the model"), tokenizer, seed)


def own_traces(settings: LessonSettings) -> list[Trace]:
    """The thoughts of the user's files that are of strategies which are taught; how sure a model
    is cannot be read from a file."""
    taught = set(settings.strategies) - {UNCERTAIN}
    found = []
    for path in map(Path, settings.traces):
        own = traces.read_traces(path)
        kept = [trace for trace in own if trace.strategy in taught]
        if not kept:
            hint = f"give some of {', '.join(sorted(taught))}, or teach more strategies"
            raise ConfigError(f"{path} has no thoughts of a strategy that is taught", hint=hint)
        if others := sorted({trace.strategy for trace in own} - taught):
            count, names = len(own) - len(kept), ", ".join(others)
            log.warning("%s: %d thoughts of %s are left out: not taught", path, count, names)
        found += kept
    return found


def unseen_items(
    settings: LessonSettings, split: str, count: int, levels: traces.Levels | None = None
) -> list[tasks.Task]:
    """Items of a split: so many of each family, each once where there are enough; of the families
    that are taught, or of others."""
    found: dict[tuple[str, str], tasks.Task] = {}
    for family, level in (levels or settings.ranges).items():
        wanted = len(found) + count
        for i in range(5 * count):
            task = tasks.make(family, split, i, level=level)
            found.setdefault((family, task.operands), task)
            if len(found) == wanted:
                break
    return list(found.values())


def items_of(strategy: str, items: Sequence[tasks.Task]) -> list[tasks.Task]:
    """The items that a strategy is for."""
    families = traces.families_of(strategy, dict.fromkeys(item.family for item in items))
    return [item for item in items if item.family in families]


def spread(items: Sequence[tasks.Task], count: int) -> list[tasks.Task]:
    """So many items from all over a list, at most."""
    return list(items)[:: max(1, len(items) // count)][:count]
