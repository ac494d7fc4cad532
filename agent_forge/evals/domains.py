"""Domains: the examples of a file or of generated tasks, in three disjoint parts.

A search looks at `selection`, stops early by `holdout`, and only the last comparison reads
`verdict`. A hash of what an example asks names its part, so a near-copy (another form, or another
answer), in this file or another, is always in the same part: see near_copies.py. Running text asks
nothing: a hash of all of it names its part, and its first word (of a script without spaces, or of a
single word, the first character) is given, so that every tokenizer is asked for the same bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

from agent_forge.config.load import did_you_mean
from agent_forge.data import baselines
from agent_forge.data.dataset_rows import Example, arguments_of
from agent_forge.data.datasets import read_own
from agent_forge.data.near_copies import (
    BY_PROMPT,
    ENOUGH,
    FEW,
    SplitBy,
    question_hash,
    same_texts,
    telling_passages,
)
from agent_forge.data.tasks import DOMAINS, FAMILIES, Task, as_example, is_right, make
from agent_forge.errors import ConfigError
from agent_forge.evals.graders import GRADER_IDS

SHARES = {"selection": 0.50, "holdout": 0.15, "verdict": 0.35}
LEVELS = (1, 20)  # of generated tasks, as Phase 1 learns them
TASK_ITEMS = 2000
DRAWS_AN_ITEM = 10  # a family of few items repeats itself; copies are left out
SYMBOLS = ("Mc", "Sm", "Sc", "So")  # Unicode categories that tell questions apart, as letters do
FIRST_WORD = re.compile(r"\s*\S+(?=\s)|\s*\S")
# Scripts without spaces: Thai, Lao, Tibetan, Myanmar, Khmer, Tai Tham, kana, Han.
_SCRIPTS = r"\u0e00-\u109f\u1780-\u17ff\u1a20-\u1aaf\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff"
UNSPACED = re.compile(rf"[{_SCRIPTS}\uff66-\uff9f\U00020000-\U0003ffff]")
JOINER = "\u200d"  # of emoji
QUESTION_FORM = re.compile(r"\A(.*\n)?Question: (.*)\nAnswer:\Z", re.DOTALL)
POWER = (1.959964 + 0.841621) ** 2  # of the normal quantiles for 5 % two-sided and 80 %
DISCORDANCE = 0.2  # share of items that only one of two models of a family gets right, about
TEXT = "story"  # the one family without answers: it is measured alone
Levels = tuple[int, int]


@dataclass(frozen=True)
class AnswerFormat:
    """What ends a generated answer, beside the model's own end tokens."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()  # for models that continue the text instead of chatting


