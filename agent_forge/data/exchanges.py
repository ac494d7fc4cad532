"""Talking with tools and as somebody: questions, calls, results and answers, and persona cards.

A call is written in a short form, `read shop.json boat shelf`; the result is what the tool says to
it. Splits share no wordings, nor what tools are asked. A card tells in a line who somebody is and
which tools there are: ` named Zoe felt happy ... can calc read`. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings
from agent_forge.data.tasks.base import MAX_DRAWS, SPLITS, split_of

_words: dict[str, Any] = json.loads(Path(__file__).with_name("exchanges.json").read_text())
TOOLS: tuple[str, ...] = tuple(_words["tools"])
SLOTS: tuple[str, ...] = tuple(_words["slots"])
POOLS: dict[str, list[str]] = _words["pools"]
REFUSED, SMALL_TALK = "refused", "small talk"
REFUSAL: str = _words["refusal"]
LURED = 0.1  # of what is read, whose key is the name of another tool
FIRST_DAY = datetime(2026, 1, 1)
Word = Annotated[str, Field(pattern=r"^[A-Za-z-]{1,24}$")]
CALCULATIONS = {"times": "*", "plus": "+", "minus": "-"}


class Persona(Settings):
    """Who a model says that it is."""

    name: Word
    mood: Word
    likes: Annotated[list[Word], Field(min_length=2, max_length=2)]
    home: Word
    saying: Word
    animal: Word

    @model_validator(mode="after")
    def _words_differ(self) -> Persona:
        words = [word for slot in SLOTS[:-1] for word in self.values(slot, ())]
        if len({*words, *TOOLS}) < len(words) + len(TOOLS):
            raise ValueError("a word stands for two things, or is the name of a tool")
        for slot in SLOTS:
            answer = _words["slots"][slot]["answer"].format(**self.gaps(TOOLS))
            if not answers_slot(self, TOOLS, slot, answer):
                raise ValueError(f"its answers could not be told apart: {answer}")
        return self

    def gaps(self, tools: Sequence[str]) -> dict[str, str]:
        """What its answers are filled with."""
        one, two = self.likes
        named = {key: getattr(self, key) for key in ("name", "mood", "home", "saying", "animal")}
        return {**named, "one": one, "two": two, "tools": _listed(tools)}

    def values(self, slot: str, tools: Sequence[str]) -> list[str]:
        """The words that an answer about a slot has, and that none about others may have."""
        if slot == "likes":
            return self.likes
        return list(tools) if slot == "tools" else [str(getattr(self, slot))]


@dataclass(frozen=True)
class Exchange:
    """A question and what is to be said: an answer, or a call, its result and then the answer."""

    kind: str  # a tool, a slot of the persona, `refused` or `small talk`
    question: str
    answer: str
    call: str = ""
    result: str = ""
    lured: bool = False  # the question names another tool


class Card(NamedTuple):
    """A persona with its tools, as a prompt before the conversation."""

    persona: Persona
    tools: tuple[str, ...]

    def text(self, order: Random | None = None) -> str:
        """In one line; `order` shuffles its parts."""
        p = self.persona
        parts = [f"named {p.name}", f"felt {p.mood}", f"liked {p.likes[0]} and {p.likes[1]}"]
        parts += [f"near {p.home}", f"said {p.saying}", f"with {p.animal}"]
        parts += [" ".join(("can", *self.tools))]
        if order:
            order.shuffle(parts)
        return " " + " ".join(parts)


def random_card(rng: Random) -> Card:
    """Somebody, with some of the tools."""
    things = rng.sample(POOLS["thing"], 2)  # some are sayings too: a word stands for one thing
    left = [word for word in POOLS["saying"] if word not in things]
    pick = {key: rng.choice(POOLS[key]) for key in ("name", "mood", "home", "animal")}
    persona = Persona(**pick, likes=things, saying=rng.choice(left))
    return Card(persona, tuple(rng.sample(TOOLS, rng.randint(2, len(TOOLS)))))


# -- questions -------------------------------------------------------------------------------------


def tool_exchange(tool: str, split: str, rng: Random) -> Exchange:
    """A question that this tool answers; what is asked belongs to the split."""
    asked = _ASKED[tool]
    for _ in range(MAX_DRAWS):
        gaps, call, result, answer = asked(split, rng)
        if tool == "clock" or split_of(tool, call) == split:
            question = _typed(rng.choice(_words["tools"][tool][split]).format(**gaps), split, rng)
            lured = gaps.get("key") in _words["lures"]
            return Exchange(tool, question, answer.format(result=result), call, result, lured)
    raise RuntimeError(f"nothing of split {split!r} can be asked of {tool}")


def refused(split: str, rng: Random) -> Exchange:
    """A wish that no tool fulfils."""
    gaps = {"name": rng.choice(POOLS["name"]), "thing": rng.choice(_words["keys"])}
    text = rng.choice(_words["refused"][split]).format(**gaps)
    return Exchange(REFUSED, _typed(text, split, rng), REFUSAL)


def small_talk(split: str, rng: Random) -> Exchange:
    answer = rng.choice(list(_words["small_talk"]))
    text = rng.choice(_words["small_talk"][answer][split])
    return Exchange(SMALL_TALK, _typed(text, split, rng), answer)


def about(card: Card, slot: str, split: str, rng: Random) -> Exchange:
    """A question about one slot of a persona."""
    described = _words["slots"][slot]
    answer = described["answer"].format(**card.persona.gaps(card.tools))
    return Exchange(slot, _typed(rng.choice(described[split]), split, rng), answer)


def every_about(card: Card, split: str) -> list[Exchange]:
    """All questions about a persona that a split has, each once."""
    found: dict[str, Exchange] = {}
    for slot in SLOTS:
        described = _words["slots"][slot]
        answer = described["answer"].format(**card.persona.gaps(card.tools))
        for wording in described[split]:
            for carrier in dict.fromkeys(_words["carriers"][split]):
                plain = carrier.format(q=wording)
                for text in (_lower(plain), _capital(plain)):
                    found.setdefault(text, Exchange(slot, text, answer))
    return list(found.values())


def tool_questions(card: Card, split: str, count: int, seed: int = 0) -> list[Exchange]:
    """So many questions for the tools of a card, the tools in turn; each once, as far as the
    split has others."""
    rng, found = Random(f"{split}/{seed}"), dict[str, Exchange]()
    for number in range(20 * count):
        own = tool_exchange(card.tools[number % len(card.tools)], split, rng)
        found.setdefault(own.question, own)
        if len(found) == count:
            break
    return list(found.values())


def other_questions(
    make: Callable[[str, Random], Exchange], split: str, count: int
) -> list[Exchange]:
    """So many questions of another kind; each once, as far as there are others."""
    rng = Random(split)
    made = (make(split, rng) for _ in range(20 * count))
    return list({own.question: own for own in made}.values())[:count]


def answers_slot(persona: Persona, tools: Sequence[str], slot: str, text: str) -> bool:
    """True if a text has the words of a slot and no other's: one answer to all is mostly wrong."""
    said = set(text.replace(",", " ").replace(".", " ").replace("!", " ").split())
    own = persona.values(slot, tools)
    others = {v for other in SLOTS if other != slot for v in persona.values(other, tools)}
    return said.issuperset(own) and not said & (others - set(own))


