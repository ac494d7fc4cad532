"""Readers of published sets that are for measuring alone, not for training.

Each takes the folder of all sets and, where a set has parts such as languages, the wanted one.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from agent_forge.data.dataset_rows import Example, asked
from agent_forge.data.row_files import lines, rows
from agent_forge.errors import ConfigError, DamagedFile, NotFound

_NAMES = """
    ara Arabic  arb Arabic  cmn Chinese  zho Chinese  deu German  eng English  fra French
    hin Hindi  jpn Japanese  por Portuguese  rus Russian  spa Spanish  swh Swahili  tha Thai
    ita Italian  nld Dutch  tur Turkish  vie Vietnamese  kor Korean  pol Polish
"""
LANGUAGES = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True))
OTHERS = 3  # wrong translations beside the right one
NEAR = 6  # they are among so many of the next longer and the next shorter ones


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
            choices = [row.text("choice1"), row.text("choice2")]
            right = choices[row.index("label", 2)]
            prompt = f"{row.text('premise')}\n{row.text('question').capitalize()}:"
            options = tuple(f" {choice}" for choice in choices)
            yield Example(prompt, f" {right}", path.name.split(".")[1], choices=options)


def flores(folder: Path, wanted: str) -> Iterator[Example]:
    """From English into every other language: the right sentence among three of other places."""
    texts = _flores(folder, wanted)
    english = texts.pop("eng")
    for code, sentences in texts.items():
        yield from _translations(LANGUAGES.get(code, code), english, sentences)


def flores_language(folder: Path, wanted: str) -> Iterator[Example]:
    """The language of a sentence, by name."""
    texts = _flores(folder, wanted)
    names = sorted({LANGUAGES.get(code, code) for code in texts})
    for code, sentences in texts.items():
        for text in sentences:
            prompt = f"Text: {text}\nThe language of this text is"
            right = f" {LANGUAGES.get(code, code)}"
            yield Example(prompt, right, code, choices=tuple(f" {name}" for name in names))


def tatoeba(folder: Path, wanted: str) -> Iterator[Example]:
    """Into English: the right sentence among three others."""
    for path in _files(folder, "tatoeba", f"tatoeba.{wanted or '*'}-eng.eng"):
        code = path.name.split(".")[1].partition("-")[0]
        there, here = _sentences(path.with_suffix(f".{code}")), _sentences(path)
        if len(there) != len(here):
            raise DamagedFile(path, f"{len(here)} lines, the other language has {len(there)}")
        yield from _translations("English", there, here, LANGUAGES.get(code, code))


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


IN_PARTS = (xcopa, flores, flores_language, tatoeba)


def _files(folder: Path, name: str, pattern: str) -> list[Path]:
    """The files of a set; the folder may have the name of a release, as flores200_dev."""
    places = [folder / name, *sorted(folder.glob(f"{name}[0-9_]*"))]
    found = [path for place in places for path in sorted(place.glob(pattern))]
    if not found:
        raise NotFound(
            f"{folder} has no pack {name!r}: files like {pattern} are expected in {folder / name}",
            hint="put them there, or name another folder: --data-dir, AGENT_FORGE_DATA",
        )
    return found


def _sentences(path: Path) -> list[str]:
    if not path.is_file():
        raise NotFound(f"{path} is missing")
    return [line.strip() for _, line in lines(path)]


def _flores(folder: Path, wanted: str) -> dict[str, list[str]]:
    """The sentences of each language, line by line the same."""
    paths = _files(folder, "flores", "*_*.dev")
    texts = {path.name.partition("_")[0]: _sentences(path) for path in paths}
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
        choices = sorted([right[i], *wrong], key=lambda t: hashlib.sha256(t.encode()).digest())
        prompt = f"{source}: {given[i]}\n{target}:"
        yield Example(prompt, f" {right[i]}", target, choices=tuple(f" {c}" for c in choices))
