"""Graders: is a generated text right? Numbers are compared, functions run, documents parsed.

Each grader takes the task and all that the model wrote. Nothing of it is executed or compiled in
this process: code goes to the sandbox, documents through parsers that only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction

from agent_forge.data.tasks import FAMILIES, Task, is_right
from agent_forge.data.tasks.verifiers import MAX_TEXT, json_document, words
from agent_forge.sandbox import SandboxLimits, run_tests

Grade = Callable[[Task, str], bool]

LIMITS = SandboxLimits(cpu_seconds=3, wall_seconds=6.0)
LONGEST_NUMBER = 60
MARKS = (r"####", r"answer\s+is\s*:?", r"answer\s*:", r"answer\s*=")
MARK = re.compile("|".join(MARKS), re.IGNORECASE)
BOXED = re.compile(r"\\boxed\s*\{")
LATEX = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}")
FIGURE = re.compile(
    r"(?<![\w.,])(?P<sign>[-+\u2212]?)\s?\\?[$\u20ac\u00a3]?(?P<inner>-?)"
    r"(?:(?P<units>\d+)\s+(?=\d+\s?/\s?\d))?"  # as the 1 of 1 1/2
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<below>\d+))?\s?(?P<percent>\\?%?)"
)
FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
TOP_LEVEL = re.compile(
    r"(?:def|async def|class|import|from|if|for|while|try|except|finally|else|elif|with|@|#|[)\]}])"
    r"|[A-Za-z_][\w.]*(?:\[.*?\])?\s*(?:[-+*/|&]?=|\()"
)
BEGINS = re.compile(r"^(?:def|async def|class|import|from|@)\b", re.MULTILINE)


def final_number(text: str) -> tuple[Fraction, bool] | None:
    """The number that a text gives as its answer, and whether it is a percentage.

    It stands after the last `####`, in the last box, after the last "answer is", or is the last.
    """
    text = LATEX.sub(r"\1/\2", text[:MAX_TEXT].replace("\\!", "").replace("{,}", ","))
    boxes = [match.end() for match in BOXED.finditer(text)]
    marks = [match.end() for match in MARK.finditer(text)]
    if "####" in text:
        marked = text.rpartition("####")[2]
    elif boxes:
        marked = text[boxes[-1] :].partition("}")[0]
    else:
        marked = text[marks[-1] :].strip().partition("\n")[0] if marks else ""
    found = _figures(marked.rpartition("=")[2])[:1] or _figures(text)[-1:]
    return found[0] if found else None


def math(task: Task, text: str) -> bool:
    """True if the final number is that of the answer; 50 % may be written as 50, 50% or 0.5."""
    expected, found = final_number(task.answer), final_number(text)
    if expected is None or found is None:
        return False
    values = [{v, v / 100} if percent else {v} for v, percent in (expected, found)]
    return bool(values[0] & values[1])


def _figures(text: str) -> list[tuple[Fraction, bool]]:
    """The numbers in a text, and whether each is a percentage."""
    figures = []
    for match in FIGURE.finditer(text):
        if len(match.group()) > LONGEST_NUMBER or not int(match["below"] or 1):
            continue
        value = Fraction(match["number"].replace(",", "")) / int(match["below"] or 1)
        value += int(match["units"] or 0)
        negative = match["sign"] in ("-", "\u2212") or match["inner"]
        figures.append((-value if negative else value, bool(match["percent"])))
    return figures


def source(text: str) -> str:
    """The program in a text: its first fenced block, else from the first definition to prose."""
    fenced = FENCE.search(text)
    if fenced:
        return fenced[1]
    begins = BEGINS.search(text)
    lines = text[begins.start() if begins else 0 :].splitlines()
    kept = []
    for line in lines:
        if line.strip() and not line[0].isspace() and not TOP_LEVEL.match(line):
            break
        kept.append(line)
    return "\n".join(kept)


def code(task: Task, text: str) -> bool:
    """True if the function in the text passes all tests of the task."""
    return _passes(source(text), task)


def completed(task: Task, text: str) -> bool:
    """The same for a question that is the beginning of the function, which the text continues."""
    if FENCE.search(text) or BEGINS.match(text):
        return _passes(f"{task.question}\n    pass\n\n{source(text)}", task)
    return _passes(task.question + text, task)


def _passes(program: str, task: Task) -> bool:
    """True if a program passes the tests; without a function, or as no text, it is not run."""
    surrogates = any("\ud800" <= c <= "\udfff" for c in program)
    if "def " not in program or len(program) > MAX_TEXT or surrogates:
        return False
    return run_tests(program, task.tests, limits=LIMITS).ok


def document(task: Task, text: str) -> bool:
    """True if the text is, or JSON in it begins, a document with the content of the answer."""
    fenced = FENCE.search(text[:MAX_TEXT])
    family = FAMILIES.get(task.family)
    accept = family.accept if family and family.accept else json_document
    given = fenced[1] if fenced else text
    return accept(task, _bare_json(given) if accept is json_document else given)


def _bare_json(text: str) -> str:
    """The first JSON object or list in a text, else the text."""
    start = min((at for at in map(text.find, "[{") if at >= 0), default=-1)
    if start < 0 or len(text) > MAX_TEXT:
        return text
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return text
    return text[start:end]


def same(task: Task, text: str) -> bool:
    """True if the text is the answer itself, as one of several choices is."""
    return text.strip() == task.answer.strip()


# What stands for a grader in the hash of an evaluation, under which scores are cached.
GRADER_IDS: dict[Grade, str] = {is_right: "check", math: "math", code: "code", words: "words"}
GRADER_IDS |= {completed: "completed", document: "document", same: "same"}