def _typed(text: str, split: str, rng: Random) -> str:
    """As people type it: with something before it, in small letters without a mark, or neatly."""
    text = rng.choice(_words["carriers"][split]).format(q=text)
    return rng.choice((_lower, _capital))(text)


def _lower(text: str) -> str:
    return text.rstrip(".?!")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# -- what tools are asked --------------------------------------------------------------------------


def _asked_calc(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    by = rng.choice(list(CALCULATIONS))
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    if by != "times":
        a, b = sorted((10 * a + rng.randint(0, 9), 10 * b + rng.randint(0, 9)), reverse=True)
    result = {"times": a * b, "plus": a + b, "minus": a - b}[by]
    gaps = {"a": a, "b": b, "by": by}
    return gaps, f"calc {a}{CALCULATIONS[by]}{b}", str(result), "It is {result}."


def _asked_read(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    file = rng.choice(list(_words["files"]))
    key = rng.choice(_words["lures"] if rng.random() < LURED else _words["keys"])
    field = rng.choice(_words["files"][file])
    gaps = {"file": file, "key": key, "field": field}
    return gaps, f"read {file} {key} {field}", _entry(file, key, field), "It is {result}."


def _asked_conv(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    unit, to, factor = rng.choice(_words["units"])
    amount = rng.randint(2, 999)
    gaps = {"amount": amount, "unit": unit, "to": to}
    return gaps, f"conv {amount} {unit} {to}", str(amount * factor), "It is {result}."


def _asked_clock(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    now = moment(split) if split != "train" else _moment(rng)
    return {}, "clock", f"{now:%Y-%m-%d %H:%M}", f"It is {now:%H:%M}."


def _asked_find(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    word = rng.choice(_words["mentioned"])
    file, line, text = place_of(word)
    return {"word": word}, f"find {word}", f"{file}:{line}: {text}", f"In {file}."


def _asked_python(split: str, rng: Random) -> tuple[dict[str, Any], str, str, str]:
    length = rng.randint(4, 9)
    word = "".join(rng.choice("aeiou" if n % 2 else "bdfgklmnprst") for n in range(length))
    return {"word": word}, f"python print(len('{word}'))", str(length), "It has {result} letters."


_ASKED = {
    "calc": _asked_calc,
    "read": _asked_read,
    "conv": _asked_conv,
    "clock": _asked_clock,
    "find": _asked_find,
    "python": _asked_python,
}


def moment(split: str) -> datetime:
    """The time at which the questions of a split are asked."""
    return _moment(Random(SPLITS.index(split)))


def _moment(rng: Random) -> datetime:
    return FIRST_DAY + timedelta(minutes=rng.randrange(60 * 24 * 365))


def _entry(file: str, key: str, field: str) -> str:
    return str(1000 + _number(f"{file}/{key}/{field}") % 9000)


def place_of(word: str) -> tuple[str, int, str]:
    """The text file, line and sentence that has a word."""
    words = sorted(_words["mentioned"], key=lambda w: (_number(w), w))
    texts, n = _words["texts"], words.index(word)
    return texts[n % len(texts)], 1 + n // len(texts), f"the {word} was seen today"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def asked_files() -> dict[str, str]:
    """The files that questions are about, by name."""
    keys, found = [*_words["keys"], *_words["lures"]], dict[str, str]()
    for file, fields in _words["files"].items():
        if file.endswith(".json"):
            table = {key: {f: int(_entry(file, key, f)) for f in fields} for key in keys}
            found[file] = json.dumps(table)
        else:
            rows = [",".join((key, *(_entry(file, key, f) for f in fields))) for key in keys]
            found[file] = "\n".join([",".join(("name", *fields)), *rows])
    lines: dict[str, dict[int, str]] = {name: {} for name in _words["texts"]}
    for word in _words["mentioned"]:
        file, line, text = place_of(word)
        lines[file][line] = text
    return found | {f: "\n".join(t for _, t in sorted(own.items())) for f, own in lines.items()}
