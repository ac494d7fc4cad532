"""Benchmarks (packs, as users call them): what models are measured on by name.

Without an answer format items are measured by likelihood, as choices. Of a published set the test
part is the verdict, and what a search sees comes from the rest, without near-copies of that part;
where a set has no parts, a hash of what is asked decides. Worked examples before the question are
of the training part, the same for all. Readers of sets that are for measuring alone take the folder
of all sets and the wanted part.
"""

import csv
import hashlib
import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agent_forge.config.load import did_you_mean
from agent_forge.data import datasets
from agent_forge.data.baselines import Grade
from agent_forge.data.dataset_rows import Example, asked
from agent_forge.data.near_copies import BY_PROMPT, SplitBy, question_hash
from agent_forge.data.row_files import lines, rows
from agent_forge.data.tasks import Task, as_example, make
from agent_forge.data.tasks.verifiers import words
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.evals import domains, graders
from agent_forge.evals.domains import LEVELS, AnswerFormat, Domain, Levels, content_hash
from agent_forge.evals.lm_eval_harness import PREFIX as HARNESS

NAMES: dict[str, str] = json.loads(Path(__file__).with_name("languages.json").read_text())
OTHERS = 3  # wrong translations beside the right one
NEAR = 6  # they are among so many of the next longer and the next shorter ones
FOLDER = "AGENT_FORGE_DATA"  # the environment variable that names the folder of all datasets
PREFIX = "pack:"  # of a benchmark among names of tasks
CHOICE = "choice:"  # of a generated one whose answers are chosen by likelihood, not written
EVERY_DOMAIN = ("code", "math", "multilingual", "structured")  # what models of others are asked
BENCHMARK_ITEMS = 500  # of a generated benchmark
SEEN = 2000  # training items that a guess rests on
MATH = ("addition", "subtraction", "multiplication", "expression", "word_problem")
CODE = ("code_list", "code_string", "code_number")
STRUCTURED = ("extract_field", "to_json", "to_yaml", "to_csv")
NEXT_QUESTION = ("\nQuestion:",)
NO_FUNCTION = ("\nassert", "\nprint(", "\nif __name__", '\n"""', "\n```\n")


@dataclass(frozen=True)
class Benchmark:
    """One row of the table. Where there are `families` it is generated."""

    name: str
    grade: Grade = graders.same
    writing: AnswerFormat | None = None  # None: measured by likelihood
    families: tuple[str, ...] = ()
    read: Callable[[Path, str], Iterator[Example]] | None = None  # None: a dataset of that name
    shots: int = 0  # worked examples


def humaneval(folder: Path, wanted: str) -> Iterator[Example]:
    """Functions to complete; the test calls what was asked for by its name."""
    for path in _files(folder, "humaneval", "*.jsonl*"):
        for row in rows(path):
            name, question = row.text("entry_point"), row.text("prompt")
            test = f"{row.text('test')}\ncheck({name})"
            yield Example(question, row.text("canonical_solution"), "humaneval", tests=(test,))


def xcopa(folder: Path, wanted: str) -> Iterator[Example]:
    """The likelier of two causes or effects, in eleven languages."""
    for path in _files(folder, "xcopa", f"test.{wanted or '*'}.jsonl"):
        for row in rows(path):
            choices = f" {row.text('choice1')}", f" {row.text('choice2')}"
            right, language = choices[row.index("label", 2)], path.name.split(".")[1]
            prompt = f"{row.text('premise')}\n{row.text('question').capitalize()}:"
            yield Example(prompt, right, language, choices=choices)


def flores(folder: Path, wanted: str) -> Iterator[Example]:
    """From English into every other language: the right sentence among three of other places."""
    texts = _flores(folder, wanted)
    english = texts.pop("eng")
    for code, sentences in texts.items():
        yield from _translations(NAMES.get(code, code), english, sentences)


def flores_language(folder: Path, wanted: str) -> Iterator[Example]:
    """The language of a sentence, by name."""
    texts = _flores(folder, wanted)
    names = {code: f" {NAMES.get(code, code)}" for code in texts}
    choices = tuple(sorted(set(names.values())))
    for code, sentences in texts.items():
        for text in sentences:
            prompt = f"Text: {text}\nThe language of this text is"
            yield Example(prompt, names[code], code, choices=choices)


def tatoeba(folder: Path, wanted: str) -> Iterator[Example]:
    """Into English: the right sentence among three others."""
    for path in _files(folder, "tatoeba", f"tatoeba.{wanted or '*'}-eng.eng"):
        code = path.name.split(".")[1].partition("-")[0]
        there, here = _sentences(path.with_suffix(f".{code}")), _sentences(path)
        if len(there) != len(here):
            raise DamagedFile(path, f"{len(here)} lines, the other language has {len(there)}")
        yield from _translations("English", there, here, NAMES.get(code, code))


