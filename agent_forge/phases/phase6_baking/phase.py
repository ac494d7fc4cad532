"""Phase 6, Baking: tools and a persona inside the weights.

In: the model of Phase 5. Out: one that calls tools, says who it is, and refuses what it has no tool
for, with no prompt before the conversation. Rounds teach tools and persona in turn beside what the
model knows, from right exchanges or by KL to itself with the prompt; a round that hurts is taken
back. All is measured with real tools on wordings, numbers and files that were not taught.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from agent_forge.contract import phase
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseHeadline, PhaseReport, Table
from agent_forge.data import exchanges, traces
from agent_forge.data.exchanges import Card, Exchange, other_questions, tool_questions
from agent_forge.data.tasks import Task
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import ACCURACY, Gain, compare_answers
from agent_forge.evals.replies import Replies
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase6_baking.config import BakingSettings
from agent_forge.phases.phase6_baking.cycles import BakingTraining, Round
from agent_forge.phases.phase6_baking.persona import load_persona
from agent_forge.phases.training import (
    LatentModel,
    Scores,
    compare_domains,
    learned_before,
    measure_domains,
    save_handed_over,
)
from agent_forge.train.corpus import build_corpus, validate_corpus
from agent_forge.train.lessons import lessons_of_record, unseen_items

INPUT, BAKED = "input", "baked"
TOOLS, PERSONA, REFUSED, TALK = "tools", "persona", "refused", "small talk"
OTHER_ITEMS = 300  # wishes that no tool fulfils; small talk has fewer wordings
THOUGHT_ITEMS = 100  # of each family, that it thinks about
OLD_ITEMS = 300  # old tasks that no tool should be called for
ITEM_TOKENS = 60  # of an exchange, about
OPENERS = (
    *("Hello.", "Who are you?", "How are you?", "What can you do?", "What is 48 times 73?"),
    *("How many m are 12 km?", "Send a mail to Tom.", "Where do you live?", "Thank you."),
)


@dataclass(frozen=True)
class Measured:
    """A model on unseen items: exchanges by what is asked, old tasks, and tasks with thoughts."""

    replies: dict[str, Replies]
    old: Scores
    needless_calls: list[bool]  # of old tasks: a tool was called
    thoughts: dict[str, float]

    @property
    def false_calls(self) -> float:
        """The share of the items without a tool of which a tool was called."""
        own = [c != "" for k in (PERSONA, REFUSED, TALK) for c in self.replies[k].called]
        return _share([*own, *self.needless_calls])

    @property
    def wrong_tools(self) -> float:
        """The share of the questions for a tool at which another one was called."""
        own = self.replies[TOOLS]
        pairs = zip(own.asked, own.called, strict=True)
        return _share([called not in ("", e.kind) for e, called in pairs])


class BakingPhase(phase.PhaseController):
    """Measure, teach tools and persona in turn, measure, hand over."""

    name = "baking"
    config: BakingSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        validate_corpus(c, (*traces.ABOUT, TOOLS, PERSONA, "cards"))
        persona = load_persona(c.persona)
        steps = c.follow_steps + c.rounds * c.round_steps
        notes = (
            f"{persona.name}, with {', '.join(c.tools)}",
            f"at most {c.rounds} rounds of {c.round_steps} steps, {c.method}",
        )
        tokens = c.rows * c.row_tokens
        asked = 2 * (c.tool_items + 3 * c.evaluation_items) + c.rounds * c.choice_items
        work = steps + asked * ITEM_TOKENS // (3 * tokens)
        disk = (2 + c.rounds) * 5 * weights * 4 * 4 + 2 * weights * 4
        memory = 10 * 4 * weights + 4000 * tokens + 3 * 10**8
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened, c = ctx.inputs[0].open(), self.config
        if not isinstance(given := opened.network, ForgeNetwork):
            raise ConfigError("Phase 6 takes models of our own", hint="forge bake takes others")
        card = Card(load_persona(c.persona), tuple(c.tools))
        lessons = lessons_of_record(c, ctx.inputs[0].metadata, opened.tokenizer, ctx.seed)
        corpus = build_corpus(c, given.settings, opened.tokenizer)
        training = BakingTraining(ctx, c, corpus, lessons, card)
        start = LatentModel.of(given)
        found = {INPUT: self._measure(training, start, INPUT)}
        model = training.cycles(training.follow(start))
        found[BAKED] = self._measure(training, model, BAKED)
        return self._result(training, model, found)

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(self, training: BakingTraining, model: LatentModel, name: str) -> Measured:
        ctx, network = training.ctx, model.opened().to(training.ctx.device)
        old = measure_domains(ctx, training.corpus, network, name)
        asked = {
            TOOLS: tool_questions(training.card, "verdict", self.config.tool_items),
            PERSONA: exchanges.every_about(training.card, "verdict"),
            REFUSED: other_questions(exchanges.refused, "verdict", OTHER_ITEMS),
            TALK: other_questions(exchanges.small_talk, "verdict", OTHER_ITEMS),
        }
        replies = {}
        for kind, own in asked.items():
            look = partial(_asked, training, network, own)
            replies[kind] = Replies(own, **ctx.once("replies", f"{name}/{kind}", look))
        needless = partial(_called_tools, training, network)
        return Measured(
            replies,
            old,
            ctx.once("needless calls", name, needless),
            ctx.once("thoughts", name, partial(_thoughts, training, network)),
        )

    # -- telling -----------------------------------------------------------------------------------

    def _result(
        self, training: BakingTraining, model: LatentModel, found: Mapping[str, Measured]
    ) -> phase.PhaseResult:
        ctx, before, after = training.ctx, found[INPUT], found[BAKED]
        gains = {k: _gain(before, after, k) for k in (TOOLS, PERSONA, REFUSED)}
        old = compare_domains(training.corpus, before.old, after.old).overall.gains[ACCURACY]
        metrics = {
            "tool_success_rate": gains[TOOLS].candidate,
            "persona_consistency": gains[PERSONA].candidate,
            "refusal_rate": gains[REFUSED].candidate,
            "false_call_rate": after.false_calls,
            "wrong_tool_rate": after.wrong_tools,
            "constant_answer": _best_constant(training.card, after.replies[PERSONA].asked),
            "old_gain": old.value,
        }
        ctx.log(None, {f"phase/{name}": value for name, value in metrics.items()})
        own = [(tool, after.replies[TOOLS].share(tool)) for tool in training.card.tools]
        ctx.log(None, {f"tools/{tool}/success": share for tool, share in own})
        told = [f"tools right {gains[TOOLS].candidate:.1%} (n = {gains[TOOLS].n})"]
        one = f"one answer to all: at most {metrics['constant_answer']:.1%}"
        told.append(f"persona {gains[PERSONA].candidate:.1%} on unseen wordings ({one})")
        told.append(f"refuses without a tool {metrics['refusal_rate']:.1%}")
        told.append(f"needless calls {after.false_calls:.1%}")
        verdict = f"{', '.join(told)}; old tasks {100 * old.value:+.1f} points"
        headline = PhaseHeadline(
            "tool questions right", gains[TOOLS].reference, gains[TOOLS].candidate, verdict
        )
        tables = [_table(training, found), _round_table(training.rounds)]
        report = PhaseReport(headline, verdict, metrics, tables)
        talk = ctx.once("conversation", BAKED, partial(_conversation, training, model))
        report.details = {
            "rounds": [asdict(own) for own in training.rounds],
            "conversation": talk,
            "wrong": _wrong(after),
        }
        card = training.card
        said = {"tools": list(card.tools), "persona": card.persona.model_dump(), **metrics}
        said = {**learned_before(ctx.inputs[0].metadata), **said}
        return save_handed_over(ctx, training.corpus, model, report, said, talk)


def _asked(
    training: BakingTraining, network: ForgeNetwork, asked: Sequence[Exchange]
) -> dict[str, Any]:
    found = training.ask(network, asked, "verdict")
    return {"right": found.right, "called": found.called, "said": found.said}


def _called_tools(training: BakingTraining, network: ForgeNetwork) -> list[bool]:
    """Of some unseen old tasks, whether a tool was called."""
    unseen = [task for own in training.corpus.unseen.values() for task in own]
    few = unseen[:: max(1, len(unseen) // OLD_ITEMS)][:OLD_ITEMS]
    asked = [Exchange("", task.question, task.answer) for task in few]
    return [name != "" for name in training.ask(network, asked, "verdict").called]


def _thoughts(training: BakingTraining, network: ForgeNetwork) -> dict[str, float]:
    """By family, the share of unseen items that are right after a thought."""
    if not training.lessons:
        return {}
    items: list[Task] = unseen_items(training.lessons.settings, "verdict", THOUGHT_ITEMS)
    return Thinker(network, training.corpus.tokenizer).right_by_family(items)


def _conversation(training: BakingTraining, model: LatentModel) -> Table:
    """A short conversation, as it went."""
    network = model.opened().to(training.ctx.device)
    rows: Table = [["question", "calls", "answer"]]
    replies = training.asker.replies(network, OPENERS, "verdict")
    for question, reply in zip(OPENERS, replies, strict=True):
        calls = "; ".join(f"`{call.call}` -> {call.text}" for call in reply.calls)
        rows.append([question, calls or "-", f"`{reply.answer}`"])
    return rows


def _gain(before: Measured, after: Measured, kind: str) -> Gain:
    return compare_answers(before.replies[kind].right, after.replies[kind].right, kind)


def _best_constant(card: Card, asked: Sequence[Exchange]) -> float:
    """The share of the questions about a persona that the best single answer to all would get."""
    shares = []
    for answer in {own.answer for own in asked}:
        right = [
            exchanges.answers_slot(card.persona, card.tools, own.kind, answer) for own in asked
        ]
        shares.append(_share(right))
    return max(shares)


def _table(training: BakingTraining, found: Mapping[str, Measured]) -> Table:
    """What is right, kind by kind, of every model."""
    rows: Table = [["asked", "items", *found]]
    last = found[BAKED]
    for kind, own in last.replies.items():
        rows.append([kind, len(own.asked), *(m.replies[kind].share() for m in found.values())])
        for part in dict.fromkeys(e.kind for e in own.asked):
            if part != kind:
                count = sum(e.kind == part for e in own.asked)
                shares = [m.replies[kind].share(part) for m in found.values()]
                rows.append([f"{kind}: {part}", count, *shares])
    for domain in last.old:
        values = [m.old[domain].accuracy for m in found.values()]
        rows.append([f"old tasks: {domain}", len(last.old[domain].right), *values])
    for family in last.thoughts:
        rows.append(
            [f"thoughts: {family}", THOUGHT_ITEMS, *(m.thoughts[family] for m in found.values())]
        )
    rows.append(["needless calls", "", *(m.false_calls for m in found.values())])
    rows.append(["another tool called", "", *(m.wrong_tools for m in found.values())])
    return rows


def _round_table(rounds: Sequence[Round]) -> Table:
    rows: Table = [["round", "of", *(rounds[0].after if rounds else ()), "the round is"]]
    for own in rounds:
        end = f"taken back: {own.taken_back}" if own.taken_back else "kept"
        shares = [f"{own.before[k]:.3f} -> {own.after[k]:.3f}" for k in own.after]
        rows.append([own.number, own.kind, *shares, end])
    return rows


def _wrong(after: Measured) -> list[dict[str, str]]:
    """A few of the replies that are wrong, of every kind."""
    found = []
    for own in after.replies.values():
        rows = zip(own.asked, own.right, own.called, own.said, strict=True)
        bad = [(e, called, said) for e, right, called, said in rows if not right]
        for e, called, said in bad[:: max(1, len(bad) // 4)][:4]:
            found.append(
                {"question": e.question, "called": called, "said": said, "right": e.answer}
            )
    return found


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0
