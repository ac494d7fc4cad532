"""What an example asks, in a form that its near-copies share: only they can share its hash.

Coarse on purpose: two questions that share a hash by chance merely stay in one part of the data.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal
from unicodedata import normalize

from agent_forge.data.dataset_rows import Example
from agent_forge.data.worked_examples import TURN, last_example, sorted_options

# What decides the part of an example: what it asks, where what shares a passage with a running text
# or a long answer of another part is left out; and of what was begun before, the same where only
# running texts are, where nothing is, the question with whatever is around it but for known labels,
# its prompt, or (at first) prompt and answer.
SplitBy = Literal["overlap", "passage", "asked", "question", "prompt", "content"]
BY_PASSAGE = ("overlap", "passage")
BY_PROMPT = ("prompt", "content")  # blanks around an answer counted then, as did the path of a file
_ASKS = "question|q|problem|exercise|task|instructions?|input|prompt|query|user|human"
_ANSWERS = "answer|a|solution|response|reply|output|completion|assistant|model|bot|ai"
_GIVEN = "passage|context|background|text|article|document|story|review|premise|sentence"
_LABEL = r"(?im)^(?:(?:[^\w\n]|_){0,20}(?:%s) *\d* *(?:[-\u2013\u2014:.)\]|>*_`#]+|$))+"
ASKS, ANSWERS = re.compile(_LABEL % _ASKS), re.compile(_LABEL % f"{_ANSWERS}|system")
BEGINS = re.compile(_LABEL % f"{_ASKS}|{_GIVEN}")
ROLE = re.compile(rf"(?i)<\|?({_ASKS}|{_ANSWERS}|system)\|?>")
TAG = re.compile(r"<[|/]?\w+[|/]?>")
LAST_WORDS = 40  # in so many characters is what a prompt ends with
END = re.compile(
    rf"(?i)(?:^|[\W_]+)(?:(?:(?:the|your|final|correct) )*(?:{_ANSWERS})(?: is)?[ \d]*"
    r"|let\W?s think step by step)$"
)
NO_LETTERS = re.compile(r"[\W_\u115f\u1160]+")  # and Hangul fillers, invisible letters
PASSAGE, KEPT = 50, 8  # letters that texts share to overlap; one of so many passages is compared
ENOUGH = 4  # shared passages that are no chance, as words that follow a form may be
COMMON, FEW = 0.2, 5  # share of all texts, and number, above which a passage says nothing: a form
_BASE, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd: they can be undone modulo 2^64


def question_hash(example: Example, exact: bool = True, split_by: SplitBy = "asked") -> bytes:
    """The sha256 that near-copies share: of what is asked, or of all of a running text."""
    question = _question if split_by == "question" else _asked
    if not (exact and example.prompt):
        key = letters(example.prompt + example.completion)
    elif example.messages:
        roles = [m["role"] for m in example.messages]
        last = len(roles) - 1 - roles[::-1].index("assistant")
        turns = [(m["role"], m["content"]) for m in example.messages[:last]]
        asked = [letters(question(said)) for role, said in turns if role == "user"]
        key = asked[-1] if asked else ""
        if len(key) < TURN:
            key = letters(question("\n".join(said for role, said in turns if role != "system")))
    else:
        key = letters(question(example.prompt))
    raw = "".join(example.prompt.split())
    return hashlib.sha256((key or letters(example.prompt) or raw).encode()).digest()


def letters(text: str) -> str:
    """The letters and digits of a text, without case, accents and forms."""
    plain = normalize("NFKD", normalize("NFKD", text).casefold()).replace("\u0131", "i")
    return NO_LETTERS.sub("", plain)


def passages(text: str) -> frozenset[int]:
    """Hashes of some passages of a text, the same ones wherever they stand: two texts that share
    twice PASSAGE letters in a row share ENOUGH of them, but for a chance of some per cent."""
    import numpy as np  # here: near-copies are told apart without it

    codes = np.frombuffer(letters(text).encode("utf-32-le"), np.uint32).astype(np.uint64)
    if len(codes) < PASSAGE:
        return frozenset()
    ones = np.ones(len(codes), np.uint64)
    powers = np.multiply.accumulate(ones * np.uint64(_BASE))
    undone = np.multiply.accumulate(ones * np.uint64(pow(_BASE, -1, 2**64)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(codes * powers)])
    hashes = (sums[PASSAGE:] - sums[:-PASSAGE]) * undone[: len(codes) - PASSAGE + 1]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_MIX)
    return frozenset(hashes[(hashes >> np.uint64(40)) % np.uint64(KEPT) == 0].tolist())


def telling_passages(texts: Iterable[str]) -> list[frozenset[int]]:
    """The passages of each text, without those of a form that many of them share."""
    found = [passages(text) for text in texts]
    counts = Counter(passage for own in found for passage in own)
    most = max(FEW, COMMON * len(found))
    common = {passage for passage, count in counts.items() if count > most}
    return [own - common for own in found]


def same_texts(
    texts: Sequence[str], asked: Sequence[str] = (), keys: Sequence[Any] = ()
) -> list[int]:
    """The number of each text's group: in one are those that share a passage of which one of them
    asks (`asked` are their ends; none: it is all of them), and those of equal letters, or keys."""
    group = list(range(len(texts)))

    def first(i: int) -> int:
        while group[i] != i:
            group[i] = i = group[group[i]]
        return i

    found, seen = telling_passages(texts), dict[Any, int]()
    asks = [own & passages(end) for own, end in zip(found, asked, strict=True)] if asked else found
    asker = {passage: i for i, own in enumerate(asks) for passage in own}  # the last one
    for i, own in enumerate(found):
        known = {asker[passage] for passage in own if passage in asker}
        others = [other for other in known if len(own & asks[other]) >= ENOUGH]
        for other in (seen.setdefault(keys[i] if keys else letters(texts[i]), i), *others):
            group[first(i)] = first(other)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(first(i), len(numbers)) for i in range(len(texts))]


def _asked(text: str) -> str:
    """What a prompt asks, whatever worked examples are before it and in whatever order options."""
    text = last_example(normalize("NFKD", text))
    is_code = text.endswith(('"', "'"))  # whose lists are no options
    return _question(text) if is_code else sorted_options(_question(text))


def _question(text: str) -> str:
    """The question in a prompt without the words around it; of several the last, with its text."""
    text = normalize("NFKD", text).replace("[/INST]", "\nassistant:").replace("[INST]", "\nuser:")
    text = TAG.sub("\n", ROLE.sub(r"\n\1: ", text))
    text = "\n".join(line.strip() for line in text.splitlines())
    text = text[: _end(text)]
    answered = [match.end() for match in ANSWERS.finditer(text)]
    after = text[answered[-1] :] if answered else ""
    if begins := BEGINS.search(after):  # what is asked last, with the paragraph that it is in
        paragraph = after.rfind("\n\n", 0, begins.end())
        text = after[paragraph if paragraph >= 0 else begins.start() :]
    return ASKS.sub("", text)


def _end(text: str) -> int:
    """Where a prompt ends without the words that ask for an answer."""
    end = len(text)
    while True:
        while end and not text[end - 1].isalnum():
            end -= 1
        start = max(0, end - LAST_WORDS)
        words = END.search(text[start:end])
        if not words or not start + words.start():
            return end
        end = start + words.start()
