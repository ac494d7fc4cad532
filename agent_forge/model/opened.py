"""An open model: its network, and its way from text to tokens and back, whoever made it.

All that differs between our tokenizer and those of transformers is in the two classes here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

from torch import nn

from agent_forge.data.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL,
    THINKING,
    Message,
    Tokenizer,
    behind_thought,
)
from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.model.chat import DATE, render, render_reply, shared
from agent_forge.model.folder import CONFIG, MODEL_TYPE, home_of, open_weights, read_config
from agent_forge.model.load import load_network, longest_text, open_tokenizer, refusing
from agent_forge.model.network import ForgeNetwork
from agent_forge.quant.layers import round_inputs
from agent_forge.quant.packed import KEY, packing_of
from agent_forge.store import files
from agent_forge.store.models import load_directory
from agent_forge.store.tensors import first_not_finite

LEAST_LENGTH = 2  # tokens: one that is given, one that is asked for
Asked = tuple[list[int], int]  # token ids, and where those that are asked for begin
OPENING_TOKENS = 8  # of a prompt, in which a template may open a thought
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"  # in texts of reasoning models, as of DeepSeek
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # tokens of vocabularies with a byte fallback


class ForgeModel:
    """Our network with its tokenizer. Special tokens are placed by their ids, as in training."""

    end_tokens = frozenset((SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]))  # each ends an answer
    max_length = None  # tokens that the network can read; None: any number
    chats = True  # it has a form for conversations
    byte_tokens = frozenset[int]()  # of which a row is read together, or not at all

    def __init__(self, network: ForgeNetwork, folder: Path) -> None:
        self.network, self.tokenizer = network, Tokenizer.load(folder)
        self.tokenizer.fits(network.settings)

    def encode(self, text: str) -> list[int]:
        """The ids of a text that the network is to continue."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the next reply begins."""
        return self.tokenizer.encode_chat(messages, reply=True)

    def encode_answer(self, prompt: str, answer: str) -> Asked:
        """A text whose end, the answer, is asked for."""
        given, asked = self.tokenizer.encode_batch([prompt, answer])
        ids, start = given + asked, len(given)
        _place_of(prompt + answer, self._shown(ids))
        return _with_blanks(answer, (ids, start), self._shown)

    def encode_reply(self, messages: Sequence[Message]) -> Asked:
        """A conversation whose last message is asked for, with the end of its turn."""
        ids = self.tokenizer.encode_chat(messages)
        said, shown = [m.get("content") or "" for m in messages], self._shown(ids)
        for text in said:
            _place_of(text, shown)
        asked = ids, len(self.encode_chat(messages[:-1]))
        return _with_blanks(said[-1], asked, self._shown)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that only the network has."""
        return self.tokenizer.decode(i for i in ids if i < self.tokenizer.vocab_size)

    def decode_answer(self, ids: Sequence[int], *, within: bool = False) -> str:
        """What is said behind the thought, if there is one; nothing if it has no end. `within`:
        the prompt has begun it."""
        return self.decode(behind_thought(ids, within=within))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends with the beginning of a thought."""
        return [*prompt[-1:]] == [SPECIAL[THINKING]]

    def _shown(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, specials=True)