@dataclass(frozen=True)
class Domain:
    """Examples that share a score. `exact`: there are answers, which are right or wrong. With
    `writing` the model generates them and `grade` judges; else likelihood decides."""

    name: str
    examples: tuple[Example, ...]
    exact: bool = True
    tasks: tuple[Task, ...] = ()  # those of the examples, if they are generated or graded
    writing: AnswerFormat | None = None
    grade: baselines.Grade = is_right
    seen: tuple[Task, ...] = ()  # what guesses rest on; none: generated ones, or its own
    split_by: SplitBy = "asked"
    near_copies: int = 0  # in its whole file
    repeated: int = 0  # rows of its file that an earlier file has too; they count there
    overlapping: int = 0  # rows left out, since they share a passage with the verdict's

    def select(self, numbers: Iterable[int]) -> Domain:
        chosen = list(numbers)
        tasks = tuple(self.tasks[i] for i in chosen) if self.tasks else ()
        return replace(self, examples=tuple(self.examples[i] for i in chosen), tasks=tasks)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each answer that count."""
        return [len(self.counted(example).encode()) for example in self.examples]

    def asked(self, example: Example) -> Example:
        """An example as models are asked for it: a reply without the blanks at its ends, which some
        templates leave out, so that nobody is asked for more. An older evolution goes on as it
        began, with them."""
        last = reply_of(example)
        if last is None or self.split_by in BY_PROMPT:
            return example
        said, turns = example.completion.strip(), list(example.messages)
        turns[last] = {**turns[last], "content": said}
        return replace(example, completion=said, messages=tuple(turns))

    def counted(self, example: Example) -> str:
        """The part of an answer whose bytes count: without the blanks at its ends, which some
        tokenizers leave out, so that it is the same for every model."""
        text = answer(self.asked(example))
        return text if self.split_by in BY_PROMPT else text.strip()

    @property
    def chance(self) -> float:
        """The accuracy of guessing: 1 / choices; one alone is no choice: it has to be written."""
        counts = [len(set(e.choices)) for e in self.examples]
        return sum(1 / n if n > 1 else 0.0 for n in counts) / len(counts)

    @cached_property
    def unigram_bits(self) -> float:
        """Bits per byte of the answers for a model that only counts bytes."""
        return unigram_bits(map(self.counted, self.examples))

    @cached_property
    def parts(self) -> list[str]:
        """The part of each example and of every near-copy of it."""
        return [_part_at(split_hash(e, self.split_by, self.exact)) for e in self.examples]

    @cached_property
    def questions(self) -> list[int]:
        """The number of each example's question: near-copies ask the same one, and so do texts that
        share a passage, and rows where it is one of a long answer."""
        if not self.tasks:
            texts = [text_of(example) for example in self.examples]
            if not self.exact:
                return same_texts(texts)
            hashes = [split_hash(example, "asked") for example in self.examples]
            return same_texts(texts, long_answers(self.examples), hashes)
        keys = ((t.family, t.operands) if t.operands else t.question for t in self.tasks)
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def baselines(self) -> dict[str, float]:
        """The accuracy of guessing from what was seen, by name of the guess; empty for text."""
        if not self.tasks or not self.exact:
            return {}
        seen: Sequence[Task] = self.seen
        families = list(dict.fromkeys(task.family for task in self.tasks))
        if not seen and set(families) <= set(FAMILIES):
            levels = min(t.level for t in self.tasks), max(t.level for t in self.tasks)
            numbers = range(len(self.tasks))
            seen = [make(families[i % len(families)], "train", i, level=levels) for i in numbers]
        majority = baselines.majority(seen or self.tasks, self.tasks, self.grade)
        ngram = {"ngram": baselines.ngram(seen, self.tasks, grade=self.grade)} if seen else {}
        return {"majority": majority, **ngram}


def from_files(paths: Sequence[Path], split_by: SplitBy = "asked") -> list[Domain]:
    """Every file a domain, named after it."""
    found: dict[str, Domain] = {}
    places: dict[Path, Path] = {}
    seen: set[bytes] = set()
    for path in paths:
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{path} cannot be found: {error}") from error
        if first := places.get(real):
            raise ConfigError(f"{path} is given twice: it is the same file as {first}")
        places[real] = path
        name, parts = path.stem, 1
        while name in found:  # of one name in two folders: enough of its path, from anywhere
            parts += 1
            name = str(path) if split_by in BY_PROMPT else str(Path(*real.parts[-parts:]))
        found[name] = _read(path, name, split_by, seen)
    return list(found.values())


def from_tasks(
    names: Sequence[str] = (),
    *,
    split: str = "verdict",
    count: int = TASK_ITEMS,
    levels: Levels = LEVELS,
) -> list[Domain]:
    """Generated tasks by family or domain; without names all that small models can learn."""
    groups = {name: _families(name) for name in names}
    if not names:
        every = {d: tuple(f for f in of if FAMILIES[f].learnable) for d, of in DOMAINS.items()}
        groups = {domain: of for domain, of in every.items() if of}
    return [generated(name, of, split, count, levels) for name, of in groups.items()]


def part(domain: Domain, split: str | None = None, limit: int | None = None) -> Domain:
    """The examples of one split, and of these at most `limit`, chosen by their hash."""
    mine: Sequence[int] = range(len(domain.examples))
    if split is not None:
        _check_split(split)
        mine = [i for i, its in enumerate(domain.parts) if its == split]
    if not mine:
        hint = f"give more data: {split} gets {SHARES[str(split)]:.0%} of it{copies_hint(domain)}"
        problem = f"none of its {len(domain.examples)} examples is for {split}"
        raise ConfigError(f"{domain.name}: {problem}", hint=hint)
    hashes = [content_hash(example) for example in domain.examples]
    kept = set(sorted(hashes[i] for i in mine)[:limit])
    if domain.split_by in BY_PROMPT:  # as it was: also what differs in spaces, of whatever part
        mine = range(len(hashes))
    return domain.select(i for i in mine if hashes[i] in kept)


def text_of(example: Example) -> str:
    return example.prompt + answer(example)


def long_answers(examples: Sequence[Example]) -> list[str]:
    """The answers that passages are looked for in: not those that many rows give, as labels are,
    whatever their length. (Short ones have too few passages to share.)"""
    counts = Counter(map(answer, examples))
    return [said if counts[said := answer(e)] <= FEW else "" for e in examples]


def told_by(domains: Iterable[Domain], by: SplitBy, *, whole: bool = False) -> list[str]:
    """What these domains ask that may stand nowhere else: texts, and long answers (`whole`: all
    that their rows say), which evolutions that were begun before did not look at."""
    found = list[str]()
    for domain in domains:
        if not domain.exact:
            found += map(text_of, domain.examples)
        elif by == "overlap" and not whole:
            found += long_answers(domain.examples)
        elif by == "overlap":  # of packs without the worked examples
            bare = [Example(task.question, f"\n{task.answer}") for task in domain.tasks]
            found += map(text_of, bare or domain.examples)
    return found


def without_passages(domains: Sequence[Domain], told: Sequence[str], *, rows: bool) -> list[Domain]:
    """The domains without running texts (with `rows` also questions and answers) that share a
    passage with what is told elsewhere."""
    looked_at = [d for d in domains if told and (rows or not d.exact)]
    every = [text_of(e) for d in looked_at for e in d.examples]
    found = iter(telling_passages([*told, *every]))
    taken = set[int]().union(*itertools.islice(found, len(told)))
    kept = []
    for domain in domains:
        if any(domain is other for other in looked_at):
            own = [len(taken & next(found)) < ENOUGH for _ in domain.examples]
            count = domain.overlapping + own.count(False)
            chosen = domain.select(itertools.compress(range(len(own)), own))
            domain = replace(chosen, overlapping=count)
        kept.append(domain)
    return kept


def kept_apart(splits: Mapping[str, Sequence[Domain]], by: SplitBy) -> dict[str, list[Domain]]:
    """The splits without texts and rows of holdout and selection that share a passage with the
    verdict's, and without those of selection that do with holdout's; the verdict's tell how many
    these are."""
    found = dict[str, list[Domain]]()
    for split in [s for s in ("verdict", "holdout", "selection") if s in splits]:
        told = told_by((domain for others in found.values() for domain in others), by)
        found[split] = without_passages(splits[split], told, rows=by == "overlap")
        for domain in found[split]:
            if not domain.examples:
                hint = "give more data, or texts and answers that do not repeat one another"
                problem = f"all that is for {split} shares passages with another part"
                raise ConfigError(f"{domain.name}: {problem}", hint=hint)
    for number, domain in enumerate(found["verdict"]):
        left_out = sum(found[s][number].overlapping for s in found)
        found["verdict"][number] = replace(domain, overlapping=left_out)
    return {split: found[split] for split in splits}


def _check_split(split: str) -> None:
    if split not in SHARES:
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, list(SHARES))}")


def _part_at(digest: bytes) -> str:
    place = int.from_bytes(digest[-4:], "big") / 2**32
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    return split


def content_hash(example: Example) -> bytes:
    """The sha256 of what an example says, whatever its spaces."""
    said = "\0".join(" ".join(text.split()) for text in (example.prompt, answer(example)))
    return hashlib.sha256(said.encode()).digest()


def exact_hash(example: Example) -> bytes:
    """The sha256 of all that is asked: only exact copies share it."""
    said = [example.prompt, answer(example), example.choices, example.messages]
    return hashlib.sha256(json.dumps(said, default=str).encode()).digest()


def split_hash(example: Example, split_by: SplitBy, exact: bool = True) -> bytes:
    """The sha256 that decides the part of an example."""
    if split_by == "content":
        return content_hash(example)
    if split_by == "prompt":
        return prompt_hash(example, exact)
    return question_hash(example, exact, split_by)


def prompt_hash(example: Example, exact: bool = True) -> bytes:
    """The sha256 that decided before `question_hash` did."""
    last = reply_of(example)
    if not exact:
        text = example.prompt + example.completion
    elif last is None:
        text = QUESTION_FORM.sub(r"\1\2", example.prompt)
    else:
        text = "\n".join(m["content"] for m in example.messages[:last] if m["role"] != "system")
    return hashlib.sha256(folded(text).encode()).digest()


def folded(text: str) -> str:
    """The letters, digits and symbols of a text, without case or forms; else its punctuation."""
    plain = normalize("NFKC", normalize("NFKC", text).casefold())
    kinds = {c: category(c) for c in set(plain)}
    left_out = {ord(c): None for c, k in kinds.items() if k[0] not in "LN" and k not in SYMBOLS}
    return plain.translate(left_out) or "".join(plain.split())


def copies_told(domains: Sequence[Domain]) -> list[str]:
    """Sentences about near-copies and repeated rows; an empty list if there are none."""
    notes = []
    if counts := ", ".join(f"{d.name} {d.near_copies}" for d in domains if d.near_copies):
        where = "each is in the part of the first"
        if domains[0].split_by == "content":
            where = "split by content, so the verdict may ask what the search saw"
        rows = "rows that repeat a prompt, or a text, but for case, spaces, punctuation"
        notes.append(f"near-copies ({rows}): {counts}; {where}")
    if shared := ", ".join(f"{d.name} {d.overlapping}" for d in domains if d.overlapping):
        what = "texts and long answers that share a passage with the verdict's"
        notes.append(f"{what}, left out: {shared}")
    if repeated := ", ".join(f"{d.name} {d.repeated}" for d in domains if d.repeated):
        notes.append(f"rows that an earlier file has too, left out: {repeated}")
    return notes


def copies_hint(domain: Domain) -> str:
    """The end of a hint about a part that is too small: near-copies may be the reason."""
    if not domain.near_copies or domain.split_by == "content":
        return ""
    return f"; {domain.near_copies} of its rows are near-copies, which stay together"


def answer(example: Example) -> str:
    """The text that is asked for: the completion, and what it calls with which arguments."""
    last = reply_of(example)
    calls = (example.messages[last].get("tool_calls") or ()) if last is not None else ()
    functions = [call.get("function") or call for call in calls]
    said = [{"name": f.get("name"), "arguments": arguments_of(f)} for f in functions]
    return example.completion + "".join(json.dumps(call, ensure_ascii=False) for call in said)


def reply_of(example: Example) -> int | None:
    """The index of the assistant's last message, which is asked for; None if there is none."""
    said = (i for i, m in enumerate(example.messages) if m["role"] == "assistant")
    return max(said, default=None)


