"""Everyday words in six languages: translate them, tell the language, choose the translation.

A word may be asked in every split, but not with the same languages and company or wording.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, family, load, scaled, wording

_data = load("multilingual")
LANGUAGES: list[str] = _data["languages"]
LEXICON: list[list[str]] = _data["lexicon"]  # a row for each word, in the order of the languages
WORDS = {language: [row[i] for row in LEXICON] for i, language in enumerate(LANGUAGES)}
_all = [word.lower() for words in WORDS.values() for word in words]
# The words that tell their language: no other has them (`shared` lists words that mean something
# else in another of the languages), and they are not too short for that.
OWN = {
    language: [
        w for w in words if len(w) > 4 and w not in _data["shared"] and _all.count(w.lower()) == 1
    ]
    for language, words in WORDS.items()
}


def words_and_languages(level: int, rng: Random) -> Operands:
    """Two languages, and rows of the lexicon."""
    source, target = rng.sample(LANGUAGES, 2)
    return source, target, *rng.sample(range(len(LEXICON)), scaled(level, 1, 8))


def translate(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    source, target, *rows = operands
    asked = ", ".join(WORDS[source][row] for row in rows)
    text = wording("translate", split, rng, source=source, target=target, words=asked)
    return _list_question(text, rows, range(len(LEXICON)), WORDS[target].__getitem__, rng)


def words_of_languages(level: int, rng: Random) -> Operands:
    """Languages, each with a word that no other language of the lexicon has."""
    languages = rng.choices(LANGUAGES, k=scaled(level, 2, 8))
    return tuple((language, rng.choice(OWN[language])) for language in languages)


def name_languages(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    text = wording("name_languages", split, rng, words=", ".join(w for _, w in operands))
    return _list_question(text, [language for language, _ in operands], LANGUAGES, str, rng)


def word_and_options(level: int, rng: Random) -> Operands:
    """Two languages, the word asked for, and other words to choose among."""
    source, target = rng.sample(LANGUAGES, 2)
    row, *others = rng.sample(range(len(LEXICON)), scaled(level, 3, 10))
    return source, target, row, *sorted(others)


def choose_translation(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    source, target, row, *others = operands
    answer = WORDS[target][row]
    options = [WORDS[target][other] for other in others]
    mixed = ", ".join(rng.sample([answer, *options], len(options) + 1))
    gaps = {"source": source, "target": target, "word": WORDS[source][row], "options": mixed}
    text = wording("choose_translation", split, rng, **gaps)
    return TaskContent(text, answer, tuple(rng.sample(options, len(options))))


def _list_question(
    text: str, items: list[Any], choices: Sequence[Any], word: Callable[[Any], str], rng: Random
) -> TaskContent:
    """A question with a list of words as its answer; wrong ones have another at one place."""
    place = int(rng.random() * len(items))
    others = rng.sample([choice for choice in choices if choice != items[place]], 3)
    changed = ([*items[:place], other, *items[place + 1 :]] for other in others)
    answer, *bad = (", ".join(map(word, row)) for row in (items, *changed))
    return TaskContent(text, answer, tuple(bad))


FAMILIES = (
    family("translate", words_and_languages, translate, verifiers.words),
    family("name_languages", words_of_languages, name_languages, verifiers.words),
    family("choose_translation", word_and_options, choose_translation, verifiers.words),
)
