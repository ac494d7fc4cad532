"""From the rows of each dataset to training examples: one small generator for each kind of row.

A reader knows the fields of the original files and of the Hugging Face version.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent_forge.data.row_files import MAX_CHARACTERS, DataRow, pieces

# Words in names of fields that belong to a question even as a number, unless the last word tells:
# `option_2` and `input` are asked, `context_title`, `table_name` and `input_language` only tell.
_BELONGS = re.compile(r"\b([a-e]|choice|option|input|context|fact|hint|table|text|query)s?\b")
_MEDIA = re.compile(r"\b(audio|chart|figure|image|video)s?\b")
# Last words of names of fields that only tell of a question; what any other field says is asked.
_TELLS = re.compile(
    r"\b(annotation|annotator|at|author|category|checksum|cluster|comment|concept|count|created"
    r"|dataset|date|difficulty|domain|explanation|family|fold|format|grade|group|hash|id|idx|index"
    r"|info|key|label|lang|language|length|level|license|link|meta|metadata|model|name|note|number|origin"
    r"|provider|quality|rating|rationale|reason|reasoning|reviewer|score|section|size|skill|solution"
    r"|source|split|status|style|subject|subset|tag|task|test|time|timestamp|title|token|topic|type"
    r"|uid|updated|uri|url|user|uuid|version|year)s?$"
    r"|^(challenge )?test( setup)? (list|code)$|\b(lang|language|country) codes?$"
)
# Names of fields that say whether the answer of a row is right; `label` says so too, as in rows for
# KTO, unless it is a class.
_RIGHT = re.compile(r"^(is )?(correct|right|accepted)$")
_RIGHT_OR_LABEL = re.compile(f"{_RIGHT.pattern}|^label$")
_CLASSES = ("yes", "no", "true", "false")
_ZERO = ("0", "0.0", "no")  # what is not right, where no class is meant
LONG_ENOUGH = 3  # words of a field that can be found again in a prompt
_READ = {
    "messages": ("messages", "choices"),
    "prompt": ("prompt", "completion", "choices"),
    "question": ("question", "answer", "choices"),
}
_OF_MESSAGES = ("role", "content", "tool_calls", "name", "weight")
_HIDDEN = ("function_call", "refusal", "audio", "annotations", "image", "images", "video", "videos")


@dataclass(frozen=True)
class Example:
    """A prompt and the completion that is learned; plain text has no prompt."""

    prompt: str
    completion: str
    source: str = ""
    split: str = ""
    choices: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()  # a conversation; the prompt is for reading only
    tests: tuple[str, ...] = ()  # of code: what a right answer passes


Reader = Callable[[DataRow], Iterator[Example]]


def asked(question: str, answer: str, context: str = "", *choices: str) -> Example:
    """An example in the form that all questions share."""
    before = f"{context.strip()}\n" if context.strip() else ""
    prompt = f"{before}Question: {question.strip()}\nAnswer:"
    return Example(prompt, f" {answer.strip()}", choices=tuple(f" {c.strip()}" for c in choices))


def coded(task: str, code: str) -> Example:
    return Example(f'"""\n{task.strip()}\n"""\n', f"{code.strip()}\n")


def gsm8k(row: DataRow) -> Iterator[Example]:
    yield asked(row.text("question"), re.sub(r"<<[^<>]*>>", "", row.text("answer")))


def svamp(row: DataRow) -> Iterator[Example]:
    body = row.text("Body").strip()
    body += "" if body.endswith((".", "?", "!", ",")) else "."
    yield asked(f"{body} {row.text('Question')}", row.text("Answer"))


def asdiv(row: DataRow) -> Iterator[Example]:
    body = f"{row.text('body').strip()} " if row.has("body") else ""
    yield asked(f"{body}{row.text('question')}", row.text("result", "answer"))


def mbpp(row: DataRow) -> Iterator[Example]:
    tests = row.texts("test_list")
    if not tests:
        raise row.damaged("field 'test_list' is empty")
    before = f"{row.text('test_setup_code')}\n" if row.value.get("test_setup_code") else ""
    task = f"{row.text('text', 'prompt')}\n{tests[0]}"
    yield replace(coded(task, row.text("code")), tests=tuple(before + test for test in tests))


def mbpp_kind(row: DataRow) -> str:
    """The published split: 11-510 test, 511-600 validation, the rest for training."""
    task = row.get("task_id")
    if not isinstance(task, int):
        raise row.damaged("field 'task_id' is not a number")
    return "test" if 11 <= task <= 510 else "valid" if 511 <= task <= 600 else "train"


def codexglue(row: DataRow) -> Iterator[Example]:
    yield coded(row.text("docstring"), row.text("code"))


def arc(row: DataRow) -> Iterator[Example]:
    question = row.get("question")
    if isinstance(question, Mapping):  # the original nests it
        inner = replace(row, value=question)
        stem, listed = inner.text("stem"), inner.get("choices")
        pairs = [(c.get("label"), c.get("text")) for c in listed]
    else:
        choices = replace(row, value=row.get("choices"))
        stem = row.text("question")
        pairs = list(zip(choices.get("label"), choices.get("text"), strict=True))
    texts = {str(label): row.checked(text, "choices") for label, text in pairs}
    key = row.text("answerKey")
    if key not in texts or len(texts) < len(pairs):  # of two with one label neither is meant
        raise row.damaged(f"field 'answerKey' is {key!r}, choices are {pairs}")
    yield asked(stem, texts[key], "", *texts.values())


def hotpotqa(row: DataRow) -> Iterator[Example]:
    """The context is the sentences that the answer rests on, where the file has them."""
    supporting: list[str] = []
    if row.has("context") and row.has("supporting_facts"):
        context, facts = row.get("context"), row.get("supporting_facts")
        try:
            if isinstance(context, Mapping):  # Hugging Face: columns
                context = list(zip(context["title"], context["sentences"], strict=True))
                facts = list(zip(facts["title"], facts["sent_id"], strict=True))
            sentences = dict(context)
            kept = [sentences[t][i] for t, i in facts if t in sentences and i < len(sentences[t])]
            supporting = [sentence.strip() for sentence in kept]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise row.damaged("fields 'context' and 'supporting_facts' do not fit") from None
    yield asked(row.text("question"), row.text("answer"), " ".join(supporting))


def drop(row: DataRow) -> Iterator[Example]:
    passage = row.text("passage")
    if not row.has("qa_pairs"):  # Hugging Face: one question a row
        spans = replace(row, value=row.get("answers_spans")).get("spans")
        if not isinstance(spans, list) or not spans:
            raise row.damaged("field 'answers_spans' has no spans")
        yield asked(row.text("question"), row.checked(spans[0], "spans"), passage)
        return
    for pair in row.get("qa_pairs"):
        inner = replace(row, value=pair)
        answer = inner.get("answer")
        spans = ", ".join(map(str, answer.get("spans") or []))
        date = " ".join(str(part) for part in (answer.get("date") or {}).values() if part)
        said = str(answer.get("number") or "") or spans or date
        yield asked(inner.text("question"), row.checked(said, "answer"), passage)


def strategyqa(row: DataRow) -> Iterator[Example]:
    facts = row.value.get("facts") if row.has("facts") else []
    context = facts if isinstance(facts, str) else " ".join(row.checked(f, "facts") for f in facts)
    yield asked(row.text("question"), row.text("answer"), context, "no", "yes")


def piqa(row: DataRow) -> Iterator[Example]:
    if row.get("label") == -1:  # the published test set has no answers
        return
    choices = (row.text("sol1"), row.text("sol2"))
    yield asked(row.text("goal"), choices[row.index("label", 2)], "", *choices)


def hellaswag(row: DataRow) -> Iterator[Example]:
    if row.value.get("label") == "":  # the published test set has no answers
        return
    choices = tuple(f" {ending.strip()}" for ending in row.texts("endings"))
    gold = choices[row.index("label", len(choices))]
    yield Example(row.text("ctx").strip(), gold, choices=choices)


def boolq(row: DataRow) -> Iterator[Example]:
    if row.has("query"):  # passage and question in one, as evaluation suites keep it
        passage, _, question = row.text("query").rpartition("\nQuestion:")
        choices = row.texts("choices")
        answer = choices[row.index("gold", len(choices))]
        yield asked(question, answer, passage.removeprefix("Passage:"), *choices)
        return
    yield asked(row.text("question"), row.text("answer"), row.text("passage"), "no", "yes")


def text(row: DataRow) -> Iterator[Example]:
    """Plain text: a field `text`, or a row that is a text, cut where it is too long for one."""
    content = row.value if isinstance(row.value, str) else row.get("text", "content", "story")
    if not isinstance(content, str):  # a number is no text, though it may be an answer
        raise row.damaged(f"field 'text' is {type(content).__name__}, text is expected")
    whole = len(content) <= MAX_CHARACTERS
    numbered = enumerate(content.splitlines(keepends=True))
    for text in [content] if whole else (piece for _, piece in pieces(numbered)):
        if text.strip():
            yield Example("", row.checked(text, "text"))


def own(row: DataRow) -> Iterator[Example]:
    """A user's row: messages, prompt/completion or question/answer, with choices; or text."""
    form = next((name for name in _READ if row.has(name)), "")
    if form:
        given = [name for name in ("context", "passage") if form == "question" and row.has(name)][
            :1
        ]
        for name in (*_READ[form], *given):
            _refuse_unclear(row, name)
        choices = row.texts("choices", optional=True)
        row.refuse_long("".join(choices), "field 'choices'")
        if choices and isinstance(row.value.get("answer"), int):
            problem = "field 'answer' is a number: that of a choice, or its text?"
            raise row.damaged(problem, "write the text of the right choice, in quotes")
        if form == "messages":
            example = replace(_conversation(row), choices=choices)
        elif form == "prompt":
            example = Example(row.text("prompt"), row.text("completion"), choices=choices)
        else:
            context = row.text(*given) if given else ""
            example = asked(row.text("question"), row.text("answer"), context, *choices)
        _refuse_unread(row, (*_READ[form], *given), example.prompt)
        yield example
    elif isinstance(row.value, str) or row.has("text"):
        if isinstance(row.value, Mapping):
            _refuse_unread(row, ("text",), "")
        yield from text(row)
    else:
        found = list(row.value) if isinstance(row.value, Mapping) else type(row.value).__name__
        fields = "'prompt' and 'completion', 'messages', 'question' and 'answer', 'text'"
        raise row.damaged(f"none of the fields {fields}; found {found}")


