"""`forge bake`: any causal language model behaves without a prompt as it did with it.

A model with a chat template gets the prompt as its system message, before questions of a user;
any other one as text that stands before the beginnings it continues. The verdict is on questions
that taught nothing: a third of them, by their sha256; near-copies of a question go with it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_forge.data import tasks
from agent_forge.data.dataset_rows import Example
from agent_forge.data.loader import TokenizedItem
from agent_forge.data.near_copies import question_hash
from agent_forge.data.row_files import MAX_CHARACTERS, SUFFIXES, lines, rows
from agent_forge.errors import ConfigError
from agent_forge.evals import model_under_test as measuring
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.merge.output import clear_leftovers, refuse_existing, write
from agent_forge.model.card import card_head
from agent_forge.model.folder import home_of, open_weights, read_config
from agent_forge.model.load import check_tensors
from agent_forge.model.opened import OpenedModel, open_model
from agent_forge.model.weights import Weights
from agent_forge.phases.training import learned_before
from agent_forge.quant.packed import packing_of
from agent_forge.store import files
from agent_forge.store.records import BAKING, learned_record
from agent_forge.store.tensors import first_not_finite, spec_of, split_tied
from agent_forge.train.bake import BakeSettings, Progress, bake
from agent_forge.train.prompt_baking import Question, answers_to, batch_of, mean_kl
from agent_forge.train.trainer import Batch

QUESTIONS = Path(__file__).with_name("questions.json")
BAKED = 0.1  # of the KL may be left
HARDLY = 0.005  # nats a token: a prompt that changes less than this has no effect to speak of
LEAST_QUESTIONS = 3  # two to learn from, one that is asked in the end
LEAST_ANSWER = 8  # tokens of an answer that the context has to have room for
GREEDY_TOKENS = 24  # of answers that are compared as a whole
HELD_OUT_SAMPLES = 2  # answers to each question of the verdict
HELD_OUT = 1 << 32  # added to the seed: other draws than those that teach
STORIES, STORY_TOKENS = 32, 256  # ordinary texts, and where they are cut


@dataclass(frozen=True)
class BakeRequest:
    """Which prompt is to be baked into which model."""

    model: str
    prompt: Path
    out: Path
    questions: Path | None = None
    settings: BakeSettings = field(default_factory=BakeSettings)


@dataclass(frozen=True)
class Baking:
    """A model with its prompt and questions, checked, before any work."""

    weights: Weights
    opened: OpenedModel
    prompt: str
    place: str  # where the model is given the prompt
    learned: list[Question]
    held_out: list[Question]
    settings: BakeSettings  # with answers that the context has room for

    def facts(self) -> dict[str, Any]:
        """What a dry run says."""
        first, s = self.learned[0], self.settings
        copies = 2 if s.lora_rank else 5  # a student; its gradients and two means of them
        return {
            "weights": self.weights.parameters,
            "prompt": self.place,
            "prompt_tokens": len(first.told) - len(first.asked),
            "questions_learned": len(self.learned),
            "questions_held_out": len(self.held_out),
            "answer_tokens": s.answer_tokens,
            "memory_bytes": self.weights.parameters * 4 * copies,
            "disk_bytes": self.weights.nbytes,
        }


@dataclass(frozen=True)
class BakeVerdict:
    """What baking did, on questions that taught nothing and on ordinary text."""

    questions: int
    kl_before: float  # nats a token, to the prompted model, on its answers
    kl_after: float
    equal_before: float  # share of likeliest answers that are those of the prompted model
    equal_after: float
    text_before: float  # nats a token of texts that have nothing to do with the prompt
    text_after: float

    @property
    def kl_left(self) -> float:
        return self.kl_after / self.kl_before if self.kl_before else 0.0

    @property
    def baked(self) -> bool:
        return self.kl_before >= HARDLY and self.kl_left <= BAKED

    @property
    def sentence(self) -> str:
        if self.kl_before < HARDLY:
            return f"not baked: the prompt hardly changes the model ({self.kl_before:.4f} nats)"
        left = f"{self.kl_left:.1%} of the KL to the prompted model is left"
        cost = f"ordinary text costs {self.text_after / self.text_before - 1:+.1%} nats"
        help = "a lower rate helps" if self.kl_left > 1 else "more steps or questions help"
        more = "" if self.baked else f" ({BAKED:.0%} would be baked: {help})"
        head = "baked" if self.baked else "not baked"
        asked = f"{self.questions} unseen question{'s' * (self.questions != 1)}"
        return f"{head}: {left} on {asked}{more}; {cost}"

    def to_json(self) -> dict[str, Any]:
        told = {"kl_left": self.kl_left, "baked": self.baked, "sentence": self.sentence}
        return {**asdict(self), **told}


@dataclass(frozen=True)
class BakedModel:
    """What was written, how it was judged, and what it took."""

    folder: Path
    place: str
    verdict: BakeVerdict
    cpu_seconds: float


def check(request: BakeRequest, force: bool, *, look: bool = True) -> Baking:
    """Refuse what cannot be done before any work; returns what the work begins with."""
    if packing_of(read_config(request.model), request.model):
        hint = "bake into the model it was made of, then forge quantize that"
        raise ConfigError(f"{request.model} is packed: it cannot be trained", hint=hint)
    prompt = _text_of(request.prompt)
    texts = _own_questions(request.questions) if request.questions else []
    weights = open_weights(request.model)
    check_tensors(weights)
    refuse_existing(request.out, weights, force, look=look)
    opened = open_model(request.model)
    if not texts:
        texts = files.read_json(QUESTIONS)["questions" if opened.chats else "openers"]
    parts = split(texts)
    (learned, place), (held_out, _) = (with_prompt(opened, prompt, part) for part in parts)
    longest = max(len(question.told) for question in (*learned, *held_out))
    room = min(request.settings.answer_tokens, (opened.max_length or 1 << 62) - longest)
    if room < LEAST_ANSWER:
        read = f"the model reads {opened.max_length:,}"
        problem = f"the prompt and a question take {longest:,} tokens, {read}"
        raise ConfigError(problem, hint="shorten the prompt or the questions")
    settings = replace(request.settings, answer_tokens=room)
    return Baking(weights, opened, prompt, place, learned, held_out, settings)


def _text_of(path: Path) -> str:
    """The content of a UTF-8 file that is not blank."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file", hint="--prompt FILE: a text file, in UTF-8")
    text = "".join(line for _, line in lines(path)).replace("\r\n", "\n")
    if not text.strip():
        raise ConfigError(f"{path} is empty: there is no prompt to bake")
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path} has more than {MAX_CHARACTERS:,} characters")
    return text


