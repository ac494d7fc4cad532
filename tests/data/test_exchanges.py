"""What is said with tools and by a persona: right by the real tools, splits apart, no constant."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from agent_forge.data import exchanges
from agent_forge.data.exchanges import SLOTS, TOOLS, Card, Exchange, tool_questions
from agent_forge.data.tasks.base import SPLITS
from agent_forge.infer.tools import Toolbox, builtin_tools
from agent_forge.phases.phase6_baking.persona import load_persona

CARD = Card(load_persona("zoe"), TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_results_are_those_of_the_real_tools(tool: str, tmp_path: Path) -> None:
    for name, text in exchanges.asked_files().items():
        (tmp_path / name).write_text(text)
    box = Toolbox(builtin_tools(tmp_path, lambda: exchanges.moment("verdict")))
    rng = Random(1)
    for _ in range(4 if tool == "python" else 40):
        own = exchanges.tool_exchange(tool, "verdict", rng)
        found = box.call(own.call)
        assert found.ok and found.request["name"] == tool, found
        assert found.text == own.result, (own, found)


@pytest.mark.parametrize("tool", [name for name in TOOLS if name != "clock"])
def test_splits_share_nothing_that_tools_are_asked(tool: str) -> None:
    rng = Random(2)
    calls = {s: {exchanges.tool_exchange(tool, s, rng).call for _ in range(150)} for s in SPLITS}
    assert not calls["train"] & calls["verdict"] and not calls["selection"] & calls["verdict"]


def test_splits_share_no_wordings() -> None:
    asked = {
        s: {e.question.lower().strip(".?") for e in exchanges.every_about(CARD, s)} for s in SPLITS
    }
    assert not asked["train"] & asked["verdict"] and not asked["selection"] & asked["verdict"]
    assert len(exchanges.every_about(CARD, "verdict")) >= 300
    assert len(tool_questions(CARD, "verdict", 500)) == 500


def test_answers_about_a_slot_are_told_apart() -> None:
    """The right answer to each passes, everybody else's and one that says all do not."""
    own = {e.kind: e.answer for e in exchanges.every_about(CARD, "verdict")}
    for slot in SLOTS:
        passed = [k for k, answer in own.items() if exchanges.answers_slot(*CARD, slot, answer)]
        assert passed == [slot]
        assert not exchanges.answers_slot(*CARD, slot, " ".join(own.values()))
        assert not exchanges.answers_slot(*CARD, slot, "")
    other = Card(load_persona("otto"), TOOLS)
    assert not exchanges.answers_slot(*other, "name", own["name"])


def test_a_card_tells_all_in_any_order() -> None:
    plain, mixed = CARD.text(), CARD.text(Random(3))
    assert sorted(plain.split()) == sorted(mixed.split()) and plain != mixed
    for slot in SLOTS:
        assert set(CARD.persona.values(slot, CARD.tools)) <= set(plain.split())


def test_random_cards_give_questions_with_one_right_answer() -> None:
    rng = Random(4)
    for _ in range(200):
        card = exchanges.random_card(rng)
        slot = rng.choice(SLOTS)
        asked = exchanges.about(card, slot, "train", rng)
        assert exchanges.answers_slot(*card, slot, asked.answer)


def test_questions_come_as_people_type_them() -> None:
    rng = Random(5)
    asked = [exchanges.refused("train", rng).question for _ in range(60)]
    assert any(text[0].isupper() and text[-1] in ".?" for text in asked)
    assert any(text[0].islower() and text[-1] not in ".?" for text in asked)


def test_some_questions_name_another_tool() -> None:
    rng = Random(6)
    found: list[Exchange] = [exchanges.tool_exchange("read", "train", rng) for _ in range(300)]
    lured = [own for own in found if own.lured]
    assert 10 < len(lured) < 80 and all(own.call.startswith("read ") for own in lured)
