"""Can a network solve items that are longer than any it was taught, without being taught again?

    python benchmarks/reach.py                 every cell that is missing
    python benchmarks/reach.py --study hints   one group
    python benchmarks/reach.py --tables        write the table from what is there

Networks of `tiny` learn from nothing, by worked thoughts about totals of 4 to 10 digits and 2 to 5
swaps, for as many steps each. Then they are asked for longer items: is every token of thought and
answer the likeliest? `positions`: other bases of rotary positions, none, random ones out of a
larger range (arXiv 2305.16843), or a random gap before each thought; decaying sums of the memory
know the order in any case. `hints`: an index before every element of the question and again before
its step (arXiv 2310.16028), which counts from a random number on, with some of these positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from results import command
from torch import Tensor

from agent_forge.data import tasks, traces
from agent_forge.data.loader import IGNORE, TokenizedItem
from agent_forge.data.tokenizer import SPECIAL, Tokenizer
from agent_forge.infer.thinking import BEGIN, TAG_IDS
from agent_forge.model import attention
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.pipeline.config import load_config
from agent_forge.train.config import STEP, TrainSettings
from agent_forge.train.corpus import build_corpus
from agent_forge.train.lessons import trace_item
from agent_forge.train.trainer import Trainer

NAME, SEEDS = "reach", (1, 2, 3)
TAUGHT = {"tot4": (4, 10), "swap4": (2, 5)}
ASKED = {"tot4": (4, 10, 11, 12, 14), "swap4": (2, 5, 6, 7)}
STEPS, ROWS, ITEMS, INDICES = 1200, 24, 200, 40
RANGE, GAP = 256, 32
PLAIN, NONE, RANDOM, GAPS = "as they are", "none", f"random of {RANGE}", f"a gap of up to {GAP}"
BASES = {"base 10": 10.0, "base 1,000": 1e3, "base 10,000": 1e4}
STUDIES = {
    "positions": [(kind, False) for kind in (PLAIN, *BASES, NONE, RANDOM, GAPS)],
    "hints": [(kind, True) for kind in (PLAIN, NONE, RANDOM, GAPS)],
}
turn = attention.rotate  # as the network has it


@dataclass
class Positions:
    """Where the tokens of a batch stand, which a network is told instead of their order."""

    kind: str
    rng: Random
    rows: Tensor | None = field(default=None, init=False)  # B x 1 x T

    def draw(self, items: Sequence[TokenizedItem], ids_BT: Tensor) -> None:
        """The positions of another batch, also when a model is asked: as it was taught."""
        count, length = ids_BT.shape
        rows = torch.arange(length).repeat(count, 1)
        if self.kind == RANDOM:
            for row, item in zip(rows, items, strict=True):
                own = sorted(self.rng.sample(range(RANGE), len(item.ids)))
                row[: len(own)] = torch.tensor(own)
        elif self.kind == GAPS:
            gaps = torch.tensor([[self.rng.randint(0, GAP)] for _ in rows])
            rows = rows + gaps * (ids_BT == BEGIN).cumsum(dim=1)
        self.rows = rows[:, None]

    def rotate(self, x_BHTK: Tensor, positions: Tensor) -> Tensor:
        assert self.rows is not None and self.rows.shape[-1] == len(positions)
        return x_BHTK if self.kind == NONE else turn(x_BHTK, self.rows)


@dataclass(frozen=True)
class Questions:
    """Worked items of a size, with an index before every element if that is asked for."""

    tokenizer: Tokenizer
    hints: bool

    def item(self, family: str, size: int, split: str, number: int) -> TokenizedItem:
        task = tasks.make(family, split, number, level=tasks.FAMILIES[family].size.level(size))
        item = trace_item(self.tokenizer, traces.write_trace(task, STEP, Random(0)))
        first = Random(f"{family} {split} {number}").randrange(INDICES - size)
        return self._with_hints(item, family, first) if self.hints else item

    def _with_hints(self, item: TokenizedItem, family: str, first: int) -> TokenizedItem:
        """Indices are tokens behind the vocabulary; every text is as before without them."""
        texts = [self.tokenizer.decode([i], specials=True) for i in item.ids]
        colon = next(i for i, text in enumerate(texts) if ":" in text)
        end, begin = item.ids.index(SPECIAL["<|end|>"]), item.ids.index(BEGIN)
        if family == "tot4":  # every digit is an element
            places = [*range(colon + 1, end)]
        else:  # every pair behind a blank
            places = [i + 1 for i in range(colon, end) if texts[i] == " "]
        steps = [i + 1 for i in range(begin, len(item.ids)) if item.ids[i] in TAG_IDS]
        assert len(places) == len(steps)
        index = {place: n for own in (places, steps) for n, place in enumerate(own, first)}
        ids, asked = list[int](), list[bool]()
        for i, (token, is_asked) in enumerate(zip(item.ids, item.asked, strict=True)):
            if i in index:
                ids, asked = [*ids, self.tokenizer.vocab_size + index[i]], [*asked, i > begin]
            ids, asked = [*ids, token], [*asked, is_asked]
        return TokenizedItem(ids, asked)


def batch_of(items: Sequence[TokenizedItem]) -> tuple[Tensor, Tensor]:
    """Items as rows, and the next token of each position that is learned."""
    length = max(len(item.ids) for item in items)
    ids, targets = torch.zeros(len(items), length, dtype=torch.long), None
    targets = torch.full_like(ids, IGNORE)
    for row, item in enumerate(items):
        own = torch.tensor(item.ids)
        ids[row, : len(own)] = own
        learned = torch.tensor(item.asked[1:])
        targets[row, : len(own) - 1][learned] = own[1:][learned]
    return ids, targets


def exact(network: ForgeNetwork, items: Sequence[TokenizedItem], positions: Positions) -> float:
    """The share of items of which every learned token is the likeliest."""
    network.eval()
    with torch.no_grad():
        ids, targets = batch_of(items)
        positions.draw(items, ids)
        found = network(ids).argmax(dim=-1)
    return float(((found == targets) | (targets == IGNORE)).all(dim=1).float().mean())


def reach(kind: str, hints: bool, seed: int) -> dict[str, Any]:
    """Train a network, and ask it for known and for longer items."""
    cpu, config = time.process_time(), load_config(preset="tiny")
    tokenizer = build_corpus(config.phases.quietstar, config.model).tokenizer
    questions = Questions(tokenizer, hints)
    torch.manual_seed(seed)
    shape = config.model.model_copy(update={"vocab_size": tokenizer.vocab_size + INDICES})
    network, positions = ForgeNetwork(shape), Positions(kind, Random(f"positions {seed}"))
    optimizer = MuonGrokfast(network, config.phases.quietstar.train.optimizer)
    settings = TrainSettings(warmup_steps=10, warmdown_share=0.6)
    generator, rng = torch.Generator().manual_seed(seed), Random(f"items {seed}")
    trainer = Trainer(network, optimizer, language_loss, settings, total=STEPS, generator=generator)
    base = mock.patch.object(attention, "ROPE_BASE", BASES.get(kind, attention.ROPE_BASE))
    with base, mock.patch.object(attention, "rotate", positions.rotate):
        for step in range(1, STEPS + 1):
            drawn = [(f, rng.randint(*TAUGHT[f])) for f in TAUGHT for _ in range(ROWS // 2)]
            numbers = [step * ROWS + i + seed * 10**7 for i in range(ROWS)]
            pairs = zip(drawn, numbers, strict=True)
            items = [questions.item(f, size, "train", n) for (f, size), n in pairs]
            batch = batch_of(items)
            positions.draw(items, batch[0])
            values = trainer.step(step, batch)
        solved = {
            family: {
                str(size): exact(
                    network,
                    [questions.item(family, size, "verdict", n) for n in range(ITEMS)],
                    positions,
                )
                for size in sizes
            }
            for family, sizes in ASKED.items()
        }
    return {
        "exact": solved,
        "items": ITEMS,
        "steps": STEPS,
        "loss": round(values["loss_avg_100"], 4),
        "cpu_s": round(time.process_time() - cpu),
    }


def cells(
    work: Path, study: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    for name, own in STUDIES.items():
        for (kind, hints), seed in product(own, SEEDS) if study in (None, name) else ():
            cell = {"study": name, "positions": kind, "seed": seed}
            yield cell, partial(reach, kind, hints, seed)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Exact thoughts and answers by size: the mean over seeds, and the least and the most."""
    if not rows:
        return ["(not measured yet)"]
    sizes = [(family, str(size)) for family, own in ASKED.items() for size in own]
    head = ["positions", "index", *(f"{family} {size}" for family, size in sizes)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for study, own in STUDIES.items():
        for kind, hints in own:
            found = [r for r in rows if (r["study"], r["positions"]) == (study, kind)]
            if found:
                shares = [[100 * r["exact"][f][s] for r in found] for f, s in sizes]
                told = [f"{sum(v) / len(v):.1f} ({min(v):.0f}..{max(v):.0f})" for v in shares]
                name = f"{kind} ({len(found)} seeds)"
                lines.append(f"| {name} | {'yes' if hints else 'no'} | {' | '.join(told)} |")
    return lines


if __name__ == "__main__":
    command(str(__doc__), NAME, list(STUDIES), cells, {"reach": table}, "forge.md")
