"""A network that thinks perfectly, for testing what judges thoughts: it reads tokens, not weights.

It writes the steps of an item, going on from whatever stands there, and then answers with the last
state of its thought; without a thought it cannot solve anything. `knows` makes it answer rightly
whatever its thought is: then thoughts are theatre.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agent_forge.data import traces
from agent_forge.data.tasks.reasoning import ADVANCE, Machine
from agent_forge.data.tokenizer import SPECIAL
from agent_forge.infer.thinking import BEGIN, END
from agent_forge.model.network import ForgeNetwork, GenerationCache
from tests.support.networks import settings
from tests.support.tokenizers import TOKENIZER

USER, TURN_END = SPECIAL["<|user|>"], SPECIAL["<|end|>"]
UNKNOWN = "7"  # what it says if it does not know


class StepMachine(ForgeNetwork):
    """Predicts the next token by running the task."""

    def __init__(self, *, knows: bool = False, slips: int = 0) -> None:
        super().__init__(settings())
        self.knows = knows
        self.slips = slips  # every so many items it makes a mistake in its first step

    @torch.no_grad()
    def predict(
        self, tokens_BT: Tensor, cache: GenerationCache | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert cache is not None
        before = cache.memory.get("read")
        read = tokens_BT if before is None else torch.cat([before, tokens_BT], 1)
        cache.memory["read"] = read
        logits = torch.full((len(read), self.settings.vocab_size), -10.0)
        for row, ids in enumerate(read.tolist()):
            logits[row, self.next_token(ids)] = 10.0
        return logits, torch.ones(len(read), dtype=torch.long)

    def next_token(self, ids: list[int]) -> int:
        if SPECIAL["<|assistant|>"] not in ids:
            return 0  # within a prompt, which goes on by itself
        question = TOKENIZER.decode(ids[ids.index(USER) + 1 : ids.index(TURN_END)])
        said = ids[ids.index(SPECIAL["<|assistant|>"]) + 1 :]
        if BEGIN not in said or END in said:
            return self._spoken(self._answer(question, said), said)
        machine = read_question(question)
        thought = said[said.index(BEGIN) + 1 :]
        claims = traces.parse(TOKENIZER.decode(thought, specials=True))[1]
        wanted = self._continued(question, machine, claims)
        for whole in (*wanted, END):
            piece = [whole] if isinstance(whole, int) else TOKENIZER.compose(*whole)
            if thought[: len(piece)] != piece:
                return piece[len(thought)] if thought == piece[: len(thought)] else END
            thought = thought[len(piece) :]
        return END

    def _continued(self, question: str, machine: Machine, claims: tuple[str, ...]) -> list[Any]:
        """All claims of a thought that goes on from those that are whole."""
        state, done, told = machine.start, 0, []
        for label, claim in zip(machine.labels, claims, strict=False):
            right = machine.advance(label, state)
            whole = len(f"{label}{right}") + (len(right) > 1)
            if len(claim) < whole or not claim[-len(right) :].isdigit():
                break
            state, done = claim[-len(right) :], done + 1
            told.append(claim)
        rest = machine.states_from(state, done)
        if self.slips and not done and hash_of(question) % self.slips == 0:
            state = machine.advance(machine.labels[0], machine.start)
            wrong = str((int(state[-1]) + 1) % 10)
            rest = [state[:-1] + wrong, *machine.states_from(state[:-1] + wrong, 1)]
        for label, state in zip(machine.labels[done:], rest, strict=True):
            told.append(f"{label}{state}" if len(state) == 1 else f"{label} {state}")
        return [(SPECIAL["<step>"], claim) for claim in told]

    def _answer(self, question: str, said: list[int]) -> str:
        if self.knows:
            return read_question(question).states()[-1]
        if BEGIN not in said:
            return UNKNOWN
        thought = TOKENIZER.decode(said[said.index(BEGIN) + 1 : said.index(END)], specials=True)
        claims = traces.parse(thought)[1]
        size = len(read_question(question).start)
        return claims[-1][-size:].strip() if claims else UNKNOWN

    def _spoken(self, answer: str, said: list[int]) -> int:
        """The next token of an answer, and its end."""
        ids = [*TOKENIZER.encode(answer), TURN_END]
        place = len(said) - (said.index(END) + 1 if END in said else 0)
        return ids[min(place, len(ids) - 1)]


def hash_of(text: str) -> int:
    return sum(map(ord, text))


def read_question(question: str) -> Machine:
    """The steps that a question asks for; of `odds` none, for it is not in these tests."""
    if question.startswith("tot"):
        start, labels = question.removeprefix("tot ").split(":")
        return Machine(start, tuple(labels), ADVANCE["tot4"])
    if question.startswith("swp"):
        start, text = question.removeprefix("swp ").split(" : ")
        return Machine(start, tuple(text.split()), ADVANCE["swap4"])
    text, start = question.split(" : ")
    return Machine(start, tuple(text.split(", ")), ADVANCE["chain"])