def json_test_suite(folder: Path, wanted: str) -> Iterator[Example]:
    """Whether a text is JSON: what every parser must accept, and what it must refuse."""
    for path in _files(folder, "json_test_suite", "test_parsing/[yn]_*.json"):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:  # not to be shown to a model as text
            continue
        if text.strip() and "".join(text.split()).isprintable() and len(text) < 2000:
            right = "yes" if path.name.startswith("y_") else "no"
            yield replace(asked("Is this valid JSON?", right, text, "no", "yes"), source=path.stem)


def csv_spectrum(folder: Path, wanted: str) -> Iterator[Example]:
    """CSV with quotes, commas and line ends in its cells, to be written as JSON."""
    for path in _files(folder, "csv_spectrum", "csvs/*.csv"):
        text = path.read_bytes().decode("utf-8", "replace")
        try:
            records = list(csv.DictReader(text.splitlines(keepends=True)))
        except csv.Error as error:
            raise DamagedFile(path, f"not readable as CSV ({error})") from None
        prompt = f"CSV:\n{text.strip()}\n\nThe same as a JSON list of objects with text values:\n"
        yield Example(prompt, json.dumps(records, ensure_ascii=False), path.stem)


def _files(folder: Path, name: str, pattern: str) -> list[Path]:
    """The files of a set; the folder may have the name of a release, as flores200_dev."""
    places = [folder / name, *sorted(folder.glob(f"{name}[0-9_]*"))]
    found = [path for place in places for path in sorted(place.glob(pattern))]
    if not found:
        hint = "put them there, or name another folder: --data-dir, AGENT_FORGE_DATA"
        problem = f"files like {pattern} are expected in {folder / name}"
        raise NotFound(f"{folder} has no pack {name!r}: {problem}", hint=hint)
    return found


def _sentences(path: Path) -> list[str]:
    if not path.is_file():
        raise NotFound(f"{path} is missing")
    return [line.strip() for _, line in lines(path)]


def _flores(folder: Path, wanted: str) -> dict[str, list[str]]:
    """The sentences of each language, line by line the same."""
    paths = _files(folder, "flores", "*_*.dev")
    codes = [path.name.partition("_")[0] for path in paths]
    # Each of two scripts, as zho_Hans and zho_Hant, is a language of its own.
    named = ((p.stem if codes.count(c) > 1 else c, p) for c, p in zip(codes, paths, strict=True))
    texts = {code: _sentences(path) for code, path in named}
    if "eng" not in texts or len({len(text) for text in texts.values()}) != 1:
        raise DamagedFile(paths[0].parent, "not the same lines in every language, with English")
    if wanted and (wanted not in texts or wanted == "eng"):
        known = ", ".join(sorted(set(texts) - {"eng"}))
        raise ConfigError(f"flores has no language {wanted!r}", hint=f"known: {known}")
    return {code: texts[code] for code in texts if not wanted or code in ("eng", wanted)}


def _translations(
    target: str, given: Sequence[str], right: Sequence[str], source: str = "English"
) -> Iterator[Example]:
    """Sentences to translate; the wrong choices are about as long as the right one."""
    order = sorted(range(len(right)), key=lambda i: (len(right[i].encode()), i))
    for rank, i in enumerate(order):
        near = sorted(order[max(0, rank - NEAR) : rank + NEAR], key=lambda j: abs(j - i))
        others = dict.fromkeys(right[j] for j in near)
        wrong = [text for text in others if text != right[i]][:OTHERS]
        choices = tuple(f" {text}" for text in _mixed([right[i], *wrong]))
        yield Example(f"{source}: {given[i]}\n{target}:", f" {right[i]}", target, choices=choices)


def _mixed(choices: Collection[str]) -> tuple[str, ...]:
    """Choices in an order that says nothing about which is right."""
    return tuple(sorted(choices, key=lambda text: hashlib.sha256(text.encode()).digest()))


