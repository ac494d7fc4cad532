"""What a phase learns from and is measured on: generated tasks, texts, real datasets, own files.

Everything is a function of the settings, so a resumed run has the same corpus. A dataset that is
wanted and not there is named, and generated tasks of its category take its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agent_forge.config.settings import ModelSettings
from agent_forge.data import baselines, datasets, tasks
from agent_forge.data.dataset_rows import Example
from agent_forge.data.loader import Curriculum, CurriculumStage, TokenizedDataset, TokenizedItem
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.train.config import DOMAINS, CorpusSettings

log = logging.getLogger(__name__)
TEXT = "text"  # what belongs to no domain: all learn it
DOMAIN_OF_CATEGORY = {
    "math": "reasoning",
    "code": "reasoning",
    "qa": "memory",
    "lang": TEXT,
    "cs": "adaptive",
    "own": TEXT,
}
STAGES = ((0.3, 1), (0.3, 2), (0.4, 3))  # of the curriculum: share of the steps, number
TOKENIZER_TEXTS = 20_000
SELECTION_ITEMS = 300
HELD_OUT_ITEMS = 100  # of each domain, for evaluations during training
Items = dict[str, list[TokenizedItem]]  # by domain


@dataclass
class CorpusPart:
    """A source of examples: its domain, and the stage of the curriculum at which it comes in."""

    name: str
    domain: str
    stage: int
    examples: list[Example]


@dataclass
class Corpus:
    """Tokens to learn from, and unseen items to be measured on, by domain."""

    settings: CorpusSettings
    tokenizer: Tokenizer
    sources: list[TokenizedDataset]
    parts: list[CorpusPart]
    selection: Items  # for choices: thresholds, early stop
    verdict: Items  # for the verdict, never for a choice
    unseen: dict[str, list[tasks.Task]]  # the tasks behind `verdict`
    seen: dict[str, list[tasks.Task]]  # tasks like those that were learned
    missing: list[str] = field(default_factory=list)

    @property
    def held_out(self) -> list[TokenizedItem]:
        """A few items of every domain that are not trained on, for evaluations on the way."""
        return [item for domain in DOMAINS for item in self.selection[domain][:HELD_OUT_ITEMS]]

    def curriculum(self) -> Curriculum:
        """Three stages: a part comes in at its own and stays at half of its weight."""
        length = self.settings.row_tokens
        return Curriculum([CurriculumStage(s, self._stage_mix(n), length) for s, n in STAGES])

    def constant(self, mix: dict[str, float]) -> Curriculum:
        """A curriculum of one stage."""
        return Curriculum([CurriculumStage(1.0, mix, self.settings.row_tokens)])

    def mix(self, domain: str = "", own_share: float = 0.0) -> dict[str, float]:
        """The mixture of the last stage; `own_share` of it is replaced by one domain alone."""
        mix = {name: (1 - own_share) * w for name, w in self._stage_mix(3).items()}
        own = [part.name for part in self.parts if part.domain == domain]
        for name in own:
            mix[name] = mix.get(name, 0.0) + own_share / len(own)
        return mix

    def baselines(self) -> dict[str, float]:
        """What guessing would reach on the unseen items, by the names of the metrics."""
        values = {}
        for domain in DOMAINS:
            seen, unseen = self.seen[domain], self.unseen[domain]
            values[f"baseline/majority/{domain}"] = baselines.majority(seen, unseen)
            values[f"baseline/ngram/{domain}"] = baselines.ngram(seen, unseen)
        return values

    def _stage_mix(self, stage: int) -> dict[str, float]:
        """Weights that add up to 1: text has its share, the domains share the rest evenly."""
        text_share = self.settings.text_share
        mix: dict[str, float] = {}
        domains = list(dict.fromkeys(part.domain for part in self.parts))
        tasked = [domain for domain in domains if domain != TEXT]
        for domain in domains:
            weight = text_share if domain == TEXT else (1 - text_share) / len(tasked)
            there = [p for p in self.parts if p.domain == domain and p.stage <= stage]
            there = there or [p for p in self.parts if p.domain == domain]
            raw = {p.name: 1.0 if p.stage == stage else 0.5 for p in there}
            mix |= {name: weight * value / sum(raw.values()) for name, value in raw.items()}
        return mix


def validate_corpus(settings: CorpusSettings) -> None:
    """Refuse what cannot be learned from, before any work."""
    datasets.missing(settings.datasets, Path(settings.data_dir))
    _families(settings, [])
    _own_parts(settings)


def build_corpus(
    settings: CorpusSettings, model: ModelSettings, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Everything to learn from and to be measured on. Without a tokenizer, one is trained on it."""
    folder = Path(settings.data_dir)
    missing = datasets.missing(settings.datasets, folder)
    families = _families(settings, missing)
    parts = [*_task_parts(settings, families), *_real_parts(settings, folder, missing)]
    tokenizer = tokenizer or Tokenizer.train(_sample(parts), model.vocab_size)
    tokenizer.fits(model)
    sources = [TokenizedDataset(p.name, *datasets.tokenise(tokenizer, p.examples)) for p in parts]
    measured = {d: [f for f in families if tasks.FAMILIES[f].domain == d] for d in DOMAINS}
    if not all(measured.values()):
        raise ConfigError(
            f"no family of tasks for {', '.join(d for d, f in measured.items() if not f)}",
            hint="the setting `families` needs at least one of each domain",
        )
    count = settings.evaluation_items
    few = min(count, SELECTION_ITEMS)
    selection = {d: _tasks(f, "selection", few, settings) for d, f in measured.items()}
    unseen = {d: _tasks(f, "verdict", count, settings) for d, f in measured.items()}
    return Corpus(
        settings,
        tokenizer,
        sources,
        parts,
        {d: _items(tokenizer, found) for d, found in selection.items()},
        {d: _items(tokenizer, found) for d, found in unseen.items()},
        unseen,
        {d: _tasks(f, "train", count, settings) for d, f in measured.items()},
        missing,
    )


