"""What is taught about tools and a persona: exchanges as token rows, with or without a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from agent_forge.data import exchanges
from agent_forge.data.exchanges import Card, Exchange
from agent_forge.data.loader import TokenizedDataset, TokenizedItem
from agent_forge.data.tokenizer import END_OF_CALL, END_OF_TURN, SPECIAL, TOOL_CALL, Tokenizer
from agent_forge.infer.tool_use import asked_prompt, result_ids

TOOLS, PERSONA, CARDS = "tools", "persona", "cards"
REFUSED_SHARE, TALK_SHARE = 0.2, 0.1  # of the rows of tools
UNPROMPTED = 0.1  # of what is behind a prompt: a tool that the prompt does not name


def taught_tools(tokenizer: Tokenizer, card: Card, count: int, seed: int) -> TokenizedDataset:
    """Calls of the card's tools, wishes that no tool fulfils, and small talk."""
    rng, rows = Random(seed), list[Exchange]()
    for _ in range(count):
        kind = rng.random()
        if kind < REFUSED_SHARE:
            rows.append(exchanges.refused("train", rng))
        elif kind < REFUSED_SHARE + TALK_SHARE:
            rows.append(exchanges.small_talk("train", rng))
        else:
            rows.append(exchanges.tool_exchange(rng.choice(card.tools), "train", rng))
    return _dataset(TOOLS, [exchange_item(tokenizer, own) for own in rows])


def taught_persona(tokenizer: Tokenizer, card: Card, count: int, seed: int) -> TokenizedDataset:
    """Questions about the persona of a card."""
    rng = Random(seed)
    slots = (rng.choice(exchanges.SLOTS) for _ in range(count))
    rows = [exchanges.about(card, slot, "train", rng) for slot in slots]
    return _dataset(PERSONA, [exchange_item(tokenizer, own) for own in rows])


def taught_cards(tokenizer: Tokenizer, count: int, seed: int) -> TokenizedDataset:
    """Other personas with other tools, told by a prompt."""
    rng = Random(seed)
    asked = (asked_behind_card("train", rng) for _ in range(count))
    return _dataset(CARDS, [exchange_item(tokenizer, own, system) for system, own in asked])


def asked_behind_card(split: str, rng: Random) -> tuple[str, Exchange]:
    """A prompt with somebody else's card, and a question whose answer depends on it."""
    card = exchanges.random_card(rng)
    missing = [name for name in exchanges.TOOLS if name not in card.tools]
    if missing and rng.random() < UNPROMPTED:
        own = exchanges.tool_exchange(rng.choice(missing), split, rng)
        own = Exchange(exchanges.REFUSED, own.question, exchanges.REFUSAL)
    elif rng.random() < 0.4:
        own = exchanges.tool_exchange(rng.choice(card.tools), split, rng)
    else:
        own = exchanges.about(card, rng.choice(exchanges.SLOTS), split, rng)
    return card.text(rng), own


def exchange_item(tokenizer: Tokenizer, exchange: Exchange, system: str = "") -> TokenizedItem:
    """An exchange as token ids; calls and answers are learned, results are not."""
    ids = asked_prompt(tokenizer, exchange.question, system)
    asked = [False] * len(ids)
    if exchange.call:
        call = tokenizer.compose(SPECIAL[TOOL_CALL], exchange.call, SPECIAL[END_OF_CALL])
        result = result_ids(tokenizer, exchange.result)
        ids, asked = ids + call + result, asked + [True] * len(call) + [False] * len(result)
    answer = tokenizer.compose(exchange.answer, SPECIAL[END_OF_TURN])
    return TokenizedItem([*ids, *answer], [*asked, *[True] * len(answer)])


def _dataset(name: str, items: Sequence[TokenizedItem]) -> TokenizedDataset:
    return TokenizedDataset(name, [item.ids for item in items], [item.asked for item in items])