IN_PARTS = (xcopa, flores, flores_language, tatoeba)
_BODY = AnswerFormat(384, ("\ndef ", "\nclass ", "\n#", *NO_FUNCTION))
_JSON = AnswerFormat(256, ("\n\nCSV",))
_TABLE = (
    Benchmark("math", graders.math, AnswerFormat(128, ("\n\n",)), MATH),
    Benchmark("code", graders.code, AnswerFormat(256, ("\n\n", *NO_FUNCTION)), CODE),
    Benchmark("multilingual", families=("translate", "name_languages", "choose_translation")),
    Benchmark("structured", graders.document, AnswerFormat(256, ("\n\n",)), STRUCTURED),
    Benchmark("gsm8k", graders.math, AnswerFormat(256, NEXT_QUESTION), shots=4),
    Benchmark("svamp", graders.math, AnswerFormat(64, NEXT_QUESTION), shots=4),
    Benchmark("asdiv", graders.math, AnswerFormat(64, NEXT_QUESTION), shots=4),
    Benchmark("mbpp", graders.code, AnswerFormat(256, NO_FUNCTION), shots=3),
    Benchmark("humaneval", graders.completed, _BODY, read=humaneval),
    *map(Benchmark, ["arc_easy", "arc_challenge", "piqa", "boolq", "hellaswag", "strategyqa"]),
    *(Benchmark(n, words, AnswerFormat(32, ("\n",)), shots=2) for n in ("hotpotqa", "drop")),
    *(Benchmark(read.__name__, read=read) for read in IN_PARTS),
    Benchmark("jsontestsuite", read=json_test_suite),
    Benchmark("csv_spectrum", graders.document, _JSON, read=csv_spectrum),
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
    split_by: SplitBy = "asked",
) -> list[Domain]:
    """Each benchmark as a domain; `name:part` is one part of it, such as a language of xcopa."""
    if len(set(names)) < len(names):
        raise ConfigError("a pack is given twice")
    folder, found = folder or Path(os.environ.get(FOLDER, "data")), []
    for name in names:
        benchmark, wanted = find(name)
        seen: list[Example] = []
        if benchmark.families:
            domain, seen = _generated(benchmark, split, count or BENCHMARK_ITEMS, levels)
        elif benchmark.read:
            whole = _whole(benchmark, list(benchmark.read(folder, wanted)), name)
            domain = domains.part(replace(whole, split_by=split_by), split, count)
        else:
            domain, seen = _dataset(benchmark, split, count, folder, split_by)
        worked = _worked(benchmark, seen, benchmark.shots if shots is None else shots)
        by: SplitBy = "question" if split_by in ("question", *BY_PROMPT) else "asked"
        shown = {question_hash(example, split_by=by) for example in worked}
        hashes = enumerate(question_hash(example, split_by=by) for example in domain.examples)
        domain = domain.select([i for i, own in hashes if own not in shown])
        taken = {content_hash(example) for example in (*worked, *domain.examples)}
        # What guesses may rest on: nothing that is asked or shown.
        free = [] if benchmark.families else [e for e in seen if content_hash(e) not in taken]
        examples = tuple(_after(worked, example) for example in domain.examples)
        guesses = tuple(_task(benchmark, example) for example in free)
        domain = replace(domain, name=name, examples=examples, seen=guesses)
        found.append(replace(domain, writing=benchmark.writing, grade=benchmark.grade))
    return found


def from_names(
    names: Sequence[str], *, split: str, count: int, levels: Levels, split_by: SplitBy = "asked"
) -> list[Domain]:
    """Generated tasks, benchmarks (`pack:NAME`), and generated ones of these as choices
    (`choice:NAME`): what the settings of an evolution name."""
    packs = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    chosen = [name.removeprefix(CHOICE) for name in names if name.startswith(CHOICE)]
    tasks = [name for name in names if not name.startswith((PREFIX, CHOICE))]
    found = from_benchmarks(packs, split=split, count=count, levels=levels, split_by=split_by)
    found += [_as_choices(name, split, count, levels) for name in chosen]
    if tasks or not (packs or chosen):
        found = domains.from_tasks(tasks, split=split, count=count, levels=levels) + found
    if len({domain.name for domain in found}) < len(found):
        raise ConfigError("a pack and tasks have the same name", hint="name one of them")
    return found


def find(name: str) -> tuple[Benchmark, str]:
    """A benchmark by its name, and the part of it that is wanted."""
    stem, _, wanted = name.partition(":")
    if f"{stem}:" == HARNESS:
        hint = "forge eval has them; measure each model with it"
        problem = "tasks of lm-eval give one score for a model, and no answers to compare"
        raise ConfigError(f"{name}: {problem}", hint=hint)
    if stem not in BENCHMARKS:
        raise ConfigError(f"no pack is called {stem!r}{did_you_mean(stem, list(BENCHMARKS))}")
    benchmark = BENCHMARKS[stem]
    if wanted and benchmark.read not in IN_PARTS:
        raise ConfigError(f"the pack {stem!r} has no parts, so {name!r} names none")
    return benchmark, wanted


def _generated(
    benchmark: Benchmark, split: str | None, count: int, levels: Levels
) -> tuple[Domain, list[Example]]:
    name, families = benchmark.name, benchmark.families
    domain = domains.generated(name, families, split or "verdict", count, levels)
    if benchmark.writing is None:
        pairs = zip(domain.examples, domain.tasks, strict=True)
        asked = (replace(e, choices=_mixed({e.completion, *t.distractors})) for e, t in pairs)
        domain = replace(domain, examples=tuple(asked))
    drawn = zip(range(32), itertools.cycle(families), strict=False)
    return domain, [as_example(make(family, "train", i, level=levels)) for i, family in drawn]