def is_wrong(row: DataRow) -> bool:
    """True if a user's row says of its own answer that it is wrong, or not to be learned."""
    if not any(row.has(name) for name in _READ):
        return False
    said = str(row.value.get("completion", row.value.get("answer"))).strip().lower()
    right = _RIGHT if row.has("choices") or said in _CLASSES else _RIGHT_OR_LABEL
    marks = {_words(n): str(v).lower() for n, v in row.value.items() if right.search(_words(n))}
    zero = () if row.has("choices") else _ZERO  # beside choices it is the place of the right one
    wrong = any(m == "false" or (m in zero and name != "label") for name, m in marks.items())
    turns = row.value.get("messages")
    spoken = [m for m in turns if isinstance(m, Mapping)] if isinstance(turns, list) else []
    replies = [m.get("weight") for m in spoken if m.get("role") == "assistant"]
    return wrong or replies[-1:] == [0]


def _refuse_unclear(row: DataRow, name: str) -> None:
    """Refuse what is no text and can be written in several ways: true or yes, 1.5 or 1.50."""
    value = row.value.get(name)
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, bool | float):
            problem = f"field {name!r} is {json.dumps(entry)}, which can be written in several ways"
            raise row.damaged(problem, "write it as a text, in quotes")


def _refuse_unread(row: DataRow, read: Collection[str], prompt: str) -> None:
    """Refuse fields that may belong to a question and are not in it: without them it would be
    another one. Numbers, and what names its field as only telling of the row, do not."""
    for name, value in row.value.items():
        words = _words(name)
        texts = isinstance(value, str | list | Mapping) or _BELONGS.search(words)
        tells = _TELLS.search(words) and not _MEDIA.search(words)
        if name in read or tells or not texts or not _says(value):
            continue
        said = value.strip() if isinstance(value, str) else ""
        if len(said.split()) < LONG_ENOUGH or said not in prompt:
            hint = "write it into the prompt, or a message; or call it 'note' if nothing asks it"
            choices = words in ("option", "options", "answer choices", "candidates", "alternatives")
            hint = "call it 'choices', a list of texts" if choices else hint
            raise row.damaged(f"field {name!r} is not read", hint)


