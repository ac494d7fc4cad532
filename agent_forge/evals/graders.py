"""Graders: is a generated text right? Numbers are compared, functions run, documents parsed.

Each grader takes the task and all that the model wrote. Nothing of it is executed or compiled in
this process: code goes to the sandbox, documents through parsers that only read.
"""

import contextlib
import itertools
import json
import re
import textwrap
from fractions import Fraction
from typing import Any
from unicodedata import normalize

from agent_forge.data.baselines import Grade
from agent_forge.data.tasks import FAMILIES, Task, is_right
from agent_forge.data.tasks.verifiers import MAX_TEXT, PARSERS, document_share, json_document, words
from agent_forge.sandbox import SandboxLimits, run_tests

LIMITS = SandboxLimits(cpu_seconds=3, wall_seconds=6.0)
LONGEST_NUMBER = 60
STARTS = 20  # brackets of a text at which JSON could begin
THERE, ALMOST = 0.2, 0.99  # credit in part: for what has the right form; the most
CALLED = re.compile(r"[A-Za-z_]\w*(?=\()")
MARK = re.compile(r"answer(?P<label>\s*[:=])?(?:(?<=[:=])|\s+is\s*:?)", re.IGNORECASE)
WHICH_IS = re.compile(r"\b(?:which is|equals|is equal to|comes to|namely)\b", re.IGNORECASE)
_WORD = (
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b"
)
NUMBER_WORD = re.compile(_WORD, re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
BOXED = re.compile(r"\\boxed\s*\{")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for what no number is made of: roots, pi, commands
WORDS = r"text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|operatorname"
# No heading, as `#### Step 1` or `#### 1. Eggs` is.
HASHES = re.compile(rf"####\s*(?=[-+]?\s?[$\u20ac\u00a3]?-?[\d.{UNKNOWN}])(?!\d+[.)]\s*[^\W\d])")
_FRACTION = r"\\[cdt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
# How numbers are written, and how FIGURE reads them: one after the other.
_FORMS: Any = (
    (r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " "),
    (r"([\u00b9\u00b2\u00b3\u2070\u2074-\u2079\u207b]+)", r"^\1"),  # then a usual digit
    (r".+", lambda m: normalize("NFKC", m[0])),
    (r"\u2044", "/"),
    (r"(?<!\w)_{1,3}(?=[-+$.\d])|(?<=[\d%])_{1,3}(?!\w)", ""),
    (r"(?<=\d)['_\u2019](?=\d{3}(?!\d))", ""),
    (r"(?i)\b(?:minus|negative)\s+(?=[\d.$])|(?<=[=(])\s*[-\u2212]\s+(?=[\d.$])", "-"),
    (r"(?i)(####|\b(?:answer|result|total) is:?)[ \t]*[-\u2212][ \t]+(?=[\d.$])", r"\1 -"),
    (rf"(?i){_WORD}(?:[\s-](?:hundred|thousand|and|{_WORD})){{0,6}}\s?\((-?[\d.,]+)\)", r"\1"),
    (r"(?<!\w)[\u2012\u2013](?=[\d.$\\])|\u2212", "-"),
    (r"\\!|\\left\b|\\right\b|\\displaystyle\b|\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)", ""),
    (r"\{,\}", ","),
    (r"\\([$%])", r"\1"),
    (r"\\[,;: ()\[\]]|~|\\q?quad\b", " "),
    (rf"\\(?:{WORDS})\s*\{{([^{{}}]*)\}}", r" \1 "),
    (rf"(?<=-){_FRACTION}", r"\1\2/\3\4 "),
    (_FRACTION, r" \1\2/\3\4 "),
    (r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1"),
    (r"\*\*(?=-?\d)(?<=\d\*\*)", "^"),
    (r"\s?(?:\\times\b|\\cdot\b|[\u00d7\u00b7\u22c5]|(?<=\d)\s?[xX*](?=\s?10\^))\s?", "*"),
    (r"(?<![\w.,])(\d{1,3}(?: \d{3})+)(?![\d/]| [\d/]|[.,]\d{3})", lambda m: m[0].replace(" ", "")),
    (r"(?i)\\(?!boxed)[a-z]+\s*(?:\{[^{}]*\})*|\bsqrt\s*\([^()]*\)|[\u221a\u03c0]", UNKNOWN),
)
FORMS = [(re.compile(pattern), form) for pattern, form in _FORMS]
SCALES = {"hundred": 2, "thousand": 3, "k": 3, "million": 6, "billion": 9, "trillion": 12}
FIGURE = re.compile(
    r"(?<![\w.,^])(?<!\d:)(?P<sign>[-+]?)(?:[$\u20ac\u00a3]\s?)?(?P<inner>-?)"
    r"(?:(?P<units>\d+)\s+(?=\d+\s?/\s?\d))?"  # as the 1 of 1 1/2
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?![.,:'_]?\d|x[\dA-Fa-f])"
    r"(?:\s?/\s?(?P<below>\d+)|\^(?P<power>[-+]?\d{1,3})(?!\d))?(?:[eE](?P<e>[-+]?\d{1,3})(?!\w))?"
    r"(?:\*10\^(?P<tens>[-+]?\d{1,3})(?!\d))?(?!\^)"
    rf"(?:\s?(?P<scale>(?i:{'|'.join(SCALES)}))(?!\w))?\s?(?P<percent>(?:%|(?i:per\s?cent)\b)?)"
)
GOES_ON = re.compile(rf"\s*(?:[-+*/^xX]\s*(?:\.?\d|[({UNKNOWN}])|{UNKNOWN})")  # an expression
IN_WORDS = re.compile(
    r"(?i)\s*(?:[a-z]+\s+)?(?:times|plus|minus|of|per|multiplied|divided|(?:less|more|fewer)\s+than)\b"
)
OR = re.compile(r"(?:\s*[^\W\d]{1,20}){0,2}?\s*,?\s*\bor\s+", re.IGNORECASE)  # then another number
NOT = re.compile(r"\bnot\s+\Z", re.IGNORECASE)
# What ends the words that give a number: what follows may reckon with others.
CLAUSE_END = re.compile(
    r"\n|[(;]|[.!?](?=\s|$)|,\s(?!(?:but|or)\s+[-$]?\d)|\b(?:since|because|where|check)\b", re.I
)
FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
BODY = re.compile(r"\n*[ \t]+(?!```)\S")  # that goes on with the function of a question
CLOSING = re.compile(r"\n[ \t]*```")  # a fence that the question has opened
TOP_LEVEL = re.compile(
    r"(?:def|async def|class|import|from|if|for|while|try|except|finally|else|elif|with|@|#|[)\]}])"
    r"|[A-Za-z_][\w.]*(?:\[.*?\])?\s*(?:[-+*/|&]?=|\()"
)
DEFINES = re.compile(r"^(?:async )?def ", re.MULTILINE)
_CONSTANT = r"(?:#|[A-Za-z_]\w* *= *(?:[-\d\"'\[({]|[\w.]+\()).*\n+"  # right before a definition
BEGINS = re.compile(rf"^(?:{_CONSTANT})*(?:def|async def|class|import|from|@)\b", re.MULTILINE)


def final_number(text: str) -> tuple[Fraction, bool] | None:
    """The number that a text gives as its answer, and whether it is a percentage: after the last
    `####` that no box and no "answer is" follows, in the last box, after the last "answer is", or
    the last of all."""
    text = text[:MAX_TEXT]
    for pattern, form in FORMS:
        text = pattern.sub(form, text)
    marked = _marked(text)
    before, equals, _ = marked.partition("=")
    plain = FIGURE.match(before.strip())
    reckons = plain and any(p.match(before.strip(), plain.end()) for p in (GOES_ON, IN_WORDS))
    told = equals and plain and not reckons
    marked = before if told else marked.rpartition("=")[2]
    figures = _figures(marked)[:1]
    if not figures and NUMBER_WORD.search(marked):
        return None  # it tells a number, and none that is in the text
    if not figures and not re.search(rf"[\d{UNKNOWN}]", marked):
        marked, figures = text, _figures(text)[-1:]
    if not figures or UNKNOWN in marked[: figures[0].start()][-1:]:
        return None
    (figure,) = figures
    value, either = _value(figure), OR.match(marked, figure.end())
    other = FIGURE.match(marked, either.end()) if either else None
    if GOES_ON.match(marked, figure.end()) or (other and not _alike(value, _value(other))):
        return None
    return value


def _marked(text: str) -> str:
    """The clause that a text says its answer in; nothing if it says nowhere."""
    boxes = [match.end() for match in BOXED.finditer(text)]
    marks = list(MARK.finditer(text))
    hashes = [match.end() for match in HASHES.finditer(text)]
    later = [*boxes[-1:], *(match.start() for match in marks[-1:])]
    if hashes and hashes[-1] > max(later, default=-1):
        return CLAUSE_END.split(text[hashes[-1] :].strip(), maxsplit=1)[0]
    if boxes:
        return text[boxes[-1] :].partition("}")[0]
    if not marks:
        return ""
    said = text[marks[-1].end() :].strip()
    if marks[-1]["label"] and not FIGURE.match(said.lstrip("*-$ ")):  # it reckons, then tells
        sentences = [s for s in SENTENCE_END.split(said) if FIGURE.search(s)]
        said = sentences[-1] if sentences else said
    clause = CLAUSE_END.split(said, maxsplit=1)[0]
    sentence = SENTENCE_END.split(said, maxsplit=1)[0]
    plain = FIGURE.match(said)
    goes_on = plain and any(p.match(said, plain.end()) for p in (GOES_ON, IN_WORDS))
    reckons = not plain or (goes_on and "=" not in clause)
    if reckons and (told := WHICH_IS.search(sentence)):
        return CLAUSE_END.split(sentence[told.end() :], maxsplit=1)[0]
    denies = FIGURE.search(clause) and not _figures(clause)  # then what it is instead
    return sentence if denies else clause


def _figures(text: str) -> list[re.Match[str]]:
    """The numbers in a text, without those that it says are not meant."""
    found = ((figure, figure.start()) for figure in FIGURE.finditer(text))
    return [figure for figure, at in found if not NOT.search(text[max(0, at - 9) : at])]


def math(task: Task, text: str) -> bool:
    """True if the final number is that of the answer; 50 % may be written as 50, 50% or 0.5."""
    return _alike(final_number(task.answer), final_number(text))


def _alike(one: tuple[Fraction, bool] | None, other: tuple[Fraction, bool] | None) -> bool:
    if one is None or other is None:
        return False
    values = [{v, v / 100} if percent else {v} for v, percent in (one, other)]
    return bool(values[0] & values[1])


def _value(figure: re.Match[str]) -> tuple[Fraction, bool] | None:
    """The number that a match of FIGURE is, and whether it is a percentage."""
    if len(figure.group()) > LONGEST_NUMBER:
        return None
    number, below = Fraction(figure["number"].replace(",", "")), int(figure["below"] or 1)
    power = int(figure["power"] or 1)
    if not below or (power < 0 and not number):
        return None
    tens = int(figure["e"] or 0) + int(figure["tens"] or 0)
    tens += SCALES.get((figure["scale"] or "").lower(), 0)
    value = (number**power / below + int(figure["units"] or 0)) * Fraction(10) ** tens
    negative = figure["sign"] == "-" or figure["inner"]
    return -value if negative else value, bool(figure["percent"])


def source(text: str, name: str = "") -> str:
    """The program in a text: its fenced blocks up to the one that defines the function of a name,
    else its first that defines something, else its first, else from the first definition to
    prose."""
    if blocks := [textwrap.dedent(fenced[1]) for fenced in FENCE.finditer(text)]:
        wanted = re.compile(rf"^(?:async )?def {re.escape(name)}\b", re.MULTILINE)
        place = next((i for i, b in enumerate(blocks) if name and wanted.search(b)), None)
        if place is not None:
            return "\n\n".join(b for b in blocks[: place + 1] if BEGINS.search(b))
        return next((block for block in blocks if BEGINS.search(block)), blocks[0])
    begins, kept = BEGINS.search(text), []
    for line in text[begins.start() if begins else 0 :].splitlines():
        if line.strip() and not line[0].isspace() and not TOP_LEVEL.match(line):
            break
        kept.append(line)
    return "\n".join(kept)


def code(task: Task, text: str) -> bool:
    """True if the function in the text passes all tests of the task."""
    return _passes(program_of(task, text), task)


def program_of(task: Task, text: str) -> str:
    """The program in a text that `code` runs for a task."""
    return source(text, _called(task))


def _called(task: Task) -> str:
    """The function that the tests of a task call."""
    found = CALLED.search(task.tests[0]) if task.tests else None
    return found[0] if found else ""


def completed(task: Task, text: str) -> bool:
    """The same for a question that begins the function, which the text continues. What the
    question defines before that function is for the tests too, as the question has it."""
    begins = [match.start() for match in DEFINES.finditer(task.question)]
    setup = task.question[: begins[-1]] if begins else ""
    if not BODY.match(text) and (FENCE.search(text) or BEGINS.match(text)):
        return _passes(f"{task.question}\n    pass\n\n{source(text)}", task, setup)
    return _passes(task.question + CLOSING.split(text, maxsplit=1)[0], task, setup)


def _passes(program: str, task: Task, setup: str = "") -> bool:
    """True if a program passes the tests."""
    return _can_run(program) and run_tests(program, task.tests, setup=setup, limits=LIMITS).ok


def _can_run(program: str) -> bool:
    """False for what has no function, or is no text: that is not run."""
    surrogates = any("\ud800" <= c <= "\udfff" for c in program)
    return "def " in program and len(program) <= MAX_TEXT and not surrogates


def document(task: Task, text: str) -> bool:
    """True if the text is, or JSON in it begins, a document with the content of the answer."""
    accept, given = _document_in(task, text)
    return bool(accept(task, given))


def _document_in(task: Task, text: str) -> tuple[Any, str]:
    """What checks a task's document, and the part of a text that is to be one."""
    fenced = FENCE.search(text[:MAX_TEXT])
    family = FAMILIES.get(task.family)
    accept = family.accept if family and family.accept else json_document
    given = fenced[1] if fenced else text
    return accept, _bare_json(given) if accept is json_document else given


def code_in_part(task: Task, text: str) -> float:
    """1 if all tests pass; a fifth of less if the function is there, the rest by passed tests."""
    called = _called(task)
    program = source(text, called)
    if not called or not _can_run(program):
        return 0.0
    result = run_tests(program, (called, *task.tests), limits=LIMITS)
    there, *passed = result.passed
    share = THERE * there + (1 - THERE) * sum(passed) / len(passed)
    return 1.0 if result.ok else min(share, ALMOST)


def document_in_part(task: Task, text: str) -> float:
    """1 if the content is that of the answer; else a fifth for a document of the kind that was
    asked for, the rest by the values that stand in their places."""
    if document(task, text):
        return 1.0
    accept, given = _document_in(task, text)
    share = document_share(accept, task.answer, given) if accept in PARSERS else None
    return 0.0 if share is None else min(THERE + (1 - THERE) * share, ALMOST)


def _bare_json(text: str) -> str:
    """The first JSON object or list in a text, else the text."""
    if len(text) > MAX_TEXT:
        return text
    for start in itertools.islice((m.start() for m in re.finditer(r"[\[{]", text)), STARTS):
        with contextlib.suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(text, start)
            return text[start:end]
    return text


def same(task: Task, text: str) -> bool:
    """True if the text is the answer itself, as one of several choices is."""
    return text.strip() == task.answer.strip()


# What stands for a grader in the hash of an evaluation, under which scores are cached.
GRADER_IDS: dict[Grade, str] = {is_right: "check", math: "math", code: "code", words: "words"}
GRADER_IDS |= {completed: "completed", document: "document", same: "same"}
GRADER_IDS |= {code_in_part: "code in part", document_in_part: "document in part"}
IN_PART: dict[Grade, Grade] = {code: code_in_part, document: document_in_part}
