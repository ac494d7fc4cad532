"""Benchmarks (packs, as users call them): what models are measured on by name.

Without an answer format items are measured by likelihood, as choices. Of a published set the test
part is the verdict, and what a search sees comes from the rest; where a set has no parts, a hash of
each prompt decides. Worked examples before the question are of the training part, the same for all.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent_forge.config.load import did_you_mean
from agent_forge.data import datasets
from agent_forge.data.dataset_rows import Example
from agent_forge.data.tasks import Task, as_example, make
from agent_forge.data.tasks.verifiers import words
from agent_forge.errors import ConfigError, NotFound
from agent_forge.evals import benchmark_rows, domains, graders
from agent_forge.evals.domains import LEVELS, AnswerFormat, Domain, Levels, SplitBy, content_hash
from agent_forge.evals.lm_eval_harness import PREFIX as HARNESS

FOLDER = "AGENT_FORGE_DATA"  # the environment variable that names the folder of all datasets
PREFIX = "pack:"  # of a benchmark among names of tasks
BENCHMARK_ITEMS = 500  # of a generated benchmark
SEEN = 2000  # training items that a guess rests on
MATH = ("addition", "subtraction", "multiplication", "expression", "word_problem")
CODE = ("code_list", "code_string", "code_number")
LANGUAGES = ("translate", "name_languages", "choose_translation")
STRUCTURED = ("extract_field", "to_json", "to_yaml", "to_csv")
NEXT_QUESTION = ("\nQuestion:",)
NO_FUNCTION = ("\nassert", "\nprint(", "\nif __name__", '\n"""', "\n```\n")


@dataclass(frozen=True)
class Benchmark:
    """One row of the table. Where there are `families` it is generated."""

    name: str
    grade: graders.Grade = graders.same
    writing: AnswerFormat | None = None  # None: measured by likelihood
    families: tuple[str, ...] = ()
    read: Callable[[Path, str], Iterator[Example]] | None = None  # None: a dataset of that name
    shots: int = 0  # worked examples


_SHORT = AnswerFormat(64, NEXT_QUESTION)
_WORDS = AnswerFormat(32, ("\n",))
_BODY = AnswerFormat(384, ("\ndef ", "\nclass ", "\n#", *NO_FUNCTION))
_JSON = AnswerFormat(256, ("\n\nCSV",))
_TABLE = (
    Benchmark("math", graders.math, AnswerFormat(128, ("\n\n",)), MATH),
    Benchmark("code", graders.code, AnswerFormat(256, ("\n\n", *NO_FUNCTION)), CODE),
    Benchmark("multilingual", families=LANGUAGES),
    Benchmark("structured", graders.document, AnswerFormat(256, ("\n\n",)), STRUCTURED),
    Benchmark("gsm8k", graders.math, AnswerFormat(256, NEXT_QUESTION), shots=4),
    Benchmark("svamp", graders.math, _SHORT, shots=4),
    Benchmark("asdiv", graders.math, _SHORT, shots=4),
    Benchmark("mbpp", graders.code, AnswerFormat(256, NO_FUNCTION), shots=3),
    Benchmark("humaneval", graders.completed, _BODY, read=benchmark_rows.humaneval),
    *map(Benchmark, ["arc_easy", "arc_challenge", "piqa", "boolq", "hellaswag", "strategyqa"]),
    Benchmark("hotpotqa", words, _WORDS, shots=2),
    Benchmark("drop", words, _WORDS, shots=2),
    Benchmark("xcopa", read=benchmark_rows.xcopa),
    Benchmark("flores", read=benchmark_rows.flores),
    Benchmark("flores_language", read=benchmark_rows.flores_language),
    Benchmark("tatoeba", read=benchmark_rows.tatoeba),
    Benchmark("jsontestsuite", read=benchmark_rows.json_test_suite),
    Benchmark("csv_spectrum", graders.document, _JSON, read=benchmark_rows.csv_spectrum),
)
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _TABLE}


def from_benchmarks(
    names: Sequence[str],
    *,
    split: str | None = None,
    count: int | None = None,
    levels: Levels = LEVELS,
    folder: Path | None = None,
    shots: int | None = None,
    split_by: SplitBy = "prompt",
) -> list[Domain]:
    """Each benchmark as a domain; `name:part` is one part of it, such as a language of xcopa."""
    if len(set(names)) < len(names):
        raise ConfigError("a pack is given twice")
    place = folder or Path(os.environ.get(FOLDER, "data"))
    found = []
    for name in names:
        benchmark, wanted = find(name)
        seen: list[Example] = []
        if benchmark.families:
            domain, seen = _generated(benchmark, split, count or BENCHMARK_ITEMS, levels)
        elif benchmark.read:
            whole = _whole(benchmark, list(benchmark.read(place, wanted)), name)
            domain = domains.part(replace(whole, split_by=split_by), split, count)
        else:
            domain, seen = _dataset(benchmark, split, count, place, split_by)
        worked = _worked(benchmark, seen, benchmark.shots if shots is None else shots)
        shown = {content_hash(example) for example in worked}
        asked = enumerate(map(content_hash, domain.examples))
        domain = domain.select([i for i, known in asked if known not in shown])
        taken = shown | set(map(content_hash, domain.examples))
        # What guesses may rest on: nothing that is asked or shown.
        free = [] if benchmark.families else [e for e in seen if content_hash(e) not in taken]
        domain = replace(
            domain,
            name=name,
            examples=tuple(_after(worked, example) for example in domain.examples),
            writing=benchmark.writing,
            grade=benchmark.grade,
            seen=tuple(_task(benchmark, example) for example in free),
        )
        found.append(domain)
    return found


