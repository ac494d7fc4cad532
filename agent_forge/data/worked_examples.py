"""Worked examples before a question, and options below it, known by their form and not by a list of
labels: what a prompt ends with (`Sentiment:`, `=>`) stood before, with an answer behind it.

Only the last example of a prompt asks; options ask the same in any order.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

TURN = 24  # letters and digits of a last turn that says enough without the turns before it
_WORD = r"[^\s:=>|\])]"
LABEL = re.compile(
    rf"(?m)^([^\w\n]{{0,20}})([^\W\d_]{_WORD}*(?: {_WORD}+){{0,4}}) ?((?!::)[:>\])]+|$)"
)
WITHIN = re.compile(
    rf"(?<!\S)()([^\W\d_]{_WORD}*) ?\d{{0,3}} ?(:)(?!\S)"
)  # within a line: one word
HEADING = re.compile(r"[#<\[*=]")  # before a label that is a line of its own
SIGN = re.compile(r"(?:(?<=\s)[^\w\s.,;!?'\"()\[\]{}<]{1,4}|[-=~]+>|[=:\u2190-\u21ff])$")
NAMES_VALUES = ("=", ":", "-", "--", "\u2013", "\u2014")  # signs that have other uses too
LETTERS = re.compile(r"[^\W\d_]+")
LIST_NUMBER = re.compile(r"\A\W*\d{1,3}[.)]\s+")
OWN_NUMBER = re.compile(
    r"(?m)^([^\w\n]{0,20}[^\W\d_][^\s:\d]*(?: [^\s:\d]+){0,4}) ?\d{1,3}(?= ?[:)\]>])"
)
OPTION = re.compile(
    r"(?m)(?<!\S)(?:[(\[](?P<number>[A-Za-z]|\d\d?)[)\]]\s*"
    r"|\**(?P<plain>[A-Za-z]|\d\d?)[.):]\**\s+)|^[-*\u2022]\s+"
)


class Label(NamedTuple):
    """A label of a text: where it stands, and its letters."""

    start: int
    end: int
    name: str


def last_example(text: str) -> str:
    """The last of the worked examples that a text consists of, without numbers of its own; the
    whole text if it has no such form."""
    text = "\n".join(line.strip() for line in text.splitlines()).strip()
    labels = list(_labels(text, LABEL))
    begin = _after_label(text, labels)
    begin = begin or _after_label(text, list(_labels(text, WITHIN)), within=True)
    if not begin and (begin := _after_sign(text)):
        return LIST_NUMBER.sub("", text[begin:])
    begin = begin or _after_units(text, labels)
    seen = {at.name for at in labels if at.start < begin}
    return OWN_NUMBER.sub(lambda m: m[1] if _letters(m[1]) in seen else m[0], text[begin:])


def _labels(text: str, form: re.Pattern[str]) -> Iterator[Label]:
    """What stands before a colon or a closing bracket, or is a heading."""
    for found in form.finditer(text):
        mark, words, end = found.groups()
        is_heading = not end and HEADING.search(mark)
        is_tag = end.startswith(">") and "<" in mark
        if is_heading or is_tag or end[:1] in (":", ")", "]"):
            yield Label(found.start(), found.end(), _letters(words).rstrip("0123456789"))


def _after_label(text: str, labels: list[Label], within: bool = False) -> int:
    """Where the last example begins in a text that ends with a label which had answers before."""
    if not labels or _says(text[labels[-1].end :]):
        return 0
    *before, final = labels
    while before and before[-1].name == final.name:
        if _says(text[before[-1].end : final.start]):
            break
        final = before.pop()  # it is written twice
    seen = [at for at in before if at.name == final.name]
    if not seen or not _says(text[: seen[0].start]):
        return 0
    answered = seen[-1].end
    heads = {at.name for at in before if at.start < seen[0].start}
    again = [at.start for at in before if at.start >= answered and at.name in heads]
    if again:  # with the paragraph that it is in
        paragraph = text.rfind("\n\n", answered, again[0])
        return again[0] if paragraph < 0 else paragraph
    if within:  # a word before a colon alone says too little
        return 0
    answer = final.start - len(text[answered : final.start].lstrip())
    for gap in ("\n\n", "\n") if len(seen) > 1 else ("\n\n",):
        begin = text.find(gap, answer, final.start)
        if begin > 0 and _says(text[begin : final.start]):
            return begin
    return 0


def _after_sign(text: str) -> int:
    """Where the last line begins if it ends with a sign that parts lines before it in two."""
    begin = text.rfind("\n") + 1
    sign = SIGN.search(text, begin)
    asked = text[begin : sign.start()] if sign else ""
    if not sign or not _says(asked):
        return 0
    words, start, at = set(LETTERS.findall(asked)), 0, 0
    for line in text[:begin].splitlines(keepends=True):
        left, _, right = line.partition(sign[0])
        alike = sign[0] not in NAMES_VALUES or words == set(LETTERS.findall(left))
        at += len(line)
        if alike and _says(left) and _says(right):
            start = at
    return max(start, text.find("\n\n", start - 1, begin)) if start else 0


def _after_units(text: str, labels: list[Label]) -> int:
    """Where the last example begins if its labels begin those of the ones before it, and the rest
    of these, the answer, is missing. What may be a turn of a conversation has to say enough."""
    names, before = [at.name for at in labels], dict[str, int]()
    for last, name in enumerate(names):
        first, size = before.get(name, last), len(names) - last
        if size < last - first and names[first : first + size] == names[last:]:
            unit, start = names[first:last], labels[last].start
            apart = text[:start].endswith("\n\n")
            apart = apart and not text[: labels[last - 1].start].endswith("\n\n")
            twice = names[max(0, first - len(unit)) : first] == unit
            enough = twice and sum(map(str.isalnum, text[start:])) >= TURN
            return start if apart or enough else 0
        before[name] = last
    return 0


def _says(text: str) -> bool:
    return any(map(str.isalnum, text))


def sorted_options(text: str) -> str:
    """A text with its lines from the first option on in one order, without the letters or numbers
    of the options; the text itself if it lists none."""
    marks = sorted(_options(text), key=re.Match.start)
    if not marks:
        return text
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    pieces = "\n".join(text[m.end() : end] for m, end in zip(marks, ends, strict=True))
    return text[: marks[0].start()] + "\n".join(sorted(pieces.split("\n"), key=_letters))


def _options(text: str) -> Iterator[re.Match[str]]:
    """The marks of options: bullets, and what counts on from A, a or 1 in one form."""
    lists: list[list[re.Match[str]]] = []
    newest: dict[tuple[object, ...], list[re.Match[str]]] = {}
    for mark in OPTION.finditer(text):
        number = mark["number"] or mark["plain"] or ""
        form = mark[0].strip().replace(number, ""), number.isdigit(), number.isupper()
        found = newest.get(form, [])
        place = int(number) - 1 if number.isdigit() else ord(number.lower() or "a") - ord("a")
        if place == len(found) or not number:
            found.append(mark)
        elif not place:
            found = [mark]
        if len(found) == 1:
            lists.append(found)
        newest[form] = found
    for found in lists:
        are_lines = all(text[at.start() - 1] == "\n" for at in found if at.start())
        if len(found) > (1 if are_lines or found[0][0][0] in "([" else 2):
            yield from found


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