def _by_length(text: str) -> tuple[int, str]:
    return len(text), text


def _as_choices(name: str, split: str, count: int, levels: Levels) -> Domain:
    """A generated benchmark in plain words: the right answer among some to other questions of its
    kind, about as long; those that a task names itself come first. At most 500 items."""
    benchmark, _ = find(name)
    if not benchmark.families:
        known = ", ".join(b.name for b in BENCHMARKS.values() if b.families)
        raise ConfigError(f"{CHOICE}{name}: only generated packs are", hint=f"known: {known}")
    domain, _ = _generated(benchmark, split, min(count, BENCHMARK_ITEMS), levels)
    answers: dict[str, list[str]] = {}  # of a family, by length
    for task in domain.tasks:
        answers.setdefault(task.family, []).append(task.answer)
    answers = {family: sorted(set(texts), key=_by_length) for family, texts in answers.items()}
    examples = []
    for task in domain.tasks:
        alike = answers[task.family]
        at = bisect_left(alike, _by_length(task.answer), key=_by_length)
        near = alike[at + 1 : at + NEAR] + alike[max(0, at - NEAR) : at]
        wrong = [a for a in dict.fromkeys([*task.distractors, *near]) if a != task.answer][:OTHERS]
        choices = tuple(f" {text}" for text in _mixed({task.answer, *wrong}))
        prompt = f"{task.question}\nAnswer:"
        examples.append(Example(prompt, f" {task.answer}", task.family, choices=choices))
    return replace(domain, examples=tuple(examples), writing=None, grade=graders.same)


def _dataset(
    benchmark: Benchmark, split: str | None, count: int | None, folder: Path, split_by: SplitBy
) -> tuple[Domain, list[Example]]:
    """A published set and its training items. Without a split: its test part, or all of it."""
    side: str | None = "verdict" if split in (None, "verdict") else "selection"
    if split is None and len(datasets.kinds_in(*datasets.located(benchmark.name, folder))) == 1:
        side = None
    read = partial(datasets.read, benchmark.name, folder, split_by=split_by)
    domain = _whole(benchmark, list(read(split=side)), benchmark.name)
    if side == "selection":
        hashes = [domains.split_hash(example, split_by) for example in domain.examples]
        verdict = () if split_by in BY_PROMPT else read(split="verdict")
        asked = {domains.split_hash(example, split_by) for example in verdict}
        # A fifth of what a selection could see is for holdout alone.
        free = ((i, own[0] < 51) for i, own in enumerate(hashes) if own not in asked)
        domain = domain.select([i for i, is_held in free if is_held == (split == "holdout")])
    if not domain.examples:
        hint = "put its training file, or a larger one, beside the test file"
        raise NotFound(f"{folder} has no items of {benchmark.name!r} for {split}", hint=hint)
    seen = itertools.islice(read(split="train"), SEEN)
    return domains.part(domain, None, count), list(seen)


def _whole(benchmark: Benchmark, found: Sequence[Example], name: str) -> Domain:
    kept = {content_hash(example): example for example in reversed(found)}
    examples = tuple(reversed(kept.values()))
    return Domain(name, examples, True, tuple(_task(benchmark, example) for example in examples))


def _task(benchmark: Benchmark, example: Example) -> Task:
    """What a grader compares with: of a worked solution its final number."""
    worked, right = benchmark.grade is graders.math, example.completion
    right = right.rpartition("####")[2].strip() if worked else right
    return Task(benchmark.name, 1, example.split, example.prompt, right, tests=example.tests)


def _worked(benchmark: Benchmark, seen: Sequence[Example], shots: int) -> list[Example]:
    """Worked examples, short ones, so that small models can read them."""
    if shots > len(seen):
        hint = "--shots 0, or put its training file into the folder"
        problem = f"{shots} worked examples are wanted, its training part has {len(seen)}"
        raise ConfigError(f"{benchmark.name}: {problem}", hint=hint)
    short = sorted(seen, key=lambda e: (len(e.prompt) + len(domains.answer(e)), content_hash(e)))
    middle = short[len(short) // 4 :] or short  # the very shortest are odd ones
    return (middle if len(middle) >= shots else short)[:shots]


def _after(worked: Sequence[Example], example: Example) -> Example:
    """An example with worked ones before it: as earlier turns where it is a conversation."""
    if not worked:
        return example
    ends = ((e, "\n" if e.messages else "") for e in worked)  # of the prompt
    before = "".join(f"{e.prompt}{end}{e.completion.rstrip()}\n\n" for e, end in ends)
    turns = tuple(turn for shot in worked for turn in shot.messages)
    messages = (*turns, *example.messages) if example.messages else ()
    return replace(example, prompt=before + example.prompt, messages=messages)