def _own_questions(path: Path) -> list[str]:
    """Questions of a file, each once: lines of a text, or rows with `prompt` or `question`."""
    if path.name.endswith(SUFFIXES) and path.suffix not in (".txt", ".tokens"):
        texts = [row.text("prompt", "question") for row in rows(path)]
    else:
        texts = [line.strip() for _, line in lines(path)]
    found = list(dict.fromkeys(text for text in texts if text))
    if (different := len(_near_copies(found))) < LEAST_QUESTIONS:
        problem = f"{path} has {different} different questions, {LEAST_QUESTIONS} are needed"
        raise ConfigError(problem, hint="one a line; a hundred is a good number")
    return found


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Two thirds to learn from, one third for the verdict, by their sha256; near-copies of a
    question (another case, other marks, a label before it) are on the same side."""
    learned, held_out = list[str](), list[str]()
    for group in _near_copies(sorted(texts, key=lambda t: hashlib.sha256(t.encode()).digest())):
        fits = len(held_out) + len(group) <= len(texts) // 3
        (held_out if fits or not held_out else learned).extend(group)
    return learned, held_out


def _near_copies(texts: Sequence[str]) -> list[list[str]]:
    """Questions with their near-copies, in the order of the first of each."""
    groups: dict[bytes, list[str]] = {}
    for text in texts:
        groups.setdefault(question_hash(Example(text, "")), []).append(text)
    return [*groups.values()]


def with_prompt(
    opened: OpenedModel, prompt: str, texts: Sequence[str]
) -> tuple[list[Question], str]:
    """The questions without and with the prompt, and where the model is given it."""
    if not opened.chats:
        before = prompt if prompt[-1].isspace() else f"{prompt} "
        told = [opened.encode(before + text) for text in texts]
        pairs = zip(map(opened.encode, texts), told, strict=True)
        return [Question(*pair) for pair in pairs], "before the text"

    def said(text: str, *first: dict[str, str]) -> list[int]:
        return opened.encode_chat([*first, {"role": "user", "content": text}])

    system = {"role": "system", "content": prompt.strip()}
    try:
        ignored = said(texts[0], system) == said(texts[0])
    except ConfigError:  # its template knows no such role
        ignored = True
    if ignored:
        before = f"{prompt.strip()}\n\n"
        found = [Question(said(text), said(before + text)) for text in texts]
        return found, "before the user's text: the chat template takes no system message"
    return [Question(said(text), said(text, system)) for text in texts], "as system message"


def bake_prompt(request: BakeRequest, *, force: bool, progress: Progress) -> BakedModel:
    """Bake, measure and write."""
    began = time.process_time()
    baking = check(request, force, look=False)
    teacher, ends = baking.opened.network, baking.opened.end_tokens
    questions = _HeldOut(baking)
    progress("measuring", 1, 2)
    learned, settings = baking.learned, baking.settings
    student = bake(teacher, learned, settings, stop_tokens=ends, progress=progress)
    result = _as_stored(student, baking.weights, request)
    verdict = questions.judge(student)
    progress("measuring", 2, 2)
    record = _record(baking, verdict)
    beside = {BAKING: files.to_json(files.finite(record)), "README.md": _card(request, record)}
    clear_leftovers(request.out)
    texts = questions.texts[: measuring.CONFIRMED]
    recorded = measuring.measure(student, texts).loss
    with files.building(request.out) as built:
        write(result, built, beside=beside)
        measuring.confirm(built, lambda m: measuring.measure(m.model, texts).loss, recorded)
        refuse_existing(request.out, baking.weights, force)
        files.publish(built, request.out, replace=force)
    return BakedModel(request.out, baking.place, verdict, time.process_time() - began)


class _HeldOut:
    """What is asked before and after: unseen questions, and texts that are not about the prompt."""

    def __init__(self, baking: Baking) -> None:
        opened, s = baking.opened, baking.settings
        self.teacher, self.questions = opened.network, baking.held_out
        self._greedy = SamplingSettings(
            min(GREEDY_TOKENS, s.answer_tokens), stop_tokens=opened.end_tokens
        )
        self.texts = _ordinary_texts(opened)
        sampling = s.sampling(opened.end_tokens, HELD_OUT)
        answers = answers_to(
            self.teacher, self.questions, sampling, prompted=True, samples=HELD_OUT_SAMPLES
        )
        starts = range(0, len(answers), s.rows)
        self._batches: list[Batch] = [batch_of(answers[n : n + s.rows]) for n in starts]
        self._wanted = self._answers(self.teacher, prompted=True)
        self._before = self._measure(self.teacher)

    def judge(self, student: nn.Module) -> BakeVerdict:
        pairs = zip(self._before, self._measure(student), strict=True)
        return BakeVerdict(len(self.questions), *(number for pair in pairs for number in pair))

    def _measure(self, network: nn.Module) -> tuple[float, float, float]:
        """KL to the prompted teacher, share of equal answers, nats a token of ordinary text."""
        found = self._answers(network, prompted=False)
        same = sum(a == b for a, b in zip(found, self._wanted, strict=True)) / len(found)
        kl = mean_kl(self.teacher, network, self._batches)
        return kl, same, measuring.measure(network, self.texts).nats_per_token

    def _answers(self, network: nn.Module, *, prompted: bool) -> list[list[int]]:
        given = [q.told if prompted else q.asked for q in self.questions]
        return [text.tokens for text in generate(network, given, self._greedy)]


def _ordinary_texts(opened: OpenedModel) -> list[TokenizedItem]:
    """Generated stories, of which every token but the first is asked for."""
    made = (tasks.make("story", "verdict", number) for number in range(STORIES))
    longest = min(STORY_TOKENS, opened.max_length or STORY_TOKENS)
    ids = [opened.encode(f"{task.question} {task.answer}")[:longest] for task in made]
    return [TokenizedItem(text, [place > 0 for place in range(len(text))]) for text in ids]


def _as_stored(student: nn.Module, weights: Weights, request: BakeRequest) -> Weights:
    """The weights in the types of the model's files, which the student then computes with too."""
    usual = Counter(spec.dtype for spec in weights.specs.values()).most_common(1)[0][0]
    state = student.state_dict()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in split_tied(state)[0].items():
        dtype = weights.specs[name].dtype if name in weights.specs else usual
        kept[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        tensor.copy_(kept[name])
    if bad := first_not_finite(kept):
        raise ConfigError(f"{bad} does not fit its type any more", hint="bake at a lower --rate")
    return Weights(
        {name: spec_of(tensor) for name, tensor in kept.items()},
        kept.__getitem__,
        label=str(request.out),
        config=read_config(request.model),
        folder=home_of(request.model),
        sources=weights.sources,
    )


def _record(baking: Baking, verdict: BakeVerdict) -> dict[str, Any]:
    """How the model was made, the verdict on it, and what its parent's record says."""
    folder = baking.weights.folder
    return {
        "parent_sha256": baking.weights.sha256(),
        "prompt": baking.prompt,
        "given": baking.place,
        "questions_learned": len(baking.learned),
        "settings": {**asdict(baking.settings), "rate": baking.settings.learning_rate},
        "verdict": verdict.to_json(),
        "learned": learned_before(learned_record(folder) if folder else {}),
    }


def _card(request: BakeRequest, record: dict[str, Any]) -> bytes:
    config, verdict = read_config(request.model), record["verdict"]
    head = card_head([request.model], config, ("prompt-baking",), relation="finetune")
    quoted = "\n".join(f"> {line}" for line in record["prompt"].strip().splitlines())
    tables = "\n".join(
        f"| {name} | {before:.4g} | {after:.4g} |" for name, before, after in table_of(verdict)
    )
    does = "answers" if verdict["baked"] else "was to answer"
    return f"""{head}
# {request.out.name}\n
It {does} without this prompt as its parent does with it, which was given it {record["given"]}:\n
{quoted}\n
{verdict["sentence"]}.\n
| | before | after |
|---|---|---|
{tables}\n
{BAKING} has all settings. Made by `forge bake` of Agent Forge.\n""".encode()


def table_of(verdict: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The numbers of a verdict before and after, by what they are."""
    names = {
        "kl": "KL to the prompted model, nats a token",
        "equal": "likeliest answers equal to its own, share",
        "text": "ordinary text, nats a token",
    }
    return [(name, verdict[f"{k}_before"], verdict[f"{k}_after"]) for k, name in names.items()]