class TransformersModel:
    """A causal language model of transformers, with the tokenizer and template of its maker."""

    def __init__(self, network: Any, folder: Path) -> None:
        self.network, self.tokenizer = network, open_tokenizer(folder)
        self.vocab_size = int(network.get_input_embeddings().weight.shape[0])
        longest = longest_text(network)
        if longest is not None and (not isinstance(longest, int) or longest < LEAST_LENGTH):
            raise DamagedFile(folder / CONFIG, f"the longest text is {longest!r} tokens")
        self.max_length: int | None = longest
        self.chats = bool(self.tokenizer.chat_template)
        self.date = DATE  # today, as its template says it
        self.end_tokens = end_tokens_of(folder, network.config, self.tokenizer)
        fallback = self.tokenizer.convert_tokens_to_ids(BYTES)
        self.byte_tokens = frozenset(fallback) - {None, self.tokenizer.unk_token_id}

    def encode(self, text: str) -> list[int]:
        return self._ids(text, special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.chats:  # a model that was never taught to chat continues the text
            return self.encode("\n".join(message["content"] for message in messages))
        text = render(self.tokenizer, messages, reply=True, date=self.date)
        return self._ids(text, special=False)

    def encode_answer(self, prompt: str, answer: str) -> Asked:
        return self._asked(prompt, prompt + answer, answer, special=True)

    def encode_reply(self, messages: Sequence[Message]) -> Asked:
        texts = render_reply(self.tokenizer, messages, self.date)
        return self._asked(*texts, messages[-1].get("content") or "", special=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def decode_answer(self, ids: Sequence[int], *, within: bool = False) -> str:
        """What is said behind the thought, if it is marked as most makers do."""
        begin, end = map(self.tokenizer.convert_tokens_to_ids, (THOUGHT, END_OF_THOUGHT))
        if {begin, end} <= {*self.tokenizer.all_special_ids}:  # which a text is decoded without
            return self.decode(behind_thought(ids, (begin, end), within=within))
        text = (THOUGHT if within else "") + self.decode(ids)
        _, ended, behind = text.rpartition(END_OF_THOUGHT)
        return "" if THOUGHT in (behind if ended else text) else behind

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends with the beginning of a thought, as some templates write it."""
        return self._shown(prompt[-OPENING_TOKENS:]).rstrip().endswith(THOUGHT)

    @refusing("the tokenizer")  # once around all that is asked of it
    def _asked(self, given: str, whole: str, answer: str, *, special: bool) -> Asked:
        """All is asked for from where the tokens of the whole text differ from those given."""
        # So a token that reaches from the prompt into the answer is asked for.
        before, ids = self._ids(given, special=special), self._ids(whole, special=special)
        start = min(shared(before, ids), len(ids) - 1)
        if start == 0:  # nothing comes before the first token: it cannot be asked for
            before = self._ids(given, special=False)
            start, ids = len(before), before + self._ids(whole[len(given) :], special=False)
        begins = _place_of(whole, self._shown(ids)) + len(_folded(given))
        if len(_folded(self._shown(ids[:start]))) > begins:
            raise ConfigError("the tokenizer adds to a prompt what the answer begins with")
        return _with_blanks(answer, (ids, start), self._shown)

    def _shown(self, ids: Sequence[int]) -> str:
        with refusing("the tokenizer"):
            return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """`special`: with the start that the tokenizer adds to a text of its own."""
        with refusing("the tokenizer"):
            ids = list(self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
        if not ids:
            raise ConfigError("the tokenizer gives no token for a text")
        if max(ids) >= self.vocab_size:
            problem = f"token {max(ids)} is outside the vocabulary of {self.vocab_size}"
            raise ConfigError(problem, hint="the tokenizer in the folder does not fit the model")
        return ids


OpenedModel = ForgeModel | TransformersModel


def _place_of(text: str, shown: str) -> int:
    """Where a text begins in what its tokens show, both folded; one that is not is refused."""
    text, shown = _folded(text), _folded(shown)
    if (place := shown.find(text)) < 0:
        lost = next((c for c in text if c not in shown), "")
        what = f"the character {lost!r} (U+{ord(lost):04X})" if lost else "a part of a text"
        raise ConfigError(f"the tokenizer loses {what}: too few bits would count")
    return place


def _with_blanks(answer: str, asked: Asked, show: Callable[[Sequence[int]], str]) -> Asked:
    if _blanks(answer.strip()) > _blanks(show(asked[0][asked[1] :])):
        raise ConfigError("the tokenizer loses blanks of an answer: too few bits would count")
    return asked


def _folded(text: str) -> str:
    """A text without blanks, case and forms of characters, which many tokenizers change."""
    plain = text if text.isascii() else normalize("NFKC", text)
    plain = plain.casefold() if plain.isascii() else normalize("NFKC", plain.casefold())
    return "".join(plain.split())


def _blanks(text: str) -> int:
    return sum(map(str.isspace, text))


def open_model(ref: str | Path) -> OpenedModel:
    """The model in a folder or of `base+adapter`; its files are verified against their manifest."""
    config, folder = read_config(ref), home_of(ref)
    ours = config["model_type"] == MODEL_TYPE
    if ours and folder == Path(ref) and (folder / "metadata.json").is_file():  # saved by a run
        state = load_directory(folder)[0]
    else:
        weights = open_weights(ref)
        weights.verify()
        state = {name: weights[name] for name in weights}
    if bad := first_not_finite(state):
        raise DamagedFile(ref, f"{bad} holds NaN or infinity", hint="fetch it again")
    packing = packing_of(config, folder)
    if packing:
        config = {key: value for key, value in config.items() if key != KEY}
    network = load_network(config, state, str(ref)).eval()
    if packing:
        round_inputs(network, packing.with_rounded_inputs)
    if isinstance(network, ForgeNetwork):
        network.folder, network.packing = folder, packing
    return with_tokenizer(network, folder)


def with_tokenizer(network: nn.Module, folder: Path) -> OpenedModel:
    if isinstance(network, ForgeNetwork):
        return ForgeModel(network, folder)
    return TransformersModel(network, folder)


def end_tokens_of(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as its maker's `generate` has them."""
    path = folder / "generation_config.json"
    said = getattr(config, "eos_token_id", None)
    if path.is_file():
        said = files.read_json(path).get("eos_token_id")
    listed = said if isinstance(said, list) else [tokenizer.eos_token_id if said is None else said]
    ends = [end for end in listed if end is not None]
    if not all(isinstance(end, int) for end in ends):
        raise DamagedFile(path, f"eos_token_id is {said!r}, a number or a list is needed")
    return frozenset(ends)