def _words(name: Any) -> str:
    """The words of a name such as inputText or option_2, without case and numbers."""
    return " ".join(re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", str(name)).lower()))


def _says(value: Any) -> bool:
    """Whether there is anything in a field; yes and no say nothing that could be asked."""
    return not isinstance(value, bool) and bool(value.strip() if isinstance(value, str) else value)


def _conversation(row: DataRow) -> Example:
    messages = row.entries("messages")
    row.refuse_long(json.dumps(messages, ensure_ascii=False, default=str), "field 'messages'")
    kept: list[dict[str, Any]] = []
    for number, message in enumerate(messages, start=1):
        inner = DataRow(message, row.path, f"{row.where}, message {number}")
        role = inner.text("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise inner.damaged(f"role {role!r} is none of system, user, assistant, tool")
        _refuse_unclear(inner, "content")
        if hidden := next((name for name in _HIDDEN if _says(message.get(name))), None):
            raise inner.damaged(f"field {hidden!r} is not read", "calls belong into 'tool_calls'")
        calls = inner.entries("tool_calls", optional=True)
        named = [c.get("function") or c for c in calls if isinstance(c, Mapping)]
        if sum(isinstance(call, Mapping) for call in named) < len(calls):
            raise inner.damaged("field 'tool_calls' is not a list of objects")
        said = "" if calls and not inner.value.get("content") else inner.text("content")
        kept.append({**inner.value, "content": said})
    spoken = [i for i, message in enumerate(kept) if message["role"] == "assistant"]
    if not spoken:
        raise row.damaged("no message is the assistant's, so nothing would be learned")
    for name, value in kept[spoken[-1]].items():
        told = name in _OF_MESSAGES or _TELLS.search(_words(name))
        if not told and isinstance(value, str | list | Mapping) and _says(value):
            hint = "write it into the content if it is to be asked for, else remove it"
            raise row.damaged(f"field {name!r} of the last reply is not read", hint)
    before = "\n".join(message["content"] for message in kept[: spoken[-1]])
    return Example(before, kept[spoken[-1]]["content"], messages=tuple(kept))


def arguments_of(function: Mapping[str, Any]) -> Any:
    """The arguments of a tool call, which may be written as JSON."""
    given = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(given) if isinstance(given, str) else given
    return given


def saved(row: DataRow) -> Iterator[Example]:
    """A row that `forge data fetch` wrote."""
    prompt = row.value.get("prompt") if isinstance(row.value, Mapping) else None
    if not isinstance(prompt, str):
        raise row.damaged("field 'prompt' is not a text")
    row.refuse_long(prompt, "field 'prompt'")
    options, tests = (row.texts(name, optional=True) for name in ("choices", "tests"))
    yield Example(prompt, row.text("completion"), choices=options, tests=tests)


def saved_kind(row: DataRow) -> str:
    kind = row.text("split")
    if kind not in ("train", "valid", "test"):
        raise row.damaged(f"field 'split' is {kind!r}")
    return kind