def _items(tokenizer: Tokenizer, found: Sequence[tasks.Task]) -> list[TokenizedItem]:
    """Tasks as token ids of which the answer is asked for."""
    documents, masks = datasets.tokenise(tokenizer, (tasks.as_example(task) for task in found))
    return [TokenizedItem(ids, asked) for ids, asked in zip(documents, masks, strict=True)]


def _families(settings: CorpusSettings, missing: list[str]) -> list[str]:
    """The families asked for or the learnable ones, and stand-ins for what is missing."""
    known = settings.families or [n for n, f in tasks.FAMILIES.items() if f.learnable]
    for name in known:
        tasks.make(name, "train", 0)  # refuses an unknown name
    families = list(known)
    for name in missing:
        category = datasets.find(name).category
        stand_in = [n for n, f in tasks.FAMILIES.items() if f.category == category]
        text = "dataset %s is not in %s: generated tasks stand in for it (%s)"
        log.warning(text, name, settings.data_dir, ", ".join(stand_in))
        families += [n for n in stand_in if n not in families]
    return families


def _task_parts(settings: CorpusSettings, families: Iterable[str]) -> list[CorpusPart]:
    """Each family in three parts of rising level, one for each stage of the curriculum."""
    parts = []
    for name in [*families, "story"] if "story" not in families else families:
        family = tasks.FAMILIES[name]
        domain = family.domain if family.domain in DOMAINS else TEXT
        for stage, (low, high) in enumerate(_bands(settings.max_level), start=1):
            numbers = range(settings.items_per_family // 3)
            made = [tasks.make(name, "train", i, level=(low, high)) for i in numbers]
            examples = [tasks.as_example(task) for task in made]
            parts.append(CorpusPart(f"{name}.{stage}", domain, stage, examples))
    return parts


def _bands(highest: int) -> list[tuple[int, int]]:
    """Levels in three bands, the last up to the highest."""
    cuts = [1, 1 + highest // 3, 1 + 2 * highest // 3, highest + 1]
    return [(low, max(low, high - 1)) for low, high in pairwise(cuts)]


def _real_parts(settings: CorpusSettings, folder: Path, missing: list[str]) -> list[CorpusPart]:
    """The datasets that are there, and the user's own files."""
    parts, by = [], settings.split_by
    for name in settings.datasets:
        if name not in missing:
            found = datasets.find(name)
            examples = list(datasets.read(name, folder, split="train", split_by=by))
            domain = DOMAIN_OF_CATEGORY[found.category]
            parts.append(CorpusPart(name, domain, found.stage, examples))
    return [*parts, *_own_parts(settings)]


def _own_parts(settings: CorpusSettings) -> list[CorpusPart]:
    parts, by = [], settings.split_by
    for text in settings.texts:
        examples = list(datasets.read_own(Path(text), split="train", split_by=by))
        if not examples:
            raise ConfigError(f"{text} has no examples to train on")
        parts.append(CorpusPart(Path(text).stem, TEXT, 1, examples))
    return parts


def _tasks(
    families: Sequence[str], split: str, count: int, settings: CorpusSettings
) -> list[tasks.Task]:
    """So many tasks of a split, the families in turn."""
    levels = (1, settings.max_level)
    return [tasks.make(families[i % len(families)], split, i, level=levels) for i in range(count)]


def _sample(parts: Sequence[CorpusPart]) -> Iterable[str]:
    """Texts for the tokenizer: evenly from all parts."""
    each = max(1, TOKENIZER_TEXTS // len(parts))
    for part in parts:
        step = max(1, len(part.examples) // each)
        for example in part.examples[::step]:
            yield f"{example.prompt} {example.completion}"
