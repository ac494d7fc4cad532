"""What a phase learns from and is measured on: generated tasks, texts, real datasets, own files.

It is a function of the settings alone. Generated tasks stand in for a dataset that is missing.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agent_forge.config.settings import ModelSettings
from agent_forge.data import baselines, datasets, tasks
from agent_forge.data.dataset_rows import Example
from agent_forge.data.loader import Curriculum, CurriculumStage, TokenizedDataset, TokenizedItem
from agent_forge.data.near_copies import question_hash
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.train.config import DOMAINS, CorpusSettings

log = logging.getLogger(__name__)
TEXT = "text"  # what belongs to no domain: all learn it
DOMAIN_OF_CATEGORY = {"math": "reasoning", "code": "reasoning", "qa": "memory", "cs": "adaptive"}
DOMAIN_OF_CATEGORY["lang"] = TEXT
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


def validate_corpus(settings: CorpusSettings, others: Iterable[str] = ()) -> None:
    """Refuse what cannot be learned from, before any work. Other sources are called `others`."""
    datasets.missing(settings.datasets, Path(settings.data_dir))
    families = _families(settings, [])
    taken = {*others, *settings.datasets, *(p.name for p in _task_parts(settings, families, 0))}
    for part in _own_parts(settings):
        if part.name in taken:
            problem = f"texts: a file is called {part.name!r}, as something else to learn from is"
            raise ConfigError(problem, hint="give it another name")
        taken.add(part.name)


def build_corpus(
    settings: CorpusSettings,
    model: ModelSettings,
    tokenizer: Tokenizer | None = None,
    measured: Iterable[tasks.Task] = (),
) -> Corpus:
    """Everything to learn from and to be measured on. Without a tokenizer, one is trained on it.
    What `measured` items ask is not learned from the user's own texts."""
    folder = Path(settings.data_dir)
    missing = datasets.missing(settings.datasets, folder)
    families = _families(settings, missing)
    of_domain = {d: [f for f in families if tasks.FAMILIES[f].domain == d] for d in DOMAINS}
    if not all(of_domain.values()):
        lacking = ", ".join(domain for domain, names in of_domain.items() if not names)
        hint = "the setting `families` needs at least one of each domain"
        raise ConfigError(f"no family of tasks for {lacking}", hint=hint)
    count = settings.evaluation_items
    few = min(count, SELECTION_ITEMS)
    seen, selection, unseen = (
        {d: _tasks(f, split, size, settings.max_level) for d, f in of_domain.items()}
        for split, size in (("train", count), ("selection", few), ("verdict", count))
    )
    parts = _task_parts(settings, families)
    for name in settings.datasets:
        if name not in missing:
            dataset = datasets.find(name)
            examples = list(datasets.read(name, folder, split="train", split_by=settings.split_by))
            domain = DOMAIN_OF_CATEGORY[dataset.category]
            parts.append(CorpusPart(name, domain, dataset.stage, examples))
    asked = [t for found in (selection, unseen) for own in found.values() for t in own]
    parts += _own_parts(settings, [*measured, *asked])
    tokenizer = tokenizer or Tokenizer.train(_sample(parts), model.vocab_size)
    tokenizer.fits(model)
    sources = [TokenizedDataset(p.name, *datasets.tokenise(tokenizer, p.examples)) for p in parts]
    few_items, items = _items(tokenizer, selection), _items(tokenizer, unseen)
    return Corpus(settings, tokenizer, sources, parts, few_items, items, unseen, seen, missing)


def _items(tokenizer: Tokenizer, by_domain: dict[str, list[tasks.Task]]) -> Items:
    """Tasks as token ids of which the answer is asked for."""
    items: Items = {}
    for domain, found in by_domain.items():
        documents, masks = datasets.tokenise(tokenizer, map(tasks.as_example, found))
        items[domain] = list(map(TokenizedItem, documents, masks))
    return items


def _families(settings: CorpusSettings, missing: list[str]) -> list[str]:
    """The families asked for or the learnable ones, and stand-ins for what is missing."""
    families = list(settings.families or (n for n, f in tasks.FAMILIES.items() if f.learnable))
    for name in families:
        tasks.make(name, "train", 0)  # refuses an unknown name
    for name in missing:
        category = datasets.find(name).category
        stand_in = [n for n, f in tasks.FAMILIES.items() if f.category == category]
        text = "dataset %s is not in %s: generated tasks stand in for it (%s)"
        log.warning(text, name, settings.data_dir, ", ".join(stand_in))
        families += [n for n in stand_in if n not in families]
    return families


def _task_parts(
    settings: CorpusSettings, families: Iterable[str], items: int | None = None
) -> list[CorpusPart]:
    """Each family in three parts of rising level, one for each stage of the curriculum."""
    items = settings.items_per_family // 3 if items is None else items
    parts, highest = [], settings.max_level
    cuts = [1, 1 + highest // 3, 1 + 2 * highest // 3, highest + 1]
    for name in [*families, "story"] if "story" not in families else families:
        family = tasks.FAMILIES[name]
        domain = family.domain if family.domain in DOMAINS else TEXT
        for stage, (low, after) in enumerate(pairwise(cuts), start=1):
            levels = (low, max(low, after - 1))
            generated = (tasks.make(name, "train", i, level=levels) for i in range(items))
            examples = list(map(tasks.as_example, generated))
            parts.append(CorpusPart(f"{name}.{stage}", domain, stage, examples))
    return parts


def _own_parts(settings: CorpusSettings, measured: Iterable[tasks.Task] = ()) -> list[CorpusPart]:
    parts, by = [], settings.split_by
    asked = {question_hash(tasks.as_example(task)) for task in measured} if settings.texts else ()
    for text in settings.texts:
        found = datasets.read_own(Path(text), split="train", split_by=by)
        examples = [e for e in found if not asked or question_hash(e) not in asked]
        if not examples:
            raise ConfigError(f"{text} has no examples to train on")
        parts.append(CorpusPart(Path(text).stem, TEXT, 1, examples))
    return parts


def _tasks(families: list[str], split: str, count: int, highest: int) -> list[tasks.Task]:
    """So many tasks of a split, the families in turn."""
    turns = ((families[i % len(families)], split, i) for i in range(count))
    return [tasks.make(*turn, level=(1, highest)) for turn in turns]


def _sample(parts: Sequence[CorpusPart]) -> Iterable[str]:
    """Texts for the tokenizer: evenly from all parts."""
    each = max(1, TOKENIZER_TEXTS // len(parts))
    for part in parts:
        for example in part.examples[:: max(1, len(part.examples) // each)]:
            yield f"{example.prompt} {example.completion}"