def evaluation_hash(domains: Sequence[Domain], **settings: Any) -> str:
    """The sha256 of what is asked and how: the key of cached scores, so its form never changes."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for domain in domains:
        digest.update(f"\0{domain.name}/{domain.exact}".encode())
        for example in domain.examples:
            choices = list(dict.fromkeys(example.choices))  # each is asked once
            asked = [example.prompt, answer(example), choices, example.messages]
            digest.update(b"\0" + json.dumps(asked, default=str).encode())
        if domain.writing:
            ends = f"max_new_tokens={domain.writing.max_new_tokens}, stop={domain.writing.stop!r}"
            tests = [task.tests for task in domain.tasks]
            digest.update(f"(Writing({ends}), {GRADER_IDS[domain.grade]!r}, {tests!r})".encode())
    return digest.hexdigest()


def unigram_bits(texts: Iterable[str]) -> float:
    """The entropy of the bytes of all texts together, in bits a byte."""
    counts = Counter(b"".join(map(str.encode, texts)))
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def perplexity_score(bits_per_byte: float, unigram: float, below: float = 0.0) -> float:
    """1 - H/H0: 0 is no better than counting bytes, 1 knows the text. What is worse than counting
    bytes falls on towards -below, so that fewer bits are always better; without it, it is 0."""
    if below and bits_per_byte > unigram > 0:
        return below * (unigram / bits_per_byte - 1)
    return max(0.0, 1 - bits_per_byte / unigram) if unigram else 0.0


def beyond_chance(accuracy: float, chance: float) -> float:
    """Accuracy on a scale where guessing is 0 and always right is 1."""
    return max(0.0, (accuracy - chance) / (1 - chance)) if chance < 1 else 0.0


def smallest_gain(n: int) -> float:
    """The smallest difference in accuracy that n paired items show (5 % two-sided, 80 % power). Its
    standard error is sqrt(DISCORDANCE / n); where n is small the discordance is at least the
    difference itself, which bounds the answer by 7.85 / n."""
    return min(1.0, max(math.sqrt(POWER * DISCORDANCE / n), POWER / n)) if n else 1.0


def _read(path: Path, name: str, split_by: SplitBy, seen: set[bytes]) -> Domain:
    """The examples of a file, each once; what earlier files have (`seen`) counts there."""
    kept: dict[bytes, Example] = {}
    kinds = set()
    copy_of = content_hash if split_by == "content" else exact_hash
    for example in read_own(path):
        if asked := _asked(example, by_spaces=split_by in BY_PROMPT):
            kept.setdefault(copy_of(asked), asked)
            kinds.add(bool(example.prompt))
    if not kept:
        raise ConfigError(f"{path} has nothing to ask for")
    if len(kinds) == 2:
        hint = "make two files of it: each has a score of its own"
        raise ConfigError(f"some rows of {path} have answers, others are text", hint=hint)
    fresh = kept if split_by == "content" else {k: e for k, e in kept.items() if k not in seen}
    seen |= set(kept)
    if not fresh:
        problem = f"all rows of {path} are in the files before it"
        raise ConfigError(problem, hint="give each row once")
    examples, exact = tuple(fresh.values()), kinds.pop()
    near: SplitBy = "prompt" if split_by == "content" else split_by
    groups = {split_hash(example, near, exact) for example in examples}
    copies, repeated = len(examples) - len(groups), len(kept) - len(fresh)
    return Domain(name, examples, exact, split_by=split_by, near_copies=copies, repeated=repeated)


def _asked(example: Example, *, by_spaces: bool = False) -> Example | None:
    """An example with something given and something asked; of a text the first word is given."""
    # `by_spaces`: only what spaces separate is a word, as it was.
    if example.prompt:
        return example if answer(example) else None
    text = example.completion
    first = FIRST_WORD.match(text)
    given = first[0] if first else ""
    if not by_spaces and (UNSPACED.search(given) or not text.removeprefix(given).strip()):
        given = text[: _first_character(text)]
    asked = text.removeprefix(given)
    return replace(example, prompt=given, completion=asked, messages=()) if asked.strip() else None


def _first_character(text: str) -> int:
    """Where the first character that is no blank ends, with its marks and what is joined to it."""
    end = len(text) - len(text.lstrip()) + 1
    for character in text[end:]:
        mark = category(character) in ("Mn", "Mc", "Me", "Sk")
        if not mark and JOINER not in text[end - 1 : end + 1]:
            break
        end += 1
    return end


def _families(name: str) -> tuple[str, ...]:
    if name in FAMILIES:
        return (name,)
    if name not in DOMAINS:
        hint = did_you_mean(name, [*DOMAINS, *FAMILIES])
        raise ConfigError(f"no tasks are called {name!r}{hint}")
    return tuple(family for family in DOMAINS[name] if family != TEXT)


def generated(name: str, families: Sequence[str], split: str, count: int, levels: Levels) -> Domain:
    """Items that no model was trained on; holdout is cut from what a selection could draw."""
    _check_split(split)
    source = "verdict" if split == "verdict" else "selection"
    kept: dict[bytes, tuple[Example, Task]] = {}
    for i in range(DRAWS_AN_ITEM * count):
        task = make(families[i % len(families)], source, i, level=levels)
        if example := _asked(as_example(task)):
            held = _part_at(content_hash(example)) == "holdout"
            if split == "verdict" or held == (split == "holdout"):
                kept.setdefault(content_hash(example), (example, task))
        if len(kept) == count:
            break
    if not kept:
        raise ConfigError(f"{name} has no items for {split} at levels {levels[0]} to {levels[1]}")
    examples, behind = zip(*kept.values(), strict=True)
    return Domain(name, examples, families != (TEXT,), behind)
