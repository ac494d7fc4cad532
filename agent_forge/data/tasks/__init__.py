"""Generated tasks with exact verifiers, at levels 1 to 100; nothing is downloaded.

The splits (`train`, `selection`, `verdict`) share no operands, and no wordings where a family has
any. Words, templates and wordings are in .json files; families.json lists the families in order.
base.py says what a task and a family are, verifiers.py what is forgiven; the rest are families.
"""

import hashlib
from collections.abc import Callable
from importlib import import_module
from random import Random

from agent_forge.config.load import did_you_mean
from agent_forge.data.dataset_rows import Example
from agent_forge.data.tasks.base import DESCRIPTIONS, MAX_LEVEL, SPLITS, Size, Task, TaskFamily
from agent_forge.errors import ConfigError

__all__ = ["DOMAINS", "FAMILIES", "SPLITS", "Size", "Task", "TaskFamily"]
__all__ += ["as_example", "is_right", "make"]

Run = Callable[[str, tuple[str, ...]], bool]  # (source, tests): whether every test passes

_MODULES = ["symbols", "arithmetic", "word_problems", "memory", "common_sense", "code"]
_MODULES += ["structured", "multilingual", "stories", "reasoning"]
_LOADED = (import_module(f"{__name__}.{name}") for name in _MODULES)
_BY_NAME = {family.name: family for module in _LOADED for family in module.FAMILIES}
FAMILIES: dict[str, TaskFamily] = {name: _BY_NAME[name] for name in DESCRIPTIONS}  # in that order
DOMAINS: dict[str, tuple[str, ...]] = {
    domain: tuple(f.name for f in FAMILIES.values() if f.domain == domain)
    for domain in dict.fromkeys(f.domain for f in FAMILIES.values())
}
Level = int | tuple[int, int]  # one, or a range


def make(
    family: str, split: str, index: int, *, seed: int = 0, level: Level = (1, MAX_LEVEL)
) -> Task:
    """Item number `index` of a split, at one level or at a level drawn evenly from a range."""
    low, high = (level, level) if isinstance(level, int) else level
    if family not in FAMILIES:
        hint = did_you_mean(family, list(FAMILIES)).removeprefix("; ")
        raise ConfigError(f"no task family is called {family!r}", hint=hint)
    if split not in SPLITS:
        raise ConfigError(f"no split is called {split!r}", hint=f"one of {', '.join(SPLITS)}")
    if not 1 <= low <= high <= MAX_LEVEL:
        hint = f"levels go from 1 to {MAX_LEVEL}"
        raise ConfigError(f"levels {low} to {high} are no range", hint=hint)
    digest = hashlib.sha256(f"{family}/{split}/{index}/{seed}/{low}-{high}".encode()).digest()
    rng = Random(int.from_bytes(digest[:8], "little"))
    return FAMILIES[family].generate(low if low == high else rng.randint(low, high), split, rng)


def is_right(task: Task, text: str, run: Run | None = None) -> bool:
    """True if `text` is a right answer; only `run` ever executes code, against the tests."""
    accept = FAMILIES[task.family].accept
    if accept is not None:
        return accept(task, text)
    if run is None:
        raise ValueError(f"an answer to {task.family!r} is code: pass run=, which executes it")
    return run(text, task.tests)


def as_example(task: Task) -> Example:
    """A task as a turn of a chat; a story as running text."""
    if task.family == "story":
        return Example("", f"{task.question} {task.answer}", task.family)
    texts = {"user": task.question, "assistant": task.answer}
    turns = tuple({"role": role, "content": text} for role, text in texts.items())
    return Example(task.question, task.answer, task.family, messages=turns)
