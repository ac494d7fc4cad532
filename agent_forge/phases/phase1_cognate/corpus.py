"""What Phase 1 learns from: generated tasks, stories, and real datasets where there are any.

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
from agent_forge.data import datasets, tasks
from agent_forge.data.loader import Curriculum, CurriculumStage, TokenizedDataset
from agent_forge.data.readers import Example
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError
from agent_forge.evals.likelihood import TokenizedItem
from agent_forge.phases.phase1_cognate.config import DOMAINS, CognateSettings

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


@dataclass
class CorpusPart:
    """A source of examples: what it is for and when it comes in."""

    name: str
    domain: str
    stage: int
    examples: list[Example]


@dataclass
class Corpus:
    """Tokens to learn from, and unseen items to be measured on, by domain."""

    tokenizer: Tokenizer
    sources: list[TokenizedDataset]
    parts: list[CorpusPart]
    selection: dict[str, list[TokenizedItem]]
    verdict: dict[str, list[TokenizedItem]]
    unseen: dict[str, list[tasks.Task]]  # the tasks behind `verdict`
    seen: dict[str, list[tasks.Task]]  # tasks like those that were learned
    missing: list[str] = field(default_factory=list)

    def curriculum(self, text_share: float, length: int) -> Curriculum:
        """Three stages: a part comes in at its own and stays at half of its weight."""
        stages = [
            CurriculumStage(
                share, self._mix(text_share, number), length, tuple(range(1, number + 1))
            )
            for share, number in STAGES
        ]
        return Curriculum(stages)

    def mix(self, domain: str, own_share: float, text_share: float) -> dict[str, float]:
        """What a specialist learns from: mostly its own domain, the rest as the trunk did."""
        mix = {name: (1 - own_share) * w for name, w in self._mix(text_share, 3).items()}
        own = [part.name for part in self.parts if part.domain == domain]
        for name in own:
            mix[name] = mix.get(name, 0.0) + own_share / len(own)
        return mix

    def _mix(self, text_share: float, stage: int) -> dict[str, float]:
        """Weights that add up to 1: text has its share, the domains share the rest evenly."""
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


def validate_corpus(settings: CognateSettings) -> None:
    """Refuse what cannot be learned from, before any work."""
    datasets.missing(settings.datasets, Path(settings.data_dir))
    _families(settings, [])
    _own_parts(settings)


def build_corpus(settings: CognateSettings, model: ModelSettings) -> Corpus:
    """Everything that Phase 1 learns from, and is measured on."""
    folder = Path(settings.data_dir)
    missing = datasets.missing(settings.datasets, folder)
    families = _families(settings, missing)
    parts = [*_task_parts(settings, families), *_real_parts(settings, folder, missing)]
    tokenizer = Tokenizer.train(_sample(parts), model.vocab_size)
    tokenizer.fits(model)
    sources = [TokenizedDataset(p.name, *datasets.tokenise(tokenizer, p.examples)) for p in parts]
    measured = {d: [f for f in families if tasks.FAMILIES[f].domain == d] for d in DOMAINS}
    if not all(measured.values()):
        raise ConfigError(
            f"no family of tasks for {', '.join(d for d, f in measured.items() if not f)}",
            hint="phases.cognate.families needs at least one of each domain",
        )
    count = settings.evaluation_items
    verdict = {d: _tasks(f, "verdict", count, settings) for d, f in measured.items()}
    few = min(count, SELECTION_ITEMS)
    selection = {d: _tasks(f, "selection", few, settings) for d, f in measured.items()}
    return Corpus(
        tokenizer,
        sources,
        parts,
        {d: items(tokenizer, found) for d, found in selection.items()},
        {d: items(tokenizer, found) for d, found in verdict.items()},
        verdict,
        {d: _tasks(f, "train", count, settings) for d, f in measured.items()},
        missing,
    )


def items(tokenizer: Tokenizer, found: Sequence[tasks.Task]) -> list[TokenizedItem]:
    """Tasks as token ids of which the answer is asked for."""
    documents, masks = datasets.tokenise(tokenizer, (tasks.as_example(task) for task in found))
    return [TokenizedItem(ids, asked) for ids, asked in zip(documents, masks, strict=True)]


def _families(settings: CognateSettings, missing: list[str]) -> list[str]:
    """The families asked for or the learnable ones, and stand-ins for what is missing."""
    known = settings.families or [n for n, f in tasks.FAMILIES.items() if f.learnable]
    for name in known:
        tasks.make(name, "train", 0)  # refuses an unknown name
    families = list(known)
    for name in missing:
        category = datasets.find(name).category
        stand_in = [n for n, f in tasks.FAMILIES.items() if f.category == category]
        log.warning(
            "dataset %s is not in %s: generated tasks stand in for it (%s)",
            name,
            settings.data_dir,
            ", ".join(stand_in),
        )
        families += [n for n in stand_in if n not in families]
    return families


def _task_parts(settings: CognateSettings, families: Iterable[str]) -> list[CorpusPart]:
    """Each family in three parts of rising level, one for each stage of the curriculum."""
    parts = []
    for name in [*families, "story"] if "story" not in families else families:
        family = tasks.FAMILIES[name]
        domain = family.domain if family.domain in DOMAINS else TEXT
        for stage, (low, high) in enumerate(_bands(settings.max_level), start=1):
            count = settings.items_per_family // 3
            made = [
                tasks.as_example(tasks.make(name, "train", i, level=(low, high)))
                for i in range(count)
            ]
            parts.append(CorpusPart(f"{name}.{stage}", domain, stage, made))
    return parts


def _bands(highest: int) -> list[tuple[int, int]]:
    """Levels in three bands, the last up to the highest."""
    cuts = [1, 1 + highest // 3, 1 + 2 * highest // 3, highest + 1]
    return [(low, max(low, high - 1)) for low, high in pairwise(cuts)]


def _real_parts(settings: CognateSettings, folder: Path, missing: list[str]) -> list[CorpusPart]:
    """The datasets that are there, and the user's own files."""
    parts = []
    for name in settings.datasets:
        if name not in missing:
            found = datasets.find(name)
            examples = list(datasets.read(name, folder, split="train"))
            domain = DOMAIN_OF_CATEGORY[found.category]
            parts.append(CorpusPart(name, domain, found.stage, examples))
    return [*parts, *_own_parts(settings)]


def _own_parts(settings: CognateSettings) -> list[CorpusPart]:
    parts = []
    for text in settings.texts:
        examples = list(datasets.read_own(Path(text), split="train"))
        if not examples:
            raise ConfigError(f"{text} has no examples to train on")
        parts.append(CorpusPart(Path(text).stem, TEXT, 1, examples))
    return parts


def _tasks(
    families: Sequence[str], split: str, count: int, settings: CognateSettings
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