def from_names(
    names: Sequence[str], *, split: str, count: int, levels: Levels, split_by: SplitBy = "prompt"
) -> list[Domain]:
    """Generated tasks and, as `pack:NAME`, benchmarks: what the settings of an evolution name."""
    packs = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    tasks = [name for name in names if not name.startswith(PREFIX)]
    found = from_benchmarks(packs, split=split, count=count, levels=levels, split_by=split_by)
    if tasks or not packs:
        found = domains.from_tasks(tasks, split=split, count=count, levels=levels) + found
    if len({domain.name for domain in found}) < len(found):
        raise ConfigError("a pack and tasks have the same name", hint="name one of them")
    return found


def find(name: str) -> tuple[Benchmark, str]:
    """A benchmark by its name, and the part of it that is wanted."""
    stem, _, wanted = name.partition(":")
    if f"{stem}:" == HARNESS:
        hint = "forge eval has them; measure each model with it"
        problem = f"{name}: tasks of lm-eval give one score for a model, and no answers to compare"
        raise ConfigError(problem, hint=hint)
    if stem not in BENCHMARKS:
        raise ConfigError(f"no pack is called {stem!r}{did_you_mean(stem, list(BENCHMARKS))}")
    benchmark = BENCHMARKS[stem]
    if wanted and benchmark.read not in benchmark_rows.IN_PARTS:
        raise ConfigError(f"the pack {stem!r} has no parts, so {name!r} names none")
    return benchmark, wanted


def _generated(
    benchmark: Benchmark, split: str | None, count: int, levels: Levels
) -> tuple[Domain, list[Example]]:
    families = benchmark.families
    domain = domains.generated(benchmark.name, families, split or "verdict", count, levels)
    if benchmark.writing is None:
        pairs = zip(domain.examples, domain.tasks, strict=True)
        choices = (replace(e, choices=_mixed(e.completion, t.distractors)) for e, t in pairs)
        domain = replace(domain, examples=tuple(choices))
    drawn = zip(range(32), itertools.cycle(families), strict=False)
    return domain, [as_example(make(family, "train", i, level=levels)) for i, family in drawn]


def _dataset(
    benchmark: Benchmark, split: str | None, count: int | None, folder: Path, split_by: SplitBy
) -> tuple[Domain, list[Example]]:
    """A published set, and its training items; holdout is cut from what a selection could see.

    Without a split it is the published test part, or all of a set that has none.
    """
    side: str | None = "verdict" if split in (None, "verdict") else "selection"
    paths = datasets.local_files(datasets.find(benchmark.name), folder)
    if split is None and len({datasets.kind_of_file(path) for path in paths}) == 1:
        side = side if datasets.find(benchmark.name).kind_of else None
    found = list(datasets.read(benchmark.name, folder, split=side))
    if not found:
        hint = "put its training file beside the test file"
        raise NotFound(f"{folder} has no items of {benchmark.name!r} for {split}", hint=hint)
    domain = _whole(benchmark, found, benchmark.name)
    if side == "selection":
        hashed = domains.prompt_hash if split_by == "prompt" else content_hash
        # A fifth of what a selection could see is for holdout alone.
        held = enumerate(hashed(example)[0] < 51 for example in domain.examples)
        domain = domain.select([i for i, is_held in held if is_held == (split == "holdout")])
    seen = itertools.islice(datasets.read(benchmark.name, folder, split="train"), SEEN)
    return domains.part(domain, None, count), list(seen)


def _whole(benchmark: Benchmark, found: Sequence[Example], name: str) -> Domain:
    kept = {content_hash(example): example for example in reversed(found)}
    examples = tuple(reversed(kept.values()))
    return Domain(name, examples, True, tuple(_task(benchmark, example) for example in examples))


def _task(benchmark: Benchmark, example: Example) -> Task:
    """What a grader compares with: of a worked solution its final number."""
    right = example.completion
    if benchmark.grade is graders.math:
        right = right.rpartition("####")[2].strip()
    return Task(benchmark.name, 1, example.split, example.prompt, right, tests=example.tests)


def _mixed(right: str, wrong: Sequence[str]) -> tuple[str, ...]:
    """Choices in an order that says nothing about which is right."""
    return tuple(sorted({right, *wrong}, key=lambda c: hashlib.sha256(c.encode()).digest()))


def _worked(benchmark: Benchmark, seen: Sequence[Example], shots: int) -> list[Example]:
    """Worked examples, short ones, so that small models can read them."""
    if shots > len(seen):
        raise ConfigError(
            f"{benchmark.name}: {shots} worked examples are wanted, its training part"
            f" has {len(seen)}",
            hint="--shots 0, or put its training file into the folder",
        )
    short = sorted(seen, key=lambda e: (len(e.prompt) + len(domains.answer(e)), content_hash(e)))
    middle = short[len(short) // 4 :] or short  # the very shortest are odd ones
    return (middle if len(middle) >= shots else short)[:shots]


def _after(worked: Sequence[Example], example: Example) -> Example:
    """An example with worked ones before it: as earlier turns where it is a conversation."""
    if not worked:
        return example
    pairs = [(f"{e.prompt}\n" if e.messages else e.prompt, e.completion) for e in worked]
    before = "".join(f"{prompt}{completion.rstrip()}\n\n" for prompt, completion in pairs)
    turns = tuple(turn for shot in worked for turn in shot.messages)
    messages = (*turns, *example.messages) if example.messages else ()
    return replace(example, prompt=before + example.prompt, messages=messages)
